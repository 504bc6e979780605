// Rows of a weight in blocks as they flow through a warp, for one token of eight-bit activations: what the fused kernels are
// made of. As in `matvec.cuh`, with these differences: what a block does before its activations are there (waiting for the kernel
// before, norms, the choice of experts) is a function that is called while the first rows are on their way; a warp has two rows, which may
// lie anywhere, such as those of a gate and its unit; and a row may be a weighted sum over slots, whose activations lie one behind the other.
// At one token the instructions count as much as the bytes: whatever a row needs once is worked out once.
#pragma once

#include "codes.cuh"
#include "matvec.cuh"

template <u32 TYPE, u32 WARPS> struct Flow {
    using Q = Quant<TYPE>;
    static constexpr u32 ROWS = 2;
    static constexpr u32 STEP_BYTES = 32 * Q::BYTES / Q::UNITS;
    // A step that does not start at a multiple of 16 reaches into one piece more.
    static constexpr u32 STAGE_BYTES = (STEP_BYTES + 15 + 15) / 16 * 16;
    static constexpr u32 STAGES = STEP_BYTES <= 640 ? 3 : 2;
    static constexpr u32 RING_BYTES = STAGES * ROWS * STAGE_BYTES;
    static constexpr u32 RINGS_BYTES = WARPS * RING_BYTES;

    u8* ring;
    u32 lane, warp, part, parts, pairs, units, steps, row_bytes;

    // `1 << log_parts` warps share rows, so that a block has `pairs` of them at a time.
    EVG_DEVICE Flow(u8* shared, u32 in, u32 log_parts) {
        lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        ring = shared + warp * RING_BYTES;
        parts = 1u << log_parts, part = warp & (parts - 1), pairs = WARPS >> log_parts;
        units = in / UNIT, steps = ceil_div(units, 32u), row_bytes = units / Q::UNITS * Q::BYTES;
    }

    // Two rows, and where the next step of them is.
    struct Pair {
        const u8* row[ROWS];
        EVG_DEVICE u32 offset(u32 r, u32 step) const { return u32(reinterpret_cast<u64>(row[r]) + step * STEP_BYTES) & 15u; }
    };

    EVG_DEVICE void bring(const Pair& pair, u32 step, u32 stage) const {
        const u32 start = step * STEP_BYTES, bytes = min_u32(row_bytes - start, STEP_BYTES);
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            const u32 off = pair.offset(r, step);
            const u8* from = pair.row[r] + start - off + 16 * lane;
            u8* to = ring + (stage * ROWS + r) * STAGE_BYTES + 16 * lane;
#pragma unroll
            for (u32 i = 0; i < STAGE_BYTES; i += 16 * 32)
                if (i + 16 * lane < off + bytes) copy_async_16(to + i, from + i);
        }
    }

    // Groups `first`, `first + stride`, … below `groups`, of `pairs` pairs each. `pair_of(group, pair, slot)` is where two rows lie,
    // `before()` makes the activations `x`: records of `units` units for each slot. `weight_of(slot)` is the slot's factor; `emit(group,
    // pair, sums)` gets both sums, in one thread.
    template <class PairOf, class Before, class WeightOf, class Emit>
    EVG_DEVICE void run(u32 first, u32 stride, u32 groups, u32 slots, const u32* x, PairOf pair_of, Before before, WeightOf weight_of, Emit emit) {
        __shared__ float partial[WARPS * ROWS];
        const u32 own = warp / parts;
        u32 next_group = first, next_slot = 0, next_step = part, next_stage = 0;
        Pair next = {};
        if (first < groups) next = pair_of(first, own, 0);
        auto bring_next = [&]() {
            if (next_group < groups) {
                bring(next, next_step, next_stage);
                next_step += parts;
                if (next_step >= steps) {
                    next_step = part;
                    if (++next_slot == slots) next_slot = 0, next_group += stride;
                    if (next_group < groups) next = pair_of(next_group, own, next_slot);
                }
            }
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
            copy_async_commit();
        };
#pragma unroll
        for (u32 i = 0; i + 1 < STAGES; i++) bring_next();
        before();
        u32 stage = 0;
#pragma unroll 1
        for (u32 group = first; group < groups; group += stride) {
            float sums[ROWS] = {0.0f, 0.0f};
#pragma unroll 1
            for (u32 slot = 0; slot < slots; slot++) {
                const Pair pair = pair_of(group, own, slot);
                float dots[ROWS] = {0.0f, 0.0f};
                const u32* records = x + (slot * units + lane) * Eights::WORDS;
#pragma unroll 1
                for (u32 step = part; step < steps; step += parts) {
                    bring_next();
                    copy_async_wait<int(STAGES - 1)>();
                    __syncwarp();
                    if (32 * step + lane < units) {
                        const u32* record = records + 32 * step * Eights::WORDS;
#pragma unroll
                        for (u32 r = 0; r < ROWS; r++) {
                            Unit unit;
                            unpack_of_row<TYPE, Q::ALIGN>(ring + (stage * ROWS + r) * STAGE_BYTES + pair.offset(r, step), lane, unit);
                            dots[r] += unit_dot_staged<TYPE>(Eights(), unit, record);
                        }
                    }
                    // The stage is filled again by the next step's copies.
                    __syncwarp();
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                }
                const float weight = weight_of(slot);
                for (u32 r = 0; r < ROWS; r++) sums[r] = fmaf(weight, dots[r], sums[r]);
            }
            for (u32 r = 0; r < ROWS; r++) sums[r] = warp_sum(sums[r]);
            if (parts == 1) {
                if (lane == 0) emit(group, own, sums);
                continue;
            }
            if (lane == 0)
                for (u32 r = 0; r < ROWS; r++) partial[warp * ROWS + r] = sums[r];
            __syncthreads();
            if (threadIdx.x < pairs) {
                float all[ROWS] = {0.0f, 0.0f};
                for (u32 p = 0; p < parts; p++)
                    for (u32 r = 0; r < ROWS; r++) all[r] += partial[(threadIdx.x * parts + p) * ROWS + r];
                emit(group, threadIdx.x, all);
            }
            // The next group's sums go to the same place.
            __syncthreads();
        }
        copy_async_wait<0>();
    }

    // Rows `2 pair` and the one behind it of `rows` at `w`, in a group's own counting.
    EVG_DEVICE Pair neighbours(const u8* w, u32 rows, u32 group, u32 pair) const {
        const u32 row = 2 * (group * pairs + pair);
        return {{w + u64(min_u32(row, rows - 1)) * row_bytes, w + u64(min_u32(row + 1, rows - 1)) * row_bytes}};
    }

    // Row `group * pairs + pair` of each of two weights.
    EVG_DEVICE Pair twins(const u8* one, const u8* two, u32 rows, u32 group, u32 pair) const {
        const u64 at = u64(min_u32(group * pairs + pair, rows - 1)) * row_bytes;
        return {{one + at, two + at}};
    }

    // Puts sums of neighbours where they belong.
    EVG_DEVICE void put(float* y, u32 rows, u32 group, u32 pair, const float (&sums)[ROWS]) const {
        const u32 row = 2 * (group * pairs + pair);
        if (row < rows) y[row] = sums[0];
        if (row + 1 < rows) y[row + 1] = sums[1];
    }
};

