//! Graphs, their nodes, instantiation, update, launch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::HostDevice;
use super::machine::{Op, Record, State};
use super::space::Space;
use super::thread;
use super::work::Work;
use crate::driver::{
    CaptureMode, CaptureStatus, CopySide, DriverErrorKind as Kind, DriverResult, Edge, ExecHandle, GraphHandle, Graphs,
    Node, NodeArgs, NodeHandle, StreamHandle, UpdateResult,
};
use crate::mutant;

/// What a node does.
#[derive(Clone, Debug)]
pub(super) enum NodeWork {
    Work(Work),
    Child(Arc<GraphDef>),
}

/// One node; it depends on earlier ones, by index.
#[derive(Clone, Debug)]
pub(super) struct NodeDef {
    pub(super) device: u32,
    pub(super) work: NodeWork,
    pub(super) deps: SmallVec<[u32; 4]>,
}

/// A graph's content; never changes once captured.
#[derive(Debug)]
pub(super) struct GraphDef {
    pub(super) device: u32,
    pub(super) nodes: Vec<NodeDef>,
}

/// A live graph.
#[derive(Debug)]
pub(super) struct Graph {
    def: Arc<GraphDef>,
    /// Handles of the child graphs, by node.
    children: Vec<(u32, u64)>,
    /// Whether it is part of another graph, and lives and dies with it.
    pub(super) is_child: bool,
}

impl Graph {
    pub(super) fn device(&self) -> u32 {
        self.def.device
    }

    pub(super) fn def(&self) -> &Arc<GraphDef> {
        &self.def
    }
}

/// What an exec runs, in order; a launch takes it as it is then.
#[derive(Debug)]
pub(super) struct ExecBody {
    pub(super) work: Vec<(u32, Work)>,
    /// What it is called, for faults.
    pub(super) name: Mutex<Option<String>>,
}

/// A live exec.
#[derive(Debug)]
pub(super) struct Exec {
    pub(super) device: u32,
    def: Arc<GraphDef>,
    body: Arc<ExecBody>,
    last: Option<Arc<Record>>,
    charged_bytes: usize,
}

/// Bits of a node handle below the graph's.
const NODE_BITS: u32 = 24;

fn node_handle(graph: u64, index: u32) -> NodeHandle {
    NodeHandle(graph << NODE_BITS | u64::from(index + 1))
}

impl GraphDef {
    fn flatten(&self, into: &mut Vec<(u32, Work)>) {
        // Of the nodes that could run, the one that became ready last runs first: legal, and as far from the
        // order of capture as the edges allow, so that a missing edge shows.
        let mut waits: Vec<usize> = self.nodes.iter().map(|n| n.deps.len()).collect();
        let mut followers: Vec<SmallVec<[u32; 2]>> = vec![SmallVec::new(); self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for &dep in &node.deps {
                followers[dep as usize].push(index as u32);
            }
        }
        let mut ready: Vec<u32> = (0..self.nodes.len() as u32).filter(|&i| waits[i as usize] == 0).collect();
        if mutant::is("host.order-of-capture") {
            ready = (0..self.nodes.len() as u32).rev().collect();
            waits.fill(usize::MAX);
        }
        while let Some(index) = ready.pop() {
            let node = &self.nodes[index as usize];
            match &node.work {
                NodeWork::Work(work) => into.push((node.device, work.clone())),
                NodeWork::Child(child) => child.flatten(into),
            }
            for &next in &followers[index as usize] {
                waits[next as usize] -= 1;
                if waits[next as usize] == 0 {
                    ready.push(next);
                }
            }
        }
    }

    fn body(&self) -> ExecBody {
        let mut work = Vec::with_capacity(self.nodes.len());
        self.flatten(&mut work);
        ExecBody { work, name: Mutex::default() }
    }

    /// The driver's rules for putting `new` into an exec made from this graph.
    fn accepts(&self, new: &Self, space: &Space) -> UpdateResult {
        if self.nodes.len() != new.nodes.len() {
            return UpdateResult::TopologyChanged;
        }
        for (old, new) in self.nodes.iter().zip(&new.nodes) {
            if old.deps != new.deps {
                return UpdateResult::TopologyChanged;
            }
            let result = accepts_node(old, new, space);
            if result != UpdateResult::Updated {
                return result;
            }
        }
        UpdateResult::Updated
    }
}

