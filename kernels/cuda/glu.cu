#include "elementwise.cuh"
#include "gated.cuh"

template <class F>
static EVG_DEVICE void each(Row3 g, Row3 u, Row3 o, const CodeRows& codes, u32 tokens, u32 slots, u32 cols, F f) {
    if (codes.asked())
        each_group(g, u, o, codes, tokens, slots, cols, f);
    else
        each_element(g, u, o, tokens, slots, cols, f);
}

// out = act(gate) * up over [tokens, slots, cols]; the gate is cut at `limit` from above, `up` on both sides. The result goes to
// `out`, as codes to `q` and `scales`, or both.
EVG_KERNEL(glu, EVG_BOUNDS(256))(const char* gate, u64 gate_stride, u64 gate_slot, const char* up, u64 up_stride, u64 up_slot, char* out,
    u64 out_stride, u64 out_slot, u32 tokens, u32 slots, u32 cols, u32 activation, float limit, char* q, u64 q_stride, u64 q_slot,
    char* scales, u64 scales_stride, u64 scales_slot) {
    evg_begin();
    const Row3 g = {gate, gate_stride, gate_slot}, u = {up, up_stride, up_slot}, o = {out, out_stride, out_slot};
    const CodeRows codes = {q, q_stride, q_slot, scales, scales_stride, scales_slot};
    if (activation == 0)
        each(g, u, o, codes, tokens, slots, cols, [=](float x, float y) { return gated(0, limit, x, y); });
    else
        each(g, u, o, codes, tokens, slots, cols, [=](float x, float y) { return gated(1, limit, x, y); });
}
