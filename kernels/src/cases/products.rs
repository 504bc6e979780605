//! Cases of the ops that read quantised blocks, and of those that make activations for them.

use super::{Case, Tensors};
use crate::KernelError;
use crate::ops::{ExpertMatMul, GetRows, HeadMatMul, MatMul, Quantize, TensorView};
use crate::quant::QuantType;

const EXACT: f64 = 0.0;

/// Products are summed in other orders than the host's.
const SUMMED: f64 = 1e-5;

/// (rows, columns, tokens) for every type: one token, a few, many.
const SHAPES: [[usize; 3]; 3] = [[37, 512, 1], [21, 768, 3], [70, 256, 9]];

/// More for some types: warps that share rows, columns in several pieces, groups and tiles of tokens, one row.
const MORE: [[usize; 3]; 6] =
    [[18, 2816, 1], [20, 4096, 1], [9, 8192, 2], [5, 20_480, 5], [130, 512, 65], [40, 1536, 8]];
const SOME: [QuantType; 6] =
    [QuantType::F16, QuantType::Q4_0, QuantType::Q8_0, QuantType::Q4_K, QuantType::Q6_K, QuantType::MXFP4];

pub(super) fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    let types = || QuantType::ALL.iter().copied().filter(|ty| ty.supported());
    for ty in types() {
        rows(&mut list, ty);
        let more = MORE.iter().filter(|_| SOME.contains(&ty));
        for &shape in SHAPES.iter().chain(more) {
            product(&mut list, ty, shape, false);
            if ty.block_size() > 1 {
                product(&mut list, ty, shape, true);
            }
        }
        for tokens in [2, 11] {
            for per_slot in [false, true] {
                experts(&mut list, ty, tokens, per_slot, false);
                if ty.block_size() > 1 {
                    experts(&mut list, ty, tokens, per_slot, true);
                }
            }
        }
    }
    for (ty, with_eights) in [(QuantType::F32, false), (QuantType::Q4_0, false), (QuantType::Q4_0, true)] {
        for tokens in [1, 33] {
            experts_in_two_places(&mut list, ty, tokens, with_eights);
        }
    }
    per_head(&mut list);
    for (ty, cols) in [(QuantType::F32, 99), (QuantType::F16, 99), (QuantType::BF16, 7)] {
        for tokens in [1, 3, 10] {
            product(&mut list, ty, [11, cols, tokens], false);
        }
    }
    // Routers: few rows of floats.
    product(&mut list, QuantType::F32, [128, 2816, 1], false);
    // The heads of models.
    for eights in [false, true] {
        for shape in [[32_000, 2048, 1], [2048, 8192, 1], [2816, 2816, 512]] {
            for ty in SOME.into_iter().filter(|ty| !eights || ty.block_size() > 1) {
                product(&mut list, ty, shape, eights);
                if let Some(last) = list.pop() {
                    list.push(last.large());
                }
            }
        }
    }
    unaligned(&mut list);
    quantize(&mut list);
    list
}

/// Blocks of random codes whose scales are neither tiny nor huge.
fn blocks(t: &mut Tensors<'_>, ty: QuantType, count: usize) -> Vec<u8> {
    let mut random =
        t.random(count * ty.type_bytes() + 4 * count).into_iter().map(|v| ((v + 1.0) * 8_388_608.0) as u32);
    let mut next = || random.next().unwrap_or_default() >> 3;
    let mut bytes = Vec::with_capacity(count * ty.type_bytes());
    for _ in 0..count {
        let start = bytes.len();
        bytes.extend((0..ty.type_bytes()).map(|_| next() as u8));
        let block = &mut bytes[start..];
        let mut half =
            |at: usize| block[at..at + 2].copy_from_slice(&(0x1800 + (next() & 0x8FFF) as u16).to_le_bytes());
        match ty {
            QuantType::F32 => block[3] = 0x3E,
            QuantType::BF16 => block[1] = 0xBE,
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => (half(0), half(2)).1,
            QuantType::Q2_K => (half(80), half(82)).1,
            QuantType::Q3_K => half(108),
            QuantType::Q6_K => half(208),
            QuantType::Q8_K => block[2..4].copy_from_slice(&[0x20, 0x3C]),
            QuantType::MXFP4 => block[0] = 118 + block[0] % 8,
            _ => half(0),
        }
    }
    bytes
}

pub(super) fn weight(t: &mut Tensors<'_>, ty: QuantType, shape: &[usize]) -> Result<TensorView, KernelError> {
    let bytes = blocks(t, ty, shape.iter().product::<usize>() / ty.block_size());
    t.bytes(ty, shape, &bytes)
}

