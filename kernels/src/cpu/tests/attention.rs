use proptest::prelude::*;

use super::*;
use crate::ops::{Attention, KvStore};

struct Case {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    /// Tokens in the cache before the first query.
    past: usize,
    window: Option<u32>,
    softcap: Option<f32>,
    sinks: bool,
    ty: QuantType,
    ring: bool,
}

const PLAIN: Case = Case {
    tokens: 1,
    heads: 4,
    kv_heads: 2,
    d: 24,
    dv: 24,
    past: 0,
    window: None,
    softcap: None,
    sinks: false,
    ty: QuantType::F32,
    ring: false,
};

impl Case {
    fn capacity(&self) -> usize {
        if self.ring { self.window.unwrap() as usize + self.tokens - 1 } else { self.past + self.tokens + 3 }
    }

    /// Stores all keys and values token by token, as a decode would, then asks the last `tokens` queries at once.
    /// Returns what came out and what should have.
    fn run(&self) -> (Vec<f32>, Vec<f64>) {
        let mut memory = Memory::default();
        let total = self.past + self.tokens;
        let (k, v) = (random(1, total * self.kv_heads * self.d), random(2, total * self.kv_heads * self.dv));
        let q: Vec<f32> = random(3, self.tokens * self.heads * self.d).iter().map(|x| 3.0 * x).collect();
        let capacity = self.capacity();
        let mut cache = |width: usize| {
            let len = capacity * self.kv_heads * width;
            let bytes = vec![0xFF; len * self.ty.type_bytes()];
            memory.bytes(self.ty, &[capacity, self.kv_heads, width], &bytes)
        };
        let (k_cache, v_cache) = (cache(self.d), cache(self.dv));
        for p in 0..total {
            for (values, cache, width) in [(&k, &k_cache, self.d), (&v, &v_cache, self.dv)] {
                let row = self.kv_heads * width;
                let src = memory.floats(&[1, self.kv_heads, width], &values[p * row..(p + 1) * row]);
                let positions = memory.ints(&[1], &[p as i32]);
                memory.run(&KvStore { src, cache: cache.clone(), positions, ring: self.ring }).unwrap();
            }
        }
        let positions: Vec<i32> = (self.past..total).map(|p| p as i32).collect();
        let sinks: Option<Vec<f32>> = self.sinks.then(|| (0..self.heads).map(|h| h as f32 - 1.0).collect());
        let out = memory.output(&[self.tokens, self.heads, self.dv]);
        let op = Attention {
            q: memory.floats(&[self.tokens, self.heads, self.d], &q),
            k: k_cache,
            v: v_cache,
            positions: memory.ints(&[self.tokens], &positions),
            out: out.clone(),
            scale: 0.3,
            window: self.window,
            softcap: self.softcap,
            sinks: sinks.as_ref().map(|s| memory.floats(&[self.heads], s)),
            ring: self.ring,
            codes: None,
            spread: None,
        };
        same_on_any_threads(|| {
            memory.run(&op).unwrap();
            read(&out)
        });
        (read(&out), self.reference(&q, &k, &v, sinks.as_deref()))
    }

    fn reference(&self, q: &[f32], k: &[f32], v: &[f32], sinks: Option<&[f32]>) -> Vec<f64> {
        let stored = |x: f32| match self.ty {
            QuantType::F16 => half::f16::from_f32(x).to_f64(),
            QuantType::BF16 => half::bf16::from_f32(x).to_f64(),
            _ => f64::from(x),
        };
        let mut want = Vec::new();
        for t in 0..self.tokens {
            for h in 0..self.heads {
                let p = self.past + t;
                let first = self.window.map_or(0, |w| (p + 1).saturating_sub(w as usize));
                let kv = h / (self.heads / self.kv_heads);
                let q = &q[(t * self.heads + h) * self.d..][..self.d];
                let mut scores: Vec<f64> = (first..=p)
                    .map(|j| {
                        let k = &k[(j * self.kv_heads + kv) * self.d..][..self.d];
                        let s =
                            q.iter().zip(k).map(|(&q, &k)| f64::from(q) * stored(k)).sum::<f64>() * f64::from(0.3f32);
                        self.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
                    })
                    .collect();
                scores.iter_mut().for_each(|s| *s = s.exp());
                let sum = scores.iter().sum::<f64>() + sinks.map_or(0.0, |s| f64::from(s[h]).exp());
                for c in 0..self.dv {
                    let at = |j: usize| stored(v[(j * self.kv_heads + kv) * self.dv + c]);
                    want.push(scores.iter().enumerate().map(|(i, s)| s * at(first + i)).sum::<f64>() / sum);
                }
            }
        }
        want
    }
}

#[test]
fn spans_agree_with_the_plain_sum() {
    for (past, tokens) in [(0, 1), (0, 5), (1, 1), (255, 1), (256, 2), (300, 3), (700, 1), (0, 300)] {
        let (got, want) = Case { past, tokens, ..PLAIN }.run();
        close(&got, &want, 2e-6);
    }
}

