// Attention of a few tokens over a cache of 16-bit floats, spread over the keys.
//
// A block has one token, one key head, up to 8 or 16 of its query heads (rows) and a slice of the keys. How many slices there
// are follows the length of the text, which is read here; blocks past the last one leave. A text of one slice is done by one
// block a head; else each slice leaves its greatest score, its sum and its weighted values in memory, and the blocks that
// come last, so many as help, put them together, each some columns, in the order of the slices. They wait for each other:
// there are fewer of them than places for blocks on the device.
//
// Products are those of tensor cores, in which a float takes two rows: its nearest 16-bit float, and what that leaves, with
// 22 bits together. Of 16 rows of a product 8 are thus 8 heads' upper halves, the others their lower halves.
#include "cache.cuh"
#include "codes.cuh"
#include "mma.cuh"

#define THREADS 256
#define WARPS 8u
// Keys at a time.
#define TILE 128u
// Elements of a key that four neighbouring lanes take at a time, 16 bytes each.
#define CHUNK 32u
// Columns of values that a warp takes.
#define COLUMNS 64u
// Most elements of a query, in 128s.
#define MOST_QUARTERS 5u
// Most slices of a text.
#define MOST_SLICES 256u
// Weights are at most this: their lower halves are no subnormal numbers then, but for the least.
#define WEIGHT 4096.0f

struct Inputs {
    const char *q, *k, *v, *positions, *sinks;
    char* out;
    u64 q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head;
    u32 tokens, heads, kv_heads, d, dv, capacity, window, ring;
    float scale, softcap;
    CodeRows codes;
    // Slices: parts `[slots, slices, rows, dv]`, then `[slots, slices, rows]` greatest scores with sums.
    float* room;
    u32* counters;
    u32 slices, least, helpers;
};

// Which keys a block has.
struct Slice {
    u32 number, all, first, count;
};

// What a float is in two halves.
struct Halves {
    u16 upper, lower;
    EVG_DEVICE explicit Halves(float x) : upper(float_to_half(x)), lower(float_to_half(x - half_to_float(upper))) {}
};
static EVG_DEVICE u32 pair(u16 low, u16 high) { return u32(low) | u32(high) << 16; }

// A power of two that takes a row's greatest magnitude to 256 and on; `back` undoes it.
struct PowerOfTwo {
    float to, back;
    EVG_DEVICE explicit PowerOfTwo(float most) {
        const u32 exponent = __float_as_uint(most) >> 23;
        const u32 bounded = max_u32(exponent, 16);
        const bool number = exponent < 255;
        to = number ? __uint_as_float((262 - bounded) << 23) : 1.0f;
        back = number ? __uint_as_float((bounded - 8) << 23) : 1.0f;
    }
};

