//! What the steps of a sequence read and write at fixed addresses.

use evergraph_kernels::ops::{SampleState, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::{DeviceSlice, Element, Purpose, Tracked, Use};

use super::runtime::Unit;
use super::step::{tensor_bytes, view_of};
use crate::error::Result;

/// Counters of a sequence: a few for each group of heads of a step of few tokens, and far more than any op has asked for.
const COUNTERS: usize = 4096;

/// Everything that steps read and write besides weights, cache and scratch.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) ids: Buffer<i32>,
    pub(super) positions: Buffer<i32>,
    pub(super) hidden: Buffer<f32>,
    pub(super) logits: Buffer<f32>,
    pub(super) token: Buffer<i32>,
    pub(super) position: Buffer<i32>,
    pub(super) recent: Buffer<i32>,
    pub(super) state: Buffer<SampleState>,
    /// Zeros between ops, for each device.
    pub(super) counters: Vec<Buffer<i32>>,
    pub(super) taps: Vec<Buffer<f32>>,
}

#[derive(Debug)]
pub(super) struct Buffer<T: Element> {
    pub(super) slice: DeviceSlice<T>,
    pub(super) view: TensorView,
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(unit: &Unit, name: &str, ty: QuantType, shape: &[usize]) -> Result<Self> {
        let len = tensor_bytes(ty, shape)? / size_of::<T>();
        let slice = unit.pool().alloc_for::<T>(len, Purpose::State, unit.stream())?;
        let view = view_of(&slice, name, unit.device(), ty, shape)?;
        Ok(Self { slice, view })
    }

    /// The first rows.
    pub(super) fn first(&self, rows: usize) -> Result<TensorView> {
        Ok(self.view.narrow(0, 0, rows)?)
    }
}

impl Buffers {
    /// Zeros, in which the blocks of a kernel count each other.
    pub(super) fn counters(unit: &Unit) -> Result<Buffer<i32>> {
        let counters = Buffer::new(unit, "counters", QuantType::I32, &[COUNTERS])?;
        unit.stream().upload(&[0; COUNTERS], &counters.slice)?;
        Ok(counters)
    }

    pub(super) fn uses(&self) -> impl Iterator<Item = (&dyn Tracked, Use)> {
        let fixed: [&dyn Tracked; 8] = [
            &self.ids.slice,
            &self.positions.slice,
            &self.hidden.slice,
            &self.logits.slice,
            &self.token.slice,
            &self.position.slice,
            &self.recent.slice,
            &self.state.slice,
        ];
        let taps = self.taps.iter().map(|tap| &tap.slice as &dyn Tracked);
        let counters = self.counters.iter().map(|counters| &counters.slice as &dyn Tracked);
        fixed.into_iter().chain(counters).chain(taps).map(|tracked| (tracked, Use::State))
    }
}

#[cfg(test)]
mod tests;
