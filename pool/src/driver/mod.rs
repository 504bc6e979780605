//! Four thin traits over one device, fitted one to one to CUDA's driver API.
//!
//! | trait | covers | CUDA calls |
//! |---|---|---|
//! | [`Memory`] | reserve, create, map, set access, unmap, release, malloc, free, pinned and registered host memory | `cuMemAddressReserve` … `cuMemHostRegister` |
//! | [`Streams`] | streams, events, copies, host functions | `cuStream*`, `cuEvent*`, `cuMemcpy*Async`, `cuMemset*Async`, `cuLaunchHostFunc` |
//! | [`Graphs`] | capture, nodes, instantiate, update, launch | `cuStreamBeginCapture` … `cuGraphLaunch` |
//! | [`Modules`] | load, function, argument layout, launch | `cuModuleLoadData`, `cuFuncGetParamInfo`, `cuLaunchKernel` |
//!
//! Bodies: [`host`] (a complete device on the CPU) and `cuda` (cudarc's `sys` level, loaded at run
//! time). [`Faulty`] wraps either, fails the n-th call of a kind and logs every call. [`VirtualMachine`] makes several
//! devices of one.
//!
//! [`open`] opens the device of a [`DeviceChoice`]. One driver object is one device. Calls need that device *current* on the calling thread
//! ([`Driver::bind`], `cuCtxSetCurrent`); the host device refuses a call made without it, so that a
//! missing bind is found without a GPU. Everything is object safe: pools hold an `Arc<dyn Driver>`.

#![allow(unsafe_code)]

mod choice;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod cuda;
pub mod debugging;
mod error;
pub mod faulty;
mod handle_map;
pub mod host;
pub(crate) mod host_memory;
mod types;
mod virtual_devices;
mod watched;

use std::fmt::Debug;
use std::sync::Arc;

pub use choice::{DeviceChoice, NoSuchChoice, open};
pub use error::{Argument, DriverError, DriverErrorKind, DriverResult, Fault, ForeignAccess};
pub use faulty::{Call, Faulty};
pub use handle_map::{HandleHasher, HandleMap};
pub use types::*;
pub use virtual_devices::{VirtualDevice, VirtualMachine};
pub use watched::WatchedCopies;

/// A device: the four traits and its identity.
pub trait Driver: Memory + Streams + Graphs + Modules + Debug + Send + Sync {
    /// Makes this device current on the calling thread (`cuCtxSetCurrent`). Cheap when it already is.
    fn bind(&self) -> DriverResult<()>;

    /// What the device is and can do. Does not touch the device.
    fn info(&self) -> &DeviceInfo;

    /// The sticky fault of this context, if an earlier launch died of one. After that every call fails
    /// with it, as on hardware; this one always answers.
    fn fault(&self) -> Option<Fault>;

    /// Says what an exec is called, for the fault's report should the context die while it runs.
    fn name_exec(&self, exec: ExecHandle, name: &str) {
        let _ = (exec, name);
    }

    /// The device whose memory is at an address, where that can be told. Host memory is no device's.
    fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        let _ = ptr;
        None
    }

    /// This driver as a host device, where it is one (through adaptors too).
    fn as_host(&self) -> Option<&host::HostDevice> {
        None
    }
}

/// A shared, type-erased driver.
pub type DynDriver = Arc<dyn Driver>;

/// Address space, physical memory and host memory.
pub trait Memory {
    /// Smallest unit of [`create`](Self::create), [`map`](Self::map) and
    /// [`address_reserve`](Self::address_reserve), bytes (`cuMemGetAllocationGranularity`).
    fn granularity_bytes(&self) -> DriverResult<usize>;

    /// Reserves `bytes` of address space, mapped to nothing (`cuMemAddressReserve`).
    /// `align` 0 means the granularity; `hint` is a wish, not a promise.
    fn address_reserve(&self, bytes: usize, align: usize, hint: Option<DevicePtr>) -> DriverResult<DevicePtr>;

