//! The heap: hand out, take back, split, merge.
//!
//! A freed block waits in a ring of the last few frees, neither merged nor indexed. A request of exactly its
//! size takes it from there: a perfect fit is also the best fit, so nothing is lost by not merging first.
//! Any other request settles the whole ring before it looks, so placement is exact best fit all the same.

use std::collections::BTreeMap;

use slab::Slab;

use super::bins::Bins;
use super::block::{Block, Chunks, NONE, Segment, Zone};
use super::uses::Home;
use super::*;

/// How a heap places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HeapConfig {
    /// Every block is a multiple of this; a power of two, at least 1.
    pub(crate) granule_bytes: u64,
    /// Do not split off a remainder smaller than the request's bytes divided by this; 0: split off any.
    pub(crate) look_ahead_divisor: u64,
    /// Idle memory up to this size joins a neighbour that one stream still uses. More than that stays apart
    /// for other streams, once there is more than one.
    pub(crate) absorb_bytes: u64,
    /// Requests below this are small; 0: none is.
    pub(crate) small_bytes: u64,
    /// Small requests get a zone of their own in reserved ranges once this much has memory.
    pub(crate) zoned_from_bytes: u64,
}

impl HeapConfig {
    /// For reserved ranges: split to the granule.
    pub(crate) const VMM: Self = Self {
        granule_bytes: 512,
        look_ahead_divisor: 0,
        absorb_bytes: 2 << 20,
        small_bytes: 384 << 10,
        zoned_from_bytes: 128 << 20,
    };
    /// For slabs: leave up to a twentieth on, as a slightly larger request often follows.
    pub(crate) const SLAB: Self = Self { look_ahead_divisor: 20, small_bytes: 0, ..Self::VMM };
}

/// Bins of the large and of the small zone.
pub(super) type ZonedBins = [Bins; 2];

fn zoned(shift: u32) -> ZonedBins {
    [Bins::new(shift), Bins::new(shift)]
}

/// How many freed blocks wait unmerged.
const RING: usize = 8;

/// Segments end below this, so that rounding an address up never wraps.
const MAX_ADDRESS: u64 = 1 << 62;

/// The free and used memory of one purpose (scratch, state or weights: they never share a chunk).
#[derive(Debug)]
pub(crate) struct Heap {
    config: HeapConfig,
    shift: u32,
    pub(super) blocks: Slab<Block>,
    pub(super) segments: Slab<Segment>,
    pub(super) by_base: BTreeMap<u64, u32>,
    /// Free blocks that nobody uses, that several streams use, and that exactly one uses.
    pub(super) idle: ZonedBins,
    pub(super) mixed: ZonedBins,
    pub(super) streams: Vec<Option<ZonedBins>>,
    pub(super) ring: [u32; RING],
    pub(super) ring_len: usize,
    /// The only stream seen so far.
    only: Option<u32>,
    pub(super) multi_stream: bool,
    /// Stream keys that stand for a capture window or an arena: see `private`.
    pub(super) private: Uses,
    /// For each stream: the host saw everything before this complete.
    completed: Vec<Stamp>,
    unsettled: bool,
    pub(super) used_bytes: u64,
    pub(super) requested_bytes: u64,
    pub(super) used_blocks: u64,
    pub(super) slab_bytes: u64,
    pub(super) chunked_bytes: u64,
}

impl Heap {
    /// An empty heap. The granule is rounded up to a power of two.
    #[must_use]
    pub(crate) fn new(config: HeapConfig) -> Self {
        let granule_bytes = config.granule_bytes.clamp(1, 1 << 30).next_power_of_two();
        let shift = granule_bytes.trailing_zeros();
        Self {
            config: HeapConfig { granule_bytes, ..config },
            shift,
            blocks: Slab::new(),
            segments: Slab::new(),
            by_base: BTreeMap::new(),
            idle: zoned(shift),
            mixed: zoned(shift),
            streams: Vec::new(),
            ring: [NONE; RING],
            ring_len: 0,
            only: None,
            multi_stream: false,
            private: Uses::none(),
            completed: Vec::new(),
            unsettled: false,
            used_bytes: 0,
            requested_bytes: 0,
            used_blocks: 0,
            slab_bytes: 0,
            chunked_bytes: 0,
        }
    }

    /// Its configuration.
    #[must_use]
    pub(crate) fn config(&self) -> HeapConfig {
        self.config
    }

    /// Checks and rounds a request for this heap. `align` 0: any.
    #[inline]
    pub(crate) fn request(&self, bytes: u64, align: u64) -> Result<Request, BadRequest> {
        Request::new(bytes, align, self.config.granule_bytes)
    }