/// Codes and scales, both with gaps between rows if `gap`.
pub(super) fn eights(t: &mut Tensors<'_>, shape: &[usize], gap: bool) -> Result<(TensorView, TensorView), KernelError> {
    let (last, cols) = (shape.len() - 1, shape[shape.len() - 1]);
    let rows: usize = shape[..last].iter().product();
    let (q_cols, groups) = (cols + if gap { 4 } else { 0 }, cols / 32 + usize::from(gap));
    let codes: Vec<u8> = t.random(rows * q_cols).iter().map(|v| (v * 127.0) as i8 as u8).collect();
    let scales = t.random(rows * groups);
    let scale = |row: usize, group: usize| {
        let d = 0.01 * scales[row * groups + group].abs();
        let codes = codes[row * q_cols..].iter().skip(32 * group).take(32);
        [d, d * codes.map(|&c| i32::from(c as i8)).sum::<i32>() as f32]
    };
    let values: Vec<f32> = (0..rows * groups).flat_map(|i| scale(i / groups, i % groups)).collect();
    let (mut q_shape, mut scales_shape) = (shape.to_vec(), shape.to_vec());
    q_shape[last] = q_cols;
    scales_shape[last] = groups;
    scales_shape.push(2);
    let q = t.bytes(QuantType::I8, &q_shape, &codes)?.narrow(last, 0, cols)?;
    Ok((q, t.floats(&scales_shape, &values)?.narrow(last, 0, cols / 32)?))
}

fn rows(list: &mut Vec<Case>, ty: QuantType) {
    let touched = 5 * 768 * (ty.type_bytes() + 4 * ty.block_size()) / ty.block_size();
    let case = Case::new("get_rows", format!("{ty}"), EXACT, move |t| {
        let table = weight(t, ty, &[19, 768])?;
        let ids = t.ints(&[5], &[18, 0, 7, 7, 3])?;
        Ok(Box::new(GetRows { table, ids, out: t.strided_output(&[5, 768], 1, 3)?, scale: 1.0 }))
    });
    list.push(case.touching(touched));
    list.push(Case::new("get_rows", format!("{ty} scaled"), EXACT, move |t| {
        let table = weight(t, ty, &[2, 256])?;
        Ok(Box::new(GetRows { table, ids: t.ints(&[1], &[1])?, out: t.output(&[1, 256])?, scale: 53.066 }))
    }));
}

fn product(list: &mut Vec<Case>, ty: QuantType, [out, cols, tokens]: [usize; 3], with_eights: bool) {
    let form = if with_eights { "q8" } else { "f32" };
    list.push(Case::new("matmul", format!("{ty} {form} {out}x{cols} {tokens} tokens"), SUMMED, move |t| {
        let w = weight(t, ty, &[out, cols])?;
        let y = t.strided_output(&[tokens, out], 2, 3)?;
        if with_eights {
            let (q, scales) = eights(t, &[tokens, cols], false)?;
            return Ok(Box::new(MatMul::quantized(w, q, scales, y)));
        }
        Ok(Box::new(MatMul::new(w, t.noise(&[tokens, cols])?, y)))
    }));
}

fn experts(list: &mut Vec<Case>, ty: QuantType, tokens: usize, per_slot: bool, with_eights: bool) {
    let (count, out, cols, used) = (7, 35, 512, 3);
    let form = if with_eights { "q8" } else { "f32" };
    let inputs = if per_slot { "an input a slot" } else { "an input a token" };
    list.push(Case::new("expert_matmul", format!("{ty} {form} {tokens} tokens, {inputs}"), SUMMED, move |t| {
        let w = weight(t, ty, &[count, out, cols])?;
        // Some experts get nothing, some several tokens.
        let ids: Vec<i32> = (0..tokens * used).map(|slot| [6, 0, 3, 1, 0][slot * slot % 5]).collect();
        let ids = t.ints(&[tokens, used], &ids)?;
        let y = t.strided_output(&[tokens, used, out], 1, 2)?;
        let shape: &[usize] = if per_slot { &[tokens, used, cols] } else { &[tokens, cols] };
        if with_eights {
            let (q, scales) = eights(t, shape, true)?;
            return Ok(Box::new(ExpertMatMul::quantized(w, q, scales, ids, y)));
        }
        Ok(Box::new(ExpertMatMul::new(w, t.strided_noise(shape, 1, 4)?, ids, y)))
    }));
}

/// Experts in two places, and slots that have none.
fn experts_in_two_places(list: &mut Vec<Case>, ty: QuantType, tokens: usize, with_eights: bool) {
    let (out, cols, used) = (70, 512, 4);
    let form = if with_eights { "q8" } else { "f32" };
    list.push(Case::new("expert_matmul", format!("{ty} {form} {tokens} tokens, two places"), SUMMED, move |t| {
        let (w, more) = (weight(t, ty, &[2, out, cols])?, weight(t, ty, &[3, out, cols])?);
        let ids: Vec<i32> = (0..tokens * used).map(|slot| [1, -1, 4, 0, 2, -1, -1, 3][slot * 5 % 8]).collect();
        let ids = t.ints(&[tokens, used], &ids)?;
        let y = t.strided_output(&[tokens, used, out], 1, 2)?;
        let product = if with_eights {
            let (q, scales) = eights(t, &[tokens, cols], true)?;
            ExpertMatMul::quantized(w, q, scales, ids, y)
        } else {
            ExpertMatMul::new(w, t.strided_noise(&[tokens, cols], 1, 4)?, ids, y)
        };
        Ok(Box::new(ExpertMatMul { more: Some(more), ..product }))
    }));
}

