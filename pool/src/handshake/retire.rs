//! The retirer's side: mark, bump, check, unlock, wait, relock, change, unmark.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{EpochWriter, Lease};
use crate::mutant;
use crate::sync::{Ordering, fence};

/// What the retirer's side needs of the state behind a pool's lock. A victim is whatever changes together: a
/// block, several blocks, or a graph that is being evicted.
pub trait Retire {
    /// What is retired.
    type Victim: ?Sized;

    /// The epoch, which lives behind the same lock.
    fn epoch(&mut self) -> &mut EpochWriter;

    /// Marks the victim *retiring* (for a graph: dead). From here to [`unmark`](Self::unmark) hand-out and
    /// other retirers keep away and walks call it bad. `false`: somebody else is retiring (part of) it; then
    /// nothing was marked.
    fn mark(&mut self, victim: &Self::Victim) -> bool;

    /// Takes the mark away.
    fn unmark(&mut self, victim: &Self::Victim);

    /// Shows the lease of every dependent of the victim.
    fn leases(&self, victim: &Self::Victim, visit: &mut dyn FnMut(&Arc<Lease>));
}

/// How [`begin`] went.
#[must_use = "a victim that was marked must be committed or abandoned"]
#[derive(Debug)]
pub enum Begun {
    /// No dependent can launch on the old state any more.
    Cleared(Cleared),
    /// A dependent is between check and launch: abandon, or unlock and wait.
    Held(Held),
    /// Somebody else is retiring it.
    Taken,
}

type Seen = SmallVec<[(Arc<Lease>, u64); 4]>;

/// A marked victim with a lease in the way.
#[must_use = "a victim that was marked must be committed or abandoned"]
#[derive(Debug)]
pub struct Held {
    seen: Seen,
}

/// A marked victim which no dependent can launch on any more.
#[must_use = "a victim that was marked must be committed or abandoned"]
#[derive(Debug)]
pub struct Cleared {
    seen: Seen,
}

/// First half of retiring, in one critical section: mark, bump, fence, read the leases, then the launch
/// numbers. A victim without dependents moves no epoch.
///
/// After [`Held::abandon`] another victim needs a `begin` of its own, with its own bump.
pub fn begin<S: Retire>(state: &mut S, victim: &S::Victim) -> Begun {
    if !state.mark(victim) {
        return Begun::Taken;
    }
    let mut seen = Seen::new();
    let early = mutant::is("number-before-lease");
    state.leases(victim, &mut |lease| seen.push((Arc::clone(lease), if early { lease.last_launch() } else { 0 })));
    if seen.is_empty() {
        return Begun::Cleared(Cleared { seen });
    }
    let late = mutant::is("bump-after-reads");
    if !late {
        state.epoch().bump();
        retirer_fence();
    }
    let held = !mutant::is("leases-not-read") && seen.iter().any(|(lease, _)| lease.is_held());
    if late {
        state.epoch().bump();
        retirer_fence();
    }
    if held {
        return Begun::Held(Held { seen });
    }
    let mut cleared = Cleared { seen };
    if !early {
        cleared.read_numbers();
    }
    Begun::Cleared(cleared)
}

impl Held {
    /// Gives up on this victim and takes the mark away. The epoch stays moved: its dependents walk once.
    pub fn abandon<S: Retire>(self, state: &mut S, victim: &S::Victim) {
        state.unmark(victim);
    }

    /// Waits for the leases. **The pool's lock is not held**: the launcher's slow path needs it. The mark
    /// keeps everybody else away meanwhile.
    pub fn wait(self) -> Cleared {
        for (lease, _) in &self.seen {
            lease.wait_clear();
        }
        let mut cleared = Cleared { seen: self.seen };
        cleared.read_numbers();
        cleared
    }
}

impl Cleared {
    fn read_numbers(&mut self) {
        for (lease, number) in &mut self.seen {
            *number = lease.last_launch();
        }
    }

    /// The dependents and the last launch of each (0: never launched). Order what follows after those: by an
    /// event for a reissue, as seen by the host before an unmap or a free.
    pub fn last_launches(&self) -> impl Iterator<Item = (&Arc<Lease>, u64)> {
        self.seen.iter().map(|(lease, number)| (lease, *number))
    }

