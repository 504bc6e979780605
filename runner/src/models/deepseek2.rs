//! DeepSeek V2, V2-Lite, V2.5, V3, V3.1 and R1: latent attention, dense blocks first, then experts with shared ones beside them.
//!
//! Attention runs in its absorbed form on a compressed cache (see [`Latent`]). Older files have keys and values of a head in one
//! tensor (`attn_kv_b`) instead of two; it is taken apart when the file is loaded. Keys have to be transposed then, which
//! blocks can not be: they become F16, and floats stay what they are. Values keep their type.
//!
//! Blocks that predict further tokens (`nextn_predict_layers`) are not read.

use std::sync::Arc;

use evergraph_kernels::ops::{Activation, GroupRank, Scoring, TensorView, Yarn};
use evergraph_kernels::quant::{dequantize, quantize};

use super::attention::{AttentionPart, KeyValue, Rotation};
use super::block::Block;
use super::decoder::Decoder;
use super::experts::{Choice, Experts, GateUp, OnBus};
use super::feed_forward::{Branch, Dense, FeedForward};
use super::keys::{self, Keys};
use super::latent::Latent;
use super::weights::Weights;
use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, QuantType};
use crate::placement::{Placement, in_block};

/// The numbers in a file's metadata.
#[derive(Debug, PartialEq)]
struct Shape {
    /// Those that are run; others predict further tokens.
    blocks: usize,
    width: usize,
    context: usize,
    eps: f32,
    vocabulary: usize,
    heads: usize,
    /// Width of compressed queries; 0 where they are not.
    q_rank: usize,
    /// Width of what keys and values are made of.
    rank: usize,
    /// Elements of a head's key that are not rotated, and those that are.
    own: usize,
    turned: usize,
    value_dim: usize,
    position: Position,
    /// Blocks that are dense, the first ones.
    dense: usize,
    hidden: Vec<usize>,
    experts: Option<ExpertShape>,
}

/// How positions turn queries and keys.
#[derive(Debug, PartialEq)]
struct Position {
    base: f32,
    scale: f32,
    yarn: Option<Yarn>,
    /// Factor of what is rotated.
    magnitude: f32,
    /// Factor of the scores, beside one over the root of a key's length.
    attention: f32,
}

#[derive(Debug, PartialEq)]
struct ExpertShape {
    count: usize,
    used: usize,
    hidden: usize,
    shared: usize,
    scoring: Scoring,
    groups: Option<(u32, u32)>,
    norm: bool,
    scale: f32,
}

impl Shape {
    fn read(file: &Gguf) -> Result<Self> {
        let keys = Keys::new(file)?;
        let all = keys.size("block_count", keys::MOST_BLOCKS)?;
        let blocks = all - keys.count("nextn_predict_layers", all as u64 - 1)?;
        let width = keys.size("embedding_length", keys::MOST_WIDTH)?;
        let rank = keys.size("attention.kv_lora_rank", keys::MOST_HEAD_DIM)?;
        let turned = keys.turned(keys::MOST_HEAD_DIM)?;
        // Older files give a head's own lengths where newer ones give those of the compressed cache.
        let dim = |part: &str| {
            let of_head = format!("attention.{part}_mla");
            match keys.count(&of_head, keys::MOST_HEAD_DIM)? {
                0 => Ok((keys.size(&format!("attention.{part}"), keys::MOST_HEAD_DIM)?, format!("attention.{part}"))),
                dim => Ok::<_, Error>((dim, of_head)),
            }
        };
        let ((key_dim, key), (value_dim, _)) = (dim("key_length")?, dim("value_length")?);
        if key_dim <= turned {
            let expected = format!("more than the {turned} elements that are rotated");
            return Err(Error::metadata(keys.name(&key), expected, key_dim));
        }
        let context = keys.size("context_length", i32::MAX as u64)?;
        Ok(Self {
            blocks,
            width,
            context,
            eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            vocabulary: keys.vocabulary(width)?,
            heads: keys.size("attention.head_count", keys::MOST_HEADS)?,
            q_rank: keys.count("attention.q_lora_rank", keys::MOST_WIDTH)?,
            rank,
            own: key_dim - turned,
            turned,
            value_dim,
            position: Position::read(&keys, context)?,
            dense: keys.count("leading_dense_block_count", keys::MOST_BLOCKS)?,
            hidden: keys.sizes("feed_forward_length", blocks, keys::MOST_WIDTH)?,
            experts: ExpertShape::read(&keys)?,
        })
    }

