#include "cache.cuh"

#define ENTRIES 16u

// scores[t, w] = scale * sum over h of weights[t, h] * max(q[t, h] . keys[w], 0) for the entries that token t sees. Blocks take
// ENTRIES entries of a token; 16 threads an entry, each with every 16th head. Rows in shared memory are one longer than
// they need be, so that threads read from different banks.
EVG_KERNEL(index_scores, EVG_BOUNDS(256))(const char* q, u64 q_stride, u64 q_head, const char* weights, u64 weights_stride, const char* keys,
    u32 ty, u64 keys_stride, const char* positions, char* scores, u64 scores_stride, u32 tokens, u32 heads, u32 d, u32 entries, u32 ratio,
    float scale) {
    evg_begin();
    EVG_DYNAMIC_SHARED(float, queries);
    float* wide = queries + heads * (d + 1);
    const u32 threads = block_threads(), key = threadIdx.x / 16, part = threadIdx.x % 16;
    for (u32 t = blockIdx.y; t < tokens; t += gridDim.y) {
        const int position = at<int>(positions, 0)[t];
        if (position < 0) evg_fault("position outside the cache");
        const u32 seen = min_u32((u32(position) + 1) / ratio, entries);
        if (blockIdx.x * ENTRIES >= seen) continue;
        for (u32 i = threadIdx.x; i < heads * d; i += threads)
            queries[i / d * (d + 1) + i % d] = at<float>(q, t * q_stride + i / d * q_head)[i % d];
        for (u32 first = blockIdx.x * ENTRIES; first < seen; first += gridDim.x * ENTRIES) {
            const u32 count = min_u32(ENTRIES, seen - first);
            for (u32 i = threadIdx.x; i < count * d; i += threads)
                wide[i / d * (d + 1) + i % d] = element(keys + u64(first + i / d) * keys_stride, ty, i % d);
            __syncthreads();
            float total = 0.0f;
            if (key < count) {
                const float* k = wide + key * (d + 1);
                for (u32 h = part; h < heads; h += 16) {
                    const float* row = queries + h * (d + 1);
                    float dot = 0.0f;
                    for (u32 i = 0; i < d; i++) dot = fmaf(row[i], k[i], dot);
                    total = fmaf(at<float>(weights, t * weights_stride)[h], fmaxf(dot, 0.0f), total);
                }
            }
            total = warp_reduce<Sum, float>(total, 16);
            if (key < count && part == 0) at<float>(scores, t * scores_stride)[first + key] = scale * total;
            __syncthreads();
        }
    }
}
