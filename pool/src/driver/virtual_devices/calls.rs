//! The calls: entry rules, whose handles and memory, then the physical device.

use std::sync::Arc;

use super::{Function, Map, VirtualDevice, own};
use crate::driver::{
    CaptureMode, CaptureStatus, DeviceOrdinal, DevicePtr, DriverErrorKind as Kind, DriverResult, Edge, EventHandle,
    ExecHandle, FunctionHandle, GraphHandle, Graphs, HostCallback, HostPtr, LaunchConfig, MemInfo, Memory,
    ModuleHandle, ModuleImage, Modules, Node, NodeHandle, ParamLayout, PhysHandle, StreamHandle, Streams, UpdateResult,
};
use crate::mutant;

/// The driver's number for peer access that is on already.
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;

/// Destroys an object: its owner is forgotten first, since the handle may be another's before the call is back.
macro_rules! destroy {
    ($self:ident, $call:ident, $table:ident, $handle:ident, $what:literal) => {{
        $self.enter(stringify!($call))?;
        own!($self, stringify!($call), $table, $handle, $what)?;
        let owner = $self.machine.owners.write().$table.remove(&$handle);
        let gone = $self.mine($self.inner.$call($handle));
        if let (Err(_), Some(owner)) = (&gone, owner) {
            $self.machine.owners.write().$table.insert($handle, owner);
        }
        gone
    }};
}

/// Makes an object, which is this device's.
macro_rules! make {
    ($self:ident, $table:ident, $made:expr) => {{
        let handle = $self.mine($made)?;
        $self.machine.owners.write().$table.insert(handle, $self.number());
        Ok(handle)
    }};
}

/// A call that needs this device current, and these handles its own.
macro_rules! pass {
    ($self:ident, $call:ident($($arg:expr),*) $(, $table:ident $handle:ident is $what:literal)*) => {{
        $self.enter(stringify!($call))?;
        $(own!($self, stringify!($call), $table, $handle, $what)?;)*
        $self.mine($self.inner.$call($($arg),*))
    }};
}

impl Memory for VirtualDevice {
    fn granularity_bytes(&self) -> DriverResult<usize> {
        pass!(self, granularity_bytes())
    }

    fn address_reserve(&self, bytes: usize, align: usize, hint: Option<DevicePtr>) -> DriverResult<DevicePtr> {
        self.enter("address_reserve")?;
        // One unit more, so that no two ranges touch: see `apart`.
        let guard_bytes = if bytes == 0 { 0 } else { self.mine(self.inner.granularity_bytes())? };
        let guarded = bytes
            .checked_add(guard_bytes)
            .and_then(|whole| self.inner.address_reserve(whole, align, hint).ok().map(|ptr| (ptr, whole)));
        let (ptr, whole) = match guarded {
            Some(made) => made,
            None => (self.mine(self.inner.address_reserve(bytes, align, hint))?, bytes),
        };
        self.machine.map.write().add_reservation(ptr, bytes, whole);
        Ok(ptr)
    }

    fn address_free(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        self.enter("address_free")?;
        let known = self.machine.map.write().take_reservation(ptr, bytes);
        let gone = self.mine(self.inner.address_free(ptr, known.map_or(bytes, |(_, whole)| whole)));
        if let (Err(_), Some((asked, whole))) = (&gone, known) {
            self.machine.map.write().add_reservation(ptr, asked, whole);
        }
        gone
    }

    fn create(&self, bytes: usize) -> DriverResult<PhysHandle> {
        const CALL: &str = "create";
        self.enter(CALL)?;
        if let Err(error) = self.charge(CALL, bytes) {
            // A size that is off is said to be.
            let odd = !bytes.is_multiple_of(self.mine(self.inner.granularity_bytes())?.max(1));
            return if odd { self.mine(self.inner.create(bytes)) } else { Err(error) };
        }
        let made = self.mine(self.inner.create(bytes));
        let mut map = self.machine.map.write();
        match &made {
            Ok(handle) => map.add_chunk(*handle, self.number(), bytes),
            Err(_) => map.credit(self.number(), bytes),
        }
        made
    }

    fn map(&self, ptr: DevicePtr, bytes: usize, offset_bytes: usize, handle: PhysHandle) -> DriverResult<()> {
        const CALL: &str = "map";
        self.enter(CALL)?;
        if !self.machine.map.read().fits_reservation(ptr, bytes) {
            return Err(self.err(CALL, Kind::InvalidValue("the mapping ends past its reservation")));
        }
        self.mine(self.inner.map(ptr, bytes, offset_bytes, handle))?;
        self.machine.map.write().add_mapping(ptr, bytes, handle);
        Ok(())
    }

