#include "cache.cuh"

// scores[t, h, c] = scale * q[t, h] . k[c, h / group] for the rows that the query sees, minus infinity for the others. A
// block takes one (t, h), a warp every n-th key.
EVG_KERNEL(attention_scores, EVG_BOUNDS(256))(const char* q, u64 q_stride, u64 q_head, const char* k, u64 k_stride, u64 k_head, u32 ty,
    const char* positions, char* scores, u64 s_stride, u64 s_head, u32 tokens, u32 heads, u32 kv_heads, u32 d, u32 capacity, u32 window,
    float scale) {
    evg_begin();
    for (u64 row = blockIdx.x; row < u64(tokens) * heads; row += gridDim.x) {
        const u32 t = u32(row / heads), h = u32(row % heads), end = u32(at<int>(positions, 0)[t]) + 1;
        if (end - 1 >= capacity) evg_fault("position outside the cache");
        const u32 first = window == 0 || end < window ? 0 : end - window;
        const float* query = at<float>(q, t * q_stride + h * q_head);
        float* out = at<float>(scores, t * s_stride + h * s_head);
        for (u32 c = threadIdx.x; c < capacity; c += block_threads())
            if (c < first || c >= end) out[c] = -infinity();
        for (u32 c = first + warp_id(); c < end; c += block_warps()) {
            const char* key = k + c * k_stride + h / (heads / kv_heads) * k_head;
            float sum = 0.0f;
            for (u32 i = lane_id(); i < d; i += 32) sum = fmaf(query[i], element(key, ty, i), sum);
            sum = warp_sum(sum);
            if (lane_id() == 0) out[c] = sum * scale;
        }
    }
}
