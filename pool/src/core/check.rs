//! Every invariant of the heap, for tests and for `doctor`.

use std::collections::BTreeSet;

use super::block::NONE;
use super::uses::Home;
use super::*;

macro_rules! hold {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

impl Heap {
    /// Every invariant, or what is broken. O(blocks).
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut seen = 0;
        let (mut slab_bytes, mut chunked_bytes) = (0, 0);
        let mut indexed = BTreeSet::new();
        let mut last_end = 0;
        hold!(self.by_base.len() == self.segments.len(), "segments and their order disagree");
        for (&base, &segment) in &self.by_base {
            let entry = self.segments.get(segment as usize).ok_or("a dead segment is listed")?;
            hold!(entry.base == base && base >= last_end, "segment {segment} overlaps or moved");
            last_end = entry.end();
            let (mut at, mut prev) = (entry.base, NONE);
            let mut key = entry.first;
            let mut hinted = BTreeSet::new();
            while key != NONE {
                let block = self.blocks.get(key as usize).ok_or_else(|| format!("dead block {key} in the tiling"))?;
                hold!(block.base == at && block.bytes > 0, "a gap or an overlap at {at:#x} (block {key})");
                hold!(block.prev == prev && block.segment == segment, "block {key} is mislinked");
                hold!(
                    at.is_multiple_of(self.config().granule_bytes)
                        && block.bytes.is_multiple_of(self.config().granule_bytes),
                    "block {key} is off the granule"
                );
                let zone = if at < entry.small_end { block::Zone::Small } else { block::Zone::Large };
                hold!(
                    block.zone == zone && (at >= entry.small_end || block.end() <= entry.small_end),
                    "block {key} is in the wrong zone"
                );
                seen += 1;
                let slot = entry.hint_slot(at);
                let hint = entry.hints[slot];
                hold!(hint != NONE, "no hint where block {key} starts");
                if hint == key {
                    hinted.insert(slot);
                }
                match block.state {
                    BlockState::Used => {
                        hold!(block.requested_bytes() <= block.bytes, "block {key} is smaller than what was asked for");
                        hold!(
                            block.holes != self.missing_chunks(BlockKey(key)).is_empty(),
                            "block {key}'s holes are miscounted"
                        );
                    }
                    BlockState::Free => {
                        hold!(!block.holes, "free block {key} has holes");
                        if !block.quick {
                            indexed.insert(key);
                        }
                        if prev != NONE {
                            hold!(
                                !self.mergeable(&self.blocks[prev as usize], block),
                                "{prev} and {key} did not merge"
                            );
                        }
                    }
                    BlockState::Claimed => {}
                    BlockState::Unbacked => {
                        hold!(entry.chunks.is_some() && block.uses.is_empty(), "unbacked block {key} in a slab");
                        let like = |p: &block::Block| p.state == BlockState::Unbacked && p.zone == block.zone;
                        let unmerged = prev != NONE && like(&self.blocks[prev as usize]);
                        hold!(!unmerged, "unbacked {prev} and {key} did not merge");
                    }
                }
                if let Some(pages) = &entry.chunks {
                    let (inner, outer) = (entry.inner_chunks(at, block.end()), entry.outer_chunks(at, block.end()));
                    match block.state {
                        BlockState::Unbacked => {
                            hold!(inner == outer, "unbacked block {key} ends inside a chunk");
                            hold!(inner.clone().all(|c| !pages.is_backed(c)), "unbacked block {key} has pages");
                        }
                        BlockState::Used => {
                            hold!(
                                outer.clone().all(|c| inner.contains(&c) || pages.is_backed(c)),
                                "used block {key} lost a chunk that it shares"
                            );
                        }
                        BlockState::Free | BlockState::Claimed => {
                            hold!(outer.clone().all(|c| pages.is_backed(c)), "block {key} has no pages");
                        }
                    }
                }
                at = block.end();
                prev = key;
                key = block.next;
            }
            hold!(at == entry.end(), "segment {segment} is not tiled to its end");
            for (slot, &hint) in entry.hints.iter().enumerate() {
                hold!(hint == NONE || hinted.contains(&slot), "hint {slot} of segment {segment} is stale");
            }
            match &entry.chunks {
                None => slab_bytes += entry.bytes,
                Some(pages) => {
                    let tied = |c: &u32| pages.is_tied(*c);
                    let whole = |c: u32| c > 0 && pages.is_backed(c) && pages.is_backed(c - 1);
                    hold!((0..pages.count).filter(tied).all(whole), "segment {segment} lost a part of a bundle");
                    let backed = (0..pages.count).filter(|&c| pages.is_backed(c)).count();
                    hold!(backed == pages.backed_count as usize, "segment {segment} miscounts its chunks");
                    chunked_bytes += backed as u64 * pages.bytes;
                }
            }
        }
        hold!(seen == self.blocks.len(), "{seen} blocks tile, {} exist", self.blocks.len());
        hold!((slab_bytes, chunked_bytes) == (self.slab_bytes, self.chunked_bytes), "backed bytes are off");
        let ring: BTreeSet<u32> = self.ring[..self.ring_len].iter().copied().collect();
        for (key, block) in self.blocks.iter() {
            hold!(block.quick == ring.contains(&(key as u32)), "block {key} and the ring disagree");
        }
        let mut unbacked = BTreeSet::new();
        let mut key = self.unbacked;
        while key != NONE {
            let block = self.blocks.get(key as usize).ok_or("a dead block is listed as unbacked")?;
            hold!(block.state == BlockState::Unbacked && unbacked.insert(key), "block {key} is listed as unbacked");
            key = block.bin_next;
        }
        let expected = self.blocks.iter().filter(|(_, b)| b.state == BlockState::Unbacked).count();
        hold!(unbacked.len() == expected, "{expected} unbacked blocks, {} listed", unbacked.len());
        self.check_index(indexed)
    }

    fn check_index(&self, mut indexed: BTreeSet<u32>) -> Result<(), String> {
        let streams = self.streams.iter().enumerate();
        let streams = streams.filter_map(|(s, b)| b.as_ref().map(|b| (Home::Stream(s as u32), b)));
        for (home, zones) in [(Home::Idle, &self.idle), (Home::Mixed, &self.mixed)].into_iter().chain(streams) {
            for (zone, bins) in zones.iter().enumerate() {
                for key in bins.audit(&self.blocks)? {
                    let block = &self.blocks[key as usize];
                    hold!(indexed.remove(&key), "block {key} is indexed twice, or not free");
                    hold!(block.uses.home() == home && block.zone as usize == zone, "block {key} is in a wrong index");
                }
            }
        }
        hold!(indexed.is_empty(), "free blocks {indexed:?} are in no index");
        Ok(())
    }
}
