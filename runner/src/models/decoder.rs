//! A stack of blocks between an embedding and an output matrix.

use std::ops::Range;
use std::sync::Arc;

use evergraph_kernels::ops::{Copy, RmsNorm, Softcap, TensorView};
use evergraph_pool::driver::DeviceOrdinal;
use evergraph_pool::{Tracked, Use};

use super::attention::{AttentionPart, Scores, spread};
use super::block::{Block, Shared};
use super::experts::Experts;
use super::input::{Input, Room, get_rows};
use super::kv::KvCache;
use super::layer_input::LayerInputs;
use super::residual::Wanted;
use super::streams::StreamStack;
use super::weights::Weights;
use crate::engine::{HostExperts, Runtime, Step};
use crate::error::{Error, Result};
use crate::placement::Home;

/// A model that reads tokens one after the other.
#[derive(Debug)]
pub struct Decoder {
    /// The weights that all views below look into.
    pub weights: Weights,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of tokens.
    pub vocabulary: usize,
    /// Longest sequence that the model was made for, tokens.
    pub context: usize,
    /// Added to mean squares.
    pub eps: f32,
    /// `[V, D]`.
    pub embedding: TensorView,
    /// Factor of embedded tokens.
    pub embedding_scale: f32,
    /// Where each block's own input comes from, in models that have such.
    pub layer_inputs: Option<LayerInputs>,
    /// The blocks; none where the residual is [several streams](Self::streams).
    pub blocks: Vec<Block>,
    /// The blocks of a model with several residual streams.
    pub streams: Option<Box<StreamStack>>,
    /// Norm after the last block, `[D]`.
    pub output_norm: TensorView,
    /// `[V, D]`.
    pub output: TensorView,
    /// `c * tanh(logits / c)`.
    pub softcap: Option<f32>,
}

/// What the blocks of one device share in a step.
struct Site {
    device: DeviceOrdinal,
    shared: Shared,
}

/// Copies of what lies between the blocks, for tests and debugging.
#[derive(Debug)]
pub struct Taps {
    /// `[T, D]` after each block (all streams of it, where there are several), and after the last norm.
    pub outputs: Vec<TensorView>,
}

impl Decoder {
    /// Whether the host has a share in its steps.
    #[must_use]
    pub fn uses_host(&self) -> bool {
        self.weights.any_on_host()
    }

    /// The device of the output matrix, or the first one where the host has it.
    pub(crate) fn home_device(&self, runtime: &Runtime) -> DeviceOrdinal {
        runtime.unit(self.output.root().device).device()
    }

    /// Experts on the host, of blocks that are on the device.
    fn experts_on_host(&self) -> impl Iterator<Item = &Experts> {
        let ours = self.blocks.iter().filter(|block| block.home == Home::Device).flat_map(|block| &block.branches);
        let streams = self.streams.iter().flat_map(|stack| &stack.blocks).flat_map(|block| &block.branches);
        let experts = ours.chain(streams).filter_map(|branch| branch.part.experts());
        experts.filter(|experts| experts.are_on_host())
    }

    /// The same as the device reaches them; none if there are some that it does not reach.
    pub(crate) fn host_experts(&self) -> Vec<HostExperts> {
        self.experts_on_host().map(Experts::over_the_bus).collect::<Option<_>>().unwrap_or_default()
    }

    /// Room on the device for the experts that stay on the host, one block's at a time, bytes.
    #[must_use]
    pub fn streamed_bytes(&self) -> usize {
        let experts: Vec<_> = self.experts_on_host().map(Experts::tensors).collect();
        let most = |place: usize| experts.iter().filter_map(|tensors| Some(tensors[place]?.range().len())).max();
        (0..3).filter_map(most).sum()
    }

