//! Scratch shared by graphs that never overlap.

use std::sync::Arc;

use crate::Stream;
use crate::outputs::Book;
use crate::shared::Shared;

/// Scratch memory shared by the graphs of one stream, which therefore never run at the same time. Its size is
/// that of the largest of them, not of their sum.
///
/// A slice that outlives its window is an error there. A result that a caller keeps is [held](crate::ArenaGraph::hold)
/// instead, and while it is, no graph is launched that would write over it.
#[derive(Clone, Debug)]
pub struct Arena(pub(crate) Arc<ArenaInner>);

#[derive(Debug)]
pub(crate) struct ArenaInner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) index: usize,
    pub(crate) stream: Stream,
    pub(crate) book: Arc<Book>,
}

impl Arena {
    /// The stream that its graphs run on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// How much memory it has gathered, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.shared.arena_bytes(self.0.index)
    }
}

impl Drop for ArenaInner {
    fn drop(&mut self) {
        self.shared.drop_arena(self.index);
    }
}

/// What happens to memory handed out inside a capture window.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum ScratchPolicy {
    /// It is the graph's until the graph is gone.
    #[default]
    Pin,
    /// It comes from an arena and stays there, for the next graph on the same stream.
    Shared(Arena),
    /// It may be taken when memory is short (vmm: its pages; slab: the bytes); the graph is stale from then on.
    Track,
}
