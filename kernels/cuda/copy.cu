#include "common.cuh"

#define PIECE 1024u

template <class T> static EVG_DEVICE void plain(const char* src, char* dst, u32 first, u32 end) {
    for (u32 i = first + threadIdx.x; i < end; i += block_threads()) at<T>(dst, 0)[i] = at<T>(src, 0)[i];
}

static EVG_DEVICE float widen(const char* src, u32 ty, u32 i) {
    if (ty == TYPE_F32) return at<float>(src, 0)[i];
    const u16 bits = at<u16>(src, 0)[i];
    return ty == TYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// dst = src over [a, b, cols]: float types in any combination, or elements of 1, 2, 4 or 8 bytes as they are.
EVG_KERNEL(copy, EVG_BOUNDS(256))(const char* src, u32 src_ty, u64 src_outer, u64 src_inner, char* dst, u32 dst_ty, u64 dst_outer,
    u64 dst_inner, u32 outer, u32 inner, u32 cols) {
    evg_begin();
    const u32 pieces = ceil_div(cols, PIECE);
    for (u64 item = blockIdx.x; item < u64(outer) * inner * pieces; item += gridDim.x) {
        const u32 first = u32(item % pieces) * PIECE, end = min_u32(cols, first + PIECE);
        const u64 row = item / pieces;
        const char* from = src + row / inner * src_outer + row % inner * src_inner;
        char* to = dst + row / inner * dst_outer + row % inner * dst_inner;
        if (src_ty == dst_ty) {
            switch (src_ty) {
                case TYPE_I8: plain<u8>(from, to, first, end); break;
                case TYPE_F16: case TYPE_BF16: case TYPE_I16: plain<u16>(from, to, first, end); break;
                case TYPE_F32: case TYPE_I32: plain<u32>(from, to, first, end); break;
                case TYPE_I64: case TYPE_F64: plain<u64>(from, to, first, end); break;
                default: evg_fault("copy of a type that it does not know");
            }
            continue;
        }
        for (u32 i = first + threadIdx.x; i < end; i += block_threads()) {
            const float value = widen(from, src_ty, i);
            if (dst_ty == TYPE_F32)
                at<float>(to, 0)[i] = value;
            else
                at<u16>(to, 0)[i] = dst_ty == TYPE_F16 ? float_to_half(value) : float_to_bf16(value);
        }
    }
}
