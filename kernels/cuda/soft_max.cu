#include "common.cuh"

// out[t, h] = softmax(x[t, h]); a row of nothing but minus infinity becomes zeros. One block a row. The output may be x:
// each thread works on its own columns.
EVG_KERNEL(soft_max, EVG_BOUNDS(1024))(const char* x, u64 x_stride, u64 x_head, char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads,
    u32 cols) {
    evg_begin();
    const u32 threads = block_threads();
    for (u64 row = blockIdx.x; row < u64(tokens) * heads; row += gridDim.x) {
        const u32 t = u32(row / heads), h = u32(row % heads);
        const float* from = at<float>(x, t * x_stride + h * x_head);
        float* to = at<float>(out, t * out_stride + h * out_head);
        float top = -infinity();
        for (u32 i = threadIdx.x; i < cols; i += threads) top = fmaxf(top, from[i]);
        top = block_max(top);
        if (top == -infinity()) {
            for (u32 i = threadIdx.x; i < cols; i += threads) to[i] = 0.0f;
            continue;
        }
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < cols; i += threads) {
            const float value = expf(from[i] - top);
            to[i] = value;
            sum += value;
        }
        const float factor = 1.0f / block_sum(sum);
        for (u32 i = threadIdx.x; i < cols; i += threads) to[i] *= factor;
    }
}
