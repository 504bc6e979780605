// What every kernel starts from: types, kernel declarations, 16-bit floats, reductions in a fixed order.
//
// Compiled by NVRTC with nothing of CUDA's headers, and by g++ under `emulated/shim.h`, where the threads of a block are
// fibers. PTX therefore stands here only, each with its twin.
//
// Rules for kernels:
// - Blocks are whole warps. All lanes of a warp reach each shuffle, all threads of a block each `__syncthreads` and each
//   `block_*` function: leave early only as a whole block.
// - No float atomics and no result that depends on which block came first: a rerun must give the same bits.
// - Strides are bytes. An index out of range in device data is `evg_fault()`.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef EVG_EMULATED
#include "emulated/shim.h"
#endif

// `EVG_KERNEL(name)(parameters) { … }`, or `EVG_KERNEL(name, EVG_BOUNDS(256))(parameters) { … }` for one that is always
// launched with at most 256 threads a block.
#ifdef EVG_LIST
// The emulator's build looks for this word in the preprocessed text.
#define EVG_KERNEL(name, ...) evg_kernel_named name
#elif defined(EVG_EMULATED)
#define EVG_KERNEL(name, ...) static void evg_kernel_##name
#else
#define EVG_KERNEL(name, ...) extern "C" __global__ void __VA_ARGS__ name
#endif
#define EVG_BOUNDS(threads) __launch_bounds__(threads)
// The same where a multiprocessor is to have room for so many blocks.
#define EVG_BOUNDS_EACH(threads, blocks) __launch_bounds__(threads, blocks)

// `EVG_DYNAMIC_SHARED(float, buffer);` makes `float* buffer` point to the dynamic shared memory of the launch, aligned to 16.
#ifdef EVG_EMULATED
#define EVG_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(evg::dynamic_shared())
#else
#define EVG_DYNAMIC_SHARED(type, name)                    \
    extern __shared__ __align__(16) u8 evg_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(evg_dynamic_shared)
#endif

