use super::*;
use crate::ops::{
    Activation, Add, Advance, Codes, Fill, Glu, Mul, Normed, Part, Quantize, ResidualNorm, RmsNorm, Rope, RopeKind,
    Scale, Softcap, Yarn,
};

fn norm(x: &[f32], weight: Option<&[f32]>, eps: f64, scale: f64) -> Vec<f64> {
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = scale / (mean + eps).sqrt();
    x.iter().enumerate().map(|(i, &v)| f64::from(v) * factor * weight.map_or(1.0, |w| f64::from(w[i]))).collect()
}

#[test]
fn rms_norm_over_shapes_weights_and_residuals() {
    for (tokens, cols) in [(1, 1), (3, 7), (2, 640), (200, 130)] {
        for (weighted, added, gap) in [(true, false, 0), (false, true, 3), (true, true, 8)] {
            let mut memory = Memory::default();
            let (x, r, w) = (random(1, tokens * cols), random(2, tokens * cols), random(3, cols));
            let out = memory.output(&[tokens, cols]);
            let op = RmsNorm {
                x: memory.strided(&[tokens, cols], &x, gap),
                weight: weighted.then(|| memory.floats(&[cols], &w)),
                residual: added.then(|| memory.strided(&[tokens, cols], &r, gap + 1)),
                out: Some(out.clone()),
                codes: None,
                eps: 1e-6,
                scale: 0.5,
                gain: if added { 0.8 } else { 1.0 },
            };
            same_on_any_threads(|| {
                memory.run(&op).unwrap();
                read(&out)
            });
            let mut want: Vec<f64> = x.chunks(cols).flat_map(|x| norm(x, weighted.then_some(&w), 1e-6, 0.5)).collect();
            if added {
                want.iter_mut().zip(&r).for_each(|(w, &r)| *w = 0.8 * (*w + f64::from(r)));
            }
            close(&read(&out), &want, 2e-6);
        }
    }
}

#[test]
fn rms_norm_in_place_and_onto_the_residual() {
    let mut memory = Memory::default();
    let (x, h, w) = (random(1, 80), random(2, 80), random(3, 20));
    let weight = memory.floats(&[20], &w);
    let view = memory.floats(&[2, 2, 20], &x);
    memory.run(&RmsNorm::new(view.clone(), weight.clone(), view.clone(), 1e-5)).unwrap();
    let want: Vec<f64> = x.chunks(20).flat_map(|x| norm(x, Some(&w), 1e-5, 1.0)).collect();
    close(&read(&view), &want, 2e-6);

    let (x_view, h_view) = (memory.floats(&[4, 20], &x), memory.floats(&[4, 20], &h));
    memory.run(&RmsNorm::add_to(h_view.clone(), x_view, weight, 1e-5)).unwrap();
    let sum: Vec<f64> = want.iter().zip(&h).map(|(w, &h)| w + f64::from(h)).collect();
    close(&read(&h_view), &sum, 2e-6);
}

/// The bytes of codes and the bits of scales.
fn code_bits(codes: &Codes) -> (Vec<u8>, Vec<u32>) {
    // SAFETY: contiguous, in a live buffer of the test's memory.
    let q = unsafe { std::slice::from_raw_parts(codes.q.ptr().0 as usize as *const u8, codes.q.len()) };
    (q.to_vec(), bits(&read(&codes.scales)))
}

fn codes(memory: &mut Memory, shape: &[usize]) -> Codes {
    let groups = [&shape[..shape.len() - 1], &[shape[shape.len() - 1] / 32, 2]].concat();
    let q = memory.bytes(QuantType::I8, shape, &vec![0x55; shape.iter().product()]);
    Codes { q, scales: memory.output(&groups) }
}

