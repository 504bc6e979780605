//! Gemma 4 in its three shapes: with experts beside a dense part, dense, and with per-layer embeddings and shared keys
//! and values.
//!
//! Like Gemma 3, but that the head's size, the number of key heads and the width of the feed-forward part go by the
//! block; global blocks may take their values from the keys and rotate a part of each head only; values are normed;
//! scores are not scaled; each block scales its output.

use std::sync::Arc;

use evergraph_kernels::ops::{Activation, TensorView};

use super::attention::{AttentionPart, KeyValue, OwnKeyValue, Rotation};
use super::block::Block;
use super::decoder::Decoder;
use super::experts::{Choice, Experts, GateUp, OnBus};
use super::feed_forward::{Branch, Dense, FeedForward};
use super::input::is_on_host;
use super::keys::{self, Keys};
use super::layer_input::{LayerInput, LayerInputs};
use super::weights::{Weights, missing};
use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::placement::{Home, Placement};

/// The numbers in a file's metadata.
#[derive(Debug, PartialEq)]
struct Shape {
    width: usize,
    context: usize,
    eps: f32,
    window: Option<u32>,
    softcap: Option<f32>,
    /// Width of a block's own input; 0 where there is none.
    input: usize,
    experts: Option<ExpertShape>,
    global: HeadShape,
    local: HeadShape,
    layers: Vec<Layer>,
    vocabulary: usize,
}

/// Heads of blocks of one kind.
#[derive(Debug, PartialEq)]
struct HeadShape {
    key_dim: usize,
    value_dim: usize,
    rotated: usize,
    rope_base: f32,
}

#[derive(Debug, PartialEq)]
struct ExpertShape {
    count: usize,
    used: usize,
    hidden: usize,
}

/// What goes by the block.
#[derive(Debug, PartialEq)]
struct Layer {
    local: bool,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    /// The block whose keys and values it uses.
    source: Option<usize>,
}

impl Shape {
    fn read(file: &Gguf) -> Result<Self> {
        let keys = Keys::new(file)?;
        let blocks = keys.size("block_count", keys::MOST_BLOCKS)?;
        let width = keys.size("embedding_length", keys::MOST_WIDTH)?;
        let experts = match keys.experts()? {
            None => None,
            Some((count, used)) => {
                Some(ExpertShape { count, used, hidden: keys.size("expert_feed_forward_length", keys::MOST_WIDTH)? })
            }
        };
        let global = HeadShape::read(&keys, "", None)?;
        let local = HeadShape::read(&keys, "_swa", Some(&global))?;
        Ok(Self {
            width,
            context: keys.size("context_length", i32::MAX as u64)?,
            eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            window: keys.window()?,
            softcap: keys.positive_or_none("final_logit_softcapping")?,
            input: keys.count("embedding_length_per_layer_input", keys::MOST_WIDTH)?,
            experts,
            global,
            local,
            layers: layers(&keys, blocks)?,
            vocabulary: keys.vocabulary(width)?,
        })
    }

    fn heads(&self, layer: &Layer) -> &HeadShape {
        if layer.local { &self.local } else { &self.global }
    }
}

impl HeadShape {
    /// Of blocks whose keys end in `suffix`; what a file does not say is as in `default`.
    fn read(keys: &Keys<'_>, suffix: &str, default: Option<&Self>) -> Result<Self> {
        let dim = |key: &str, default: Option<usize>| {
            let key = format!("attention.{key}{suffix}");
            match default {
                Some(default) => keys.size_or(&key, keys::MOST_HEAD_DIM, default),
                None => keys.size(&key, keys::MOST_HEAD_DIM),
            }
        };
        let key_dim = dim("key_length", default.map(|heads| heads.key_dim))?;
        let value_dim = dim("value_length", default.map(|heads| heads.value_dim))?;
        let rotated = keys.size_or(&format!("rope.dimension_count{suffix}"), key_dim as u64, key_dim)?;
        if !rotated.is_multiple_of(2) {
            return Err(Error::metadata(
                keys.name(&format!("rope.dimension_count{suffix}")),
                "an even number",
                rotated,
            ));
        }
        let rope_base =
            keys.positive(&format!("rope.freq_base{suffix}"), Some(if suffix.is_empty() { 1e6 } else { 1e4 }))?;
        Ok(Self { key_dim, value_dim, rotated, rope_base })
    }
}

