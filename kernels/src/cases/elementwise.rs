//! Cases of the elementwise ops.

use super::Case;
use crate::ops::{Activation, Add, Glu, Mul, Scale, Softcap};

const EXACT: f64 = 0.0;

/// (rows, columns): one element, odd sizes, wide rows, many rows.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [1, 2880], [3, 7], [2, 4097], [33, 64], [300, 5]];

pub(super) fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    for shape in SHAPES {
        let name = format!("{}x{}", shape[0], shape[1]);
        list.push(Case::new("add", &name, EXACT, move |t| {
            Ok(Box::new(Add { a: t.noise(&shape)?, b: t.noise(&shape)?, out: t.output(&shape)? }))
        }));
        list.push(Case::new("mul", format!("{name} in place, strided"), EXACT, move |t| {
            let a = t.strided_noise(&shape, 1, 3)?;
            Ok(Box::new(Mul { b: t.strided_noise(&shape, 2, 4)?, out: a.clone(), a }))
        }));
        list.push(Case::new("scale", &name, EXACT, move |t| {
            Ok(Box::new(Scale { x: t.strided_noise(&shape, 4, 8)?, out: t.strided_output(&shape, 3, 4)?, factor: 0.3 }))
        }));
        list.push(Case::new("softcap", &name, 1e-6, move |t| {
            let x: Vec<f32> = t.random(shape[0] * shape[1]).iter().map(|x| x * 90.0).collect();
            let x = t.floats(&shape, &x)?;
            Ok(Box::new(Softcap { out: x.clone(), x, cap: 30.0 }))
        }));
        for activation in [Activation::GeluTanh, Activation::Silu] {
            for limit in [None, Some(2.5)] {
                let name = format!("{name} {activation:?} {}", if limit.is_some() { "limited" } else { "open" });
                list.push(Case::new("glu", name, 2e-6, move |t| {
                    let wide = |x: Vec<f32>| x.iter().map(|x| 8.0 * x).collect::<Vec<_>>();
                    let (gate, up) = (t.random(shape[0] * shape[1]), t.random(shape[0] * shape[1]));
                    let (gate, up) = (t.floats(&shape, &wide(gate))?, t.strided(&shape, &wide(up), 1, 2)?);
                    Ok(Box::new(Glu { limit, ..Glu::new(gate.clone(), up, gate, activation) }))
                }));
            }
        }
    }
    list.push(Case::new("add", "the same row with every token", EXACT, |t| {
        Ok(Box::new(Add { a: t.noise(&[5, 300])?, b: t.noise(&[300])?, out: t.output(&[5, 300])? }))
    }));
    list.push(Case::new("glu", "gate and up side by side, three dimensions", 2e-6, |t| {
        let both = t.noise(&[3, 4, 2 * 70])?;
        let (gate, up) = (both.narrow(2, 0, 70)?, both.narrow(2, 70, 70)?);
        Ok(Box::new(Glu::new(gate, up, t.output(&[3, 4, 70])?, Activation::Silu)))
    }));
    gates_to_codes(&mut list);
    for (name, odd) in [("add", true), ("mul", false)] {
        list.push(Case::new(name, "infinities and NaN", EXACT, move |t| {
            let values = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, 1e-40];
            let a = t.floats(&[8, 8], &values.iter().flat_map(|&v| [v; 8]).collect::<Vec<_>>())?;
            let (b, out) = (t.floats(&[8], &values)?, t.output(&[8, 8])?);
            Ok(if odd { Box::new(Add { a, b, out }) } else { Box::new(Mul { a, b, out }) })
        }));
    }
    list.push(Case::new("softcap", "infinities and NaN", 1e-6, |t| {
        let x = t.floats(&[1, 5], &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, -0.0])?;
        Ok(Box::new(Softcap { out: x.clone(), x, cap: 30.0 }))
    }));
    list.push(Case::new("glu", "infinities, NaN and far values", 2e-6, |t| {
        let gate = [-1e30, -100.0, -88.0, 0.0, -0.0, 88.0, 1e10, f32::NAN];
        let gate = t.floats(&[1, 8], &gate)?;
        let (up, out) = (t.floats(&[1, 8], &[1.0; 8])?, t.output(&[1, 8])?);
        Ok(Box::new(Glu::new(gate, up, out, Activation::Silu)))
    }));
    list
}

/// Gates at which both functions are exact everywhere: what is rounded to codes is the same, to the bit.
fn gates_to_codes(list: &mut Vec<Case>) {
    let gates =
        |x: Vec<f32>| x.iter().map(|x| [0.0, 24.0, 30.5, -300.0, 41.0][(x * 100.0).abs() as usize % 5]).collect();
    for activation in [Activation::GeluTanh, Activation::Silu] {
        for [tokens, cols] in [[1, 32], [3, 96], [1, 2112], [40, 704]] {
            for (start, limit) in [(0, None), (1, Some(30.0))] {
                let way = if start == 0 { "codes" } else { "codes and in place, unaligned, limited" };
                list.push(Case::new("glu", format!("{tokens}x{cols} {activation:?} to {way}"), EXACT, move |t| {
                    let (gate, shape): (Vec<f32>, _) = (gates(t.random(tokens * cols)), [tokens, cols]);
                    let (gate, up) = (t.strided(&shape, &gate, start, 4)?, t.strided_noise(&shape, start, 8)?);
                    let codes = Some(t.codes(&shape, 2 * start)?);
                    let out = (start == 1).then(|| gate.clone());
                    Ok(Box::new(Glu { gate, up, out, codes, activation, limit }))
                }));
            }
        }
    }
    list.push(Case::new("glu", "gate and up side by side to codes", EXACT, move |t| {
        let both: Vec<f32> = gates(t.random(3 * 4 * 128));
        let both = t.floats(&[3, 4, 128], &both)?;
        let (gate, up) = (both.narrow(2, 0, 64)?, both.narrow(2, 64, 64)?);
        let (out, codes) = (Some(t.output(&[3, 4, 64])?), Some(t.codes(&[3, 4, 64], 0)?));
        Ok(Box::new(Glu { gate, up, out, codes, activation: Activation::Silu, limit: None }))
    }));
}
