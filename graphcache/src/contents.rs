//! What a captured graph refers to, for people and for tests.

use evergraph_pool::driver::{DevicePtr, DynDriver, GraphHandle};

use crate::CacheError;
use crate::scan::{Found, Layouts, NodeShape, scan};

/// What could be read out of a captured graph, child graphs included.
///
/// The cache makes the same walk after every capture, and compares it with what was declared and handed out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Contents {
    /// How many nodes it has, children's included.
    pub nodes: usize,
    /// How many of them are kernels.
    pub kernels: usize,
    /// Words that may be device addresses, each once. Numbers that are none are among them: see whose they are with
    /// [`Pool::resolve_many`](evergraph_pool::Pool::resolve_many).
    pub words: Vec<Word>,
    /// Host addresses of copies, each once.
    pub host: Vec<Word>,
    /// Why it can not be read to its end, if so.
    pub opaque: Option<String>,
    /// A node whose data only its owner knows (a host function, an event), if there is one.
    pub needs_owner: Option<String>,
}

/// A word of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Word {
    /// The word.
    pub address: DevicePtr,
    /// The first node that has it, for people.
    pub node: String,
}

impl Contents {
    /// Reads a graph that was captured and not destroyed yet.
    ///
    /// # Errors
    /// `AllocationNode`; those of the driver.
    pub fn read(driver: &DynDriver, graph: GraphHandle) -> Result<Self, CacheError> {
        driver.bind()?;
        // The first page is nobody's: small numbers are sizes.
        let scan = scan(driver, graph, &Layouts::default(), 0x1000..=u64::MAX)?;
        let words = |found: &[Found]| {
            let word = |f: &Found| Word { address: DevicePtr(f.address), node: f.node_name() };
            found.iter().map(word).collect()
        };
        let nodes = &scan.shape.nodes;
        Ok(Self {
            nodes: nodes.len(),
            kernels: nodes.iter().filter(|node| matches!(node, NodeShape::Kernel { .. })).count(),
            words: words(&scan.pointers),
            host: words(&scan.host),
            opaque: scan.opaque,
            needs_owner: scan.needs_owner,
        })
    }
}