#[test]
fn codes_of_norms_and_gates_are_those_of_a_quantised_result() {
    for (shape, used) in [([3, 96], 1), ([1, 2816], 1), ([2, 4 * 64], 4)] {
        let mut memory = Memory::default();
        let (values, n) = (random(1, shape[0] * shape[1]), shape[0] * shape[1]);
        let x = memory.floats(&shape, &values);
        let (other, weight) = (memory.floats(&shape, &random(2, n)), memory.floats(&[shape[1]], &random(3, shape[1])));
        let (normed, gated) = (memory.output(&shape), memory.output(&shape));
        // What comes out in two ops.
        let mut wanted = |op: &dyn Op, out: &TensorView| {
            memory.run(op).unwrap();
            let want = codes(&mut memory, &shape);
            memory.run(&Quantize { x: out.clone(), q: want.q.clone(), scales: want.scales.clone() }).unwrap();
            (code_bits(&want), bits(&read(out)))
        };
        let norm = RmsNorm { gain: 1.5, ..RmsNorm::new(x.clone(), weight, normed.clone(), 1e-6) };
        let norm = RmsNorm { residual: Some(other.clone()), ..norm };
        let gate = Glu::new(x.clone(), other.clone(), gated.clone(), Activation::GeluTanh);
        let (want_norm, want_gate) = (wanted(&norm, &normed), wanted(&gate, &gated));
        for with_floats in [false, true] {
            let (of_norm, of_gate) = (codes(&mut memory, &shape), codes(&mut memory, &shape));
            let (normed, gated) = (memory.output(&shape), memory.output(&shape));
            let out = |view: &TensorView| with_floats.then(|| view.clone());
            memory.run(&RmsNorm { out: out(&normed), codes: Some(of_norm.clone()), ..norm.clone() }).unwrap();
            let heads = |view: &TensorView| view.heads(used).unwrap();
            let slots = |codes: &Codes| {
                let scales = codes.scales.reshape(&[shape[0], used, shape[1] / used / 32, 2]).unwrap();
                Some(Codes { q: heads(&codes.q), scales })
            };
            let gate = Glu { gate: heads(&x), up: heads(&other), codes: slots(&of_gate), ..gate.clone() };
            memory.run(&Glu { out: out(&gated).as_ref().map(heads), ..gate }).unwrap();
            assert_eq!(code_bits(&of_norm), want_norm.0);
            assert_eq!(code_bits(&of_gate), want_gate.0);
            if with_floats {
                assert_eq!((bits(&read(&normed)), bits(&read(&gated))), (want_norm.1.clone(), want_gate.1.clone()));
            }
        }
    }
}

