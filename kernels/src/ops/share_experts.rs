//! Which of a token's experts the device does, and which the host.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// Splits the choice of a [router](super::Router) for one token between the device, which keeps some of the experts, and the host.
///
/// The device does all chosen experts that it keeps. Where these are fewer than [`fetched`](Self::fetched) has places, it takes the
/// first of the others too, up to that number, which [`GatherExperts`](super::GatherExperts) brings there. The rest is the host's.
/// Both lists are in the order of the choice; places behind their ends hold id -1 ("no expert") and weight 0. Each chosen expert is
/// counted, once if it was chosen twice. An id outside `0 .. E`, or a slot outside `-1 .. slots`, is a fault.
#[derive(Clone, Debug)]
pub struct ShareExperts {
    /// `[1, K]` I32, K up to 32: the choice.
    pub ids: TensorView,
    /// `[1, K]` F32.
    pub weights: TensorView,
    /// `[E]` I32: the slot in which the device keeps each expert, or -1.
    pub at: TensorView,
    /// Number of slots.
    pub slots: usize,
    /// `[E]` I32: how often each expert was chosen.
    pub counts: TensorView,
    /// The device's part.
    pub device: Chosen,
    /// `[1, K]` I32, beside the device's ids: where its product finds the weights. The n-th fetched expert is at n, the expert of
    /// a slot behind the places for the fetched; -1 for none.
    pub places: TensorView,
    /// `[F]` I32: the experts that are to be fetched, or -1. None where the device does what it keeps and no more.
    pub fetched: Option<TensorView>,
    /// The host's part.
    pub host: Chosen,
}

/// Experts with their weights.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// `[1, K]` I32, contiguous.
    pub ids: TensorView,
    /// `[1, K]` F32, contiguous.
    pub weights: TensorView,
}

/// A lane of a warp for each.
const MOST_USED: usize = 32;

impl ShareExperts {
    fn outputs(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        let (device, host) = (&self.device, &self.host);
        let list = [
            ("ids of the device", Some(&device.ids)),
            ("weights of the device", Some(&device.weights)),
            ("places", Some(&self.places)),
            ("ids of the host", Some(&host.ids)),
            ("weights of the host", Some(&host.weights)),
            ("counts", Some(&self.counts)),
            ("fetched", self.fetched.as_ref()),
        ];
        list.into_iter().filter_map(|(role, view)| Some((role, view?)))
    }
}

impl Op for ShareExperts {
    fn name(&self) -> &'static str {
        "share_experts"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.ids, &self.weights, &self.at, &self.counts]
    }

    fn writes(&self) -> Vec<&TensorView> {
        self.outputs().map(|(_, view)| view).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.ids, &mut self.weights, &mut self.at]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("ids", &self.ids, &["1", "K"])?;
        let used = self.ids.dim(1);
        check.parameter(used <= MOST_USED, "experts of a token", used, "at most 32")?;
        for (role, view) in [
            ("ids", &self.ids),
            ("ids of the device", &self.device.ids),
            ("places", &self.places),
            ("ids of the host", &self.host.ids),
        ] {
            check.i32(role, view)?;
            check.shape(role, view, &[1, used])?;
        }
        for (role, view) in [
            ("weights", &self.weights),
            ("weights of the device", &self.device.weights),
            ("weights of the host", &self.host.weights),
        ] {
            check.f32(role, view)?;
            check.shape(role, view, &[1, used])?;
        }
        check.rank("at", &self.at, &["E"])?;
        check.i32("at", &self.at)?;
        check.i32("counts", &self.counts)?;
        check.shape("counts", &self.counts, &[self.at.dim(0)])?;
        if let Some(fetched) = &self.fetched {
            check.rank("fetched", fetched, &["F"])?;
            check.i32("fetched", fetched)?;
            check.parameter(fetched.dim(0) <= used, "experts to fetch", fetched.dim(0), "at most those of a token")?;
        }
        let fits = self.slots > 0 && self.slots <= i32::MAX as usize - MOST_USED;
        check.parameter(fits, "slots", self.slots, "at least 1, and room for the fetched below 2147483648")?;
        let mut others = vec![("ids", &self.ids), ("weights", &self.weights), ("at", &self.at)];
        for (role, view) in self.outputs() {
            check.apart(role, view, &others)?;
            others.push((role, view));
        }
        Ok(())
    }

    fn call(&self) -> Call {
        let fetched = self.fetched.as_ref();
        // One warp, a lane for each of the chosen.
        Call::new(1)
            .threads(1, 1)
            .view(&self.ids)
            .view(&self.weights)
            .dim(self.ids.dim(1))
            .view(&self.at)
            .view(&self.counts)
            .dim(self.at.dim(0))
            .dim(self.slots)
            .view(&self.device.ids)
            .view(&self.device.weights)
            .view(&self.places)
            .optional(fetched)
            .dim(fetched.map_or(0, |fetched| fetched.dim(0)))
            .view(&self.host.ids)
            .view(&self.host.weights)
    }
}
