//! What the host saw complete: uses are dropped, and free blocks merge across streams.

use super::block::NONE;
use super::*;

impl Heap {
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
        for (key, block) in self.blocks.iter() {
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
