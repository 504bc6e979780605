//! The CUDA body: cudarc's `sys` level, one driver call a method, `libcuda` loaded at run time.
//!
//! The conformance suite runs over it and over [`Faulty`](super::Faulty) of it on a machine with a device
//! (`tests/conformance_cuda.rs`, feature `gpu`). It was last told on one NVIDIA H200 and on two, driver 580.159.04
//! (CUDA 13.0). **Not exercised yet**: devices that can not reach each other, other drivers and chips, and a real
//! external semaphore. Nodes of external semaphores, batched memory operations and conditions are reported as unknown.
//!
//! A fault is reported by some later call, and by every call after that, with the name of the op or graph that was in
//! flight where that is only one, else with those that were.
//!
//! What hardware does not check, callers must not rely on: dead handles are undefined behaviour, accesses are checked by
//! page, a call that names a live object works without its device being current. The host device checks all of it.
//!
//! The primary context of the device is used, so that libraries built on the runtime API share it. No stream-ordered
//! allocation is ever made. Needs a driver of 12.4 or later (parameter layouts); what is missing is named by
//! [`CudaDevice::open`].
//!
//! cudarc's own `DriverError` is not used: formatting it calls the driver.

mod error;
mod flight;
mod graph;
pub mod interop;
mod memory;
mod module;
mod stream;

use std::sync::Arc;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::{
    DeviceInfo, DeviceOrdinal, DevicePtr, Driver, DriverError, DriverErrorKind, DriverResult, ExecHandle, Fault,
    FunctionHandle, HandleMap, ParamLayout, StreamHandle,
};
use flight::{Flight, Note, Suspect};

/// Calls a driver function and turns its status into a result.
macro_rules! cuda {
    ($device:expr, $call:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: handles and addresses are plain values that the driver checks; out pointers are live locals for
        // the length of the call; what a caller must promise beyond that is in the trait's own contract. The symbol
        // is there: `open` looked for every one in `REQUIRED`.
        let status = unsafe { cudarc::driver::sys::$function($($arg),*) };
        $device.check($call, status)
    }};
}
use cuda;

/// Every driver function that this body calls.
const REQUIRED: &[&str] = &[
    "cuInit",
    "cuGetErrorName",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuCtxEnablePeerAccess",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuPointerGetAttribute",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamGetId",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuLaunchHostFunc",
    "cuUserObjectCreate",
    "cuGraphRetainUserObject",
    "cuGraphGetNodes",
    "cuGraphGetEdges_v2",
    "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphKernelNodeGetAttribute",
    "cuGraphMemcpyNodeGetParams",
    "cuGraphMemsetNodeGetParams",
    "cuGraphChildGraphNodeGetGraph",
    "cuGraphAddChildGraphNode",
    "cuGraphEventRecordNodeGetEvent",
    "cuGraphEventWaitNodeGetEvent",
    "cuGraphDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecUpdate_v2",
    "cuGraphUpload",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncGetParamInfo",
    "cuKernelGetParamInfo",
    "cuLaunchKernelEx",
];

/// A CUDA device.
#[derive(Debug)]
pub struct CudaDevice {
    info: DeviceInfo,
    device: sys::CUdevice,
    context: Context,
    /// Primary contexts of peers, retained on first use.
    peers: Mutex<Vec<(sys::CUdevice, Context)>>,
    /// Layouts by function; emptied when a module goes, since handles come back.
    layouts: Mutex<HandleMap<FunctionHandle, Option<Arc<ParamLayout>>>>,
    /// What functions and execs are called, for faults.
    names: Mutex<HandleMap<u64, String>>,
    flight: Flight,
    fault: Mutex<Option<Fault>>,
}

/// A context handle.
#[derive(Clone, Copy, Debug)]
struct Context(sys::CUcontext);

// SAFETY: the driver lets any thread use a context that it has made current; the handle is an opaque value.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Whether the driver library can be loaded here.
#[must_use]
pub fn is_present() -> bool {
    // SAFETY: loads and drops the library; its initialisers are the vendor's.
    unsafe { sys::is_culib_present() }
}

/// What there is of CUDA on this machine, found without taking a device.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Survey {
    /// The newest CUDA that the driver speaks, as (major, minor).
    pub driver_version: Option<(u32, u32)>,
    /// The devices, by number.
    pub devices: Vec<DeviceInfo>,
    /// Why no device can be used, if none can.
    pub missing: Option<Missing>,
}

