//! The device's share of a single token's experts that stay on the host: those that it keeps, and some that it fetches.

use evergraph_kernels::ops::{Chosen, GatherExperts, RmsNorm, ShareExperts, TensorView};
use evergraph_kernels::quant::QuantType;

use super::block::fitted;
use super::experts::{ExpertRoom, Experts, GateUp, Products, Sums};
use super::input::{Input, Room};
use crate::engine::{CachedExperts, Step};
use crate::error::{Error, Result};

/// Room for the experts that the device does of a token whose others the host does.
#[derive(Debug)]
pub(super) struct Fetched {
    /// How many of a token it fetches at most.
    share: usize,
    /// `[share]`: 0, 1, 2 …, the places of the fetched.
    places: Option<TensorView>,
    /// `[bytes]` I8 each: where they are fetched to.
    tensors: [Option<TensorView>; 3],
    /// Where it keeps some: who does which.
    lists: Option<Lists>,
    gate: TensorView,
    up: TensorView,
    y: TensorView,
    /// `[D]`.
    sum: TensorView,
    room: Option<Room>,
}

/// `[1, K]` each, for the device, and `[share]`.
#[derive(Debug)]
struct Lists {
    chosen: Chosen,
    places: TensorView,
    fetched: Option<TensorView>,
}

/// What the device does of a token, `[1, n]` each.
#[derive(Debug)]
pub(super) struct Ours<'a> {
    chosen: Chosen,
    /// Where products find them: among the fetched, or behind those among the kept.
    places: TensorView,
    /// `[share]`: those that it fetches.
    fetched: Option<TensorView>,
    cached: Option<&'a CachedExperts>,
    /// How many, if they are the first of the chosen; else 0.
    pub(super) first: usize,
}

impl Fetched {
    /// Room for any of these, all of which the device reaches; none where it does nothing of them.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        experts: impl Iterator<Item = &'a Experts> + Clone,
        width: usize,
    ) -> Result<Option<Self>> {
        let most = |of: &dyn Fn(&Experts) -> usize| experts.clone().map(of).max().unwrap_or(0);
        let used = most(&|experts| experts.used);
        let least = experts.clone().map(|experts| experts.used).min().unwrap_or(0);
        let keeps = experts.clone().any(|experts| step.cached_experts(experts.down.ptr()).is_some());
        // The host is asked in any case. It has one left at least, unless lists say that it has none.
        let share = step.device_share().min(if keeps { least } else { least.saturating_sub(1) });
        let done = if keeps { used } else { share };
        if done == 0 {
            return Ok(None);
        }
        let mut tensors = [None, None, None];
        for (place, tensor) in tensors.iter_mut().enumerate() {
            let bytes = |experts: &Experts| experts.tensors()[place].map_or(0, |w| w.range().len() / w.dim(0));
            *tensor = match most(&bytes) * share {
                0 => None,
                bytes => Some(step.scratch("experts fetched from the host", QuantType::I8, &[bytes])?),
            };
        }
        let (hidden, up) =
            (done * most(&|experts| experts.hidden()), done * most(&|experts| experts.up() / experts.used));
        Ok(Some(Self {
            share,
            places: step.places(share)?,
            tensors,
            lists: if keeps { Some(Lists::new(step, used, share)?) } else { None },
            gate: step.floats("gate of fetched experts", &[1, hidden])?,
            up: step.floats("up of fetched experts", &[1, up])?,
            y: step.floats("outputs of fetched experts", &[1, done * width])?,
            sum: step.floats("sum of fetched experts", &[1, width])?,
            room: Room::new(step, width.max(hidden), experts.flat_map(Experts::products))?,
        }))
    }

    /// What the device keeps of these experts, where there are lists to go by.
    pub(super) fn cached<'a>(&self, step: &Step<'a>, experts: &Experts) -> Option<&'a CachedExperts> {
        self.lists.as_ref().and_then(|_| step.cached_experts(experts.down.ptr()))
    }

    /// Appends what splits a token's choice: the device does what it keeps, and fetches others up to its share. The host's part goes to `host`.
    pub(super) fn share_out<'a>(
        &self,
        step: &mut Step<'_>,
        cached: &'a CachedExperts,
        chosen: Chosen,
        host: Chosen,
    ) -> Result<Ours<'a>> {
        let Some(lists) = &self.lists else { return Err(lost()) };
        let fit = |list: &TensorView| fitted(list, 1, chosen.ids.dim(1));
        let device = Chosen { ids: fit(&lists.chosen.ids)?, weights: fit(&lists.chosen.weights)? };
        let (places, fetched) = (fit(&lists.places)?, lists.fetched.clone());
        step.push(ShareExperts {
            ids: chosen.ids,
            weights: chosen.weights,
            at: cached.at.clone(),
            slots: cached.count,
            counts: cached.counts.clone(),
            device: device.clone(),
            places: places.clone(),
            fetched: fetched.clone(),
            host,
        })?;
        Ok(Ours { chosen: device, places, fetched, cached: Some(cached), first: 0 })
    }

    /// The first of the chosen, for a device that keeps none.
    pub(super) fn first(&self, chosen: Chosen) -> Result<Ours<'static>> {
        let (share, Some(places)) = (self.share, &self.places) else { return Err(lost()) };
        let chosen = Chosen { ids: chosen.ids.narrow(1, 0, share)?, weights: chosen.weights.narrow(1, 0, share)? };
        let fetched = Some(chosen.ids.reshape(&[share])?);
        Ok(Ours { chosen, places: places.reshape(&[1, share])?, fetched, cached: None, first: share })
    }
}

