// `latent_heads`: rotation of a part of each query head, and a normed and partly rotated row for all heads, into its cache.
//
// Grid: (the row, then parts of the heads; tokens, which blocks take in turns).
#include "cache.cuh"
#include "yarn.cuh"

#define THREADS 256

struct Row {
    const float *from, *weight;
    u32 rank, pairs;
    float eps;
    const float *sines, *cosines;
};

template <class T> static EVG_DEVICE void store(const Row& row, T* to, u32 ty) {
    const u32 threads = block_threads();
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < row.rank; i += threads) sum = fmaf(row.from[i], row.from[i], sum);
    const float factor = 1.0f / sqrtf(block_sum(sum) / float(row.rank) + row.eps);
    for (u32 i = threadIdx.x; i < row.rank; i += threads) to[i] = narrow<T>(row.from[i] * factor * row.weight[i], ty);
    for (u32 p = threadIdx.x; p < row.pairs; p += threads) {
        const float u = row.from[row.rank + 2 * p], v = row.from[row.rank + 2 * p + 1];
        to[row.rank + 2 * p] = narrow<T>(u * row.cosines[p] - v * row.sines[p], ty);
        to[row.rank + 2 * p + 1] = narrow<T>(u * row.sines[p] + v * row.cosines[p], ty);
    }
}

EVG_KERNEL(latent_heads, EVG_BOUNDS(THREADS))(const char* q, u64 q_stride, u64 q_head, char* out, u64 out_stride, u64 out_head, const char* kv,
    u64 kv_stride, const char* norm, const char* positions, char* cache, u64 cache_row, u32 ty, u32 capacity, u32 tokens, u32 heads, u32 rank,
    u32 pairs, float eps, float base, float scale, float yarn_factor, u32 original, float beta_fast, float beta_slow, float magnitude) {
    EVG_DYNAMIC_SHARED(float, frequencies);
    float *sines = frequencies + pairs, *cosines = sines + pairs;
    const u32 threads = block_threads(), parts = gridDim.x - 1;
    // Arithmetic on nothing but arguments, while the kernel before this one still runs; each thread reads only what it wrote.
    const Frequencies of(pairs, base, scale, yarn_factor, original, beta_fast, beta_slow);
    for (u32 p = threadIdx.x; p < pairs; p += threads) frequencies[p] = of(p);
    evg_begin();
    for (u32 t = blockIdx.y; t < tokens; t += gridDim.y) {
        const int position = at<int>(positions, 0)[t];
        if (position < 0 || u32(position) >= capacity) evg_fault("position outside the cache");
        for (u32 p = threadIdx.x; p < pairs; p += threads) {
            float sine, cosine;
            sincosf(float(position) * frequencies[p], &sine, &cosine);
            sines[p] = sine * magnitude, cosines[p] = cosine * magnitude;
        }
        __syncthreads();
        if (blockIdx.x == 0) {
            const Row row = {at<float>(kv, t * kv_stride), at<float>(norm, 0), rank, pairs, eps, sines, cosines};
            char* to = cache + u64(position) * cache_row;
            if (ty == TYPE_F32)
                store(row, at<float>(to, 0), ty);
            else
                store(row, at<u16>(to, 0), ty);
        } else {
            const u32 some = ceil_div(heads, parts), first = (blockIdx.x - 1) * some;
            const u32 mine = first < heads ? min_u32(some, heads - first) : 0;
            for (u32 i = threadIdx.x; i < mine * pairs; i += threads) {
                const u32 h = first + i / pairs, p = i % pairs;
                const float* from = at<float>(q, t * q_stride + h * q_head);
                float* to = at<float>(out, t * out_stride + h * out_head);
                const float u = from[2 * p], v = from[2 * p + 1];
                to[2 * p] = u * cosines[p] - v * sines[p];
                to[2 * p + 1] = u * sines[p] + v * cosines[p];
            }
        }
        // The next token's turns go to the same place.
        __syncthreads();
    }
}