#define EVG_DEVICE __device__ __forceinline__
// The first thing in every kernel of an op; only arithmetic on its arguments may come before. It may have been launched before the kernel before it has ended, so that its blocks
// take their places meanwhile: here it waits until that one is over and all that it wrote is to be seen. Then the next
// kernel may come, which waits likewise.
EVG_DEVICE void evg_begin() {
#if !defined(EVG_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// For what is called from many places and large.
#ifdef EVG_EMULATED
#define EVG_NOINLINE __attribute__((noinline))
#else
#define EVG_NOINLINE __device__ __noinline__
#endif

// Numbers of element types, as in GGUF files. Block types stand where they are decoded.
#define TYPE_F32 0u
#define TYPE_F16 1u
#define TYPE_I8 24u
#define TYPE_I16 25u
#define TYPE_I32 26u
#define TYPE_I64 27u
#define TYPE_F64 28u
#define TYPE_BF16 30u

// Ends the launch as a fault of the device. The reason is seen in emulation only.
EVG_DEVICE void evg_fault(const char* reason = nullptr) {
#ifdef EVG_EMULATED
    evg::fault(reason ? reason : "the kernel found bad data in device memory");
#else
    (void)reason;
    asm volatile("trap;");
#endif
}

// `dp4a(a, b, c)`: c plus the dot product of four signed bytes in a and b.
EVG_DEVICE int dp4a(int a, int b, int c) {
#ifdef EVG_EMULATED
    for (int i = 0; i < 32; i += 8) c += int(i8(u32(a) >> i)) * int(i8(u32(b) >> i));
    return c;
#else
    return __dp4a(a, b, c);
#endif
}

EVG_DEVICE float infinity() { return __uint_as_float(0x7F800000u); }

// 16-bit floats. Conversions to them round to nearest, ties to even; NaN becomes a quiet NaN of the same sign.
EVG_DEVICE float half_to_float(u16 bits) {
#ifdef EVG_EMULATED
    const u32 word = u32(bits) << 16, sign = word & 0x80000000u, magnitude = word << 1;
    const float normal = __uint_as_float((magnitude >> 4) + (0xE0u << 23)) * __uint_as_float(0x07800000u);
    const float subnormal = __uint_as_float((magnitude >> 17) | (126u << 23)) - 0.5f;
    return __uint_as_float(sign | __float_as_uint(magnitude < (1u << 27) ? subnormal : normal));
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

EVG_DEVICE u16 float_to_half(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return u16(((bits >> 16) & 0x8000u) | 0x7E00u);
#ifdef EVG_EMULATED
    const float base = __uint_as_float(bits & 0x7FFFFFFFu) * __uint_as_float(0x77800000u) * __uint_as_float(0x08800000u);
    u32 bias = (bits << 1) & 0xFF000000u;
    if (bias < 0x71000000u) bias = 0x71000000u;
    const u32 rounded = __float_as_uint(__uint_as_float((bias >> 1) + 0x07800000u) + base);
    return u16(((bits >> 16) & 0x8000u) | (((rounded >> 13) & 0x7C00u) + (rounded & 0x0FFFu)));
#else
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#endif
}

EVG_DEVICE float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

EVG_DEVICE u16 float_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return u16((bits >> 16) | 0x40u);
    return u16((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// The lower and the upper of two halves in one word.
EVG_DEVICE float2 half2_to_float2(u32 bits) { return make_float2(half_to_float(u16(bits)), half_to_float(u16(bits >> 16))); }
EVG_DEVICE float2 bf162_to_float2(u32 bits) { return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)); }

// Numbers in a strided tensor: `at<float>(x, t * stride)[i]`.
template <class T> EVG_DEVICE const T* at(const char* base, u64 bytes) { return reinterpret_cast<const T*>(base + bytes); }
template <class T> EVG_DEVICE T* at(char* base, u64 bytes) { return reinterpret_cast<T*>(base + bytes); }

// Whether 16-byte loads may be used at this address (or with this stride).
EVG_DEVICE bool aligned16(u64 value) { return (value & 15u) == 0; }
EVG_DEVICE bool aligned16(const void* pointer) { return aligned16(reinterpret_cast<u64>(pointer)); }

// This thread's number in the block and the block's size.
EVG_DEVICE u32 thread_rank() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
EVG_DEVICE u32 block_threads() { return blockDim.x * blockDim.y * blockDim.z; }
EVG_DEVICE u32 lane_id() { return thread_rank() & 31u; }
EVG_DEVICE u32 warp_id() { return thread_rank() >> 5; }
EVG_DEVICE u32 block_warps() { return block_threads() >> 5; }

#define FULL_WARP 0xFFFFFFFFu

// Reductions. Every lane (thread) gets the result; the order of operations is fixed. `T` is float, double, int or u32.
struct Sum {
    template <class T> static EVG_DEVICE T zero() { return T(0); }
    template <class T> static EVG_DEVICE T of(T a, T b) { return a + b; }
};
// NaN counts as less than everything, as `fmaxf` has it. For float only.
struct Max {
    template <class T> static EVG_DEVICE T zero() { return T(-infinity()); }
    template <class T> static EVG_DEVICE T of(T a, T b) { return fmaxf(a, b); }
};

// Over groups of `width` neighbouring lanes (a power of two).
template <class Op, class T> EVG_DEVICE T warp_reduce(T value, int width = 32) {
    for (int distance = width / 2; distance > 0; distance >>= 1)
        value = Op::template of<T>(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

template <class Op, class T> EVG_DEVICE T block_reduce(T value) {
    __shared__ T partial[32];
    value = warp_reduce<Op, T>(value);
    if (block_warps() == 1) return value;
    if (lane_id() == 0) partial[warp_id()] = value;
    __syncthreads();
    value = lane_id() < block_warps() ? partial[lane_id()] : Op::template zero<T>();
    value = warp_reduce<Op, T>(value);
    // The next reduction writes `partial` again.
    __syncthreads();
    return value;
}

template <class T> EVG_DEVICE T warp_sum(T value) { return warp_reduce<Sum, T>(value); }
template <class T> EVG_DEVICE T block_sum(T value) { return block_reduce<Sum, T>(value); }
EVG_DEVICE float warp_max(float value) { return warp_reduce<Max, float>(value); }
EVG_DEVICE float block_max(float value) { return block_reduce<Max, float>(value); }

// The greatest and the least of the lanes' numbers.
EVG_DEVICE u32 warp_greatest_u32(u32 value) {
#if !defined(EVG_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, value);
#else
    for (int distance = 16; distance > 0; distance >>= 1) value = max(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
#endif
}
EVG_DEVICE u32 warp_least_u32(u32 value) { return ~warp_greatest_u32(~value); }

// What grids may leave over: `for (u64 i = blockIdx.x; i < rows; i += gridDim.x)`.
EVG_DEVICE u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }
EVG_DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
EVG_DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
EVG_DEVICE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }
