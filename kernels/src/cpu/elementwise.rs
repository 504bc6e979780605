//! Elementwise bodies. The output may be the first input: that is copied into the output first, and the work is
//! done there.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::math::exp;
use super::parallel;
use super::quantize::CodeRows;
use super::simd::{Level, per_level};
use super::span::{Reader, Rows};

fn binary(ctx: &KernelContext<'_>, f: fn(Level, &[f32], &mut [f32])) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_stride, y, y_stride) = (a.ptr()?, a.stride()?, a.ptr()?, a.stride()?);
    let (out, out_stride, rows, cols) = (a.ptr()?, a.stride()?, a.dim()?, a.dim()?);
    let x = Rows::<f32>::read(ctx, x, rows, cols, x_stride)?;
    let y = Rows::<f32>::read(ctx, y, rows, cols, y_stride)?;
    let out = Rows::<f32>::write(ctx, out, rows, cols, out_stride)?;
    let (in_place, level) = (x.in_place(&out), Level::current());
    parallel::each(rows, cols, |t| {
        // SAFETY: each row belongs to one task; the op checked that the second input is apart from the output, and
        // the first one is either the output (then it is not read through another slice) or apart too.
        unsafe {
            let out = out.row_mut(t, 0);
            if !in_place {
                out.copy_from_slice(x.row(t, 0));
            }
            f(level, y.row(t, 0), out);
        }
    });
    Ok(())
}

fn unary(ctx: &KernelContext<'_>, f: fn(Level, f32, &mut [f32])) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_stride, out, out_stride) = (a.ptr()?, a.stride()?, a.ptr()?, a.stride()?);
    let (rows, cols, value) = (a.dim()?, a.dim()?, a.float()?);
    let x = Rows::<f32>::read(ctx, x, rows, cols, x_stride)?;
    let out = Rows::<f32>::write(ctx, out, rows, cols, out_stride)?;
    let (in_place, level) = (x.in_place(&out), Level::current());
    parallel::each(rows, 2 * cols, |t| {
        // SAFETY: as in `binary`.
        unsafe {
            let out = out.row_mut(t, 0);
            if !in_place {
                out.copy_from_slice(x.row(t, 0));
            }
            f(level, value, out);
        }
    });
    Ok(())
}

/// `add`.
pub(super) fn add(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    binary(ctx, add_row)
}

/// `mul`.
pub(super) fn mul(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    binary(ctx, mul_row)
}

/// `scale`.
pub(super) fn scale(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    unary(ctx, scale_row)
}

/// `softcap`.
pub(super) fn softcap(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    unary(ctx, softcap_row)
}

per_level! {
    fn add_row(y: &[f32], out: &mut [f32]) = add_body
}
per_level! {
    fn mul_row(y: &[f32], out: &mut [f32]) = mul_body
}
per_level! {
    fn scale_row(factor: f32, out: &mut [f32]) = scale_body
}
per_level! {
    fn softcap_row(cap: f32, out: &mut [f32]) = softcap_body
}

#[inline(always)]
fn add_body<const L: u8>(y: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(y).for_each(|(out, y)| *out += y);
}

#[inline(always)]
fn mul_body<const L: u8>(y: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(y).for_each(|(out, y)| *out *= y);
}

#[inline(always)]
fn scale_body<const L: u8>(factor: f32, out: &mut [f32]) {
    out.iter_mut().for_each(|out| *out *= factor);
}

#[inline(always)]
fn softcap_body<const L: u8>(cap: f32, out: &mut [f32]) {
    out.iter_mut().for_each(|out| *out = cap * (*out / cap).tanh());
}

/// `glu`.
pub(super) fn glu(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (gate, gate_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (up, up_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (out, out_strides) = (a.optional()?, [a.stride()?, a.stride()?]);
    let (tokens, slots, cols) = (a.dim()?, a.dim()?, a.dim()?);
    let (activation, limit) = (a.dim()?, a.float()?);
    let dims = [tokens, slots];
    let codes = CodeRows::next(&mut a, ctx, dims, cols)?;
    let gate = Rows::<f32>::read3(ctx, gate, dims, cols, gate_strides)?;
    let up = Rows::<f32>::read3(ctx, up, dims, cols, up_strides)?;
    let out = out.map(|out| Rows::<f32>::write3(ctx, out, dims, cols, out_strides)).transpose()?;
    let (in_place, level) = (out.is_some_and(|out| gate.in_place(&out)), Level::current());
    let f = if activation == 0 { geglu_row } else { swiglu_row };
    parallel::each(tokens * slots, 4 * cols, |i| {
        let (t, s) = (i / slots, i % slots);
        // Where only codes are asked for, the floats are this thread's own.
        let mut own = if out.is_some() { Vec::new() } else { super::scratch(cols) };
        // SAFETY: as in `binary`; codes are apart from everything else.
        unsafe {
            let row = out.as_ref().map_or(own.as_mut_slice(), |out| out.row_mut(t, s));
            if !in_place {
                row.copy_from_slice(gate.row(t, s));
            }
            f(level, up.row(t, s), limit, row);
            if let Some(codes) = &codes {
                codes.write(level, t, s, row);
            }
        }
        super::give_back(own);
    });
    Ok(())
}

per_level! {
    fn geglu_row(up: &[f32], limit: f32, out: &mut [f32]) = geglu_body
}
per_level! {
    fn swiglu_row(up: &[f32], limit: f32, out: &mut [f32]) = swiglu_body
}

#[inline(always)]
fn geglu_body<const L: u8>(up: &[f32], limit: f32, out: &mut [f32]) {
    glu_body(up, limit, out, |x| {
        // 0.5 (1 + tanh(u)) is 1 / (1 + exp(-2u)), which keeps its precision where tanh(u) is close to -1.
        let u = 0.797_884_6 * (x + 0.044_715 * x * x * x);
        x / (1.0 + exp::<L>(-2.0 * u))
    });
}

#[inline(always)]
fn swiglu_body<const L: u8>(up: &[f32], limit: f32, out: &mut [f32]) {
    glu_body(up, limit, out, |x| x / (1.0 + exp::<L>(-x)));
}

#[inline(always)]
fn glu_body(up: &[f32], limit: f32, out: &mut [f32], f: impl Fn(f32) -> f32) {
    if limit < f32::INFINITY {
        for (out, &up) in out.iter_mut().zip(up) {
            *out = f(out.min(limit)) * up.clamp(-limit, limit);
        }
    } else {
        for (out, &up) in out.iter_mut().zip(up) {
            *out = f(*out) * up;
        }
    }
}
