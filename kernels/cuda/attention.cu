// Attention over a cache, one block a key head and a few queries of it (rows: tokens times heads of the group), which share
// every read of keys and values.
//
// Keys are taken in tiles that start at multiples of TILE, whatever the block: a query's result does not depend on the
// queries beside it. Per tile: eight lanes a key give the scores of all rows; a warp a row turns them into weights; then
// threads own pairs of columns and take every n-th four keys. The parts of a column are summed at the end, in order.
#include "cache.cuh"

#define THREADS 256
#define TILE 128u
#define STAGED 576u
#define MAX_ROWS 8

struct Inputs {
    const char *q, *k, *v, *positions, *sinks;
    char* out;
    u64 q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head;
    u32 tokens, heads, kv_heads, d, dv, capacity, window, ring;
    float scale, softcap;
};

struct Shared {
    float4 scores[MAX_ROWS][TILE / 4];
    float4 queries[MAX_ROWS][STAGED / 4];
    float2 parts[MAX_ROWS][THREADS];
    // Each row's query: staged, or where it lies.
    const char* sources[MAX_ROWS];
    float tops[MAX_ROWS], sums[MAX_ROWS], factors[MAX_ROWS];
};

// Rows of a block and what they see.
struct Rows {
    u32 token, tokens, head, heads;
    EVG_DEVICE u32 count() const { return tokens * heads; }
    EVG_DEVICE u32 t(u32 row) const { return token + row / heads; }
    EVG_DEVICE u32 h(u32 row) const { return head + row % heads; }
};

struct Range {
    u32 first, end;
};

static EVG_DEVICE Range visible(const Inputs& in, u32 t) {
    const int position = at<int>(in.positions, 0)[t];
    if (position < 0 || (in.ring != 1 && u32(position) >= in.capacity)) evg_fault("position outside the cache");
    const u32 end = u32(position) + 1;
    return {in.window == 0 || end < in.window ? 0 : end - in.window, end};
}

// Columns c and c + 1; the second is 0 past the end.
template <u32 TY> static EVG_DEVICE float2 load_pair(const char* row, u32 c, u32 dv, bool aligned) {
    if (aligned && c + 1 < dv) {
        if (TY == TYPE_F32) return *at<float2>(row, 4ull * c);
        const u32 bits = *at<u32>(row, 2ull * c);
        return TY == TYPE_F16 ? half2_to_float2(bits) : bf162_to_float2(bits);
    }
    return make_float2(element<TY>(row, c), c + 1 < dv ? element<TY>(row, c + 1) : 0.0f);
}

static EVG_DEVICE void add_value(float2& sum, float weight, float2 x, bool guard) {
    const bool seen = weight != 0.0f || !guard;
    sum.x = fmaf(weight, seen ? x.x : 0.0f, sum.x);
    sum.y = fmaf(weight, seen ? x.y : 0.0f, sum.y);
}

