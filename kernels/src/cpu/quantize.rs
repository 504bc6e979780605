//! Activations to 8-bit integers.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::parallel;
use super::simd::{Level, per_level};
use super::span::{Reader, Rows};

/// Columns that share a scale.
pub(super) const GROUP: usize = crate::ops::Quantize::GROUP;

/// `quantize`.
pub(super) fn quantize(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_stride, q, q_stride) = (a.ptr()?, a.stride()?, a.ptr()?, a.stride()?);
    let (scales, scales_stride, tokens, cols) = (a.ptr()?, a.stride()?, a.dim()?, a.dim()?);
    let x = Rows::<f32>::read(ctx, x, tokens, cols, x_stride)?;
    let q = Rows::<i8>::write(ctx, q, tokens, cols, q_stride)?;
    let scales = Rows::<f32>::write(ctx, scales, tokens, cols / GROUP * 2, scales_stride)?;
    let level = Level::current();
    // SAFETY: each row belongs to one task; the op checked that the three are apart.
    parallel::each(tokens, cols, |t| unsafe { row(level, x.row(t, 0), q.row_mut(t, 0), scales.row_mut(t, 0)) });
    Ok(())
}

/// Rows of codes that a kernel writes beside its floats, or in place of them.
pub(super) struct CodeRows {
    q: Rows<i8>,
    scales: Rows<f32>,
}

impl CodeRows {
    /// Those of the next parameters, where there are any: `[dims, cols]`.
    pub(super) fn next(
        a: &mut Reader<'_, '_>,
        ctx: &KernelContext<'_>,
        dims: [usize; 2],
        cols: usize,
    ) -> Result<Option<Self>, Fault> {
        let (q, q_strides) = (a.optional()?, [a.stride()?, a.stride()?]);
        let (scales, scales_strides) = (a.optional()?, [a.stride()?, a.stride()?]);
        let (Some(q), Some(scales)) = (q, scales) else { return Ok(None) };
        let q = Rows::write3(ctx, q, dims, cols, q_strides)?;
        Ok(Some(Self { q, scales: Rows::write3(ctx, scales, dims, cols / GROUP * 2, scales_strides)? }))
    }

    /// Writes row `(a, b)`.
    ///
    /// # Safety
    /// Nothing else touches the row's codes and scales meanwhile.
    pub(super) unsafe fn write(&self, level: Level, a: usize, b: usize, x: &[f32]) {
        // SAFETY: the caller vouches for exclusivity.
        unsafe { row(level, x, self.q.row_mut(a, b), self.scales.row_mut(a, b)) }
    }
}

per_level! {
    /// One row: `q` as long as `x`, two scales for each [`GROUP`].
    pub(super) fn row(x: &[f32], q: &mut [i8], scales: &mut [f32]) = row_body
}

#[inline(always)]
fn row_body<const L: u8>(x: &[f32], q: &mut [i8], scales: &mut [f32]) {
    let groups = x.as_chunks::<GROUP>().0.iter().zip(q.as_chunks_mut::<GROUP>().0);
    #[cfg(target_arch = "x86_64")]
    if L == 2 {
        // SAFETY: level 2 runs only where AVX-512 was found.
        groups.zip(scales.as_chunks_mut::<2>().0).for_each(|((x, q), scales)| *scales = unsafe { group(x, q) });
        return;
    }
    for ((x, q), scales) in groups.zip(scales.as_chunks_mut::<2>().0) {
        let mut lanes = [0.0f32; 8];
        for x in x.as_chunks::<8>().0 {
            for l in 0..8 {
                lanes[l] = greater(x[l].abs(), lanes[l]);
            }
        }
        let d = lanes.iter().fold(0.0f32, |most, &lane| greater(lane, most)) / 127.0;
        let mut sum = 0i32;
        for (q, &x) in q.iter_mut().zip(x) {
            // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even. The limits are for
            // scales so small that they are rounded coarsely, or to 0.
            const ROUND: f32 = 12_582_912.0;
            let code = if d == 0.0 { 0.0 } else { (x / d).clamp(-127.0, 127.0) + ROUND - ROUND };
            *q = code as i8;
            sum += i32::from(*q);
        }
        *scales = [d, d * sum as f32];
    }
}

/// The greater one; NaN where there was one, so that the scale shows it.
#[inline(always)]
fn greater(a: f32, most: f32) -> f32 {
    if most < a || a.is_nan() { a } else { most }
}

/// One group with AVX-512: the codes, and what `row_body` gives as scales.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn group(x: &[f32; GROUP], q: &mut [i8; GROUP]) -> [f32; 2] {
    use std::arch::x86_64::*;
    // SAFETY: 32 floats are there.
    let x = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] };
    if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x[0], x[1]) != 0 {
        *q = [0; GROUP];
        return [f32::NAN; 2];
    }
    let most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1])));
    let d = most / 127.0;
    if d == 0.0 {
        *q = [0; GROUP];
        return [d, 0.0];
    }
    let (low, high) = (_mm512_set1_ps(-127.0), _mm512_set1_ps(127.0));
    let codes = x.map(|x| {
        let ratio = _mm512_div_ps(x, _mm512_set1_ps(d));
        // Infinity by infinity is no number, and 0.
        let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(ratio, ratio);
        _mm512_maskz_cvtps_epi32(number, _mm512_min_ps(_mm512_max_ps(ratio, low), high))
    });
    let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(codes[0], codes[1]));
    for (codes, q) in codes.into_iter().zip(q.as_chunks_mut::<16>().0) {
        // SAFETY: 16 bytes are there.
        unsafe { _mm_storeu_si128(q.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(codes)) };
    }
    [d, d * sum as f32]
}
