use super::*;
use crate::ops::{Attention, AttentionScores, AttentionValues, SoftMax};

/// A cache whose rows from `filled` on hold no numbers.
fn cache(memory: &mut Memory, ty: QuantType, [rows, heads, d]: [usize; 3], filled: usize, seed: u64) -> TensorView {
    let mut values = random(seed, rows * heads * d);
    values[filled * heads * d..].fill(f32::NAN);
    memory.weights(ty, &[rows, heads, d], &values).0
}

fn both_ways(ty: QuantType, window: Option<u32>, positions: &[i32]) -> (Vec<f32>, Vec<f32>) {
    let (heads, kv_heads, d, capacity) = (6, 2, 40, 300);
    let tokens = positions.len();
    let mut memory = Memory::default();
    let filled = *positions.iter().max().unwrap() as usize + 1;
    let k = cache(&mut memory, ty, [capacity, kv_heads, d], filled, 1);
    let v = cache(&mut memory, ty, [capacity, kv_heads, d], filled, 2);
    let q = memory.strided(&[tokens, heads, d], &random(3, tokens * heads * d), 8);
    let positions = memory.ints(&[tokens], positions);
    let (fused, unfused) = (memory.output(&[tokens, heads, d]), memory.output(&[tokens, heads, d]));
    let scores = memory.strided(&[tokens, heads, capacity], &vec![f32::NAN; tokens * heads * capacity], 4);
    let scale = (d as f32).sqrt().recip();
    let attention = Attention {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        positions: positions.clone(),
        out: fused.clone(),
        scale,
        window,
        softcap: None,
        sinks: None,
        ring: false,
    };
    memory.run(&attention).unwrap();
    memory.run(&AttentionScores { q, k, positions, scores: scores.clone(), scale, window }).unwrap();
    memory.run(&SoftMax { x: scores.clone(), out: scores.clone() }).unwrap();
    memory.run(&AttentionValues { p: scores, v, out: unfused.clone() }).unwrap();
    (read(&fused), read(&unfused))
}

#[test]
fn three_kernels_are_one_attention() {
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for window in [None, Some(1), Some(7)] {
            let (fused, unfused) = both_ways(ty, window, &[0, 5, 131, 258]);
            let want: Vec<f64> = fused.iter().map(|&x| f64::from(x)).collect();
            close(&unfused, &want, 1e-5);
            assert!(fused.iter().any(|&x| x.abs() > 0.01), "something comes out");
        }
    }
}

#[test]
fn three_kernels_give_the_same_bits_on_any_number_of_threads() {
    same_on_any_threads(|| both_ways(QuantType::F16, None, &[140, 299, 17, 3]).1);
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

#[test]
fn a_position_outside_the_cache_is_a_fault() {
    let mut memory = Memory::default();
    let k = cache(&mut memory, QuantType::F16, [4, 1, 8], 4, 1);
    let q = memory.floats(&[1, 1, 8], &random(2, 8));
    for position in [4, -1] {
        let positions = memory.ints(&[1], &[position]);
        let scores = memory.output(&[1, 1, 4]);
        let op = AttentionScores { q: q.clone(), k: k.clone(), positions, scores, scale: 1.0, window: None };
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
    let op = AttentionScores { q, k: k.clone(), positions, scores: scores.clone(), scale: 1.0, window: None };
    assert!(op.check().is_err(), "3 heads on 2 key heads");
    let out = memory.output(&[1, 3, 8]);
    assert!(AttentionValues { p: scores, v: k, out }.check().is_err(), "3 heads on 2 value heads");
    let x = memory.output(&[1, 1, 4]);
    let out = memory.output(&[1, 1, 5]);
    assert!(SoftMax { x, out }.check().is_err(), "another shape");
}
