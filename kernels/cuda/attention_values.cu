#include "cache.cuh"

// out[t, h] = sum over c of p[t, h, c] * v[c, h / group] in the order of c. Rows with a weight of 0 are not read. A block
// takes one (t, h), a thread some columns.
EVG_KERNEL(attention_values, EVG_BOUNDS(256))(const char* p, u64 p_stride, u64 p_head, const char* v, u64 v_stride, u64 v_head, u32 ty,
    char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads, u32 kv_heads, u32 dv, u32 capacity) {
    evg_begin();
    for (u64 row = blockIdx.x; row < u64(tokens) * heads; row += gridDim.x) {
        const u32 t = u32(row / heads), h = u32(row % heads);
        const float* weights = at<float>(p, t * p_stride + h * p_head);
        const char* values = v + h / (heads / kv_heads) * v_head;
        float* to = at<float>(out, t * out_stride + h * out_head);
        for (u32 i = threadIdx.x; i < dv; i += block_threads()) {
            float sum = 0.0f;
            for (u32 c = 0; c < capacity; c++) {
                const float weight = weights[c];
                if (weight != 0.0f) sum = fmaf(weight, element(values + c * v_stride, ty, i), sum);
            }
            to[i] = sum;
        }
    }
}
