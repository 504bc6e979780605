//! Capture, node walk, instantiate, update, launch.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys;

use smallvec::SmallVec;

use super::flight::Note;
use super::stream::raw_stream;
use super::{CudaDevice, cuda};
use crate::driver::{
    CaptureMode, CaptureStatus, CopySide, DevicePtr, DriverErrorKind as Kind, DriverResult, Edge, EventHandle,
    ExecHandle, FunctionHandle, GraphHandle, Graphs, LaunchConfig, Modules, Node, NodeArgs, NodeHandle, StreamHandle,
    UpdateResult,
};

/// Words of the packed form (`extra`).
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

fn raw_graph(graph: GraphHandle) -> sys::CUgraph {
    std::ptr::with_exposed_provenance_mut(graph.0 as usize)
}

fn raw_exec(exec: ExecHandle) -> sys::CUgraphExec {
    std::ptr::with_exposed_provenance_mut(exec.0 as usize)
}

fn raw_node(node: NodeHandle) -> sys::CUgraphNode {
    std::ptr::with_exposed_provenance_mut(node.0 as usize)
}

fn node_handle(node: sys::CUgraphNode) -> NodeHandle {
    NodeHandle(node.expose_provenance() as u64)
}

fn raw_mode(mode: CaptureMode) -> sys::CUstreamCaptureMode {
    match mode {
        CaptureMode::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    }
}

/// One side of a one-dimensional copy; `None` for arrays.
fn side(memory: sys::CUmemorytype, host: u64, device: u64, offset: usize) -> Option<CopySide> {
    use sys::CUmemorytype as Type;
    match memory {
        Type::CU_MEMORYTYPE_HOST => Some(CopySide::Host(host.wrapping_add(offset as u64))),
        Type::CU_MEMORYTYPE_DEVICE | Type::CU_MEMORYTYPE_UNIFIED => {
            Some(CopySide::Device(DevicePtr(device.wrapping_add(offset as u64))))
        }
        Type::CU_MEMORYTYPE_ARRAY => None,
    }
}

