//! Feed-forward parts: dense, and with experts that a router picks.

use evergraph_kernels::ops::{Activation, Add, ExpertSum, Glu, MatMul, RmsNorm, Router, Scoring, TensorView};
use evergraph_kernels::quant::QuantType;

use super::block::{Shared, fitted};
use super::input::Input;
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
}

/// Experts and their router.
#[derive(Debug)]
pub struct Experts {
    /// `[E, D]`.
    pub router: TensorView,
    /// The router's own norm of the residual stream: `[D]`, and a factor. None where it reads what the experts read.
    pub router_norm: Option<(TensorView, f32)>,
    /// Gate and up.
    pub gate_up: GateUp,
    /// `[E, D, F]`.
    pub down: TensorView,
    /// Factor of each expert's output, `[E]`.
    pub down_scale: Option<TensorView>,
    /// Experts a token.
    pub used: usize,
    /// The function on the gate.
    pub activation: Activation,
}

/// The two weights that an expert's input is multiplied with.
#[derive(Debug)]
pub enum GateUp {
    /// Two tensors, `[E, F, D]` each.
    Apart {
        /// `[E, F, D]`.
        gate: TensorView,
        /// `[E, F, D]`.
        up: TensorView,
    },
    /// `[E, 2 F, D]`: the rows of the gate, then those of up.
    Merged(TensorView),
}

/// Scratch of a step's routers.
#[derive(Debug)]
pub(super) struct RouterScratch {
    logits: TensorView,
    ids: TensorView,
    weights: TensorView,
    /// `[T, K, D]`.
    y: TensorView,
}

impl RouterScratch {
    /// Room for any of these routers; none where there is none.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        experts: impl Iterator<Item = &'a Experts> + Clone,
        tokens: usize,
        width: usize,
    ) -> Result<Option<Self>> {
        let Some(count) = experts.clone().map(|experts| experts.router.dim(0)).max() else { return Ok(None) };
        let used = experts.map(|experts| experts.used).max().unwrap_or(1);
        Ok(Some(Self {
            logits: step.floats("router logits", &[tokens, count])?,
            ids: step.scratch("expert ids", QuantType::I32, &[tokens, used])?,
            weights: step.floats("expert weights", &[tokens, used])?,
            y: step.floats("expert outputs", &[tokens, used * width])?,
        }))
    }
}

impl Branch {
    /// What the branch adds for `h`, into `shared.y`: in place of what is there, or on top of it.
    pub(super) fn forward(&self, step: &mut Step<'_>, shared: &Shared, h: &TensorView, on_top: bool) -> Result<()> {
        let (y, eps) = (&shared.y, shared.eps);
        let out = if on_top { shared.branch.as_ref().unwrap_or(y) } else { y };
        match &self.part {
            FeedForward::Dense(dense) => dense.forward(step, shared, h, &self.norm, out)?,
            FeedForward::Experts(experts) => experts.forward(step, shared, h, &self.norm, out)?,
        }
        match (&self.post_norm, on_top) {
            (Some(norm), true) => step.push(RmsNorm::add_to(y.clone(), out.clone(), norm.clone(), eps)),
            (Some(norm), false) => step.push(RmsNorm::new(out.clone(), norm.clone(), y.clone(), eps)),
            (None, true) => step.push(Add { a: y.clone(), b: out.clone(), out: y.clone() }),
            (None, false) => Ok(()),
        }
    }
}

impl FeedForward {
    /// Its experts, if it has any.
    pub(super) fn experts(&self) -> Option<&Experts> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(experts) => Some(experts),
        }
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
            Self::Experts(experts) if matches!(experts.gate_up, GateUp::Merged(_)) => 2 * self.hidden(),
            _ => self.hidden(),
        }
    }

    /// The weights of its products.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        match self {
            Self::Dense(dense) => [Some(&dense.gate), Some(&dense.up), Some(&dense.down)],
            Self::Experts(experts) => experts.weights(),
        }
        .into_iter()
        .flatten()
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
        })
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        norm: &TensorView,
        out: &TensorView,
    ) -> Result<()> {
        let (tokens, hidden, room) = (h.dim(0), self.gate.dim(0), shared.room.as_ref());
        let gate = fitted(&shared.gate, tokens, hidden)?;
        let up = fitted(&shared.up, tokens, hidden)?;
        let norm = RmsNorm::new(h.clone(), norm.clone(), shared.x.clone(), shared.eps);
        let x = Input::unwritten(room, &shared.x, [&self.gate, &self.up], false)?.norm(step, norm)?;
        x.times(step, &self.gate, &gate)?;
        x.times(step, &self.up, &up)?;
        let glu = Glu::new(gate.clone(), up, gate.clone(), self.activation);
        Input::unwritten(room, &gate, [&self.down], false)?.glu(step, glu)?.times(step, &self.down, out)
    }
}

