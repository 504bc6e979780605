// `residual_norm`: h = gain * (h + norm(y) * weight), y the sum of one or two parts, and up to three norms of the new h. Without
// a weight y is added as it is. One block a row.
#include "codes.cuh"

#define MOST_NORMED 3

struct Part {
    const char* x;
    u64 stride;
    const char* norm;
};

struct Normed {
    const char* weight;
    char* out;
    u64 stride;
    CodeRows codes;
    float scale;
};

struct Inputs {
    Part parts[2];
    char* h;
    u64 stride;
    const char* weight;
    Normed normed[MOST_NORMED];
    u32 cols;
    float eps, gain;
};

// Four columns of a row.
struct Columns {
    float v[4];
    EVG_DEVICE void load(const char* base, u64 bytes, u32 i, bool mine, float otherwise) {
        const float4 x = base && mine ? *at<float4>(base, bytes + 4ull * i) : make_float4(otherwise, otherwise, otherwise, otherwise);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    }
    EVG_DEVICE void store(char* base, u64 bytes, u32 i) const { *at<float4>(base, bytes + 4ull * i) = make_float4(v[0], v[1], v[2], v[3]); }
    EVG_DEVICE float squares() const { return fmaf(v[0], v[0], fmaf(v[1], v[1], fmaf(v[2], v[2], fmaf(v[3], v[3], 0.0f)))); }
};

// sqrt(mean of squares + eps)
static EVG_DEVICE float root(float sum, u32 cols, float eps) { return sqrtf(block_sum(sum) / float(cols) + eps); }

// A thread has all that is its own in registers, and everything is on its way before the first sum is waited for.
static EVG_DEVICE void add_in_registers(const Inputs& in, u32 t) {
    const u32 cols = in.cols, i = 4 * threadIdx.x;
    const bool mine = i < cols;
    const Part &one = in.parts[0], &two = in.parts[1];
    Columns y, norm, other, other_norm, h, weight, weights[MOST_NORMED];
    y.load(one.x, t * one.stride, i, mine, 0.0f);
    norm.load(one.norm, 0, i, mine, 1.0f);
    other.load(two.x, t * two.stride, i, mine, 0.0f);
    other_norm.load(two.norm, 0, i, mine, 1.0f);
    h.load(in.h, t * in.stride, i, mine, 0.0f);
    weight.load(in.weight, 0, i, mine, 1.0f);
#pragma unroll
    for (u32 n = 0; n < MOST_NORMED; n++) weights[n].load(in.normed[n].weight, 0, i, mine, 1.0f);

    if (one.norm) {
        const float factor = 1.0f / root(y.squares(), cols, in.eps);
        for (u32 j = 0; j < 4; j++) y.v[j] = y.v[j] * factor * norm.v[j];
    }
    if (two.x) {
        const float factor = two.norm ? 1.0f / root(other.squares(), cols, in.eps) : 1.0f;
        for (u32 j = 0; j < 4; j++) y.v[j] = other.v[j] * factor * other_norm.v[j] + y.v[j];
    }
    const float factor = in.weight ? 1.0f / root(y.squares(), cols, in.eps) : 1.0f;
    for (u32 j = 0; j < 4; j++) h.v[j] = (y.v[j] * factor * weight.v[j] + h.v[j]) * in.gain;
    if (mine) h.store(in.h, t * in.stride, i);
    if (!in.normed[0].weight) return;

    const float divisor = root(h.squares(), cols, in.eps);
#pragma unroll
    for (u32 n = 0; n < MOST_NORMED; n++) {
        const Normed& to = in.normed[n];
        if (!to.weight) continue;
        const float scaled = to.scale / divisor;
        Columns z;
        for (u32 j = 0; j < 4; j++) z.v[j] = h.v[j] * scaled * weights[n].v[j];
        if (to.out && mine) z.store(to.out, t * to.stride, i);
        if (to.codes.asked()) store_codes(to.codes.row(t, 0), i, z.v, mine);
    }
}

