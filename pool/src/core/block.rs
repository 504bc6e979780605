//! Blocks and segments.

use super::uses::{Stamp, Uses};

/// Names a block for as long as it is used or claimed. Reused later: identity is the allocation id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockKey(pub(super) u32);

impl BlockKey {
    /// For side tables of the runtime.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Names a segment until it is removed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SegmentKey(pub(super) u32);

impl SegmentKey {
    /// For side tables of the runtime.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum BlockState {
    /// Handed out.
    Used,
    /// To be had; all of it has memory behind it.
    Free,
    /// Taken out of the free blocks on its way back to the driver.
    Claimed,
    /// Address space without memory.
    Unbacked,
}

/// No block: end of a list.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Block {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) requested_bytes: u64,
    /// Neighbours by address in the same segment.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// Neighbours in the free index.
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    pub(super) segment: u32,
    pub(super) state: BlockState,
    /// Free, but still in the quick ring: not indexed, not merged.
    pub(super) quick: bool,
    /// Used, but some of its chunks have no memory.
    pub(super) holes: bool,
    pub(super) uses: Uses,
    pub(super) stamp: Stamp,
}

/// Pages of a segment.
#[derive(Debug)]
pub(super) struct Chunks {
    pub(super) bytes: u64,
    /// One bit a chunk: memory is behind it.
    pub(super) backed: Vec<u64>,
    pub(super) backed_count: u32,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) first: u32,
    pub(super) used_blocks: u32,
    /// `None`: a slab.
    pub(super) chunks: Option<Chunks>,
    /// For each stretch of `HINT_BYTES`: a block that starts in it, or `NONE`. Makes `find` a few steps.
    pub(super) hints: Vec<u32>,
}