template <u32 TY, int ROWS> static EVG_DEVICE void attend(const Inputs& in, Shared& shared, const Rows rows, u32 kv_head) {
    const u32 count = rows.count(), thread = threadIdx.x, bytes = u32(sizeof(typename Element<TY>::type));
    // Of all rows together, and what every row sees.
    Range any = {0xFFFFFFFFu, 0}, all = {0, 0xFFFFFFFFu};
#pragma unroll 1
    for (u32 i = 0; i < rows.tokens; i++) {
        const Range range = visible(in, rows.token + i);
        any = {min_u32(any.first, range.first), max_u32(any.end, range.end)};
        all = {max_u32(all.first, range.first), min_u32(all.end, range.end)};
    }
    const char *keys = in.k + kv_head * in.k_head, *values = in.v + kv_head * in.v_head;
    const bool staged = in.d <= STAGED;
    if (staged) {
#pragma unroll 1
        for (u32 i = thread; i < ROWS * STAGED; i += THREADS) {
            const u32 row = i / STAGED, c = i % STAGED;
            const bool there = row < count && c < in.d;
            reinterpret_cast<float*>(shared.queries[row])[c] =
                there ? at<float>(in.q, rows.t(row) * in.q_stride + rows.h(row) * in.q_head)[c] : 0.0f;
        }
    }
    if (thread < ROWS) {
        const u32 row = min_u32(thread, count - 1);
        shared.sources[thread] = staged ? reinterpret_cast<const char*>(shared.queries[thread])
                                        : in.q + rows.t(row) * in.q_stride + rows.h(row) * in.q_head;
    }
    const bool wide_keys = staged && aligned16(keys) && aligned16(in.k_stride);
    const bool wide_values = (reinterpret_cast<u64>(values) | in.v_stride) % (2 * bytes) == 0;

    for (u32 column = 0; column < in.dv; column += 2 * THREADS) {
        const u32 pairs = min_u32(THREADS, ceil_div(in.dv - column, 2u)), groups = min_u32(THREADS / pairs, TILE / 4);
        const u32 group = thread / pairs, c = column + 2 * (thread % pairs);
        float2 sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = make_float2(0.0f, 0.0f);
        if (thread < ROWS) shared.tops[thread] = -infinity(), shared.sums[thread] = 0.0f;
        __syncthreads();

        for (u32 start = any.first / TILE * TILE; start < any.end; start += TILE) {
            // Scores.
            const u32 part = thread % 8;
#pragma unroll 1
            for (u32 j = thread / 8; j < TILE; j += THREADS / 8) {
                const u32 position = start + j;
                float dot[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) dot[r] = 0.0f;
                if (position >= any.first && position < any.end) {
                    const char* key = keys + (in.ring == 1 ? position % in.capacity : position) * in.k_stride;
                    u32 done = 0;
                    if (wide_keys) {
                        done = in.d / 8 * 8;
#pragma unroll 1
                        for (u32 i = 8 * part; i < done; i += 64) {
                            float x[8];
                            load8<TY>(key + i * bytes, x);
#pragma unroll
                            for (int r = 0; r < ROWS; r++) {
                                const float4 a = shared.queries[r][i / 4], b = shared.queries[r][i / 4 + 1];
                                dot[r] = fmaf(a.x, x[0], fmaf(a.y, x[1], fmaf(a.z, x[2], fmaf(a.w, x[3], dot[r]))));
                                dot[r] = fmaf(b.x, x[4], fmaf(b.y, x[5], fmaf(b.z, x[6], fmaf(b.w, x[7], dot[r]))));
                            }
                        }
                    }
#pragma unroll 1
                    for (u32 i = done + part; i < in.d; i += 8) {
                        const float x = element<TY>(key, i);
#pragma unroll
                        for (int r = 0; r < ROWS; r++) dot[r] = fmaf(*at<float>(shared.sources[r], 4ull * i), x, dot[r]);
                    }
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float score = warp_reduce<Sum>(dot[r], 8);
                    if (part == u32(r)) reinterpret_cast<float*>(shared.scores[r])[j] = score;
                }
            }
            __syncthreads();
            // Weights.
#pragma unroll 1
            for (u32 r = warp_id(); r < ROWS; r += THREADS / 32) {
                float* scores = reinterpret_cast<float*>(shared.scores[r]);
                const Range range = r < count ? visible(in, rows.t(r)) : Range{0, 0};
                float top = -infinity(), total = 0.0f;
#pragma unroll 1
                for (u32 j = lane_id(); j < TILE; j += 32) {
                    const u32 position = start + j;
                    float score = -infinity();
                    if (position >= range.first && position < range.end) {
                        score = scores[j] * in.scale;
                        if (in.softcap > 0.0f) score = in.softcap * tanhf(score / in.softcap);
                    }
                    scores[j] = score;
                    top = fmaxf(top, score);
                }
                const float old = shared.tops[r];
                top = fmaxf(warp_max(top), old);
                // Nothing to see so far: weights of zero.
                const bool none = top == -infinity();
#pragma unroll 2
                for (u32 j = lane_id(); j < TILE; j += 32) {
                    const float weight = none ? 0.0f : expf(scores[j] - top);
                    scores[j] = weight;
                    total += weight;
                }
                total = warp_sum(total);
                __syncwarp();
                if (lane_id() == 0) {
                    const float factor = old == -infinity() ? 0.0f : expf(old - top);
                    shared.sums[r] = shared.sums[r] * factor + total;
                    shared.tops[r] = top;
                    shared.factors[r] = factor;
                }
            }
            __syncthreads();
            // Values.
            if (group < groups) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) sum[r] = make_float2(sum[r].x * shared.factors[r], sum[r].y * shared.factors[r]);
                // A row that does not see a key must not meet its value, which may be no number.
                const bool guard = start < all.first || start + TILE > all.end;
#pragma unroll 1
                for (u32 j = 4 * group; j < TILE; j += 4 * groups) {
                    float2 x[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 position = start + j + i;
                        x[i] = make_float2(0.0f, 0.0f);
                        if (position >= any.first && position < any.end)
                            x[i] = load_pair<TY>(values + (in.ring == 1 ? position % in.capacity : position) * in.v_stride, c, in.dv, wide_values);
                    }
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        const float4 w = shared.scores[r][j / 4];
                        add_value(sum[r], w.x, x[0], guard), add_value(sum[r], w.y, x[1], guard);
                        add_value(sum[r], w.z, x[2], guard), add_value(sum[r], w.w, x[3], guard);
                    }
                }
            }
            __syncthreads();
        }

