//! The host device: a complete device on the CPU, at least as strict as the hardware.
//!
//! - **Memory** is real pages at real addresses: a device address is an address of this process. A chunk may be
//!   mapped at two ranges; fresh memory is poisoned; a freed address is the next one handed out, and so is a
//!   destroyed stream's, event's or graph's handle.
//! - **Access** is checked against the map, once a span: a kernel, copy or set that touches what it may not makes
//!   the context's sticky fault, naming op and owner. The call that queued it succeeded; the next call that waits
//!   reports it, and every call after that. Memory taken from under a *running* op is the same fault.
//! - **Streams** run in order, each on a thread of its own, or (stepped) on the thread that waits or asks, as late
//!   as possible, a graph node by node. On a stepped device a kernel that waits for a flag needs the flag set before
//!   anybody waits for its stream.
//! - **Capture, update and the current device** follow the driver's rules; where those are vague, the strict
//!   reading. Driver calls from a host function are refused.
//!
//! What an update can not carry over shows here: a kernel that runs with another hidden attribute than its function
//! has is a fault.
//!
//! ```
//! use evergraph_pool::driver::{Driver, Memory, Streams, host::{HostConfig, HostDevice}};
//! let device = HostDevice::new(HostConfig::default().memory(64 << 20))?;
//! device.bind()?;
//! let stream = device.stream_create(0)?;
//! let memory = device.malloc(4)?;
//! device.memset_d8(memory, 7, 4, stream)?;
//! let mut back = [0u8; 4];
//! // SAFETY: `back` outlives the copy, which the wait ends.
//! unsafe { device.memcpy_dtoh(back.as_mut_ptr(), memory, 4, stream)? };
//! device.stream_synchronize(stream)?;
//! assert_eq!(back, [7; 4]);
//! # Ok::<(), evergraph_pool::driver::DriverError>(())
//! ```
//!
//! Linux only (memfd).

mod arena;
mod capture;
mod config;
mod graph;
mod kernel;
mod machine;
mod memory;
mod module;
mod pages;
mod slots;
mod space;
mod stream;
pub(super) mod thread;
mod work;

use std::sync::Arc;

pub use config::{HostConfig, Poison};
pub use kernel::{HostKernel, KernelContext, SpanCheck};

use super::{
    DeviceInfo, DeviceOrdinal, DevicePtr, Driver, DriverError, DriverErrorKind, DriverResult, ExecHandle, Fault,
};
use crate::mutant;
use machine::Machine;

/// A device on the CPU.
#[derive(Debug)]
pub struct HostDevice {
    machine: Arc<Machine>,
    info: DeviceInfo,
}

/// Several host devices of one machine: one address space, peer rules between them.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostMachine {}

/// Devices are bits of a mask.
const MAX_DEVICES: usize = 64;

impl HostMachine {
    /// A machine of `devices` alike devices (1 to 64), numbered from 0.
    ///
    /// # Errors
    /// `InvalidValue` for another number, or for a granularity that is not a power of two of at least 4096.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(devices: usize, config: HostConfig) -> DriverResult<Vec<Arc<HostDevice>>> {
        let refuse = |why| {
            let kind = DriverErrorKind::InvalidValue(why);
            Err(DriverError::new("open", DeviceOrdinal(0), kind))
        };
        if !(1..=MAX_DEVICES).contains(&devices) {
            return refuse("a machine has 1 to 64 devices");
        }
        if !config.granularity_bytes.is_power_of_two() || config.granularity_bytes < pages::PAGE_BYTES {
            return refuse("the granularity is a power of two of at least 4096");
        }
        let machine = Machine::new(devices, config);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let device = |ordinal| {
            let config = &machine.config;
            let name = format!("host {ordinal}");
            let mut info = DeviceInfo::new(DeviceOrdinal(ordinal), "host", name, config.memory_bytes, config.vmm);
            info.multiprocessors = threads as u32;
            info.shared_bytes = module::MAX_SHARED_BYTES;
            Arc::new(HostDevice { machine: machine.clone(), info })
        };
        Ok((0..devices as u32).map(device).collect())
    }
}