    /// Whether a tensor is read as it is.
    fn reads(&self, name: &str) -> bool {
        in_block(name).is_none_or(|(block, part)| block < self.blocks && part != "attn_kv_b.weight")
    }
}

impl Position {
    fn read(keys: &Keys<'_>, context: usize) -> Result<Self> {
        let base = keys.positive("rope.freq_base", Some(1e4))?;
        let plain = Self { base, scale: 1.0, yarn: None, magnitude: 1.0, attention: 1.0 };
        let factor = || keys.positive("rope.scaling.factor", Some(1.0));
        match keys.text("rope.scaling.type")? {
            None | Some("none") => Ok(plain),
            Some("linear") => Ok(Self { scale: 1.0 / factor()?, ..plain }),
            Some("yarn") => {
                let factor = factor()?.max(1.0);
                let original = keys.size_or("rope.scaling.original_context_length", i32::MAX as u64, context)?;
                let yarn = Yarn {
                    factor,
                    original_context: original as u32,
                    beta_fast: keys.positive("rope.scaling.yarn_beta_fast", Some(32.0))?,
                    beta_slow: keys.positive("rope.scaling.yarn_beta_slow", Some(1.0))?,
                };
                if base <= 1.0 {
                    return Err(Error::metadata(
                        keys.name("rope.freq_base"),
                        "more than 1, as positions are scaled",
                        base,
                    ));
                }
                // Longer texts have flatter scores. Models either scale all of a score, or only what is rotated.
                let (magnitude, attention) = match keys.positive_or_none("rope.scaling.yarn_log_multiplier")? {
                    Some(multiplier) => (1.0, (1.0 + multiplier * factor.ln()).powi(2)),
                    None => (1.0 + 0.1 * factor.ln(), 1.0),
                };
                Ok(Self { yarn: Some(yarn), magnitude, attention, ..plain })
            }
            Some(other) => Err(Error::Unsupported {
                what: "this kind of position scaling for deepseek2",
                found: other.to_owned(),
                advice: "a file with yarn or linear scaling, or none".to_owned(),
            }),
        }
    }
}

impl ExpertShape {
    fn read(keys: &Keys<'_>) -> Result<Option<Self>> {
        let Some((count, used)) = keys.experts()? else { return Ok(None) };
        let groups = keys.size_or("expert_group_count", count as u64, 1)?;
        let groups_used = keys.size_or("expert_group_used_count", groups as u64, groups)?;
        let fits = count.is_multiple_of(groups) && (groups == 1 || count / groups >= 2);
        if !fits || count / groups * groups_used < used {
            let expected = format!("groups of equal size of {count} experts, of which those used hold {used}");
            return Err(Error::metadata(
                keys.name("expert_group_count"),
                expected,
                format!("{groups_used} of {groups}"),
            ));
        }
        let (norm, scale) = keys.expert_weights()?;
        Ok(Some(Self {
            count,
            used,
            hidden: keys.size("expert_feed_forward_length", keys::MOST_WIDTH)?,
            shared: keys.count("expert_shared_count", count as u64)?,
            // V2 takes the softmax and does not say so.
            scoring: keys.scoring(Scoring::Softmax)?,
            groups: (groups > 1).then_some((groups as u32, groups_used as u32)),
            norm,
            scale,
        }))
    }
}

