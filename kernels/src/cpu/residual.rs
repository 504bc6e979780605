//! A sum onto the residual stream, and norms of what comes of it.

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::norm::{add, norm, times};
use super::parallel;
use super::quantize::CodeRows;
use super::simd::Level;
use super::span::{Reader, Rows, load};

/// `residual_norm`.
pub(super) fn residual_norm(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (tokens, cols, eps, gain) = (a.dim()?, a.dim()?, a.float()?, a.float()?);
    let vector = |at: DevicePtr| load::<f32>(ctx, at, cols);
    let mut parts = Vec::new();
    for _ in 0..2 {
        let (x, stride, norm) = (a.optional()?, a.stride()?, a.optional()?);
        if let Some(x) = x {
            parts.push((Rows::<f32>::read(ctx, x, tokens, cols, stride)?, norm.map(vector).transpose()?));
        }
    }
    let (h, h_stride, weight) = (a.ptr()?, a.stride()?, a.optional()?.map(vector).transpose()?);
    let h = Rows::<f32>::write(ctx, h, tokens, cols, h_stride)?;
    let mut normed = Vec::new();
    for _ in 0..3 {
        let (weight, out, stride) = (a.optional()?, a.optional()?, a.stride()?);
        let out = out.map(|out| Rows::<f32>::write(ctx, out, tokens, cols, stride)).transpose()?;
        let codes = CodeRows::next(&mut a, ctx, [tokens, 1], cols)?;
        normed.push((weight.map(vector).transpose()?, out, codes));
    }
    let scales = [a.float()?, a.float()?, a.float()?];

    let level = Level::current();
    parallel::each(tokens, 8 * cols, |t| {
        let (mut y, mut z) = (super::scratch(cols), super::scratch(cols));
        // SAFETY: each row belongs to one task; the op checked that what is written is apart from what is read, and from
        // each other.
        unsafe {
            for (index, (x, weight)) in parts.iter().enumerate() {
                let to = if index == 0 { &mut y } else { &mut z };
                match weight {
                    Some(weight) => norm(level, x.row(t, 0), Some(weight), eps, 1.0, to),
                    None => to.copy_from_slice(x.row(t, 0)),
                }
                if index > 0 {
                    add(level, &z, &mut y);
                }
            }
            let h = h.row_mut(t, 0);
            match &weight {
                Some(weight) => norm(level, &y, Some(weight), eps, 1.0, &mut z),
                None => z.copy_from_slice(&y),
            }
            add(level, h, &mut z);
            if gain != 1.0 {
                times(level, gain, &mut z);
            }
            h.copy_from_slice(&z);
            for ((weight, out, codes), scale) in normed.iter().zip(scales) {
                let Some(weight) = weight else { continue };
                norm(level, &z, Some(weight), eps, scale, &mut y);
                if let Some(out) = out {
                    out.row_mut(t, 0).copy_from_slice(&y);
                }
                if let Some(codes) = codes {
                    codes.write(level, t, 0, &y);
                }
            }
        }
        super::give_back(y);
        super::give_back(z);
    });
    Ok(())
}
