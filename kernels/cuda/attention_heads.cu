// `attention_heads`: norm of each head, rotation of queries and keys, keys and values into their caches.
//
// Grid: (heads of queries, keys and values; tokens, which blocks take in turns). Heads of 256 or 512 elements that are turned
// whole take a warp each, which keeps them in registers and waits for nobody; others a block.
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

template <class T> static EVG_DEVICE void store4(T* to, float4 x, u32 ty);
template <> EVG_DEVICE void store4<float>(float* to, float4 x, u32) { *reinterpret_cast<float4*>(to) = x; }
template <> EVG_DEVICE void store4<u16>(u16* to, float4 x, u32 ty) {
    const u32 low = narrow<u16>(x.x, ty) | u32(narrow<u16>(x.y, ty)) << 16, high = narrow<u16>(x.z, ty) | u32(narrow<u16>(x.w, ty)) << 16;
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
}

// Eight neighbouring pairs of a head's 256 HALVES elements are this lane's in fours: 128 i + 4 lane, and as many half a head on.
template <u32 HALVES> struct Head {
    static constexpr u32 FOURS = 2 * HALVES, COLS = 256 * HALVES;
    float4 x[FOURS];

    static EVG_DEVICE u32 column(u32 i) { return 128 * i + 4 * lane_id(); }
    EVG_DEVICE void load(const float* from) {
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) x[i] = *reinterpret_cast<const float4*>(from + column(i));
    }
    // To the bits of `rms_norm`, in which a thread has four columns.
    EVG_DEVICE void norm(const Head& weights, float eps) {
        float sums[FOURS];
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) sums[i] = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, fmaf(x[i].z, x[i].z, fmaf(x[i].w, x[i].w, 0.0f))));
        for (int distance = 16; distance > 0; distance >>= 1) {
#pragma unroll
            for (u32 i = 0; i < FOURS; i++) sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], distance);
        }
#pragma unroll
        for (u32 step = FOURS / 2; step > 0; step /= 2)
#pragma unroll
            for (u32 i = 0; i < step; i++) sums[i] += sums[i + step];
        const float factor = 1.0f / sqrtf(sums[0] / float(COLS) + eps);
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) {
            const float4 w = weights.x[i];
            x[i] = make_float4(x[i].x * factor, x[i].y * factor, x[i].z * factor, x[i].w * factor);
            x[i] = make_float4(x[i].x * w.x, x[i].y * w.y, x[i].z * w.z, x[i].w * w.w);
        }
    }
    EVG_DEVICE void turn(const float (&sines)[4 * HALVES], const float (&cosines)[4 * HALVES]) {
#pragma unroll
        for (u32 i = 0; i < HALVES; i++) {
            float u[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, v[4] = {x[i + HALVES].x, x[i + HALVES].y, x[i + HALVES].z, x[i + HALVES].w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const float sine = sines[4 * i + j], cosine = cosines[4 * i + j], a = u[j], b = v[j];
                u[j] = a * cosine - b * sine, v[j] = a * sine + b * cosine;
            }
            x[i] = make_float4(u[0], u[1], u[2], u[3]), x[i + HALVES] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    template <class T> EVG_DEVICE void store(T* to, u32 ty) const {
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) store4<T>(to + column(i), x[i], ty);
    }
};

// As `attention_heads`, for heads of 256 HALVES elements that are turned whole, aligned rows, and a warp a block.
#define HEADS_OF_WARPS(name, HALVES)                                                                                                              \
    EVG_KERNEL(name, EVG_BOUNDS(32))(char* q, u64 q_stride, u64 q_head, const char* q_norm, const char* k, u64 k_stride, u64 k_head,            \
        const char* k_norm, const char* v, u64 v_stride, u64 v_head, const char* positions, char* k_cache, u64 k_row, u64 k_row_head,           \
        char* v_cache, u64 v_row, u64 v_row_head, const char* factors, u32 ty, u32 capacity, u32 ring, u32 norm_values, u32 tokens, u32 heads,  \
        u32 kv_heads, u32 d, u32 dv, u32 pairs, float eps, float base, float scale) {                                                           \
        const bool query = blockIdx.x < heads, value = blockIdx.x >= heads + kv_heads;                                                          \
        const u32 h = query ? blockIdx.x : (blockIdx.x - heads) % kv_heads;                                                                     \
        (void)d, (void)dv;                                                                                                                      \
        const Place place = {q, q_stride, q_head, k, k_stride, k_head, v, v_stride, v_head, positions, k_cache, k_row, k_row_head, v_cache,     \
            v_row, v_row_head, ty, capacity, ring, tokens, h, query, value};                                                                    \
        make_ready<HALVES>(place, at<float>(query ? q_norm : value ? nullptr : k_norm, 0), at<float>(factors, 0), pairs,                        \
            !value || norm_values == 1, eps, base, scale);                                                                                      \
    }

struct Place {
    char* q;
    u64 q_stride, q_head;
    const char* k;
    u64 k_stride, k_head;
    const char* v;
    u64 v_stride, v_head;
    const char* positions;
    char* k_cache;
    u64 k_row, k_row_head;
    char* v_cache;
    u64 v_row, v_row_head;
    u32 ty, capacity, ring, tokens, h;
    bool query, value;
};

template <u32 HALVES>
static EVG_DEVICE void make_ready(const Place& in, const float* weight, const float* factors, u32 pairs, bool normed, float eps, float base, float scale) {
    // What follows from arguments and weights alone, while the kernel before this one still runs. Rounded as in `rope`.
    float frequencies[4 * HALVES];
    Head<HALVES> weights;
#pragma unroll
    for (u32 i = 0; i < weights.FOURS; i++) weights.x[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (weight) weights.load(weight);
    if (!in.value) {
#pragma unroll
        for (u32 i = 0; i < 4 * HALVES; i++) {
            const u32 p = weights.column(i / 4) + i % 4;
            frequencies[i] = float(pow(double(base), -double(p) / double(pairs)) * double(scale));
            if (factors) frequencies[i] /= factors[p];
        }
    }
    evg_begin();
    for (u32 t = blockIdx.y; t < in.tokens; t += gridDim.y) {
        const int position = at<int>(in.positions, 0)[t];
        char* const own = in.q + t * in.q_stride + in.h * in.q_head;
        const char* from = in.query ? own : in.value ? in.v + t * in.v_stride + in.h * in.v_head : in.k + t * in.k_stride + in.h * in.k_head;
        Head<HALVES> head;
        head.load(at<float>(from, 0));
        if (normed) head.norm(weights, eps);
        if (!in.value) {
            float sines[4 * HALVES], cosines[4 * HALVES];
#pragma unroll
            for (u32 i = 0; i < 4 * HALVES; i++) sincosf(float(position) * frequencies[i], &sines[i], &cosines[i]);
            head.turn(sines, cosines);
        }
        if (in.query) {
            head.store(at<float>(own, 0), TYPE_F32);
            continue;
        }
        const u32 to = in.ring == 1 ? u32(position) % in.capacity : u32(position);
        if (position < 0 || to >= in.capacity) evg_fault("position outside the cache");
        char* place = in.value ? in.v_cache + to * in.v_row + in.h * in.v_row_head : in.k_cache + to * in.k_row + in.h * in.k_row_head;
        if (in.ty == TYPE_F32)
            head.store(at<float>(place, 0), in.ty);
        else
            head.store(at<u16>(place, 0), in.ty);
    }
}

HEADS_OF_WARPS(attention_heads_256, 1)
HEADS_OF_WARPS(attention_heads_512, 2)
