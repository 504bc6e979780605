//! The choice of the next token.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::parallel;
use super::span::{Reader, Rows, load};
use crate::ops::SampleState;

/// `argmax`.
pub(super) fn argmax(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, stride, out, rows, cols) = (a.ptr()?, a.stride()?, a.ptr()?, a.dim()?, a.dim()?);
    let x = Rows::<f32>::read(ctx, x, rows, cols, stride)?;
    let out = Rows::<i32>::write(ctx, out, rows, 1, 4)?;
    parallel::each(rows, cols / 4, |t| {
        // SAFETY: each row belongs to one task; the op checked that output and input are apart.
        unsafe { out.row_mut(t, 0)[0] = first_greatest(x.row(t, 0)) as i32 };
    });
    Ok(())
}

/// Index of the greatest element, the first of equal ones; 0 if all are NaN.
fn first_greatest(x: &[f32]) -> usize {
    // Block by block: the maximum of a block vectorises, its place is looked for only where it is a new one.
    let (mut best, mut place) = (f32::NEG_INFINITY, None);
    for (b, block) in x.chunks(1024).enumerate() {
        let top = super::math::greatest(block);
        let better = top > best || place.is_none();
        if let Some(i) = block.iter().position(|&v| better && v == top) {
            (best, place) = (top, Some(b * 1024 + i));
        }
    }
    place.unwrap_or(0)
}

/// `advance`.
pub(super) fn advance(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (positions, count, by) = (a.ptr()?, a.dim()?, a.int()?);
    let positions = Rows::<i32>::write(ctx, positions, 1, count, 0)?;
    // SAFETY: nothing else touches the positions while the kernel runs.
    unsafe { positions.row_mut(0, 0) }.iter_mut().for_each(|p| *p = p.wrapping_add(by));
    Ok(())
}

/// `sample`.
pub(super) fn sample(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (logits, vocabulary, state, recent, ring, token) = (a.ptr()?, a.dim()?, a.ptr()?, a.ptr()?, a.dim()?, a.ptr()?);
    // SAFETY: stream order keeps everybody else away; the op checked that none of these overlap.
    let (state, recent, token) = unsafe {
        (ctx.slice_mut::<SampleState>(state, 1)?, ctx.slice_mut::<i32>(recent, ring)?, ctx.slice_mut::<i32>(token, 1)?)
    };
    let mut logits = load::<f32>(ctx, logits, vocabulary)?;
    let state = &mut state[0];
    penalise(&mut logits, state, recent);
    let chosen = if state.temp > 0.0 { draw(&logits, state) } else { Some(first_greatest(&logits)) };
    state.counter = state.counter.wrapping_add(1);
    // Of logits that are no numbers none is chosen.
    let chosen = chosen.filter(|&token| logits.get(token).is_some_and(|logit| logit.is_finite()));
    token[0] = chosen.map_or(SampleState::NONE, |token| token as i32);
    recent[(state.recent_len % ring as u64) as usize] = token[0];
    state.recent_len = state.recent_len.wrapping_add(1);
    Ok(())
}

/// Makes recent tokens less likely, each once.
fn penalise(logits: &mut [f32], state: &SampleState, recent: &[i32]) {
    let penalty = state.repeat_penalty;
    if penalty == 1.0 || penalty.is_nan() || penalty <= 0.0 {
        return;
    }
    let held = state.recent_len.min(recent.len() as u64);
    let count = u64::try_from(state.repeat_last_n).map_or(held, |n| n.min(held));
    let mut tokens: Vec<i32> =
        (state.recent_len - count..state.recent_len).map(|n| recent[(n % recent.len() as u64) as usize]).collect();
    tokens.sort_unstable();
    tokens.dedup();
    for token in tokens {
        if let Some(logit) = usize::try_from(token).ok().and_then(|t| logits.get_mut(t)) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

/// Top-k, top-p, min-p, temperature, draw. None if all are NaN, and the best if it is infinite.
fn draw(logits: &[f32], state: &SampleState) -> Option<usize> {
    let best_first = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let mut list: Vec<(f32, u32)> = Vec::new();
    let k = usize::try_from(state.top_k).ok().filter(|&k| k > 0 && k < logits.len()).unwrap_or(logits.len());
    if k < logits.len() {
        // Candidates pile up to a limit, then all but the best k go and raise the bar.
        let limit = (4 * k).max(4096);
        let mut bar = f32::NEG_INFINITY;
        for (i, &logit) in logits.iter().enumerate() {
            if logit > bar || (list.len() < k && !logit.is_nan()) {
                list.push((logit, i as u32));
                if list.len() == limit {
                    list.select_nth_unstable_by(k - 1, best_first);
                    list.truncate(k);
                    bar = list[k - 1].0;
                }
            }
        }
    } else {
        list.extend(logits.iter().enumerate().filter(|(_, l)| !l.is_nan()).map(|(i, &l)| (l, i as u32)));
    }
    list.sort_unstable_by(best_first);
    list.truncate(k);
    let &(top, first) = list.first()?;
    let probability = |logit: f32, temp: f32| (f64::from(logit - top) / f64::from(temp)).exp();
    if state.top_p < 1.0 {
        let total: f64 = list.iter().map(|&(l, _)| probability(l, 1.0)).sum();
        let mut sum = 0.0;
        let kept = list.iter().position(|&(l, _)| {
            sum += probability(l, 1.0) / total;
            sum >= f64::from(state.top_p)
        });
        list.truncate(kept.map_or(list.len(), |last| last + 1));
    }
    if state.min_p > 0.0 {
        let kept = list.iter().take_while(|&&(l, _)| probability(l, 1.0) >= f64::from(state.min_p)).count();
        list.truncate(kept.max(1));
    }
    let total: f64 = list.iter().map(|&(l, _)| probability(l, state.temp)).sum();
    let mut left = uniform(state.seed, state.counter) * total;
    for &(logit, token) in &list {
        left -= probability(logit, state.temp);
        if left < 0.0 {
            return Some(token as usize);
        }
    }
    // Rounding left a crumb (or the best logit is infinite and probabilities are NaN).
    Some(first as usize)
}

/// Number `counter` of the sequence of `seed`, in `[0, 1)`: SplitMix64 (Steele, Lea, Flood 2014), 53 bits.
fn uniform(seed: u64, counter: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let z = mix(mix(seed).wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    (z >> 11) as f64 / (1u64 << 53) as f64
}