/// One launch gives the bits of the norms and sums that it stands for.
#[test]
fn a_sum_onto_the_residual_and_its_norms_are_those_of_single_ops() {
    for (parts, normed_parts, gain, normed_sum) in [
        (1, 0, 1.0, true),
        (1, 1, 0.8, true),
        (2, 2, 1.0, true),
        (2, 0, 1.5, true),
        (1, 0, 1.0, false),
        (2, 1, 0.8, false),
    ] {
        let (shape, n) = ([3, 96], 3 * 96);
        let mut memory = Memory::default();
        let mut noise = |shape: &[usize], seed| memory.floats(shape, &random(seed, shape.iter().product()));
        let xs = [noise(&shape, 1), noise(&shape, 2)];
        let weights: Vec<_> = (3..9).map(|seed| noise(&[96], seed)).collect();
        let eps = 1e-6;

        // In single ops.
        let (h, y) = (memory.floats(&shape, &random(9, n)), memory.output(&shape));
        for (i, x) in xs[..parts].iter().enumerate() {
            let (x, weight, y) = (x.clone(), weights[i].clone(), y.clone());
            let run = |op: &dyn Op| memory.run(op).unwrap();
            match (i < normed_parts, i) {
                (true, 0) => run(&RmsNorm::new(x, weight, y, eps)),
                (true, _) => run(&RmsNorm::add_to(y, x, weight, eps)),
                (false, 0) => run(&Scale { x, out: y, factor: 1.0 }),
                (false, _) => run(&Add { a: y.clone(), b: x, out: y }),
            }
        }
        let sum_weight = normed_sum.then(|| weights[2].clone());
        match &sum_weight {
            Some(weight) => {
                memory.run(&RmsNorm { gain, ..RmsNorm::add_to(h.clone(), y, weight.clone(), eps) }).unwrap();
            }
            None => {
                memory.run(&Add { a: h.clone(), b: y, out: h.clone() }).unwrap();
                memory.run(&Scale { x: h.clone(), out: h.clone(), factor: gain }).unwrap();
            }
        }
        let mut wanted = Vec::new();
        for (weight, scale) in weights[3..].iter().zip([1.0, 0.25, 1.0]) {
            let (out, codes) = (memory.output(&shape), codes(&mut memory, &shape));
            let norm = RmsNorm { scale, ..RmsNorm::new(h.clone(), weight.clone(), out.clone(), eps) };
            memory.run(&RmsNorm { codes: Some(codes.clone()), ..norm }).unwrap();
            wanted.push((bits(&read(&out)), code_bits(&codes)));
        }

        let memory = std::cell::RefCell::new(memory);
        same_on_any_threads(|| {
            let mut memory = memory.borrow_mut();
            let new_h = memory.floats(&shape, &random(9, n));
            let weight = sum_weight.clone();
            let mut op = ResidualNorm { h: new_h.clone(), parts: vec![], weight, gain, eps, normed: vec![] };
            for (i, x) in xs[..parts].iter().enumerate() {
                let norm = (i < normed_parts).then(|| weights[i].clone());
                op.parts.push(Part { x: x.clone(), norm });
            }
            for (i, scale) in [1.0, 0.25, 1.0].into_iter().enumerate() {
                let out = (i != 2).then(|| memory.output(&shape));
                let codes = (i != 1).then(|| codes(&mut memory, &shape));
                op.normed.push(Normed { weight: weights[3 + i].clone(), scale, out, codes });
            }
            memory.run(&op).unwrap();
            assert_eq!(bits(&read(&new_h)), bits(&read(&h)));
            for (normed, (floats, codes)) in op.normed.iter().zip(&wanted) {
                assert!(normed.out.as_ref().is_none_or(|out| bits(&read(out)) == *floats));
                assert!(normed.codes.as_ref().is_none_or(|got| code_bits(got) == *codes));
            }
            read(&new_h)
        });
    }
}

