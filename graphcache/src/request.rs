//! What a run is asked for.

use evergraph_pool::{AllocationId, Pool, ScratchPolicy, Stream, Touch};

use crate::GraphKey;
use crate::key::FullKey;

/// Which graph, on which stream, with memory from which pools.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub(crate) key: &'a GraphKey,
    pub(crate) pool: &'a Pool,
    pub(crate) others: &'a [&'a Pool],
    pub(crate) beside: &'a [(&'a Pool, &'a Stream)],
    pub(crate) stream: &'a Stream,
    pub(crate) policy: ScratchPolicy,
    pub(crate) bound: &'a [AllocationId],
    pub(crate) touches: &'a [Touch],
    pub(crate) modules: u64,
}

impl<'a> Request<'a> {
    /// The graph of `key` on `stream`, with scratch from `pool`, pinned.
    #[must_use]
    pub fn new(key: &'a GraphKey, pool: &'a Pool, stream: &'a Stream) -> Self {
        Self {
            key,
            pool,
            others: &[],
            beside: &[],
            stream,
            policy: ScratchPolicy::Pin,
            bound: &[],
            touches: &[],
            modules: 0,
        }
    }

    /// What happens to memory handed out inside the capture.
    #[must_use]
    pub fn policy(mut self, policy: ScratchPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// More pools that the graph has memory of: other devices', or another of the same device.
    #[must_use]
    pub fn others(mut self, pools: &'a [&'a Pool]) -> Self {
        self.others = pools;
        self
    }

    /// More devices that the work goes to: each with a stream that it forks into from the request's own, and the pool that
    /// [scratch](crate::Scope::alloc_beside) there comes from. The graph depends on all of them, and is repaired as a whole.
    #[must_use]
    pub fn beside(mut self, lanes: &'a [(&'a Pool, &'a Stream)]) -> Self {
        self.beside = lanes;
        self
    }

    /// The allocations that this run is meant for, in an order of the caller's choice. A graph that was captured
    /// with others is stale. Replays do not call the closure, so a buffer that the caller swapped for another
    /// one is only noticed through this list (or through the key). A compare of a few words, no lock.
    #[must_use]
    pub fn bound(mut self, allocations: &'a [AllocationId]) -> Self {
        self.bound = allocations;
        self
    }

    /// How far this run reaches into growable slices. One that is not named is touched to the end of what the closure
    /// declares of it. A run that reaches further than a slice has grown is refused: nothing is queued.
    #[must_use]
    pub fn touches(mut self, touches: &'a [Touch]) -> Self {
        self.touches = touches;
        self
    }

    /// The generation of the code that the closure launches; part of the key. See
    /// [`Module::generation`](crate::Module::generation).
    #[must_use]
    pub fn modules(mut self, generation: u64) -> Self {
        self.modules = generation;
        self
    }

    pub(crate) fn full_key(&self) -> FullKey {
        FullKey { key: self.key.clone(), device: self.stream.device(), stream: self.stream.id(), modules: self.modules }
    }

    pub(crate) fn pools(&self) -> impl Iterator<Item = &'a Pool> {
        let beside = self.beside.iter().map(|(pool, _)| *pool);
        std::iter::once(self.pool).chain(self.others.iter().copied()).chain(beside)
    }
}
