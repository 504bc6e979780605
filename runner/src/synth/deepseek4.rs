//! DeepSeek V4 Flash: three kinds of layers, four residual streams.

use super::shapes::{List, Tensor, Values};
use crate::gguf::{QuantType, Writer};

pub(super) const NAME: &str = "deepseek-v4-flash";
pub(super) const ARCHITECTURE: &str = "deepseek4";
/// Layers of the published model.
pub(super) const LAYERS: usize = 43;

const VOCABULARY: u64 = 129_280;
const WIDTH: u64 = 4096;
const HEADS: u64 = 64;
const HEAD: u64 = 512;
const QUERY_RANK: u64 = 1024;
const GROUPS: u64 = 8;
const OUTPUT_RANK: u64 = 1024;
const INDEX_HEADS: u64 = 64;
const INDEX_HEAD: u64 = 128;
const STREAMS: u64 = 4;
const EXPERTS: u64 = 256;
const USED: u64 = 6;
const HIDDEN: u64 = 2048;
/// The first layers take their experts from a table.
const HASHED: usize = 3;

/// Tokens of a layer's compressed keys: none in the first two layers, then 4 and 128 in turns.
fn ratio(layer: usize) -> u64 {
    match layer {
        0 | 1 => 0,
        _ if layer.is_multiple_of(2) => 4,
        _ => 128,
    }
}

/// Writes the keys of the architecture.
pub(super) fn metadata(layers: usize, writer: &mut Writer) {
    let key = |name: &str| format!("{ARCHITECTURE}.{name}");
    for (name, value) in [
        ("vocab_size", VOCABULARY),
        ("context_length", 1 << 20),
        ("embedding_length", WIDTH),
        ("embedding_length_out", STREAMS * WIDTH),
        ("block_count", layers as u64),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", 1),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("attention.q_lora_rank", QUERY_RANK),
        ("attention.sliding_window", 128),
        ("attention.indexer.head_count", INDEX_HEADS),
        ("attention.indexer.key_length", INDEX_HEAD),
        ("attention.indexer.top_k", 512),
        ("attention.output_group_count", GROUPS),
        ("attention.output_lora_rank", OUTPUT_RANK),
        ("rope.dimension_count", 64),
        ("rope.scaling.original_context_length", 65_536),
        ("hyper_connection.count", STREAMS),
        ("hyper_connection.sinkhorn_iterations", 20),
        ("hash_layer_count", HASHED.min(layers) as u64),
        ("expert_count", EXPERTS),
        ("expert_used_count", USED),
        ("expert_feed_forward_length", HIDDEN),
        ("expert_shared_count", 1),
        ("expert_gating_func", 4),
    ] {
        writer.put(key(name), value as u32);
    }
    for (name, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-6f32),
        ("rope.freq_base", 1e4),
        ("attention.compress_rope_freq_base", 1.6e5),
        ("rope.scaling.factor", 16.0),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
        ("hyper_connection.epsilon", 1e-6),
        ("expert_weights_scale", 1.5),
    ] {
        writer.put(key(name), value);
    }
    writer.put(key("rope.scaling.type"), "yarn");
    writer.put(key("expert_weights_norm"), true);
    writer.put(key("swiglu_clamp_exp"), vec![10f32; layers]);
    writer.put(key("attention.compress_ratios"), (0..layers).map(|layer| ratio(layer) as i32).collect::<Vec<_>>());
}

/// Lists the tensors, in the order in which they stand in the file.
pub(super) fn tensors(layers: usize, quant: QuantType, out: &mut Vec<Tensor>) {
    let mut list = List { quant, out };
    list.embedding("token_embd", &[WIDTH, VOCABULARY], 1.0);
    list.all("output_norm.weight", &[WIDTH], 4.0);
    list.embedding("output", &[WIDTH, VOCABULARY], 1.0);
    mixer(&mut list, "output_hc", STREAMS, 1);
    for layer in 0..layers {
        attention(&mut list, layer);
        feed_forward(&mut list, layer);
    }
}

