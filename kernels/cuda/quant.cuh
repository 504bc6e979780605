// Blocks of quantised weights, 32 elements at a time.
//
// Layouts: the GGUF types of ggml (`ggml-common.h`). Every format comes down to one shape: 32 codes, each a byte, and for
// each half of 16 a factor and an offset, so that what multiplies them is written once:
//
//     element j = a[j / 16] * (code[j] - ZERO) + b[j / 16]
//
// Blocks may lie at any address that is a multiple of `ALIGN`; words are read at no wider alignment than that.
#pragma once

#include "grids.cuh"

#define TYPE_Q4_0 2u
#define TYPE_Q4_1 3u
#define TYPE_Q5_0 6u
#define TYPE_Q5_1 7u
#define TYPE_Q8_0 8u
#define TYPE_Q2_K 10u
#define TYPE_Q3_K 11u
#define TYPE_Q4_K 12u
#define TYPE_Q5_K 13u
#define TYPE_Q6_K 14u
#define TYPE_Q8_K 15u
#define TYPE_IQ2_XXS 16u
#define TYPE_IQ2_XS 17u
#define TYPE_IQ3_XXS 18u
#define TYPE_IQ4_NL 20u
#define TYPE_IQ3_S 21u
#define TYPE_IQ2_S 22u
#define TYPE_IQ4_XS 23u
#define TYPE_MXFP4 39u

// `DO(name)` for each block type, each float type.
#define FOR_BLOCK_TYPES(DO)                                                                                \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(Q8_K) DO(IQ4_NL) \
    DO(IQ4_XS) DO(MXFP4) DO(IQ2_XXS) DO(IQ2_XS) DO(IQ2_S) DO(IQ3_XXS) DO(IQ3_S)
#define FOR_FLOAT_TYPES(DO) DO(F32) DO(F16) DO(BF16)

// Elements that are decoded at a time.
#define UNIT 32u

// 32 elements of a row.
struct Unit {
    // Element 4 i + k is byte k of word i.
    u32 code[8];
    float a[2];
    float b[2];
};

