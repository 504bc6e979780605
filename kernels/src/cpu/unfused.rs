//! Attention in three kernels, its scores in memory.
//!
//! Queries that share a key head are taken some at a time, so that each key and value is widened once for all of them. A score is
//! summed as in fused attention, a value's weighted sum in the order of the cache's rows: neither depends on the other queries.

use std::ops::Range;

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::attention::{BLOCK, LANES, SPAN, dots, weigh};
use super::math::{exp, greatest, sum};
use super::parallel;
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};
use crate::quant::{QuantType, decode_body};

/// Queries that are taken together, about.
const QUERIES: usize = 32;

/// Rows of a cache that are widened at a time: a multiple of [`BLOCK`], and a part of [`SPAN`].
const KEYS: usize = 16;

/// Least columns of values that a task takes.
const COLUMNS: usize = 64;

/// What a query sees: rows of the cache in order, in one piece or two.
type Seen = [Range<usize>; 2];

/// What each of the queries at `positions` sees.
fn seen(
    ctx: &KernelContext<'_>,
    cache: DevicePtr,
    positions: &[i32],
    (capacity, window, ring): (usize, usize, bool),
) -> Result<Vec<Seen>, Fault> {
    let of = |&position: &i32| {
        let position = usize::try_from(position).ok().filter(|&p| ring || p < capacity);
        let end = position.ok_or_else(|| ctx.fault(cache, 0, false, "position outside the cache"))? + 1;
        let first = if window == 0 { 0 } else { end.saturating_sub(window) };
        if !ring {
            return Ok([first..end, end..end]);
        }
        let (first, last) = (first % capacity, (end - 1) % capacity);
        Ok(if first <= last { [first..last + 1, last + 1..last + 1] } else { [0..last + 1, first..capacity] })
    };
    positions.iter().map(of).collect()
}

/// The pieces of it within `range`.
fn within(seen: &Seen, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    seen.clone().map(|piece| piece.start.max(range.start)..piece.end.min(range.end)).into_iter()
}

/// From the first row that one of them sees to the last.
fn hull(seen: &[Seen]) -> Range<usize> {
    let pieces = || seen.iter().flatten().filter(|piece| !piece.is_empty());
    let first = pieces().map(|piece| piece.start).min().unwrap_or(0);
    first..pieces().map(|piece| piece.end).max().unwrap_or(first)
}

/// A cache `[C, Hkv, cols]`, of which the first rows are looked at.
#[derive(Clone, Copy)]
struct Cache {
    ty: QuantType,
    rows: Rows<u8>,
}

impl Cache {
    fn new(
        ctx: &KernelContext<'_>,
        (ptr, strides, ty): (DevicePtr, [usize; 2], QuantType),
        dims: [usize; 2],
        cols: usize,
    ) -> Result<Self, Fault> {
        let element = ty.type_bytes();
        if !(ptr.0 as usize | strides[0] | strides[1]).is_multiple_of(element) {
            return Err(ctx.fault(ptr, element, false, "misaligned address"));
        }
        Ok(Self { ty, rows: Rows::read3(ctx, ptr, dims, cols * element, strides)? })
    }

    /// Columns of a row as `f32`s, filled up with zeros.
    #[inline(always)]
    fn widen<const L: u8>(&self, row: usize, head: usize, columns: &Range<usize>, wide: &mut [f32]) {
        let element = self.ty.type_bytes();
        // SAFETY: stream order keeps writers of the cache away while the kernel runs.
        let bytes = unsafe { self.rows.row(row, head) };
        let (values, rest) = wide.split_at_mut(columns.len());
        decode_body::<L>(self.ty, &bytes[columns.start * element..columns.end * element], values);
        rest.fill(0.0);
    }
}

/// The tokens of each task, for heads in groups that share keys.
fn tiles(tokens: usize, group: usize) -> Vec<Range<usize>> {
    let together = (QUERIES / group.max(1)).max(1);
    (0..tokens).step_by(together).map(|start| start..(start + together).min(tokens)).collect()
}

