//! Row lookups, cache writes, copies, fills.

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::parallel;
use super::simd::{Level, per_level};
use super::span::{Reader, Rows, load};
use crate::quant::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::quant::{QuantType, decode};

/// `get_rows`.
pub(super) fn get_rows(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (table, ty, count, cols, stride) = (a.ptr()?, a.ty()?, a.dim()?, a.dim()?, a.stride()?);
    let (ids, out, tokens, out_stride, scale) = (a.ptr()?, a.ptr()?, a.dim()?, a.stride()?, a.float()?);
    let row_bytes = ty.row_bytes(cols).map_err(|_| ctx.fault(table, 0, false, "columns do not fit the blocks"))?;
    let ids = load::<i32>(ctx, ids, tokens)?;
    let level = Level::current();
    let out = Rows::<u8>::write(ctx, out, tokens, cols * 4, out_stride)?;
    for (t, &id) in ids.iter().enumerate() {
        let row = usize::try_from(id).ok().filter(|&row| row < count);
        let row = row.ok_or_else(|| ctx.fault(table, row_bytes, false, "row number out of range"))?;
        let at = table.checked_add(row * stride).unwrap_or_default();
        // SAFETY: stream order keeps writers away; the op checked that the output is apart.
        let (bytes, out) = unsafe { (ctx.slice::<u8>(at, row_bytes)?, out.row_mut(t, 0)) };
        if ty == QuantType::I32 {
            out.copy_from_slice(bytes);
            continue;
        }
        let mut values = super::scratch(cols);
        decode(level, ty, bytes, &mut values);
        for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(&values) {
            *out = (value * scale).to_ne_bytes();
        }
        super::give_back(values);
    }
    Ok(())
}

/// `kv_store`.
pub(super) fn kv_store(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (src, src_strides, positions) = (a.ptr()?, [a.stride()?, a.stride()?], a.ptr()?);
    let (cache, ty, capacity, cache_strides) = (a.ptr()?, a.ty()?, a.dim()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, cols, ring) = (a.dim()?, a.dim()?, a.dim()?, a.dim()? == 1);
    let positions = load::<i32>(ctx, positions, tokens)?;
    let src = Rows::<f32>::read3(ctx, src, [tokens, heads], cols, src_strides)?;
    let cache = CacheRows::new(ctx, cache, ty, capacity, cache_strides, [heads, cols], &positions, ring)?;
    let level = Level::current();
    for t in 0..tokens {
        // SAFETY: one thread writes; the op checked that the cache is apart from the source.
        (0..heads).for_each(|h| unsafe { cache.write(level, t, h, src.row(t, h)) });
    }
    Ok(())
}

/// The rows of a cache that tokens go to. Only those need be mapped: a cache may grow under its graph.
pub(super) enum CacheRows {
    Floats(Vec<Rows<f32>>),
    Halves(Vec<Rows<u16>>, fn(Level, &[f32], &mut [u16])),
}

impl CacheRows {
    /// Those at `positions`, each `[heads, cols]`.
    #[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
    pub(super) fn new(
        ctx: &KernelContext<'_>,
        cache: DevicePtr,
        ty: QuantType,
        capacity: usize,
        strides: [usize; 2],
        [heads, cols]: [usize; 2],
        positions: &[i32],
        ring: bool,
    ) -> Result<Self, Fault> {
        let places = positions.iter().map(|&position| {
            let row = usize::try_from(position).ok().map(|p| if ring { p % capacity.max(1) } else { p });
            let row = row.filter(|&row| row < capacity);
            let row = row.ok_or_else(|| ctx.fault(cache, 0, true, "position outside the cache"))?;
            Ok(cache.checked_add(row * strides[0]).unwrap_or_default())
        });
        Ok(match ty {
            QuantType::F32 => {
                let rows = places.map(|at| Rows::write(ctx, at?, heads, cols, strides[1]));
                Self::Floats(rows.collect::<Result<_, Fault>>()?)
            }
            _ => {
                let rows = places.map(|at| Rows::write(ctx, at?, heads, cols, strides[1]));
                Self::Halves(rows.collect::<Result<_, Fault>>()?, if ty == QuantType::F16 { to_f16 } else { to_bf16 })
            }
        })
    }

