//! The ops of a step: the layers (the *body*) and what follows them (the *head*).
//!
//! The same code runs a decode step of one token, eagerly or inside a capture, and a chunk of a prompt. Up to
//! [`FUSED_UP_TO`] tokens of cache, attention is one kernel. Deeper caches take the way of a card without
//! flash attention: keys and values are widened to `f32`, the scores of all heads are written out, and all of that is
//! scratch from the pool, which grows with the capacity of the cache.
//!
//! Activations stay `f32`: the story is about memory, and its limits are tuned to this scratch.

use evergraph_graphcache::Scope;
use evergraph_kernels::Kernels;
use evergraph_kernels::ops::{
    Activation, Advance, Attention, AttentionScores, AttentionValues, Copy, ExpertMatMul, ExpertSum, GetRows, Glu,
    GroupRank, KvStore, MatMul, Plan, RmsNorm, Rope, Router, Sample, Scoring, SoftMax, TensorView,
};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::Faulty;
use evergraph_pool::{DeviceSlice, Element, Pool, PoolError, Purpose, Stream};

use super::model::{
    EPS, EXPERT_WIDTH, EXPERTS, EXPERTS_USED, HEAD_WIDTH, HEADS, KV_HEADS, Layer, Model, ROPE_BASE, VOCABULARY, WIDTH,
    root,
};
use super::witness::{SHARE, TAKE};
use crate::error::Result;

/// Largest capacity, in tokens, that one fused attention kernel serves.
pub(super) const FUSED_UP_TO: usize = 64;

/// What pools round sizes up to.
const BLOCK_BYTES: usize = 512;

/// Where memory comes from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room<'a> {
    pub(super) pool: &'a Pool,
    pub(super) stream: &'a Stream,
    pub(super) device: &'a Faulty,
    /// Every slice is that many times as long as what lies in it, so that the story is the same on a card whose pages
    /// are that much larger.
    pub(super) scale: usize,
}

impl Room<'_> {
    /// Elements that `len` of them take with the room behind them. Pools hand out whole blocks of 512 bytes, so these are
    /// what is scaled: the slices then lie in their pages as they would in small ones.
    fn padded<T: Element>(&self, len: usize) -> usize {
        match self.scale {
            1 => len,
            scale => (len * size_of::<T>()).next_multiple_of(BLOCK_BYTES) * scale / size_of::<T>(),
        }
    }

    pub(super) fn alloc<T: Element>(&self, len: usize, purpose: Purpose) -> Result<DeviceSlice<T>, PoolError> {
        self.pool.alloc_for(self.padded::<T>(len), purpose, self.stream)
    }

    pub(super) fn upload<T: Element>(&self, data: &[T], purpose: Purpose) -> Result<DeviceSlice<T>, PoolError> {
        let slice = self.alloc(data.len(), purpose)?;
        self.stream.upload(data, &slice)?;
        Ok(slice)
    }
}

/// Where ops run and take their scratch from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bench<'a> {
    pub(super) room: Room<'a>,
    pub(super) kernels: &'a Kernels,
    /// The run of the graph cache that this is part of, if any: its scratch becomes the graph's.
    pub(super) scope: Option<&'a Scope<'a>>,
    /// Who the scratch is for, as the witness knows it; none where graphs share it by design.
    pub(super) owner: Option<u64>,
}

/// A temporary: in the pool until it is dropped, which may be before the work that uses it has run.
struct Temporary {
    view: TensorView,
    _slice: DeviceSlice<f32>,
}

impl Bench<'_> {
    fn scratch(&self, name: &str, ty: QuantType, shape: &[usize]) -> Result<Temporary> {
        // Four bytes an element, float or integer.
        let len = shape.iter().product();
        let room = self.room;
        let slice = match self.scope {
            Some(scope) => scope.alloc::<f32>(room.padded::<f32>(len))?,
            None => room.alloc::<f32>(len, Purpose::Scratch)?,
        };
        match self.owner {
            Some(owner) => taken(room.device, &slice, owner),
            None => room.device.mark(SHARE, &[("ptr", slice.ptr().0), ("bytes", slice.bytes() as u64)]),
        }
        Ok(Temporary { view: TensorView::new(&root(name, &slice, room.pool), ty, shape)?, _slice: slice })
    }

    fn floats(&self, name: &str, shape: &[usize]) -> Result<Temporary> {
        self.scratch(name, QuantType::F32, shape)
    }

    fn launch(&self, plan: &Plan) -> Result<()> {
        Ok(plan.launch(self.kernels, self.room.stream.handle())?)
    }
}

