#include "yarn.cuh"

#define PAIRS 128u

// Rotates pairs of the last dimension by position * base^(-2i/n) * scale, blended (YaRN) or divided by factors. Blocks take
// a token and every gridDim.y-th head; the turns of up to PAIRS pairs at a time lie in shared memory.
EVG_KERNEL(rope, EVG_BOUNDS(256))(const char* x, u64 x_stride, u64 x_head, const char* positions, char* out, u64 out_stride, u64 out_head,
    u32 tokens, u32 heads, u32 cols, u32 interleaved, u32 inverse, float base, float scale, const char* factors, float yarn_factor,
    u32 original, float beta_fast, float beta_slow) {
    evg_begin();
    __shared__ float sines[PAIRS], cosines[PAIRS];
    const u32 pairs = cols / 2, threads = block_threads();
    const Frequencies frequencies(pairs, base, scale, yarn_factor, original, beta_fast, beta_slow);
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const float position = float(at<int>(positions, 0)[t]);
        for (u32 first = 0; first < pairs; first += PAIRS) {
            const u32 count = min_u32(PAIRS, pairs - first);
            for (u32 p = threadIdx.x; p < count; p += threads) {
                const u32 i = first + p;
                float frequency = frequencies.plain(i);
                if (factors) frequency /= at<float>(factors, 0)[i];
                frequency = frequencies.blend(frequency, i);
                float sine, cosine;
                sincosf(position * frequency, &sine, &cosine);
                sines[p] = inverse == 1 ? -sine : sine;
                cosines[p] = cosine;
            }
            __syncthreads();
            const u32 mine = heads > blockIdx.y ? ceil_div(heads - blockIdx.y, gridDim.y) : 0;
            for (u32 i = threadIdx.x; i < mine * count; i += threads) {
                const u32 h = blockIdx.y + i / count * gridDim.y, p = i % count;
                const float* from = at<float>(x, t * x_stride + h * x_head);
                float* to = at<float>(out, t * out_stride + h * out_head);
                const u32 a = interleaved == 1 ? 2 * (first + p) : first + p, b = interleaved == 1 ? a + 1 : a + pairs;
                const float u = from[a], v = from[b];
                to[a] = u * cosines[p] - v * sines[p];
                to[b] = u * sines[p] + v * cosines[p];
            }
            __syncthreads();
        }
    }
}
