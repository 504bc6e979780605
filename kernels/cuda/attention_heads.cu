// `attention_heads`: norm of each head, rotation of queries and keys, keys and values into their caches.
//
// Grid: (heads of queries, keys and values; tokens, which blocks take in turns).
#include "cache.cuh"

// The row's norm (`weight` null: without one), or the row as it is, to shared memory. Sums as `rms_norm` does.
static EVG_DEVICE void stage(const float* from, const float* weight, bool normed, u32 cols, float eps, float* to) {
    const u32 threads = block_threads();
    if (aligned16(from) && aligned16(weight) && cols % 4 == 0 && cols <= 4 * threads) {
        const u32 i = 4 * threadIdx.x;
        const bool mine = i < cols;
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        float4 v = mine ? *reinterpret_cast<const float4*>(from + i) : zero;
        const float4 m = mine && weight ? *reinterpret_cast<const float4*>(weight + i) : one;
        if (normed) {
            const float sum = block_sum(fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, 0.0f)))));
            const float factor = 1.0f / sqrtf(sum / float(cols) + eps);
            v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
            v = make_float4(v.x * m.x, v.y * m.y, v.z * m.z, v.w * m.w);
        }
        if (mine) *reinterpret_cast<float4*>(to + i) = v;
    } else {
        float factor = 1.0f;
        if (normed) {
            float sum = 0.0f;
            for (u32 i = threadIdx.x; i < cols; i += threads) sum = fmaf(from[i], from[i], sum);
            factor = 1.0f / sqrtf(block_sum(sum) / float(cols) + eps);
        }
        for (u32 i = threadIdx.x; i < cols; i += threads) to[i] = from[i] * factor * (weight ? weight[i] : 1.0f);
    }
    __syncthreads();
}

// The staged row to its place, its first `pairs` pairs rotated.
template <class T>
static EVG_DEVICE void put(const float* row, u32 cols, const float* frequencies, u32 pairs, float position, char* base, u32 ty) {
    T* to = at<T>(base, 0);
    for (u32 p = threadIdx.x; p < pairs; p += block_threads()) {
        float sine, cosine;
        sincosf(position * frequencies[p], &sine, &cosine);
        const float u = row[p], v = row[p + pairs];
        to[p] = narrow<T>(u * cosine - v * sine, ty);
        to[p + pairs] = narrow<T>(u * sine + v * cosine, ty);
    }
    for (u32 i = 2 * pairs + threadIdx.x; i < cols; i += block_threads()) to[i] = narrow<T>(row[i], ty);
    // The next row is staged in the same place.
    __syncthreads();
}

EVG_KERNEL(attention_heads, EVG_BOUNDS(1024))(char* q, u64 q_stride, u64 q_head, const char* q_norm, const char* k, u64 k_stride, u64 k_head,
    const char* k_norm, const char* v, u64 v_stride, u64 v_head, const char* positions, char* k_cache, u64 k_row, u64 k_row_head, char* v_cache,
    u64 v_row, u64 v_row_head, const char* factors, u32 ty, u32 capacity, u32 ring, u32 norm_values, u32 tokens, u32 heads, u32 kv_heads, u32 d,
    u32 dv, u32 pairs, float eps, float base, float scale) {
    EVG_DYNAMIC_SHARED(float, row);
    float* frequencies = row + max_u32(d, dv);
    const bool query = blockIdx.x < heads, value = blockIdx.x >= heads + kv_heads;
    const u32 h = query ? blockIdx.x : (blockIdx.x - heads) % kv_heads, cols = value ? dv : d, turned = value ? 0 : pairs;
    // Arithmetic on nothing but arguments, while the kernel before this one still runs. Rounded as in `rope`; each thread
    // reads only what it wrote.
    for (u32 p = threadIdx.x; p < turned; p += block_threads())
        frequencies[p] = float(pow(double(base), -double(p) / double(pairs)) * double(scale));
    evg_begin();
    if (factors)
        for (u32 p = threadIdx.x; p < turned; p += block_threads()) frequencies[p] /= at<float>(factors, 0)[p];
    const float* weight = at<float>(query ? q_norm : value ? nullptr : k_norm, 0);
    for (u32 t = blockIdx.y; t < tokens; t += gridDim.y) {
        const int position = at<int>(positions, 0)[t];
        if (query) {
            char* place = q + t * q_stride + h * q_head;
            stage(at<float>(place, 0), weight, true, cols, eps, row);
            put<float>(row, cols, frequencies, turned, float(position), place, TYPE_F32);
            continue;
        }
        const u32 to = ring == 1 ? u32(position) % capacity : u32(position);
        if (position < 0 || to >= capacity) evg_fault("position outside the cache");
        const char* from = value ? v + t * v_stride + h * v_head : k + t * k_stride + h * k_head;
        char* place = value ? v_cache + to * v_row + h * v_row_head : k_cache + to * k_row + h * k_row_head;
        stage(at<float>(from, 0), weight, !value || norm_values == 1, cols, eps, row);
        if (ty == TYPE_F32)
            put<float>(row, cols, frequencies, turned, float(position), place, ty);
        else
            put<u16>(row, cols, frequencies, turned, float(position), place, ty);
    }
}
