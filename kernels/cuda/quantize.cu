// `quantize`: activations as 8-bit integers with a scale for each 32. A warp takes a unit at a time. Grid: groups of eight units.
#include "common.cuh"

// The greater one; NaN where there was one, so that the scale shows it.
EVG_DEVICE float greater(float a, float most) { return most < a || a != a ? a : most; }

EVG_KERNEL(quantize, EVG_BOUNDS(256))
(const char* x, u64 x_stride, char* q, u64 q_stride, char* scales, u64 scales_stride, u32 tokens, u32 in) {
    evg_begin();
    const u32 lane = threadIdx.x % 32, units = in / 32;
    const u64 all = u64(tokens) * units;
    for (u64 i = u64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; i < all; i += u64(gridDim.x) * (blockDim.x / 32)) {
        const u64 t = i / units;
        const u32 unit = u32(i % units);
        const float value = at<float>(x, t * x_stride)[u64(unit) * 32 + lane];
        float most = fabsf(value);
        for (int distance = 16; distance > 0; distance >>= 1) most = greater(__shfl_xor_sync(FULL_WARP, most, distance), most);
        const float d = most / 127.0f;
        // The limits are for scales so small that they are rounded coarsely, or to 0, which leaves nothing; NaN becomes 0.
        const float ratio = value / d;
        const int code = d != 0.0f && ratio == ratio ? __float2int_rn(fminf(fmaxf(ratio, -127.0f), 127.0f)) : 0;
        at<i8>(q, t * q_stride)[u64(unit) * 32 + lane] = i8(code);
        const int sum = warp_sum(code);
        if (lane == 0) {
            float* to = at<float>(scales, t * scales_stride) + 2 * u64(unit);
            to[0] = d, to[1] = d * float(sum);
        }
    }
}
