//! Growth: which chunks to map, or how large a slab to ask for.

use std::ops::Range;

use super::block::NONE;
use super::runs::Reach;
use super::*;

/// Small requests share slabs of this size.
const SMALL_SLAB_BYTES: u64 = 2 << 20;
/// Middling ones share slabs of this size.
const LARGE_SLAB_BYTES: u64 = 20 << 20;
/// Slabs are whole multiples of this: what drivers hand out anyway.
const SLAB_UNIT_BYTES: u64 = 2 << 20;

/// Chunks to map so that a request fits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Growth {
    /// In which segment.
    pub(crate) segment: SegmentKey,
    /// Which chunks, by number from the segment's base; ascending, apart from each other.
    pub(crate) chunks: Vec<Range<u32>>,
    /// The place for the request: free space in it is part of the plan.
    pub(crate) window: Range<u64>,
}

impl Heap {
    /// The fewest chunks of a reserved segment that make room for the request, counting in free space next
    /// to unbacked space that `stream` may use at once. `None`: no segment has the address space.
    /// When all of them (none, if work that completed meanwhile made room) are [`back`](Self::back)ed,
    /// [`alloc`](Self::alloc) succeeds.
    pub(crate) fn plan_growth(&mut self, request: &Request, stream: StreamKey) -> Option<Growth> {
        if self.asleep {
            return None;
        }
        if self.alone(stream) {
            self.settle_ring()
        } else {
            self.settle_completed()
        }
        // What is mapped for a second stream must not fall to the first one's neighbours.
        self.note_stream(stream);
        let zone = self.zone(request);
        let reach = |zone| Reach { stream, foreign: &|_| false, unbacked: true, zone };
        // Only where its own zone has no address space left.
        let window = self.growth_window(request, &reach(Some(zone)));
        let window = window.or_else(|| self.growth_window(request, &reach(None)))?;
        let end = window.start + request.bytes;
        let mut key = self.find(window.start)?.0;
        let segment = self.blocks[key as usize].segment;
        let entry = &self.segments[segment as usize];
        let mut chunks: Vec<Range<u32>> = Vec::new();
        while key != NONE && self.blocks[key as usize].base < end {
            let block = &self.blocks[key as usize];
            if block.state == BlockState::Unbacked {
                chunks.push(entry.outer_chunks(block.base.max(window.start), block.end().min(end)));
            }
            key = block.next;
        }
        Some(Growth { segment: SegmentKey(segment), chunks, window: window.start..end })
    }

    /// Size of the slab to ask the driver for, bytes, when the request fits nowhere. At least what the
    /// request needs; small requests share a slab, large ones get a twentieth on top.
    #[must_use]
    pub(crate) fn plan_slab(&self, request: &Request) -> u64 {
        // A slab may start at the driver's smallest alignment, short of the one asked for.
        let needed = request.bytes + request.align;
        if needed <= SMALL_SLAB_BYTES / 2 {
            SMALL_SLAB_BYTES
        } else if needed <= LARGE_SLAB_BYTES / 2 {
            LARGE_SLAB_BYTES
        } else {
            (needed + needed / 20).next_multiple_of(SLAB_UNIT_BYTES)
        }
    }

    /// Wholly free slabs that a new slab of `bytes` makes superfluous, so that steadily growing requests do
    /// not pile up slabs too small for the next one: after this, wholly free slabs hold no more than `bytes`.
    /// Claimed: to give back (or to [`release_claim`](Self::release_claim)).
    pub(crate) fn claim_outgrown(&mut self, bytes: u64, usable: &dyn Fn(StreamKey) -> bool) -> Vec<Claim> {
        self.settle_completed();
        let free: u64 = self.whole_slabs(usable).iter().map(|&(b, _)| b).sum();
        if free > bytes { self.claim_slabs(free - bytes, usable) } else { Vec::new() }
    }

    /// Pages came under these chunks (idle: no uses). Unbacked space becomes free; inside a used block its
    /// holes are filled.
    pub(crate) fn back(&mut self, segment: SegmentKey, chunks: Range<u32>) -> Result<(), Misuse> {
        let refused = Misuse::Chunks(segment);
        let (start, bytes) = self.chunk_span(segment, &chunks).ok_or(refused)?;
        let end = start + bytes;
        {
            let pages = self.segments.get(segment.index()).and_then(|s| s.chunks.as_ref()).ok_or(refused)?;
            if chunks.clone().any(|c| pages.is_backed(c)) {
                return Err(refused);
            }
        }
        let mut key = self.find(start).ok_or(refused)?.0;
        if let Some(pages) = &mut self.segments[segment.index()].chunks {
            pages.set(chunks.clone(), true);
        }
        self.chunked_bytes += bytes;
        // No chunk of the range had pages: every block here is unbacked, or used with holes.
        while key != NONE && self.blocks[key as usize].base < end {
            let block = &self.blocks[key as usize];
            if block.state == BlockState::Unbacked {
                if block.base < start {
                    key = self.split(key, start - block.base);
                }
                if self.blocks[key as usize].end() > end {
                    self.split(key, end - self.blocks[key as usize].base);
                }
                self.unlist_unbacked(key);
                self.blocks[key as usize].state = BlockState::Free;
                key = self.settle_free(key);
            } else {
                self.blocks[key as usize].holes = !self.missing_chunks(BlockKey(key)).is_empty();
            }
            key = self.blocks[key as usize].next;
        }
        Ok(())
    }

    /// Address and length of chunks, bytes.
    #[must_use]
    pub(crate) fn chunk_span(&self, segment: SegmentKey, chunks: &Range<u32>) -> Option<(u64, u64)> {
        let entry = self.segments.get(segment.index())?;
        let pages = entry.chunks.as_ref()?;
        if chunks.is_empty() || chunks.end > pages.count {
            return None;
        }
        Some((entry.base + u64::from(chunks.start) * pages.bytes, chunks.len() as u64 * pages.bytes))
    }
}
