// Another module with a function of the same name that does something else.

typedef unsigned int u32;

extern "C" __global__ void add(u32* dst, const u32* src, u32 n, u32 value) {
    for (u32 i = 0; i < n; i++) dst[i] = src[i] - value;
}
