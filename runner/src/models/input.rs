//! Inputs of products: floats, and the same as integers where a weight takes them.
//!
//! A product with a weight on the host is done there, one at a time: its input crosses, and its result comes back.

use evergraph_kernels::host::HOST;
use evergraph_kernels::ops::{
    Codes, Copy, ExpertMatMul, GetRows, Glu, HeadMatMul, MatMul, Quantize, RmsNorm, TensorView,
};
use evergraph_kernels::quant::QuantType;

use crate::engine::{ActType, Step};
use crate::error::Result;

/// Where inputs of one place in a block go: norms of the residual stream, and codes. They use it one after the other: an
/// input is read only until the next one of its place is made.
#[derive(Debug)]
pub(super) struct Place {
    /// `[T, D]`.
    pub(super) x: TensorView,
    /// For codes, where there are any.
    pub(super) room: Option<Room>,
}

impl Place {
    /// For `tokens` of `width`, and codes of up to `elements` for these weights.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        [tokens, width]: [usize; 2],
        elements: usize,
        weights: impl IntoIterator<Item = &'a TensorView>,
    ) -> Result<Self> {
        Ok(Self { x: step.floats("block input", &[tokens, width])?, room: Room::new(step, elements, weights)? })
    }

    /// A norm of the residual stream, yet to be written, as [`Input::unwritten`].
    pub(super) fn normed<'a>(&self, weights: impl IntoIterator<Item = &'a TensorView>, kept: bool) -> Result<Input> {
        Input::unwritten(self.room.as_ref(), &self.x, weights, kept)
    }
}

