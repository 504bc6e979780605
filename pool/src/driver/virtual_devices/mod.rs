//! Several devices of one: for trying out on a single GPU what is written for many, and for finding what hardware with
//! many would let pass.
//!
//! A virtual device is an adaptor over a physical one, with a number, streams, modules and a share of the memory of its
//! own. It is as strict about who may do what as the host device: calls need *it* current, its handles are its own, and
//! its memory is for others only by [`enable_peer_access`](super::Memory::enable_peer_access) (plain memory) or
//! [`set_access`](super::Memory::set_access) (mapped chunks). What a launch is given, and what a copy or set touches, is
//! looked up when the call is made; memory of a device that did not grant it is a
//! [`Foreign`](DriverErrorKind::Foreign) error, and nothing is queued. A parameter that only looks like an address of
//! another device is refused too; addresses in device memory (pointer tables) are not seen.
//!
//! One context serves all virtual devices of a physical one: a fault of one is the fault of all. Work that goes past the
//! driver (libraries with their own launches) is not checked.
//!
//! ```
//! use evergraph_pool::driver::{Driver, DriverErrorKind, DynDriver, Memory, Streams, VirtualMachine};
//! use evergraph_pool::driver::host::{HostConfig, HostDevice};
//! let one = HostDevice::new(HostConfig::default())?;
//! let devices = VirtualMachine::new(&[one as DynDriver], 2)?;
//! devices[1].bind()?;
//! let theirs = devices[1].malloc(64)?;
//! devices[0].bind()?;
//! let stream = devices[0].stream_create(0)?;
//! let refused = devices[0].memset_d8(theirs, 1, 64, stream).unwrap_err();
//! assert!(matches!(refused.kind, DriverErrorKind::Foreign(_)));
//! # Ok::<(), evergraph_pool::driver::DriverError>(())
//! ```

mod calls;
mod map;

use std::sync::Arc;

use parking_lot::RwLock;
use smallvec::SmallVec;

use super::host::{HostDevice, thread};
use super::{
    Argument, DeviceInfo, DeviceOrdinal, DevicePtr, Driver, DriverError, DriverErrorKind, DriverResult, DynDriver,
    EventHandle, ExecHandle, Fault, ForeignAccess, FunctionHandle, GraphHandle, HandleMap, ModuleHandle, ParamLayout,
    StreamHandle,
};
use map::{Map, Stranger};

/// Devices are bits of a mask.
const MAX_DEVICES: usize = 64;

/// Several virtual devices over the physical ones that there are.
#[derive(Debug)]
#[non_exhaustive]
pub struct VirtualMachine {}

impl VirtualMachine {
    /// `devices` devices (1 to 64), numbered from 0, spread over the physical ones in turn; those on the same one have
    /// equal shares of its memory.
    ///
    /// # Errors
    /// `InvalidValue` for another number, or without a physical device.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(physical: &[DynDriver], devices: usize) -> DriverResult<Vec<Arc<VirtualDevice>>> {
        let refuse = |why| Err(DriverError::new("open", DeviceOrdinal(0), DriverErrorKind::InvalidValue(why)));
        if !(1..=MAX_DEVICES).contains(&devices) {
            return refuse("a machine has 1 to 64 devices");
        }
        if physical.is_empty() {
            return refuse("virtual devices are made of at least one device");
        }
        let under: Vec<DynDriver> = physical.iter().cycle().take(devices).cloned().collect();
        let machine = Arc::new(Machine {
            token: Arc::new(()),
            map: RwLock::new(Map::new(devices)),
            owners: RwLock::default(),
            under: under.iter().map(|driver| driver.info().ordinal).collect(),
        });
        let device = |(number, inner): (usize, DynDriver)| {
            let shares = machine.under.iter().filter(|ordinal| **ordinal == inner.info().ordinal).count();
            let mut info = inner.info().clone();
            info.ordinal = DeviceOrdinal(number as u32);
            info.name = format!("{}, virtual {number}", info.name);
            info.total_bytes /= shares.max(1);
            info.virtual_of = Some(inner.info().ordinal);
            Arc::new(VirtualDevice { info, inner, machine: Arc::clone(&machine) })
        };
        Ok(under.into_iter().enumerate().map(device).collect())
    }
}

/// What the devices share.
#[derive(Debug)]
struct Machine {
    /// Identity for what threads carry.
    token: Arc<()>,
    map: RwLock<Map>,
    owners: RwLock<Owners>,
    /// The physical device of each, by number.
    under: Vec<DeviceOrdinal>,
}

/// Whose handles are whose.
#[derive(Debug, Default)]
struct Owners {
    streams: HandleMap<StreamHandle, u32>,
    events: HandleMap<EventHandle, u32>,
    graphs: HandleMap<GraphHandle, u32>,
    execs: HandleMap<ExecHandle, u32>,
    modules: HandleMap<ModuleHandle, u32>,
    functions: HandleMap<FunctionHandle, Arc<Function>>,
}

/// A kernel of a module.
#[derive(Debug)]
struct Function {
    owner: u32,
    module: ModuleHandle,
    name: String,
    /// Where its packed arguments may have pointers; `None` where the driver can not tell.
    words: Option<SmallVec<[(usize, u32); 16]>>,
}

