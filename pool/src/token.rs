//! Generation tokens: which allocation, and which state of it.

use std::fmt;
use std::num::NonZeroU64;

use crate::Purpose;

/// Number of a pool in this process. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PoolId(pub(crate) u16);

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.0)
    }
}

/// The identity of one hand-out: process-unique, never reused, and it knows its pool.
///
/// The upper 16 bits are the pool's number, the lower 48 a counter. An address is never an identity: drivers
/// and pools hand the same one out again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationId(NonZeroU64);

impl AllocationId {
    pub(crate) const COUNTER_BITS: u32 = 48;

    /// `counter` is 1 or more and below 2^48.
    #[inline]
    pub(crate) fn new(pool: PoolId, counter: u64) -> Self {
        let raw = u64::from(pool.0) << Self::COUNTER_BITS | counter;
        Self(NonZeroU64::new(raw).unwrap_or(NonZeroU64::MAX))
    }

    /// Back from a number; 0 is nobody.
    pub(crate) fn from_raw(raw: u64) -> Option<Self> {
        NonZeroU64::new(raw).map(Self)
    }

    /// The pool that issued it.
    #[must_use]
    pub fn pool(self) -> PoolId {
        PoolId((self.0.get() >> Self::COUNTER_BITS) as u16)
    }

    /// As a number, for logs and traces.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Debug for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counter = self.0.get() & ((1 << Self::COUNTER_BITS) - 1);
        write!(f, "{}.{counter}", self.pool().0)
    }
}

/// Which allocation, and which state of it. Two equal tokens mean: same owner, same address, same pages, same
/// bytes.
///
/// `address` moves when the range changes hands, `backing` when new pages come under the same address,
/// `content` when the bytes were lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token {
    /// The allocation.
    pub allocation: AllocationId,
    /// Moves when the range changes hands.
    pub address: u32,
    /// Moves when other pages come under the address.
    pub backing: u32,
    /// Moves when the bytes are lost.
    pub content: u32,
    /// Where the pool looks first; says nothing about identity.
    pub(crate) place: Place,
}

impl Token {
    /// What the memory is for; `None` where it is not the pool's own, or has no bytes.
    #[must_use]
    pub fn purpose(&self) -> Option<Purpose> {
        match self.place.kind() {
            PlaceKind::Block { heap, .. } => Purpose::ALL.get(heap).copied(),
            PlaceKind::Outside(_) | PlaceKind::Nowhere => None,
        }
    }
}

/// Where an allocation is to be found in its pool's tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Place(u32);

/// What a [`Place`] points at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PlaceKind {
    /// Block `index` of the heap of one purpose.
    Block {
        /// Which heap.
        heap: usize,
        /// The block's index in it.
        index: usize,
    },
    /// A foreign range, host buffer or registered host memory: always tracked.
    Outside(usize),
    /// Zero bytes: nothing to find.
    Nowhere,
}

impl Place {
    const INDEX: u32 = (1 << 29) - 1;
    pub(crate) const NOWHERE: Self = Self(u32::MAX);

    #[inline]
    pub(crate) fn block(heap: usize, index: usize) -> Self {
        Self((heap as u32) << 29 | (index as u32 & Self::INDEX))
    }

    pub(crate) fn outside(index: usize) -> Self {
        Self(6 << 29 | (index as u32 & Self::INDEX))
    }

    pub(crate) fn kind(self) -> PlaceKind {
        let index = (self.0 & Self::INDEX) as usize;
        match self.0 >> 29 {
            7 => PlaceKind::Nowhere,
            6 => PlaceKind::Outside(index),
            heap => PlaceKind::Block { heap: heap as usize, index },
        }
    }
}

#[cfg(test)]
mod tests;
