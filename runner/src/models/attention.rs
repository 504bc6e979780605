//! Attention: projections, norms of heads, rotation, the cache.

use evergraph_kernels::ops::{
    Attention, AttentionHeads, AttentionScores, AttentionValues, Codes, NewKeys, Quantize, SoftMax, Spread, TensorView,
};

use super::block::{Shared, fitted};
use super::input::Input;
use super::kv::{KvCache, LayerCache};
use super::latent::Latent;
use crate::engine::Step;
use crate::error::{Error, Result};

/// Grouped attention with normed and rotated heads.
#[derive(Debug)]
pub struct AttentionPart {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Sliding window, tokens; none for global layers.
    pub window: Option<u32>,
    /// How queries and keys are rotated.
    pub rotation: Rotation,
    /// Factor of the scores.
    pub scale: f32,
    /// `[heads * key_dim, D]`; what it is with a compressed cache, [`Latent`] says.
    pub q: TensorView,
    /// `[key_dim]`; none with a compressed cache.
    pub q_norm: Option<TensorView>,
    /// Where keys and values come from.
    pub kv: KeyValue,
    /// `[D, heads * value_dim]`.
    pub output: TensorView,
}

/// Rotary embedding of heads, in halves (with a compressed cache, in neighbours).
#[derive(Clone, Debug)]
pub struct Rotation {
    /// The first elements of a head that are rotated.
    pub dims: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Factor of the angles.
    pub scale: f32,
    /// Divisors of the frequencies, `[dims / 2]`.
    pub factors: Option<TensorView>,
}

/// Keys and values of a block.
#[derive(Debug)]
pub enum KeyValue {
    /// Of its own.
    Own(Box<OwnKeyValue>),
    /// Those in the cache of the block of this number, which comes before.
    Of(usize),
    /// One compressed row for all heads.
    Latent(Box<Latent>),
}

/// How a block makes its keys and values.
#[derive(Debug)]
pub struct OwnKeyValue {
    /// `[kv_heads * key_dim, D]`.
    pub k: TensorView,
    /// `[kv_heads * value_dim, D]`; none where values are the keys before norm and rotation.
    pub v: Option<TensorView>,
    /// `[key_dim]`.
    pub k_norm: TensorView,
    /// Whether values are normed, without a weight.
    pub norm_values: bool,
}

/// Room for attention's scores where they are written out, which blocks use one after the other.
#[derive(Debug)]
pub(super) struct Scores {
    /// `[queries at a time, most of heads * rows]`.
    room: TensorView,
    /// Tokens that the step reaches at most.
    reach: usize,
    /// Whether all layers write them out; else those that keep the whole text, on the device.
    all: bool,
}

impl Scores {
    /// Room for the scores of `tokens` queries in any of these blocks; none where they are not written out.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        tokens: usize,
        cache: &KvCache,
        blocks: impl Iterator<Item = (usize, &'a AttentionPart)>,
    ) -> Result<Option<Self>> {
        let Some(reach) = cache.scored(tokens) else { return Ok(None) };
        let of = |(index, part): (usize, &AttentionPart)| {
            let layer = cache.layers().get(index).filter(|layer| cache.writes_scores(layer));
            part.heads.saturating_mul(layer.map_or(0, |layer| layer.scored(reach)))
        };
        let Some(most) = blocks.map(of).max().filter(|most| *most > 0) else { return Ok(None) };
        let all = cache.layers().iter().all(|layer| cache.writes_scores(layer));
        Ok(Some(Self { all, room: step.floats("attention scores", &[cache.queries_at_once(tokens), most])?, reach }))
    }

    /// The scores of so many queries and heads for the first `rows` of a cache, `[queries, heads, rows]`.
    fn of(&self, queries: usize, heads: usize, rows: usize) -> Result<TensorView> {
        Ok(self.room.narrow(0, 0, queries)?.narrow(1, 0, heads * rows)?.heads(heads)?)
    }

    /// Queries at a time.
    fn at_once(&self) -> usize {
        self.room.dim(0).max(1)
    }
}

