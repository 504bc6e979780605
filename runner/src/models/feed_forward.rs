//! Feed-forward parts: branches of a block, dense or with experts.

use evergraph_kernels::ops::{Activation, Add, Glu, Part, TensorView};

use super::block::{Shared, fitted};
use super::experts::{AskedExperts, Experts};
use super::input::{Input, Room, is_on_host};
use super::residual::{self, Wanted};
use super::weights::Weights;
use crate::engine::Step;
use crate::error::Result;

/// One of the feed-forward parts of a block, which stand side by side: all read the residual stream, and their outputs
/// are added.
#[derive(Debug)]
pub struct Branch {
    /// Norm of its input, `[D]`.
    pub norm: TensorView,
    /// What it does.
    pub part: FeedForward,
    /// Norm of its output, `[D]`.
    pub post_norm: Option<TensorView>,
}

/// Feed-forward part.
#[derive(Debug)]
pub enum FeedForward {
    /// The same weights for every token.
    Dense(Box<Dense>),
    /// With the weights of the experts that a router picks for each token.
    Experts(Box<Experts>),
}

/// `down(act(gate x) * up x)`.
#[derive(Debug)]
pub struct Dense {
    /// `[F, D]`.
    pub gate: TensorView,
    /// `[F, D]`.
    pub up: TensorView,
    /// `[D, F]`.
    pub down: TensorView,
    /// The function on the gate.
    pub activation: Activation,
    /// What gate and up are cut at before that.
    pub limit: Option<f32>,
}

/// What a branch reads: norms of the residual stream.
#[derive(Debug)]
pub(super) struct BranchInput {
    pub(super) x: Wanted,
    /// Of a router that has a norm of its own.
    pub(super) router: Option<Wanted>,
}

impl BranchInput {
    /// The norms.
    pub(super) fn wanted(&self) -> impl Iterator<Item = &Wanted> {
        [&self.x].into_iter().chain(&self.router)
    }
}

impl Branch {
    /// Its input, yet to be written to the place of this number; none where the host does the branch.
    pub(super) fn input(&self, step: &Step<'_>, shared: &Shared, place: usize) -> Result<Option<BranchInput>> {
        let place = shared.place(place);
        let (x, router) = match &self.part {
            _ if self.part.is_on_host() && !step.is_on_host() && shared.streamed.is_none() => return Ok(None),
            FeedForward::Dense(dense) => (place.normed([&dense.gate, &dense.up], false)?, None),
            FeedForward::Experts(experts) => {
                // A router without a norm of its own reads the floats.
                let own = experts.router_norm.as_ref().zip(shared.router.as_ref());
                let streamed = shared.streamed.as_ref().filter(|_| experts.are_on_host());
                let weights = match streamed {
                    // As they will be where they come to.
                    Some(streamed) => (0..experts.gate_up.weights().count()).map(|n| streamed.coming(n)).collect(),
                    None => Ok(experts.gate_up.weights().cloned().collect::<Vec<_>>()),
                }?;
                let x = place.normed(&weights, own.is_none())?;
                let router = own.map(|((norm, scale), scratch)| {
                    let input = Input::unwritten(None, &scratch.x, [&experts.router], true)?;
                    Ok::<_, crate::Error>(Wanted::new(norm, *scale, input))
                });
                (x, router.transpose()?)
            }
        };
        Ok(Some(BranchInput { x: Wanted::new(&self.norm, 1.0, x), router }))
    }

    /// Asks the host for what it alone does in this branch, if it does.
    pub(super) fn ask_host(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        place: usize,
    ) -> Result<Option<AskedExperts>> {
        match &self.part {
            FeedForward::Experts(experts)
                if experts.are_on_host() && !step.is_on_host() && shared.streamed.is_none() =>
            {
                experts.ask_host(step, shared, h, &self.norm, &shared.place(place).x)
            }
            _ => Ok(None),
        }
    }

    /// What the branch adds for `h`, before its last norm: into `out`, or where the host puts it, which may have been asked for
    /// it. Gives where it is.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        [h, out]: [&TensorView; 2],
        place: usize,
        input: Option<&BranchInput>,
        asked: Option<AskedExperts>,
    ) -> Result<TensorView> {
        let asked = match asked {
            Some(asked) => Some(asked),
            None => self.ask_host(step, shared, h, place)?,
        };
        let room = shared.place(place).room.as_ref();
        match (asked, input, &self.part) {
            (Some(AskedExperts { asked, sum, beside: None }), _, _) => {
                step.wait(asked)?;
                return Ok(sum);
            }
            (Some(AskedExperts { asked, sum, beside: Some(rest) }), _, _) => {
                step.wait(asked)?;
                step.push(Add { a: rest.clone(), b: sum, out: rest.clone() })?;
                return Ok(rest);
            }
            (None, Some(input), FeedForward::Dense(dense)) => dense.forward(step, shared, room, input, out)?,
            (None, Some(input), FeedForward::Experts(experts)) => experts.forward(step, shared, room, input, out)?,
            // A branch without an input is the host's.
            (None, None, _) => {}
        }
        Ok(out.clone())
    }
}

