//! Bundles: neighbouring chunks behind one physical handle.
//!
//! A large request gets few large handles instead of many small ones, because a driver call costs about the same whatever
//! its size. A handle is mapped and unmapped as a whole, so its chunks come and go together: claims take whole bundles,
//! and what lies inside a used block or behind an extent counts only with the whole of its bundle. All else (tiling, best
//! fit, zones, growth) goes by chunks and knows nothing of them, so a bundle's free parts serve requests of any size, and
//! nothing is rounded up to a large chunk.
//!
//! That is why large chunks are no heap of their own: a heap for each chunk size would have to round every large request
//! up to its chunk, and its free memory would reach a small request only through the driver.

use std::ops::Range;

use smallvec::SmallVec;

use super::block::{Chunks, NONE};
use super::claim::Candidate;
use super::*;

impl Heap {
    fn pages(&self, segment: SegmentKey) -> Option<&Chunks> {
        self.segments.get(segment.index())?.chunks.as_ref()
    }

    /// These chunks, all backed, are one bundle from here on.
    pub(crate) fn tie(&mut self, segment: SegmentKey, chunks: Range<u32>) -> Result<(), Misuse> {
        let refused = Misuse::Chunks(segment);
        let pages = self.segments.get_mut(segment.index()).and_then(|s| s.chunks.as_mut()).ok_or(refused)?;
        let there = !chunks.is_empty() && chunks.end <= pages.count && chunks.clone().all(|c| pages.is_backed(c));
        if !there || chunks.clone().any(|c| pages.is_tied(c)) {
            return Err(refused);
        }
        pages.set_tied(chunks, true);
        Ok(())
    }

    /// Among these chunks there are no bundles any more: their handles went while the heap slept.
    pub(crate) fn untie(&mut self, segment: SegmentKey, chunks: Range<u32>) {
        if let Some(pages) = self.segments.get_mut(segment.index()).and_then(|s| s.chunks.as_mut()) {
            let end = chunks.end.min(pages.count);
            pages.set_tied(chunks.start.min(end)..end, false);
        }
    }

    /// What is left of a run of chunks without the parts of bundles at its ends.
    #[must_use]
    pub(crate) fn whole(&self, segment: SegmentKey, chunks: Range<u32>) -> Range<u32> {
        match self.pages(segment).filter(|pages| chunks.end <= pages.count) {
            Some(pages) => pages.whole(chunks),
            None => chunks,
        }
    }

    /// The chunks that share a chunk's handle, itself included.
    #[must_use]
    pub(crate) fn bundle(&self, segment: SegmentKey, chunk: u32) -> Range<u32> {
        match self.pages(segment).filter(|pages| chunk < pages.count) {
            Some(pages) => pages.bundle(chunk),
            None => chunk..chunk + 1,
        }
    }

    /// Whether there may be a bundle.
    #[must_use]
    pub(crate) fn has_bundles(&self) -> bool {
        self.segments.iter().any(|(_, s)| s.chunks.as_ref().is_some_and(Chunks::has_ties))
    }

    /// Cuts chunks where blocks begin and end; with each stretch, whether it lies inside one block that is used or will be
    /// at once. There a bundle is in nobody's way.
    #[must_use]
    pub(crate) fn stretches(&self, segment: SegmentKey, chunks: &Range<u32>) -> SmallVec<[(Range<u32>, bool); 2]> {
        let mut found = SmallVec::new();
        let mut at = chunks.start;
        if let Some((base, bytes)) = self.chunk_span(segment, chunks)
            && let Some(entry) = self.segments.get(segment.index())
        {
            let mut key = self.find(base).map_or(NONE, |first| first.0);
            while key != NONE && self.blocks[key as usize].base < base + bytes {
                let block = &self.blocks[key as usize];
                key = block.next;
                let inner = entry.inner_chunks(block.base, block.end());
                let (start, end) = (inner.start.max(at), inner.end.min(chunks.end));
                if start < end && matches!(block.state, BlockState::Used | BlockState::Unbacked) {
                    if at < start {
                        found.push((at..start, false));
                    }
                    found.push((start..end, true));
                    at = end;
                }
            }
        }
        if at < chunks.end {
            found.push((at..chunks.end, false));
        }
        found
    }

    /// Free chunks, by segment ascending, without those whose bundle is not free as a whole.
    pub(super) fn whole_bundles(&self, chunks: Vec<Candidate>) -> Vec<Candidate> {
        if !self.has_bundles() {
            return chunks;
        }
        let mut found: Vec<Candidate> = Vec::with_capacity(chunks.len());
        // The beginning of a bundle whose end is yet to be seen.
        let mut open: Option<Candidate> = None;
        for mut candidate in chunks {
            let Some(pages) = self.pages(SegmentKey(candidate.segment)) else { continue };
            let Range { start, end } = candidate.chunks;
            let mut from = start;
            if let Some(mut begun) = open.take()
                && begun.segment == candidate.segment
                && begun.chunks.end == start
            {
                let bundle = pages.bundle(start);
                begun.streams = begun.streams.max(candidate.streams);
                begun.chunks.end = bundle.end.min(end);
                if end < bundle.end {
                    open = Some(begun);
                    continue;
                }
                from = bundle.end;
                found.push(begun);
            } else if pages.is_tied(start) {
                from = pages.bundle(start).end.min(end);
            }
            let cut = pages.whole(from..end).end.max(from);
            for (chunks, whole) in [(from..cut, true), (cut..end, false)] {
                if let Some((base, _)) = self.chunk_span(SegmentKey(candidate.segment), &chunks) {
                    candidate = Candidate { chunks, base, ..candidate };
                    if whole {
                        found.push(candidate.clone());
                    } else {
                        open = Some(candidate.clone());
                    }
                }
            }
        }
        found
    }
}
