// `expert_matmul` with many tokens. Grid: tiles of rows, experts. A block finds the slots of its expert in the ids and
// multiplies its rows with them, 64 at a time in the order of the slots. Experts from number `experts` on are those of `more`; slots
// with id -1 get zeros. Without ids (`head_matmul`) slot k of a token takes expert k.
#include "tiles.cuh"

struct SlotRows {
    const u32* list;
    u32 used;
    const char* x;
    u64 x_strides[2];
    const char* all_scales;
    u64 scales_strides[2];
    char* y;
    u64 y_strides[2];
    EVG_DEVICE u64 offset(u32 i, const u64* strides) const { return list[i] / used * strides[0] + list[i] % used * strides[1]; }
    EVG_DEVICE const char* input(u32 i) const { return x + offset(i, x_strides); }
    EVG_DEVICE const char* scales(u32 i) const { return all_scales + offset(i, scales_strides); }
    EVG_DEVICE char* output(u32 i) const { return y + offset(i, y_strides); }
};

template <class Tile>
EVG_DEVICE void multiply_experts(Matrix a, u32 experts, const int* ids, u32 slots, SlotRows rows, u32* buffers, const u8* more, u32 more_experts) {
    constexpr u32 WARPS = TILE_THREADS / 32;
    __shared__ u32 list[TILE], found_by[WARPS], resume;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    rows.list = list;
    if (blockIdx.y >= experts) a.w = more + u64(blockIdx.y - experts) * a.out * a.row_bytes;
    else a.w += u64(blockIdx.y) * a.out * a.row_bytes;
    if (!ids) {
        // The slots of a head are one a token.
        for (u32 next = 0; next < slots; next += TILE * rows.used) {
            const u32 count = min_u32(ceil_div(slots - next, rows.used), TILE);
            __syncthreads();
            if (threadIdx.x < count) list[threadIdx.x] = next + threadIdx.x * rows.used + blockIdx.y;
            __syncthreads();
            multiply_tile<Tile>(a, blockIdx.x * TILE, rows, count, buffers);
        }
        return;
    }
    u32 next = 0;
    while (next < slots) {
        u32 count = 0;
        while (next < slots && count < TILE) {
            const u32 slot = next + threadIdx.x;
            bool match = false;
            if (slot < slots) {
                const int id = ids[slot];
                if (id != -1 && u32(id) >= experts + more_experts) evg_fault("expert id out of range");
                if (id == -1 && blockIdx.y == 0) {
                    float* to = at<float>(rows.y, slot / rows.used * rows.y_strides[0] + slot % rows.used * rows.y_strides[1]);
                    for (u32 row = blockIdx.x * TILE; row < min_u32(a.out, (blockIdx.x + 1) * TILE); row++) to[row] = 0.0f;
                }
                match = u32(id) == blockIdx.y;
            }
            const u32 votes = __ballot_sync(FULL_WARP, match);
            if (lane == 0) found_by[warp] = u32(__popc(votes));
            if (threadIdx.x == 0) resume = next + TILE_THREADS;
            // Nobody still reads the list for the tile before: this comes before anybody writes to it.
            __syncthreads();
            u32 index = count + u32(__popc(votes & ((1u << lane) - 1)));
            for (u32 i = 0; i < warp; i++) index += found_by[i];
            if (match && index < TILE) list[index] = slot;
            // The first that found no room is where the next tile starts.
            if (match && index == TILE) resume = slot;
            u32 found = 0;
            for (u32 i = 0; i < WARPS; i++) found += found_by[i];
            count = min_u32(count + found, TILE);
            __syncthreads();
            next = resume;
            __syncthreads();
        }
        if (count > 0) multiply_tile<Tile>(a, blockIdx.x * TILE, rows, count, buffers);
    }
}

EVG_KERNEL(expert_matmul_tiled_f32, EVG_BOUNDS(TILE_THREADS))
(const u8* w, u32 type, u32 experts, u32 out, u32 in, const int* ids, u32 tokens, u32 used, const char* x, u64 x_stride0,
 u64 x_stride1, char* y, u64 y_stride0, u64 y_stride1, const char*, u64, u64, const u8* more,
 u32 more_experts) {
    evg_begin();
    EVG_DYNAMIC_SHARED(u32, buffers);
    const SlotRows rows = {nullptr, used, x, {x_stride0, x_stride1}, nullptr, {0, 0}, y, {y_stride0, y_stride1}};
    multiply_experts<FloatTile>(matrix(w, type, out, in), experts, ids, tokens * used, rows, buffers, more, more_experts);
}

EVG_KERNEL(expert_matmul_tiled_q8, EVG_BOUNDS(TILE_THREADS))
(const u8* w, u32 type, u32 experts, u32 out, u32 in, const int* ids, u32 tokens, u32 used, const char* x, u64 x_stride0,
 u64 x_stride1, char* y, u64 y_stride0, u64 y_stride1, const char* scales, u64 scales_stride0, u64 scales_stride1,
 const u8* more, u32 more_experts) {
    evg_begin();
    EVG_DYNAMIC_SHARED(u32, buffers);
    const SlotRows rows = {nullptr, used, x,  {x_stride0, x_stride1}, scales, {scales_stride0, scales_stride1},
                           y,       {y_stride0, y_stride1}};
    multiply_experts<EightTile>(matrix(w, type, out, in), experts, ids, tokens * used, rows, buffers, more, more_experts);
}