/// `attention_scores`.
pub(super) fn scores(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (q, q_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (k, k_strides, ty) = (a.ptr()?, [a.stride()?, a.stride()?], a.ty()?);
    let positions = a.ptr()?;
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, kv_heads) = (a.dim()?, a.dim()?, a.dim()?);
    let (d, capacity, window, ring) = (a.dim()?, a.dim()?, a.dim()?, a.dim()? == 1);
    let (scale, softcap) = (a.float()?, a.float()?);

    let seen = seen(ctx, k, &load::<i32>(ctx, positions, tokens)?, (capacity, window, ring))?;
    // Only rows that some query can see need be mapped: a cache may grow under its graph.
    let keys = Cache::new(ctx, (k, k_strides, ty), [hull(&seen).end, kv_heads], d)?;
    let q = Rows::<f32>::read3(ctx, q, [tokens, heads], d, q_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], capacity, out_strides)?;
    let (level, group, filled) = (Level::current(), heads / kv_heads, d.next_multiple_of(LANES));
    let (tiles, spans) = (tiles(tokens, group), capacity.div_ceil(SPAN));
    let cost = tokens.div_ceil(tiles.len()) * group * SPAN * d / 16;
    parallel::each(tiles.len() * kv_heads * spans, cost, |i| {
        let (tile, head) = (&tiles[i / spans / kv_heads], i / spans % kv_heads);
        let span = i % spans * SPAN..(i % spans * SPAN + SPAN).min(capacity);
        let count = tile.len() * group;
        let read = hull(&seen[tile.clone()]);
        let read = read.start.max(span.start)..read.end.min(span.end);
        let mut packed = super::scratch(count.next_multiple_of(BLOCK) * filled);
        let mut dots = super::scratch(count.next_multiple_of(BLOCK) * SPAN);
        let mut wide = super::scratch(KEYS * filled);
        if !read.is_empty() {
            for (i, to) in packed.chunks_exact_mut(filled).take(count).enumerate() {
                // SAFETY: stream order keeps writers of queries away; the op checked that the output is apart.
                to[..d].copy_from_slice(unsafe { q.row(tile.start + i / group, head * group + i % group) });
            }
            multiply(level, &keys, head, d, read.clone(), &packed, &mut wide, &mut dots);
        }
        for (i, dots) in dots.chunks_exact(SPAN).take(count).enumerate() {
            let (t, h) = (tile.start + i / group, head * group + i % group);
            // SAFETY: each part of a row of the scores belongs to one task.
            let out = unsafe { out.part_mut(t, h, span.start, span.len()) };
            out.fill(f32::NEG_INFINITY);
            for piece in within(&seen[t], &span).filter(|piece| !piece.is_empty()) {
                let out = &mut out[piece.start - span.start..piece.end - span.start];
                for (out, dot) in out.iter_mut().zip(&dots[piece.start - read.start..]) {
                    let score = dot * scale;
                    *out = if softcap > 0.0 { softcap * (score / softcap).tanh() } else { score };
                }
            }
        }
        [packed, dots, wide].into_iter().for_each(super::give_back);
    });
    Ok(())
}

