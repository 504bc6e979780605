//! Inputs of products: floats, and the same as integers where a weight takes them.

use evergraph_kernels::ops::{ExpertMatMul, MatMul, Quantize, TensorView};
use evergraph_kernels::quant::QuantType;

use crate::engine::{ActType, Step};
use crate::error::Result;

/// Room for one quantised input. All inputs of a step use it one after the other: an input is read only until the next
/// one is made.
#[derive(Debug)]
pub(super) struct Room {
    /// `[elements]` I8.
    codes: TensorView,
    /// `[elements / 32 * 2]` F32.
    scales: TensorView,
}

impl Room {
    /// Room for inputs of up to `elements` for these weights; none where activations stay floats or no weight is in
    /// blocks.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        elements: usize,
        weights: impl IntoIterator<Item = &'a TensorView>,
    ) -> Result<Option<Self>> {
        if step.act() == ActType::F32 || !weights.into_iter().any(in_blocks) {
            return Ok(None);
        }
        let elements = elements.next_multiple_of(Quantize::GROUP);
        Ok(Some(Self {
            codes: step.scratch("quantised input", QuantType::I8, &[elements])?,
            scales: step.floats("scales of the input", &[elements / Quantize::GROUP * 2])?,
        }))
    }
}

/// An input of one or several products.
#[derive(Debug)]
pub(super) struct Input {
    floats: TensorView,
    /// Codes and scales.
    integers: Option<(TensorView, TensorView)>,
}

impl Input {
    /// `x` (`[T, in]` or `[T, K, in]`), for products with these weights. Quantises it, once for all, where one of them
    /// takes integers.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        room: Option<&Room>,
        x: &TensorView,
        weights: impl IntoIterator<Item = &'a TensorView>,
    ) -> Result<Self> {
        let floats = x.clone();
        let Some(room) = room.filter(|_| weights.into_iter().any(in_blocks)) else {
            return Ok(Self { floats, integers: None });
        };
        let (rows, cols) = (x.rows(), x.cols());
        let groups = cols / Quantize::GROUP;
        let first = |room: &TensorView, len: usize, shape: &[usize]| room.narrow(0, 0, len)?.reshape(shape);
        let codes = first(&room.codes, rows * cols, &[rows, cols])?;
        let scales = first(&room.scales, rows * groups * 2, &[rows, groups, 2])?;
        step.push(Quantize { x: x.reshape(&[rows, cols])?, q: codes.clone(), scales: scales.clone() })?;
        let outer = &x.shape()[..x.rank() - 1];
        let scales = scales.reshape(&[outer, &[groups, 2]].concat())?;
        Ok(Self { floats, integers: Some((codes.reshape(x.shape())?, scales)) })
    }

    /// Appends `y = w x`.
    pub(super) fn times(&self, step: &mut Step<'_>, w: &TensorView, y: &TensorView) -> Result<()> {
        let (w, y) = (w.clone(), y.clone());
        match self.integers.clone().filter(|_| in_blocks(&w)) {
            Some((q, scales)) => step.push(MatMul::quantized(w, q, scales, y)),
            None => step.push(MatMul::new(w, self.floats.clone(), y)),
        }
    }

    /// Appends the products with the experts that `ids` names.
    pub(super) fn times_experts(
        &self,
        step: &mut Step<'_>,
        w: &TensorView,
        ids: &TensorView,
        y: &TensorView,
    ) -> Result<()> {
        let (w, ids, y) = (w.clone(), ids.clone(), y.clone());
        match self.integers.clone().filter(|_| in_blocks(&w)) {
            Some((q, scales)) => step.push(ExpertMatMul::quantized(w, q, scales, ids, y)),
            None => step.push(ExpertMatMul::new(w, self.floats.clone(), ids, y)),
        }
    }
}

/// Whether a weight takes integers.
fn in_blocks(w: &TensorView) -> bool {
    w.ty().block_size() > 1
}
