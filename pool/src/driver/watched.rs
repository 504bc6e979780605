//! An adaptor that says each copy before it is issued, and finds out at once whether it went well.
//!
//! A device reports an error at some later call, which is often a copy: copies are what programs wait for. Here a copy is
//! between two waits. What the first one finds is older than the copy and is said to be; what the second one finds is
//! the copy's.

use std::fmt;
use std::sync::Arc;

use super::debugging::{self, Say};
use super::host::HostDevice;
use super::{
    CaptureMode, CaptureStatus, DeviceInfo, DeviceOrdinal, DevicePtr, Driver, DriverError, DriverResult, DynDriver,
    Edge, EventHandle, ExecHandle, Fault, FunctionHandle, GraphHandle, Graphs, HostCallback, HostPtr, LaunchConfig,
    MemInfo, Memory, ModuleHandle, ModuleImage, Modules, Node, NodeHandle, ParamLayout, PhysHandle, StreamHandle,
    Streams, UpdateResult,
};

/// A driver whose copies are said, waited for and blamed. For finding mistakes: it is slow.
///
/// While the stream records, copies are only said. Work of other devices is not waited for: a peer copy is ordered after
/// it by whoever queues the copy.
pub struct WatchedCopies {
    inner: DynDriver,
    say: Say,
}

impl fmt::Debug for WatchedCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedCopies").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// One side of a copy.
enum Side {
    Host(u64),
    Device(DevicePtr, Option<DeviceOrdinal>),
}

impl WatchedCopies {
    /// Watches the copies of `driver`. From here on names of ranges are kept ([`debugging::name_range`]).
    #[must_use]
    pub fn new(driver: DynDriver, say: Say) -> Arc<Self> {
        debugging::keep_names();
        Arc::new(Self { inner: driver, say })
    }

    fn device(&self) -> DeviceOrdinal {
        self.inner.info().ordinal
    }

    fn in_words(&self, side: &Side) -> String {
        match side {
            Side::Host(address) => format!("host {address:#x}"),
            Side::Device(ptr, named) => {
                let known = debugging::name_at(*ptr);
                let home = self.inner.home(*ptr).or(known.as_ref().map(|known| known.0));
                let device = match (*named, home) {
                    (Some(named), Some(home)) if named != home => format!("device {named} (it is device {home}'s)"),
                    (Some(named), _) => format!("device {named}"),
                    (None, Some(home)) => format!("device {home}"),
                    (None, None) => "unknown device".to_owned(),
                };
                let name = known.map_or_else(String::new, |(_, name)| format!(" {name}"));
                format!("{device} {ptr}{name}")
            }
        }
    }

    fn watch(
        &self,
        (call, before): (&'static str, &'static str),
        (dst, src): (Side, Side),
        bytes: usize,
        stream: StreamHandle,
        copy: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<()> {
        let device = self.device();
        let (from, to) = (self.in_words(&src), self.in_words(&dst));
        (self.say)(&format!("{call} on device {device}: {bytes} bytes from {from} to {to}"));
        if self.inner.capture_status(stream)? != CaptureStatus::None {
            (self.say)(&format!("{call} is recorded, not run"));
            return copy();
        }
        // All streams: what another one still does wrong must not be found at the end of this copy.
        if let Err(error) = self.inner.synchronize() {
            (self.say)(&format!("{call} was not issued: work before it failed: {}", error.kind));
            return Err(DriverError { call: before, ..error });
        }
        let done = copy().and_then(|()| self.inner.stream_synchronize(stream));
        done.map_err(|error| {
            (self.say)(&format!("{call} failed: {}", error.kind));
            DriverError { call, ..error }
        })
    }
}

impl Driver for WatchedCopies {
    fn bind(&self) -> DriverResult<()> {
        self.inner.bind()
    }

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn fault(&self) -> Option<Fault> {
        self.inner.fault()
    }

    fn name_exec(&self, exec: ExecHandle, name: &str) {
        self.inner.name_exec(exec, name);
    }

    fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        self.inner.home(ptr)
    }

    fn as_host(&self) -> Option<&HostDevice> {
        self.inner.as_host()
    }
}

/// Methods that go to the inner driver as they are.
macro_rules! pass {
    ($($([$unsafe:tt])? fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        #[allow(unused_unsafe)]
        $($unsafe)? fn $name(&self $(, $arg: $ty)*) -> DriverResult<$ret> {
            // SAFETY: where the method is unsafe, its caller keeps the same contract.
            unsafe { self.inner.$name($($arg),*) }
        }
    )*};
}

