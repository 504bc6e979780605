//! Norms.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::math::dot;
use super::parallel;
use super::quantize::CodeRows;
use super::simd::{Level, per_level};
use super::span::{Reader, Rows};

/// `rms_norm`.
pub(super) fn rms_norm(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, weight, residual, out) = (a.ptr()?, a.optional()?, a.optional()?, a.optional()?);
    let (tokens, heads, cols) = (a.dim()?, a.dim()?, a.dim()?);
    let x_strides = [a.stride()?, a.stride()?];
    let residual_strides = [a.stride()?, a.stride()?];
    let out_strides = [a.stride()?, a.stride()?];
    let dims = [tokens, heads];
    let (eps, scale, gain) = (a.float()?, a.float()?, a.float()?);
    let codes = CodeRows::next(&mut a, ctx, dims, cols)?;
    let x = Rows::<f32>::read3(ctx, x, dims, cols, x_strides)?;
    let residual = residual.map(|r| Rows::<f32>::read3(ctx, r, dims, cols, residual_strides)).transpose()?;
    let out = out.map(|out| Rows::<f32>::write3(ctx, out, dims, cols, out_strides)).transpose()?;
    // SAFETY: stream order keeps writers away; the op checked that the results are apart from the weight.
    let weight = weight.map(|w| unsafe { ctx.slice::<f32>(w, cols) }).transpose()?;
    let level = Level::current();
    parallel::each(tokens * heads, cols, |i| {
        let (t, h) = (i / heads, i % heads);
        let mut normed = super::scratch(cols);
        // SAFETY: each row belongs to one task; where the output is the input or the residual it is the same row,
        // and those are read into `normed` before the output is borrowed.
        unsafe {
            norm(level, x.row(t, h), weight, eps, scale, &mut normed);
            if let Some(residual) = &residual {
                add(level, residual.row(t, h), &mut normed);
            }
            if gain != 1.0 {
                times(level, gain, &mut normed);
            }
            if let Some(out) = &out {
                out.row_mut(t, h).copy_from_slice(&normed);
            }
            if let Some(codes) = &codes {
                codes.write(level, t, h, &normed);
            }
        }
        super::give_back(normed);
    });
    Ok(())
}

per_level! {
    pub(super) fn norm(x: &[f32], weight: Option<&[f32]>, eps: f32, scale: f32, out: &mut [f32]) = norm_body
}

#[inline(always)]
fn norm_body<const L: u8>(x: &[f32], weight: Option<&[f32]>, eps: f32, scale: f32, out: &mut [f32]) {
    let factor = scale / (dot::<L>(x, x) / x.len() as f32 + eps).sqrt();
    match weight {
        Some(weight) => {
            for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                *out = x * factor * w;
            }
        }
        None => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = x * factor;
            }
        }
    }
}

per_level! {
    pub(super) fn add(x: &[f32], out: &mut [f32]) = add_body
}

#[inline(always)]
fn add_body<const L: u8>(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += x;
    }
}

per_level! {
    pub(super) fn times(gain: f32, out: &mut [f32]) = times_body
}

#[inline(always)]
fn times_body<const L: u8>(gain: f32, out: &mut [f32]) {
    for out in out {
        *out *= gain;
    }
}
