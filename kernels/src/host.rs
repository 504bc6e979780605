//! Ops that the host does itself, on its own memory, beside a device.
//!
//! A [`HostPart`] is a list of ops on views whose roots are on [`HOST`]: weights in a mapped file, page-locked buffers
//! through which activations cross, scratch. The bodies are those of the host device, called without one: every span that an op
//! touches is checked against the roots of the part.
//!
//! A part runs where a stream has come to it. [`HostNode`] puts it into the stream as a host function. The other way
//! is a turn ([`HostAsk`](crate::ops::HostAsk), [`HostWait`](crate::ops::HostWait)): the thread that launched the stream's
//! work looks for the question and answers it, which takes a few microseconds less than a host function, and the device goes on with other
//! ops meanwhile.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use evergraph_pool::driver::host::{HostKernel, KernelContext, SpanCheck};
use evergraph_pool::driver::{DeviceOrdinal, DevicePtr, Fault, HostCallback, ParamLayout, StreamHandle};
use smallvec::SmallVec;

use crate::ops::{Call, Launch, Op, Plan, Root, TensorView};
use crate::quant::QuantType;
use crate::{KernelError, Kernels, cpu};

/// The host as a place where tensors are: no device has this number.
pub const HOST: DeviceOrdinal = DeviceOrdinal(u32::MAX);

/// Zeroed host memory for tensors, aligned to 64 bytes. Pages that nobody touches take no memory.
pub struct HostBlock {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory; who may touch which bytes when is the order of the parts that use it.
unsafe impl Send for HostBlock {}
// SAFETY: as above; there is no access through a shared reference but by address.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// `bytes` of memory; none if there is not so much.
    #[must_use]
    pub fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(64), 64).ok()?;
        // SAFETY: the layout has a size above zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { ptr, layout })
    }

    /// Memory that holds these bytes; none if there is not so much.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Option<Self> {
        let block = Self::new(bytes.len())?;
        // SAFETY: the block is as long, new, and nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), block.ptr.as_ptr(), bytes.len()) };
        Some(block)
    }

    /// Its address.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr.as_ptr().expose_provenance() as u64)
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// `bytes` from `offset_bytes` on as a tensor's root; none past the end.
    #[must_use]
    pub fn root(&self, name: impl Into<String>, offset_bytes: usize, bytes: usize) -> Option<Arc<Root>> {
        let end = offset_bytes.checked_add(bytes)?;
        let ptr = self.ptr().checked_add(offset_bytes)?;
        (end <= self.bytes()).then(|| Root::new(name, ptr, bytes, HOST))
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for HostBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBlock").field("ptr", &self.ptr).field("bytes", &self.bytes()).finish()
    }
}

/// What keeps the memory of a part's roots.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Ops that the host does, one after the other.
///
/// # Reuse and capture
/// Addresses are fixed, as in a graph; a part runs as often as one likes. It keeps what it was given to keep. Page-locked memory is
/// not among that: the graph that asks for the part depends on it.
pub struct HostPart {
    calls: Vec<HostCall>,
    spans: Spans,
    #[allow(dead_code, reason = "kept for its destructor")]
    keep: Vec<Keep>,
}

struct HostCall {
    kernel: &'static HostKernel,
    layout: ParamLayout,
    launch: Launch,
}

/// What a part may touch: start, end, whether for writing. By address.
#[derive(Debug)]
struct Spans(SmallVec<[(u64, u64, bool); 16]>);

impl SpanCheck for Spans {
    fn check(&self, op: &str, ptr: DevicePtr, bytes: usize, write: bool) -> Result<(), Fault> {
        let end = ptr.0.saturating_add(bytes as u64);
        let inside = |&(from, to, writable): &(u64, u64, bool)| from <= ptr.0 && end <= to && (writable || !write);
        if self.0.iter().any(inside) {
            return Ok(());
        }
        let owner = "no tensor of this part of the host's".to_owned();
        Err(Fault { address: ptr, bytes, write, op: op.to_owned(), owner })
    }
}

impl fmt::Debug for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.calls.iter().map(|call| call.launch.kernel)).finish()
    }
}

impl HostPart {
    /// The ops of a plan, which must all be on [`HOST`]. `keep` owns the memory of their roots, or the caller sees to
    /// it that the memory is there whenever the part runs, as for any launch.
    ///
    /// # Errors
    /// [`KernelError::Placement`] for an op that is elsewhere, [`KernelError::MissingKernel`].
    pub fn new(plan: &Plan, keep: Vec<Keep>) -> Result<Self, KernelError> {
        let mut calls = Vec::with_capacity(plan.ops().len());
        for op in plan.ops() {
            if let Some(view) = op.reads().into_iter().chain(op.writes()).find(|view| view.root().device != HOST) {
                return Err(KernelError::Placement {
                    op: op.name(),
                    device: HOST,
                    writes: String::new(),
                    tensor: format!("{view:?} of {}", view.root().name),
                    found: view.root().device,
                });
            }
            let Call { config, args } = op.call();
            let launch = Launch { kernel: op.name(), config, args };
            let kernel = cpu::KERNELS.iter().find(|kernel| kernel.name == launch.kernel);
            let kernel = kernel.ok_or(KernelError::MissingKernel(launch.kernel))?;
            calls.push(HostCall { kernel, layout: ParamLayout::c_layout(kernel.params), launch });
        }
        let spans = plan.accesses().into_iter().map(|access| {
            let (start, range) = (access.root.ptr.0, access.range);
            (start + range.start as u64, start + range.end as u64, access.writes)
        });
        Ok(Self { calls, spans: Spans(spans.collect()), keep })
    }

    /// Does all of it on this thread and those that help it.
    ///
    /// # Errors
    /// A fault, such as a number out of range in the data. What ran before stays done.
    pub fn run(&self) -> Result<(), Fault> {
        for HostCall { kernel, layout, launch } in &self.calls {
            let args = launch.args.as_bytes();
            (kernel.body)(&KernelContext::new(kernel.name, launch.config, layout, args, &self.spans))?;
        }
        Ok(())
    }

    /// Number of ops.
    #[must_use]
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }
}

/// The first fault of parts that ran where nobody could be told.
#[derive(Debug, Default)]
pub struct HostFaults(Mutex<Option<Fault>>);

impl HostFaults {
    /// Takes note of one.
    pub fn note(&self, fault: Fault) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fault);
    }

    /// The first one since this was last asked.
    #[must_use]
    pub fn take(&self) -> Option<Fault> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A part of the host's as a host function of the stream.
#[derive(Clone, Debug)]
pub struct HostNode {
    /// What is to be done.
    pub part: Arc<HostPart>,
    /// Who is told of a fault.
    pub faults: Arc<HostFaults>,
}

impl Op for HostNode {
    fn name(&self) -> &'static str {
        "host_node"
    }

    fn reads(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    fn writes(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn enqueue(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        let Self { part, faults } = self.clone();
        let run = move || {
            if let Err(fault) = part.run() {
                faults.note(fault);
            }
        };
        kernels.driver().bind()?;
        Ok(kernels.driver().launch_host_fn(stream, HostCallback::new(run))?)
    }
}

/// A tensor at the start of a block.
///
/// # Errors
/// [`KernelError::View`] for a shape that does not fit.
pub fn tensor(block: &HostBlock, name: &str, ty: QuantType, shape: &[usize]) -> Result<TensorView, KernelError> {
    let root = Root::new(name, block.ptr(), block.bytes(), HOST);
    TensorView::new(&root, ty, shape)
}

#[cfg(test)]
mod tests;