fn rotate(x: &[f32], kind: RopeKind, angles: &[f64]) -> Vec<f64> {
    let mut out: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    for (i, angle) in angles.iter().enumerate() {
        let (a, b) = match kind {
            RopeKind::Neox => (i, i + angles.len()),
            RopeKind::Interleaved => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = angle.sin_cos();
        (out[a], out[b]) = (out[a] * cos - out[b] * sin, out[a] * sin + out[b] * cos);
    }
    out
}

#[test]
fn rope_rotates_pairs_by_position() {
    let (tokens, heads, d) = (3, 2, 12);
    let positions = [0i32, 5, 1234];
    for kind in [RopeKind::Neox, RopeKind::Interleaved] {
        for (scale, factors, inverse) in
            [(1.0f32, false, false), (0.125, false, false), (1.0, true, false), (1.0, false, true)]
        {
            let mut memory = Memory::default();
            let x = random(1, tokens * heads * d);
            let view = memory.strided(&[tokens, heads, d], &x, 4);
            let ff = [1.0, 1.0, 2.0, 4.0, 1e30, 1e30];
            let op = Rope {
                x: view.clone(),
                positions: memory.ints(&[tokens], &positions),
                out: view.clone(),
                kind,
                base: 10000.0,
                scale,
                factors: factors.then(|| memory.floats(&[d / 2], &ff)),
                yarn: None,
                inverse,
            };
            memory.run(&op).unwrap();
            let mut want = Vec::new();
            for (i, x) in x.chunks(d).enumerate() {
                let p = f64::from(positions[i / heads]) * if inverse { -1.0 } else { 1.0 };
                let angle = |i: usize| {
                    let f = 10000f64.powf(-2.0 * i as f64 / d as f64) * f64::from(scale);
                    p * if factors { f / f64::from(ff[i]) } else { f }
                };
                want.extend(rotate(x, kind, &(0..d / 2).map(angle).collect::<Vec<_>>()));
            }
            // Angles are floats: at position 1234 they are good to 1e-4.
            close(&read(&view), &want, 1e-4);
        }
    }
}

#[test]
fn rope_there_and_back_with_yarn_is_the_start() {
    let mut memory = Memory::default();
    let x = random(1, 2 * 64);
    let (view, out) = (memory.floats(&[2, 1, 64], &x), memory.output(&[2, 1, 64]));
    let positions = memory.ints(&[2], &[7, 100]);
    let yarn = Yarn { factor: 40.0, original_context: 4096, beta_fast: 32.0, beta_slow: 1.0 };
    let there = Rope { out: out.clone(), yarn: Some(yarn), ..Rope::interleaved(view, positions.clone(), 10000.0) };
    memory.run(&there).unwrap();
    let mut want = Vec::new();
    for (x, p) in x.chunks(64).zip([7.0, 100.0]) {
        let dim = |r: f64| 64.0 * (4096.0 / (2.0 * std::f64::consts::PI * r)).ln() / (2.0 * 10000f64.ln());
        let (low, high) = (dim(32.0).floor().max(0.0), dim(1.0).ceil().min(63.0));
        let angle = |i: usize| {
            let f = 10000f64.powf(-2.0 * i as f64 / 64.0);
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            p * (f * (1.0 - ramp) + f / 40.0 * ramp)
        };
        want.extend(rotate(x, RopeKind::Interleaved, &(0..32).map(angle).collect::<Vec<_>>()));
    }
    close(&read(&out), &want, 2e-5);
    let back = Rope { yarn: Some(yarn), inverse: true, ..Rope::interleaved(out.clone(), positions, 10000.0) };
    memory.run(&back).unwrap();
    close(&read(&out), &x.iter().map(|&v| f64::from(v)).collect::<Vec<_>>(), 1e-6);
}

#[test]
fn sums_products_scales_and_caps() {
    let (tokens, cols) = (3, 70);
    let (a, b) = (random(1, tokens * cols), random(2, tokens * cols));
    let wide = |v: f32| f64::from(v);
    let mut memory = Memory::default();
    let b_view = memory.strided(&[tokens, cols], &b, 2);
    let a_view = memory.floats(&[tokens, cols], &a);
    memory.run(&Add { a: a_view.clone(), b: b_view.clone(), out: a_view.clone() }).unwrap();
    close(&read(&a_view), &a.iter().zip(&b).map(|(&a, &b)| wide(a) + wide(b)).collect::<Vec<_>>(), 1e-7);

    let (a_view, out) = (memory.strided(&[tokens, cols], &a, 1), memory.output(&[tokens, cols]));
    let row = memory.floats(&[cols], &b[..cols]);
    memory.run(&Mul { a: a_view.clone(), b: row, out: out.clone() }).unwrap();
    let want: Vec<f64> = a.iter().enumerate().map(|(i, &a)| wide(a) * wide(b[i % cols])).collect();
    close(&read(&out), &want, 1e-7);

    memory.run(&Scale { x: a_view.clone(), out: out.clone(), factor: -3.0 }).unwrap();
    close(&read(&out), &a.iter().map(|&a| -3.0 * wide(a)).collect::<Vec<_>>(), 1e-7);

    memory.run(&Softcap { x: a_view.clone(), out: a_view.clone(), cap: 0.5 }).unwrap();
    close(&read(&a_view), &a.iter().map(|&a| 0.5 * (wide(a) / 0.5).tanh()).collect::<Vec<_>>(), 1e-6);
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::GeluTanh => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044715 * x.powi(3))).tanh()),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

