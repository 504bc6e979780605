// scores[t, h, c] = scale * q[t, h] . k[c, h / group], capped, for the rows that the query sees; minus infinity for the others.
// Keys that no query of a block sees are not read.
#include "sight.cuh"

#define THREADS 256
#define ROWS 8u
#define KEYS 128u
#define STAGED 576u

struct Inputs {
    const char *q, *k, *positions;
    char* scores;
    u64 q_stride, q_head, k_stride, k_head, s_stride, s_head;
    u32 ty, tokens, heads, kv_heads, d;
    Sight sight;
    float scale, softcap;

    // Queries of a key head come token by token.
    EVG_DEVICE u32 group() const { return heads / kv_heads; }
    EVG_DEVICE u32 queries() const { return tokens * group(); }
    EVG_DEVICE const char* query(u32 row, u32 kv_head) const { return q + row / group() * q_stride + (kv_head * group() + row % group()) * q_head; }
    EVG_DEVICE float* out(u32 row, u32 kv_head) const {
        return at<float>(scores, row / group() * s_stride + (kv_head * group() + row % group()) * s_head);
    }
    EVG_DEVICE u32 position(u32 row) const { return u32(at<int>(positions, 0)[row / group()]); }
    EVG_DEVICE Range seen(u32 first, u32 count) const {
        const u32 token = first / group();
        return seen_by(sight, positions, token, (first + count - 1) / group() - token + 1);
    }
    EVG_DEVICE float score(float dot) const {
        const float score = dot * scale;
        return softcap > 0.0f ? softcap * tanhf(score / softcap) : score;
    }
};

// Up to eight queries with 128 keys: eight lanes a key.
struct Few {
    const Inputs& in;
    float (&staged)[ROWS][STAGED];
    u32 first, count, kv_head, start;

    template <u32 TY> EVG_DEVICE void of() const {
        const Range range = in.seen(first, count);
        const char* keys = in.k + kv_head * in.k_head;
        const bool all_staged = in.d <= STAGED, wide = all_staged && aligned16(keys) && aligned16(in.k_stride);
        const u32 part = threadIdx.x % 8, bytes = u32(sizeof(typename Element<TY>::type));
        const u32 row = first + min_u32(part, count - 1), position = in.position(row), own = in.sight.own(int(position));
        float* const to = in.out(row, kv_head);
        if (all_staged && range.first < start + KEYS && range.end > start) {
#pragma unroll 1
            for (u32 i = threadIdx.x; i < ROWS * STAGED; i += THREADS) {
                const u32 r = i / STAGED, c = i % STAGED;
                staged[r][c] = r < count && c < in.d ? at<float>(in.query(first + r, kv_head), 0)[c] : 0.0f;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (u32 j = threadIdx.x / 8; j < KEYS; j += THREADS / 8) {
            const u32 c = start + j;
            float dot[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) dot[r] = 0.0f;
            if (c >= range.first && c < range.end) {
                const char* key = keys + c * in.k_stride;
                u32 done = 0;
                if (wide) {
                    done = in.d / 8 * 8;
#pragma unroll 2
                    for (u32 i = 8 * part; i < done; i += 64) {
                        float x[8];
                        load8<TY>(key + i * bytes, x);
#pragma unroll
                        for (u32 r = 0; r < ROWS; r++) {
                            const float4 a = *reinterpret_cast<const float4*>(&staged[r][i]), b = *reinterpret_cast<const float4*>(&staged[r][i + 4]);
                            dot[r] = fmaf(a.x, x[0], fmaf(a.y, x[1], fmaf(a.z, x[2], fmaf(a.w, x[3], dot[r]))));
                            dot[r] = fmaf(b.x, x[4], fmaf(b.y, x[5], fmaf(b.z, x[6], fmaf(b.w, x[7], dot[r]))));
                        }
                    }
                }
#pragma unroll 1
                for (u32 i = done + part; i < in.d; i += 8) {
                    const float x = element<TY>(key, i);
#pragma unroll
                    for (u32 r = 0; r < ROWS; r++) {
                        const float* query = all_staged ? staged[r] : at<float>(in.query(first + min_u32(r, count - 1), kv_head), 0);
                        dot[r] = fmaf(query[i], x, dot[r]);
                    }
                }
            }
            float mine = 0.0f;
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                const float sum = warp_reduce<Sum>(dot[r], 8);
                if (part == r) mine = sum;
            }
            if (part < count && c < in.sight.capacity) to[c] = in.sight.sees(position, own, c) ? in.score(mine) : -infinity();
        }
        // The next queries take the same place.
        __syncthreads();
    }
};

// The grid is (parts of the keys, parts of the queries of a key head, key heads).
EVG_KERNEL(attention_scores, EVG_BOUNDS(THREADS))(const char* q, u64 q_stride, u64 q_head, const char* k, u64 k_stride, u64 k_head, u32 ty,
    const char* positions, char* scores, u64 s_stride, u64 s_head, u32 tokens, u32 heads, u32 kv_heads, u32 d, u32 capacity, u32 window, u32 ring,
    float scale, float softcap) {
    evg_begin();
    __shared__ __align__(16) float staged[ROWS][STAGED];
    const Inputs in = {q, k, positions, scores, q_stride, q_head, k_stride, k_head, s_stride, s_head, ty, tokens, heads, kv_heads, d,
        {capacity, window, ring}, scale, softcap};
    for (u32 kv_head = blockIdx.z; kv_head < kv_heads; kv_head += gridDim.z)
        for (u32 first = blockIdx.y * ROWS; first < in.queries(); first += gridDim.y * ROWS)
            for (u32 start = blockIdx.x * KEYS; start < capacity; start += gridDim.x * KEYS) {
                Few few = {in, staged, first, min_u32(ROWS, in.queries() - first), kv_head, start};
                with_cache_type(ty, few);
            }
}

// 64 queries with 64 keys: half of the threads bring a key's terms each, the others a query's.
struct Many {
    const Inputs& in;
    Terms (&terms)[2];
    u32 first, count, kv_head, start;

