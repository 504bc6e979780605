//! Cases of norms, rotary embedding, cache writes, copies, fills and positions.

use super::Case;
use crate::ops::{
    Advance, Copy, Fill, HostAsk, HostWait, KvStore, Normed, Part, ResidualNorm, RmsNorm, Rope, RopeKind, Yarn,
};
use crate::quant::QuantType;

const EXACT: f64 = 0.0;
const CACHES: [QuantType; 3] = [QuantType::F32, QuantType::F16, QuantType::BF16];

/// Values at which 16-bit floats round, overflow, become subnormal or stay odd.
pub(super) const EDGES: [f32; 20] = [
    0.0,
    -0.0,
    1.0,
    1.000_488_3,
    1.001_464_8,
    1.003_906_3,
    1.011_718_8,
    65504.0,
    65519.9,
    65520.0,
    -1e30,
    3.4e38,
    6.1e-5,
    5.97e-8,
    2.98e-8,
    2.99e-8,
    -1e-40,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

pub(super) fn cases() -> Vec<Case> {
    [norms(), residuals(), ropes(), stores(), copies(), small()].concat()
}

fn norms() -> Vec<Case> {
    let mut list = Vec::new();
    for shape in [[1, 1], [1, 2880], [3, 7], [2, 4099], [40, 64], [1, 7168]] {
        let name = format!("{}x{}", shape[0], shape[1]);
        list.push(Case::new("rms_norm", &name, 2e-6, move |t| {
            let (x, weight, out) = (t.noise(&shape)?, t.noise(&[shape[1]])?, t.output(&shape)?);
            Ok(Box::new(RmsNorm::new(x, weight, out, 1e-6)))
        }));
        list.push(Case::new("rms_norm", format!("{name} onto the residual, strided"), 2e-6, move |t| {
            let (h, x, weight) =
                (t.strided_noise(&shape, 1, 3)?, t.strided_noise(&shape, 2, 2)?, t.noise(&[shape[1]])?);
            Ok(Box::new(RmsNorm { scale: 0.7, gain: -1.3, ..RmsNorm::add_to(h, x, weight, 1e-5) }))
        }));
    }
    list.push(Case::new("rms_norm", "per head, in place, without weight", 2e-6, |t| {
        let x = t.strided_noise(&[5, 6, 40], 4, 12)?;
        let out = Some(x.clone());
        let (weight, residual, codes) = (None, None, None);
        Ok(Box::new(RmsNorm { x, weight, residual, out, codes, eps: 1e-6, scale: 1.0, gain: 1.0 }))
    }));
    list.push(Case::new("rms_norm", "zeros, huge and tiny rows", 2e-6, |t| {
        let mut x = vec![0.0; 4 * 100];
        x[100..200].fill(1e18);
        x[200..300].fill(-1e-20);
        x[399] = 3e4;
        let (x, weight, out) = (t.floats(&[4, 100], &x)?, t.noise(&[100])?, t.output(&[4, 100])?);
        Ok(Box::new(RmsNorm::new(x, weight, out, 1e-6)))
    }));
    norms_to_codes(&mut list);
    list
}

/// Inputs whose sums are exact in any order: what is rounded to codes is the same everywhere, to the bit.
fn norms_to_codes(list: &mut Vec<Case>) {
    let whole = |x: Vec<f32>, most: f32| x.iter().map(|x| (x * most).round()).collect::<Vec<_>>();
    // Rows in registers and in turns, ends within a warp.
    for [tokens, cols] in [[1, 32], [3, 96], [1, 2816], [2, 4128], [5, 8192]] {
        // Columns at 16 bytes, or not.
        for start in [0, 1] {
            let name = format!("{tokens}x{cols} to codes{}", if start == 0 { "" } else { ", unaligned" });
            list.push(Case::new("rms_norm", &name, EXACT, move |t| {
                let x = whole(t.random(tokens * cols), 8.0);
                let (x, weight) = (t.strided(&[tokens, cols], &x, start, 4)?, t.noise(&[cols])?);
                let codes = Some(t.codes(&[tokens, cols], start)?);
                Ok(Box::new(RmsNorm { out: None, codes, ..RmsNorm::new(x.clone(), weight, x, 1e-6) }))
            }));
            list.push(Case::new("rms_norm", format!("{name} and onto the residual"), EXACT, move |t| {
                // The mean square is 1.
                let x: Vec<f32> = t.random(tokens * cols).iter().map(|x| x.signum()).collect();
                let small = |x| whole(x, 64.0).iter().map(|x| x / 64.0).collect::<Vec<_>>();
                let (h, weight) = (small(t.random(tokens * cols)), small(t.random(cols)));
                let (h, x) = (t.strided(&[tokens, cols], &h, start, 4)?, t.floats(&[tokens, cols], &x)?);
                let weight = t.floats(&[cols], &weight)?;
                let codes = Some(t.codes(&[tokens, cols], 0)?);
                Ok(Box::new(RmsNorm { scale: 0.5, gain: -1.25, codes, ..RmsNorm::add_to(h, x, weight, 1e-9) }))
            }));
        }
    }
    list.push(Case::new("rms_norm", "per head, in place and to codes", EXACT, move |t| {
        let x = whole(t.random(5 * 6 * 64), 8.0);
        let (x, weight) = (t.strided(&[5, 6, 64], &x, 4, 12)?, t.noise(&[64])?);
        let codes = Some(t.codes(&[5, 6, 64], 3)?);
        Ok(Box::new(RmsNorm { codes, ..RmsNorm::new(x.clone(), weight, x, 1e-6) }))
    }));
    list.push(Case::new("rms_norm", "zeros, infinities and NaN to codes", EXACT, |t| {
        let mut x = vec![0.0; 4 * 64];
        (x[70], x[130], x[131], x[200]) = (f32::NAN, f32::INFINITY, 1.0, -1e30);
        let (x, weight) = (t.floats(&[4, 64], &x)?, t.noise(&[64])?);
        let codes = Some(t.codes(&[4, 64], 0)?);
        Ok(Box::new(RmsNorm { out: None, codes, ..RmsNorm::new(x.clone(), weight, x, 1e-6) }))
    }));
}

fn residuals() -> Vec<Case> {
    let mut list = Vec::new();
    // Rows in one turn and in several, ends within a warp, one column.
    for [tokens, cols] in [[1, 1], [3, 7], [2, 96], [1, 2816], [2, 4128], [1, 8192]] {
        for start in [0, 1] {
            let name = format!("{tokens}x{cols}{}", if start == 0 { "" } else { ", unaligned" });
            let shape = [tokens, cols];
            for (parts, norms, normed) in [(1, 0, 0), (1, 1, 1), (2, 1, 2), (2, 2, 3)] {
                let name = format!("{name}, {parts} parts, {norms} normed, {normed} norms");
                list.push(Case::new("residual_norm", name, 6e-6, move |t| {
                    let weight = if normed == 2 { None } else { Some(t.noise(&[cols])?) };
                    let h = t.strided_noise(&shape, start, 4)?;
                    let mut op = ResidualNorm { h, parts: vec![], weight, gain: 0.75, eps: 1e-6, normed: vec![] };
                    for part in 0..parts {
                        let norm = if part < norms { Some(t.noise(&[cols])?) } else { None };
                        op.parts.push(Part { x: t.strided_noise(&shape, 4 * start, 8)?, norm });
                    }
                    for i in 0..normed {
                        let (weight, out) = (t.noise(&[cols])?, Some(t.strided_output(&shape, start, 4 * i + 4)?));
                        op.normed.push(Normed { weight, scale: 1.0 - 0.3 * i as f32, out, codes: None });
                    }
                    Ok(Box::new(op))
                }));
            }
            if cols % 32 > 0 {
                continue;
            }
            // Numbers whose squares have exact sums, as for the norms above: codes are the same to the bit.
            list.push(Case::new("residual_norm", format!("{name}, to codes"), EXACT, move |t| {
                let eighths = |x: Vec<f32>| x.iter().map(|x| (x * 16.0).round() / 8.0).collect::<Vec<_>>();
                let x: Vec<f32> = t.random(tokens * cols).iter().map(|x| x.signum()).collect();
                let (h, weight) = (eighths(t.random(tokens * cols)), eighths(t.random(cols)));
                let mut part = |weight: f32| {
                    let norm = Some(t.floats(&[cols], &vec![weight; cols])?);
                    Ok::<_, crate::KernelError>(Part { x: t.strided(&shape, &x, start, 4)?, norm })
                };
                let parts = vec![part(1.5)?, part(0.5)?];
                let (h, weight) = (t.strided(&shape, &h, start, 4)?, t.floats(&[cols], &weight)?);
                let mut normed = Vec::new();
                for (with_floats, with_codes) in [(false, true), (true, false), (true, true)] {
                    let out = if with_floats { Some(t.output(&shape)?) } else { None };
                    let codes = if with_codes { Some(t.codes(&shape, start)?) } else { None };
                    normed.push(Normed { weight: t.noise(&[cols])?, scale: 0.5, out, codes });
                }
                Ok(Box::new(ResidualNorm { h, parts, weight: Some(weight), gain: 2.0, eps: 1e-9, normed }))
            }));
        }
    }
    list
}

fn ropes() -> Vec<Case> {
    let mut list = Vec::new();
    let yarn = Yarn { factor: 16.0, original_context: 4096, beta_fast: 32.0, beta_slow: 1.0 };
    for (kind, inverse) in [(RopeKind::Neox, false), (RopeKind::Interleaved, false), (RopeKind::Interleaved, true)] {
        for [tokens, heads, d] in [[1, 1, 2], [1, 9, 128], [3, 4, 64], [2, 3, 514], [70, 2, 32]] {
            let name = format!("{kind:?}{} {tokens}x{heads}x{d}", if inverse { " back" } else { "" });
            list.push(Case::new("rope", name, 2e-6, move |t| {
                let positions: Vec<i32> = (0..tokens as i32).map(|i| i * 97 % 5000 + 3).collect();
                let (x, out) = (t.strided_noise(&[tokens, heads, d], 2, 6)?, t.output(&[tokens, heads, d])?);
                let positions = t.ints(&[tokens], &positions)?;
                Ok(Box::new(Rope { out, kind, inverse, ..Rope::neox(x, positions, 1e4, 0.25) }))
            }));
        }
    }
    list.push(Case::new("rope", "YaRN, in place, far positions", 2e-6, move |t| {
        let (x, positions) = (t.noise(&[4, 3, 128])?, t.ints(&[4], &[0, 1, 131_071, 7])?);
        Ok(Box::new(Rope { yarn: Some(yarn), ..Rope::neox(x, positions, 1e6, 1.0) }))
    }));
    list.push(Case::new("rope", "frequency factors", 2e-6, |t| {
        let (x, positions) = (t.noise(&[2, 5, 64])?, t.ints(&[2], &[900, 31])?);
        let factors: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 / 4.0).collect();
        let factors = Some(t.floats(&[32], &factors)?);
        Ok(Box::new(Rope { factors, ..Rope::neox(x, positions, 5e5, 1.0) }))
    }));
    list.push(Case::new("rope", "factors that stop all but the first pairs", 2e-6, |t| {
        let (x, positions) = (t.noise(&[3, 2, 512])?, t.ints(&[3], &[0, 1023, 200_000])?);
        let factors: Vec<f32> = (0..256).map(|i| if i < 64 { 1.0 } else { 1e30 }).collect();
        let factors = Some(t.floats(&[256], &factors)?);
        Ok(Box::new(Rope { factors, ..Rope::neox(x, positions, 1e6, 1.0) }))
    }));
    list
}

