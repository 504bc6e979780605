//! DeepSeek V4 Flash: three kinds of layers, four residual streams.

use super::shapes::{List, Tensor, Values};
use crate::gguf::{QuantType, Writer};

pub(super) const NAME: &str = "deepseek-v4-flash";
pub(super) const ARCHITECTURE: &str = "deepseek4";
/// Layers of the published model.
pub(super) const LAYERS: usize = 43;

/// A model of this family.
#[derive(Debug)]
pub(super) struct Model {
    vocabulary: u64,
    width: u64,
    heads: u64,
    head: u64,
    query_rank: u64,
    groups: u64,
    output_rank: u64,
    index_heads: u64,
    index_head: u64,
    experts: u64,
    used: u64,
    hidden: u64,
}

/// The published one.
pub(super) const FLASH: Model = Model {
    vocabulary: 129_280,
    width: 4096,
    heads: 64,
    head: 512,
    query_rank: 1024,
    groups: 8,
    output_rank: 1024,
    index_heads: 64,
    index_head: 128,
    experts: 256,
    used: 6,
    hidden: 2048,
};

const STREAMS: u64 = 4;
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

impl Model {
    /// Writes the keys of the architecture.
    pub(super) fn metadata(&self, layers: usize, writer: &mut Writer) {
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        for (name, value) in [
            ("vocab_size", self.vocabulary),
            ("context_length", 1 << 20),
            ("embedding_length", self.width),
            ("embedding_length_out", STREAMS * self.width),
            ("block_count", layers as u64),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", 1),
            ("attention.key_length", self.head),
            ("attention.value_length", self.head),
            ("attention.q_lora_rank", self.query_rank),
            ("attention.sliding_window", 128),
            ("attention.indexer.head_count", self.index_heads),
            ("attention.indexer.key_length", self.index_head),
            ("attention.indexer.top_k", 512),
            ("attention.output_group_count", self.groups),
            ("attention.output_lora_rank", self.output_rank),
            ("rope.dimension_count", 64),
            ("rope.scaling.original_context_length", 65_536),
            ("hyper_connection.count", STREAMS),
            ("hyper_connection.sinkhorn_iterations", 20),
            ("hash_layer_count", HASHED.min(layers) as u64),
            ("expert_count", self.experts),
            ("expert_used_count", self.used),
            ("expert_feed_forward_length", self.hidden),
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
    pub(super) fn tensors(&self, layers: usize, quant: QuantType, out: &mut Vec<Tensor>) {
        let mut list = List { quant, out };
        list.embedding("token_embd", &[self.width, self.vocabulary], 1.0);
        list.all("output_norm.weight", &[self.width], 4.0);
        list.embedding("output", &[self.width, self.vocabulary], 1.0);
        self.mixer(&mut list, "output_hc", STREAMS, 1);
        for layer in 0..layers {
            self.attention(&mut list, layer);
            self.feed_forward(&mut list, layer);
        }
    }

    /// What weighs the streams, all of it floats.
    fn mixer(&self, list: &mut List<'_>, name: &str, rows: u64, scales: u64) {
        let inputs = STREAMS * self.width;
        floats(list, &format!("{name}_fn.weight"), &[inputs, rows], 1.0 / (inputs as f32).sqrt());
        floats(list, &format!("{name}_base.weight"), &[rows], 0.5);
        list.all(format!("{name}_scale.weight"), &[scales], 1.0);
    }

    fn attention(&self, list: &mut List<'_>, layer: usize) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let norm = |part: &str| format!("blk.{layer}.{part}.weight");
        self.mixer(list, &name("hc_attn"), (2 + STREAMS) * STREAMS, 3);
        list.all(norm("attn_norm"), &[self.width], 1.0);
        floats(list, &norm("attn_sinks"), &[self.heads], 1.0);
        list.matrix(name("attn_q_a"), &[self.width, self.query_rank]);
        list.all(norm("attn_q_a_norm"), &[self.query_rank], 1.0);
        list.matrix(name("attn_q_b"), &[self.query_rank, self.heads * self.head]);
        list.matrix(name("attn_kv"), &[self.width, self.head]);
        list.all(norm("attn_kv_a_norm"), &[self.head], 1.0);
        list.matrix(name("attn_output_a"), &[self.heads * self.head / self.groups, self.groups * self.output_rank]);
        list.matrix(name("attn_output_b"), &[self.groups * self.output_rank, self.width]);
        let mut compressor = |prefix: &str, width: u64, ratio: u64| {
            let channels = if ratio == 4 { 2 * width } else { width };
            let name = |part: &str| format!("blk.{layer}.{prefix}_compressor_{part}");
            list.matrix(name("kv"), &[self.width, channels]);
            list.matrix(name("gate"), &[self.width, channels]);
            floats(list, &format!("{}.weight", name("ape")), &[channels, ratio], 1.0);
            list.all(format!("{}.weight", name("norm")), &[width], 1.0);
        };
        match ratio(layer) {
            0 => {}
            4 => {
                compressor("attn", self.head, 4);
                compressor("indexer", self.index_head, 4);
                list.matrix(name("indexer.attn_q_b"), &[self.query_rank, self.index_heads * self.index_head]);
                list.matrix(name("indexer.proj"), &[self.width, self.index_heads]);
            }
            ratio => compressor("attn", self.head, ratio),
        }
    }

    fn feed_forward(&self, list: &mut List<'_>, layer: usize) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let norm = |part: &str| format!("blk.{layer}.{part}.weight");
        self.mixer(list, &name("hc_ffn"), (2 + STREAMS) * STREAMS, 3);
        list.all(norm("ffn_norm"), &[self.width], 1.0);
        floats(list, &norm("ffn_gate_inp"), &[self.width, self.experts], 1.0 / (self.width as f32).sqrt());
        if layer < HASHED {
            let values = Values::Experts { used: self.used, count: self.experts };
            list.push(norm("ffn_gate_tid2eid"), QuantType::I32, &[self.used, self.vocabulary], values);
        } else {
            floats(list, &format!("blk.{layer}.exp_probs_b.bias"), &[self.experts], 0.1);
        }
        for part in ["gate", "up"] {
            list.matrix(name(&format!("ffn_{part}_exps")), &[self.width, self.hidden, self.experts]);
        }
        list.matrix(name("ffn_down_exps"), &[self.hidden, self.width, self.experts]);
        for part in ["gate", "up"] {
            list.matrix(name(&format!("ffn_{part}_shexp")), &[self.width, self.hidden]);
        }
        list.matrix(name("ffn_down_shexp"), &[self.hidden, self.width]);
    }
}

fn floats(list: &mut List<'_>, name: &str, dims: &[u64], deviation: f32) {
    list.push(name, QuantType::F32, dims, Values::Random(deviation));
}

/// One that runs in a test.
#[cfg(test)]
pub(super) const TINY: Model = Model {
    vocabulary: 512,
    width: 128,
    heads: 4,
    head: 128,
    query_rank: 64,
    groups: 2,
    output_rank: 32,
    index_heads: 8,
    index_head: 64,
    experts: 16,
    used: 3,
    hidden: 64,
};
