// `expert_matmul` with few tokens: each slot's expert is multiplied on its own. Grid: groups of rows, slots.
#pragma once

#include "matvec.cuh"

// The chosen expert's weights, among the first or among those `more`; none for id -1, and a bad id is a fault. Without ids slot k of a
// token takes expert k: `head_matmul`.
EVG_DEVICE const u8* expert_of_slot(const u8* w, const int* ids, u32 k, u32 experts, u64 expert_bytes, const u8* more, u32 more_experts) {
    const int id = ids ? ids[blockIdx.y] : int(k);
    if (id == -1) return nullptr;
    if (u32(id) >= experts + more_experts) evg_fault("expert id out of range");
    return u32(id) < experts ? w + u64(u32(id)) * expert_bytes : more + u64(u32(id) - experts) * expert_bytes;
}

// What a slot without an expert gets.
EVG_DEVICE void no_expert(char* y, u32 out) {
    const u64 step = u64(gridDim.x) * block_threads();
    for (u64 row = u64(blockIdx.x) * block_threads() + thread_rank(); row < out; row += step) at<float>(y, 0)[row] = 0.0f;
}

#define EXPERT_MATVEC(FORM, NAME, BLOCK, BYTES, ...)                                                                     \
    EVG_KERNEL(expert_matvec_##FORM##_##NAME, EVG_BOUNDS(MATVEC_THREADS))                                                \
    (const u8* w, u32, u32 experts, u32 out, u32 in, const int* ids, u32, u32 used, const char* x, u64 x_stride0,         \
     u64 x_stride1, char* y, u64 y_stride0, u64 y_stride1, const char* scales, u64 scales_stride0, u64 scales_stride1,      \
     const u8* more, u32 more_experts) { evg_begin();                                                                      \
        const u32 t = blockIdx.y / used, k = blockIdx.y % used;                                                          \
        const Rows rows = {x + t * x_stride0 + k * x_stride1, 0, scales + t * scales_stride0 + k * scales_stride1, 0};    \
        char* to = y + t * y_stride0 + k * y_stride1;                                                                    \
        w = expert_of_slot(w, ids, k, experts, u64(out) * (in / BLOCK) * BYTES, more, more_experts);                      \
        if (!w) return no_expert(to, out);                                                                               \
        __VA_ARGS__::run(w, out, in, rows, 1, to, 0);                                                                    \
    }
