#include "choice.cuh"
#include "greatest.cuh"

// The best of `count` ranks that is above minus infinity; place 0 if there is none, as with NaN.
static EVG_DEVICE u32 best_of(const float* ranks, u32 count) {
    Greatest best = Greatest::none();
    for (u32 i = lane_id(); i < count; i += 32)
        if (ranks[i] > -infinity()) best.take(ranks[i], i);
    best = warp_greatest(best);
    return best.place == NOWHERE ? 0 : best.place;
}

// The K best experts of each token and their weights. One warp a token; shared memory holds scores and ranks of all
// experts and the sums of the groups.
EVG_KERNEL(router, EVG_BOUNDS(32))(const char* logits, u64 stride, const char* bias, char* ids, char* weights, u32 tokens, u32 experts, u32 used,
    u32 scoring, u32 groups, u32 groups_used, u32 greatest, u32 norm, float scale) {
    evg_begin();
    EVG_DYNAMIC_SHARED(float, scores);
    float *ranks = scores + experts, *sums = ranks + experts;
    const u32 lane = lane_id(), size = experts / groups;
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const float* row = at<float>(logits, t * stride);
        float factor = 1.0f, top = 0.0f;
        if (scoring == 0) {
            top = -infinity();
            for (u32 i = lane; i < experts; i += 32) top = fmaxf(top, row[i]);
            top = warp_max(top);
            float sum = 0.0f;
            for (u32 i = lane; i < experts; i += 32) sum += expf(row[i] - top);
            factor = warp_sum(sum);
        }
        for (u32 i = lane; i < experts; i += 32) {
            const float value = scoring == 0 ? expf(row[i] - top) / factor : score(row[i], scoring);
            scores[i] = value;
            ranks[i] = bias ? value + at<float>(bias, 0)[i] : value;
        }
        __syncwarp();
        if (groups > 1) {
            for (u32 g = lane; g < groups; g += 32) {
                float first = -infinity(), second = -infinity();
                for (u32 i = g * size; i < (g + 1) * size; i++) {
                    const float r = ranks[i];
                    if (r > first)
                        second = first, first = r;
                    else if (r > second)
                        second = r;
                }
                sums[g] = greatest == 1 ? first : first + second;
            }
            __syncwarp();
            // A group that is kept is marked by its sum: no sum of two ranks is this NaN.
            const u32 kept = 0x7FC0BEEFu;
            for (u32 k = 0; k < groups_used; k++) {
                const u32 best = best_of(sums, groups);
                __syncwarp();
                if (lane == 0) sums[best] = __uint_as_float(kept);
                __syncwarp();
            }
            for (u32 i = lane; i < experts; i += 32)
                if (__float_as_uint(sums[i / size]) != kept) ranks[i] = -infinity();
            __syncwarp();
        }
        float sum = 0.0f;
        for (u32 k = 0; k < used; k++) {
            const u32 best = best_of(ranks, experts);
            const float weight = scores[best];
            sum += weight;
            __syncwarp();
            if (lane == 0) {
                ranks[best] = -infinity();
                at<int>(ids, 0)[u64(t) * used + k] = int(best);
                at<float>(weights, 0)[u64(t) * used + k] = weight;
            }
            __syncwarp();
        }
        const float by = norm == 1 ? scale / fmaxf(sum, 1.17549435e-38f) : scale;
        for (u32 k = lane; k < used; k += 32) at<float>(weights, 0)[u64(t) * used + k] *= by;
        __syncwarp();
    }
}

// The experts that a table names for each token, and their weights. One warp a token.
EVG_KERNEL(hash_router, EVG_BOUNDS(32))(const char* logits, u64 stride, const char* table, u32 vocabulary, const char* numbers, char* ids,
    char* weights, u32 tokens, u32 experts, u32 used, u32 scoring, u32 norm, float scale) {
    evg_begin();
    const u32 lane = lane_id();
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        const float* row = at<float>(logits, t * stride);
        const u32 number = u32(at<int>(numbers, 0)[t]);
        if (number >= vocabulary) evg_fault("token number out of range");
        const int* chosen = at<int>(table, u64(number) * used * 4);
        float factor = 1.0f, top = 0.0f;
        if (scoring == 0) {
            top = -infinity();
            for (u32 i = lane; i < experts; i += 32) top = fmaxf(top, row[i]);
            top = warp_max(top);
            float all = 0.0f;
            for (u32 i = lane; i < experts; i += 32) all += expf(row[i] - top);
            factor = warp_sum(all);
        }
        float* to = at<float>(weights, u64(t) * used * 4);
        float sum = 0.0f;
        for (u32 first = 0; first < used; first += 32) {
            const u32 k = first + lane;
            float value = 0.0f;
            if (k < used) {
                const u32 expert = u32(chosen[k]);
                if (expert >= experts) evg_fault("expert id out of range");
                value = scoring == 0 ? expf(row[expert] - top) / factor : score(row[expert], scoring);
                at<int>(ids, u64(t) * used * 4)[k] = int(expert);
                to[k] = value;
            }
            sum += warp_sum(value);
        }
        const float times = norm == 1 ? scale / fmaxf(sum, 1.17549435e-38f) : scale;
        __syncwarp();
        for (u32 k = lane; k < used; k += 32) to[k] *= times;
    }
}
