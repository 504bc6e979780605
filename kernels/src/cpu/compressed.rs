//! Compressed keys: how they are made, which of them count, and attention over them and a window.

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::math::{dot, exp, greatest, sum};
use super::rope::{rotate_pairs, tail_frequencies, turns};
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};
use super::{give_back, parallel, scratch};
use crate::quant::half::{f32_to_bf16, f32_to_f16};
use crate::quant::{QuantType, decode_body};

/// Rows of a cache, as bytes.
#[derive(Clone, Copy)]
struct Cache {
    ty: QuantType,
    rows: Rows<u8>,
}

impl Cache {
    /// The first `used` rows, which alone need be mapped: a cache may grow under its graph.
    fn read(
        ctx: &KernelContext<'_>,
        (ptr, ty): (DevicePtr, QuantType),
        used: usize,
        cols: usize,
        stride: usize,
    ) -> Result<Self, Fault> {
        let element = ty.type_bytes();
        if !(ptr.0 as usize | stride).is_multiple_of(element) {
            return Err(ctx.fault(ptr, element, false, "misaligned address"));
        }
        Ok(Self { ty, rows: Rows::<u8>::read(ctx, ptr, used, cols * element, stride)? })
    }
}

/// Positions of tokens; a negative one is a fault.
fn positions(ctx: &KernelContext<'_>, ptr: DevicePtr, tokens: usize) -> Result<Vec<usize>, Fault> {
    let whole = |p: i32| usize::try_from(p).map_err(|_| ctx.fault(ptr, 4, false, "position outside the cache"));
    load::<i32>(ctx, ptr, tokens)?.into_iter().map(whole).collect()
}

/// `compress_keys`.
pub(super) fn compress_keys(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (rows, rows_stride, capacity) = (a.ptr()?, a.stride()?, a.dim()?);
    let (ape, ape_ty, weight, at) = (a.ptr()?, a.ty()?, a.ptr()?, a.ptr()?);
    let (cache, ty, entries, cache_stride) = (a.ptr()?, a.ty()?, a.dim()?, a.stride()?);
    let (tokens, d, ratio, overlap) = (a.dim()?, a.dim()?, a.dim()?, a.dim()? == 1);
    let (eps, dims) = (a.float()?, a.dim()?);
    let frequencies = tail_frequencies(&mut a, dims)?;
    let channels = if overlap { 2 * d } else { d };
    let weight = load::<f32>(ctx, weight, d)?;
    let ends: Vec<usize> = positions(ctx, at, tokens)?.into_iter().filter(|p| (p + 1).is_multiple_of(ratio)).collect();
    let Some(last) = ends.iter().max() else { return Ok(()) };
    let level = Level::current();
    let rounded = Cache::read(ctx, (ape, ape_ty), ratio, channels, channels * ape_ty.type_bytes())?;
    let mut ape = vec![0.0; ratio * channels];
    for (place, wide) in ape.chunks_exact_mut(channels).enumerate() {
        // SAFETY: nobody writes weights.
        widen(level, ape_ty, unsafe { rounded.rows.row(place, 0) }, wide);
    }
    let used = last / ratio + 1;
    if used > entries {
        return Err(ctx.fault(cache, 0, true, "position outside the cache"));
    }
    let element = ty.type_bytes();
    let cache = Rows::<u8>::write(ctx, cache, used, d * element, cache_stride)?;
    let rows = Rows::<f32>::read(ctx, rows, capacity.min(last + 1), 2 * channels, rows_stride)?;
    parallel::each(ends.len(), 4 * ratio * channels, |i| {
        let (end, window) = (ends[i], ends[i] / ratio);
        // (row of the token, its place in its window, first of its channels)
        let mut slots = Vec::with_capacity(2 * ratio);
        if overlap && window > 0 {
            slots.extend((0..ratio).map(|i| (end + 1 - 2 * ratio + i, i, 0)));
        }
        slots.extend((0..ratio).map(|i| (end + 1 - ratio + i, i, channels - d)));
        let mut entry = scratch(d);
        for (c, entry) in entry.iter_mut().enumerate() {
            let gate = |&(token, place, first): &(usize, usize, usize)| {
                // SAFETY: stream order keeps writers away from the ring while the kernel runs.
                unsafe { rows.row(token % capacity, 0)[channels + first + c] + ape[place * channels + first + c] }
            };
            let top = slots.iter().map(gate).fold(f32::NEG_INFINITY, f32::max);
            let (mut weights, mut values) = (0.0, 0.0);
            for slot in &slots {
                let p = (gate(slot) - top).exp();
                weights += p;
                // SAFETY: as above.
                values += p * unsafe { rows.row(slot.0 % capacity, 0) }[slot.2 + c];
            }
            *entry = values / weights;
        }
        let square = entry.iter().map(|x| x * x).sum::<f32>() / d as f32;
        let factor = 1.0 / (square + eps).sqrt();
        entry.iter_mut().zip(&weight).for_each(|(x, w)| *x *= factor * w);
        rotate_pairs(&mut entry[d - dims..], &turns((window * ratio) as i32, &frequencies, false));
        // SAFETY: no two tokens end the same window, so the row belongs to this task.
        let out = unsafe { cache.row_mut(window, 0) };
        for (x, out) in entry.iter().zip(out.chunks_exact_mut(element)) {
            match ty {
                QuantType::F16 => out.copy_from_slice(&f32_to_f16(*x).to_ne_bytes()),
                QuantType::BF16 => out.copy_from_slice(&f32_to_bf16(*x).to_ne_bytes()),
                _ => out.copy_from_slice(&x.to_ne_bytes()),
            }
        }
        give_back(entry);
    });
    Ok(())
}

