// Frequencies of rotary embeddings.
#pragma once
#include "common.cuh"

// base^(-i/pairs) * scale, divided by a factor or blended (YaRN, where `original` is not 0): slow frequencies are interpolated, fast
// ones stay, a linear ramp between.
struct Frequencies {
    u32 pairs;
    float base, scale, yarn_factor;
    double low, high;
    bool blended;

    EVG_DEVICE Frequencies(u32 pairs, float base, float scale, float yarn_factor, u32 original, float beta_fast, float beta_slow)
        : pairs(pairs), base(base), scale(scale), yarn_factor(yarn_factor), low(0.0), high(0.0), blended(original > 0) {
        if (blended) {
            const double n = 2.0 * pairs, log_base = 2.0 * log(double(base)), turn = 2.0 * 3.14159265358979323846;
            low = fmax(floor(n * log(original / (turn * double(beta_fast))) / log_base), 0.0);
            high = fmin(ceil(n * log(original / (turn * double(beta_slow))) / log_base), n - 1.0);
        }
    }

    // Rounded to f32 where the host device rounds: a position multiplies the difference.
    EVG_DEVICE float plain(u32 i) const { return float(pow(double(base), -double(i) / double(pairs)) * double(scale)); }

    EVG_DEVICE float blend(float frequency, u32 i) const {
        if (!blended) return frequency;
        const double ramp = fmin(fmax((double(i) - low) / fmax(high - low, 0.001), 0.0), 1.0), value = frequency;
        return float(value * (1.0 - ramp) + value / double(yarn_factor) * ramp);
    }

    EVG_DEVICE float operator()(u32 i) const { return blend(plain(i), i); }
};
