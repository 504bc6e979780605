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
