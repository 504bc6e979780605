// What queries see of a cache, for attention with its scores in memory, and tiles of its products.
#pragma once
#include "cache.cuh"

// A cache of `capacity` rows; a ring has position p in row p mod capacity.
struct Sight {
    u32 capacity, window, ring;

    // The row where the query at a position has its own key.
    EVG_DEVICE u32 own(int position) const {
        if (position < 0 || (ring != 1 && u32(position) >= capacity)) evg_fault("position outside the cache");
        return ring == 1 ? u32(position) % capacity : u32(position);
    }

    // Whether the query at a position, whose own row that is, sees a row.
    EVG_DEVICE bool sees(u32 position, u32 own, u32 row) const {
        if (row > own && ring != 1) return false;
        const u32 distance = row <= own ? own - row : own + capacity - row;
        return distance <= position && (window == 0 || distance < window);
    }
};

// Rows from the first that some query sees to the last.
struct Range {
    u32 first, end;
};

// Of the queries of the tokens `token .. token + count`. All threads get the same.
EVG_DEVICE Range seen_by(const Sight& sight, const char* positions, u32 token, u32 count) {
    Range range = {0xFFFFFFFFu, 0};
    bool wraps = false;
#pragma unroll 4
    for (u32 t = token; t < token + count; t++) {
        const u32 position = u32(at<int>(positions, 0)[t]), own = sight.own(int(position));
        const u32 back = sight.window == 0 ? position : min_u32(position, sight.window - 1);
        range.first = min_u32(range.first, own - min_u32(own, back));
        range.end = max_u32(range.end, own + 1);
        wraps = wraps || back > own;
    }
    return wraps ? Range{0, sight.capacity} : range;
}

// Tiles of products: 64 columns by 64 queries, 32 terms of their sums at a time, 128 threads of which each has 8 columns of
// 4 queries. Sums run in the order of terms, whatever else is in the tile.
#define SIDE 64u
#define TERMS 32u
#define TILE_THREADS 128u
// Distance of two terms in shared memory, in floats: keeps 16-byte loads aligned and spreads stores over banks.
#define PITCH 68u

struct Terms {
    float a[TERMS * PITCH], b[TERMS * PITCH];
};

// Where a thread stands in a tile: columns 4 * m and on, and 32 + 4 * m and on; queries 4 * n and on.
struct Stand {
    u32 m, n;
    EVG_DEVICE Stand() : m(threadIdx.x % 8), n(threadIdx.x / 8) {}
    EVG_DEVICE u32 column(u32 half) const { return 4 * m + 32 * half; }
};

// `sums[i][j] += a[k][column i] * b[k][query j]`, over all terms k; `guard`: a factor of 0 in b meets nothing.
template <bool GUARD> EVG_DEVICE void multiply_terms(const Terms& terms, const Stand& stand, float (&sums)[8][4]) {
    const float *a = terms.a + 4 * stand.m, *b = terms.b + 4 * stand.n;
#pragma unroll 8
    for (u32 k = 0; k < TERMS; k++) {
        const float4 low = *reinterpret_cast<const float4*>(a + k * PITCH), high = *reinterpret_cast<const float4*>(a + k * PITCH + 32);
        const float4 four = *reinterpret_cast<const float4*>(b + k * PITCH);
        const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const float y[4] = {four.x, four.y, four.z, four.w};
        for (u32 i = 0; i < 8; i++)
            for (u32 j = 0; j < 4; j++) sums[i][j] = fmaf(GUARD && y[j] == 0.0f ? 0.0f : x[i], y[j], sums[i][j]);
    }
}

// Eight numbers of a row from its element i on, zeros from `count` on. `wide`: the row is aligned to 16 bytes.
template <u32 TY> EVG_DEVICE void bring8(const char* row, u32 i, u32 count, bool wide, float* to) {
    if (wide && i + 8 <= count) {
        load8<TY>(row + u64(i) * sizeof(typename Element<TY>::type), to);
    } else {
#pragma unroll 1
        for (u32 j = 0; j < 8; j++) to[j] = i + j < count ? element<TY>(row, i + j) : 0.0f;
    }
}

// Calls `f.of<TY>()` for the type of a cache.
template <class F> EVG_DEVICE void with_cache_type(u32 ty, F& f) {
    if (ty == TYPE_F32)
        f.template of<TYPE_F32>();
    else if (ty == TYPE_F16)
        f.template of<TYPE_F16>();
    else
        f.template of<TYPE_BF16>();
}
