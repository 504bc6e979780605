// Rows of a key or value cache: F32, F16 or BF16.
#pragma once
#include "common.cuh"

template <u32 TY> struct Element {
    typedef u16 type;
};
template <> struct Element<TYPE_F32> {
    typedef float type;
};

template <u32 TY> EVG_DEVICE float widen(typename Element<TY>::type bits);
template <> EVG_DEVICE float widen<TYPE_F32>(float value) { return value; }
template <> EVG_DEVICE float widen<TYPE_F16>(u16 bits) { return half_to_float(bits); }
template <> EVG_DEVICE float widen<TYPE_BF16>(u16 bits) { return bf16_to_float(bits); }

// A number for a row of the type `ty`.
template <class T> EVG_DEVICE T narrow(float value, u32 ty);
template <> EVG_DEVICE float narrow<float>(float value, u32) { return value; }
template <> EVG_DEVICE u16 narrow<u16>(float value, u32 ty) { return ty == TYPE_F16 ? float_to_half(value) : float_to_bf16(value); }

// Element i of a row.
template <u32 TY> EVG_DEVICE float element(const char* row, u32 i) { return widen<TY>(at<typename Element<TY>::type>(row, 0)[i]); }

// Element i of a row of a type that is known at run time.
EVG_DEVICE float element(const char* row, u32 ty, u32 i) {
    return ty == TYPE_F32 ? element<TYPE_F32>(row, i) : ty == TYPE_F16 ? element<TYPE_F16>(row, i) : element<TYPE_BF16>(row, i);
}

// Eight numbers of a row, in one or two 16-byte loads.
template <u32 TY> EVG_DEVICE void load8(const char* from, float* to) {
    if (TY == TYPE_F32) {
        const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    } else {
        const uint4 bits = *reinterpret_cast<const uint4*>(from);
        const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = TY == TYPE_F16 ? half2_to_float2(words[i]) : bf162_to_float2(words[i]);
            to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
        }
    }
}
