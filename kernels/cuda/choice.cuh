// The choice of a token's experts by one warp that has all scores in its registers: what `router` gives without groups, to the same bits.
#pragma once
#include "common.cuh"

#define CHOICE_MOST 256u
#define CHOICE_MOST_USED 32u
#define CHOICE_EACH (CHOICE_MOST / 32u)

// From a logit to a score, but for a softmax.
EVG_DEVICE float score(float logit, u32 scoring) {
    if (scoring == 1) return 1.0f / (1.0f + expf(-logit));
    // softplus(x) = max(x, 0) + ln(1 + exp(-|x|)) overflows nowhere.
    return sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
}

struct Choice {
    int ids[CHOICE_MOST_USED];
    float weights[CHOICE_MOST_USED];
    float scores[CHOICE_MOST];
};

// Greater for greater floats; 0 for minus infinity and NaN, which are never chosen.
EVG_DEVICE u32 rank_key(float rank) {
    if (!(rank > -infinity())) return 0;
    // -0 and 0 are equals.
    const u32 bits = rank == 0.0f ? 0u : __float_as_uint(rank);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// `to` is in shared memory. At most CHOICE_MOST experts, CHOICE_MOST_USED used.
EVG_DEVICE void choose(const float* logits, const float* bias, u32 experts, u32 used, u32 scoring, u32 norm, float scale, Choice& to) {
    const u32 lane = lane_id();
    float values[CHOICE_EACH];
    u32 keys[CHOICE_EACH];
    float top = -infinity();
#pragma unroll
    for (u32 j = 0; j < CHOICE_EACH; j++) {
        values[j] = lane + 32 * j < experts ? logits[lane + 32 * j] : -infinity();
        top = fmaxf(top, values[j]);
    }
    float factor = 1.0f;
    if (scoring == 0) {
        top = warp_max(top);
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < CHOICE_EACH; j++) {
            values[j] = expf(values[j] - top);
            if (lane + 32 * j < experts) sum += values[j];
        }
        factor = warp_sum(sum);
    }
#pragma unroll
    for (u32 j = 0; j < CHOICE_EACH; j++) {
        const u32 i = lane + 32 * j;
        keys[j] = 0;
        if (i >= experts) continue;
        const float value = scoring == 0 ? values[j] / factor : score(values[j], scoring);
        to.scores[i] = value;
        keys[j] = rank_key(bias ? value + bias[i] : value);
    }
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 1
    for (u32 k = 0; k < used; k++) {
        u32 key = 0, place = 0xFFFFFFFFu;
#pragma unroll
        for (u32 j = 0; j < CHOICE_EACH; j++)
            if (keys[j] > key) key = keys[j], place = lane + 32 * j;
        const u32 greatest = warp_greatest_u32(key);
        // The first of equals; the first of all where nothing may be chosen.
        const u32 best = greatest == 0 ? 0 : warp_least_u32(key == greatest ? place : 0xFFFFFFFFu);
#pragma unroll
        for (u32 j = 0; j < CHOICE_EACH; j++)
            if (best == lane + 32 * j) keys[j] = 0;
        const float weight = to.scores[best];
        sum += weight;
        if (lane == 0) to.ids[k] = int(best), to.weights[k] = weight;
    }
    __syncwarp();
    const float by = norm == 1 ? scale / fmaxf(sum, 1.17549435e-38f) : scale;
    if (lane < used) to.weights[lane] *= by;
    __syncwarp();
}
