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

    /// Back from a side table.
    pub(crate) fn from_index(index: usize) -> Self {
        Self(index as u32)
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

/// Which part of a reserved range a block lies in. Small blocks between large ones keep those from merging:
/// they cost several times their own size. So they get a part of their own once a heap is large enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Zone {
    Large,
    Small,
}

/// No block: end of a list.
pub(super) const NONE: u32 = u32::MAX;

/// One cache line, and no more: with thousands of blocks, lines touched are what a hand-out costs.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) base: u64,
    pub(super) bytes: u64,
    /// Neighbours by address in the same segment.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// Neighbours in the free index. Where the block is used: what was asked for, in two halves.
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    pub(super) segment: u32,
    pub(super) state: BlockState,
    /// Free, but still in the quick ring: not indexed, not merged.
    pub(super) quick: bool,
    /// Used, but some of its chunks have no memory.
    pub(super) holes: bool,
    pub(super) zone: Zone,
    /// Left over from before where the block is used.
    pub(super) uses: Uses,
    /// When the last of `uses` was queued, at the latest; 0 when nobody uses it. Where the block is used: the
    /// runtime's word about it.
    pub(super) stamp: Stamp,
}

const _: () = assert!(size_of::<Option<Block>>() == 64);

impl Block {
    /// What was asked for; 0 unless used.
    #[inline]
    pub(super) fn requested_bytes(&self) -> u64 {
        match self.state {
            BlockState::Used => u64::from(self.bin_prev) << 32 | u64::from(self.bin_next),
            BlockState::Free | BlockState::Claimed | BlockState::Unbacked => 0,
        }
    }

    /// The block, in no index, becomes used, by nobody yet.
    #[inline]
    pub(super) fn set_used(&mut self, requested_bytes: u64) {
        self.state = BlockState::Used;
        self.stamp = Stamp(0);
        (self.bin_prev, self.bin_next) = ((requested_bytes >> 32) as u32, requested_bytes as u32);
    }

    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.base + self.bytes
    }

    /// Free and in an index.
    #[inline]
    pub(super) fn settled_free(&self) -> bool {
        self.state == BlockState::Free && !self.quick
    }
}

/// Which chunks of a reserved range have pages.
#[derive(Debug)]
pub(super) struct Chunks {
    pub(super) bytes: u64,
    pub(super) count: u32,
    backed: Vec<u64>,
    pub(super) backed_count: u32,
    /// Chunks that hang on the physical handle of the chunk before them. Empty until there is one.
    tied: Vec<u64>,
}

impl Chunks {
    pub(super) fn new(bytes: u64, count: u32) -> Self {
        Self { bytes, count, backed: vec![0; (count as usize).div_ceil(64)], backed_count: 0, tied: Vec::new() }
    }

    pub(super) fn is_backed(&self, chunk: u32) -> bool {
        self.backed[chunk as usize / 64] >> (chunk % 64) & 1 == 1
    }

    /// Whether a chunk hangs on the handle of the one before it.
    pub(super) fn is_tied(&self, chunk: u32) -> bool {
        let tied = self.tied.get(chunk as usize / 64).is_some_and(|word| word >> (chunk % 64) & 1 == 1);
        tied && !crate::mutant::is("bundles-cut")
    }

    /// Whether any chunk was ever tied.
    pub(super) fn has_ties(&self) -> bool {
        !self.tied.is_empty()
    }

    /// The chunks from the second on hang on the first one's handle, or no chunk on another one's.
    pub(super) fn set_tied(&mut self, chunks: std::ops::Range<u32>, tied: bool) {
        if tied && self.tied.is_empty() {
            self.tied = vec![0; self.backed.len()];
        }
        let mut from = chunks.start + u32::from(tied);
        while from < chunks.end {
            let Some(word) = self.tied.get_mut(from as usize / 64) else { return };
            let to = chunks.end.min((from / 64 + 1) * 64);
            let bits = (u64::MAX >> (64 - (to - from))) << (from % 64);
            *word = if tied { *word | bits } else { *word & !bits };
            from = to;
        }
    }

    /// The chunks that share a chunk's handle, itself included.
    pub(super) fn bundle(&self, chunk: u32) -> std::ops::Range<u32> {
        let (mut start, mut end) = (chunk, chunk + 1);
        while self.is_tied(start) {
            start -= 1;
        }
        while end < self.count && self.is_tied(end) {
            end += 1;
        }
        start..end
    }

    /// What is left of a run of chunks without the parts of bundles at its ends.
    pub(super) fn whole(&self, chunks: std::ops::Range<u32>) -> std::ops::Range<u32> {
        let (mut start, mut end) = (chunks.start, chunks.end);
        if !self.has_ties() || chunks.is_empty() {
            return chunks;
        }
        if self.is_tied(start) {
            start = self.bundle(start).end;
        }
        if end < self.count && self.is_tied(end) {
            end = self.bundle(end).start;
        }
        start..end.max(start)
    }

    pub(super) fn set(&mut self, chunks: std::ops::Range<u32>, backed: bool) {
        if !backed {
            self.set_tied(chunks.clone(), false);
        }
        for chunk in chunks {
            if self.is_backed(chunk) != backed {
                self.backed[chunk as usize / 64] ^= 1 << (chunk % 64);
                if backed {
                    self.backed_count += 1;
                } else {
                    self.backed_count -= 1;
                }
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Segment {
    /// What the tiling covers: the driver's range, cut to whole granules.
    pub(super) base: u64,
    pub(super) bytes: u64,
    /// Where the small zone ends; `base` if there is none.
    pub(super) small_end: u64,
    pub(super) first: u32,
    /// `None`: a slab.
    pub(super) chunks: Option<Chunks>,
    /// For each stretch of `1 << hint_shift` bytes: a block that starts in it, or `NONE`. Makes finding an
    /// address a few steps without a sorted tree on the warm path.
    pub(super) hint_shift: u32,
    pub(super) hints: Vec<u32>,
}

impl Segment {
    pub(super) fn new(base: u64, bytes: u64, chunks: Option<Chunks>) -> Self {
        // A sixteenth of the address space, where that is a useful number of chunks.
        let small_end = base + chunks.as_ref().map_or(0, |c| u64::from(c.count / 16) * c.bytes);
        // 2 MiB stretches, or longer so that a terabyte of address space needs no more than 2^18 of them.
        let mut hint_shift = 21;
        while bytes >> hint_shift >= 1 << 18 {
            hint_shift += 1;
        }
        let hints = vec![NONE; (bytes >> hint_shift) as usize + 1];
        Self { base, bytes, small_end, first: NONE, chunks, hint_shift, hints }
    }

    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.base + self.bytes
    }

    #[inline]
    pub(super) fn hint_slot(&self, address: u64) -> usize {
        ((address - self.base) >> self.hint_shift) as usize
    }

    /// Chunks wholly inside `[start, end)`.
    pub(super) fn inner_chunks(&self, start: u64, end: u64) -> std::ops::Range<u32> {
        let Some(chunks) = &self.chunks else { return 0..0 };
        let first = (start - self.base).div_ceil(chunks.bytes);
        let last = (end - self.base) / chunks.bytes;
        first as u32..last.max(first) as u32
    }

    /// Chunks that `[start, end)` touches.
    pub(super) fn outer_chunks(&self, start: u64, end: u64) -> std::ops::Range<u32> {
        let Some(chunks) = &self.chunks else { return 0..0 };
        ((start - self.base) / chunks.bytes) as u32..(end - self.base).div_ceil(chunks.bytes) as u32
    }
}
