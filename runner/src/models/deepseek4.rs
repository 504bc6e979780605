//! DeepSeek V4: residual streams, a sliding window with compressed keys of what lies before it, experts in every block.
//!
//! A block's kind goes by its ratio of compression: 0 sees its window only; 4 sees the best of overlapping keys of four
//! tokens each, by an index; 128 sees all keys of 128 tokens each. The first blocks take their experts from a table by the
//! token's number.

use std::sync::Arc;

use evergraph_kernels::ops::{Activation, GroupRank, Scoring, Yarn};

use super::compressed::{CompressedPart, Compressor, Indexer, Tail};
use super::decoder::Decoder;
use super::experts::{Choice, Experts, GateUp, OnBus};
use super::feed_forward::{Branch, Dense, FeedForward};
use super::hyper::Mixer;
use super::keys::{self, Keys};
use super::streams::{StreamBlock, StreamStack};
use super::weights::Weights;
use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::placement::{Home, Placement, in_block};

/// The ratio whose keys overlap, and are chosen by an index.
const INDEXED: usize = 4;

/// Most tokens of a compressed key.
const MOST_RATIO: u64 = 4096;

/// The numbers in a file's metadata.
#[derive(Debug, PartialEq)]
struct Shape {
    blocks: usize,
    width: usize,
    context: usize,
    vocabulary: usize,
    eps: f32,
    heads: usize,
    dim: usize,
    query_rank: usize,
    rotated: usize,
    rope_base: f32,
    compressed_base: f32,
    yarn: Option<Yarn>,
    window: u32,
    ratios: Vec<usize>,
    index: IndexShape,
    groups: usize,
    output_rank: usize,
    streams: usize,
    iterations: u32,
    stream_eps: f32,
    hashed: usize,
    experts: usize,
    used: usize,
    hidden: usize,
    shared: usize,
    weights_scale: f32,
    weights_norm: bool,
    scoring: Scoring,
    limits: Vec<Option<f32>>,
    shared_limits: Vec<Option<f32>>,
}

#[derive(Debug, PartialEq)]
struct IndexShape {
    heads: usize,
    dim: usize,
    top: usize,
}

impl Shape {
    fn read(file: &Gguf) -> Result<Self> {
        let keys = Keys::new(file)?;
        let all = keys.size("block_count", keys::MOST_BLOCKS)?;
        // Blocks that predict further tokens stand at the end of files that have them.
        let more = keys.count("nextn_predict_layers", all as u64 - 1)?;
        let first = format!("blk.{}.nextn.", all - more);
        let predicts = more > 0 && file.tensors().iter().any(|tensor| tensor.name().starts_with(&first));
        let blocks = if predicts { all - more } else { all };
        let width = keys.size("embedding_length", keys::MOST_WIDTH)?;
        let dim = keys.size("attention.key_length", keys::MOST_HEAD_DIM)?;
        let heads = keys.size("attention.head_count", keys::MOST_HEADS)?;
        let value_dim = keys.size_or("attention.value_length", keys::MOST_HEAD_DIM, dim)?;
        let kv_heads = keys.size_or("attention.head_count_kv", keys::MOST_HEADS, 1)?;
        if (value_dim, kv_heads) != (dim, 1) {
            let expected = format!("one head of {dim}, since keys are values too");
            return Err(Error::metadata(
                keys.name("attention.value_length"),
                expected,
                format!("{kv_heads} of {value_dim}"),
            ));
        }
        let rotated = keys.turned(dim as u64)?;
        let (weights_norm, weights_scale) = keys.expert_weights()?;
        let ratios = keys.counts("attention.compress_ratios", blocks, MOST_RATIO)?;
        let indexed = ratios.contains(&INDEXED);
        let index = |key: &str, most: u64| match indexed {
            true => keys.size(&format!("attention.indexer.{key}"), most),
            false => Ok(1),
        };
        let groups = keys.size("attention.output_group_count", heads as u64)?;
        keys::check_heads(keys.name("attention.output_group_count"), heads, groups)?;
        let Some(window) = keys.window()? else {
            return Err(Error::metadata(keys.name("attention.sliding_window"), "a positive number", "none"));
        };
        let Some((experts, used)) = keys.experts()? else {
            return Err(Error::metadata(keys.name("expert_count"), "a positive number", "none"));
        };
        let has_shared = file.tensor("blk.0.ffn_gate_shexp.weight").is_some();
        let limits = keys.limits("swiglu_clamp_exp", blocks)?;
        let shared_limits = keys.limits("swiglu_clamp_shexp", blocks)?;
        Ok(Self {
            blocks,
            width,
            context: keys.size("context_length", i32::MAX as u64)?,
            vocabulary: keys.vocabulary(width)?,
            eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            heads,
            dim,
            query_rank: keys.size("attention.q_lora_rank", keys::MOST_WIDTH)?,
            rotated,
            rope_base: keys.positive("rope.freq_base", Some(1e4))?,
            compressed_base: keys.positive("attention.compress_rope_freq_base", Some(1.6e5))?,
            yarn: yarn(&keys)?,
            window,
            index: IndexShape {
                heads: index("head_count", keys::MOST_HEADS)?,
                dim: index("key_length", keys::MOST_HEAD_DIM)?,
                top: index("top_k", 1 << 20)?,
            },
            ratios,
            groups,
            output_rank: keys.size("attention.output_lora_rank", keys::MOST_WIDTH)?,
            streams: keys.size("hyper_connection.count", 32)?,
            iterations: keys.size("hyper_connection.sinkhorn_iterations", 10_000)? as u32,
            stream_eps: keys.positive("hyper_connection.epsilon", Some(1e-6))?,
            hashed: keys.count("hash_layer_count", keys::MOST_BLOCKS)?,
            experts,
            used,
            hidden: keys.size("expert_feed_forward_length", keys::MOST_WIDTH)?,
            // A file that has the tensors means them.
            shared: keys.count("expert_shared_count", 64)?.max(has_shared.into()),
            weights_scale,
            weights_norm,
            scoring: keys.scoring(Scoring::SqrtSoftplus)?,
            shared_limits: limits.iter().zip(shared_limits).map(|(limit, own)| own.or(*limit)).collect(),
            limits,
        })
    }

