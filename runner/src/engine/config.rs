//! How a sequence is set up.

use evergraph_kernels::quant::QuantType;

/// Element type of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KvType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    #[default]
    F16,
    /// The upper half of 32-bit floats.
    Bf16,
}

impl KvType {
    /// As a tensor type.
    #[must_use]
    pub fn quant_type(self) -> QuantType {
        match self {
            Self::F32 => QuantType::F32,
            Self::F16 => QuantType::F16,
            Self::Bf16 => QuantType::BF16,
        }
    }
}

/// How a sequence is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SessionConfig {
    /// Most tokens in the sequence; none means as many as the model was made for.
    pub context: Option<usize>,
    /// Most tokens in one step.
    pub ubatch: usize,
    /// Types of the key and value caches.
    pub kv: (KvType, KvType),
    /// Rows of logits made at a time, where logits of many positions are asked for.
    pub logit_rows: usize,
    /// Whether attention is one kernel that keeps no scores. Else they are written out, in scratch that grows with the text, and a step
    /// is another graph for each 256 tokens of it.
    pub flash_attention: bool,
    /// Tokens in a step from which on experts that stay on the host are copied to the device for it, rather than done on the host.
    /// None means as many as is best, if there is room for them.
    pub stream_experts: Option<usize>,
    /// Of the experts that a single token uses and that stay on the host, how many the device reads over the bus and does, while
    /// the host does the others. None means as many as is best.
    pub device_experts: Option<usize>,
    /// Memory of the device for experts that stay on the host, bytes at most: those that single tokens choose most often, which the
    /// device then does without reading them over the bus. None means none.
    pub expert_cache: Option<usize>,
    /// Whether the output of each block is kept, for tests and debugging.
    pub taps: bool,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            context: None,
            ubatch: 512,
            kv: (KvType::F16, KvType::F16),
            logit_rows: 1,
            flash_attention: true,
            stream_experts: None,
            device_experts: None,
            expert_cache: None,
            taps: false,
        }
    }
}