/// Builds the model of a file on a device.
///
/// # Errors
/// [`Error::Metadata`], [`Error::Tensor`] or [`Error::Unsupported`] for a file that does not hold together;
/// those of the pool.
pub(super) fn load(file: Arc<Gguf>, runtime: &Runtime, placement: &Placement) -> Result<Decoder> {
    let shape = Shape::read(&file)?;
    let read = |name: &str| shape.reads(name);
    let mut weights = Weights::load_some(file, runtime, placement, shape.blocks, &read)?;
    let heads =
        (0..shape.blocks).map(|index| heads(&mut weights, runtime, &shape, index)).collect::<Result<Vec<_>>>()?;
    let (width, vocabulary) = (shape.width, shape.vocabulary);
    let embedding = weights.get("token_embd.weight", &[vocabulary, width])?;
    let output = weights.find("output.weight", &[vocabulary, width])?.unwrap_or_else(|| embedding.clone());
    let build = |(index, heads)| block(&weights, &shape, index, heads);
    let blocks = heads.into_iter().enumerate().map(build).collect::<Result<_>>()?;
    Ok(Decoder {
        width,
        vocabulary,
        context: shape.context,
        eps: shape.eps,
        embedding,
        embedding_scale: 1.0,
        layer_inputs: None,
        blocks,
        streams: None,
        output_norm: weights.vector("output_norm.weight", width)?,
        output,
        softcap: None,
        weights,
    })
}

/// The key and value weights of a block's heads, `[H, R, nope]` and `[H, dv, R]`.
fn heads(weights: &mut Weights, runtime: &Runtime, shape: &Shape, index: usize) -> Result<[TensorView; 2]> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let &Shape { heads, rank, own, value_dim, .. } = shape;
    let both = name("attn_kv_b");
    if weights.has(&name("attn_k_b")) || !weights.has(&both) {
        let k = weights.get(&name("attn_k_b"), &[heads, rank, own])?;
        return Ok([k, weights.get(&name("attn_v_b"), &[heads, value_dim, rank])?]);
    }
    let home = weights.home(&both);
    let (ty, bytes) = weights.source(&both, &[heads * (own + value_dim), rank])?;
    let (k, v) = split(ty, bytes, [heads, own, value_dim, rank])?;
    Ok([
        weights.make(runtime, home, &name("attn_k_b"), (k.0, &[heads, rank, own]), &k.1)?,
        weights.make(runtime, home, &name("attn_v_b"), (v.0, &[heads, value_dim, rank]), &v.1)?,
    ])
}

/// A type, and bytes of a tensor.
type Made = (QuantType, Vec<u8>);

/// `[H (own + dv), R]` to `[H, R, own]` and `[H, dv, R]`.
fn split(ty: QuantType, bytes: &[u8], [heads, own, value_dim, rank]: [usize; 4]) -> Result<(Made, Made)> {
    let row_bytes = ty.row_bytes(rank)?;
    let key_ty = if ty.block_size() == 1 { ty } else { QuantType::F16 };
    let (mut keys, mut values) = (Vec::new(), Vec::with_capacity(heads * value_dim * row_bytes));
    let mut floats = vec![0.0; own * rank];
    let mut turned = vec![0.0; own * rank];
    for head in bytes.chunks_exact(((own + value_dim) * row_bytes).max(1)).take(heads) {
        let (key, value) = head.split_at(own * row_bytes);
        values.extend_from_slice(value);
        dequantize(ty, key, &mut floats)?;
        for (column, to) in turned.chunks_exact_mut(own).enumerate() {
            to.iter_mut().enumerate().for_each(|(row, to)| *to = floats[row * rank + column]);
        }
        keys.extend(quantize(key_ty, &turned)?);
    }
    Ok(((key_ty, keys), (ty, values)))
}

