//! Blocks of each format as codes and scales in AVX-512 registers, 64 columns to one.

use std::arch::x86_64::*;

use super::few::{LANES, STEP};
use crate::quant::codes::{FP4, IQ4};
use crate::quant::{blocks::fp4_scale, kquants::q3_scales};

/// Columns of a part.
pub(super) const PART: usize = 4 * LANES;

/// A format's blocks, taken so many at a time that it is two parts of 64 columns or four.
pub(super) trait Blocks {
    /// Bytes and columns of a block.
    const BYTES: usize;
    const COLUMNS: usize;
    const MINIMA: bool;
    /// Columns at a time: [`STEP`], or a block.
    const CHUNK: usize = if Self::COLUMNS > STEP { Self::COLUMNS } else { STEP };

    /// # Safety
    /// The bytes of a chunk are at `b`; the features below are there.
    unsafe fn chunk(b: *const u8) -> Chunk;
}

/// Codes and, for each lane of four columns, scales; minima for each 16 columns. A chunk of 128 columns has the first two
/// parts and the first minima.
pub(super) struct Chunk {
    pub(super) codes: [__m512i; 4],
    pub(super) scales: [__m512; 4],
    pub(super) minima: [__m256; 2],
}

macro_rules! blocks {
    ($($name:ident: $bytes:literal, $columns:literal, $minima:literal, |$b:ident| $chunk:expr;)*) => {
        $(
            pub(super) struct $name;

            impl Blocks for $name {
                const BYTES: usize = $bytes;
                const COLUMNS: usize = $columns;
                const MINIMA: bool = $minima;

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c")]
                #[inline]
                unsafe fn chunk($b: *const u8) -> Chunk {
                    // SAFETY: by the caller.
                    unsafe { $chunk }
                }
            }
        )*
    };
}