#pragma unroll
        for (int r = 0; r < ROWS; r++) shared.parts[r][thread] = sum[r];
        __syncthreads();
#pragma unroll 1
        for (u32 i = thread; i < count * pairs; i += THREADS) {
            const u32 r = i / pairs, pair = i % pairs, first = column + 2 * pair;
            float2 total = shared.parts[r][pair];
#pragma unroll 1
            for (u32 g = 1; g < groups; g++) {
                total.x += shared.parts[r][g * pairs + pair].x;
                total.y += shared.parts[r][g * pairs + pair].y;
            }
            float denominator = shared.sums[r], factor = 1.0f;
            if (in.sinks) {
                const float sink = at<float>(in.sinks, 0)[rows.h(r)], top = fmaxf(shared.tops[r], sink);
                factor = expf(shared.tops[r] - top);
                denominator = denominator * factor + expf(sink - top);
            }
            factor /= denominator;
            float* to = at<float>(in.out, rows.t(r) * in.out_stride + rows.h(r) * in.out_head);
            to[first] = total.x * factor;
            if (first + 1 < in.dv) to[first + 1] = total.y * factor;
        }
        __syncthreads();
    }
}

template <u32 TY> static EVG_DEVICE void attend(const Inputs& in, Shared& shared, const Rows rows, u32 kv_head) {
    if (rows.count() <= 4)
        attend<TY, 4>(in, shared, rows, kv_head);
    else
        attend<TY, 8>(in, shared, rows, kv_head);
}

// The grid is (parts of the tokens, key heads, parts of a key head's group); a block takes at most MAX_ROWS rows.
EVG_KERNEL(attention, EVG_BOUNDS(THREADS))(const char* q, u64 q_stride, u64 q_head, const char* k, u64 k_stride, u64 k_head, const char* v,
    u64 v_stride, u64 v_head, u32 ty, const char* positions, const char* sinks, char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads,
    u32 kv_heads, u32 d, u32 dv, u32 capacity, u32 window, u32 ring, float scale, float softcap, char* codes, u64 codes_outer, u64 codes_inner,
    char* scales, u64 scales_outer, u64 scales_inner) {
    evg_begin();
    // A kernel of its own makes codes of what this one writes.
    (void)codes, (void)codes_outer, (void)codes_inner, (void)scales, (void)scales_outer, (void)scales_inner;
    __shared__ Shared shared;
    const Inputs in = {q, k, v, positions, sinks, out, q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head, tokens, heads,
        kv_heads, d, dv, capacity, window, ring, scale, softcap};
    const u32 group = heads / kv_heads, some_tokens = ceil_div(tokens, gridDim.x), some_heads = ceil_div(group, gridDim.z);
    const u32 token = blockIdx.x * some_tokens, head = blockIdx.z * some_heads;
    if (token >= tokens || head >= group) return;
    for (u32 kv_head = blockIdx.y; kv_head < kv_heads; kv_head += gridDim.y) {
        const Rows rows = {token, min_u32(some_tokens, tokens - token), kv_head * group + head, min_u32(some_heads, group - head)};
        if (rows.count() > MAX_ROWS) evg_fault("more rows a block than it has room for");
        if (ty == TYPE_F32)
            attend<TYPE_F32>(in, shared, rows, kv_head);
        else if (ty == TYPE_F16)
            attend<TYPE_F16>(in, shared, rows, kv_head);
        else
            attend<TYPE_BF16>(in, shared, rows, kv_head);
    }
}