/// Tells the witness who has a slice from now on.
pub(super) fn taken<T: Element>(device: &Faulty, slice: &DeviceSlice<T>, owner: u64) {
    device.mark(TAKE, &[("ptr", slice.ptr().0), ("bytes", slice.bytes() as u64), ("owner", owner)]);
}

/// One layer's cache.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    /// `[C, Hkv, d]` F16.
    pub(super) k: TensorView,
    /// `[C, Hkv, d]` F16.
    pub(super) v: TensorView,
}

/// Runs the layers over `T` tokens and writes the last one's hidden state.
pub(super) fn body(
    bench: Bench<'_>,
    model: &Model,
    caches: &[Cache],
    ids: &TensorView,
    positions: &TensorView,
    scores: Option<&TensorView>,
    hidden: &TensorView,
) -> Result<()> {
    let tokens = ids.dim(0);
    let h = bench.floats("h", &[tokens, WIDTH])?;
    let mut plan = Plan::new();
    let scale = (WIDTH as f32).sqrt();
    plan.push(GetRows { table: model.embedding.view.clone(), ids: ids.clone(), out: h.view.clone(), scale })?;
    bench.launch(&plan)?;
    for (layer, cache) in model.layers.iter().zip(caches) {
        attention(bench, layer, cache, &h.view, positions, scores)?;
        experts(bench, layer, &h.view)?;
    }
    let mut plan = Plan::new();
    plan.push(Copy { src: h.view.narrow(0, tokens - 1, 1)?, dst: hidden.clone() })?;
    bench.launch(&plan)
}

fn attention(
    bench: Bench<'_>,
    layer: &Layer,
    cache: &Cache,
    h: &TensorView,
    positions: &TensorView,
    scores: Option<&TensorView>,
) -> Result<()> {
    let (tokens, capacity) = (h.dim(0), cache.k.dim(0));
    let x = bench.floats("x", &[tokens, WIDTH])?;
    let q = bench.floats("q", &[tokens, HEADS * HEAD_WIDTH])?;
    let k = bench.floats("k", &[tokens, KV_HEADS * HEAD_WIDTH])?;
    let v = bench.floats("v", &[tokens, KV_HEADS * HEAD_WIDTH])?;
    let mixed = bench.floats("mixed", &[tokens, HEADS, HEAD_WIDTH])?;
    let (q_heads, k_heads, v_heads) = (q.view.heads(HEADS)?, k.view.heads(KV_HEADS)?, v.view.heads(KV_HEADS)?);
    let mut plan = Plan::new();
    plan.push(RmsNorm::new(h.clone(), layer.attn_norm.view.clone(), x.view.clone(), EPS))?;
    for (weight, y) in [(&layer.attn_q, &q), (&layer.attn_k, &k), (&layer.attn_v, &v)] {
        plan.push(MatMul::new(weight.view.clone(), x.view.clone(), y.view.clone()))?;
    }
    plan.push(Rope::neox(q_heads.clone(), positions.clone(), ROPE_BASE, 1.0))?;
    plan.push(Rope::neox(k_heads.clone(), positions.clone(), ROPE_BASE, 1.0))?;
    for (src, cache) in [(k_heads, &cache.k), (v_heads, &cache.v)] {
        plan.push(KvStore { src, cache: cache.clone(), positions: positions.clone(), ring: false })?;
    }
    bench.launch(&plan)?;

    let scale = (HEAD_WIDTH as f32).sqrt().recip();
    let mut plan = Plan::new();
    if capacity <= FUSED_UP_TO {
        plan.push(Attention {
            q: q_heads,
            k: cache.k.clone(),
            v: cache.v.clone(),
            positions: positions.clone(),
            out: mixed.view.clone(),
            scale,
            window: None,
            softcap: None,
            sinks: None,
            ring: false,
            codes: None,
            spread: None,
        })?;
        bench.launch(&plan)?;
    } else {
        let wide_k = bench.floats("wide k", &[capacity, KV_HEADS, HEAD_WIDTH])?;
        let wide_v = bench.floats("wide v", &[capacity, KV_HEADS, HEAD_WIDTH])?;
        let own;
        let scores = match scores {
            Some(workspace) => workspace.narrow(0, 0, tokens)?,
            None => {
                own = bench.floats("scores", &[tokens, HEADS, capacity])?;
                own.view.clone()
            }
        };
        plan.push(Copy { src: cache.k.clone(), dst: wide_k.view.clone() })?;
        plan.push(Copy { src: cache.v.clone(), dst: wide_v.view.clone() })?;
        plan.push(AttentionScores {
            q: q_heads,
            k: wide_k.view.clone(),
            positions: positions.clone(),
            scores: scores.clone(),
            scale,
            window: None,
            softcap: None,
            ring: false,
        })?;
        plan.push(SoftMax { x: scores.clone(), out: scores.clone() })?;
        plan.push(AttentionValues {
            p: scores,
            v: wide_v.view.clone(),
            positions: positions.clone(),
            out: mixed.view.clone(),
            window: None,
            ring: false,
        })?;
        bench.launch(&plan)?;
    }

    let mut plan = Plan::new();
    let flat = mixed.view.reshape(&[tokens, HEADS * HEAD_WIDTH])?;
    plan.push(MatMul::new(layer.attn_output.view.clone(), flat, x.view.clone()))?;
    plan.push(RmsNorm::add_to(h.clone(), x.view.clone(), layer.post_attn_norm.view.clone(), EPS))?;
    bench.launch(&plan)
}

