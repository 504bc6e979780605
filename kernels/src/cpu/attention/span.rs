//! Some queries over one span of keys: scores in blocks of four queries and four keys, then values.
//!
//! Each key and value is widened once for all queries. A score is summed in 16 lanes and then as a tree, a value's weighted sum
//! key by key: neither depends on the other queries of the block.

use std::ops::Range;

use super::{Cache, Score, widen};
use crate::cpu::math::{exp, greatest, sum};
use crate::cpu::simd::{fma, per_level};

/// Queries and keys of a block.
pub(in crate::cpu) const BLOCK: usize = 4;

/// Keys that are widened at a time: a multiple of [`BLOCK`].
const KEYS: usize = 16;

/// Lanes that a score is summed in; rows of keys, queries and values are filled up with zeros to a multiple of it.
pub(in crate::cpu) const LANES: usize = 16;

/// The queries of some tokens, all heads that share keys.
pub(super) struct Queries<'a> {
    /// Heads that share keys.
    pub(super) group: usize,
    /// Width of a query, filled up.
    pub(super) d: usize,
    /// Width of a value, and filled up.
    pub(super) dv: usize,
    pub(super) dv_filled: usize,
    /// `[token][head]`, filled up to whole blocks.
    pub(super) rows: &'a [f32],
    /// The keys of the span that each token sees.
    pub(super) ranges: &'a [Range<usize>],
}

/// Room for [`partial`], all zeros at first.
pub(super) struct Room<'a> {
    /// `[queries][SPAN]`
    pub(super) scores: &'a mut [f32],
    /// `[KEYS][d or dv]`
    pub(super) wide: &'a mut [f32],
    /// `[queries][dv]`
    pub(super) values: &'a mut [f32],
}

impl Room<'_> {
    /// Floats of each part, for so many queries (whole blocks) and widths that are filled up.
    pub(super) fn floats(queries: usize, d: usize, dv: usize) -> [usize; 3] {
        [queries * super::SPAN, KEYS * d.max(dv), queries * dv]
    }
}

per_level! {
    /// `part` = per query: maximum of the scores, sum of `exp(score - maximum)`, the values weighted by those. Queries of tokens
    /// that see none of the span are left out.
    pub(super) fn partial(cache: &Cache, queries: &Queries<'_>, score: Score, room: Room<'_>, part: &mut [f32]) = partial_body
}

