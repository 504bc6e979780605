//! The products with AVX2 and with AVX-512 VNNI. Each does, lane by lane, what the plain loops do.

// Counted loops over register arrays, which unroll wholly.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::few::{LANES, STEP, Token, Weights, reduce};
use super::many::{Job, ROWS, Rows};
use crate::cpu::gemm::{DEPTH, PANEL};
use crate::quant::codes::GROUP;

/// Few tokens.
///
/// # Safety
/// Lengths as `Weights::times` checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn few_vnni(w: &Weights<'_>, x: &Token, y: &mut [f32]) {
    let (stride, entries) = (x.q.len(), x.q.len() / GROUP);
    // Each of a step's eight scales for four lanes.
    let spread = [0, 4].map(|first| {
        let first = _mm512_set1_epi32(first);
        _mm512_add_epi32(first, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))
    });
    for (r, y) in y.iter_mut().enumerate() {
        let mut sums = _mm512_setzero_ps();
        let mut low = _mm256_setzero_ps();
        for step in 0..stride / STEP {
            let entry = step * (STEP / GROUP);
            // SAFETY: steps are whole in all lists.
            unsafe {
                let d = _mm256_loadu_ps(x.d.as_ptr().add(entry));
                let scale = _mm256_mul_ps(_mm256_loadu_ps(w.scales.as_ptr().add(r * entries + entry)), d);
                let scale = _mm512_castps256_ps512(scale);
                for (half, spread) in spread.iter().enumerate() {
                    let at = step * STEP + half * 64;
                    let codes = _mm512_loadu_si512(w.codes.as_ptr().add(r * stride + at).cast());
                    let q = _mm512_loadu_si512(x.q.as_ptr().add(at).cast());
                    let offsets = _mm512_loadu_si512(x.offsets.as_ptr().add(at / 4).cast());
                    let products = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(offsets, codes, q));
                    let scale = _mm512_permutexvar_ps(*spread, scale);
                    sums = _mm512_add_ps(sums, _mm512_mul_ps(scale, products));
                }
                if let Some(minima) = w.minima {
                    let minima = _mm256_loadu_ps(minima.as_ptr().add(r * entries + entry));
                    let of_x = _mm256_loadu_ps(x.sums.as_ptr().add(entry));
                    low = _mm256_add_ps(low, _mm256_mul_ps(minima, of_x));
                }
            }
        }
        let (mut lanes, mut low_lanes) = ([0.0; LANES], [0.0; 8]);
        // SAFETY: as many floats are there.
        unsafe {
            _mm512_storeu_ps(lanes.as_mut_ptr(), sums);
            _mm256_storeu_ps(low_lanes.as_mut_ptr(), low);
        }
        *y = reduce(&lanes, &low_lanes);
    }
}

/// Eight sums of four products. Pairs are summed in 16 bits, which is enough: codes are at most 128, and 2 * 128 * 127 fits.
#[target_feature(enable = "avx2")]
#[inline]
fn fours(codes: __m256i, q: __m256i, offsets: __m256i, signed: bool) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    if signed {
        let codes = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(q, codes));
        _mm256_madd_epi16(pairs, ones)
    } else {
        _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(codes, q), ones), offsets)
    }
}

/// Few tokens.
///
/// # Safety
/// Lengths as `Weights::times` checks them.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn few_avx2(w: &Weights<'_>, x: &Token, y: &mut [f32]) {
    let (stride, entries) = (x.q.len(), x.q.len() / GROUP);
    for (r, y) in y.iter_mut().enumerate() {
        let mut sums = [_mm256_setzero_ps(); 2];
        let mut low = _mm256_setzero_ps();
        for step in 0..stride / STEP {
            let entry = step * (STEP / GROUP);
            // SAFETY: steps are whole in all lists.
            unsafe {
                let d = _mm256_loadu_ps(x.d.as_ptr().add(entry));
                let scale = _mm256_mul_ps(_mm256_loadu_ps(w.scales.as_ptr().add(r * entries + entry)), d);
                for part in 0..4 {
                    let at = step * STEP + part * 32;
                    let codes = _mm256_loadu_si256(w.codes.as_ptr().add(r * stride + at).cast());
                    let q = _mm256_loadu_si256(x.q.as_ptr().add(at).cast());
                    let offsets = _mm256_loadu_si256(x.offsets.as_ptr().add(at / 4).cast());
                    let products = _mm256_cvtepi32_ps(fours(codes, q, offsets, w.signed));
                    let (a, b) = (2 * part as i32, 2 * part as i32 + 1);
                    let scale = _mm256_permutevar8x32_ps(scale, _mm256_setr_epi32(a, a, a, a, b, b, b, b));
                    let sum = &mut sums[part % 2];
                    *sum = _mm256_add_ps(*sum, _mm256_mul_ps(scale, products));
                }
                if let Some(minima) = w.minima {
                    let minima = _mm256_loadu_ps(minima.as_ptr().add(r * entries + entry));
                    let of_x = _mm256_loadu_ps(x.sums.as_ptr().add(entry));
                    low = _mm256_add_ps(low, _mm256_mul_ps(minima, of_x));
                }
            }
        }
        let (mut lanes, mut low_lanes) = ([0.0; LANES], [0.0; 8]);
        // SAFETY: as many floats are there.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(8), sums[1]);
            _mm256_storeu_ps(low_lanes.as_mut_ptr(), low);
        }
        *y = reduce(&lanes, &low_lanes);
    }
}

