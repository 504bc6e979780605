//! Experts and their router: on the device, on the host, or fetched from there.

use evergraph_kernels::ops::{
    Activation, Chosen, ExpertSum, Glu, GroupRank, HashRouter, RmsNorm, Router, Scoring, TensorView,
};
use evergraph_kernels::quant::QuantType;

use super::block::{Shared, fitted};
use super::feed_forward::BranchInput;
use super::input::{CrossingInput, Input, Room, is_on_host};
use super::streamed::Streamed;
use super::weights::Weights;
use crate::engine::{Asked, HostExperts, Step};
use crate::error::{Error, Result};

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
    /// Factor of each expert's output, `[E]`, where the products are.
    pub down_scale: Option<TensorView>,
    /// The same on the device, for experts that come there from the host.
    pub device_scale: Option<TensorView>,
    /// Gate, up and down as the device reaches them, where they are on the host.
    pub on_bus: Option<OnBus>,
    /// Experts a token.
    pub used: usize,
    /// The function on the gate.
    pub activation: Activation,
    /// What gate and up are cut at before that.
    pub limit: Option<f32>,
    /// How they are chosen and weighed.
    pub choice: Choice,
}

/// How experts are chosen for a token, and what weights their outputs get.
#[derive(Clone, Debug)]
pub struct Choice {
    /// From the router's logits to scores.
    pub scoring: Scoring,
    /// `[E]`: added to the scores for the choice only.
    pub bias: Option<TensorView>,
    /// (groups, groups used).
    pub groups: Option<(u32, u32)>,
    /// What a group counts by.
    pub group_rank: GroupRank,
    /// Whether weights are divided by their sum.
    pub norm: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// `[V, K]` I32: the experts of each token of the vocabulary, where scores have no say in that.
    pub table: Option<TensorView>,
}

impl Choice {
    /// The best by softmax, whose weights sum up to one.
    #[must_use]
    pub fn softmax() -> Self {
        let (scoring, group_rank) = (Scoring::Softmax, GroupRank::default());
        Self { scoring, bias: None, groups: None, group_rank, norm: true, scale: 1.0, table: None }
    }

    /// Appends the choice: which experts for each token, and with what weight.
    fn push(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        logits: TensorView,
        [ids, weights]: [&TensorView; 2],
    ) -> Result<()> {
        let (ids, weights) = (ids.clone(), weights.clone());
        let &Self { scoring, groups, group_rank, norm, scale, .. } = self;
        match (&self.table, &shared.tokens) {
            (Some(table), Some(tokens)) => {
                let (table, tokens) = (table.clone(), tokens.clone());
                step.push(HashRouter { logits, table, tokens, ids, weights, scoring, norm, scale })
            }
            (Some(_), None) => Err(Error::CheckFailed("experts by the token's number, without tokens".to_owned())),
            (None, _) => {
                let bias = self.bias.clone();
                step.push(Router { logits, bias, ids, weights, scoring, groups, group_rank, norm, scale })
            }
        }
    }
}

/// Experts of the host as the device reads them: over the bus.
#[derive(Debug)]
pub struct OnBus {
    /// Gate and up.
    pub gate_up: GateUp,
    /// `[E, D, F]`.
    pub down: TensorView,
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
    /// `[T, D]`: the normed input of a router that has a norm of its own.
    pub(super) x: TensorView,
    /// `[T, K, D]`; none where all experts are the host's.
    y: Option<TensorView>,
}

/// What the host was asked for, and where its result will be.
#[derive(Debug)]
pub(super) struct AskedExperts {
    pub(super) asked: Asked,
    /// `[T, D]`.
    pub(super) sum: TensorView,
    /// What the device adds to it.
    pub(super) beside: Option<TensorView>,
}

/// Room between the products of experts, `[T, …]` each.
pub(super) struct ExpertRoom<'a> {
    pub(super) gate: TensorView,
    pub(super) up: TensorView,
    pub(super) y: TensorView,
    pub(super) quantised: Option<&'a Room>,
}