template <u32 SETS> struct Block {
    static constexpr u32 ROWS = 8 * SETS;
    const Inputs& in;
    // Dynamic shared memory: queries, `[chunk][set][upper rows, lower rows][32]` halves, then scores, `[part][row][pitch]`. At the end
    // other things lie there.
    uint4* queries;
    float* scores;
    // Of rows.
    float *tops, *sums, *factors, *scales;
    u32 token, kv_head, head, rows, warp, g, t;
    u32 start;

    EVG_DEVICE u32 slot() const { return blockIdx.y * gridDim.z + blockIdx.z; }

    // The place of key `i` of the slice.
    EVG_DEVICE u32 place(u32 i) const {
        const u32 place = start + i;
        return place >= in.capacity ? place - in.capacity : place;
    }
    EVG_DEVICE const char* key(u32 i) const { return in.k + kv_head * in.k_head + place(i) * in.k_stride; }
    EVG_DEVICE const char* value(u32 i) const { return in.v + kv_head * in.v_head + place(i) * in.v_stride; }

    EVG_DEVICE void prefetch(u32 from, u32 count) const {
        const u32 lanes = THREADS, key_lines = in.d / 64 + 1, value_lines = in.v == in.k ? 0 : in.dv / 64 + 1;
        for (u32 i = threadIdx.x; i < count * key_lines; i += lanes)
            prefetch_line(key(from + i / key_lines) + min_u32(128 * (i % key_lines), 2 * in.d - 16));
        for (u32 i = threadIdx.x; i < count * value_lines; i += lanes)
            prefetch_line(value(from + i / value_lines) + min_u32(128 * (i % value_lines), 2 * in.dv - 16));
    }

    // A warp's queries, one of each set.
    struct Query {
        float4 x[SETS][MOST_QUARTERS];
    };
    EVG_DEVICE void load(Query& query) const {
        const u32 lane = lane_id();
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
            const u32 row = 8 * s + warp;
            const float* from = at<float>(in.q, token * in.q_stride + (head + row) * in.q_head);
#pragma unroll
            for (u32 i = 0; i < MOST_QUARTERS; i++) {
                const u32 e = 128 * i + 4 * lane;
                query.x[s][i] = row < rows && e < in.d ? *reinterpret_cast<const float4*>(from + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
    }
    EVG_DEVICE void stage(const Query& query) const {
        const u32 lane = lane_id();
        float most[SETS];
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
            most[s] = 0.0f;
#pragma unroll
            for (u32 i = 0; i < MOST_QUARTERS; i++) {
                const float4 x = query.x[s][i];
                most[s] = fmaxf(most[s], fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
            }
        }
        together<Max>(most);
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
            const PowerOfTwo power(most[s]);
            if (lane == 0) scales[8 * s + warp] = power.back * in.scale;
#pragma unroll
            for (u32 i = 0; i < MOST_QUARTERS; i++) {
                const u32 e = 128 * i + 4 * lane;
                const float4 x = query.x[s][i];
                const Halves a(x.x * power.to), b(x.y * power.to), c(x.z * power.to), d(x.w * power.to);
                if (e >= in.d) continue;
                uint2* to = reinterpret_cast<uint2*>(queries) + ((e / CHUNK * SETS + s) * 16 + warp) * 8 + e % CHUNK / 4;
                to[0] = make_uint2(pair(a.upper, b.upper), pair(c.upper, d.upper));
                to[64] = make_uint2(pair(a.lower, b.lower), pair(c.lower, d.lower));
            }
        }
    }

    // How the warps share a tile: groups of 16 keys by parts of the elements.
    struct Sharing {
        u32 groups, parts, pitch;
        EVG_DEVICE explicit Sharing(u32 count) {
            groups = count <= 16 ? 1 : count <= 32 ? 2 : count <= 64 ? 4 : 8;
            parts = WARPS / groups;
            pitch = 16 * groups + (groups == 1 ? 4 : 8);
        }
    };

    // What a lane takes of the warp's 16 keys at a time: four chunks of two keys.
    struct Keys {
        uint4 x[4][2];
    };
    EVG_DEVICE void load(u32 from, u32 count, const Sharing& sharing, u32 first, Keys& keys) const {
        const u32 i = 16 * (warp % sharing.groups) + g, chunks = in.d / CHUNK;
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            const bool there = i + 8 * n < count;
            const char* row = key(from + (there ? i + 8 * n : 0)) + 16 * t;
#pragma unroll
            for (u32 u = 0; u < 4; u++) {
                const u32 c = first + u * sharing.parts;
                keys.x[u][n] = there && c < chunks ? *reinterpret_cast<const uint4*>(row + 2 * CHUNK * c) : make_uint4(0, 0, 0, 0);
            }
        }
    }

    // `keys` are the warp's first.
    EVG_DEVICE void score(u32 from, u32 count, const Sharing& sharing, Keys& keys) const {
        const u32 group = warp % sharing.groups, part = warp / sharing.groups, chunks = in.d / CHUNK;
        if (16 * group >= count) return;
        float dots[SETS][2][4] = {};
#pragma unroll 1
        for (u32 first = part; first < chunks; first += 4 * sharing.parts) {
#pragma unroll
            for (u32 u = 0; u < 4; u++) {
                const u32 c = first + u * sharing.parts;
                if (c >= chunks) break;
#pragma unroll
                for (u32 s = 0; s < SETS; s++) {
                    const uint4* of = queries + ((c * SETS + s) * 16 + g) * 4 + t;
                    const uint4 upper = of[0], lower = of[32];
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        multiply_halves(dots[s][n], upper.x, lower.x, upper.y, lower.y, keys.x[u][n].x, keys.x[u][n].y);
                        multiply_halves(dots[s][n], upper.z, lower.z, upper.w, lower.w, keys.x[u][n].z, keys.x[u][n].w);
                    }
                }
            }
            if (first + 4 * sharing.parts < chunks) load(from, count, sharing, first + 4 * sharing.parts, keys);
        }
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                float* to = scores + (part * ROWS + 8 * s + g) * sharing.pitch + 16 * group + 8 * n + 2 * t;
                const float(&dot)[4] = dots[s][n];
                *reinterpret_cast<float2*>(to) = make_float2(dot[0] + dot[2], dot[1] + dot[3]);
            }
        }
    }

    // Scores to weights, a warp a row of each set: pairs of keys as (upper halves, lower halves), in the place of part 0.
    EVG_DEVICE void weigh(u32 count, const Sharing& sharing, bool first) const {
        const u32 lane = lane_id();
        float v[SETS][4], old[SETS], before[SETS], top[SETS], total[SETS];
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
            const u32 row = 8 * s + warp;
            const float* of = scores + row * sharing.pitch + 2 * lane;
            float2 sums_of[2] = {};
            // Keys behind the 64th have one part.
#pragma unroll
            for (u32 part = 0; part < WARPS; part++) {
                if (part >= sharing.parts || 2 * lane >= count) continue;
                const float2 more = *reinterpret_cast<const float2*>(of + part * ROWS * sharing.pitch);
                sums_of[0].x += more.x, sums_of[0].y += more.y;
            }
            if (64 + 2 * lane < count) sums_of[1] = *reinterpret_cast<const float2*>(of + 64);
#pragma unroll
            for (u32 p = 0; p < 2; p++) {
                const u32 k = 64 * p + 2 * lane;
                v[s][2 * p] = k < count ? capped(sums_of[p].x * scales[row]) : -infinity();
                v[s][2 * p + 1] = k + 1 < count ? capped(sums_of[p].y * scales[row]) : -infinity();
            }
            old[s] = first ? -infinity() : tops[row], before[s] = first ? 0.0f : sums[row];
            top[s] = fmaxf(fmaxf(v[s][0], v[s][1]), fmaxf(v[s][2], v[s][3]));
        }
        together<Max>(top);
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
            top[s] = fmaxf(old[s], top[s]);
            // Nothing to see so far: weights of zero.
            const bool none = top[s] == -infinity();
