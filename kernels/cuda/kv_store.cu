#include "cache.cuh"

#define PIECE 1024u

template <class T> static EVG_DEVICE void store(const char* src, u64 src_head, char* cache, u64 cache_head, u32 ty, u32 cols, u32 first, u32 end) {
    for (u32 i = first + threadIdx.x; i < end; i += block_threads()) {
        const u32 h = i / cols, c = i % cols;
        at<T>(cache, h * cache_head)[c] = narrow<T>(at<float>(src, h * src_head)[c], ty);
    }
}

// cache[positions[t]] = src[t], converted. Blocks take pieces of a token's heads * cols elements.
EVG_KERNEL(kv_store, EVG_BOUNDS(256))(const char* src, u64 src_stride, u64 src_head, const char* positions, char* cache, u32 ty, u32 capacity,
    u64 cache_stride, u64 cache_head, u32 tokens, u32 heads, u32 cols, u32 ring) {
    evg_begin();
    const u32 elements = heads * cols, pieces = ceil_div(elements, PIECE);
    for (u64 item = blockIdx.x; item < u64(tokens) * pieces; item += gridDim.x) {
        const u32 t = u32(item / pieces), first = u32(item % pieces) * PIECE, end = min_u32(elements, first + PIECE);
        const int position = at<int>(positions, 0)[t];
        const u32 row = ring == 1 ? u32(position) % capacity : u32(position);
        if (position < 0 || row >= capacity) evg_fault("position outside the cache");
        const char* from = src + t * src_stride;
        char* to = cache + row * cache_stride;
        if (ty == TYPE_F32)
            store<float>(from, src_head, to, cache_head, ty, cols, first, end);
        else
            store<u16>(from, src_head, to, cache_head, ty, cols, first, end);
    }
}
