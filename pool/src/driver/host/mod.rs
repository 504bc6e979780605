//! The host device: a complete device on the CPU, at least as strict as the hardware.

mod config;
mod kernel;

use std::sync::Arc;

pub use config::{HostConfig, Poison};
pub use kernel::{HostKernel, KernelContext, SpanCheck};

use super::*;

/// A device on the CPU.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostDevice {
    info: DeviceInfo,
}

/// Several host devices of one machine: one address space, peer rules between them.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostMachine {}

impl HostMachine {
    /// A machine of `devices` alike devices, numbered from 0.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(devices: usize, config: HostConfig) -> DriverResult<Vec<Arc<HostDevice>>> {
        (0..devices).map(|_| HostDevice::new(config.clone())).collect()
    }
}

impl HostDevice {
    /// A machine of one device.
    pub fn new(config: HostConfig) -> DriverResult<Arc<Self>> {
        let info = DeviceInfo::new(DeviceOrdinal(0), "host", "host", config.memory_bytes, config.vmm);
        Ok(Arc::new(Self { info }))
    }

    /// Runs the next piece of work of a stream of a stepped device; whether there was one that could run.
    pub fn step(&self, stream: StreamHandle) -> DriverResult<bool> {
        let _ = stream;
        Err(self.todo("step"))
    }

    /// Hidden launch attributes that an exec's kernel nodes really run with, in execution order.
    pub fn exec_hidden_attributes(&self, exec: ExecHandle) -> DriverResult<Vec<u32>> {
        let _ = exec;
        Err(self.todo("exec_hidden_attributes"))
    }

    /// Makes a function's layout readable or not, as with drivers that can not tell.
    pub fn set_layout_readable(&self, function: FunctionHandle, readable: bool) -> DriverResult<()> {
        let _ = (function, readable);
        Err(self.todo("set_layout_readable"))
    }

    /// Makes a function's arguments in graph nodes readable or not.
    pub fn set_args_readable(&self, function: FunctionHandle, readable: bool) -> DriverResult<()> {
        let _ = (function, readable);
        Err(self.todo("set_args_readable"))
    }

    /// What is live on this device; for leak checks.
    #[must_use]
    pub fn live(&self) -> Live {
        Live::default()
    }

