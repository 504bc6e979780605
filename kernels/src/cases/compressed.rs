//! Cases of compressed keys: how they are made, which count, and attention over them; and of experts named by a table.

use super::{Case, Tensors};
use crate::KernelError;
use crate::ops::{
    CompressKeys, CompressedAttention, Entries, HashRouter, IndexScores, IndexTop, Scoring, TensorView, Yarn,
};
use crate::quant::QuantType;

pub(super) fn cases() -> Vec<Case> {
    [compressed(), scored(), chosen(), attended(), routed()].concat()
}

const CACHES: [QuantType; 3] = [QuantType::F32, QuantType::F16, QuantType::BF16];

/// A cache of noise whose rows have gaps.
fn cache(t: &mut Tensors<'_>, ty: QuantType, rows: usize, d: usize) -> Result<TensorView, KernelError> {
    let values = t.random(rows * (d + 4));
    t.typed(ty, &[rows, d + 4], &values)?.narrow(1, 2, d)
}

/// Rounded caches may differ by a step where the numbers before rounding differ by a bit.
fn tolerance(ty: QuantType) -> f64 {
    match ty {
        QuantType::F32 => 2e-6,
        QuantType::F16 => 1e-3,
        _ => 8e-3,
    }
}

fn compressed() -> Vec<Case> {
    let mut list = Vec::new();
    let yarn = Some(Yarn { factor: 16.0, original_context: 65_536, beta_fast: 32.0, beta_slow: 1.0 });
    for (ty, first, tokens, ratio, overlap, d) in [
        (QuantType::F32, 0, 1, 4, true, 64),
        (QuantType::F32, 3, 1, 4, true, 128),
        (QuantType::F32, 4, 11, 4, true, 96),
        (QuantType::F16, 1023, 1, 4, true, 512),
        (QuantType::F32, 126, 1, 128, false, 64),
        (QuantType::BF16, 127, 1, 128, false, 512),
        (QuantType::F32, 200, 60, 128, false, 34),
        (QuantType::F16, 0, 9, 3, false, 6),
        (QuantType::F32, 5, 7, 1, true, 300),
    ] {
        let name = format!("{ty} tokens {first}..{}, {ratio} a key of {d}", first + tokens);
        let name = if overlap { format!("{name}, overlap") } else { name };
        list.push(Case::new("compress_keys", name, tolerance(ty), move |t| {
            let channels = if overlap { 2 * d } else { d };
            let capacity = ratio * if overlap { 2 } else { 1 } + tokens + 2;
            let rows = t.strided_noise(&[capacity, 2 * channels], 1, 3)?;
            let ape: Vec<f32> = t.random(ratio * channels).iter().map(|x| 3.0 * x).collect();
            let positions: Vec<i32> = (0..tokens).map(|i| (first + i) as i32).collect();
            Ok(Box::new(CompressKeys {
                rows,
                ape: t.typed(ty, &[ratio, channels], &ape)?,
                weight: t.noise(&[d])?,
                positions: t.ints(&[tokens], &positions)?,
                cache: cache(t, ty, (first + tokens).div_ceil(ratio), d)?,
                overlap,
                eps: 1e-6,
                dims: d / 4 * 2,
                base: 1.6e5,
                yarn: yarn.filter(|_| ratio == 4),
            }))
        }));
    }
    list
}

fn scored() -> Vec<Case> {
    let mut list = Vec::new();
    for (ty, positions, heads, d, entries) in [
        (QuantType::F32, vec![0], 4, 32, 5),
        (QuantType::F32, vec![3, 4, 100, 7], 5, 33, 25),
        (QuantType::F16, vec![300], 64, 128, 80),
        (QuantType::BF16, (90..130).collect(), 16, 64, 33),
        (QuantType::F32, vec![1_000_000], 3, 2, 40),
    ] {
        let name = format!("{ty} {} tokens, {heads}x{d}, {entries} entries", positions.len());
        list.push(Case::new("index_scores", name, 2e-6, move |t| {
            let tokens = positions.len();
            let (q, weights) = (t.strided_noise(&[tokens, heads, d], 1, 2)?, t.strided_noise(&[tokens, heads], 0, 3)?);
            let (keys, positions) = (cache(t, ty, entries, d)?, t.ints(&[tokens], &positions)?);
            let scores = t.strided_output(&[tokens, entries], 1, 4)?;
            Ok(Box::new(IndexScores { q, weights, keys, positions, scores, ratio: 4, scale: 0.1 }))
        }));
    }
    list
}

fn chosen() -> Vec<Case> {
    let mut list = Vec::new();
    for (positions, entries, most) in
        [(vec![3], 1, 4), (vec![0, 30, 35, 39], 10, 8), (vec![4000], 1000, 512), (vec![9, 2399, 2396, 1200], 600, 1)]
    {
        for ties in [false, true] {
            let name = format!("{most} of {entries}, {} tokens{}", positions.len(), if ties { ", ties" } else { "" });
            let positions = positions.clone();
            list.push(Case::new("index_top", name, 0.0, move |t| {
                let tokens = positions.len();
                let mut scores = t.random(tokens * entries);
                if ties {
                    scores.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0);
                }
                let scores = t.strided(&[tokens, entries], &scores, 1, 2)?;
                let ids = t.ints(&[tokens, most + 2], &vec![-1; tokens * (most + 2)])?.narrow(1, 1, most)?;
                Ok(Box::new(IndexTop { scores, positions: t.ints(&[tokens], &positions)?, ids, ratio: 4 }))
            }));
        }
    }
    list.push(Case::new("index_top", "zeros of both signs, infinities and NaN", 0.0, |t| {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let rows = [
            [0.0, -0.0, -0.0, 0.0, 0.0, -0.0, -1.0, 0.0],
            [nan, 1.0, inf, nan, -inf, 2.0, -1.0, -inf],
            [nan; 8],
            [-inf, nan, -inf, nan, -inf, nan, -inf, -3e38],
        ];
        let scores = t.floats(&[4, 8], &rows.concat())?;
        let (positions, ids) = (t.ints(&[4], &[31, 32, 33, 99])?, t.ints(&[4, 5], &[-1; 20])?);
        Ok(Box::new(IndexTop { scores, positions, ids, ratio: 4 }))
    }));
    list
}