fn layers(keys: &Keys<'_>, blocks: usize) -> Result<Vec<Layer>> {
    let local = keys.local_blocks(blocks, None)?;
    let heads = keys.sizes("attention.head_count", blocks, keys::MOST_HEADS)?;
    let kv_heads = keys.sizes("attention.head_count_kv", blocks, keys::MOST_HEADS)?;
    let hidden = keys.sizes("feed_forward_length", blocks, keys::MOST_WIDTH)?;
    let sharing = "attention.shared_kv_layers";
    let own = blocks - keys.count(sharing, blocks as u64 - 1)?;
    (0..blocks)
        .map(|index| {
            let local_here = local[index];
            // The last block of the same kind that has keys and values of its own.
            let last = || (0..own).rev().find(|&source| local[source] == local_here);
            let source = match index < own {
                true => None,
                false => Some(last().ok_or_else(|| {
                    let kind = if local_here { "local" } else { "global" };
                    let expected = format!("a {kind} block before block {own}, for block {index} to share with");
                    Error::metadata(keys.name(sharing), expected, "none")
                })?),
            };
            let kv_heads = kv_heads[source.unwrap_or(index)];
            keys::check_heads(keys.name("attention.head_count_kv"), heads[index], kv_heads)?;
            Ok(Layer { local: local_here, heads: heads[index], kv_heads, hidden: hidden[index], source })
        })
        .collect()
}

/// Builds the model of a file on a device.
///
/// # Errors
/// [`Error::Metadata`], [`Error::Tensor`] or [`Error::Unsupported`] for a file that does not hold together;
/// those of the pool.
pub(super) fn load(file: Arc<Gguf>, runtime: &Runtime, placement: &Placement) -> Result<Decoder> {
    let shape = Shape::read(&file)?;
    let follows = |(block, layer): (usize, &Layer)| Some((block, layer.source?));
    let follows = shape.layers.iter().enumerate().filter_map(follows).collect();
    let placement = Placement { follows, ..placement.clone() };
    let weights = Weights::load(file, runtime, &placement, shape.layers.len())?;
    let (width, vocabulary) = (shape.width, shape.vocabulary);
    let embedding = weights.get("token_embd.weight", &[vocabulary, width])?;
    let output = weights.find("output.weight", &[vocabulary, width])?.unwrap_or_else(|| embedding.clone());
    let build = |(index, layer)| block(&weights, &shape, index, layer);
    let blocks = shape.layers.iter().enumerate().map(build).collect::<Result<_>>()?;
    Ok(Decoder {
        width,
        vocabulary,
        context: shape.context,
        eps: shape.eps,
        embedding,
        embedding_scale: (width as f32).sqrt(),
        layer_inputs: layer_inputs(&weights, &shape)?,
        blocks,
        output_norm: weights.vector("output_norm.weight", width)?,
        output,
        softcap: shape.softcap,
        streams: None,
        weights,
    })
}

fn layer_inputs(weights: &Weights, shape: &Shape) -> Result<Option<LayerInputs>> {
    if shape.input == 0 {
        return Ok(None);
    }
    // Both are bounded, so the product is far below 2^63.
    let all = shape.layers.len() * shape.input;
    Ok(Some(LayerInputs {
        width: shape.input,
        table: weights.get("per_layer_token_embd.weight", &[shape.vocabulary, all])?,
        projection: weights.get("per_layer_model_proj.weight", &[all, shape.width])?,
        norm: weights.vector("per_layer_proj_norm.weight", shape.input)?,
    }))
}

fn block(weights: &Weights, shape: &Shape, index: usize, layer: &Layer) -> Result<Block> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let (width, input) = (shape.width, shape.input);
    let norm = |part: &str| weights.vector(&name(part), width);
    let input = match input {
        0 => None,
        _ => Some(LayerInput {
            gate: weights.get(&name("inp_gate"), &[input, width])?,
            projection: weights.get(&name("proj"), &[width, input])?,
            post_norm: norm("post_norm")?,
        }),
    };
    let home = weights.block_home(index);
    let factors = match layer.local {
        true => None,
        false => Some(weights.vector_of_block(index, "rope_freqs.weight", shape.global.rotated / 2)?),
    };
    Ok(Block {
        home,
        device: weights.block_device(index),
        attn_norm: norm("attn_norm")?,
        attention: attention(weights, shape, layer, &name, factors)?,
        post_attn_norm: Some(norm("post_attention_norm")?),
        branches: branches(weights, shape, index, layer)?,
        post_ffn_norm: Some(norm("post_ffw_norm")?),
        input,
        gain: weights.find_number(&name("layer_output_scale"))?.unwrap_or(1.0),
    })
}

