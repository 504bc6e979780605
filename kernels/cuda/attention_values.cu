// out[t, h] = sum over c of p[t, h, c] * v[c, h / group], over the rows that the query sees. Weights of others do not matter, and
// rows that no query of a block sees are not read.
#include "sight.cuh"

#define THREADS 256
#define ROWS 8
#define COLUMNS 16u
#define SPAN 256u
// Pairs of columns of a block, and threads that share a pair.
#define PAIRS (COLUMNS / 2)
#define SHARERS (THREADS / PAIRS)

struct Inputs {
    const char *p, *v, *positions;
    char* out;
    u64 p_stride, p_head, v_stride, v_head, out_stride, out_head;
    u32 tokens, heads, kv_heads, dv;
    Sight sight;

    // Queries of a key head come token by token.
    EVG_DEVICE u32 group() const { return heads / kv_heads; }
    EVG_DEVICE u32 queries() const { return tokens * group(); }
    EVG_DEVICE const float* weights(u32 row, u32 kv_head) const {
        return at<float>(p, row / group() * p_stride + (kv_head * group() + row % group()) * p_head);
    }
    EVG_DEVICE float* to(u32 row, u32 kv_head) const {
        return at<float>(out, row / group() * out_stride + (kv_head * group() + row % group()) * out_head);
    }
    EVG_DEVICE u32 position(u32 row) const { return u32(at<int>(positions, 0)[row / group()]); }
    EVG_DEVICE Range seen(u32 first, u32 count) const {
        const u32 token = first / group();
        return seen_by(sight, positions, token, (first + count - 1) / group() - token + 1);
    }
};

struct Room {
    float weights[SPAN][ROWS];
    float2 parts[ROWS][THREADS];
    u32 position[ROWS], own[ROWS];
};

// Up to eight queries, 16 columns: threads share pairs of columns, and take every n-th row of the cache.
struct Few {
    const Inputs& in;
    Room& room;
    u32 first, count, kv_head, column;