/// Products of heads: parts of wider rows on both sides, one token, a few, tiles of them.
fn per_head(list: &mut Vec<Case>) {
    let mut product = |ty: QuantType, [heads, out, cols, tokens]: [usize; 4]| {
        let name = format!("{ty} {heads} heads of {out}x{cols}, {tokens} tokens");
        list.push(Case::new("head_matmul", name, SUMMED, move |t| {
            let w = weight(t, ty, &[heads, out, cols])?;
            let x = t.strided_noise(&[tokens, heads, cols], 0, 16)?;
            Ok(Box::new(HeadMatMul { w, x, y: t.strided_output(&[tokens, heads, out], 3, 5)? }))
        }));
    };
    for ty in QuantType::ALL.iter().copied().filter(|ty| ty.supported()) {
        let cols = 256.max(ty.block_size());
        product(ty, [3, 37, cols, 1]);
        product(ty, [2, 20, cols, 9]);
    }
    for ty in [QuantType::F32, QuantType::F16, QuantType::Q8_0, QuantType::Q4_0] {
        product(ty, [5, 130, 32, 3]);
        product(ty, [16, 512, 128, 1]);
        product(ty, [2, 65, 64, 131]);
    }
    product(QuantType::F32, [3, 9, 7, 2]);
    product(QuantType::BF16, [1, 1, 5, 70]);
    let large = [(128, 512, 128, 1), (128, 128, 512, 1), (128, 512, 128, 512)];
    for (heads, out, cols, tokens) in large {
        product(QuantType::Q8_0, [heads, out, cols, tokens]);
    }
    let last = list.len() - large.len();
    list[last..].iter_mut().for_each(|case| *case = case.clone().large());
}

/// Blocks at odd addresses, activations that 16-byte loads may not touch.
fn unaligned(list: &mut Vec<Case>) {
    for ty in [QuantType::Q4_0, QuantType::Q4_K, QuantType::Q5_1, QuantType::IQ4_XS, QuantType::MXFP4] {
        for tokens in [1, 2, 20] {
            for with_eights in [false, true] {
                let form = if with_eights { "q8" } else { "f32" };
                let name = format!("{ty} {form} at an odd address, {tokens} tokens");
                list.push(Case::new("matmul", name, SUMMED, move |t| {
                    let (out, cols) = (19, 768);
                    let mut bytes = vec![0; 1];
                    bytes.extend(blocks(t, ty, out * cols / ty.block_size()));
                    let root = t.bytes(QuantType::I8, &[bytes.len()], &bytes)?;
                    let w = TensorView::at(root.root(), 1, ty, &[out, cols])?;
                    let y = t.output(&[tokens, out])?;
                    if with_eights {
                        let (q, scales) = eights(t, &[tokens, cols], true)?;
                        return Ok(Box::new(MatMul::quantized(w, q, scales, y)));
                    }
                    Ok(Box::new(MatMul::new(w, t.strided_noise(&[tokens, cols], 1, 2)?, y)))
                }));
            }
        }
    }
}

fn quantize(list: &mut Vec<Case>) {
    let op = |t: &mut Tensors<'_>, x: TensorView| -> Result<Quantize, KernelError> {
        let (tokens, cols) = (x.dim(0), x.dim(1));
        let q = t.bytes(QuantType::I8, &[tokens, cols + 5], &vec![77; tokens * (cols + 5)])?.narrow(1, 3, cols)?;
        let scales = t.output(&[tokens, cols / 32 + 1, 2])?.narrow(1, 1, cols / 32)?;
        Ok(Quantize { x, q, scales })
    };
    for shape in [[1, 32], [3, 96], [2, 2816], [300, 64]] {
        list.push(Case::new("quantize", format!("{}x{}", shape[0], shape[1]), EXACT, move |t| {
            let x = t.strided_noise(&shape, 1, 4)?;
            Ok(Box::new(op(t, x)?))
        }));
    }
    list.push(Case::new("quantize", "zeros, ties, tiny, huge and odd values", EXACT, move |t| {
        let mut values = vec![0.0f32; 32];
        values.extend((0..32).map(|i| i as f32 * 0.5 - 7.75 + if i == 31 { 119.25 } else { 0.0 }));
        values.extend((0..32).map(|i| i as f32 * 1e-44));
        values.extend((0..32).map(|i| (i as f32 - 16.0) * 2e37));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values.extend((0..32).map(|i| if i == 9 { odd } else { i as f32 }));
        }
        // So small that the scale is 0.
        values.extend((0..32).map(|i| if i == 20 { 1e-45 } else { -0.0 }));
        let x = t.floats(&[2, 128], &values)?;
        Ok(Box::new(op(t, x)?))
    }));
    list.push(Case::new("get_rows", "I32", EXACT, |t| {
        let table = t.ints(&[4, 3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -2, i32::MIN])?;
        let (ids, out) = (t.ints(&[2], &[3, 1])?, t.ints(&[2, 3], &[0; 6])?);
        Ok(Box::new(GetRows { table, ids, out, scale: 1.0 }))
    }));
}
