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

/// Every source, one op a file.
pub const SOURCES: &[Source] = sources![
    "add" "advance" "argmax" "attention_scores" "attention_values" "copy" "expert_sum" "fill" "glu" "kv_store" "mul"
    "probe" "rms_norm" "rope" "router" "scale" "soft_max" "softcap"
];

/// Every header that they may include, by the name under which they do. Nothing else can be included.
pub(super) const HEADERS: &[(&str, &str)] = headers![
    "cache.cuh" "common.cuh" "elementwise.cuh" "greatest.cuh"
];
