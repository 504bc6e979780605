// Activations of some tokens in shared memory, unit by unit, padded so that lanes that read neighbouring units hit
// different banks.
#pragma once

#include "quant.cuh"

// The eight-bit form: 32 codes, then the scale and the scaled sums of both halves.
struct Eights {
    static constexpr u32 WORDS = 12;
};
// The float form: 32 numbers, then the sums of both halves.
struct Floats {
    static constexpr u32 WORDS = 36;
};

// Where activations lie: a row a token.
struct Rows {
    const char* x;
    u64 x_stride;
    // Scale and scaled sum of each unit; null for floats.
    const char* scales;
    u64 scales_stride;
};

// Copies units `first .. first + count` of `tokens` tokens (at most TOKENS) to `to`, a token's records CHUNK records after
// those of the one before, with all threads of a block that has one dimension.
template <u32 TOKENS, u32 CHUNK>
EVG_DEVICE void stage_activations(Eights, const Rows& rows, u32 tokens, u32 first, u32 count, u32* to) {
    const bool wide = aligned16(rows.x) && aligned16(rows.x_stride);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < tokens * count; i += blockDim.x) {
        const u32 t = TOKENS == 1 ? 0 : i / count, k = i - t * count, u = first + k;
        const char* from = rows.x + t * rows.x_stride + UNIT * u64(u);
        u32 words[8];
        if (wide)
            load_words<8, 16>(reinterpret_cast<const u8*>(from), words);
        else
            load_words<8, 1>(reinterpret_cast<const u8*>(from), words);
        int sums[2] = {0, 0};
        for (u32 j = 0; j < 8; j++) sums[j / 4] = dp4a(int(words[j]), 0x01010101, sums[j / 4]);
        const float d = at<float>(rows.scales, t * rows.scales_stride)[2 * u64(u)];
        uint4* out = reinterpret_cast<uint4*>(to + (t * CHUNK + k) * Eights::WORDS);
        out[0] = make_uint4(words[0], words[1], words[2], words[3]);
        out[1] = make_uint4(words[4], words[5], words[6], words[7]);
        out[2] = make_uint4(__float_as_uint(d), __float_as_uint(d * float(sums[0])), __float_as_uint(d * float(sums[1])), 0);
    }
}

template <u32 TOKENS, u32 CHUNK>
EVG_DEVICE void stage_activations(Floats, const Rows& rows, u32 tokens, u32 first, u32 count, u32* to) {
    const bool wide = aligned16(rows.x) && aligned16(rows.x_stride);
    // A thread has half a unit.
#pragma unroll 1
    for (u32 i = threadIdx.x; i < 2 * tokens * count; i += blockDim.x) {
        const u32 half = i % 2, t = TOKENS == 1 ? 0 : i / 2 / count, k = i / 2 - t * count, u = first + k;
        const float* from = at<float>(rows.x, t * rows.x_stride) + UNIT * u64(u) + 16 * half;
        float* out = reinterpret_cast<float*>(to + (t * CHUNK + k) * Floats::WORDS);
        float sum = 0.0f;
        for (u32 j = 0; j < 4; j++) {
            const float4 v = wide ? reinterpret_cast<const float4*>(from)[j]
                                  : make_float4(from[4 * j], from[4 * j + 1], from[4 * j + 2], from[4 * j + 3]);
            reinterpret_cast<float4*>(out)[4 * half + j] = v;
            sum += (v.x + v.y) + (v.z + v.w);
        }
        out[UNIT + half] = sum;
    }
}

// A unit of weights times the activations of one record.
template <u32 TYPE> EVG_DEVICE float unit_dot_staged(Eights, const Unit& unit, const u32* record) {
    const uint4* from = reinterpret_cast<const uint4*>(record);
    const uint4 low = from[0], high = from[1], scales = from[2];
    const int x[8] = {int(low.x), int(low.y), int(low.z), int(low.w), int(high.x), int(high.y), int(high.z), int(high.w)};
    return unit_dot_q8<TYPE>(unit, x, __uint_as_float(scales.x), __uint_as_float(scales.y), __uint_as_float(scales.z));
}

template <u32 TYPE> EVG_DEVICE float unit_dot_staged(Floats, const Unit& unit, const u32* record) {
    const float4* from = reinterpret_cast<const float4*>(record);
    const float2 sums = reinterpret_cast<const float2*>(record)[UNIT / 2];
    return unit_dot<TYPE>(unit, from, sums.x, sums.y);
}
