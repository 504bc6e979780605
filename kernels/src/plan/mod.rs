//! The plan of a step: ops in order, each on the device that it writes, known as a whole before anything runs.
//!
//! A view knows its root through any chain of views, and the root its device. An op runs where the buffer lives that it
//! writes; what it reads of other devices comes there by a step of its own, a [`PeerCopy`], once for all who read it. An op that
//! would touch memory of another device does not get into a plan. A row write gives the whole cache: whoever reads any of it later
//! comes after that write.

mod arrive;
mod order;
mod peer_copy;
mod print;
mod run;
mod split;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use evergraph_pool::driver::{DeviceInfo, DeviceOrdinal, StreamHandle};
use smallvec::SmallVec;

pub use order::After;
pub use peer_copy::PeerCopy;
pub use print::{PlanStep, Tensor, dot, text};
pub use run::{DeviceLane, Events};
pub use split::{SPLIT_OPS, Split, SplitOp, accepts_split};

use crate::host::HOST;
use crate::ops::{Op, Root, TensorView, fuse};
use crate::{KernelError, Kernels};
use arrive::Arrived;

/// Bytes of one root that a plan touches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// The allocation.
    pub root: Arc<Root>,
    /// From the first to the last byte touched, counted from the root's first.
    pub range: Range<usize>,
    /// Whether any of it is read before the plan wrote it.
    pub reads: bool,
    /// Whether any of it is written.
    pub writes: bool,
}

/// What gives memory for bytes that come from another device: under a name, so many of them, on that device.
pub type Land<'a, E> = dyn FnMut(&str, usize, DeviceOrdinal) -> Result<Arc<Root>, E> + 'a;

/// Ops in launch order, each checked when it was added, each on one device.
#[derive(Default)]
pub struct Plan {
    ops: Vec<Box<dyn Op>>,
    /// Where each of them runs.
    devices: Vec<DeviceOrdinal>,
    /// What came to other devices so far.
    arrived: Vec<Arrived>,
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ops.iter().map(|op| op.name())).finish()
    }
}

impl Plan {
    /// No ops yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends an op after checking it.
    ///
    /// # Errors
    /// Those of [`Op::check`]; [`KernelError::Placement`] if it would touch memory of a device other than
    /// the one it writes.
    pub fn push(&mut self, op: impl Op + 'static) -> Result<(), KernelError> {
        op.check()?;
        let home = self.home(&op)?;
        match foreign(&op, home)? {
            Some(view) => Err(misplaced(&op, home, view)),
            None => {
                self.append(op, home);
                Ok(())
            }
        }
    }

