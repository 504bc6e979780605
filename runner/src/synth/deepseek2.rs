//! DeepSeek V2-Lite and V3: latent attention, dense layers first, shared experts.

use super::shapes::{List, Tensor, Values};
use crate::gguf::{QuantType, Writer};

pub(super) const ARCHITECTURE: &str = "deepseek2";

/// A model by name. Zero stands for what a model does not have.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) layers: usize,
    context: u64,
    vocabulary: u64,
    width: u64,
    heads: u64,
    query_rank: u64,
    dense: usize,
    hidden: u64,
    experts: u64,
    used: u64,
    expert_hidden: u64,
    shared: u64,
    groups: [u64; 2],
    scale: f32,
    /// 1: softmax; 2: sigmoid, with a bias for the choice and weights over their sum.
    gating: u64,
    log_multiplier: f32,
}

pub(super) const MODELS: &[Model] = &[
    Model {
        name: "deepseek-v2-lite",
        layers: 27,
        context: 163_840,
        vocabulary: 102_400,
        width: 2048,
        heads: 16,
        query_rank: 0,
        dense: 1,
        hidden: 10_944,
        experts: 64,
        used: 6,
        expert_hidden: 1408,
        shared: 2,
        groups: [1, 1],
        scale: 1.0,
        gating: 1,
        log_multiplier: 0.0707,
    },
    Model {
        name: "deepseek-v3",
        layers: 61,
        context: 163_840,
        vocabulary: 129_280,
        width: 7168,
        heads: 128,
        query_rank: 1536,
        dense: 3,
        hidden: 18_432,
        experts: 256,
        used: 8,
        expert_hidden: 2048,
        shared: 1,
        groups: [8, 4],
        scale: 2.5,
        gating: 2,
        log_multiplier: 0.1,
    },
];

/// Widths that both have: of a latent row, of what positions turn, of a head's own keys, and of its values.
const RANK: u64 = 512;
const TURNED: u64 = 64;
const OWN: u64 = 128;
const VALUES: u64 = 128;

impl Model {
    /// Writes the keys of the architecture.
    pub(super) fn metadata(&self, layers: usize, writer: &mut Writer) {
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        for (name, value) in [
            ("vocab_size", self.vocabulary),
            ("context_length", self.context),
            ("embedding_length", self.width),
            ("block_count", layers as u64),
            ("feed_forward_length", self.hidden),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", 1),
            ("attention.kv_lora_rank", RANK),
            ("attention.key_length", RANK + TURNED),
            ("attention.value_length", RANK),
            ("attention.key_length_mla", OWN + TURNED),
            ("attention.value_length_mla", VALUES),
            ("rope.dimension_count", TURNED),
            ("rope.scaling.original_context_length", 4096),
            ("leading_dense_block_count", self.dense as u64),
            ("expert_count", self.experts),
            ("expert_used_count", self.used),
            ("expert_shared_count", self.shared),
            ("expert_feed_forward_length", self.expert_hidden),
            ("expert_group_count", self.groups[0]),
            ("expert_group_used_count", self.groups[1]),
            ("expert_gating_func", self.gating),
            // llama.cpp asks for it where the number of layers is not a published model's; 0 is none.
            ("attention.q_lora_rank", self.query_rank),
        ] {
            writer.put(key(name), value as u32);
        }
        for (name, value) in [
            ("attention.layer_norm_rms_epsilon", 1e-6f32),
            ("rope.freq_base", 1e4),
            ("rope.scaling.factor", 40.0),
            ("rope.scaling.yarn_beta_fast", 32.0),
            ("rope.scaling.yarn_beta_slow", 1.0),
            ("rope.scaling.yarn_log_multiplier", self.log_multiplier),
            ("expert_weights_scale", self.scale),
        ] {
            writer.put(key(name), value);
        }
        writer.put(key("rope.scaling.type"), "yarn");
        writer.put(key("expert_weights_norm"), self.gating == 2);
    }

    /// Lists the tensors, in the order in which they stand in the file.
    pub(super) fn tensors(&self, layers: usize, quant: QuantType, out: &mut Vec<Tensor>) {
        let mut list = List { quant, out };
        list.embedding("token_embd", &[self.width, self.vocabulary], 1.0);
        list.all("output_norm.weight", &[self.width], 4.0);
        list.embedding("output", &[self.width, self.vocabulary], 1.0);
        for layer in 0..layers {
            self.attention(&mut list, layer);
            self.feed_forward(&mut list, layer);
        }
    }

    fn attention(&self, list: &mut List<'_>, layer: usize) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let norm = |part: &str| format!("blk.{layer}.{part}.weight");
        let (width, heads, rank) = (self.width, self.heads, self.query_rank);
        list.all(norm("attn_norm"), &[width], 1.0);
        if rank == 0 {
            list.matrix(name("attn_q"), &[width, heads * (OWN + TURNED)]);
        } else {
            list.matrix(name("attn_q_a"), &[width, rank]);
            list.all(norm("attn_q_a_norm"), &[rank], 1.0);
            list.matrix(name("attn_q_b"), &[rank, heads * (OWN + TURNED)]);
        }
        list.matrix(name("attn_kv_a_mqa"), &[width, RANK + TURNED]);
        list.all(norm("attn_kv_a_norm"), &[RANK], 1.0);
        list.matrix(name("attn_k_b"), &[OWN, RANK, heads]);
        list.matrix(name("attn_v_b"), &[RANK, VALUES, heads]);
        list.matrix(name("attn_output"), &[heads * VALUES, width]);
    }

    fn feed_forward(&self, list: &mut List<'_>, layer: usize) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let norm = |part: &str| format!("blk.{layer}.{part}.weight");
        let (width, hidden) = (self.width, self.expert_hidden);
        list.all(norm("ffn_norm"), &[width], 1.0);
        let mut dense = |suffix: &str, hidden| {
            list.matrix(name(&format!("ffn_gate{suffix}")), &[width, hidden]);
            list.matrix(name(&format!("ffn_up{suffix}")), &[width, hidden]);
            list.matrix(name(&format!("ffn_down{suffix}")), &[hidden, width]);
        };
        if layer < self.dense {
            return dense("", self.hidden);
        }
        dense("_shexp", self.shared * hidden);
        let deviation = 1.0 / (width as f32).sqrt();
        list.push(norm("ffn_gate_inp"), QuantType::F32, &[width, self.experts], Values::Random(deviation));
        if self.gating == 2 {
            let bias = format!("blk.{layer}.exp_probs_b.bias");
            list.push(bias, QuantType::F32, &[self.experts], Values::Random(0.05));
        }
        for part in ["gate", "up"] {
            list.matrix(name(&format!("ffn_{part}_exps")), &[width, hidden, self.experts]);
        }
        list.matrix(name("ffn_down_exps"), &[hidden, width, self.experts]);
    }
}

/// As [`MODELS`], but of a size that runs in a test.
#[cfg(test)]
pub(super) fn tiny() -> impl Iterator<Item = Model> {
    MODELS.iter().map(
        |&Model { name, layers, query_rank, dense, shared, groups, scale, gating, log_multiplier, .. }| Model {
            name,
            layers,
            context: 4096,
            vocabulary: 512,
            width: 128,
            heads: 4,
            query_rank: query_rank.min(64),
            dense,
            hidden: 96,
            experts: 16,
            used: 3,
            expert_hidden: 64,
            shared,
            groups: groups.map(|groups| groups.min(8)),
            scale,
            gating,
            log_multiplier,
        },
    )
}