    fn set_access(&self, ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) -> DriverResult<()> {
        const CALL: &str = "set_access";
        self.enter(CALL)?;
        let mut under = devices.iter().map(|&d| self.under(CALL, d)).collect::<DriverResult<Vec<_>>>()?;
        under.sort_unstable();
        under.dedup();
        self.mine(self.inner.set_access(ptr, bytes, &under))?;
        self.machine.map.write().add_access(ptr, bytes, devices);
        Ok(())
    }

    fn unmap(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        self.enter("unmap")?;
        let taken = self.machine.map.write().take_mappings(ptr, bytes);
        let gone = self.mine(self.inner.unmap(ptr, bytes));
        let mut map = self.machine.map.write();
        if gone.is_ok() {
            map.gone(taken)
        } else {
            map.put_back(taken)
        }
        gone
    }

    fn release(&self, handle: PhysHandle) -> DriverResult<()> {
        self.enter("release")?;
        let key = self.machine.map.write().take_handle(handle);
        let gone = self.mine(self.inner.release(handle));
        if let Some(key) = key {
            let mut map = self.machine.map.write();
            if gone.is_ok() { map.released(key) } else { map.put_handle_back(handle, key) }
        }
        gone
    }

    fn malloc(&self, bytes: usize) -> DriverResult<DevicePtr> {
        const CALL: &str = "malloc";
        self.enter(CALL)?;
        let taken_bytes = Map::plain_bytes(bytes);
        self.charge(CALL, taken_bytes)?;
        let made = self.mine(self.apart(bytes));
        let mut map = self.machine.map.write();
        match &made {
            Ok(ptr) => map.add_plain(*ptr, bytes, self.number()),
            Err(_) => map.credit(self.number(), taken_bytes),
        }
        made
    }

