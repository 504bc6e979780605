//! What streams and graphs do, and doing it: kernels, copies, sets, host functions.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::machine::Machine;
use super::thread::as_callback;
use super::{HostKernel, KernelContext, SpanCheck};
use crate::driver::{CopySide, DevicePtr, Fault, FunctionHandle, HostCallback, LaunchConfig, ParamLayout};
use crate::mutant;

/// A function of a loaded module.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) kernel: &'static HostKernel,
    pub(super) layout: Arc<ParamLayout>,
    pub(super) device: u32,
    /// False once the module was unloaded.
    pub(super) loaded: AtomicBool,
    pub(super) layout_readable: AtomicBool,
    pub(super) args_readable: AtomicBool,
}

/// A kernel launch with everything it needs.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    pub(super) handle: FunctionHandle,
    pub(super) function: Arc<Function>,
    /// The launch attribute that no getter shows.
    pub(super) hidden: u32,
    pub(super) config: LaunchConfig,
    pub(super) args: SmallVec<[u8; 128]>,
}

/// A copy; each device side with the device that must be able to touch it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) dst: CopySide,
    pub(super) dst_device: u32,
    pub(super) src: CopySide,
    pub(super) src_device: u32,
    pub(super) bytes: usize,
    /// Whether the device sides must *belong* to their devices (a peer copy names them).
    pub(super) homes: bool,
}

impl Copy {
    fn op(&self) -> &'static str {
        if self.homes { "memcpy_peer" } else { "memcpy" }
    }
}

/// A memset of `count` elements of `width` bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set {
    pub(super) dst: DevicePtr,
    pub(super) value: u32,
    pub(super) width: usize,
    pub(super) count: usize,
}

impl Set {
    pub(super) fn bytes(&self) -> usize {
        self.width * self.count
    }
}

/// One piece of work, of a stream or of a graph.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Kernel(Kernel),
    Copy(Copy),
    Set(Set),
    Host(HostCallback),
}

/// Spans that the op now running on one stream has touched, so that a free under it is noticed.
#[derive(Debug, Default)]
pub(super) struct Touched {
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    device: u32,
    op: &'static str,
    spans: Vec<(u64, u64)>,
}

/// Above this many spans they are sorted and merged.
const MERGE_ABOVE: usize = 512;

impl Touched {
    fn note(&self, start: u64, end: u64) {
        let mut running = self.running.lock();
        for span in running.spans.iter_mut().rev().take(4) {
            if span.0 <= start && start <= span.1 {
                span.1 = span.1.max(end);
                return;
            }
        }
        if running.spans.len() >= MERGE_ABOVE {
            running.spans.sort_unstable();
            running.spans.dedup_by(|next, kept| {
                let joined = next.0 <= kept.1;
                if joined {
                    kept.1 = kept.1.max(next.1);
                }
                joined
            });
        }
        running.spans.push((start, end));
    }

    fn begin(&self, device: u32, op: &'static str) {
        let mut running = self.running.lock();
        running.device = device;
        running.op = op;
    }

    fn end(&self) {
        self.running.lock().spans.clear();
    }

    /// The device and op that touch the range now.
    pub(super) fn touching(&self, start: u64, bytes: usize) -> Option<(u32, &'static str)> {
        let running = self.running.lock();
        let hit = running.spans.iter().any(|&(from, to)| from < start + bytes as u64 && start < to);
        hit.then_some((running.device, running.op))
    }
}

/// The map as seen by one running op.
struct Access<'a> {
    machine: &'a Machine,
    touched: &'a Touched,
    device: u32,
}

impl SpanCheck for Access<'_> {
    fn check(&self, op: &str, ptr: DevicePtr, bytes: usize, write: bool) -> Result<(), Fault> {
        // Noting under the map's lock: an unmap either sees the note or makes the check fail.
        let space = self.machine.space.read();
        match space.check(self.device, ptr.0, bytes, write) {
            Ok(()) => {
                self.touched.note(ptr.0, ptr.0 + bytes as u64);
                Ok(())
            }
            Err(owner) => Err(Fault { address: ptr, bytes, write, op: op.to_owned(), owner }),
        }
    }
}

