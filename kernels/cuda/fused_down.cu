// The last products of feed-forward parts of one token, in one launch, a kernel for each type of block: of a dense part, whose floats are
// made codes here, of experts with the weighted sum over them, or of both side by side.
//
// Blocks `0 .. dense_blocks` have rows of the dense product, the others rows of the experts' sum, over all slots.
#include "flow.cuh"

#define FUSED_WARPS 8u
#define FUSED_THREADS 256u
#define MOST_USED 32u
#define MOST_UNITS 1024u

// Floats as records.
static EVG_DEVICE void stage_floats(const float* from, u32 cols, u32* x) {
#pragma unroll 1
    for (u32 i = 4 * threadIdx.x; i - 4 * (threadIdx.x % 32) < cols; i += 4 * FUSED_THREADS) {
        const bool mine = i < cols;
        const float4 v = mine ? *reinterpret_cast<const float4*>(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float values[4] = {v.x, v.y, v.z, v.w};
        stage_codes(x, i, values, mine);
    }
    __syncthreads();
}

struct ExpertRows {
    const u8* w;
    const int* ids;
    const float *weights, *scale;
    u32 experts, used, cols, rows;
};

template <u32 TYPE>
static EVG_DEVICE void fused_down(u32 dense_blocks, u32 dense_log_parts, const u8* dense_w, const float* dense_x, u32 dense_cols, u32 dense_rows,
    float* dense_y, u32 log_parts, const ExpertRows& of, const Rows& codes, float* y) {
    EVG_DYNAMIC_SHARED(u8, shared);
    __shared__ const u8* bases[MOST_USED];
    __shared__ float factors[MOST_USED];
    using F = Flow<TYPE, FUSED_WARPS>;
    u32* x = reinterpret_cast<u32*>(shared + F::RINGS_BYTES);
    if (blockIdx.x < dense_blocks) {
        F flow(shared, dense_cols, dense_log_parts);
        flow.run(
            blockIdx.x, dense_blocks, ceil_div(dense_rows, 2 * flow.pairs), 1, x,
            [&](u32 group, u32 pair, u32) { return flow.neighbours(dense_w, dense_rows, group, pair); },
            [&]() {
                evg_begin();
                stage_floats(dense_x, dense_cols, x);
            },
            [](u32) { return 1.0f; }, [&](u32 group, u32 pair, const float(&sums)[2]) { flow.put(dense_y, dense_rows, group, pair, sums); });
        return;
    }
    evg_begin();
    F flow(shared, of.cols, log_parts);
    if (threadIdx.x < of.used) {
        const u32 id = u32(of.ids[threadIdx.x]);
        if (id >= of.experts) evg_fault("expert id out of range");
        bases[threadIdx.x] = of.w + u64(id) * of.rows * flow.row_bytes;
        factors[threadIdx.x] = of.weights[threadIdx.x] * (of.scale ? of.scale[id] : 1.0f);
    }
    __syncthreads();
    flow.run(
        blockIdx.x - dense_blocks, gridDim.x - dense_blocks, ceil_div(of.rows, 2 * flow.pairs), of.used, x,
        [&](u32 group, u32 pair, u32 slot) { return flow.neighbours(bases[slot], of.rows, group, pair); },
        [&]() {
            stage_activations<1, MOST_UNITS>(Eights(), codes, 1, 0, of.used * flow.units, x);
            __syncthreads();
        },
        [&](u32 slot) { return factors[slot]; },
        [&](u32 group, u32 pair, const float(&sums)[2]) { flow.put(y, of.rows, group, pair, sums); });
}

#define FUSED_DOWN(NAME)                                                                                                             \
    EVG_KERNEL(fused_down_##NAME, EVG_BOUNDS(FUSED_THREADS))                                                                          \
    (u32 dense_blocks, u32 dense_log_parts, const u8* dense_w, const char* dense_x, u32 dense_cols, u32 dense_rows, char* dense_y,              \
     u32 log_parts, const u8* w, u32 experts, const char* ids, const char* weights, const char* scale, const char* q, const char* scales,      \
     u32 used, u32 cols, u32 rows, char* y) {                                                                                          \
        const Rows codes = {q, 0, scales, 0};                                                                                          \
        const ExpertRows of = {w, at<int>(ids, 0), at<float>(weights, 0), at<float>(scale, 0), experts, used, cols, rows};              \
        fused_down<TYPE_##NAME>(dense_blocks, dense_log_parts, dense_w, at<float>(dense_x, 0), dense_cols, dense_rows, at<float>(dense_y, 0), \
                                log_parts, of, codes, at<float>(y, 0));                                                                \
    }

FOR_FUSED_TYPES(FUSED_DOWN)
