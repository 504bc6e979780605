//! Launch against retire: the few atomics that make sure that no graph is launched with a bad token.
//!
//! ```text
//! launcher                                   retirer, under the pool's lock
//! --------                                   ------------------------------
//! lease := held                              mark the block "retiring"
//! fence(SeqCst)                              bump the epoch
//! epoch == what a walk proved?               fence(SeqCst)
//!   yes: launch, note the number             read the leases (acquire), then the launch numbers
//! lease := clear (release)                     held: abandon, or unlock and wait
//!   no: walk under the lock, again             clear: order after those launches, change, unmark
//! ```
//!
//! Either the launcher's epoch load sees the bump, or the retirer's lease load sees the lease: the two fences
//! exclude the third case. "Proven" comes from [`EpochWriter::proven`] only, which needs the pool's lock.
//!
//! # Cost
//!
//! An undisturbed launch pays a store, a fence, one load and compare for each device, and two stores: 8 to 12 ns. No
//! lock is taken, nothing is allocated and no foreign code runs while the lease is held. Two fences in all,
//! one a side; everything else is relaxed but for the clear (release) and the lease read (acquire).
//!
//! The model in `tests/loom_handshake` includes this very file with loom's atomics.

use std::sync::Arc;

use crate::mutant;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence, relax};

#[path = "handshake/retire.rs"]
mod retire;

pub use retire::{Begun, Cleared, Held, Need, Patience, Retire, RetireHost, begin, retire};

/// What a pool publishes: it moves when a block *with dependents* is retired, and for nothing else.
///
/// Stored by [`EpochWriter::bump`] under the pool's lock, loaded by launchers without it.
#[derive(Debug)]
pub struct Epoch(AtomicU64);

/// The pool's own copy of its epoch. It lives in the pool's mutex, and the published [`Epoch`] is only ever
/// stored from it: a retirer never loads what it is about to store.
#[derive(Debug)]
pub struct EpochWriter {
    value: u64,
    published: Arc<Epoch>,
}

/// An epoch at which a walk found every dependency good. Only a walk makes one; [`Proven::NONE`] equals no
/// epoch, so a graph that was never walked is never launched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proven(u64);

impl Proven {
    /// Nothing was proven yet.
    pub const NONE: Self = Self(0);
}

impl Default for Proven {
    fn default() -> Self {
        Self::NONE
    }
}

impl Default for EpochWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl EpochWriter {
    /// A fresh epoch.
    #[must_use]
    pub fn new() -> Self {
        Self { value: 1, published: Arc::new(Epoch(AtomicU64::new(1))) }
    }

    /// The published side.
    #[must_use]
    pub fn published(&self) -> Arc<Epoch> {
        Arc::clone(&self.published)
    }

    /// Moves the epoch. The caller has marked what it is about to change, in the same critical section.
    pub fn bump(&mut self) {
        self.value += 1;
        if !mutant::is("no-bump") {
            self.published.0.store(self.value, Ordering::Relaxed);
        }
    }

    /// What a walk may call proven, if it found everything good in the critical section that it is still in.
    #[must_use]
    pub fn proven(&self) -> Proven {
        Proven(self.value)
    }
}

/// One graph's side of the handshake: whether it is between check and launch, and its last launch.
///
/// The pool holds an `Arc` of this, never the graph.
#[derive(Debug)]
pub struct Lease {
    /// Held by the one [`Launcher`]; plain stores suffice, because its guard borrows it mutably.
    exclusive: AtomicBool,
    /// Held by that many guards of [`Lease::enter`].
    shared: AtomicU32,
    /// Number of the last launch; 0 before the first.
    last_launch: AtomicU64,
    /// The graph is being evicted: a walk must refuse it. Written and read under a pool's lock.
    dead: AtomicBool,
}

impl Default for Lease {
    fn default() -> Self {
        Self::new()
    }
}

impl Lease {
    /// A lease nobody holds.
    #[must_use]
    pub fn new() -> Self {
        Self {
            exclusive: AtomicBool::new(false),
            shared: AtomicU32::new(0),
            last_launch: AtomicU64::new(0),
            dead: AtomicBool::new(false),
        }
    }

