//! The IQ2 and IQ3 formats: 256 elements a block, magnitudes by the entry of a grid, signs apart. Layouts: the GGUF types of
//! ggml (`ggml-common.h`).
//!
//! They are unpacked into codes and scales (see [`codes`](super::codes)); floats are made from those, which is exact: a scale
//! has 16 bits at most and a magnitude 6.

mod tables;

use tables::{GRID_IQ2_S, GRID_IQ2_XS, GRID_IQ2_XXS, GRID_IQ3_S, GRID_IQ3_XXS};

use super::codes::half;

/// The code of 0. The greatest magnitude is 62.
pub(super) const ZERO: u8 = 64;

const ONES: u64 = 0x0101_0101_0101_0101;

/// Entries of eight places, as codes of positive elements.
const fn eights<const N: usize>(grid: &[u16; N]) -> [u64; N] {
    let mut codes = [0; N];
    let mut i = 0;
    while i < N {
        let mut place = 0;
        while place < 8 {
            let magnitude = tables::IQ2[(grid[i] >> (2 * place)) as usize & 3];
            codes[i] |= ((ZERO + magnitude) as u64) << (8 * place);
            place += 1;
        }
        i += 1;
    }
    codes
}

/// Entries of four places.
const fn fours<const N: usize>(grid: &[u16; N], magnitudes: &[u8; 8]) -> [u32; N] {
    let mut codes = [0; N];
    let mut i = 0;
    while i < N {
        let mut place = 0;
        while place < 4 {
            let magnitude = magnitudes[(grid[i] >> (4 * place)) as usize & 7];
            codes[i] |= ((ZERO + magnitude) as u32) << (8 * place);
            place += 1;
        }
        i += 1;
    }
    codes
}

/// For each byte of signs, what negates eight codes: 127 where the bit is set.
const fn signs() -> [u64; 256] {
    let mut masks = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut bit = 0;
        while bit < 8 {
            masks[i] |= (127 * (i as u64 >> bit & 1)) << (8 * bit);
            bit += 1;
        }
        i += 1;
    }
    masks
}

/// The same for seven bits, which stand for eight with an even number of them set.
const fn even_signs() -> [u64; 128] {
    let all = signs();
    let mut masks = [0; 128];
    let mut i = 0;
    while i < 128 {
        masks[i] = all[i | (i.count_ones() as usize & 1) << 7];
        i += 1;
    }
    masks
}

static IQ2_XXS: [u64; 256] = eights(&GRID_IQ2_XXS);
static IQ2_XS: [u64; 512] = eights(&GRID_IQ2_XS);
static IQ2_S: [u64; 1024] = eights(&GRID_IQ2_S);
static IQ3_XXS: [u32; 256] = fours(&GRID_IQ3_XXS, &tables::IQ3_XXS);
static IQ3_S: [u32; 512] = fours(&GRID_IQ3_S, &tables::IQ3_S);
static SIGNS: [u64; 256] = signs();
static EVEN_SIGNS: [u64; 128] = even_signs();

/// Codes of eight elements from those of positive ones: 64 + m becomes 64 - m, which is 127 less it, and 1. No byte carries.
#[inline(always)]
fn signed(positive: u64, signs: u64) -> [u8; 8] {
    ((positive ^ signs) + (signs & ONES)).to_le_bytes()
}

#[inline(always)]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline(always)]
fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

type Scales = [f32; 16];

#[inline(always)]
pub(super) fn iq2_xxs<const L: u8>(b: &[u8; 66], codes: &mut [u8; 256], scales: &mut Scales, _: &mut Scales) {
    let d = half::<L>(b, 0);
    for (k, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let w = word(b, 6 + 8 * k);
        let scale = d * (0.5 + (w >> 28) as f32) * 0.25;
        [scales[2 * k], scales[2 * k + 1]] = [scale; 2];
        for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let entry = IQ2_XXS[usize::from(b[2 + 8 * k + i])];
            *codes = signed(entry, EVEN_SIGNS[(w >> (7 * i)) as usize & 127]);
        }
    }
}

#[inline(always)]
pub(super) fn iq2_xs<const L: u8>(b: &[u8; 74], codes: &mut [u8; 256], scales: &mut Scales, _: &mut Scales) {
    let d = half::<L>(b, 0);
    fifteenths(d, &b[66..], scales);
    for (k, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let w = usize::from(u16::from_le_bytes([b[2 + 2 * k], b[3 + 2 * k]]));
        *codes = signed(IQ2_XS[w & 511], EVEN_SIGNS[w >> 9]);
    }
}

#[inline(always)]
pub(super) fn iq2_s<const L: u8>(b: &[u8; 82], codes: &mut [u8; 256], scales: &mut Scales, _: &mut Scales) {
    let d = half::<L>(b, 0);
    fifteenths(d, &b[74..], scales);
    for (k, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = usize::from(b[66 + k / 4] >> (2 * (k % 4)) & 3);
        *codes = signed(IQ2_S[usize::from(b[2 + k]) | high << 8], SIGNS[usize::from(b[34 + k])]);
    }
}

/// Sixteen scales of four bits, for 16 elements each.
#[inline(always)]
fn fifteenths(d: f32, packed: &[u8], scales: &mut Scales) {
    for (scales, &packed) in scales.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        *scales = [packed & 15, packed >> 4].map(|s| d * (0.5 + f32::from(s)) * 0.25);
    }
}

#[inline(always)]
pub(super) fn iq3_xxs<const L: u8>(b: &[u8; 98], codes: &mut [u8; 256], scales: &mut Scales, _: &mut Scales) {
    let d = half::<L>(b, 0);
    for (k, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let w = word(b, 66 + 4 * k);
        let scale = d * (0.5 + (w >> 28) as f32) * 0.5;
        [scales[2 * k], scales[2 * k + 1]] = [scale; 2];
        for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let entry = |at: usize| IQ3_XXS[usize::from(b[2 + 8 * k + 2 * i + at])];
            *codes = signed(pair(entry(0), entry(1)), EVEN_SIGNS[(w >> (7 * i)) as usize & 127]);
        }
    }
}

#[inline(always)]
pub(super) fn iq3_s<const L: u8>(b: &[u8; 110], codes: &mut [u8; 256], scales: &mut Scales, _: &mut Scales) {
    let d = half::<L>(b, 0);
    for (k, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let s = b[106 + k / 2] >> (4 * (k % 2)) & 15;
        [scales[2 * k], scales[2 * k + 1]] = [d * f32::from(1 + 2 * s); 2];
        for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let entry = |at: usize| {
                let high = usize::from(b[66 + k] >> (2 * i + at) & 1);
                IQ3_S[usize::from(b[2 + 8 * k + 2 * i + at]) | high << 8]
            };
            *codes = signed(pair(entry(0), entry(1)), SIGNS[usize::from(b[74 + 4 * k + i])]);
        }
    }
}

/// The values of a block.
#[inline(always)]
pub(super) fn values<const B: usize>(
    unpack: impl Fn(&[u8; B], &mut [u8; 256], &mut Scales, &mut Scales),
) -> impl Fn(&[u8; B], &mut [f32; 256]) {
    move |b, out| {
        let (mut codes, mut scales) = ([0; 256], [0.0; 16]);
        unpack(b, &mut codes, &mut scales, &mut [0.0; 16]);
        for ((out, codes), scale) in out.as_chunks_mut::<16>().0.iter_mut().zip(codes.as_chunks::<16>().0).zip(scales) {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(code as i8 - ZERO as i8);
            }
        }
    }
}

#[cfg(test)]
mod tests;
