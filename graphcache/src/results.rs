//! Results that a caller may keep: where they are, and whether a launch would write over one that is held.

use std::any::{Any, TypeId};
use std::sync::Arc;

use evergraph_pool::handshake::Lease;
use evergraph_pool::{Arena, ArenaGraph, DeviceSlice, Element, Output, ScratchPolicy};
use smallvec::SmallVec;

use crate::scope::{Made, Notes, Span};
use crate::{CacheError, Request};

/// Where a captured graph leaves its results, and its place in its arena.
#[derive(Debug, Default)]
pub(crate) struct Results {
    arena: Option<Arena>,
    /// All that it writes there.
    spans: Vec<Span>,
    made: SmallVec<[(TypeId, Span); 2]>,
    graph: Option<Arc<ArenaGraph>>,
}

impl Results {
    /// Those of a capture that has just ended. The slices go, into the arena, before the window is closed: what the graph
    /// leaves there is reached through its arena from now on.
    pub(crate) fn of(request: &Request<'_>, notes: &Notes) -> Self {
        let made = notes.outputs.take().into_iter().map(|made| ((*made.slice).type_id(), made.span)).collect();
        let ScratchPolicy::Shared(arena) = &request.policy else { return Self::default() };
        Self { arena: Some(arena.clone()), spans: notes.handed.borrow().clone(), made, graph: None }
    }

    /// Takes the graph's place in the arena, with the lease that it is launched under.
    pub(crate) fn enlist(&mut self, lease: &Arc<Lease>) {
        self.graph = self.arena.as_ref().map(|arena| arena.enlist(lease, &self.spans));
    }

    /// Whether a launch would write over nothing that somebody holds. Asked under the lease.
    #[inline]
    pub(crate) fn may_launch(&self) -> bool {
        self.graph.as_ref().is_none_or(|graph| graph.may_launch())
    }

    /// Notes a launch, under the lease.
    #[inline]
    pub(crate) fn note_launch(&self) {
        if let Some(graph) = &self.graph {
            graph.note_launch();
        }
    }

    pub(crate) fn hold<T: Element>(&self, index: usize) -> Result<Output<T>, CacheError> {
        let found = self.made.get(index).filter(|(ty, _)| *ty == TypeId::of::<DeviceSlice<T>>());
        let (Some((_, (ptr, bytes))), Some(graph)) = (found, &self.graph) else {
            return Err(CacheError::NoOutput { index });
        };
        Ok(graph.hold(*ptr, *bytes)?)
    }
}

/// A result of a run without a graph: a slice of its own, which nobody writes over.
pub(crate) fn own<T: Element>(made: &[Made], index: usize) -> Result<Output<T>, CacheError> {
    let slice = made.get(index).map(|made| Arc::clone(&made.slice) as Arc<dyn Any + Send + Sync>);
    let slice = slice.and_then(|slice| slice.downcast::<DeviceSlice<T>>().ok());
    slice.map(Output::of).ok_or(CacheError::NoOutput { index })
}
