//! Physical chunks of several sizes: which go under a gap, and what the heap is told of them.
//!
//! The books count in smallest chunks. A larger one is a *bundle* of neighbours there (see `core/bundles.rs`), made where
//! much is missing inside one block. Chunks without a range are laid under new gaps largest first; one that is too large
//! for every gap goes back to the driver in place of what has to be made anew, so that the pool holds no more than before.

use std::ops::Range;

use smallvec::SmallVec;

use crate::chunk_class::{Gap, chunk_class, chunks_of};
use crate::core::SegmentKey;
use crate::driver::{DriverError, PhysHandle};
use crate::growth::over_limit;
use crate::shared::Shared;
use crate::state::{Backing, State};
use crate::{Purpose, mutant};

/// A run of chunks without pages, and whether bundles may go there.
pub(crate) type Stretch = (Range<u32>, bool);

/// How far the chunks without a range serve some gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Laid {
    /// To be made anew, bytes.
    pub(crate) lack_bytes: u64,
    /// Sizes of the chunks that go back in its place, ascending.
    pub(crate) misfits: Vec<u64>,
}

/// Lays chunks of the given sizes, which are taken out, under stretches.
pub(crate) fn lay(spare: &mut Vec<u64>, stretches: &[Stretch], unit: u64) -> Laid {
    spare.sort_unstable();
    let mut lack_bytes = 0;
    for (chunks, bundles) in stretches {
        let mut left = chunks.len() as u64 * unit;
        while left > 0 {
            let most = if *bundles { left } else { unit };
            let fits = spare.partition_point(|&bytes| bytes <= most);
            let Some(largest) = fits.checked_sub(1) else { break };
            left -= spare.remove(largest);
        }
        lack_bytes += left;
    }
    let mut enough = 0;
    let misfits: Vec<u64> = spare
        .iter()
        .copied()
        .take_while(|bytes| {
            let short = enough < lack_bytes;
            enough += bytes;
            short
        })
        .collect();
    spare.drain(..misfits.len());
    Laid { lack_bytes, misfits }
}

impl Shared {
    /// What of these chunks would have to be made anew, and how far that would go over the byte limit.
    pub(crate) fn lack(&self, heap: usize, wanted: &[(SegmentKey, Vec<Range<u32>>)]) -> (u64, u64) {
        let state = self.lock();
        let mut spare: Vec<u64> = state.spare.iter().map(|s| s.bytes).collect();
        let (mut lack, mut back) = (0, 0);
        for (segment, chunks) in wanted {
            let laid = lay(&mut spare, &state.stretches(heap, *segment, chunks), self.chunk_bytes);
            lack += laid.lack_bytes;
            back += laid.misfits.iter().sum::<u64>();
        }
        let over = if lack == 0 { 0 } else { over_limit(&state, lack).unwrap_or(0) };
        (lack, over.saturating_sub(back))
    }

    /// Makes a chunk: as large as its class says, smaller where the driver has none so large. `largest`: what was too
    /// large before.
    pub(crate) fn make_chunk(&self, gap: Gap, largest: &mut u64) -> Result<(PhysHandle, u64), DriverError> {
        let room_bytes = self.room_bytes();
        let class = |most: u64| {
            let gap = Gap { left_bytes: gap.left_bytes.min(most), ..gap };
            chunk_class(gap, room_bytes, self.chunk_bytes, &self.chunk_classes)
        };
        let mut bytes = class(*largest);
        loop {
            match self.driver.create(bytes as usize) {
                Err(error)
                    if error.is_out_of_memory() && bytes > self.chunk_bytes && !mutant::is("bundle-or-nothing") =>
                {
                    *largest = bytes - 1;
                    bytes = class(*largest);
                }
                made => return made.map(|handle| (handle, bytes)),
            }
        }
    }

    /// What the pool may have at all.
    fn room_bytes(&self) -> u64 {
        let limit = self.lock().limit_bytes;
        limit.unwrap_or(u64::MAX).min(self.driver.info().total_bytes as u64)
    }

    /// How many chunks a gap takes, and how large the largest is.
    pub(crate) fn chunks_for(&self, purpose: Purpose, bytes: u64) -> (u64, u64) {
        let sizes = chunks_of(purpose, bytes, self.room_bytes(), self.chunk_bytes, &self.chunk_classes);
        sizes.fold((0, 0), |(count, largest), (bytes, times)| (count + times, bytes.max(largest)))
    }
}

impl State {
    /// Runs of chunks, cut where a bundle would lie under more than one block.
    pub(crate) fn stretches(&self, heap: usize, segment: SegmentKey, chunks: &[Range<u32>]) -> SmallVec<[Stretch; 4]> {
        chunks.iter().flat_map(|run| self.heaps[heap].stretches(segment, run)).collect()
    }

    /// Tells the heap which of these chunks hang on one handle.
    pub(crate) fn tie_chunks(&mut self, heap: usize, segment: SegmentKey, chunks: Range<u32>) {
        let Some(Some(Backing::Range { chunks: bundles, .. })) = self.backing[heap].get(segment.index()) else {
            return;
        };
        let books = &mut self.heaps[heap];
        books.untie(segment, chunks.clone());
        let (mut at, end) = (chunks.start, chunks.end.min(bundles.len() as u32));
        while at < end {
            let Some(Some(bundle)) = bundles.get(at as usize) else {
                at += 1;
                continue;
            };
            at = bundle.chunks().end;
            if bundle.count.get() > 1 {
                let done = books.tie(segment, bundle.chunks());
                debug_assert!(done.is_ok(), "mapped chunks are backed: {done:?}");
            }
        }
    }

    /// Tells a heap anew which of its chunks hang on one handle.
    pub(crate) fn tie_heap(&mut self, heap: usize) {
        if mutant::is("bundles-untold") {
            return;
        }
        let segments: Vec<SegmentKey> = self.heaps[heap].segments().map(|s| s.key).collect();
        for segment in segments {
            self.tie_chunks(heap, segment, 0..u32::MAX);
        }
    }
}

#[cfg(test)]
mod tests;
