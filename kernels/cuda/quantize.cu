// `quantize`: activations as 8-bit integers with a scale for each 32. A warp takes a unit at a time. Grid: groups of eight units.
#include "codes.cuh"

EVG_KERNEL(quantize, EVG_BOUNDS(256))
(const char* x, u64 x_stride, char* q, u64 q_stride, char* scales, u64 scales_stride, u32 tokens, u32 in) {
    evg_begin();
    const CodeRows codes = {q, q_stride, 0, scales, scales_stride, 0};
    const u32 lane = threadIdx.x % 32, units = in / CODE_GROUP;
    const u64 all = u64(tokens) * units;
    for (u64 i = u64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; i < all; i += u64(gridDim.x) * (blockDim.x / 32)) {
        const u64 t = i / units;
        const u32 column = u32(i % units) * CODE_GROUP + lane;
        const float value[1] = {at<float>(x, t * x_stride)[column]};
        store_codes(codes.row(t, 0), column, value, true);
    }
}