#[inline(always)]
fn partial_body<const L: u8>(cache: &Cache, queries: &Queries<'_>, score: Score, room: Room<'_>, part: &mut [f32]) {
    let Room { scores, wide, values } = room;
    let Queries { group, d, dv, dv_filled, rows, ranges } = *queries;
    let seen = ranges.iter().filter(|range| !range.is_empty());
    let first = seen.clone().map(|range| range.start).min().unwrap_or(0);
    let end = seen.map(|range| range.end).max().unwrap_or(0);
    let count = rows.len() / d;
    for start in (first..end).step_by(KEYS) {
        let keys = KEYS.min(end - start);
        for (k, wide) in wide.chunks_exact_mut(d).take(keys).enumerate() {
            widen::<L>(cache, &cache.k, start + k, wide);
        }
        for q in (0..count).step_by(BLOCK) {
            for k in (0..keys).step_by(BLOCK) {
                let dots = dots::<L>(&rows[q * d..(q + BLOCK) * d], &wide[k * d..(k + BLOCK) * d], d);
                for (i, dots) in dots.iter().enumerate() {
                    scores[(q + i) * super::SPAN + start - first + k..][..BLOCK].copy_from_slice(dots);
                }
            }
        }
    }
    let own = |q: usize| ranges.get(q / group).filter(|range| !range.is_empty());
    for (q, (scores, part)) in scores.chunks_exact_mut(super::SPAN).zip(part.chunks_exact_mut(dv + 2)).enumerate() {
        let Some(range) = own(q) else { continue };
        let scores = &mut scores[range.start - first..range.end - first];
        scores.iter_mut().for_each(|s| *s *= score.scale);
        if score.softcap > 0.0 {
            scores.iter_mut().for_each(|s| *s = score.softcap * (*s / score.softcap).tanh());
        }
        let max = greatest(scores);
        scores.iter_mut().for_each(|s| *s = exp::<L>(*s - max));
        (part[0], part[1]) = (max, sum(scores));
    }
    values.fill(0.0);
    for start in (first..end).step_by(KEYS) {
        let keys = KEYS.min(end - start);
        for (k, wide) in wide.chunks_exact_mut(dv_filled).take(keys).enumerate() {
            widen::<L>(cache, &cache.v, start + k, wide);
        }
        for q in (0..count).step_by(BLOCK) {
            let out = &mut values[q * dv_filled..(q + BLOCK) * dv_filled];
            let (scores, at) = (&scores[q * super::SPAN..(q + BLOCK) * super::SPAN], start - first);
            let mut own = (q..q + BLOCK).map(own);
            if own.clone().flatten().all(|range| range.start <= start && start + keys <= range.end) {
                weigh::<L>(scores, at, &wide[..keys * dv_filled], dv_filled, out);
                continue;
            }
            // At the edges not all see all.
            for (scores, out) in scores.chunks_exact(super::SPAN).zip(out.chunks_exact_mut(dv_filled)) {
                let Some(range) = own.next().flatten() else { continue };
                for (k, wide) in wide.chunks_exact(dv_filled).take(keys).enumerate() {
                    if range.contains(&(start + k)) {
                        let p = scores[at + k];
                        out.iter_mut().zip(wide).for_each(|(out, &v)| *out = fma::<L>(p, v, *out));
                    }
                }
            }
        }
    }
    for (part, values) in part.chunks_exact_mut(dv + 2).zip(values.chunks_exact(dv_filled)) {
        part[2..].copy_from_slice(&values[..dv]);
    }
}

/// The dot products of four rows with four, `d` long.
#[inline(always)]
pub(in crate::cpu) fn dots<const L: u8>(a: &[f32], b: &[f32], d: usize) -> [[f32; BLOCK]; BLOCK] {
    assert!(a.len() == BLOCK * d && b.len() == BLOCK * d && d.is_multiple_of(LANES));
    #[cfg(target_arch = "x86_64")]
    if L == 2 {
        // SAFETY: level 2 runs only where AVX-512 was found; lengths were checked above.
        return unsafe { super::x86::dots(a, b, d) };
    }
    let mut dots = [[0.0; BLOCK]; BLOCK];
    for (a, dots) in a.chunks_exact(d).zip(&mut dots) {
        for (b, dot) in b.chunks_exact(d).zip(dots) {
            let mut lanes = [0.0f32; LANES];
            for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
                for l in 0..LANES {
                    lanes[l] = fma::<L>(a[l], b[l], lanes[l]);
                }
            }
            for n in [8, 4, 2, 1] {
                for l in 0..n {
                    lanes[l] += lanes[l + n];
                }
            }
            *dot = lanes[0];
        }
    }
    dots
}

/// `out[q] += sum of scores[q][at + k] * values[k]` for four queries, key after key.
#[inline(always)]
pub(in crate::cpu) fn weigh<const L: u8>(scores: &[f32], at: usize, values: &[f32], dv: usize, out: &mut [f32]) {
    let keys = values.len() / dv;
    assert!(scores.len() == BLOCK * super::SPAN && at + keys <= super::SPAN);
    assert!(out.len() == BLOCK * dv && values.len() == keys * dv && dv.is_multiple_of(LANES));
    #[cfg(target_arch = "x86_64")]
    if L == 2 {
        // SAFETY: level 2 runs only where AVX-512 was found; lengths were checked above.
        return unsafe { super::x86::weigh(scores, at, values, dv, out) };
    }
    for (scores, out) in scores.chunks_exact(super::SPAN).zip(out.chunks_exact_mut(dv)) {
        for (p, values) in scores[at..at + keys].iter().zip(values.chunks_exact(dv)) {
            out.iter_mut().zip(values).for_each(|(out, &v)| *out = fma::<L>(*p, v, *out));
        }
    }
}
