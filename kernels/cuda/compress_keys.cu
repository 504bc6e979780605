#include "cache.cuh"
#include "yarn.cuh"

// Gates and values of one channel over the slots of a window.
struct Slots {
    const char *rows, *ape;
    u64 stride;
    u32 ty, capacity, channels, d, ratio, end;
    bool before;

    EVG_DEVICE u32 count() const { return before ? 2 * ratio : ratio; }
    // The last slots are this window's, those before them the window's before.
    EVG_DEVICE const float* row(u32 slot) const { return at<float>(rows, u64((end + 1 - count() + slot) % capacity) * stride); }
    EVG_DEVICE u32 channel(u32 slot, u32 c) const { return before && slot < ratio ? c : channels - d + c; }
    EVG_DEVICE float gate(u32 slot, u32 c) const {
        const u32 own = channel(slot, c);
        return row(slot)[channels + own] + element(ape, ty, (slot % ratio) * channels + own);
    }
};

// The compressed key of each window that ends at one of the tokens. One block a token; most have nothing to do.
EVG_KERNEL(compress_keys, EVG_BOUNDS(256))(const char* rows, u64 rows_stride, u32 capacity, const char* ape, u32 ape_ty, const char* weight,
    const char* positions, char* cache, u32 ty, u32 entries, u64 cache_stride, u32 tokens, u32 d, u32 ratio, u32 overlap, float eps,
    u32 dims, float base, float yarn_factor, u32 original, float beta_fast, float beta_slow) {
    evg_begin();
    EVG_DYNAMIC_SHARED(float, entry);
    const u32 threads = block_threads();
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const int position = at<int>(positions, 0)[t];
        if (position < 0) evg_fault("position outside the cache");
        if ((u32(position) + 1) % ratio) continue;
        const u32 window = u32(position) / ratio;
        if (window >= entries) evg_fault("position outside the cache");
        const u32 channels = overlap == 1 ? 2 * d : d;
        const Slots slots = {rows, ape, rows_stride, ape_ty, capacity, channels, d, ratio, u32(position), overlap == 1 && window > 0};
        float squares = 0.0f;
        for (u32 c = threadIdx.x; c < d; c += threads) {
            float top = -infinity(), weights = 0.0f, values = 0.0f;
            for (u32 i = 0; i < slots.count(); i++) top = fmaxf(top, slots.gate(i, c));
            for (u32 i = 0; i < slots.count(); i++) {
                const float p = expf(slots.gate(i, c) - top);
                weights += p;
                values = fmaf(p, slots.row(i)[slots.channel(i, c)], values);
            }
            const float value = values / weights;
            entry[c] = value;
            squares = fmaf(value, value, squares);
        }
        const float factor = 1.0f / sqrtf(block_sum(squares) / float(d) + eps);
        for (u32 c = threadIdx.x; c < d; c += threads) entry[c] *= factor * at<float>(weight, 0)[c];
        __syncthreads();
        const Frequencies frequencies(dims / 2, base, 1.0f, yarn_factor, original, beta_fast, beta_slow);
        for (u32 p = threadIdx.x; p < dims / 2; p += threads) {
            float sine, cosine;
            sincosf(float(window * ratio) * frequencies(p), &sine, &cosine);
            float* pair = entry + d - dims + 2 * p;
            const float u = pair[0], v = pair[1];
            pair[0] = u * cosine - v * sine;
            pair[1] = u * sine + v * cosine;
        }
        __syncthreads();
        char* to = cache + u64(window) * cache_stride;
        for (u32 c = threadIdx.x; c < d; c += threads) {
            if (ty == TYPE_F32)
                at<float>(to, 0)[c] = entry[c];
            else
                at<u16>(to, 0)[c] = narrow<u16>(entry[c], ty);
        }
        __syncthreads();
    }
}
