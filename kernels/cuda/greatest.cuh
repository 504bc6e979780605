// The greatest element and its place.
#pragma once
#include "common.cuh"

#define NOWHERE 0xFFFFFFFFu

struct Greatest {
    float value;
    u32 place;
    EVG_DEVICE static Greatest none() { return {-infinity(), NOWHERE}; }
    // The greater; of equal ones the first. NaN never wins.
    EVG_DEVICE void take(float other, u32 at) {
        if (other > value || (other == value && at < place)) value = other, place = at;
    }
};

EVG_DEVICE Greatest warp_greatest(Greatest mine) {
    for (int distance = 16; distance > 0; distance >>= 1) {
        const float value = __shfl_xor_sync(FULL_WARP, mine.value, distance);
        const u32 place = __shfl_xor_sync(FULL_WARP, mine.place, distance);
        mine.take(value, place);
    }
    return mine;
}

// This thread's share of a row.
EVG_DEVICE Greatest take_row(Greatest best, const float* row, u32 cols) {
    const u32 threads = block_threads(), whole = aligned16(row) ? cols / 4 * 4 : 0;
    // Several loads in flight: a single block reads a whole vocabulary.
#pragma unroll 4
    for (u32 i = 4 * thread_rank(); i < whole; i += 4 * threads) {
        const float4 v = *reinterpret_cast<const float4*>(row + i);
        best.take(v.x, i), best.take(v.y, i + 1), best.take(v.z, i + 2), best.take(v.w, i + 3);
    }
#pragma unroll 1
    for (u32 i = whole + thread_rank(); i < cols; i += threads) best.take(row[i], i);
    return best;
}

EVG_DEVICE Greatest block_greatest(Greatest mine) {
    __shared__ float values[32];
    __shared__ u32 places[32];
    mine = warp_greatest(mine);
    if (lane_id() == 0) values[warp_id()] = mine.value, places[warp_id()] = mine.place;
    __syncthreads();
    mine = Greatest::none();
    if (lane_id() < block_warps()) mine = {values[lane_id()], places[lane_id()]};
    mine = warp_greatest(mine);
    __syncthreads();
    return mine;
}
