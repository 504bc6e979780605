// `matmul` with one token of floats, a kernel for each type. Grid: groups of rows, tokens.
#include "matvec.cuh"
#include "matvec_floats.cuh"

#define MATVEC(TOKENS, NAME, ...)                                                                                      \
    EVG_KERNEL(matvec_f32_t##TOKENS##_##NAME, EVG_BOUNDS(MATVEC_THREADS))                                               \
    (const u8* w, u32, u32 out, u32 in, const char* x, u32 tokens, u64 x_stride, char* y, u64 y_stride, const char*, u64) { evg_begin(); \
        const u32 first = blockIdx.y * TOKENS;                                                                         \
        const Rows rows = {x + first * x_stride, x_stride, nullptr, 0};                                                \
        __VA_ARGS__::run(w, out, in, rows, min_u32(tokens - first, TOKENS), y + first * y_stride, y_stride);           \
    }
#define ONE(NAME) MATVEC(1, NAME, MatVec<TYPE_##NAME, Floats, 1>)
#define ONE_FLOATS(NAME) MATVEC(1, NAME, MatVecFloats<TYPE_##NAME, 1>)
FOR_BLOCK_TYPES(ONE)
FOR_FLOAT_TYPES(ONE_FLOATS)