// `N` words from an address that is a multiple of `ALIGN`. Never touches an aligned word that holds none of them.
template <u32 N, u32 ALIGN> EVG_DEVICE void load_words(const u8* from, u32* out) {
    if constexpr (ALIGN >= 16 && N % 4 == 0) {
        for (u32 i = 0; i < N; i += 4) {
            const uint4 v = reinterpret_cast<const uint4*>(from)[i / 4];
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
    } else if constexpr (ALIGN >= 8 && N % 2 == 0) {
        for (u32 i = 0; i < N; i += 2) {
            const uint2 v = reinterpret_cast<const uint2*>(from)[i / 2];
            out[i] = v.x, out[i + 1] = v.y;
        }
    } else if constexpr (ALIGN >= 4) {
        for (u32 i = 0; i < N; i++) out[i] = reinterpret_cast<const u32*>(from)[i];
    } else {
        const u32 off = u32(reinterpret_cast<u64>(from)) & 3u;
        const u32* aligned = reinterpret_cast<const u32*>(from - off);
        u32 low = aligned[0];
        for (u32 i = 0; i < N; i++) {
            // The word after the last one is another page's, perhaps.
            const u32 high = aligned[i + 1 < N || off ? i + 1 : i];
            out[i] = __funnelshift_r(low, high, 8 * off);
            low = high;
        }
    }
}

template <u32 ALIGN> EVG_DEVICE u32 load_u16(const u8* from) {
    if constexpr (ALIGN >= 2) return *reinterpret_cast<const u16*>(from);
    return u32(from[0]) | u32(from[1]) << 8;
}
template <u32 ALIGN> EVG_DEVICE float load_half(const u8* from) { return half_to_float(u16(load_u16<ALIGN>(from))); }

// Low nibbles, then high nibbles, of four words.
EVG_DEVICE void nibbles(const u32* words, u32* code) {
    for (u32 i = 0; i < 4; i++) {
        code[i] = words[i] & 0x0F0F0F0Fu;
        code[i + 4] = (words[i] >> 4) & 0x0F0F0F0Fu;
    }
}

// Adds bit j of `high` to code j as its bit 4.
EVG_DEVICE void fifth_bits(u32 high, u32* code) {
    // The product puts bit k of four where bit 8 k + 4 is; nothing carries.
    for (u32 i = 0; i < 8; i++) code[i] |= ((high >> (4 * i)) & 15u) * 0x02040810u & 0x10101010u;
}

// Replaces nibbles by bytes of a table of 16 (four words).
EVG_DEVICE void look_up(const u32* words, const u32* table, u32* code) {
    for (u32 i = 0; i < 4; i++) {
        u32 pair[2];
        for (u32 half = 0; half < 2; half++) {
            const u32 q = words[i] >> (16 * half);
            // Three bits choose a byte of each half of the table, the fourth the half.
            const u32 low = __byte_perm(table[0], table[1], q & 0x7777u), high = __byte_perm(table[2], table[3], q & 0x7777u);
            pair[half] = __byte_perm(low, high, 0x3210u | (q & 0x8888u) >> 1);
        }
        code[i] = __byte_perm(pair[0], pair[1], 0x6420u);
        code[i + 4] = __byte_perm(pair[0], pair[1], 0x7531u);
    }
}

// IQ4_NL's codes: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
EVG_DEVICE void look_up_iq4(const u32* words, u32* code) {
    const u32 table[4] = {0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u};
    look_up(words, table, code);
}

// The eight signs that seven bits stand for: an even number of them is set.
EVG_DEVICE u32 even_signs(u32 seven) { return seven | (u32(__popc(seven)) & 1u) << 7; }

// Four codes, those negated whose bit of `signs` is set. None is 0, so nothing carries.
EVG_DEVICE u32 with_signs(u32 code, u32 signs) {
    const u32 set = (signs & 15u) * 0x00204081u & 0x01010101u;
    return (code ^ set * 0xFFu) + set;
}

// Eight codes of an IQ2 entry.
EVG_DEVICE void grid_of_eight(u32 entry, u32 signs, u32* code) {
    for (u32 half = 0; half < 2; half++) {
        // Places of two bits apart, to one a nibble: numbers of the magnitudes 8, 25, 43.
        u32 places = entry >> (8 * half) & 0xFFu;
        places = (places | places << 4) & 0x0F0Fu;
        places = (places | places << 2) & 0x3333u;
        code[half] = with_signs(__byte_perm(0x002B1908u, 0, places), signs >> (4 * half));
    }
}

// Four codes of an IQ3 entry, by a table of eight magnitudes.
EVG_DEVICE u32 grid_of_four(u32 entry, u32 low, u32 high, u32 signs) { return with_signs(__byte_perm(low, high, entry), signs); }

// Scale and minimum of unit `u` of Q4_K and Q5_K.
EVG_DEVICE void scale_and_minimum(const u8* scales, u32 u, u32& scale, u32& minimum) {
    const u32 i = u & 3u;
    const u32 first = scales[i], second = scales[i + 4], third = scales[i + 8];
    scale = u < 4 ? first & 63u : (third & 15u) | (first >> 6) << 4;
    minimum = u < 4 ? second & 63u : third >> 4 | (second >> 6) << 4;
}

// What is known of a type. `unpack` reads unit `u` of the block at `p`, of which only the alignment `A` may be relied on.
// Offsets `b` are set for types with minima; for others they follow from ZERO.
template <u32 TYPE> struct Quant;

#define QUANT(TYPE, BLOCK_SIZE, BLOCK_BYTES, NATURAL, WITH_MINIMUM, WITH_HALVES, ZERO_CODE) \
    static constexpr u32 BLOCK = BLOCK_SIZE, BYTES = BLOCK_BYTES, ALIGN = NATURAL, UNITS = BLOCK_SIZE / UNIT; \
    static constexpr bool MINIMUM = WITH_MINIMUM, HALVES = WITH_HALVES; \
    static constexpr int ZERO = ZERO_CODE;

template <> struct Quant<TYPE_Q4_0> {
    QUANT(Q4_0, 32, 18, 2, false, false, 8)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        u32 words[4];
        load_words<4, A>(p + 2, words);
        nibbles(words, out.code);
        out.a[0] = load_half<A>(p);
    }
};