    /// Whether any dependent was ever launched.
    #[must_use]
    pub fn any_launched(&self) -> bool {
        self.seen.iter().any(|(_, number)| *number != 0)
    }

    /// Nothing changes after all.
    pub fn abandon<S: Retire>(self, state: &mut S, victim: &S::Victim) {
        state.unmark(victim);
    }

    /// Second half: generation and block change, then the mark goes, in one critical section. If `change`
    /// fails, the mark goes too and the victim is as `change` left it.
    pub fn commit<S: Retire, R>(self, state: &mut S, victim: &S::Victim, change: impl FnOnce(&mut S) -> R) -> R {
        let result = change(state);
        state.unmark(victim);
        result
    }
}

/// A lock around some [`Retire`] state, and a way to wait for the device. Lets [`retire`] be one piece of
/// code for the pool and for its model.
pub trait RetireHost {
    /// What the lock guards.
    type State: Retire;
    /// Work to order after.
    type Order;

    /// Runs `f` in a critical section.
    fn locked<R>(&self, f: impl FnOnce(&mut Self::State) -> R) -> R;

    /// Under the lock: what must be over before the victim may change: the last launches of its dependents
    /// and its own uses.
    fn order(state: &mut Self::State, victim: &<Self::State as Retire>::Victim, cleared: &Cleared) -> Self::Order;

    /// Waits on the host until it is. Not under the lock.
    fn wait(&self, order: &Self::Order);
}

/// What to do when a dependent is between check and launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// Leave this victim alone.
    Skip,
    /// Wait: leases are short.
    Wait,
}

/// How complete the earlier work must be before the victim changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// Stream order is enough (reissue): `change` gets the order and puts it before the new owner's work.
    Stream,
    /// The host must have seen it complete (unmap, free).
    Host,
}

/// Retires one victim from begin to end. `None`: a lease was held and `patience` was short, or somebody else
/// retires it.
///
/// The lock is dropped for every wait, and *retiring* keeps hand-out, walks and other retirers away meanwhile.
pub fn retire<H: RetireHost, R>(
    host: &H,
    victim: &<H::State as Retire>::Victim,
    patience: Patience,
    need: Need,
    change: impl FnOnce(&mut H::State, &H::Order) -> R,
) -> Option<R> {
    let mut change = Some(change);
    // Under the lock: all of it, when nothing has to be waited for.
    enum Step<R, O> {
        Done(Option<R>),
        Lease(Held),
        Device(Cleared, O),
    }
    let mut finish = |state: &mut H::State, cleared: Cleared| -> Step<R, H::Order> {
        let order = H::order(state, victim, &cleared);
        if need == Need::Host && !mutant::is("device-wait-under-lock") {
            return Step::Device(cleared, order);
        }
        if need == Need::Host {
            host.wait(&order);
        }
        Step::Done(change.take().map(|change| cleared.commit(state, victim, |state| change(state, &order))))
    };
    let mut step = host.locked(|state| match begin(state, victim) {
        Begun::Taken => Step::Done(None),
        Begun::Cleared(cleared) => finish(state, cleared),
        Begun::Held(held) if patience == Patience::Skip => {
            held.abandon(state, victim);
            Step::Done(None)
        }
        Begun::Held(held) if mutant::is("lease-wait-under-lock") => finish(state, held.wait()),
        Begun::Held(held) => Step::Lease(held),
    });
    if let Step::Lease(held) = step {
        let cleared = held.wait();
        step = host.locked(|state| finish(state, cleared));
    }
    match step {
        Step::Done(done) => done,
        Step::Device(cleared, order) => {
            host.wait(&order);
            let change = change.take()?;
            Some(host.locked(|state| cleared.commit(state, victim, |state| change(state, &order))))
        }
        Step::Lease(_) => None,
    }
}

fn retirer_fence() {
    if mutant::is("retirer-fence-acqrel") {
        fence(Ordering::AcqRel);
    } else if !mutant::is("retirer-fence-removed") {
        fence(Ordering::SeqCst);
    }
}
