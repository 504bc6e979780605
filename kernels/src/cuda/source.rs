//! The sources of the CUDA kernels.

/// One `.cu` file with its place in this crate.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// The file's name without `.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! sources {
    ($($name:literal)*) => {
        &[$(Source { name: $name, text: include_str!(concat!("../../cuda/", $name, ".cu")) }),*]
    };
}

macro_rules! headers {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../cuda/", $name)))),*]
    };
}

/// Every source: one op a file, or a part of its kernels where there are many.
pub const SOURCES: &[Source] = sources![
    "add" "advance" "argmax" "attention" "attention_heads" "attention_scores" "attention_split" "attention_values" "compress_keys"
    "compressed_attention" "copy" "expert_matmul" "expert_matvec_f32" "expert_matvec_q8" "expert_sum" "fill"
    "fp8_kv_quantize" "fused_down" "fused_norm" "fused_router" "gather_experts" "get_rows" "glu" "hc_expand" "hc_split_sinkhorn" "hc_weighted_sum" "host_turn"
    "index_scores" "index_top" "kv_store" "latent_heads" "matmul" "matvec_f32_t1" "matvec_f32_t4" "matvec_q8_t1"
    "matvec_q8_t8" "mul" "probe" "quantize" "residual_norm" "rms_norm" "rope" "rope_tail" "router" "sample" "scale"
    "share_experts" "soft_max" "softcap"
];

/// Every header that they may include, by the name under which they do. Nothing else can be included.
pub(super) const HEADERS: &[(&str, &str)] = headers![
    "activations.cuh" "cache.cuh" "choice.cuh" "codes.cuh" "common.cuh" "copy_async.cuh" "elementwise.cuh" "expert_matvec.cuh" "flow.cuh" "gated.cuh" "greatest.cuh"
    "grids.cuh" "matvec.cuh" "matvec_floats.cuh" "mma.cuh" "quant.cuh" "sight.cuh" "tiles.cuh" "yarn.cuh"
];
