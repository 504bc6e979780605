//! A stack of blocks over several residual streams.

use evergraph_kernels::ops::{Copy, RmsNorm, TensorView};
use evergraph_pool::driver::DeviceOrdinal;

use super::block::{Parts, Shared};
use super::compressed::{CompressedPart, Scratch};
use super::decoder::{Decoder, Taps, tap};
use super::feed_forward::{self, Branch, BranchInput};
use super::hyper::{Mixer, Streams};
use super::input::get_rows;
use super::kv::{KvCache, LayerCache};
use super::residual;
use crate::engine::Step;
use crate::error::{Error, Result};

/// The blocks of a model whose residual is several streams.
#[derive(Debug)]
pub struct StreamStack {
    /// Number of streams.
    pub streams: usize,
    /// Rounds that make the weights between streams.
    pub iterations: u32,
    /// Keeps sums of those from 0.
    pub eps: f32,
    /// The blocks.
    pub blocks: Vec<StreamBlock>,
    /// Makes one of the streams after the last block.
    pub head: Mixer,
    /// Whether keys are rounded as an 8-bit cache would have them.
    pub rounded_keys: bool,
}

/// A block: attention, then feed-forward parts, each with its own way to read and write the streams.
#[derive(Debug)]
pub struct StreamBlock {
    /// The device that it is on.
    pub device: DeviceOrdinal,
    /// For attention.
    pub attn_mixer: Mixer,
    /// Norm before attention, `[D]`.
    pub attn_norm: TensorView,
    /// Attention.
    pub attention: CompressedPart,
    /// For the feed-forward parts.
    pub ffn_mixer: Mixer,
    /// Feed-forward parts, side by side.
    pub branches: Vec<Branch>,
}

impl StreamBlock {
    /// The weights of all its products.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        let branches = self.branches.iter().flat_map(|branch| branch.part.products());
        let mixers = [&self.attn_mixer.mix, &self.ffn_mixer.mix];
        self.attention.products().chain(branches).chain(mixers)
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        streams: &Streams,
        scratch: &Scratch,
        cache: &LayerCache,
    ) -> Result<()> {
        let (h, y, eps) = (&streams.x, &shared.y, shared.eps);
        streams.read(step, &self.attn_mixer)?;
        let x = shared.place(0).normed(self.attention.projections(), false)?;
        x.norm(step, RmsNorm::new(h.clone(), self.attn_norm.clone(), h.clone(), eps))?;
        self.attention.forward(step, shared, scratch, &x, cache)?;
        streams.write(step, y)?;

        streams.read(step, &self.ffn_mixer)?;
        let inputs = feed_forward::inputs(&self.branches, step, shared)?;
        for wanted in inputs.iter().flatten().flat_map(BranchInput::wanted) {
            wanted.norm(step, h, eps)?;
        }
        let parts = feed_forward::forward(&self.branches, step, shared, h, &inputs)?;
        residual::fold(step, &parts, y, eps)?;
        streams.write(step, y)
    }
}

impl StreamStack {
    /// What the blocks of a device take of the scratch that they share.
    fn parts(&self, device: DeviceOrdinal) -> Parts<'_> {
        let blocks = || self.blocks.iter().filter(|block| block.device == device);
        let most = |of: &dyn Fn(&CompressedPart) -> usize| {
            blocks().map(|block| of(&block.attention)).max().unwrap_or(1).max(1)
        };
        let heads = most(&|part| part.heads * part.dim);
        Parts {
            branches: blocks().map(|block| block.branches.as_slice()).collect(),
            products: blocks().flat_map(StreamBlock::products).collect(),
            attention: [heads, most(&|part| part.dim), 1, heads],
            input: 1,
        }
    }

    /// As [`Decoder::forward`].
    pub(super) fn forward(
        &self,
        model: &Decoder,
        step: &mut Step<'_>,
        [ids, positions, out]: [&TensorView; 3],
        cache: &KvCache,
        taps: Option<&Taps>,
    ) -> Result<()> {
        let (tokens, width, home) = (ids.dim(0), model.width, step.device());
        let dims = [tokens, self.streams, width];
        let sums = (self.iterations, self.eps, model.eps);
        step.go_to(model.embedding.root().device);
        let mut streams = Streams::new(step, dims, sums)?;
        let first = streams.stream(0)?;
        get_rows(step, &model.embedding, ids, &first, model.embedding_scale)?;
        for number in 1..self.streams {
            step.push(Copy { src: first.clone(), dst: streams.stream(number)? })?;
        }
        let layers = cache.layers();
        if layers.len() != self.blocks.len() {
            return Err(Error::CheckFailed(format!("{} caches for {} blocks", layers.len(), self.blocks.len())));
        }
        let mut site: Option<(DeviceOrdinal, Shared, Scratch)> = None;
        for (index, (block, layer)) in self.blocks.iter().zip(layers).enumerate() {
            if streams.device() != block.device {
                step.go_to(block.device);
                streams = streams.moved(step, dims, sums)?;
            }
            let (_, shared, scratch) = match site.take() {
                Some(here) if here.0 == block.device => site.insert(here),
                _ => site.insert(self.site(step, model, [ids, positions], layers)?),
            };
            block.forward(step, shared, &streams, scratch, layer)?;
            tap(step, taps, index, &streams.flat()?)?;
        }
        streams.read_last(step, &self.head)?;
        step.go_to(home);
        step.push(RmsNorm::new(streams.x.clone(), model.output_norm.clone(), out.clone(), model.eps))?;
        tap(step, taps, self.blocks.len(), out)
    }

    /// Scratch for the blocks of the device that the step is on.
    fn site(
        &self,
        step: &mut Step<'_>,
        model: &Decoder,
        [ids, positions]: [&TensorView; 2],
        layers: &[LayerCache],
    ) -> Result<(DeviceOrdinal, Shared, Scratch)> {
        let (device, tokens) = (step.device(), ids.dim(0));
        let positions = step.across("positions", positions)?;
        let mut shared = Shared::of(step, &self.parts(device), &positions, model.width, model.eps)?;
        shared.tokens = Some(ids.clone());
        let here = self.blocks.iter().zip(layers).filter(|(block, _)| block.device == device);
        let parts = here.map(|(block, layer)| (&block.attention, layer));
        Ok((device, shared, Scratch::new(step, parts, tokens, self.rounded_keys)?))
    }
}
