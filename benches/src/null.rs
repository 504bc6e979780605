//! A driver whose calls do nothing: what is left is the cost of the pool and the cache themselves.
//!
//! Addresses are numbers that nobody dereferences; streams are always idle; a graph is one empty node.

// The traits have unsafe functions; their bodies here do nothing.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evergraph_pool::driver::{
    CaptureMode, CaptureStatus, DeviceInfo, DeviceOrdinal, DevicePtr, Driver, DriverResult, DynDriver, Edge,
    EventHandle, ExecHandle, Fault, FunctionHandle, GraphHandle, Graphs, HostCallback, HostPtr, LaunchConfig, MemInfo,
    Memory, ModuleHandle, ModuleImage, Modules, Node, NodeHandle, ParamLayout, PhysHandle, StreamHandle, Streams,
    UpdateResult,
};

const GRANULARITY: u64 = 2 << 20;

/// See the module.
#[derive(Debug)]
pub struct NullDriver {
    info: DeviceInfo,
    next_address: AtomicU64,
    next_handle: AtomicU64,
    capturing: AtomicU64,
}

impl NullDriver {
    /// A driver of a device with 1 TiB of nothing.
    #[must_use]
    pub fn shared() -> DynDriver {
        Arc::new(Self {
            info: DeviceInfo::new(DeviceOrdinal(0), "null", "no device", 1 << 40, true),
            next_address: AtomicU64::new(1 << 44),
            next_handle: AtomicU64::new(1),
            capturing: AtomicU64::new(0),
        })
    }

    fn address(&self, bytes: usize) -> DevicePtr {
        let bytes = (bytes as u64).next_multiple_of(GRANULARITY);
        DevicePtr(self.next_address.fetch_add(bytes, Ordering::Relaxed))
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }
}

impl Driver for NullDriver {
    fn bind(&self) -> DriverResult<()> {
        Ok(())
    }
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn fault(&self) -> Option<Fault> {
        None
    }
}

impl Memory for NullDriver {
    fn granularity_bytes(&self) -> DriverResult<usize> {
        Ok(GRANULARITY as usize)
    }
    fn address_reserve(&self, bytes: usize, _: usize, _: Option<DevicePtr>) -> DriverResult<DevicePtr> {
        Ok(self.address(bytes))
    }
    fn address_free(&self, _: DevicePtr, _: usize) -> DriverResult<()> {
        Ok(())
    }
    fn create(&self, _: usize) -> DriverResult<PhysHandle> {
        Ok(PhysHandle(self.handle()))
    }
    fn map(&self, _: DevicePtr, _: usize, _: usize, _: PhysHandle) -> DriverResult<()> {
        Ok(())
    }
    fn set_access(&self, _: DevicePtr, _: usize, _: &[DeviceOrdinal]) -> DriverResult<()> {
        Ok(())
    }
    fn unmap(&self, _: DevicePtr, _: usize) -> DriverResult<()> {
        Ok(())
    }
    fn release(&self, _: PhysHandle) -> DriverResult<()> {
        Ok(())
    }
    fn malloc(&self, bytes: usize) -> DriverResult<DevicePtr> {
        Ok(self.address(bytes))
    }
    fn free(&self, _: DevicePtr) -> DriverResult<()> {
        Ok(())
    }
    fn mem_info(&self) -> DriverResult<MemInfo> {
        Ok(MemInfo { free_bytes: self.info.total_bytes, total_bytes: self.info.total_bytes })
    }
    fn host_alloc(&self, bytes: usize) -> DriverResult<HostPtr> {
        Ok(HostPtr(self.address(bytes).0))
    }
    unsafe fn host_free(&self, _: HostPtr) -> DriverResult<()> {
        Ok(())
    }
    unsafe fn host_register(&self, _: *const u8, bytes: usize) -> DriverResult<DevicePtr> {
        Ok(self.address(bytes))
    }
    fn host_unregister(&self, _: *const u8) -> DriverResult<()> {
        Ok(())
    }
    fn can_access_peer(&self, _: DeviceOrdinal) -> DriverResult<bool> {
        Ok(false)
    }
    fn enable_peer_access(&self, _: DeviceOrdinal) -> DriverResult<()> {
        Ok(())
    }
}

