//! Gemma 3, and its like with experts.
//!
//! Five local layers to one global one by default, grouped attention with normed heads, norms before and
//! after each part, a gated feed-forward part, tied embeddings. Where a file has `expert_count`, its blocks
//! have a router and experts in place of the dense feed-forward part (that is how the demo's model is made).

use std::sync::Arc;

use evergraph_kernels::ops::{Activation, TensorView};

use super::attention::{AttentionPart, KeyValue, OwnKeyValue, Rotation};
use super::block::Block;
use super::decoder::Decoder;
use super::experts::{Choice, Experts, GateUp};
use super::feed_forward::{Branch, Dense, FeedForward};
use super::keys::{self, Keys};
use super::weights::{Weights, missing};
use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::placement::Placement;

/// The numbers in a file's metadata.
#[derive(Debug, PartialEq)]
struct Shape {
    blocks: usize,
    width: usize,
    context: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    eps: f32,
    rope_base: f32,
    rope_base_local: f32,
    rope_scale: f32,
    window: Option<u32>,
    local: Vec<bool>,
    softcap: Option<f32>,
    experts: Option<(usize, usize)>,
    vocabulary: usize,
}

impl Shape {
    fn read(file: &Gguf) -> Result<Self> {
        let keys = Keys::new(file)?;
        let blocks = keys.size("block_count", keys::MOST_BLOCKS)?;
        let width = keys.size("embedding_length", keys::MOST_WIDTH)?;
        let heads = keys.size("attention.head_count", keys::MOST_HEADS)?;
        let kv_heads = keys.size("attention.head_count_kv", keys::MOST_HEADS)?;
        keys::check_heads(keys.name("attention.head_count_kv"), heads, kv_heads)?;
        let key_dim = keys.size("attention.key_length", keys::MOST_HEAD_DIM)?;
        if !key_dim.is_multiple_of(2) {
            return Err(Error::metadata(keys.name("attention.key_length"), "an even number", key_dim));
        }
        let experts = keys.experts()?;
        let hidden = if experts.is_some() { "expert_feed_forward_length" } else { "feed_forward_length" };
        Ok(Self {
            blocks,
            width,
            context: keys.size("context_length", i32::MAX as u64)?,
            hidden: keys.size(hidden, keys::MOST_WIDTH)?,
            heads,
            kv_heads,
            key_dim,
            value_dim: keys.size("attention.value_length", keys::MOST_HEAD_DIM)?,
            eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            rope_base: keys.positive("rope.freq_base", Some(1e6))?,
            rope_base_local: keys.positive("rope.freq_base_swa", Some(1e4))?,
            rope_scale: rope_scale(&keys)?,
            window: keys.window()?,
            local: keys.local_blocks(blocks, Some(6))?,
            softcap: keys.positive_or_none("final_logit_softcapping")?,
            experts,
            vocabulary: keys.vocabulary(width)?,
        })
    }

    /// Factor of the attention scores. The 27B model, told by its 62 blocks, uses its width instead of the
    /// head's.
    fn attention_scale(&self) -> f32 {
        let per_head = if self.blocks == 62 { self.width / self.heads } else { self.key_dim };
        1.0 / (per_head.max(1) as f32).sqrt()
    }
}

/// Factor of the global layers' rotation angles.
fn rope_scale(keys: &Keys<'_>) -> Result<f32> {
    match keys.text("rope.scaling.type")? {
        None | Some("none") => Ok(1.0),
        Some("linear") => Ok(1.0 / keys.positive("rope.scaling.factor", Some(1.0))?),
        Some(other) => Err(Error::Unsupported {
            what: "this kind of position scaling for gemma3",
            found: other.to_owned(),
            advice: "a file with linear scaling or none".to_owned(),
        }),
    }
}

/// Builds the model of a file on a device.
///
/// # Errors
/// [`Error::Metadata`], [`Error::Tensor`] or [`Error::Unsupported`] for a file that does not hold together;
/// those of the pool.
pub(super) fn load(file: Arc<Gguf>, runtime: &Runtime, placement: &Placement) -> Result<Decoder> {
    let shape = Shape::read(&file)?;
    let weights = Weights::load(file, runtime, placement, shape.blocks)?;
    let embedding = weights.get("token_embd.weight", &[shape.vocabulary, shape.width])?;
    let output = weights.find("output.weight", &[shape.vocabulary, shape.width])?.unwrap_or_else(|| embedding.clone());
    let blocks = (0..shape.blocks).map(|index| block(&weights, &shape, index)).collect::<Result<_>>()?;
    Ok(Decoder {
        width: shape.width,
        vocabulary: shape.vocabulary,
        context: shape.context,
        eps: shape.eps,
        embedding,
        embedding_scale: (shape.width as f32).sqrt(),
        layer_inputs: None,
        blocks,
        output_norm: weights.vector("output_norm.weight", shape.width)?,
        output,
        softcap: shape.softcap,
        streams: None,
        weights,
    })
}

fn block(weights: &Weights, shape: &Shape, index: usize) -> Result<Block> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let width = shape.width;
    let norm = |part: &str| weights.vector(&name(part), width);
    let local = shape.window.is_some() && shape.local.get(index).copied().unwrap_or(false);
    let rows = [shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim];
    let [q, k, v] = weights.projections(&name, rows, width)?;
    let there = |part: &str, view: Option<TensorView>| view.ok_or_else(|| missing(&name(part)));
    Ok(Block {
        home: weights.block_home(index),
        device: weights.block_device(index),
        attn_norm: norm("attn_norm")?,
        attention: AttentionPart {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            window: if local { shape.window } else { None },
            rotation: Rotation {
                dims: shape.key_dim,
                base: if local { shape.rope_base_local } else { shape.rope_base },
                scale: if local { 1.0 } else { shape.rope_scale },
                factors: None,
            },
            scale: shape.attention_scale(),
            q: there("attn_q", q)?,
            q_norm: Some(weights.vector(&name("attn_q_norm"), shape.key_dim)?),
            kv: KeyValue::Own(Box::new(OwnKeyValue {
                k: there("attn_k", k)?,
                v: Some(there("attn_v", v)?),
                k_norm: weights.vector(&name("attn_k_norm"), shape.key_dim)?,
                norm_values: false,
            })),
            output: weights.get(&name("attn_output"), &[width, shape.heads * shape.value_dim])?,
        },
        post_attn_norm: Some(norm("post_attention_norm")?),
        branches: vec![Branch { norm: norm("ffn_norm")?, part: feed_forward(weights, shape, &name)?, post_norm: None }],
        post_ffn_norm: Some(norm("post_ffw_norm")?),
        input: None,
        gain: 1.0,
    })
}

fn feed_forward(weights: &Weights, shape: &Shape, name: &dyn Fn(&str) -> String) -> Result<FeedForward> {
    let (width, hidden, activation) = (shape.width, shape.hidden, Activation::GeluTanh);
    let Some((experts, used)) = shape.experts else {
        return Ok(FeedForward::Dense(Box::new(Dense::load(weights, name, [hidden, width], activation)?)));
    };
    Ok(FeedForward::Experts(Box::new(Experts {
        router: weights.get(&name("ffn_gate_inp"), &[experts, width])?,
        router_norm: None,
        gate_up: GateUp::load(weights, name, [experts, hidden, width])?,
        down: weights.get(&name("ffn_down_exps"), &[experts, width, hidden])?,
        down_scale: None,
        device_scale: None,
        on_bus: None,
        used,
        activation,
        limit: None,
        choice: Choice::softmax(),
    })))
}
