//! Cases of ops that are several in one launch, against those one after the other.

use super::products::{eights, weight};
use super::{Case, Tensors};
use crate::KernelError;
use crate::ops::{
    Activation, Codes, ExpertMatMul, ExpertSum, FusedDown, FusedNorm, FusedRouter, Glu, GroupRank, MatMul, Normed,
    Part, Quantize, ResidualNorm, Router, Scoring,
};
use crate::quant::QuantType;

const TYPES: [QuantType; 5] = [QuantType::Q4_0, QuantType::Q8_0, QuantType::Q4_K, QuantType::Q5_K, QuantType::Q6_K];

/// Norms are summed in another order than the reference does: now and then a code is rounded to its neighbour.
const ROUNDED: f64 = 8e-3;

pub(super) fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    for ty in TYPES {
        let first = list.len();
        norms(&mut list, ty);
        routers(&mut list, ty);
        downs(&mut list, ty);
        // Without a GPU all shapes are tried with one type; what differs from type to type is how a unit is read.
        let rest = list.drain(first..).collect::<Vec<Case>>();
        let one = ty == QuantType::Q4_0;
        list.extend(
            rest.into_iter().enumerate().map(|(at, case)| if one || at % 3 == 0 { case } else { case.large() }),
        );
    }
    list
}

/// What a residual norm reads beside the stream.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Sum {
    /// Nothing: a norm alone.
    None,
    /// One part as it is.
    Plain,
    /// Two parts and all norms.
    Full,
}

fn norms(list: &mut Vec<Case>, ty: QuantType) {
    for (sum, cols, rows, experts, large) in [
        (Sum::Plain, 256, vec![37, 5], 0, false),
        (Sum::Full, 512, vec![40, 33, 33], 9, false),
        (Sum::None, 768, vec![64], 0, false),
        (Sum::Plain, 512, vec![41, 41], 3, false),
        (Sum::Full, 1024, vec![70, 70], 0, false),
        (Sum::Full, 4096, vec![18, 3, 70, 33], 6, false),
        (Sum::Full, 2816, vec![4096, 2048, 2048], 0, true),
        (Sum::Plain, 2048, vec![2816, 2816], 64, true),
        (Sum::Full, 2816, vec![2112, 2112], 128, true),
    ] {
        let name = format!("{ty} {sum:?} sum, {cols} columns, products of {rows:?} rows, {experts} experts");
        let case = Case::new("fused_norm", name, ROUNDED, move |t| {
            let part = |t: &mut Tensors<'_>, with: bool| {
                Ok::<_, KernelError>(Part {
                    x: t.noise(&[1, cols])?,
                    norm: with.then(|| t.noise(&[cols])).transpose()?,
                })
            };
            let h = t.noise(&[1, cols])?;
            let parts = match sum {
                Sum::None => Vec::new(),
                Sum::Plain => vec![part(t, false)?],
                Sum::Full => vec![part(t, true)?, part(t, true)?],
            };
            let of_sum = if sum == Sum::Full { Some(t.noise(&[cols])?) } else { None };
            let codes = codes(t, &[1, cols])?;
            let out = t.output(&[1, cols])?;
            let mut normed =
                vec![Normed { weight: t.noise(&[cols])?, scale: 1.0, out: None, codes: Some(codes.clone()) }];
            if experts > 0 {
                normed.push(Normed { weight: t.noise(&[cols])?, scale: 0.5, out: Some(out.clone()), codes: None });
                normed.push(Normed {
                    weight: t.noise(&[cols])?,
                    scale: 1.0,
                    out: None,
                    codes: Some(self::codes(t, &[1, cols])?),
                });
            }
            let (gain, eps) = if sum == Sum::Full { (0.75, 1e-5) } else { (1.0, 1e-6) };
            let norm = ResidualNorm { h, parts, weight: of_sum, gain, eps, normed };
            let products = rows.iter().map(|&rows| {
                let (w, y) = (weight(t, ty, &[rows, cols])?, t.output(&[1, rows])?);
                Ok(MatMul::quantized(w, codes.q.clone(), codes.scales.clone(), y))
            });
            let products = products.collect::<Result<_, KernelError>>()?;
            let router = match experts {
                0 => None,
                _ => Some(MatMul::new(t.noise(&[experts, cols])?, out, t.output(&[1, experts])?)),
            };
            let products: Vec<MatMul> = products;
            // Two of as many rows are a gate and its unit.
            let glu = (rows.len() == 2 && rows[0] == rows[1]).then(|| {
                let (gate, up, activation) = (products[0].y.clone(), products[1].y.clone(), Activation::GeluTanh);
                Glu::new(gate.clone(), up, gate, activation)
            });
            Ok(Box::new(FusedNorm { norm, products, router, glu, counter: t.ints(&[1], &[0])? }))
        });
        list.push(if large { case.large() } else { case });
    }
}