    /// Takes the lease for one of several launchers that may overlap. One launcher at a time is cheaper: see
    /// [`Launcher`].
    #[inline]
    pub fn enter(&self) -> LeaseGuard<'_> {
        if mutant::is("boolean-lease") {
            return LeaseGuard::exclusive(self);
        }
        self.shared.fetch_add(1, Ordering::Relaxed);
        launcher_fence();
        LeaseGuard { lease: self, number: 0, shared: true }
    }

    /// Whether somebody is between check and launch. What a launcher did before it let go is visible after a
    /// `false`.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let order = if mutant::is("lease-read-relaxed") { Ordering::Relaxed } else { Ordering::Acquire };
        self.exclusive.load(order) || self.shared.load(order) != 0
    }

    /// The number of the last launch, 0 if there was none. Read it *after* [`is_held`](Self::is_held) said no.
    #[must_use]
    pub fn last_launch(&self) -> u64 {
        self.last_launch.load(Ordering::Relaxed)
    }

    /// Waits until nobody holds the lease. **Never under a pool's lock**: a holder may need it next.
    pub fn wait_clear(&self) {
        let mut round = 0;
        while self.is_held() {
            relax(round);
            round = round.saturating_add(1);
        }
    }

    /// Marks the graph as being evicted. Part of the eviction's critical section, before its bump.
    pub fn mark_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// Takes the mark back: the eviction was given up. Under the lock.
    pub fn unmark_dead(&self) {
        self.dead.store(false, Ordering::Relaxed);
    }

    /// Whether the graph is being evicted. Asked by a walk, under the lock.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }
}

/// The only launcher of a graph: owning it is the right to launch, so the lease is a flag and not a count.
#[derive(Debug)]
pub struct Launcher {
    lease: Arc<Lease>,
}

impl Default for Launcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Launcher {
    /// A launcher with a lease of its own.
    #[must_use]
    pub fn new() -> Self {
        Self { lease: Arc::new(Lease::new()) }
    }

    /// What the pool gets to see.
    #[must_use]
    pub fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Takes the lease. The guard gives it back on every way out, panics included.
    #[inline]
    pub fn enter(&mut self) -> LeaseGuard<'_> {
        LeaseGuard::exclusive(&self.lease)
    }

    /// Launches if no pool was disturbed since the walk that `proven` comes from.
    ///
    /// `launch` is the driver's launch call and nothing else. `number` counts this graph's launches; it is noted
    /// even when `launch` fails or panics, because a failed call may have queued work. `None` means
    /// disturbed: `launch` was not called, and the lease is already given back.
    #[inline]
    pub fn launch<'e, R>(
        &mut self,
        proven: impl IntoIterator<Item = (&'e Epoch, Proven)>,
        number: u64,
        launch: impl FnOnce() -> R,
    ) -> Option<R> {
        let (mut guard, undisturbed);
        if mutant::is("epoch-before-lease") {
            undisturbed = equal(proven);
            guard = self.enter();
        } else {
            guard = self.enter();
            undisturbed = guard.undisturbed(proven);
        }
        if !undisturbed {
            return None;
        }
        guard.launched(number);
        let result = launch();
        drop(guard);
        Some(result)
    }
}

/// The lease, held. While it lives: no pool lock, no allocation, no callback.
#[must_use = "the check and the launch happen while this lives"]
#[derive(Debug)]
pub struct LeaseGuard<'a> {
    lease: &'a Lease,
    number: u64,
    shared: bool,
}

impl<'a> LeaseGuard<'a> {
    #[inline]
    fn exclusive(lease: &'a Lease) -> Self {
        lease.exclusive.store(true, Ordering::Relaxed);
        launcher_fence();
        Self { lease, number: 0, shared: false }
    }

    /// Whether every epoch still is what a walk proved.
    #[inline]
    #[must_use]
    pub fn undisturbed<'e>(&self, proven: impl IntoIterator<Item = (&'e Epoch, Proven)>) -> bool {
        equal(proven)
    }

    /// Notes the number of the launch that this lease covers; published before the lease is cleared.
    #[inline]
    pub fn launched(&mut self, number: u64) {
        self.number = number;
    }

    fn note(&self) {
        if self.number == 0 {
            return;
        }
        if self.shared {
            self.lease.last_launch.fetch_max(self.number, Ordering::Relaxed);
        } else {
            self.lease.last_launch.store(self.number, Ordering::Relaxed);
        }
    }
}

impl Drop for LeaseGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let late = mutant::is("number-after-clear");
        if !late {
            self.note();
        }
        let order = if mutant::is("lease-clear-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        if self.shared {
            self.lease.shared.fetch_sub(1, order);
        } else {
            self.lease.exclusive.store(false, order);
        }
        if late {
            self.note();
        }
    }
}

#[inline]
fn equal<'e>(proven: impl IntoIterator<Item = (&'e Epoch, Proven)>) -> bool {
    proven.into_iter().all(|(epoch, proven)| epoch.0.load(Ordering::Relaxed) == proven.0)
}

#[inline]
fn launcher_fence() {
    if mutant::is("launcher-fence-acqrel") {
        fence(Ordering::AcqRel);
    } else if !mutant::is("launcher-fence-removed") {
        fence(Ordering::SeqCst);
    }
}