fn accepts_node(old: &NodeDef, new: &NodeDef, space: &Space) -> UpdateResult {
    let (old_work, new_work) = match (&old.work, &new.work) {
        (NodeWork::Child(old), NodeWork::Child(new)) => return old.accepts(new, space),
        (NodeWork::Work(old), NodeWork::Work(new)) => (old, new),
        _ => return UpdateResult::NodeTypeChanged,
    };
    let moved = |old: CopySide, new: CopySide| match (old, new) {
        (CopySide::Device(old), CopySide::Device(new)) => {
            space.home(old.0).zip(space.home(new.0)).is_some_and(|(old, new)| old != new)
        }
        (CopySide::Host(_), CopySide::Host(_)) => false,
        _ => true,
    };
    let fine = match (old_work, new_work) {
        (Work::Kernel(a), Work::Kernel(b)) => {
            if old.device != new.device {
                return UpdateResult::FunctionChanged;
            }
            // A programmatic start is an edge of another kind, where there is an edge.
            let edge = !old.deps.is_empty() && !mutant::is("host.programmatic-edges-alike");
            if edge && a.config.programmatic != b.config.programmatic {
                return UpdateResult::TopologyChanged;
            }
            a.config.cooperative == b.config.cooperative
        }
        (Work::Copy(a), Work::Copy(b)) => {
            !moved(a.dst, b.dst) && !moved(a.src, b.src) && (a.dst_device, a.src_device) == (b.dst_device, b.src_device)
        }
        (Work::Set(a), Work::Set(b)) => !moved(CopySide::Device(a.dst), CopySide::Device(b.dst)),
        (Work::Host(_), Work::Host(_)) => true,
        _ => return UpdateResult::NodeTypeChanged,
    };
    if fine && old.device == new.device { UpdateResult::Updated } else { UpdateResult::ParametersChanged }
}

impl State {
    /// Makes a graph live, its child graphs with it.
    pub(super) fn insert_graph(&mut self, def: Arc<GraphDef>) -> GraphHandle {
        let mut children = Vec::new();
        for (index, node) in def.nodes.iter().enumerate() {
            if let NodeWork::Child(child) = &node.work {
                let child = self.insert_graph(child.clone());
                if let Some(child) = self.graphs.get_mut(child.0) {
                    child.is_child = true;
                }
                children.push((index as u32, child.0));
            }
        }
        GraphHandle(self.graphs.insert(Graph { def, children, is_child: false }))
    }

    /// Takes a graph and its children out; the caller drops them without the lock.
    fn remove_graph(&mut self, handle: u64) -> Vec<Graph> {
        let mut gone = Vec::new();
        let mut open = VecDeque::from([handle]);
        while let Some(handle) = open.pop_front() {
            if let Some(graph) = self.graphs.remove(handle) {
                open.extend(graph.children.iter().map(|&(_, child)| child));
                gone.push(graph);
            }
        }
        gone
    }
}

impl HostDevice {
    pub(super) fn graph<'s>(
        &self,
        call: &'static str,
        state: &'s State,
        graph: GraphHandle,
    ) -> DriverResult<&'s Graph> {
        let found = state.graphs.get(graph.0).filter(|graph| graph.def.device == self.ordinal());
        found.ok_or_else(|| self.err(call, Kind::InvalidHandle("graph")))
    }

    pub(super) fn set_exec_name(&self, exec: ExecHandle, name: &str) {
        let mut state = self.machine.state.lock();
        if let Ok(exec) = self.exec("name_exec", &mut state, exec) {
            *exec.body.name.lock() = Some(name.to_owned());
        }
    }

    fn exec<'s>(&self, call: &'static str, state: &'s mut State, exec: ExecHandle) -> DriverResult<&'s mut Exec> {
        let found = state.execs.get_mut(exec.0).filter(|exec| exec.device == self.ordinal());
        found.ok_or_else(|| self.err(call, Kind::InvalidHandle("exec")))
    }

    /// Hidden launch attributes that an exec's kernel nodes really run with, in execution order. No driver has this
    /// call; tests use it to see what an update kept.
    pub fn exec_hidden_attributes(&self, exec: ExecHandle) -> DriverResult<Vec<u32>> {
        let mut state = self.machine.state.lock();
        let exec = self.exec("exec_hidden_attributes", &mut state, exec)?;
        Ok(exec
            .body
            .work
            .iter()
            .filter_map(|(_, w)| if let Work::Kernel(k) = w { Some(k.hidden) } else { None })
            .collect())
    }
}

