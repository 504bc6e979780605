//! A step being put together: ops, and scratch that lives as long as the step.

use evergraph_kernels::Kernels;
use evergraph_kernels::ops::{Op, Plan, Root, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::{DeviceOrdinal, StreamHandle};
use evergraph_pool::{DeviceSlice, Tracked};

use super::runtime::ActType;
use crate::error::Result;

/// Ops in the order they run, and their scratch.
///
/// # Reuse and capture
/// Scratch comes from the pool while the step is put together and goes back, in stream order, once its ops
/// are queued. Inside a capture it becomes the graph's.
pub struct Step<'a> {
    device: DeviceOrdinal,
    act: ActType,
    allocate: &'a dyn Fn(usize) -> Result<DeviceSlice<u8>>,
    plan: Plan,
    scratch: Vec<DeviceSlice<u8>>,
}

impl<'a> Step<'a> {
    pub(super) fn new(
        device: DeviceOrdinal,
        act: ActType,
        allocate: &'a dyn Fn(usize) -> Result<DeviceSlice<u8>>,
    ) -> Self {
        Self { device, act, allocate, plan: Plan::new(), scratch: Vec::new() }
    }

    /// What products with weights in blocks are to take.
    #[must_use]
    pub fn act(&self) -> ActType {
        self.act
    }

    /// Scratch of a shape. Contents are undefined.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn scratch(&mut self, name: &'static str, ty: QuantType, shape: &[usize]) -> Result<TensorView> {
        let slice = (self.allocate)(tensor_bytes(ty, shape)?)?;
        let view = view_of(&slice, name, self.device, ty, shape)?;
        self.scratch.push(slice);
        Ok(view)
    }

    /// Scratch of floats.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn floats(&mut self, name: &'static str, shape: &[usize]) -> Result<TensorView> {
        self.scratch(name, QuantType::F32, shape)
    }

    /// Appends an op.
    ///
    /// # Errors
    /// What does not fit about it.
    pub fn push(&mut self, op: impl Op + 'static) -> Result<()> {
        Ok(self.plan.push(op)?)
    }

    /// The ops so far.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Queues the ops, then lets go of the scratch.
    pub(super) fn launch(self, kernels: &Kernels, stream: StreamHandle) -> Result<()> {
        Ok(self.plan.launch(kernels, stream)?)
    }
}

impl std::fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").field("plan", &self.plan).field("scratch", &self.scratch.len()).finish_non_exhaustive()
    }
}

/// Bytes of a contiguous tensor.
pub(crate) fn tensor_bytes(ty: QuantType, shape: &[usize]) -> Result<usize> {
    let (cols, rows) = shape.split_last().map_or((0, &[][..]), |(cols, rows)| (*cols, rows));
    let rows = rows.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    let bytes = rows.and_then(|rows| ty.row_bytes(cols).ok()?.checked_mul(rows));
    let error = evergraph_pool::PoolError::TooLarge { requested: usize::MAX, element_bytes: ty.type_bytes() };
    bytes.ok_or_else(|| error.into())
}

/// A slice seen as a tensor.
pub(crate) fn view_of(
    slice: &impl Tracked,
    name: &str,
    device: DeviceOrdinal,
    ty: QuantType,
    shape: &[usize],
) -> Result<TensorView> {
    let root = Root::with_allocation(name, slice.ptr(), slice.bytes(), device, slice.token().allocation.get());
    Ok(TensorView::new(&root, ty, shape)?)
}
