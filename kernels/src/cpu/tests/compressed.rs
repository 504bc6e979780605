//! Compressed keys, what is chosen of them and attention over them, against double precision.

use super::*;
use crate::ops::{CompressKeys, CompressedAttention, Entries, HashRouter, IndexScores, IndexTop, Scoring, TensorView};

/// What [`CompressKeys`] makes of these rows (values, then gates, by token) for window `w`.
fn entry(rows: &[Vec<f32>], ape: &[f32], weight: &[f32], op: &CompressKeys, w: usize) -> Vec<f64> {
    let (ratio, d, channels) = (op.ape.dim(0), weight.len(), op.ape.dim(1));
    let mut slots: Vec<(usize, usize)> = Vec::new();
    if op.overlap && w > 0 {
        slots.extend((0..ratio).map(|i| ((w - 1) * ratio + i, 0)));
    }
    slots.extend((0..ratio).map(|i| (w * ratio + i, channels - d)));
    let mut out = Vec::new();
    for c in 0..d {
        let gate = |&(token, first): &(usize, usize)| {
            let own = first + c;
            (f64::from(rows[token][channels + own]) + f64::from(ape[token % ratio * channels + own])).exp()
        };
        let total: f64 = slots.iter().map(gate).sum();
        out.push(slots.iter().map(|slot| gate(slot) * f64::from(rows[slot.0][slot.1 + c])).sum::<f64>() / total);
    }
    let mean = out.iter().map(|x| x * x).sum::<f64>() / d as f64;
    out.iter_mut().zip(weight).for_each(|(x, w)| *x *= f64::from(*w) / (mean + 1e-6).sqrt());
    for pair in 0..op.dims / 2 {
        let angle = (w * ratio) as f64 * f64::from(op.base).powf(-2.0 * pair as f64 / op.dims as f64);
        let at = d - op.dims + 2 * pair;
        let (a, b) = (out[at], out[at + 1]);
        (out[at], out[at + 1]) = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos());
    }
    out
}

#[test]
fn a_key_is_made_where_a_window_ends_however_tokens_come() {
    for (ratio, overlap) in [(4, true), (4, false), (3, false), (1, true)] {
        let (d, tokens) = (6, 26);
        let channels = if overlap { 2 * d } else { d };
        let rows: Vec<Vec<f32>> = (0..tokens).map(|t| random(t as u64 + 1, 2 * channels)).collect();
        let (ape, weight) = (random(70, ratio * channels), random(71, d));
        let mut all: Vec<Vec<u32>> = Vec::new();
        for batch in [1, 3, 7, tokens] {
            let mut memory = Memory::default();
            // Just as many rows as are needed: they are used again and again.
            let capacity = ratio * if overlap { 2 } else { 1 } + batch - 1;
            let ring = memory.floats(&[capacity, 2 * channels], &vec![f32::NAN; capacity * 2 * channels]);
            let cache = memory.output(&[tokens / ratio, d]);
            let op = CompressKeys {
                rows: ring.clone(),
                ape: memory.floats(&[ratio, channels], &ape),
                weight: memory.floats(&[d], &weight),
                positions: memory.ints(&[1], &[0]),
                cache: cache.clone(),
                overlap,
                eps: 1e-6,
                dims: 4,
                base: 100.0,
                yarn: None,
            };
            for first in (0..tokens).step_by(batch) {
                let count = batch.min(tokens - first);
                for (token, row) in rows.iter().enumerate().skip(first).take(count) {
                    write(&ring.index(token % capacity).unwrap(), row);
                }
                let positions: Vec<i32> = (first..first + count).map(|p| p as i32).collect();
                let positions = memory.ints(&[count], &positions);
                memory.run(&CompressKeys { positions, ..op.clone() }).unwrap();
            }
            for (w, got) in rows_of(&cache).iter().enumerate() {
                close(got, &entry(&rows, &ape, &weight, &op, w), 1e-5);
            }
            all.push(bits(&read(&cache)));
        }
        assert!(all.iter().all(|bits| *bits == all[0]), "steps of any length give the same bits");
    }
}

