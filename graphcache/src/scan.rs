//! Reads a captured graph back: every pointer in it, and what it does without its pointers.

use std::collections::hash_map::Entry;
use std::ops::RangeInclusive;
use std::sync::Arc;

use evergraph_pool::driver::{
    CopySide, DevicePtr, DynDriver, Edge, FunctionHandle, GraphHandle, HandleMap, LaunchConfig, Node, NodeArgs,
    NodeHandle, ParamLayout,
};
use evergraph_pool::mutant;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::CacheError;

/// What a graph refers to.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// Words that may be device pointers, each value once, with the first node that has it.
    pub(crate) pointers: Vec<Found>,
    /// Host addresses that copies use.
    pub(crate) host: Vec<Found>,
    /// Why the graph can not be read to its end: first reason only.
    pub(crate) opaque: Option<String>,
    /// Nodes with data that only their owner knows (host functions, events).
    pub(crate) needs_owner: Option<String>,
    /// What the graph does, without its pointers.
    pub(crate) shape: Shape,
}

/// A word in a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) address: u64,
    /// Index of the node in reading order.
    pub(crate) node: u32,
    pub(crate) what: What,
}

/// Kinds of nodes, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum What {
    Kernel,
    Copy,
    Set,
}

impl Found {
    pub(crate) fn node_name(&self) -> String {
        let what = match self.what {
            What::Kernel => "kernel",
            What::Copy => "copy",
            What::Set => "memset",
        };
        format!("node {} ({what})", self.node)
    }
}

/// A graph without its pointers and values: what an exec-update must find unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Shape {
    pub(crate) nodes: Vec<NodeShape>,
    /// Edges by node index, children's after their parent's.
    pub(crate) edges: Vec<(u32, u32)>,
}

/// A node without its pointers and values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NodeShape {
    Kernel {
        function: FunctionHandle,
        config: LaunchConfig,
        bytes: usize,
    },
    Copy {
        to_host: bool,
        from_host: bool,
    },
    Set,
    Child {
        nodes: u32,
    },
    Empty,
    /// Nothing proves that two of these are alike.
    Unproven,
}

/// Where the pointers of each function lie in its packed arguments. Kept across captures.
#[derive(Debug, Default)]
pub(crate) struct Layouts(Mutex<HandleMap<FunctionHandle, Words>>);

#[derive(Debug)]
struct Words {
    layout: Option<Arc<ParamLayout>>,
    bytes: usize,
    offsets: SmallVec<[u32; 16]>,
}

impl Words {
    /// Offsets of words that may be pointers.
    fn new(layout: Option<&Arc<ParamLayout>>, bytes: usize) -> Self {
        // Without a layout, every aligned word: a false hit costs a look-up, or pins what is not needed.
        let mut offsets: SmallVec<[u32; 16]> = SmallVec::new();
        match layout {
            Some(layout) => offsets.extend(layout.words().map(|(_, offset)| offset)),
            None => offsets.extend((0..bytes as u32 / 8).map(|i| 8 * i)),
        }
        offsets.sort_unstable();
        offsets.dedup();
        Self { layout: layout.cloned(), bytes, offsets }
    }

    /// Those of a function. A handle may come back as another function's, so the layout is looked at too.
    fn of<'a>(
        known: &'a mut HandleMap<FunctionHandle, Self>,
        function: FunctionHandle,
        layout: Option<&Arc<ParamLayout>>,
        bytes: usize,
    ) -> &'a Self {
        let same =
            |layout: &Arc<ParamLayout>, words: &Self| words.layout.as_ref().is_some_and(|l| Arc::ptr_eq(l, layout));
        let fits = |words: &Self| {
            words.bytes == bytes
                && match layout {
                    None => words.layout.is_none(),
                    Some(layout) => same(layout, words) || words.layout.as_ref() == Some(layout),
                }
        };
        match known.entry(function) {
            Entry::Occupied(entry) => {
                let words = entry.into_mut();
                if !fits(words) {
                    *words = Self::new(layout, bytes);
                }
                words
            }
            Entry::Vacant(entry) => entry.insert(Self::new(layout, bytes)),
        }
    }
}

/// Walks every node of `graph`, children included. Words outside of `span`, where no pool has anything, are not
/// kept.
///
/// # Errors
/// `AllocationNode`; those of the driver.
pub(crate) fn scan(
    driver: &DynDriver,
    graph: GraphHandle,
    layouts: &Layouts,
    span: RangeInclusive<u64>,
) -> Result<Scan, CacheError> {
    let mut scan = Scan::default();
    // Taken along, so that no lock is held or taken a node: whoever scans meanwhile works them out again.
    let mut known = std::mem::take(&mut *layouts.0.lock());
    let walked = Walk { driver, known: &mut known, span, seen: HandleMap::default(), scan: &mut scan }.graph(graph, 0);
    let mut kept = layouts.0.lock();
    if kept.len() < known.len() {
        *kept = known;
    }
    drop(kept);
    walked?;
    if mutant::is("cache.scan-off") {
        scan.pointers.clear();
        scan.host.clear();
    }
    Ok(scan)
}

/// Graphs nest by hand; deeper than this is no graph of ours.
const MAX_DEPTH: u32 = 16;

