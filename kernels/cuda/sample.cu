// The choice of the next token, in one block: penalty, greedy, or top-k, top-p, min-p, temperature and draw.
//
// Tokens are ordered by rank: the logit's bits, made to sort as whole numbers, above the complement of the token's number.
// Ranks are unique, so "the k-th best" has one answer. With few tokens left to choose from they are sorted in shared memory
// and summed one by one, as the host device does. Else sums are of whole numbers (probabilities in fixed point, whose order
// does not matter), and the token at which a sum is reached is found digit by digit.
#include "greatest.cuh"

#define THREADS 1024u
// Entries of a sorted list, and buckets.
#define LIST 1024u
// Tokens whose bits are in shared memory at a time.
#define SEGMENT 131072u

struct State {
    u64 seed, counter;
    float temp;
    int top_k;
    float top_p, min_p, penalty;
    int last_n;
    u64 recent_len;
};

struct Scratch {
    u32 said[SEGMENT / 32];
    u64 list[LIST];
    u64 buckets[LIST];
    u64 warps[32];
    u64 found, left;
    u32 count, bucket;
};

struct Vocabulary {
    const float* logits;
    u32 size;
    const int* recent;
    u64 first_said;
    u32 said, ring;
    float penalty;
};

// Calls f(token, logit) for every token, with the penalty for those that were said.
template <class F> static EVG_DEVICE void each_logit(const Vocabulary& v, Scratch& s, F f) {
    for (u32 base = 0; base < v.size; base += SEGMENT) {
        const u32 end = min_u32(v.size - base, SEGMENT);
        if (v.said) {
            __syncthreads();
#pragma unroll 1
            for (u32 i = threadIdx.x; i < SEGMENT / 32; i += THREADS) s.said[i] = 0;
            __syncthreads();
#pragma unroll 1
            for (u32 i = threadIdx.x; i < v.said; i += THREADS) {
                const int token = v.recent[(v.first_said + i) % v.ring];
                if (token >= 0 && u32(token) >= base && u32(token) - base < end)
                    atomicOr(&s.said[(u32(token) - base) / 32], 1u << (u32(token) % 32));
            }
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < end; i += THREADS) {
            float logit = v.logits[base + i];
            if (v.said && (s.said[i / 32] >> (i % 32) & 1u)) logit = logit > 0.0f ? logit / v.penalty : logit * v.penalty;
            f(base + i, logit);
        }
    }
    __syncthreads();
}

static EVG_DEVICE u64 rank(float logit, u32 token) {
    const u32 bits = __float_as_uint(logit), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return u64(key) << 32 | (0xFFFFFFFFu - token);
}
static EVG_DEVICE float logit_of(u64 rank) {
    const u32 key = u32(rank >> 32);
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
static EVG_DEVICE u32 token_of(u64 rank) { return 0xFFFFFFFFu - u32(rank); }

// exp(below / temp): a probability before it is divided by the sum.
static EVG_NOINLINE double share(float below, float temp) { return exp(double(below) / double(temp)); }

// What a token adds to a sum: one, or its probability in fixed point.
struct Weight {
    bool mass;
    float top, temp;
    double unit;
    EVG_DEVICE u64 of(float logit) const {
        return mass ? u64(share(logit - top, temp) * unit) : 1;
    }
};

// Buckets by the distance from the best: narrow, and in the order of ranks.
static EVG_DEVICE u32 bucket_of(float logit, float top) { return u32(fminf((top - logit) * 32.0f, float(LIST - 1))); }

// Adds up the buckets; the thread of the one in which the sum reaches `target` notes it, and how much is wanted of it.
// Returns the sum of all.
static EVG_DEVICE u64 locate(Scratch& s, u64 target) {
    const u64 mine = s.buckets[threadIdx.x];
    u64 sum = mine;
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 below = __shfl_up_sync(FULL_WARP, sum, by);
        if (lane_id() >= by) sum += below;
    }
    if (lane_id() == 31) s.warps[warp_id()] = sum;
    __syncthreads();
    u64 before = 0, total = 0;
    for (u32 i = 0; i < 32; i++) {
        if (i < warp_id()) before += s.warps[i];
        total += s.warps[i];
    }
    sum += before;
    if (sum >= target && sum - mine < target) {
        s.bucket = threadIdx.x;
        s.left = target - (sum - mine);
    }
    __syncthreads();
    return total;
}

