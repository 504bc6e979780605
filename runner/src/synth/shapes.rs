//! The shapes of published models: metadata and tensors.

use crate::gguf::{QuantType, Writer};

/// One tensor of a model.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) ty: QuantType,
    /// The contiguous dimension first.
    pub(super) dims: Vec<u64>,
    pub(super) values: Values,
}

/// What a tensor holds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Values {
    /// Random weights of this deviation.
    Random(f32),
    /// The same number everywhere.
    All(f32),
    /// Frequency factors of a rope that turns the first so many pairs and leaves the others.
    RopeFactors { turned: u64 },
    /// So many experts for each token, different ones, out of `count`.
    Experts { used: u64, count: u64 },
}

/// A model by name. Zero stands for what a model does not have.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) architecture: &'static str,
    pub(super) layers: usize,
    context: u32,
    width: u64,
    ffn: u64,
    heads: u64,
    kv_heads: u64,
    /// KV heads of global layers.
    global_kv_heads: u64,
    head: u64,
    /// Head size of global layers.
    global_head: u64,
    window: u32,
    /// Every so many layers one is global.
    period: usize,
    /// The last layers of the full model that use another layer's keys and values.
    shared_kv: usize,
    /// Width of the embeddings of each layer.
    per_layer: u64,
    /// Whether values of global layers are their keys.
    values_are_keys: bool,
    experts: u64,
    experts_used: u32,
    expert_ffn: u64,
}

const VOCABULARY: u64 = 262_144;

pub(super) const MODELS: &[Model] = &[
    Model {
        name: "gemma3-270m",
        architecture: "gemma3",
        layers: 18,
        context: 32_768,
        width: 640,
        ffn: 2048,
        heads: 4,
        kv_heads: 1,
        global_kv_heads: 1,
        head: 256,
        global_head: 256,
        window: 512,
        period: 6,
        shared_kv: 0,
        per_layer: 0,
        values_are_keys: false,
        experts: 0,
        experts_used: 0,
        expert_ffn: 0,
    },
    Model {
        name: "gemma4-26b-a4b",
        architecture: "gemma4",
        layers: 30,
        context: 262_144,
        width: 2816,
        ffn: 2112,
        heads: 16,
        kv_heads: 8,
        global_kv_heads: 2,
        head: 256,
        global_head: 512,
        window: 1024,
        period: 6,
        shared_kv: 0,
        per_layer: 0,
        values_are_keys: true,
        experts: 128,
        experts_used: 8,
        expert_ffn: 704,
    },
    Model {
        name: "gemma4-31b",
        architecture: "gemma4",
        layers: 60,
        context: 262_144,
        width: 5376,
        ffn: 21_504,
        heads: 32,
        kv_heads: 16,
        global_kv_heads: 4,
        head: 256,
        global_head: 512,
        window: 1024,
        period: 6,
        shared_kv: 0,
        per_layer: 0,
        values_are_keys: true,
        experts: 0,
        experts_used: 0,
        expert_ffn: 0,
    },
    Model {
        name: "gemma4-e2b",
        architecture: "gemma4",
        layers: 35,
        context: 131_072,
        width: 1536,
        ffn: 6144,
        heads: 8,
        kv_heads: 1,
        global_kv_heads: 1,
        head: 256,
        global_head: 512,
        window: 512,
        period: 5,
        shared_kv: 20,
        per_layer: 256,
        values_are_keys: false,
        experts: 0,
        experts_used: 0,
        expert_ffn: 0,
    },
];

impl Model {
    fn is_local(&self, layer: usize) -> bool {
        layer % self.period != self.period - 1
    }

    /// How many of so many layers have no keys and values of their own. They use those of the last two layers before them, the
    /// second of which must be global.
    fn shared(&self, layers: usize) -> usize {
        if self.shared_kv == 0 || layers <= self.period {
            return 0;
        }
        let own = layers * (self.layers - self.shared_kv) / self.layers;
        layers - (own / self.period * self.period).max(self.period)
    }

    fn ffn_of(&self, layer: usize, layers: usize) -> u64 {
        if layer >= layers - self.shared(layers) { 2 * self.ffn } else { self.ffn }
    }

