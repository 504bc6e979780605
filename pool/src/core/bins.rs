//! The index of free blocks of one home: size bins under two levels of bitmaps.
//!
//! Up to 63 granules every size has a bin of its own; above, each doubling is cut into 64 bins, so two
//! blocks of one bin differ by less than 1/64. A search looks through the request's own bin for the tightest
//! fit, then finds the next bin that has anything by two bit scans; every block there fits, and again the
//! tightest is taken. With thousands of free blocks a bin holds two or three.

use super::block::{Block, NONE};
use super::table::Blocks;

/// Octaves: the exact one, then one for each doubling up to 2^47 bytes in granules of one byte.
const LEVELS: usize = 44;
const SLOTS: usize = 64;

/// A bin is searched this far for the tightest fit as long as some fit is known: thousands of blocks within
/// 1/64 of each other are not worth telling apart.
const LOOK: u32 = 32;

#[derive(Debug)]
pub(super) struct Bins {
    shift: u32,
    levels: u64,
    slots: [u64; LEVELS],
    /// Made with the first block.
    heads: Box<[u32]>,
    pub(super) count: u32,
}

impl Bins {
    pub(super) fn new(granule_shift: u32) -> Self {
        Self { shift: granule_shift, levels: 0, slots: [0; LEVELS], heads: Box::default(), count: 0 }
    }

    #[cold]
    fn make_heads(&mut self) {
        self.heads = vec![NONE; LEVELS * SLOTS].into_boxed_slice();
    }

    /// Level and slot of a block of so many bytes.
    #[inline]
    fn bin(&self, bytes: u64) -> (usize, usize) {
        let granules = bytes >> self.shift;
        if granules < SLOTS as u64 {
            (0, granules as usize)
        } else {
            let top = granules.ilog2();
            // Sizes past the last level (no request is that large) share its last bin.
            let level = top as usize - 5;
            if level < LEVELS {
                (level, (granules >> (top - 6)) as usize & (SLOTS - 1))
            } else {
                (LEVELS - 1, SLOTS - 1)
            }
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, key: u32) {
        if self.heads.is_empty() {
            self.make_heads();
        }
        let (level, slot) = self.bin(blocks[key as usize].bytes);
        let head = std::mem::replace(&mut self.heads[level * SLOTS + slot], key);
        let block = &mut blocks[key as usize];
        block.bin_prev = NONE;
        block.bin_next = head;
        if head == NONE {
            self.slots[level] |= 1 << slot;
            self.levels |= 1 << level;
        } else {
            blocks[head as usize].bin_prev = key;
        }
        self.count += 1;
    }

    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut Blocks, key: u32) {
        let block = &blocks[key as usize];
        let (prev, next) = (block.bin_prev, block.bin_next);
        if next != NONE {
            blocks[next as usize].bin_prev = prev;
        }
        if prev != NONE {
            blocks[prev as usize].bin_next = next;
        } else {
            let (level, slot) = self.bin(blocks[key as usize].bytes);
            self.heads[level * SLOTS + slot] = next;
            if next == NONE {
                self.slots[level] &= !(1 << slot);
                if self.slots[level] == 0 {
                    self.levels &= !(1 << level);
                }
            }
        }
        self.count -= 1;
    }

    /// The first bin at or after (`level`, `slot`) that has anything.
    #[inline]
    fn next_bin(&self, level: usize, slot: usize) -> Option<(usize, usize)> {
        if slot < SLOTS {
            let here = self.slots[level] >> slot;
            if here != 0 {
                return Some((level, slot + here.trailing_zeros() as usize));
            }
        }
        let above = if level + 1 < LEVELS { self.levels >> (level + 1) } else { 0 };
        if above == 0 {
            return None;
        }
        let level = level + 1 + above.trailing_zeros() as usize;
        Some((level, self.slots[level].trailing_zeros() as usize))
    }

    /// The smallest block that has room for `bytes` at `align`: its key and size.
    #[inline]
    pub(super) fn best_fit(&self, blocks: &Blocks, bytes: u64, align: u64) -> Option<(u32, u64)> {
        if self.count == 0 {
            return None;
        }
        let (mut level, mut slot) = self.bin(bytes);
        while let Some((l, s)) = self.next_bin(level, slot) {
            let mut best: Option<(u32, u64)> = None;
            let mut key = self.heads[l * SLOTS + s];
            let mut looked = 0;
            while key != NONE {
                let block = &blocks[key as usize];
                let size = block.bytes;
                if size >= bytes && best.is_none_or(|(_, b)| size < b) && fits(block, bytes, align) {
                    best = Some((key, size));
                    if size == bytes || l == 0 {
                        break;
                    }
                }
                looked += 1;
                if looked > LOOK && best.is_some() {
                    break;
                }
                key = block.bin_next;
            }
            if best.is_some() {
                return best;
            }
            (level, slot) = (l, s + 1);
        }
        None
    }

    /// Size of the largest block.
    pub(super) fn largest(&self, blocks: &Blocks) -> u64 {
        if self.levels == 0 {
            return 0;
        }
        let level = 63 - self.levels.leading_zeros() as usize;
        let slot = 63 - self.slots[level].leading_zeros() as usize;
        let mut largest = 0;
        let mut key = self.heads[level * SLOTS + slot];
        while key != NONE {
            largest = largest.max(blocks[key as usize].bytes);
            key = blocks[key as usize].bin_next;
        }
        largest
    }

    /// Every block, for the invariant check; also whether bitmaps and lists agree.
    pub(super) fn audit(&self, blocks: &Blocks) -> Result<Vec<u32>, String> {
        let mut keys = Vec::new();
        if self.heads.is_empty() {
            return if self.levels == 0 && self.count == 0 { Ok(keys) } else { Err("bins without heads".into()) };
        }
        for level in 0..LEVELS {
            if (self.slots[level] != 0) != (self.levels >> level & 1 == 1) {
                return Err(format!("level bit {level} disagrees with its slots"));
            }
            for slot in 0..SLOTS {
                let mut key = self.heads[level * SLOTS + slot];
                if (key != NONE) != (self.slots[level] >> slot & 1 == 1) {
                    return Err(format!("slot bit {level}/{slot} disagrees with its list"));
                }
                let mut prev = NONE;
                while key != NONE {
                    let block = blocks.get(key as usize).ok_or_else(|| format!("bin holds dead block {key}"))?;
                    if self.bin(block.bytes) != (level, slot) || block.bin_prev != prev {
                        return Err(format!("block {key} is in the wrong bin or mislinked"));
                    }
                    keys.push(key);
                    if keys.len() > blocks.len() {
                        return Err("a bin is a ring".into());
                    }
                    prev = key;
                    key = block.bin_next;
                }
            }
        }
        if keys.len() != self.count as usize {
            return Err(format!("{} blocks in bins, {} counted", keys.len(), self.count));
        }
        Ok(keys)
    }
}

/// Whether an aligned start leaves room.
#[inline]
fn fits(block: &Block, bytes: u64, align: u64) -> bool {
    // Bases are below 2^63 (checked when a segment comes in), so rounding up can not wrap.
    let start = (block.base + align - 1) & !(align - 1);
    start - block.base <= block.bytes - bytes
}
