// CUDA for g++: the part that the kernels here use. The threads of a block are fibers on one thread of the operating
// system; whatever waits for other threads (barriers, shuffles) switches fibers. See `engine.cpp`.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
#define EVG_VECTOR2(name, base, bytes)                       \
    struct alignas(bytes) name { base x, y; };                \
    static inline name make_##name(base x, base y) { return {x, y}; }
#define EVG_VECTOR4(name, base, bytes)                       \
    struct alignas(bytes) name { base x, y, z, w; };          \
    static inline name make_##name(base x, base y, base z, base w) { return {x, y, z, w}; }
EVG_VECTOR2(float2, float, 8)
EVG_VECTOR4(float4, float, 16)
EVG_VECTOR2(double2, double, 16)
EVG_VECTOR2(int2, int, 8)
EVG_VECTOR4(int4, int, 16)
EVG_VECTOR2(uint2, unsigned, 8)
EVG_VECTOR4(uint4, unsigned, 16)
EVG_VECTOR2(uchar2, unsigned char, 2)
EVG_VECTOR4(uchar4, unsigned char, 4)
EVG_VECTOR4(char4, signed char, 4)
EVG_VECTOR2(ushort2, unsigned short, 4)
EVG_VECTOR4(ushort4, unsigned short, 8)
EVG_VECTOR2(ulonglong2, unsigned long long, 16)
#undef EVG_VECTOR2
#undef EVG_VECTOR4

namespace evg {

// What the running fiber sees. Swapped by the engine at each switch.
struct Lane {
    uint3 thread;
    unsigned lane;
    unsigned warp;
};
struct Block {
    uint3 index;
    dim3 threads;
    dim3 grid;
    void* shared;
};
struct View {
    Lane lane;
    Block block;
};
// Set for the thread of the operating system that runs a block.
extern __attribute__((visibility("hidden"))) thread_local View view;

inline void* dynamic_shared() { return view.block.shared; }

// Ends the launch with this reason. Does not return.
[[noreturn]] void fault(const char* reason);
// Waits for all threads of the block. `line` tells barriers apart that are reached by different threads.
void barrier();
// Barrier with a vote: how many threads brought a nonzero value.
int barrier_count(int value);
// Waits for all lanes of the warp; lane `source(lane)`'s value is what each gets. `bytes` is 4 or 8.
uint64_t exchange(const char* kind, unsigned mask, uint64_t value, unsigned source);
// One bit per lane that brought a nonzero value.
unsigned ballot(const char* kind, unsigned mask, bool value);

template <class T> inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffles move up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> inline T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// Kernels and their parameters.
struct Parameter {
    uint32_t offset, bytes;
};
struct Kernel {
    const char* name;
    void (*call)(const char* args);
    const Parameter* parameters;
    unsigned parameter_count;
    unsigned args_bytes;
};
void enlist(const Kernel& kernel);

// Offsets as C lays out parameters: each at its natural alignment.
template <class... A> struct Layout {
    static constexpr unsigned count = sizeof...(A);
    Parameter parameters[count ? count : 1] = {};
    unsigned bytes = 0;
    constexpr Layout() {
        const unsigned sizes[] = {unsigned(sizeof(A))..., 0}, aligns[] = {unsigned(alignof(A))..., 1};
        unsigned at = 0;
        for (unsigned i = 0; i < count; i++) {
            at = (at + aligns[i] - 1) / aligns[i] * aligns[i];
            parameters[i] = {at, sizes[i]};
            at += sizes[i];
        }
        bytes = at;
    }
};

template <auto F> struct Entry;
template <class... A, void (*F)(A...)> struct Entry<F> {
    static constexpr Layout<A...> layout{};
    template <size_t... I> static void unpack(const char* args, std::index_sequence<I...>) {
        F(read<A>(args + layout.parameters[I].offset)...);
    }
    template <class T> static T read(const char* from) {
        std::remove_const_t<T> value;
        memcpy(&value, from, sizeof(T));
        return value;
    }
    static void call(const char* args) { unpack(args, std::index_sequence_for<A...>{}); }
};

template <auto F> struct Registrar {
    explicit Registrar(const char* name) {
        enlist({name, Entry<F>::call, Entry<F>::layout.parameters, Entry<F>::layout.count, Entry<F>::layout.bytes});
    }
};

}  // namespace evg

// What the build puts after a source, once per kernel.
#define EVG_REGISTER(name) static const evg::Registrar<evg_kernel_##name> evg_registered_##name(#name);

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __restrict__ __restrict

#define threadIdx (evg::view.lane.thread)
#define blockIdx (evg::view.block.index)
#define blockDim (evg::view.block.threads)
#define gridDim (evg::view.block.grid)
constexpr int warpSize = 32;