fn block(weights: &Weights, shape: &Shape, index: usize, [k_b, v_b]: [TensorView; 2]) -> Result<Block> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let &Shape { width, heads, q_rank, rank, own, turned, value_dim, ref position, .. } = shape;
    let rows = heads * (own + turned);
    let (q_a, q) = match q_rank {
        0 => (None, weights.get(&name("attn_q"), &[rows, width])?),
        _ => {
            let norm = weights.vector(&name("attn_q_a_norm"), q_rank)?;
            let q_a = weights.get(&name("attn_q_a"), &[q_rank, width])?;
            (Some((q_a, norm)), weights.get(&name("attn_q_b"), &[rows, q_rank])?)
        }
    };
    Ok(Block {
        home: weights.block_home(index),
        device: weights.block_device(index),
        attn_norm: weights.vector(&name("attn_norm"), width)?,
        attention: AttentionPart {
            heads,
            kv_heads: 1,
            key_dim: rank + turned,
            value_dim: rank,
            window: None,
            rotation: Rotation { dims: turned, base: position.base, scale: position.scale, factors: None },
            scale: position.attention / ((own + turned) as f32).sqrt(),
            q,
            q_norm: None,
            kv: KeyValue::Latent(Box::new(Latent {
                q_a,
                kv_a: weights.get(&name("attn_kv_a_mqa"), &[rank + turned, width])?,
                kv_norm: weights.vector(&name("attn_kv_a_norm"), rank)?,
                k_b,
                v_b,
                yarn: position.yarn,
                magnitude: position.magnitude,
            })),
            output: weights.get(&name("attn_output"), &[width, heads * value_dim])?,
        },
        post_attn_norm: None,
        branches: branches(weights, shape, index)?,
        post_ffn_norm: None,
        input: None,
        gain: 1.0,
    })
}

/// The dense part, or experts with those that all tokens share beside them.
fn branches(weights: &Weights, shape: &Shape, index: usize) -> Result<Vec<Branch>> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let (width, activation) = (shape.width, Activation::Silu);
    let branch =
        |part| Ok::<_, Error>(Branch { norm: weights.vector(&name("ffn_norm"), width)?, part, post_norm: None });
    let dense = |name: &dyn Fn(&str) -> String, hidden| {
        let dense = Dense::load(weights, name, [hidden, width], activation)?;
        branch(FeedForward::Dense(Box::new(dense)))
    };
    let of = match &shape.experts {
        Some(of) if index >= shape.dense => of,
        _ => return Ok(vec![dense(&name, shape.hidden[index])?]),
    };
    let &ExpertShape { count, used, hidden, shared, scoring, groups, norm, scale } = of;
    let bias = weights.find_vector(&format!("blk.{index}.exp_probs_b.bias"), count)?;
    // DeepSeek-V2 ranks groups by their best expert, V3, which corrects scores by a bias, by the best two.
    let group_rank = match scoring {
        Scoring::Softmax if bias.is_none() => GroupRank::Greatest,
        _ => GroupRank::TwoGreatest,
    };
    let gate_up = GateUp::load(weights, &name, [count, hidden, width])?;
    let down = weights.get(&name("ffn_down_exps"), &[count, width, hidden])?;
    let experts = Experts {
        router: weights.get(&name("ffn_gate_inp"), &[count, width])?,
        router_norm: None,
        on_bus: OnBus::find(weights, &gate_up, &down),
        gate_up,
        down,
        down_scale: None,
        device_scale: None,
        used,
        choice: Choice { scoring, bias, groups, group_rank, norm, scale, table: None },
        limit: None,
        activation,
    };
    let mut list = Vec::new();
    let of_shared = |part: &str| name(&format!("{part}_shexp"));
    // Their number may be missing where their tensors are not.
    let shared_hidden = match shared {
        0 => weights.rows(&of_shared("ffn_gate")),
        _ => Some(shared * hidden),
    };
    if let Some(hidden) = shared_hidden {
        list.push(dense(&of_shared, hidden)?);
    }
    list.push(branch(FeedForward::Experts(Box::new(experts)))?);
    Ok(list)
}

#[cfg(test)]
mod tests;