/// The inputs of branches that stand side by side, yet to be written.
pub(super) fn inputs(branches: &[Branch], step: &Step<'_>, shared: &Shared) -> Result<Vec<Option<BranchInput>>> {
    branches.iter().enumerate().map(|(index, branch)| branch.input(step, shared, index)).collect()
}

/// Asks the host for its branch before the others are begun, so that it runs beside them; none where it has none, or more
/// than that to do here.
fn ask_host(
    branches: &[Branch],
    step: &mut Step<'_>,
    shared: &Shared,
    h: &TensorView,
) -> Result<Option<(usize, AskedExperts)>> {
    let on_host = |branch: &Branch| branch.part.products().any(is_on_host);
    let mut there = branches.iter().enumerate().filter(|(_, branch)| on_host(branch));
    match (there.next(), there.next()) {
        (Some((index, branch)), None) => Ok(branch.ask_host(step, shared, h, index)?.map(|asked| (index, asked))),
        _ => Ok(None),
    }
}

/// What branches that stand side by side add for `h` (`[T, D]`), as one or two parts; `inputs` have been written.
pub(super) fn forward(
    branches: &[Branch],
    step: &mut Step<'_>,
    shared: &Shared,
    h: &TensorView,
    inputs: &[Option<BranchInput>],
) -> Result<Vec<Part>> {
    let (y, eps) = (&shared.y, shared.eps);
    let mut asked = ask_host(branches, step, shared, h)?;
    let mut parts: Vec<Part> = Vec::new();
    for (index, (branch, input)) in branches.iter().zip(inputs).enumerate() {
        let asked = asked.take_if(|(of, _)| *of == index).map(|(_, asked)| asked);
        let out = shared.branch.as_ref().filter(|_| index > 0).unwrap_or(y);
        let x = branch.forward(step, shared, [h, out], index, input.as_ref(), asked)?;
        let of_host = x != *out;
        parts.push(Part { x, norm: branch.post_norm.clone() });
        // There is room for two; what the host made is to be read before it is asked again.
        if index + 1 < branches.len() && (parts.len() == 2 || of_host) {
            residual::fold(step, &parts, y, eps)?;
            parts = vec![Part { x: y.clone(), norm: None }];
        }
    }
    Ok(parts)
}

impl FeedForward {
    /// Its experts, if it has any.
    pub(super) fn experts(&self) -> Option<&Experts> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(experts) => Some(experts),
        }
    }

    /// Whether the host does it beside the device.
    pub(super) fn is_on_host(&self) -> bool {
        self.experts().is_some_and(Experts::are_on_host)
    }

    /// Elements between the two products, for each token.
    pub(super) fn hidden(&self) -> usize {
        match self {
            Self::Dense(dense) => dense.gate.dim(0),
            Self::Experts(experts) => experts.hidden() * experts.used,
        }
    }

    /// Elements beside the gate's, for each token.
    pub(super) fn up(&self) -> usize {
        match self {
            Self::Experts(experts) => experts.up(),
            Self::Dense(_) => self.hidden(),
        }
    }

    /// The weights of its products.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        let (dense, experts) = match self {
            Self::Dense(dense) => (Some([&dense.gate, &dense.up, &dense.down]), None),
            Self::Experts(experts) => (None, Some(experts.products())),
        };
        dense.into_iter().flatten().chain(experts.into_iter().flatten())
    }
}

impl Dense {
    /// Those of a block whose tensors `name` names.
    pub(super) fn load(
        weights: &Weights,
        name: &dyn Fn(&str) -> String,
        [hidden, width]: [usize; 2],
        activation: Activation,
    ) -> Result<Self> {
        Ok(Self {
            gate: weights.get(&name("ffn_gate"), &[hidden, width])?,
            up: weights.get(&name("ffn_up"), &[hidden, width])?,
            down: weights.get(&name("ffn_down"), &[width, hidden])?,
            activation,
            limit: None,
        })
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        room: Option<&Room>,
        input: &BranchInput,
        out: &TensorView,
    ) -> Result<()> {
        let (tokens, hidden, x) = (out.dim(0), self.gate.dim(0), input.x.input());
        let [gate, up] = shared.dense();
        let (gate, up) = (fitted(gate, tokens, hidden)?, fitted(up, tokens, hidden)?);
        x.times(step, &self.gate, &gate)?;
        x.times(step, &self.up, &up)?;
        let glu = Glu { limit: self.limit, ..Glu::new(gate.clone(), up, gate.clone(), self.activation) };
        Input::unwritten(room, &gate, [&self.down], false)?.glu(step, glu)?.times(step, &self.down, out)
    }
}
