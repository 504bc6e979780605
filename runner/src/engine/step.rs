//! A step being put together: ops, and scratch that lives as long as the step.

use std::sync::Arc;

use evergraph_kernels::host::{HOST, HostPart, Keep};
use evergraph_kernels::lane::Lane;
use evergraph_kernels::ops::{Op, Root, TensorView};
use evergraph_kernels::plan::{DeviceLane, PeerCopy, Plan, PlanStep};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::{DeviceOrdinal, DevicePtr};
use evergraph_pool::{DeviceSlice, Tracked};

use super::expert_cache::CachedExperts;
use super::host::{Crossing, HostSide, HostWork};
use super::runtime::ActType;
use crate::error::{Error, Result};

/// Ops in the order they run, and their scratch. Some of them the host may do: see [`on_host`](Self::on_host).
///
/// # Reuse and capture
/// Scratch comes from the pool while the step is put together and goes back, in stream order, once its ops
/// are queued. Inside a capture it becomes the graph's.
pub struct Step<'a> {
    /// Where scratch is taken.
    device: DeviceOrdinal,
    act: ActType,
    allocate: &'a dyn Fn(DeviceOrdinal, usize) -> Result<DeviceSlice<u8>>,
    side: Option<&'a HostSide>,
    capturing: bool,
    /// Ops up to the next place where the host is waited for, and who does them.
    plan: Plan,
    on_host: bool,
    /// What was before it, each with what the host has to do then.
    done: Vec<(Plan, Arc<HostPart>)>,
    scratch: Vec<DeviceSlice<u8>>,
    /// What keeps the host's memory that ops at hand use.
    keep: Vec<Keep>,
    asked: bool,
    counters: Vec<TensorView>,
}

/// What the host was asked for and not yet waited for.
#[must_use]
#[derive(Debug)]
pub struct Asked(Arc<HostPart>);

impl<'a> Step<'a> {
    pub(super) fn new(
        device: DeviceOrdinal,
        act: ActType,
        allocate: &'a dyn Fn(DeviceOrdinal, usize) -> Result<DeviceSlice<u8>>,
        side: Option<&'a HostSide>,
        capturing: bool,
    ) -> Self {
        Self {
            device,
            act,
            allocate,
            side,
            capturing,
            plan: Plan::new(),
            on_host: false,
            done: Vec::new(),
            scratch: Vec::new(),
            keep: Vec::new(),
            asked: false,
            counters: Vec::new(),
        }
    }

    /// Lets ops count in this memory `[n]` of its device, which is declared and holds zeros.
    pub(super) fn count_in(&mut self, counters: &TensorView) {
        self.counters.push(counters.clone());
    }

    /// What products with weights in blocks are to take.
    #[must_use]
    pub fn act(&self) -> ActType {
        self.act
    }

    /// Whether ops at hand are the host's.
    #[must_use]
    pub fn is_on_host(&self) -> bool {
        self.on_host
    }

    /// The device that scratch is taken on, for the ops that come next.
    #[must_use]
    pub fn device(&self) -> DeviceOrdinal {
        self.device
    }

    /// Takes scratch on this device from here on. Where an op runs is not said here: it runs where it writes.
    pub fn go_to(&mut self, device: DeviceOrdinal) {
        if device != HOST {
            self.device = device;
        }
    }