impl CudaDevice {
    fn kernel_params(&self, call: &'static str, node: sys::CUgraphNode) -> DriverResult<sys::CUDA_KERNEL_NODE_PARAMS> {
        let mut params = MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
        cuda!(self, call, cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()))?;
        // SAFETY: all zero is a valid value of these plain fields, and the driver filled them.
        Ok(unsafe { params.assume_init() })
    }

    fn kernel_node(
        &self,
        call: &'static str,
        node: sys::CUgraphNode,
        params: sys::CUDA_KERNEL_NODE_PARAMS,
    ) -> DriverResult<Node> {
        // Kernels of libraries are known by `kern` where `func` is null.
        let function = if params.func.is_null() { params.kern.cast() } else { params.func };
        let function = FunctionHandle(function.expose_provenance() as u64);
        let config = LaunchConfig {
            grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
            block: [params.blockDimX, params.blockDimY, params.blockDimZ],
            shared_bytes: params.sharedMemBytes,
            // An edge's matter: see `graph_edges`.
            programmatic: false,
            cooperative: self.is_cooperative(call, node)?,
        };
        let args = if params.extra.is_null() {
            self.args_by_layout(function, params.kernelParams)?
        } else {
            // SAFETY: the node's own, zero-terminated list, valid while the node is.
            unsafe { args_from_extra(params.extra) }
        };
        Ok(Node::Kernel { function, config, args })
    }

    fn is_cooperative(&self, call: &'static str, node: sys::CUgraphNode) -> DriverResult<bool> {
        let mut value = MaybeUninit::<sys::CUlaunchAttributeValue>::zeroed();
        let which = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        match cuda!(self, call, cuGraphKernelNodeGetAttribute(node, which, value.as_mut_ptr())) {
            Ok(()) => {}
            // A driver that does not show it refuses an update that changes it all the same.
            Err(error) if matches!(error.kind, Kind::InvalidValue(_) | Kind::NotSupported(_)) => return Ok(false),
            Err(error) => return Err(error),
        }
        // SAFETY: all zero is a valid value of this plain union, and the driver filled this field of it.
        Ok(unsafe { value.assume_init().cooperative } != 0)
    }

    fn args_by_layout(&self, function: FunctionHandle, params: *mut *mut c_void) -> DriverResult<NodeArgs> {
        let Some(layout) = self.param_layout(function)? else { return Ok(NodeArgs::Unreadable) };
        let mut bytes: SmallVec<[u8; 128]> = SmallVec::from_elem(0, layout.packed_bytes());
        if params.is_null() && !layout.params.is_empty() {
            return Ok(NodeArgs::Unreadable);
        }
        for (index, param) in layout.params.iter().enumerate() {
            // SAFETY: the node's array has one pointer a parameter, each to at least that parameter's bytes, valid
            // while the node is; they are copied out and never written.
            let value = unsafe { std::slice::from_raw_parts((*params.add(index)).cast::<u8>(), param.bytes as usize) };
            bytes[param.offset as usize..(param.offset + param.bytes) as usize].copy_from_slice(value);
        }
        Ok(NodeArgs::Packed { bytes, layout: Some(layout) })
    }

    fn copy_node(&self, call: &'static str, node: sys::CUgraphNode) -> DriverResult<Node> {
        let mut params = MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
        cuda!(self, call, cuGraphMemcpyNodeGetParams(node, params.as_mut_ptr()))?;
        // SAFETY: the driver filled it, memory types included.
        let params = unsafe { params.assume_init() };
        let dst = side(params.dstMemoryType, params.dstHost.addr() as u64, params.dstDevice, params.dstXInBytes);
        let src = side(params.srcMemoryType, params.srcHost.addr() as u64, params.srcDevice, params.srcXInBytes);
        Ok(match (dst, src) {
            (Some(dst), Some(src)) if params.Height.max(1) * params.Depth.max(1) == 1 => {
                Node::Copy { dst, src, bytes: params.WidthInBytes }
            }
            _ => Node::Unknown(sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY as u32),
        })
    }

    fn set_node(&self, call: &'static str, node: sys::CUgraphNode) -> DriverResult<Node> {
        let mut params = MaybeUninit::<sys::CUDA_MEMSET_NODE_PARAMS>::zeroed();
        cuda!(self, call, cuGraphMemsetNodeGetParams(node, params.as_mut_ptr()))?;
        // SAFETY: all zero is a valid value of these plain fields, and the driver filled them.
        let params = unsafe { params.assume_init() };
        let row = params.width * params.elementSize as usize;
        let bytes = params.height.saturating_sub(1) * params.pitch + row;
        Ok(Node::Set { dst: DevicePtr(params.dst), bytes })
    }
}

/// The packed buffer of an `extra` list; anything else in the list makes it unreadable.
///
/// # Safety
/// `extra` is a node's list: pairs of a small number and a pointer, ended by zero.
unsafe fn args_from_extra(extra: *mut *mut c_void) -> NodeArgs {
    let (mut buffer, mut size) = (None, None);
    let mut at = extra;
    loop {
        // SAFETY: the list goes on until its zero.
        let key = unsafe { *at }.addr();
        if key == 0 {
            break;
        }
        // SAFETY: a key that is not zero has a value.
        let value = unsafe { *at.add(1) };
        match key {
            BUFFER_POINTER => buffer = Some(value.cast::<u8>()),
            BUFFER_SIZE => size = Some(value.cast::<usize>()),
            _ => return NodeArgs::Unreadable,
        }
        // SAFETY: as above.
        at = unsafe { at.add(2) };
    }
    match (buffer, size) {
        (Some(buffer), Some(size)) => {
            // SAFETY: the node's own buffer, of the size that stands beside it; copied out.
            let bytes = unsafe { std::slice::from_raw_parts(buffer, *size) };
            NodeArgs::Packed { bytes: bytes.into(), layout: None }
        }
        _ => NodeArgs::Unreadable,
    }
}

