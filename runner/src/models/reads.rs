//! What a step can not do without reading: the measure of how well it uses memory.

use std::ops::Range;

use evergraph_kernels::ops::TensorView;

use super::compressed::CompressedPart;
use super::decoder::Decoder;
use super::experts::Experts;
use super::feed_forward::Branch;
use crate::engine::KvType;

impl Decoder {
    /// Bytes of weights that a step of `tokens` tokens with `logits` rows of logits reads at least, each once: matrices in full
    /// (of experts, as many as `tokens` tokens can pick if each picks others), one row of an embedding for each token. Norms and
    /// other vectors are not counted.
    #[must_use]
    pub fn weight_bytes(&self, tokens: usize, logits: usize) -> u64 {
        let blocks: u64 = self.blocks.iter().map(|block| parts_bytes(block.products(), &block.branches, tokens)).sum();
        let streams = self.streams.iter().flat_map(|stack| &stack.blocks);
        let streams: u64 = streams.map(|block| parts_bytes(block.products(), &block.branches, tokens)).sum();
        let blocks = blocks.saturating_add(streams);
        let inputs = self.layer_inputs.as_ref().map_or(0, |inputs| {
            bytes(&inputs.projection).saturating_add(row_bytes(&inputs.table).saturating_mul(tokens as u64))
        });
        let head = if logits > 0 { bytes(&self.output) } else { 0 };
        let rows = row_bytes(&self.embedding).saturating_mul(tokens as u64);
        [inputs, head, rows].into_iter().fold(blocks, u64::saturating_add)
    }

    /// Bytes of keys and values that a step of the tokens at `positions` reads at least, each once: all up to the last, or what
    /// the windows of its tokens see.
    #[must_use]
    pub fn cache_bytes(&self, positions: Range<usize>, types: (KvType, KvType)) -> u64 {
        let streams = self.streams.iter().flat_map(|stack| &stack.blocks);
        let streams = streams.map(|block| compressed_bytes(&block.attention, &positions, types.0));
        let parts = self.blocks.iter().map(|block| &block.attention);
        parts
            .map(|part| {
                let seen = part.window.map_or(positions.end, |window| {
                    positions.len().saturating_add(window as usize).saturating_sub(1).min(positions.end)
                });
                let width = |dim: usize, ty: KvType| dim.saturating_mul(ty.quant_type().type_bytes());
                let values = if part.latent().is_some() { 0 } else { part.value_dim };
                let row = width(part.key_dim, types.0).saturating_add(width(values, types.1));
                seen.saturating_mul(part.kv_heads).saturating_mul(row) as u64
            })
            .chain(streams)
            .fold(0, u64::saturating_add)
    }
}

fn parts_bytes<'a>(products: impl Iterator<Item = &'a TensorView>, branches: &[Branch], tokens: usize) -> u64 {
    let experts = || branches.iter().filter_map(|branch| branch.part.experts());
    // Experts are counted in full among the products; what nobody can have picked is taken off again.
    let idle: u64 = experts().map(|experts| idle_bytes(experts, tokens)).sum();
    let routers: u64 = experts().map(|experts| bytes(&experts.router)).sum();
    (products.map(bytes).sum::<u64>() + routers).saturating_sub(idle)
}

/// Bytes of a window's keys and of the compressed ones that the last token sees, with those of the index.
fn compressed_bytes(part: &CompressedPart, positions: &Range<usize>, ty: KvType) -> u64 {
    let row = |width: usize| width.saturating_mul(ty.quant_type().type_bytes());
    let own = positions.len().saturating_add(part.window as usize).saturating_sub(1).min(positions.end);
    let ratio = part.compressor.as_ref().map_or(usize::MAX, |compressor| compressor.ratio);
    let entries = positions.end / ratio;
    let seen = part.indexer.as_ref().map_or(entries, |index| entries.min(index.top));
    let index = part.indexer.as_ref().map_or(0, |index| row(index.compressor.norm.dim(0)));
    own.saturating_add(seen).saturating_mul(row(part.dim)).saturating_add(entries.saturating_mul(index)) as u64
}

/// Bytes of the experts that so many tokens leave alone, at least.
fn idle_bytes(experts: &Experts, tokens: usize) -> u64 {
    let all = experts.router.dim(0);
    let idle = all.saturating_sub(experts.used.saturating_mul(tokens));
    experts.products().map(|weight| bytes(weight) / all.max(1) as u64 * idle as u64).sum()
}

fn bytes(view: &TensorView) -> u64 {
    view.range().len() as u64
}

fn row_bytes(view: &TensorView) -> u64 {
    bytes(view) / view.rows().max(1) as u64
}
