//! The demo's model: a small mixture of experts, made up from a seed.
//!
//! Its bones are Gemma's: RMS norms before and after each part, rotary positions, grouped heads, a gated
//! feed-forward; every layer's feed-forward is eight experts of which a token visits two. Weights are quantised as
//! in real files (`Q8_0`, `Q4_0`, `Q6_K`), the vocabulary is the 256 bytes.

use std::sync::Arc;

use evergraph_kernels::ops::{Root, TensorView};
use evergraph_kernels::quant::{QuantType, quantize};
use evergraph_pool::{DeviceSlice, Pool, Purpose};

use super::step::{Room, taken};
use super::witness::OTHERS;
use crate::error::Result;

pub(super) const VOCABULARY: usize = 256;
pub(super) const LAYERS: usize = 4;
pub(super) const WIDTH: usize = 256;
pub(super) const HEADS: usize = 8;
pub(super) const KV_HEADS: usize = 2;
pub(super) const HEAD_WIDTH: usize = 32;
pub(super) const EXPERTS: usize = 8;
pub(super) const EXPERTS_USED: usize = 2;
pub(super) const EXPERT_WIDTH: usize = 128;
pub(super) const EPS: f32 = 1e-6;
pub(super) const ROPE_BASE: f32 = 10_000.0;

/// A weight on the device: its memory, and how ops see it.
#[derive(Debug)]
pub(super) struct Weight {
    pub(super) slice: DeviceSlice<u8>,
    pub(super) view: TensorView,
}

/// One layer's weights.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: Weight,
    pub(super) attn_q: Weight,
    pub(super) attn_k: Weight,
    pub(super) attn_v: Weight,
    pub(super) attn_output: Weight,
    pub(super) post_attn_norm: Weight,
    pub(super) ffn_norm: Weight,
    pub(super) router: Weight,
    pub(super) experts_gate_up: Weight,
    pub(super) experts_down: Weight,
    pub(super) post_ffn_norm: Weight,
}

/// All weights.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: Weight,
    pub(super) output: Weight,
}

impl Model {
    /// Makes the weights up and uploads them.
    pub(super) fn generate(seed: u64, room: Room<'_>) -> Result<Self> {
        let mut forge = Forge { random: Random::new(seed), room };
        let embedding = forge.matrix("token_embd", QuantType::Q8_0, &[VOCABULARY, WIDTH], 1.0)?;
        let layers = (0..LAYERS).map(|_| forge.layer()).collect::<Result<_>>()?;
        let output_norm = forge.norm("output_norm", WIDTH)?;
        // Wide logits: a flat distribution would hide a wrong hidden state.
        let output = forge.matrix("output", QuantType::Q6_K, &[VOCABULARY, WIDTH], 3.0)?;
        Ok(Self { embedding, layers, output_norm, output })
    }

    /// Every weight that the layers read.
    pub(super) fn body_weights(&self) -> impl Iterator<Item = &Weight> {
        std::iter::once(&self.embedding).chain(self.layers.iter().flat_map(|l| {
            [
                &l.attn_norm,
                &l.attn_q,
                &l.attn_k,
                &l.attn_v,
                &l.attn_output,
                &l.post_attn_norm,
                &l.ffn_norm,
                &l.router,
                &l.experts_gate_up,
                &l.experts_down,
                &l.post_ffn_norm,
            ]
        }))
    }

    /// Every weight that the head reads.
    pub(super) fn head_weights(&self) -> impl Iterator<Item = &Weight> {
        [&self.output_norm, &self.output].into_iter()
    }

    /// Bytes of all weights.
    pub(super) fn bytes(&self) -> usize {
        self.body_weights().chain(self.head_weights()).map(|w| w.slice.bytes()).sum()
    }
}

struct Forge<'a> {
    random: Random,
    room: Room<'a>,
}

impl Forge<'_> {
    fn layer(&mut self) -> Result<Layer> {
        let (q, kv) = (HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH);
        Ok(Layer {
            attn_norm: self.norm("attn_norm", WIDTH)?,
            attn_q: self.matrix("attn_q", QuantType::Q8_0, &[q, WIDTH], 1.0)?,
            attn_k: self.matrix("attn_k", QuantType::Q8_0, &[kv, WIDTH], 1.0)?,
            attn_v: self.matrix("attn_v", QuantType::Q8_0, &[kv, WIDTH], 1.0)?,
            attn_output: self.matrix("attn_output", QuantType::Q8_0, &[WIDTH, q], 1.0)?,
            post_attn_norm: self.norm("post_attention_norm", WIDTH)?,
            ffn_norm: self.norm("ffn_norm", WIDTH)?,
            router: self.matrix("ffn_gate_inp", QuantType::F32, &[EXPERTS, WIDTH], 2.0)?,
            experts_gate_up: self.matrix(
                "ffn_gate_up_exps",
                QuantType::Q4_0,
                &[EXPERTS, 2 * EXPERT_WIDTH, WIDTH],
                1.0,
            )?,
            experts_down: self.matrix("ffn_down_exps", QuantType::Q8_0, &[EXPERTS, WIDTH, EXPERT_WIDTH], 1.0)?,
            post_ffn_norm: self.norm("post_ffw_norm", WIDTH)?,
        })
    }

    /// Normal values whose products with a normed vector have deviation `gain`.
    fn matrix(&mut self, name: &str, ty: QuantType, shape: &[usize], gain: f32) -> Result<Weight> {
        let columns = shape.last().copied().unwrap_or(1);
        let deviation = if name == "token_embd" { gain } else { gain / (columns as f32).sqrt() };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.random.normal() * deviation).collect();
        self.upload(name, ty, shape, &values)
    }

    /// Factors around 1.
    fn norm(&mut self, name: &str, width: usize) -> Result<Weight> {
        let values: Vec<f32> = (0..width).map(|_| 1.0 + 0.1 * self.random.normal()).collect();
        self.upload(name, QuantType::F32, &[width], &values)
    }

    fn upload(&mut self, name: &str, ty: QuantType, shape: &[usize], values: &[f32]) -> Result<Weight> {
        let bytes = quantize(ty, values)?;
        let slice = self.room.upload(&bytes, Purpose::Weight)?;
        taken(self.room.device, &slice, OTHERS);
        let view = TensorView::new(&root(name, &slice, self.room.pool), ty, shape)?;
        Ok(Weight { slice, view })
    }
}

/// The root of a slice, by name.
pub(super) fn root<T: evergraph_pool::Element>(name: &str, slice: &DeviceSlice<T>, pool: &Pool) -> Arc<Root> {
    Root::with_allocation(name, slice.ptr(), slice.bytes(), pool.device(), slice.allocation().get())
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// About normal: the sum of four uniforms, which is close enough for weights.
    fn normal(&mut self) -> f32 {
        let word = self.next();
        let sum: f32 = (0..4).map(|i| ((word >> (16 * i)) & 0xffff) as f32 / 65536.0).sum();
        (sum - 2.0) * 1.732_050_8
    }
}