/// What weighs the streams, all of it floats.
fn mixer(list: &mut List<'_>, name: &str, rows: u64, scales: u64) {
    let inputs = STREAMS * WIDTH;
    floats(list, &format!("{name}_fn.weight"), &[inputs, rows], 1.0 / (inputs as f32).sqrt());
    floats(list, &format!("{name}_base.weight"), &[rows], 0.5);
    list.all(format!("{name}_scale.weight"), &[scales], 1.0);
}

fn floats(list: &mut List<'_>, name: &str, dims: &[u64], deviation: f32) {
    list.push(name, QuantType::F32, dims, Values::Random(deviation));
}

fn attention(list: &mut List<'_>, layer: usize) {
    let name = |part: &str| format!("blk.{layer}.{part}");
    let norm = |part: &str| format!("blk.{layer}.{part}.weight");
    mixer(list, &name("hc_attn"), (2 + STREAMS) * STREAMS, 3);
    list.all(norm("attn_norm"), &[WIDTH], 1.0);
    floats(list, &norm("attn_sinks"), &[HEADS], 1.0);
    list.matrix(name("attn_q_a"), &[WIDTH, QUERY_RANK]);
    list.all(norm("attn_q_a_norm"), &[QUERY_RANK], 1.0);
    list.matrix(name("attn_q_b"), &[QUERY_RANK, HEADS * HEAD]);
    list.matrix(name("attn_kv"), &[WIDTH, HEAD]);
    list.all(norm("attn_kv_a_norm"), &[HEAD], 1.0);
    list.matrix(name("attn_output_a"), &[HEADS * HEAD / GROUPS, GROUPS * OUTPUT_RANK]);
    list.matrix(name("attn_output_b"), &[GROUPS * OUTPUT_RANK, WIDTH]);
    let mut compressor = |prefix: &str, width: u64, ratio: u64| {
        let channels = if ratio == 4 { 2 * width } else { width };
        let name = |part: &str| format!("blk.{layer}.{prefix}_compressor_{part}");
        list.matrix(name("kv"), &[WIDTH, channels]);
        list.matrix(name("gate"), &[WIDTH, channels]);
        floats(list, &format!("{}.weight", name("ape")), &[channels, ratio], 1.0);
        list.all(format!("{}.weight", name("norm")), &[width], 1.0);
    };
    match ratio(layer) {
        0 => {}
        4 => {
            compressor("attn", HEAD, 4);
            compressor("indexer", INDEX_HEAD, 4);
            list.matrix(name("indexer.attn_q_b"), &[QUERY_RANK, INDEX_HEADS * INDEX_HEAD]);
            list.matrix(name("indexer.proj"), &[WIDTH, INDEX_HEADS]);
        }
        ratio => compressor("attn", HEAD, ratio),
    }
}

fn feed_forward(list: &mut List<'_>, layer: usize) {
    let name = |part: &str| format!("blk.{layer}.{part}");
    let norm = |part: &str| format!("blk.{layer}.{part}.weight");
    mixer(list, &name("hc_ffn"), (2 + STREAMS) * STREAMS, 3);
    list.all(norm("ffn_norm"), &[WIDTH], 1.0);
    floats(list, &norm("ffn_gate_inp"), &[WIDTH, EXPERTS], 1.0 / (WIDTH as f32).sqrt());
    if layer < HASHED {
        let values = Values::Experts { used: USED, count: EXPERTS };
        list.push(norm("ffn_gate_tid2eid"), QuantType::I32, &[USED, VOCABULARY], values);
    } else {
        floats(list, &format!("blk.{layer}.exp_probs_b.bias"), &[EXPERTS], 0.1);
    }
    for part in ["gate", "up"] {
        list.matrix(name(&format!("ffn_{part}_exps")), &[WIDTH, HIDDEN, EXPERTS]);
    }
    list.matrix(name("ffn_down_exps"), &[HIDDEN, WIDTH, EXPERTS]);
    for part in ["gate", "up"] {
        list.matrix(name(&format!("ffn_{part}_shexp")), &[WIDTH, HIDDEN]);
    }
    list.matrix(name("ffn_down_shexp"), &[HIDDEN, WIDTH]);
}
