// The kernels of the stories for a GPU: what `kernels.rs` is for the host device. One thread does the work; a launch
// of more is fine. No headers, so that NVRTC alone is enough.

typedef unsigned int u32;

__device__ __forceinline__ bool first() {
    return (blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x | threadIdx.y | threadIdx.z) == 0;
}

extern "C" {

__global__ void gate(volatile u32* flag) {
    while (*flag == 0) __nanosleep(500);
    __threadfence_system();
}

__global__ void fill(u32* dst, u32 n, u32 value) {
    if (!first()) return;
    for (u32 i = 0; i < n; i++) dst[i] = value;
}

__global__ void gated_fill(volatile u32* flag, volatile u32* dst, u32 n, u32 value) {
    if (!first()) return;
    *flag = 2;
    __threadfence_system();
    while (*flag != 1) __nanosleep(500);
    __threadfence_system();
    for (u32 i = 0; i < n; i++) dst[i] = value;
}

__global__ void add(u32* dst, const u32* src, u32 n, u32 value) {
    if (!first()) return;
    for (u32 i = 0; i < n; i++) dst[i] = src[i] + value;
}

__global__ void add_wide(u32* dst, const u32* src, u32 n, u32 value) {
    if (!first()) return;
    for (u32 i = 0; i < n; i++) dst[i] = src[i] + value;
}

__global__ void step(u32* counter) {
    if (first()) atomicAdd(counter, 1);
}

__global__ void alone(u32* inside, u32* crowded) {
    if (!first()) return;
    if (atomicAdd(inside, 1) != 0) atomicExch(crowded, 1);
    for (int i = 0; i < 50; i++) __nanosleep(1000);
    atomicSub(inside, 1);
}

__global__ void indirect(u32** table, u32 value) {
    if (first()) **table = value;
}

__global__ void peek(const volatile unsigned char* src, u32 bytes) {
    if (!first()) return;
    for (u32 i = 0; i < bytes; i++) (void)src[i];
}

struct Span {
    u32* dst;
    u32 n;
};

__global__ void mixed(Span span, unsigned char a, unsigned long long b) {
    if (!first()) return;
    for (u32 i = 0; i < span.n; i++) span.dst[i] = a + (u32)b;
}

__global__ void burst() {
    __trap();
}

}
