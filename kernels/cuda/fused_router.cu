// The choice of one token's experts and their first products, in one launch, a kernel for each type of block: sums as they are, or, of a gate and
// its unit, the codes of what comes of both.
//
// Every block makes the choice for itself, in a warp that has nothing to stage. Grid: groups of rows, slots; the first block writes the
// choice for those that read it later.
#include "choice.cuh"
#include "flow.cuh"
#include "gated.cuh"

#define FUSED_WARPS 8u
#define FUSED_THREADS 256u
#define MOST_UNITS 256u

struct Routed {
    const float *logits, *bias;
    int* ids;
    float* weights;
    u32 experts, used, scoring, norm;
    float scale;
};

struct ExpertProduct {
    const u8* w;
    float* y;
    u32 rows;
};

template <u32 TYPE>
static EVG_DEVICE void fused_router(const Routed& in, const ExpertProduct& one, const ExpertProduct& two, u32 cols, u32 log_parts,
    const Rows& rows, u32 glu, float limit, u32 hidden, const Codes& codes) {
    EVG_DYNAMIC_SHARED(u8, shared);
    __shared__ Choice choice;
    __shared__ float values[CODE_GROUP];
    using F = Flow<TYPE, FUSED_WARPS>;
    F flow(shared, cols, log_parts);
    u32* x = reinterpret_cast<u32*>(shared + F::RINGS_BYTES);
    evg_begin();
    if (flow.warp == FUSED_WARPS - 1) choose(in.logits, in.bias, in.experts, in.used, in.scoring, in.norm, in.scale, choice);
    stage_activations<1, MOST_UNITS>(Eights(), rows, 1, 0, flow.units, x);
    __syncthreads();
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < in.used)
        in.ids[threadIdx.x] = choice.ids[threadIdx.x], in.weights[threadIdx.x] = choice.weights[threadIdx.x];
    const u64 expert = u64(u32(choice.ids[blockIdx.y])) * flow.row_bytes;
    const u8 *from1 = one.w + expert * one.rows, *from2 = two.w + expert * two.rows;
    const auto nothing = []() {};
    const auto factor = [](u32) { return 1.0f; };
    if (glu == NO_GLU) {
        const u32 groups1 = ceil_div(one.rows, 2 * flow.pairs), groups = groups1 + ceil_div(two.rows, 2 * flow.pairs);
        flow.run(
            blockIdx.x, gridDim.x, groups, 1, x,
            [&](u32 group, u32 pair, u32) {
                return group < groups1 ? flow.neighbours(from1, one.rows, group, pair) : flow.neighbours(from2, two.rows, group - groups1, pair);
            },
            nothing, factor,
            [&](u32 group, u32 pair, const float(&sums)[2]) {
                if (group < groups1)
                    flow.put(one.y, one.rows, group, pair, sums);
                else
                    flow.put(two.y, two.rows, group - groups1, pair, sums);
            });
        return;
    }
    // Both in one weight: the gate's rows come first.
    if (two.rows == 0) from2 = from1 + u64(hidden) * flow.row_bytes;
    const u32 turns = CODE_GROUP / flow.pairs;
    for (u32 unit = blockIdx.x; unit < hidden / CODE_GROUP; unit += gridDim.x) {
        flow.run(
            unit * turns, 1, (unit + 1) * turns, 1, x,
            [&](u32 group, u32 pair, u32) { return flow.twins(from1, from2, hidden, group, pair); }, nothing, factor,
            [&](u32 group, u32 pair, const float(&sums)[2]) {
                values[(group - unit * turns) * flow.pairs + pair] = gated(glu, limit, sums[0], sums[1]);
            });
        __syncthreads();
        if (flow.warp == 0) {
            const float value[1] = {values[flow.lane]};
            store_codes(codes, unit * CODE_GROUP + flow.lane, value, true);
        }
        __syncthreads();
    }
}

#define FUSED_ROUTER(NAME)                                                                                                         \
    EVG_KERNEL(fused_router_##NAME, EVG_BOUNDS(FUSED_THREADS))                                                                      \
    (const char* logits, const char* bias, char* ids, char* weights, u32 experts, u32 used, u32 scoring, u32 norm, float scale, const u8* w1,  \
     u32 rows1, char* y1, u64 y1_slot, const u8* w2, u32 rows2, char* y2, u64 y2_slot, u32 cols, u32 log_parts, const char* q,                \
     const char* scales, u32 glu, float limit, u32 hidden, char* coded, u64 coded_slot, char* coded_scales, u64 coded_scales_slot) {        \
        const Rows rows = {q, 0, scales, 0};                                                                                        \
        const Routed in = {at<float>(logits, 0), at<float>(bias, 0), at<int>(ids, 0), at<float>(weights, 0), experts, used, scoring, norm, scale}; \
        const ExpertProduct one = {w1, at<float>(y1, blockIdx.y * y1_slot), rows1}, two = {w2, at<float>(y2, blockIdx.y * y2_slot), rows2};  \
        const Codes codes = {at<i8>(coded, blockIdx.y * coded_slot), at<float>(coded_scales, blockIdx.y * coded_scales_slot)};            \
        fused_router<TYPE_##NAME>(in, one, two, cols, log_parts, rows, glu, limit, hidden, codes);                                        \
    }

FOR_FUSED_TYPES(FUSED_ROUTER)
