//! A block: attention, feed-forward parts, norms, as ops on a step. Models put it together from their files.

use evergraph_kernels::ops::{Part, ResidualNorm, RmsNorm, Spread, TensorView};
use evergraph_pool::driver::DeviceOrdinal;

use super::attention::{AttentionPart, KeyValue, Scores};
use super::experts::RouterScratch;
use super::feed_forward::{self, Branch, BranchInput};
use super::fetched::Fetched;
use super::input::{Place, Room};
use super::kv::LayerCache;
use super::latent::LatentScratch;
use super::layer_input::LayerInput;
use super::residual::{self, Wanted};
use super::streamed::Streamed;
use crate::engine::Step;
use crate::error::{Error, Result};
use crate::placement::Home;

/// A residual block: norms before its parts, and after them in some models.
#[derive(Debug)]
pub struct Block {
    /// Where it is.
    pub home: Home,
    /// The device, where it is on one.
    pub device: DeviceOrdinal,
    /// Norm before attention, `[D]`.
    pub attn_norm: TensorView,
    /// Attention.
    pub attention: AttentionPart,
    /// Norm of what attention adds, `[D]`, if there is one.
    pub post_attn_norm: Option<TensorView>,
    /// Feed-forward parts, side by side.
    pub branches: Vec<Branch>,
    /// Norm of what they add, `[D]`, if there is one.
    pub post_ffn_norm: Option<TensorView>,
    /// How the block takes in its own input, in models that have one for each block.
    pub input: Option<LayerInput>,
    /// Factor of the block's output.
    pub gain: f32,
}

/// What all blocks of a step share: where its tokens stand, and scratch, which they use one after the other.
#[derive(Debug)]
pub(super) struct Shared {
    /// `[T]`.
    pub(super) positions: TensorView,
    /// Added to mean squares.
    pub(super) eps: f32,
    /// `[T, D]`: what a part adds.
    pub(super) y: TensorView,
    /// `[T, D]`: what a branch adds to that, where blocks have several.
    pub(super) branch: Option<TensorView>,
    pub(super) q: TensorView,
    pub(super) k: TensorView,
    pub(super) v: TensorView,
    pub(super) a: TensorView,
    /// Of attention over a compressed cache.
    pub(super) latent: Option<LatentScratch>,
    pub(super) gate: TensorView,
    pub(super) up: TensorView,
    /// Gate and up of a dense part beside experts, whose products then need not wait for it: of a single token.
    beside: Option<[TensorView; 2]>,
    /// For what a single token's experts have between their products, so that it may be made while their input is read.
    pub(super) hidden: Option<Room>,
    pub(super) router: Option<RouterScratch>,
    /// For the inputs of attention, and of the first branch.
    first: Place,
    /// For those of the other branches, which are written at the same time.
    others: Vec<Place>,
    /// For attention's scores, where they are written out.
    pub(super) scores: Option<Scores>,
    /// For attention of few tokens, whose keys a device spreads over its blocks.
    pub(super) spread: Option<Spread>,
    /// The tokens' numbers (`[T]`), where experts go by them.
    pub(super) tokens: Option<TensorView>,
    /// Where experts of the host come to, if they come.
    pub(super) streamed: Option<Streamed>,
    /// Where the device does its share of a single token's experts that stay on the host, if it has one.
    pub(super) fetched: Option<Fetched>,
}

/// Parts of some blocks, and the room that a token's attention takes in them.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    /// The feed-forward parts of each block.
    pub(super) branches: Vec<&'a [Branch]>,
    /// The weights of all products.
    pub(super) products: Vec<&'a TensorView>,
    /// Most elements of queries, keys, values and what attention makes of them.
    pub(super) attention: [usize; 4],
    /// Most elements of a block's own input.
    pub(super) input: usize,
}

fn most(list: impl Iterator<Item = usize>) -> usize {
    list.max().unwrap_or(1).max(1)
}

impl<'a> Parts<'a> {
    fn of(blocks: &[&'a Block]) -> Self {
        let attentions = || blocks.iter().map(|block| &block.attention);
        let own = || attentions().filter(|part| matches!(part.kv, KeyValue::Own(_)));
        Self {
            branches: blocks.iter().map(|block| block.branches.as_slice()).collect(),
            products: blocks.iter().flat_map(|block| block.products()).collect(),
            attention: [
                most(attentions().map(|part| part.heads * part.key_dim)),
                most(own().map(|part| part.kv_heads * part.key_dim)),
                most(own().map(|part| part.kv_heads * part.value_dim)),
                most(attentions().map(|part| part.widest())),
            ],
            input: most(blocks.iter().filter_map(|block| block.input.as_ref()).map(|input| input.gate.dim(0))),
        }
    }
}

impl Shared {
    /// Room for any of the blocks, which are where the step's ops at hand run, with tokens at these positions.
    pub(super) fn new(
        step: &mut Step<'_>,
        blocks: &[&Block],
        positions: &TensorView,
        width: usize,
        eps: f32,
    ) -> Result<Self> {
        let mut shared = Self::of(step, &Parts::of(blocks), positions, width, eps)?;
        let attentions = blocks.iter().map(|block| &block.attention);
        shared.latent = LatentScratch::new(step, attentions, positions.dim(0))?;
        Ok(shared)
    }

