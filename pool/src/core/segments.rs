//! Segments come and go.

use super::block::{Chunks, NONE, Segment, Zone};
use super::*;

/// Segments end below this, so that rounding an address up never wraps.
const MAX_ADDRESS: u64 = 1 << 62;

impl Heap {
    /// Takes in a slab from the driver's `malloc`: all of it free. Edges short of a granule are left unused.
    pub(crate) fn add_segment(&mut self, base: u64, bytes: u64) -> Result<SegmentKey, Misuse> {
        let refused = Misuse::Range { base, bytes };
        let granule = self.config.granule_bytes;
        let end = base.checked_add(bytes).filter(|&e| e <= MAX_ADDRESS).ok_or(refused)?;
        let start = base.checked_next_multiple_of(granule).ok_or(refused)?;
        let end = end & !(granule - 1);
        if base == 0 || end <= start {
            return Err(refused);
        }
        let key = self.insert_segment(Segment::new(start, end - start, None), BlockState::Free)?;
        self.slab_bytes += end - start;
        let first = self.segments[key.index()].first;
        self.settle_free(first);
        Ok(key)
    }

    /// Takes in a reserved range: address space without memory. `base` and `chunk_bytes` are multiples of
    /// the granule, `bytes` of `chunk_bytes`.
    pub(crate) fn reserve_segment(&mut self, base: u64, bytes: u64, chunk_bytes: u64) -> Result<SegmentKey, Misuse> {
        let refused = Misuse::Range { base, bytes };
        let granule = self.config.granule_bytes;
        base.checked_add(bytes).filter(|&e| e <= MAX_ADDRESS).ok_or(refused)?;
        let whole = |n: u64, unit: u64| n != 0 && n.is_multiple_of(unit);
        if !whole(chunk_bytes, granule) || !whole(base, granule) || !whole(bytes, chunk_bytes) {
            return Err(refused);
        }
        let count = u32::try_from(bytes / chunk_bytes).map_err(|_| refused)?;
        // A chunk that was mapped for one stream must not fall to the neighbour of another.
        self.config.absorb_bytes = self.config.absorb_bytes.min(chunk_bytes / 2);
        self.insert_segment(Segment::new(base, bytes, Some(Chunks::new(chunk_bytes, count))), BlockState::Unbacked)
    }

    fn insert_segment(&mut self, mut segment: Segment, state: BlockState) -> Result<SegmentKey, Misuse> {
        let (base, bytes) = (segment.base, segment.bytes);
        let below = self.by_base.range(..segment.end()).next_back();
        if below.is_some_and(|(_, &k)| self.segments[k as usize].end() > base) {
            return Err(Misuse::Range { base, bytes });
        }
        let key = self.segments.vacant_key() as u32;
        let small_bytes = if self.config.small_bytes == 0 { 0 } else { segment.small_end - base };
        segment.small_end = base + small_bytes;
        segment.first = self.new_block(key, base, bytes, state);
        if state == BlockState::Unbacked {
            self.list_unbacked(segment.first);
        }
        segment.hints[0] = segment.first;
        let first = segment.first;
        self.segments.insert(segment);
        if small_bytes > 0 {
            self.blocks[first as usize].zone = Zone::Small;
            let large = self.split(first, small_bytes);
            self.blocks[large as usize].zone = Zone::Large;
        }
        self.by_base.insert(base, key);
        Ok(SegmentKey(key))
    }

    /// Forgets a slab that is claimed as a whole, or a reserved range none of whose chunks is backed and
    /// none of whose blocks is used.
    pub(crate) fn remove_segment(&mut self, segment: SegmentKey) -> Result<(), Misuse> {
        let refused = Misuse::Segment(segment);
        let entry = self.segments.get(segment.index()).ok_or(refused)?;
        let state = if entry.chunks.is_none() { BlockState::Claimed } else { BlockState::Unbacked };
        let mut blocks = Vec::new();
        let mut key = entry.first;
        while key != NONE {
            blocks.push(key);
            key = self.blocks[key as usize].next;
            // One block a zone at most.
            if blocks.len() > 2 {
                return Err(refused);
            }
        }
        if blocks.iter().any(|&b| self.blocks[b as usize].state != state) {
            return Err(refused);
        }
        if entry.chunks.is_none() {
            self.slab_bytes -= entry.bytes;
        }
        self.by_base.remove(&entry.base);
        for block in blocks {
            if state == BlockState::Unbacked {
                self.unlist_unbacked(block);
            }
            self.blocks.remove(block);
        }
        self.segments.remove(segment.index());
        Ok(())
    }
}