impl RouterScratch {
    /// Room for any of these routers; none where there is none.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        experts: impl Iterator<Item = &'a Experts> + Clone,
        [tokens, width]: [usize; 2],
        streamed: bool,
    ) -> Result<Option<Self>> {
        let Some(count) = experts.clone().map(|experts| experts.router.dim(0)).max() else { return Ok(None) };
        let used = experts.clone().map(|experts| experts.used).max().unwrap_or(1);
        let here = step.is_on_host() || streamed || experts.clone().any(|experts| !experts.are_on_host());
        Ok(Some(Self {
            logits: step.floats("router logits", &[tokens, count])?,
            ids: step.scratch("expert ids", QuantType::I32, &[tokens, used])?,
            weights: step.floats("expert weights", &[tokens, used])?,
            x: step.floats("router input", &[tokens, width])?,
            y: if here { Some(step.floats("expert outputs", &[tokens, used * width])?) } else { None },
        }))
    }
}

impl GateUp {
    /// Its tensors, one or two.
    pub(super) fn weights(&self) -> impl Iterator<Item = &TensorView> + Clone {
        match self {
            Self::Apart { gate, up } => [Some(gate), Some(up)],
            Self::Merged(both) => [Some(both), None],
        }
        .into_iter()
        .flatten()
    }

    /// As the device reaches them, for weights of the host; none where it does not.
    fn on_bus(&self, weights: &Weights) -> Option<Self> {
        Some(match self {
            Self::Apart { gate, up } => Self::Apart { gate: weights.on_bus(gate)?, up: weights.on_bus(up)? },
            Self::Merged(both) => Self::Merged(weights.on_bus(both)?),
        })
    }

    /// Whether all of it is on the host.
    pub(super) fn is_on_host(&self) -> bool {
        self.weights().all(is_on_host)
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

impl OnBus {
    /// As the device reaches them; none for experts that it has, or does not reach.
    pub(super) fn find(weights: &Weights, gate_up: &GateUp, down: &TensorView) -> Option<Self> {
        Some(Self { gate_up: gate_up.on_bus(weights)?, down: weights.on_bus(down)? })
    }
}

impl Experts {
    /// The weights of the experts' products, without the router.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> + Clone {
        self.gate_up.weights().chain([&self.down])
    }

    /// Elements between an expert's two products.
    pub(super) fn hidden(&self) -> usize {
        self.down.dim(2)
    }

    /// Gate, or gate and up merged; up, where it is apart; down.
    pub(super) fn tensors(&self) -> [Option<&TensorView>; 3] {
        match &self.gate_up {
            GateUp::Apart { gate, up } => [Some(gate), Some(up), Some(&self.down)],
            GateUp::Merged(both) => [Some(both), None, Some(&self.down)],
        }
    }

    /// As the device reaches them, where they are on the host; none if it does not.
    pub(super) fn over_the_bus(&self) -> Option<HostExperts> {
        let OnBus { gate_up, down } = self.on_bus.as_ref()?;
        let [gate, up] = match gate_up {
            GateUp::Apart { gate, up } => [Some(gate), Some(up)],
            GateUp::Merged(both) => [Some(both), None],
        };
        let tensors = [gate, up, Some(down)].map(|tensor| tensor.cloned());
        Some(HostExperts { key: self.down.ptr(), used: self.used, tensors })
    }

    /// Whether all of them are on the host.
    pub(super) fn are_on_host(&self) -> bool {
        self.products().all(is_on_host)
    }

    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        quantised: Option<&Room>,
        input: &BranchInput,
        out: &TensorView,
    ) -> Result<()> {
        let Some(scratch @ RouterScratch { ids, weights, y: Some(y), .. }) = &shared.router else { return Ok(()) };
        let fit = |buffer: &TensorView, cols: usize| fitted(buffer, out.dim(0), cols);
        let (ids, weights) = (fit(ids, self.used)?, fit(weights, self.used)?);
        let logits = self.logits(step, scratch, input.router.as_ref().unwrap_or(&input.x).input().floats())?;
        self.choice.push(step, shared, logits, [&ids, &weights])?;
        let room = ExpertRoom {
            gate: fit(&shared.gate, self.used * self.hidden())?,
            up: fit(&shared.up, self.up())?,
            y: fit(y, self.used * out.dim(1))?,
            quantised: shared.hidden.as_ref().or(quantised),
        };
        let streamed = shared.streamed.as_ref().filter(|_| self.are_on_host());
        self.outputs(step, streamed, input.x.input(), [ids, weights], &room, out)
    }