    template <u32 TY> EVG_DEVICE void of() const {
        const Range range = in.seen(first, count);
        if (threadIdx.x < count) {
            room.position[threadIdx.x] = in.position(first + threadIdx.x);
            room.own[threadIdx.x] = in.sight.own(int(room.position[threadIdx.x]));
        }
        const u32 pair = threadIdx.x % PAIRS, sharer = threadIdx.x / PAIRS, c = column + 2 * pair;
        const u32 bytes = u32(sizeof(typename Element<TY>::type));
        const char* values = in.v + kv_head * in.v_head;
        const bool wide = (reinterpret_cast<u64>(values) | in.v_stride) % (2 * bytes) == 0 && c + 1 < in.dv;
        float2 sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = make_float2(0.0f, 0.0f);
        __syncthreads();
#pragma unroll 1
        for (u32 start = range.first / SPAN * SPAN; start < range.end; start += SPAN) {
            const u32 row = start + threadIdx.x;
#pragma unroll 1
            for (u32 r = 0; r < ROWS; r++) {
                const bool sees = r < count && row < in.sight.capacity && in.sight.sees(room.position[r], room.own[r], row);
                room.weights[threadIdx.x][r] = sees ? in.weights(first + r, kv_head)[row] : 0.0f;
            }
            __syncthreads();
            if (c < in.dv) {
#pragma unroll 4
                for (u32 i = sharer; i < SPAN; i += SHARERS) {
                    const u32 row = start + i;
                    if (row < range.first || row >= range.end) continue;
                    const char* from = values + row * in.v_stride;
                    float2 x;
                    if (wide) {
                        if (TY == TYPE_F32) {
                            x = *at<float2>(from, 4ull * c);
                        } else {
                            const u32 bits = *at<u32>(from, 2ull * c);
                            x = TY == TYPE_F16 ? half2_to_float2(bits) : bf162_to_float2(bits);
                        }
                    } else {
                        x = make_float2(element<TY>(from, c), c + 1 < in.dv ? element<TY>(from, c + 1) : 0.0f);
                    }
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        // What is not seen may be no number.
                        const float weight = room.weights[i][r];
                        sum[r].x = fmaf(weight, weight == 0.0f ? 0.0f : x.x, sum[r].x);
                        sum[r].y = fmaf(weight, weight == 0.0f ? 0.0f : x.y, sum[r].y);
                    }
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) room.parts[r][threadIdx.x] = sum[r];
        __syncthreads();
        if (threadIdx.x < count * PAIRS) {
            const u32 r = threadIdx.x / PAIRS, of = threadIdx.x % PAIRS, first_column = column + 2 * of;
            float2 total = room.parts[r][of];
#pragma unroll 4
            for (u32 s = 1; s < SHARERS; s++) {
                total.x += room.parts[r][s * PAIRS + of].x;
                total.y += room.parts[r][s * PAIRS + of].y;
            }
            float* to = in.to(first + r, kv_head);
            if (first_column < in.dv) to[first_column] = total.x;
            if (first_column + 1 < in.dv) to[first_column + 1] = total.y;
        }
        __syncthreads();
    }
};

// The grid is (parts of the columns, parts of the queries of a key head, key heads).
EVG_KERNEL(attention_values, EVG_BOUNDS(THREADS))(const char* p, u64 p_stride, u64 p_head, const char* v, u64 v_stride, u64 v_head, u32 ty,
    const char* positions, char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads, u32 kv_heads, u32 dv, u32 capacity, u32 window, u32 ring) {
    evg_begin();
    __shared__ Room room;
    const Inputs in = {p, v, positions, out, p_stride, p_head, v_stride, v_head, out_stride, out_head, tokens, heads, kv_heads, dv,
        {capacity, window, ring}};
    for (u32 kv_head = blockIdx.z; kv_head < kv_heads; kv_head += gridDim.z)
        for (u32 first = blockIdx.y * ROWS; first < in.queries(); first += gridDim.y * ROWS)
            for (u32 column = blockIdx.x * COLUMNS; column < dv; column += gridDim.x * COLUMNS) {
                Few few = {in, room, first, min_u32(ROWS, in.queries() - first), kv_head, column};
                with_cache_type(ty, few);
            }
}

struct Tile {
    Terms terms[2];
    u32 position[SIDE], own[SIDE];
};

// 64 queries, 64 columns: half of the threads bring half a row of values each, the others a query's weights.
struct Many {
    const Inputs& in;
    Tile& tile;
    u32 first, count, kv_head, column;

    template <u32 TY> EVG_DEVICE void bring_values(const Range& range, u32 start, Terms& terms) const {
        const u32 term = threadIdx.x / 2, row = start + term, from = 32 * (threadIdx.x % 2);
        const bool there = row >= range.first && row < range.end;
        const char* values = in.v + kv_head * in.v_head + row * in.v_stride;
        const bool wide = aligned16(values) && (column + from) * sizeof(typename Element<TY>::type) % 16 == 0;
        float* to = terms.a + term * PITCH + from;
#pragma unroll
        for (u32 i = 0; i < 32; i += 8) {
            float x[8] = {};
            if (there) bring8<TY>(values, column + from + i, in.dv, wide, x);
            *reinterpret_cast<float4*>(to + i) = make_float4(x[0], x[1], x[2], x[3]);
            *reinterpret_cast<float4*>(to + i + 4) = make_float4(x[4], x[5], x[6], x[7]);
        }
    }

