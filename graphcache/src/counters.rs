//! How often what happened.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A snapshot of a cache's counters.
        ///
        /// Every run ends as exactly one of `warm_ups`, `captures`, `replays`, `remaps`, `updates`, `recaptures`,
        /// `eager` and `refusals`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Tally {
            $(pub(crate) $name: Count,)*
        }

        impl Tally {
            pub(crate) fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Runs of the closure before a graph's first capture.
    warm_ups,
    /// First captures, launched.
    captures,
    /// Launches of a graph that was good as it was.
    replays,
    /// Launches after pages were put back under the same addresses.
    remaps,
    /// Launches after a new capture was put into the old exec.
    updates,
    /// Launches after a new capture and a new exec.
    recaptures,
    /// Runs of the closure instead of a graph.
    eager,
    /// Runs that ended in an error of the cache, the pool or the driver.
    refusals,
    /// Graphs that went for the sake of the bounds, or of the driver's memory.
    evictions,
    /// Graphs that a pool took the memory of, to their end.
    pool_evictions,
    /// Runs that found their graph stale.
    stale,
    /// Captures that were ended because something was not ready inside the window.
    window_misses,
    /// Captures that somebody's illegal call broke.
    lost_captures,
    /// Graphs whose memory was pinned because they had to be captured again too often.
    storms,
    /// Graphs with a node that can not be read.
    opaque,
    /// Pointers that the scan found and nobody had declared: pinned.
    undeclared,
    /// Instantiated graphs made.
    created,
    /// Instantiated graphs destroyed. `created - destroyed` is how many there are.
    destroyed,
}

/// One counter. Relaxed: counts order nothing.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    #[inline]
    pub(crate) fn one(&self) {
        self.add(1);
    }
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    /// Instantiated graphs that there are.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.created.saturating_sub(self.destroyed)
    }

    /// All runs.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.warm_ups
            + self.captures
            + self.replays
            + self.remaps
            + self.updates
            + self.recaptures
            + self.eager
            + self.refusals
    }
}
