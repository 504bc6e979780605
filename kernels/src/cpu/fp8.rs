//! Rounding through E4M3.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::parallel;
use super::span::{Reader, Rows};
use crate::ops::Fp8KvQuantize;

/// `fp8_kv_quantize`.
pub(super) fn kv_quantize(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, cols, rotated) = (a.dim()?, a.dim()?, a.dim()?, a.dim()?);
    let x = Rows::<f32>::read3(ctx, x, [tokens, heads], cols, x_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], cols, out_strides)?;
    let in_place = x.in_place(&out);
    parallel::each(tokens * heads, 8 * cols, |i| {
        // SAFETY: each row belongs to one task. The input is read only where it is not the output, and then the op checked
        // that they are apart.
        let row = unsafe { out.row_mut(i / heads, i % heads) };
        if !in_place {
            // SAFETY: as above.
            row.copy_from_slice(unsafe { x.row(i / heads, i % heads) });
        }
        row[..cols - rotated].chunks_mut(Fp8KvQuantize::GROUP).for_each(round_group);
    });
    Ok(())
}

fn round_group(group: &mut [f32]) {
    let greatest = group.iter().fold(1e-4f32, |most, x| most.max(x.abs()));
    let scale = power_above(greatest / 448.0);
    group.iter_mut().for_each(|x| *x = e4m3(*x / scale) * scale);
}

/// The least power of two that is not below `x`, which is a normal number; at most 2^127.
fn power_above(x: f32) -> f32 {
    const MANTISSA: u32 = (1 << 23) - 1;
    let exponent = (x.to_bits() >> 23) + u32::from(x.to_bits() & MANTISSA > 0);
    f32::from_bits(exponent.min(254) << 23)
}

/// The nearest number of E4M3, ties to even, after a cut at ±448; NaN stays NaN.
fn e4m3(x: f32) -> f32 {
    let cut = x.abs().min(448.0);
    let rounded = if cut < 0.015_625 {
        // Below 2^-6 steps are 2^-9, which is what a float of this size has.
        (cut + 16384.0) - 16384.0
    } else {
        let bits = cut.to_bits();
        f32::from_bits((bits + 0x7FFFF + (bits >> 20 & 1)) & !0xF_FFFF)
    };
    // `min` takes the number where the other is NaN.
    if x.is_nan() { x } else { rounded.copysign(x) }
}
