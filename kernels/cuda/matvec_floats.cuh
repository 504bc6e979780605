// Products of a weight of floats with few tokens.
#pragma once

#include "activations.cuh"

// Elements of 16 bytes of a row.
template <u32 TYPE> EVG_DEVICE void float_values(const uint4& bits, float* out) {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    for (u32 i = 0; i < 4; i++) {
        if constexpr (TYPE == TYPE_F32) {
            out[i] = __uint_as_float(words[i]);
        } else {
            const float2 pair = TYPE == TYPE_F16 ? half2_to_float2(words[i]) : bf162_to_float2(words[i]);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
}

// Warps share rows so that each has about one round of four 16-byte loads a lane: a router's few rows come in as fast as the
// many of a vocabulary. How a row is shared, and so the order of its sum, depends on the columns only.
template <u32 TYPE, u32 TOKENS> struct MatVecFloats {
    static constexpr u32 BYTES = TYPE == TYPE_F32 ? 4 : 2;
    static constexpr u32 WARPS = 8, PIECE = 16 / BYTES, ROWS = TOKENS == 1 ? 2 : 1, AHEAD = 4;

    static EVG_DEVICE void run(const u8* w, u32 out, u32 in, const Rows& rows, u32 tokens, char* y, u64 y_stride) {
        __shared__ float partial[WARPS * ROWS * TOKENS];
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 log_parts = 0;
        while (log_parts < 3 && in / PIECE > (32 * AHEAD) << log_parts) log_parts++;
        const u32 parts = 1u << log_parts, part = warp & (parts - 1);
        const u32 rows_per_block = WARPS * ROWS >> log_parts, own_row = (warp >> log_parts) * ROWS;
        const u64 row_bytes = u64(in) * BYTES;
        const bool wide = aligned16(w) && aligned16(row_bytes) && aligned16(rows.x) && aligned16(rows.x_stride);
        const u32 pieces = wide ? in / PIECE : 0;
#pragma unroll 1
        for (u32 first = blockIdx.x * rows_per_block; first < out; first += gridDim.x * rows_per_block) {
            float sums[ROWS][TOKENS];
            const u8* row[ROWS];
            for (u32 r = 0; r < ROWS; r++) {
                row[r] = w + u64(min_u32(first + own_row + r, out - 1)) * row_bytes;
                for (u32 t = 0; t < TOKENS; t++) sums[r][t] = 0.0f;
            }
#pragma unroll 1
            for (u32 start = 32 * part + lane; start < pieces; start += 32 * AHEAD * parts) {
                uint4 bits[ROWS][AHEAD];
                for (u32 r = 0; r < ROWS; r++)
                    for (u32 a = 0; a < AHEAD; a++) {
                        const u32 piece = start + 32 * parts * a;
                        bits[r][a] = piece < pieces ? reinterpret_cast<const uint4*>(row[r])[piece] : make_uint4(0, 0, 0, 0);
                    }
                for (u32 a = 0; a < AHEAD; a++) {
                    const u32 piece = start + 32 * parts * a;
                    if (piece >= pieces) break;
                    float values[ROWS][PIECE];
                    for (u32 r = 0; r < ROWS; r++) float_values<TYPE>(bits[r][a], values[r]);
                    for (u32 t = 0; t < TOKENS; t++) {
                        if (TOKENS > 1 && t >= tokens) break;
                        const float4* x = at<float4>(rows.x, t * rows.x_stride) + u64(piece) * (PIECE / 4);
                        for (u32 q = 0; q < PIECE / 4; q++) {
                            const float4 v = x[q];
                            for (u32 r = 0; r < ROWS; r++) {
                                const float* value = values[r] + 4 * q;
                                float sum = sums[r][t];
                                sum = fmaf(value[0], v.x, sum), sum = fmaf(value[1], v.y, sum);
                                sum = fmaf(value[2], v.z, sum), sum = fmaf(value[3], v.w, sum);
                                sums[r][t] = sum;
                            }
                        }
                    }
                }
            }
            // Rows that no 16-byte load may touch.
#pragma unroll 1
            for (u32 i = pieces * PIECE + 32 * part + lane; i < in; i += 32 * parts)
                for (u32 r = 0; r < ROWS; r++) {
                    const float value = float_value(TYPE, row[r], i);
                    for (u32 t = 0; t < TOKENS; t++) {
                        if (TOKENS > 1 && t >= tokens) break;
                        sums[r][t] = fmaf(value, at<float>(rows.x, t * rows.x_stride)[i], sums[r][t]);
                    }
                }
            for (u32 r = 0; r < ROWS; r++)
                for (u32 t = 0; t < TOKENS; t++) {
                    const float sum = warp_sum(sums[r][t]);
                    if (lane == 0) partial[(warp * ROWS + r) * TOKENS + t] = sum;
                }
            __syncthreads();
            const u32 r = threadIdx.x & (rows_per_block - 1), t = threadIdx.x / rows_per_block;
            if (t < tokens && first + r < out) {
                float sum = 0.0f;
                for (u32 p = 0; p < parts; p++) sum += partial[((r / ROWS * parts + p) * ROWS + r % ROWS) * TOKENS + t];
                at<float>(y, t * y_stride)[first + r] = sum;
            }
            // The next rows' sums go to the same place.
            __syncthreads();
        }
    }
};