#[test]
fn gates_over_the_whole_range() {
    for activation in [Activation::GeluTanh, Activation::Silu] {
        for (limit, gap) in [(None, 0), (Some(7.0), 5)] {
            let mut memory = Memory::default();
            let gate: Vec<f32> =
                (-400..400).map(|i| i as f32 * 0.05).chain([-200.0, 200.0, -1e30, 1e30, 0.0, 1e-8]).collect();
            let up: Vec<f32> = random(2, gate.len()).iter().map(|x| 20.0 * x).collect();
            let (rows, cols) = (2, gate.len() / 2);
            let gate_view = memory.strided(&[rows, cols], &gate, gap);
            let up_view = memory.strided(&[rows, cols], &up, gap);
            memory.run(&Glu { limit, ..Glu::new(gate_view.clone(), up_view, gate_view.clone(), activation) }).unwrap();
            for ((&got, &gate), &up) in read(&gate_view).iter().zip(&gate).zip(&up) {
                let limit = limit.map_or(f64::INFINITY, f64::from);
                let want = activate(activation, f64::from(gate).min(limit)) * f64::from(up).clamp(-limit, limit);
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= 1e-6 * want.abs() + 1e-6 || (want.abs() > 1e38 && got.is_infinite()),
                    "{gate}: {got} for {want}"
                );
            }
        }
    }
}

#[test]
fn merged_gate_and_up_are_two_windows_of_one_buffer() {
    let mut memory = Memory::default();
    let (tokens, used, width) = (2, 3, 10);
    let values = random(4, tokens * used * 2 * width);
    let merged = memory.floats(&[tokens, used, 2 * width], &values);
    let (gate, up) = (merged.narrow(2, 0, width).unwrap(), merged.narrow(2, width, width).unwrap());
    let activation = Activation::GeluTanh;
    memory.run(&Glu::new(gate.clone(), up.clone(), gate.clone(), activation)).unwrap();
    let want: Vec<f64> = values
        .chunks(2 * width)
        .flat_map(|row| (0..width).map(|i| activate(activation, f64::from(row[i])) * f64::from(row[width + i])))
        .collect();
    close(&read(&gate), &want, 1e-6);
    let rest: Vec<f32> = values.chunks(2 * width).flat_map(|row| row[width..].to_vec()).collect();
    assert_eq!(bits(&read(&up)), bits(&rest), "up is not touched");
}

#[test]
fn exp_is_good_to_two_ulp() {
    let mut worst = 0.0f64;
    for i in -870_000..880_000 {
        let x = i as f32 * 1e-4;
        for got in [crate::cpu::math::exp::<0>(x), crate::cpu::math::exp::<1>(x)] {
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(got) - want).abs() / want);
        }
    }
    assert!(worst < 2.4e-7, "{worst}");
    let exp = crate::cpu::math::exp::<0>;
    assert_eq!((exp(f32::NEG_INFINITY), exp(-1e30), exp(f32::INFINITY)), (0.0, 0.0, f32::INFINITY));
    assert_eq!(exp(0.0), 1.0);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn fill_and_advance() {
    let mut memory = Memory::default();
    let floats = memory.output(&[3, 5]);
    memory.run(&Fill { x: floats.clone(), value: 2.5 }).unwrap();
    assert_eq!(read(&floats), [2.5; 15]);
    let ints = memory.ints(&[3], &[4, -1, i32::MAX]);
    memory.run(&Advance { positions: ints.clone(), by: 2 }).unwrap();
    assert_eq!(read_ints(&ints), [6, 1, i32::MIN + 1]);
    memory.run(&Fill { x: ints.clone(), value: -7.0 }).unwrap();
    assert_eq!(read_ints(&ints), [-7; 3]);
}
