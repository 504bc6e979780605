//! Cases of hyper-connections, of the rotation of a head's tail and of rounding through 8 bits: what DeepSeek V4 adds.

use super::Case;
use super::rows::EDGES;
use crate::ops::{Fp8KvQuantize, HcExpand, HcMix, HcSplitSinkhorn, HcWeightedSum, RopeTail, Yarn};

pub(super) fn cases() -> Vec<Case> {
    [tails(), splits(), sums(), expansions(), rounded()].concat()
}

const YARN: Yarn = Yarn { factor: 16.0, original_context: 65_536, beta_fast: 32.0, beta_slow: 1.0 };

fn tails() -> Vec<Case> {
    let mut list = Vec::new();
    for inverse in [false, true] {
        for ([tokens, heads, d], dims) in
            [([1, 64, 512], 64), ([1, 1, 2], 2), ([3, 5, 130], 6), ([70, 2, 96], 96), ([2, 3, 515], 300)]
        {
            let name = format!("{dims} of {tokens}x{heads}x{d}{}", if inverse { " back" } else { "" });
            list.push(Case::new("rope_tail", name, 2e-6, move |t| {
                let positions: Vec<i32> = (0..tokens as i32).map(|i| i * 97 % 5000 + 3).collect();
                let x = t.strided_noise(&[tokens, heads, d], 2, 6)?;
                let out = t.strided_output(&[tokens, heads, d], 1, 3)?;
                let positions = t.ints(&[tokens], &positions)?;
                Ok(Box::new(RopeTail { out, inverse, ..RopeTail::new(x, positions, dims, 1e4) }))
            }));
        }
        let name = format!("YaRN, in place, far positions{}", if inverse { " back" } else { "" });
        list.push(Case::new("rope_tail", name, 2e-6, move |t| {
            let (x, positions) = (t.strided_noise(&[4, 3, 192], 3, 5)?, t.ints(&[4], &[0, 1, 131_071, 7])?);
            Ok(Box::new(RopeTail { yarn: Some(YARN), inverse, ..RopeTail::new(x, positions, 64, 1.6e5) }))
        }));
    }
    list
}

fn splits() -> Vec<Case> {
    let mut list = Vec::new();
    for (tokens, n, iterations) in [(1, 4, 20), (70, 4, 20), (3, 1, 3), (2, 2, 1), (5, 3, 7), (2, 8, 20), (1, 32, 2)] {
        let name = format!("{tokens} tokens, {n} streams, {iterations} rounds");
        list.push(Case::new("hc_split_sinkhorn", name, 2e-6, move |t| {
            let m: Vec<f32> = t.random(tokens * (2 + n) * n).iter().map(|x| 4.0 * x).collect();
            let m = t.strided(&[tokens, (2 + n) * n], &m, 1, 3)?;
            let (scale, base) = (t.floats(&[3], &[0.7, 1.5, -2.0])?, t.noise(&[(2 + n) * n])?);
            let (pre, post) = (t.strided_output(&[tokens, n], 2, 3)?, t.strided_output(&[tokens, n], 1, 1)?);
            let mix = Some(HcMix { post, comb: t.output(&[tokens, n, n])?, iterations });
            Ok(Box::new(HcSplitSinkhorn { m, scale, base, pre, mix, eps: 1e-6 }))
        }));
    }
    list.push(Case::new("hc_split_sinkhorn", "extreme values", 2e-6, |t| {
        let mut m = vec![0.0; 3 * 24];
        // One of a row takes all; nothing is left of the others but what eps leaves.
        (m[0], m[4], m[8], m[13]) = (1e30, -1e30, 200.0, 150.0);
        m[24..48].fill(-1e4);
        m[48..72].iter_mut().enumerate().for_each(|(i, m)| *m = if i % 5 == 0 { 90.0 } else { -90.0 });
        let (m, scale, base) = (t.floats(&[3, 24], &m)?, t.floats(&[3], &[1.0; 3])?, t.floats(&[24], &[0.0; 24])?);
        let mix = Some(HcMix { post: t.output(&[3, 4])?, comb: t.output(&[3, 4, 4])?, iterations: 20 });
        Ok(Box::new(HcSplitSinkhorn { m, scale, base, pre: t.output(&[3, 4])?, mix, eps: 1e-6 }))
    }));
    for n in [4, 5] {
        list.push(Case::new("hc_split_sinkhorn", format!("{n} streams, read only"), 2e-6, move |t| {
            let (m, scale, base) = (t.strided_noise(&[9, n], 1, 2)?, t.floats(&[1], &[3.0])?, t.noise(&[n])?);
            Ok(Box::new(HcSplitSinkhorn { m, scale, base, pre: t.output(&[9, n])?, mix: None, eps: 1e-3 }))
        }));
    }
    list
}