/// Writes a row of floats.
fn write(row: &TensorView, values: &[f32]) {
    assert_eq!(row.cols(), values.len());
    // SAFETY: inside the view's root, a live buffer of the test's memory.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), row.ptr().0 as usize as *mut f32, values.len()) };
}

#[test]
fn a_key_beyond_the_cache_is_a_fault() {
    for (position, fits) in [(6, true), (7, true), (8, true), (11, false), (-1, false)] {
        let mut memory = Memory::default();
        let op = CompressKeys {
            rows: memory.floats(&[16, 8], &random(1, 128)),
            ape: memory.floats(&[4, 4], &random(2, 16)),
            weight: memory.floats(&[4], &random(3, 4)),
            positions: memory.ints(&[1], &[position]),
            cache: memory.output(&[2, 4]),
            overlap: false,
            eps: 1e-6,
            dims: 2,
            base: 10.0,
            yarn: None,
        };
        assert_eq!(memory.run(&op).is_ok(), fits, "{position}");
    }
}

#[test]
fn entries_are_scored_and_the_best_are_named_in_order() {
    let (heads, d, entries, positions) = (3, 10, 30, [2, 47, 119, 500]);
    let tokens = positions.len();
    let mut memory = Memory::default();
    let (q, weights, keys) = (random(1, tokens * heads * d), random(2, tokens * heads), random(3, entries * d));
    let scores = memory.output(&[tokens, entries]);
    let places = memory.ints(&[tokens], &positions);
    let op = IndexScores {
        q: memory.strided(&[tokens, heads, d], &q, 1),
        weights: memory.strided(&[tokens, heads], &weights, 2),
        keys: memory.floats(&[entries, d], &keys),
        positions: places.clone(),
        scores: scores.clone(),
        ratio: 4,
        scale: 0.5,
    };
    memory.run(&op).unwrap();
    let ids = memory.ints(&[tokens, 8], &[-1; 32]);
    memory.run(&IndexTop { scores: scores.clone(), positions: places, ids: ids.clone(), ratio: 4 }).unwrap();
    for (t, (got, &position)) in rows_of(&scores).iter().zip(&positions).enumerate() {
        let seen = ((position as usize + 1) / 4).min(entries);
        let score = |w: usize| {
            let head = |h: usize| {
                let dot: f64 = (0..d).map(|c| f64::from(q[(t * heads + h) * d + c]) * f64::from(keys[w * d + c])).sum();
                f64::from(weights[t * heads + h]) * dot.max(0.0)
            };
            0.5 * (0..heads).map(head).sum::<f64>()
        };
        let want: Vec<f64> = (0..seen).map(score).collect();
        close(&got[..seen], &want, 1e-6);
        assert!(got[seen..].iter().all(|x| x.is_nan()), "nothing is said of what is not seen");
        let mut order: Vec<usize> = (0..seen).collect();
        order.sort_by(|&a, &b| want[b].total_cmp(&want[a]));
        order.truncate(8);
        order.sort_unstable();
        let want: Vec<i32> = order.iter().map(|&w| w as i32).chain([-1; 8]).take(8).collect();
        assert_eq!(read_ints(&ids)[t * 8..(t + 1) * 8], want, "position {position}");
    }
}

#[test]
fn of_equal_scores_the_first_are_taken_whatever_their_sign() {
    let mut memory = Memory::default();
    let scores =
        memory.floats(&[2, 6], &[-0.0, 0.0, -0.0, 1.0, 0.0, f32::NAN, f32::NAN, -9.0, f32::NAN, -9.0, 0.5, 0.5]);
    let (positions, ids) = (memory.ints(&[2], &[23, 23]), memory.ints(&[2, 4], &[-1; 8]));
    memory.run(&IndexTop { scores, positions, ids: ids.clone(), ratio: 4 }).unwrap();
    assert_eq!(read_ints(&ids), [0, 1, 2, 3, 1, 3, 4, 5]);
}

