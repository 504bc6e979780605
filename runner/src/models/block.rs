//! The parts of a transformer block, as ops on a step. Models put them together from their files.

use evergraph_kernels::ops::{
    Activation, Attention, ExpertSum, Glu, KvStore, RmsNorm, Rope, Router, Scoring, TensorView,
};
use evergraph_kernels::quant::QuantType;

use super::input::{Input, Room};
use super::kv::LayerCache;
use crate::engine::Step;
use crate::error::Result;

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
    /// Rotation base.
    pub rope_base: f32,
    /// Factor of the rotation angles.
    pub rope_scale: f32,
    /// Factor of the scores.
    pub scale: f32,
    /// `[heads * key_dim, D]`.
    pub q: TensorView,
    /// `[kv_heads * key_dim, D]`.
    pub k: TensorView,
    /// `[kv_heads * value_dim, D]`.
    pub v: TensorView,
    /// `[key_dim]`.
    pub q_norm: TensorView,
    /// `[key_dim]`.
    pub k_norm: TensorView,
    /// `[D, heads * value_dim]`.
    pub output: TensorView,
}

/// Feed-forward part.
#[derive(Debug)]
pub enum FeedForward {
    /// `down(act(gate x) * up x)`.
    Dense {
        /// `[F, D]`.
        gate: TensorView,
        /// `[F, D]`.
        up: TensorView,
        /// `[D, F]`.
        down: TensorView,
        /// The function on the gate.
        activation: Activation,
    },
    /// The same, with the weights of the experts that a router picks for each token.
    Experts {
        /// `[E, D]`.
        router: TensorView,
        /// `[E, F, D]`.
        gate: TensorView,
        /// `[E, F, D]`.
        up: TensorView,
        /// `[E, D, F]`.
        down: TensorView,
        /// Experts a token.
        used: usize,
        /// The function on the gate.
        activation: Activation,
    },
}

/// A pre- and post-normed residual block.
#[derive(Debug)]
pub struct Block {
    /// Norm before attention, `[D]`.
    pub attn_norm: TensorView,
    /// Attention.
    pub attention: AttentionPart,
    /// Norm of what attention adds, `[D]`.
    pub post_attn_norm: TensorView,
    /// Norm before the feed-forward part, `[D]`.
    pub ffn_norm: TensorView,
    /// Feed-forward part.
    pub ffn: FeedForward,
    /// Norm of what it adds, `[D]`.
    pub post_ffn_norm: TensorView,
}

/// Scratch that all blocks of a step share, one after the other.
#[derive(Debug)]
pub(super) struct Shared {
    /// `[T, D]`: the normed input of a part.
    x: TensorView,
    /// `[T, D]`: what a part adds.
    y: TensorView,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    a: TensorView,
    ffn: FfnScratch,
    /// For the input of the products at hand, where it is quantised.
    room: Option<Room>,
}

#[derive(Debug, Default)]
struct FfnScratch {
    gate: Option<TensorView>,
    up: Option<TensorView>,
    router: Option<RouterScratch>,
}

#[derive(Debug, Clone)]
struct RouterScratch {
    logits: TensorView,
    ids: TensorView,
    weights: TensorView,
    y: TensorView,
}

impl Shared {
    /// Room for any of the blocks, with `tokens` tokens.
    pub(super) fn new(step: &mut Step<'_>, blocks: &[Block], tokens: usize, width: usize) -> Result<Self> {
        let most = |of: &dyn Fn(&Block) -> usize| blocks.iter().map(of).max().unwrap_or(1).max(1);
        let part = |of: &'static dyn Fn(&AttentionPart) -> usize| most(&|block| of(&block.attention));
        let mut ffn = FfnScratch::default();
        let hidden = most(&|block| block.ffn.hidden());
        ffn.gate = Some(step.floats("ffn gate", &[tokens, hidden])?);
        ffn.up = Some(step.floats("ffn up", &[tokens, hidden])?);
        let experts = blocks.iter().find_map(|block| match &block.ffn {
            FeedForward::Experts { router, used, .. } => Some((router.dim(0), *used)),
            FeedForward::Dense { .. } => None,
        });
        if let Some((count, used)) = experts {
            ffn.router = Some(RouterScratch {
                logits: step.floats("router logits", &[tokens, count])?,
                ids: step.scratch("expert ids", QuantType::I32, &[tokens, used])?,
                weights: step.floats("expert weights", &[tokens, used])?,
                y: step.floats("expert outputs", &[tokens, used, width])?,
            });
        }
        let inputs = [width, part(&|part| part.heads * part.value_dim), hidden];
        let widest = inputs.into_iter().max().unwrap_or(width);
        let room = Room::new(step, tokens.saturating_mul(widest), blocks.iter().flat_map(Block::products))?;
        Ok(Self {
            x: step.floats("block input", &[tokens, width])?,
            y: step.floats("block output", &[tokens, width])?,
            q: step.floats("q", &[tokens, part(&|part| part.heads * part.key_dim)])?,
            k: step.floats("k", &[tokens, part(&|part| part.kv_heads * part.key_dim)])?,
            v: step.floats("v", &[tokens, part(&|part| part.kv_heads * part.value_dim)])?,
            a: step.floats("attention", &[tokens, part(&|part| part.heads * part.value_dim)])?,
            ffn,
            room,
        })
    }
}

/// The first elements of a buffer of rows, as rows of another width.
fn fitted(buffer: &TensorView, tokens: usize, width: usize) -> Result<TensorView> {
    if buffer.shape() == [tokens, width] {
        return Ok(buffer.clone());
    }
    Ok(buffer.reshape(&[buffer.len()])?.narrow(0, 0, tokens * width)?.reshape(&[tokens, width])?)
}

