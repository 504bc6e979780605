//! The heap: hand out, take back, split, merge.
//!
//! A freed block waits in a ring of the last few frees, neither merged nor indexed. A request of exactly its
//! size takes it from there: a perfect fit is also the best fit, so nothing is lost by not merging first.
//! Any other request settles the whole ring before it looks, so placement is exact best fit all the same.

use std::collections::BTreeMap;

use slab::Slab;

use super::bins::Bins;
use super::block::{NONE, Segment, Zone};
use super::table::Blocks;
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

pub(super) fn zoned(shift: u32) -> ZonedBins {
    [Bins::new(shift), Bins::new(shift)]
}

/// How many freed blocks wait unmerged.
const RING: usize = 8;

/// The free and used memory of one purpose (scratch, state or weights: they never share a chunk).
#[derive(Debug)]
pub(crate) struct Heap {
    pub(super) config: HeapConfig,
    pub(super) shift: u32,
    pub(super) blocks: Blocks,
    pub(super) segments: Slab<Segment>,
    pub(super) by_base: BTreeMap<u64, u32>,
    /// Free blocks that nobody uses, that several streams use, and that exactly one uses.
    pub(super) idle: ZonedBins,
    pub(super) mixed: ZonedBins,
    pub(super) streams: Vec<Option<ZonedBins>>,
    /// Unbacked blocks, linked like a bin: growth starts from them and need not look at the others.
    pub(super) unbacked: u32,
    pub(super) ring: [u32; RING],
    pub(super) ring_len: usize,
    /// The only stream seen so far.
    pub(super) only: Option<u32>,
    pub(super) multi_stream: bool,
    /// Stream keys that stand for a capture window or an arena: see `private`.
    pub(super) private: Uses,
    /// For each stream: the host saw everything before this complete.
    pub(super) completed: Vec<Stamp>,
    pub(super) unsettled: bool,
    /// Its pages are away, or about to go: see `sleep`.
    pub(super) asleep: bool,
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
            blocks: Blocks::new(),
            segments: Slab::new(),
            by_base: BTreeMap::new(),
            idle: zoned(shift),
            mixed: zoned(shift),
            streams: Vec::new(),
            unbacked: NONE,
            ring: [NONE; RING],
            ring_len: 0,
            only: None,
            multi_stream: false,
            private: Uses::none(),
            completed: Vec::new(),
            unsettled: false,
            asleep: false,
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

    /// The warm path: a block that `stream` may use at once. Its queued uses (at most `stream`'s) are dropped.
    #[inline]
    pub(crate) fn alloc(&mut self, request: &Request, stream: StreamKey) -> Option<BlockKey> {
        if self.asleep {
            return None;
        }
        for i in (0..self.ring_len).rev() {
            let key = self.ring[i];
            let block = &self.blocks[key as usize];
            if block.bytes == request.bytes && block.base & (request.align - 1) == 0 && block.uses.within(stream) {
                self.ring_len -= 1;
                if i < self.ring_len {
                    self.ring.copy_within(i + 1..=self.ring_len, i);
                }
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

    /// Takes a used block back; its bytes. `uses`: streams with queued work that may touch it; `now`: the
    /// pool's clock.
    #[inline]
    pub(crate) fn free(&mut self, block: BlockKey, uses: Uses, now: Stamp) -> Result<u64, Misuse> {
        let Some(entry) = self.blocks.get_mut(block.index()).filter(|b| b.state == BlockState::Used) else {
            return Err(Misuse::Block(block));
        };
        let bytes = entry.bytes;
        entry.state = BlockState::Free;
        entry.stamp = if uses.is_empty() { Stamp(0) } else { now };
        entry.uses = uses;
        if entry.holes {
            self.free_with_holes(block.0);
            return Ok(bytes);
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
        Ok(bytes)
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
        block.set_used(request.requested_bytes);
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
            if self.uniform() {
                // The block had merged with what is around it before it was cut.
                self.index(rest);
            } else {
                self.settle_free(rest);
            }
        }
        taken
    }
}
