//! Router and the sum over experts.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::parallel;
use super::simd::{Level, fma, per_level};
use super::span::{Reader, Rows, load};

/// `router`.
pub(super) fn router(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (logits, stride, bias, ids, weights) = (a.ptr()?, a.stride()?, a.optional()?, a.ptr()?, a.ptr()?);
    let (tokens, experts, used) = (a.dim()?, a.dim()?, a.dim()?);
    let (scoring, groups, groups_used, greatest) = (a.dim()?, a.dim()?, a.dim()?, a.dim()? == 1);
    let (norm, scale) = (a.dim()? == 1, a.float()?);
    let logits = Rows::<f32>::read(ctx, logits, tokens, experts, stride)?;
    let bias = bias.map(|b| load::<f32>(ctx, b, experts)).transpose()?;
    let ids = Rows::<i32>::write(ctx, ids, tokens, used, used * 4)?;
    let weights = Rows::<f32>::write(ctx, weights, tokens, used, used * 4)?;
    parallel::each(tokens, experts * (20 + used), |t| {
        // SAFETY: each token's rows belong to one task; the op checked that outputs and input are apart.
        let (logits, ids, weights) = unsafe { (logits.row(t, 0), ids.row_mut(t, 0), weights.row_mut(t, 0)) };
        let scores = scores(logits, scoring);
        let mut ranks: Vec<f32> = match &bias {
            Some(bias) => scores.iter().zip(bias).map(|(s, b)| s + b).collect(),
            None => scores.clone(),
        };
        if groups > 1 {
            keep_groups(&mut ranks, groups, groups_used, greatest);
        }
        let mut sum = 0.0;
        for (id, weight) in ids.iter_mut().zip(weights.iter_mut()) {
            let best = first_greatest(&ranks);
            // Chosen: below everything that can still be chosen, NaN among it.
            ranks[best] = f32::NEG_INFINITY;
            *id = best as i32;
            *weight = scores[best];
            sum += *weight;
        }
        let factor = if norm { scale / f32::max(sum, f32::MIN_POSITIVE) } else { scale };
        weights.iter_mut().for_each(|w| *w *= factor);
    });
    Ok(())
}

/// `hash_router`.
pub(super) fn hash_router(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (logits, stride, table, vocabulary) = (a.ptr()?, a.stride()?, a.ptr()?, a.dim()?);
    let (numbers, ids, weights) = (a.ptr()?, a.ptr()?, a.ptr()?);
    let (tokens, experts, used, scoring) = (a.dim()?, a.dim()?, a.dim()?, a.dim()?);
    let (norm, scale) = (a.dim()? == 1, a.float()?);
    let logits = Rows::<f32>::read(ctx, logits, tokens, experts, stride)?;
    let rows = Rows::<i32>::read(ctx, table, vocabulary, used, used * 4)?;
    let ids = Rows::<i32>::write(ctx, ids, tokens, used, used * 4)?;
    let weights = Rows::<f32>::write(ctx, weights, tokens, used, used * 4)?;
    for (t, number) in load::<i32>(ctx, numbers, tokens)?.into_iter().enumerate() {
        let number = usize::try_from(number).ok().filter(|&number| number < vocabulary);
        let number = number.ok_or_else(|| ctx.fault(table, 0, false, "token number out of range"))?;
        // SAFETY: one task does all; the op checked that outputs and inputs are apart.
        let (logits, chosen) = unsafe { (logits.row(t, 0), rows.row(number, 0)) };
        // SAFETY: as above.
        let (ids, weights) = unsafe { (ids.row_mut(t, 0), weights.row_mut(t, 0)) };
        let scores = scores(logits, scoring);
        let mut sum = 0.0;
        for ((id, weight), &expert) in ids.iter_mut().zip(weights.iter_mut()).zip(chosen) {
            let score = usize::try_from(expert).ok().and_then(|expert| scores.get(expert));
            *weight = *score.ok_or_else(|| ctx.fault(table, 4, false, "expert id out of range"))?;
            *id = expert;
            sum += *weight;
        }
        let factor = if norm { scale / f32::max(sum, f32::MIN_POSITIVE) } else { scale };
        weights.iter_mut().for_each(|w| *w *= factor);
    }
    Ok(())
}