    /// How heads of a block with this ratio are rotated.
    fn tail(&self, ratio: usize) -> Tail {
        match ratio {
            0 => Tail { dims: self.rotated, base: self.rope_base, yarn: None },
            _ => Tail { dims: self.rotated, base: self.compressed_base, yarn: self.yarn },
        }
    }
}

/// Blending of the frequencies of blocks with compressed keys.
fn yarn(keys: &Keys<'_>) -> Result<Option<Yarn>> {
    match keys.text("rope.scaling.type")? {
        None | Some("none") => Ok(None),
        Some("yarn") => Ok(Some(Yarn {
            factor: keys.positive("rope.scaling.factor", None)?,
            original_context: keys.size("rope.scaling.original_context_length", i32::MAX as u64)? as u32,
            beta_fast: keys.positive("rope.scaling.yarn_beta_fast", Some(32.0))?,
            beta_slow: keys.positive("rope.scaling.yarn_beta_slow", Some(1.0))?,
        })),
        Some(other) => Err(Error::Unsupported {
            what: "this kind of position scaling for deepseek4",
            found: other.to_owned(),
            advice: "a file with YaRN or none".to_owned(),
        }),
    }
}

/// Builds the model of a file on a device.
///
/// # Errors
/// [`Error::Metadata`], [`Error::Tensor`] or [`Error::Unsupported`] for a file that does not hold together, or a placement of
/// whole blocks on the host; those of the pool.
pub(super) fn load(file: Arc<Gguf>, runtime: &Runtime, placement: &Placement) -> Result<Decoder> {
    let shape = Shape::read(&file)?;
    // Blocks that predict further tokens take no memory of the device.
    let read = |name: &str| in_block(name).is_none_or(|(block, _)| block < shape.blocks);
    let weights = Weights::load_some(file, runtime, placement, shape.blocks, &read)?;
    let on_host = (0..shape.blocks).filter(|block| weights.block_home(*block) == Home::Host).count();
    if on_host > 0 {
        return Err(Error::Unsupported {
            what: "a model of residual streams with whole blocks on the host",
            found: format!("{on_host} of {} blocks there", shape.blocks),
            advice: "-cmoe or -ncmoe, which leave only experts there".to_owned(),
        });
    }
    let (width, vocabulary) = (shape.width, shape.vocabulary);
    let blocks = (0..shape.blocks).map(|index| block(&weights, &shape, index)).collect::<Result<_>>()?;
    let streams = StreamStack {
        streams: shape.streams,
        iterations: shape.iterations,
        eps: shape.stream_eps,
        blocks,
        head: Mixer::load(&weights, "output_hc", [shape.streams, width], false)?,
        rounded_keys: runtime.config().rounded_keys,
    };
    Ok(Decoder {
        width,
        vocabulary,
        context: shape.context,
        eps: shape.eps,
        embedding: weights.get("token_embd.weight", &[vocabulary, width])?,
        embedding_scale: 1.0,
        layer_inputs: None,
        blocks: Vec::new(),
        streams: Some(Box::new(streams)),
        output_norm: weights.vector("output_norm.weight", width)?,
        output: weights.get("output.weight", &[vocabulary, width])?,
        softcap: None,
        weights,
    })
}