/// Runs one piece of work as `device`; a fault kills that device's context. `graph` names the graph that it is part of.
pub(super) fn run(
    machine: &Machine,
    touched: &Touched,
    device: u32,
    work: &Work,
    graph: Option<&Mutex<Option<String>>>,
) {
    if machine.is_faulted(device) {
        return;
    }
    let op = match work {
        Work::Kernel(kernel) => kernel.function.kernel.name,
        Work::Copy(copy) => copy.op(),
        Work::Set(_) => "memset",
        Work::Host(_) => "host function",
    };
    touched.begin(device, op);
    let access = Access { machine, touched, device };
    let result = match work {
        Work::Kernel(kernel) => run_kernel(kernel, &access),
        Work::Copy(copy) => run_copy(copy, &access),
        Work::Set(set) => run_set(set, &access),
        Work::Host(callback) => {
            // A panic in a host function is its own affair; the stream goes on.
            let _ = catch_unwind(AssertUnwindSafe(|| as_callback(|| (callback.0)())));
            Ok(())
        }
    };
    touched.end();
    if let Err(mut fault) = result {
        if let Some(name) = graph.and_then(|name| name.lock().clone()) {
            fault.op = format!("{} in graph {name}", fault.op);
        }
        machine.set_fault(device, fault);
    }
}

fn run_kernel(kernel: &Kernel, access: &Access<'_>) -> Result<(), Fault> {
    let function = &kernel.function;
    let name = function.kernel.name;
    let fault = |owner: String| Fault { address: DevicePtr::NULL, bytes: 0, write: false, op: name.to_owned(), owner };
    if !function.loaded.load(Ordering::Acquire) && !mutant::is("host.unloaded-runs") {
        return Err(fault("the function's module was unloaded".to_owned()));
    }
    if kernel.hidden != function.kernel.hidden_attribute {
        return Err(fault(format!(
            "launched with hidden attribute {}, the function needs {}: an exec-update kept the old one",
            kernel.hidden, function.kernel.hidden_attribute
        )));
    }
    let context = KernelContext::new(name, kernel.config, &function.layout, &kernel.args, access);
    catch_unwind(AssertUnwindSafe(|| as_callback(|| (function.kernel.body)(&context)))).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(fault(format!("the kernel panicked: {message}")))
    })
}

fn run_copy(copy: &Copy, access: &Access<'_>) -> Result<(), Fault> {
    let side = |side: CopySide, device: u32, write: bool| -> Result<u64, Fault> {
        match side {
            CopySide::Device(ptr) => {
                let checked = Access { device, ..*access };
                checked.check(copy.op(), ptr, copy.bytes, write)?;
                let home = access.machine.space.read().home(ptr.0);
                if copy.homes && !mutant::is("host.homes-unchecked") && home.is_some_and(|home| home != device) {
                    let owner = format!("memory of device {}, named as device {device}", home.unwrap_or(0));
                    return Err(Fault { address: ptr, bytes: copy.bytes, write, op: copy.op().to_owned(), owner });
                }
                Ok(ptr.0)
            }
            CopySide::Host(ptr) => match access.machine.space.read().check_host(ptr, copy.bytes) {
                Ok(()) => Ok(ptr),
                Err(owner) => {
                    let address = DevicePtr(ptr);
                    Err(Fault { address, bytes: copy.bytes, write, op: copy.op().to_owned(), owner })
                }
            },
        }
    };
    let src = side(copy.src, copy.src_device, false)?;
    let dst = side(copy.dst, copy.dst_device, true)?;
    // SAFETY: device sides are mapped and stay so while noted as touched; for host sides the caller of the copy
    // vouched. `copy` allows overlap.
    unsafe { std::ptr::copy(src as usize as *const u8, dst as usize as *mut u8, copy.bytes) };
    Ok(())
}

fn run_set(set: &Set, access: &Access<'_>) -> Result<(), Fault> {
    access.check("memset", set.dst, set.bytes(), true)?;
    let dst = set.dst.0 as usize as *mut u8;
    if set.width == 1 {
        // SAFETY: the span is mapped and writable, and noted as touched.
        unsafe { std::ptr::write_bytes(dst, set.value as u8, set.count) };
    } else {
        // SAFETY: as above; the call checked that `dst` is 4-byte aligned.
        let words = unsafe { std::slice::from_raw_parts_mut(dst.cast::<u32>(), set.count) };
        words.fill(set.value);
    }
    Ok(())
}