    /// A tensor of this device as one of the other: a copy between devices, where they are not the same.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn across(&mut self, name: &'static str, view: &TensorView) -> Result<TensorView> {
        if view.root().device == self.device || self.on_host {
            return Ok(view.clone());
        }
        let there = self.scratch(name, view.ty(), view.shape())?;
        self.push(PeerCopy { src: view.clone(), dst: there.clone() })?;
        Ok(there)
    }

    /// Scratch of a shape, where the ops at hand run. Contents are undefined.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn scratch(&mut self, name: &'static str, ty: QuantType, shape: &[usize]) -> Result<TensorView> {
        if self.on_host {
            let (view, keep) = self.side()?.scratch(name, ty, shape)?;
            self.keep(keep);
            return Ok(view);
        }
        let slice = (self.allocate)(self.device, tensor_bytes(ty, shape)?)?;
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

    /// Appends an op. It runs on the device that it writes, and what it reads of others is copied there first.
    ///
    /// # Errors
    /// What does not fit about it; those of the pool.
    pub fn push(&mut self, op: impl Op + 'static) -> Result<()> {
        let (allocate, scratch) = (self.allocate, &mut self.scratch);
        self.plan.place(op, &mut |name: &str, bytes, device| {
            let slice = allocate(device, bytes)?;
            let allocation = slice.token().allocation.get();
            let root = Root::with_allocation(name, slice.ptr(), bytes, device, allocation);
            scratch.push(slice);
            Ok::<_, Error>(root)
        })
    }

    /// Keeps memory of the host as long as ops at hand may run.
    pub fn keep(&mut self, keep: Keep) {
        if !self.keep.iter().any(|kept| Arc::ptr_eq(kept, &keep)) {
            self.keep.push(keep);
        }
    }

    /// Memory that device and host reach both, for what one makes and the other reads in one share of the host's. Contents
    /// are undefined. What the host made is to be read before the next share begins.
    ///
    /// # Errors
    /// Those of the pool; [`Error::CheckFailed`] where nothing of the model is on the host.
    pub fn crossing(&self, name: &'static str, ty: QuantType, shape: &[usize]) -> Result<Crossing> {
        self.side()?.crossing(self.device, name, ty, shape)
    }

    /// Asks the host to do the ops that `build` appends, on memory of the host, once the device has come here. They run
    /// while the device does what is appended next, up to [`wait`](Self::wait).
    ///
    /// # Errors
    /// Those of `build`; [`Error::CheckFailed`] where nothing of the model is on the host, or while it is asked already.
    pub fn on_host(&mut self, build: impl FnOnce(&mut Self) -> Result<()>) -> Result<Asked> {
        let side = self.side()?;
        if self.on_host || self.asked {
            return Err(Error::CheckFailed("the host is asked for two things at once".to_owned()));
        }
        let outer = std::mem::take(&mut self.plan);
        self.on_host = true;
        let built = build(self);
        self.on_host = false;
        let plan = std::mem::replace(&mut self.plan, outer);
        let mut keep = std::mem::take(&mut self.keep);
        built?;
        keep.extend(side.keep().iter().cloned());
        let part = Arc::new(HostPart::new(&plan, keep)?);
        match side.how() {
            HostWork::Turns => self.push(side.ask())?,
            HostWork::Nodes => self.push(side.node(&part))?,
        }
        self.asked = true;
        Ok(Asked(part))
    }

    /// Waits for what the host was asked for.
    ///
    /// # Errors
    /// [`Error::CheckFailed`] where nothing of the model is on the host.
    pub fn wait(&mut self, asked: Asked) -> Result<()> {
        let side = self.side()?;
        if side.how() == HostWork::Turns {
            self.done.push((std::mem::take(&mut self.plan), asked.0));
            self.push(side.wait())?;
        }
        side.begin_part();
        self.asked = false;
        Ok(())
    }

    fn side(&self) -> Result<&'a HostSide> {
        self.side.ok_or_else(|| Error::CheckFailed("a step without a host's share asks for one".to_owned()))
    }

    /// The ops since the host was last waited for, or all, if it never was.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The lane on which experts of the host come to the device, where they do in a step of so many tokens.
    #[must_use]
    pub fn lane(&self, tokens: usize) -> Option<Arc<Lane>> {
        self.side.filter(|_| !self.on_host)?.lane(tokens)
    }

    /// How many of a token's experts that stay on the host the device fetches and does itself.
    #[must_use]
    pub fn device_share(&self) -> usize {
        self.side.filter(|_| !self.on_host).map_or(0, |side| side.device_share())
    }

    /// What the device keeps of experts that stay on the host, by the host's address of their last tensor.
    pub(crate) fn cached_experts(&self, key: DevicePtr) -> Option<&'a CachedExperts> {
        self.side.filter(|_| !self.on_host)?.cache()?.of(key)
    }

    /// The numbers 0, 1, 2 … as a tensor `[count]` on the device; none for none, or more than there are.
    ///
    /// # Errors
    /// None but for sizes that make no sense.
    pub(crate) fn places(&self, count: usize) -> Result<Option<TensorView>> {
        self.side.map_or(Ok(None), |side| side.places(count))
    }

    /// `count` zeros `[count]` (I32) of the device, in which the blocks of a kernel count each other. Every op that counts leaves zeros
    /// behind, so that all ops of the step, which run one after the other, have the same ones. None for ops of the host, for a
    /// step that has none, and for more than there are: the op then does without.
    ///
    /// # Errors
    /// None but for sizes that make no sense.
    pub fn counters(&self, count: usize) -> Result<Option<TensorView>> {
        let ours = |all: &&TensorView| all.root().device == self.device && (1..=all.dim(0)).contains(&count);
        let all = self.counters.iter().filter(|_| !self.on_host).find(ours);
        Ok(all.map(|all| all.narrow(0, 0, count)).transpose()?)
    }

    /// Number of ops so far, the host's not counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.done.iter().map(|(plan, _)| plan.ops().len()).sum::<usize>() + self.plan.ops().len()
    }

    /// Scratch of the device that the step has taken so far, bytes.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.iter().map(DeviceSlice::bytes).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The plan of all of it, which is not run.
    pub(super) fn planned(self) -> Vec<PlanStep> {
        let mut steps: Vec<PlanStep> = Vec::new();
        for plan in self.done.iter().map(|(plan, _)| plan).chain([&self.plan]) {
            // Where the host is waited for, all that comes later comes after all that was before.
            let first = steps.len();
            steps.extend(plan.steps().into_iter().map(|mut step| {
                step.after.iter_mut().for_each(|before| *before += first);
                if step.after.is_empty() {
                    step.after.extend(first.checked_sub(1));
                }
                step
            }));
        }
        steps
    }

    /// Queues the ops, then lets go of the scratch. Gives back what the host has to do once it is launched, if this was
    /// captured; else that was done.
    pub(super) fn launch(mut self, lanes: &[DeviceLane<'_>], fuse: bool) -> Result<Vec<Arc<HostPart>>> {
        let mut parts = Vec::new();
        if let Some(counter) = self.counters(1)?.filter(|_| fuse)
            && let Some(lane) = lanes.first()
        {
            let fused = |plan: Plan| plan.fused(lane.kernels.device(), &counter);
            self.done = self.done.into_iter().map(|(plan, part)| (fused(plan), part)).collect();
            self.plan = fused(self.plan);
        }
        for (plan, part) in self.done {
            plan.launch_over(lanes, !self.capturing)?;
            match self.side {
                Some(side) if !self.capturing => side.answer(&part)?,
                _ => parts.push(part),
            }
        }
        self.plan.launch_over(lanes, !self.capturing)?;
        Ok(parts)
    }
}

impl std::fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step")
            .field("plan", &self.plan)
            .field("parts of the host", &self.done.len())
            .field("scratch", &self.scratch.len())
            .finish_non_exhaustive()
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
