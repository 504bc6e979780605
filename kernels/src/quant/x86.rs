//! Dequantisation and dot products with AVX-512. Four- and five-bit codes are looked up in a table of the block's values that lives
//! in one register or two; every value is computed as the portable code computes it, so the bits are the same.

#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::blocks::{FP4_CODES, IQ4_CODES};
use super::kquants::{pairs, q3_scales, scales};
use super::{QuantType, blocks, grids};

const INDICES: [f32; 32] = {
    let mut list = [0.0; 32];
    let mut i = 0;
    while i < 32 {
        list[i] = i as f32;
        i += 1;
    }
    list
};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn table(values: &[f32], at: usize) -> __m512 {
    let values: &[f32; 16] = values[at..].first_chunk().unwrap_or(&[0.0; 16]);
    // SAFETY: 16 floats are there.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn half(b: &[u8], at: usize) -> f32 {
    let bits = i32::from(u16::from_le_bytes([b[at], b[at + 1]]));
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn load16(b: &[u8], at: usize) -> __m128i {
    let bytes = &b[at..at + 16];
    // SAFETY: 16 bytes are there.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn load32(b: &[u8], at: usize) -> __m256i {
    let bytes = &b[at..at + 32];
    // SAFETY: 32 bytes are there.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Where 16 values of a row go: into memory, or times the same place of `x` into sums.
///
/// Element `i` of the row belongs to `out[i]` or `x[i]`; whoever makes one has checked that they are as long as the row.
#[derive(Clone, Copy)]
struct Sink {
    out: *mut f32,
    x: *const f32,
    /// 64 lanes, as in the portable code: element i of the row goes to lane i mod 64.
    sums: [__m512; 4],
}

impl Sink {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
    #[inline]
    fn put<const DOT: bool>(&mut self, at: usize, values: __m512) {
        if DOT {
            // SAFETY: inside the row, so inside `x`.
            let x = unsafe { _mm512_loadu_ps(self.x.add(at)) };
            let sum = &mut self.sums[at / 16 % 4];
            *sum = _mm512_fmadd_ps(values, x, *sum);
        } else {
            // SAFETY: inside the row, so inside `out`.
            unsafe { _mm512_storeu_ps(self.out.add(at), values) }
        }
    }
}

/// 16 bytes as 16 lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn lanes(b: &[u8], at: usize) -> __m512i {
    _mm512_cvtepu8_epi32(load16(b, at))
}

/// Whole blocks into `f32`; stops at the shorter of both.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) fn decode(ty: QuantType, bytes: &[u8], out: &mut [f32]) {
    let count = (bytes.len() / ty.type_bytes()).min(out.len() / ty.block_size());
    let bytes = &bytes[..count * ty.type_bytes()];
    let out = &mut out[..count * ty.block_size()];
    let mut sink = Sink { out: out.as_mut_ptr(), x: std::ptr::null(), sums: [_mm512_setzero_ps(); 4] };
    let rest = row::<false>(ty, bytes, &mut sink);
    let done = out.len() - rest.len() / ty.type_bytes();
    for (b, o) in rest.chunks_exact(ty.type_bytes()).zip(&mut out[done..]) {
        *o = single(ty, b);
    }
}

/// `y[r] = w[r] . x`, summed in the order of the portable code.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) fn dot_rows(ty: QuantType, w: &[u8], row_bytes: usize, x: &[f32], y: &mut [f32]) {
    let cols = row_bytes / ty.type_bytes() * ty.block_size();
    let x = &x[..cols];
    for (w, y) in w.chunks_exact(row_bytes).zip(y) {
        let mut sink = Sink { out: std::ptr::null_mut(), x: x.as_ptr(), sums: [_mm512_setzero_ps(); 4] };
        let rest = row::<true>(ty, w, &mut sink);
        let mut lanes = [0.0f32; 64];
        for (sum, lanes) in sink.sums.iter().zip(lanes.as_chunks_mut::<16>().0) {
            // SAFETY: 16 floats are there.
            unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), *sum) };
        }
        // Floats that do not fill a register.
        let done = cols - rest.len() / ty.type_bytes();
        for (i, b) in rest.chunks_exact(ty.type_bytes()).enumerate() {
            let lane = &mut lanes[(done + i) % 64];
            *lane = single(ty, b).mul_add(x[done + i], *lane);
        }
        *y = crate::cpu::reduce(&lanes);
    }
}

