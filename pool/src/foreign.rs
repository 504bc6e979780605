//! Memory that the pool did not issue: library workspaces, other allocators' tensors.

use std::sync::Arc;

use crate::driver::DevicePtr;
use crate::shared::Shared;
use crate::{PoolError, Token, Tracked};

/// A range of device memory that somebody else owns, known to the pool so that graphs can depend on it and a
/// scan can tell whose pointer it found.
///
/// Withdraw it (drop it, or [`move_to`](Self::move_to)) **before** the memory goes: that waits until no graph
/// can be launched on it any more and all launches have completed.
#[must_use = "a range that is dropped is withdrawn"]
#[derive(Debug)]
pub struct ForeignRange {
    pub(crate) shared: Arc<Shared>,
    pub(crate) tracked: usize,
}

impl ForeignRange {
    /// Which allocation, in which state, right now.
    #[must_use]
    pub fn token(&self) -> Token {
        self.shared.outside_token(self.tracked)
    }

    /// Where it starts.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.shared.outside_span(self.tracked).0
    }

    /// How long it is, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shared.outside_span(self.tracked).1
    }

    /// The memory moves or changes its size: every graph that depends on it is stale afterwards. Waits for
    /// their last launches.
    ///
    /// # Errors
    /// Those of the driver; the range is as before then.
    pub fn move_to(&mut self, ptr: DevicePtr, bytes: usize) -> Result<(), PoolError> {
        self.shared.move_outside(self.tracked, ptr, bytes)
    }
}

impl Tracked for ForeignRange {
    fn token(&self) -> Token {
        self.token()
    }
    fn ptr(&self) -> DevicePtr {
        self.ptr()
    }
    fn bytes(&self) -> usize {
        self.bytes()
    }
}

impl Drop for ForeignRange {
    fn drop(&mut self) {
        self.shared.withdraw_outside(self.tracked);
    }
}