/// `index_scores`.
pub(super) fn index_scores(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    /// Entries of a task.
    const PART: usize = 64;
    let mut a = Reader::new(ctx);
    let (q, q_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (weights, weights_stride) = (a.ptr()?, a.stride()?);
    let (keys, ty, keys_stride) = (a.ptr()?, a.ty()?, a.stride()?);
    let (at, scores, scores_stride) = (a.ptr()?, a.ptr()?, a.stride()?);
    let (tokens, heads, d) = (a.dim()?, a.dim()?, a.dim()?);
    let (entries, ratio, scale) = (a.dim()?, a.dim()?, a.float()?);
    let seen: Vec<usize> = positions(ctx, at, tokens)?.into_iter().map(|p| ((p + 1) / ratio).min(entries)).collect();
    let most = seen.iter().copied().max().unwrap_or(0);
    let q = Rows::<f32>::read3(ctx, q, [tokens, heads], d, q_strides)?;
    let weights = Rows::<f32>::read(ctx, weights, tokens, heads, weights_stride)?;
    let keys = Cache::read(ctx, (keys, ty), most, d, keys_stride)?;
    let scores = Rows::<f32>::write(ctx, scores, tokens, entries, scores_stride)?;
    let (level, parts) = (Level::current(), most.div_ceil(PART));
    parallel::each(tokens * parts, PART * heads * d, |i| {
        let (t, first) = (i / parts, i % parts * PART);
        let end = (first + PART).min(seen[t]);
        let mut wide = scratch(d);
        for w in first..end {
            // SAFETY: stream order keeps writers away while the kernel runs; each score belongs to one task.
            unsafe {
                widen(level, keys.ty, keys.rows.row(w, 0), &mut wide);
                let mut total = 0.0;
                for (h, weight) in weights.row(t, 0).iter().enumerate() {
                    total += weight * product(level, q.row(t, h), &wide).max(0.0);
                }
                scores.part_mut(t, 0, w, 1)[0] = scale * total;
            }
        }
        give_back(wide);
    });
    Ok(())
}

/// `index_top`.
pub(super) fn index_top(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (scores, scores_stride, at) = (a.ptr()?, a.stride()?, a.ptr()?);
    let (ids, ids_stride) = (a.ptr()?, a.stride()?);
    let (tokens, entries, most, ratio) = (a.dim()?, a.dim()?, a.dim()?, a.dim()?);
    let positions = positions(ctx, at, tokens)?;
    let scores = Rows::<f32>::read(ctx, scores, tokens, entries, scores_stride)?;
    let ids = Rows::<i32>::write(ctx, ids, tokens, most, ids_stride)?;
    parallel::each(tokens, 8 * entries, |t| {
        let seen = ((positions[t] + 1) / ratio).min(entries);
        // SAFETY: each token's row belongs to one task; the op checked that output and inputs are apart.
        let (scores, ids) = unsafe { (&scores.row(t, 0)[..seen], ids.row_mut(t, 0)) };
        let mut order: Vec<u32> = (0..seen as u32).collect();
        if seen > most {
            // Zeros of both signs are equal; NaN is below everything.
            let rank = |&i: &u32| {
                let score = scores[i as usize] + 0.0;
                if score.is_nan() { f32::NEG_INFINITY } else { score }
            };
            let nan = |i: &u32| scores[*i as usize].is_nan();
            let before = |a: &u32, b: &u32| rank(b).total_cmp(&rank(a)).then(nan(a).cmp(&nan(b))).then(a.cmp(b));
            order.select_nth_unstable_by(most - 1, before);
            order.truncate(most);
            order.sort_unstable();
        }
        ids.iter_mut().zip(order).for_each(|(id, i)| *id = i as i32);
    });
    Ok(())
}

/// `compressed_attention`.
pub(super) fn attention(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (q, q_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (keys, ty, capacity, keys_stride) = (a.ptr()?, a.ty()?, a.dim()?, a.stride()?);
    let (cache, entries, cache_stride) = (a.optional()?, a.dim()?, a.stride()?);
    let (chosen, most, chosen_stride) = (a.optional()?, a.dim()?, a.stride()?);
    let (at, sinks) = (a.ptr()?, a.optional()?);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, d) = (a.dim()?, a.dim()?, a.dim()?);
    let (window, ratio, ring) = (a.dim()?, a.dim()?, a.dim()? == 1);
    let (_, scale) = (a.dim()?, a.float()?);
    let positions = positions(ctx, at, tokens)?;
    let end = positions.iter().max().map_or(0, |p| p + 1);
    if !ring && end > capacity {
        return Err(ctx.fault(keys, 0, false, "position outside the cache"));
    }
    let seen: Vec<usize> = positions.iter().map(|p| ((p + 1) / ratio).min(entries)).collect();
    let q = Rows::<f32>::read3(ctx, q, [tokens, heads], d, q_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], d, out_strides)?;
    let keys = Cache::read(ctx, (keys, ty), end.min(capacity), d, keys_stride)?;
    let used = seen.iter().copied().max().unwrap_or(0);
    let cache = cache.map(|cache| Cache::read(ctx, (cache, ty), used, d, cache_stride)).transpose()?;
    let sinks = sinks.map(|sinks| load::<f32>(ctx, sinks, heads)).transpose()?;
    // The entries of each token.
    let mut lists: Vec<Vec<usize>> = Vec::with_capacity(tokens);
    let chosen = chosen.map(|ids| Rows::<i32>::read(ctx, ids, tokens, most, chosen_stride)).transpose()?;
    for (t, &seen) in seen.iter().enumerate() {
        let Some(ids) = &chosen else {
            lists.push((0..seen).collect());
            continue;
        };
        // SAFETY: stream order keeps writers away while the kernel runs.
        let ids = unsafe { &ids.row(t, 0)[..seen.min(most)] };
        let number = |&id: &i32| usize::try_from(id).ok().filter(|&id| id < seen);
        let list: Option<Vec<usize>> = ids.iter().map(number).collect();
        lists.push(list.ok_or_else(|| ctx.fault(at, 4, false, "an entry that is not seen was chosen"))?);
    }
    let level = Level::current();
    let parts = if tokens >= 2 * parallel::threads() { 1 } else { heads.min(parallel::threads()) };
    let share = heads.div_ceil(parts);
    parallel::each(tokens * parts, (window + used.min(most.max(1))) * d * share / 2, |i| {
        let (t, first) = (i / parts, i % parts * share);
        let (list, position) = (&lists[t], positions[t]);
        let start = (position + 1).saturating_sub(window);
        let count = position + 1 - start + list.len();
        let (mut wide, mut scores) = (scratch(count * d), scratch(count));
        let own = (start..=position).map(|p| (&keys, p % capacity));
        let rest = cache.iter().flat_map(|cache| list.iter().map(move |&w| (cache, w)));
        for ((cache, row), wide) in own.chain(rest).zip(wide.chunks_exact_mut(d)) {
            // SAFETY: stream order keeps writers away while the kernel runs.
            widen(level, cache.ty, unsafe { cache.rows.row(row, 0) }, wide);
        }
        for h in first..(first + share).min(heads) {
            let sink = sinks.as_ref().map(|sinks| sinks[h]);
            // SAFETY: each row of the output belongs to one task; the op checked that it is apart from the input.
            let (q, out) = unsafe { (q.row(t, h), out.row_mut(t, h)) };
            attend(level, q, &wide, scale, sink, &mut scores, out);
        }
        give_back(wide);
        give_back(scores);
    });
    Ok(())
}