/// One element of a type without blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn single(ty: QuantType, b: &[u8]) -> f32 {
    match (ty, b) {
        (QuantType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (QuantType::BF16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]),
        (_, b @ &[_, _]) => half(b, 0),
        _ => 0.0,
    }
}

/// Sends the values of whole blocks to the sink, in an order that ascends in each lane. For types without blocks
/// returns the bytes at the end that do not fill a register.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn row<'b, const DOT: bool>(ty: QuantType, bytes: &'b [u8], out: &mut Sink) -> &'b [u8] {
    // The sink is copied, so that its sums can stay in registers.
    macro_rules! each {
        ($bytes:literal, 32, $f:expr) => {{
            let mut sink = *out;
            // Two at a time: which sum an element goes to is then known when this is compiled.
            let (pairs, rest) = bytes.as_chunks::<{ 2 * $bytes }>();
            for (i, pair) in pairs.iter().enumerate() {
                let [a, b] = pair.as_chunks::<$bytes>().0 else { continue };
                $f(a, 64 * i, &mut sink);
                $f(b, 64 * i + 32, &mut sink);
            }
            if let Some(b) = rest.first_chunk::<$bytes>() {
                $f(b, 64 * pairs.len(), &mut sink);
            }
            *out = sink;
            &[]
        }};
        ($bytes:literal, 256, $f:expr) => {{
            let mut sink = *out;
            for (i, b) in bytes.as_chunks::<$bytes>().0.iter().enumerate() {
                $f(b, 256 * i, &mut sink);
            }
            *out = sink;
            &[]
        }};
    }
    macro_rules! floats {
        ($bytes:literal, $f:expr) => {{
            let mut sink = *out;
            let (fours, rest) = bytes.as_chunks::<{ 64 * $bytes }>();
            for (i, four) in fours.iter().enumerate() {
                for (j, b) in four.as_chunks::<{ 16 * $bytes }>().0.iter().enumerate() {
                    sink.put::<DOT>(64 * i + 16 * j, $f(b));
                }
            }
            let (ones, rest) = rest.as_chunks::<{ 16 * $bytes }>();
            for (j, b) in ones.iter().enumerate() {
                sink.put::<DOT>(64 * fours.len() + 16 * j, $f(b));
            }
            *out = sink;
            rest
        }};
    }
    match ty {
        QuantType::F32 => floats!(4, |b: &[u8; 64]| {
            // SAFETY: 64 bytes are there.
            unsafe { _mm512_loadu_ps(b.as_ptr().cast()) }
        }),
        QuantType::F16 => floats!(2, |b: &[u8; 32]| _mm512_cvtph_ps(load32(b, 0))),
        QuantType::BF16 => floats!(2, |b: &[u8; 32]| {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load32(b, 0))))
        }),
        QuantType::Q4_0 => each!(18, 32, |b: &[u8; 18], at, out: &mut Sink| {
            let codes = _mm512_sub_ps(table(&INDICES, 0), _mm512_set1_ps(8.0));
            nibbles::<DOT>(lanes(b, 2), _mm512_mul_ps(_mm512_set1_ps(half(b, 0)), codes), at, out);
        }),
        QuantType::Q4_1 => each!(20, 32, |b: &[u8; 20], at, out: &mut Sink| {
            nibbles::<DOT>(lanes(b, 4), line(0, half(b, 0), -half(b, 2)), at, out);
        }),
        QuantType::Q5_0 => each!(22, 32, q5_0::<DOT>),
        QuantType::Q5_1 => each!(24, 32, q5_1::<DOT>),
        QuantType::Q8_0 => each!(34, 32, |b: &[u8; 34], at, out: &mut Sink| {
            let d = _mm512_set1_ps(half(b, 0));
            for i in [0, 16] {
                let q = _mm512_cvtepi8_epi32(load16(b, 2 + i));
                out.put::<DOT>(at + i, _mm512_mul_ps(d, _mm512_cvtepi32_ps(q)));
            }
        }),
        QuantType::Q2_K => each!(84, 256, q2_k::<DOT>),
        QuantType::Q3_K => each!(110, 256, q3_k::<DOT>),
        QuantType::Q4_K => each!(144, 256, q4_k::<DOT>),
        QuantType::Q5_K => each!(176, 256, q5_k::<DOT>),
        QuantType::Q6_K => each!(210, 256, q6_k::<DOT>),
        QuantType::Q8_K => each!(292, 256, |b: &[u8; 292], at, out: &mut Sink| {
            let d = _mm512_set1_ps(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            for i in (0..256).step_by(16) {
                let q = _mm512_cvtepi8_epi32(load16(b, 4 + i));
                out.put::<DOT>(at + i, _mm512_mul_ps(d, _mm512_cvtepi32_ps(q)));
            }
        }),
        QuantType::IQ4_NL => each!(18, 32, |b: &[u8; 18], at, out: &mut Sink| {
            let values = _mm512_mul_ps(_mm512_set1_ps(half(b, 0)), table(&IQ4_CODES, 0));
            nibbles::<DOT>(lanes(b, 2), values, at, out);
        }),
        QuantType::IQ4_XS => each!(136, 256, iq4_xs::<DOT>),
        QuantType::MXFP4 => each!(17, 32, |b: &[u8; 17], at, out: &mut Sink| {
            let (scale, factor) = blocks::fp4_scale(b[0]);
            let codes = _mm512_mul_ps(_mm512_set1_ps(factor), table(&FP4_CODES, 0));
            nibbles::<DOT>(lanes(b, 1), _mm512_mul_ps(_mm512_set1_ps(scale), codes), at, out);
        }),
        QuantType::IQ2_XXS => each!(66, 256, |b, at, out: &mut Sink| grid::<DOT, 66>(grids::iq2_xxs::<2>, b, at, out)),
        QuantType::IQ2_XS => each!(74, 256, |b, at, out: &mut Sink| grid::<DOT, 74>(grids::iq2_xs::<2>, b, at, out)),
        QuantType::IQ2_S => each!(82, 256, |b, at, out: &mut Sink| grid::<DOT, 82>(grids::iq2_s::<2>, b, at, out)),
        QuantType::IQ3_XXS => each!(98, 256, |b, at, out: &mut Sink| grid::<DOT, 98>(grids::iq3_xxs::<2>, b, at, out)),
        QuantType::IQ3_S => each!(110, 256, |b, at, out: &mut Sink| grid::<DOT, 110>(grids::iq3_s::<2>, b, at, out)),
        // Ops refuse the rest when they check their weights.
        _ => &[],
    }
}