template <> struct Quant<TYPE_Q4_1> {
    QUANT(Q4_1, 32, 20, 4, true, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        u32 words[4];
        load_words<4, A>(p + 4, words);
        nibbles(words, out.code);
        out.a[0] = load_half<A>(p);
        out.b[0] = load_half<A>(p + 2);
    }
};

template <> struct Quant<TYPE_Q5_0> {
    QUANT(Q5_0, 32, 22, 2, false, false, 16)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        u32 words[5];
        load_words<5, A>(p + 2, words);
        nibbles(words + 1, out.code);
        fifth_bits(words[0], out.code);
        out.a[0] = load_half<A>(p);
    }
};

template <> struct Quant<TYPE_Q5_1> {
    QUANT(Q5_1, 32, 24, 8, true, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        u32 words[4], high;
        load_words<4, A>(p + 8, words);
        load_words<1, (A < 4 ? A : 4)>(p + 4, &high);
        nibbles(words, out.code);
        fifth_bits(high, out.code);
        out.a[0] = load_half<A>(p);
        out.b[0] = load_half<A>(p + 2);
    }
};

template <> struct Quant<TYPE_Q8_0> {
    QUANT(Q8_0, 32, 34, 2, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        load_words<8, A>(p + 2, out.code);
        out.a[0] = load_half<A>(p);
    }
};

template <> struct Quant<TYPE_Q2_K> {
    QUANT(Q2_K, 256, 84, 4, true, true, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        load_words<8, A>(p + 16 + 32 * (u / 4), out.code);
        for (u32 i = 0; i < 8; i++) out.code[i] = (out.code[i] >> (2 * (u & 3u))) & 0x03030303u;
        const float d = load_half<A>(p + 80), minimum = load_half<A>(p + 82);
        for (u32 h = 0; h < 2; h++) {
            const u32 scale = p[2 * u + h];
            out.a[h] = d * float(scale & 15u);
            out.b[h] = -(minimum * float(scale >> 4));
        }
    }
};

template <> struct Quant<TYPE_Q3_K> {
    QUANT(Q3_K, 256, 110, 2, false, true, 4)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        load_words<8, A>(p + 32 + 32 * (u / 4), out.code);
        // Half of the high bits at a time, which keeps them in registers.
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 high[4];
            load_words<4, A>(p + 16 * h, high);
            for (u32 i = 0; i < 4; i++) {
                const u32 low = out.code[4 * h + i] >> (2 * (u & 3u)) & 0x03030303u;
                out.code[4 * h + i] = low | (high[i] >> u & 0x01010101u) << 2;
            }
        }
        const float d = load_half<A>(p + 108);
        for (u32 h = 0; h < 2; h++) {
            const u32 k = 2 * u + h, group = k >> 2;
            const u32 low = p[96 + (k & 3u) + 4 * (group & 1u)] >> (4 * (group >> 1)), upper = p[104 + (k & 3u)] >> (2 * group);
            out.a[h] = d * float(int((low & 15u) | (upper & 3u) << 4) - 32);
        }
    }
};

template <> struct Quant<TYPE_Q4_K> {
    QUANT(Q4_K, 256, 144, 16, true, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        load_words<8, A>(p + 16 + 32 * (u / 2), out.code);
        for (u32 i = 0; i < 8; i++) out.code[i] = (out.code[i] >> (4 * (u & 1u))) & 0x0F0F0F0Fu;
        u32 scale, minimum;
        scale_and_minimum(p + 4, u, scale, minimum);
        out.a[0] = load_half<A>(p) * float(scale);
        out.b[0] = -(load_half<A>(p + 2) * float(minimum));
    }
};

