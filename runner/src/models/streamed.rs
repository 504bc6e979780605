//! Weights of experts that stay on the host and come to the device ahead of their use.
//!
//! For many tokens nearly all experts are chosen, and the device is done with them before the host would be: their weights cross
//! instead of the activations. There is one place for each of an expert's tensors. The next block's tensor is copied there, on a
//! lane of its own, as soon as the block before is done with the place, while the device goes on with the rest of that block.

use std::cell::Cell;
use std::sync::Arc;

use evergraph_kernels::lane::{Lane, Record, Upload, Wait};
use evergraph_kernels::ops::TensorView;
use evergraph_kernels::quant::QuantType;

use super::experts::Experts;
use crate::engine::Step;
use crate::error::{Error, Result};

/// Tensors of an expert: gate (with up, where the two are merged), up, down.
const PLACES: usize = 3;

/// The event that says where the step began.
const BEGUN: usize = 0;

/// The places, and what comes to them.
#[derive(Debug)]
pub(super) struct Streamed {
    lane: Arc<Lane>,
    places: [Place; PLACES],
}

#[derive(Debug)]
struct Place {
    /// `[bytes]` I8; none where nothing comes here.
    memory: Option<TensorView>,
    /// What comes here, in the order of the blocks.
    weights: Vec<TensorView>,
    /// What is used next.
    next: Cell<usize>,
    ready: usize,
    free: usize,
}

impl Streamed {
    /// Takes the places as scratch of the step, and lets the first tensors come.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        lane: Arc<Lane>,
        experts: impl Iterator<Item = &'a Experts>,
    ) -> Result<Self> {
        let place = |number: usize| Place {
            memory: None,
            weights: Vec::new(),
            next: Cell::new(0),
            ready: 1 + number,
            free: 1 + PLACES + number,
        };
        let mut places: [Place; PLACES] = std::array::from_fn(place);
        for experts in experts {
            for (place, weight) in places.iter_mut().zip(experts.tensors()) {
                place.weights.extend(weight.cloned());
            }
        }
        for place in &mut places {
            if let Some(most) = place.weights.iter().map(|weight| weight.range().len()).max() {
                place.memory = Some(step.scratch("experts from the host", QuantType::I8, &[most])?);
            }
        }
        step.push(Record { lane: Arc::clone(&lane), event: BEGUN })?;
        let streamed = Self { lane, places };
        for place in &streamed.places {
            streamed.upload(step, place, BEGUN)?;
        }
        Ok(streamed)
    }

    /// The next tensor of a place as it will be there.
    pub(super) fn coming(&self, place: usize) -> Result<TensorView> {
        let place = self.place(place)?;
        let weight = place.weights.get(place.next.get()).ok_or_else(lost)?;
        let memory = place.memory.as_ref().ok_or_else(lost)?;
        Ok(TensorView::new(memory.root(), weight.ty(), weight.shape())?)
    }

    /// Appends what waits for the next tensor of a place, what `use_` does with it, and the coming of the one after it.
    pub(super) fn with(
        &self,
        step: &mut Step<'_>,
        place: usize,
        use_: impl FnOnce(&mut Step<'_>, &TensorView) -> Result<()>,
    ) -> Result<()> {
        let weight = self.coming(place)?;
        let place = self.place(place)?;
        step.push(Wait { lane: Arc::clone(&self.lane), event: place.ready })?;
        use_(step, &weight)?;
        place.next.set(place.next.get() + 1);
        if place.next.get() < place.weights.len() {
            step.push(Record { lane: Arc::clone(&self.lane), event: place.free })?;
            self.upload(step, place, place.free)?;
        }
        Ok(())
    }

    fn upload(&self, step: &mut Step<'_>, place: &Place, after: usize) -> Result<()> {
        let (Some(weight), Some(memory)) = (place.weights.get(place.next.get()), &place.memory) else { return Ok(()) };
        let dst = TensorView::new(memory.root(), weight.ty(), weight.shape())?;
        step.push(Upload { lane: Arc::clone(&self.lane), after, done: place.ready, src: weight.clone(), dst })
    }

    fn place(&self, number: usize) -> Result<&Place> {
        self.places.get(number).ok_or_else(lost)
    }
}

fn lost() -> Error {
    Error::CheckFailed("a block uses experts that were not sent for".to_owned())
}
