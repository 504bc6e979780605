//! Formats of 256 elements a block. Layouts: the GGUF types of ggml (`ggml-common.h`).

use super::blocks::IQ4_CODES;
use super::half::f16_to_f32;

#[inline(always)]
fn half(b: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([b[at], b[at + 1]]))
}

#[inline(always)]
pub(super) fn q2_k(b: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (half(b, 80), half(b, 82));
    for n in 0..2 {
        for s in 0..4 {
            for group in 0..2 {
                let scale = b[8 * n + 2 * s + group];
                let (factor, minimum) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
                for l in 0..16 {
                    let q = (b[16 + 32 * n + 16 * group + l] >> (2 * s)) & 3;
                    out[128 * n + 32 * s + 16 * group + l] = factor * f32::from(q) - minimum;
                }
            }
        }
    }
}

/// The sixteen six-bit scales of Q3_K, 32 too great.
#[inline(always)]
pub(crate) fn q3_scales(b: &[u8; 110]) -> [i32; 16] {
    let packed = &b[96..108];
    let mut scales = [0i32; 16];
    for k in 0..4 {
        let (a, m, c) = (i32::from(packed[k]), i32::from(packed[4 + k]), i32::from(packed[8 + k]));
        scales[k] = (a & 15) | ((c & 3) << 4);
        scales[4 + k] = (m & 15) | (((c >> 2) & 3) << 4);
        scales[8 + k] = (a >> 4) | (((c >> 4) & 3) << 4);
        scales[12 + k] = (m >> 4) | (((c >> 6) & 3) << 4);
    }
    scales
}

#[inline(always)]
pub(super) fn q3_k(b: &[u8; 110], out: &mut [f32; 256]) {
    let d = half(b, 108);
    let scales = q3_scales(b);
    for n in 0..2 {
        for s in 0..4 {
            for group in 0..2 {
                let factor = d * (scales[8 * n + 2 * s + group] - 32) as f32;
                for l in 16 * group..16 * group + 16 {
                    let low = i32::from((b[32 + 32 * n + l] >> (2 * s)) & 3);
                    let high = i32::from((b[l] >> (4 * n + s)) & 1);
                    out[128 * n + 32 * s + l] = factor * (low - 4 + 4 * high) as f32;
                }
            }
        }
    }
}

/// The eight (scale, minimum) pairs of Q4_K and Q5_K.
#[inline(always)]
pub(super) fn pairs(s: &[u8; 12]) -> [(u8, u8); 8] {
    let mut pairs = [(0, 0); 8];
    for j in 0..4 {
        pairs[j] = (s[j] & 63, s[j + 4] & 63);
        pairs[j + 4] = ((s[j + 8] & 15) | ((s[j] >> 6) << 4), (s[j + 8] >> 4) | ((s[j + 4] >> 6) << 4));
    }
    pairs
}

#[inline(always)]
pub(super) fn scales(b: &[u8]) -> [u8; 12] {
    let mut scales = [0; 12];
    scales.copy_from_slice(&b[4..16]);
    scales
}

#[inline(always)]
pub(super) fn q4_k(b: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin, pairs) = (half(b, 0), half(b, 2), pairs(&scales(b)));
    for c in 0..4 {
        let (low, high) = (pairs[2 * c], pairs[2 * c + 1]);
        let (d0, m0) = (d * f32::from(low.0), dmin * f32::from(low.1));
        let (d1, m1) = (d * f32::from(high.0), dmin * f32::from(high.1));
        for l in 0..32 {
            let q = b[16 + 32 * c + l];
            out[64 * c + l] = d0 * f32::from(q & 15) - m0;
            out[64 * c + 32 + l] = d1 * f32::from(q >> 4) - m1;
        }
    }
}

#[inline(always)]
pub(super) fn q5_k(b: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin, pairs) = (half(b, 0), half(b, 2), pairs(&scales(b)));
    for c in 0..4 {
        let (low, high) = (pairs[2 * c], pairs[2 * c + 1]);
        let (d0, m0) = (d * f32::from(low.0), dmin * f32::from(low.1));
        let (d1, m1) = (d * f32::from(high.0), dmin * f32::from(high.1));
        for l in 0..32 {
            let (q, h) = (b[48 + 32 * c + l], b[16 + l]);
            out[64 * c + l] = d0 * f32::from((q & 15) | (((h >> (2 * c)) & 1) << 4)) - m0;
            out[64 * c + 32 + l] = d1 * f32::from((q >> 4) | (((h >> (2 * c + 1)) & 1) << 4)) - m1;
        }
    }
}

#[inline(always)]
pub(super) fn q6_k(b: &[u8; 210], out: &mut [f32; 256]) {
    let d = half(b, 208);
    for n in 0..2 {
        let (ql, qh, sc) = (64 * n, 128 + 32 * n, 192 + 8 * n);
        for group in 0..2 {
            let mut factors = [0.0; 4];
            for (plane, factor) in factors.iter_mut().enumerate() {
                *factor = d * f32::from(b[sc + group + 2 * plane] as i8);
            }
            for l in 16 * group..16 * group + 16 {
                let (low, upper, high) = (b[ql + l], b[ql + 32 + l], b[qh + l]);
                let q = [
                    (low & 15) | ((high & 3) << 4),
                    (upper & 15) | (((high >> 2) & 3) << 4),
                    (low >> 4) | (((high >> 4) & 3) << 4),
                    (upper >> 4) | ((high >> 6) << 4),
                ];
                for plane in 0..4 {
                    out[128 * n + 32 * plane + l] = factors[plane] * (i32::from(q[plane]) - 32) as f32;
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn q8_k(b: &[u8; 292], out: &mut [f32; 256]) {
    let d = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    for j in 0..256 {
        out[j] = d * f32::from(b[4 + j] as i8);
    }
}

#[inline(always)]
pub(super) fn iq4_xs(b: &[u8; 136], out: &mut [f32; 256]) {
    let d = half(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for s in 0..8 {
        let low = (b[4 + s / 2] >> (4 * (s % 2))) & 15;
        let scale = i32::from(low) | i32::from((high >> (2 * s)) & 3) << 4;
        let factor = d * (scale - 32) as f32;
        for j in 0..16 {
            let q = b[8 + 16 * s + j];
            out[32 * s + j] = factor * IQ4_CODES[usize::from(q & 15)];
            out[32 * s + 16 + j] = factor * IQ4_CODES[usize::from(q >> 4)];
        }
    }
}
