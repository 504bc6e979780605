use super::*;
use crate::ops::{AttentionHeads, KvStore, NewKeys, RmsNorm, Rope};

/// All bytes of a cache.
fn bytes_of(view: &TensorView) -> Vec<u8> {
    let range = view.range();
    // SAFETY: a live buffer of the test's memory.
    unsafe { std::slice::from_raw_parts(view.ptr().0 as usize as *const u8, range.len()) }.to_vec()
}

/// One launch gives the bits of the ops that it stands for, whatever threads do.
#[test]
fn heads_are_normed_rotated_and_stored_as_in_single_ops() {
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for (dims, ring, norm_values, shared, factored) in
            [(24, false, true, false, false), (8, true, true, true, true), (24, true, false, false, true)]
        {
            let (tokens, heads, kv_heads, d, eps) = (5, 3, 2, 24, 1e-6);
            let mut memory = Memory::default();
            let mut noise = |shape: &[usize]| {
                let seed = shape.iter().sum::<usize>() as u64;
                memory.floats(shape, &random(seed, shape.iter().product()))
            };
            let (k, weights) = (noise(&[tokens, kv_heads, d]), [noise(&[d]), noise(&[d])]);
            let v = if shared { k.clone() } else { noise(&[tokens, kv_heads, d]) };
            let positions = [7, 3, 6, 1000, 5].map(|p: i32| if ring { p } else { p % 8 });
            let positions = memory.ints(&[tokens], &positions);
            let factors = factored.then(|| memory.floats(&[dims / 2], &random(9, dims / 2)));
            let new_q = |memory: &mut Memory| memory.floats(&[tokens, heads, d], &random(4, tokens * heads * d));
            let new_cache = |memory: &mut Memory| memory.weights(ty, &[8, kv_heads, d], &[0.5; 8 * 2 * 24]).0;

            let q = new_q(&mut memory);
            let (k_cache, v_cache) = (new_cache(&mut memory), new_cache(&mut memory));
            let turn = |memory: &mut Memory, x: &TensorView, weight: &TensorView| {
                let (out, positions) = (memory.output(x.shape()), positions.clone());
                memory.run(&RmsNorm::new(x.clone(), weight.clone(), out.clone(), eps)).unwrap();
                let part = out.narrow(2, 0, dims).unwrap();
                memory.run(&Rope { factors: factors.clone(), ..Rope::neox(part, positions, 1e4, 0.5) }).unwrap();
                out
            };
            let store = |memory: &mut Memory, src: TensorView, cache: &TensorView| {
                memory.run(&KvStore { src, cache: cache.clone(), positions: positions.clone(), ring }).unwrap();
            };
            let wanted_q = turn(&mut memory, &q, &weights[0]);
            let keys = turn(&mut memory, &k, &weights[1]);
            store(&mut memory, keys, &k_cache);
            let values = if norm_values { memory.output(v.shape()) } else { v.clone() };
            if norm_values {
                let norm = RmsNorm::new(v.clone(), weights[0].clone(), values.clone(), eps);
                memory.run(&RmsNorm { weight: None, ..norm }).unwrap();
            }
            store(&mut memory, values, &v_cache);

            // Each number of threads has queries and caches of its own.
            let memory = std::cell::RefCell::new(memory);
            same_on_any_threads(|| {
                let mut memory = memory.borrow_mut();
                let q = new_q(&mut memory);
                let caches = [new_cache(&mut memory), new_cache(&mut memory)];
                let [k_cache_view, v_cache_view] = caches.clone();
                let all = AttentionHeads {
                    q: q.clone(),
                    q_norm: weights[0].clone(),
                    new: Some(NewKeys {
                        k: k.clone(),
                        k_norm: weights[1].clone(),
                        v: v.clone(),
                        norm_values,
                        k_cache: k_cache_view,
                        v_cache: v_cache_view,
                        ring,
                    }),
                    positions: positions.clone(),
                    eps,
                    dims,
                    base: 1e4,
                    scale: 0.5,
                    factors: factors.clone(),
                };
                memory.run(&all).unwrap();
                assert_eq!(bits(&read(&q)), bits(&read(&wanted_q)));
                assert_eq!(bytes_of(&caches[0]), bytes_of(&k_cache));
                assert_eq!(bytes_of(&caches[1]), bytes_of(&v_cache));
                read(&q)
            });
        }
    }
}