/// Why no CUDA device can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// The driver library can not be loaded.
    Library,
    /// The driver library lacks this function: it is too old.
    Function(&'static str),
    /// The driver would not start, in its own words.
    Start(String),
    /// It started, and has no device.
    Device,
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Library => f.write_str("libcuda not found: no NVIDIA driver on the loader's path"),
            Self::Function(name) => write!(f, "libcuda has no {name}: the driver is older than 12.4"),
            Self::Start(why) => write!(f, "the NVIDIA driver does not start: {why}"),
            Self::Device => f.write_str("the NVIDIA driver has no device"),
        }
    }
}

/// Looks around.
#[must_use]
pub fn survey() -> Survey {
    let mut survey = Survey { missing: missing(), ..Survey::default() };
    if survey.missing.as_ref().is_some_and(|missing| *missing != Missing::Device) {
        return survey;
    }
    let mut version = 0;
    // SAFETY: the symbol is there (`missing` looked for it), `version` is live.
    if unsafe { sys::cuDriverGetVersion(&raw mut version) } as u32 == 0 && version > 0 {
        survey.driver_version = Some((version as u32 / 1000, version as u32 % 1000 / 10));
    }
    for ordinal in 0..count() {
        match describe(ordinal) {
            Ok((_, info)) => survey.devices.push(info),
            Err(error) => survey.missing = Some(Missing::Start(error.to_string())),
        }
    }
    survey
}

/// What is missing before there can be a device; the driver is started.
fn missing() -> Option<Missing> {
    if !is_present() {
        return Some(Missing::Library);
    }
    for name in REQUIRED {
        // SAFETY: only the presence of the symbol is asked for; it is not called under this type.
        let found = unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
        if found.is_err() {
            return Some(Missing::Function(name));
        }
    }
    // SAFETY: the symbol is there; initialising twice is allowed.
    let status = unsafe { sys::cuInit(0) };
    match error::check("open", DeviceOrdinal(0), status) {
        // CUDA_ERROR_NO_DEVICE.
        Err(_) if status as u32 == 100 => Some(Missing::Device),
        Err(error) => Some(Missing::Start(error.kind.to_string())),
        Ok(()) if count() == 0 => Some(Missing::Device),
        Ok(()) => None,
    }
}

/// How many devices a driver that was started has.
fn count() -> u32 {
    let mut count = 0;
    // SAFETY: callers have started the driver, so the symbol is there; `count` is live.
    let status = unsafe { sys::cuDeviceGetCount(&raw mut count) };
    if status as u32 == 0 { count.max(0) as u32 } else { 0 }
}

/// How many devices there are; 0 without a driver.
#[must_use]
pub fn device_count() -> u32 {
    if missing().is_some() { 0 } else { count() }
}