impl Block {
    /// The weights of its products.
    fn products(&self) -> impl Iterator<Item = &TensorView> {
        let part = &self.attention;
        [&part.q, &part.k, &part.v, &part.output].into_iter().chain(match &self.ffn {
            FeedForward::Dense { gate, up, down, .. } => [gate, up, down],
            FeedForward::Experts { gate, up, down, .. } => [gate, up, down],
        })
    }

    /// `h` (`[T, D]`) through the block, in place.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        positions: &TensorView,
        cache: &LayerCache,
        eps: f32,
    ) -> Result<()> {
        let (x, y) = (&shared.x, &shared.y);
        step.push(RmsNorm::new(h.clone(), self.attn_norm.clone(), x.clone(), eps))?;
        self.attention.forward(step, shared, positions, cache, eps)?;
        step.push(RmsNorm::add_to(h.clone(), y.clone(), self.post_attn_norm.clone(), eps))?;

        step.push(RmsNorm::new(h.clone(), self.ffn_norm.clone(), x.clone(), eps))?;
        self.ffn.forward(step, shared)?;
        step.push(RmsNorm::add_to(h.clone(), y.clone(), self.post_ffn_norm.clone(), eps))
    }
}

impl AttentionPart {
    fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        positions: &TensorView,
        cache: &LayerCache,
        eps: f32,
    ) -> Result<()> {
        let tokens = shared.x.dim(0);
        let q = fitted(&shared.q, tokens, self.heads * self.key_dim)?;
        let k = fitted(&shared.k, tokens, self.kv_heads * self.key_dim)?;
        let v = fitted(&shared.v, tokens, self.kv_heads * self.value_dim)?;
        let a = fitted(&shared.a, tokens, self.heads * self.value_dim)?;
        let x = Input::new(step, shared.room.as_ref(), &shared.x, [&self.q, &self.k, &self.v])?;
        for (w, y) in [(&self.q, &q), (&self.k, &k), (&self.v, &v)] {
            x.times(step, w, y)?;
        }
        let (q, k, v) = (q.heads(self.heads)?, k.heads(self.kv_heads)?, v.heads(self.kv_heads)?);
        for (heads, norm) in [(&q, &self.q_norm), (&k, &self.k_norm)] {
            step.push(RmsNorm::new(heads.clone(), norm.clone(), heads.clone(), eps))?;
            step.push(Rope::neox(heads.clone(), positions.clone(), self.rope_base, self.rope_scale))?;
        }
        for (src, into) in [(k, &cache.k), (v, &cache.v)] {
            step.push(KvStore { src, cache: into.clone(), positions: positions.clone(), ring: cache.ring })?;
        }
        step.push(Attention {
            q,
            k: cache.k.clone(),
            v: cache.v.clone(),
            positions: positions.clone(),
            out: a.heads(self.heads)?,
            scale: self.scale,
            window: self.window,
            softcap: None,
            sinks: None,
            ring: cache.ring,
        })?;
        Input::new(step, shared.room.as_ref(), &a, [&self.output])?.times(step, &self.output, &shared.y)
    }
}

impl FeedForward {
    /// Elements between the two products, for each token.
    fn hidden(&self) -> usize {
        match self {
            Self::Dense { gate, .. } => gate.dim(0),
            Self::Experts { gate, used, .. } => gate.dim(1) * used,
        }
    }

    fn forward(&self, step: &mut Step<'_>, shared: &Shared) -> Result<()> {
        let tokens = shared.x.dim(0);
        let (Some(gate_out), Some(up_out)) = (&shared.ffn.gate, &shared.ffn.up) else { return Ok(()) };
        let gate_out = fitted(gate_out, tokens, self.hidden())?;
        let up_out = fitted(up_out, tokens, self.hidden())?;
        let room = shared.room.as_ref();
        match self {
            Self::Dense { gate, up, down, activation } => {
                let x = Input::new(step, room, &shared.x, [gate, up])?;
                x.times(step, gate, &gate_out)?;
                x.times(step, up, &up_out)?;
                step.push(glu(&gate_out, &up_out, *activation))?;
                Input::new(step, room, &gate_out, [down])?.times(step, down, &shared.y)
            }
            Self::Experts { router, gate, up, down, used, activation } => {
                let Some(scratch) = shared.ffn.router.clone() else { return Ok(()) };
                let (gate_out, up_out) = (gate_out.heads(*used)?, up_out.heads(*used)?);
                let x = Input::new(step, room, &shared.x, [router, gate, up])?;
                x.times(step, router, &scratch.logits)?;
                step.push(Router {
                    logits: scratch.logits,
                    bias: None,
                    ids: scratch.ids.clone(),
                    weights: scratch.weights.clone(),
                    scoring: Scoring::Softmax,
                    groups: None,
                    norm: true,
                    scale: 1.0,
                })?;
                for (w, y) in [(gate, &gate_out), (up, &up_out)] {
                    x.times_experts(step, w, &scratch.ids, y)?;
                }
                step.push(glu(&gate_out, &up_out, *activation))?;
                let (ids, y) = (scratch.ids, scratch.y);
                Input::new(step, room, &gate_out, [down])?.times_experts(step, down, &ids, &y)?;
                let (weights, out) = (scratch.weights, shared.y.clone());
                step.push(ExpertSum { y, weights, expert_scale: None, residual: None, out })
            }
        }
    }
}

fn glu(gate: &TensorView, up: &TensorView, activation: Activation) -> Glu {
    Glu { gate: gate.clone(), up: up.clone(), out: gate.clone(), activation, limit: None }
}
