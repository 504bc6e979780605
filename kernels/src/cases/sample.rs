//! Cases of the choice of the next token.

use zerocopy::IntoBytes;

use super::Case;
use crate::ops::{ArgMax, Sample, SampleState};
use crate::quant::QuantType;

/// The whole vocabulary, temperature 1.
const OPEN: SampleState = SampleState { temp: 1.0, top_k: 0, repeat_last_n: -1, ..GREEDY };

const GREEDY: SampleState = SampleState {
    seed: 7,
    counter: 0,
    temp: 0.0,
    top_k: 40,
    top_p: 1.0,
    min_p: 0.0,
    repeat_penalty: 1.0,
    repeat_last_n: 64,
    recent_len: 0,
};

fn sample(
    name: String,
    state: SampleState,
    logits: impl Fn(Vec<f32>) -> Vec<f32> + Send + Sync + 'static,
    vocabulary: usize,
) -> Case {
    Case::new("sample", name, 0.0, move |t| {
        let noise = t.random(vocabulary);
        let logits = t.floats(&[vocabulary], &logits(noise))?;
        let state = t.bytes(QuantType::I8, &[SampleState::BYTES], state.as_bytes())?;
        // Tokens of all kinds have been said: good ones, twice, and ones that are none.
        let recent: Vec<i32> = (0..64).map(|i| if i % 9 == 8 { -1 } else { (i % 40) * 3 }).collect();
        Ok(Box::new(Sample { logits, state, recent: t.ints(&[64], &recent)?, token: t.ints(&[1], &[-1])? }))
    })
}

/// Logits as a model gives them: most far below the best.
fn peaked(noise: Vec<f32>) -> Vec<f32> {
    noise.iter().map(|&x| 12.0 * x * x * x - 3.0).collect()
}

/// Few different values, so that ties are everywhere.
fn coarse(noise: Vec<f32>) -> Vec<f32> {
    noise.iter().map(|&x| (x * 4.0).round() / 2.0).collect()
}

pub(super) fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    for vocabulary in [1, 2, 100, 4099, 151_936, 262_144] {
        let states = [
            ("greedy", GREEDY),
            ("greedy with penalty", SampleState { repeat_penalty: 1.3, recent_len: 100, ..GREEDY }),
            ("top 40", SampleState { temp: 0.8, top_p: 0.95, min_p: 0.05, ..GREEDY }),
            ("top 700 with penalty", SampleState { top_k: 700, repeat_penalty: 1.1, recent_len: 20, ..OPEN }),
            ("top 3000", SampleState { top_k: 3000, temp: 3.0, top_p: 0.99, ..OPEN }),
            ("all", OPEN),
            ("all, top-p", SampleState { top_p: 0.9, ..OPEN }),
            ("all, min-p, hot", SampleState { min_p: 0.02, temp: 2.0, ..OPEN }),
        ];
        for (name, state) in states {
            let draws = if vocabulary > 5000 { 1 } else { 4 };
            for counter in 0..draws {
                let state = SampleState { counter, ..state };
                let large = vocabulary == 262_144;
                let case = sample(format!("{name} of {vocabulary}, draw {counter}"), state, peaked, vocabulary);
                list.push(if large { case.large() } else { case });
            }
        }
    }
    for counter in 0..6 {
        for (name, state) in [
            ("top 40", SampleState { top_k: 40, ..OPEN }),
            ("all", OPEN),
            ("all, top-p", SampleState { top_p: 0.7, ..OPEN }),
            ("all, penalty", SampleState { repeat_penalty: 1.5, recent_len: 64, ..OPEN }),
        ] {
            let state = SampleState { counter, ..state };
            list.push(sample(format!("{name}, ties, draw {counter}"), state, coarse, 5000));
        }
    }
    type Change = fn(Vec<f32>) -> Vec<f32>;
    let odd: [(&str, Change); 5] = [
        ("NaN", |x| vec![f32::NAN; x.len()]),
        ("minus infinity", |x| vec![f32::NEG_INFINITY; x.len()]),
        ("infinity", |x| vec![f32::INFINITY; x.len()]),
        ("one number among NaN", |x| (0..x.len()).map(|i| if i == 77 { 1.0 } else { f32::NAN }).collect()),
        ("few numbers among minus infinity", |x| {
            x.iter().map(|&x| if x > 0.9 { x } else { f32::NEG_INFINITY }).collect()
        }),
    ];
    for (name, logits) in odd {
        for (how, state) in [
            ("greedy", GREEDY),
            ("top 40", SampleState { temp: 1.0, top_p: 0.9, min_p: 0.1, ..GREEDY }),
            ("all", SampleState { top_p: 0.9, ..OPEN }),
        ] {
            list.push(sample(format!("{how}, {name}"), state, logits, 300));
        }
    }
    list.push(sample(
        "a wild state".into(),
        SampleState {
            counter: u64::MAX,
            recent_len: u64::MAX,
            top_k: -5,
            top_p: 0.0,
            min_p: 2.0,
            repeat_penalty: f32::NAN,
            ..OPEN
        },
        peaked,
        500,
    ));
    for [rows, cols] in [[1, 1], [3, 5000], [2, 4099], [1, 151_936]] {
        list.push(Case::new("argmax", format!("{rows}x{cols}"), 0.0, move |t| {
            let x = t.strided_noise(&[rows, cols], 1, 3)?;
            Ok(Box::new(ArgMax { x, out: t.ints(&[rows], &vec![-1; rows])? }))
        }));
    }
    list.push(Case::new("argmax", "ties, NaN and infinities", 0.0, |t| {
        let mut x = vec![0.25; 6 * 3000];
        (x[1000], x[2000]) = (1.0, 1.0);
        x[3000..6000].fill(f32::NAN);
        x[6000..9000].fill(f32::NEG_INFINITY);
        x[6000] = f32::NAN;
        x[9000] = f32::NAN;
        (x[11_999], x[11_998]) = (f32::INFINITY, f32::INFINITY);
        (x[12_000..15_000]).fill(-0.0);
        x[13_000] = 0.0;
        let x = t.floats(&[6, 3000], &x)?;
        Ok(Box::new(ArgMax { x, out: t.ints(&[6], &[-1; 6])? }))
    }));
    list
}