fn attention(
    weights: &Weights,
    shape: &Shape,
    layer: &Layer,
    name: &dyn Fn(&str) -> String,
    factors: Option<TensorView>,
) -> Result<AttentionPart> {
    let &Layer { local, heads, kv_heads, .. } = layer;
    let &HeadShape { key_dim, value_dim, rotated, rope_base } = shape.heads(layer);
    let rows = [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim];
    let [q, k, v] = weights.projections(name, rows, shape.width)?;
    let kv = match layer.source {
        // Some files have the tensors all the same.
        Some(source) => KeyValue::Of(source),
        None => {
            if v.is_none() && value_dim != key_dim {
                let found = format!("none, with values of {value_dim} elements and keys of {key_dim}");
                return Err(Error::tensor(name("attn_v"), "a tensor", found));
            }
            KeyValue::Own(Box::new(OwnKeyValue {
                k: k.ok_or_else(|| missing(&name("attn_k")))?,
                v,
                k_norm: weights.vector(&name("attn_k_norm"), key_dim)?,
                norm_values: true,
            }))
        }
    };
    Ok(AttentionPart {
        heads,
        kv_heads,
        key_dim,
        value_dim,
        window: shape.window.filter(|_| local),
        rotation: Rotation { dims: rotated, base: rope_base, scale: 1.0, factors },
        scale: 1.0,
        q: q.ok_or_else(|| missing(&name("attn_q")))?,
        q_norm: Some(weights.vector(&name("attn_q_norm"), key_dim)?),
        kv,
        output: weights.get(&name("attn_output"), &[shape.width, heads * value_dim])?,
    })
}

/// The dense part, and the experts beside it in blocks that have them.
fn branches(weights: &Weights, shape: &Shape, index: usize, layer: &Layer) -> Result<Vec<Branch>> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let (width, activation) = (shape.width, Activation::GeluTanh);
    let norm = |part: &str| weights.vector(&name(part), width);
    let mut dense = Branch {
        norm: norm("ffn_norm")?,
        part: FeedForward::Dense(Box::new(Dense::load(weights, &name, [layer.hidden, width], activation)?)),
        post_norm: None,
    };
    if !weights.has(&name("ffn_gate_inp")) && !weights.has(&name("ffn_down_exps")) {
        return Ok(vec![dense]);
    }
    let Some(ExpertShape { count, used, hidden }) = shape.experts else {
        return Err(Error::metadata("gemma4.expert_count", format!("the number of experts in block {index}"), "none"));
    };
    dense.post_norm = Some(norm("post_ffw_norm_1")?);
    let router_norm = weights.vector(&format!("blk.{index}.ffn_gate_inp.scale"), width)?;
    let down = weights.get(&name("ffn_down_exps"), &[count, width, hidden])?;
    let gate_up = GateUp::load(weights, &name, [count, hidden, width])?;
    let scale = format!("blk.{index}.ffn_down_exps.scale");
    let on_bus = OnBus::find(weights, &gate_up, &down);
    // The sum is where all products are, or with the block.
    let sum = if gate_up.is_on_host() && is_on_host(&down) { Home::Host } else { weights.block_home(index) };
    let experts = Experts {
        router: weights.get(&name("ffn_gate_inp"), &[count, width])?,
        router_norm: Some((router_norm, 1.0 / (width as f32).sqrt())),
        gate_up,
        down,
        down_scale: weights.find_vector_on(sum, &scale, count)?,
        device_scale: match weights.block_home(index) {
            Home::Device => weights.find_vector(&scale, count)?,
            Home::Host => None,
        },
        on_bus,
        used,
        activation,
        limit: None,
        choice: Choice::softmax(),
    };
    let beside = Branch {
        norm: norm("pre_ffw_norm_2")?,
        part: FeedForward::Experts(Box::new(experts)),
        post_norm: Some(norm("post_ffw_norm_2")?),
    };
    Ok(vec![dense, beside])
}
