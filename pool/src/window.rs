//! The capture window, and what is left of it: the registration.

use std::sync::Arc;

use crate::driver::DevicePtr;
use crate::handshake::{Epoch, Proven};
use crate::shared::Shared;
use crate::{Dependency, Hold, PoolError, PoolId, Stale, Stream, Token, Use};

/// A capture window: between [`Pool::begin_window`](crate::Pool::begin_window) and [`finish`](Self::finish),
/// allocations on its stream are hand-outs to the graph being captured.
///
/// Inside, the pool makes no driver call at all. What is not ready is [`PoolError::WindowMiss`]. Slices dropped
/// inside go to the window's own free list. Dropping the window without `finish` puts everything back.
///
/// Order of calls: open the window, begin the driver's capture, capture, end the driver's capture, declare
/// what the scan found, finish.
#[must_use = "dropping a window cancels it"]
#[derive(Debug)]
pub struct Window {
    pub(crate) shared: Arc<Shared>,
    pub(crate) dependent: usize,
    pub(crate) stream: Option<Stream>,
    pub(crate) open: bool,
}

/// One hand-out of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandedOut {
    /// Which allocation.
    pub token: Token,
    /// Where.
    pub ptr: DevicePtr,
    /// How much was asked for, bytes.
    pub bytes: usize,
}

impl Window {
    /// Declares that the graph uses `bytes` bytes of an allocation from `offset_bytes` on. From here on the
    /// graph depends on it, in this very state.
    ///
    /// # Errors
    /// `OtherPool`, `StaleToken`, `Range`.
    pub fn declare(
        &self,
        token: Token,
        use_: Use,
        offset_bytes: usize,
        bytes: usize,
        hold: Hold,
    ) -> Result<(), PoolError> {
        self.shared.declare(self.dependent, Dependency { token, use_, offset_bytes, bytes, hold })
    }

    /// Everything handed out so far, in order.
    #[must_use]
    pub fn handed_out(&self) -> Vec<HandedOut> {
        self.shared.handed_out(self.dependent)
    }

    /// Whether `ptr` lies in memory that was handed out in this window, whether its slice still lives or not.
    /// One past the end counts as inside.
    #[must_use]
    pub fn owns(&self, ptr: DevicePtr) -> bool {
        self.shared.window_owns(self.dependent, ptr)
    }

    /// The pool.
    #[must_use]
    pub fn pool_id(&self) -> PoolId {
        self.shared.id
    }

    /// Closes the window: its memory is the graph's now, by the window's policy. The driver's capture has ended.
    ///
    /// # Errors
    /// `OutlivesWindow`; the window is cancelled then.
    pub fn finish(mut self) -> Result<Registration, PoolError> {
        // On an error the drop of `self` cancels.
        self.shared.finish_window(self.dependent, self.stream.as_ref())?;
        self.open = false;
        Ok(Registration { shared: Arc::clone(&self.shared), dependent: self.dependent })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.open && !crate::mutant::is("window-stays-open") {
            self.shared.cancel_window(self.dependent, self.stream.as_ref());
        }
    }
}

/// A graph's registration with one pool. While it lives the pool tells the graph what happens to its memory.
///
/// Dropping it moves the graph's last launch into its blocks' uses and lets go of what the graph held.
#[must_use = "dropping a registration lets the graph's memory go"]
#[derive(Debug)]
pub struct Registration {
    pub(crate) shared: Arc<Shared>,
    pub(crate) dependent: usize,
}

/// Memory that has pages again after [`Registration::reback`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reback {
    /// Where.
    pub ptr: DevicePtr,
    /// How much, bytes.
    pub bytes: usize,
    /// It is zeroed scratch: clear it before the launch.
    pub clear: bool,
    /// They were put back just now; otherwise they were there already and only taken note of.
    pub mapped: bool,
}

impl Registration {
    /// Checks every dependency and proves the epoch, in one critical section. The only source of [`Proven`].
    ///
    /// # Errors
    /// Which dependencies are bad, and why.
    pub fn walk(&self) -> Result<Proven, Stale> {
        self.shared.walk(self.dependent)
    }

    /// Puts pages back under unbacked scratch, at the same addresses (vmm), and takes note of other pages that came under
    /// what slept and kept its bytes. Walk again afterwards.
    ///
    /// # Errors
    /// `Stale` if something is bad that pages alone do not repair; `Asleep`; `OutOfMemory`; those of the driver.
    pub fn reback(&self) -> Result<Vec<Reback>, PoolError> {
        self.shared.reback(self.dependent)
    }

    /// The pool's epoch, to compare with what [`walk`](Self::walk) proved.
    #[must_use]
    pub fn epoch(&self) -> &Arc<Epoch> {
        &self.shared.epoch
    }

    /// What the graph depends on, as recorded.
    #[must_use]
    pub fn dependencies(&self) -> Vec<Dependency> {
        self.shared.dependencies(self.dependent)
    }

    /// Memory that only this graph keeps from being reused, bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.shared.held_bytes(self.dependent)
    }

    /// The pool.
    #[must_use]
    pub fn pool_id(&self) -> PoolId {
        self.shared.id
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.unregister(self.dependent);
    }
}
