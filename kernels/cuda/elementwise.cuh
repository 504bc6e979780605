// Elementwise work on rows: blocks take pieces of `PIECE` columns, four columns a thread, in 16-byte accesses where all
// tensors allow it. Each element is read before it is written by the same thread, so the output may be an input.
#pragma once
#include "codes.cuh"

#define PIECE 1024u

// out[r, c] = f(x[r, c], y[r, c]) over [rows, cols]; strides in bytes; `rows` are (outer, inner) pairs.
struct Row3 {
    const char* base;
    u64 outer, inner;
    EVG_DEVICE const float* row(u32 a, u32 b) const { return at<float>(base, a * outer + b * inner); }
    EVG_DEVICE bool wide() const { return aligned16(base) && aligned16(outer) && aligned16(inner); }
};

// As `each_element` does, for rows of whole groups: the results go to `out`, where there is one, and as codes to `codes`. A warp
// has whole groups, and all of its lanes go on together.
template <class F>
EVG_DEVICE void each_group(Row3 x, Row3 y, Row3 out, const CodeRows& codes, u32 rows, u32 slots, u32 cols, F f) {
    const u32 pieces = ceil_div(cols, PIECE), threads = block_threads();
    const bool wide = x.wide() && y.wide() && out.wide();
    for (u64 item = blockIdx.x; item < u64(rows) * slots * pieces; item += gridDim.x) {
        const u32 first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        const u64 row = item / pieces;
        const u32 a = u32(row / slots), b = u32(row % slots), lane = threadIdx.x % 32;
        const float *xs = x.row(a, b), *ys = y.row(a, b);
        float* to = out.base ? const_cast<float*>(out.row(a, b)) : nullptr;
        const Codes coded = codes.row(a, b);
        if (wide) {
            for (u32 i = first + 4 * threadIdx.x; i - 4 * lane < end; i += 4 * threads) {
                const bool mine = i < end;
                float z[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (mine) {
                    const float4 p = *reinterpret_cast<const float4*>(xs + i), q = *reinterpret_cast<const float4*>(ys + i);
                    z[0] = f(p.x, q.x), z[1] = f(p.y, q.y), z[2] = f(p.z, q.z), z[3] = f(p.w, q.w);
                    if (to) *reinterpret_cast<float4*>(to + i) = make_float4(z[0], z[1], z[2], z[3]);
                }
                store_codes(coded, i, z, mine);
            }
        } else {
            for (u32 i = first + threadIdx.x; i < end; i += threads) {
                const float z[1] = {f(xs[i], ys[i])};
                if (to) to[i] = z[0];
                store_codes(coded, i, z, true);
            }
        }
    }
}

template <class F> EVG_DEVICE void each_element(Row3 x, Row3 y, Row3 out, u32 rows, u32 slots, u32 cols, F f) {
    const u32 pieces = ceil_div(cols, PIECE), threads = block_threads();
    const bool wide = x.wide() && y.wide() && out.wide();
    for (u64 item = blockIdx.x; item < u64(rows) * slots * pieces; item += gridDim.x) {
        const u32 first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        const u64 row = item / pieces;
        const u32 a = u32(row / slots), b = u32(row % slots);
        const float *xs = x.row(a, b), *ys = y.row(a, b);
        float* to = const_cast<float*>(out.row(a, b));
        u32 c = first;
        if (wide) {
            const u32 whole = first + (end - first) / 4 * 4;
            for (u32 i = first + 4 * threadIdx.x; i < whole; i += 4 * threads) {
                const float4 p = *reinterpret_cast<const float4*>(xs + i), q = *reinterpret_cast<const float4*>(ys + i);
                *reinterpret_cast<float4*>(to + i) = make_float4(f(p.x, q.x), f(p.y, q.y), f(p.z, q.z), f(p.w, q.w));
            }
            c = whole;
        }
        for (c += threadIdx.x; c < end; c += threads) to[c] = f(xs[c], ys[c]);
    }
}
