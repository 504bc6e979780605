#include "common.cuh"

#define GROUP 64u

// The least power of two that is not below x, which is a normal number; at most 2^127.
static EVG_DEVICE float power_above(float x) {
    const u32 bits = __float_as_uint(x), exponent = (bits >> 23) + ((bits & 0x7FFFFFu) ? 1 : 0);
    return __uint_as_float(min_u32(exponent, 254) << 23);
}

// The nearest number of E4M3, ties to even, after a cut at 448 on both sides; NaN stays NaN.
static EVG_DEVICE float e4m3(float x) {
    if (x != x) return x;
    const float cut = fminf(fabsf(x), 448.0f);
    float rounded;
    if (cut < 0.015625f) {
        // Below 2^-6 steps are 2^-9, which is what a float of this size has.
        rounded = __fadd_rn(__fadd_rn(cut, 16384.0f), -16384.0f);
    } else {
        const u32 bits = __float_as_uint(cut);
        rounded = __uint_as_float((bits + 0x7FFFFu + (bits >> 20 & 1u)) & ~0xFFFFFu);
    }
    return copysignf(rounded, x);
}

// Rounds all but the last `rotated` elements of each row in groups of 64; a warp a group. The others are copied.
EVG_KERNEL(fp8_kv_quantize, EVG_BOUNDS(256))(const char* x, u64 x_stride, u64 x_head, char* out, u64 out_stride, u64 out_head, u32 tokens,
    u32 heads, u32 cols, u32 rotated) {
    evg_begin();
    const u32 rounded = cols - rotated, groups = ceil_div(cols, GROUP), lane = lane_id(), warps = block_warps();
    const u64 items = u64(tokens) * heads * groups;
    for (u64 item = u64(blockIdx.x) * warps + warp_id(); item < items; item += u64(gridDim.x) * warps) {
        const u64 row = item / groups;
        const u32 t = u32(row / heads), h = u32(row % heads), first = u32(item % groups) * GROUP;
        const float* from = at<float>(x, t * x_stride + h * x_head);
        float* to = at<float>(out, t * out_stride + h * out_head);
        float value[2], greatest = 1e-4f;
        for (u32 i = 0; i < 2; i++) {
            const u32 c = first + lane + 32 * i;
            value[i] = c < cols ? from[c] : 0.0f;
            // NaN is no greatest value.
            if (c < rounded) greatest = fmaxf(greatest, fabsf(value[i]));
        }
        const float scale = power_above(__fdiv_rn(warp_max(greatest), 448.0f));
        for (u32 i = 0; i < 2; i++) {
            const u32 c = first + lane + 32 * i;
            if (c < cols) to[c] = c < rounded ? __fmul_rn(e4m3(__fdiv_rn(value[i], scale)), scale) : value[i];
        }
    }
}
