#include "common.cuh"

#define PIECE 1024u

// out[t] = sum over j of pre[t, j] * z[t, j]. Blocks take pieces of PIECE columns.
EVG_KERNEL(hc_weighted_sum, EVG_BOUNDS(256))(const char* z, u64 z_stride, u64 z_stream, const char* pre, u64 pre_stride, char* out,
    u64 out_stride, u32 tokens, u32 n, u32 cols) {
    evg_begin();
    const u32 pieces = ceil_div(cols, PIECE), threads = block_threads();
    for (u64 item = blockIdx.x; item < u64(tokens) * pieces; item += gridDim.x) {
        const u32 t = u32(item / pieces), first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        const float* weights = at<float>(pre, t * pre_stride);
        for (u32 c = first + threadIdx.x; c < end; c += threads) {
            float sum = 0.0f;
            for (u32 j = 0; j < n; j++) sum = fmaf(weights[j], at<float>(z, t * z_stride + j * z_stream)[c], sum);
            at<float>(out, t * out_stride)[c] = sum;
        }
    }
}