blocks! {
    Q4_0: 18, 32, false, |b| four(|i| {
        let [p, q] = [b.add(36 * i), b.add(36 * i + 18)];
        (nibbles(p.add(2), q.add(2)), halves(p, q))
    }, none());
    Q4_1: 20, 32, true, |b| four(|i| {
        let [p, q] = [b.add(40 * i), b.add(40 * i + 20)];
        (nibbles(p.add(4), q.add(4)), halves(p, q))
    }, minima_of_four(b.add(2), 20));
    Q5_0: 22, 32, false, |b| four(|i| {
        let [p, q] = [b.add(44 * i), b.add(44 * i + 22)];
        (fifth(nibbles(p.add(6), q.add(6)), p.add(2), q.add(2)), halves(p, q))
    }, none());
    Q5_1: 24, 32, true, |b| four(|i| {
        let [p, q] = [b.add(48 * i), b.add(48 * i + 24)];
        (fifth(nibbles(p.add(8), q.add(8)), p.add(4), q.add(4)), halves(p, q))
    }, minima_of_four(b.add(2), 24));
    Q8_0: 34, 32, false, |b| four(|i| {
        let [p, q] = [b.add(68 * i), b.add(68 * i + 34)];
        let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(load32(p.add(2))), load32(q.add(2)));
        (_mm512_xor_si512(codes, _mm512_set1_epi8(i8::MIN)), halves(p, q))
    }, none());
    Iq4Nl: 18, 32, false, |b| four(|i| {
        let [p, q] = [b.add(36 * i), b.add(36 * i + 18)];
        (look_up(&IQ4, nibbles(p.add(2), q.add(2))), halves(p, q))
    }, none());
    Mxfp4: 17, 32, false, |b| four(|i| {
        let [p, q] = [b.add(34 * i), b.add(34 * i + 17)];
        // As in `quant::codes`.
        let scale = |e: u8| { let (scale, factor) = fp4_scale(e); _mm512_set1_ps(scale * (0.5 * factor)) };
        let scales = _mm512_mask_mov_ps(scale(*p), 0xFF00, scale(*q));
        (look_up(&FP4, nibbles(p.add(1), q.add(1))), scales)
    }, none());
    Q2K: 84, 256, true, |b| {
        let packed = load16(b);
        let low = _mm512_cvtepu8_epi32(_mm_and_si128(packed, _mm_set1_epi8(15)));
        let high = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(packed), _mm_set1_epi8(15)));
        let scales = _mm512_mul_ps(_mm512_set1_ps(half(b.add(80))), _mm512_cvtepi32_ps(low));
        let minima = negated(_mm512_mul_ps(_mm512_set1_ps(half(b.add(82))), _mm512_cvtepi32_ps(high)));
        Chunk {
            codes: parts(|p| planes(b.add(16 + 32 * (p / 2)), p % 2)),
            scales: parts(|p| fours(scales, p)),
            minima: [_mm512_castps512_ps256(minima), _mm512_extractf32x8_ps::<1>(minima)],
        }
    };
    Q3K: 110, 256, false, |b| {
        let packed = q3_scales(&*b.cast());
        let packed = _mm512_sub_epi32(_mm512_loadu_si512(packed.as_ptr().cast()), _mm512_set1_epi32(32));
        let scales = _mm512_mul_ps(_mm512_set1_ps(half(b.add(108))), _mm512_cvtepi32_ps(packed));
        let high = _mm512_broadcast_i64x4(load32(b));
        Chunk {
            codes: parts(|p| {
                let codes = planes(b.add(32 + 32 * (p / 2)), p % 2);
                let set = _mm512_test_epi8_mask(high, two_bytes(1 << (2 * p), 2 << (2 * p)));
                _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(4))
            }),
            scales: parts(|p| fours(scales, p)),
            minima: none(),
        }
    };
    Q4K: 144, 256, true, |b| {
        let (scales, minima) = scales_and_minima(b);
        Chunk { codes: parts(|p| nibbles_of_32(b.add(16 + 32 * p))), scales: parts(|p| eights(scales, p)), minima }
    };
    Q5K: 176, 256, true, |b| {
        let (scales, minima) = scales_and_minima(b);
        let high = _mm512_broadcast_i64x4(load32(b.add(16)));
        Chunk {
            codes: parts(|p| {
                let codes = nibbles_of_32(b.add(48 + 32 * p));
                let set = _mm512_test_epi8_mask(high, two_bytes(1 << (2 * p), 2 << (2 * p)));
                _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(16))
            }),
            scales: parts(|p| eights(scales, p)),
            minima,
        }
    };
    Q6K: 210, 256, false, |b| {
        let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(b.add(192))));
        let scales = _mm512_mul_ps(_mm512_set1_ps(half(b.add(208))), scales);
        let (low_bits, high_bits) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
        Chunk {
            codes: parts(|p| {
                let low = _mm512_loadu_si512(b.add(64 * (p / 2)).cast());
                let high = _mm512_broadcast_i64x4(load32(b.add(128 + 32 * (p / 2))));
                let (low, high) = if p % 2 == 0 {
                    (low, _mm512_sllv_epi16(high, two_words(4, 2)))
                } else {
                    (_mm512_srli_epi16::<4>(low), _mm512_srlv_epi16(high, two_words(0, 2)))
                };
                // Low bits or (high ones and their mask).
                _mm512_ternarylogic_epi32::<0xF8>(_mm512_and_si512(low, low_bits), high, high_bits)
            }),
            scales: parts(|p| fours(scales, p)),
            minima: none(),
        }
    };
    Iq4Xs: 136, 256, false, |b| {
        let low = b.add(4).cast::<u32>().read_unaligned();
        let high = u32::from(b.add(2).cast::<u16>().read_unaligned());
        // Nibble s of `low` and pair s of `high` make scale s.
        let shifts = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let low = _mm256_srlv_epi32(_mm256_set1_epi32(low as i32), _mm256_slli_epi32::<2>(shifts));
        let high = _mm256_srlv_epi32(_mm256_set1_epi32(high as i32), _mm256_slli_epi32::<1>(shifts));
        let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
        let packed = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)), high);
        let packed = _mm256_sub_epi32(packed, _mm256_set1_epi32(32));
        let scales = _mm256_mul_ps(_mm256_set1_ps(half(b)), _mm256_cvtepi32_ps(packed));
        Chunk {
            codes: parts(|p| look_up(&IQ4, nibbles(b.add(8 + 32 * p), b.add(24 + 32 * p)))),
            scales: parts(|p| eights(scales, p)),
            minima: none(),
        }
    };
}

