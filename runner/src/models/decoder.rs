//! A stack of blocks between an embedding and an output matrix.

use evergraph_kernels::ops::{Copy, GetRows, RmsNorm, Softcap, TensorView};
use evergraph_pool::{Tracked, Use};

use super::block::{Block, Shared};
use super::input::{Input, Room};
use super::kv::KvCache;
use super::layer_input::LayerInputs;
use super::weights::Weights;
use crate::engine::Step;
use crate::error::Result;

/// A model that reads tokens one after the other.
#[derive(Debug)]
pub struct Decoder {
    /// The weights that all views below look into.
    pub weights: Weights,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of tokens.
    pub vocabulary: usize,
    /// Longest sequence that the model was made for, tokens.
    pub context: usize,
    /// Added to mean squares.
    pub eps: f32,
    /// `[V, D]`.
    pub embedding: TensorView,
    /// Factor of embedded tokens.
    pub embedding_scale: f32,
    /// Where each block's own input comes from, in models that have such.
    pub layer_inputs: Option<LayerInputs>,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// Norm after the last block, `[D]`.
    pub output_norm: TensorView,
    /// `[V, D]`.
    pub output: TensorView,
    /// `c * tanh(logits / c)`.
    pub softcap: Option<f32>,
}

/// Copies of what lies between the blocks, for tests and debugging.
#[derive(Debug)]
pub struct Taps {
    /// `[T, D]` after each block, and after the last norm.
    pub outputs: Vec<TensorView>,
}

impl Decoder {
    /// What a step of this model depends on, besides its sequence.
    pub fn uses(&self) -> Vec<(&dyn Tracked, Use)> {
        self.weights.uses()
    }

    /// Tokens `ids` (`[T]`) at `positions` (`[T]`) to the normed output of the last block, in `out` (`[T, D]`).
    ///
    /// # Errors
    /// Those of the pool and of ops.
    pub fn forward(
        &self,
        step: &mut Step<'_>,
        ids: &TensorView,
        positions: &TensorView,
        cache: &KvCache,
        out: &TensorView,
        taps: Option<&Taps>,
    ) -> Result<()> {
        let tokens = ids.dim(0);
        let h = step.floats("residual", &[tokens, self.width])?;
        step.push(GetRows {
            table: self.embedding.clone(),
            ids: ids.clone(),
            out: h.clone(),
            scale: self.embedding_scale,
        })?;
        let inputs = match &self.layer_inputs {
            Some(inputs) => Some((inputs.forward(step, ids, &h, self.eps)?, inputs.width)),
            None => None,
        };
        let shared = Shared::new(step, &self.blocks, positions, self.width, self.eps)?;
        for (index, (block, layer)) in self.blocks.iter().zip(cache.layers()).enumerate() {
            let input = match &inputs {
                Some((inputs, width)) => Some(inputs.narrow(1, index * width, *width)?),
                None => None,
            };
            block.forward(step, &shared, &h, input.as_ref(), layer)?;
            tap(step, taps, index, &h)?;
        }
        step.push(RmsNorm::new(h, self.output_norm.clone(), out.clone(), self.eps))?;
        tap(step, taps, self.blocks.len(), out)
    }

    /// Normed outputs (`[R, D]`) to logits (`[R, V]`).
    ///
    /// # Errors
    /// Those of ops.
    pub fn head(&self, step: &mut Step<'_>, hidden: &TensorView, logits: &TensorView) -> Result<()> {
        let room = Room::new(step, hidden.len(), [&self.output])?;
        Input::new(step, room.as_ref(), hidden, [&self.output])?.times(step, &self.output, logits)?;
        match self.softcap {
            Some(cap) => step.push(Softcap { x: logits.clone(), out: logits.clone(), cap }),
            None => Ok(()),
        }
    }
}

fn tap(step: &mut Step<'_>, taps: Option<&Taps>, index: usize, from: &TensorView) -> Result<()> {
    match taps.and_then(|taps| taps.outputs.get(index)) {
        Some(to) => step.push(Copy { src: from.clone(), dst: to.narrow(0, 0, from.dim(0))? }),
        None => Ok(()),
    }
}
