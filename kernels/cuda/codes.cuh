// Activations as 8-bit integers with a scale for each 32 columns: what `quantize` makes of floats, and kernels of what they
// have in registers, to the same bits.
#pragma once
#include "common.cuh"

#define CODE_GROUP 32u

// A row's codes and scales.
struct Codes {
    i8* q;
    float* scales;
};

// Rows of them, as kernels get them; null where none are asked for.
struct CodeRows {
    char* q;
    u64 q_outer, q_inner;
    char* scales;
    u64 scales_outer, scales_inner;
    EVG_DEVICE bool asked() const { return q != nullptr; }
    EVG_DEVICE Codes row(u64 a, u64 b) const {
        return {at<i8>(q, a * q_outer + b * q_inner), at<float>(scales, a * scales_outer + b * scales_inner)};
    }
};

// The greater one; NaN where there was one, so that the scale shows it.
EVG_DEVICE float greater(float a, float most) { return most < a || a != a ? a : most; }

// Columns `column .. column + N` of a row, and `32 / N` neighbouring lanes, whose columns follow each other, have a group.
// All lanes of a warp come here; those that have no columns are not `mine`, and groups are whole.
template <u32 N> EVG_DEVICE void store_codes(const Codes& to, u32 column, const float (&values)[N], bool mine) {
    const int lanes = int(CODE_GROUP / N);
    float most = 0.0f;
#pragma unroll
    for (u32 i = 0; i < N; i++) most = greater(fabsf(values[i]), most);
    for (int distance = lanes / 2; distance > 0; distance >>= 1) most = greater(__shfl_xor_sync(FULL_WARP, most, distance), most);
    const float d = most / 127.0f;
    int codes[N], sum = 0;
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        // The limits are for scales so small that they are rounded coarsely, or to 0, which leaves nothing; NaN becomes 0.
        const float ratio = values[i] / d;
        codes[i] = d != 0.0f && ratio == ratio ? __float2int_rn(fminf(fmaxf(ratio, -127.0f), 127.0f)) : 0;
        sum += codes[i];
    }
    sum = warp_reduce<Sum>(sum, lanes);
    if (!mine) return;
    i8* q = to.q + column;
    if (N % 4 == 0 && reinterpret_cast<u64>(q) % 4 == 0) {
#pragma unroll
        for (u32 i = 0; i + 4 <= N; i += 4) {
            u32 word = 0;
#pragma unroll
            for (u32 j = 0; j < 4; j++) word |= u32(u8(codes[(i + j) % N])) << (8 * j);
            reinterpret_cast<u32*>(q)[i / 4] = word;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i++) q[i] = i8(codes[i]);
    }
    if (column % CODE_GROUP == 0) {
        float* scales = to.scales + 2 * (column / CODE_GROUP);
        scales[0] = d, scales[1] = d * float(sum);
    }
}