impl Memory for WatchedCopies {
    pass! {
        fn granularity_bytes() -> usize;
        fn address_reserve(bytes: usize, align: usize, hint: Option<DevicePtr>) -> DevicePtr;
        fn address_free(ptr: DevicePtr, bytes: usize) -> ();
        fn create(bytes: usize) -> PhysHandle;
        fn map(ptr: DevicePtr, bytes: usize, offset_bytes: usize, handle: PhysHandle) -> ();
        fn set_access(ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) -> ();
        fn unmap(ptr: DevicePtr, bytes: usize) -> ();
        fn release(handle: PhysHandle) -> ();
        fn malloc(bytes: usize) -> DevicePtr;
        fn free(ptr: DevicePtr) -> ();
        fn mem_info() -> MemInfo;
        fn host_alloc(bytes: usize) -> HostPtr;
        [unsafe] fn host_free(ptr: HostPtr) -> ();
        [unsafe] fn host_register(ptr: *const u8, bytes: usize) -> DevicePtr;
        fn host_unregister(ptr: *const u8) -> ();
        fn can_access_peer(peer: DeviceOrdinal) -> bool;
        fn enable_peer_access(peer: DeviceOrdinal) -> ();
    }
}

impl Streams for WatchedCopies {
    pass! {
        fn stream_create(priority: i32) -> StreamHandle;
        fn stream_destroy(stream: StreamHandle) -> ();
        fn stream_id(stream: StreamHandle) -> u64;
        fn stream_synchronize(stream: StreamHandle) -> ();
        fn stream_query(stream: StreamHandle) -> bool;
        fn stream_wait_event(stream: StreamHandle, event: EventHandle) -> ();
        fn synchronize() -> ();
        fn event_create(timing: bool) -> EventHandle;
        fn event_destroy(event: EventHandle) -> ();
        fn event_record(event: EventHandle, stream: StreamHandle) -> ();
        fn event_query(event: EventHandle) -> bool;
        fn event_synchronize(event: EventHandle) -> ();
        fn event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32;
        fn memset_d8(dst: DevicePtr, value: u8, bytes: usize, stream: StreamHandle) -> ();
        fn memset_d32(dst: DevicePtr, value: u32, words: usize, stream: StreamHandle) -> ();
        fn launch_host_fn(stream: StreamHandle, callback: HostCallback) -> ();
    }

    unsafe fn memcpy_htod(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let sides = (Side::Device(dst, None), Side::Host(src.addr() as u64));
        self.watch(("memcpy_htod", "work before memcpy_htod"), sides, bytes, stream, || {
            // SAFETY: the caller keeps the same contract.
            unsafe { self.inner.memcpy_htod(dst, src, bytes, stream) }
        })
    }

    unsafe fn memcpy_dtoh(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let sides = (Side::Host(dst.addr() as u64), Side::Device(src, None));
        self.watch(("memcpy_dtoh", "work before memcpy_dtoh"), sides, bytes, stream, || {
            // SAFETY: the caller keeps the same contract.
            unsafe { self.inner.memcpy_dtoh(dst, src, bytes, stream) }
        })
    }

    fn memcpy_dtod(&self, dst: DevicePtr, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let sides = (Side::Device(dst, None), Side::Device(src, None));
        self.watch(("memcpy_dtod", "work before memcpy_dtod"), sides, bytes, stream, || {
            self.inner.memcpy_dtod(dst, src, bytes, stream)
        })
    }

    fn memcpy_peer(
        &self,
        dst: DevicePtr,
        dst_device: DeviceOrdinal,
        src: DevicePtr,
        src_device: DeviceOrdinal,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let sides = (Side::Device(dst, Some(dst_device)), Side::Device(src, Some(src_device)));
        self.watch(("memcpy_peer", "work before memcpy_peer"), sides, bytes, stream, || {
            self.inner.memcpy_peer(dst, dst_device, src, src_device, bytes, stream)
        })
    }
}

impl Graphs for WatchedCopies {
    pass! {
        fn begin_capture(stream: StreamHandle, mode: CaptureMode) -> ();
        fn end_capture(stream: StreamHandle) -> GraphHandle;
        fn add_child(stream: StreamHandle, graph: GraphHandle) -> ();
        fn capture_status(stream: StreamHandle) -> CaptureStatus;
        fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode;
        fn graph_nodes(graph: GraphHandle) -> Vec<NodeHandle>;
        fn graph_edges(graph: GraphHandle) -> Vec<Edge>;
        fn node(node: NodeHandle) -> Node;
        fn graph_destroy(graph: GraphHandle) -> ();
        fn instantiate(graph: GraphHandle) -> ExecHandle;
        fn exec_update(exec: ExecHandle, graph: GraphHandle) -> UpdateResult;
        fn upload(exec: ExecHandle, stream: StreamHandle) -> ();
        fn launch(exec: ExecHandle, stream: StreamHandle) -> ();
        fn exec_destroy(exec: ExecHandle) -> ();
    }
}

impl Modules for WatchedCopies {
    pass! {
        fn module_load(image: ModuleImage<'_>) -> ModuleHandle;
        fn module_unload(module: ModuleHandle) -> ();
        fn function(module: ModuleHandle, name: &str) -> FunctionHandle;
        fn param_layout(function: FunctionHandle) -> Option<Arc<ParamLayout>>;
        [unsafe] fn launch_kernel(function: FunctionHandle, config: &LaunchConfig, args: &[u8], stream: StreamHandle) -> ();
    }
}

#[cfg(test)]
mod tests;
