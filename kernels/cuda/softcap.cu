#include "elementwise.cuh"

// out = cap * tanh(x / cap) over [rows, cols].
EVG_KERNEL(softcap, EVG_BOUNDS(256))(const char* x, u64 x_stride, char* out, u64 out_stride, u32 rows, u32 cols, float cap) {
    evg_begin();
    const Row3 in = {x, x_stride, 0};
    each_element(in, in, {out, out_stride, 0}, rows, 1, cols, [=](float v, float) { return cap * tanhf(v / cap); });
}