/// `factor * i - minimum` for i from `first` on, rounded as two steps.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn line(first: usize, factor: f32, minimum: f32) -> __m512 {
    let scaled = _mm512_mul_ps(_mm512_set1_ps(factor), table(&INDICES, first));
    _mm512_sub_ps(scaled, _mm512_set1_ps(minimum))
}

/// Low nibbles, then high ones, each looked up. The lookup uses the low four bits of a lane only.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn nibbles<const DOT: bool>(q: __m512i, values: __m512, base: usize, out: &mut Sink) {
    out.put::<DOT>(base, _mm512_permutexvar_ps(q, values));
    out.put::<DOT>(base + 16, _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(q), values));
}

/// Low nibbles with a fifth bit, then high ones, each looked up.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn five<const DOT: bool>(q: __m512i, high: [u16; 2], values: [__m512; 2], base: usize, out: &mut Sink) {
    let (mask, bit) = (_mm512_set1_epi32(15), _mm512_set1_epi32(16));
    for (at, q, high) in [(0, q, high[0]), (16, _mm512_srli_epi32::<4>(q), high[1])] {
        let q = _mm512_and_si512(q, mask);
        let q = _mm512_mask_or_epi32(q, high, q, bit);
        out.put::<DOT>(base + at, _mm512_permutex2var_ps(values[0], q, values[1]));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q5_0<const DOT: bool>(b: &[u8; 22], base: usize, out: &mut Sink) {
    let (d, sixteen) = (_mm512_set1_ps(half(b, 0)), _mm512_set1_ps(16.0));
    let values = [
        _mm512_mul_ps(d, _mm512_sub_ps(table(&INDICES, 0), sixteen)),
        _mm512_mul_ps(d, _mm512_sub_ps(table(&INDICES, 16), sixteen)),
    ];
    let high = [u16::from_le_bytes([b[2], b[3]]), u16::from_le_bytes([b[4], b[5]])];
    five::<DOT>(lanes(b, 6), high, values, base, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q5_1<const DOT: bool>(b: &[u8; 24], base: usize, out: &mut Sink) {
    let (d, m) = (half(b, 0), half(b, 2));
    let high = [u16::from_le_bytes([b[4], b[5]]), u16::from_le_bytes([b[6], b[7]])];
    five::<DOT>(lanes(b, 8), high, [line(0, d, -m), line(16, d, -m)], base, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q2_k<const DOT: bool>(b: &[u8; 84], base: usize, out: &mut Sink) {
    let (d, dmin) = (half(b, 80), half(b, 82));
    // Four values, four times over: the lookup then needs no mask.
    let codes = _mm512_cvtepi32_ps(_mm512_and_si512(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(3),
    ));
    for n in 0..2 {
        for group in 0..2 {
            let mut q = lanes(b, 16 + 32 * n + 16 * group);
            for s in 0..4 {
                let scale = b[8 * n + 2 * s + group];
                let factor = _mm512_set1_ps(d * f32::from(scale & 15));
                let minimum = _mm512_set1_ps(dmin * f32::from(scale >> 4));
                let values = _mm512_sub_ps(_mm512_mul_ps(factor, codes), minimum);
                out.put::<DOT>(base + 128 * n + 32 * s + 16 * group, _mm512_permutexvar_ps(q, values));
                q = _mm512_srli_epi32::<2>(q);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q3_k<const DOT: bool>(b: &[u8; 110], base: usize, out: &mut Sink) {
    let d = half(b, 108);
    let scales = q3_scales(b);
    let (three, four) = (_mm512_set1_epi32(3), _mm512_set1_epi32(4));
    let codes = _mm512_sub_ps(table(&INDICES, 0), _mm512_set1_ps(4.0));
    for group in 0..2 {
        let high = lanes(b, 16 * group);
        for n in 0..2 {
            let mut q = lanes(b, 32 + 32 * n + 16 * group);
            for s in 0..4 {
                let factor = d * (scales[8 * n + 2 * s + group] - 32) as f32;
                let values = _mm512_mul_ps(_mm512_set1_ps(factor), codes);
                let set = _mm512_test_epi32_mask(high, _mm512_set1_epi32(1 << (4 * n + s)));
                let code = _mm512_and_si512(q, three);
                let code = _mm512_mask_or_epi32(code, set, code, four);
                out.put::<DOT>(base + 128 * n + 32 * s + 16 * group, _mm512_permutexvar_ps(code, values));
                q = _mm512_srli_epi32::<2>(q);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q4_k<const DOT: bool>(b: &[u8; 144], base: usize, out: &mut Sink) {
    let (d, dmin, pairs) = (half(b, 0), half(b, 2), pairs(&scales(b)));
    for c in 0..4 {
        let (low, high) = (pairs[2 * c], pairs[2 * c + 1]);
        let low = line(0, d * f32::from(low.0), dmin * f32::from(low.1));
        let high = line(0, d * f32::from(high.0), dmin * f32::from(high.1));
        for at in [0, 16] {
            let q = lanes(b, 16 + 32 * c + at);
            out.put::<DOT>(base + 64 * c + at, _mm512_permutexvar_ps(q, low));
            out.put::<DOT>(base + 64 * c + 32 + at, _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(q), high));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q5_k<const DOT: bool>(b: &[u8; 176], base: usize, out: &mut Sink) {
    let (d, dmin, pairs) = (half(b, 0), half(b, 2), pairs(&scales(b)));
    let (mask, bit) = (_mm512_set1_epi32(15), _mm512_set1_epi32(16));
    let mut fifth = [lanes(b, 16), lanes(b, 32)];
    let one = _mm512_set1_epi32(1);
    for c in 0..4 {
        for plane in 0..2 {
            let (scale, minimum) = pairs[2 * c + plane];
            let (factor, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
            let values = [line(0, factor, minimum), line(16, factor, minimum)];
            for (at, fifth) in fifth.iter_mut().enumerate() {
                let q = lanes(b, 48 + 32 * c + 16 * at);
                let q = if plane == 0 { q } else { _mm512_srli_epi32::<4>(q) };
                let q = _mm512_and_si512(q, mask);
                let q = _mm512_mask_or_epi32(q, _mm512_test_epi32_mask(*fifth, one), q, bit);
                *fifth = _mm512_srli_epi32::<1>(*fifth);
                out.put::<DOT>(base + 64 * c + 32 * plane + 16 * at, _mm512_permutex2var_ps(values[0], q, values[1]));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn q6_k<const DOT: bool>(b: &[u8; 210], base: usize, out: &mut Sink) {
    let d = half(b, 208);
    let (low, two, offset) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3), _mm256_set1_epi8(32));
    for n in 0..2 {
        let (a, c, high) = (load32(b, 64 * n), load32(b, 64 * n + 32), load32(b, 128 + 32 * n));
        let codes = [
            (_mm256_and_si256(a, low), high),
            (_mm256_and_si256(c, low), _mm256_srli_epi16::<2>(high)),
            (_mm256_and_si256(_mm256_srli_epi16::<4>(a), low), _mm256_srli_epi16::<4>(high)),
            (_mm256_and_si256(_mm256_srli_epi16::<4>(c), low), _mm256_srli_epi16::<6>(high)),
        ];
        for (plane, (q, high)) in codes.into_iter().enumerate() {
            let high = _mm256_slli_epi16::<4>(_mm256_and_si256(high, two));
            let q = _mm256_sub_epi8(_mm256_or_si256(q, high), offset);
            for (group, q) in [_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q)].into_iter().enumerate() {
                let factor = d * f32::from(b[192 + 8 * n + group + 2 * plane] as i8);
                let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
                out.put::<DOT>(base + 128 * n + 32 * plane + 16 * group, _mm512_mul_ps(_mm512_set1_ps(factor), q));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn iq4_xs<const DOT: bool>(b: &[u8; 136], base: usize, out: &mut Sink) {
    let d = half(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for s in 0..8 {
        let low = (b[4 + s / 2] >> (4 * (s % 2))) & 15;
        let scale = i32::from(low) | i32::from((high >> (2 * s)) & 3) << 4;
        let values = _mm512_mul_ps(_mm512_set1_ps(d * (scale - 32) as f32), table(&IQ4_CODES, 0));
        nibbles::<DOT>(lanes(b, 8 + 16 * s), values, base + 32 * s, out);
    }
}

/// A block of a grid format: its codes, less that of 0, times their scales.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn grid<const DOT: bool, const B: usize>(
    unpack: impl Fn(&[u8; B], &mut [u8; 256], &mut [f32; 16], &mut [f32; 16]),
    b: &[u8; B],
    base: usize,
    out: &mut Sink,
) {
    let (mut codes, mut scales) = ([0; 256], [0.0; 16]);
    unpack(b, &mut codes, &mut scales, &mut [0.0; 16]);
    let zero = _mm_set1_epi8(grids::ZERO as i8);
    for (g, scale) in scales.into_iter().enumerate() {
        let codes = _mm_sub_epi8(load16(&codes, 16 * g), zero);
        let values = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
        out.put::<DOT>(base + 16 * g, values);
    }
}
