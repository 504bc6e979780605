//! An array of strings in a file, and an index over it.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::gguf::{Array, Bytes, Gguf};

/// Texts by number, numbers by text.
///
/// The texts stay in the file's bytes; what is kept in memory is 4 bytes a text for its place and 8 to 16 for the
/// index. (A quarter million tokens as `String`s, in two maps, would be more than everything else that loading takes.)
pub(super) struct Texts {
    file: Arc<Bytes>,
    /// Where the array starts in the file.
    base: usize,
    /// Where each text starts after that; its length stands in the eight bytes before.
    starts: Vec<u32>,
    /// Open addressing, number + 1 in each slot, a power of two of them.
    slots: Vec<u32>,
    hasher: RandomState,
    longest_bytes: usize,
}

impl Texts {
    /// The texts of an array of this file; none if there are more than 2^24, or more than 4 GiB of them.
    pub(super) fn new(file: &Gguf, array: &Array<'_>) -> Option<Self> {
        let count = array.len();
        if count > (1 << 24) || array.bytes().len() > u32::MAX as usize {
            return None;
        }
        let all: &[u8] = (**file.bytes()).as_ref();
        // Both slices come from the same file, so the difference is the array's place in it.
        let base = (array.bytes().as_ptr() as usize).wrapping_sub(all.as_ptr() as usize);
        let mut texts = Self {
            file: file.bytes().clone(),
            base,
            starts: array.spans().map(|(at, _)| at as u32).collect(),
            slots: vec![0; (count * 2).next_power_of_two()],
            hasher: RandomState::new(),
            longest_bytes: array.spans().map(|(_, text)| text.len()).max().unwrap_or(0),
        };
        for number in 0..texts.len() as u32 {
            let slot = texts.slot(texts.text(number));
            if texts.slots[slot] == 0 {
                texts.slots[slot] = number + 1; // of equal texts the first counts
            }
        }
        Some(texts)
    }

    /// The slot that holds a text, or the empty one where it would go.
    fn slot(&self, text: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(text) as usize & mask;
        // At most half of the slots are taken, so an empty one comes.
        while self.slots[slot] != 0 && self.text(self.slots[slot] - 1) != text {
            slot = (slot + 1) & mask;
        }
        slot
    }

    pub(super) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The number of a text.
    pub(super) fn find(&self, text: &str) -> Option<u32> {
        if text.len() > self.longest_bytes {
            return None;
        }
        self.slots[self.slot(text)].checked_sub(1)
    }

    /// The text of a number; empty past the end.
    pub(super) fn text(&self, number: u32) -> &str {
        let bytes: &[u8] = (*self.file).as_ref();
        let text = self.starts.get(number as usize).and_then(|&start| {
            let start = self.base + start as usize;
            let length = u64::from_le_bytes(bytes.get(start - 8..)?.first_chunk().copied()?);
            std::str::from_utf8(bytes.get(start..start + length as usize)?).ok()
        });
        text.unwrap_or_default()
    }
}

impl std::fmt::Debug for Texts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Texts").field("len", &self.len()).finish_non_exhaustive()
    }
}
