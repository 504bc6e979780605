//! Private stream keys: the free memory of a capture window or an arena.
//!
//! The runtime tags what is freed inside a window with a stream key that stands for no stream. Only a request
//! under the same key finds such memory on the warm path; it never merges with anything else, and the slow
//! paths leave it alone because their `usable` says no to the key.

use super::block::NONE;
use super::*;

impl Heap {
    /// Declares a stream key private, or ordinary again. Before its first use, or after its last.
    pub(crate) fn set_private(&mut self, stream: StreamKey, private: bool) {
        if private {
            self.private.insert(stream);
        } else {
            self.private.remove(stream);
        }
    }

    /// In every free block that `from` uses, puts `to` in its place. `now` is the pool's clock.
    pub(crate) fn retag(&mut self, from: StreamKey, to: &Uses, now: Stamp) {
        self.settle_ring();
        let tagged = |b: &block::Block| b.state == BlockState::Free && b.uses.contains(from);
        let keys: Vec<u32> = self.blocks.iter().filter(|(_, b)| tagged(b)).map(|(k, _)| k as u32).collect();
        for &key in &keys {
            self.unindex(key);
            let block = &mut self.blocks[key as usize];
            block.uses.remove(from);
            block.uses.extend(to);
            block.stamp = if block.uses.is_empty() { Stamp(0) } else { block.stamp.max(now) };
            self.note_streams(key);
            self.index(key);
        }
        if !keys.is_empty() {
            self.merge_all();
        }
    }

    /// Every free block that `stream` uses becomes used, with nothing requested, joined as far as they touch:
    /// what was freed inside a window now belongs to its graph.
    pub(crate) fn take_private(&mut self, stream: StreamKey) -> Vec<BlockKey> {
        self.settle_ring();
        let mut taken: Vec<BlockKey> = Vec::new();
        let firsts: Vec<u32> = self.by_base.values().map(|&s| self.segments[s as usize].first).collect();
        for first in firsts {
            let mut key = first;
            while key != NONE {
                let block = &self.blocks[key as usize];
                let (prev, next) = (block.prev, block.next);
                if block.state == BlockState::Free && block.uses.contains(stream) {
                    self.unindex(key);
                    let block = &mut self.blocks[key as usize];
                    block.set_used(0);
                    block.uses = Uses::none();
                    let zone = block.zone;
                    if prev != NONE && taken.last() == Some(&BlockKey(prev)) && self.blocks[prev as usize].zone == zone
                    {
                        self.join(prev, key);
                    } else {
                        taken.push(BlockKey(key));
                    }
                }
                key = next;
            }
        }
        taken
    }
}
