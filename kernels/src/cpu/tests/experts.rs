use super::*;
use crate::ops::{Chosen, ExpertMatMul, ExpertSum, GroupRank, Router, Scoring, ShareExperts};

struct Routed {
    ids: Vec<i32>,
    weights: Vec<f32>,
}

#[allow(clippy::too_many_arguments)]
fn route(
    logits: &[f32],
    experts: usize,
    used: usize,
    bias: Option<&[f32]>,
    scoring: Scoring,
    groups: Option<(u32, u32)>,
    norm: bool,
    scale: f32,
) -> Routed {
    let mut memory = Memory::default();
    let tokens = logits.len() / experts;
    let (ids, weights) = (memory.ints(&[tokens, used], &vec![-9; tokens * used]), memory.output(&[tokens, used]));
    let op = Router {
        logits: memory.strided(&[tokens, experts], logits, 3),
        bias: bias.map(|b| memory.floats(&[experts], b)),
        ids: ids.clone(),
        weights: weights.clone(),
        scoring,
        groups,
        // DeepSeek-V2's rule where scores are a softmax.
        group_rank: if scoring == Scoring::Softmax { GroupRank::Greatest } else { GroupRank::TwoGreatest },
        norm,
        scale,
    };
    memory.run(&op).unwrap();
    Routed { ids: read_ints(&ids), weights: read(&weights) }
}

#[test]
fn softmax_router_takes_the_best_and_breaks_ties_low() {
    let logits = [0.0, 2.0, 1.0, 2.0, -1.0, 5.0, 5.0, 5.0, 5.0, 5.0];
    let r = route(&logits, 5, 3, None, Scoring::Softmax, None, false, 1.0);
    assert_eq!(r.ids, [1, 3, 2, 0, 1, 2]);
    let sum: f64 = logits[..5].iter().map(|&l| f64::from(l).exp()).sum();
    let want: Vec<f64> = [2.0f64, 2.0, 1.0].iter().map(|l| l.exp() / sum).chain([0.2; 3]).collect();
    close(&r.weights, &want, 1e-6);
    let r = route(&logits, 5, 3, None, Scoring::Softmax, None, true, 2.5);
    close(&[r.weights[..3].iter().sum::<f32>(), r.weights[3..].iter().sum()], &[2.5, 2.5], 1e-6);
}

#[test]
fn a_group_counts_its_greatest_or_its_two_greatest() {
    // Groups of (3, 0), (2, 2) and (1, 1): the first has the greatest, the second the greatest two.
    let logits = [3.0, 0.0, 2.0, 2.0, 1.0, 1.0];
    let chosen = |scoring| route(&logits, 6, 2, None, scoring, Some((3, 1)), false, 1.0).ids;
    assert_eq!(chosen(Scoring::Softmax), [0, 1]);
    assert_eq!(chosen(Scoring::Sigmoid), [2, 3]);
}

#[test]
fn the_bias_moves_the_choice_and_not_the_weight() {
    let logits = [0.0, 1.0, 2.0, 3.0];
    let bias = [1.0, 0.0, 0.0, -1.0];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let r = route(&logits, 4, 2, Some(&bias), Scoring::Sigmoid, None, false, 1.0);
    assert_eq!(r.ids, [0, 2]);
    close(&r.weights, &[sigmoid(0.0), sigmoid(2.0)], 1e-6);
    let r = route(&logits, 4, 2, Some(&bias), Scoring::SqrtSoftplus, None, false, 1.0);
    let s = |x: f64| (1.0 + x.exp()).ln().sqrt();
    assert_eq!(r.ids, [0, 2]);
    close(&r.weights, &[s(0.0), s(2.0)], 1e-6);
}

