//! Two runs of a case, compared.

use super::Tensors;
use super::tensors::Allocation;
use crate::ops::{Quantize, TensorView};
use crate::quant::QuantType;
use crate::quant::half::{bf16_to_f32, f16_to_f32};

/// The greatest error and where it is.
pub(super) struct Worst {
    pub(super) error: f64,
    pub(super) place: String,
}

impl Worst {
    fn note(&mut self, error: f64, place: impl FnOnce() -> String) {
        if error > self.error {
            *self = Self { error, place: place() };
        }
    }
}

/// Compares what was written with what should have been, and all other bytes with what they were.
pub(super) fn compare(
    got: &Tensors<'_>,
    want: &Tensors<'_>,
    writes: &[&TensorView],
    leftovers: &[&TensorView],
) -> Worst {
    let mut worst = Worst { error: 0.0, place: String::new() };
    for (number, (got, want)) in got.allocations.iter().zip(&want.allocations).enumerate() {
        let mut written = vec![false; got.before.len()];
        for view in leftovers {
            if let Some(offset) = got.offset(view) {
                written[offset..offset + view.range().len()].fill(true);
            }
        }
        for view in writes.iter().filter(|view| !leftovers.iter().any(|left| left.same_place(view))) {
            if let Some(offset) = got.offset(view) {
                elements(got, want, view, offset, &mut written, &mut worst);
            }
        }
        let differs = |i: usize| got.after[i] != got.before[i] || want.after[i] != want.before[i];
        if let Some(i) = (0..written.len()).find(|&i| !written[i] && differs(i)) {
            let at = i as i64 - super::tensors::MARGIN as i64;
            let who = if got.after[i] == got.before[i] { " by the reference" } else { "" };
            worst.note(f64::INFINITY, || {
                format!("tensor {}: byte {at} is none of the op's and was changed{who}", number + 1)
            });
        }
    }
    worst
}

/// Compares one view's elements and marks their bytes.
fn elements(
    got: &Allocation,
    want: &Allocation,
    view: &TensorView,
    offset: usize,
    written: &mut [bool],
    worst: &mut Worst,
) {
    let (shape, strides, ty) = (view.shape(), view.strides(), view.ty());
    let (last, bytes) = (shape.len() - 1, ty.type_bytes());
    let mut pairs = Vec::new();
    for row in 0..view.rows() {
        let (mut index, mut start) = (row, offset);
        let mut place = vec![0; shape.len()];
        for axis in (0..last).rev() {
            place[axis] = index % shape[axis];
            start += place[axis] * strides[axis];
            index /= shape[axis];
        }
        for block in 0..shape[last] / ty.block_size() {
            let at = start + block * bytes..start + (block + 1) * bytes;
            written[at.clone()].fill(true);
            place[last] = block;
            match (value(ty, &got.after[at.clone()]), value(ty, &want.after[at.clone()])) {
                (Some(got), Some(want)) => pairs.push((got, want, row, block)),
                _ if got.after[at.clone()] != want.after[at.clone()] => {
                    let (got, want) = (&got.after[at.clone()], &want.after[at]);
                    worst.note(f64::INFINITY, || format!("{view:?} {place:?}: {got:?} for {want:?}"));
                }
                _ => {}
            }
        }
    }
    let top = pairs.iter().map(|p| p.1.abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
    for (got, want, row, column) in pairs {
        let error = if got == want || (got.is_nan() && want.is_nan()) {
            0.0
        } else if got.is_finite() && want.is_finite() && top > 0.0 {
            (got - want).abs() / top
        } else {
            f64::INFINITY
        };
        worst.note(error, || format!("{view:?} row {row} column {column}: {got} for {want}"));
    }
}

/// Whether codes and scales, contiguous, are those of the floats that the same run wrote.
pub(super) fn codes_of_own(got: &Tensors<'_>, [x, q, scales]: [&TensorView; 3]) -> Worst {
    let mut worst = Worst { error: 0.0, place: String::new() };
    let bytes = |view: &TensorView| {
        let found = got.allocations.iter().find_map(|a| Some((a, a.offset(view)?)));
        found.map(|(a, offset)| a.after[offset..offset + view.range().len()].to_vec()).unwrap_or_default()
    };
    let floats = |view: &TensorView| -> Vec<f32> {
        bytes(view).as_chunks::<4>().0.iter().map(|&word| f32::from_ne_bytes(word)).collect()
    };
    let (x, codes, scales) = (floats(x), bytes(q), floats(scales));
    let groups = x.as_chunks::<{ Quantize::GROUP }>().0.iter().zip(codes.as_chunks::<{ Quantize::GROUP }>().0);
    for (number, ((x, codes), found)) in groups.zip(scales.as_chunks::<2>().0).enumerate() {
        let d = x.iter().fold(0.0, |most: f32, x| most.max(x.abs())) / 127.0;
        let want = x.map(|x| if d == 0.0 { 0.0 } else { (x / d).clamp(-127.0, 127.0).round_ties_even() });
        let sum: f32 = want.iter().sum();
        if codes.map(|code| f32::from(code as i8)) != want || *found != [d, d * sum] {
            worst.note(f64::INFINITY, || format!("group {number} of the codes: {codes:?} {found:?} for {want:?} {d}"));
        }
    }
    worst
}

/// A float's value; none for other types.
fn value(ty: QuantType, bytes: &[u8]) -> Option<f64> {
    let word = || bytes.try_into().ok().map(u16::from_ne_bytes);
    match ty {
        QuantType::F32 => Some(f64::from(f32::from_ne_bytes(bytes.try_into().ok()?))),
        QuantType::F16 => Some(f64::from(f16_to_f32(word()?))),
        QuantType::I8 => Some(f64::from(i8::from_ne_bytes(bytes.try_into().ok()?))),
        QuantType::BF16 => Some(f64::from(bf16_to_f32(word()?))),
        _ => None,
    }
}