fn block(weights: &Weights, shape: &Shape, index: usize) -> Result<StreamBlock> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let mixer = |part: &str| Mixer::load(weights, &format!("blk.{index}.{part}"), [shape.streams, shape.width], true);
    Ok(StreamBlock {
        device: weights.block_device(index),
        attn_mixer: mixer("hc_attn")?,
        attn_norm: weights.vector(&name("attn_norm"), shape.width)?,
        attention: attention(weights, shape, index)?,
        ffn_mixer: mixer("hc_ffn")?,
        branches: branches(weights, shape, index)?,
    })
}

fn attention(weights: &Weights, shape: &Shape, index: usize) -> Result<CompressedPart> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let &Shape { width, heads, dim, query_rank, groups, output_rank, .. } = shape;
    let ratio = shape.ratios[index];
    let compressor = |prefix: &str, dim: usize| {
        let channels = if ratio == INDEXED { 2 * dim } else { dim };
        let name = |part: &str| format!("blk.{index}.{prefix}_compressor_{part}.weight");
        Ok::<_, Error>(Compressor {
            ratio,
            overlap: ratio == INDEXED,
            kv: weights.get(&name("kv"), &[channels, width])?,
            gate: weights.get(&name("gate"), &[channels, width])?,
            ape: weights.get(&name("ape"), &[ratio, channels])?,
            norm: weights.vector(&name("norm"), dim)?,
        })
    };
    let indexer = match ratio {
        INDEXED => {
            let &IndexShape { heads, dim, top } = &shape.index;
            Some(Indexer {
                compressor: compressor("indexer", dim)?,
                heads,
                q_b: weights.get(&name("indexer.attn_q_b"), &[heads * dim, query_rank])?,
                proj: weights.get(&name("indexer.proj"), &[heads, width])?,
                top,
            })
        }
        _ => None,
    };
    let output_a = weights.get(&name("attn_output_a"), &[groups * output_rank, heads * dim / groups])?;
    Ok(CompressedPart {
        heads,
        dim,
        window: shape.window,
        tail: shape.tail(ratio),
        q_a: weights.get(&name("attn_q_a"), &[query_rank, width])?,
        q_a_norm: weights.vector(&name("attn_q_a_norm"), query_rank)?,
        q_b: weights.get(&name("attn_q_b"), &[heads * dim, query_rank])?,
        kv: weights.get(&name("attn_kv"), &[dim, width])?,
        kv_norm: weights.vector(&name("attn_kv_a_norm"), dim)?,
        sinks: weights.vector(&name("attn_sinks"), heads)?,
        output_a: output_a.reshape(&[groups, output_rank, heads * dim / groups])?,
        output_b: weights.get(&name("attn_output_b"), &[width, groups * output_rank])?,
        compressor: if ratio > 0 { Some(compressor("attn", dim)?) } else { None },
        indexer,
    })
}

/// The shared expert, and the experts beside it.
fn branches(weights: &Weights, shape: &Shape, index: usize) -> Result<Vec<Branch>> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let &Shape { width, hidden, experts, used, .. } = shape;
    let mut branches = Vec::new();
    if shape.shared > 0 {
        let of_shared = |part: &str| name(&format!("{part}_shexp"));
        let dense = Dense::load(weights, &of_shared, [shape.shared * hidden, width], Activation::Silu)?;
        branches.push(Branch {
            norm: weights.vector(&name("ffn_norm"), width)?,
            part: FeedForward::Dense(Box::new(Dense { limit: shape.shared_limits[index], ..dense })),
            post_norm: None,
        });
    }
    let (bias, table) = match index < shape.hashed {
        true => (None, Some(weights.numbers(&name("ffn_gate_tid2eid"), &[shape.vocabulary, used], experts)?)),
        false => (Some(weights.vector(&format!("blk.{index}.exp_probs_b.bias"), experts)?), None),
    };
    let gate_up = GateUp::load(weights, &name, [experts, hidden, width])?;
    let down = weights.get(&name("ffn_down_exps"), &[experts, width, hidden])?;
    branches.push(Branch {
        norm: weights.vector(&name("ffn_norm"), width)?,
        part: FeedForward::Experts(Box::new(Experts {
            router: weights.get(&name("ffn_gate_inp"), &[experts, width])?,
            router_norm: None,
            on_bus: OnBus::find(weights, &gate_up, &down),
            gate_up,
            down,
            down_scale: None,
            device_scale: None,
            used,
            activation: Activation::Silu,
            limit: shape.limits[index],
            choice: Choice {
                scoring: shape.scoring,
                bias,
                groups: None,
                group_rank: GroupRank::default(),
                norm: shape.weights_norm,
                scale: shape.weights_scale,
                table,
            },
        })),
        post_norm: None,
    });
    Ok(branches)
}
