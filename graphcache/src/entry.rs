//! One key's place in the cache.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use evergraph_pool::mutant;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::CacheError;
use crate::graph::Graph;
use crate::key::FullKey;
use crate::scope::{Lost, Made};

/// A key's entry. Its state is checked out by one thread at a time for anything slower than a launch, so that
/// no lock is held while the closure runs.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: FullKey,
    pub(crate) slot: Mutex<Slot>,
    changed: Condvar,
    invalid: AtomicBool,
    /// When it was last used, on the cache's clock.
    used: AtomicU64,
    /// Plain replays so far. Counted here and not in the cache's tally: whoever launches has the slot to itself, so this
    /// needs no read-modify-write.
    replays: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Slot {
    /// `None`: checked out, or evicted for good.
    pub(crate) state: Option<State>,
    owner: Option<ThreadId>,
    /// Not in the cache any more: look the key up again.
    pub(crate) gone: bool,
}

/// What a key has.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) graph: Option<Graph>,
    pub(crate) warmed: u32,
    /// It was captured before, so that the next capture is a repair.
    pub(crate) captured: bool,
    /// Captured again too often: its memory is pinned from now on.
    pub(crate) pinned: bool,
    /// Its repair was put off: the last run was eager because that was cheaper.
    pub(crate) put_off: bool,
    /// The last run was eager because memory was not ready inside the capture window.
    pub(crate) missed: bool,
    pub(crate) tempo: Tempo,
    pub(crate) lost: Lost,
    /// Results of the last run, if that was none of a graph.
    pub(crate) own: Vec<Made>,
}

impl Entry {
    pub(crate) fn new(key: FullKey) -> Arc<Self> {
        let slot = Slot { state: Some(State::default()), owner: None, gone: false };
        Arc::new(Self {
            key,
            slot: Mutex::new(slot),
            changed: Condvar::new(),
            invalid: AtomicBool::new(false),
            used: AtomicU64::new(0),
            replays: AtomicU64::new(0),
        })
    }

    /// Waits for the state. `None`: the entry was evicted meanwhile.
    ///
    /// # Errors
    /// `Reentrant` if this very thread has it.
    pub(crate) fn lock(&self) -> Result<Option<MutexGuard<'_, Slot>>, CacheError> {
        let mut slot = self.slot.lock();
        while slot.state.is_none() && !slot.gone {
            if slot.owner == Some(thread::current().id()) {
                return Err(CacheError::Reentrant);
            }
            self.changed.wait(&mut slot);
        }
        Ok((!slot.gone).then_some(slot))
    }

    /// Takes the state out of a locked slot that has it.
    pub(crate) fn check_out(self: &Arc<Self>, mut slot: MutexGuard<'_, Slot>) -> CheckedOut {
        slot.owner = Some(thread::current().id());
        CheckedOut { state: slot.state.take().unwrap_or_default(), entry: Arc::clone(self) }
    }

    /// Takes the state out for good, unless somebody works with it.
    pub(crate) fn try_evict(&self) -> Option<State> {
        let mut slot = self.slot.try_lock()?;
        let state = slot.state.take()?;
        slot.gone = true;
        self.changed.notify_all();
        Some(state)
    }

    /// Takes out a graph whose memory a pool is reusing, unless somebody works with it (who will notice).
    pub(crate) fn take_evicted(&self) -> Option<Graph> {
        let mut slot = self.slot.try_lock()?;
        let graph = &mut slot.state.as_mut()?.graph;
        if graph.as_ref().is_some_and(|g| g.handle.evicted()) { graph.take() } else { None }
    }

    /// Takes the graph out, unless somebody works with it. What else is known of the key stays.
    pub(crate) fn take_graph(&self) -> Option<Graph> {
        self.slot.try_lock()?.state.as_mut()?.graph.take()
    }

    #[inline]
    pub(crate) fn note_use(&self, now: u64) {
        self.used.store(now, Ordering::Relaxed);
    }

    /// Counts a replay. The caller has the slot.
    #[inline]
    pub(crate) fn note_replay(&self) {
        self.replays.store(self.replays.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(crate) fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    pub(crate) fn last_used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The slot, if its state is there and nobody is at it.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Slot>> {
        self.slot.try_lock()
    }

    pub(crate) fn invalidate(&self) {
        self.invalid.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Relaxed)
    }

    pub(crate) fn take_invalid(&self) -> bool {
        self.invalid.swap(false, Ordering::Relaxed)
    }
}

/// An entry's state, in one thread's hands; it goes back on every way out.
#[derive(Debug)]
pub(crate) struct CheckedOut {
    pub(crate) entry: Arc<Entry>,
    pub(crate) state: State,
}

impl Drop for CheckedOut {
    fn drop(&mut self) {
        let mut slot = self.entry.slot.lock();
        slot.owner = None;
        slot.state = Some(std::mem::take(&mut self.state));
        // All: whoever leaves by a plain launch wakes nobody else.
        self.entry.changed.notify_all();
    }
}

/// How often a graph goes stale.
#[derive(Debug, Default)]
pub(crate) struct Tempo {
    /// Runs so far.
    runs: u64,
    /// The runs at which it was captured again.
    recaptures: VecDeque<u64>,
    stale_at: u64,
    /// Running mean of the runs between two times of going stale.
    life: f32,
}

impl Tempo {
    pub(crate) fn ran(&mut self) {
        self.runs += 1;
    }

    /// It is stale again; how many runs it may be expected to live after a repair.
    pub(crate) fn stale(&mut self) -> f32 {
        let lived = (self.runs - self.stale_at) as f32;
        self.stale_at = self.runs;
        self.life = if self.life == 0.0 { lived.max(64.0) } else { self.life + 0.25 * (lived - self.life) };
        self.life.max(1.0)
    }

    /// It is being captured again; whether that is a storm: more than `most` times within `window` runs.
    pub(crate) fn recaptured(&mut self, most: u32, window: u64) -> bool {
        self.recaptures.push_back(self.runs);
        while self.recaptures.front().is_some_and(|at| at + window < self.runs) {
            self.recaptures.pop_front();
        }
        self.recaptures.len() > most as usize && !mutant::is("cache.storms-ignored")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nine_recaptures_in_64_runs_are_a_storm_and_nine_in_640_are_not() {
        let mut tempo = Tempo::default();
        let storms = |tempo: &mut Tempo, runs: u64| {
            (0..9).any(|_| {
                (0..runs).for_each(|_| tempo.ran());
                tempo.recaptured(8, 64)
            })
        };
        assert!(!storms(&mut tempo, 71));
        assert!(storms(&mut tempo, 7));
    }

    #[test]
    fn a_graph_that_always_goes_stale_is_expected_to_live_shortly() {
        let mut tempo = Tempo::default();
        assert!(tempo.stale() >= 64.0, "the first time says little");
        for _ in 0..20 {
            tempo.ran();
            tempo.stale();
        }
        assert!(tempo.stale() < 1.5);
    }
}