    /// Appends an op after checking it; what it reads of other devices comes to its own first, into memory that `land` gives: so
    /// many bytes on that device, under a name.
    ///
    /// # Errors
    /// Those of [`Op::check`] and of `land`; [`KernelError::Placement`] if it writes memory of several devices, or reads what can
    /// not come there: memory of the host, or of an op that does not say [what](Op::sources_mut) it reads.
    pub fn place<O: Op + 'static, E: From<KernelError>>(&mut self, mut op: O, land: &mut Land<'_, E>) -> Result<(), E> {
        op.check()?;
        let home = self.home(&op)?;
        if foreign(&op, home)?.is_some() && home != HOST {
            for source in op.sources_mut() {
                let device = source.root().device;
                if device != home && device != HOST {
                    *source = self.bring(source, home, land)?;
                }
            }
            op.check()?;
        }
        match foreign(&op, home)? {
            Some(view) => Err(misplaced(&op, home, view).into()),
            None => {
                self.append(op, home);
                Ok(())
            }
        }
    }

    /// The device that an op writes; of an op that writes nothing, the one before it.
    fn home(&self, op: &impl Op) -> Result<DeviceOrdinal, KernelError> {
        let writes = op.writes();
        let Some(first) = writes.first() else {
            return Ok(self.devices.last().copied().unwrap_or(DeviceOrdinal(0)));
        };
        let home = first.root().device;
        match writes.iter().find(|view| view.root().device != home) {
            Some(view) => Err(misplaced(op, home, view)),
            None => Ok(home),
        }
    }

    fn append(&mut self, op: impl Op + 'static, home: DeviceOrdinal) {
        self.ops.push(Box::new(op));
        self.devices.push(home);
    }

    /// Puts ops of one token that a device does in one launch together; see [`fuse`]. A plan over several devices
    /// stays as it is.
    #[must_use]
    pub fn fused(mut self, device: &DeviceInfo, counter: &TensorView) -> Self {
        let home = counter.root().device;
        if self.is_on(home) {
            self.ops = fuse(self.ops, device, counter);
            self.devices = vec![home; self.ops.len()];
        }
        self
    }

    /// The ops.
    #[must_use]
    pub fn ops(&self) -> &[Box<dyn Op>] {
        &self.ops
    }

    /// Where op `index` runs.
    #[must_use]
    pub fn device(&self, index: usize) -> Option<DeviceOrdinal> {
        self.devices.get(index).copied()
    }

    /// The devices that it runs on, in the order in which they come.
    #[must_use]
    pub fn devices(&self) -> SmallVec<[DeviceOrdinal; 4]> {
        let mut list = SmallVec::new();
        for device in &self.devices {
            if !list.contains(device) {
                list.push(*device);
            }
        }
        list
    }

    /// Whether all of it is on this device.
    #[must_use]
    pub fn is_on(&self, device: DeviceOrdinal) -> bool {
        self.devices.iter().all(|home| *home == device)
    }

    /// Launches all in order, on the stream of the one device that all of it is on. Nothing is checked again.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        for op in &self.ops {
            tracing::trace!(target: "evergraph::ops", op = op.name(), writes = ?op.writes(), reads = ?op.reads());
            op.enqueue(kernels, stream)?;
        }
        Ok(())
    }

    /// What the plan touches, one entry per root, in order of first use: the set to declare to a graph.
    #[must_use]
    pub fn accesses(&self) -> Vec<Access> {
        let mut list: Vec<Access> = Vec::new();
        let mut written: Vec<(Arc<Root>, Range<usize>)> = Vec::new();
        let mut note = |view: &TensorView, write: bool| {
            let (root, range) = (view.root(), view.range());
            // Reading what one earlier op of the plan wrote is no input.
            let covered = written.iter().any(|(r, w)| r == root && w.start <= range.start && range.end <= w.end);
            match list.iter_mut().find(|a| a.root == *root) {
                Some(access) => {
                    access.reads |= !write && !covered;
                    access.writes |= write;
                    access.range = access.range.start.min(range.start)..access.range.end.max(range.end);
                }
                None => {
                    list.push(Access { root: root.clone(), range: range.clone(), reads: !write, writes: write });
                }
            }
            if write && view.is_contiguous() && !covered {
                written.push((root.clone(), range));
            }
        };
        for op in &self.ops {
            for view in op.reads() {
                note(view, false);
            }
            for view in op.writes() {
                note(view, true);
            }
        }
        list
    }
}

/// The first view that an op on `home` could not touch there. A weight that is split over devices is nowhere.
fn foreign(op: &impl Op, home: DeviceOrdinal) -> Result<Option<&TensorView>, KernelError> {
    let reads = op.reads();
    match reads.iter().find(|view| view.root().is_split()) {
        None if op.crosses() => Ok(None),
        None => Ok(reads.into_iter().find(|view| view.root().device != home)),
        Some(view) => {
            let accepted = SPLIT_OPS.iter().filter(|known| known.split != Split::Whole).map(|known| known.op);
            let tensor = format!("{view:?} of {}", view.root().name);
            let accepted = format!("{}, part by part", accepted.collect::<Vec<_>>().join(", "));
            Err(KernelError::SplitWeight { op: op.name(), tensor, accepted })
        }
    }
}

fn misplaced(op: &impl Op, home: DeviceOrdinal, view: &TensorView) -> KernelError {
    let writes = op.writes().first().map_or_else(String::new, |view| format!(" ({view:?})"));
    KernelError::Placement {
        op: op.name(),
        device: home,
        writes,
        tensor: format!("{view:?} of {}", view.root().name),
        found: view.root().device,
    }
}