fn stores() -> Vec<Case> {
    let mut list = Vec::new();
    for ty in CACHES {
        for [tokens, heads, d] in [[1, 8, 128], [3, 2, 7], [5, 1, 1030]] {
            list.push(Case::new("kv_store", format!("{ty} {tokens}x{heads}x{d}"), EXACT, move |t| {
                let positions: Vec<i32> = (0..tokens as i32).map(|i| 11 - 2 * i).collect();
                let src = t.strided_noise(&[tokens, heads, d], 1, 5)?;
                let cache = t.typed(ty, &[16, heads, d + 2], &vec![0.5; 16 * heads * (d + 2)])?.narrow(2, 1, d)?;
                let positions = t.ints(&[tokens], &positions)?;
                Ok(Box::new(KvStore { src, cache, positions, ring: false }))
            }));
        }
        list.push(Case::new("kv_store", format!("{ty} ring, odd values"), EXACT, move |t| {
            let src = t.floats(&[2, 20], &[EDGES, EDGES].concat())?;
            let cache = t.typed(ty, &[7, 20], &[0.25; 140])?;
            let positions = t.ints(&[2], &[i32::MAX, 700])?;
            Ok(Box::new(KvStore { src, cache, positions, ring: true }))
        }));
    }
    list
}

fn copies() -> Vec<Case> {
    let mut list = Vec::new();
    for from in CACHES {
        for to in CACHES {
            list.push(Case::new("copy", format!("{from} to {to}"), EXACT, move |t| {
                let mut values = t.random(3 * 4 * 1100);
                values[..20].copy_from_slice(&EDGES);
                let src = t.typed(from, &[3, 4, 1100], &values)?.narrow(2, 1, 1090)?;
                let dst = t.typed(to, &[3, 5, 1095], &vec![0.0; 3 * 5 * 1095])?.narrow(1, 1, 4)?.narrow(2, 3, 1090)?;
                Ok(Box::new(Copy { src, dst }))
            }));
        }
    }
    for ty in [QuantType::I8, QuantType::I16, QuantType::I32, QuantType::I64, QuantType::F64] {
        list.push(Case::new("copy", format!("{ty} as it is"), EXACT, move |t| {
            let bytes: Vec<u8> = (0..50 * ty.type_bytes()).map(|i| (i * 37) as u8).collect();
            let src = t.bytes(ty, &[5, 10], &bytes)?.narrow(1, 1, 9)?;
            let dst = t.bytes(ty, &[5, 9], &vec![0; 45 * ty.type_bytes()])?;
            Ok(Box::new(Copy { src, dst }))
        }));
    }
    list.push(Case::new("copy", "one dimension", EXACT, |t| {
        Ok(Box::new(Copy { src: t.noise(&[4097])?, dst: t.output(&[4097])? }))
    }));
    list
}