// Rows of any width, wherever they lie. What is needed again is read again.
static EVG_DEVICE void add_in_turns(const Inputs& in, u32 t) {
    const u32 cols = in.cols, threads = block_threads();
    const Part &one = in.parts[0], &two = in.parts[1];
    const float *x1 = at<float>(one.x, t * one.stride), *n1 = at<float>(one.norm, 0), *w = at<float>(in.weight, 0);
    const float *x2 = two.x ? at<float>(two.x, t * two.stride) : nullptr, *n2 = at<float>(two.norm, 0);
    float* h = at<float>(in.h, t * in.stride);
    float factors[2] = {1.0f, 1.0f};
    if (n1) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < cols; i += threads) sum = fmaf(x1[i], x1[i], sum);
        factors[0] = 1.0f / root(sum, cols, in.eps);
    }
    if (x2 && n2) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < cols; i += threads) sum = fmaf(x2[i], x2[i], sum);
        factors[1] = 1.0f / root(sum, cols, in.eps);
    }
    const auto y = [&](u32 i) {
        const float first = x1[i] * factors[0] * (n1 ? n1[i] : 1.0f);
        return x2 ? x2[i] * factors[1] * (n2 ? n2[i] : 1.0f) + first : first;
    };
    float sum = 0.0f, factor = 1.0f;
    if (w) {
        for (u32 i = threadIdx.x; i < cols; i += threads) sum = fmaf(y(i), y(i), sum);
        factor = 1.0f / root(sum, cols, in.eps);
        sum = 0.0f;
    }
    for (u32 i = threadIdx.x; i < cols; i += threads) {
        const float value = (y(i) * factor * (w ? w[i] : 1.0f) + h[i]) * in.gain;
        h[i] = value;
        sum = fmaf(value, value, sum);
    }
    const float divisor = root(sum, cols, in.eps);
#pragma unroll 1
    for (u32 n = 0; n < MOST_NORMED; n++) {
        const Normed to = n == 0 ? in.normed[0] : n == 1 ? in.normed[1] : in.normed[2];
        if (!to.weight) continue;
        const float scaled = to.scale / divisor, *weight = at<float>(to.weight, 0);
        // Rows that have codes are whole groups: all of a warp is here, or none.
        for (u32 i = threadIdx.x; i < cols; i += threads) {
            const float z[1] = {h[i] * scaled * weight[i]};
            if (to.out) at<float>(to.out, t * to.stride)[i] = z[0];
            if (to.codes.asked()) store_codes(to.codes.row(t, 0), i, z, true);
        }
    }
}

static EVG_DEVICE bool wide(const char* base, u64 stride) { return aligned16(base) && aligned16(stride); }

EVG_KERNEL(residual_norm, EVG_BOUNDS(1024))(u32 tokens, u32 cols, float eps, float gain, const char* x1, u64 x1_stride, const char* norm1,
    const char* x2, u64 x2_stride, const char* norm2, char* h, u64 h_stride, const char* weight, const char* weight1, char* out1, u64 out1_stride,
    char* q1, u64 q1_stride, u64 q1_inner, char* scales1, u64 scales1_stride, u64 scales1_inner, const char* weight2, char* out2,
    u64 out2_stride, char* q2, u64 q2_stride, u64 q2_inner, char* scales2, u64 scales2_stride, u64 scales2_inner, const char* weight3,
    char* out3, u64 out3_stride, char* q3, u64 q3_stride, u64 q3_inner, char* scales3, u64 scales3_stride, u64 scales3_inner, float scale1,
    float scale2, float scale3) {
    evg_begin();
    const Inputs in = {{{x1, x1_stride, norm1}, {x2, x2_stride, norm2}}, h, h_stride, weight,
        {{weight1, out1, out1_stride, {q1, q1_stride, q1_inner, scales1, scales1_stride, scales1_inner}, scale1},
            {weight2, out2, out2_stride, {q2, q2_stride, q2_inner, scales2, scales2_stride, scales2_inner}, scale2},
            {weight3, out3, out3_stride, {q3, q3_stride, q3_inner, scales3, scales3_stride, scales3_inner}, scale3}},
        cols, eps, gain};
    bool all_wide = cols % 4 == 0 && wide(x1, x1_stride) && wide(norm1, 0) && wide(x2, x2_stride) && wide(norm2, 0) && wide(h, h_stride) && wide(weight, 0);
#pragma unroll
    for (u32 n = 0; n < MOST_NORMED; n++) all_wide = all_wide && wide(in.normed[n].weight, 0) && wide(in.normed[n].out, in.normed[n].stride);
    const u32 threads = block_threads();
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        if (all_wide && cols <= 4 * threads)
            add_in_registers(in, t);
        else
            add_in_turns(in, t);
    }
}
