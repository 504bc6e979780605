//! Blocks as integers: codes of one byte and a scale (and minimum) for each 16 of them, for products with quantised
//! activations. Each format becomes the same three lists, so that there is one product for all of them.

use super::blocks::{IQ4_CODES, fp4_scale};
use super::half::f16_to_f32;
use super::kquants::{pairs, q3_scales, scales};
use super::{QuantType, grids};
use crate::cpu::simd::per_level;

/// Elements that share an entry of the lists of scales and minima.
pub(crate) const GROUP: usize = 16;

/// How the codes of a type are to be read: element `i` is `scales[i / 16] * (codes[i] - zero) + minima[i / 16]`, with the
/// rounding of the format's own formula, so exactly the value that [`dequantize`](super::dequantize) gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Format {
    /// The code of 0. Where it is not 128, codes are at most 128: two products of them then fit 16 bits.
    pub(crate) zero: u8,
    /// Whether entries of scales and minima come in equal pairs, one for 32 elements.
    pub(crate) wide: bool,
    /// Whether there are minima.
    pub(crate) minima: bool,
}

impl Format {
    /// The format of a type of blocks.
    pub(crate) fn of(ty: QuantType) -> Option<Self> {
        let (zero, wide, minima) = match ty {
            QuantType::Q4_0 => (8, true, false),
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => (0, true, true),
            QuantType::Q5_0 => (16, true, false),
            QuantType::Q8_0 | QuantType::Q8_K | QuantType::IQ4_NL | QuantType::IQ4_XS => (128, true, false),
            QuantType::MXFP4 => (FP4_ZERO, true, false),
            QuantType::IQ2_XXS | QuantType::IQ3_XXS | QuantType::IQ3_S => (grids::ZERO, true, false),
            QuantType::IQ2_XS | QuantType::IQ2_S => (grids::ZERO, false, false),
            QuantType::Q2_K => (0, false, true),
            QuantType::Q3_K => (4, false, false),
            QuantType::Q6_K => (32, false, false),
            _ => return None,
        };
        Some(Self { zero, wide, minima })
    }
}

/// Where codes go: rows of `stride` codes (a multiple of 16), and their entries. What lies behind the end of a row is left
/// as it was.
pub(crate) struct Codes<'a> {
    pub(crate) stride: usize,
    pub(crate) codes: &'a mut [u8],
    pub(crate) scales: &'a mut [f32],
    pub(crate) minima: &'a mut [f32],
}

per_level! {
    /// Unpacks bytes `from .. from + bytes` (whole blocks) of each row in `w`.
    pub(crate) fn unpack(
        ty: QuantType,
        w: &[u8],
        row_bytes: usize,
        from: usize,
        bytes: usize,
        to: &mut Codes<'_>,
    ) = unpack_body
}

#[inline(always)]
fn unpack_body<const L: u8>(ty: QuantType, w: &[u8], row_bytes: usize, from: usize, bytes: usize, to: &mut Codes<'_>) {
    #[inline(always)]
    fn each<const B: usize, const N: usize, const G: usize>(
        bytes: &[u8],
        (codes, scales, minima): (&mut [u8], &mut [f32], &mut [f32]),
        f: impl Fn(&[u8; B], &mut [u8; N], &mut [f32; G], &mut [f32; G]),
    ) {
        let to = codes.as_chunks_mut::<N>().0.iter_mut().zip(scales.as_chunks_mut::<G>().0);
        let to = to.zip(minima.as_chunks_mut::<G>().0);
        for (b, ((codes, scales), minima)) in bytes.as_chunks::<B>().0.iter().zip(to) {
            #[cfg(target_arch = "x86_64")]
            (0..B).step_by(64).for_each(|at| x86::ahead(b.as_ptr().wrapping_add(at)));
            f(b, codes, scales, minima);
        }
    }
    let entries = to.stride / GROUP;
    let rows = to.codes.chunks_exact_mut(to.stride).zip(to.scales.chunks_exact_mut(entries));
    let rows = rows.zip(to.minima.chunks_exact_mut(entries));
    for (row, ((codes, scales), minima)) in w.chunks_exact(row_bytes).zip(rows) {
        let (b, to) = (&row[from..from + bytes], (codes, scales, minima));
        match ty {
            QuantType::Q4_0 => each(b, to, q4_0::<L>),
            QuantType::Q4_1 => each(b, to, q4_1::<L>),
            QuantType::Q5_0 => each(b, to, q5_0::<L>),
            QuantType::Q5_1 => each(b, to, q5_1::<L>),
            QuantType::Q8_0 => each(b, to, q8_0::<L>),
            QuantType::Q2_K => each(b, to, q2_k::<L>),
            QuantType::Q3_K => each(b, to, q3_k::<L>),
            QuantType::Q4_K => each(b, to, q4_k::<L>),
            QuantType::Q5_K => each(b, to, q5_k::<L>),
            QuantType::Q6_K => each(b, to, q6_k::<L>),
            QuantType::Q8_K => each(b, to, q8_k::<L>),
            QuantType::IQ4_NL => each(b, to, iq4_nl::<L>),
            QuantType::IQ4_XS => each(b, to, iq4_xs::<L>),
            QuantType::MXFP4 => each(b, to, mxfp4::<L>),
            QuantType::IQ2_XXS => each(b, to, grids::iq2_xxs::<L>),
            QuantType::IQ2_XS => each(b, to, grids::iq2_xs::<L>),
            QuantType::IQ2_S => each(b, to, grids::iq2_s::<L>),
            QuantType::IQ3_XXS => each(b, to, grids::iq3_xxs::<L>),
            QuantType::IQ3_S => each(b, to, grids::iq3_s::<L>),
            // Ops refuse the rest when they check their weights.
            _ => {}
        }
    }
}