    fn free(&self, ptr: DevicePtr) -> DriverResult<()> {
        const CALL: &str = "free";
        self.enter(CALL)?;
        let taken = {
            let mut map = self.machine.map.write();
            if map.is_plain_of_other(ptr, self.number()) {
                return Err(self.err(CALL, Kind::InvalidValue("memory of another device")));
            }
            map.take_plain(ptr)
        };
        let gone = self.mine(self.inner.free(ptr));
        if let Some(taken) = taken {
            let mut map = self.machine.map.write();
            if gone.is_ok() { map.gone(taken) } else { map.put_back(taken) }
        }
        gone
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        let info = pass!(self, mem_info())?;
        let total_bytes = self.info.total_bytes;
        let left_bytes = total_bytes.saturating_sub(self.machine.map.read().used_bytes(self.number()));
        Ok(MemInfo { free_bytes: left_bytes.min(info.free_bytes), total_bytes })
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<HostPtr> {
        pass!(self, host_alloc(bytes))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> DriverResult<()> {
        self.enter("host_free")?;
        // SAFETY: the caller keeps the same contract.
        self.mine(unsafe { self.inner.host_free(ptr) })
    }

    unsafe fn host_register(&self, ptr: *const u8, bytes: usize) -> DriverResult<DevicePtr> {
        self.enter("host_register")?;
        // SAFETY: the caller keeps the same contract.
        self.mine(unsafe { self.inner.host_register(ptr, bytes) })
    }

    fn host_unregister(&self, ptr: *const u8) -> DriverResult<()> {
        pass!(self, host_unregister(ptr))
    }

    fn can_access_peer(&self, peer: DeviceOrdinal) -> DriverResult<bool> {
        const CALL: &str = "can_access_peer";
        self.enter(CALL)?;
        let under = self.under(CALL, peer)?;
        if under == self.inner.info().ordinal {
            return Ok(peer != self.info.ordinal);
        }
        self.mine(self.inner.can_access_peer(under))
    }

    fn enable_peer_access(&self, peer: DeviceOrdinal) -> DriverResult<()> {
        const CALL: &str = "enable_peer_access";
        self.enter(CALL)?;
        let under = self.under(CALL, peer)?;
        if peer == self.info.ordinal {
            return Err(self.err(CALL, Kind::PeerAccess));
        }
        if !self.machine.map.write().add_peer(self.number(), peer.0) {
            let name = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED".to_owned();
            return Err(self.err(CALL, Kind::Other { code: PEER_ACCESS_ALREADY_ENABLED, name }));
        }
        if under == self.inner.info().ordinal {
            return Ok(());
        }
        match self.inner.enable_peer_access(under) {
            // By another virtual device of these two.
            Err(error) if matches!(error.kind, Kind::Other { code: PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
            Err(error) => {
                self.machine.map.write().remove_peer(self.number(), peer.0);
                self.mine(Err(error))
            }
            Ok(()) => Ok(()),
        }
    }
}

impl VirtualDevice {
    /// Plain memory that does not touch another device's: one past the end is an address that kernels are given, and where
    /// that is the start of another's memory nobody can tell the two apart. What the driver hands out first is held until
    /// there is another place. Where that is not soon found, memory that touches will do.
    fn apart(&self, bytes: usize) -> DriverResult<DevicePtr> {
        const TRIES: usize = 4;
        let mut found = self.inner.malloc(bytes)?;
        let mut touching = Vec::new();
        while touching.len() < TRIES
            && self.machine.map.read().touches_other(found, bytes, self.number())
            && !mutant::is("virtual.ranges-touch")
            && let Ok(other) = self.inner.malloc(bytes)
        {
            touching.push(std::mem::replace(&mut found, other));
        }
        let freed = touching.into_iter().map(|ptr| self.inner.free(ptr)).fold(Ok(()), Result::and);
        freed.map(|()| found).inspect_err(|_| drop(self.inner.free(found)))
    }

    /// Takes from the device's share.
    fn charge(&self, call: &'static str, bytes: usize) -> DriverResult<()> {
        if self.machine.map.write().charge(self.number(), bytes, self.info.total_bytes) {
            Ok(())
        } else {
            Err(self.err(call, Kind::OutOfMemory))
        }
    }
}

impl Streams for VirtualDevice {
    fn stream_create(&self, priority: i32) -> DriverResult<StreamHandle> {
        self.enter("stream_create")?;
        make!(self, streams, self.inner.stream_create(priority))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        destroy!(self, stream_destroy, streams, stream, "stream")
    }

    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        pass!(self, stream_id(stream), streams stream is "stream")
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        pass!(self, stream_synchronize(stream), streams stream is "stream")
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        pass!(self, stream_query(stream), streams stream is "stream")
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        pass!(self, stream_wait_event(stream, event), streams stream is "stream")
    }

    /// Waits for the whole context, other devices on it included: destroyed streams are known to nobody else. Where a
    /// stream of another device records, which that would break, it waits for the streams of this one.
    fn synchronize(&self) -> DriverResult<()> {
        self.enter("synchronize")?;
        let (own, others): (Vec<_>, Vec<_>) = {
            let owners = self.machine.owners.read();
            owners.streams.iter().map(|(&s, &owner)| (s, owner)).partition(|(_, owner)| *owner == self.number())
        };
        let records = |(stream, _): &(StreamHandle, u32)| {
            self.inner.capture_status(*stream).is_ok_and(|s| s != CaptureStatus::None)
        };
        if others.iter().any(records) {
            return own.into_iter().try_for_each(|(stream, _)| self.mine(self.inner.stream_synchronize(stream)));
        }
        self.mine(self.inner.synchronize())
    }

    fn event_create(&self, timing: bool) -> DriverResult<EventHandle> {
        self.enter("event_create")?;
        make!(self, events, self.inner.event_create(timing))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        destroy!(self, event_destroy, events, event, "event")
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        pass!(self, event_record(event, stream), events event is "event", streams stream is "stream")
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        pass!(self, event_query(event), events event is "event")
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        pass!(self, event_synchronize(event), events event is "event")
    }

    fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> DriverResult<f32> {
        pass!(self, event_elapsed_ms(start, end), events start is "event", events end is "event")
    }

    unsafe fn memcpy_htod(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        const CALL: &str = "memcpy_htod";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        self.may_touch(CALL, "dst", dst, bytes)?;
        // SAFETY: the caller keeps the same contract.
        self.mine(unsafe { self.inner.memcpy_htod(dst, src, bytes, stream) })
    }

    unsafe fn memcpy_dtoh(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "memcpy_dtoh";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        self.may_touch(CALL, "src", src, bytes)?;
        // SAFETY: the caller keeps the same contract.
        self.mine(unsafe { self.inner.memcpy_dtoh(dst, src, bytes, stream) })
    }

    fn memcpy_dtod(&self, dst: DevicePtr, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "memcpy_dtod";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        self.may_touch(CALL, "dst", dst, bytes)?;
        self.may_touch(CALL, "src", src, bytes)?;
        self.mine(self.inner.memcpy_dtod(dst, src, bytes, stream))
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
        const CALL: &str = "memcpy_peer";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        let (dst_under, src_under) = (self.under(CALL, dst_device)?, self.under(CALL, src_device)?);
        self.is_home(CALL, "dst", dst_device, dst, bytes)?;
        self.is_home(CALL, "src", src_device, src, bytes)?;
        self.mine(if dst_under == src_under && dst_under == self.inner.info().ordinal {
            self.inner.memcpy_dtod(dst, src, bytes, stream)
        } else {
            self.inner.memcpy_peer(dst, dst_under, src, src_under, bytes, stream)
        })
    }

    fn memset_d8(&self, dst: DevicePtr, value: u8, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "memset_d8";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        self.may_touch(CALL, "dst", dst, bytes)?;
        self.mine(self.inner.memset_d8(dst, value, bytes, stream))
    }

    fn memset_d32(&self, dst: DevicePtr, value: u32, words: usize, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "memset_d32";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        self.may_touch(CALL, "dst", dst, words.saturating_mul(4))?;
        self.mine(self.inner.memset_d32(dst, value, words, stream))
    }

    fn launch_host_fn(&self, stream: StreamHandle, callback: HostCallback) -> DriverResult<()> {
        pass!(self, launch_host_fn(stream, callback), streams stream is "stream")
    }
}

impl Graphs for VirtualDevice {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        pass!(self, begin_capture(stream, mode), streams stream is "stream")
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        self.enter("end_capture")?;
        own!(self, "end_capture", streams, stream, "stream")?;
        make!(self, graphs, self.inner.end_capture(stream))
    }

    fn add_child(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()> {
        pass!(self, add_child(stream, graph), streams stream is "stream", graphs graph is "graph")
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        pass!(self, capture_status(stream), streams stream is "stream")
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        pass!(self, exchange_capture_mode(mode))
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<NodeHandle>> {
        pass!(self, graph_nodes(graph), graphs graph is "graph")
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        pass!(self, graph_edges(graph), graphs graph is "graph")
    }

    fn node(&self, node: NodeHandle) -> DriverResult<Node> {
        pass!(self, node(node))
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        destroy!(self, graph_destroy, graphs, graph, "graph")
    }

    fn instantiate(&self, graph: GraphHandle) -> DriverResult<ExecHandle> {
        self.enter("instantiate")?;
        own!(self, "instantiate", graphs, graph, "graph")?;
        make!(self, execs, self.inner.instantiate(graph))
    }

    fn exec_update(&self, exec: ExecHandle, graph: GraphHandle) -> DriverResult<UpdateResult> {
        pass!(self, exec_update(exec, graph), execs exec is "exec", graphs graph is "graph")
    }

    fn upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        pass!(self, upload(exec, stream), execs exec is "exec", streams stream is "stream")
    }

    fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        pass!(self, launch(exec, stream), execs exec is "exec", streams stream is "stream")
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        destroy!(self, exec_destroy, execs, exec, "exec")
    }
}

impl Modules for VirtualDevice {
    fn module_load(&self, image: ModuleImage<'_>) -> DriverResult<ModuleHandle> {
        self.enter("module_load")?;
        make!(self, modules, self.inner.module_load(image))
    }

    fn module_unload(&self, module: ModuleHandle) -> DriverResult<()> {
        let functions: Vec<_> = {
            let owners = self.machine.owners.read();
            owners.functions.iter().filter(|(_, f)| f.module == module).map(|(&handle, _)| handle).collect()
        };
        destroy!(self, module_unload, modules, module, "module")?;
        let mut owners = self.machine.owners.write();
        for function in functions {
            // Not where the handle is another module's by now.
            if owners.functions.get(&function).is_some_and(|f| f.module == module) {
                owners.functions.remove(&function);
            }
        }
        Ok(())
    }

    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        let function = pass!(self, function(module, name), modules module is "module")?;
        let same = |f: &Arc<Function>| f.module == module && f.name == name && f.owner == self.number();
        if !self.machine.owners.read().functions.get(&function).is_some_and(same) {
            let layout = self.mine(self.inner.param_layout(function))?;
            let known = Function::new(self.number(), module, name, layout.as_deref());
            self.machine.owners.write().functions.insert(function, known);
        }
        Ok(function)
    }

    fn param_layout(&self, function: FunctionHandle) -> DriverResult<Option<Arc<ParamLayout>>> {
        const CALL: &str = "param_layout";
        self.enter(CALL)?;
        self.own_function(CALL, function)?;
        self.mine(self.inner.param_layout(function))
    }

    unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> DriverResult<()> {
        const CALL: &str = "launch_kernel";
        self.enter(CALL)?;
        own!(self, CALL, streams, stream, "stream")?;
        let known = self.own_function(CALL, function)?;
        self.may_launch(CALL, known.as_deref(), args)?;
        // SAFETY: the caller keeps the same contract.
        self.mine(unsafe { self.inner.launch_kernel(function, config, args, stream) })
    }
}

impl VirtualDevice {
    fn own_function(&self, call: &'static str, function: FunctionHandle) -> DriverResult<Option<Arc<Function>>> {
        let known = self.machine.owners.read().functions.get(&function).cloned();
        match known {
            Some(known) if known.owner != self.number() => Err(self.err(call, Kind::InvalidHandle("function"))),
            known => Ok(known),
        }
    }
}