per_level! {
    fn widen(ty: QuantType, bytes: &[u8], out: &mut [f32]) = widen_body
}
per_level! {
    fn product(a: &[f32], b: &[f32]) -> f32 = dot
}
per_level! {
    fn attend(q: &[f32], keys: &[f32], scale: f32, sink: Option<f32>, scores: &mut [f32], out: &mut [f32]) = attend_body
}

#[inline(always)]
fn widen_body<const L: u8>(ty: QuantType, bytes: &[u8], out: &mut [f32]) {
    decode_body::<L>(ty, bytes, out);
}

#[inline(always)]
fn attend_body<const L: u8>(
    q: &[f32],
    keys: &[f32],
    scale: f32,
    sink: Option<f32>,
    scores: &mut [f32],
    out: &mut [f32],
) {
    for (score, key) in scores.iter_mut().zip(keys.chunks_exact(q.len())) {
        *score = scale * dot::<L>(q, key);
    }
    let top = sink.map_or(greatest(scores), |sink| greatest(scores).max(sink));
    scores.iter_mut().for_each(|s| *s = exp::<L>(*s - top));
    let total = sum(scores) + sink.map_or(0.0, |sink| exp::<L>(sink - top));
    out.fill(0.0);
    for (&p, key) in scores.iter().zip(keys.chunks_exact(q.len())) {
        out.iter_mut().zip(key).for_each(|(out, &x)| *out = fma::<L>(p, x, *out));
    }
    let factor = 1.0 / total;
    out.iter_mut().for_each(|out| *out *= factor);
}