#[test]
fn groups_compete_with_their_two_best() {
    // Group sums (two best): 0: 5.0, 1: 4.5, 2: 4.9.
    let logits = [4.0, 1.0, 0.0, 2.0, 2.5, 0.0, 2.4, 2.5, 2.45];
    let ranks = |scoring| route(&logits, 9, 3, None, scoring, Some((3, 2)), false, 1.0).ids;
    // Softmax and softplus keep the order of logits but not of sums; bias alone shows the rule.
    let zeros = [0.0f32; 9];
    let r = route(&zeros, 9, 3, Some(&logits), Scoring::Sigmoid, Some((3, 2)), true, 1.0);
    assert_eq!(r.ids, [0, 7, 8], "group 1 is out, although it has more than expert 1");
    close(&r.weights, &[1.0 / 3.0; 3], 1e-6);
    assert_eq!(ranks(Scoring::Softmax)[0], 0);
}

#[test]
fn a_router_full_of_nan_still_names_experts() {
    let r = route(&[f32::NAN; 8], 8, 3, None, Scoring::Softmax, None, true, 1.0);
    assert!(r.ids.iter().all(|&id| (0..8).contains(&id)), "{:?}", r.ids);
    let r = route(&[f32::INFINITY, 0.0, f32::NEG_INFINITY, 0.0], 4, 2, None, Scoring::Sigmoid, None, true, 1.0);
    assert_eq!(r.ids, [0, 1]);
}

#[test]
fn expert_sum_weighs_scales_and_adds() {
    let (tokens, used, width, experts) = (4, 3, 33, 5);
    let (y, w, h) = (random(1, tokens * used * width), random(2, tokens * used), random(3, tokens * width));
    let scale = random(4, experts);
    let ids: Vec<i32> = (0..tokens * used).map(|i| (i * 2 % experts) as i32).collect();
    for (scaled, added) in [(false, false), (true, true)] {
        let mut memory = Memory::default();
        let out = memory.floats(&[tokens, width], &h);
        let op = ExpertSum {
            y: memory.strided(&[tokens, used, width], &y, 2),
            weights: memory.floats(&[tokens, used], &w),
            expert_scale: scaled.then(|| (memory.floats(&[experts], &scale), memory.ints(&[tokens, used], &ids))),
            residual: added.then(|| out.clone()),
            out: out.clone(),
        };
        memory.run(&op).unwrap();
        let mut want = Vec::new();
        for t in 0..tokens {
            for c in 0..width {
                let part = |k: usize| {
                    let s = if scaled { f64::from(scale[ids[t * used + k] as usize]) } else { 1.0 };
                    f64::from(w[t * used + k]) * s * f64::from(y[(t * used + k) * width + c])
                };
                let start = if added { f64::from(h[t * width + c]) } else { 0.0 };
                want.push(start + (0..used).map(part).sum::<f64>());
            }
        }
        close(&read(&out), &want, 1e-6);
    }
    let mut memory = Memory::default();
    let op = ExpertSum {
        y: memory.floats(&[1, 1, 2], &[1.0; 2]),
        weights: memory.floats(&[1, 1], &[1.0]),
        expert_scale: Some((memory.floats(&[2], &[1.0; 2]), memory.ints(&[1, 1], &[2]))),
        residual: None,
        out: memory.output(&[1, 2]),
    };
    assert!(memory.run(&op).unwrap_err().owner.contains("expert id"));
}

/// Lists of the device with places, what it fetches, and the list of the host, for six chosen of ten experts and this table of slots.
type Lists = [Vec<i32>; 4];

fn share(at: [i32; 10], fetches: usize) -> (Lists, [Vec<f32>; 2], Vec<i32>) {
    let mut memory = Memory::default();
    let mut chosen = || Chosen { ids: memory.ints(&[1, 6], &[-9; 6]), weights: memory.floats(&[1, 6], &[9.0; 6]) };
    let (device, host) = (chosen(), chosen());
    let (places, counts) = (memory.ints(&[1, 6], &[-9; 6]), memory.ints(&[10], &[5; 10]));
    let fetched = (fetches > 0).then(|| memory.ints(&[fetches], &vec![-9; fetches]));
    let op = ShareExperts {
        ids: memory.ints(&[1, 6], &[8, 2, 5, 0, 9, 3]),
        weights: memory.floats(&[1, 6], &[0.8, 0.2, 0.5, 0.25, 0.9, 0.3]),
        at: memory.ints(&[10], &at),
        slots: 4,
        counts: counts.clone(),
        device: device.clone(),
        places: places.clone(),
        fetched: fetched.clone(),
        host: host.clone(),
    };
    memory.run(&op).unwrap();
    let fetched = fetched.map_or_else(Vec::new, |fetched| read_ints(&fetched));
    let lists = [read_ints(&device.ids), read_ints(&places), fetched, read_ints(&host.ids)];
    (lists, [read(&device.weights), read(&host.weights)], read_ints(&counts))
}