/// Many tokens: `V` panels at a time.
///
/// # Safety
/// Lengths as `Job::check` checks them, and jobs alike.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn many_vnni<const V: usize>(jobs: [&Job<'_>; V], w: &Rows<'_>, acc: [&mut [f32]; V]) {
    let Some(first) = jobs.first() else { return };
    let (group, minima, groups) = (first.group, first.minima, first.d.len() / PANEL);
    let acc = acc.map(<[f32]>::as_mut_ptr);
    // SAFETY: groups are whole in all lists, and no longer than the rows.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
        for (r, sums) in sums.iter_mut().enumerate() {
            for v in 0..V {
                sums[v] = _mm512_loadu_ps(acc[v].add(r * PANEL));
            }
        }
        for g in 0..groups {
            let offsets = jobs.map(|job| _mm512_loadu_si512(job.offsets.as_ptr().add(g * PANEL).cast()));
            let mut products = [offsets; ROWS];
            for k in (g * group..(g + 1) * group).step_by(4) {
                let q = jobs.map(|job| _mm512_loadu_si512(job.q.as_ptr().add(k * PANEL).cast()));
                for (r, products) in products.iter_mut().enumerate() {
                    let codes = w.codes.as_ptr().add(r * DEPTH + k).cast::<i32>().read_unaligned();
                    let codes = _mm512_set1_epi32(codes);
                    for v in 0..V {
                        products[v] = _mm512_dpbusd_epi32(products[v], codes, q[v]);
                    }
                }
            }
            let d = jobs.map(|job| _mm512_loadu_ps(job.d.as_ptr().add(g * PANEL)));
            let of_x = jobs.map(|job| _mm512_loadu_ps(job.sums.as_ptr().add(g * PANEL)));
            for (r, (sums, products)) in sums.iter_mut().zip(products).enumerate() {
                let entry = r * (DEPTH / GROUP) + g * group / GROUP;
                let scale = _mm512_set1_ps(*w.scales.as_ptr().add(entry));
                let minimum = _mm512_set1_ps(*w.minima.as_ptr().add(entry));
                for v in 0..V {
                    let scaled = _mm512_mul_ps(_mm512_mul_ps(scale, d[v]), _mm512_cvtepi32_ps(products[v]));
                    sums[v] = _mm512_add_ps(sums[v], scaled);
                    if minima {
                        sums[v] = _mm512_add_ps(sums[v], _mm512_mul_ps(minimum, of_x[v]));
                    }
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for v in 0..V {
                _mm512_storeu_ps(acc[v].add(r * PANEL), sums[v]);
            }
        }
    }
}

/// Many tokens, eight lanes at a time.
///
/// # Safety
/// Lengths as `Job::check` checks them.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn many_avx2(job: &Job<'_>, w: &Rows<'_>, acc: &mut [f32]) {
    let group = job.group;
    for half in [0, 8] {
        // SAFETY: groups are whole in all lists, and no longer than the rows.
        unsafe {
            let acc = acc.as_mut_ptr().add(half);
            let mut sums = [_mm256_setzero_ps(); ROWS];
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = _mm256_loadu_ps(acc.add(r * PANEL));
            }
            for g in 0..job.d.len() / PANEL {
                let lane = g * PANEL + half;
                let first = if job.signed {
                    _mm256_setzero_si256()
                } else {
                    _mm256_loadu_si256(job.offsets.as_ptr().add(lane).cast())
                };
                let mut products = [first; ROWS];
                for k in (g * group..(g + 1) * group).step_by(4) {
                    let q = _mm256_loadu_si256(job.q.as_ptr().add(k * PANEL + 4 * half).cast());
                    for (r, products) in products.iter_mut().enumerate() {
                        let codes = w.codes.as_ptr().add(r * DEPTH + k).cast::<i32>().read_unaligned();
                        let codes = _mm256_set1_epi32(codes);
                        let more = fours(codes, q, *products, job.signed);
                        *products = if job.signed { _mm256_add_epi32(*products, more) } else { more };
                    }
                }
                let d = _mm256_loadu_ps(job.d.as_ptr().add(lane));
                let of_x = _mm256_loadu_ps(job.sums.as_ptr().add(lane));
                for (r, (sum, products)) in sums.iter_mut().zip(products).enumerate() {
                    let entry = r * (DEPTH / GROUP) + g * group / GROUP;
                    let scale = _mm256_mul_ps(_mm256_set1_ps(*w.scales.as_ptr().add(entry)), d);
                    *sum = _mm256_add_ps(*sum, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(products)));
                    if job.minima {
                        let minimum = _mm256_set1_ps(*w.minima.as_ptr().add(entry));
                        *sum = _mm256_add_ps(*sum, _mm256_mul_ps(minimum, of_x));
                    }
                }
            }
            for (r, sum) in sums.into_iter().enumerate() {
                _mm256_storeu_ps(acc.add(r * PANEL), sum);
            }
        }
    }
}
