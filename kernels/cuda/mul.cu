#include "elementwise.cuh"

// out = a * b over [rows, cols]; a stride of 0 repeats a row.
EVG_KERNEL(mul, EVG_BOUNDS(256))(const char* a, u64 a_stride, const char* b, u64 b_stride, char* out, u64 out_stride, u32 rows, u32 cols) {
    evg_begin();
    each_element({a, a_stride, 0}, {b, b_stride, 0}, {out, out_stride, 0}, rows, 1, cols, [](float x, float y) { return x * y; });
}