#[test]
fn windows_softcaps_sinks_and_shapes() {
    let cases = [
        Case { past: 40, tokens: 7, window: Some(16), ..PLAIN },
        Case { past: 3, tokens: 2, window: Some(1), ..PLAIN },
        Case { past: 600, tokens: 3, window: Some(300), ..PLAIN },
        Case { past: 20, tokens: 4, softcap: Some(2.0), ..PLAIN },
        Case { past: 300, tokens: 4, sinks: true, ..PLAIN },
        Case { past: 30, tokens: 2, heads: 1, kv_heads: 1, d: 7, dv: 3, ..PLAIN },
        Case { past: 30, tokens: 2, heads: 8, kv_heads: 1, d: 64, dv: 130, ..PLAIN },
        Case { past: 30, tokens: 2, heads: 3, kv_heads: 3, d: 256, dv: 256, ..PLAIN },
    ];
    for case in cases {
        let (got, want) = case.run();
        close(&got, &want, 3e-6);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_agrees_with_the_plain_sum(
        past in 0usize..600, tokens in 1usize..6, kv_heads in 1usize..4, group in 1usize..5, d in 1usize..70,
        dv in 1usize..70, window in prop::option::of(1u32..400), ring: bool, sinks: bool,
        ty in prop::sample::select(&[QuantType::F32, QuantType::F16, QuantType::BF16][..]),
    ) {
        let ring = ring && window.is_some();
        let softcap = sinks.then_some(5.0);
        let case = Case { past, tokens, heads: kv_heads * group, kv_heads, d, dv, window, ring, sinks, ty, softcap };
        let (got, want) = case.run();
        close(&got, &want, 5e-6);
    }
}

#[test]
fn half_caches_are_read_as_they_were_stored() {
    for ty in [QuantType::F16, QuantType::BF16] {
        let (got, want) = Case { past: 270, tokens: 3, ty, d: 40, ..PLAIN }.run();
        close(&got, &want, 2e-6);
    }
}

#[test]
fn a_ring_holds_what_the_window_needs() {
    for (past, tokens) in [(0, 1), (3, 2), (100, 1), (100, 9), (777, 4)] {
        let case = Case { past, tokens, window: Some(16), ring: true, ..PLAIN };
        let (got, want) = case.run();
        close(&got, &want, 2e-6);
    }
}

#[test]
fn a_batch_gives_the_bits_of_single_queries() {
    let (many, _) = Case { past: 250, tokens: 20, ..PLAIN }.run();
    // The same random queries: the first token of each run has the same values.
    let (one, _) = Case { past: 250, tokens: 1, ..PLAIN }.run();
    assert_ne!(many.len(), one.len());
    // Keys come from one sequence, so only the number of queries differs.
    let shared = Case { past: 250, tokens: 20, ..PLAIN };
    let row = shared.heads * shared.dv;
    let (k, v) = (random(1, 270 * 2 * 24), random(2, 270 * 2 * 24));
    let q: Vec<f32> = random(3, 20 * 4 * 24).iter().map(|x| 3.0 * x).collect();
    for t in [0, 7, 19] {
        let mut memory = Memory::default();
        let out = memory.output(&[1, 4, 24]);
        let op = Attention {
            q: memory.floats(&[1, 4, 24], &q[t * 96..(t + 1) * 96]),
            k: memory.floats(&[270, 2, 24], &k),
            v: memory.floats(&[270, 2, 24], &v),
            positions: memory.ints(&[1], &[250 + t as i32]),
            out: out.clone(),
            scale: 0.3,
            window: None,
            softcap: None,
            sinks: None,
            ring: false,
            codes: None,
            spread: None,
        };
        memory.run(&op).unwrap();
        assert_eq!(bits(&read(&out)), bits(&many[t * row..(t + 1) * row]), "query {t}");
    }
}

#[test]
fn positions_outside_the_cache_are_faults() {
    for position in [-1, 8, i32::MAX, i32::MIN] {
        let mut memory = Memory::default();
        let cache = memory.floats(&[8, 1, 4], &[0.0; 32]);
        let positions = memory.ints(&[1], &[position]);
        let src = memory.floats(&[1, 1, 4], &[1.0; 4]);
        let store = KvStore { src: src.clone(), cache: cache.clone(), positions: positions.clone(), ring: false };
        assert!(memory.run(&store).unwrap_err().owner.contains("position outside"), "{position}");
        assert!(read(&cache).iter().all(|&v| v == 0.0));
        let attention = Attention {
            q: src,
            k: cache.clone(),
            v: cache,
            positions,
            out: memory.output(&[1, 1, 4]),
            scale: 1.0,
            window: None,
            softcap: None,
            sinks: None,
            ring: false,
            codes: None,
            spread: None,
        };
        assert!(memory.run(&attention).unwrap_err().owner.contains("position outside"), "{position}");
    }
}

#[test]
fn only_the_rows_in_use_need_be_mapped() {
    // A cache that grows under its graph: 64 rows of address space, 4 of memory.
    let mut memory = Memory::default();
    let root = memory.root(64 * 16);
    memory.buffers[0].1 = 4 * 16;
    let cache = TensorView::new(&root, QuantType::F32, &[64, 1, 4]).unwrap();
    let src = memory.floats(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0]);
    let mut step = |p: i32| {
        let positions = memory.ints(&[1], &[p]);
        memory.run(&KvStore { src: src.clone(), cache: cache.clone(), positions: positions.clone(), ring: false })?;
        let out = memory.output(&[1, 1, 4]);
        let (q, k, v) = (src.clone(), cache.clone(), cache.clone());
        let (scale, window, softcap, sinks, ring) = (1.0, None, None, None, false);
        let op = Attention {
            q,
            k,
            v,
            positions,
            out: out.clone(),
            scale,
            window,
            softcap,
            sinks,
            ring,
            codes: None,
            spread: None,
        };
        memory.run(&op).map(|()| read(&out))
    };
    for p in 0..4 {
        assert_eq!(step(p).unwrap(), [1.0, 2.0, 3.0, 4.0]);
    }
    let fault = step(4).unwrap_err();
    assert!(fault.write && fault.address == root.ptr.checked_add(64).unwrap(), "{fault}");
}
