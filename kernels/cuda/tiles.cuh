// Products of a weight with many tokens: tiles of 64 rows by 64 tokens, a unit of columns at a time through shared memory.
//
// Half of the 128 threads decode one row's unit each, the other half bring one token's. Then each thread multiplies 8 rows
// with 4 tokens. Two buffers, so that a barrier a unit is enough. An element is summed unit after unit.
#pragma once

#include "activations.cuh"

#define TILE 64u
#define TILE_THREADS 128u
// Distance of two columns in shared memory, in words: keeps 16-byte loads aligned and spreads stores over banks.
#define TILE_PITCH 68u

// A weight matrix whose blocks may lie anywhere.
struct Matrix {
    const u8* w;
    u32 type;
    u32 out, in;
    u64 row_bytes;
};

EVG_DEVICE Matrix matrix(const u8* w, u32 type, u32 out, u32 in) {
    u32 elements, bytes;
    block_shape(type, elements, bytes);
    return {w, type, out, in, u64(in / elements) * bytes};
}

// Where the threads that multiply stand in a tile: rows 4 * m and on, and 32 + 4 * m and on; tokens 4 * n and on.
struct Place {
    u32 m, n;
    EVG_DEVICE Place() : m(threadIdx.x % 8), n(threadIdx.x / 8) {}
    EVG_DEVICE u32 row(u32 i) const { return 4 * m + i % 4 + 32 * (i / 4); }
};

// Floats: a weight's unit is decoded exactly.
struct FloatTile {
    static constexpr u32 BUFFER_WORDS = 2 * UNIT * TILE_PITCH;
    float sums[8][4];

    EVG_DEVICE FloatTile() {
        for (u32 i = 0; i < 8; i++)
            for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }

    static EVG_DEVICE void bring_weight(const Matrix& a, u32 row, u32 unit, u32* buffer, u32 place) {
        float* to = reinterpret_cast<float*>(buffer) + place;
        const u8* from = a.w + row * a.row_bytes;
        if (row >= a.out) {
            for (u32 j = 0; j < UNIT; j++) to[j * TILE_PITCH] = 0.0f;
        } else if (a.type == TYPE_F32 || a.type == TYPE_F16 || a.type == TYPE_BF16) {
#pragma unroll 4
            for (u32 j = 0; j < UNIT; j++) {
                const u32 i = unit * UNIT + j;
                to[j * TILE_PITCH] = i < a.in ? float_value(a.type, from, i) : 0.0f;
            }
        } else {
            Unpack decode = {from, unit};
            with_block_type(a.type, decode);
            for (u32 j = 0; j < UNIT; j++) to[j * TILE_PITCH] = unit_value(decode.unit, decode.zero, j);
        }
    }

    static EVG_DEVICE void bring_input(const char* x, const char*, u32 in, u32 unit, u32* buffer, u32 place) {
        float* to = reinterpret_cast<float*>(buffer) + UNIT * TILE_PITCH + place;
        const float* from = reinterpret_cast<const float*>(x) + unit * UNIT;
        const u32 count = x ? min_u32(in - unit * UNIT, UNIT) : 0;
        if (count == UNIT && aligned16(from)) {
            for (u32 q = 0; q < UNIT / 4; q++) {
                const float4 v = reinterpret_cast<const float4*>(from)[q];
                float* column = to + 4 * q * TILE_PITCH;
                column[0] = v.x, column[TILE_PITCH] = v.y, column[2 * TILE_PITCH] = v.z, column[3 * TILE_PITCH] = v.w;
            }
        } else {
#pragma unroll 4
            for (u32 j = 0; j < UNIT; j++) to[j * TILE_PITCH] = j < count ? from[j] : 0.0f;
        }
    }