template <> struct Quant<TYPE_Q5_K> {
    QUANT(Q5_K, 256, 176, 16, true, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 high[8];
        load_words<8, A>(p + 48 + 32 * (u / 2), out.code);
        load_words<8, A>(p + 16, high);
        for (u32 i = 0; i < 8; i++)
            out.code[i] = ((out.code[i] >> (4 * (u & 1u))) & 0x0F0F0F0Fu) | ((high[i] >> u) & 0x01010101u) << 4;
        u32 scale, minimum;
        scale_and_minimum(p + 4, u, scale, minimum);
        out.a[0] = load_half<A>(p) * float(scale);
        out.b[0] = -(load_half<A>(p + 2) * float(minimum));
    }
};

template <> struct Quant<TYPE_Q6_K> {
    QUANT(Q6_K, 256, 210, 2, false, true, 32)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        const u32 n = u / 4, plane = u & 3u;
        u32 high[8];
        load_words<8, A>(p + 64 * n + 32 * (plane & 1u), out.code);
        load_words<8, A>(p + 128 + 32 * n, high);
        for (u32 i = 0; i < 8; i++)
            out.code[i] = ((out.code[i] >> (4 * (plane >> 1))) & 0x0F0F0F0Fu) | ((high[i] >> (2 * plane)) & 0x03030303u) << 4;
        const float d = load_half<A>(p + 208);
        for (u32 h = 0; h < 2; h++) out.a[h] = d * float(i8(p[192 + 2 * u + h]));
    }
};

template <> struct Quant<TYPE_Q8_K> {
    QUANT(Q8_K, 256, 292, 4, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 d;
        load_words<8, A>(p + 4 + 32 * u, out.code);
        load_words<1, A>(p, &d);
        out.a[0] = __uint_as_float(d);
    }
};

template <> struct Quant<TYPE_IQ4_NL> {
    QUANT(IQ4_NL, 32, 18, 2, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        u32 words[4];
        load_words<4, A>(p + 2, words);
        look_up_iq4(words, out.code);
        out.a[0] = load_half<A>(p);
    }
};

template <> struct Quant<TYPE_IQ4_XS> {
    QUANT(IQ4_XS, 256, 136, 8, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 words[4];
        load_words<4, A>(p + 8 + 16 * u, words);
        look_up_iq4(words, out.code);
        const u32 low = p[4 + u / 2] >> (4 * (u & 1u)), high = load_u16<A>(p + 2) >> (2 * u);
        out.a[0] = load_half<A>(p) * float(int((low & 15u) | (high & 3u) << 4) - 32);
    }
};

