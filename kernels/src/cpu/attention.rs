//! Attention over a cache.
//!
//! Keys are taken in spans that start at multiples of [`SPAN`]. Each span gives a maximum, a sum and a weighted sum
//! of values; spans are merged in order. One query's result is therefore the same however the work was spread.

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::math::{dot, exp, greatest, sum};
use super::parallel;
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};
use crate::quant::{QuantType, decode_body};

/// Keys in a span.
const SPAN: usize = 256;

/// Values rows that are added at a time.
const STEP: usize = 4;

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
    let spans = |t: usize| {
        let (first, end) = visible(t);
        (first / SPAN, end.div_ceil(SPAN))
    };
    // One query group over one span: (maximum, sum, weighted values) per head.
    let partial = |t: usize, head: usize, span: usize, part: &mut [f32]| {
        let (first, end) = visible(t);
        let keys = (span * SPAN).max(first)..((span + 1) * SPAN).min(end);
        let cache = Cache { ty, k, v, head, modulus };
        // SAFETY: stream order keeps writers of queries away; the op checked that the output is apart.
        let queries = (0..group).map(|g| unsafe { q.row(t, head * group + g) });
        let mut packed = super::scratch(group * d);
        queries.zip(packed.chunks_exact_mut(d)).for_each(|(from, to)| to.copy_from_slice(from));
        let mut scores = super::scratch(group * SPAN);
        let mut wide = super::scratch(STEP * d.max(dv));
        span_values(level, &cache, keys.start, keys.end, &packed, score, &mut scores, &mut wide, part);
        [packed, scores, wide].into_iter().for_each(super::give_back);
    };
    let finish = |t: usize, head: usize, parts: &mut dyn Iterator<Item = &[f32]>| {
        let mut merged = super::scratch(group * (dv + 2));
        if let Some(first) = parts.next() {
            merged.copy_from_slice(first);
        }
        for part in parts {
            for (m, p) in merged.chunks_exact_mut(dv + 2).zip(part.chunks_exact(dv + 2)) {
                merge(level, m, p);
            }
        }
        for (g, m) in merged.chunks_exact(dv + 2).enumerate() {
            let sink = sinks.as_ref().map(|s| s[head * group + g]);
            // SAFETY: each row of the output belongs to one task.
            finish_row(level, m, sink, unsafe { out.row_mut(t, head * group + g) });
        }
        super::give_back(merged);
    };

    let part_len = group * (dv + 2);
    let pairs = tokens * kv_heads;
    let total: usize = (0..tokens).map(|t| spans(t).1 - spans(t).0).sum();
    let cost = |spans: usize| spans * SPAN * group * (d + dv) / 16;
    if pairs >= 2 * rayon::current_num_threads() || total <= tokens {
        parallel::each(pairs, cost(total / tokens.max(1)), |i| {
            let (t, head) = (i / kv_heads, i % kv_heads);
            let (first, end) = spans(t);
            let mut parts = super::scratch(part_len * (end - first));
            for (span, part) in (first..end).zip(parts.chunks_exact_mut(part_len)) {
                partial(t, head, span, part);
            }
            finish(t, head, &mut parts.chunks_exact(part_len));
            super::give_back(parts);
        });
    } else {
        // Few queries over many keys: spans are the tasks.
        for t in 0..tokens {
            let (first, end) = spans(t);
            let count = end - first;
            let mut parts = super::scratch(kv_heads * count * part_len);
            let address = Rows::over(&mut parts, kv_heads * count, part_len);
            parallel::each(kv_heads * count, cost(1), |i| {
                // SAFETY: each part belongs to one task.
                partial(t, i / count, first + i % count, unsafe { address.row_mut(i, 0) });
            });
            for head in 0..kv_heads {
                let parts = &parts[head * count * part_len..(head + 1) * count * part_len];
                finish(t, head, &mut parts.chunks_exact(part_len));
            }
            super::give_back(parts);
        }
    }
    Ok(())
}

per_level! {
    #[allow(clippy::too_many_arguments)]
    fn span_values(
        cache: &Cache,
        first: usize,
        end: usize,
        q: &[f32],
        score: Score,
        scores: &mut [f32],
        wide: &mut [f32],
        part: &mut [f32],
    ) = span_values_body
}

/// `part` = per query head: maximum of the scores, sum of `exp(score - maximum)`, the values weighted by those.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn span_values_body<const L: u8>(
    cache: &Cache,
    first: usize,
    end: usize,
    q: &[f32],
    score: Score,
    scores: &mut [f32],
    wide: &mut [f32],
    part: &mut [f32],
) {
    let count = end - first;
    let group = scores.len() / SPAN;
    let (d, dv) = (q.len() / group, part.len() / group - 2);
    for (j, position) in (first..end).enumerate() {
        let key = widen::<L>(cache, &cache.k, position, &mut wide[..d]);
        for (q, scores) in q.chunks_exact(d).zip(scores.chunks_exact_mut(SPAN)) {
            scores[j] = dot::<L>(q, key) * score.scale;
        }
    }
    for (scores, part) in scores.chunks_exact_mut(SPAN).zip(part.chunks_exact_mut(dv + 2)) {
        let scores = &mut scores[..count];
        if score.softcap > 0.0 {
            scores.iter_mut().for_each(|s| *s = score.softcap * (*s / score.softcap).tanh());
        }
        let max = greatest(scores);
        scores.iter_mut().for_each(|s| *s = exp::<L>(*s - max));
        part[0] = max;
        part[1] = sum(scores);
        part[2..].fill(0.0);
    }
    for j in (0..count).step_by(STEP) {
        let step = STEP.min(count - j);
        let whole = wide.chunks_exact_mut(dv);
        let mut values: [&[f32]; STEP] = [&[]; STEP];
        for (s, (value, wide)) in values.iter_mut().zip(whole).enumerate().take(step) {
            *value = widen::<L>(cache, &cache.v, first + j + s, wide);
        }
        for (scores, part) in scores.chunks_exact(SPAN).zip(part.chunks_exact_mut(dv + 2)) {
            let out = &mut part[2..];
            if step == STEP {
                let (p, v) = (&scores[j..j + STEP], values.map(|v| &v[..out.len()]));
                for (c, out) in out.iter_mut().enumerate() {
                    let mut total = *out;
                    for s in 0..STEP {
                        total = fma::<L>(p[s], v[s][c], total);
                    }
                    *out = total;
                }
            } else {
                for (&p, v) in scores[j..j + step].iter().zip(&values) {
                    out.iter_mut().zip(*v).for_each(|(out, &v)| *out = fma::<L>(p, v, *out));
                }
            }
        }
    }
}

/// Row of `position` as `f32`: in place, or converted into `wide`.
#[inline(always)]
fn widen<'w, const L: u8>(cache: &Cache, rows: &Rows<u8>, position: usize, wide: &'w mut [f32]) -> &'w [f32] {
    let row = if position < cache.modulus { position } else { position % cache.modulus };
    // SAFETY: stream order keeps writers of the cache away while the kernel runs.
    let bytes: &[u8] = unsafe { rows.row(row, cache.head) };
    if cache.ty == QuantType::F32 {
        // SAFETY: any bits are an f32; the alignment was checked with the arguments.
        let (_, values, _) = unsafe { bytes.align_to::<f32>() };
        return values;
    }
    decode_body::<L>(cache.ty, bytes, wide);
    wide
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
