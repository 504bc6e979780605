//! Per-layer embeddings: what each block gets of the token itself, beside the residual stream.

use evergraph_kernels::ops::{Activation, Glu, Part, ResidualNorm, RmsNorm, TensorView};

use super::block::{Shared, fitted};
use super::input::{Input, Room, get_rows};
use super::residual::{self, Wanted};
use crate::engine::Step;
use crate::error::Result;

/// Where the inputs of all blocks come from, once a token.
#[derive(Debug)]
pub struct LayerInputs {
    /// Elements for each block, `P`.
    pub width: usize,
    /// `[V, L P]`.
    pub table: TensorView,
    /// `[L P, D]`.
    pub projection: TensorView,
    /// `[P]`.
    pub norm: TensorView,
}

/// How a block takes its input in.
#[derive(Debug)]
pub struct LayerInput {
    /// `[P, D]`.
    pub gate: TensorView,
    /// `[D, P]`.
    pub projection: TensorView,
    /// Norm of what it adds, `[D]`.
    pub post_norm: TensorView,
}

impl LayerInputs {
    /// The inputs `[T, L P]` of tokens `ids` with embeddings `h` (`[T, D]`): the mean, scaled to keep its size, of the
    /// tokens' own rows and of what the embedding projects to.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        ids: &TensorView,
        h: &TensorView,
        eps: f32,
    ) -> Result<TensorView> {
        let (tokens, all, width) = (h.dim(0), self.table.dim(1), h.dim(1));
        let rows = step.floats("layer inputs", &[tokens, all])?;
        let projected = step.floats("projected layer inputs", &[tokens, all])?;
        let half = std::f32::consts::FRAC_1_SQRT_2;
        let scale = (self.width as f32).sqrt() * half;
        get_rows(step, &self.table, ids, &rows, scale)?;
        let room = Room::new(step, h.len(), [&self.projection])?;
        Input::new(step, room.as_ref(), h, [&self.projection])?.times(step, &self.projection, &projected)?;
        let blocks = all / self.width;
        let (heads, projected) = (rows.heads(blocks)?, projected.heads(blocks)?);
        // The projection is to be divided by sqrt(D) before its norm: that is the norm with D times the eps.
        let norm = RmsNorm::add_to(heads, projected, self.norm.clone(), eps * width as f32);
        step.push(RmsNorm { scale: half, ..norm })?;
        Ok(rows)
    }
}

impl LayerInput {
    /// The weights of its products.
    pub(super) fn products(&self) -> [&TensorView; 2] {
        [&self.gate, &self.projection]
    }

    /// The residual stream as the input of its first product, yet to be written.
    pub(super) fn gated(&self, shared: &Shared, h: &TensorView) -> Result<Input> {
        Input::unwritten(shared.place(0).room.as_ref(), h, [&self.gate], true)
    }

    /// `h = gain * (h + norm(projection(gelu(gate h) * input)))`, with `input` `[T, P]`, and what is wanted next.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: Input,
        input: &TensorView,
        gain: f32,
        next: Option<&Wanted>,
    ) -> Result<()> {
        let room = shared.place(0).room.as_ref();
        let gate = fitted(&shared.gate, input.dim(0), self.gate.dim(0))?;
        h.times(step, &self.gate, &gate)?;
        let glu = Glu::new(gate.clone(), input.clone(), gate.clone(), Activation::GeluTanh);
        let hidden = Input::unwritten(room, &gate, [&self.projection], false)?.glu(step, glu)?;
        hidden.times(step, &self.projection, &shared.y)?;
        let parts = vec![Part { x: shared.y.clone(), norm: None }];
        let (h, weight, eps) = (h.floats().clone(), self.post_norm.clone(), shared.eps);
        residual::add(step, ResidualNorm { h, parts, weight: Some(weight), gain, eps, normed: Vec::new() }, next)
    }
}