// The rank at which the sum of weights, best first, reaches `target`, among tokens of at least `floor`. 0 if none does.
static EVG_NOINLINE u64 reach(const Vocabulary& v, Scratch& s, u64 floor, float top, Weight weight, u64 target) {
    s.buckets[threadIdx.x] = 0;
    __syncthreads();
    each_logit(v, s, [&](u32 token, float logit) {
        if (logit == logit && rank(logit, token) >= floor) {
            const u64 w = weight.of(logit);
            if (w) atomicAdd(&s.buckets[bucket_of(logit, top)], w);
        }
    });
    if (locate(s, target) < target) return 0;
    const u32 bucket = s.bucket;
    target = s.left;
    u64 known = 0;
    // Six digits of ten bits and one of four.
    for (int shift = 54; shift >= 0; shift = shift > 4 ? shift - 10 : shift - 4) {
        const int bits = shift == 0 ? 4 : 10;
        const u64 mask = (1ull << bits) - 1;
        __syncthreads();
        s.buckets[threadIdx.x] = 0;
        __syncthreads();
        each_logit(v, s, [&](u32 token, float logit) {
            if (logit != logit || bucket_of(logit, top) != bucket) return;
            const u64 r = rank(logit, token);
            if (r < floor || (shift + bits < 64 && r >> (shift + bits) != known)) return;
            const u64 w = weight.of(logit);
            if (w) atomicAdd(&s.buckets[mask - (r >> shift & mask)], w);
        });
        locate(s, target);
        known = known << bits | (mask - s.bucket);
        target = s.left;
    }
    __syncthreads();
    return known;
}

// The sum of weights of tokens of at least `floor`.
static EVG_NOINLINE u64 total_of(const Vocabulary& v, Scratch& s, u64 floor, Weight weight) {
    u64 sum = 0;
    each_logit(v, s, [&](u32 token, float logit) {
        if (logit == logit && rank(logit, token) >= floor) sum += weight.of(logit);
    });
    return block_sum(sum);
}

// Number `counter` of the sequence of `seed`, in [0, 1): SplitMix64 (Steele, Lea, Flood 2014), 53 bits.
static EVG_DEVICE u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static EVG_DEVICE double uniform(u64 seed, u64 counter) {
    return double(mix(mix(seed) + (counter + 1) * 0x9E3779B97F4A7C15ull) >> 11) / 9007199254740992.0;
}

// Puts all tokens for which `wanted` holds into the list, best first; returns how many there are. At most LIST.
template <class F> static EVG_DEVICE u32 gather(const Vocabulary& v, Scratch& s, F wanted) {
    if (threadIdx.x == 0) s.count = 0;
    s.list[threadIdx.x] = 0;
    __syncthreads();
    each_logit(v, s, [&](u32 token, float logit) {
        if (logit == logit && wanted(token, logit)) {
            const u32 place = atomicAdd(&s.count, 1u);
            if (place < LIST) s.list[place] = rank(logit, token);
        }
    });
    const u32 count = min_u32(s.count, LIST), i = threadIdx.x;
    // Bitonic sort; whatever order they came in.
    for (u32 size = 2; size / 2 < count; size *= 2) {
        for (u32 step = size / 2; step > 0; step /= 2) {
            const u32 other = i ^ step;
            if (other > i) {
                const u64 a = s.list[i], b = s.list[other];
                if ((a < b) == ((i & size) == 0)) s.list[i] = b, s.list[other] = a;
            }
            __syncthreads();
        }
    }
    return count;
}

// As the host device has it: sums in the order of the list.
static EVG_NOINLINE u32 draw_from_list(Scratch& s, const State& state, u32 count) {
    double* shares = reinterpret_cast<double*>(s.buckets);
    const u32 i = threadIdx.x;
    const float top = logit_of(s.list[0]), mine = logit_of(s.list[i < count ? i : 0]);
    shares[i] = share(mine - top, 1.0f);
    __syncthreads();
    if (i == 0) {
        if (state.top_p < 1.0f) {
            double total = 0.0, sum = 0.0;
            for (u32 j = 0; j < count; j++) total += shares[j];
            for (u32 j = 0; j < count; j++) {
                sum += shares[j] / total;
                if (sum >= double(state.top_p)) count = j + 1;
            }
        }
        if (state.min_p > 0.0f) {
            u32 kept = 0;
            while (kept < count && shares[kept] >= double(state.min_p)) kept++;
            count = kept ? kept : 1;
        }
        s.count = count;
    }
    __syncthreads();
    count = s.count;
    shares[i] = share(mine - top, state.temp);
    __syncthreads();
    if (i == 0) {
        double total = 0.0;
        for (u32 j = 0; j < count; j++) total += shares[j];
        double left = uniform(state.seed, state.counter) * total;
        u32 chosen = 0;
        for (u32 j = 0; j < count; j++) {
            left -= shares[j];
            if (left < 0.0) {
                chosen = j;
                break;
            }
        }
        s.count = token_of(s.list[chosen]);
    }
    __syncthreads();
    return s.count;
}

