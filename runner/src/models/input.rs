//! Inputs of products: floats, and the same as integers where a weight takes them.

use evergraph_kernels::ops::{Codes, ExpertMatMul, Glu, MatMul, Quantize, RmsNorm, TensorView};
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

    /// Its first places, for the codes of `x`.
    fn codes(&self, x: &TensorView) -> Result<Codes> {
        let groups = x.cols() / Quantize::GROUP;
        let first = |room: &TensorView, len: usize, shape: &[usize]| room.narrow(0, 0, len)?.reshape(shape);
        let outer = &x.shape()[..x.rank() - 1];
        let scales = first(&self.scales, x.rows() * groups * 2, &[outer, &[groups, 2]].concat())?;
        Ok(Codes { q: first(&self.codes, x.len(), x.shape())?, scales })
    }
}

/// An input of one or several products: floats, and codes of them where a weight takes integers.
#[derive(Debug)]
pub(super) struct Input {
    floats: TensorView,
    codes: Option<Codes>,
    /// Whether anybody reads the floats.
    floats_read: bool,
}

impl Input {
    /// An input that an op is yet to write (`x`: `[T, in]` or `[T, K, in]`), for products with these weights. `kept` says
    /// that others read its floats too; floats that nobody reads are not written.
    pub(super) fn unwritten<'a>(
        room: Option<&Room>,
        x: &TensorView,
        weights: impl IntoIterator<Item = &'a TensorView>,
        kept: bool,
    ) -> Result<Self> {
        let (mut integers, mut floats_read) = (false, kept);
        for weight in weights {
            integers |= in_blocks(weight);
            floats_read |= !in_blocks(weight);
        }
        let codes = room.filter(|_| integers).map(|room| room.codes(x)).transpose()?;
        Ok(Self { floats: x.clone(), floats_read: floats_read || codes.is_none(), codes })
    }

    /// `x` (`[T, in]` or `[T, K, in]`) as it is, for products with these weights. Quantises it, once for all, where one
    /// of them takes integers.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        room: Option<&Room>,
        x: &TensorView,
        weights: impl IntoIterator<Item = &'a TensorView>,
    ) -> Result<Self> {
        let input = Self::unwritten(room, x, weights, true)?;
        if let Some(Codes { q, scales }) = &input.codes {
            let (rows, cols) = (x.rows(), x.cols());
            let scales = scales.reshape(&[rows, cols / Quantize::GROUP, 2])?;
            step.push(Quantize { x: x.reshape(&[rows, cols])?, q: q.reshape(&[rows, cols])?, scales })?;
        }
        Ok(input)
    }

    /// Appends a norm that writes the input.
    pub(super) fn norm(self, step: &mut Step<'_>, norm: RmsNorm) -> Result<Self> {
        step.push(RmsNorm { out: self.out(), codes: self.codes.clone(), ..norm })?;
        Ok(self)
    }

    /// Appends a gated unit that writes the input.
    pub(super) fn glu(self, step: &mut Step<'_>, glu: Glu) -> Result<Self> {
        step.push(Glu { out: self.out(), codes: self.codes.clone(), ..glu })?;
        Ok(self)
    }

    /// The floats. Only those that are kept, or were there before, are written.
    pub(super) fn floats(&self) -> &TensorView {
        &self.floats
    }

    /// The floats, if anybody reads them.
    fn out(&self) -> Option<TensorView> {
        Some(self.floats.clone()).filter(|_| self.floats_read)
    }

    /// Appends `y = w x`.
    pub(super) fn times(&self, step: &mut Step<'_>, w: &TensorView, y: &TensorView) -> Result<()> {
        let (w, y) = (w.clone(), y.clone());
        match self.codes.clone().filter(|_| in_blocks(&w)) {
            Some(Codes { q, scales }) => step.push(MatMul::quantized(w, q, scales, y)),
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
        match self.codes.clone().filter(|_| in_blocks(&w)) {
            Some(Codes { q, scales }) => step.push(ExpertMatMul::quantized(w, q, scales, ids, y)),
            None => step.push(ExpertMatMul::new(w, self.floats.clone(), ids, y)),
        }
    }
}

/// Whether a weight takes integers.
fn in_blocks(w: &TensorView) -> bool {
    w.ty().block_size() > 1
}