fn routers(list: &mut Vec<Case>, ty: QuantType) {
    for (experts, used, [rows, cols], merged, scoring, bias, glu) in [
        (8, 2, [37, 256], false, Scoring::Softmax, false, false),
        (3, 3, [33, 1280], true, Scoring::Sigmoid, true, false),
        (40, 5, [5, 512], false, Scoring::SqrtSoftplus, true, false),
        (64, 6, [64, 512], false, Scoring::Softmax, false, true),
        (128, 8, [32, 768], true, Scoring::Softmax, false, true),
        (256, 8, [32, 256], false, Scoring::Sigmoid, true, true),
        (7, 2, [96, 2048], true, Scoring::Softmax, false, true),
    ] {
        let name =
            format!("{ty} {used} of {experts}, {rows}x{cols}, merged {merged}, {scoring:?}, bias {bias}, glu {glu}");
        list.push(Case::new("fused_router", name, ROUNDED, move |t| {
            let logits: Vec<f32> = t.random(experts).iter().map(|x| 6.0 * x).collect();
            let router = Router {
                logits: t.floats(&[1, experts], &logits)?,
                bias: bias.then(|| t.noise(&[experts])).transpose()?,
                ids: t.ints(&[1, used], &vec![-1; used])?,
                weights: t.output(&[1, used])?,
                scoring,
                groups: None,
                group_rank: GroupRank::default(),
                norm: !bias,
                scale: 1.5,
            };
            let x = made_codes(t, &[1, cols])?;
            let out = if merged { 2 * rows } else { rows };
            let mut products = Vec::new();
            for _ in 0..if merged { 1 } else { 2 } {
                let (w, y) = (weight(t, ty, &[experts, out, cols])?, t.output(&[1, used, out])?);
                products.push(ExpertMatMul::quantized(w, x.q.clone(), x.scales.clone(), router.ids.clone(), y));
            }
            let glu = if glu {
                let (gate, up) = match products.as_slice() {
                    [both] => (both.y.narrow(2, 0, rows)?, both.y.narrow(2, rows, rows)?),
                    _ => (products[0].y.clone(), products[1].y.clone()),
                };
                let codes = Some(codes(t, &[1, used, rows])?);
                Some(Glu { gate, up, out: None, codes, activation: Activation::Silu, limit: bias.then_some(0.5) })
            } else {
                None
            };
            Ok(Box::new(FusedRouter { router, products, glu }))
        }));
    }
    list.push(Case::new("fused_router", format!("{ty} ties, and no logit that is a number"), 1e-5, move |t| {
        let mut logits = vec![0.5; 40];
        logits[33] = 0.75;
        logits[7] = f32::NAN;
        let (logits, ids) = (t.floats(&[1, 40], &logits)?, t.ints(&[1, 4], &[-1; 4])?);
        let (bias, weights) = (None, t.output(&[1, 4])?);
        let (scoring, groups, group_rank) = (Scoring::Sigmoid, None, GroupRank::default());
        let x = made_codes(t, &[1, 256])?;
        let product = ExpertMatMul::quantized(
            self::weight(t, ty, &[40, 8, 256])?,
            x.q,
            x.scales,
            ids.clone(),
            t.output(&[1, 4, 8])?,
        );
        let router = Router { logits, bias, ids, weights, scoring, groups, group_rank, norm: true, scale: 1.0 };
        Ok(Box::new(FusedRouter { router, products: vec![product], glu: None }))
    }));
}

fn downs(list: &mut Vec<Case>, ty: QuantType) {
    // [rows, columns] of the dense part, (experts, used, rows, columns) of the others.
    for (dense, experts, scaled, large) in [
        (Some([37, 512]), None, false, false),
        (None, Some((5, 3, 33, 256)), false, false),
        (Some([33, 1280]), Some((4, 4, 33, 768)), true, false),
        (None, Some((9, 2, 17, 2048)), true, false),
        (Some([2816, 4096]), None, false, true),
        (Some([2048, 2816]), Some((7, 6, 2048, 1280)), false, true),
        (Some([2816, 2048]), Some((9, 8, 2816, 512)), true, true),
    ] {
        let name = format!("{ty} dense {dense:?}, experts {experts:?}, scaled {scaled}");
        let case = Case::new("fused_down", name, 1e-4, move |t| {
            let dense = match dense {
                Some([rows, cols]) => {
                    let (x, codes) = (t.noise(&[1, cols])?, codes(t, &[1, cols])?);
                    let (w, y) = (weight(t, ty, &[rows, cols])?, t.output(&[1, rows])?);
                    let product = MatMul::quantized(w, codes.q.clone(), codes.scales.clone(), y);
                    Some((Quantize { x, q: codes.q, scales: codes.scales }, product))
                }
                None => None,
            };
            let experts = match experts {
                Some((experts, used, rows, cols)) => {
                    let x = made_codes(t, &[1, used, cols])?;
                    let ids: Vec<i32> = (0..used).map(|k| ((k * 7 + 2) % experts) as i32).collect();
                    let (ids, y) = (t.ints(&[1, used], &ids)?, t.output(&[1, used, rows])?);
                    let w = weight(t, ty, &[experts, rows, cols])?;
                    let product = ExpertMatMul::quantized(w, x.q, x.scales, ids.clone(), y.clone());
                    let expert_scale = if scaled { Some((t.noise(&[experts])?, ids)) } else { None };
                    let weights = t.noise(&[1, used])?;
                    let sum = ExpertSum { y, weights, expert_scale, residual: None, out: t.output(&[1, rows])? };
                    Some((product, sum))
                }
                None => None,
            };
            Ok(Box::new(FusedDown { dense, experts }))
        });
        list.push(if large { case.large() } else { case });
    }
}

/// Codes to be written, without gaps.
fn codes(t: &mut Tensors<'_>, shape: &[usize]) -> Result<Codes, KernelError> {
    let groups = [&shape[..shape.len() - 1], &[shape[shape.len() - 1] / Quantize::GROUP, 2]].concat();
    let q = t.bytes(QuantType::I8, shape, &vec![0x55; shape.iter().product()])?;
    Ok(Codes { q, scales: t.output(&groups)? })
}

/// Codes that are there.
fn made_codes(t: &mut Tensors<'_>, shape: &[usize]) -> Result<Codes, KernelError> {
    let (q, scales) = eights(t, shape, false)?;
    Ok(Codes { q, scales })
}
