// `residual_norm` of one token and the products that read a norm of it, in one launch, a kernel for each type of block.
//
// Every block makes the new row for itself, which costs less than another launch: all of it comes from the second cache, while the
// block's first weights are on their way. Blocks `0 .. blocks` have products with weights in blocks, which all read the same norm
// (`which`) and may be a gate and its unit, whose product is what is written then; the next `router_blocks` those with a weight of floats, which read a norm of their own, and the last block writes the norms that
// others read later. The row itself is written by the block that was last to read it, since it may be written where it was read.
#include "flow.cuh"
#include "gated.cuh"

#define FUSED_WARPS 16u
#define FUSED_THREADS 512u
// 16-byte pieces of a row that a thread has at most.
#define MOST_PIECES 2u
#define MOST_NORMED 3
// Blocks of the float product have 4 rows, each shared by 4 warps.
#define ROUTER_PARTS 4u
#define ROUTER_ROWS 4u

struct Sources {
    const char *x1, *norm1, *x2, *norm2, *h, *weight;
    u32 cols;
    float eps, gain;
};

// The weights of norms, and the new row, in shared memory. Weights do not wait for the kernel before. Each thread reads and writes its
// own pieces only, so there is no barrier.
struct Kept {
    float *norm1, *norm2, *weight, *normed, *row;

    EVG_DEVICE Kept(float* shared, u32 cols)
        : norm1(shared), norm2(shared + cols), weight(shared + 2 * cols), normed(shared + 3 * cols), row(shared) {}

    static EVG_DEVICE void bring(float* to, const char* from, u32 cols) {
        if (!from) return;
#pragma unroll 1
        for (u32 i = 4 * threadIdx.x; i < cols; i += 4 * FUSED_THREADS)
            copy_async_16(reinterpret_cast<u8*>(to + i), at<u8>(from, 4ull * i));
    }
    EVG_DEVICE void bring(const Sources& in, const char* of_normed) const {
        bring(norm1, in.norm1, in.cols), bring(norm2, in.norm2, in.cols);
        bring(weight, in.weight, in.cols), bring(normed, of_normed, in.cols);
        copy_async_commit();
    }
};

EVG_DEVICE float4 piece_of(const float* row, u32 column) { return *reinterpret_cast<const float4*>(row + column); }

EVG_DEVICE float4 piece_or_zero(const char* row, u32 column, bool mine) {
    return row && mine ? *at<float4>(row, 4ull * column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

EVG_DEVICE float squares(float4 v) { return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w))); }

EVG_DEVICE float4 times(float4 v, float by) { return make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }

EVG_DEVICE float4 times(float4 v, float4 w) { return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w); }

EVG_DEVICE float4 plus(float4 v, float4 w) { return make_float4(v.x + w.x, v.y + w.y, v.z + w.z, v.w + w.w); }

// A sum over all threads. `place` is where its parts meet: sums that follow each other have different ones, and so one barrier each.
EVG_DEVICE float sum_at(u32 place, float a) {
    __shared__ float partial[4][FUSED_WARPS];
    a = warp_sum(a);
    if (threadIdx.x % 32 == 0) partial[place][threadIdx.x / 32] = a;
    __syncthreads();
    return warp_reduce<Sum>(partial[place][threadIdx.x % FUSED_WARPS], FUSED_WARPS);
}

