//! What depends on memory, and what the pool tells it.

use std::fmt::Debug;
use std::sync::Arc;

use crate::handshake::Lease;
use crate::{PoolId, Stream, Token};

/// What a graph does with the bytes it depends on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Use {
    /// Reads what somebody wrote before the launch.
    Input,
    /// Reads and writes what lives across launches.
    State,
    /// Reads what never changes.
    Weight,
    /// Writes before it reads: contents may be lost between launches.
    Scratch,
    /// Scratch that must be zero at the start; cleared again after new pages came under it.
    ZeroedScratch,
}

impl Use {
    /// Whether lost content is harmless (after clearing, for zeroed scratch).
    #[must_use]
    pub fn is_scratch(self) -> bool {
        matches!(self, Self::Scratch | Self::ZeroedScratch)
    }
}

/// What happens to the block when its slice is dropped while a graph depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Hold {
    /// The block stays until the graph is gone.
    Strong,
    /// The block may be taken, and the graph goes stale with it.
    Weak,
}

/// One thing that a graph needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dependency {
    /// Which allocation, in which state.
    pub token: Token,
    /// What for.
    pub use_: Use,
    /// Where the bytes start in the allocation.
    pub offset_bytes: usize,
    /// How many bytes.
    pub bytes: usize,
    /// What happens when the slice is dropped.
    pub hold: Hold,
}

/// A captured graph as the pool sees it: a lease, a stream, a price.
///
/// The pool keeps an `Arc` of this, so it must not own slices of that pool (nor the graph).
/// The three getters are called under the pool's lock and must do nothing but return.
pub trait Dependent: Debug + Send + Sync {
    /// The lease of the launch protocol, with the last launch's number.
    fn lease(&self) -> &Arc<Lease>;

    /// The one stream that this graph is launched on.
    fn stream(&self) -> &Stream;

    /// Predicted price of rebuilding it, µs: cheaper ones are evicted first.
    fn rebuild_cost_us(&self) -> u32;

    /// Memory that it depends on was retired, or the graph itself was evicted. Called without any lock; it
    /// may call the pool.
    fn retired(&self, notice: &Retired);
}

/// What a dependent is told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retired {
    /// The pool that tells.
    pub pool: PoolId,
    /// Why.
    pub reason: RetireReason,
    /// The allocations that it depended on and that changed. Empty for an eviction.
    pub tokens: Vec<Token>,
}

/// Why memory, or a graph, was retired.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RetireReason {
    /// The bytes belong to another allocation now.
    Reissued,
    /// The memory went back to the driver, address and all.
    GivenBack,
    /// The pages went back to the driver; the address stays. [`Registration::reback`](crate::Registration::reback)
    /// brings pages again.
    Unbacked,
    /// The memory fell asleep: no pages until it wakes, under the same address. Whether the bytes are kept shows in
    /// the token's `content`.
    Asleep,
    /// The owner of a foreign range took it away or moved it.
    Withdrawn,
    /// Memory was short: drop the graph. It can not be launched any more; its memory is already being reused.
    Evicted,
}
