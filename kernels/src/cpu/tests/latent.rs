//! Attention over a compressed cache: products of heads, and what is made ready for it.

use super::*;
use crate::ops::{HeadMatMul, KvStore, LatentHeads, RmsNorm, Rope, RopeKind, Yarn};

#[test]
fn each_head_is_multiplied_with_its_own_weight() {
    for (ty, [heads, out, cols], tokens) in [
        (QuantType::F32, [3, 5, 7], 1),
        (QuantType::F16, [4, 70, 33], 3),
        (QuantType::Q8_0, [2, 130, 64], 40),
        (QuantType::Q4_K, [5, 9, 256], 2),
    ] {
        let mut memory = Memory::default();
        let (w, exact) = memory.weights(ty, &[heads, out, cols], &random(1, heads * out * cols));
        let x = random(2, tokens * heads * cols);
        // Parts of wider rows, as queries whose other part is rotated.
        let x_view = memory.strided(&[tokens, heads, cols], &x, 8);
        let y = memory.strided(&[tokens, heads, out], &vec![f32::NAN; tokens * heads * out], 3);
        let mut wanted = Vec::new();
        for slot in 0..tokens * heads {
            let (x, w) = (&x[slot * cols..][..cols], &exact[slot % heads * out * cols..]);
            wanted.extend((0..out).map(|r| {
                let row = w[r * cols..].iter().zip(x);
                row.map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>()
            }));
        }
        memory.run(&HeadMatMul { w, x: x_view, y: y.clone() }).unwrap();
        close(&read(&y), &wanted, 2e-5);
    }
}

#[test]
fn latent_rows_and_queries_are_those_of_single_ops() {
    let yarn = Yarn { factor: 40.0, original_context: 4096, beta_fast: 32.0, beta_slow: 1.0 };
    for (yarn, in_place, ty) in
        [(None, true, QuantType::F32), (Some(yarn), false, QuantType::F16), (Some(yarn), true, QuantType::BF16)]
    {
        let (tokens, heads, rank, turned, capacity) = (4, 3, 20, 6, 9);
        let mut memory = Memory::default();
        let positions = memory.ints(&[tokens], &[7, 2, 8, 0]);
        let (q_values, kv_values) = (random(1, tokens * heads * turned), random(2, tokens * (rank + turned)));
        let (q, kv) = (
            memory.strided(&[tokens, heads, turned], &q_values, 5),
            memory.strided(&[tokens, rank + turned], &kv_values, 2),
        );
        let norm = memory.floats(&[rank], &random(3, rank));
        let mut cache = || memory.weights(ty, &[capacity, rank + turned], &[0.5; 9 * 26]).0;
        let (single, fused) = (cache(), cache());
        let (q_single, kv_single) =
            (memory.floats(&[tokens, heads, turned], &q_values), memory.floats(&[tokens, rank + turned], &kv_values));

        let rope =
            |x: TensorView| Rope { kind: RopeKind::Interleaved, yarn, ..Rope::neox(x, positions.clone(), 1e4, 1.0) };
        memory.run(&rope(q_single.clone())).unwrap();
        let normed = kv_single.narrow(1, 0, rank).unwrap();
        memory.run(&RmsNorm::new(normed.clone(), norm.clone(), normed, 1e-6)).unwrap();
        let rotated = kv_single.heads(1).unwrap().narrow(2, rank, turned).unwrap();
        memory.run(&rope(rotated)).unwrap();
        let positions = positions.clone();
        memory
            .run(&KvStore { src: kv_single, cache: single.clone(), positions: positions.clone(), ring: false })
            .unwrap();

        let memory = std::cell::RefCell::new(memory);
        same_on_any_threads(|| {
            let q = memory.borrow_mut().strided(&[tokens, heads, turned], &read(&q), 5);
            let out = if in_place { q.clone() } else { memory.borrow_mut().output(&[tokens, heads, turned]) };
            let op = LatentHeads {
                q,
                out: out.clone(),
                kv: kv.clone(),
                norm: norm.clone(),
                positions: positions.clone(),
                cache: fused.clone(),
                eps: 1e-6,
                base: 1e4,
                scale: 1.0,
                yarn,
                magnitude: 1.0,
            };
            memory.borrow().run(&op).unwrap();
            assert_eq!(bits(&read(&out)), bits(&read(&q_single)), "{ty}");
            let bytes = |view: &TensorView| {
                // SAFETY: a live buffer of the test's memory, as long.
                unsafe { std::slice::from_raw_parts(view.ptr().0 as usize as *const u8, view.range().len()) }.to_vec()
            };
            assert!(bytes(&fused) == bytes(&single), "{ty}");
            // What is rotated grows by the magnitude, what is normed does not.
            memory.borrow().run(&LatentHeads { magnitude: 2.0, ..op }).unwrap();
            assert_ne!(bytes(&fused), bytes(&single));
            let grown = read(&out);
            if !in_place {
                assert!(grown.iter().zip(read(&q_single)).all(|(a, b)| *a == 2.0 * b), "{ty}");
            }
            grown
        });
    }
}

#[test]
fn a_row_outside_the_cache_is_a_fault() {
    for position in [9, -1] {
        let mut memory = Memory::default();
        let op = LatentHeads {
            q: memory.output(&[1, 2, 4]),
            out: memory.output(&[1, 2, 4]),
            kv: memory.output(&[1, 10]),
            norm: memory.output(&[6]),
            positions: memory.ints(&[1], &[position]),
            cache: memory.output(&[9, 10]),
            eps: 1e-6,
            base: 1e4,
            scale: 1.0,
            yarn: None,
            magnitude: 1.0,
        };
        let fault = memory.run(&op).unwrap_err();
        assert!(fault.owner.contains("position") || format!("{fault:?}").contains("position"), "{fault:?}");
    }
}
