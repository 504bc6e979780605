//! Attention over a compressed cache (multi-head latent attention, DeepSeek-V2: arXiv 2405.04434), in its absorbed form.
//!
//! A token leaves one row for all heads: `R` normed elements, from which keys and values of each head could be made, and `dr`
//! rotated ones that all keys share. No key or value is made: a head's query goes through its key weight once, into the space of
//! the rows; scores are products with whole rows; the weighted sum of their first `R` elements goes through the head's value
//! weight. So the cache is one key head of `R + dr` elements, and its values are the first part of it.

use evergraph_kernels::ops::{LatentHeads, RmsNorm, TensorView, Yarn};

use super::attention::AttentionPart;
use super::block::{Shared, fitted};
use super::input::{Input, times_heads};
use super::kv::LayerCache;
use crate::engine::Step;
use crate::error::{Error, Result};

/// How a block with a compressed cache makes queries, rows and outputs. In its [`AttentionPart`] `key_dim` is `R + dr`,
/// `value_dim` is `R`, `q` is `[H (nope + dr), D or Rq]` and `output` is `[D, H dv]`.
#[derive(Debug)]
pub struct Latent {
    /// Where queries come from, if not from the block's input itself: `[Rq, D]`, and a norm `[Rq]`.
    pub q_a: Option<(TensorView, TensorView)>,
    /// `[R + dr, D]`.
    pub kv_a: TensorView,
    /// `[R]`.
    pub kv_norm: TensorView,
    /// Keys of each head, `[H, R, nope]`.
    pub k_b: TensorView,
    /// Values of each head, `[H, dv, R]`.
    pub v_b: TensorView,
    /// Blending of frequencies.
    pub yarn: Option<Yarn>,
    /// Factor of what is rotated.
    pub magnitude: f32,
}

/// Room that blocks with a compressed cache use one after the other, `[T, …]` each.
#[derive(Debug)]
pub(super) struct LatentScratch {
    /// Queries before their second product, in models with one.
    a: Option<TensorView>,
    q: TensorView,
    kv: TensorView,
    values: TensorView,
}

impl LatentScratch {
    /// Room for any of these; none where none has such a cache.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        parts: impl Iterator<Item = &'a AttentionPart> + Clone,
        tokens: usize,
    ) -> Result<Option<Self>> {
        let parts = parts.filter_map(|part| Some((part, part.latent()?)));
        let most = |of: &dyn Fn(&AttentionPart) -> usize| parts.clone().map(|(part, _)| of(part)).max();
        let Some(q) = most(&|part| part.q.dim(0)) else { return Ok(None) };
        let a = parts.clone().filter_map(|(_, latent)| Some(latent.q_a.as_ref()?.0.dim(0))).max();
        let mut floats = |name, width| step.floats(name, &[tokens, width]);
        Ok(Some(Self {
            a: a.map(|a| floats("compressed queries", a)).transpose()?,
            q: floats("queries", q)?,
            kv: floats("latent rows", most(&|part| part.key_dim).unwrap_or(1))?,
            values: floats("values of heads", most(&|part| part.output.cols()).unwrap_or(1))?,
        }))
    }
}

impl Latent {
    /// The weight that queries begin with.
    pub(super) fn first<'a>(&'a self, part: &'a AttentionPart) -> &'a TensorView {
        self.q_a.as_ref().map_or(&part.q, |(weight, _)| weight)
    }

    /// The weights of products that come after those with the block's input, but for the output's.
    pub(super) fn products<'a>(&'a self, part: &'a AttentionPart) -> impl Iterator<Item = &'a TensorView> {
        self.q_a.iter().map(|_| &part.q).chain([&self.k_b, &self.v_b])
    }

    /// What attention adds for the normed input `x`, into `shared.y`.
    pub(super) fn forward(
        &self,
        part: &AttentionPart,
        step: &mut Step<'_>,
        shared: &Shared,
        x: &Input,
        cache: &LayerCache,
    ) -> Result<()> {
        let lost = || Error::CheckFailed("a step without room for compressed rows".to_owned());
        let scratch = shared.latent.as_ref().ok_or_else(lost)?;
        let (tokens, room) = (shared.positions.dim(0), shared.place(0).room.as_ref());
        let (heads, rank, turned) = (part.heads, part.value_dim, part.rotation.dims);
        let q = fitted(&scratch.q, tokens, part.q.dim(0))?;
        let kv = fitted(&scratch.kv, tokens, part.key_dim)?;
        x.times(step, &self.kv_a, &kv)?;
        match &self.q_a {
            None => x.times(step, &part.q, &q)?,
            Some((weight, norm)) => {
                let a = fitted(scratch.a.as_ref().ok_or_else(lost)?, tokens, weight.dim(0))?;
                x.times(step, weight, &a)?;
                // The block's input is done with: its room is free.
                let normed = Input::unwritten(room, &a, [&part.q], false)?;
                normed.norm(step, RmsNorm::new(a.clone(), norm.clone(), a, shared.eps))?;
                normed.times(step, &part.q, &q)?;
            }
        }
        let q = q.heads(heads)?;
        let own = q.dim(2) - turned;
        let absorbed = fitted(&shared.q, tokens, heads * part.key_dim)?.heads(heads)?;
        // Floats on both sides of attention: these products are small, and all that is cached goes through them.
        times_heads(step, &q.narrow(2, 0, own)?, &self.k_b, &absorbed.narrow(2, 0, rank)?)?;
        step.push(LatentHeads {
            q: q.narrow(2, own, turned)?,
            out: absorbed.narrow(2, rank, turned)?,
            kv,
            norm: self.kv_norm.clone(),
            positions: shared.positions.clone(),
            cache: cache.k.reshape(&[cache.k.dim(0), part.key_dim])?,
            eps: shared.eps,
            base: part.rotation.base,
            scale: part.rotation.scale,
            yarn: self.yarn,
            magnitude: self.magnitude,
        })?;
        let a = fitted(&shared.a, tokens, heads * rank)?.heads(heads)?;
        part.attend(step, shared, absorbed, cache, a.clone(), None)?;
        let values = fitted(&scratch.values, tokens, part.output.cols())?;
        times_heads(step, &a, &self.v_b, &values.heads(heads)?)?;
        Input::new(step, room, &values, [&part.output])?.times(step, &part.output, &shared.y)
    }
}