fn small() -> Vec<Case> {
    let mut list = Vec::new();
    for shape in [[1, 1], [3, 5000]] {
        list.push(Case::new("fill", format!("F32 {}x{}", shape[0], shape[1]), EXACT, move |t| {
            Ok(Box::new(Fill { x: t.output(&shape)?, value: -0.5 }))
        }));
    }
    list.push(Case::new("fill", "I32", EXACT, |t| Ok(Box::new(Fill { x: t.ints(&[2, 3], &[9; 6])?, value: -7.0 }))));
    list.push(Case::new("advance", "one", EXACT, |t| Ok(Box::new(Advance { positions: t.ints(&[1], &[41])?, by: 1 }))));
    list.push(Case::new("host_ask", "around the end", EXACT, |t| {
        Ok(Box::new(HostAsk { turn: t.ints(&[1], &[-1])?, told: t.ints(&[1], &[7])? }))
    }));
    for (name, done) in [("answered", [-5, 0]), ("given up", [4, 1])] {
        list.push(Case::new("host_wait", name, EXACT, move |t| {
            Ok(Box::new(HostWait { turn: t.ints(&[1], &[-5])?, done: t.ints(&[2], &done)? }))
        }));
    }
    list.push(Case::new("advance", "many, around the end", EXACT, |t| {
        let values: Vec<i32> = (0..700).map(|i| i32::MAX - i % 5).collect();
        Ok(Box::new(Advance { positions: t.ints(&[700], &values)?, by: 3 }))
    }));
    list
}