    fn todo(&self, call: &'static str) -> DriverError {
        DriverError::new(call, self.info.ordinal, DriverErrorKind::NotSupported("not written yet"))
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
}

impl Driver for HostDevice {
    fn bind(&self) -> DriverResult<()> {
        Ok(())
    }
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn fault(&self) -> Option<Fault> {
        None
    }
    fn as_host(&self) -> Option<&HostDevice> {
        Some(self)
    }
}
impl Memory for HostDevice {
    fn granularity_bytes(&self) -> DriverResult<usize> {
        Err(self.todo("granularity_bytes"))
    }
    fn address_reserve(&self, _bytes: usize, _align: usize, _hint: Option<DevicePtr>) -> DriverResult<DevicePtr> {
        Err(self.todo("address_reserve"))
    }
    fn address_free(&self, _ptr: DevicePtr, _bytes: usize) -> DriverResult<()> {
        Err(self.todo("address_free"))
    }
    fn create(&self, _bytes: usize) -> DriverResult<PhysHandle> {
        Err(self.todo("create"))
    }
    fn map(&self, _ptr: DevicePtr, _bytes: usize, _offset_bytes: usize, _handle: PhysHandle) -> DriverResult<()> {
        Err(self.todo("map"))
    }
    fn set_access(&self, _ptr: DevicePtr, _bytes: usize, _devices: &[DeviceOrdinal]) -> DriverResult<()> {
        Err(self.todo("set_access"))
    }
    fn unmap(&self, _ptr: DevicePtr, _bytes: usize) -> DriverResult<()> {
        Err(self.todo("unmap"))
    }
    fn release(&self, _handle: PhysHandle) -> DriverResult<()> {
        Err(self.todo("release"))
    }
    fn malloc(&self, _bytes: usize) -> DriverResult<DevicePtr> {
        Err(self.todo("malloc"))
    }
    fn free(&self, _ptr: DevicePtr) -> DriverResult<()> {
        Err(self.todo("free"))
    }
    fn mem_info(&self) -> DriverResult<MemInfo> {
        Err(self.todo("mem_info"))
    }
    fn host_alloc(&self, _bytes: usize) -> DriverResult<HostPtr> {
        Err(self.todo("host_alloc"))
    }
    unsafe fn host_free(&self, _ptr: HostPtr) -> DriverResult<()> {
        Err(self.todo("host_free"))
    }
    unsafe fn host_register(&self, _ptr: *const u8, _bytes: usize) -> DriverResult<DevicePtr> {
        Err(self.todo("host_register"))
    }
    fn host_unregister(&self, _ptr: *const u8) -> DriverResult<()> {
        Err(self.todo("host_unregister"))
    }
    fn can_access_peer(&self, _peer: DeviceOrdinal) -> DriverResult<bool> {
        Err(self.todo("can_access_peer"))
    }
    fn enable_peer_access(&self, _peer: DeviceOrdinal) -> DriverResult<()> {
        Err(self.todo("enable_peer_access"))
    }
}
impl Streams for HostDevice {
    fn stream_create(&self, _priority: i32) -> DriverResult<StreamHandle> {
        Err(self.todo("stream_create"))
    }
    fn stream_destroy(&self, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("stream_destroy"))
    }
    fn stream_id(&self, _stream: StreamHandle) -> DriverResult<u64> {
        Err(self.todo("stream_id"))
    }
    fn stream_synchronize(&self, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("stream_synchronize"))
    }
    fn stream_query(&self, _stream: StreamHandle) -> DriverResult<bool> {
        Err(self.todo("stream_query"))
    }
    fn stream_wait_event(&self, _stream: StreamHandle, _event: EventHandle) -> DriverResult<()> {
        Err(self.todo("stream_wait_event"))
    }
    fn synchronize(&self) -> DriverResult<()> {
        Err(self.todo("synchronize"))
    }
    fn event_create(&self, _timing: bool) -> DriverResult<EventHandle> {
        Err(self.todo("event_create"))
    }
    fn event_destroy(&self, _event: EventHandle) -> DriverResult<()> {
        Err(self.todo("event_destroy"))
    }
    fn event_record(&self, _event: EventHandle, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("event_record"))
    }
    fn event_query(&self, _event: EventHandle) -> DriverResult<bool> {
        Err(self.todo("event_query"))
    }
    fn event_synchronize(&self, _event: EventHandle) -> DriverResult<()> {
        Err(self.todo("event_synchronize"))
    }
    fn event_elapsed_ms(&self, _start: EventHandle, _end: EventHandle) -> DriverResult<f32> {
        Err(self.todo("event_elapsed_ms"))
    }
    unsafe fn memcpy_htod(
        &self,
        _dst: DevicePtr,
        _src: *const u8,
        _bytes: usize,
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Err(self.todo("memcpy_htod"))
    }
    unsafe fn memcpy_dtoh(
        &self,
        _dst: *mut u8,
        _src: DevicePtr,
        _bytes: usize,
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Err(self.todo("memcpy_dtoh"))
    }
    fn memcpy_dtod(&self, _dst: DevicePtr, _src: DevicePtr, _bytes: usize, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("memcpy_dtod"))
    }
    fn memcpy_peer(
        &self,
        _dst: DevicePtr,
        _dst_device: DeviceOrdinal,
        _src: DevicePtr,
        _src_device: DeviceOrdinal,
        _bytes: usize,
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Err(self.todo("memcpy_peer"))
    }
    fn memset_d8(&self, _dst: DevicePtr, _value: u8, _bytes: usize, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("memset_d8"))
    }
    fn memset_d32(&self, _dst: DevicePtr, _value: u32, _words: usize, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("memset_d32"))
    }
    fn launch_host_fn(&self, _stream: StreamHandle, _callback: HostCallback) -> DriverResult<()> {
        Err(self.todo("launch_host_fn"))
    }
}
impl Graphs for HostDevice {
    fn begin_capture(&self, _stream: StreamHandle, _mode: CaptureMode) -> DriverResult<()> {
        Err(self.todo("begin_capture"))
    }
    fn end_capture(&self, _stream: StreamHandle) -> DriverResult<GraphHandle> {
        Err(self.todo("end_capture"))
    }
    fn capture_status(&self, _stream: StreamHandle) -> DriverResult<CaptureStatus> {
        Err(self.todo("capture_status"))
    }
    fn exchange_capture_mode(&self, _mode: CaptureMode) -> DriverResult<CaptureMode> {
        Err(self.todo("exchange_capture_mode"))
    }
    fn graph_nodes(&self, _graph: GraphHandle) -> DriverResult<Vec<NodeHandle>> {
        Err(self.todo("graph_nodes"))
    }
    fn graph_edges(&self, _graph: GraphHandle) -> DriverResult<Vec<(NodeHandle, NodeHandle)>> {
        Err(self.todo("graph_edges"))
    }
    fn node(&self, _node: NodeHandle) -> DriverResult<Node> {
        Err(self.todo("node"))
    }
    fn graph_destroy(&self, _graph: GraphHandle) -> DriverResult<()> {
        Err(self.todo("graph_destroy"))
    }
    fn instantiate(&self, _graph: GraphHandle) -> DriverResult<ExecHandle> {
        Err(self.todo("instantiate"))
    }
    fn exec_update(&self, _exec: ExecHandle, _graph: GraphHandle) -> DriverResult<UpdateResult> {
        Err(self.todo("exec_update"))
    }
    fn upload(&self, _exec: ExecHandle, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("upload"))
    }
    fn launch(&self, _exec: ExecHandle, _stream: StreamHandle) -> DriverResult<()> {
        Err(self.todo("launch"))
    }
    fn exec_destroy(&self, _exec: ExecHandle) -> DriverResult<()> {
        Err(self.todo("exec_destroy"))
    }
}
impl Modules for HostDevice {
    fn module_load(&self, _image: ModuleImage<'_>) -> DriverResult<ModuleHandle> {
        Err(self.todo("module_load"))
    }
    fn module_unload(&self, _module: ModuleHandle) -> DriverResult<()> {
        Err(self.todo("module_unload"))
    }
    fn function(&self, _module: ModuleHandle, _name: &str) -> DriverResult<FunctionHandle> {
        Err(self.todo("function"))
    }
    fn param_layout(&self, _function: FunctionHandle) -> DriverResult<Option<Arc<ParamLayout>>> {
        Err(self.todo("param_layout"))
    }
    unsafe fn launch_kernel(
        &self,
        _function: FunctionHandle,
        _config: &LaunchConfig,
        _args: &[u8],
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Err(self.todo("launch_kernel"))
    }
}
