// Products of a weight with few tokens, where reading the weight is the work.
//
// A warp takes `ROWS` rows at a time and brings them in steps of 32 units, a unit a lane, through a ring in shared memory
// that asynchronous copies fill `STAGES - 1` steps ahead: the copies are whole 16-byte pieces whatever the format's
// alignment, and what is in flight does not cost registers. Activations are staged once a block.
//
// The sum of a row is made in an order that depends on the columns and on the form of the activations only: lane l adds up
// units l, l + 32, …, lanes are added as a tree, then the warps that share a row in order.
#pragma once

#include "activations.cuh"
#include "copy_async.cuh"

#define MATVEC_THREADS 256u
#define MATVEC_WARPS 8u
// Dynamic shared memory of a block at most. Every device has 48 KiB, and sums take some.
#define MATVEC_SHARED_BYTES (47u * 1024u)

// Sizes of the kernel for a type, a form of activations and a number of tokens. `launch/matvec.rs` has the same.
template <u32 TYPE, class Form, u32 TOKENS> struct MatVec {
    using Q = Quant<TYPE>;
    static constexpr u32 STEP_BYTES = 32 * Q::BYTES / Q::UNITS;
    // A step that does not start at a multiple of 16 reaches into one piece more.
    static constexpr u32 STAGE_BYTES = (STEP_BYTES + 15 + 15) / 16 * 16;
    static constexpr u32 ROWS = STEP_BYTES <= 640 && !(Form::WORDS == Floats::WORDS && TOKENS > 1) ? 2 : 1;
    static constexpr u32 STAGES = TOKENS == 1 && STEP_BYTES <= 1088 ? 3 : 2;
    static constexpr u32 RING_BYTES = STAGES * ROWS * STAGE_BYTES;
    // Units of activations that are staged at a time: a multiple of 32, as many as fit beside the rings.
    static constexpr u32 FIT = (MATVEC_SHARED_BYTES - MATVEC_WARPS * RING_BYTES) / (TOKENS * Form::WORDS * 4) / 32 * 32;
    static constexpr u32 CHUNK = FIT < 256 ? FIT : 256;
    static_assert(CHUNK >= 32, "no room for activations");

    // Brings the bytes of one step of one row; the ring gets them at the offset that the address has in its 16 bytes.
    static EVG_DEVICE void bring(const u8* row, u32 row_bytes, u32 step, u8* to, u32 lane) {
        const u32 start = step * STEP_BYTES, bytes = min_u32(row_bytes - start, STEP_BYTES);
        const u8* from = row + start;
        const u32 off = u32(reinterpret_cast<u64>(from)) & 15u;
        if (off % Q::ALIGN == 0) {
#pragma unroll
            for (u32 i = 0; i < STAGE_BYTES; i += 16 * 32) {
                const u32 at = i + 16 * lane;
                if (at < off + bytes) copy_async_16(to + at, from - off + at);
            }
        } else {
            // A weight that is less aligned than its format lets hope.
#pragma unroll 1
            for (u32 i = lane; i < bytes; i += 32) to[i] = from[i];
        }
    }

    static EVG_DEVICE u32 offset(const u8* row, u32 step) {
        const u32 off = u32(reinterpret_cast<u64>(row) + step * STEP_BYTES) & 15u;
        return off % Q::ALIGN == 0 ? off : 0;
    }

    // `y[t][r] = w[r] . x[t]`, with all blocks of the grid's first dimension. `tokens` is at most TOKENS.
    static EVG_DEVICE void run(const u8* w, u32 out, u32 in, const Rows& rows, u32 tokens, char* y, u64 y_stride) {
        EVG_DYNAMIC_SHARED(u8, shared);
        __shared__ float partial[MATVEC_WARPS * ROWS * TOKENS];
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u8* ring = shared + warp * RING_BYTES;
        u32* x = reinterpret_cast<u32*>(shared + MATVEC_WARPS * RING_BYTES);

        const u32 units = in / UNIT, steps = ceil_div(units, 32u), row_bytes = units / Q::UNITS * Q::BYTES;
        // Warps that share rows: where a row has several steps, in equal parts.
        const u32 log_parts = Form::WORDS == Floats::WORDS ? 0 : steps % 4 == 0 && steps >= 8 ? 2 : steps % 2 == 0 ? 1 : 0;
        const u32 parts = 1u << log_parts, part = warp & (parts - 1);
        const u32 rows_per_block = MATVEC_WARPS * ROWS >> log_parts, own_row = (warp >> log_parts) * ROWS;
        const bool whole = units <= CHUNK;

        // The next step to bring: it runs ahead over the block's groups of rows.
        u32 next_first = blockIdx.x * rows_per_block, next_step = part, next_slot = 0;
        auto bring_next = [&]() {
            if (next_first < out && next_step < steps) {
                for (u32 r = 0; r < ROWS; r++) {
                    const u32 row = min_u32(next_first + own_row + r, out - 1);
                    bring(w + u64(row) * row_bytes, row_bytes, next_step, ring + (next_slot * ROWS + r) * STAGE_BYTES, lane);
                }
                next_step += parts;
                if (next_step >= steps) next_step = part, next_first += gridDim.x * rows_per_block;
            }
            next_slot = next_slot + 1 == STAGES ? 0 : next_slot + 1;
            copy_async_commit();
        };
#pragma unroll 1
        for (u32 i = 0; i + 1 < STAGES; i++) bring_next();

        u32 slot = 0;
        bool staged = false;
#pragma unroll 1
        for (u32 first = blockIdx.x * rows_per_block; first < out; first += gridDim.x * rows_per_block) {
            float sums[ROWS][TOKENS];
            for (u32 r = 0; r < ROWS; r++)
                for (u32 t = 0; t < TOKENS; t++) sums[r][t] = 0.0f;
            const u8* row[ROWS];
            for (u32 r = 0; r < ROWS; r++) row[r] = w + u64(min_u32(first + own_row + r, out - 1)) * row_bytes;

            u32 step = part;
#pragma unroll 1
            for (u32 chunk = 0; chunk < units; chunk += CHUNK) {
                const u32 count = min_u32(units - chunk, CHUNK);
                if (!staged) {
                    __syncthreads();
                    stage_activations<TOKENS, CHUNK>(Form(), rows, tokens, chunk, count, x);
                    __syncthreads();
                    staged = whole;
                }
#pragma unroll 1
                for (; 32 * step < chunk + count; step += parts) {
                    bring_next();
                    copy_async_wait<STAGES - 1>();
                    __syncwarp();
                    const u32 u = 32 * step + lane;
                    if (u < units) {
                        const u32* record = x + (u - chunk) * Form::WORDS;
#pragma unroll
                        for (u32 r = 0; r < ROWS; r++) {
                            const u8* from = ring + (slot * ROWS + r) * STAGE_BYTES + offset(row[r], step);
                            Unit unit;
                            unpack_of_row<TYPE, Q::ALIGN>(from, lane, unit);
#pragma unroll
                            for (u32 t = 0; t < TOKENS; t++) {
                                if (TOKENS == 1 || t < tokens)
                                    sums[r][t] += unit_dot_staged<TYPE>(Form(), unit, record + t * CHUNK * Form::WORDS);
                            }
                        }
                    }
                    // The slot is filled again by the next step's copies.
                    __syncwarp();
                    slot = slot + 1 == STAGES ? 0 : slot + 1;
                }
            }

            for (u32 r = 0; r < ROWS; r++)
                for (u32 t = 0; t < TOKENS; t++) sums[r][t] = warp_sum(sums[r][t]);
            if (parts == 1) {
                if (lane == 0) {
                    for (u32 r = 0; r < ROWS; r++)
                        for (u32 t = 0; t < TOKENS; t++)
                            if (first + own_row + r < out && t < tokens) at<float>(y, t * y_stride)[first + own_row + r] = sums[r][t];
                }
                continue;
            }
            if (lane == 0) {
                for (u32 r = 0; r < ROWS; r++)
                    for (u32 t = 0; t < TOKENS; t++) partial[(warp * ROWS + r) * TOKENS + t] = sums[r][t];
            }
            __syncthreads();
#pragma unroll 1
            for (u32 i = threadIdx.x; i < rows_per_block * tokens; i += MATVEC_THREADS) {
                const u32 r = i % rows_per_block, t = i / rows_per_block;
                float sum = 0.0f;
#pragma unroll 1
                for (u32 p = 0; p < parts; p++) sum += partial[((r / ROWS * parts + p) * ROWS + r % ROWS) * TOKENS + t];
                if (first + r < out) at<float>(y, t * y_stride)[first + r] = sum;
            }
            // The next group's sums go to the same place.
            __syncthreads();
        }
        copy_async_wait<0>();
    }
};