/// A walk that goes on.
struct Walk<'a> {
    driver: &'a DynDriver,
    known: &'a mut HandleMap<FunctionHandle, Words>,
    span: RangeInclusive<u64>,
    /// Words that were found before: a decode step names its buffers again and again.
    seen: HandleMap<u64, ()>,
    scan: &'a mut Scan,
}

impl Walk<'_> {
    fn graph(&mut self, graph: GraphHandle, depth: u32) -> Result<(), CacheError> {
        let driver = self.driver;
        let nodes = driver.graph_nodes(graph)?;
        let mut places: HandleMap<NodeHandle, u32> = HandleMap::default();
        places.reserve(nodes.len());
        self.scan.shape.nodes.reserve(nodes.len());
        for handle in nodes {
            let index = self.scan.shape.nodes.len() as u32;
            places.insert(handle, index);
            let shape = match driver.node(handle)? {
                Node::Kernel { function, config, args: NodeArgs::Packed { bytes, layout } } => {
                    self.arguments(function, layout.as_ref(), &bytes, index);
                    NodeShape::Kernel { function, config, bytes: bytes.len() }
                }
                Node::Kernel { args: NodeArgs::Unreadable, .. } => {
                    self.scan.opaque(format!("the arguments of node {index} can not be read"));
                    NodeShape::Unproven
                }
                Node::Copy { dst, src, .. } => {
                    for side in [dst, src] {
                        self.side(side, index);
                    }
                    NodeShape::Copy {
                        to_host: matches!(dst, CopySide::Host(_)),
                        from_host: matches!(src, CopySide::Host(_)),
                    }
                }
                Node::Set { dst, .. } => {
                    self.word(dst.0, index, What::Set);
                    NodeShape::Set
                }
                Node::Child(_) if depth >= MAX_DEPTH => {
                    self.scan.opaque(format!("node {index} is a graph nested deeper than {MAX_DEPTH}"));
                    NodeShape::Unproven
                }
                Node::Child(child) => {
                    self.scan.shape.nodes.push(NodeShape::Empty);
                    if !mutant::is("cache.child-graphs-unscanned") {
                        self.graph(child, depth + 1)?;
                    }
                    let nodes = self.scan.shape.nodes.len() as u32 - index - 1;
                    self.scan.shape.nodes[index as usize] = NodeShape::Child { nodes };
                    continue;
                }
                Node::Host => {
                    self.scan.needs_owner.get_or_insert_with(|| format!("node {index} calls a host function"));
                    NodeShape::Unproven
                }
                Node::EventRecord(_) | Node::EventWait(_) => {
                    self.scan.needs_owner.get_or_insert_with(|| format!("node {index} uses an event"));
                    NodeShape::Unproven
                }
                Node::Empty => NodeShape::Empty,
                Node::Alloc => return Err(CacheError::AllocationNode),
                Node::Unknown(number) => {
                    self.scan.opaque(format!("node {index} is of an unknown kind ({number})"));
                    NodeShape::Unproven
                }
                _ => {
                    self.scan.opaque(format!("node {index} is of an unknown kind"));
                    NodeShape::Unproven
                }
            };
            self.scan.shape.nodes.push(shape);
        }
        let shape = &mut self.scan.shape;
        for Edge { from, to, programmatic } in driver.graph_edges(graph)? {
            let (Some(&from), Some(&to)) = (places.get(&from), places.get(&to)) else { continue };
            if programmatic && let Some(NodeShape::Kernel { config, .. }) = shape.nodes.get_mut(to as usize) {
                config.programmatic = true;
            }
            shape.edges.push((from, to));
        }
        Ok(())
    }

    fn arguments(&mut self, function: FunctionHandle, layout: Option<&Arc<ParamLayout>>, bytes: &[u8], node: u32) {
        for &offset in &Words::of(self.known, function, layout, bytes.len()).offsets {
            let Some(word) = bytes.get(offset as usize..).and_then(|bytes| bytes.first_chunk()) else { continue };
            let address = u64::from_ne_bytes(*word);
            if self.span.contains(&address) && self.seen.insert(address, ()).is_none() {
                self.scan.pointers.push(Found { address, node, what: What::Kernel });
            }
        }
    }

    fn side(&mut self, side: CopySide, node: u32) {
        if mutant::is("cache.copies-unscanned") {
            return;
        }
        match side {
            CopySide::Device(DevicePtr(address)) => self.word(address, node, What::Copy),
            CopySide::Host(address) => {
                // Whatever no pool knows needs an owner, so none is left out.
                if !self.scan.host.iter().any(|found| found.address == address) {
                    self.scan.host.push(Found { address, node, what: What::Copy });
                }
            }
        }
    }

    #[inline]
    fn word(&mut self, address: u64, node: u32, what: What) {
        if self.span.contains(&address) && self.seen.insert(address, ()).is_none() {
            self.scan.pointers.push(Found { address, node, what });
        }
    }
}

impl Scan {
    fn opaque(&mut self, why: String) {
        self.opaque.get_or_insert(why);
    }
}

impl Shape {
    /// Whether an exec made of `self` may be updated to a graph of shape `new` with nothing taken on trust: same
    /// nodes, same function handles, same readable attributes, same edges, and no node that can not be read.
    pub(crate) fn proves_update_to(&self, new: &Self) -> bool {
        self == new && !self.nodes.contains(&NodeShape::Unproven)
    }
}

#[cfg(test)]
mod tests;