#pragma unroll
            for (u32 i = 0; i < 4; i++) v[s][i] = none ? 0.0f : expf(v[s][i] - top[s]);
            total[s] = (v[s][0] + v[s][1]) + (v[s][2] + v[s][3]);
#pragma unroll
            for (u32 p = 0; p < 2; p++) {
                const u32 k = 64 * p + 2 * lane;
                const Halves a(v[s][2 * p] * WEIGHT), b(v[s][2 * p + 1] * WEIGHT);
                if (k < 16 * sharing.groups)
                    *reinterpret_cast<uint2*>(scores + (8 * s + warp) * sharing.pitch + k) = make_uint2(pair(a.upper, b.upper), pair(a.lower, b.lower));
            }
        }
        together<Sum>(total);
        __syncwarp();
#pragma unroll
        for (u32 s = 0; s < SETS; s++) {
            const u32 row = 8 * s + warp;
            if (lane > 0) continue;
            const float factor = old[s] == -infinity() ? 0.0f : expf(old[s] - top[s]);
            tops[row] = top[s], factors[row] = factor, sums[row] = fmaf(before[s], factor, total[s]);
        }
    }
    // Several reductions of a warp, none of which waits for another.
    template <class Op> static EVG_DEVICE void together(float (&values)[SETS]) {
        for (int distance = 16; distance > 0; distance >>= 1) {
#pragma unroll
            for (u32 s = 0; s < SETS; s++) values[s] = Op::template of<float>(values[s], __shfl_xor_sync(FULL_WARP, values[s], distance));
        }
    }
    EVG_DEVICE float capped(float score) const { return in.softcap > 0.0f ? in.softcap * tanhf(score / in.softcap) : score; }

    // Four keys' values in eight columns.
    EVG_DEVICE void load(u32 from, u32 count, u32 step, u32 column, uint4 (&x)[4]) const {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 i = 16 * step + 4 * t + j;
            x[j] = i < count ? *reinterpret_cast<const uint4*>(value(from + i) + 2 * column) : make_uint4(0, 0, 0, 0);
        }
    }

    // Values of the keys of some steps of 16 by 64 columns. `x` are those of the warp's first step.
    EVG_DEVICE void add(u32 from, u32 count, u32 pitch, u32 column, u32 part, u32 parts, uint4 (&x)[4], float (&sum)[SETS][8][4]) const {
        const u32 steps = ceil_div(count, 16u);
#pragma unroll 1
        for (u32 step = part; step < steps; step += parts) {
            uint4 next[4];
            load(from, count, step + parts, column, next);
            uint4 weights[SETS];
#pragma unroll
            for (u32 s = 0; s < SETS; s++) weights[s] = *reinterpret_cast<const uint4*>(scores + (8 * s + g) * pitch + 16 * step + 4 * t);
            const u32 words[4][4] = {{x[0].x, x[0].y, x[0].z, x[0].w}, {x[1].x, x[1].y, x[1].z, x[1].w}, {x[2].x, x[2].y, x[2].z, x[2].w},
                {x[3].x, x[3].y, x[3].z, x[3].w}};
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 both = i % 2 == 0 ? 0x5410u : 0x7632u;
                const u32 b0 = __byte_perm(words[0][i / 2], words[1][i / 2], both), b1 = __byte_perm(words[2][i / 2], words[3][i / 2], both);
#pragma unroll
                for (u32 s = 0; s < SETS; s++) multiply_halves(sum[s][i], weights[s].x, weights[s].y, weights[s].z, weights[s].w, b0, b1);
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) x[j] = next[j];
        }
    }

    // A row's greatest score and sum to what its values are multiplied with.
    EVG_DEVICE float last_factor(u32 row, float top, float sum) const {
        float factor = 1.0f;
        if (in.sinks) {
            const float sink = at<float>(in.sinks, 0)[head + row], most = fmaxf(top, sink);
            factor = expf(top - most);
            sum = fmaf(sum, factor, expf(sink - most));
        }
        return factor / sum * (1.0f / WEIGHT);
    }

    template <u32 N> EVG_DEVICE void store(u32 row, u32 column, const float (&values)[N], bool mine) const {
        if (mine) {
            float4* to = reinterpret_cast<float4*>(at<float>(in.out, token * in.out_stride + (head + row) * in.out_head) + column);
#pragma unroll
            for (u32 i = 0; i < N / 4; i++) to[i] = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        }
        if (in.codes.asked()) store_codes(in.codes.row(token, head + row), column, values, mine);
    }

    EVG_DEVICE float* part_of(u32 slice, u32 row) const { return in.room + ((u64(slot()) * in.slices + slice) * ROWS + row) * in.dv; }
    EVG_DEVICE float2* stand_of(u32 slice, u32 row) const {
        const u64 parts = u64(in.tokens) * gridDim.z * in.slices * ROWS * in.dv;
        return reinterpret_cast<float2*>(in.room + parts) + (u64(slot()) * in.slices + slice) * ROWS + row;
    }

    EVG_DEVICE void attend(const Slice& slice, const Query& query) const {
        const u32 spread = in.dv / COLUMNS, parts = WARPS / spread, part = warp / spread, column = warp % spread * COLUMNS + 8 * g;
        float sum[SETS][8][4] = {};
        uint4 x[4];
        Keys keys;
        const Sharing own_first(min_u32(TILE, slice.count));
        load(0, min_u32(TILE, slice.count), own_first, warp / own_first.groups, keys);
        prefetch(0, min_u32(TILE, slice.count));
        stage(query);
        __syncthreads();
#pragma unroll 1
        for (u32 from = 0; from < slice.count; from += TILE) {
            const u32 left = slice.count - from, count = min_u32(TILE, left);
            if (left > TILE) prefetch(from + TILE, min_u32(TILE, left - TILE));
            const Sharing sharing(count);
            // What is known early is loaded early where there are registers for it.
            if (SETS > 1) load(from, count, part, column, x);
            if (from > 0) load(from, count, sharing, warp / sharing.groups, keys);
            score(from, count, sharing, keys);
            if (SETS == 1) load(from, count, part, column, x);
            __syncthreads();
            weigh(count, sharing, from == 0);
            __syncthreads();
            if (from > 0) {
#pragma unroll
                for (u32 s = 0; s < SETS; s++) {
                    const float factor = factors[8 * s + g];
#pragma unroll
                    for (u32 i = 0; i < 8; i++)
                        for (u32 j = 0; j < 4; j++) sum[s][i][j] *= factor;
                }
            }
            add(from, count, sharing.pitch, column, part, parts, x, sum);
            __syncthreads();
        }
        // Of a row, 16 neighbouring columns.
        float values[SETS][16];
#pragma unroll
        for (u32 s = 0; s < SETS; s++)
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                values[s][i] = sum[s][i][0] + sum[s][i][2];
                values[s][8 + i] = sum[s][i][1] + sum[s][i][3];
            }
        const u32 own = warp % spread * COLUMNS + 16 * t;
        if (parts > 1) {
            float* all = reinterpret_cast<float*>(queries);
            if (part > 0) {
#pragma unroll
                for (u32 s = 0; s < SETS; s++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        reinterpret_cast<float4*>(all + ((part - 1) * ROWS + 8 * s + g) * in.dv + own)[i] =
                            make_float4(values[s][4 * i], values[s][4 * i + 1], values[s][4 * i + 2], values[s][4 * i + 3]);
            }
            __syncthreads();
            if (part > 0 && slice.all == 1) return;
#pragma unroll 1
            for (u32 other = 1; other < parts && part == 0; other++) {
#pragma unroll
                for (u32 s = 0; s < SETS; s++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const float4 more = reinterpret_cast<const float4*>(all + ((other - 1) * ROWS + 8 * s + g) * in.dv + own)[i];
                        values[s][4 * i] += more.x, values[s][4 * i + 1] += more.y, values[s][4 * i + 2] += more.z, values[s][4 * i + 3] += more.w;
                    }
            }
        }
        if (slice.all == 1) {
#pragma unroll
            for (u32 s = 0; s < SETS; s++) {
                const u32 row = 8 * s + g;
                const float factor = last_factor(min_u32(row, rows - 1), tops[row], sums[row]);
#pragma unroll
                for (u32 i = 0; i < 16; i++) values[s][i] *= factor;
                store(row, own, values[s], row < rows);
            }
            return;
        }
        if (part == 0) {
#pragma unroll
            for (u32 s = 0; s < SETS; s++) {
                const u32 row = 8 * s + g;
                if (row >= rows) continue;
                float4* to = reinterpret_cast<float4*>(part_of(slice.number, row) + own);
#pragma unroll
                for (u32 i = 0; i < 4; i++) to[i] = make_float4(values[s][4 * i], values[s][4 * i + 1], values[s][4 * i + 2], values[s][4 * i + 3]);
            }
        }
        if (threadIdx.x < rows) *stand_of(slice.number, threadIdx.x) = make_float2(tops[threadIdx.x], sums[threadIdx.x]);
        put_together(slice);
    }

    // What is put together of so many slices: parts of rows, 128 columns or what there is, some at a time by a block.
    struct Pieces {
        u32 at_once, width, items;
        EVG_DEVICE Pieces(const Inputs& in, u32 rows, u32 slices) {
            at_once = slices <= 8 ? 8 : slices <= 16 ? 4 : slices <= 32 ? 2 : 1;
            width = min_u32(in.dv, 128), items = rows * (in.dv / width);
        }
    };

    // The last blocks to come here, so many as help, put all slices together.
    EVG_DEVICE void put_together(const Slice& slice) const {
        __shared__ u32 number, helpers;
        const u32 n = slice.all;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32* counter = in.counters + slot();
            const Pieces all(in, rows, n);
            const u32 helping = min_u32(min_u32(in.helpers, n), ceil_div(all.items, all.at_once));
            // What all threads of the block wrote is to be seen by whoever sees the count.
            __threadfence();
            const u32 arrived = atomicAdd(counter, 1u);
            if (arrived + helping >= n) {
                while (*reinterpret_cast<volatile u32*>(counter) < n) {}
                // Who has seen that all are there says so; the last of them leaves a zero.
                if (atomicAdd(counter, 1u) == n + helping - 1) atomicExch(counter, 0u);
                __threadfence();
            }
            number = arrived + helping - n, helpers = helping;
        }
        __syncthreads();
        const u32 helper = number, helping = helpers;
        if (helper >= helping) return;
        const Pieces all(in, rows, n);
        const u32 lane = lane_id(), at_once = all.at_once, sharers = WARPS / at_once, sharer = warp % sharers;
        const u32 width = all.width, pieces = in.dv / width, items = all.items;
        float4* parts = queries_as<float4>();