#[test]
fn the_device_does_what_it_keeps_and_fetches_what_is_missing_to_its_share() {
    let at = [-1, 3, 1, -1, -1, -1, -1, 2, -1, 0];
    let (lists, weights, counts) = share(at, 0);
    assert_eq!(lists, [vec![2, 9, -1, -1, -1, -1], vec![1, 0, -1, -1, -1, -1], vec![], vec![8, 5, 0, 3, -1, -1]]);
    assert_eq!(weights, [[0.2, 0.9, 0.0, 0.0, 0.0, 0.0], [0.8, 0.5, 0.25, 0.3, 0.0, 0.0]]);
    assert_eq!(counts, [6, 5, 6, 6, 5, 6, 5, 5, 6, 6], "chosen ones are counted, wherever they are done");
    // Two of four are there: the first two of the others come.
    let (lists, weights, _) = share(at, 4);
    assert_eq!(
        lists,
        [vec![8, 2, 5, 9, -1, -1], vec![0, 5, 1, 4, -1, -1], vec![8, 5, -1, -1], vec![0, 3, -1, -1, -1, -1]]
    );
    assert_eq!(weights, [[0.8, 0.2, 0.5, 0.9, 0.0, 0.0], [0.25, 0.3, 0.0, 0.0, 0.0, 0.0]]);
    // As many are there as it does at least, or more.
    assert_eq!(share(at, 2).0[2], [-1, -1]);
    assert_eq!(share(at, 1).0[3], [8, 5, 0, 3, -1, -1]);
    // None are there, and all come: the host has nothing left.
    let (lists, ..) = share([-1; 10], 6);
    assert_eq!(lists, [vec![8, 2, 5, 0, 9, 3], vec![0, 1, 2, 3, 4, 5], vec![8, 2, 5, 0, 9, 3], vec![-1; 6]]);
}

#[test]
fn experts_of_two_places_are_those_of_one_and_none_gives_zeros() {
    let (w, x) = (random(1, 5 * 3 * 32), random(2, 2 * 32));
    let run = |ids: &[i32], apart: bool| {
        let mut memory = Memory::default();
        let y = memory.floats(&[2, 3, 3], &[f32::NAN; 18]);
        let all = if apart { 2 } else { 5 };
        let (first, x) = (memory.floats(&[all, 3, 32], &w[..all * 96]), memory.floats(&[2, 32], &x));
        let product = ExpertMatMul::new(first, x, memory.ints(&[2, 3], ids), y.clone());
        let more = apart.then(|| memory.floats(&[3, 3, 32], &w[2 * 96..]));
        memory.run(&ExpertMatMul { more, ..product }).map(|()| read(&y))
    };
    let wanted = run(&[0, 4, 2, 1, 1, 3], false).unwrap();
    assert_eq!(run(&[0, 4, 2, 1, 1, 3], true).unwrap(), wanted);
    let some = run(&[0, -1, 2, -1, 1, 3], true).unwrap();
    for (slot, (found, wanted)) in some.chunks(3).zip(wanted.chunks(3)).enumerate() {
        assert_eq!(found, if [1, 3].contains(&slot) { &[0.0; 3] } else { wanted }, "slot {slot}");
    }
    assert!(run(&[0, 5, 2, 1, 1, 3], true).unwrap_err().owner.contains("expert id"));
    assert!(run(&[0, -2, 2, 1, 1, 3], true).unwrap_err().owner.contains("expert id"));
}