impl Graphs for HostDevice {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        self.capture_begin(stream, mode)
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        self.capture_end(stream)
    }

    fn add_child(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()> {
        self.capture_child(stream, graph)
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        self.capture_state(stream)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.enter("exchange_capture_mode")?;
        Ok(thread::exchange_mode(&self.machine.token, mode))
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<NodeHandle>> {
        const CALL: &str = "graph_nodes";
        self.enter(CALL)?;
        let state = self.machine.state.lock();
        let count = self.graph(CALL, &state, graph)?.def.nodes.len();
        Ok((0..count as u32).map(|index| node_handle(graph.0, index)).collect())
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        const CALL: &str = "graph_edges";
        self.enter(CALL)?;
        let state = self.machine.state.lock();
        let nodes = &self.graph(CALL, &state, graph)?.def.nodes;
        let edges = nodes.iter().enumerate().flat_map(|(to, node)| {
            let to = node_handle(graph.0, to as u32);
            node.deps.iter().map(move |&from| Edge { from: node_handle(graph.0, from), to, programmatic: false })
        });
        Ok(edges.collect())
    }

    fn node(&self, node: NodeHandle) -> DriverResult<Node> {
        const CALL: &str = "node";
        self.enter(CALL)?;
        let state = self.machine.state.lock();
        let invalid = || self.err(CALL, Kind::InvalidHandle("node"));
        let index = ((node.0 & ((1 << NODE_BITS) - 1)) as u32).checked_sub(1).ok_or_else(invalid)?;
        let graph = state.graphs.get(node.0 >> NODE_BITS).ok_or_else(invalid)?;
        let def = graph.def.nodes.get(index as usize).ok_or_else(invalid)?;
        Ok(match &def.work {
            NodeWork::Child(_) => {
                let child = graph.children.iter().find(|(at, _)| *at == index).ok_or_else(invalid)?;
                Node::Child(GraphHandle(child.1))
            }
            NodeWork::Work(Work::Kernel(kernel)) => {
                let function = &kernel.function;
                let args = if function.args_readable.load(Ordering::Relaxed) {
                    let layout = function.layout_readable.load(Ordering::Relaxed).then(|| function.layout.clone());
                    NodeArgs::Packed { bytes: kernel.args.as_slice().into(), layout }
                } else {
                    NodeArgs::Unreadable
                };
                Node::Kernel { function: kernel.handle, config: kernel.config, args }
            }
            NodeWork::Work(Work::Copy(copy)) => Node::Copy { dst: copy.dst, src: copy.src, bytes: copy.bytes },
            NodeWork::Work(Work::Set(set)) => Node::Set { dst: set.dst, bytes: set.bytes() },
            NodeWork::Work(Work::Host(_)) => Node::Host,
        })
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        const CALL: &str = "graph_destroy";
        self.enter(CALL)?;
        let gone = {
            let mut state = self.machine.state.lock();
            self.strictly_not_capturing(CALL, &mut state)?;
            if self.graph(CALL, &state, graph)?.is_child {
                return Err(self.err(CALL, Kind::InvalidValue("a child graph goes with its parent")));
            }
            state.remove_graph(graph.0)
        };
        drop(gone);
        Ok(())
    }

    fn instantiate(&self, graph: GraphHandle) -> DriverResult<ExecHandle> {
        const CALL: &str = "instantiate";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.not_capturing(CALL, &mut state)?;
        let def = self.graph(CALL, &state, graph)?.def.clone();
        let body = def.body();
        let charged_bytes = body.work.len().saturating_mul(self.machine.config.exec_bytes_per_node);
        let charged = self.machine.space.write().charge_hidden(self.ordinal(), charged_bytes);
        charged.map_err(|kind| self.err(CALL, kind))?;
        let exec = Exec { device: self.ordinal(), def, body: Arc::new(body), last: None, charged_bytes };
        Ok(ExecHandle(state.execs.insert(exec)))
    }

    fn exec_update(&self, exec: ExecHandle, graph: GraphHandle) -> DriverResult<UpdateResult> {
        const CALL: &str = "exec_update";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.strictly_not_capturing(CALL, &mut state)?;
        let new = self.graph(CALL, &state, graph)?.def.clone();
        let exec = self.exec(CALL, &mut state, exec)?;
        let result = exec.def.accepts(&new, &self.machine.space.read());
        if result != UpdateResult::Updated && !mutant::is("host.update-takes-anything") {
            return Ok(result);
        }
        let mut body = new.body();
        // What no getter shows, no update carries over.
        for ((_, new), (_, old)) in body.work.iter_mut().zip(&exec.body.work) {
            if let (Work::Kernel(new), Work::Kernel(old)) = (new, old)
                && !mutant::is("host.update-carries-hidden")
            {
                new.hidden = old.hidden;
            }
        }
        body.name = Mutex::new(exec.body.name.lock().take());
        let old_body = std::mem::replace(&mut exec.body, Arc::new(body));
        let old_def = std::mem::replace(&mut exec.def, new);
        drop(state);
        drop((old_body, old_def));
        Ok(UpdateResult::Updated)
    }

    fn upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "upload";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        self.exec(CALL, &mut state, exec)?;
        self.stream_not_capturing(CALL, &mut state, key)?;
        self.strictly_not_capturing(CALL, &mut state)
    }

    fn launch(&self, handle: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "launch";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        self.exec(CALL, &mut state, handle)?;
        self.stream_not_capturing(CALL, &mut state, key)?;
        let exec = self.exec(CALL, &mut state, handle)?;
        let done = Record::new(key);
        let after = exec.last.clone().filter(|last| !last.is_done() && !mutant::is("host.runs-overlap"));
        let body = exec.body.clone();
        self.push(CALL, &mut state, key, Op::Graph { body, after, done: done.clone(), next: 0 })?;
        self.exec(CALL, &mut state, handle)?.last = Some(done);
        Ok(())
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        const CALL: &str = "exec_destroy";
        self.enter(CALL)?;
        let gone = {
            let mut state = self.machine.state.lock();
            self.not_capturing(CALL, &mut state)?;
            let charged_bytes = self.exec(CALL, &mut state, exec)?.charged_bytes;
            self.machine.space.write().credit_hidden(self.ordinal(), charged_bytes);
            state.execs.remove(exec.0)
        };
        drop(gone);
        Ok(())
    }
}