#pragma unroll 1
        for (u32 first = helper * at_once; first < items; first += helping * at_once) {
            const u32 item = first + warp / sharers, row = min_u32(item / pieces, rows - 1), column = item % pieces * width + 4 * lane;
            const bool there = item < items && 4 * lane < width;
            // Slice `lane + 32 j`.
            float2 stands[MOST_SLICES / 32];
#pragma unroll
            for (u32 j = 0; j < MOST_SLICES / 32; j++)
                stands[j] = lane + 32 * j < n ? __ldcg(stand_of(lane + 32 * j, row)) : make_float2(-infinity(), 0.0f);
            float v[4] = {}, weights[MOST_SLICES / 32] = {};
            // Where registers are few, before values come.
            if (SETS == 1) weigh_slices(row, stands, weights);
            const float* of = part_of(0, row) + column;
            const u32 stride = ROWS * in.dv;
#pragma unroll 1
            for (u32 turn = 0; turn < n; turn += 8 * sharers) {
                float4 x[8];
#pragma unroll
                for (u32 k = 0; k < 8; k++) {
                    const u32 i = turn + sharer + sharers * k;
                    x[k] = there && i < n ? __ldcg(reinterpret_cast<const float4*>(of + u64(i) * stride)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                if (SETS > 1 && turn == 0) weigh_slices(row, stands, weights);
#pragma unroll
                for (u32 k = 0; k < 8; k++) {
                    // Eight sharers have slices of all lanes, fewer those of the first 32 only.
                    const float own = sharers == 8 ? weights[k / 4] : weights[0];
                    const float weight = __shfl_sync(FULL_WARP, own, int(sharers == 8 ? sharer + 8 * (k % 4) : (sharer + sharers * k) % 32));
                    v[0] = fmaf(x[k].x, weight, v[0]), v[1] = fmaf(x[k].y, weight, v[1]);
                    v[2] = fmaf(x[k].z, weight, v[2]), v[3] = fmaf(x[k].w, weight, v[3]);
                }
                // Those of the next 64 slices.
#pragma unroll
                for (u32 j = 2; j < MOST_SLICES / 32; j++) weights[j - 2] = weights[j];
            }
            if (sharers > 1) {
                parts[warp * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
                __syncthreads();
                for (u32 other = 1; other < sharers && sharer == 0; other++) {
                    const float4 more = parts[(warp + other) * 32 + lane];
                    v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
                }
                // The next ones go to the same place.
                __syncthreads();
            }
            if (sharer == 0) store(row, column, v, there);
        }
    }

    // Greatest scores and sums of a row's slices to what their values are multiplied with.
    EVG_DEVICE void weigh_slices(u32 row, const float2 (&stands)[MOST_SLICES / 32], float (&weights)[MOST_SLICES / 32]) const {
        float top = -infinity(), sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < MOST_SLICES / 32; j++) top = fmaxf(top, stands[j].x);
        top = warp_max(top);
#pragma unroll
        for (u32 j = 0; j < MOST_SLICES / 32; j++) {
            weights[j] = stands[j].x == -infinity() ? 0.0f : expf(stands[j].x - top);
            sum = fmaf(stands[j].y, weights[j], sum);
        }
        const float factor = last_factor(row, top, warp_sum(sum));
#pragma unroll
        for (u32 j = 0; j < MOST_SLICES / 32; j++) weights[j] *= factor;
    }
    template <class T> EVG_DEVICE T* queries_as() const { return reinterpret_cast<T*>(queries); }
};

