//! Sleep: a heap whose pages are away while its tiling stays as it is.
//!
//! A sleeping heap hands nothing out and claims nothing; frees work as ever. Its books go on saying "backed": that is
//! what has to be mapped again when it wakes. What became wholly free in the meantime is taken off them first.

use std::ops::Range;

use super::*;

impl Heap {
    /// From here on it hands nothing out, or does again.
    pub(crate) fn set_asleep(&mut self, asleep: bool) {
        self.asleep = asleep;
    }

    /// Whether it hands nothing out.
    #[must_use]
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep
    }

    /// Chunks in which nobody has a byte, no arena either, become unbacked space. Only while asleep: the host has seen
    /// everything complete that ever used them, so the streams left with free blocks mean nothing.
    pub(crate) fn unback_free(&mut self) {
        if !self.asleep {
            return;
        }
        let private = self.private.clone();
        self.asleep = false;
        for claim in self.claim_chunks(u64::MAX, &(0..0), &|stream| !private.contains(stream), true) {
            let done = self.unback_claim(claim.block);
            debug_assert!(done.is_ok(), "a claim is unbacked once: {done:?}");
        }
        self.asleep = true;
    }

    /// Every chunk that has pages by these books, segment by segment, ascending.
    #[must_use]
    pub(crate) fn backed_chunks(&self) -> Vec<(SegmentKey, Vec<Range<u32>>)> {
        let mut found = Vec::new();
        for &segment in self.by_base.values() {
            let Some(pages) = self.segments.get(segment as usize).and_then(|s| s.chunks.as_ref()) else { continue };
            let chunks = runs((0..pages.count).filter(|&chunk| pages.is_backed(chunk)));
            if !chunks.is_empty() {
                found.push((SegmentKey(segment), chunks));
            }
        }
        found
    }

    /// The stretches of a used block that have pages, by address.
    #[must_use]
    pub(crate) fn backed_spans(&self, block: BlockKey) -> Vec<Range<u64>> {
        let Some(entry) = self.blocks.get(block.index()).filter(|b| b.state == BlockState::Used) else {
            return Vec::new();
        };
        let Some(segment) = self.segments.get(entry.segment as usize) else { return Vec::new() };
        // A slab never sleeps.
        let Some(pages) = &segment.chunks else { return Vec::new() };
        let touched = segment.outer_chunks(entry.base, entry.end());
        let at = |chunk: u32| segment.base + u64::from(chunk) * pages.bytes;
        runs(touched.filter(|&chunk| pages.is_backed(chunk)))
            .into_iter()
            .map(|run| at(run.start).max(entry.base)..at(run.end).min(entry.end()))
            .collect()
    }

    /// The used blocks of all segments.
    #[must_use]
    pub(crate) fn used_blocks(&self) -> Vec<BlockKey> {
        let used = self.blocks.iter().filter(|(_, block)| block.state == BlockState::Used);
        used.map(|(key, _)| BlockKey(key as u32)).collect()
    }

    /// The arenas and windows that have free memory here.
    #[must_use]
    pub(crate) fn private_tags(&self) -> Uses {
        let mut tags = Uses::none();
        for (_, block) in self.blocks.iter().filter(|(_, b)| b.state == BlockState::Free) {
            block.uses.iter().filter(|&tag| self.private.contains(tag)).for_each(|tag| tags.insert(tag));
        }
        tags
    }
}

/// Ascending numbers as ranges.
pub(crate) fn runs(chunks: impl Iterator<Item = u32>) -> Vec<Range<u32>> {
    let mut found: Vec<Range<u32>> = Vec::new();
    for chunk in chunks {
        match found.last_mut() {
            Some(last) if last.end == chunk => last.end += 1,
            _ => found.push(chunk..chunk + 1),
        }
    }
    found
}
