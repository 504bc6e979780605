//! Attention over a cache.
//!
//! Keys are taken in spans that start at multiples of [`SPAN`]. Each span gives a maximum, a sum and a weighted sum
//! of values; spans are merged in order. One query's result is therefore the same however the work was spread.

mod span;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

pub(super) use self::span::{BLOCK, LANES, dots, weigh};
use self::span::{Queries, Room};
use super::math::exp;
use super::parallel;
use super::quantize::CodeRows;
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};
use crate::quant::{QuantType, decode_body};

/// Keys in a span.
pub(super) const SPAN: usize = 256;

/// Queries that are taken together, about.
const QUERIES: usize = 32;

/// Keys and values of one key head.
#[derive(Clone, Copy)]
struct Cache {
    ty: QuantType,
    /// `[capacity, Hkv, d]` and `[capacity, Hkv, dv]`, as bytes.
    k: Rows<u8>,
    v: Rows<u8>,
    head: usize,
    /// The row of position `p` is `p mod modulus`.
    modulus: usize,
}

/// Heads that share keys, and the width of values.
#[derive(Clone, Copy)]
struct Shape {
    group: usize,
    dv: usize,
}

impl Shape {
    /// Floats that a token's queries give for a span.
    fn part(self) -> usize {
        self.group * (self.dv + 2)
    }
}

/// Scores to values: `p = exp(cap(scale * s) - max)`.
#[derive(Clone, Copy)]
struct Score {
    scale: f32,
    /// 0 means none.
    softcap: f32,
}

