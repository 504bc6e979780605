//! How blocks tile a segment: split, join, merge, and the index of the free ones.

use super::block::{Block, NONE, Zone};
use super::heap::zoned;
use super::uses::Home;
use super::*;

impl Heap {
    pub(super) fn new_block(&mut self, segment: u32, base: u64, bytes: u64, state: BlockState) -> u32 {
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
            uses: Uses::none(),
            stamp: Stamp(0),
        })
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
        if state == BlockState::Unbacked {
            self.list_unbacked(second);
        }
        second
    }

    pub(super) fn list_unbacked(&mut self, key: u32) {
        let head = std::mem::replace(&mut self.unbacked, key);
        let block = &mut self.blocks[key as usize];
        (block.bin_prev, block.bin_next) = (NONE, head);
        if head != NONE {
            self.blocks[head as usize].bin_prev = key;
        }
    }

    pub(super) fn unlist_unbacked(&mut self, key: u32) {
        let block = &self.blocks[key as usize];
        let (prev, next) = (block.bin_prev, block.bin_next);
        if next != NONE {
            self.blocks[next as usize].bin_prev = prev;
        }
        if prev == NONE {
            self.unbacked = next;
        } else {
            self.blocks[prev as usize].bin_next = next;
        }
    }

    /// Whether everything free is `stream`'s or nobody's, and merged as far as it goes: then nothing is to be
    /// had beyond what the warm path finds.
    pub(super) fn alone(&self, stream: StreamKey) -> bool {
        self.uniform() && self.only.is_none_or(|only| only == stream.0)
    }

    /// One stream and no window: whoever may have one free block may have them all.
    #[inline]
    pub(super) fn uniform(&self) -> bool {
        !self.multi_stream && self.private.is_empty()
    }

    /// Joins a block with the one after it; the first lives on. Neither is in an index.
    pub(super) fn join(&mut self, key: u32, next: u32) {
        if self.blocks[next as usize].state == BlockState::Unbacked {
            self.unlist_unbacked(next);
        }
        let gone = self.blocks.remove(next);
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
        self.note_streams(key);
        if self.uniform() { self.settle_uniform(key) } else { self.settle_mixed(key) }
    }

    /// With one stream and no window, free neighbours of one zone always merge; so no two of them are to be
    /// found around, and one look to each side is enough.
    #[inline]
    fn settle_uniform(&mut self, key: u32) -> u32 {
        let mut key = key;
        let block = &self.blocks[key as usize];
        let (prev, next, zone) = (block.prev, block.next, block.zone);
        // Both loads are on their way before either is waited for.
        let joins =
            |k: u32| k != NONE && self.blocks[k as usize].settled_free() && self.blocks[k as usize].zone == zone;
        let (before, after) = (joins(prev), joins(next));
        if after {
            self.unindex(next);
            self.join(key, next);
        }
        if before {
            self.unindex(prev);
            self.join(prev, key);
            key = prev;
        }
        self.index(key);
        key
    }

    fn settle_mixed(&mut self, key: u32) -> u32 {
        let mut key = key;
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
        let uses = &self.blocks[key as usize].uses;
        match uses.home() {
            Home::Idle => {}
            Home::Stream(s) if self.only == Some(s) => {}
            _ if uses.intersects(&self.private) => {}
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
}
