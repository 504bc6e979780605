#include "common.cuh"

#define PIECE 1024u

// out[t] = residual[t] + sum over k of weights[t, k] * scale[ids[t, k]] * y[t, k], in the order of k.
EVG_KERNEL(expert_sum, EVG_BOUNDS(256))(const char* y, u64 y_stride, u64 y_slot, const char* weights, const char* scale, const char* ids,
    u32 experts, const char* residual, u64 residual_stride, char* out, u64 out_stride, u32 tokens, u32 used, u32 cols) {
    const u32 pieces = ceil_div(cols, PIECE);
    const bool scaled = scale && ids;
    for (u64 item = blockIdx.x; item < u64(tokens) * pieces; item += gridDim.x) {
        const u32 t = u32(item / pieces), first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        const float* w = at<float>(weights, 0) + u64(t) * used;
        const int* id = at<int>(ids, 0) + u64(t) * used;
        for (u32 c = first + threadIdx.x; c < end; c += block_threads()) {
            float sum = 0.0f;
            for (u32 k = 0; k < used; k++) {
                float weight = w[k];
                if (scaled) {
                    if (u32(id[k]) >= experts) evg_fault("expert id out of range");
                    weight *= at<float>(scale, 0)[id[k]];
                }
                sum = fmaf(weight, at<float>(y, t * y_stride + k * y_slot)[c], sum);
            }
            if (residual) sum += at<float>(residual, t * residual_stride)[c];
            at<float>(out, t * out_stride)[c] = sum;
        }
    }
}