#[inline(always)]
pub(super) fn half<const L: u8>(b: &[u8], at: usize) -> f32 {
    let bits = u16::from_le_bytes([b[at], b[at + 1]]);
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    if L > 0 {
        // SAFETY: levels above 0 run only where F16C was found.
        return unsafe { x86::half(bits) };
    }
    f16_to_f32(bits)
}

/// Signed bytes, made 128 greater.
#[inline(always)]
fn signed<const L: u8>(q: &[u8], codes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    if L > 0 {
        for (codes, q) in codes.as_chunks_mut::<32>().0.iter_mut().zip(q.as_chunks::<32>().0) {
            // SAFETY: levels above 0 run only where AVX2 was found.
            unsafe { x86::signed(q, codes) };
        }
        return;
    }
    for (code, q) in codes.as_chunks_mut::<8>().0.iter_mut().zip(q.as_chunks::<8>().0) {
        *code = (u64::from_ne_bytes(*q) ^ 0x8080_8080_8080_8080).to_ne_bytes();
    }
}

/// Low halves of 16 bytes, then high ones.
#[inline(always)]
fn nibbles(q: &[u8], codes: &mut [u8; 32]) {
    for (l, &q) in q[..16].iter().enumerate() {
        codes[l] = q & 15;
        codes[16 + l] = q >> 4;
    }
}

/// The same, each looked up.
#[inline(always)]
fn lookup<const L: u8>(q: &[u8], table: &[u8; 16], codes: &mut [u8]) {
    let (Some(q), Some(codes)) = (q.first_chunk::<16>(), codes.first_chunk_mut::<32>()) else { return };
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    if L > 0 {
        // SAFETY: levels above 0 run only where AVX2 was found.
        unsafe { x86::lookup(q, table, codes) };
        return;
    }
    for (l, &q) in q.iter().enumerate() {
        codes[l] = table[usize::from(q & 15)];
        codes[16 + l] = table[usize::from(q >> 4)];
    }
}

/// Adds 16 to the codes whose bit is set.
#[inline(always)]
fn fifth<const L: u8>(bits: u32, codes: &mut [u8; 32]) {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    if L > 0 {
        // SAFETY: levels above 0 run only where AVX2 was found.
        unsafe { x86::fifth(bits, codes) };
        return;
    }
    for (l, code) in codes.iter_mut().enumerate() {
        *code |= (((bits >> l) & 1) << 4) as u8;
    }
}

type Entry2 = [f32; 2];
type Entry16 = [f32; 16];

#[inline(always)]
fn q4_0<const L: u8>(b: &[u8; 18], codes: &mut [u8; 32], scales: &mut Entry2, _: &mut Entry2) {
    *scales = [half::<L>(b, 0); 2];
    nibbles(&b[2..], codes);
}

#[inline(always)]
fn q4_1<const L: u8>(b: &[u8; 20], codes: &mut [u8; 32], scales: &mut Entry2, minima: &mut Entry2) {
    *scales = [half::<L>(b, 0); 2];
    *minima = [half::<L>(b, 2); 2];
    nibbles(&b[4..], codes);
}