impl Function {
    fn new(owner: u32, module: ModuleHandle, name: &str, layout: Option<&ParamLayout>) -> Arc<Self> {
        let words = layout.map(|layout| layout.words().collect());
        Arc::new(Self { owner, module, name: name.to_owned(), words })
    }
}

/// One of the devices of a [`VirtualMachine`].
#[derive(Debug)]
pub struct VirtualDevice {
    info: DeviceInfo,
    inner: DynDriver,
    machine: Arc<Machine>,
}

/// Refuses a handle that is known as another device's.
macro_rules! own {
    ($self:ident, $call:expr, $table:ident, $handle:expr, $what:literal) => {
        $self.owned($call, $self.machine.owners.read().$table.get(&$handle).copied(), $what)
    };
}
use own;

impl VirtualDevice {
    /// The physical device that it is on.
    #[must_use]
    pub fn inner(&self) -> &DynDriver {
        &self.inner
    }

    fn number(&self) -> u32 {
        self.info.ordinal.0
    }

    fn err(&self, call: &'static str, kind: DriverErrorKind) -> DriverError {
        DriverError::new(call, self.info.ordinal, kind)
    }

    /// Entry of every call: this device is current.
    fn enter(&self, call: &'static str) -> DriverResult<()> {
        let current = thread::current(&self.machine.token) == Some(self.number());
        // What is wrong with calls from a host function the device says itself.
        if current || thread::in_callback() || crate::mutant::is("virtual.any-device-is-current") {
            Ok(())
        } else {
            Err(self.err(call, DriverErrorKind::InvalidContext))
        }
    }

    fn owned(&self, call: &'static str, owner: Option<u32>, what: &'static str) -> DriverResult<()> {
        match owner {
            Some(owner) if owner != self.number() => Err(self.err(call, DriverErrorKind::InvalidHandle(what))),
            _ => Ok(()),
        }
    }

    /// A result of the physical device, as this one's.
    fn mine<T>(&self, result: DriverResult<T>) -> DriverResult<T> {
        result.map_err(|error| DriverError { device: self.info.ordinal, ..error })
    }

    /// The physical device of a virtual one.
    fn under(&self, call: &'static str, device: DeviceOrdinal) -> DriverResult<DeviceOrdinal> {
        let found = self.machine.under.get(device.0 as usize).copied();
        found.ok_or_else(|| self.err(call, DriverErrorKind::InvalidValue("no such device")))
    }

    #[cold]
    fn foreign(
        &self,
        call: &'static str,
        op: &str,
        argument: Argument,
        device: DeviceOrdinal,
        stranger: Stranger,
    ) -> DriverError {
        let Stranger { address, owner } = stranger;
        let access = ForeignAccess { op: op.to_owned(), argument, address, owner, device };
        self.err(call, DriverErrorKind::Foreign(access))
    }

    /// Whether a call of this device may touch a range.
    fn may_touch(&self, call: &'static str, name: &'static str, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        let checked = self.machine.map.read().check(self.number(), ptr, bytes);
        checked.map_err(|stranger| self.foreign(call, call, Argument::Named(name), self.info.ordinal, stranger))
    }

    /// Whether a range is memory of the device that a peer copy says it is.
    fn is_home(
        &self,
        call: &'static str,
        name: &'static str,
        device: DeviceOrdinal,
        ptr: DevicePtr,
        bytes: usize,
    ) -> DriverResult<()> {
        let checked = self.machine.map.read().check_home(device.0, ptr, bytes);
        checked.map_err(|stranger| self.foreign(call, call, Argument::Named(name), device, stranger))
    }

    /// Whether the pointers among a launch's arguments are for this device.
    fn may_launch(&self, call: &'static str, function: Option<&Function>, args: &[u8]) -> DriverResult<()> {
        let map = self.machine.map.read();
        let check = |(number, offset): (usize, u32)| {
            let Some(word) = args.get(offset as usize..).and_then(|bytes| bytes.first_chunk()) else { return Ok(()) };
            map.check_address(self.number(), u64::from_ne_bytes(*word)).map_err(|stranger| {
                let name = function.map_or("an unnamed kernel", |function| &function.name);
                self.foreign(call, name, Argument::Parameter(number), self.info.ordinal, stranger)
            })
        };
        match function.and_then(|function| function.words.as_ref()) {
            Some(words) => words.iter().copied().try_for_each(check),
            // Nobody can tell the parameters: every aligned word.
            None => (0..args.len() / 8).map(|i| (i, 8 * i as u32)).try_for_each(check),
        }
    }
}

impl Driver for VirtualDevice {
    fn bind(&self) -> DriverResult<()> {
        self.mine(self.inner.bind())?;
        thread::set_current(&self.machine.token, self.number());
        Ok(())
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn fault(&self) -> Option<Fault> {
        self.inner.fault()
    }

    fn name_exec(&self, exec: ExecHandle, name: &str) {
        self.inner.name_exec(exec, name);
    }

    fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        self.machine.map.read().home(ptr)
    }

    fn as_host(&self) -> Option<&HostDevice> {
        self.inner.as_host()
    }
}

#[cfg(test)]
mod tests;
