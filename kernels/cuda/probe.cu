// Probe kernels: tiny, with arithmetic that can be done in the head. Words are 32 bits and wrap around.
#include "common.cuh"

#define EACH_WORD(i, len) for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < len; i += gridDim.x * blockDim.x)

// out[i] = value + i
EVG_KERNEL(probe_fill)(u32* out, u32 len, u32 value) {
    EACH_WORD(i, len) out[i] = value + i;
}

// out[i] = input[i] + k
EVG_KERNEL(probe_add)(const u32* input, u32* out, u32 len, u32 k) {
    EACH_WORD(i, len) out[i] = input[i] + k;
}

// out[i] = 3 a[i] + b[i]
EVG_KERNEL(probe_mix)(const u32* a, const u32* b, u32* out, u32 len) {
    EACH_WORD(i, len) out[i] = 3 * a[i] + b[i];
}

// state[i] += input[i]
EVG_KERNEL(probe_accumulate)(const u32* input, u32* state, u32 len) {
    EACH_WORD(i, len) state[i] += input[i];
}

// out[i] = sum over j of table[j][i]
EVG_KERNEL(probe_gather)(const u64* table, u32* out, u32 rows, u32 len) {
    EACH_WORD(i, len) {
        u32 sum = 0;
        for (u32 j = 0; j < rows; j++) sum += reinterpret_cast<const u32*>(table[j])[i];
        out[i] = sum;
    }
}

// p = place[0], seq[p] = 3 p, place[1] = seq[0] + ... + seq[p], place[0] = p + 1
EVG_KERNEL(probe_append)(u32* seq, u32* place) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const u32 p = place[0];
        seq[p] = 3 * p;
        u32 sum = 0;
        for (u32 i = 0; i <= p; i++) sum += seq[i];
        place[0] = p + 1;
        place[1] = sum;
    }
}

// cell[1] = cell[0], then cell[0] += 1
EVG_KERNEL(probe_count)(u32* cell) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const u32 old = cell[0];
        cell[1] = old;
        cell[0] = old + 1;
    }
}