// Four neighbouring columns of a row as codes into the records of `activations.cuh`, as `store_codes` and staging them again give them, but
// for a product in place of a quotient. Eight neighbouring lanes have a unit; all lanes of a warp come here.
EVG_DEVICE void stage_codes(u32* records, u32 column, const float (&values)[4], bool mine) {
    float most = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) most = greater(fabsf(values[i]), most);
    for (int distance = 4; distance > 0; distance >>= 1) most = greater(__shfl_xor_sync(FULL_WARP, most, distance), most);
    // Fast forms of quotients: every block does this.
    const float d = most * (1.0f / 127.0f), by = __fdividef(127.0f, most);
    u32 word = 0;
    int sum = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const float ratio = values[i] * by;
        const int code = d != 0.0f && ratio == ratio ? __float2int_rn(fminf(fmaxf(ratio, -127.0f), 127.0f)) : 0;
        sum += code;
        word |= u32(u8(code)) << (8 * i);
    }
    // Of this half of the unit.
    sum = warp_reduce<Sum>(sum, 4);
    if (!mine) return;
    u32* record = records + column / UNIT * Eights::WORDS;
    const u32 at = column % UNIT / 4;
    record[at] = word;
    if (at == 0) record[8] = __float_as_uint(d), record[9] = __float_as_uint(d * float(sum)), record[11] = 0;
    if (at == 4) record[10] = __float_as_uint(d * float(sum));
}

// The types whose products are fused with what is beside them. `src/ops/fused` has the same.
#define FOR_FUSED_TYPES(DO) DO(Q4_0) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K)
