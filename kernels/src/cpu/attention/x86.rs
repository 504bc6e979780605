//! Blocks of attention with AVX-512. Each does, lane by lane, what the portable loops do.

// Counted loops over register arrays, which unroll wholly.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::SPAN;
use super::span::{BLOCK, LANES};

/// Four rows times four.
///
/// # Safety
/// AVX-512 is there; both have four rows of `d`, a multiple of [`LANES`].
#[target_feature(enable = "avx512f,avx512dq,fma")]
pub(super) unsafe fn dots(a: &[f32], b: &[f32], d: usize) -> [[f32; BLOCK]; BLOCK] {
    let (a, b) = (a.as_ptr(), b.as_ptr());
    let mut sums = [_mm512_setzero_ps(); BLOCK * BLOCK];
    for i in (0..d).step_by(LANES) {
        let mut right = [_mm512_setzero_ps(); BLOCK];
        for k in 0..BLOCK {
            // SAFETY: by the lengths above.
            right[k] = unsafe { _mm512_loadu_ps(b.add(k * d + i)) };
        }
        for q in 0..BLOCK {
            // SAFETY: by the lengths above.
            let left = unsafe { _mm512_loadu_ps(a.add(q * d + i)) };
            for k in 0..BLOCK {
                sums[q * BLOCK + k] = _mm512_fmadd_ps(left, right[k], sums[q * BLOCK + k]);
            }
        }
    }
    // All sixteen trees at once. Eights: halves are those of sums i and i + 4.
    let eight =
        |a: __m512, b: __m512| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
    // Fours: quarters are those of sums i, i + 4, i + 8, i + 12.
    let four =
        |a: __m512, b: __m512| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
    let mut quarters = [_mm512_setzero_ps(); BLOCK];
    for i in 0..BLOCK {
        quarters[i] = four(eight(sums[i], sums[i + 4]), eight(sums[i + 8], sums[i + 12]));
    }
    let two = |a: __m512, b: __m512| _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b));
    let (first, second) = (two(quarters[0], quarters[1]), two(quarters[2], quarters[3]));
    let all = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(first, second), _mm512_shuffle_ps::<0xDD>(first, second));
    let mut dots = [[0.0; BLOCK]; BLOCK];
    // SAFETY: sixteen floats are there.
    unsafe { _mm512_storeu_ps(dots.as_mut_ptr().cast(), all) };
    dots
}

/// Adds weighted values to four rows.
///
/// # Safety
/// AVX-512 is there; scores have four rows of [`SPAN`], of which `values.len() / dv` from `at` on are used; `out` has four rows
/// of `dv`, a multiple of [`LANES`].
#[target_feature(enable = "avx512f,avx512dq,fma")]
pub(super) unsafe fn weigh(scores: &[f32], at: usize, values: &[f32], dv: usize, out: &mut [f32]) {
    let mut column = 0;
    while column + 4 * LANES <= dv {
        // SAFETY: by the caller.
        unsafe { weigh_columns::<4>(scores, at, values, dv, column, out) };
        column += 4 * LANES;
    }
    while column < dv {
        // SAFETY: by the caller.
        unsafe { weigh_columns::<1>(scores, at, values, dv, column, out) };
        column += LANES;
    }
}

/// `N` registers of columns.
///
/// # Safety
/// As for [`weigh`]; the columns are there.
#[target_feature(enable = "avx512f,avx512dq,fma")]
#[inline]
unsafe fn weigh_columns<const N: usize>(
    scores: &[f32],
    at: usize,
    values: &[f32],
    dv: usize,
    column: usize,
    out: &mut [f32],
) {
    let keys = values.len() / dv;
    let (scores, values, out) = (scores.as_ptr(), values.as_ptr(), out.as_mut_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; BLOCK];
    // SAFETY: by the caller.
    unsafe {
        for q in 0..BLOCK {
            for n in 0..N {
                sums[q][n] = _mm512_loadu_ps(out.add(q * dv + column + n * LANES));
            }
        }
        for k in 0..keys {
            let mut row = [_mm512_setzero_ps(); N];
            for n in 0..N {
                row[n] = _mm512_loadu_ps(values.add(k * dv + column + n * LANES));
            }
            for q in 0..BLOCK {
                let p = _mm512_set1_ps(*scores.add(q * SPAN + at + k));
                for n in 0..N {
                    sums[q][n] = _mm512_fmadd_ps(p, row[n], sums[q][n]);
                }
            }
        }
        for q in 0..BLOCK {
            for n in 0..N {
                _mm512_storeu_ps(out.add(q * dv + column + n * LANES), sums[q][n]);
            }
        }
    }
}