    /// The same for blocks that are given by their parts.
    pub(super) fn of(
        step: &mut Step<'_>,
        parts: &Parts<'_>,
        positions: &TensorView,
        width: usize,
        eps: f32,
    ) -> Result<Self> {
        let tokens = positions.dim(0);
        let branches = || parts.branches.iter().copied().flatten().map(|branch| &branch.part);
        let coming = || branches().filter_map(|part| part.experts()).filter(|experts| experts.are_on_host());
        let lane = step.lane(tokens).filter(|_| coming().next().is_some());
        let streamed = match lane {
            Some(lane) => Some(Streamed::new(step, lane, coming())?),
            None => None,
        };
        let all_reached = || coming().all(|experts| experts.on_bus.is_some());
        let fetched = if tokens == 1 && streamed.is_none() && !step.is_on_host() && all_reached() {
            Fetched::new(step, coming(), width)?
        } else {
            None
        };
        let elsewhere = !step.is_on_host() && streamed.is_none();
        // A part that the host does beside the device has its room there.
        let here = || branches().filter(|part| !(elsewhere && part.is_on_host()));
        let [q, k, v, attended] = parts.attention;
        let hidden = most(here().map(|part| part.hidden())).max(parts.input);
        let most_branches = parts.branches.iter().map(|branches| branches.len()).max().unwrap_or(0);
        let widest = width.max(attended).max(hidden);
        let mut place = || {
            let weights = parts.products.iter().copied();
            Place::new(step, [tokens, width], tokens.saturating_mul(widest), weights)
        };
        let first = place()?;
        let others = (1..most_branches).map(|_| place()).collect::<Result<Vec<_>>>()?;
        let beside = if tokens == 1 && most_branches > 1 {
            let dense = most(here().filter(|part| part.experts().is_none()).map(|part| part.hidden()));
            Some([step.floats("gate beside experts", &[1, dense])?, step.floats("up beside experts", &[1, dense])?])
        } else {
            None
        };
        Ok(Self {
            positions: positions.clone(),
            eps,
            y: step.floats("block output", &[tokens, width])?,
            branch: if most_branches > 1 { Some(step.floats("branch output", &[tokens, width])?) } else { None },
            q: step.floats("q", &[tokens, q])?,
            k: step.floats("k", &[tokens, k])?,
            v: step.floats("v", &[tokens, v])?,
            a: step.floats("attention", &[tokens, attended])?,
            latent: None,
            gate: step.floats("ffn gate", &[tokens, hidden])?,
            up: step.floats("ffn up", &[tokens, most(here().map(|part| part.up()))])?,
            beside,
            hidden: if tokens == 1 { Room::new(step, hidden, parts.products.iter().copied())? } else { None },
            router: RouterScratch::new(
                step,
                branches().filter_map(|part| part.experts()),
                [tokens, width],
                streamed.is_some(),
            )?,
            first,
            others,
            scores: None,
            spread: None,
            tokens: None,
            streamed,
            fetched,
        })
    }

    /// Where gate and up of a dense part go.
    pub(super) fn dense(&self) -> [&TensorView; 2] {
        self.beside.as_ref().map_or([&self.gate, &self.up], |[gate, up]| [gate, up])
    }

    /// For inputs of the branch of this number, and of attention if that is 0.
    pub(super) fn place(&self, number: usize) -> &Place {
        number.checked_sub(1).and_then(|index| self.others.get(index)).unwrap_or(&self.first)
    }
}

/// The first elements of a buffer of rows, as rows of another width.
pub(super) fn fitted(buffer: &TensorView, tokens: usize, width: usize) -> Result<TensorView> {
    if buffer.shape() == [tokens, width] {
        return Ok(buffer.clone());
    }
    Ok(buffer.reshape(&[buffer.len()])?.narrow(0, 0, tokens * width)?.reshape(&[tokens, width])?)
}

impl Block {
    /// The weights of its products.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        let branches = self.branches.iter().flat_map(|branch| branch.part.products());
        self.attention.products().chain(branches).chain(self.input.iter().flat_map(LayerInput::products))
    }

    /// The norm of the residual stream that the block reads, yet to be written.
    pub(super) fn wanted(&self, shared: &Shared) -> Result<Wanted> {
        let input = shared.place(0).normed(self.attention.projections(), false)?;
        Ok(Wanted::new(&self.attn_norm, 1.0, input))
    }

    /// `h` (`[T, D]`) through the block, in place, and `next` of it; `x` is what the block [wants](Self::wanted). `input`
    /// (`[T, P]`) is the block's own, if it takes one.
    #[expect(clippy::too_many_arguments, reason = "what a block reads and writes")]
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        x: &Wanted,
        input: Option<&TensorView>,
        cache: &LayerCache,
        next: Option<&Wanted>,
    ) -> Result<()> {
        let (y, eps) = (&shared.y, shared.eps);
        let sum = |parts: Vec<Part>, weight: &Option<TensorView>, gain: f32| {
            let (h, weight) = (h.clone(), weight.clone());
            ResidualNorm { h, parts, weight, gain, eps, normed: Vec::new() }
        };
        self.attention.forward(step, shared, x.input(), cache)?;
        let inputs = feed_forward::inputs(&self.branches, step, shared)?;
        let wanted = inputs.iter().flatten().flat_map(BranchInput::wanted);
        residual::add(step, sum(vec![Part { x: y.clone(), norm: None }], &self.post_attn_norm, 1.0), wanted)?;

        let parts = feed_forward::forward(&self.branches, step, shared, h, &inputs)?;
        match self.input.as_ref().zip(input) {
            Some((part, input)) => {
                residual::fold(step, &parts, y, eps)?;
                let gated = part.gated(shared, h)?;
                let Some(norm) = self.post_ffn_norm.clone() else {
                    return Err(Error::CheckFailed(
                        "a block with an input of its own and no norm before it".to_owned(),
                    ));
                };
                gated.norm(step, RmsNorm::add_to(h.clone(), y.clone(), norm, eps))?;
                part.forward(step, shared, gated, input, self.gain, next)
            }
            None => residual::add(step, sum(parts, &self.post_ffn_norm, self.gain), next),
        }
    }
}