    // ---- segments

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
            self.blocks.remove(block as usize);
        }
        self.segments.remove(segment.index());
        Ok(())
    }

    // ---- the warm path

    /// The warm path: a block that `stream` may use at once. Its queued uses (at most `stream`'s) are dropped.
    #[inline]
    pub(crate) fn alloc(&mut self, request: &Request, stream: StreamKey) -> Option<BlockKey> {
        for i in (0..self.ring_len).rev() {
            let key = self.ring[i];
            let block = &self.blocks[key as usize];
            if block.bytes == request.bytes && block.base & (request.align - 1) == 0 && block.uses.within(stream) {
                self.ring.copy_within(i + 1..self.ring_len, i);
                self.ring_len -= 1;
                self.blocks[key as usize].quick = false;
                return Some(self.hand_out(key, request));
            }
        }
        self.settle_ring();
        let zone = self.zone(request);
        self.alloc_in(request, stream, zone).or_else(|| self.alloc_run(request, stream, zone))
    }

    /// Where a request belongs.
    #[inline]
    pub(super) fn zone(&self, request: &Request) -> Zone {
        let small = request.bytes < self.config.small_bytes && self.chunked_bytes >= self.config.zoned_from_bytes;
        if small { Zone::Small } else { Zone::Large }
    }

    /// Best fit in one zone.
    #[inline]
    pub(super) fn alloc_in(&mut self, request: &Request, stream: StreamKey, zone: Zone) -> Option<BlockKey> {
        let zone = zone as usize;
        let own = self.streams.get(stream.0 as usize).and_then(Option::as_ref);
        let own = own.and_then(|b| b[zone].best_fit(&self.blocks, request.bytes, request.align));
        let idle = self.idle[zone].best_fit(&self.blocks, request.bytes, request.align);
        // On a tie the stream's own block: idle ones serve everybody.
        let (key, mine) = match (own, idle) {
            (Some((own, bytes)), Some((idle, idle_bytes))) => {
                if bytes <= idle_bytes {
                    (own, true)
                } else {
                    (idle, false)
                }
            }
            (Some((own, _)), None) => (own, true),
            (None, Some((idle, _))) => (idle, false),
            (None, None) => return None,
        };
        let bins = if mine { self.streams[stream.0 as usize].as_mut()? } else { &mut self.idle };
        bins[zone].remove(&mut self.blocks, key);
        let block = &self.blocks[key as usize];
        let start = (block.base + request.align - 1) & !(request.align - 1);
        let key = self.trim(key, start, request);
        Some(self.hand_out(key, request))
    }

    /// Takes a used block back. `uses`: streams with queued work that may touch it; `now`: the pool's clock.
    #[inline]
    pub(crate) fn free(&mut self, block: BlockKey, uses: Uses, now: Stamp) -> Result<(), Misuse> {
        let Some(entry) = self.blocks.get_mut(block.index()).filter(|b| b.state == BlockState::Used) else {
            return Err(Misuse::Block(block));
        };
        self.used_bytes -= entry.bytes;
        self.requested_bytes -= entry.requested_bytes;
        self.used_blocks -= 1;
        entry.requested_bytes = 0;
        entry.state = BlockState::Free;
        entry.stamp = if uses.is_empty() { Stamp(0) } else { now };
        entry.uses = uses;
        self.segments[entry.segment as usize].busy_blocks -= 1;
        if entry.holes {
            self.free_with_holes(block.0);
            return Ok(());
        }
        entry.quick = true;
        if self.ring_len == RING {
            let oldest = self.ring[0];
            self.ring.copy_within(1.., 0);
            self.ring_len -= 1;
            self.blocks[oldest as usize].quick = false;
            self.settle_free(oldest);
        }
        self.ring[self.ring_len] = block.0;
        self.ring_len += 1;
        Ok(())
    }

    /// Merges and indexes the blocks that wait in the ring.
    #[inline]
    pub(super) fn settle_ring(&mut self) {
        for i in 0..std::mem::take(&mut self.ring_len) {
            let key = self.ring[i];
            self.blocks[key as usize].quick = false;
            self.settle_free(key);
        }
    }

    /// Marks a block used that is in no index.
    #[inline]
    pub(super) fn hand_out(&mut self, key: u32, request: &Request) -> BlockKey {
        let block = &mut self.blocks[key as usize];
        block.state = BlockState::Used;
        block.requested_bytes = request.requested_bytes;
        block.uses = Uses::none();
        self.used_bytes += block.bytes;
        self.requested_bytes += request.requested_bytes;
        self.used_blocks += 1;
        self.segments[block.segment as usize].busy_blocks += 1;
        BlockKey(key)
    }

    /// Cuts a free, unindexed block down to the request at `start`; what is left over is settled.
    #[inline]
    fn trim(&mut self, key: u32, start: u64, request: &Request) -> u32 {
        let block = &mut self.blocks[key as usize];
        let (base, bytes) = (block.base, block.bytes);
        // What is left over must not merge with what is taken.
        block.state = BlockState::Used;
        let mut taken = key;
        if start > base {
            taken = self.split(key, start - base);
            self.blocks[key as usize].state = BlockState::Free;
            self.settle_free(key);
        }
        let rest = bytes - (start - base) - request.bytes;
        let keep = request.bytes.checked_div(self.config.look_ahead_divisor).unwrap_or(0);
        if rest > keep {
            let rest = self.split(taken, request.bytes);
            self.blocks[rest as usize].state = BlockState::Free;
            self.settle_free(rest);
        }
        taken
    }

    // ---- the tiling

    pub(super) fn new_block(&mut self, segment: u32, base: u64, bytes: u64, state: BlockState) -> u32 {
        // Four billion blocks would need 300 GiB of bookkeeping: keys fit.
        self.blocks.insert(Block {
            base,
            bytes,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
            segment,
            state,
            quick: false,
            holes: false,
            zone: Zone::Large,
            requested_bytes: 0,
            uses: Uses::none(),
            stamp: Stamp(0),
        }) as u32
    }

    /// Cuts a block after `bytes`; the new second part has the same state and uses. In no index.
    pub(super) fn split(&mut self, key: u32, bytes: u64) -> u32 {
        let block = &mut self.blocks[key as usize];
        let (segment, next, state, zone) = (block.segment, block.next, block.state, block.zone);
        let (base, rest) = (block.base + bytes, block.bytes - bytes);
        let (uses, stamp) = (block.uses.clone(), block.stamp);
        block.bytes = bytes;
        let second = self.new_block(segment, base, rest, state);
        let block = &mut self.blocks[second as usize];
        (block.prev, block.next, block.uses, block.stamp, block.zone) = (key, next, uses, stamp, zone);
        self.blocks[key as usize].next = second;
        if next != NONE {
            self.blocks[next as usize].prev = second;
        }
        let entry = &mut self.segments[segment as usize];
        let slot = entry.hint_slot(base);
        if entry.hints[slot] == NONE {
            entry.hints[slot] = second;
        }
        second
    }

    /// Joins a block with the one after it; the first lives on. Neither is in an index.
    pub(super) fn join(&mut self, key: u32, next: u32) {
        let gone = self.blocks.remove(next as usize);
        let block = &mut self.blocks[key as usize];
        block.bytes += gone.bytes;
        block.next = gone.next;
        block.uses.extend(&gone.uses);
        block.stamp = block.stamp.max(gone.stamp);
        if gone.next != NONE {
            self.blocks[gone.next as usize].prev = key;
        }
        let entry = &mut self.segments[gone.segment as usize];
        let slot = entry.hint_slot(gone.base);
        if entry.hints[slot] == next {
            let block = &self.blocks[key as usize];
            let starts_here = |k: u32| k != NONE && entry.hint_slot(self.blocks[k as usize].base) == slot;
            entry.hints[slot] = if entry.hint_slot(block.base) == slot {
                key
            } else if starts_here(gone.next) {
                gone.next
            } else {
                NONE
            };
        }
    }

    /// Whether two neighbours may be one free block.
    #[inline]
    pub(super) fn mergeable(&self, a: &Block, b: &Block) -> bool {
        if !a.settled_free() || !b.settled_free() || a.zone != b.zone {
            return false;
        }
        if a.uses == b.uses {
            return true;
        }
        // While there is one stream, nobody else wants what is idle. A window must not swallow it, though.
        let absorb = if self.multi_stream { self.config.absorb_bytes } else { u64::MAX };
        (a.uses.is_empty() && a.bytes <= absorb && !b.uses.intersects(&self.private))
            || (b.uses.is_empty() && b.bytes <= absorb && !a.uses.intersects(&self.private))
    }

    /// Merges a free, unindexed block with what is around it and indexes the result.
    pub(super) fn settle_free(&mut self, key: u32) -> u32 {
        let mut key = key;
        self.note_streams(key);
        loop {
            let block = &self.blocks[key as usize];
            let (prev, next) = (block.prev, block.next);
            if prev != NONE && self.mergeable(&self.blocks[prev as usize], block) {
                self.unindex(prev);
                self.join(prev, key);
                key = prev;
            } else if next != NONE && self.mergeable(block, &self.blocks[next as usize]) {
                self.unindex(next);
                self.join(key, next);
            } else {
                break;
            }
        }
        self.index(key);
        key
    }

    #[inline]
    pub(super) fn note_streams(&mut self, key: u32) {
        if self.multi_stream {
            return;
        }
        match self.blocks[key as usize].uses.home() {
            Home::Idle => {}
            _ if self.blocks[key as usize].uses.intersects(&self.private) => {}
            Home::Stream(s) => self.note_stream(StreamKey(s)),
            Home::Mixed => self.multi_stream = true,
        }
    }

    /// Idle memory is everybody's as soon as there is a second stream.
    pub(super) fn note_stream(&mut self, stream: StreamKey) {
        match self.only {
            None => self.only = Some(stream.0),
            Some(only) => self.multi_stream |= only != stream.0,
        }
    }

    #[inline]
    pub(super) fn index(&mut self, key: u32) {
        let block = &self.blocks[key as usize];
        let (home, zone) = (block.uses.home(), block.zone as usize);
        let bins = match home {
            Home::Idle => &mut self.idle,
            Home::Mixed => &mut self.mixed,
            Home::Stream(s) => {
                let s = s as usize;
                if self.streams.len() <= s {
                    self.streams.resize_with(s + 1, || None);
                }
                let shift = self.shift;
                self.streams[s].get_or_insert_with(|| zoned(shift))
            }
        };
        bins[zone].insert(&mut self.blocks, key);
    }

    #[inline]
    pub(super) fn unindex(&mut self, key: u32) {
        let block = &self.blocks[key as usize];
        let (home, zone) = (block.uses.home(), block.zone as usize);
        let bins = match home {
            Home::Idle => Some(&mut self.idle),
            Home::Mixed => Some(&mut self.mixed),
            Home::Stream(s) => self.streams.get_mut(s as usize).and_then(Option::as_mut),
        };
        if let Some(bins) = bins {
            bins[zone].remove(&mut self.blocks, key);
        }
    }

    // ---- completion

    /// The host saw everything complete that was queued on `stream` before `upto`. O(1); blocks notice when
    /// the slow paths look at them.
    pub(crate) fn completed(&mut self, stream: StreamKey, upto: Stamp) {
        let s = stream.0 as usize;
        if self.completed.len() <= s {
            self.completed.resize(s + 1, Stamp(0));
        }
        if self.completed[s] < upto {
            self.completed[s] = upto;
            self.unsettled = true;
        }
    }

    /// The stream is gone and complete: takes it out of every set, so that its number may be reused.
    pub(crate) fn forget_stream(&mut self, stream: StreamKey) {
        self.completed(stream, Stamp(u64::MAX));
        self.settle_completed();
        self.completed[stream.0 as usize] = Stamp(0);
    }

    /// Drops the uses that the host saw complete, then merges what can be merged now.
    pub(super) fn settle_completed(&mut self) {
        self.settle_ring();
        if !std::mem::take(&mut self.unsettled) {
            return;
        }
        let mut changed = Vec::new();
        for (key, block) in &self.blocks {
            let busy = |s: StreamKey| self.completed.get(s.0 as usize).is_none_or(|&upto| upto < block.stamp);
            let waits = matches!(block.state, BlockState::Free | BlockState::Claimed) && !block.uses.is_empty();
            if waits && !block.uses.iter().all(busy) {
                changed.push((key as u32, block.uses.iter().filter(|&s| busy(s)).collect::<Uses>()));
            }
        }
        if changed.is_empty() {
            return;
        }
        // First all uses, then all merges: a merge must not mix finished uses with a later stamp.
        for (key, uses) in changed {
            let free = self.blocks[key as usize].state == BlockState::Free;
            if free {
                self.unindex(key);
            }
            let block = &mut self.blocks[key as usize];
            if uses.is_empty() {
                block.stamp = Stamp(0);
            }
            block.uses = uses;
            if free {
                self.index(key);
            }
        }
        self.merge_all();
    }

    /// Merges whatever may be merged, after uses have changed.
    pub(super) fn merge_all(&mut self) {
        let firsts: Vec<u32> = self.segments.iter().map(|(_, s)| s.first).collect();
        for mut key in firsts {
            while key != NONE {
                let next = self.blocks[key as usize].next;
                if next != NONE && self.mergeable(&self.blocks[key as usize], &self.blocks[next as usize]) {
                    self.unindex(key);
                    self.unindex(next);
                    self.join(key, next);
                    self.index(key);
                } else {
                    key = next;
                }
            }
        }
    }
}