impl Graphs for CudaDevice {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        cuda!(self, "begin_capture", cuStreamBeginCapture_v2(raw_stream(stream), raw_mode(mode)))?;
        self.flight.note(Note::CaptureBegun, 0, stream);
        Ok(())
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        const CALL: &str = "end_capture";
        let mut graph: sys::CUgraph = std::ptr::null_mut();
        let ended = cuda!(self, CALL, cuStreamEndCapture(raw_stream(stream), &raw mut graph));
        self.flight.note(Note::CaptureEnded, 0, stream);
        ended?;
        if graph.is_null() {
            return Err(self.err(CALL, Kind::CaptureInvalidated));
        }
        Ok(GraphHandle(graph.expose_provenance() as u64))
    }

    fn add_child(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()> {
        const CALL: &str = "add_child";
        const SET_DEPENDENCIES: u32 = 1;
        let stream = raw_stream(stream);
        let (mut status, mut id, mut into, mut count) = (0u32, 0, std::ptr::null_mut(), 0);
        let (mut after, mut data) = (std::ptr::null(), std::ptr::null());
        cuda!(
            self,
            CALL,
            cuStreamGetCaptureInfo_v3(
                stream,
                (&raw mut status).cast(),
                &raw mut id,
                &raw mut into,
                &raw mut after,
                &raw mut data,
                &raw mut count
            )
        )?;
        match status {
            0 => return Err(self.err(CALL, Kind::CaptureState)),
            1 => {}
            _ => return Err(self.err(CALL, Kind::CaptureInvalidated)),
        }
        let mut node: sys::CUgraphNode = std::ptr::null_mut();
        cuda!(self, CALL, cuGraphAddChildGraphNode(&raw mut node, into, after, count, raw_graph(graph)))?;
        let none = std::ptr::null();
        cuda!(self, CALL, cuStreamUpdateCaptureDependencies_v2(stream, &raw mut node, none, 1, SET_DEPENDENCIES))
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        Ok(self.capture("capture_status", stream)?.0)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        let mut mode = raw_mode(mode) as u32;
        cuda!(self, "exchange_capture_mode", cuThreadExchangeStreamCaptureMode((&raw mut mode).cast()))?;
        Ok(match mode {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            _ => CaptureMode::Relaxed,
        })
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<NodeHandle>> {
        const CALL: &str = "graph_nodes";
        let mut count = 0;
        cuda!(self, CALL, cuGraphGetNodes(raw_graph(graph), std::ptr::null_mut(), &raw mut count))?;
        if count == 0 {
            return Ok(Vec::new()); // asking for none is an error
        }
        let mut nodes = vec![std::ptr::null_mut(); count];
        cuda!(self, CALL, cuGraphGetNodes(raw_graph(graph), nodes.as_mut_ptr(), &raw mut count))?;
        nodes.truncate(count);
        Ok(nodes.into_iter().map(node_handle).collect())
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        const CALL: &str = "graph_edges";
        let null = std::ptr::null_mut::<sys::CUgraphNode>();
        let mut count = 0;
        cuda!(self, CALL, cuGraphGetEdges_v2(raw_graph(graph), null, null, std::ptr::null_mut(), &raw mut count))?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut from = vec![std::ptr::null_mut(); count];
        let mut to = from.clone();
        // SAFETY: plain numbers, for which zero is a value.
        let mut data: Vec<sys::CUgraphEdgeData> = vec![unsafe { std::mem::zeroed() }; count];
        cuda!(
            self,
            CALL,
            cuGraphGetEdges_v2(raw_graph(graph), from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &raw mut count)
        )?;
        let programmatic = sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8;
        let edges = from.into_iter().zip(to).zip(data).take(count).map(|((from, to), data)| Edge {
            from: node_handle(from),
            to: node_handle(to),
            programmatic: data.type_ == programmatic,
        });
        Ok(edges.collect())
    }

    fn node(&self, node: NodeHandle) -> DriverResult<Node> {
        const CALL: &str = "node";
        use sys::CUgraphNodeType as Type;
        let node = raw_node(node);
        // Most nodes are kernels, and nodes of another kind are refused: that saves a call a node.
        if let Ok(params) = self.kernel_params(CALL, node) {
            return self.kernel_node(CALL, node, params);
        }
        // As a number: later drivers have types that this build does not know.
        let mut kind = 0u32;
        cuda!(self, CALL, cuGraphNodeGetType(node, (&raw mut kind).cast()))?;
        let is = |known: Type| kind == known as u32;
        if is(Type::CU_GRAPH_NODE_TYPE_KERNEL) {
            self.kernel_node(CALL, node, self.kernel_params(CALL, node)?)
        } else if is(Type::CU_GRAPH_NODE_TYPE_MEMCPY) {
            self.copy_node(CALL, node)
        } else if is(Type::CU_GRAPH_NODE_TYPE_MEMSET) {
            self.set_node(CALL, node)
        } else if is(Type::CU_GRAPH_NODE_TYPE_HOST) {
            Ok(Node::Host)
        } else if is(Type::CU_GRAPH_NODE_TYPE_EMPTY) {
            Ok(Node::Empty)
        } else if is(Type::CU_GRAPH_NODE_TYPE_MEM_ALLOC) || is(Type::CU_GRAPH_NODE_TYPE_MEM_FREE) {
            Ok(Node::Alloc)
        } else if is(Type::CU_GRAPH_NODE_TYPE_GRAPH) {
            let mut child: sys::CUgraph = std::ptr::null_mut();
            cuda!(self, CALL, cuGraphChildGraphNodeGetGraph(node, &raw mut child))?;
            Ok(Node::Child(GraphHandle(child.expose_provenance() as u64)))
        } else if is(Type::CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
            let mut event: sys::CUevent = std::ptr::null_mut();
            cuda!(self, CALL, cuGraphEventRecordNodeGetEvent(node, &raw mut event))?;
            Ok(Node::EventRecord(EventHandle(event.expose_provenance() as u64)))
        } else if is(Type::CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
            let mut event: sys::CUevent = std::ptr::null_mut();
            cuda!(self, CALL, cuGraphEventWaitNodeGetEvent(node, &raw mut event))?;
            Ok(Node::EventWait(EventHandle(event.expose_provenance() as u64)))
        } else {
            Ok(Node::Unknown(kind))
        }
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        cuda!(self, "graph_destroy", cuGraphDestroy(raw_graph(graph)))
    }

    fn instantiate(&self, graph: GraphHandle) -> DriverResult<ExecHandle> {
        let mut exec: sys::CUgraphExec = std::ptr::null_mut();
        cuda!(self, "instantiate", cuGraphInstantiateWithFlags(&raw mut exec, raw_graph(graph), 0))?;
        let exec = ExecHandle(exec.expose_provenance() as u64);
        // The handle may have been another's.
        self.names.lock().remove(&exec.0);
        Ok(exec)
    }

    fn exec_update(&self, exec: ExecHandle, graph: GraphHandle) -> DriverResult<UpdateResult> {
        const UPDATE_FAILURE: u32 = 910;
        let mut info = MaybeUninit::<sys::CUgraphExecUpdateResultInfo>::zeroed();
        // SAFETY: as all calls; the result is read as a number below, whatever a later driver puts there.
        let status = unsafe { sys::cuGraphExecUpdate_v2(raw_exec(exec), raw_graph(graph), info.as_mut_ptr()) };
        if status as u32 != UPDATE_FAILURE {
            self.check("exec_update", status)?;
            return Ok(UpdateResult::Updated);
        }
        // SAFETY: the field is a 32-bit number in C.
        let result = unsafe { (&raw const (*info.as_ptr()).result).cast::<u32>().read() };
        Ok(match result {
            2 => UpdateResult::TopologyChanged,
            3 => UpdateResult::NodeTypeChanged,
            4 | 7 => UpdateResult::FunctionChanged,
            5 | 8 => UpdateResult::ParametersChanged,
            _ => UpdateResult::NotSupported,
        })
    }

    fn upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        cuda!(self, "upload", cuGraphUpload(raw_exec(exec), raw_stream(stream)))
    }

    fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        let call = || cuda!(self, "launch", cuGraphLaunch(raw_exec(exec), raw_stream(stream)));
        self.queue(Note::Graph, exec.0, stream, call)
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        cuda!(self, "exec_destroy", cuGraphExecDestroy(raw_exec(exec)))
    }
}
