//! The pool's core: a pure state machine over addresses.
//!
//! No driver, no lock, no clock, no unsafe code: the same calls give the same state on every machine, so it
//! can be tested exhaustively and fuzzed on a CPU. The runtime around it makes the driver calls and tells
//! the heap what happened.
//!
//! | word | meaning here |
//! |---|---|
//! | segment | an address range that the pool owns: a slab (all of it backed) or a reserved range (backed chunk by chunk) |
//! | chunk | the least that one physical handle backs of a reserved range. Kept apart from blocks: a bit per chunk says whether pages are there, so that stitching and growable slices can move pages without touching the tiling |
//! | bundle | neighbouring chunks behind one larger physical handle: they go together or not at all; see [`bundles`] |
//! | block | a piece of a segment. Blocks tile a segment without gaps: free, used, claimed (on its way back to the driver) or unbacked |
//! | uses | the streams whose queued work may still touch a free block |
//!
//! Placement is best fit with coalescing; see [`bins`] for how it is found in a few loads, and [`heap`] for
//! the quick ring that makes a just-freed block of the same size the cheapest of all.

mod bins;
mod block;
mod bundles;
mod check;
mod claim;
mod completion;
mod growing;
mod growth;
mod heap;
mod private;
mod request;
mod runs;
mod segments;
mod sleep;
mod table;
mod tiling;
mod uses;
mod view;

#[cfg(test)]
mod tests;

pub(crate) use block::{BlockKey, BlockState, SegmentKey};
pub(crate) use claim::Claim;
pub(crate) use growth::Growth;
pub(crate) use heap::{Heap, HeapConfig};
pub(crate) use request::{BadRequest, Request};
pub(crate) use sleep::runs;
pub(crate) use uses::{Stamp, StreamKey, Uses};
pub(crate) use view::{BlockView, SegmentView};

/// A call that the state does not allow. The heap is as it was before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Misuse {
    /// No such block, or not in a state that allows this.
    Block(BlockKey),
    /// No such segment, or not in a state that allows this.
    Segment(SegmentKey),
    /// Chunks outside the segment, or not in the state that the call needs.
    Chunks(SegmentKey),
    /// A segment that is empty, misaligned, wraps or overlaps another one.
    Range {
        /// Where it starts.
        base: u64,
        /// How long it is.
        bytes: u64,
    },
}
