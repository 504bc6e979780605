//! Attention in three kernels, its scores in memory.

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::math::{dot, exp, greatest, sum};
use super::parallel;
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};
use crate::quant::{QuantType, decode_body};

/// Rows `0 .. used` of a cache `[C, Hkv, cols]`, as bytes.
fn cache_rows(
    ctx: &KernelContext<'_>,
    (ptr, strides, ty): (DevicePtr, [usize; 2], QuantType),
    dims: [usize; 2],
    cols: usize,
) -> Result<Rows<u8>, Fault> {
    let element = ty.type_bytes();
    if !(ptr.0 as usize | strides[0] | strides[1]).is_multiple_of(element) {
        return Err(ctx.fault(ptr, element, false, "misaligned address"));
    }
    Rows::read3(ctx, ptr, dims, cols * element, strides)
}

/// `attention_scores`.
pub(super) fn scores(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (q, q_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (k, k_strides, ty) = (a.ptr()?, [a.stride()?, a.stride()?], a.ty()?);
    let positions = a.ptr()?;
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, kv_heads) = (a.dim()?, a.dim()?, a.dim()?);
    let (d, capacity, window) = (a.dim()?, a.dim()?, a.dim()?);
    let scale = a.float()?;

    let mut ends = Vec::with_capacity(tokens);
    for position in load::<i32>(ctx, positions, tokens)? {
        let end = usize::try_from(position).ok().filter(|&p| p < capacity);
        ends.push(end.ok_or_else(|| ctx.fault(k, 0, false, "position outside the cache"))? + 1);
    }
    let used = ends.iter().copied().max().unwrap_or(0);
    let k = cache_rows(ctx, (k, k_strides, ty), [used, kv_heads], d)?;
    let q = Rows::<f32>::read3(ctx, q, [tokens, heads], d, q_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], capacity, out_strides)?;
    let level = Level::current();
    parallel::each(tokens * heads, capacity * d / 16, |i| {
        let (t, head) = (i / heads, i % heads);
        let end: usize = ends[t];
        let first = if window == 0 { 0 } else { end.saturating_sub(window) };
        // SAFETY: stream order keeps writers of the queries away; each row of the scores belongs to one task.
        let (q, out) = unsafe { (q.row(t, head), out.row_mut(t, head)) };
        let mut wide = super::scratch(d);
        score_row(level, ty, &k, head / (heads / kv_heads), first..end, q, scale, &mut wide, out);
        super::give_back(wide);
    });
    Ok(())
}

per_level! {
    #[allow(clippy::too_many_arguments)]
    fn score_row(
        ty: QuantType,
        k: &Rows<u8>,
        kv_head: usize,
        visible: std::ops::Range<usize>,
        q: &[f32],
        scale: f32,
        wide: &mut [f32],
        out: &mut [f32],
    ) = score_row_body
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn score_row_body<const L: u8>(
    ty: QuantType,
    k: &Rows<u8>,
    kv_head: usize,
    visible: std::ops::Range<usize>,
    q: &[f32],
    scale: f32,
    wide: &mut [f32],
    out: &mut [f32],
) {
    out.fill(f32::NEG_INFINITY);
    for c in visible {
        // SAFETY: stream order keeps writers of the cache away while the kernel runs.
        decode_body::<L>(ty, unsafe { k.row(c, kv_head) }, wide);
        out[c] = dot::<L>(q, wide) * scale;
    }
}

/// `soft_max`.
pub(super) fn soft_max(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, columns) = (a.dim()?, a.dim()?, a.dim()?);
    let x = Rows::<f32>::read3(ctx, x, [tokens, heads], columns, x_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], columns, out_strides)?;
    let in_place = x.in_place(&out);
    let level = Level::current();
    parallel::each(tokens * heads, columns, |i| {
        // SAFETY: each row belongs to one task; an op in place reads its row before it writes it.
        let row = unsafe { out.row_mut(i / heads, i % heads) };
        if !in_place {
            // SAFETY: the op checked that the two are apart.
            row.copy_from_slice(unsafe { x.row(i / heads, i % heads) });
        }
        soft_max_row(level, row);
    });
    Ok(())
}

per_level! {
    fn soft_max_row(row: &mut [f32]) = soft_max_row_body
}

#[inline(always)]
fn soft_max_row_body<const L: u8>(row: &mut [f32]) {
    let max = greatest(row);
    if max == f32::NEG_INFINITY {
        row.fill(0.0);
        return;
    }
    row.iter_mut().for_each(|x| *x = exp::<L>(*x - max));
    let factor = 1.0 / sum(row);
    row.iter_mut().for_each(|x| *x *= factor);
}

/// `attention_values`.
pub(super) fn values(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (p, p_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (v, v_strides, ty) = (a.ptr()?, [a.stride()?, a.stride()?], a.ty()?);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, kv_heads) = (a.dim()?, a.dim()?, a.dim()?);
    let (dv, capacity) = (a.dim()?, a.dim()?);
    let p = Rows::<f32>::read3(ctx, p, [tokens, heads], capacity, p_strides)?;
    let v = cache_rows(ctx, (v, v_strides, ty), [capacity, kv_heads], dv)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], dv, out_strides)?;
    let level = Level::current();
    parallel::each(tokens * heads, capacity * dv / 16, |i| {
        let (t, head) = (i / heads, i % heads);
        // SAFETY: stream order keeps writers of the weights away; each row of the output belongs to one task.
        let (p, out) = unsafe { (p.row(t, head), out.row_mut(t, head)) };
        let mut wide = super::scratch(dv);
        value_row(level, ty, &v, head / (heads / kv_heads), p, &mut wide, out);
        super::give_back(wide);
    });
    Ok(())
}

per_level! {
    fn value_row(ty: QuantType, v: &Rows<u8>, kv_head: usize, p: &[f32], wide: &mut [f32], out: &mut [f32])
        = value_row_body
}

#[inline(always)]
fn value_row_body<const L: u8>(
    ty: QuantType,
    v: &Rows<u8>,
    kv_head: usize,
    p: &[f32],
    wide: &mut [f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    for (c, &p) in p.iter().enumerate().filter(|(_, p)| **p != 0.0) {
        // SAFETY: stream order keeps writers of the cache away while the kernel runs.
        decode_body::<L>(ty, unsafe { v.row(c, kv_head) }, wide);
        out.iter_mut().zip(&*wide).for_each(|(out, &v)| *out = fma::<L>(p, v, *out));
    }
}
