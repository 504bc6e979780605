#include "codes.cuh"

// out = gain * (residual + scale * x / sqrt(mean(x^2) + eps) * weight), one block a row. The output may be x or the residual:
// each thread reads what it writes first, and the sum is complete before anything is written. The result goes to `out`, as codes
// to `q` and `scales`, or both. Codes need whole warps, also where rows end within one.
EVG_KERNEL(rms_norm, EVG_BOUNDS(1024))(const char* x, const char* weight, const char* residual, char* out, u32 tokens, u32 heads, u32 cols,
    u64 x_stride, u64 x_head, u64 residual_stride, u64 residual_head, u64 out_stride, u64 out_head, float eps, float scale,
    float gain, char* q, u64 q_stride, u64 q_head, char* scales, u64 scales_stride, u64 scales_head) {
    evg_begin();
    const CodeRows codes = {q, q_stride, q_head, scales, scales_stride, scales_head};
    const u32 threads = block_threads();
    for (u64 row = blockIdx.x; row < u64(tokens) * heads; row += gridDim.x) {
        const u32 t = u32(row / heads), h = u32(row % heads);
        const float* from = at<float>(x, t * x_stride + h * x_head);
        const float* add = residual ? at<float>(residual, t * residual_stride + h * residual_head) : nullptr;
        const float* w = reinterpret_cast<const float*>(weight);
        float* to = out ? at<float>(out, t * out_stride + h * out_head) : nullptr;
        const Codes coded = codes.row(t, h);
        const bool wide = aligned16(from) && aligned16(to) && aligned16(add) && aligned16(w);
        const u32 whole = wide ? cols / 4 * 4 : 0;
        if (whole == cols && cols <= 4 * threads) {
            // A thread has all that is its own in registers, and everything is on its way before the sum is waited for.
            const u32 i = 4 * threadIdx.x;
            const bool mine = i < cols;
            const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            const float4 v = mine ? *reinterpret_cast<const float4*>(from + i) : zero;
            const float4 m = mine && w ? *reinterpret_cast<const float4*>(w + i) : one;
            const float4 r = mine && add ? *reinterpret_cast<const float4*>(add + i) : zero;
            const float sum = block_sum(fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, 0.0f)))));
            const float factor = scale / sqrtf(sum / float(cols) + eps);
            float4 y = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
            if (w) y = make_float4(y.x * m.x, y.y * m.y, y.z * m.z, y.w * m.w);
            if (add) y = make_float4(y.x + r.x, y.y + r.y, y.z + r.z, y.w + r.w);
            const float z[4] = {y.x * gain, y.y * gain, y.z * gain, y.w * gain};
            if (mine && to) *reinterpret_cast<float4*>(to + i) = make_float4(z[0], z[1], z[2], z[3]);
            if (codes.asked()) store_codes(coded, i, z, mine);
            continue;
        }
        float sum = 0.0f;
        for (u32 i = 4 * threadIdx.x; i < whole; i += 4 * threads) {
            const float4 v = *reinterpret_cast<const float4*>(from + i);
            sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
        }
        for (u32 i = whole + threadIdx.x; i < cols; i += threads) sum = fmaf(from[i], from[i], sum);
        sum = block_sum(sum);
        const float factor = scale / sqrtf(sum / float(cols) + eps);
        // A warp goes on as long as its first lane has columns.
        const u32 lane = threadIdx.x % 32;
        for (u32 i = 4 * threadIdx.x; i - 4 * lane < whole; i += 4 * threads) {
            const bool mine = i < whole;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (mine) v = *reinterpret_cast<const float4*>(from + i);
            v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
            if (mine && w) {
                const float4 m = *reinterpret_cast<const float4*>(w + i);
                v = make_float4(v.x * m.x, v.y * m.y, v.z * m.z, v.w * m.w);
            }
            if (mine && add) {
                const float4 r = *reinterpret_cast<const float4*>(add + i);
                v = make_float4(v.x + r.x, v.y + r.y, v.z + r.z, v.w + r.w);
            }
            const float z[4] = {v.x * gain, v.y * gain, v.z * gain, v.w * gain};
            if (mine && to) *reinterpret_cast<float4*>(to + i) = make_float4(z[0], z[1], z[2], z[3]);
            if (codes.asked()) store_codes(coded, i, z, mine);
        }
        for (u32 i = whole + threadIdx.x; i < cols; i += threads) {
            float v = from[i] * factor;
            if (w) v *= w[i];
            if (add) v += add[i];
            const float z[1] = {v * gain};
            if (to) to[i] = z[0];
            // Rows that have codes are whole groups: all of a warp is here, or none.
            if (codes.asked()) store_codes(coded, i, z, true);
        }
    }
}
