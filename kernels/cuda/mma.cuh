// A product of small matrices of 16-bit floats by one warp, on tensor cores.
#pragma once
#include "common.cuh"

// `sums += a b`: 16 x 16 by 16 x 8, summed in f32. With `g = lane / 4` and `t = lane % 4` a lane has of `a` the pairs
// (row g, columns 2t, 2t + 1), (row g + 8, the same), (row g, columns 2t + 8, 2t + 9), (row g + 8, the same); of `b` the pairs (rows 2t,
// 2t + 1, column g), (rows 2t + 8, 2t + 9, column g); of the sums (row g, columns 2t, 2t + 1) and (row g + 8, the same).
EVG_DEVICE void multiply_halves(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef EVG_EMULATED
    const u32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const u64 upper = u64(a2) << 32 | a0, lower = u64(a3) << 32 | a1, right = u64(b1) << 32 | b0;
    for (u32 from = 0; from < 4; from++) {
        const u64 rows[2] = {__shfl_sync(FULL_WARP, upper, int(4 * g + from)), __shfl_sync(FULL_WARP, lower, int(4 * g + from))};
        const u64 columns[2] = {__shfl_sync(FULL_WARP, right, int(4 * (2 * t) + from)), __shfl_sync(FULL_WARP, right, int(4 * (2 * t + 1) + from))};
        for (u32 i = 0; i < 4; i++) {
            const u64 row = rows[i / 2], column = columns[i % 2];
            for (u32 k = 0; k < 64; k += 16) sums[i] = fmaf(half_to_float(u16(row >> k)), half_to_float(u16(column >> k)), sums[i]);
        }
    }
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Asks for a line of memory to be brought near.
EVG_DEVICE void prefetch_line(const char* at) {
#ifdef EVG_EMULATED
    (void)at;
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}