template <> struct Quant<TYPE_MXFP4> {
    QUANT(MXFP4, 32, 17, 1, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32, Unit& out) {
        // Twice the values of the 4-bit floats, and half the scale: 0 1 2 3 4 6 8 12 and their negatives.
        const u32 table[4] = {0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu};
        u32 words[4];
        load_words<4, A>(p + 1, words);
        look_up(words, table, out.code);
        // Two to the power of e - 128; the two least are subnormal.
        const u32 e = p[0];
        out.a[0] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

template <> struct Quant<TYPE_IQ2_XXS> {
    QUANT(IQ2_XXS, 256, 66, 2, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 words[2];
        load_words<2, A>(p + 2 + 8 * u, words);
        for (u32 i = 0; i < 4; i++)
            grid_of_eight(GRID_IQ2_XXS[words[0] >> (8 * i) & 255u], even_signs(words[1] >> (7 * i) & 127u), out.code + 2 * i);
        out.a[0] = load_half<A>(p) * (0.5f + float(words[1] >> 28)) * 0.25f;
    }
};

template <> struct Quant<TYPE_IQ2_XS> {
    QUANT(IQ2_XS, 256, 74, 2, false, true, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 words[2];
        load_words<2, A>(p + 2 + 8 * u, words);
        for (u32 i = 0; i < 4; i++) {
            const u32 w = words[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
            grid_of_eight(GRID_IQ2_XS[w & 511u], even_signs(w >> 9), out.code + 2 * i);
        }
        const float d = load_half<A>(p);
        const u32 scales = p[66 + u];
        for (u32 h = 0; h < 2; h++) out.a[h] = d * (0.5f + float(scales >> (4 * h) & 15u)) * 0.25f;
    }
};

template <> struct Quant<TYPE_IQ2_S> {
    QUANT(IQ2_S, 256, 82, 2, false, true, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 low, signs;
        load_words<1, A>(p + 2 + 4 * u, &low);
        load_words<1, A>(p + 34 + 4 * u, &signs);
        const u32 high = p[66 + u], scales = p[74 + u];
        for (u32 i = 0; i < 4; i++) {
            const u32 entry = (low >> (8 * i) & 255u) | (high >> (2 * i) & 3u) << 8;
            grid_of_eight(GRID_IQ2_S[entry], signs >> (8 * i), out.code + 2 * i);
        }
        const float d = load_half<A>(p);
        for (u32 h = 0; h < 2; h++) out.a[h] = d * (0.5f + float(scales >> (4 * h) & 15u)) * 0.25f;
    }
};

template <> struct Quant<TYPE_IQ3_XXS> {
    QUANT(IQ3_XXS, 256, 98, 2, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 words[2], rest;
        load_words<2, A>(p + 2 + 8 * u, words);
        load_words<1, A>(p + 66 + 4 * u, &rest);
        for (u32 i = 0; i < 8; i++) {
            const u32 signs = even_signs(rest >> (7 * (i / 2)) & 127u) >> (4 * (i % 2));
            // Magnitudes 4 12 20 28 36 44 52 62.
            const u32 entry = GRID_IQ3_XXS[words[i / 4] >> (8 * (i % 4)) & 255u];
            out.code[i] = grid_of_four(entry, 0x1C140C04u, 0x3E342C24u, signs);
        }
        out.a[0] = load_half<A>(p) * (0.5f + float(rest >> 28)) * 0.5f;
    }
};

template <> struct Quant<TYPE_IQ3_S> {
    QUANT(IQ3_S, 256, 110, 2, false, false, 0)
    template <u32 A> static EVG_DEVICE void unpack(const u8* p, u32 u, Unit& out) {
        u32 words[2], signs;
        load_words<2, A>(p + 2 + 8 * u, words);
        load_words<1, A>(p + 74 + 4 * u, &signs);
        const u32 high = p[66 + u];
        for (u32 i = 0; i < 8; i++) {
            // Magnitudes 1 3 5 7 9 11 13 15.
            const u32 entry = GRID_IQ3_S[(words[i / 4] >> (8 * (i % 4)) & 255u) | (high >> i & 1u) << 8];
            out.code[i] = grid_of_four(entry, 0x07050301u, 0x0F0D0B09u, signs >> (4 * i));
        }
        out.a[0] = load_half<A>(p) * float(1u + 2u * (u32(p[106 + u / 2]) >> (4 * (u & 1u)) & 15u));
    }
};

#undef QUANT

// Element `j` of a unit, the very bits that the host's code gives. Offsets are -0 where a type has none, which changes nothing.
EVG_DEVICE float unit_value(const Unit& unit, int zero, u32 j) {
    const int code = int(i8(unit.code[j / 4] >> (8 * (j % 4))));
    return __fadd_rn(__fmul_rn(unit.a[j / 16], float(code - zero)), unit.b[j / 16]);
}

// Offsets of the two halves where codes are multiplied as they stand.
template <u32 TYPE> EVG_DEVICE float unit_offset(const Unit& unit, u32 h) {
    using Q = Quant<TYPE>;
    h = Q::HALVES ? h : 0;
    return Q::MINIMUM ? unit.b[h] : float(-Q::ZERO) * unit.a[h];
}

// A unit times 32 activations of eight bits: `d` is their scale, `s` is `d` times the sum of each half.
template <u32 TYPE> EVG_DEVICE float unit_dot_q8(const Unit& unit, const int* x, float d, float s0, float s1) {
    using Q = Quant<TYPE>;
    int i0 = 0, i1 = 0;
    for (u32 i = 0; i < 4; i++) i0 = dp4a(int(unit.code[i]), x[i], i0);
    for (u32 i = 4; i < 8; i++) i1 = dp4a(int(unit.code[i]), x[i], i1);
    float y;
    if constexpr (Q::HALVES) {
        y = d * (unit.a[0] * float(i0) + unit.a[1] * float(i1));
        y += unit_offset<TYPE>(unit, 0) * s0 + unit_offset<TYPE>(unit, 1) * s1;
    } else {
        y = d * (unit.a[0] * float(i0 + i1));
        if constexpr (Q::MINIMUM || Q::ZERO != 0) y += unit_offset<TYPE>(unit, 0) * (s0 + s1);
    }
    return y;
}

// A unit times 32 floats: `s` is the sum of each half.
template <u32 TYPE> EVG_DEVICE float unit_dot(const Unit& unit, const float4* x, float s0, float s1) {
    using Q = Quant<TYPE>;
    float sum[2] = {0.0f, 0.0f};
    for (u32 i = 0; i < 8; i++) {
        const float4 v = x[i];
        float& to = sum[i / 4];
        const u32 code = unit.code[i];
        to = fmaf(float(int(i8(code))), v.x, to);
        to = fmaf(float(int(i8(code >> 8))), v.y, to);
        to = fmaf(float(int(i8(code >> 16))), v.z, to);
        to = fmaf(float(int(i8(code >> 24))), v.w, to);
    }
    float y = Q::HALVES ? unit.a[0] * sum[0] + unit.a[1] * sum[1] : unit.a[0] * (sum[0] + sum[1]);
    if constexpr (Q::HALVES) {
        y += unit_offset<TYPE>(unit, 0) * s0 + unit_offset<TYPE>(unit, 1) * s1;
    } else if constexpr (Q::MINIMUM || Q::ZERO != 0) {
        y += unit_offset<TYPE>(unit, 0) * (s0 + s1);
    }
    return y;
}

// `job.run<TYPE>()` for the block type of this number. Any other is a fault.
template <class Job> EVG_DEVICE void with_block_type(u32 type, Job& job) {
    switch (type) {
#define CASE(NAME) \
    case TYPE_##NAME: job.template run<TYPE_##NAME>(); break;
        FOR_BLOCK_TYPES(CASE)
#undef CASE
    default: evg_fault("no block type");
    }
}

// Elements and bytes of a block, at run time.
EVG_DEVICE void block_shape(u32 type, u32& elements, u32& bytes) {
    elements = 1, bytes = 0;
    switch (type) {
    case TYPE_F32:
    case TYPE_I32: bytes = 4; break;
    case TYPE_F16:
    case TYPE_BF16: bytes = 2; break;
#define CASE(NAME) \
    case TYPE_##NAME: elements = Quant<TYPE_##NAME>::BLOCK, bytes = Quant<TYPE_##NAME>::BYTES; break;
        FOR_BLOCK_TYPES(CASE)
#undef CASE
    default: evg_fault("no element type");
    }
}

// Element `i` of a row of floats of this type.
EVG_DEVICE float float_value(u32 type, const u8* row, u64 i) {
    if (type == TYPE_F32) return reinterpret_cast<const float*>(row)[i];
    const u16 bits = reinterpret_cast<const u16*>(row)[i];
    return type == TYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// Unit `u` of a row of blocks, which may lie at any address.
template <u32 TYPE, u32 A> EVG_DEVICE void unpack_of_row(const u8* row, u32 u, Unit& out) {
    using Q = Quant<TYPE>;
    Q::template unpack<A>(row + u64(u / Q::UNITS) * Q::BYTES, u % Q::UNITS, out);
}

// The same for a type known at run time, with both halves' factors and offsets set; `zero` is what codes are too great by.
struct Unpack {
    const u8* row;
    u32 u;
    Unit unit;
    int zero;
    template <u32 TYPE> EVG_DEVICE void run() {
        using Q = Quant<TYPE>;
        unpack_of_row<TYPE, 1>(row, u, unit);
        if (!Q::HALVES) unit.a[1] = unit.a[0];
        if (!Q::MINIMUM) unit.b[0] = unit.b[1] = -0.0f;
        if (Q::MINIMUM && !Q::HALVES) unit.b[1] = unit.b[0];
        zero = Q::ZERO;
    }
};
