#include "common.cuh"

// x = bits everywhere; x is contiguous.
EVG_KERNEL(fill, EVG_BOUNDS(256))(char* x, u32 rows, u32 cols, u32 bits) {
    evg_begin();
    const u64 count = u64(rows) * cols, step = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) at<u32>(x, 0)[i] = bits;
}