impl Streams for NullDriver {
    fn stream_create(&self, _: i32) -> DriverResult<StreamHandle> {
        Ok(StreamHandle(self.handle()))
    }
    fn stream_destroy(&self, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        Ok(stream.0)
    }
    fn stream_synchronize(&self, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn stream_query(&self, _: StreamHandle) -> DriverResult<bool> {
        Ok(true)
    }
    fn stream_wait_event(&self, _: StreamHandle, _: EventHandle) -> DriverResult<()> {
        Ok(())
    }
    fn synchronize(&self) -> DriverResult<()> {
        Ok(())
    }
    fn event_create(&self, _: bool) -> DriverResult<EventHandle> {
        Ok(EventHandle(self.handle()))
    }
    fn event_destroy(&self, _: EventHandle) -> DriverResult<()> {
        Ok(())
    }
    fn event_record(&self, _: EventHandle, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn event_query(&self, _: EventHandle) -> DriverResult<bool> {
        Ok(true)
    }
    fn event_synchronize(&self, _: EventHandle) -> DriverResult<()> {
        Ok(())
    }
    fn event_elapsed_ms(&self, _: EventHandle, _: EventHandle) -> DriverResult<f32> {
        Ok(0.0)
    }
    unsafe fn memcpy_htod(&self, _: DevicePtr, _: *const u8, _: usize, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    unsafe fn memcpy_dtoh(&self, _: *mut u8, _: DevicePtr, _: usize, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn memcpy_dtod(&self, _: DevicePtr, _: DevicePtr, _: usize, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn memcpy_peer(
        &self,
        _: DevicePtr,
        _: DeviceOrdinal,
        _: DevicePtr,
        _: DeviceOrdinal,
        _: usize,
        _: StreamHandle,
    ) -> DriverResult<()> {
        Ok(())
    }
    fn memset_d8(&self, _: DevicePtr, _: u8, _: usize, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn memset_d32(&self, _: DevicePtr, _: u32, _: usize, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn launch_host_fn(&self, _: StreamHandle, callback: HostCallback) -> DriverResult<()> {
        (callback.0)();
        Ok(())
    }
}

impl Graphs for NullDriver {
    fn begin_capture(&self, stream: StreamHandle, _: CaptureMode) -> DriverResult<()> {
        self.capturing.store(stream.0, Ordering::Relaxed);
        Ok(())
    }
    fn end_capture(&self, _: StreamHandle) -> DriverResult<GraphHandle> {
        self.capturing.store(0, Ordering::Relaxed);
        Ok(GraphHandle(self.handle()))
    }
    fn add_child(&self, _: StreamHandle, _: GraphHandle) -> DriverResult<()> {
        Ok(())
    }
    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let active = self.capturing.load(Ordering::Relaxed) == stream.0;
        Ok(if active { CaptureStatus::Active { id: 1 } } else { CaptureStatus::None })
    }
    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        Ok(mode)
    }
    fn graph_nodes(&self, _: GraphHandle) -> DriverResult<Vec<NodeHandle>> {
        Ok(vec![NodeHandle(1)])
    }
    fn graph_edges(&self, _: GraphHandle) -> DriverResult<Vec<Edge>> {
        Ok(Vec::new())
    }
    fn node(&self, _: NodeHandle) -> DriverResult<Node> {
        Ok(Node::Empty)
    }
    fn graph_destroy(&self, _: GraphHandle) -> DriverResult<()> {
        Ok(())
    }
    fn instantiate(&self, _: GraphHandle) -> DriverResult<ExecHandle> {
        Ok(ExecHandle(self.handle()))
    }
    fn exec_update(&self, _: ExecHandle, _: GraphHandle) -> DriverResult<UpdateResult> {
        Ok(UpdateResult::NotSupported)
    }
    fn upload(&self, _: ExecHandle, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn launch(&self, _: ExecHandle, _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
    fn exec_destroy(&self, _: ExecHandle) -> DriverResult<()> {
        Ok(())
    }
}

impl Modules for NullDriver {
    fn module_load(&self, _: ModuleImage<'_>) -> DriverResult<ModuleHandle> {
        Ok(ModuleHandle(self.handle()))
    }
    fn module_unload(&self, _: ModuleHandle) -> DriverResult<()> {
        Ok(())
    }
    fn function(&self, _: ModuleHandle, _: &str) -> DriverResult<FunctionHandle> {
        Ok(FunctionHandle(self.handle()))
    }
    fn param_layout(&self, _: FunctionHandle) -> DriverResult<Option<Arc<ParamLayout>>> {
        Ok(None)
    }
    unsafe fn launch_kernel(&self, _: FunctionHandle, _: &LaunchConfig, _: &[u8], _: StreamHandle) -> DriverResult<()> {
        Ok(())
    }
}