#[test]
fn a_query_sees_its_window_its_entries_and_its_sink() {
    let (heads, d, window, capacity) = (3, 8, 5, 9);
    for (positions, chosen) in [(vec![0, 1, 2], false), (vec![40, 41, 42, 43], false), (vec![40, 41], true)] {
        let tokens = positions.len();
        let mut memory = Memory::default();
        let (q, keys) = (random(1, tokens * heads * d), random(2, capacity * d));
        let (entries, sinks) = (random(3, 11 * d), random(4, heads));
        let out = memory.output(&[tokens, heads, d]);
        let ids = [[3, 0, 9], [7, 2, 8]];
        let ids_view = memory.ints(&[2, 3], &ids.concat());
        let op = CompressedAttention {
            q: memory.strided(&[tokens, heads, d], &q, 2),
            keys: memory.floats(&[capacity, d], &keys),
            entries: Some(Entries {
                cache: memory.floats(&[11, d], &entries),
                ratio: 4,
                chosen: chosen.then_some(ids_view),
            }),
            positions: memory.ints(&[tokens], &positions),
            sinks: Some(memory.floats(&[heads], &sinks)),
            out: out.clone(),
            scale: 0.7,
            window: window as u32,
            ring: true,
        };
        memory.run(&op).unwrap();
        let mut want = Vec::new();
        for (t, &p) in positions.iter().enumerate() {
            let start = (p + 1 - window).max(0);
            let own = (start..=p).map(|p| &keys[p as usize % capacity * d..][..d]);
            let seen: Vec<usize> = match chosen {
                true => ids[t].iter().map(|&w| w as usize).collect(),
                false => (0..(p as usize + 1) / 4).collect(),
            };
            let rows: Vec<&[f32]> = own.chain(seen.iter().map(|&w| &entries[w * d..][..d])).collect();
            for h in 0..heads {
                let q = &q[(t * heads + h) * d..][..d];
                let weight = |row: &&[f32]| {
                    let dot: f64 = q.iter().zip(*row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    (0.7f32 as f64 * dot).exp()
                };
                let total = rows.iter().map(weight).sum::<f64>() + f64::from(sinks[h]).exp();
                want.extend((0..d).map(|c| rows.iter().map(|r| weight(r) * f64::from(r[c])).sum::<f64>() / total));
            }
        }
        close(&read(&out), &want, 1e-6);
        let bad = memory.ints(&[tokens, 3], &vec![11; tokens * 3]);
        let entries = op.entries.clone().map(|entries| Entries { chosen: Some(bad), ..entries });
        assert_eq!(memory.run(&CompressedAttention { entries, ..op }).is_err(), positions[0] > 2, "an entry not seen");
    }
}

#[test]
fn a_table_names_experts_and_scores_weigh_them() {
    let mut memory = Memory::default();
    let logits = random(1, 2 * 5);
    let (ids, weights) = (memory.ints(&[2, 3], &[-1; 6]), memory.output(&[2, 3]));
    let op = HashRouter {
        logits: memory.strided(&[2, 5], &logits, 1),
        table: memory.ints(&[3, 3], &[0, 1, 2, 4, 0, 3, 2, 3, 9]),
        tokens: memory.ints(&[2], &[1, 0]),
        ids: ids.clone(),
        weights: weights.clone(),
        scoring: Scoring::SqrtSoftplus,
        norm: true,
        scale: 1.5,
    };
    memory.run(&op).unwrap();
    assert_eq!(read_ints(&ids), [4, 0, 3, 0, 1, 2]);
    let mut want = Vec::new();
    for (t, chosen) in [[4, 0, 3], [0, 1, 2]].iter().enumerate() {
        let scores = chosen.map(|e: usize| f64::from(logits[t * 5 + e]).exp().ln_1p().sqrt());
        want.extend(scores.map(|s| 1.5 * s / scores.iter().sum::<f64>()));
    }
    close(&read(&weights), &want, 1e-6);
    for tokens in [[1, 3], [-1, 0], [2, 0]] {
        let tokens = memory.ints(&[2], &tokens);
        memory.run(&HashRouter { tokens, ..op.clone() }).unwrap_err();
    }
}