    /// Gives a whole reservation back; nothing may be mapped in it (`cuMemAddressFree`).
    fn address_free(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()>;

    /// Creates one physical chunk of `bytes` on this device (`cuMemCreate`).
    fn create(&self, bytes: usize) -> DriverResult<PhysHandle>;

    /// Maps a whole chunk at `ptr`; CUDA wants `offset_bytes` 0. Not accessible before
    /// [`set_access`](Self::set_access) (`cuMemMap`).
    fn map(&self, ptr: DevicePtr, bytes: usize, offset_bytes: usize, handle: PhysHandle) -> DriverResult<()>;

    /// Makes mapped memory readable and writable for the named devices (`cuMemSetAccess`).
    fn set_access(&self, ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) -> DriverResult<()>;

    /// Takes whole mappings away. The caller has waited *on the host* for all work that uses them
    /// (`cuMemUnmap`).
    fn unmap(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()>;

    /// Drops the handle of a chunk; its pages go when it is mapped nowhere (`cuMemRelease`).
    fn release(&self, handle: PhysHandle) -> DriverResult<()>;

    /// Plain device memory, aligned to at least 256 bytes (`cuMemAlloc`). Zero bytes is an error.
    fn malloc(&self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Frees what [`malloc`](Self::malloc) gave (`cuMemFree`, which waits for the device's queued work; the host device
    /// does not wait and finds who still needed the memory).
    fn free(&self, ptr: DevicePtr) -> DriverResult<()>;

    /// Free and total device memory, bytes (`cuMemGetInfo`).
    fn mem_info(&self) -> DriverResult<MemInfo>;

    /// Page-locked host memory (`cuMemHostAlloc`).
    fn host_alloc(&self, bytes: usize) -> DriverResult<HostPtr>;

    /// Frees what [`host_alloc`](Self::host_alloc) gave (`cuMemFreeHost`).
    ///
    /// # Safety
    /// No work in flight uses the memory and no reference to it is left.
    unsafe fn host_free(&self, ptr: HostPtr) -> DriverResult<()>;

    /// Makes existing host memory visible to the device, read-only; returns its device address
    /// (`cuMemHostRegister` with `DEVICEMAP | READ_ONLY`, then `cuMemHostGetDevicePointer`).
    ///
    /// # Safety
    /// The range stays allocated and unchanged until [`host_unregister`](Self::host_unregister).
    unsafe fn host_register(&self, ptr: *const u8, bytes: usize) -> DriverResult<DevicePtr>;

    /// Ends a registration (`cuMemHostUnregister`).
    fn host_unregister(&self, ptr: *const u8) -> DriverResult<()>;

    /// Whether this device can reach the memory of `peer` (`cuDeviceCanAccessPeer`).
    fn can_access_peer(&self, peer: DeviceOrdinal) -> DriverResult<bool>;

    /// Lets this device reach the `malloc` memory of `peer` (`cuCtxEnablePeerAccess`). VMM ranges are
    /// granted by [`set_access`](Self::set_access) instead.
    fn enable_peer_access(&self, peer: DeviceOrdinal) -> DriverResult<()>;
}

/// Streams, events, copies, host functions. Copies and sets are asynchronous and in stream order; on a
/// capturing stream they become nodes.
pub trait Streams {
    /// A non-blocking stream; lower `priority` is more urgent (`cuStreamCreateWithPriority`).
    fn stream_create(&self, priority: i32) -> DriverResult<StreamHandle>;
    /// Destroys the stream; queued work still completes (`cuStreamDestroy`).
    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()>;
    /// An id that is never reused, unlike the handle (`cuStreamGetId`).
    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64>;
    /// Waits on the host for everything queued (`cuStreamSynchronize`).
    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()>;
    /// Whether everything queued is complete (`cuStreamQuery`).
    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool>;
    /// Work queued after this waits for `event` (`cuStreamWaitEvent`).
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()>;
    /// Waits on the host for every stream of the device (`cuCtxSynchronize`).
    fn synchronize(&self) -> DriverResult<()>;

    /// An event; `timing` keeps a time stamp (`cuEventCreate`).
    fn event_create(&self, timing: bool) -> DriverResult<EventHandle>;
    /// Destroys an event; a pending record still completes (`cuEventDestroy`).
    fn event_destroy(&self, event: EventHandle) -> DriverResult<()>;
    /// Completes when all work queued on `stream` so far has (`cuEventRecord`).
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()>;
    /// Whether the last record is complete; true if never recorded (`cuEventQuery`).
    fn event_query(&self, event: EventHandle) -> DriverResult<bool>;
    /// Waits on the host for the last record (`cuEventSynchronize`).
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()>;
    /// Milliseconds between two completed timing events (`cuEventElapsedTime`).
    fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> DriverResult<f32>;

    /// Host to device (`cuMemcpyHtoDAsync`).
    ///
    /// # Safety
    /// `src` stays readable and unchanged until the copy has run; when captured, as long as the graph.
    unsafe fn memcpy_htod(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// Device to host (`cuMemcpyDtoHAsync`).
    ///
    /// # Safety
    /// `dst` stays writable and unaliased until the copy has run; when captured, as long as the graph.
    unsafe fn memcpy_dtoh(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()>;
    /// Device to device (`cuMemcpyDtoDAsync`).
    fn memcpy_dtod(&self, dst: DevicePtr, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()>;
    /// Between devices (`cuMemcpyPeerAsync`); `stream` belongs to this device.
    fn memcpy_peer(
        &self,
        dst: DevicePtr,
        dst_device: DeviceOrdinal,
        src: DevicePtr,
        src_device: DeviceOrdinal,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// Sets bytes (`cuMemsetD8Async`).
    fn memset_d8(&self, dst: DevicePtr, value: u8, bytes: usize, stream: StreamHandle) -> DriverResult<()>;
    /// Sets 32-bit words; `dst` is 4-byte aligned (`cuMemsetD32Async`).
    fn memset_d32(&self, dst: DevicePtr, value: u32, words: usize, stream: StreamHandle) -> DriverResult<()>;
    /// Calls `callback` in stream order on a driver thread (`cuLaunchHostFunc`). It must make no driver
    /// call; a panic in it is caught and dropped.
    fn launch_host_fn(&self, stream: StreamHandle, callback: HostCallback) -> DriverResult<()>;
}

/// Capture, node walk, instantiate, update, launch. Graph objects are not thread-safe, reads included:
/// callers serialise the calls on one graph.
pub trait Graphs {
    /// Starts recording a stream (`cuStreamBeginCapture`).
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()>;
    /// Ends recording, on the beginning stream, and from the beginning thread unless the mode is relaxed
    /// (`cuStreamEndCapture`). An invalidated capture ends with that error and the stream is usable; so does one that the
    /// wrong thread ends. On a stream that was forked into the capture it is refused and breaks the capture.
    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle>;
    /// Puts a clone of `graph` into the capture of a recording stream, as a child node behind the stream's last work
    /// (`cuGraphAddChildGraphNode`, `cuStreamUpdateCaptureDependencies`). `CaptureState` on a stream that does not record.
    fn add_child(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()>;
    /// Whether the stream records (`cuStreamGetCaptureInfo`).
    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus>;
    /// Swaps this thread's capture mode, returns the old one (`cuThreadExchangeStreamCaptureMode`).
    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode>;

    /// The nodes, in creation order (`cuGraphGetNodes`).
    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<NodeHandle>>;
    /// What runs after what (`cuGraphGetEdges`).
    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>>;
    /// What a node does, copied out: kernel arguments packed, by the function's layout or from the packed
    /// `extra` form (`cuGraphNodeGetType` and the getter of that type).
    fn node(&self, node: NodeHandle) -> DriverResult<Node>;
    /// Destroys a graph; execs made from it live on (`cuGraphDestroy`).
    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()>;

    /// Makes a graph launchable (`cuGraphInstantiate`).
    fn instantiate(&self, graph: GraphHandle) -> DriverResult<ExecHandle>;
    /// Puts `graph`'s arguments into `exec`, or says why not, leaving it as it was (`cuGraphExecUpdate`).
    /// **Success is not proof**: hidden launch attributes keep their old value.
    fn exec_update(&self, exec: ExecHandle, graph: GraphHandle) -> DriverResult<UpdateResult>;
    /// Uploads without launching (`cuGraphUpload`).
    fn upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()>;
    /// Launches; runs of one exec never overlap (`cuGraphLaunch`). Refused on a capturing stream, whose capture breaks:
    /// see [`add_child`](Self::add_child).
    fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()>;
    /// Destroys an exec; a run in flight completes (`cuGraphExecDestroy`).
    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()>;
}

/// Code: load, look up, read argument layouts, launch.
pub trait Modules {
    /// Loads code (`cuModuleLoadData`).
    fn module_load(&self, image: ModuleImage<'_>) -> DriverResult<ModuleHandle>;
    /// Unloads it; functions and graphs that use it go bad (`cuModuleUnload`).
    fn module_unload(&self, module: ModuleHandle) -> DriverResult<()>;
    /// A function by name (`cuModuleGetFunction`).
    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle>;
    /// Offset and size of each parameter (`cuFuncGetParamInfo` / `cuKernelGetParamInfo`), or `None` where
    /// the driver can not tell.
    fn param_layout(&self, function: FunctionHandle) -> DriverResult<Option<Arc<ParamLayout>>>;
    /// Launches with packed arguments (`cuLaunchKernel`).
    ///
    /// # Safety
    /// `args` fit the function's parameters and the memory that it will touch is valid for it. (The host
    /// device checks both; a GPU does not.)
    unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> DriverResult<()>;
}