template <u32 SETS> static EVG_DEVICE void attend(const Inputs& in) {
    __shared__ float tops[8 * SETS], sums[8 * SETS], factors[8 * SETS], scales[8 * SETS];
    EVG_DYNAMIC_SHARED(uint4, shared);
    const u32 group = in.heads / in.kv_heads, groups = ceil_div(group, 8 * SETS), row = blockIdx.z % groups * 8 * SETS;
    Block<SETS> block = {in, shared, reinterpret_cast<float*>(shared + in.d / CHUNK * SETS * 64), tops, sums, factors, scales};
    block.token = blockIdx.y, block.kv_head = blockIdx.z / groups;
    block.head = block.kv_head * group + row, block.rows = min_u32(8 * SETS, group - row);
    block.warp = warp_id(), block.g = lane_id() / 4, block.t = lane_id() % 4;
    const int position = at<int>(in.positions, 0)[block.token];
    typename Block<SETS>::Query query;
    if (blockIdx.x == 0) block.load(query);
    if (position < 0 || (in.ring != 1 && u32(position) >= in.capacity)) evg_fault("position outside the cache");
    const u32 end = u32(position) + 1, first = in.window == 0 || end < in.window ? 0 : end - in.window, count = end - first;
    // Whole groups of 16 keys, or all of them.
    const u32 most = min_u32(in.slices, ceil_div(count, in.least));
    const u32 each = count <= 2 * in.least ? count : ceil_div(ceil_div(count, most), 16u) * 16;
    const u32 all = each == count ? 1 : ceil_div(count, each), before = min_u32(count, blockIdx.x * each);
    const Slice slice = {blockIdx.x, all, first + before, min_u32(each, count - before)};
    if (slice.number >= slice.all) return;
    if (blockIdx.x > 0) block.load(query);
    block.start = in.ring == 1 ? slice.first % in.capacity : slice.first;
    block.attend(slice, query);
}