    /// Writes the keys of the architecture.
    pub(super) fn metadata(&self, layers: usize, writer: &mut Writer) {
        let key = |name: &str| format!("{}.{name}", self.architecture);
        writer.put(key("vocab_size"), VOCABULARY as u32);
        writer.put(key("context_length"), self.context);
        writer.put(key("embedding_length"), self.width as u32);
        writer.put(key("block_count"), layers as u32);
        writer.put(key("attention.head_count"), self.heads as u32);
        writer.put(key("attention.layer_norm_rms_epsilon"), 1e-6f32);
        writer.put(key("rope.freq_base"), 1e6f32);
        writer.put(key("rope.freq_base_swa"), 1e4f32);
        writer.put(key("attention.sliding_window"), self.window);
        writer.put(key("attention.key_length"), self.global_head as u32);
        writer.put(key("attention.value_length"), self.global_head as u32);
        let kv_heads = |layer| if self.is_local(layer) { self.kv_heads } else { self.global_kv_heads };
        if self.kv_heads == self.global_kv_heads {
            writer.put(key("attention.head_count_kv"), self.kv_heads as u32);
        } else {
            writer.put(key("attention.head_count_kv"), (0..layers).map(|l| kv_heads(l) as i32).collect::<Vec<_>>());
        }
        if self.architecture == "gemma3" {
            writer.put(key("feed_forward_length"), self.ffn as u32);
            return;
        }
        let shared = self.shared(layers);
        if shared == 0 {
            writer.put(key("feed_forward_length"), self.ffn as u32);
        } else {
            let widths: Vec<i32> = (0..layers).map(|layer| self.ffn_of(layer, layers) as i32).collect();
            writer.put(key("feed_forward_length"), widths);
        }
        writer.put(key("attention.key_length_swa"), self.head as u32);
        writer.put(key("attention.value_length_swa"), self.head as u32);
        writer.put(key("rope.dimension_count"), self.global_head as u32);
        writer.put(key("rope.dimension_count_swa"), self.head as u32);
        let locals: Vec<bool> = (0..layers).map(|layer| self.is_local(layer)).collect();
        writer.put(key("attention.sliding_window_pattern"), locals);
        writer.put(key("attention.shared_kv_layers"), shared as u32);
        writer.put(key("embedding_length_per_layer_input"), self.per_layer as u32);
        writer.put(key("final_logit_softcapping"), 30f32);
        if self.experts > 0 {
            writer.put(key("expert_count"), self.experts as u32);
            writer.put(key("expert_used_count"), self.experts_used);
            writer.put(key("expert_feed_forward_length"), self.expert_ffn as u32);
        }
    }

    /// Lists the tensors, in the order in which they stand in the file.
    pub(super) fn tensors(&self, layers: usize, quant: QuantType, out: &mut Vec<Tensor>) {
        let gemma4 = self.architecture == "gemma4";
        let mut list = List { quant, out };
        // A tied head sees the embedding again. Small embeddings, which the layers drown, keep the last token from being the
        // likeliest next one; the last norm makes up for it.
        list.embedding("token_embd", &[self.width, VOCABULARY], 0.25);
        list.all("output_norm.weight", &[self.width], 4.0);
        // For global layers only: a cut that has none must not have what no layer uses.
        if gemma4 && (0..layers).any(|layer| !self.is_local(layer)) {
            let (pairs, turned) = (self.global_head / 2, self.global_head / 8);
            list.push("rope_freqs.weight", QuantType::F32, &[pairs], Values::RopeFactors { turned });
        }
        if self.per_layer > 0 {
            let all = self.per_layer * layers as u64;
            let deviation = 1.0 / (self.per_layer as f32).sqrt();
            let ty = whole_blocks(quant, all);
            list.push("per_layer_token_embd.weight", ty, &[all, VOCABULARY], Values::Random(deviation));
            list.matrix("per_layer_model_proj", &[self.width, all]);
            list.all("per_layer_proj_norm.weight", &[self.per_layer], 1.0);
        }
        for layer in 0..layers {
            self.layer(layer, layers, &mut list);
        }
    }