/// `attention`.
pub(super) fn attention(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (q, q_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (k, k_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (v, v_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (ty, positions, sinks) = (a.ty()?, a.ptr()?, a.optional()?);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, kv_heads) = (a.dim()?, a.dim()?, a.dim()?);
    let (d, dv, capacity) = (a.dim()?, a.dim()?, a.dim()?);
    let (window, ring) = (a.dim()?, a.dim()? == 1);
    let score = Score { scale: a.float()?, softcap: a.float()? };
    let codes = CodeRows::next(&mut a, ctx, [tokens, heads], dv)?;

    let mut ends = Vec::with_capacity(tokens);
    for position in load::<i32>(ctx, positions, tokens)? {
        let end = usize::try_from(position).ok().filter(|&p| ring || p < capacity);
        ends.push(end.ok_or_else(|| ctx.fault(k, 0, false, "position outside the cache"))? + 1);
    }
    // Only rows that some query can see need be mapped: a cache may grow under its graph.
    let used = ends.iter().copied().max().unwrap_or(0).min(capacity);
    let rows = |ptr: DevicePtr, cols: usize, strides: [usize; 2]| {
        let element = ty.type_bytes();
        if !(ptr.0 as usize | strides[0] | strides[1]).is_multiple_of(element) {
            return Err(ctx.fault(ptr, element, false, "misaligned address"));
        }
        Rows::<u8>::read3(ctx, ptr, [used, kv_heads], cols * ty.type_bytes(), strides)
    };
    let (k, v) = (rows(k, d, k_strides)?, rows(v, dv, v_strides)?);
    let q = Rows::<f32>::read3(ctx, q, [tokens, heads], d, q_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], dv, out_strides)?;
    let sinks = sinks.map(|s| load::<f32>(ctx, s, heads)).transpose()?;
    let level = Level::current();
    let group = heads / kv_heads.max(1);
    let modulus = if ring { capacity } else { usize::MAX };

    let visible = |t: usize| {
        let end: usize = ends[t];
        (if window == 0 { 0 } else { end.saturating_sub(window) }, end)
    };
    // Tokens at neighbouring positions see nearly the same keys: they are taken together.
    let together = (QUERIES / group.max(1)).max(1);
    let mut tiles: Vec<Range<usize>> = Vec::new();
    for t in 0..tokens {
        match tiles.last_mut() {
            Some(tile) if tile.len() < together && ends[t] == ends[t - 1] + 1 => tile.end += 1,
            _ => tiles.push(t..t + 1),
        }
    }
    let shape = Shape { group, dv };
    let spans = |tile: &Range<usize>| {
        let first = tile.clone().map(|t| visible(t).0).min().unwrap_or(0);
        let end = tile.clone().map(|t| visible(t).1).max().unwrap_or(0);
        first / SPAN..end.div_ceil(SPAN)
    };
    // One tile over some spans: (maximum, sum, weighted values) per query and span; a sum of 0 where nothing is seen.
    let partial = |tile: &Range<usize>, head: usize, spans: Range<usize>, parts: &mut [f32]| {
        let cache = Cache { ty, k, v, head, modulus };
        let (d_filled, dv_filled) = (d.next_multiple_of(LANES), dv.next_multiple_of(LANES));
        let mut packed = super::scratch((tile.len() * group).next_multiple_of(BLOCK) * d_filled);
        for (i, to) in packed.chunks_exact_mut(d_filled).take(tile.len() * group).enumerate() {
            // SAFETY: stream order keeps writers of queries away; the op checked that the output is apart.
            to[..d].copy_from_slice(unsafe { q.row(tile.start + i / group, head * group + i % group) });
        }
        let mut ranges = vec![0..0; tile.len()];
        let room = Room::floats(packed.len() / d_filled, d_filled, dv_filled);
        let [mut scores, mut wide, mut values] = room.map(super::scratch);
        for (span, part) in spans.zip(parts.chunks_exact_mut(tile.len() * shape.part())) {
            for (t, range) in tile.clone().zip(&mut ranges) {
                let (first, end) = visible(t);
                *range = (span * SPAN).max(first)..((span + 1) * SPAN).min(end);
            }
            let room = Room { scores: &mut scores, wide: &mut wide, values: &mut values };
            let queries = Queries { group, d: d_filled, dv, dv_filled, rows: &packed, ranges: &ranges };
            span::partial(level, &cache, &queries, score, room, part);
        }
        [packed, scores, wide, values].into_iter().for_each(super::give_back);
    };
    // Puts the spans of a token together.
    let finish = |t: usize, head: usize, parts: &mut dyn Iterator<Item = &[f32]>| {
        let mut merged = super::scratch(shape.part());
        let mut any = false;
        for part in parts.filter(|part| part[1] > 0.0 || part[1].is_nan()) {
            if !any {
                merged.copy_from_slice(part);
                any = true;
                continue;
            }
            for (m, p) in merged.chunks_exact_mut(dv + 2).zip(part.chunks_exact(dv + 2)) {
                merge(level, m, p);
            }
        }
        for (g, m) in merged.chunks_exact(dv + 2).enumerate() {
            let sink = sinks.as_ref().map(|s| s[head * group + g]);
            // SAFETY: each row of the output, and its codes, belong to one task.
            unsafe {
                let row = out.row_mut(t, head * group + g);
                finish_row(level, m, sink, row);
                if let Some(codes) = &codes {
                    codes.write(level, t, head * group + g, row);
                }
            }
        }
        super::give_back(merged);
    };

    let pairs = tiles.len() * kv_heads;
    let cost = |spans: usize, tokens: usize| tokens * spans * SPAN * group * (d + dv) / 16;
    let most = tiles.iter().map(|tile| spans(tile).len()).max().unwrap_or(0);
    if pairs >= 2 * parallel::threads() || most <= 1 {
        parallel::each(pairs, cost(most, tokens.div_ceil(tiles.len().max(1))), |i| {
            let (tile, head) = (&tiles[i / kv_heads], i % kv_heads);
            let spans = spans(tile);
            let step = tile.len() * shape.part();
            let mut parts = super::scratch(step * spans.len());
            partial(tile, head, spans, &mut parts);
            for (i, t) in tile.clone().enumerate() {
                finish(
                    t,
                    head,
                    &mut parts.chunks_exact(step).map(|part| &part[i * shape.part()..(i + 1) * shape.part()]),
                );
            }
            super::give_back(parts);
        });
    } else {
        // Few queries over many keys: spans are the tasks.
        for tile in &tiles {
            let spans = spans(tile);
            let (count, step) = (spans.len(), tile.len() * shape.part());
            let mut parts = super::scratch(kv_heads * count * step);
            let address = Rows::over(&mut parts, kv_heads * count, step);
            parallel::each(kv_heads * count, cost(1, tile.len()), |i| {
                let span = spans.start + i % count;
                // SAFETY: each part belongs to one task.
                partial(tile, i / count, span..span + 1, unsafe { address.row_mut(i, 0) });
            });
            for head in 0..kv_heads {
                let parts = &parts[head * count * step..(head + 1) * count * step];
                for (i, t) in tile.clone().enumerate() {
                    let own = i * shape.part()..(i + 1) * shape.part();
                    finish(t, head, &mut parts.chunks_exact(step).map(|part| &part[own.clone()]));
                }
            }
            super::give_back(parts);
        }
    }
    Ok(())
}

/// Row of `position` as `f32`s, filled up with zeros.
#[inline(always)]
fn widen<const L: u8>(cache: &Cache, rows: &Rows<u8>, position: usize, wide: &mut [f32]) {
    let row = if position < cache.modulus { position } else { position % cache.modulus };
    // SAFETY: stream order keeps writers of the cache away while the kernel runs.
    let bytes = unsafe { rows.row(row, cache.head) };
    let (values, rest) = wide.split_at_mut(bytes.len() / cache.ty.type_bytes());
    decode_body::<L>(cache.ty, bytes, values);
    rest.fill(0.0);
}

per_level! {
    fn merge(into: &mut [f32], part: &[f32]) = merge_body
}

#[inline(always)]
fn merge_body<const L: u8>(into: &mut [f32], part: &[f32]) {
    let max = into[0].max(part[0]);
    let (a, b) = (exp::<L>(into[0] - max), exp::<L>(part[0] - max));
    into[0] = max;
    for (into, part) in into[1..].iter_mut().zip(&part[1..]) {
        *into = fma::<L>(*into, a, *part * b);
    }
}

per_level! {
    fn finish_row(merged: &[f32], sink: Option<f32>, out: &mut [f32]) = finish_body
}

#[inline(always)]
fn finish_body<const L: u8>(merged: &[f32], sink: Option<f32>, out: &mut [f32]) {
    let (max, mut sum, mut factor) = (merged[0], merged[1], 1.0);
    if let Some(sink) = sink {
        let top = max.max(sink);
        factor = exp::<L>(max - top);
        sum = sum * factor + exp::<L>(sink - top);
    }
    let factor = factor / sum;
    out.iter_mut().zip(&merged[2..]).for_each(|(out, v)| *out = v * factor);
}
