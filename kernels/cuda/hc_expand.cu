#include "common.cuh"

#define PIECE 1024u

// One column of all streams; N of 0 means any number up to 32.
template <u32 N>
static EVG_DEVICE void column(const float* weights, float y, const char* z, u64 z_stream, char* out, u64 out_stream, u32 streams, u32 c) {
    const u32 n = N ? N : streams;
    float old[N ? N : 32];
    // All are read before the first is written: the output may be the input.
    for (u32 src = 0; src < n; src++) old[src] = at<float>(z, src * z_stream)[c];
    for (u32 dst = 0; dst < n; dst++) {
        float sum = weights[n * n + dst] * y;
        for (u32 src = 0; src < n; src++) sum = fmaf(weights[src * n + dst], old[src], sum);
        at<float>(out, dst * out_stream)[c] = sum;
    }
}

// out[t, dst] = post[t, dst] * y[t] + sum over src of comb[t, src, dst] * z[t, src]. Blocks take pieces of PIECE columns, all
// streams of them.
EVG_KERNEL(hc_expand, EVG_BOUNDS(256))(const char* y, u64 y_stride, const char* z, u64 z_stride, u64 z_stream, const char* post,
    u64 post_stride, const char* comb, char* out, u64 out_stride, u64 out_stream, u32 tokens, u32 n, u32 cols) {
    evg_begin();
    // The matrix, then what the block's output is multiplied with.
    EVG_DYNAMIC_SHARED(float, weights);
    const u32 pieces = ceil_div(cols, PIECE), threads = block_threads();
    for (u64 item = blockIdx.x; item < u64(tokens) * pieces; item += gridDim.x) {
        const u32 t = u32(item / pieces), first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        for (u32 i = threadIdx.x; i < n * n; i += threads) weights[i] = at<float>(comb, u64(t) * n * n * 4)[i];
        for (u32 i = threadIdx.x; i < n; i += threads) weights[n * n + i] = at<float>(post, t * post_stride)[i];
        __syncthreads();
        const char* streams = z + t * z_stride;
        char* to = out + t * out_stride;
        for (u32 c = first + threadIdx.x; c < end; c += threads) {
            const float made = at<float>(y, t * y_stride)[c];
            if (n == 4)
                column<4>(weights, made, streams, z_stream, to, out_stream, n, c);
            else
                column<0>(weights, made, streams, z_stream, to, out_stream, n, c);
        }
        __syncthreads();
    }
}