    /// Writes head `h` of token `t`.
    ///
    /// # Safety
    /// Nothing else touches it meanwhile.
    pub(super) unsafe fn write(&self, level: Level, t: usize, h: usize, x: &[f32]) {
        // SAFETY: the caller vouches for exclusivity.
        unsafe {
            match self {
                Self::Floats(rows) => rows[t].row_mut(h, 0).copy_from_slice(x),
                Self::Halves(rows, narrow) => narrow(level, x, rows[t].row_mut(h, 0)),
            }
        }
    }
}

per_level! {
    fn to_f16(src: &[f32], dst: &mut [u16]) = to_f16_body
}
per_level! {
    fn to_bf16(src: &[f32], dst: &mut [u16]) = to_bf16_body
}

#[inline(always)]
fn to_f16_body<const L: u8>(src: &[f32], dst: &mut [u16]) {
    dst.iter_mut().zip(src).for_each(|(dst, &src)| *dst = f32_to_f16(src));
}

#[inline(always)]
fn to_bf16_body<const L: u8>(src: &[f32], dst: &mut [u16]) {
    dst.iter_mut().zip(src).for_each(|(dst, &src)| *dst = f32_to_bf16(src));
}

/// `copy`.
pub(super) fn copy(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (src, src_ty, src_strides) = (a.ptr()?, a.ty()?, [a.stride()?, a.stride()?]);
    let (dst, dst_ty, dst_strides) = (a.ptr()?, a.ty()?, [a.stride()?, a.stride()?]);
    let (dims, cols) = ([a.dim()?, a.dim()?], a.dim()?);
    let src = Rows::<u8>::read3(ctx, src, dims, cols * src_ty.type_bytes(), src_strides)?;
    let dst = Rows::<u8>::write3(ctx, dst, dims, cols * dst_ty.type_bytes(), dst_strides)?;
    parallel::each(dims[0] * dims[1], cols, |i| {
        let (a, b) = (i / dims[1], i % dims[1]);
        // SAFETY: each row belongs to one task; the op checked that the two are apart.
        let (from, to) = unsafe { (src.row(a, b), dst.row_mut(a, b)) };
        convert(src_ty, from, dst_ty, to);
    });
    Ok(())
}

fn convert(src_ty: QuantType, from: &[u8], dst_ty: QuantType, to: &mut [u8]) {
    if src_ty == dst_ty {
        to.copy_from_slice(from);
        return;
    }
    let wide = |i: usize| match src_ty {
        QuantType::F32 => f32::from_ne_bytes([from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]]),
        QuantType::F16 => f16_to_f32(u16::from_ne_bytes([from[2 * i], from[2 * i + 1]])),
        _ => bf16_to_f32(u16::from_ne_bytes([from[2 * i], from[2 * i + 1]])),
    };
    match dst_ty {
        QuantType::F32 => {
            to.as_chunks_mut::<4>().0.iter_mut().enumerate().for_each(|(i, to)| *to = wide(i).to_ne_bytes());
        }
        QuantType::F16 => {
            let to = to.as_chunks_mut::<2>().0.iter_mut().enumerate();
            to.for_each(|(i, to)| *to = f32_to_f16(wide(i)).to_ne_bytes());
        }
        _ => {
            let to = to.as_chunks_mut::<2>().0.iter_mut().enumerate();
            to.for_each(|(i, to)| *to = f32_to_bf16(wide(i)).to_ne_bytes());
        }
    }
}

/// `fill`.
pub(super) fn fill(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, rows, cols, bits) = (a.ptr()?, a.dim()?, a.dim()?, a.int()?);
    let x = Rows::<i32>::write(ctx, x, rows, cols, cols * 4)?;
    // SAFETY: each row belongs to one task.
    parallel::each(rows, cols / 8, |r| unsafe { x.row_mut(r, 0).fill(bits) });
    Ok(())
}
