//! Where plain allocations come from: the bytes freed last are handed out first.

use std::collections::BTreeMap;

use super::pages::{self, PAGE_BYTES};

/// Alignment and rounding of plain allocations, bytes.
const UNIT_BYTES: usize = 512;
/// How many freed addresses are remembered for reuse before the lowest fit is taken.
const RECENT: usize = 64;
/// Freed allocations from here on give their pages back.
const DISCARD_BYTES: usize = 128 << 10;

/// A reserved range, carved into allocations.
#[derive(Debug)]
pub(super) struct Arena {
    base: u64,
    bytes: usize,
    /// Free pieces: start to end, none touching another.
    free: BTreeMap<u64, u64>,
    recent: Vec<u64>,
}

impl Arena {
    /// Address space for a device of that memory; twice the memory, so that fragments of addresses do not matter.
    pub(super) fn new(memory_bytes: usize) -> Option<Self> {
        let bytes = memory_bytes.checked_mul(2)?.checked_next_multiple_of(2 << 20)?;
        let base = pages::reserve(bytes, 2 << 20)?;
        Some(Self { base, bytes, free: BTreeMap::from([(base, base + bytes as u64)]), recent: Vec::new() })
    }

    /// What an allocation of `bytes` takes.
    pub(super) fn rounded(bytes: usize) -> Option<usize> {
        bytes.checked_next_multiple_of(UNIT_BYTES)
    }

    /// A range of a rounded size, readable and writable.
    pub(super) fn take(&mut self, bytes: usize) -> Option<u64> {
        let len = bytes as u64;
        let reused = self.recent.iter().rposition(|&at| self.piece(at).is_some_and(|(_, end)| end - at >= len));
        let at = match reused {
            Some(index) => self.recent.remove(index),
            None => *self.free.iter().find(|(start, end)| **end - **start >= len)?.0,
        };
        let (start, end) = self.piece(at)?;
        let first = at / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let last = (at + len).next_multiple_of(PAGE_BYTES as u64);
        if !pages::protect(first, (last - first) as usize, true) {
            return None;
        }
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at);
        }
        if at + len < end {
            self.free.insert(at + len, end);
        }
        Some(at)
    }

    /// Takes a range back.
    pub(super) fn give(&mut self, at: u64, bytes: usize) {
        if crate::mutant::is("host.fresh-addresses") {
            return;
        }
        if bytes >= DISCARD_BYTES {
            pages::discard(at, bytes);
        }
        let mut start = at;
        let mut end = at + bytes as u64;
        if let Some((&before, &before_end)) = self.free.range(..at).next_back()
            && before_end == at
        {
            start = before;
        }
        if let Some(after_end) = self.free.remove(&end) {
            end = after_end;
        }
        self.free.insert(start, end);
        if self.recent.len() == RECENT {
            self.recent.remove(0);
        }
        self.recent.push(at);
    }

    fn piece(&self, at: u64) -> Option<(u64, u64)> {
        self.free.range(..=at).next_back().map(|(&start, &end)| (start, end)).filter(|&(_, end)| at < end)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        pages::give_up(self.base, self.bytes);
    }
}

#[cfg(test)]
mod tests;
