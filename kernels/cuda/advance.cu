#include "common.cuh"

// positions[i] += by, wrapping.
EVG_KERNEL(advance, EVG_BOUNDS(256))(char* positions, u32 count, u32 by) {
    evg_begin();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) at<u32>(positions, 0)[i] += by;
}
