// `get_rows`: rows of a table by number, decoded. Grid: tokens.
#include "quant.cuh"

EVG_KERNEL(get_rows, EVG_BOUNDS(256))
(const u8* table, u32 type, u32 count, u32 cols, u64 stride, const int* ids, char* out, u32 tokens, u64 out_stride, float scale) {
    evg_begin();
    u32 elements, bytes;
    block_shape(type, elements, bytes);
    for (u64 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const int id = ids[t];
        if (u32(id) >= count) evg_fault("row number out of range");
        const u8* row = table + u32(id) * stride;
        float* to = at<float>(out, t * out_stride);
        if (type == TYPE_I32) {
            for (u32 i = threadIdx.x; i < cols; i += blockDim.x) reinterpret_cast<int*>(to)[i] = reinterpret_cast<const int*>(row)[i];
        } else if (elements == 1) {
            for (u32 i = threadIdx.x; i < cols; i += blockDim.x) to[i] = float_value(type, row, i) * scale;
        } else {
            for (u32 unit = threadIdx.x; unit < cols / UNIT; unit += blockDim.x) {
                Unpack values = {row, unit};
                with_block_type(type, values);
                for (u32 j = 0; j < UNIT; j++) to[unit * UNIT + j] = unit_value(values.unit, values.zero, j) * scale;
            }
        }
    }
}