impl GateUp {
    /// Its tensors, one or two.
    fn tensors(&self) -> [Option<&TensorView>; 2] {
        match self {
            Self::Apart { gate, up } => [Some(gate), Some(up)],
            Self::Merged(both) => [Some(both), None],
        }
    }

    /// Those of a block whose tensors `name` names: merged in one, or two.
    pub(super) fn load(
        weights: &Weights,
        name: &dyn Fn(&str) -> String,
        [experts, hidden, width]: [usize; 3],
    ) -> Result<Self> {
        if let Some(both) = weights.find(&name("ffn_gate_up_exps"), &[experts, 2 * hidden, width])? {
            return Ok(Self::Merged(both));
        }
        Ok(Self::Apart {
            gate: weights.get(&name("ffn_gate_exps"), &[experts, hidden, width])?,
            up: weights.get(&name("ffn_up_exps"), &[experts, hidden, width])?,
        })
    }
}

impl Experts {
    /// Those of the experts, all of them.
    fn weights(&self) -> [Option<&TensorView>; 3] {
        let [gate, up] = self.gate_up.tensors();
        [gate, up, Some(&self.down)]
    }

    /// The weights of the experts' products, without the router.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        self.weights().into_iter().flatten()
    }

    /// Elements between an expert's two products.
    fn hidden(&self) -> usize {
        self.down.dim(2)
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        norm: &TensorView,
        out: &TensorView,
    ) -> Result<()> {
        let Some(scratch) = &shared.router else { return Ok(()) };
        let (tokens, used, width, eps) = (h.dim(0), self.used, h.dim(1), shared.eps);
        let fit = |buffer: &TensorView, cols: usize| fitted(buffer, tokens, cols);
        let (logits, ids) = (fit(&scratch.logits, self.router.dim(0))?, fit(&scratch.ids, used)?);
        let weights = fit(&scratch.weights, used)?;
        // The choice of experts is made of floats always: a rounded input may choose others.
        let logits_of = |x: &TensorView| MatMul::new(self.router.clone(), x.clone(), logits.clone());
        if let Some((norm, scale)) = &self.router_norm {
            step.push(RmsNorm { scale: *scale, ..RmsNorm::new(h.clone(), norm.clone(), shared.x.clone(), eps) })?;
            step.push(logits_of(&shared.x))?;
        }
        let room = shared.room.as_ref();
        let norm = RmsNorm::new(h.clone(), norm.clone(), shared.x.clone(), eps);
        let x = Input::unwritten(
            room,
            &shared.x,
            self.gate_up.tensors().into_iter().flatten(),
            self.router_norm.is_none(),
        )?;
        let x = x.norm(step, norm)?;
        if self.router_norm.is_none() {
            step.push(logits_of(&shared.x))?;
        }
        step.push(Router {
            logits,
            bias: None,
            ids: ids.clone(),
            weights: weights.clone(),
            scoring: Scoring::Softmax,
            groups: None,
            norm: true,
            scale: 1.0,
        })?;
        let hidden = self.hidden();
        let gate_out = fit(&shared.gate, used * hidden)?.heads(used)?;
        let glu = match &self.gate_up {
            GateUp::Apart { gate, up } => {
                let up_out = fit(&shared.up, used * hidden)?.heads(used)?;
                x.times_experts(step, gate, &ids, &gate_out)?;
                x.times_experts(step, up, &ids, &up_out)?;
                Glu::new(gate_out.clone(), up_out, gate_out.clone(), self.activation)
            }
            GateUp::Merged(both) => {
                let both_out = fit(&shared.up, used * 2 * hidden)?.heads(used)?;
                x.times_experts(step, both, &ids, &both_out)?;
                let half = |start: usize| both_out.narrow(2, start, hidden);
                Glu::new(half(0)?, half(hidden)?, gate_out.clone(), self.activation)
            }
        };
        let y = fit(&scratch.y, used * width)?.heads(used)?;
        let hidden = Input::unwritten(room, &gate_out, [&self.down], false)?.glu(step, glu)?;
        hidden.times_experts(step, &self.down, &ids, &y)?;
        let expert_scale = self.down_scale.clone().map(|scale| (scale, ids));
        step.push(ExpertSum { y, weights, expert_scale, residual: None, out: out.clone() })
    }
}
