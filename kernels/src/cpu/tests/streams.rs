//! Hyper-connections, tails of heads and rounding through 8 bits, against double precision.

use super::*;
use crate::KernelError;
use crate::ops::{Fp8KvQuantize, HcExpand, HcMix, HcSplitSinkhorn, HcWeightedSum, RopeTail, Yarn};

#[test]
fn the_tail_of_a_head_is_rotated_and_its_start_is_not() {
    let (tokens, heads, d, dims) = (3, 2, 14, 6);
    let positions = [0i32, 5, 900];
    let yarn = Yarn { factor: 16.0, original_context: 64, beta_fast: 8.0, beta_slow: 1.0 };
    for (inverse, yarn) in [(false, None), (true, None), (false, Some(yarn)), (true, Some(yarn))] {
        let mut memory = Memory::default();
        let x = random(1, tokens * heads * d);
        let view = memory.strided(&[tokens, heads, d], &x, 4);
        let (out, positions_view) = (memory.output(&[tokens, heads, d]), memory.ints(&[tokens], &positions));
        let op = RopeTail { yarn, inverse, ..RopeTail::new(view.clone(), positions_view, dims, 100.0) };
        memory.run(&RopeTail { out: out.clone(), ..op.clone() }).unwrap();
        memory.run(&op).unwrap();
        assert_eq!(bits(&read(&view)), bits(&read(&out)), "in place and not");
        let mut want = Vec::new();
        let dim = |r: f64| 6.0 * (64.0 / (2.0 * std::f64::consts::PI * r)).ln() / (2.0 * 100f64.ln());
        let (low, high) = (dim(8.0).floor().max(0.0), dim(1.0).ceil().min(5.0));
        for (i, x) in x.chunks(d).enumerate() {
            want.extend(x[..d - dims].iter().map(|&x| f64::from(x)));
            for pair in 0..dims / 2 {
                let mut f = 100f64.powf(-(pair as f64) / 3.0);
                if yarn.is_some() {
                    let ramp = ((pair as f64 - low) / (high - low).max(1e-3)).clamp(0.0, 1.0);
                    f = f * (1.0 - ramp) + f / 16.0 * ramp;
                }
                let angle = f64::from(positions[i / heads]) * if inverse { -f } else { f };
                let (a, b) = (f64::from(x[d - dims + 2 * pair]), f64::from(x[d - dims + 2 * pair + 1]));
                want.extend([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]);
            }
        }
        close(&read(&out), &want, 1e-4);
    }
}

