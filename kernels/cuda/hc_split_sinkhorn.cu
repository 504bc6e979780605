#include "common.cuh"

static EVG_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The weights of residual streams, from the mixed vector of each token; without `comb` those of reading only. One warp a
// token, a lane a row or column of the n * n matrix, which lies in shared memory.
EVG_KERNEL(hc_split_sinkhorn, EVG_BOUNDS(32))(const char* m, u64 m_stride, const char* scale, const char* base, char* pre, u64 pre_stride,
    char* post, u64 post_stride, char* comb, u32 tokens, u32 n, u32 iterations, float eps) {
    evg_begin();
    EVG_DYNAMIC_SHARED(float, c);
    const float *scales = at<float>(scale, 0), *bases = at<float>(base, 0);
    const u32 lane = threadIdx.x;
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const float* from = at<float>(m, t * m_stride);
        if (lane < n) at<float>(pre, t * pre_stride)[lane] = sigmoid(__fmul_rn(from[lane], scales[0]) + bases[lane]) + eps;
        if (!comb) continue;
        if (lane < n) at<float>(post, t * post_stride)[lane] = 2.0f * sigmoid(__fmul_rn(from[n + lane], scales[1]) + bases[n + lane]);
        float* row = c + lane * n;
        if (lane < n) {
            float top = -infinity(), sum = 0.0f;
            for (u32 i = 0; i < n; i++) {
                const u32 place = 2 * n + lane * n + i;
                row[i] = __fmul_rn(from[place], scales[2]) + bases[place];
                top = fmaxf(top, row[i]);
            }
            for (u32 i = 0; i < n; i++) sum += row[i] = expf(row[i] - top);
            for (u32 i = 0; i < n; i++) row[i] = row[i] / sum + eps;
        }
        for (u32 iteration = 0; iteration < iterations; iteration++) {
            if (iteration > 0 && lane < n) {
                float sum = 0.0f;
                for (u32 i = 0; i < n; i++) sum += row[i];
                sum += eps;
                for (u32 i = 0; i < n; i++) row[i] /= sum;
            }
            __syncwarp();
            if (lane < n) {
                float sum = 0.0f;
                for (u32 i = 0; i < n; i++) sum += c[i * n + lane];
                sum += eps;
                for (u32 i = 0; i < n; i++) c[i * n + lane] /= sum;
            }
            __syncwarp();
        }
        float* to = at<float>(comb, u64(t) * n * n * 4);
        for (u32 i = lane; i < n * n; i += 32) to[i] = c[i];
        __syncwarp();
    }
}
