// `matmul` with few tokens of eight-bit activations, a kernel for each type of block and for up to 8 tokens.
// Grid: groups of rows, groups of tokens.
#include "matvec.cuh"

#define MATVEC(TOKENS, NAME)                                                                                       \
    EVG_KERNEL(matvec_q8_t##TOKENS##_##NAME, EVG_BOUNDS(MATVEC_THREADS))                                            \
    (const u8* w, u32, u32 out, u32 in, const char* x, u32 tokens, u64 x_stride, char* y, u64 y_stride, const char* scales, \
     u64 scales_stride) { evg_begin();                                                                                          \
        const u32 first = blockIdx.y * TOKENS;                                                                     \
        const Rows rows = {x + first * x_stride, x_stride, scales + first * scales_stride, scales_stride};         \
        MatVec<TYPE_##NAME, Eights, TOKENS>::run(w, out, in, rows, min_u32(tokens - first, TOKENS),                \
                                                 y + first * y_stride, y_stride);                                  \
    }
#define EIGHT(NAME) MATVEC(8, NAME)
FOR_BLOCK_TYPES(EIGHT)