fn experts(bench: Bench<'_>, layer: &Layer, h: &TensorView) -> Result<()> {
    let tokens = h.dim(0);
    let x = bench.floats("x", &[tokens, WIDTH])?;
    let logits = bench.floats("router logits", &[tokens, EXPERTS])?;
    let ids = bench.scratch("expert ids", QuantType::I32, &[tokens, EXPERTS_USED])?;
    let weights = bench.floats("expert weights", &[tokens, EXPERTS_USED])?;
    let gate_up = bench.floats("gate and up", &[tokens, EXPERTS_USED, 2 * EXPERT_WIDTH])?;
    let down = bench.floats("down", &[tokens, EXPERTS_USED, WIDTH])?;
    let (gate, up) = (gate_up.view.narrow(2, 0, EXPERT_WIDTH)?, gate_up.view.narrow(2, EXPERT_WIDTH, EXPERT_WIDTH)?);
    let mut plan = Plan::new();
    plan.push(RmsNorm::new(h.clone(), layer.ffn_norm.view.clone(), x.view.clone(), EPS))?;
    plan.push(MatMul::new(layer.router.view.clone(), x.view.clone(), logits.view.clone()))?;
    plan.push(Router {
        logits: logits.view.clone(),
        bias: None,
        ids: ids.view.clone(),
        weights: weights.view.clone(),
        scoring: Scoring::Softmax,
        groups: None,
        group_rank: GroupRank::default(),
        norm: true,
        scale: 1.0,
    })?;
    plan.push(ExpertMatMul::new(
        layer.experts_gate_up.view.clone(),
        x.view.clone(),
        ids.view.clone(),
        gate_up.view.clone(),
    ))?;
    plan.push(Glu::new(gate.clone(), up, gate.clone(), Activation::GeluTanh))?;
    plan.push(ExpertMatMul::new(layer.experts_down.view.clone(), gate, ids.view.clone(), down.view.clone()))?;
    plan.push(ExpertSum {
        y: down.view.clone(),
        weights: weights.view.clone(),
        expert_scale: None,
        residual: None,
        out: x.view.clone(),
    })?;
    plan.push(RmsNorm::add_to(h.clone(), x.view.clone(), layer.post_ffn_norm.view.clone(), EPS))?;
    bench.launch(&plan)
}

/// What the head reads and writes of a sequence.
#[derive(Debug, Clone)]
pub(super) struct Controls {
    /// `[1, D]` F32.
    pub(super) hidden: TensorView,
    /// One `SampleState`.
    pub(super) sampler: TensorView,
    /// `[N]` I32.
    pub(super) recent: TensorView,
    /// `[1]` I32.
    pub(super) token: TensorView,
    /// `[1]` I32.
    pub(super) position: TensorView,
}

/// Logits, the choice of the next token, and the step to the next position.
pub(super) fn head(bench: Bench<'_>, model: &Model, controls: &Controls) -> Result<()> {
    let x = bench.floats("x", &[1, WIDTH])?;
    let logits = bench.floats("logits", &[1, VOCABULARY])?;
    let mut plan = Plan::new();
    plan.push(RmsNorm::new(controls.hidden.clone(), model.output_norm.view.clone(), x.view.clone(), EPS))?;
    plan.push(MatMul::new(model.output.view.clone(), x.view.clone(), logits.view.clone()))?;
    plan.push(Sample {
        logits: logits.view.reshape(&[VOCABULARY])?,
        state: controls.sampler.clone(),
        recent: controls.recent.clone(),
        token: controls.token.clone(),
    })?;
    plan.push(Advance { positions: controls.position.clone(), by: 1 })?;
    bench.launch(&plan)
}
