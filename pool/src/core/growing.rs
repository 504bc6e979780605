//! Blocks that grow in place: address space for the most they may need, memory as it comes.
//!
//! Such a block is used from the beginning, with holes where no memory is. [`back`](Heap::back) fills holes,
//! [`unback_used`](Heap::unback_used) makes them, and when the block is freed its backed parts are free and its holes
//! unbacked space, as with any block that lost pages.

use super::block::{NONE, Zone};
use super::*;

impl Heap {
    /// Takes unbacked space for a growing block: whole chunks, from the smallest stretch that has room. `None`: no segment
    /// has the address space.
    pub(crate) fn alloc_growing(&mut self, request: &Request) -> Option<BlockKey> {
        let mut best: Option<(u64, u32, u64)> = None;
        let mut key = self.unbacked;
        while key != NONE {
            let block = &self.blocks[key as usize];
            let unit = self.segments[block.segment as usize].chunks.as_ref().map_or(0, |c| c.bytes);
            let start = (block.base + (request.align - 1)) & !(request.align - 1);
            let fits = start <= block.end() && block.end() - start >= request.bytes;
            let whole = unit != 0 && request.bytes.is_multiple_of(unit) && request.align.is_multiple_of(unit);
            if fits && whole && block.zone == Zone::Large && best.is_none_or(|b| (block.bytes, block.base) < (b.0, b.2))
            {
                best = Some((block.bytes, key, block.base));
            }
            key = block.bin_next;
        }
        let (_, key, base) = best?;
        let start = (base + (request.align - 1)) & !(request.align - 1);
        // What is split off an unbacked block is listed as one.
        let taken = if start > base { self.split(key, start - base) } else { key };
        if self.blocks[taken as usize].bytes > request.bytes {
            self.split(taken, request.bytes);
        }
        self.unlist_unbacked(taken);
        let block = self.hand_out(taken, request);
        self.blocks[taken as usize].holes = true;
        Some(block)
    }
}