const STREAMS: [[usize; 3]; 5] = [[1, 4, 4096], [3, 1, 7], [40, 4, 96], [2, 3, 1030], [2, 9, 33]];

fn sums() -> Vec<Case> {
    let case = |[tokens, n, width]: [usize; 3]| {
        Case::new("hc_weighted_sum", format!("{tokens}x{n}x{width}"), 1e-6, move |t| {
            let (z, pre) = (t.strided_noise(&[tokens, n, width], 3, 4)?, t.strided_noise(&[tokens, n], 1, 2)?);
            Ok(Box::new(HcWeightedSum { z, pre, out: t.strided_output(&[tokens, width], 1, 2)? }))
        })
    };
    let extreme = Case::new("hc_weighted_sum", "huge and odd values", 1e-6, |t| {
        let (z, pre) = (t.floats(&[1, 2, 20], &[EDGES, EDGES].concat())?, t.floats(&[1, 2], &[0.5, 0.25])?);
        Ok(Box::new(HcWeightedSum { z, pre, out: t.output(&[1, 20])? }))
    });
    STREAMS.into_iter().map(case).chain([extreme]).collect()
}

fn expansions() -> Vec<Case> {
    let mut list = Vec::new();
    for [tokens, n, width] in STREAMS {
        for in_place in [false, true] {
            let name = format!("{tokens}x{n}x{width}{}", if in_place { " in place" } else { "" });
            list.push(Case::new("hc_expand", name, 1e-6, move |t| {
                let (y, z) = (t.strided_noise(&[tokens, width], 1, 1)?, t.strided_noise(&[tokens, n, width], 2, 5)?);
                let (post, comb) = (t.strided_noise(&[tokens, n], 1, 2)?, t.noise(&[tokens, n, n])?);
                let out = if in_place { z.clone() } else { t.strided_output(&[tokens, n, width], 3, 3)? };
                Ok(Box::new(HcExpand { y, z, post, comb, out }))
            }));
        }
    }
    list
}

fn rounded() -> Vec<Case> {
    let mut list = Vec::new();
    for (shape, rotated) in
        [(&[1, 512][..], 64), (&[1, 1][..], 0), (&[3, 2, 200][..], 10), (&[70, 130][..], 1), (&[2, 5, 64][..], 63)]
    {
        for in_place in [false, true] {
            let name = format!("{shape:?} less {rotated}{}", if in_place { " in place" } else { "" });
            list.push(Case::new("fp8_kv_quantize", name, 0.0, move |t| {
                let values = t.random(shape.iter().product());
                // Rows of very different sizes.
                let size = |i: usize| f32::powi(10.0, (i / 50 % 9) as i32 - 6);
                let values: Vec<f32> = values.iter().enumerate().map(|(i, x)| x * size(i)).collect();
                let x = t.strided(shape, &values, 1, 4)?;
                let out = if in_place { x.clone() } else { t.strided_output(shape, 2, 3)? };
                Ok(Box::new(Fp8KvQuantize { x, rotated, out }))
            }));
        }
    }
    list.push(Case::new("fp8_kv_quantize", "every step and the middles between them", 0.0, |t| {
        // With a greatest value of 448 the scale is 1: numbers of E4M3 stay, ties go to the even one.
        let mut values = vec![448.0, -448.0];
        for exponent in -9..9 {
            (8..16).for_each(|m| values.push((m as f32 + 0.5) / 8.0 * f32::powi(2.0, exponent)));
        }
        values.extend((0..16).map(|m| (m as f32 + 0.5) / 512.0));
        let rows: Vec<f32> = values.chunks(63).flat_map(|v| v.iter().copied().chain([448.0])).collect();
        let whole = rows.len() / 64 * 64;
        Ok(Box::new(Fp8KvQuantize {
            x: t.floats(&[whole / 64, 64], &rows[..whole])?,
            rotated: 0,
            out: t.output(&[whole / 64, 64])?,
        }))
    }));
    list.push(Case::new("fp8_kv_quantize", "zeros, huge and odd values", 0.0, |t| {
        let mut values = vec![0.0; 4 * 20];
        values[20..40].copy_from_slice(&EDGES);
        values[40..60].fill(f32::MAX);
        values[60..80].fill(-1e-30);
        Ok(Box::new(Fp8KvQuantize { x: t.floats(&[4, 20], &values)?, rotated: 0, out: t.output(&[4, 20])? }))
    }));
    list
}