impl AttentionPart {
    /// The weights of all its products.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        self.projections()
            .chain(self.latent().into_iter().flat_map(|latent| latent.products(self)))
            .chain([&self.output])
    }

    /// The weights of the products with its input.
    pub(super) fn projections(&self) -> impl Iterator<Item = &TensorView> {
        let (q, k, v) = match &self.kv {
            KeyValue::Own(own) => (&self.q, Some(&own.k), own.v.as_ref()),
            KeyValue::Of(_) => (&self.q, None, None),
            KeyValue::Latent(latent) => (latent.first(self), Some(&latent.kv_a), None),
        };
        [Some(q), k, v].into_iter().flatten()
    }

    /// How it goes about a compressed cache, if that is what it has.
    pub(super) fn latent(&self) -> Option<&Latent> {
        match &self.kv {
            KeyValue::Latent(latent) => Some(latent),
            KeyValue::Own(_) | KeyValue::Of(_) => None,
        }
    }

    /// Elements of what attention makes for each token, and of the widest input of a product that is not the block's own.
    pub(super) fn widest(&self) -> usize {
        let inputs = self.output.cols().max(self.latent().map_or(0, |_| self.q.cols()));
        inputs.max(self.heads * self.value_dim)
    }

    /// What attention adds for the normed input `x`, into `shared.y`.
    pub(super) fn forward(&self, step: &mut Step<'_>, shared: &Shared, x: &Input, cache: &LayerCache) -> Result<()> {
        if let Some(latent) = self.latent() {
            return latent.forward(self, step, shared, x, cache);
        }
        let (tokens, positions, eps) = (shared.positions.dim(0), &shared.positions, shared.eps);
        let Some(q_norm) = &self.q_norm else {
            return Err(Error::CheckFailed("heads of queries without a norm".to_owned()));
        };
        let q = fitted(&shared.q, tokens, self.heads * self.key_dim)?;
        x.times(step, &self.q, &q)?;
        let q = q.heads(self.heads)?;
        let new = match &self.kv {
            KeyValue::Own(own) => {
                let k = fitted(&shared.k, tokens, self.kv_heads * self.key_dim)?;
                x.times(step, &own.k, &k)?;
                let k = k.heads(self.kv_heads)?;
                let v = match &own.v {
                    Some(weight) => {
                        let v = fitted(&shared.v, tokens, self.kv_heads * self.value_dim)?;
                        x.times(step, weight, &v)?;
                        v.heads(self.kv_heads)?
                    }
                    None => k.clone(),
                };
                Some(NewKeys {
                    k,
                    k_norm: own.k_norm.clone(),
                    v,
                    norm_values: own.norm_values,
                    k_cache: cache.k.clone(),
                    v_cache: cache.v.clone(),
                    ring: cache.ring,
                })
            }
            KeyValue::Of(_) | KeyValue::Latent(_) => None,
        };
        let Rotation { dims, base, scale, factors } = &self.rotation;
        step.push(AttentionHeads {
            q: q.clone(),
            q_norm: q_norm.clone(),
            new,
            positions: positions.clone(),
            eps,
            dims: *dims,
            base: *base,
            scale: *scale,
            factors: factors.clone(),
        })?;
        let a = fitted(&shared.a, tokens, self.heads * self.value_dim)?;
        let input = Input::unwritten(shared.place(0).room.as_ref(), &a, [&self.output], true)?;
        // Groups of columns that have a scale are those of a head.
        let groups = self.value_dim / Quantize::GROUP;
        let codes = match input.codes().filter(|_| self.value_dim.is_multiple_of(Quantize::GROUP)) {
            Some(Codes { q, scales }) => {
                let scales = scales.reshape(&[tokens, self.heads, groups, 2])?;
                Some(Codes { q: q.heads(self.heads)?, scales })
            }
            None => None,
        };
        if !self.attend(step, shared, q, cache, a.heads(self.heads)?, codes)? {
            input.fill(step, &a)?;
        }
        input.times(step, &self.output, &shared.y)
    }

    /// Attention of the queries `[T, heads, key_dim]` over the cache, in one kernel or with its scores in memory. Whether the
    /// codes were written too.
    pub(super) fn attend(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        q: TensorView,
        cache: &LayerCache,
        out: TensorView,
        codes: Option<Codes>,
    ) -> Result<bool> {
        let (positions, scale, window, ring) = (shared.positions.clone(), self.scale, self.window, cache.ring);
        let (k, v, softcap) = (cache.k.clone(), cache.v.clone(), None);
        let whole = !cache.ring && cache.on_host.is_empty();
        let Some(scores) = shared.scores.as_ref().filter(|scores| scores.all || whole) else {
            let (made, spread) = (codes.is_some(), shared.spread.clone());
            step.push(Attention { q, k, v, positions, out, scale, window, softcap, sinks: None, ring, codes, spread })?;
            return Ok(made);
        };
        let rows = cache.scored(scores.reach);
        let (k, v) = (k.narrow(0, 0, rows)?, v.narrow(0, 0, rows)?);
        let tokens = q.dim(0);
        for first in (0..tokens).step_by(scores.at_once()) {
            let count = scores.at_once().min(tokens - first);
            let (q, out) = (q.narrow(0, first, count)?, out.narrow(0, first, count)?);
            let positions = positions.narrow(0, first, count)?;
            let scores = scores.of(count, self.heads, rows)?;
            let (p, k, v, places) = (scores.clone(), k.clone(), v.clone(), positions.clone());
            step.push(AttentionScores { q, k, positions, scores, scale, window, softcap, ring })?;
            step.push(SoftMax { x: p.clone(), out: p.clone() })?;
            step.push(AttentionValues { p, v, positions: places, out, window, ring })?;
        }
        Ok(false)
    }
}

/// What the attention of few tokens in any of these blocks takes to spread keys over a device; none where it does not.
pub(super) fn spread<'a>(
    step: &mut Step<'_>,
    tokens: usize,
    cache: &KvCache,
    blocks: impl Iterator<Item = (usize, &'a AttentionPart)>,
) -> Result<Option<Spread>> {
    let (mut most, mut counters) = (0, 0);
    for (index, part) in blocks {
        let (heads, kv_heads, dv) = (part.heads, part.kv_heads, part.value_dim);
        let spreads = cache.layers().get(index).is_some_and(LayerCache::spreads);
        if let Some(count) = Attention::counters(tokens, heads, kv_heads).filter(|_| spreads) {
            counters = counters.max(count);
            most = most.max(Attention::room(tokens, heads, kv_heads, dv).unwrap_or(0));
        }
    }
    let Some(counters) = step.counters(counters)? else { return Ok(None) };
    Ok(Some(Spread { room: step.floats("attention of slices", &[most])?, counters }))
}