/// Two parts of four blocks of 32.
#[target_feature(enable = "avx512f")]
#[inline]
fn four(part: impl Fn(usize) -> (__m512i, __m512), minima: [__m256; 2]) -> Chunk {
    let (first, second) = (part(0), part(1));
    let none = (_mm512_setzero_si512(), _mm512_setzero_ps());
    Chunk { codes: [first.0, second.0, none.0, none.0], scales: [first.1, second.1, none.1, none.1], minima }
}

#[inline(always)]
fn parts<V>(part: impl Fn(usize) -> V) -> [V; 4] {
    [part(0), part(1), part(2), part(3)]
}

#[target_feature(enable = "avx")]
#[inline]
fn none() -> [__m256; 2] {
    [_mm256_setzero_ps(); 2]
}

/// # Safety
/// 16 bytes are there.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load16(b: *const u8) -> __m128i {
    // SAFETY: by the caller.
    unsafe { _mm_loadu_si128(b.cast()) }
}

/// # Safety
/// 32 bytes are there.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load32(b: *const u8) -> __m256i {
    // SAFETY: by the caller.
    unsafe { _mm256_loadu_si256(b.cast()) }
}

/// # Safety
/// Two bytes are there.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn half(b: *const u8) -> f32 {
    // SAFETY: by the caller.
    let bits = unsafe { b.cast::<u16>().read_unaligned() };
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// The scales of two blocks, eight lanes each.
///
/// # Safety
/// Two bytes are at each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn halves(a: *const u8, b: *const u8) -> __m512 {
    // SAFETY: by the caller.
    let (a, b) = unsafe { (a.cast::<i16>().read_unaligned(), b.cast::<i16>().read_unaligned()) };
    _mm512_cvtph_ps(_mm256_mask_set1_epi16(_mm256_set1_epi16(a), 0xFF00, b))
}

/// Low nibbles of 16 bytes, then high ones; of `a`, then of `b`.
///
/// # Safety
/// 16 bytes are at each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn nibbles(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: by the caller.
    let (a, b) = unsafe { (load16(a), load16(b)) };
    let both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(a), 0xFF00, b);
    let shifts = _mm512_set_epi64(SHIFT_4, SHIFT_4, 0, 0, SHIFT_4, SHIFT_4, 0, 0);
    _mm512_and_si512(_mm512_srlv_epi16(both, shifts), _mm512_set1_epi8(15))
}

/// Four words of 4.
const SHIFT_4: i64 = 0x0004_0004_0004_0004;

/// Low nibbles of 32 bytes, then high ones.
///
/// # Safety
/// 32 bytes are there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn nibbles_of_32(b: *const u8) -> __m512i {
    // SAFETY: by the caller.
    let both = _mm512_broadcast_i64x4(unsafe { load32(b) });
    _mm512_and_si512(_mm512_srlv_epi16(both, two_words(0, 4)), _mm512_set1_epi8(15))
}

/// Pairs of bits of 32 bytes: planes 0 and 1, or 2 and 3.
///
/// # Safety
/// 32 bytes are there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn planes(b: *const u8, which: usize) -> __m512i {
    // SAFETY: by the caller.
    let both = _mm512_broadcast_i64x4(unsafe { load32(b) });
    let shifts = if which == 0 { two_words(0, 2) } else { two_words(4, 6) };
    _mm512_and_si512(_mm512_srlv_epi16(both, shifts), _mm512_set1_epi8(3))
}

