#include "yarn.cuh"

#define PAIRS 128u

// Rotates neighbouring pairs of the last `dims` elements of each head by position * base^(-2i/dims), blended (YaRN); the
// elements before them are copied where the output is not the input. Blocks as in `rope`.
EVG_KERNEL(rope_tail, EVG_BOUNDS(256))(const char* x, u64 x_stride, u64 x_head, const char* positions, char* out, u64 out_stride,
    u64 out_head, u32 tokens, u32 heads, u32 cols, u32 dims, u32 inverse, float base, float yarn_factor, u32 original, float beta_fast,
    float beta_slow) {
    evg_begin();
    __shared__ float sines[PAIRS], cosines[PAIRS];
    const u32 pairs = dims / 2, start = cols - dims, threads = block_threads();
    const u32 mine = heads > blockIdx.y ? ceil_div(heads - blockIdx.y, gridDim.y) : 0;
    const Frequencies frequencies(pairs, base, 1.0f, yarn_factor, original, beta_fast, beta_slow);
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const float position = float(at<int>(positions, 0)[t]);
        if (x != out) {
            for (u32 i = threadIdx.x; i < mine * start; i += threads) {
                const u32 h = blockIdx.y + i / start * gridDim.y, c = i % start;
                at<float>(out, t * out_stride + h * out_head)[c] = at<float>(x, t * x_stride + h * x_head)[c];
            }
        }
        for (u32 first = 0; first < pairs; first += PAIRS) {
            const u32 count = min_u32(PAIRS, pairs - first);
            for (u32 p = threadIdx.x; p < count; p += threads) {
                float sine, cosine;
                sincosf(position * frequencies(first + p), &sine, &cosine);
                sines[p] = inverse == 1 ? -sine : sine;
                cosines[p] = cosine;
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < mine * count; i += threads) {
                const u32 h = blockIdx.y + i / count * gridDim.y, p = i % count, a = start + 2 * (first + p);
                const float* from = at<float>(x, t * x_stride + h * x_head);
                float* to = at<float>(out, t * out_stride + h * out_head);
                const float u = from[a], v = from[a + 1];
                to[a] = u * cosines[p] - v * sines[p];
                to[a + 1] = u * sines[p] + v * cosines[p];
            }
            __syncthreads();
        }
    }
}
