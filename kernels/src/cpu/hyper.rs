//! Hyper-connections: the weights of residual streams, what they give a block and what it gives them.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::parallel;
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `hc_split_sinkhorn`.
pub(super) fn split_sinkhorn(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (m, m_stride, scale, base) = (a.ptr()?, a.stride()?, a.ptr()?, a.ptr()?);
    let (pre, pre_stride) = (a.ptr()?, a.stride()?);
    let (post, post_stride, comb) = (a.optional()?, a.stride()?, a.optional()?);
    let (tokens, n, iterations, eps) = (a.dim()?, a.dim()?, a.dim()?, a.float()?);
    let mixes = comb.is_some();
    let width = if mixes { (2 + n) * n } else { n };
    let scale = load::<f32>(ctx, scale, if mixes { 3 } else { 1 })?;
    let base = load::<f32>(ctx, base, width)?;
    let m = Rows::<f32>::read(ctx, m, tokens, width, m_stride)?;
    let pre = Rows::<f32>::write(ctx, pre, tokens, n, pre_stride)?;
    let post = post.map(|post| Rows::<f32>::write(ctx, post, tokens, n, post_stride)).transpose()?;
    let comb = comb.map(|comb| Rows::<f32>::write(ctx, comb, tokens, n * n, n * n * 4)).transpose()?;
    parallel::each(tokens, 2 * n * n * (iterations + 8), |t| {
        // SAFETY: each token's rows belong to one task; the op checked that outputs and inputs are apart.
        let (m, pre) = unsafe { (m.row(t, 0), pre.row_mut(t, 0)) };
        let mixed = |place: usize, kind: usize| m[place] * scale[kind] + base[place];
        pre.iter_mut().enumerate().for_each(|(j, pre)| *pre = sigmoid(mixed(j, 0)) + eps);
        let Some((post, comb)) = post.as_ref().zip(comb.as_ref()) else { return };
        // SAFETY: as above.
        let (post, comb) = unsafe { (post.row_mut(t, 0), comb.row_mut(t, 0)) };
        post.iter_mut().enumerate().for_each(|(j, post)| *post = 2.0 * sigmoid(mixed(n + j, 1)));
        comb.iter_mut().enumerate().for_each(|(i, c)| *c = mixed(2 * n + i, 2));
        sinkhorn(comb, n, iterations, eps);
    });
    Ok(())
}

/// Rows, then columns, are scaled to a sum of 1, over and over; at first a row is a softmax.
fn sinkhorn(c: &mut [f32], n: usize, iterations: usize, eps: f32) {
    for row in c.chunks_exact_mut(n) {
        let top = row.iter().fold(f32::NEG_INFINITY, |top, &x| top.max(x));
        row.iter_mut().for_each(|x| *x = (*x - top).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + eps);
    }
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in c.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for column in 0..n {
            let sum = c.iter().skip(column).step_by(n).sum::<f32>() + eps;
            c.iter_mut().skip(column).step_by(n).for_each(|x| *x /= sum);
        }
    }
}

/// `hc_weighted_sum`.
pub(super) fn weighted_sum(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (z, z_strides, pre, pre_stride) = (a.ptr()?, [a.stride()?, a.stride()?], a.ptr()?, a.stride()?);
    let (out, out_stride) = (a.ptr()?, a.stride()?);
    let (tokens, n, cols) = (a.dim()?, a.dim()?, a.dim()?);
    let z = Rows::<f32>::read3(ctx, z, [tokens, n], cols, z_strides)?;
    let pre = Rows::<f32>::read(ctx, pre, tokens, n, pre_stride)?;
    let out = Rows::<f32>::write(ctx, out, tokens, cols, out_stride)?;
    let level = Level::current();
    parallel::each(tokens, cols * n, |t| {
        // SAFETY: each token's rows belong to one task; the op checked that output and inputs are apart.
        unsafe {
            let out = out.row_mut(t, 0);
            out.fill(0.0);
            for (j, &pre) in pre.row(t, 0).iter().enumerate() {
                add_scaled(level, pre, z.row(t, j), out);
            }
        }
    });
    Ok(())
}

/// `hc_expand`.
pub(super) fn expand(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (y, y_stride, z, z_strides) = (a.ptr()?, a.stride()?, a.ptr()?, [a.stride()?, a.stride()?]);
    let (post, post_stride, comb) = (a.ptr()?, a.stride()?, a.ptr()?);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, n, cols) = (a.dim()?, a.dim()?, a.dim()?);
    let y = Rows::<f32>::read(ctx, y, tokens, cols, y_stride)?;
    let z = Rows::<f32>::read3(ctx, z, [tokens, n], cols, z_strides)?;
    let post = Rows::<f32>::read(ctx, post, tokens, n, post_stride)?;
    let comb = Rows::<f32>::read(ctx, comb, tokens, n * n, n * n * 4)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, n], cols, out_strides)?;
    let level = Level::current();
    parallel::each(tokens, cols * n * (n + 1), |t| {
        let mut next = super::scratch(n * cols);
        // SAFETY: each token's rows belong to one task. Inputs are read before the output is borrowed, as the streams
        // may be written in place.
        unsafe {
            let (y, post, comb) = (y.row(t, 0), post.row(t, 0), comb.row(t, 0));
            for (dst, next) in next.chunks_exact_mut(cols).enumerate() {
                add_scaled(level, post[dst], y, next);
                for src in 0..n {
                    add_scaled(level, comb[src * n + dst], z.row(t, src), next);
                }
            }
            for (dst, next) in next.chunks_exact(cols).enumerate() {
                out.row_mut(t, dst).copy_from_slice(next);
            }
        }
        super::give_back(next);
    });
    Ok(())
}

per_level! {
    fn add_scaled(factor: f32, x: &[f32], out: &mut [f32]) = add_scaled_body
}

#[inline(always)]
fn add_scaled_body<const L: u8>(factor: f32, x: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(out, &x)| *out = fma::<L>(factor, x, *out));
}
