use super::*;
use crate::ops::{ArgMax, Sample, SampleState};
use zerocopy::IntoBytes;

struct Sampler {
    memory: Memory,
    op: Sample,
}

impl Sampler {
    fn new(logits: &[f32], state: SampleState, ring: &[i32]) -> Self {
        let mut memory = Memory::default();
        let op = Sample {
            logits: memory.floats(&[logits.len()], logits),
            state: memory.bytes(QuantType::I8, &[SampleState::BYTES], state.as_bytes()),
            recent: memory.ints(&[ring.len()], ring),
            token: memory.ints(&[1], &[-1]),
        };
        Self { memory, op }
    }

    fn next(&self) -> i32 {
        self.memory.run(&self.op).unwrap();
        read_ints(&self.op.token)[0]
    }

    fn shares(&self, draws: usize, vocabulary: usize) -> Vec<f64> {
        let mut counts = vec![0.0; vocabulary];
        (0..draws).for_each(|_| counts[self.next() as usize] += 1.0 / draws as f64);
        counts
    }
}

const OPEN: SampleState = SampleState {
    seed: 1,
    counter: 0,
    temp: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repeat_penalty: 1.0,
    repeat_last_n: -1,
    recent_len: 0,
};

#[track_caller]
fn near(got: &[f64], want: &[f64]) {
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() < 0.02 && (*w > 0.0 || *g == 0.0), "{got:?} for {want:?}");
    }
}

const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, -1.0];

fn softmax(logits: &[f32], keep: &[usize], temp: f64) -> Vec<f64> {
    let e = |i: usize| (f64::from(logits[i]) / temp).exp();
    let sum: f64 = keep.iter().map(|&i| e(i)).sum();
    (0..logits.len()).map(|i| if keep.contains(&i) { e(i) / sum } else { 0.0 }).collect()
}

#[test]
fn draws_follow_the_probabilities_that_are_left() {
    let shares = |state| Sampler::new(&LOGITS, state, &[0; 4]).shares(10_000, 4);
    near(&shares(OPEN), &softmax(&LOGITS, &[0, 1, 2, 3], 1.0));
    near(&shares(SampleState { temp: 0.5, ..OPEN }), &softmax(&LOGITS, &[0, 1, 2, 3], 0.5));
    near(&shares(SampleState { top_k: 2, ..OPEN }), &softmax(&LOGITS, &[1, 2], 1.0));
    near(&shares(SampleState { top_k: 1, temp: 9.0, ..OPEN }), &[0.0, 1.0, 0.0, 0.0]);
    // Probabilities are 0.087, 0.644, 0.237, 0.032.
    near(&shares(SampleState { top_p: 0.6, ..OPEN }), &[0.0, 1.0, 0.0, 0.0]);
    near(&shares(SampleState { top_p: 0.8, ..OPEN }), &softmax(&LOGITS, &[1, 2], 1.0));
    near(&shares(SampleState { min_p: 0.1, ..OPEN }), &softmax(&LOGITS, &[0, 1, 2], 1.0));
    near(&shares(SampleState { top_p: 0.0, ..OPEN }), &[0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn a_draw_depends_on_seed_and_counter_only() {
    let logits = random(1, 1000);
    let run = |seed, counter| {
        let sampler = Sampler::new(&logits, SampleState { seed, counter, ..OPEN }, &[0; 4]);
        (0..20).map(|_| sampler.next()).collect::<Vec<_>>()
    };
    assert_eq!(run(5, 0), run(5, 0));
    assert_ne!(run(5, 0), run(6, 0));
    assert_eq!(run(5, 0)[7..], run(5, 7)[..13]);
}

#[test]
fn top_k_over_a_large_vocabulary_is_that_of_a_full_sort() {
    for (k, seed) in [(1, 1), (40, 2), (2000, 3)] {
        // Coarse values, so that there are ties at the edge.
        let logits: Vec<f32> = random(seed, 50_000).iter().map(|v| (v * 300.0).round() / 100.0).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let kept: std::collections::HashSet<i32> = order[..k].iter().map(|&i| i as i32).collect();
        let sampler = Sampler::new(&logits, SampleState { top_k: k as i32, temp: 50.0, ..OPEN }, &[0; 4]);
        let drawn: std::collections::HashSet<i32> = (0..3 * k.min(200)).map(|_| sampler.next()).collect();
        assert!(drawn.is_subset(&kept), "k {k}");
    }
}

#[test]
fn penalties_reach_back_as_far_as_asked() {
    // Greedy; 3 is best, then 2, then 1. All have been said, 3 last.
    let logits = [-1.0, 1.0, 1.8, 2.0, f32::NAN];
    let said = |n, penalty| {
        let state = SampleState { temp: 0.0, repeat_penalty: penalty, repeat_last_n: n, recent_len: 6, ..OPEN };
        // Token number n is at n mod 4: the last four are 7 (not in the vocabulary), 1, 2, 3.
        Sampler::new(&logits, state, &[2, 3, 7, 1]).next()
    };
    assert_eq!(said(0, 2.0), 3, "no look back");
    assert_eq!(said(1, 2.0), 2, "3 is halved");
    assert_eq!(said(2, 2.0), 1, "3 and 2 are halved, 1 is equal to 3's half and comes first");
    assert_eq!(said(-1, 2.0), 3, "all are halved");
    assert_eq!(said(-1, 1.0), 3, "off");
    // Negative logits grow more negative.
    let state = SampleState { temp: 0.0, repeat_penalty: 3.0, recent_len: 1, ..OPEN };
    assert_eq!(Sampler::new(&[-1.0, -2.0], state, &[0, 9]).next(), 1);
}

#[test]
fn tokens_are_appended_to_the_ring() {
    let state = SampleState { recent_len: 5, ..SampleState::greedy() };
    let sampler = Sampler::new(&LOGITS, state, &[-1, -2, -3]);
    assert_eq!((sampler.next(), sampler.next()), (1, 1));
    assert_eq!(read_ints(&sampler.op.recent), [1, -2, 1]);
    let after = read_ints(&sampler.op.state.reshape(&[SampleState::BYTES]).unwrap());
    assert_eq!(after.len(), SampleState::BYTES);
}

#[test]
fn of_logits_that_are_no_numbers_none_is_chosen() {
    let (nan, most) = (f32::NAN, f32::INFINITY);
    for (logits, expected) in [
        ([nan; 4], SampleState::NONE),
        ([-most; 4], SampleState::NONE),
        ([most; 4], SampleState::NONE),
        ([0.0, 1.0, most, 2.0], SampleState::NONE),
        ([nan, nan, -1e30, -most], 2),
    ] {
        for (temp, top_k) in [(0.0, 0), (1.0, 0), (1.0, 2)] {
            let state = SampleState { temp, top_k, top_p: 0.9, min_p: 0.1, ..OPEN };
            assert_eq!(Sampler::new(&logits, state, &[0; 4]).next(), expected, "{logits:?} at {temp}");
        }
    }
}

#[test]
fn argmax_takes_the_first_of_the_greatest() {
    let mut memory = Memory::default();
    let mut x = random(1, 3 * 5000);
    (x[3000], x[4000]) = (9.0, 9.0);
    (x[5000], x[5001]) = (f32::NAN, 2.0);
    x[10_000..].fill(f32::NAN);
    let (view, out) = (memory.floats(&[3, 5000], &x), memory.ints(&[3], &[-1; 3]));
    memory.run(&ArgMax { x: view, out: out.clone() }).unwrap();
    assert_eq!(read_ints(&out), [3000, 1, 0]);
}