#define ATTENTION(name, sets, bounds)                                                                                                       \
    EVG_KERNEL(name, bounds)(const char* q, u64 q_stride, u64 q_head, const char* k, u64 k_stride, u64 k_head, const char* v, u64 v_stride, \
        u64 v_head, u32 ty, const char* positions, const char* sinks, char* out, u64 out_stride, u64 out_head, u32 tokens, u32 heads,       \
        u32 kv_heads, u32 d, u32 dv, u32 capacity, u32 window, u32 ring, float scale, float softcap, char* codes, u64 codes_outer,          \
        u64 codes_inner, char* scales, u64 scales_outer, u64 scales_inner, char* room, char* counters, u32 slices, u32 least, u32 helpers) { \
        evg_begin();                                                                                                                        \
        (void)ty;                                                                                                                           \
        const Inputs in = {q, k, v, positions, sinks, out, q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head,      \
            tokens, heads, kv_heads, d, dv, capacity, window, ring, scale, softcap,                                                         \
            {codes, codes_outer, codes_inner, scales, scales_outer, scales_inner}, at<float>(room, 0), at<u32>(counters, 0), slices, least, \
            helpers};                                                                                                                       \
        attend<sets>(in);                                                                                                                   \
    }

ATTENTION(attention_split_8, 1, __launch_bounds__(THREADS, 2))
ATTENTION(attention_split_16, 2, __launch_bounds__(THREADS, 1))