impl CudaDevice {
    /// Opens a device by number.
    ///
    /// # Errors
    /// `Other` with the name of what is missing (library, function), the driver's own error, or `InvalidValue` for a
    /// number that no device has.
    pub fn open(ordinal: u32) -> DriverResult<Arc<Self>> {
        const CALL: &str = "open";
        let number = DeviceOrdinal(ordinal);
        if let Some(missing) = missing() {
            let kind = DriverErrorKind::Other { code: 0, name: missing.to_string() };
            return Err(DriverError::new(CALL, number, kind));
        }
        if ordinal >= count() {
            return Err(DriverError::new(CALL, number, DriverErrorKind::InvalidValue("no such device")));
        }
        let probe = Probe(number);
        let (device, info) = describe(ordinal)?;
        let mut context = std::ptr::null_mut();
        cuda!(probe, CALL, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        Ok(Arc::new(Self {
            info,
            device,
            context: Context(context),
            peers: Mutex::default(),
            layouts: Mutex::default(),
            names: Mutex::default(),
            flight: Flight::default(),
            fault: Mutex::default(),
        }))
    }

    fn err(&self, call: &'static str, kind: DriverErrorKind) -> DriverError {
        DriverError::new(call, self.info.ordinal, kind)
    }

    fn check(&self, call: &'static str, status: sys::CUresult) -> DriverResult<()> {
        let mut result = error::check(call, self.info.ordinal, status);
        if let Err(DriverError { kind: DriverErrorKind::Fault(fault), .. }) = &mut result {
            // The first call that reports it names it; later ones repeat that.
            let mut known = self.fault.lock();
            *fault = known.get_or_insert_with(|| self.named(fault)).clone();
        }
        result
    }

    /// A fault that was just reported, with what can have made it.
    #[cold]
    fn named(&self, fault: &Fault) -> Fault {
        let (suspects, more) = self.flight.suspects();
        let names = self.names.lock();
        let name = |suspect: &Suspect| {
            let known = names.get(&suspect.value);
            match suspect.note {
                Note::Graph => known.map_or("an unnamed graph".to_owned(), |name| format!("graph {name}")),
                Note::Copy => format!("memcpy to {:#x}", suspect.value),
                Note::Set => format!("memset at {:#x}", suspect.value),
                Note::Host => "host function".to_owned(),
                _ => known.map_or("an unnamed kernel".to_owned(), Clone::clone),
            }
        };
        let fault = Fault { op: flight::in_words(&suspects, more, name), ..fault.clone() };
        tracing::error!(device = %self.info.ordinal, %fault, "a context died");
        fault
    }

    /// Makes a call that queues work, and notes it.
    #[inline]
    fn queue(
        &self,
        note: Note,
        value: u64,
        stream: StreamHandle,
        call: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<()> {
        if self.flight.blocking {
            self.flight.note(Note::AllDone, 0, stream);
            self.flight.note(note, value, stream);
            return call();
        }
        call()?;
        self.flight.note(note, value, stream);
        Ok(())
    }

    /// The primary context of a device of this process.
    fn context_of(&self, call: &'static str, ordinal: DeviceOrdinal) -> DriverResult<sys::CUcontext> {
        if ordinal == self.info.ordinal {
            return Ok(self.context.0);
        }
        let mut device = 0;
        cuda!(self, call, cuDeviceGet(&raw mut device, ordinal.0 as i32))?;
        let mut peers = self.peers.lock();
        if let Some((_, context)) = peers.iter().find(|(known, _)| *known == device) {
            return Ok(context.0);
        }
        let mut context = std::ptr::null_mut();
        cuda!(self, call, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        peers.push((device, Context(context)));
        Ok(context)
    }
}

/// A device by number, of a driver that was started.
fn describe(ordinal: u32) -> DriverResult<(sys::CUdevice, DeviceInfo)> {
    const CALL: &str = "open";
    let number = DeviceOrdinal(ordinal);
    let probe = Probe(number);
    let mut device = 0;
    cuda!(probe, CALL, cuDeviceGet(&raw mut device, ordinal as i32))?;
    let mut total_bytes = 0;
    cuda!(probe, CALL, cuDeviceTotalMem_v2(&raw mut total_bytes, device))?;
    let mut name = [0u8; 256];
    cuda!(probe, CALL, cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))?;
    let name = std::ffi::CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned());
    let attribute = |which: sys::CUdevice_attribute| -> DriverResult<u32> {
        let mut value = 0;
        cuda!(probe, CALL, cuDeviceGetAttribute(&raw mut value, which, device))?;
        Ok(value.max(0) as u32)
    };
    use sys::CUdevice_attribute as Attribute;
    let vmm = attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0;
    let mut info = DeviceInfo::new(number, "cuda", name.unwrap_or_default(), total_bytes, vmm);
    info.multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    info.shared_bytes =
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.max(info.shared_bytes);
    info.compute_capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok((device, info))
}

/// Status checks before there is a device.
#[derive(Clone, Copy)]
struct Probe(DeviceOrdinal);

impl Probe {
    fn check(self, call: &'static str, status: sys::CUresult) -> DriverResult<()> {
        error::check(call, self.0, status)
    }
}

impl Driver for CudaDevice {
    fn bind(&self) -> DriverResult<()> {
        cuda!(self, "bind", cuCtxSetCurrent(self.context.0))
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn fault(&self) -> Option<Fault> {
        self.fault.lock().clone()
    }

    fn name_exec(&self, exec: ExecHandle, name: &str) {
        self.names.lock().insert(exec.0, name.to_owned());
    }

    fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        use sys::CUpointer_attribute as Attribute;
        let ask = |which: Attribute| -> Option<u32> {
            let mut value = 0u32;
            // SAFETY: both attributes are a number of 32 bits, `value` is live, and any address may be asked about. The
            // symbol is there. An address that nobody knows is an error of the call and nothing else.
            let status = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), which, ptr.0) };
            (status as u32 == 0).then_some(value)
        };
        let kind = ask(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
        let device_memory = kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
        ask(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).filter(|_| device_memory).map(DeviceOrdinal)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Errors at the end of a process (the driver is gone already) have nobody to go to.
        for (device, _) in self.peers.lock().drain(..) {
            let _ = cuda!(Probe(self.info.ordinal), "close", cuDevicePrimaryCtxRelease_v2(device));
        }
        let _ = cuda!(Probe(self.info.ordinal), "close", cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

#[cfg(test)]
mod tests;