#[inline(always)]
fn q5_0<const L: u8>(b: &[u8; 22], codes: &mut [u8; 32], scales: &mut Entry2, _: &mut Entry2) {
    *scales = [half::<L>(b, 0); 2];
    nibbles(&b[6..], codes);
    fifth::<L>(u32::from_le_bytes([b[2], b[3], b[4], b[5]]), codes);
}

#[inline(always)]
fn q5_1<const L: u8>(b: &[u8; 24], codes: &mut [u8; 32], scales: &mut Entry2, minima: &mut Entry2) {
    *scales = [half::<L>(b, 0); 2];
    *minima = [half::<L>(b, 2); 2];
    nibbles(&b[8..], codes);
    fifth::<L>(u32::from_le_bytes([b[4], b[5], b[6], b[7]]), codes);
}

#[inline(always)]
fn q8_0<const L: u8>(b: &[u8; 34], codes: &mut [u8; 32], scales: &mut Entry2, _: &mut Entry2) {
    *scales = [half::<L>(b, 0); 2];
    signed::<L>(&b[2..], codes);
}

/// The values of IQ4 codes, 128 greater.
pub(crate) const IQ4: [u8; 16] = {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (IQ4_CODES[i] as i32 + 128) as u8;
        i += 1;
    }
    table
};

#[inline(always)]
fn iq4_nl<const L: u8>(b: &[u8; 18], codes: &mut [u8; 32], scales: &mut Entry2, _: &mut Entry2) {
    *scales = [half::<L>(b, 0); 2];
    lookup::<L>(&b[2..], &IQ4, codes);
}

const FP4_ZERO: u8 = 12;

/// Twice the values of 4-bit floats, [`FP4_ZERO`] greater.
pub(crate) const FP4: [u8; 16] = {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (2.0 * super::blocks::FP4_CODES[i]) as i32 as u8;
        table[i] = table[i].wrapping_add(FP4_ZERO);
        i += 1;
    }
    table
};

#[inline(always)]
fn mxfp4<const L: u8>(b: &[u8; 17], codes: &mut [u8; 32], scales: &mut Entry2, _: &mut Entry2) {
    let (scale, factor) = fp4_scale(b[0]);
    // Exact: powers of two, the smallest of them 2^-128.
    *scales = [scale * (0.5 * factor); 2];
    lookup::<L>(&b[1..], &FP4, codes);
}

#[inline(always)]
fn q2_k<const L: u8>(b: &[u8; 84], codes: &mut [u8; 256], scales: &mut Entry16, minima: &mut Entry16) {
    let (d, dmin) = (half::<L>(b, 80), half::<L>(b, 82));
    for g in 0..16 {
        scales[g] = d * f32::from(b[g] & 15);
        minima[g] = -(dmin * f32::from(b[g] >> 4));
    }
    for (n, codes) in codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        for (s, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (l, code) in codes.iter_mut().enumerate() {
                *code = (b[16 + 32 * n + l] >> (2 * s)) & 3;
            }
        }
    }
}

#[inline(always)]
fn q3_k<const L: u8>(b: &[u8; 110], codes: &mut [u8; 256], scales: &mut Entry16, _: &mut Entry16) {
    let d = half::<L>(b, 108);
    for (scale, packed) in scales.iter_mut().zip(q3_scales(b)) {
        *scale = d * (packed - 32) as f32;
    }
    for (n, codes) in codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        for (s, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (l, code) in codes.iter_mut().enumerate() {
                let low = (b[32 + 32 * n + l] >> (2 * s)) & 3;
                *code = low | (((b[l] >> (4 * n + s)) & 1) << 2);
            }
        }
    }
}

#[inline(always)]
fn q4_k<const L: u8>(b: &[u8; 144], codes: &mut [u8; 256], scales: &mut Entry16, minima: &mut Entry16) {
    pairs_of_32::<L>(b, scales, minima);
    for (c, codes) in codes.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        for l in 0..32 {
            let q = b[16 + 32 * c + l];
            codes[l] = q & 15;
            codes[32 + l] = q >> 4;
        }
    }
}

#[inline(always)]
fn q5_k<const L: u8>(b: &[u8; 176], codes: &mut [u8; 256], scales: &mut Entry16, minima: &mut Entry16) {
    pairs_of_32::<L>(b, scales, minima);
    for (c, codes) in codes.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        for l in 0..32 {
            let (q, high) = (b[48 + 32 * c + l], b[16 + l]);
            codes[l] = (q & 15) | (((high >> (2 * c)) & 1) << 4);
            codes[32 + l] = (q >> 4) | (((high >> (2 * c + 1)) & 1) << 4);
        }
    }
}