    /// Asks the host for the sum of the experts' outputs. What they take crosses in as few bytes as it has.
    pub(super) fn ask_host(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        h: &TensorView,
        norm: &TensorView,
        normed: &TensorView,
    ) -> Result<Option<AskedExperts>> {
        let Some(scratch) = &shared.router else { return Ok(None) };
        let (tokens, width, used, hidden) = (h.dim(0), h.dim(1), self.used, self.hidden());
        // Before anything crosses: the router may be on the host too, and have a turn of its own.
        let norm = RmsNorm::new(h.clone(), norm.clone(), normed.clone(), shared.eps);
        match &self.router_norm {
            Some((own, scale)) => step.push(RmsNorm { weight: Some(own.clone()), scale: *scale, ..norm.clone() })?,
            None => step.push(norm.clone())?,
        }
        let logits = self.logits(step, scratch, normed)?;
        let ids = step.crossing("expert ids on the host", QuantType::I32, &[tokens, used])?;
        let weights = step.crossing("expert weights on the host", QuantType::F32, &[tokens, used])?;
        let fetched = shared.fetched.as_ref().filter(|_| tokens == 1);
        let crossed = Chosen { ids: ids.device.clone(), weights: weights.device.clone() };
        let ours = match fetched.and_then(|fetched| Some((fetched, fetched.cached(step, self)?))) {
            Some((fetched, cached)) => {
                // The choice stays on the device, which reads it again.
                let chosen =
                    Chosen { ids: fitted(&scratch.ids, 1, used)?, weights: fitted(&scratch.weights, 1, used)? };
                self.choice.push(step, shared, logits, [&chosen.ids, &chosen.weights])?;
                Some(fetched.share_out(step, cached, chosen, crossed)?)
            }
            None => {
                self.choice.push(step, shared, logits, [&crossed.ids, &crossed.weights])?;
                fetched.map(|fetched| fetched.first(crossed)).transpose()?
            }
        };
        let CrossingInput { written, read: x } = Input::crossing(step, normed, self.gate_up.weights())?;
        self.write_input(step, &written, &norm, normed)?;
        let sum = step.crossing("sum of experts of the host", QuantType::F32, &[tokens, width])?;
        // The device has the first, unless the lists say who has which.
        let share = ours.as_ref().map_or(0, |ours| ours.first);
        let rest = used - share;
        let asked = step.on_host(|step| {
            let quantised = Room::new(step, tokens * rest * hidden, [&self.down])?;
            let room = ExpertRoom {
                gate: step.floats("expert gate", &[tokens, rest * hidden])?,
                up: step.floats("expert up", &[tokens, rest * (self.up() / used)])?,
                y: step.floats("expert outputs", &[tokens, rest * width])?,
                quantised: quantised.as_ref(),
            };
            let (ids, weights) = (ids.host.narrow(1, share, rest)?, weights.host.narrow(1, share, rest)?);
            self.outputs(step, None, &x, [ids, weights], &room, &sum.host)
        })?;
        let beside = match fetched.zip(ours) {
            Some((fetched, ours)) => Some(self.fetch(step, fetched, ours, &norm, normed)?),
            None => None,
        };
        Ok(Some(AskedExperts { asked, sum: sum.device, beside }))
    }

    /// Writes the experts' input, a norm of the residual stream, after the router had its own in `normed`.
    pub(super) fn write_input(
        &self,
        step: &mut Step<'_>,
        x: &Input,
        norm: &RmsNorm,
        normed: &TensorView,
    ) -> Result<()> {
        match &self.router_norm {
            Some(_) => x.norm(step, norm.clone()),
            None => x.fill(step, normed),
        }
    }