    template <u32 TY> EVG_DEVICE void bring(const char* row, bool wide, u32 term, float* to) const {
#pragma unroll
        for (u32 i = 0; i < TERMS; i += 8) {
            float x[8] = {};
            if (row) bring8<TY>(row, term + i, in.d, wide, x);
#pragma unroll
            for (u32 j = 0; j < 8; j++) to[(i + j) * PITCH] = x[j];
        }
    }

    // The type matters where keys are brought only: one copy of the rest does for all.
    EVG_DEVICE void multiply() const {
        const Range range = in.seen(first, count);
        const Stand stand;
        float sums[8][4];
        for (u32 i = 0; i < 8; i++)
            for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
        if (range.first < start + SIDE && range.end > start) {
            const u32 own = threadIdx.x % SIDE, key = start + own;
            const bool query = threadIdx.x >= SIDE;
            const char* row = nullptr;
            if (query && own < count) row = in.query(first + own, kv_head);
            if (!query && key >= range.first && key < range.end) row = in.k + kv_head * in.k_head + key * in.k_stride;
            const bool wide = aligned16(row);
            const u32 ty = query ? TYPE_F32 : in.ty;
            const u32 steps = ceil_div(in.d, TERMS);
#pragma unroll 1
            for (u32 step = 0; step <= steps; step++) {
                // Some terms are brought while those before are multiplied.
                if (step < steps) {
                    float* to = (query ? terms[step % 2].b : terms[step % 2].a) + own;
                    if (ty == TYPE_F32)
                        bring<TYPE_F32>(row, wide, step * TERMS, to);
                    else if (ty == TYPE_F16)
                        bring<TYPE_F16>(row, wide, step * TERMS, to);
                    else
                        bring<TYPE_BF16>(row, wide, step * TERMS, to);
                }
                if (step > 0) multiply_terms<false>(terms[(step - 1) % 2], stand, sums);
                __syncthreads();
            }
        }
#pragma unroll 1
        for (u32 j = 0; j < 4; j++) {
            const u32 row = 4 * stand.n + j;
            if (row >= count) break;
            const u32 position = in.position(first + row), own = in.sight.own(int(position));
            float* const out = in.out(first + row, kv_head);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 c = start + stand.column(half);
                float s[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    // Which of the four queries is not known when this is compiled; registers must be.
                    const float* of = sums[4 * half + i];
                    const float dot = j == 0 ? of[0] : j == 1 ? of[1] : j == 2 ? of[2] : of[3];
                    s[i] = in.sight.sees(position, own, c + i) ? in.score(dot) : -infinity();
                }
                if (c + 4 <= in.sight.capacity && aligned16(out + c)) {
                    *reinterpret_cast<float4*>(out + c) = make_float4(s[0], s[1], s[2], s[3]);
                } else {
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (c + i < in.sight.capacity) out[c + i] = s[i];
                }
            }
        }
        __syncthreads();
    }
};

EVG_KERNEL(attention_scores_tiled, EVG_BOUNDS(128))(const char* q, u64 q_stride, u64 q_head, const char* k, u64 k_stride, u64 k_head, u32 ty,
    const char* positions, char* scores, u64 s_stride, u64 s_head, u32 tokens, u32 heads, u32 kv_heads, u32 d, u32 capacity, u32 window, u32 ring,
    float scale, float softcap) {
    evg_begin();
    __shared__ __align__(16) Terms terms[2];
    const Inputs in = {q, k, positions, scores, q_stride, q_head, k_stride, k_head, s_stride, s_head, ty, tokens, heads, kv_heads, d,
        {capacity, window, ring}, scale, softcap};
    for (u32 kv_head = blockIdx.z; kv_head < kv_heads; kv_head += gridDim.z)
        for (u32 first = blockIdx.y * SIDE; first < in.queries(); first += gridDim.y * SIDE)
            for (u32 start = blockIdx.x * SIDE; start < capacity; start += gridDim.x * SIDE) {
                const Many many = {in, terms, first, min_u32(SIDE, in.queries() - first), kv_head, start};
                many.multiply();
            }
}
