//! Gemma 3, and its like with experts.
//!
//! Five local layers to one global one by default, grouped attention with normed heads, norms before and
//! after each part, a gated feed-forward part, tied embeddings. Where a file has `expert_count`, its blocks
//! have a router and experts in place of the dense feed-forward part (that is how the demo's model is made).

use std::sync::Arc;

use evergraph_kernels::ops::{Activation, TensorView};

use super::block::{AttentionPart, Block, FeedForward};
use super::decoder::Decoder;
use super::weights::Weights;
use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};

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
}

impl Shape {
    fn read(file: &Gguf) -> Result<Self> {
        let arch = file.architecture()?;
        let key = |name: &str| format!("{arch}.{name}");
        let size = |name: &str, most: u64| file.require_in(&key(name), 1..=most).map(|value| value as usize);
        let positive = |name: &str, default: Option<f32>| {
            let found = file.get_f32(&key(name))?;
            match found.or(default) {
                Some(value) if value > 0.0 => Ok(value),
                _ => Err(Error::metadata(key(name), "a positive number", format!("{found:?}"))),
            }
        };
        let blocks = size("block_count", 512)?;
        let width = size("embedding_length", 1 << 20)?;
        let heads = size("attention.head_count", 1 << 12)?;
        let kv_heads = size("attention.head_count_kv", 1 << 12)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::metadata(key("attention.head_count_kv"), format!("a divisor of {heads}"), kv_heads));
        }
        let key_dim = size("attention.key_length", 1 << 14)?;
        if !key_dim.is_multiple_of(2) {
            return Err(Error::metadata(key("attention.key_length"), "an even number", key_dim));
        }
        let experts = match file.get_in(&key("expert_count"), 0..=1024)? {
            None | Some(0) => None,
            Some(count) => Some((count as usize, size("expert_used_count", count)?)),
        };
        let window = file.get_in(&key("attention.sliding_window"), 0..=i32::MAX as u64)?.unwrap_or(0) as u32;
        Ok(Self {
            blocks,
            width,
            context: size("context_length", i32::MAX as u64)?,
            hidden: size(
                if experts.is_some() { "expert_feed_forward_length" } else { "feed_forward_length" },
                1 << 20,
            )?,
            heads,
            kv_heads,
            key_dim,
            value_dim: size("attention.value_length", 1 << 14)?,
            eps: positive("attention.layer_norm_rms_epsilon", None)?,
            rope_base: positive("rope.freq_base", Some(1e6))?,
            rope_base_local: positive("rope.freq_base_swa", Some(1e4))?,
            rope_scale: rope_scale(file, &key("rope.scaling.type"), &key("rope.scaling.factor"))?,
            window: (window > 0).then_some(window),
            local: local_layers(file, &key("attention.sliding_window_pattern"), blocks)?,
            softcap: file
                .get_f32(&key("final_logit_softcapping"))?
                .map(|_| positive("final_logit_softcapping", None))
                .transpose()?,
            experts,
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
fn rope_scale(file: &Gguf, kind: &str, factor: &str) -> Result<f32> {
    match file.get_str(kind)? {
        None | Some("none") => Ok(1.0),
        Some("linear") => match file.get_f32(factor)? {
            None => Ok(1.0),
            Some(value) if value > 0.0 => Ok(1.0 / value),
            Some(value) => Err(Error::metadata(factor, "a positive number", value)),
        },
        Some(other) => Err(Error::Unsupported {
            what: "this kind of position scaling for gemma3",
            found: other.to_owned(),
            advice: "a file with linear scaling or none".to_owned(),
        }),
    }
}

/// Which layers see a sliding window only: all but every N-th, or as a list says.
fn local_layers(file: &Gguf, key: &str, blocks: usize) -> Result<Vec<bool>> {
    let expected = || format!("a period, or a list of {blocks} bools");
    match file.get(key) {
        None => Ok((0..blocks).map(|index| index % 6 < 5).collect()),
        Some(Value::Array(list)) => {
            let local: Vec<bool> = list.iter().take(blocks).filter_map(Value::as_bool).collect();
            if local.len() == blocks { Ok(local) } else { Err(Error::metadata(key, expected(), list.len())) }
        }
        Some(value) => match value.as_u64() {
            Some(period @ 1..=512) => Ok((0..blocks).map(|index| index as u64 % period < period - 1).collect()),
            _ => Err(Error::metadata(key, expected(), value)),
        },
    }
}

/// Builds the model of a file on a device.
///
/// # Errors
/// [`Error::Metadata`], [`Error::Tensor`] or [`Error::Unsupported`] for a file that does not hold together;
/// those of the pool.
pub(super) fn load(file: Arc<Gguf>, runtime: &Runtime) -> Result<Decoder> {
    let shape = Shape::read(&file)?;
    let vocabulary = vocabulary(&file, shape.width)?;
    let weights = Weights::load(file, runtime)?;
    let embedding = weights.get("token_embd.weight", &[vocabulary, shape.width])?;
    let output = weights.find("output.weight", &[vocabulary, shape.width])?.unwrap_or_else(|| embedding.clone());
    let blocks = (0..shape.blocks).map(|index| block(&weights, &shape, index)).collect::<Result<_>>()?;
    Ok(Decoder {
        width: shape.width,
        vocabulary,
        context: shape.context,
        eps: shape.eps,
        embedding,
        embedding_scale: (shape.width as f32).sqrt(),
        blocks,
        output_norm: weights.vector("output_norm.weight", shape.width)?,
        output,
        softcap: shape.softcap,
        weights,
    })
}

/// Number of tokens: the rows of the embedding, which the tokenizer must agree with.
fn vocabulary(file: &Gguf, width: usize) -> Result<usize> {
    let name = "token_embd.weight";
    let tensor =
        file.tensor(name).ok_or_else(|| Error::tensor(name, format!("shape [V, {width}]"), "no such tensor"))?;
    let rows = match tensor.shape()[..] {
        [rows, _] if rows <= i32::MAX as u64 => rows as usize,
        _ => return Err(Error::tensor(name, format!("shape [V, {width}]"), format!("{:?}", tensor.shape()))),
    };
    let key = "tokenizer.ggml.tokens";
    if let Some(tokens) = file.get_strings(key)?
        && tokens.len() != rows
    {
        return Err(Error::metadata(key, format!("{rows} tokens, one for each row of {name}"), tokens.len()));
    }
    Ok(rows)
}

fn block(weights: &Weights, shape: &Shape, index: usize) -> Result<Block> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let width = shape.width;
    let norm = |part: &str| weights.vector(&name(part), width);
    let local = shape.window.is_some() && shape.local.get(index).copied().unwrap_or(false);
    let (q, k, v) = projections(weights, shape, &name)?;
    Ok(Block {
        attn_norm: norm("attn_norm")?,
        attention: AttentionPart {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            window: if local { shape.window } else { None },
            rope_base: if local { shape.rope_base_local } else { shape.rope_base },
            rope_scale: if local { 1.0 } else { shape.rope_scale },
            scale: shape.attention_scale(),
            q,
            k,
            v,
            q_norm: weights.vector(&name("attn_q_norm"), shape.key_dim)?,
            k_norm: weights.vector(&name("attn_k_norm"), shape.key_dim)?,
            output: weights.get(&name("attn_output"), &[width, shape.heads * shape.value_dim])?,
        },
        post_attn_norm: norm("post_attention_norm")?,
        ffn_norm: norm("ffn_norm")?,
        ffn: feed_forward(weights, shape, &name)?,
        post_ffn_norm: norm("post_ffw_norm")?,
    })
}

/// The three projections, from tensors of their own or from one with the rows of q, k and v.
fn projections(
    weights: &Weights,
    shape: &Shape,
    name: &dyn Fn(&str) -> String,
) -> Result<(TensorView, TensorView, TensorView)> {
    let rows = [shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim];
    if let Some(fused) = weights.find(&name("attn_qkv"), &[rows.iter().sum(), shape.width])? {
        let part = |start: usize, rows: usize| fused.narrow(0, start, rows);
        return Ok((part(0, rows[0])?, part(rows[0], rows[1])?, part(rows[0] + rows[1], rows[2])?));
    }
    let get = |part: &str, rows: usize| weights.get(&name(part), &[rows, shape.width]);
    Ok((get("attn_q", rows[0])?, get("attn_k", rows[1])?, get("attn_v", rows[2])?))
}

fn feed_forward(weights: &Weights, shape: &Shape, name: &dyn Fn(&str) -> String) -> Result<FeedForward> {
    let (width, hidden, activation) = (shape.width, shape.hidden, Activation::GeluTanh);
    let Some((experts, used)) = shape.experts else {
        return Ok(FeedForward::Dense {
            gate: weights.get(&name("ffn_gate"), &[hidden, width])?,
            up: weights.get(&name("ffn_up"), &[hidden, width])?,
            down: weights.get(&name("ffn_down"), &[width, hidden])?,
            activation,
        });
    };
    Ok(FeedForward::Experts {
        router: weights.get(&name("ffn_gate_inp"), &[experts, width])?,
        gate: weights.get(&name("ffn_gate_exps"), &[experts, hidden, width])?,
        up: weights.get(&name("ffn_up_exps"), &[experts, hidden, width])?,
        down: weights.get(&name("ffn_down_exps"), &[experts, width, hidden])?,
        used,
        activation,
    })
}