// h = gain * (h + norm(y) * weight), as in `residual_norm`; without parts h as it is. The row is kept; what a norm multiplies it with is given back. The
// kernel before has ended when this begins, and what was brought is there.
template <u32 PIECES> EVG_DEVICE float make_row(const Sources& in, const Kept& kept) {
    // What the mean takes.
    const float part = __fdividef(1.0f, float(in.cols));
    float4 h[PIECES], y[PIECES], other[PIECES];
    float sum1 = 0.0f, sum2 = 0.0f;
#pragma unroll
    for (u32 n = 0; n < PIECES; n++) {
        const u32 i = 4 * (threadIdx.x + n * FUSED_THREADS);
        const bool mine = i < in.cols;
        h[n] = piece_or_zero(in.h, i, mine), y[n] = piece_or_zero(in.x1, i, mine), other[n] = piece_or_zero(in.x2, i, mine);
        sum1 += squares(y[n]), sum2 += squares(other[n]);
    }
    if (in.x1) {
        float factor = 1.0f;
        if (in.norm1 || in.norm2) {
            const float one = in.norm1 ? rsqrtf(sum_at(0, sum1) * part + in.eps) : 1.0f;
            const float two = in.norm2 ? rsqrtf(sum_at(1, sum2) * part + in.eps) : 1.0f;
#pragma unroll
            for (u32 n = 0; n < PIECES; n++) {
                const u32 i = 4 * (threadIdx.x + n * FUSED_THREADS);
                if (i >= in.cols) continue;
                y[n] = times(y[n], one), other[n] = times(other[n], two);
                if (in.norm1) y[n] = times(y[n], piece_of(kept.norm1, i));
                if (in.norm2) other[n] = times(other[n], piece_of(kept.norm2, i));
            }
        }
        sum1 = 0.0f;
#pragma unroll
        for (u32 n = 0; n < PIECES; n++) y[n] = plus(other[n], y[n]), sum1 += squares(y[n]);
        if (in.weight) factor = rsqrtf(sum_at(2, sum1) * part + in.eps);
#pragma unroll
        for (u32 n = 0; n < PIECES; n++) {
            const u32 i = 4 * (threadIdx.x + n * FUSED_THREADS);
            if (i >= in.cols) continue;
            y[n] = times(y[n], factor);
            if (in.weight) y[n] = times(y[n], piece_of(kept.weight, i));
            h[n] = times(plus(y[n], h[n]), in.gain);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 n = 0; n < PIECES; n++) {
        const u32 i = 4 * (threadIdx.x + n * FUSED_THREADS);
        sum += squares(h[n]);
        if (i < in.cols) *reinterpret_cast<float4*>(kept.row + i) = h[n];
    }
    return rsqrtf(sum_at(3, sum) * part + in.eps);
}

EVG_DEVICE float make_row(const Sources& in, const Kept& kept) {
    return in.cols <= 4 * FUSED_THREADS ? make_row<1>(in, kept) : make_row<MOST_PIECES>(in, kept);
}

struct NormedTo {
    const char* weight;
    float* out;
    i8* q;
    float* scales;
    float scale;
};

struct FusedProduct {
    const u8* w;
    float* y;
    u32 rows, groups;
};

#define FUSED_NORM(NAME)                                                                                                        \
    EVG_KERNEL(fused_norm_##NAME, EVG_BOUNDS_EACH(FUSED_THREADS, 2))                                                                     \
    (u32 cols, float eps, float gain, const char* x1, const char* norm1, const char* x2, const char* norm2, const char* h, char* h_out, \
     const char* weight, const char* weight1, char* out1, char* q1, char* scales1, float scale1, const char* weight2, char* out2, char* q2, \
     char* scales2, float scale2, const char* weight3, char* out3, char* q3, char* scales3, float scale3, u32 which, u32 log_parts,        \
     u32 blocks, const u8* w1, char* y1, u32 rows1, const u8* w2, char* y2, u32 rows2, const u8* w3, char* y3, u32 rows3, const u8* w4,     \
     char* y4, u32 rows4, u32 glu, float limit, u32 router_which, const u8* router, char* logits, u32 router_rows, u32 router_blocks, char* counter) {           \
        const Sources in = {x1, norm1, x2, norm2, h, weight, cols, eps, gain};                                                           \
        const NormedTo normed[MOST_NORMED] = {                                                                                          \
            {weight1, at<float>(out1, 0), at<i8>(q1, 0), at<float>(scales1, 0), scale1},                                                   \
            {weight2, at<float>(out2, 0), at<i8>(q2, 0), at<float>(scales2, 0), scale2},                                                   \
            {weight3, at<float>(out3, 0), at<i8>(q3, 0), at<float>(scales3, 0), scale3}};                                                  \
        FusedProduct products[4] = {{w1, at<float>(y1, 0), rows1, 0}, {w2, at<float>(y2, 0), rows2, 0}, {w3, at<float>(y3, 0), rows3, 0}, \
            {w4, at<float>(y4, 0), rows4, 0}};                                                                                          \
        fused_norm<TYPE_##NAME>(in, h_out, normed, which, log_parts, blocks, products, glu, limit, router_which, router, at<float>(logits, 0),        \
                                router_rows, router_blocks, at<u32>(counter, 0));                                                       \
    }

// The counter goes back to 0 by itself when all blocks were here. Thread 0 knows whether this was the last one.
static EVG_DEVICE bool was_last(u32* counter) { return threadIdx.x == 0 && atomicInc(counter, gridDim.x - 1) == gridDim.x - 1; }

// This thread's pieces of a row that is kept, times its norm's weight: `f(column, values, mine)`, with all lanes of a warp that has any.
template <class F> static EVG_DEVICE void each_piece(const Kept& kept, const float* weight, u32 cols, float scaled, F f) {
#pragma unroll 1
    for (u32 i = 4 * threadIdx.x; i - 4 * (threadIdx.x % 32) < cols; i += 4 * FUSED_THREADS) {
        const bool mine = i < cols;
        const float4 z = mine ? times(times(piece_of(kept.row, i), scaled), piece_of(weight, i)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float values[4] = {z.x, z.y, z.z, z.w};
        f(i, values, mine);
    }
}

template <u32 TYPE>
static EVG_DEVICE void fused_norm(const Sources& in, char* h_out, const NormedTo (&normed)[MOST_NORMED], u32 which, u32 log_parts, u32 blocks,
    FusedProduct (&products)[4], u32 glu, float limit, u32 router_which, const u8* router, float* logits, u32 router_rows, u32 router_blocks, u32* counter) {
    EVG_DYNAMIC_SHARED(float, kept_shared);
    const Kept kept(kept_shared, in.cols);
    u8* shared = reinterpret_cast<u8*>(kept_shared + 4 * in.cols);
    bool last = false;
    if (blockIdx.x < blocks) {
        using F = Flow<TYPE, FUSED_WARPS>;
        F flow(shared, in.cols, log_parts);
        u32* x = reinterpret_cast<u32*>(shared + F::RINGS_BYTES);
        const NormedTo to = which == 0 ? normed[0] : which == 1 ? normed[1] : normed[2];
        kept.bring(in, to.weight);
        const auto before = [&]() {
            evg_begin();
            // The first rows may still be on their way.
            copy_async_wait<int(F::STAGES - 1)>();
            const float scaled = to.scale * make_row(in, kept);
            if (h_out) last = was_last(counter);
            each_piece(kept, kept.normed, in.cols, scaled, [&](u32 i, const float(&z)[4], bool mine) { stage_codes(x, i, z, mine); });
            __syncthreads();
        };
        const auto one = [](u32) { return 1.0f; };
        if (glu != NO_GLU) {
            const FusedProduct &gate = products[0], &up = products[1];
            flow.run(
                blockIdx.x, blocks, ceil_div(gate.rows, flow.pairs), 1, x,
                [&](u32 group, u32 pair, u32) { return flow.twins(gate.w, up.w, gate.rows, group, pair); }, before, one,
                [&](u32 group, u32 pair, const float(&sums)[2]) {
                    const u32 row = group * flow.pairs + pair;
                    if (row < gate.rows) gate.y[row] = gated(glu, limit, sums[0], sums[1]);
                });
        } else {
            u32 groups = 0;
#pragma unroll
            for (u32 p = 0; p < 4; p++) products[p].groups = groups += ceil_div(products[p].rows, 2 * flow.pairs);
            // The product of a group, which then counts from its own first.
            const auto product = [&](u32& group) {
                FusedProduct of = products[0];
                u32 before = 0;
#pragma unroll
                for (u32 p = 1; p < 4; p++)
                    if (group >= products[p - 1].groups) of = products[p], before = products[p - 1].groups;
                group -= before;
                return of;
            };
            flow.run(
                blockIdx.x, blocks, groups, 1, x,
                [&](u32 group, u32 pair, u32) {
                    const FusedProduct of = product(group);
                    return flow.neighbours(of.w, of.rows, group, pair);
                },
                before, one,
                [&](u32 group, u32 pair, const float(&sums)[2]) {
                    const FusedProduct of = product(group);
                    flow.put(of.y, of.rows, group, pair, sums);
                });
        }
    } else if (blockIdx.x < blocks + router_blocks) {
        __shared__ float partial[FUSED_WARPS];
        float *x = reinterpret_cast<float*>(shared), *rows = x + in.cols;
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % ROUTER_PARTS;
        const u32 first = (blockIdx.x - blocks) * ROUTER_ROWS, own = warp / ROUTER_PARTS;
        const NormedTo to = router_which == 0 ? normed[0] : router_which == 1 ? normed[1] : normed[2];
        kept.bring(in, to.weight);
        const u8* from = router + u64(min_u32(first + own, router_rows - 1)) * in.cols * 4;
#pragma unroll 1
        for (u32 i = 4 * (32 * part + lane); i < in.cols; i += 4 * 32 * ROUTER_PARTS)
            copy_async_16(reinterpret_cast<u8*>(rows + own * in.cols + i), from + 4ull * i);
        copy_async_commit();
        evg_begin();
        copy_async_wait<1>();
        const float scaled = to.scale * make_row(in, kept);
        if (h_out) last = was_last(counter);
        each_piece(kept, kept.normed, in.cols, scaled, [&](u32 i, const float(&z)[4], bool mine) {
            if (mine) *reinterpret_cast<float4*>(x + i) = make_float4(z[0], z[1], z[2], z[3]);
        });
        copy_async_wait<0>();
        __syncthreads();
        float sum = 0.0f;
#pragma unroll 2
        for (u32 i = 4 * (32 * part + lane); i < in.cols; i += 4 * 32 * ROUTER_PARTS) {
            const float4 v = piece_of(x, i), w = piece_of(rows + own * in.cols, i);
            sum = fmaf(w.x, v.x, sum), sum = fmaf(w.y, v.y, sum), sum = fmaf(w.z, v.z, sum), sum = fmaf(w.w, v.w, sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) partial[warp] = sum;
        __syncthreads();
        if (threadIdx.x < ROUTER_ROWS && first + threadIdx.x < router_rows) {
            float all = 0.0f;
            for (u32 p = 0; p < ROUTER_PARTS; p++) all += partial[threadIdx.x * ROUTER_PARTS + p];
            logits[first + threadIdx.x] = all;
        }
    } else {
        kept.bring(in, nullptr);
        evg_begin();
        copy_async_wait<0>();
        const float factor = make_row(in, kept);
        if (h_out) last = was_last(counter);
#pragma unroll
        for (u32 k = 0; k < MOST_NORMED; k++) {
            const NormedTo& to = normed[k];
            if (!to.weight || (!to.out && !to.q)) continue;
            each_piece(kept, at<float>(to.weight, 0), in.cols, to.scale * factor, [&](u32 i, const float(&z)[4], bool mine) {
                if (to.out && mine) *reinterpret_cast<float4*>(to.out + i) = make_float4(z[0], z[1], z[2], z[3]);
                if (to.q) store_codes({to.q, to.scales}, i, z, mine);
            });
        }
    }
    if (!h_out || !__syncthreads_or(last)) return;
#pragma unroll 1
    for (u32 i = 4 * threadIdx.x; i < in.cols; i += 4 * FUSED_THREADS) *at<float4>(h_out, 4ull * i) = piece_of(kept.row, i);
}

FOR_FUSED_TYPES(FUSED_NORM)