/// `[pre, post, C]` of one token.
fn split(m: &[f32], scale: &[f32], base: &[f32], n: usize, iterations: usize, eps: f64) -> [Vec<f64>; 3] {
    let mixed = |place: usize, kind: usize| f64::from(m[place]) * f64::from(scale[kind]) + f64::from(base[place]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let pre = (0..n).map(|j| sigmoid(mixed(j, 0)) + eps).collect();
    let post = (0..n).map(|j| 2.0 * sigmoid(mixed(n + j, 1))).collect();
    let mut c: Vec<f64> = (0..n * n).map(|i| mixed(2 * n + i, 2).exp()).collect();
    let rows = |c: &mut Vec<f64>, before: f64, after: f64| {
        for row in c.chunks_mut(n) {
            let sum = row.iter().sum::<f64>() + before;
            row.iter_mut().for_each(|x| *x = *x / sum + after);
        }
    };
    let columns = |c: &mut Vec<f64>| {
        for dst in 0..n {
            let sum = (0..n).map(|src| c[src * n + dst]).sum::<f64>() + eps;
            (0..n).for_each(|src| c[src * n + dst] /= sum);
        }
    };
    rows(&mut c, 0.0, eps);
    columns(&mut c);
    for _ in 1..iterations {
        rows(&mut c, eps, 0.0);
        columns(&mut c);
    }
    [pre, post, c]
}

#[test]
fn weights_of_streams_are_what_the_formulas_say() {
    for (tokens, n, iterations) in [(1, 4, 20), (5, 4, 1), (3, 1, 2), (2, 3, 7), (2, 32, 3)] {
        let (mut memory, width, eps) = (Memory::default(), (2 + n) * n, 1e-3);
        let m: Vec<f32> = random(1, tokens * width).iter().map(|x| 3.0 * x).collect();
        let (scale, base) = ([0.5, -1.5, 2.0], random(2, width));
        let views = (memory.strided(&[tokens, width], &m, 3), memory.floats(&[3], &scale));
        let (pre, post) = (memory.output(&[tokens, n]), memory.output(&[tokens, n]));
        let (base_view, comb) = (memory.floats(&[width], &base), memory.output(&[tokens, n, n]));
        let mix = HcMix { post: post.clone(), comb: comb.clone(), iterations };
        let op = HcSplitSinkhorn { m: views.0, scale: views.1, base: base_view, pre: pre.clone(), mix: Some(mix), eps };
        memory.run(&op).unwrap();
        let mut want = [vec![], vec![], vec![]];
        for m in m.chunks(width) {
            let of_token = split(m, &scale, &base, n, iterations as usize, f64::from(eps));
            want.iter_mut().zip(of_token).for_each(|(all, one)| all.extend(one));
        }
        for (got, want) in [pre, post, comb].iter().zip(&want) {
            close(&read(got), want, 1e-5);
        }
    }
}

#[test]
fn after_the_last_block_streams_are_only_read() {
    let (mut memory, n) = (Memory::default(), 4);
    let (m, base) = (random(1, 2 * n), random(2, n));
    let pre = memory.output(&[2, n]);
    let op = HcSplitSinkhorn {
        m: memory.floats(&[2, n], &m),
        scale: memory.floats(&[1], &[2.0]),
        base: memory.floats(&[n], &base),
        pre: pre.clone(),
        mix: None,
        eps: 0.25,
    };
    memory.run(&op).unwrap();
    let want =
        m.iter().enumerate().map(|(i, &m)| 1.0 / (1.0 + (-(2.0 * f64::from(m) + f64::from(base[i % n]))).exp()) + 0.25);
    close(&read(&pre), &want.collect::<Vec<_>>(), 1e-6);
}

#[test]
fn streams_give_a_block_its_input_and_take_its_output() {
    for [tokens, n, width] in [[1, 4, 70], [3, 1, 5], [2, 3, 33]] {
        let mut memory = Memory::default();
        let (z, y) = (random(1, tokens * n * width), random(2, tokens * width));
        let (pre, comb) = (random(3, tokens * n), random(4, tokens * n * n));
        let (z_view, y_view) = (memory.strided(&[tokens, n, width], &z, 3), memory.strided(&[tokens, width], &y, 1));
        let (pre_view, comb_view) = (memory.strided(&[tokens, n], &pre, 2), memory.floats(&[tokens, n, n], &comb));
        let x = memory.output(&[tokens, width]);
        memory.run(&HcWeightedSum { z: z_view.clone(), pre: pre_view.clone(), out: x.clone() }).unwrap();
        let at = |t: usize, j: usize, c: usize| f64::from(z[(t * n + j) * width + c]);
        let (mut sums, mut streams) = (Vec::new(), Vec::new());
        for t in 0..tokens {
            for c in 0..width {
                sums.push((0..n).map(|j| f64::from(pre[t * n + j]) * at(t, j, c)).sum::<f64>());
            }
            for dst in 0..n {
                for c in 0..width {
                    // The direction matters: columns of the matrix, not rows.
                    let mixed: f64 = (0..n).map(|s| f64::from(comb[(t * n + s) * n + dst]) * at(t, s, c)).sum();
                    streams.push(mixed + f64::from(pre[t * n + dst]) * f64::from(y[t * width + c]));
                }
            }
        }
        close(&read(&x), &sums, 1e-6);
        let out = memory.output(&[tokens, n, width]);
        let op = HcExpand { y: y_view, z: z_view.clone(), post: pre_view, comb: comb_view, out: out.clone() };
        memory.run(&op).unwrap();
        close(&read(&out), &streams, 1e-6);
        memory.run(&HcExpand { out: z_view.clone(), ..op }).unwrap();
        assert_eq!(bits(&read(&z_view)), bits(&read(&out)), "in place");
    }
}

/// The numbers of E4M3 from 0 on, in order: 4 bits of exponent, 3 of mantissa, no infinities.
fn e4m3() -> Vec<f64> {
    let number = |bits: i32| match (bits >> 3, bits & 7) {
        (0, mantissa) => f64::from(mantissa) / 512.0,
        (exponent, mantissa) => f64::from(8 + mantissa) / 8.0 * 2f64.powi(exponent - 7),
    };
    (0..127).map(number).collect()
}

#[test]
fn keys_are_rounded_to_the_nearest_of_eight_bits_and_their_tails_are_not() {
    let (numbers, tail) = (e4m3(), 10);
    assert_eq!(numbers[126], 448.0);
    let mut memory = Memory::default();
    let size = |i: usize| 10f32.powi((i / 37 % 9) as i32 - 6);
    let mut x: Vec<f32> = random(1, 4 * 150).iter().enumerate().map(|(i, x)| x * size(i)).collect();
    // A scale of one, and ties.
    (x[0], x[1], x[2], x[3], x[4], x[5]) = (448.0, 17.0, 19.0, -0.000_976_562_5, 0.002_929_687_5, -0.0);
    // Far below what the least scale has steps for.
    x[150..214].fill(1e-9);
    let view = memory.strided(&[4, 150], &x, 2);
    let out = memory.output(&[4, 150]);
    memory.run(&Fp8KvQuantize { x: view, rotated: tail, out: out.clone() }).unwrap();
    let got = read(&out);
    for (row, x) in x.chunks(150).enumerate() {
        for (number, group) in x[..150 - tail].chunks(64).enumerate() {
            let greatest = group.iter().fold(1e-4f64, |most, &x| most.max(f64::from(x).abs()));
            let scale = 2f64.powf((greatest / 448.0).log2().ceil());
            for (i, &x) in group.iter().enumerate() {
                let cut = (f64::from(x).abs() / scale).min(448.0);
                let near = |a: &usize, b: &usize| {
                    let far = |i: &usize| (numbers[*i] - cut).abs();
                    far(a).total_cmp(&far(b)).then((a & 1).cmp(&(b & 1)))
                };
                let nearest = (0..127).min_by(near).unwrap();
                let want = (numbers[nearest] * scale).copysign(f64::from(x));
                assert_eq!(f64::from(got[row * 150 + number * 64 + i]), want, "{x:e} over {scale:e}");
            }
        }
        assert_eq!(bits(&got[row * 150 + 140..(row + 1) * 150]), bits(&x[140..]), "row {row}'s tail");
    }
    assert_eq!(got[..5], [448.0, 16.0, 20.0, 0.0, 0.003_906_25]);
}

#[test]
fn a_rounded_key_is_rounded_no_further() {
    let mut memory = Memory::default();
    let view = memory.floats(&[3, 2, 70], &random(1, 420));
    let op = Fp8KvQuantize { x: view.clone(), rotated: 6, out: view.clone() };
    memory.run(&op).unwrap();
    let once = read(&view);
    memory.run(&op).unwrap();
    assert_eq!(bits(&read(&view)), bits(&once));
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, f32::MAX];
    let view = memory.floats(&[1, 5], &odd);
    memory.run(&Fp8KvQuantize { x: view.clone(), rotated: 0, out: view.clone() }).unwrap();
    let got = read(&view);
    assert!(got[0].is_nan() && got[1] == f32::INFINITY && got[2] == f32::NEG_INFINITY && got[3] == 0.0, "{got:?}");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut memory = Memory::default();
    let (x, positions) = (memory.output(&[2, 3, 8]), memory.ints(&[2], &[0, 1]));
    let message = |op: &dyn Op| match op.check() {
        Err(error @ (KernelError::Shape { .. } | KernelError::Parameter { .. } | KernelError::Overlap { .. })) => {
            error.to_string()
        }
        other => panic!("{other:?}"),
    };
    for dims in [0, 3, 10] {
        assert!(message(&RopeTail::new(x.clone(), positions.clone(), dims, 1e4)).contains("dims"));
    }
    assert!(message(&RopeTail::new(x.clone(), positions.clone(), 4, -1.0)).contains("base"));
    let yarn = Some(Yarn { factor: 0.5, original_context: 9, beta_fast: 2.0, beta_slow: 1.0 });
    assert!(message(&RopeTail { yarn, ..RopeTail::new(x.clone(), positions, 4, 1e4) }).contains("yarn"));
    assert!(message(&Fp8KvQuantize { x: x.clone(), rotated: 8, out: x.clone() }).contains("rotated"));
    let half = x.narrow(2, 0, 4).unwrap();
    let shifted = Fp8KvQuantize { x: half, rotated: 0, out: x.narrow(2, 2, 4).unwrap() };
    assert!(message(&shifted).contains("out"));
    let mut split = |width: usize, n: usize| HcSplitSinkhorn {
        m: memory.output(&[2, width]),
        scale: memory.output(&[1]),
        base: memory.output(&[width]),
        pre: memory.output(&[2, n]),
        mix: None,
        eps: 1e-6,
    };
    assert!(message(&split(5, 4)).contains("m ("));
    assert!(message(&split(33, 33)).contains("streams"));
    let good = split(4, 4);
    good.check().unwrap();
    assert!(message(&HcSplitSinkhorn { eps: f32::NAN, ..good.clone() }).contains("eps"));
    assert!(message(&HcSplitSinkhorn { pre: good.m.clone(), ..good.clone() }).contains("pre"));
    let mix = |iterations| HcMix { post: good.pre.clone(), comb: good.pre.clone(), iterations };
    assert!(message(&HcSplitSinkhorn { mix: Some(mix(1)), ..good.clone() }).contains("m ("));
    let (z, pre) = (memory.output(&[2, 4, 8]), memory.output(&[2, 4]));
    let sum = HcWeightedSum { z: z.clone(), pre: pre.clone(), out: memory.output(&[2, 7]) };
    assert!(message(&sum).contains("out"));
    let inside = z.narrow(1, 0, 1).unwrap().reshape(&[2, 8]);
    assert!(inside.is_err());
    let (y, comb) = (memory.output(&[2, 8]), memory.output(&[2, 4, 4]));
    let expand = HcExpand { y, z: z.clone(), post: pre, comb, out: z };
    expand.check().unwrap();
    assert!(message(&HcExpand { y: expand.post.clone(), ..expand.clone() }).contains("y ("));
    assert!(message(&HcExpand { comb: expand.y.clone(), ..expand }).contains("comb"));
}
