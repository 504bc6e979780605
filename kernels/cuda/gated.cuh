// The gated unit of one element.
#pragma once
#include "common.cuh"

// The activation of a kernel that is to do without a gated unit.
#define NO_GLU 0xFFFFFFFFu

// `min` and `clamp` that keep what the host device's do: NaN gives the limit in `min`, and stays in `clamp`.
EVG_DEVICE float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// act(x) * y; x is cut at `limit` from above, y on both sides.
EVG_DEVICE float gated(u32 activation, float limit, float x, float y) {
    if (limit < infinity()) x = fminf(x, limit), y = clamp(y, limit);
    if (activation != 0) return x / (1.0f + expf(-x)) * y;
    // 0.5 (1 + tanh(u)) is 1 / (1 + exp(-2u)), which keeps its precision where tanh(u) is close to -1.
    const float inner = 0.7978846f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * inner)) * y;
}
