//! Cases of the choice of experts and of the sum over them.

use super::Case;
use crate::ops::{Chosen, ExpertSum, GatherExperts, GroupRank, Router, Scoring, ShareExperts};
use crate::quant::QuantType;

pub(super) fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    for scoring in [Scoring::Softmax, Scoring::Sigmoid, Scoring::SqrtSoftplus] {
        for (tokens, experts, used, groups, bias) in [
            (1, 128, 8, None, false),
            (3, 7, 7, None, true),
            (1, 1, 1, None, false),
            (2, 256, 8, Some((8, 4)), true),
            (5, 64, 6, Some((32, 5)), false),
            (70, 32, 4, Some((1, 1)), false),
            (1, 4096, 12, None, false),
        ] {
            let name = format!("{scoring:?} {used} of {experts}, {tokens} tokens, groups {groups:?}, bias {bias}");
            list.push(Case::new("router", name, 2e-6, move |t| {
                let logits: Vec<f32> = t.random(tokens * experts).iter().map(|x| 6.0 * x).collect();
                let logits = t.strided(&[tokens, experts], &logits, 1, 2)?;
                let bias = if bias { Some(t.noise(&[experts])?) } else { None };
                let ids = t.ints(&[tokens, used], &vec![-1; tokens * used])?;
                let (weights, norm) = (t.output(&[tokens, used])?, groups.is_none());
                let group_rank = if experts == 64 { GroupRank::Greatest } else { GroupRank::TwoGreatest };
                Ok(Box::new(Router { logits, bias, ids, weights, scoring, groups, group_rank, norm, scale: 1.5 }))
            }));
        }
        list.push(Case::new("router", format!("{scoring:?} ties, NaN and infinities"), 2e-6, move |t| {
            let mut logits = vec![0.5; 4 * 8];
            logits[8..16].fill(f32::NEG_INFINITY);
            logits[12] = 1.0;
            logits[16..24].fill(f32::NAN);
            (logits[24], logits[25], logits[26]) = (-1e30, 1e30, -2e30);
            let (ids, weights) = (t.ints(&[4, 3], &[-1; 12])?, t.output(&[4, 3])?);
            let logits = t.floats(&[4, 8], &logits)?;
            let (bias, groups, norm) = (None, Some((4, 3)), true);
            let group_rank = GroupRank::TwoGreatest;
            Ok(Box::new(Router { logits, bias, ids, weights, scoring, groups, group_rank, norm, scale: 1.0 }))
        }));
    }
    for (tokens, used, width) in [(1, 8, 2880), (3, 1, 7), (40, 4, 64), (2, 5, 4097)] {
        for scaled in [false, true] {
            let name =
                format!("{tokens}x{used}x{width} {}", if scaled { "scaled, onto the residual" } else { "plain" });
            list.push(Case::new("expert_sum", name, 1e-6, move |t| {
                let (y, weights) = (t.strided_noise(&[tokens, used, width], 3, 4)?, t.noise(&[tokens, used])?);
                if !scaled {
                    let out = t.strided_output(&[tokens, width], 1, 2)?;
                    return Ok(Box::new(ExpertSum { y, weights, expert_scale: None, residual: None, out }));
                }
                // Some are no experts.
                let ids: Vec<i32> = (0..tokens * used).map(|i| (i * 5 % 12) as i32 - 1).collect();
                let expert_scale = Some((t.noise(&[11])?, t.ints(&[tokens, used], &ids)?));
                let out = t.strided_noise(&[tokens, width], 2, 2)?;
                Ok(Box::new(ExpertSum { y, weights, expert_scale, residual: Some(out.clone()), out }))
            }));
        }
    }
    for (name, ty, shape, ids) in [
        ("Q4_0, whole words", QuantType::Q4_0, [7, 24, 64], vec![6, 0, 6]),
        ("Q4_0, halves of words", QuantType::Q4_0, [5, 3, 96], vec![4, 2]),
        ("F32, one", QuantType::F32, [1, 1, 1], vec![0]),
        ("Q4_0, some left as they are", QuantType::Q4_0, [5, 3, 64], vec![-1, 4, -1, 0]),
        ("Q8_0, large", QuantType::Q8_0, [3, 300, 1024], vec![2, 1, 0, 2]),
    ] {
        list.push(Case::new("gather_experts", name, 0.0, move |t| {
            let values = t.random(shape.iter().product());
            let (w, places) = (t.typed(ty, &shape, &values)?, ids.len());
            let blank = vec![7; places * w.range().len() / shape[0]];
            let out = t.bytes(ty, &[places, shape[1], shape[2]], &blank)?;
            Ok(Box::new(GatherExperts { w, ids: t.ints(&[places], &ids)?, out }))
        }));
    }
    // Chosen, the slot of each of them, places for fetched ones.
    for (name, ids, at, fetches) in [
        ("all kept", vec![3, 9, 5], vec![0, 2, 6], 0),
        ("all kept, more than are fetched", vec![3, 9, 5, 0], vec![0, 2, 6, 1], 2),
        ("none kept", vec![3, 9, 5, 1], vec![-1, -1, -1, -1], 3),
        ("none kept, none fetched", vec![11, 9], vec![-1, -1], 0),
        ("some kept", vec![7, 2, 4, 10, 1, 8, 0, 6], vec![-1, 3, -1, -1, 0, -1, 5, -1], 4),
        ("enough kept", vec![7, 2, 4, 10], vec![-1, 6, -1, 0], 2),
        ("all fetched", vec![7, 2, 4], vec![-1, 6, -1], 3),
        ("one chosen twice", vec![5, 2, 5], vec![-1, 1, -1], 2),
        ("one", vec![0], vec![-1], 0),
    ] {
        list.push(Case::new("share_experts", name, 0.0, move |t| {
            let used = ids.len();
            let mut table = vec![-1; 12];
            ids.iter().zip(&at).for_each(|(&id, &slot)| table[id as usize] = slot);
            let counts: Vec<i32> = (0..12).map(|expert| expert * 3).collect();
            let mut chosen = || {
                Ok::<_, crate::KernelError>(Chosen {
                    ids: t.ints(&[1, used], &vec![-9; used])?,
                    weights: t.output(&[1, used])?,
                })
            };
            let (device, host) = (chosen()?, chosen()?);
            Ok(Box::new(ShareExperts {
                ids: t.ints(&[1, used], &ids)?,
                weights: t.noise(&[1, used])?,
                at: t.ints(&[12], &table)?,
                slots: 7,
                counts: t.ints(&[12], &counts)?,
                device,
                places: t.ints(&[1, used], &vec![-9; used])?,
                fetched: if fetches > 0 { Some(t.ints(&[fetches], &vec![-9; fetches])?) } else { None },
                host,
            }))
        }));
    }
    list
}