    fn layer(&self, layer: usize, layers: usize, list: &mut List<'_>) {
        let gemma4 = self.architecture == "gemma4";
        let name = |part: &str| format!("blk.{layer}.{part}");
        let norm = |part: &str| format!("blk.{layer}.{part}.weight");
        let (width, local) = (self.width, self.is_local(layer));
        let (head, kv_heads) =
            if local { (self.head, self.kv_heads) } else { (self.global_head, self.global_kv_heads) };
        let own_kv = layer < layers - self.shared(layers);
        let ffn = self.ffn_of(layer, layers);
        // gemma4 does not divide scores by the root of the head size; its norm does.
        let query = if gemma4 { 2.0 / (head as f32).sqrt() } else { 1.0 };
        list.all(norm("attn_norm"), &[width], 1.0);
        list.matrix(name("attn_q"), &[width, self.heads * head]);
        list.all(norm("attn_q_norm"), &[head], query);
        if own_kv {
            list.matrix(name("attn_k"), &[width, kv_heads * head]);
            list.all(norm("attn_k_norm"), &[head], 1.0);
            if local || !self.values_are_keys {
                list.matrix(name("attn_v"), &[width, kv_heads * head]);
            }
        }
        list.matrix(name("attn_output"), &[self.heads * head, width]);
        list.all(norm("post_attention_norm"), &[width], 1.0);
        list.all(norm("ffn_norm"), &[width], 1.0);
        list.matrix(name("ffn_gate"), &[width, ffn]);
        list.matrix(name("ffn_up"), &[width, ffn]);
        list.matrix(name("ffn_down"), &[ffn, width]);
        list.all(norm("post_ffw_norm"), &[width], 1.0);
        if gemma4 {
            list.all(norm("layer_output_scale"), &[1], 1.0);
        }
        if self.experts > 0 {
            // The router's input is as long as one component: its logits get a deviation of 1.
            list.push(norm("ffn_gate_inp"), QuantType::F32, &[width, self.experts], Values::Random(1.0));
            list.all(name("ffn_gate_inp.scale"), &[width], 1.0);
            for part in ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] {
                list.all(norm(part), &[width], 1.0);
            }
            list.matrix(name("ffn_gate_up_exps"), &[width, 2 * self.expert_ffn, self.experts]);
            list.matrix(name("ffn_down_exps"), &[self.expert_ffn, width, self.experts]);
            list.all(name("ffn_down_exps.scale"), &[self.experts], 1.0);
        }
        if self.per_layer > 0 {
            list.matrix(name("inp_gate"), &[width, self.per_layer]);
            list.matrix(name("proj"), &[self.per_layer, width]);
            list.all(norm("post_norm"), &[width], 1.0);
        }
    }
}

/// Tensors while they are listed.
pub(super) struct List<'a> {
    pub(super) quant: QuantType,
    pub(super) out: &'a mut Vec<Tensor>,
}

impl List<'_> {
    pub(super) fn push(&mut self, name: impl Into<String>, ty: QuantType, dims: &[u64], values: Values) {
        self.out.push(Tensor { name: name.into(), ty, dims: dims.to_vec(), values });
    }

    pub(super) fn all(&mut self, name: impl Into<String>, dims: &[u64], value: f32) {
        self.push(name, QuantType::F32, dims, Values::All(value));
    }

    /// A matrix, or one for each expert, whose rows have as many weights as there are inputs.
    pub(super) fn matrix(&mut self, name: impl Into<String>, dims: &[u64]) {
        let inputs = dims.first().copied().unwrap_or(1);
        let ty = whole_blocks(self.quant, inputs);
        self.push(format!("{}.weight", name.into()), ty, dims, Values::Random(1.0 / (inputs as f32).sqrt()));
    }

    /// The embedding, which is the head as well: quantisers give it more bits than the layers.
    pub(super) fn embedding(&mut self, name: &str, dims: &[u64], share: f32) {
        use QuantType::{Q4_0, Q6_K, Q8_0};
        let inputs = dims.first().copied().unwrap_or(1);
        let few_bits = self.quant.block_size() > 1 && self.quant != Q8_0 && self.quant.id() >= Q4_0.id();
        let ty = whole_blocks(if few_bits { Q6_K } else { self.quant }, inputs);
        self.push(format!("{name}.weight"), ty, dims, Values::Random(share / (inputs as f32).sqrt()));
    }
}

/// The type, or what quantisers take instead where rows are no whole blocks of it.
fn whole_blocks(ty: QuantType, row: u64) -> QuantType {
    use QuantType::{F16, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    let fits = |ty: QuantType| row.is_multiple_of(ty.block_size() as u64);
    let other = match ty {
        Q2_K | Q3_K | QuantType::IQ4_XS => IQ4_NL,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        _ => F16,
    };
    [ty, other].into_iter().find(|ty| fits(*ty)).unwrap_or(F16)
}
