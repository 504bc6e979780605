//! A checked list of ops: one step of a model.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use evergraph_pool::driver::StreamHandle;

use super::{Op, Root, TensorView};
use crate::{KernelError, Kernels};

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

/// Ops in launch order, each checked when it was added, all on one device.
#[derive(Default)]
pub struct Plan {
    ops: Vec<Box<dyn Op>>,
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
    /// Those of [`Op::check`]; [`KernelError::Placement`] if it would read memory of a device other than
    /// the one it writes.
    pub fn push(&mut self, op: impl Op + 'static) -> Result<(), KernelError> {
        op.check()?;
        if let Some(home) = op.writes().first().map(|view| view.root().device) {
            for view in op.reads().into_iter().chain(op.writes()) {
                if view.root().device != home {
                    return Err(KernelError::Placement {
                        op: op.name(),
                        device: home,
                        tensor: format!("{view:?} of {}", view.root().name),
                        found: view.root().device,
                    });
                }
            }
        }
        self.ops.push(Box::new(op));
        Ok(())
    }

    /// The ops.
    #[must_use]
    pub fn ops(&self) -> &[Box<dyn Op>] {
        &self.ops
    }

    /// Launches all in order. Nothing is checked again.
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