fn scores(logits: &[f32], scoring: usize) -> Vec<f32> {
    match scoring {
        0 => {
            let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
            let mut scores: Vec<f32> = logits.iter().map(|x| (x - max).exp()).collect();
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|s| *s /= sum);
            scores
        }
        1 => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        // softplus(x) = max(x, 0) + ln(1 + exp(-|x|)) overflows nowhere.
        _ => logits.iter().map(|x| (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()).collect(),
    }
}

/// Index of the greatest element, the first of equal ones; NaN and minus infinity lose, the first index wins then.
fn first_greatest(x: &[f32]) -> usize {
    let mut best = None;
    for (i, &v) in x.iter().enumerate() {
        if v > best.map_or(f32::NEG_INFINITY, |b: usize| x[b]) {
            best = Some(i);
        }
    }
    best.unwrap_or(0)
}

/// Leaves the experts of the best groups; a group counts its greatest, or the sum of its two greatest.
fn keep_groups(ranks: &mut [f32], groups: usize, groups_used: usize, greatest: bool) {
    let size = ranks.len() / groups;
    let mut sums: Vec<f32> = ranks
        .chunks_exact(size)
        .map(|group| {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for &r in group {
                if r > first {
                    (first, second) = (r, first);
                } else if r > second {
                    second = r;
                }
            }
            if greatest { first } else { first + second }
        })
        .collect();
    let mut keep = vec![false; groups];
    for _ in 0..groups_used {
        let best = first_greatest(&sums);
        sums[best] = f32::NEG_INFINITY;
        keep[best] = true;
    }
    for (group, keep) in ranks.chunks_exact_mut(size).zip(keep) {
        if !keep {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// `gather_experts`.
pub(super) fn gather_experts(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (w, experts, bytes) = (a.ptr()?, a.dim()?, a.stride()?);
    let (ids, places, out) = (a.ptr()?, a.dim()?, a.ptr()?);
    let ids = load::<i32>(ctx, ids, places)?;
    let out = Rows::<u8>::write(ctx, out, places, bytes, bytes)?;
    let mut sources = Vec::with_capacity(places);
    for (place, id) in ids.into_iter().enumerate().filter(|(_, id)| *id != -1) {
        let expert = usize::try_from(id).ok().filter(|&e| e < experts);
        let expert = expert.ok_or_else(|| ctx.fault(w, bytes, false, "expert id out of range"))?;
        let from = w.checked_add(expert.saturating_mul(bytes)).unwrap_or_default();
        // SAFETY: nobody writes weights. Only those of chosen experts are touched.
        sources.push((place, unsafe { ctx.slice::<u8>(from, bytes)? }));
    }
    parallel::each(sources.len(), bytes / 8, |task| {
        let (place, source) = sources[task];
        // SAFETY: each place belongs to one task; the op checked that output and inputs are apart.
        unsafe { out.row_mut(place, 0) }.copy_from_slice(source);
    });
    Ok(())
}

/// `share_experts`.
pub(super) fn share_experts(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (ids, weights, used, at, counts) = (a.ptr()?, a.ptr()?, a.dim()?, a.ptr()?, a.ptr()?);
    let (experts, slots) = (a.dim()?, a.dim()?);
    let (device_ids, device_weights, places) = (a.ptr()?, a.ptr()?, a.ptr()?);
    let (fetched, fetches) = (a.optional()?, a.dim()?);
    let (host_ids, host_weights) = (a.ptr()?, a.ptr()?);
    let (chosen, given) = (load::<i32>(ctx, ids, used)?, load::<f32>(ctx, weights, used)?);
    let table = load::<i32>(ctx, at, experts)?;
    let mut kept = Vec::with_capacity(used);
    for &id in &chosen {
        let slot = usize::try_from(id).ok().and_then(|id| table.get(id));
        let slot = *slot.ok_or_else(|| ctx.fault(ids, 4, false, "expert id out of range"))?;
        let known = slot == -1 || usize::try_from(slot).is_ok_and(|slot| slot < slots);
        kept.push(if known { slot } else { return Err(ctx.fault(at, 4, false, "slot of an expert out of range")) });
    }
    let write = |ptr, cols| Rows::<i32>::write(ctx, ptr, 1, cols, cols * 4);
    let (counts, device_ids, places) = (write(counts, experts)?, write(device_ids, used)?, write(places, used)?);
    let (host_ids, fetched) = (write(host_ids, used)?, fetched.map(|ptr| write(ptr, fetches)).transpose()?);
    let device_weights = Rows::<f32>::write(ctx, device_weights, 1, used, used * 4)?;
    let host_weights = Rows::<f32>::write(ctx, host_weights, 1, used, used * 4)?;
    // SAFETY: one task does all; the op checked that outputs are apart from each other and from inputs, which were copied out.
    let (counts, places) = unsafe { (counts.row_mut(0, 0), places.row_mut(0, 0)) };
    // SAFETY: as above.
    let mut device = unsafe { (device_ids.row_mut(0, 0), device_weights.row_mut(0, 0), 0) };
    // SAFETY: as above.
    let mut host = unsafe { (host_ids.row_mut(0, 0), host_weights.row_mut(0, 0), 0) };
    // SAFETY: as above.
    let fetched = fetched.map_or(&mut [][..], |fetched| unsafe { fetched.row_mut(0, 0) });
    for (ids, weights) in [(&mut *device.0, &mut *device.1), (&mut *host.0, &mut *host.1)] {
        ids.fill(-1);
        weights.fill(0.0);
    }
    places.fill(-1);
    fetched.fill(-1);
    let wanted = fetches.saturating_sub(kept.iter().filter(|&&slot| slot != -1).count());
    let mut coming = 0;
    let before: Vec<i32> = chosen.iter().map(|&id| counts[id as usize]).collect();
    for (place, (&id, &slot)) in chosen.iter().zip(&kept).enumerate() {
        // An expert that was chosen twice counts once.
        counts[id as usize] = before[place].wrapping_add(1);
        let fetch = slot == -1 && coming < wanted;
        let (ids, weights, next) = if slot != -1 || fetch { &mut device } else { &mut host };
        ids[*next] = id;
        weights[*next] = given[place];
        if fetch {
            fetched[coming] = id;
            places[*next] = coming as i32;
            coming += 1;
        } else if slot != -1 {
            places[*next] = slot + fetches as i32;
        }
        *next += 1;
    }
    Ok(())
}

/// `expert_sum`.
pub(super) fn expert_sum(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (y, y_strides, weights) = (a.ptr()?, [a.stride()?, a.stride()?], a.ptr()?);
    let (scale, ids, experts) = (a.optional()?, a.optional()?, a.dim()?);
    let (residual, residual_stride) = (a.optional()?, a.stride()?);
    let (out, out_stride) = (a.ptr()?, a.stride()?);
    let (tokens, used, cols) = (a.dim()?, a.dim()?, a.dim()?);
    let y = Rows::<f32>::read3(ctx, y, [tokens, used], cols, y_strides)?;
    let mut weights = load::<f32>(ctx, weights, tokens * used)?;
    if let (Some(scale), Some(ids)) = (scale, ids) {
        let at = scale;
        let scale = load::<f32>(ctx, scale, experts)?;
        let ids = load::<i32>(ctx, ids, tokens * used)?;
        for (weight, id) in weights.iter_mut().zip(ids).filter(|(_, id)| *id != -1) {
            let scale = usize::try_from(id).ok().and_then(|id| scale.get(id));
            *weight *= scale.ok_or_else(|| ctx.fault(at, 4, false, "expert id out of range"))?;
        }
    }
    let residual = residual.map(|r| Rows::<f32>::read(ctx, r, tokens, cols, residual_stride)).transpose()?;
    let out = Rows::<f32>::write(ctx, out, tokens, cols, out_stride)?;
    let level = Level::current();
    parallel::each(tokens, cols * used, |t| {
        let mut sum = super::scratch(cols);
        // SAFETY: each token's rows belong to one task. Inputs are read before the output is borrowed, as the
        // residual may be the output.
        unsafe {
            for k in 0..used {
                add_scaled(level, weights[t * used + k], y.row(t, k), &mut sum);
            }
            if let Some(residual) = &residual {
                add_scaled(level, 1.0, residual.row(t, 0), &mut sum);
            }
            out.row_mut(t, 0).copy_from_slice(&sum);
        }
        super::give_back(sum);
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
