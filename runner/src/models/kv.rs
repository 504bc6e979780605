//! The key and value cache of a sequence, in pool memory.

use evergraph_kernels::ops::TensorView;
use evergraph_pool::{DeviceSlice, Purpose, Tracked, Use};

use super::block::Block;
use crate::engine::{KvType, Runtime};
use crate::error::Result;

/// One layer's cache.
#[derive(Debug)]
pub struct LayerCache {
    /// `[C, kv_heads, key_dim]`.
    pub k: TensorView,
    /// `[C, kv_heads, value_dim]`.
    pub v: TensorView,
    /// Whether position `p` is in row `p mod C`: a sliding layer keeps its window only.
    pub ring: bool,
}

/// The caches of all layers.
///
/// # Reuse and capture
/// Addresses are fixed for the life of the sequence; where to write and how far to read stands in device
/// memory, so that one captured step serves every position.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    slices: Vec<DeviceSlice<u8>>,
}

impl KvCache {
    /// Room for `context` tokens, fed at most `batch` at a time. A layer with a sliding window keeps
    /// `window + batch - 1` rows, since the first token of a batch still sees the window behind it.
    ///
    /// # Errors
    /// Out of memory, and what else the pool says.
    pub fn new(
        runtime: &Runtime,
        blocks: &[Block],
        context: usize,
        batch: usize,
        types: (KvType, KvType),
    ) -> Result<Self> {
        let (mut layers, mut slices) = (Vec::new(), Vec::new());
        for (index, block) in blocks.iter().enumerate() {
            let part = &block.attention;
            let kept = part.window.map_or(context, |window| (window as usize).saturating_add(batch).min(context));
            let mut tensor = |what: &str, ty: KvType, width: usize| {
                let shape = [kept, part.kv_heads, width];
                let bytes = crate::engine::tensor_bytes(ty.quant_type(), &shape)?;
                let slice = runtime.pool().alloc_for::<u8>(bytes, Purpose::State, runtime.stream())?;
                let name = format!("{what} cache of layer {index}");
                let view = crate::engine::view_of(&slice, &name, runtime.device(), ty.quant_type(), &shape)?;
                slices.push(slice);
                Ok::<_, crate::Error>(view)
            };
            let k = tensor("key", types.0, part.key_dim)?;
            let v = tensor("value", types.1, part.value_dim)?;
            layers.push(LayerCache { k, v, ring: kept < context });
        }
        Ok(Self { layers, slices })
    }

    /// The layers' caches.
    #[must_use]
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// What a step that uses the cache depends on.
    pub fn uses(&self) -> impl Iterator<Item = (&dyn Tracked, Use)> {
        self.slices.iter().map(|slice| (slice as &dyn Tracked, Use::State))
    }

    /// Bytes of all of it.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slices.iter().map(DeviceSlice::bytes).sum()
    }
}