per_level! {
    /// Products of queries with the keys `range`, in rows of [`SPAN`].
    #[allow(clippy::too_many_arguments)]
    fn multiply(
        keys: &Cache,
        head: usize,
        d: usize,
        range: Range<usize>,
        queries: &[f32],
        wide: &mut [f32],
        out: &mut [f32],
    ) = multiply_body
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn multiply_body<const L: u8>(
    keys: &Cache,
    head: usize,
    d: usize,
    range: Range<usize>,
    queries: &[f32],
    wide: &mut [f32],
    out: &mut [f32],
) {
    let filled = wide.len() / KEYS;
    for start in range.clone().step_by(KEYS) {
        let count = KEYS.min(range.end - start);
        for (k, wide) in wide.chunks_exact_mut(filled).take(count).enumerate() {
            keys.widen::<L>(start + k, head, &(0..d), wide);
        }
        for (queries, out) in queries.chunks_exact(BLOCK * filled).zip(out.chunks_exact_mut(BLOCK * SPAN)) {
            for k in (0..count).step_by(BLOCK) {
                let dots = dots::<L>(queries, &wide[k * filled..(k + BLOCK) * filled], filled);
                for (dots, out) in dots.iter().zip(out.chunks_exact_mut(SPAN)) {
                    // What follows the last key of a range is not looked at.
                    let at = start - range.start + k;
                    out[at..at + BLOCK].copy_from_slice(dots);
                }
            }
        }
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
    let positions = a.ptr()?;
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, kv_heads) = (a.dim()?, a.dim()?, a.dim()?);
    let (dv, capacity, window, ring) = (a.dim()?, a.dim()?, a.dim()?, a.dim()? == 1);

    let seen = seen(ctx, v, &load::<i32>(ctx, positions, tokens)?, (capacity, window, ring))?;
    let values = Cache::new(ctx, (v, v_strides, ty), [hull(&seen).end, kv_heads], dv)?;
    let p = Rows::<f32>::read3(ctx, p, [tokens, heads], capacity, p_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], dv, out_strides)?;
    let (level, group) = (Level::current(), heads / kv_heads);
    let tiles = tiles(tokens, group);
    // Few queries: columns are shared out. Each column is summed by itself.
    let parts = match tiles.len() * kv_heads {
        few if few < 2 * parallel::threads() => (2 * parallel::threads()).div_ceil(few).min(dv.div_ceil(COLUMNS)),
        _ => 1,
    };
    let width = dv.div_ceil(parts).next_multiple_of(LANES);
    let parts = dv.div_ceil(width);
    let cost = tokens.div_ceil(tiles.len()) * group * hull(&seen).len() * width / 16;
    parallel::each(tiles.len() * kv_heads * parts, cost, |i| {
        let (tile, head) = (&tiles[i / parts / kv_heads], i / parts % kv_heads);
        let columns = i % parts * width..(i % parts * width + width).min(dv);
        let count = tile.len() * group;
        let filled = columns.len().next_multiple_of(LANES);
        let mut weights = super::scratch(count.next_multiple_of(BLOCK) * SPAN);
        let mut wide = super::scratch(KEYS * filled);
        let mut sums = super::scratch(count.next_multiple_of(BLOCK) * filled);
        let range = hull(&seen[tile.clone()]);
        for start in range.clone().step_by(SPAN) {
            let span = start..(start + SPAN).min(range.end);
            for (i, to) in weights.chunks_exact_mut(SPAN).take(count).enumerate() {
                // SAFETY: stream order keeps writers of the weights away; the op checked that the output is apart.
                let from = unsafe { p.row(tile.start + i / group, head * group + i % group) };
                to[..span.len()].copy_from_slice(&from[span.clone()]);
            }
            let work = Weighted { seen: &seen[tile.clone()], group, head, columns: &columns, weights: &weights };
            add_values(level, &values, &work, span, &mut wide, &mut sums);
        }
        for (i, sums) in sums.chunks_exact(filled).take(count).enumerate() {
            let (t, h) = (tile.start + i / group, head * group + i % group);
            // SAFETY: each part of a row of the output belongs to one task.
            let out = unsafe { out.part_mut(t, h, columns.start, columns.len()) };
            out.copy_from_slice(&sums[..columns.len()]);
        }
        [weights, wide, sums].into_iter().for_each(super::give_back);
    });
    Ok(())
}

/// The queries of some tokens and their weights.
struct Weighted<'a> {
    seen: &'a [Seen],
    group: usize,
    head: usize,
    columns: &'a Range<usize>,
    /// In rows of [`SPAN`], filled up to whole blocks.
    weights: &'a [f32],
}

per_level! {
    /// Adds the weighted values of the rows `range`, at most [`SPAN`], to each query's sums.
    fn add_values(values: &Cache, work: &Weighted<'_>, range: Range<usize>, wide: &mut [f32], sums: &mut [f32])
        = add_values_body
}

#[inline(always)]
fn add_values_body<const L: u8>(
    values: &Cache,
    work: &Weighted<'_>,
    range: Range<usize>,
    wide: &mut [f32],
    sums: &mut [f32],
) {
    let filled = wide.len() / KEYS;
    for start in range.clone().step_by(KEYS) {
        let rows = start..(start + KEYS).min(range.end);
        for (row, wide) in rows.clone().zip(wide.chunks_exact_mut(filled)) {
            values.widen::<L>(row, work.head, work.columns, wide);
        }
        let at = start - range.start;
        let blocks = work.weights.chunks_exact(BLOCK * SPAN).zip(sums.chunks_exact_mut(BLOCK * filled));
        for (block, (weights, sums)) in blocks.enumerate() {
            let seen = |i: usize| work.seen.get((block * BLOCK + i) / work.group);
            let all = |seen: &Seen| within(seen, &rows).any(|piece| piece == rows);
            if (0..BLOCK).filter_map(seen).all(all) {
                weigh::<L>(weights, at, &wide[..rows.len() * filled], filled, sums);
                continue;
            }
            // A query that does not see a row must not meet its values, which may be no numbers.
            for (i, (weights, sums)) in weights.chunks_exact(SPAN).zip(sums.chunks_exact_mut(filled)).enumerate() {
                let Some(seen) = seen(i) else { continue };
                for row in within(seen, &rows).flatten() {
                    let (weight, wide) = (weights[row - range.start], &wide[(row - start) * filled..][..filled]);
                    sums.iter_mut().zip(wide).for_each(|(sum, &value)| *sum = fma::<L>(weight, value, *sum));
                }
            }
        }
    }
}
