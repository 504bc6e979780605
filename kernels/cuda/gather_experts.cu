// out[k] = w[ids[k]], `bytes` each, but for ids of -1. Grid: pieces of an expert, places.
#include "common.cuh"

// Words of a size that both sides are aligned to; several loads of each thread are under way at once, since the way may be long.
template <class Word> EVG_DEVICE void copy_words(const u8* from, u8* to, u64 bytes) {
    constexpr u32 AT_ONCE = 8;
    const u64 words = bytes / sizeof(Word), step = u64(gridDim.x) * blockDim.x;
    const Word* src = reinterpret_cast<const Word*>(from);
    Word* dst = reinterpret_cast<Word*>(to);
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + (AT_ONCE - 1) * step < words; i += AT_ONCE * step) {
        Word held[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) held[k] = src[i + k * step];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) dst[i + k * step] = held[k];
    }
    for (; i < words; i += step) dst[i] = src[i];
}

EVG_KERNEL(gather_experts, EVG_BOUNDS(256))(const u8* w, u32 experts, u64 bytes, const int* ids, u32 places, u8* out) {
    evg_begin();
    for (u32 place = blockIdx.y; place < places; place += gridDim.y) {
        const int id = ids[place];
        if (id == -1) continue;
        if (u32(id) >= experts) evg_fault("expert id out of range");
        const u8* from = w + u64(id) * bytes;
        u8* to = out + u64(place) * bytes;
        const u64 alignment = reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to) | bytes;
        if ((alignment & 15u) == 0) copy_words<uint4>(from, to, bytes);
        else if ((alignment & 1u) == 0) copy_words<u16>(from, to, bytes);
        else copy_words<u8>(from, to, bytes);
    }
}