// NOWHERE if none can be chosen.
static EVG_NOINLINE u32 draw(const Vocabulary& v, Scratch& s, const State& state) {
    // The best.
    u64 best = 0;
    each_logit(v, s, [&](u32 token, float logit) {
        const u64 r = rank(logit, token);
        if (logit == logit && r > best) best = r;
    });
    for (int distance = 16; distance > 0; distance >>= 1) {
        const u64 other = __shfl_xor_sync(FULL_WARP, best, distance);
        if (other > best) best = other;
    }
    if (lane_id() == 0) s.warps[warp_id()] = best;
    __syncthreads();
    for (u32 i = 0; i < 32; i++)
        if (s.warps[i] > best) best = s.warps[i];
    __syncthreads();
    if (best == 0) return NOWHERE;
    const float top = logit_of(best);
    // Probabilities are no numbers then.
    if (fabsf(top) == infinity()) return NOWHERE;

    const bool all = state.top_k <= 0 || u32(state.top_k) >= v.size;
    const Weight one = {false, top, 1.0f, 0.0};
    u64 floor = 0;
    if (!all) {
        // The bucket of the k-th; those in it and before it are often few.
        const u32 k = u32(state.top_k);
        s.buckets[threadIdx.x] = 0;
        __syncthreads();
        each_logit(v, s, [&](u32, float logit) {
            if (logit == logit) atomicAdd(&s.buckets[bucket_of(logit, top)], 1ull);
        });
        const u64 there = locate(s, k);
        const u32 bucket = there < k ? LIST - 1 : s.bucket;
        const u64 upto = there < k ? there : k - s.left + s.buckets[bucket];
        __syncthreads();
        if (upto <= LIST) {
            const u32 count = gather(v, s, [&](u32, float logit) { return bucket_of(logit, top) <= bucket; });
            return draw_from_list(s, state, min_u32(count, k));
        }
        floor = reach(v, s, 0, top, one, k);
        if (k <= LIST) {
            const u32 count = gather(v, s, [&](u32 token, float logit) { return rank(logit, token) >= floor; });
            return draw_from_list(s, state, min_u32(count, k));
        }
    } else if (v.size <= LIST) {
        return draw_from_list(s, state, gather(v, s, [](u32, float) { return true; }));
    }

    // Sums of as many ones as there are tokens fit 63 bits.
    const double unit = double(1ull << (31 + __clz(int(v.size)) - 1));
    if (state.top_p < 1.0f) {
        const Weight mass = {true, top, 1.0f, unit};
        const u64 total = total_of(v, s, floor, mass);
        const double share = state.top_p > 0.0f ? ceil(double(state.top_p) * double(total)) : 0.0;
        const u64 last = reach(v, s, floor, top, mass, share < 1.0 ? 1 : u64(share));
        if (last > floor) floor = last;
    }
    if (state.min_p > 0.0f) {
        u64 least = best;
        each_logit(v, s, [&](u32 token, float logit) {
            const u64 r = rank(logit, token);
            if (logit == logit && r >= floor && r < least && share(logit - top, 1.0f) >= double(state.min_p)) least = r;
        });
        for (int distance = 16; distance > 0; distance >>= 1) {
            const u64 other = __shfl_xor_sync(FULL_WARP, least, distance);
            if (other < least) least = other;
        }
        if (lane_id() == 0) s.warps[warp_id()] = least;
        __syncthreads();
        for (u32 i = 0; i < 32; i++)
            if (s.warps[i] < least) least = s.warps[i];
        __syncthreads();
        floor = least;
    }
    const Weight mass = {true, top, state.temp, unit};
    const u64 total = total_of(v, s, floor, mass);
    const u64 target = u64(uniform(state.seed, state.counter) * double(total)) + 1;
    const u64 chosen = reach(v, s, floor, top, mass, target);
    return token_of(chosen ? chosen : best);
}

EVG_KERNEL(sample, EVG_BOUNDS(1024))(const char* logits, u32 vocabulary, char* state_at, char* recent, u32 ring, char* token) {
    evg_begin();
    __shared__ Scratch s;
    if (block_threads() != THREADS) evg_fault("launched with another number of threads");
    State* const stored = at<State>(state_at, 0);
    const State state = *stored;
    Vocabulary v = {at<float>(logits, 0), vocabulary, at<int>(recent, 0), 0, 0, ring, state.penalty};
    if (state.penalty != 1.0f && state.penalty > 0.0f) {
        const u64 held = state.recent_len < ring ? state.recent_len : ring;
        v.said = u32(state.last_n < 0 || u64(state.last_n) > held ? held : u64(state.last_n));
        v.first_said = state.recent_len - v.said;
    }
    u32 chosen;
    if (state.temp > 0.0f) {
        chosen = draw(v, s, state);
    } else {
        Greatest best = Greatest::none();
        if (v.said)
            each_logit(v, s, [&](u32 token, float logit) { best.take(logit, token); });
        else
            best = take_row(best, v.logits, vocabulary);
        best = block_greatest(best);
        chosen = fabsf(best.value) == infinity() ? NOWHERE : best.place;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        stored->counter = state.counter + 1;
        stored->recent_len = state.recent_len + 1;
        // NOWHERE is -1: the caller sees that logits are no numbers.
        at<int>(token, 0)[0] = int(chosen);
        at<int>(recent, 0)[state.recent_len % ring] = int(chosen);
    }
}
