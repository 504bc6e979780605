use super::*;
use crate::ops::{Attention, AttentionScores, AttentionValues, SoftMax};

/// A cache whose rows from `filled` on hold no numbers.
fn cache(memory: &mut Memory, ty: QuantType, [rows, heads, d]: [usize; 3], filled: usize, seed: u64) -> TensorView {
    let mut values = random(seed, rows * heads * d);
    values[filled * heads * d..].fill(f32::NAN);
    memory.weights(ty, &[rows, heads, d], &values).0
}

struct Way {
    ty: QuantType,
    window: Option<u32>,
    softcap: Option<f32>,
    ring: Option<usize>,
}

const PLAIN: Way = Way { ty: QuantType::F16, window: None, softcap: None, ring: None };

fn both_ways(way: &Way, positions: &[i32]) -> (Vec<f32>, Vec<f32>) {
    let (heads, kv_heads, d, dv) = (6, 2, 40, 72);
    let (tokens, capacity) = (positions.len(), way.ring.unwrap_or(300));
    let mut memory = Memory::default();
    let filled = (*positions.iter().max().unwrap() as usize + 1).min(capacity);
    let k = cache(&mut memory, way.ty, [capacity, kv_heads, d], filled, 1);
    let v = cache(&mut memory, way.ty, [capacity, kv_heads, dv], filled, 2);
    let q = memory.strided(&[tokens, heads, d], &random(3, tokens * heads * d), 8);
    let positions = memory.ints(&[tokens], positions);
    let (fused, unfused) = (memory.output(&[tokens, heads, dv]), memory.output(&[tokens, heads, dv]));
    let scores = memory.strided(&[tokens, heads, capacity], &vec![f32::NAN; tokens * heads * capacity], 4);
    let (scale, window, softcap, ring) = ((d as f32).sqrt().recip(), way.window, way.softcap, way.ring.is_some());
    let attention = Attention {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        positions: positions.clone(),
        out: fused.clone(),
        scale,
        window,
        softcap,
        sinks: None,
        ring,
        codes: None,
        spread: None,
    };
    memory.run(&attention).unwrap();
    let (positions, out) = (positions, unfused.clone());
    let first =
        AttentionScores { q, k, positions: positions.clone(), scores: scores.clone(), scale, window, softcap, ring };
    memory.run(&first).unwrap();
    memory.run(&SoftMax { x: scores.clone(), out: scores.clone() }).unwrap();
    memory.run(&AttentionValues { p: scores, v, positions, out, window, ring }).unwrap();
    (read(&fused), read(&unfused))
}

#[track_caller]
fn same(way: &Way, positions: &[i32]) {
    let (fused, unfused) = both_ways(way, positions);
    let want: Vec<f64> = fused.iter().map(|&x| f64::from(x)).collect();
    close(&unfused, &want, 1e-5);
    assert!(fused.iter().any(|&x| x.abs() > 0.01), "something comes out");
}

#[test]
fn three_kernels_are_one_attention() {
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for window in [None, Some(1), Some(7)] {
            for softcap in [None, Some(0.5)] {
                same(&Way { ty, window, softcap, ..PLAIN }, &[0, 5, 131, 258]);
                same(&Way { ty, window, softcap, ..PLAIN }, &(120..170).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn three_kernels_know_rings() {
    for (window, ring) in [(7, 20), (1, 40), (250, 290), (30, 59)] {
        for first in [0, 3, 100, 1000] {
            let way = Way { window: Some(window), ring: Some(ring), ..PLAIN };
            let tokens = (ring as i32 + 1 - window as i32).min(30);
            same(&way, &(first..first + tokens).collect::<Vec<_>>());
        }
    }
}

#[test]
fn three_kernels_give_the_same_bits_on_any_number_of_threads() {
    same_on_any_threads(|| both_ways(&PLAIN, &[140, 299, 17, 3]).1);
}

#[test]
fn rows_without_a_visible_key_become_zeros() {
    let mut memory = Memory::default();
    let x = memory.floats(&[1, 2, 3], &[f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0, 1.0, 0.0]);
    let out = memory.output(&[1, 2, 3]);
    memory.run(&SoftMax { x, out: out.clone() }).unwrap();
    let (e, total) = (1f64.exp(), 2.0 + 1f64.exp());
    close(&read(&out), &[0.0, 0.0, 0.0, 1.0 / total, e / total, 1.0 / total], 1e-6);
}

fn plain_scores(q: &TensorView, k: &TensorView) -> AttentionScores {
    let (q, k, positions, scores) = (q.clone(), k.clone(), q.clone(), q.clone());
    AttentionScores { q, k, positions, scores, scale: 1.0, window: None, softcap: None, ring: false }
}

#[test]
fn a_position_outside_the_cache_is_a_fault() {
    let mut memory = Memory::default();
    let k = cache(&mut memory, QuantType::F16, [4, 1, 8], 4, 1);
    let q = memory.floats(&[1, 1, 8], &random(2, 8));
    for position in [4, -1] {
        let positions = memory.ints(&[1], &[position]);
        let scores = memory.output(&[1, 1, 4]);
        let op = AttentionScores { positions, scores, ..plain_scores(&q, &k) };
        assert!(memory.run(&op).is_err());
        let positions = memory.ints(&[1], &[position]);
        let (p, out) = (memory.output(&[1, 1, 4]), memory.output(&[1, 1, 8]));
        let op = AttentionValues { p, v: k.clone(), positions, out, window: None, ring: false };
        assert!(memory.run(&op).is_err());
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut memory = Memory::default();
    let k = cache(&mut memory, QuantType::F16, [4, 2, 8], 4, 1);
    let positions = memory.ints(&[1], &[0]);
    let q = memory.floats(&[1, 3, 8], &random(2, 24));
    let scores = memory.output(&[1, 3, 4]);
    let op = AttentionScores { positions: positions.clone(), scores: scores.clone(), ..plain_scores(&q, &k) };
    assert!(op.check().is_err(), "3 heads on 2 key heads");
    let out = memory.output(&[1, 3, 8]);
    let op = AttentionValues { p: scores, v: k.clone(), positions: positions.clone(), out, window: None, ring: false };
    assert!(op.check().is_err(), "3 heads on 2 value heads");
    let (q, scores) = (memory.output(&[2, 4, 8]), memory.output(&[2, 4, 4]));
    let two = memory.ints(&[2], &[0, 1]);
    let ring = |window| AttentionScores {
        positions: two.clone(),
        scores: scores.clone(),
        window,
        ring: true,
        ..plain_scores(&q, &k)
    };
    assert!(ring(Some(3)).check().is_ok());
    assert!(ring(Some(4)).check().is_err(), "a ring of 4 rows, a window of 4 and 2 tokens");
    assert!(ring(None).check().is_err(), "a ring without a window");
    let x = memory.output(&[1, 1, 4]);
    let out = memory.output(&[1, 1, 5]);
    assert!(SoftMax { x, out }.check().is_err(), "another shape");
}
