#include "greatest.cuh"

// out[t] = place of the greatest element of x[t], the first of equal ones; 0 if all are NaN. One block a row.
EVG_KERNEL(argmax, EVG_BOUNDS(1024))(const char* x, u64 stride, char* out, u32 rows, u32 cols) {
    for (u32 t = blockIdx.x; t < rows; t += gridDim.x) {
        const float* row = at<float>(x, t * stride);
        Greatest best = Greatest::none();
        const u32 threads = block_threads(), whole = aligned16(row) ? cols / 4 * 4 : 0;
#pragma unroll 4
        for (u32 i = 4 * threadIdx.x; i < whole; i += 4 * threads) {
            const float4 v = *reinterpret_cast<const float4*>(row + i);
            best.take(v.x, i), best.take(v.y, i + 1), best.take(v.z, i + 2), best.take(v.w, i + 3);
        }
        for (u32 i = whole + threadIdx.x; i < cols; i += threads) best.take(row[i], i);
        best = block_greatest(best);
        if (threadIdx.x == 0) at<int>(out, 0)[t] = best.place == NOWHERE ? 0 : int(best.place);
    }
}