    /// Elements beside the gate's, for each token.
    pub(super) fn up(&self) -> usize {
        let hidden = self.used * self.hidden();
        if matches!(self.gate_up, GateUp::Merged(_)) { 2 * hidden } else { hidden }
    }

    /// The router's logits for its normed input.
    fn logits(&self, step: &mut Step<'_>, scratch: &RouterScratch, x: &TensorView) -> Result<TensorView> {
        let logits = fitted(&scratch.logits, x.dim(0), self.router.dim(0))?;
        // The choice of experts is made of floats always: a rounded input may choose others.
        Input::new(step, None, x, [&self.router])?.times(step, &self.router, &logits)?;
        Ok(logits)
    }

    /// The weighted sum of the chosen experts' outputs, where the ops at hand run.
    fn outputs(
        &self,
        step: &mut Step<'_>,
        streamed: Option<&Streamed>,
        x: &Input,
        [ids, weights]: [TensorView; 2],
        room: &ExpertRoom<'_>,
        out: &TensorView,
    ) -> Result<()> {
        let products = Products { gate_up: &self.gate_up, down: &self.down, streamed, more: [None; 3] };
        let scale = if streamed.is_some() { &self.device_scale } else { &self.down_scale };
        let sums = Sums { weights, scale: scale.clone().map(|scale| (scale, ids.clone())) };
        self.multiply(step, &products, x, &ids, room, sums, out)
    }

    /// As [`outputs`](Self::outputs), with these tensors, of which `ids` names experts.
    #[allow(clippy::too_many_arguments, reason = "each is one thing")]
    pub(super) fn multiply(
        &self,
        step: &mut Step<'_>,
        products: &Products<'_>,
        x: &Input,
        ids: &TensorView,
        room: &ExpertRoom<'_>,
        sums: Sums,
        out: &TensorView,
    ) -> Result<()> {
        let (used, hidden) = (ids.dim(1), self.hidden());
        let (gate_out, up_out) = (room.gate.heads(used)?, room.up.heads(used)?);
        // A product with one of the experts' tensors, which is here, or comes.
        let times =
            |step: &mut Step<'_>, x: &Input, place: usize, w: &TensorView, y: &TensorView| match products.streamed {
                Some(streamed) => streamed.with(step, place, |step, w| x.times_experts(step, w, None, ids, y)),
                None => x.times_experts(step, w, products.more[place], ids, y),
            };
        let glu = match products.gate_up {
            GateUp::Apart { gate, up } => {
                times(step, x, 0, gate, &gate_out)?;
                times(step, x, 1, up, &up_out)?;
                Glu::new(gate_out.clone(), up_out, gate_out.clone(), self.activation)
            }
            GateUp::Merged(both) => {
                times(step, x, 0, both, &up_out)?;
                let half = |start: usize| up_out.narrow(2, start, hidden);
                Glu::new(half(0)?, half(hidden)?, gate_out.clone(), self.activation)
            }
        };
        let glu = Glu { limit: self.limit, ..glu };
        let y = room.y.heads(used)?;
        let down = match products.streamed {
            Some(streamed) => streamed.coming(2)?,
            None => products.down.clone(),
        };
        let hidden = Input::unwritten(room.quantised, &gate_out, [&down], false)?.glu(step, glu)?;
        times(step, &hidden, 2, products.down, &y)?;
        let Sums { weights, scale } = sums;
        step.push(ExpertSum { y, weights, expert_scale: scale, residual: None, out: out.clone() })
    }
}

/// The tensors that experts are multiplied with, where they are or come to.
pub(super) struct Products<'a> {
    pub(super) gate_up: &'a GateUp,
    pub(super) down: &'a TensorView,
    pub(super) streamed: Option<&'a Streamed>,
    /// Further experts behind those: of gate (with up, where the two are merged), up, down.
    pub(super) more: [Option<&'a TensorView>; 3],
}

/// How outputs of experts are summed up: `[T, K]` weights, and factors of the experts with the ids that name them.
pub(super) struct Sums {
    pub(super) weights: TensorView,
    pub(super) scale: Option<(TensorView, TensorView)>,
}
