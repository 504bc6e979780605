//! The table of blocks.
//!
//! As `slab` keeps one, but without a tag to look at on every access: a block has bytes, a vacant place has none, and
//! whoever has a key from a link knows that the block is there.

use std::ops::{Index, IndexMut};

use super::BlockState;
use super::block::{Block, NONE};
use super::uses::{Stamp, Uses};

#[derive(Debug)]
pub(super) struct Blocks {
    places: Vec<Block>,
    /// The vacant place to fill next; linked by `next`.
    vacant: u32,
    count: usize,
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self { places: Vec::new(), vacant: NONE, count: 0 }
    }

    /// How many blocks there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    #[inline]
    pub(super) fn get(&self, key: usize) -> Option<&Block> {
        self.places.get(key).filter(|b| b.bytes != 0)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, key: usize) -> Option<&mut Block> {
        self.places.get_mut(key).filter(|b| b.bytes != 0)
    }

    /// A key for a block that has bytes. The place that was left last is taken first: its line is near.
    #[inline]
    pub(super) fn insert(&mut self, block: Block) -> u32 {
        debug_assert!(block.bytes != 0, "a block has bytes");
        self.count += 1;
        let key = self.vacant;
        match self.places.get_mut(key as usize) {
            Some(place) => {
                self.vacant = place.next;
                *place = block;
                key
            }
            None => self.push(block),
        }
    }

    #[cold]
    fn push(&mut self, block: Block) -> u32 {
        // Four billion blocks would need 256 GiB of bookkeeping: keys fit.
        self.places.push(block);
        self.places.len() as u32 - 1
    }

    /// Takes a block out.
    #[inline]
    pub(super) fn remove(&mut self, key: u32) -> Block {
        let place = &mut self.places[key as usize];
        debug_assert!(place.bytes != 0, "a vacant place is taken out");
        let left = Block { next: self.vacant, ..Block::EMPTY };
        self.vacant = key;
        self.count -= 1;
        std::mem::replace(place, left)
    }

    /// Every block with its key, ascending by key.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Block)> {
        self.places.iter().enumerate().filter(|(_, b)| b.bytes != 0)
    }
}

impl Index<usize> for Blocks {
    type Output = Block;
    #[inline]
    fn index(&self, key: usize) -> &Block {
        let block = &self.places[key];
        debug_assert!(block.bytes != 0, "a link to a vacant place");
        block
    }
}

impl IndexMut<usize> for Blocks {
    #[inline]
    fn index_mut(&mut self, key: usize) -> &mut Block {
        let block = &mut self.places[key];
        debug_assert!(block.bytes != 0, "a link to a vacant place");
        block
    }
}

impl Block {
    const EMPTY: Self = Self {
        base: 0,
        bytes: 0,
        prev: NONE,
        next: NONE,
        bin_prev: NONE,
        bin_next: NONE,
        segment: 0,
        state: BlockState::Claimed,
        quick: false,
        holes: false,
        zone: super::block::Zone::Large,
        uses: Uses::none(),
        stamp: Stamp(0),
    };
}