    EVG_DEVICE void bring_weights(u32 start, Terms& terms) const {
        const u32 own = threadIdx.x % SIDE;
        float* to = terms.b + own;
        const float* from = own < count ? in.weights(first + own, kv_head) : nullptr;
        const u32 there = from && start < in.sight.capacity ? min_u32(TERMS, in.sight.capacity - start) : 0;
        const u32 position = tile.position[own], row = tile.own[own];
#pragma unroll
        for (u32 i = 0; i < TERMS; i += 4) {
            float x[4] = {};
            if (i + 4 <= there && aligned16(from + start + i)) {
                const float4 four = *reinterpret_cast<const float4*>(from + start + i);
                x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
            } else {
                for (u32 j = 0; j < 4; j++)
                    if (i + j < there) x[j] = from[start + i + j];
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) to[(i + j) * PITCH] = in.sight.sees(position, row, start + i + j) ? x[j] : 0.0f;
        }
    }

    // The type matters where values are brought only: one copy of the rest does for all.
    EVG_DEVICE void multiply(u32 ty) const {
        const Range range = in.seen(first, count);
        if (threadIdx.x < SIDE) {
            const u32 row = min_u32(threadIdx.x, count - 1);
            tile.position[threadIdx.x] = in.position(first + row);
            tile.own[threadIdx.x] = in.sight.own(int(tile.position[threadIdx.x]));
        }
        // Rows before this one are seen by all.
        u32 all = 0;
        if (in.sight.window == 0) {
            all = 0xFFFFFFFFu;
#pragma unroll 4
            for (u32 t = first / in.group(); t <= (first + count - 1) / in.group(); t++) all = min_u32(all, u32(at<int>(in.positions, 0)[t]) + 1);
        }
        const Stand stand;
        float sums[8][4];
        for (u32 i = 0; i < 8; i++)
            for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
        __syncthreads();
        const u32 begin = range.first / TERMS, end = ceil_div(range.end, TERMS);
#pragma unroll 1
        for (u32 step = begin; step <= end; step++) {
            // Some terms are brought while those before are multiplied.
            if (step < end) {
                Terms& terms = tile.terms[step % 2];
                if (threadIdx.x >= SIDE)
                    bring_weights(step * TERMS, terms);
                else if (ty == TYPE_F32)
                    bring_values<TYPE_F32>(range, step * TERMS, terms);
                else if (ty == TYPE_F16)
                    bring_values<TYPE_F16>(range, step * TERMS, terms);
                else
                    bring_values<TYPE_BF16>(range, step * TERMS, terms);
            }
            if (step > begin) {
                // What is not seen may be no number.
                if (step * TERMS <= all)
                    multiply_terms<false>(tile.terms[(step - 1) % 2], stand, sums);
                else
                    multiply_terms<true>(tile.terms[(step - 1) % 2], stand, sums);
            }
            __syncthreads();
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 row = 4 * stand.n + j;
            if (row >= count) break;
            float* const to = in.to(first + row, kv_head);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 c = column + stand.column(i / 4) + i % 4;
                if (c < in.dv) to[c] = sums[i][j];
            }
        }
        __syncthreads();
    }
};

EVG_KERNEL(attention_values_tiled, EVG_BOUNDS(128))(const char* p, u64 p_stride, u64 p_head, const char* v, u64 v_stride, u64 v_head, u32 ty,
    const char* positions, char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads, u32 kv_heads, u32 dv, u32 capacity, u32 window, u32 ring) {
    evg_begin();
    __shared__ __align__(16) Tile tile;
    const Inputs in = {p, v, positions, out, p_stride, p_head, v_stride, v_head, out_stride, out_head, tokens, heads, kv_heads, dv,
        {capacity, window, ring}};
    for (u32 kv_head = blockIdx.z; kv_head < kv_heads; kv_head += gridDim.z)
        for (u32 first = blockIdx.y * SIDE; first < in.queries(); first += gridDim.y * SIDE)
            for (u32 column = blockIdx.x * SIDE; column < dv; column += gridDim.x * SIDE) {
                const Many many = {in, tile, first, min_u32(SIDE, in.queries() - first), kv_head, column};
                many.multiply(ty);
            }
}
