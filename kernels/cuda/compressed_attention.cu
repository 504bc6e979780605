#include "cache.cuh"

#define KEYS 64u
#define COLUMNS 4u

// Where the keys of a token are: those of its window, then its entries.
struct Keys {
    const char *ring, *cache;
    const int* chosen;
    u64 ring_stride, cache_stride;
    u32 capacity, start, own, seen;

    EVG_DEVICE const char* row(u32 i) const {
        if (i < own) return ring + u64((start + i) % capacity) * ring_stride;
        const u32 entry = chosen ? u32(chosen[i - own]) : i - own;
        if (entry >= seen) evg_fault("an entry that is not seen was chosen");
        return cache + u64(entry) * cache_stride;
    }
};

struct Heads {
    const float* q;
    const char* sinks;
    char* out;
    u64 out_head;
    u32 first, count, d;
    float scale;
};

// ROWS heads over `count` keys, KEYS at a time: scores by warps, each a key for all heads, then values by threads, each some
// columns of all heads.
template <u32 TY, u32 ROWS> static EVG_DEVICE void attend(const Keys& keys, u32 count, const Heads& heads) {
    __shared__ float scores[ROWS][KEYS], factors[ROWS], tops[ROWS], sums[ROWS];
    const u32 d = heads.d, threads = block_threads(), lane = lane_id(), warp = warp_id();
    float values[ROWS][COLUMNS] = {};
    if (threadIdx.x < ROWS) tops[threadIdx.x] = -infinity(), sums[threadIdx.x] = 0.0f;
    for (u32 first = 0; first < count; first += KEYS) {
        const u32 tile = min_u32(KEYS, count - first);
        for (u32 k = warp; k < tile; k += block_warps()) {
            const char* key = keys.row(first + k);
            float dots[ROWS] = {};
            for (u32 c = lane; c < d; c += 32) {
                const float x = element<TY>(key, c);
                for (u32 r = 0; r < ROWS; r++) dots[r] = fmaf(heads.q[r * d + c], x, dots[r]);
            }
            for (u32 r = 0; r < ROWS; r++) {
                const float dot = warp_sum(dots[r]);
                if (lane == 0) scores[r][k] = heads.scale * dot;
            }
        }
        __syncthreads();
        for (u32 r = warp; r < ROWS; r += block_warps()) {
            const float a = lane < tile ? scores[r][lane] : -infinity(), b = lane + 32 < tile ? scores[r][lane + 32] : -infinity();
            const float before = tops[r], top = fmaxf(before, warp_max(fmaxf(a, b)));
            const float p = lane < tile ? expf(a - top) : 0.0f, o = lane + 32 < tile ? expf(b - top) : 0.0f;
            scores[r][lane] = p, scores[r][lane + 32] = o;
            const float sum = warp_sum(p + o);
            __syncwarp();
            if (lane == 0) {
                const float factor = expf(before - top);
                factors[r] = factor, tops[r] = top;
                sums[r] = fmaf(sums[r], factor, sum);
            }
        }
        __syncthreads();
        for (u32 r = 0; r < ROWS; r++)
            for (u32 i = 0; i < COLUMNS; i++) values[r][i] *= factors[r];
        for (u32 k = 0; k < tile; k++) {
            const char* key = keys.row(first + k);
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) {
                const u32 c = threadIdx.x + i * threads;
                if (c >= d) break;
                const float x = element<TY>(key, c);
                for (u32 r = 0; r < ROWS; r++) values[r][i] = fmaf(scores[r][k], x, values[r][i]);
            }
        }
        __syncthreads();
    }
    for (u32 r = 0; r < ROWS && r < heads.count; r++) {
        float factor = 1.0f, sum = sums[r];
        if (heads.sinks) {
            const float sink = at<float>(heads.sinks, 0)[heads.first + r], top = fmaxf(tops[r], sink);
            factor = expf(tops[r] - top);
            sum = fmaf(sum, factor, expf(sink - top));
        }
        factor /= sum;
        float* out = at<float>(heads.out, r * heads.out_head);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            const u32 c = threadIdx.x + i * threads;
            if (c < d) out[c] = values[r][i] * factor;
        }
    }
    __syncthreads();
}

template <u32 TY> static EVG_DEVICE void attend_rows(const Keys& keys, u32 count, const Heads& heads, u32 rows) {
    if (rows == 2)
        attend<TY, 2>(keys, count, heads);
    else
        attend<TY, 8>(keys, count, heads);
}

// Attention of heads over the window's keys and compressed entries, which are values too. Blocks take a token and `rows` (2 or
// 8) heads, whose queries lie in shared memory.
EVG_KERNEL(compressed_attention, EVG_BOUNDS(256))(const char* q, u64 q_stride, u64 q_head, const char* ring, u32 ty, u32 capacity, u64 ring_stride,
    const char* cache, u32 entries, u64 cache_stride, const char* chosen, u32 most, u64 chosen_stride, const char* positions,
    const char* sinks, char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads, u32 d, u32 window, u32 ratio, u32 ringed, u32 rows,
    float scale) {
    evg_begin();
    EVG_DYNAMIC_SHARED(float, queries);
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const int position = at<int>(positions, 0)[t];
        if (position < 0 || (ringed == 0 && u32(position) >= capacity)) evg_fault("position outside the cache");
        const u32 end = u32(position) + 1, start = end > window ? end - window : 0, seen = min_u32(end / ratio, entries);
        const int* list = chosen ? at<int>(chosen, t * chosen_stride) : nullptr;
        const Keys keys = {ring, cache, list, ring_stride, cache_stride, capacity, start, end - start, seen};
        const u32 count = end - start + (chosen ? min_u32(seen, most) : seen);
        for (u32 first = blockIdx.y * rows; first < heads; first += gridDim.y * rows) {
            const u32 some = min_u32(rows, heads - first);
            for (u32 i = threadIdx.x; i < rows * d; i += block_threads())
                queries[i] = i / d < some ? at<float>(q, t * q_stride + (first + i / d) * q_head)[i % d] : 0.0f;
            __syncthreads();
            const Heads part = {queries, sinks, out + t * out_stride + first * out_head, out_head, first, some, d, scale};
            if (ty == TYPE_F32)
                attend_rows<TYPE_F32>(keys, count, part, rows);
            else if (ty == TYPE_F16)
                attend_rows<TYPE_F16>(keys, count, part, rows);
            else
                attend_rows<TYPE_BF16>(keys, count, part, rows);
        }
    }
}