impl Lists {
    fn new(step: &mut Step<'_>, used: usize, share: usize) -> Result<Self> {
        let mut ids = |name, shape: &[usize]| step.scratch(name, QuantType::I32, shape);
        let (chosen, places) = (ids("experts of the device", &[1, used])?, ids("their places", &[1, used])?);
        let fetched = if share > 0 { Some(ids("experts to fetch", &[share])?) } else { None };
        let weights = step.floats("weights of the device's experts", &[1, used])?;
        Ok(Self { chosen: Chosen { ids: chosen, weights }, places, fetched })
    }
}

impl Experts {
    /// What the device's share of the chosen experts adds. Their input goes to `normed`, after the router is done with it.
    pub(super) fn fetch(
        &self,
        step: &mut Step<'_>,
        fetched: &Fetched,
        ours: Ours<'_>,
        norm: &RmsNorm,
        normed: &TensorView,
    ) -> Result<TensorView> {
        let Some(on_bus) = &self.on_bus else { return Err(lost()) };
        let kept = |place: usize| ours.cached.and_then(|cached| cached.slots[place].as_ref());
        // Where products find the fetched, or the kept, where none are fetched.
        let fetch = |step: &mut Step<'_>, place: usize, w: &TensorView| {
            let Some((memory, ids)) = fetched.tensors[place].as_ref().zip(ours.fetched.as_ref()) else {
                return kept(place).cloned().ok_or_else(lost);
            };
            let out = TensorView::new(memory.root(), w.ty(), &[ids.dim(0), w.dim(1), w.dim(2)])?;
            step.push(GatherExperts { w: w.clone(), ids: ids.clone(), out: out.clone() })?;
            Ok(out)
        };
        let gate_up = match &on_bus.gate_up {
            GateUp::Merged(both) => GateUp::Merged(fetch(step, 0, both)?),
            GateUp::Apart { gate, up } => GateUp::Apart { gate: fetch(step, 0, gate)?, up: fetch(step, 1, up)? },
        };
        let down = fetch(step, 2, &on_bus.down)?;
        let x = Input::unwritten(fetched.room.as_ref(), normed, gate_up.weights(), self.router_norm.is_none())?;
        self.write_input(step, &x, norm, normed)?;
        let done = ours.places.dim(1);
        let room = ExpertRoom {
            gate: fitted(&fetched.gate, 1, done * self.hidden())?,
            up: fitted(&fetched.up, 1, done * (self.up() / self.used))?,
            y: fitted(&fetched.y, 1, done * normed.dim(1))?,
            quantised: fetched.room.as_ref(),
        };
        let more = [0, 1, 2].map(|place| ours.fetched.as_ref().and_then(|_| kept(place)));
        let parts = Products { gate_up: &gate_up, down: &down, streamed: None, more };
        let sums = Sums {
            weights: ours.chosen.weights.clone(),
            scale: self.device_scale.clone().map(|scale| (scale, ours.chosen.ids.clone())),
        };
        self.multiply(step, &parts, &x, &ours.places, &room, sums, &fetched.sum)?;
        Ok(fetched.sum.clone())
    }
}

fn lost() -> Error {
    Error::CheckFailed("experts of the host that the device does not reach".to_owned())
}
