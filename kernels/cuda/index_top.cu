#include "common.cuh"

// A float as a whole number of the same order: zeros of both signs are equal, NaN is below everything.
static EVG_DEVICE u32 ordered(float value) {
    if (value != value) return 0;
    const u32 bits = value == 0.0f ? 0 : __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The numbers of the greatest scores of each token, ascending. One block a token: the least score that is taken is found a
// byte at a time, then all above it and the first of those equal to it are written in their order.
EVG_KERNEL(index_top, EVG_BOUNDS(256))(const char* scores, u64 scores_stride, const char* positions, char* ids, u64 ids_stride, u32 tokens,
    u32 entries, u32 most, u32 ratio) {
    evg_begin();
    __shared__ u32 counts[256], found[2], above[8], equal[8];
    const u32 threads = block_threads(), lane = lane_id(), warp = warp_id();
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const int position = at<int>(positions, 0)[t];
        if (position < 0) evg_fault("position outside the cache");
        const u32 seen = min_u32((u32(position) + 1) / ratio, entries);
        const float* row = at<float>(scores, t * scores_stride);
        int* out = at<int>(ids, t * ids_stride);
        if (seen <= most) {
            for (u32 i = threadIdx.x; i < seen; i += threads) out[i] = int(i);
            continue;
        }
        // `left` of those that start with `prefix` are taken.
        u32 prefix = 0, left = most;
        for (u32 shift = 24;; shift -= 8) {
            for (u32 i = threadIdx.x; i < 256; i += threads) counts[i] = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < seen; i += threads) {
                const u32 value = ordered(row[i]);
                if (shift == 24 || value >> (shift + 8) == prefix) atomicAdd(&counts[value >> shift & 255u], 1u);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                u32 bin = 255, rest = left;
                while (counts[bin] < rest) rest -= counts[bin--];
                found[0] = bin, found[1] = rest;
            }
            __syncthreads();
            prefix = prefix << 8 | found[0], left = found[1];
            __syncthreads();
            if (shift == 0) break;
        }
        u32 taken = 0, same = 0;
        for (u32 first = 0; first < seen; first += threads) {
            const u32 i = first + threadIdx.x, value = i < seen ? ordered(row[i]) : 0;
            const bool is_above = i < seen && value > prefix, is_equal = i < seen && value == prefix;
            const u32 votes_above = __ballot_sync(FULL_WARP, is_above), votes_equal = __ballot_sync(FULL_WARP, is_equal);
            if (lane == 0) above[warp] = __popc(votes_above), equal[warp] = __popc(votes_equal);
            __syncthreads();
            const u32 lower = (1u << lane) - 1;
            u32 before_above = __popc(votes_above & lower), before_equal = __popc(votes_equal & lower), all_above = 0, all_equal = 0;
            for (u32 w = 0; w < block_warps(); w++) {
                if (w < warp) before_above += above[w], before_equal += equal[w];
                all_above += above[w], all_equal += equal[w];
            }
            // Of the equal ones before this place those count that are taken.
            const u32 equals = min_u32(same + before_equal, left), place = taken + before_above + equals;
            if (is_above || (is_equal && same + before_equal < left)) out[place] = int(i);
            taken += all_above, same += all_equal;
            __syncthreads();
        }
    }
}
