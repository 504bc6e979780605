//! What reports, snapshots and the runtime may see.

use super::block::{NONE, Segment};
use super::*;

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
    /// Address space that belongs to no used block and has no memory.
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

impl Heap {
    /// The block that holds `address`, whatever its state.
    #[must_use]
    pub(crate) fn find(&self, address: u64) -> Option<BlockKey> {
        let (_, &segment) = self.by_base.range(..=address).next_back()?;
        let entry = &self.segments[segment as usize];
        if address >= entry.end() {
            return None;
        }
        // The first block starts in the first stretch, so this ends.
        let hints = &entry.hints[..=entry.hint_slot(address)];
        let mut key = hints.iter().rev().copied().find(|&k| k != NONE)?;
        while self.blocks[key as usize].base > address {
            key = self.blocks[key as usize].prev;
        }
        while self.blocks[key as usize].end() <= address {
            key = self.blocks[key as usize].next;
        }
        Some(BlockKey(key))
    }

    /// One block.
    #[must_use]
    pub(crate) fn block(&self, block: BlockKey) -> Option<BlockView> {
        let entry = self.blocks.get(block.index())?;
        Some(BlockView {
            key: block,
            segment: SegmentKey(entry.segment),
            base: entry.base,
            bytes: entry.bytes,
            requested_bytes: entry.requested_bytes(),
            state: entry.state,
            uses: if entry.state == BlockState::Used { Uses::none() } else { entry.uses.clone() },
        })
    }

    /// Start and length of a block, bytes: the cheap part of [`block`](Self::block).
    #[must_use]
    #[inline]
    pub(crate) fn span(&self, block: BlockKey) -> Option<(u64, u64)> {
        self.blocks.get(block.index()).map(|b| (b.base, b.bytes))
    }

    /// The runtime's word about a used block; 0 for any other.
    #[must_use]
    #[inline]
    pub(crate) fn owner(&self, block: BlockKey) -> u64 {
        self.blocks.get(block.index()).filter(|b| b.state == BlockState::Used).map_or(0, |b| b.stamp.0)
    }

    /// Leaves a word with a used block, to be forgotten when it is freed. Start and length of the block, bytes.
    #[inline]
    pub(crate) fn set_owner(&mut self, block: BlockKey, owner: u64) -> Option<(u64, u64)> {
        let b = self.blocks.get_mut(block.index()).filter(|b| b.state == BlockState::Used)?;
        b.stamp = Stamp(owner);
        Some((b.base, b.bytes))
    }

    /// The block after (by address, same segment).
    #[must_use]
    pub(crate) fn next(&self, block: BlockKey) -> Option<BlockKey> {
        self.blocks.get(block.index()).map(|b| b.next).filter(|&k| k != NONE).map(BlockKey)
    }

    /// Every segment, ascending by base.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentView> + '_ {
        self.by_base.values().map(|&key| view(SegmentKey(key), &self.segments[key as usize]))
    }

    /// The blocks of a segment, ascending by address; they tile it. Blocks freed a moment ago show unmerged.
    pub(crate) fn blocks_of(&self, segment: SegmentKey) -> impl Iterator<Item = BlockView> + '_ {
        let first = self.segments.get(segment.index()).map(|s| s.first).filter(|&k| k != NONE).map(BlockKey);
        std::iter::successors(first, |&block| self.next(block)).filter_map(|block| self.block(block))
    }

    /// The counters. O(blocks): for reports; the hot ones have functions of their own below.
    #[must_use]
    pub(crate) fn stats(&self) -> HeapStats {
        let mut stats = HeapStats {
            backed_bytes: self.backed_bytes(),
            segments: self.segments.len() as u64,
            ..HeapStats::default()
        };
        for (_, entry) in &self.segments {
            let mut split_bytes = 0;
            let mut busy = false;
            let mut key = entry.first;
            while key != NONE {
                let block = &self.blocks[key as usize];
                match block.state {
                    BlockState::Used => {
                        busy = true;
                        stats.used_blocks += 1;
                        stats.used_bytes += block.bytes;
                        stats.requested_bytes += block.requested_bytes();
                    }
                    BlockState::Free => {
                        stats.free_bytes += block.bytes;
                        stats.free_blocks += 1;
                        stats.largest_free_bytes = stats.largest_free_bytes.max(block.bytes);
                        split_bytes += block.bytes;
                    }
                    BlockState::Claimed => {
                        busy = true;
                        stats.claimed_bytes += block.bytes;
                    }
                    BlockState::Unbacked => stats.unbacked_bytes += block.bytes,
                }
                key = block.next;
            }
            if busy {
                stats.inactive_split_bytes += split_bytes;
            }
        }
        stats
    }

    /// Held from the driver, bytes.
    #[must_use]
    #[inline]
    pub(crate) fn backed_bytes(&self) -> u64 {
        self.slab_bytes + self.chunked_bytes
    }

    /// Largest free block, bytes, whoever may still use it.
    #[must_use]
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        let ring = self.ring[..self.ring_len].iter().map(|&k| self.blocks[k as usize].bytes);
        let bins = [&self.idle, &self.mixed].into_iter().chain(self.streams.iter().flatten());
        ring.chain(bins.flatten().map(|b| b.largest(&self.blocks))).max().unwrap_or(0)
    }
}

fn view(key: SegmentKey, entry: &Segment) -> SegmentView {
    SegmentView {
        key,
        base: entry.base,
        bytes: entry.bytes,
        backed_bytes: match &entry.chunks {
            None => entry.bytes,
            Some(pages) => u64::from(pages.backed_count) * pages.bytes,
        },
        chunk_bytes: entry.chunks.as_ref().map(|c| c.bytes),
    }
}
