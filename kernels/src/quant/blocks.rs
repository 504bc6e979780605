//! Formats of 1 and of 32 elements a block. Layouts: the GGUF types of ggml (`ggml-common.h`).

use super::half::{bf16_to_f32, f16_to_f32};

#[inline(always)]
fn half(b: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([b[at], b[at + 1]]))
}

#[inline(always)]
fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

#[inline(always)]
pub(super) fn f32(b: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*b);
}

#[inline(always)]
pub(super) fn f16(b: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16_to_f32(u16::from_le_bytes(*b));
}

#[inline(always)]
pub(super) fn bf16(b: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = bf16_to_f32(u16::from_le_bytes(*b));
}

#[inline(always)]
pub(super) fn q4_0(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(b, 0);
    for j in 0..16 {
        out[j] = d * (i32::from(b[2 + j] & 15) - 8) as f32;
        out[j + 16] = d * (i32::from(b[2 + j] >> 4) - 8) as f32;
    }
}

#[inline(always)]
pub(super) fn q4_1(b: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half(b, 0), half(b, 2));
    for j in 0..16 {
        out[j] = d * f32::from(b[4 + j] & 15) + m;
        out[j + 16] = d * f32::from(b[4 + j] >> 4) + m;
    }
}

#[inline(always)]
pub(super) fn q5_0(b: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (half(b, 0), word(b, 2));
    for j in 0..16 {
        let low = i32::from(b[6 + j] & 15) | (((high >> j) & 1) << 4) as i32;
        let upper = i32::from(b[6 + j] >> 4) | (((high >> (j + 16)) & 1) << 4) as i32;
        out[j] = d * (low - 16) as f32;
        out[j + 16] = d * (upper - 16) as f32;
    }
}

#[inline(always)]
pub(super) fn q5_1(b: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, high) = (half(b, 0), half(b, 2), word(b, 4));
    for j in 0..16 {
        let low = u32::from(b[8 + j] & 15) | (((high >> j) & 1) << 4);
        let upper = u32::from(b[8 + j] >> 4) | (((high >> (j + 16)) & 1) << 4);
        out[j] = d * low as f32 + m;
        out[j + 16] = d * upper as f32 + m;
    }
}

#[inline(always)]
pub(super) fn q8_0(b: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(b, 0);
    for j in 0..32 {
        out[j] = d * f32::from(b[2 + j] as i8);
    }
}

/// Values of the 4-bit codes of IQ4_NL and IQ4_XS.
pub(super) const IQ4_CODES: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

#[inline(always)]
pub(super) fn iq4_nl(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(b, 0);
    for j in 0..16 {
        out[j] = d * IQ4_CODES[usize::from(b[2 + j] & 15)];
        out[j + 16] = d * IQ4_CODES[usize::from(b[2 + j] >> 4)];
    }
}

/// Values of the 4-bit floats (E2M1); as in ggml there is no negative zero.
pub(super) const FP4_CODES: [f32; 16] = [0., 0.5, 1., 1.5, 2., 3., 4., 6., 0., -0.5, -1., -1.5, -2., -3., -4., -6.];

/// Scale of an MXFP4 block and a factor of its codes.
#[inline(always)]
pub(crate) fn fp4_scale(e: u8) -> (f32, f32) {
    match e {
        // 2^-127 is subnormal.
        0 => (f32::from_bits(0x0040_0000), 1.0),
        // 2^128 is no float: ggml takes the doubled codes with half the scale, here as there.
        255 => (f32::from_bits(254 << 23), 2.0),
        e => (f32::from_bits(u32::from(e) << 23), 1.0),
    }
}

#[inline(always)]
pub(super) fn mxfp4(b: &[u8; 17], out: &mut [f32; 32]) {
    let (scale, factor) = fp4_scale(b[0]);
    for j in 0..16 {
        out[j] = scale * (factor * FP4_CODES[usize::from(b[1 + j] & 15)]);
        out[j + 16] = scale * (factor * FP4_CODES[usize::from(b[1 + j] >> 4)]);
    }
}
