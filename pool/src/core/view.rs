//! What reports, snapshots and the runtime may see.

use super::block::{BlockKey, BlockState, SegmentKey};
use super::uses::Uses;

/// One block, copied out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BlockView {
    pub(crate) key: BlockKey,
    pub(crate) segment: SegmentKey,
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// What was asked for; 0 unless used.
    pub(crate) requested_bytes: u64,
    pub(crate) state: BlockState,
    /// Streams whose queued work may still touch it; empty unless free or claimed.
    pub(crate) uses: Uses,
}

/// One segment, copied out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentView {
    pub(crate) key: SegmentKey,
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// Bytes with memory behind them; all of a slab.
    pub(crate) backed_bytes: u64,
    /// Bytes in used blocks.
    pub(crate) used_bytes: u64,
    /// Bytes of a chunk; `None` for a slab.
    pub(crate) chunk_bytes: Option<u64>,
}

/// The heap in numbers. Bytes unless said otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct HeapStats {
    /// Asked for by the callers of live blocks.
    pub(crate) requested_bytes: u64,
    /// In used blocks (requested and rounding).
    pub(crate) used_bytes: u64,
    /// Free, with memory behind.
    pub(crate) free_bytes: u64,
    /// Being given back.
    pub(crate) claimed_bytes: u64,
    /// With memory behind, in all: what the pool holds from the driver.
    pub(crate) backed_bytes: u64,
    /// Address space without memory.
    pub(crate) unbacked_bytes: u64,
    /// Free in segments that also have used blocks: PyTorch's "inactive split".
    pub(crate) inactive_split_bytes: u64,
    /// The largest free block.
    pub(crate) largest_free_bytes: u64,
    /// Number of used blocks.
    pub(crate) used_blocks: u64,
    /// Number of free blocks.
    pub(crate) free_blocks: u64,
    /// Number of segments.
    pub(crate) segments: u64,
}
