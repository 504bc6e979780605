// `expert_matmul` with few tokens: each slot's expert is multiplied on its own. Grid: groups of rows, slots.
#pragma once

#include "matvec.cuh"

// The chosen expert's weights; a bad id is a fault. Without ids slot k of a token takes expert k: `head_matmul`.
EVG_DEVICE const u8* expert_of_slot(const u8* w, const int* ids, u32 k, u32 experts, u64 expert_bytes) {
    const int id = ids ? ids[blockIdx.y] : int(k);
    if (u32(id) >= experts) evg_fault("expert id out of range");
    return w + u64(u32(id)) * expert_bytes;
}

#define EXPERT_MATVEC(FORM, NAME, BLOCK, BYTES, ...)                                                                     \
    EVG_KERNEL(expert_matvec_##FORM##_##NAME, EVG_BOUNDS(MATVEC_THREADS))                                                \
    (const u8* w, u32, u32 experts, u32 out, u32 in, const int* ids, u32, u32 used, const char* x, u64 x_stride0,         \
     u64 x_stride1, char* y, u64 y_stride0, u64 y_stride1, const char* scales, u64 scales_stride0, u64 scales_stride1) { evg_begin();  \
        const u32 t = blockIdx.y / used, k = blockIdx.y % used;                                                          \
        const Rows rows = {x + t * x_stride0 + k * x_stride1, 0, scales + t * scales_stride0 + k * scales_stride1, 0};    \
        w = expert_of_slot(w, ids, k, experts, u64(out) * (in / BLOCK) * BYTES);                                            \
        __VA_ARGS__::run(w, out, in, rows, 1, y + t * y_stride0 + k * y_stride1, 0);                                     \
    }