impl HostDevice {
    /// A machine of one device.
    ///
    /// # Errors
    /// As [`HostMachine::new`].
    pub fn new(config: HostConfig) -> DriverResult<Arc<Self>> {
        let mut devices = HostMachine::new(1, config)?;
        Ok(devices.remove(0))
    }

    /// How it was set up.
    #[must_use]
    pub fn config(&self) -> &HostConfig {
        &self.machine.config
    }

    /// What is live on this device; for leak checks.
    #[must_use]
    pub fn live(&self) -> Live {
        let mut live = Live::default();
        let state = self.machine.state.lock();
        let device = self.ordinal();
        live.streams = state.streams.iter().filter(|(_, key)| state.queues[**key].device == device).count();
        live.events = state.events.iter().filter(|(_, event)| event.device == device).count();
        live.graphs = state.graphs.iter().filter(|(_, graph)| !graph.is_child && graph.device() == device).count();
        live.execs = state.execs.iter().filter(|(_, exec)| exec.device == device).count();
        live.modules = state.modules.iter().filter(|(_, module)| module.device == device).count();
        live.captures = state.captures.len();
        self.machine.space.read().count(device, &mut live);
        live
    }

    fn ordinal(&self) -> u32 {
        self.info.ordinal.0
    }

    fn err(&self, call: &'static str, kind: DriverErrorKind) -> DriverError {
        DriverError::new(call, self.info.ordinal, kind)
    }

    /// Entry of every call: not from a host function, this device current, its context alive.
    fn enter(&self, call: &'static str) -> DriverResult<()> {
        if thread::in_callback() && !mutant::is("host.callbacks-call") {
            return Err(self.err(call, DriverErrorKind::NotSupported("driver calls from a host function or kernel")));
        }
        if self.machine.current_device() != Some(self.ordinal()) && !mutant::is("host.any-device-is-current") {
            return Err(self.err(call, DriverErrorKind::InvalidContext));
        }
        self.alive(call)
    }

    fn alive(&self, call: &'static str) -> DriverResult<()> {
        if !self.machine.is_faulted(self.ordinal())
            || (call != "stream_synchronize" && mutant::is("host.faults-unstick"))
        {
            return Ok(());
        }
        match self.machine.fault(self.ordinal()) {
            Some(fault) => Err(self.err(call, DriverErrorKind::Fault(fault))),
            None => Ok(()),
        }
    }
}

impl Driver for HostDevice {
    fn bind(&self) -> DriverResult<()> {
        if thread::in_callback() && !mutant::is("host.callbacks-call") {
            let why = "driver calls from a host function or kernel";
            return Err(self.err("bind", DriverErrorKind::NotSupported(why)));
        }
        thread::set_current(&self.machine.token, self.ordinal());
        Ok(())
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn fault(&self) -> Option<Fault> {
        self.machine.fault(self.ordinal())
    }

    fn name_exec(&self, exec: ExecHandle, name: &str) {
        self.set_exec_name(exec, name);
    }

    fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        self.machine.space.read().home(ptr.0).map(DeviceOrdinal)
    }

    fn as_host(&self) -> Option<&HostDevice> {
        Some(self)
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        self.machine.close_one();
    }
}

/// Live objects of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Live {
    /// Plain allocations.
    pub mallocs: usize,
    /// Physical chunks, released but still mapped ones included.
    pub chunks: usize,
    /// Mappings of chunks.
    pub mappings: usize,
    /// Address reservations.
    pub reservations: usize,
    /// Pinned host allocations and registrations.
    pub host: usize,
    /// Device memory taken, bytes.
    pub used_bytes: usize,
    /// Streams, destroyed ones with queued work excluded.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Graphs, child graphs excluded.
    pub graphs: usize,
    /// Instantiated graphs.
    pub execs: usize,
    /// Modules.
    pub modules: usize,
    /// Captures begun and not ended, of the whole machine.
    pub captures: usize,
}