/// `a` in the words of the lower half, `b` in those of the upper.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn two_words(a: i16, b: i16) -> __m512i {
    _mm512_mask_set1_epi16(_mm512_set1_epi16(a), 0xFFFF_0000, b)
}

/// The same with bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn two_bytes(a: i32, b: i32) -> __m512i {
    _mm512_mask_set1_epi8(_mm512_set1_epi8(a as i8), 0xFFFF_FFFF_0000_0000, b as i8)
}

/// Adds 16 to codes whose bit is set, 32 bits for each block.
///
/// # Safety
/// Four bytes are at each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn fifth(codes: __m512i, a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: by the caller.
    let (a, b) = unsafe { (a.cast::<u32>().read_unaligned(), b.cast::<u32>().read_unaligned()) };
    let set = u64::from(a) | u64::from(b) << 32;
    _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(16))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn look_up(table: &[u8; 16], codes: __m512i) -> __m512i {
    // SAFETY: 16 bytes are there.
    let table = _mm512_broadcast_i32x4(unsafe { load16(table.as_ptr()) });
    _mm512_shuffle_epi8(table, codes)
}

/// Of eight scales, two for a part: eight lanes each.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn eights(scales: __m256, part: usize) -> __m512 {
    let first = 2 * part as i32;
    let which = _mm512_mask_set1_epi32(_mm512_set1_epi32(first), 0xFF00, first + 1);
    _mm512_permutexvar_ps(which, _mm512_castps256_ps512(scales))
}

/// Of sixteen scales, four for a part: four lanes each.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn fours(scales: __m512, part: usize) -> __m512 {
    let which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(4 * part as i32)), scales)
}

#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn negated(values: __m512) -> __m512 {
    _mm512_xor_ps(values, _mm512_set1_ps(-0.0))
}

/// Minima of four blocks of 32 that are `stride` bytes apart.
///
/// # Safety
/// Two bytes are at each.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn minima_of_four(b: *const u8, stride: usize) -> [__m256; 2] {
    // SAFETY: by the caller.
    let m = |i: usize| unsafe { b.add(i * stride).cast::<i16>().read_unaligned() };
    let packed = _mm_setr_epi16(m(0), m(0), m(1), m(1), m(2), m(2), m(3), m(3));
    [_mm256_cvtph_ps(packed), _mm256_setzero_ps()]
}

/// Eight scales of Q4_K and Q5_K, and minima for each 16 columns.
///
/// # Safety
/// 16 bytes are there.
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,f16c")]
#[inline]
unsafe fn scales_and_minima(b: *const u8) -> (__m256, [__m256; 2]) {
    // SAFETY: by the caller.
    let word = |i: usize| unsafe { b.add(4 + 4 * i).cast::<u32>().read_unaligned() };
    let (first, second, third) = (word(0), word(1), word(2));
    let upper = |low: u32, high: u32| low & 0x0F0F_0F0F | (high >> 6 & 0x0303_0303) << 4;
    let eight = |low: u32, high: u32| {
        let packed = u64::from(low & 0x3F3F_3F3F) | u64::from(high) << 32;
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(packed as i64)))
    };
    // SAFETY: by the caller.
    let (d, dmin) = unsafe { (half(b), half(b.add(2))) };
    let scales = _mm256_mul_ps(_mm256_set1_ps(d), eight(first, upper(third, first)));
    let minima = _mm256_mul_ps(_mm256_set1_ps(dmin), eight(second, upper(third >> 4, second)));
    let minima = _mm256_xor_ps(minima, _mm256_set1_ps(-0.0));
    let twice = |first: i32| {
        let which = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        _mm256_permutevar8x32_ps(minima, _mm256_add_epi32(which, _mm256_set1_epi32(first)))
    };
    (scales, [twice(0), twice(4)])
}
