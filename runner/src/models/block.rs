//! A block: attention, feed-forward parts, norms, as ops on a step. Models put it together from their files.

use evergraph_kernels::ops::{RmsNorm, TensorView};

use super::attention::{AttentionPart, KeyValue, Scores};
use super::feed_forward::{AskedExperts, Branch, Fetched, RouterScratch};
use super::input::{Room, is_on_host};
use super::kv::LayerCache;
use super::layer_input::LayerInput;
use super::streamed::Streamed;
use crate::engine::Step;
use crate::error::Result;
use crate::placement::Home;

/// A pre- and post-normed residual block.
#[derive(Debug)]
pub struct Block {
    /// Where it is.
    pub home: Home,
    /// Norm before attention, `[D]`.
    pub attn_norm: TensorView,
    /// Attention.
    pub attention: AttentionPart,
    /// Norm of what attention adds, `[D]`.
    pub post_attn_norm: TensorView,
    /// Feed-forward parts, side by side.
    pub branches: Vec<Branch>,
    /// Norm of what they add, `[D]`.
    pub post_ffn_norm: TensorView,
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
    /// `[T, D]`: the normed input of a part.
    pub(super) x: TensorView,
    /// `[T, D]`: what a part adds.
    pub(super) y: TensorView,
    /// `[T, D]`: what a branch adds to that, where blocks have several.
    pub(super) branch: Option<TensorView>,
    pub(super) q: TensorView,
    pub(super) k: TensorView,
    pub(super) v: TensorView,
    pub(super) a: TensorView,
    pub(super) gate: TensorView,
    pub(super) up: TensorView,
    pub(super) router: Option<RouterScratch>,
    /// For the input of the products at hand, where it is quantised.
    pub(super) room: Option<Room>,
    /// For attention's scores, where they are written out.
    pub(super) scores: Option<Scores>,
    /// Where experts of the host come to, if they come.
    pub(super) streamed: Option<Streamed>,
    /// Where experts of the host are fetched to for a single token, if the device has a share in them.
    pub(super) fetched: Option<Fetched>,
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
        let tokens = positions.dim(0);
        fn most<'a, T: 'a>(list: impl Iterator<Item = &'a T>, of: impl Fn(&T) -> usize) -> usize {
            list.map(of).max().unwrap_or(1).max(1)
        }
        let branches = || blocks.iter().flat_map(|block| &block.branches).map(|branch| &branch.part);
        let coming = || branches().filter_map(|part| part.experts()).filter(|experts| experts.are_on_host());
        let lane = step.lane(tokens).filter(|_| coming().next().is_some());
        let streamed = match lane {
            Some(lane) => Some(Streamed::new(step, lane, coming())?),
            None => None,
        };
        let share = if tokens == 1 && streamed.is_none() { step.device_share() } else { 0 };
        let reached = || coming().filter(|experts| experts.on_bus.is_some());
        let fetched = match share {
            0 => None,
            _ if reached().count() < coming().count() => None,
            _ => Fetched::new(step, reached(), share, width)?,
        };
        let elsewhere = !step.is_on_host() && streamed.is_none();
        let attentions = || blocks.iter().map(|block| &block.attention);
        let own = || attentions().filter(|part| matches!(part.kv, KeyValue::Own(_)));
        // A part that the host does beside the device has its room there.
        let parts = || branches().filter(|part| !(elsewhere && part.is_on_host()));
        let inputs = || blocks.iter().filter_map(|block| block.input.as_ref());
        let attended = most(attentions(), |part| part.heads * part.value_dim);
        let input = most(inputs(), |input| input.gate.dim(0));
        let hidden = most(parts(), |part| part.hidden()).max(input);
        let several = blocks.iter().any(|block| block.branches.len() > 1);
        let widest = width.max(attended).max(hidden);
        let room = Room::new(step, tokens.saturating_mul(widest), blocks.iter().flat_map(|block| block.products()))?;
        Ok(Self {
            positions: positions.clone(),
            eps,
            x: step.floats("block input", &[tokens, width])?,
            y: step.floats("block output", &[tokens, width])?,
            branch: if several { Some(step.floats("branch output", &[tokens, width])?) } else { None },
            q: step.floats("q", &[tokens, most(attentions(), |part| part.heads * part.key_dim)])?,
            k: step.floats("k", &[tokens, most(own(), |part| part.kv_heads * part.key_dim)])?,
            v: step.floats("v", &[tokens, most(own(), |part| part.kv_heads * part.value_dim)])?,
            a: step.floats("attention", &[tokens, attended])?,
            gate: step.floats("ffn gate", &[tokens, hidden])?,
            up: step.floats("ffn up", &[tokens, most(parts(), |part| part.up())])?,
            router: RouterScratch::new(
                step,
                branches().filter_map(|part| part.experts()),
                [tokens, width],
                streamed.is_some(),
            )?,
            room,
            scores: None,
            streamed,
            fetched,
        })
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

    /// Asks the host for its branch before the others are begun, so that it runs beside them; none where it has none, or more
    /// than that to do here.
    fn ask_host(&self, step: &mut Step<'_>, shared: &Shared, h: &TensorView) -> Result<Option<(usize, AskedExperts)>> {
        let on_host = |branch: &Branch| branch.part.products().any(is_on_host);
        let mut there = self.branches.iter().enumerate().filter(|(_, branch)| on_host(branch));
        match (there.next(), there.next()) {
            (Some((index, branch)), None) => Ok(branch.ask_host(step, shared, h)?.map(|asked| (index, asked))),
            _ => Ok(None),
        }
    }

    /// `h` (`[T, D]`) through the block, in place. `input` (`[T, P]`) is the block's own, if it takes one.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        input: Option<&TensorView>,
        cache: &LayerCache,
    ) -> Result<()> {
        let eps = shared.eps;
        self.attention.forward(step, shared, h, &self.attn_norm, cache)?;
        step.push(RmsNorm::add_to(h.clone(), shared.y.clone(), self.post_attn_norm.clone(), eps))?;

        let mut asked = self.ask_host(step, shared, h)?;
        for (index, branch) in self.branches.iter().enumerate() {
            let asked = asked.take_if(|(of, _)| *of == index).map(|(_, asked)| asked);
            branch.forward(step, shared, h, index > 0, asked)?;
        }
        let input = self.input.as_ref().zip(input);
        let gain = if input.is_some() { 1.0 } else { self.gain };
        let add = RmsNorm::add_to(h.clone(), shared.y.clone(), self.post_ffn_norm.clone(), eps);
        let add = RmsNorm { gain, ..add };
        match input {
            Some((part, input)) => {
                let h = part.gated(shared, h)?.norm(step, add)?;
                part.forward(step, shared, h, input, self.gain)
            }
            None => step.push(add),
        }
    }
}