/// Scales and minima of Q4_K and Q5_K.
#[inline(always)]
fn pairs_of_32<const L: u8>(b: &[u8], scales_out: &mut Entry16, minima: &mut Entry16) {
    let (d, dmin) = (half::<L>(b, 0), half::<L>(b, 2));
    for (g, (scale, minimum)) in pairs(&scales(b)).into_iter().enumerate() {
        let (scale, minimum) = (d * f32::from(scale), -(dmin * f32::from(minimum)));
        [scales_out[2 * g], scales_out[2 * g + 1]] = [scale; 2];
        [minima[2 * g], minima[2 * g + 1]] = [minimum; 2];
    }
}

#[inline(always)]
fn q6_k<const L: u8>(b: &[u8; 210], codes: &mut [u8; 256], scales: &mut Entry16, _: &mut Entry16) {
    let d = half::<L>(b, 208);
    for (scale, &packed) in scales.iter_mut().zip(&b[192..208]) {
        *scale = d * f32::from(packed as i8);
    }
    for (n, codes) in codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        for l in 0..32 {
            let (low, upper, high) = (b[64 * n + l], b[64 * n + 32 + l], b[128 + 32 * n + l]);
            codes[l] = (low & 15) | ((high & 3) << 4);
            codes[32 + l] = (upper & 15) | (((high >> 2) & 3) << 4);
            codes[64 + l] = (low >> 4) | (((high >> 4) & 3) << 4);
            codes[96 + l] = (upper >> 4) | ((high >> 6) << 4);
        }
    }
}

#[inline(always)]
fn q8_k<const L: u8>(b: &[u8; 292], codes: &mut [u8; 256], scales: &mut Entry16, _: &mut Entry16) {
    *scales = [f32::from_le_bytes([b[0], b[1], b[2], b[3]]); 16];
    signed::<L>(&b[4..], codes);
}

#[inline(always)]
fn iq4_xs<const L: u8>(b: &[u8; 136], codes: &mut [u8; 256], scales: &mut Entry16, _: &mut Entry16) {
    let d = half::<L>(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for s in 0..8 {
        let low = (b[4 + s / 2] >> (4 * (s % 2))) & 15;
        let scale = i32::from(low) | i32::from((high >> (2 * s)) & 3) << 4;
        let factor = d * (scale - 32) as f32;
        [scales[2 * s], scales[2 * s + 1]] = [factor; 2];
        lookup::<L>(&b[8 + 16 * s..], &IQ4, &mut codes[32 * s..]);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub(super) fn half(bits: u16) -> f32 {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn lookup(q: &[u8; 16], table: &[u8; 16], codes: &mut [u8; 32]) {
        // SAFETY: 16 bytes are read from each, 32 are there to be written.
        unsafe {
            let q = _mm_loadu_si128(q.as_ptr().cast());
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let both = _mm256_set_m128i(_mm_srli_epi16::<4>(q), q);
            let both = _mm256_shuffle_epi8(table, _mm256_and_si256(both, _mm256_set1_epi8(15)));
            _mm256_storeu_si256(codes.as_mut_ptr().cast(), both);
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn signed(q: &[u8; 32], codes: &mut [u8; 32]) {
        // SAFETY: 32 bytes are there to be read, and to be written.
        unsafe {
            let q = _mm256_loadu_si256(q.as_ptr().cast());
            _mm256_storeu_si256(codes.as_mut_ptr().cast(), _mm256_xor_si256(q, _mm256_set1_epi8(i8::MIN)));
        }
    }

    /// Asks for the cache line some way behind `b`, which need not be there: a row is read once, and mostly waited for.
    #[inline(always)]
    pub(super) fn ahead(b: *const u8) {
        // SAFETY: a prefetch touches nothing, at whatever address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(2048).cast()) };
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn fifth(bits: u32, codes: &mut [u8; 32]) {
        // Byte l gets the byte that has bit l, of which that bit is kept.
        let bytes = _mm256_setr_epi8(
            0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
        );
        let masks = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), bytes);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, masks), masks);
        let sixteen = _mm256_and_si256(set, _mm256_set1_epi8(16));
        // SAFETY: 32 bytes are there.
        unsafe {
            let at = codes.as_mut_ptr().cast::<__m256i>();
            _mm256_storeu_si256(at, _mm256_or_si256(_mm256_loadu_si256(at), sixteen));
        }
    }
}