static inline void __syncthreads() { evg::barrier(); }
static inline int __syncthreads_count(int value) { return evg::barrier_count(value); }
static inline int __syncthreads_or(int value) { return evg::barrier_count(value) != 0; }
static inline int __syncthreads_and(int value) { return evg::barrier_count(!value) == 0; }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { evg::ballot("__syncwarp", mask, false); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
[[noreturn]] static inline void __trap() { evg::fault("__trap"); }

static inline unsigned __ballot_sync(unsigned mask, int value) { return evg::ballot("__ballot_sync", mask, value != 0); }
static inline int __any_sync(unsigned mask, int value) { return evg::ballot("__any_sync", mask, value != 0) != 0; }
static inline int __all_sync(unsigned mask, int value) { return evg::ballot("__all_sync", mask, value == 0) == 0; }

template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned base = evg::view.lane.lane & ~unsigned(width - 1);
    return evg::from_bits<T>(
        evg::exchange("__shfl_sync", mask, evg::to_bits(value), base + (unsigned(source) & unsigned(width - 1))));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    const unsigned lane = evg::view.lane.lane, from = lane ^ unsigned(flip);
    // Past the end of the group: the own value, as the hardware has it.
    const bool inside = (from & ~unsigned(width - 1)) <= (lane & ~unsigned(width - 1));
    return evg::from_bits<T>(evg::exchange("__shfl_xor_sync", mask, evg::to_bits(value), inside ? from : lane));
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned lane = evg::view.lane.lane, inner = lane & unsigned(width - 1);
    return evg::from_bits<T>(
        evg::exchange("__shfl_down_sync", mask, evg::to_bits(value), inner + by < unsigned(width) ? lane + by : lane));
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned lane = evg::view.lane.lane, inner = lane & unsigned(width - 1);
    return evg::from_bits<T>(evg::exchange("__shfl_up_sync", mask, evg::to_bits(value), inner >= by ? lane - by : lane));
}

template <class T> static inline T __ldg(const T* at) { return *at; }
template <class T> static inline T __ldcs(const T* at) { return *at; }
template <class T> static inline T __ldcg(const T* at) { return *at; }

static inline unsigned __float_as_uint(float value) { return evg::from_bits<unsigned>(evg::to_bits(value)); }
static inline int __float_as_int(float value) { return evg::from_bits<int>(evg::to_bits(value)); }
static inline float __uint_as_float(unsigned bits) { return evg::from_bits<float>(bits); }
static inline float __int_as_float(int bits) { return evg::from_bits<float>(unsigned(bits)); }
static inline long long __double_as_longlong(double value) { return evg::from_bits<long long>(evg::to_bits(value)); }
static inline double __longlong_as_double(long long bits) { return evg::from_bits<double>(uint64_t(bits)); }
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
static inline int __clzll(long long value) { return value ? __builtin_clzll((unsigned long long)value) : 64; }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> (by & 31u));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) << (by & 31u) >> 32);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t all = uint64_t(b) << 32 | a;
    unsigned value = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = selector >> (4 * i);
        unsigned byte = unsigned(all >> (8 * (s & 7u))) & 0xFFu;
        if (s & 8u) byte = byte & 0x80u ? 0xFFu : 0u;
        value |= byte << (8 * i);
    }
    return value;
}
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// The compiler must not make one operation of a product and the sum it goes into.
static inline float __fmul_rn(float a, float b) {
    float value = a * b;
#ifdef __x86_64__
    asm("" : "+x"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline int __float2int_rn(float value) { return int(nearbyintf(value)); }
static inline float __int2float_rn(int value) { return float(value); }
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }

template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

// Atomics on whole numbers only: sums of floats would depend on the order of blocks.
#define EVG_ATOMIC(name, expression)                                                                           \
    template <class T> static inline T name(T* at, std::common_type_t<T> value) {                              \
        static_assert(std::is_integral<T>::value, "float atomics give other bits from run to run");            \
        T old = __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                         \
        while (!__atomic_compare_exchange_n(at, &old, T(expression), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {} \
        return old;                                                                                            \
    }
EVG_ATOMIC(atomicAdd, old + value)
EVG_ATOMIC(atomicSub, old - value)
EVG_ATOMIC(atomicMax, old < value ? value : old)
EVG_ATOMIC(atomicMin, value < old ? value : old)
EVG_ATOMIC(atomicOr, old | value)
EVG_ATOMIC(atomicAnd, old & value)
EVG_ATOMIC(atomicXor, old ^ value)
EVG_ATOMIC(atomicExch, value)
#undef EVG_ATOMIC
template <class T> static inline T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> value) {
    T old = expected;
    __atomic_compare_exchange_n(at, &old, T(value), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return old;
}
// Counts up to `limit`, then starts again at 0.
static inline unsigned atomicInc(unsigned* at, unsigned limit) {
    unsigned old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &old, old >= limit ? 0 : old + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}
