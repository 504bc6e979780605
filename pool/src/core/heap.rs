//! The heap.

use super::*;

/// How a heap places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HeapConfig {
    /// Every block is a multiple of this; a power of two, at least 1.
    pub(crate) granule_bytes: u64,
    /// Do not split off a remainder smaller than the request's bytes divided by this; 0: split off any.
    pub(crate) look_ahead_divisor: u64,
}

impl HeapConfig {
    /// For reserved ranges: split to the granule.
    pub(crate) const VMM: Self = Self { granule_bytes: 512, look_ahead_divisor: 0 };
    /// For slabs: leave up to a twentieth on, as a slightly larger request often follows.
    pub(crate) const SLAB: Self = Self { granule_bytes: 512, look_ahead_divisor: 20 };
}

/// The free and used memory of one purpose (scratch, state or weights: they never share a chunk).
#[derive(Debug)]
pub(crate) struct Heap {}

impl Heap {
    /// An empty heap. The granule is rounded up to a power of two.
    #[must_use]
    pub(crate) fn new(config: HeapConfig) -> Self {
        unimplemented!()
    }

    /// Its configuration.
    #[must_use]
    pub(crate) fn config(&self) -> HeapConfig {
        unimplemented!()
    }

    /// Checks and rounds a request for this heap. `align` 0: any.
    pub(crate) fn request(&self, bytes: u64, align: u64) -> Result<Request, BadRequest> {
        unimplemented!()
    }

    /// Takes in a slab from the driver's `malloc`: all of it free. Edges short of a granule are left unused.
    pub(crate) fn add_segment(&mut self, base: u64, bytes: u64) -> Result<SegmentKey, Misuse> {
        unimplemented!()
    }

    /// Takes in a reserved range: address space without memory. `base` and `chunk_bytes` are multiples of
    /// the granule, `bytes` of `chunk_bytes`.
    pub(crate) fn reserve_segment(&mut self, base: u64, bytes: u64, chunk_bytes: u64) -> Result<SegmentKey, Misuse> {
        unimplemented!()
    }

    /// Forgets a segment none of whose blocks is used, and which has no chunk backed (a slab: is claimed).
    pub(crate) fn remove_segment(&mut self, segment: SegmentKey) -> Result<(), Misuse> {
        unimplemented!()
    }

    /// The warm path: a block that `stream` may use at once. Its queued uses (at most `stream`'s) are dropped.
    #[inline]
    pub(crate) fn alloc(&mut self, request: &Request, stream: StreamKey) -> Option<BlockKey> {
        unimplemented!()
    }

    /// Before growth: also considers blocks that other streams may still touch, joined across streams. The
    /// streams returned (never `stream`) must be ordered before the new owner's work, by an event or by the
    /// host. `usable` says which streams may be waited for (not a capturing one).
    pub(crate) fn alloc_cross(
        &mut self,
        request: &Request,
        stream: StreamKey,
        usable: &dyn Fn(StreamKey) -> bool,
    ) -> Option<(BlockKey, Uses)> {
        unimplemented!()
    }

    /// Takes a used block back. `uses`: streams with queued work that may touch it; `now`: the pool's clock.
    #[inline]
    pub(crate) fn free(&mut self, block: BlockKey, uses: Uses, now: Stamp) -> Result<(), Misuse> {
        unimplemented!()
    }

    /// The host saw everything complete that was queued on `stream` before `upto`. O(1); blocks notice when
    /// they are looked at by the slow paths.
    pub(crate) fn completed(&mut self, stream: StreamKey, upto: Stamp) {
        unimplemented!()
    }

    /// The stream is gone and complete: takes it out of every set, so that its number may be reused.
    pub(crate) fn forget_stream(&mut self, stream: StreamKey) {
        unimplemented!()
    }

    /// The block that holds `address`, whatever its state.
    #[must_use]
    pub(crate) fn find(&self, address: u64) -> Option<BlockKey> {
        unimplemented!()
    }

    /// One block.
    #[must_use]
    pub(crate) fn block(&self, block: BlockKey) -> Option<BlockView> {
        unimplemented!()
    }

    /// Start and length of a block, bytes: the cheap part of [`block`](Self::block).
    #[must_use]
    #[inline]
    pub(crate) fn span(&self, block: BlockKey) -> Option<(u64, u64)> {
        unimplemented!()
    }

    /// The block before (by address, same segment).
    #[must_use]
    pub(crate) fn previous(&self, block: BlockKey) -> Option<BlockKey> {
        unimplemented!()
    }

    /// The block after (by address, same segment).
    #[must_use]
    pub(crate) fn next(&self, block: BlockKey) -> Option<BlockKey> {
        unimplemented!()
    }

    /// Every segment, ascending by base.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentView> + '_ {
        std::iter::empty()
    }

    /// One segment.
    #[must_use]
    pub(crate) fn segment(&self, segment: SegmentKey) -> Option<SegmentView> {
        unimplemented!()
    }

    /// The blocks of a segment, ascending by address; they tile it.
    pub(crate) fn blocks_of(&self, segment: SegmentKey) -> impl Iterator<Item = BlockView> + '_ {
        std::iter::empty()
    }

    /// The counters. O(blocks) for the split and the largest; [`backed_bytes`](Self::backed_bytes) and friends are O(1).
    #[must_use]
    pub(crate) fn stats(&self) -> HeapStats {
        unimplemented!()
    }

    /// Held from the driver, bytes.
    #[must_use]
    pub(crate) fn backed_bytes(&self) -> u64 {
        unimplemented!()
    }

    /// In used blocks, bytes.
    #[must_use]
    pub(crate) fn used_bytes(&self) -> u64 {
        unimplemented!()
    }

    /// Asked for by live blocks, bytes.
    #[must_use]
    pub(crate) fn requested_bytes(&self) -> u64 {
        unimplemented!()
    }

    /// Largest free block, bytes, whoever may still use it.
    #[must_use]
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        unimplemented!()
    }

    /// Every invariant, or what is broken. O(blocks).
    pub(crate) fn check(&self) -> Result<(), String> {
        unimplemented!()
    }
}
