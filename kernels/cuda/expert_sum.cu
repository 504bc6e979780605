#include "common.cuh"

#define PIECE 1024u
#define MOST_USED 32u

// out[t] = residual[t] + sum over k of weights[t, k] * scale[ids[t, k]] * y[t, k], in the order of k.
EVG_KERNEL(expert_sum, EVG_BOUNDS(256))(const char* y, u64 y_stride, u64 y_slot, const char* weights, const char* scale, const char* ids,
    u32 experts, const char* residual, u64 residual_stride, char* out, u64 out_stride, u32 tokens, u32 used, u32 cols) {
    evg_begin();
    __shared__ float shared[MOST_USED];
    const u32 pieces = ceil_div(cols, PIECE);
    const bool scaled = scale && ids, few = used <= MOST_USED;
    for (u64 item = blockIdx.x; item < u64(tokens) * pieces; item += gridDim.x) {
        const u32 t = u32(item / pieces), first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        const float* w = at<float>(weights, 0) + u64(t) * used;
        const int* id = at<int>(ids, 0) + u64(t) * used;
        if (few) {
            // Weights once a block, and all values of a column on their way before the first is needed.
            if (threadIdx.x < used) {
                float weight = w[threadIdx.x];
                if (scaled) {
                    const int expert = id[threadIdx.x];
                    if (expert != -1) {
                        if (u32(expert) >= experts) evg_fault("expert id out of range");
                        weight *= at<float>(scale, 0)[expert];
                    }
                }
                shared[threadIdx.x] = weight;
            }
            __syncthreads();
            for (u32 c = first + threadIdx.x; c < end; c += block_threads()) {
                const float* column = at<float>(y, t * y_stride) + c;
                const float rest = residual ? at<float>(residual, t * residual_stride)[c] : 0.0f;
                float sum = 0.0f;
                for (u32 k = 0; k < used; k += 8) {
                    float values[8];
#pragma unroll
                    for (u32 i = 0; i < 8; i++) values[i] = k + i < used ? *at<float>(reinterpret_cast<const char*>(column), (k + i) * y_slot) : 0.0f;
#pragma unroll
                    for (u32 i = 0; i < 8; i++)
                        if (k + i < used) sum = fmaf(shared[k + i], values[i], sum);
                }
                at<float>(out, t * out_stride)[c] = residual ? sum + rest : sum;
            }
            __syncthreads();
            continue;
        }
        for (u32 c = first + threadIdx.x; c < end; c += block_threads()) {
            float sum = 0.0f;
            for (u32 k = 0; k < used; k++) {
                float weight = w[k];
                if (scaled && id[k] != -1) {
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