/// Room for one quantised input.
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
            // What crosses to the host is made of the floats.
            let here = !is_on_host(weight) || is_on_host(x);
            integers |= here && in_blocks(weight);
            floats_read |= !here || !in_blocks(weight);
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
        input.quantize(step, x)?;
        Ok(input)
    }

    /// An input that ops of the device are yet to write, shaped as `x`, for products on the host with these weights. It crosses
    /// as what they take and no more.
    pub(super) fn crossing<'a>(
        step: &Step<'_>,
        x: &TensorView,
        weights: impl IntoIterator<Item = &'a TensorView>,
    ) -> Result<CrossingInput> {
        let (mut integers, mut floats) = (false, false);
        for weight in weights {
            let takes_integers = step.act() != ActType::F32 && in_blocks(weight);
            integers |= takes_integers;
            floats |= !takes_integers;
        }
        let mut input = CrossingInput {
            written: Self { floats: x.clone(), codes: None, floats_read: floats },
            read: Self { floats: x.clone(), codes: None, floats_read: floats },
        };
        if floats {
            let crossing = step.crossing("input on the host", x.ty(), x.shape())?;
            (input.written.floats, input.read.floats) = (crossing.device, crossing.host);
        }
        if integers {
            let (outer, groups) = (&x.shape()[..x.rank() - 1], x.cols() / Quantize::GROUP);
            let q = step.crossing("quantised input on the host", QuantType::I8, x.shape())?;
            let shape = [outer, &[groups, 2]].concat();
            let scales = step.crossing("scales of the input on the host", QuantType::F32, &shape)?;
            input.written.codes = Some(Codes { q: q.device, scales: scales.device });
            input.read.codes = Some(Codes { q: q.host, scales: scales.host });
        }
        Ok(input)
    }

    /// Appends what makes the input of floats that are there already.
    pub(super) fn fill(&self, step: &mut Step<'_>, x: &TensorView) -> Result<()> {
        if self.floats_read && self.floats != *x {
            step.push(Copy { src: x.clone(), dst: self.floats.clone() })?;
        }
        self.quantize(step, x)
    }

    fn quantize(&self, step: &mut Step<'_>, x: &TensorView) -> Result<()> {
        let Some(Codes { q, scales }) = &self.codes else { return Ok(()) };
        let (rows, cols) = (x.rows(), x.cols());
        let scales = scales.reshape(&[rows, cols / Quantize::GROUP, 2])?;
        step.push(Quantize { x: x.reshape(&[rows, cols])?, q: q.reshape(&[rows, cols])?, scales })
    }

    /// The codes, if anybody reads them.
    pub(super) fn codes(&self) -> Option<&Codes> {
        self.codes.as_ref()
    }

    /// Appends a norm that writes the input.
    pub(super) fn norm(&self, step: &mut Step<'_>, norm: RmsNorm) -> Result<()> {
        step.push(RmsNorm { out: self.out(), codes: self.codes.clone(), ..norm })
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
    pub(super) fn out(&self) -> Option<TensorView> {
        Some(self.floats.clone()).filter(|_| self.floats_read)
    }

    /// Appends `y = w x`.
    pub(super) fn times(&self, step: &mut Step<'_>, w: &TensorView, y: &TensorView) -> Result<()> {
        if is_on_host(w) && !step.is_on_host() {
            return self.on_host(step, w, y, None, |x, step, _, y| x.times(step, w, y));
        }
        let (w, y) = (w.clone(), y.clone());
        match self.codes.clone().filter(|_| in_blocks(&w)) {
            Some(Codes { q, scales }) => step.push(MatMul::quantized(w, q, scales, y)),
            None => step.push(MatMul::new(w, self.floats.clone(), y)),
        }
    }

    /// Appends the products with the experts that `ids` names, in `w` or behind it in `more`.
    pub(super) fn times_experts(
        &self,
        step: &mut Step<'_>,
        w: &TensorView,
        more: Option<&TensorView>,
        ids: &TensorView,
        y: &TensorView,
    ) -> Result<()> {
        if is_on_host(w) && !step.is_on_host() {
            return self.on_host(step, w, y, Some(ids), |x, step, ids, y| match ids {
                Some(ids) => x.times_experts(step, w, None, ids, y),
                None => Ok(()),
            });
        }
        let (w, ids, y) = (w.clone(), ids.clone(), y.clone());
        let product = match self.codes.clone().filter(|_| in_blocks(&w)) {
            Some(Codes { q, scales }) => ExpertMatMul::quantized(w, q, scales, ids, y),
            None => ExpertMatMul::new(w, self.floats.clone(), ids, y),
        };
        step.push(ExpertMatMul { more: more.cloned(), ..product })
    }

    /// One product on the host: what it takes crosses, and the result comes back.
    fn on_host(
        &self,
        step: &mut Step<'_>,
        w: &TensorView,
        y: &TensorView,
        ids: Option<&TensorView>,
        product: impl FnOnce(&Self, &mut Step<'_>, Option<&TensorView>, &TensorView) -> Result<()>,
    ) -> Result<()> {
        let CrossingInput { written, read: x } = Self::crossing(step, &self.floats, [w])?;
        written.fill(step, &self.floats)?;
        let ids = match ids {
            Some(ids) => {
                let there = step.crossing("expert ids on the host", ids.ty(), ids.shape())?;
                step.push(Copy { src: ids.clone(), dst: there.device })?;
                Some(there.host)
            }
            None => None,
        };
        let out = step.crossing("product of the host", y.ty(), y.shape())?;
        let asked = step.on_host(|step| product(&x, step, ids.as_ref(), &out.host))?;
        step.wait(asked)?;
        step.push(Copy { src: out.device, dst: y.clone() })
    }
}

/// An input that the device writes and the host reads.
#[derive(Debug)]
pub(super) struct CrossingInput {
    /// For the ops that write it.
    pub(super) written: Input,
    /// For the products.
    pub(super) read: Input,
}

/// Appends `out = scale * table[ids]`, where the table is.
pub(super) fn get_rows(
    step: &mut Step<'_>,
    table: &TensorView,
    ids: &TensorView,
    out: &TensorView,
    scale: f32,
) -> Result<()> {
    let rows = |ids, out| GetRows { table: table.clone(), ids, out, scale };
    if !is_on_host(table) || step.is_on_host() {
        return step.push(rows(ids.clone(), out.clone()));
    }
    let there = step.crossing("token ids on the host", ids.ty(), ids.shape())?;
    step.push(Copy { src: ids.clone(), dst: there.device })?;
    let made = step.crossing("rows of the host", out.ty(), out.shape())?;
    let asked = step.on_host(|step| step.push(rows(there.host, made.host)))?;
    step.wait(asked)?;
    step.push(Copy { src: made.device, dst: out.clone() })
}

/// Appends `y[t, h] = w[h] x[t, h]`, where the weights are.
pub(super) fn times_heads(step: &mut Step<'_>, x: &TensorView, w: &TensorView, y: &TensorView) -> Result<()> {
    let product = |x, y| HeadMatMul { w: w.clone(), x, y };
    if !is_on_host(w) || step.is_on_host() {
        return step.push(product(x.clone(), y.clone()));
    }
    let there = step.crossing("input of heads on the host", x.ty(), x.shape())?;
    step.push(Copy { src: x.clone(), dst: there.device })?;
    let made = step.crossing("product of heads of the host", y.ty(), y.shape())?;
    let asked = step.on_host(|step| step.push(product(there.host, made.host)))?;
    step.wait(asked)?;
    step.push(Copy { src: made.device, dst: y.clone() })
}

/// Whether a tensor is on the host.
pub(super) fn is_on_host(w: &TensorView) -> bool {
    w.root().device == HOST
}

/// Whether a weight takes integers.
fn in_blocks(w: &TensorView) -> bool {
    w.ty().block_size() > 1
}
