//! Reads a captured graph back: every pointer in it, and what it does without its pointers.

use std::collections::HashMap;
use std::sync::Arc;

use evergraph_pool::driver::{
    CopySide, DevicePtr, DynDriver, FunctionHandle, GraphHandle, LaunchConfig, Node, NodeArgs, NodeHandle, ParamLayout,
};
use evergraph_pool::mutant;
use parking_lot::Mutex;

use crate::CacheError;

/// What a graph refers to.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// Words that may be device pointers, with the node they came from. Each value once.
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

/// Where the pointers of each function lie in its packed arguments. Kept across captures: reading 300 nodes
/// should take tens of µs.
#[derive(Debug, Default)]
pub(crate) struct Layouts(Mutex<HashMap<FunctionHandle, Arc<Words>>>);

#[derive(Debug)]
struct Words {
    layout: Option<Arc<ParamLayout>>,
    bytes: usize,
    offsets: Vec<u32>,
}

impl Layouts {
    /// Offsets of words that may be pointers.
    fn words(&self, function: FunctionHandle, layout: Option<&Arc<ParamLayout>>, bytes: usize) -> Arc<Words> {
        let mut known = self.0.lock();
        if let Some(words) = known.get(&function)
            && words.bytes == bytes
            && words.layout.as_ref() == layout
        {
            return Arc::clone(words);
        }
        // By layout: parameters of 8 bytes, and every word of longer ones (structs by value). Packed, as every
        // aligned word: a driver's layout may be absent, and a false hit costs a look-up.
        let mut offsets: Vec<u32> = Vec::new();
        for param in layout.iter().flat_map(|l| &l.params).filter(|p| p.bytes >= 8) {
            offsets.extend((0..param.bytes / 8).map(|i| param.offset + 8 * i));
        }
        offsets.extend((0..bytes as u32 / 8).map(|i| 8 * i));
        offsets.sort_unstable();
        offsets.dedup();
        let words = Arc::new(Words { layout: layout.cloned(), bytes, offsets });
        known.insert(function, Arc::clone(&words));
        words
    }
}

/// Walks every node of `graph`, children included.
///
/// # Errors
/// `AllocationNode`; those of the driver.
pub(crate) fn scan(driver: &DynDriver, graph: GraphHandle, layouts: &Layouts) -> Result<Scan, CacheError> {
    let mut scan = Scan::default();
    walk(driver, graph, layouts, &mut scan, 0)?;
    if mutant::is("cache.scan-off") {
        scan.pointers.clear();
        scan.host.clear();
    }
    for found in [&mut scan.pointers, &mut scan.host] {
        found.sort_unstable_by_key(|f| (f.address, f.node));
        found.dedup_by_key(|f| f.address);
    }
    Ok(scan)
}

/// Graphs nest by hand; deeper than this is no graph of ours.
const MAX_DEPTH: u32 = 16;

fn walk(
    driver: &DynDriver,
    graph: GraphHandle,
    layouts: &Layouts,
    scan: &mut Scan,
    depth: u32,
) -> Result<(), CacheError> {
    let nodes = driver.graph_nodes(graph)?;
    let mut places: HashMap<NodeHandle, u32> = HashMap::with_capacity(nodes.len());
    for handle in nodes {
        let index = scan.shape.nodes.len() as u32;
        places.insert(handle, index);
        let shape = match driver.node(handle)? {
            Node::Kernel { function, config, args: NodeArgs::Packed { bytes, layout } } => {
                for &offset in &layouts.words(function, layout.as_ref(), bytes.len()).offsets {
                    scan.word(&bytes, offset as usize, index);
                }
                NodeShape::Kernel { function, config, bytes: bytes.len() }
            }
            Node::Kernel { args: NodeArgs::Unreadable, .. } => {
                scan.opaque(format!("the arguments of node {index} can not be read"));
                NodeShape::Unproven
            }
            Node::Copy { dst, src, .. } => {
                for side in [dst, src] {
                    scan.side(side, index);
                }
                NodeShape::Copy {
                    to_host: matches!(dst, CopySide::Host(_)),
                    from_host: matches!(src, CopySide::Host(_)),
                }
            }
            Node::Set { dst, .. } => {
                scan.pointers.push(Found { address: dst.0, node: index, what: What::Set });
                NodeShape::Set
            }
            Node::Child(_) if depth >= MAX_DEPTH => {
                scan.opaque(format!("node {index} is a graph nested deeper than {MAX_DEPTH}"));
                NodeShape::Unproven
            }
            Node::Child(child) => {
                scan.shape.nodes.push(NodeShape::Empty);
                if !mutant::is("cache.child-graphs-unscanned") {
                    walk(driver, child, layouts, scan, depth + 1)?;
                }
                let nodes = scan.shape.nodes.len() as u32 - index - 1;
                scan.shape.nodes[index as usize] = NodeShape::Child { nodes };
                continue;
            }
            Node::Host => {
                scan.needs_owner.get_or_insert_with(|| format!("node {index} calls a host function"));
                NodeShape::Unproven
            }
            Node::EventRecord(_) | Node::EventWait(_) => {
                scan.needs_owner.get_or_insert_with(|| format!("node {index} uses an event"));
                NodeShape::Unproven
            }
            Node::Empty => NodeShape::Empty,
            Node::Alloc => return Err(CacheError::AllocationNode),
            Node::Unknown(number) => {
                scan.opaque(format!("node {index} is of an unknown kind ({number})"));
                NodeShape::Unproven
            }
            _ => {
                scan.opaque(format!("node {index} is of an unknown kind"));
                NodeShape::Unproven
            }
        };
        scan.shape.nodes.push(shape);
    }
    let edges = driver.graph_edges(graph)?;
    scan.shape.edges.extend(edges.iter().filter_map(|(from, to)| Some((*places.get(from)?, *places.get(to)?))));
    Ok(())
}

impl Scan {
    fn word(&mut self, bytes: &[u8], offset: usize, node: u32) {
        let Some(word) = bytes.get(offset..offset + 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes) else {
            return;
        };
        // Small numbers are sizes and counts: no device maps the first page.
        if word >= 4096 {
            self.pointers.push(Found { address: word, node, what: What::Kernel });
        }
    }

    fn side(&mut self, side: CopySide, node: u32) {
        if mutant::is("cache.copies-unscanned") {
            return;
        }
        match side {
            CopySide::Device(DevicePtr(address)) => {
                self.pointers.push(Found { address, node, what: What::Copy });
            }
            CopySide::Host(address) => self.host.push(Found { address, node, what: What::Copy }),
        }
    }

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
