// `matmul` with many tokens: one block a tile. Grid: tiles of rows, tiles of tokens.
#include "tiles.cuh"

struct TokenRows {
    Rows rows;
    char* y;
    u64 y_stride;
    EVG_DEVICE const char* input(u32 t) const { return rows.x + t * rows.x_stride; }
    EVG_DEVICE const char* scales(u32 t) const { return rows.scales + t * rows.scales_stride; }
    EVG_DEVICE char* output(u32 t) const { return y + t * y_stride; }
};

template <class Tile> EVG_DEVICE void multiply_tokens(const Matrix& a, const TokenRows& all, u32 tokens, u32* buffers) {
    const u64 first = u64(blockIdx.y) * TILE;
    TokenRows own = all;
    own.rows.x += first * all.rows.x_stride;
    own.rows.scales += first * all.rows.scales_stride;
    own.y += first * all.y_stride;
    multiply_tile<Tile>(a, blockIdx.x * TILE, own, min_u32(tokens - u32(first), TILE), buffers);
}

EVG_KERNEL(matmul_tiled_f32, EVG_BOUNDS(TILE_THREADS))
(const u8* w, u32 type, u32 out, u32 in, const char* x, u32 tokens, u64 x_stride, char* y, u64 y_stride, const char*, u64) {
    evg_begin();
    EVG_DYNAMIC_SHARED(u32, buffers);
    const TokenRows rows = {{x, x_stride, nullptr, 0}, y, y_stride};
    multiply_tokens<FloatTile>(matrix(w, type, out, in), rows, tokens, buffers);
}

EVG_KERNEL(matmul_tiled_q8, EVG_BOUNDS(TILE_THREADS))
(const u8* w, u32 type, u32 out, u32 in, const char* x, u32 tokens, u64 x_stride, char* y, u64 y_stride, const char* scales,
 u64 scales_stride) {
    evg_begin();
    EVG_DYNAMIC_SHARED(u32, buffers);
    const TokenRows rows = {{x, x_stride, scales, scales_stride}, y, y_stride};
    multiply_tokens<EightTile>(matrix(w, type, out, in), rows, tokens, buffers);
}
