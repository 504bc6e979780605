#include "greatest.cuh"

// out[t] = place of the greatest element of x[t], the first of equal ones; 0 if all are NaN. One block a row.
EVG_KERNEL(argmax, EVG_BOUNDS(1024))(const char* x, u64 stride, char* out, u32 rows, u32 cols) {
    evg_begin();
    for (u32 t = blockIdx.x; t < rows; t += gridDim.x) {
        const float* row = at<float>(x, t * stride);
        Greatest best = block_greatest(take_row(Greatest::none(), row, cols));
        if (threadIdx.x == 0) at<int>(out, 0)[t] = best.place == NOWHERE ? 0 : int(best.place);
    }
}
