//! Growth: which chunks to map, or how large a slab to ask for.

use std::ops::Range;

use super::*;

/// Chunks to map so that a request fits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Growth {
    /// In which segment.
    pub(crate) segment: SegmentKey,
    /// Which chunks, by number from the segment's base; ascending, apart from each other.
    pub(crate) chunks: Vec<Range<u32>>,
}

impl Heap {
    /// The fewest chunks of a reserved segment that make room for the request, counting in free space next
    /// to unbacked space that `stream` may use at once. `None`: no segment has the address space.
    /// When all of them are [`back`](Self::back)ed, [`alloc`](Self::alloc) succeeds.
    pub(crate) fn plan_growth(&mut self, request: &Request, stream: StreamKey) -> Option<Growth> {
        unimplemented!()
    }

    /// Size of the slab to ask the driver for, bytes, when the request fits nowhere. At least what the
    /// request needs; small requests share a slab, large ones get a twentieth on top.
    #[must_use]
    pub(crate) fn plan_slab(&self, request: &Request) -> u64 {
        unimplemented!()
    }

    /// Wholly free slabs that a new slab of `bytes` makes superfluous, so that steadily growing requests do
    /// not pile up slabs too small for the next one. Claimed: to give back (or to [`release_claim`](Self::release_claim)).
    pub(crate) fn claim_outgrown(&mut self, bytes: u64) -> Vec<Claim> {
        unimplemented!()
    }

    /// Pages came under these chunks (idle: no uses). Unbacked space becomes free; inside a used block its
    /// holes are filled.
    pub(crate) fn back(&mut self, segment: SegmentKey, chunks: Range<u32>) -> Result<(), Misuse> {
        unimplemented!()
    }

    /// Address and length of chunks, bytes.
    #[must_use]
    pub(crate) fn chunk_span(&self, segment: SegmentKey, chunks: &Range<u32>) -> Option<(u64, u64)> {
        unimplemented!()
    }
}