    /// Number of blocks.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.streams.as_ref().map_or(self.blocks.len(), |stack| stack.blocks.len())
    }

    /// Width of what lies behind block `index`, or after the last norm.
    #[must_use]
    pub fn tap_width(&self, index: usize) -> usize {
        let streams = self.streams.as_ref().filter(|stack| index < stack.blocks.len());
        streams.map_or(1, |stack| stack.streams) * self.width
    }

    /// What a step of this model depends on, besides its sequence.
    pub fn uses(&self) -> Vec<(&dyn Tracked, Use)> {
        self.weights.uses()
    }

    /// Tokens `ids` (`[T]`) at `positions` (`[T]`) to the normed output of the last block, in `out` (`[T, D]`).
    ///
    /// # Errors
    /// Those of the pool and of ops.
    pub fn forward(
        &self,
        step: &mut Step<'_>,
        ids: &TensorView,
        positions: &TensorView,
        cache: &KvCache,
        out: &TensorView,
        taps: Option<&Taps>,
    ) -> Result<()> {
        if let Some(stack) = &self.streams {
            return stack.forward(self, step, [ids, positions, out], cache, taps);
        }
        let (tokens, home) = (ids.dim(0), step.device());
        step.go_to(self.embedding.root().device);
        let mut h = step.floats("residual", &[tokens, self.width])?;
        get_rows(step, &self.embedding, ids, &h, self.embedding_scale)?;
        let inputs = match &self.layer_inputs {
            Some(inputs) => Some((inputs.forward(step, ids, &h, self.eps)?, inputs.width)),
            None => None,
        };
        let mut sites: Vec<Site> = Vec::new();
        // A block writes the norm that comes after it, the next block's or the last one, unless that is elsewhere.
        let mut ready: Option<Wanted> = None;
        let mut index = 0;
        while let Some(block) = self.blocks.get(index) {
            let next = match block.home {
                Home::Device => {
                    step.go_to(block.device);
                    h = step.across("residual", &h)?;
                    if !sites.iter().any(|site| site.device == block.device) {
                        sites.push(self.site(step, positions, cache)?);
                    }
                    let lost = || Error::CheckFailed(format!("no scratch on device {}", block.device));
                    let site = sites.iter().find(|site| site.device == block.device).ok_or_else(lost)?;
                    let shared = &site.shared;
                    let input = match &inputs {
                        Some((inputs, width)) => Some(inputs.narrow(1, index * width, *width)?),
                        None => None,
                    };
                    let x = written(step, ready.take(), block, shared, &h)?;
                    let here = |device: DeviceOrdinal| device == block.device;
                    ready = match self.blocks.get(index + 1) {
                        Some(next) if next.home == Home::Device && here(next.device) => Some(next.wanted(shared)?),
                        None if here(out.root().device) => {
                            Some(Wanted::new(&self.output_norm, 1.0, Input::unwritten(None, out, [], true)?))
                        }
                        _ => None,
                    };
                    block.forward(step, shared, &h, &x, input.as_ref(), &cache.layers()[index], ready.as_ref())?;
                    index + 1
                }
                Home::Host => {
                    let end = self.end_on_host(index, taps.is_some());
                    self.on_host(step, index..end, [&h, positions], inputs.as_ref(), cache)?;
                    end
                }
            };
            index = next;
            tap(step, taps, index - 1, &h)?;
        }
        step.go_to(home);
        if ready.is_none() {
            step.push(RmsNorm::new(h, self.output_norm.clone(), out.clone(), self.eps))?;
        }
        tap(step, taps, self.blocks.len(), out)
    }

    /// Scratch for the blocks of the device that the step is on.
    fn site(&self, step: &mut Step<'_>, positions: &TensorView, cache: &KvCache) -> Result<Site> {
        let device = step.device();
        let is_here = |block: &&Block| block.home == Home::Device && block.device == device;
        let ours: Vec<&Block> = self.blocks.iter().filter(is_here).collect();
        let positions = step.across("positions", positions)?;
        let mut shared = Shared::new(step, &ours, &positions, self.width, self.eps)?;
        let parts = || {
            let parts = self.attentions(0..self.blocks.len(), Home::Device);
            parts.filter(|(index, _)| self.blocks[*index].device == device)
        };
        shared.scores = Scores::new(step, positions.dim(0), cache, parts())?;
        shared.spread = spread(step, positions.dim(0), cache, parts())?;
        Ok(Site { device, shared })
    }

    /// The attention of blocks that have this home, each with its block's number.
    fn attentions(&self, blocks: Range<usize>, home: Home) -> impl Iterator<Item = (usize, &AttentionPart)> {
        let some = self.blocks.iter().enumerate().skip(blocks.start).take(blocks.len());
        some.filter(move |(_, block)| block.home == home).map(|(index, block)| (index, &block.attention))
    }

    /// Where the blocks end that the host does at a stretch from block `start` on.
    fn end_on_host(&self, start: usize, one_by_one: bool) -> usize {
        let blocks = self.blocks.iter().skip(start).take(if one_by_one { 1 } else { usize::MAX });
        start + blocks.take_while(|block| block.home == Home::Host).count()
    }

    /// `h` through blocks that are on the host: it crosses, and comes back.
    fn on_host(
        &self,
        step: &mut Step<'_>,
        blocks: Range<usize>,
        [h, positions]: [&TensorView; 2],
        inputs: Option<&(TensorView, usize)>,
        cache: &KvCache,
    ) -> Result<()> {
        let crossed = |step: &mut Step<'_>, name, view: &TensorView| {
            let crossing = step.crossing(name, view.ty(), view.shape())?;
            step.push(Copy { src: view.clone(), dst: crossing.device.clone() })?;
            Ok::<_, crate::Error>(crossing)
        };
        let residual = crossed(step, "residual on the host", h)?;
        let positions = crossed(step, "positions on the host", positions)?;
        let inputs = match inputs {
            Some((inputs, width)) => {
                let here = inputs.narrow(1, blocks.start * width, blocks.len() * width)?;
                Some((crossed(step, "layer inputs on the host", &here)?.host, *width))
            }
            None => None,
        };
        let asked = step.on_host(|step| {
            let ours: Vec<&Block> = self.blocks[blocks.clone()].iter().collect();
            let mut shared = Shared::new(step, &ours, &positions.host, self.width, self.eps)?;
            let attentions = self.attentions(blocks.clone(), Home::Host);
            shared.scores = Scores::new(step, positions.host.dim(0), cache, attentions)?;
            let mut ready: Option<Wanted> = None;
            for (number, (block, layer)) in ours.iter().zip(&cache.layers()[blocks.clone()]).enumerate() {
                let input = match &inputs {
                    Some((inputs, width)) => Some(inputs.narrow(1, number * width, *width)?),
                    None => None,
                };
                layer.on_host.iter().for_each(|block| step.keep(Arc::clone(block) as _));
                let x = written(step, ready.take(), block, &shared, &residual.host)?;
                ready = ours.get(number + 1).map(|next| next.wanted(&shared)).transpose()?;
                block.forward(step, &shared, &residual.host, &x, input.as_ref(), layer, ready.as_ref())?;
            }
            Ok(())
        })?;
        step.wait(asked)?;
        step.push(Copy { src: residual.device, dst: h.clone() })
    }

    /// Normed outputs (`[R, D]`) to logits (`[R, V]`).
    ///
    /// # Errors
    /// Those of ops.
    pub fn head(&self, step: &mut Step<'_>, hidden: &TensorView, logits: &TensorView) -> Result<()> {
        let room = Room::new(step, hidden.len(), [&self.output])?;
        Input::new(step, room.as_ref(), hidden, [&self.output])?.times(step, &self.output, logits)?;
        match self.softcap {
            Some(cap) => step.push(Softcap { x: logits.clone(), out: logits.clone(), cap }),
            None => Ok(()),
        }
    }
}

/// What a block reads of `h`: as the block before it wrote it, or by a kernel of its own.
fn written(
    step: &mut Step<'_>,
    ready: Option<Wanted>,
    block: &Block,
    shared: &Shared,
    h: &TensorView,
) -> Result<Wanted> {
    if let Some(ready) = ready {
        return Ok(ready);
    }
    let x = block.wanted(shared)?;
    x.norm(step, h, shared.eps)?;
    Ok(x)
}

/// Appends a copy of what lies behind block `index`, where one is asked for.
pub(super) fn tap(step: &mut Step<'_>, taps: Option<&Taps>, index: usize, from: &TensorView) -> Result<()> {
    match taps.and_then(|taps| taps.outputs.get(index)) {
        Some(to) => step.push(Copy { src: from.clone(), dst: to.narrow(0, 0, from.dim(0))? }),
        None => Ok(()),
    }
}
