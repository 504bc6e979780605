// `latent_heads`: rotation of a part of each query head, and a normed and partly rotated row for all heads, into its cache.
//
// Warps have a task each and wait for nobody: the norm of the row, or 32 pairs of a head's or the row's elements, a lane a pair. Grid:
// (tasks by four; tokens, which blocks take in turns).
#include "cache.cuh"
#include "yarn.cuh"

#define THREADS 128
#define WARPS 4u
// Elements of a row that a lane has in registers, in fours.
#define FOURS 4u

template <class T> static EVG_DEVICE void store4(T* to, float4 x, u32 ty);
template <> EVG_DEVICE void store4<float>(float* to, float4 x, u32) { *reinterpret_cast<float4*>(to) = x; }
template <> EVG_DEVICE void store4<u16>(u16* to, float4 x, u32 ty) {
    const u32 low = narrow<u16>(x.x, ty) | u32(narrow<u16>(x.y, ty)) << 16, high = narrow<u16>(x.z, ty) | u32(narrow<u16>(x.w, ty)) << 16;
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
}

struct Norm {
    const float* weight;
    u32 rank;
    float eps;
    bool wide;
    // What is known before the row is.
    float4 weights[FOURS];

    EVG_DEVICE Norm(const float* weight, u32 rank, float eps, bool wide) : weight(weight), rank(rank), eps(eps), wide(wide) {
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (u32 i = 0; i < FOURS; i++) {
            const u32 e = 128 * i + 4 * lane_id();
            weights[i] = wide && e < rank ? *reinterpret_cast<const float4*>(weight + e) : zero;
        }
    }

    EVG_DEVICE float factor(float sum) const { return 1.0f / sqrtf(warp_sum(sum) / float(rank) + eps); }

    template <class T> EVG_DEVICE void store(const float* from, T* to, u32 ty) const {
        const u32 lane = lane_id();
        float sum = 0.0f;
        if (wide) {
            float4 x[FOURS];
#pragma unroll
            for (u32 i = 0; i < FOURS; i++) {
                const u32 e = 128 * i + 4 * lane;
                x[i] = e < rank ? *reinterpret_cast<const float4*>(from + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (u32 i = 0; i < FOURS; i++) sum = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, fmaf(x[i].z, x[i].z, fmaf(x[i].w, x[i].w, sum))));
            const float by = factor(sum);
#pragma unroll
            for (u32 i = 0; i < FOURS; i++) {
                const u32 e = 128 * i + 4 * lane;
                const float4 w = weights[i];
                if (e < rank) store4<T>(to + e, make_float4(x[i].x * by * w.x, x[i].y * by * w.y, x[i].z * by * w.z, x[i].w * by * w.w), ty);
            }
            return;
        }
#pragma unroll 4
        for (u32 i = lane; i < rank; i += 32) sum = fmaf(from[i], from[i], sum);
        const float by = factor(sum);
#pragma unroll 4
        for (u32 i = lane; i < rank; i += 32) to[i] = narrow<T>(from[i] * by * weight[i], ty);
    }
};

// A pair turned, to two neighbouring places.
template <class T> static EVG_DEVICE void put(T* to, float u, float v, float sine, float cosine, u32 ty) {
    to[0] = narrow<T>(u * cosine - v * sine, ty);
    to[1] = narrow<T>(u * sine + v * cosine, ty);
}

EVG_KERNEL(latent_heads, EVG_BOUNDS(THREADS))(const char* q, u64 q_stride, u64 q_head, char* out, u64 out_stride, u64 out_head, const char* kv,
    u64 kv_stride, const char* norm, const char* positions, char* cache, u64 cache_row, u32 ty, u32 capacity, u32 tokens, u32 heads, u32 rank,
    u32 pairs, float eps, float base, float scale, float yarn_factor, u32 original, float beta_fast, float beta_slow, float magnitude) {
    // The first task is the norm; then come heads, the row as the last of them, each in parts of 32 pairs.
    const u32 task = blockIdx.x * WARPS + warp_id(), parts = ceil_div(pairs, 32u), turn = task - 1;
    const u32 head = turn / parts, p = turn % parts * 32 + lane_id();
    if (task > 0 && head > heads) return;
    const u32 bytes = ty == TYPE_F32 ? 16 : 8;
    // What follows from arguments and weights alone, while the kernel before this one still runs.
    const bool wide = rank % 4 == 0 && rank <= 128 * FOURS && aligned16(kv) && aligned16(kv_stride) && aligned16(norm) &&
        (reinterpret_cast<u64>(cache) | cache_row) % bytes == 0;
    if (task == 0) {
        const Norm of(at<float>(norm, 0), rank, eps, wide);
        evg_begin();
        for (u32 t = blockIdx.y; t < tokens; t += gridDim.y) {
            const int position = at<int>(positions, 0)[t];
            if (position < 0 || u32(position) >= capacity) evg_fault("position outside the cache");
            char* to = cache + u64(position) * cache_row;
            if (ty == TYPE_F32)
                of.store(at<float>(kv, t * kv_stride), at<float>(to, 0), ty);
            else
                of.store(at<float>(kv, t * kv_stride), at<u16>(to, 0), ty);
        }
        return;
    }
    const Frequencies frequencies(pairs, base, scale, yarn_factor, original, beta_fast, beta_slow);
    const float frequency = p < pairs ? frequencies(p) : 0.0f;
    evg_begin();
    if (p >= pairs) return;
    for (u32 t = blockIdx.y; t < tokens; t += gridDim.y) {
        const int position = at<int>(positions, 0)[t];
        const bool row = head == heads;
        const float* from = (row ? at<float>(kv, t * kv_stride) + rank : at<float>(q, t * q_stride + head * q_head)) + 2 * p;
        const float u = from[0], v = from[1];
        if (position < 0 || u32(position) >= capacity) evg_fault("position outside the cache");
        float sine, cosine;
        sincosf(float(position) * frequency, &sine, &cosine);
        sine *= magnitude, cosine *= magnitude;
        char* to = cache + u64(position) * cache_row;
        if (!row)
            put(at<float>(out, t * out_stride + head * out_head) + 2 * p, u, v, sine, cosine, TYPE_F32);
        else if (ty == TYPE_F32)
            put(at<float>(to, 0) + rank + 2 * p, u, v, sine, cosine, ty);
        else
            put(at<u16>(to, 0) + rank + 2 * p, u, v, sine, cosine, ty);
    }
}