    EVG_DEVICE void multiply(const u32* buffer, const Place& place) {
        const float* w = reinterpret_cast<const float*>(buffer) + 4 * place.m;
        const float* x = reinterpret_cast<const float*>(buffer) + UNIT * TILE_PITCH + 4 * place.n;
#pragma unroll 8
        for (u32 k = 0; k < UNIT; k++) {
            const float4 low = *reinterpret_cast<const float4*>(w + k * TILE_PITCH);
            const float4 high = *reinterpret_cast<const float4*>(w + k * TILE_PITCH + 32);
            const float4 token = *reinterpret_cast<const float4*>(x + k * TILE_PITCH);
            const float a[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const float b[4] = {token.x, token.y, token.z, token.w};
            for (u32 i = 0; i < 8; i++)
                for (u32 j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
    }
};

// Eight-bit activations: codes stay codes, and their dot products are integers.
struct EightTile {
    // Eight words of codes, then the factors and offsets of both halves; eight words of activations, then their scale and
    // the scaled sums of both halves.
    static constexpr u32 BUFFER_WORDS = (12 + 11) * TILE_PITCH;
    float sums[8][4];

    EVG_DEVICE EightTile() {
        for (u32 i = 0; i < 8; i++)
            for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }

    static EVG_DEVICE void bring_weight(const Matrix& a, u32 row, u32 unit, u32* buffer, u32 place) {
        u32* to = buffer + place;
        if (row >= a.out) {
            for (u32 j = 0; j < 12; j++) to[j * TILE_PITCH] = 0;
        } else {
            Unpack values = {a.w + row * a.row_bytes, unit};
            with_block_type(a.type, values);
            for (u32 j = 0; j < 8; j++) to[j * TILE_PITCH] = values.unit.code[j];
            for (u32 h = 0; h < 2; h++) {
                // Codes are multiplied as they stand, so what they are too great by goes into the offset.
                const float factor = values.unit.a[h];
                to[(8 + h) * TILE_PITCH] = __float_as_uint(factor);
                to[(10 + h) * TILE_PITCH] = __float_as_uint(fmaf(float(-values.zero), factor, values.unit.b[h]));
            }
        }
    }

    static EVG_DEVICE void bring_input(const char* x, const char* scales, u32, u32 unit, u32* buffer, u32 place) {
        u32* to = buffer + 12 * TILE_PITCH + place;
        if (!x) {
            for (u32 j = 0; j < 11; j++) to[j * TILE_PITCH] = 0;
            return;
        }
        const u8* from = reinterpret_cast<const u8*>(x) + unit * UNIT;
        u32 words[8];
        if (aligned16(from))
            load_words<8, 16>(from, words);
        else
            load_words<8, 1>(from, words);
        int halves[2] = {0, 0};
        for (u32 j = 0; j < 8; j++) {
            to[j * TILE_PITCH] = words[j];
            halves[j / 4] = dp4a(int(words[j]), 0x01010101, halves[j / 4]);
        }
        const float d = reinterpret_cast<const float*>(scales)[2 * unit];
        to[8 * TILE_PITCH] = __float_as_uint(d);
        to[9 * TILE_PITCH] = __float_as_uint(d * float(halves[0]));
        to[10 * TILE_PITCH] = __float_as_uint(d * float(halves[1]));
    }

    static EVG_DEVICE void four(const u32* from, u32* to) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
    static EVG_DEVICE void four(const u32* from, float* to) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }

    EVG_DEVICE void multiply(const u32* buffer, const Place& place) {
        const u32* w = buffer + 4 * place.m;
        const u32* x = buffer + 12 * TILE_PITCH + 4 * place.n;
        float d[4];
        four(x + 8 * TILE_PITCH, d);
#pragma unroll 1
        for (u32 h = 0; h < 2; h++) {
            int dots[8][4];
            for (u32 i = 0; i < 8; i++)
                for (u32 j = 0; j < 4; j++) dots[i][j] = 0;
#pragma unroll
            for (u32 k = 4 * h; k < 4 * h + 4; k++) {
                u32 a[8], b[4];
                four(w + k * TILE_PITCH, a);
                four(w + k * TILE_PITCH + 32, a + 4);
                four(x + k * TILE_PITCH, b);
                for (u32 i = 0; i < 8; i++)
                    for (u32 j = 0; j < 4; j++) dots[i][j] = dp4a(int(a[i]), int(b[j]), dots[i][j]);
            }
            float factor[8], offset[8], half_sums[4];
            four(w + (8 + h) * TILE_PITCH, factor);
            four(w + (8 + h) * TILE_PITCH + 32, factor + 4);
            four(w + (10 + h) * TILE_PITCH, offset);
            four(w + (10 + h) * TILE_PITCH + 32, offset + 4);
            four(x + (9 + h) * TILE_PITCH, half_sums);
            for (u32 i = 0; i < 8; i++)
                for (u32 j = 0; j < 4; j++) {
                    const float sum = fmaf(factor[i] * d[j], float(dots[i][j]), sums[i][j]);
                    sums[i][j] = fmaf(offset[i], half_sums[j], sum);
                }
        }
    }
};

// Rows `first_row .. + 64` times `count` tokens (at most 64). `Tokens` says where token i's input, scales and output are.
// All threads of the block; `buffers` is room for two.
template <class Tile, class Tokens> EVG_DEVICE void multiply_tile(const Matrix& a, u32 first_row, const Tokens& tokens, u32 count, u32* buffers) {
    const u32 own = threadIdx.x % TILE;
    const bool weights = threadIdx.x < TILE;
    const char* x = !weights && own < count ? tokens.input(own) : nullptr;
    const char* scales = !weights && own < count ? tokens.scales(own) : nullptr;
    auto bring = [&](u32 unit) {
        u32* buffer = buffers + unit % 2 * Tile::BUFFER_WORDS;
        if (weights)
            Tile::bring_weight(a, first_row + own, unit, buffer, own);
        else
            Tile::bring_input(x, scales, a.in, unit, buffer, own);
    };
    const u32 units = ceil_div(a.in, UNIT);
    const Place place;
    Tile tile;
    // The tile before may still be read.
    __syncthreads();
#pragma unroll 1
    for (u32 unit = 0; unit <= units; unit++) {
        // One unit is brought while the one before is multiplied.
        if (unit < units) bring(unit);
        if (unit > 0) tile.multiply(buffers + (unit - 1) % 2 * Tile::BUFFER_WORDS, place);
        __syncthreads();
    }
    for (u32 j = 0; j < 4; j++) {
        const u32 t = 4 * place.n + j;
        if (t >= count) break;
        float* y = reinterpret_cast<float*>(tokens.output(t)) + first_row;
        for (u32 i = 0; i < 8; i++)
            if (first_row + place.row(i) < a.out) y[place.row(i)] = tile.sums[i][j];
    }
}