fn attended() -> Vec<Case> {
    let mut list = Vec::new();
    // Tokens, heads, width, window, tokens of an entry (0: none), entries of a list (0: all).
    for (first, tokens, heads, d, window, ratio, most) in [
        (0, 1, 1, 2, 1, 0, 0),
        (40, 1, 4, 128, 16, 0, 0),
        (0, 9, 5, 64, 4, 4, 0),
        (700, 1, 64, 512, 128, 4, 40),
        (90, 17, 9, 66, 16, 4, 8),
        (250, 20, 4, 128, 16, 128, 0),
        (5, 2, 3, 1024, 8, 4, 3),
    ] {
        for ty in CACHES {
            let name = format!("{ty} tokens {first}..{}, {heads}x{d}, window {window}", first + tokens);
            let name = if ratio > 0 { format!("{name}, {ratio} an entry, {most} chosen") } else { name };
            let case = Case::new("compressed_attention", name, 2e-6, move |t| {
                let q: Vec<f32> = t.random(tokens * heads * d).iter().map(|x| 3.0 * x).collect();
                let (q, keys) = (t.strided(&[tokens, heads, d], &q, 1, 2)?, cache(t, ty, window + tokens, d)?);
                let positions: Vec<i32> = (0..tokens).map(|i| (first + i) as i32).collect();
                let entries = if ratio == 0 {
                    None
                } else {
                    let rows = (first + tokens).div_ceil(ratio);
                    let ids = |i: usize| (0..most).map(move |k| (k * ((first + i + 1) / ratio).max(1) / most) as i32);
                    let ids: Vec<i32> = (0..tokens).flat_map(ids).collect();
                    let chosen = if most > 0 { Some(t.ints(&[tokens, most], &ids)?) } else { None };
                    Some(Entries { cache: cache(t, ty, rows, d)?, ratio: ratio as u32, chosen })
                };
                Ok(Box::new(CompressedAttention {
                    q,
                    keys,
                    entries,
                    positions: t.ints(&[tokens], &positions)?,
                    sinks: if heads > 3 { Some(t.noise(&[heads])?) } else { None },
                    out: t.strided_output(&[tokens, heads, d], 3, 3)?,
                    scale: 1.0 / (d as f32).sqrt(),
                    window: window as u32,
                    ring: true,
                }))
            });
            // The real widths are tried in one type only without a GPU.
            list.push(if heads * d > 1 << 14 && ty != QuantType::F16 { case.large() } else { case });
        }
    }
    list.push(Case::new("compressed_attention", "scores far apart, great sinks", 2e-6, |t| {
        let q: Vec<f32> = t.random(3 * 4 * 64).iter().map(|x| 300.0 * x).collect();
        Ok(Box::new(CompressedAttention {
            q: t.floats(&[3, 4, 64], &q)?,
            keys: t.noise(&[40, 64])?,
            entries: Some(Entries { cache: t.noise(&[9, 64])?, ratio: 4, chosen: None }),
            positions: t.ints(&[3], &[0, 39, 20])?,
            sinks: Some(t.floats(&[4], &[500.0, -500.0, 0.0, 90.0])?),
            out: t.output(&[3, 4, 64])?,
            scale: 1.0,
            window: 32,
            ring: false,
        }))
    }));
    list
}

fn routed() -> Vec<Case> {
    let mut list = Vec::new();
    for scoring in [Scoring::Softmax, Scoring::Sigmoid, Scoring::SqrtSoftplus] {
        for (tokens, experts, used, norm) in [(1, 256, 6, true), (3, 7, 7, false), (40, 64, 40, true)] {
            let name = format!("{scoring:?} {used} of {experts}, {tokens} tokens, norm {norm}");
            list.push(Case::new("hash_router", name, 2e-6, move |t| {
                let logits: Vec<f32> = t.random(tokens * experts).iter().map(|x| 6.0 * x).collect();
                let table: Vec<i32> = (0..50 * used).map(|i| (i * 7 % experts) as i32).collect();
                let numbers: Vec<i32> = (0..tokens).map(|i| (i * 13 % 50) as i32).collect();
                Ok(Box::new(HashRouter {
                    logits: t.strided(&[tokens, experts], &logits, 1, 2)?,
                    table: t.ints(&[50, used], &table)?,
                    tokens: t.ints(&[tokens], &numbers)?,
                    ids: t.ints(&[tokens, used], &vec![-1; tokens * used])?,
                    weights: t.output(&[tokens, used])?,
                    scoring,
                    norm,
                    scale: 1.5,
                }))
            }));
        }
    }
    list
}
