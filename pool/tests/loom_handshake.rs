//! Launch against retire, checked exhaustively with loom.
//!
//! `src/handshake.rs` is included as it is; only the atomics under it are loom's. Around it stand a small
//! pool, a small graph cache and a device that completes work only when it is waited for. Each scenario
//! explores all interleavings (some up to a number of preemptions) and all values that a relaxed load may return. Then each
//! rule of the protocol is taken out in turn, and the model must fail: see [`mutants`].

#![allow(clippy::unwrap_used)]

#[path = "../src/handshake.rs"]
#[allow(dead_code, unused_imports, unreachable_pub)]
mod handshake;

#[path = "loom_handshake/device.rs"]
mod device;
#[path = "loom_handshake/graph.rs"]
mod graph;
#[path = "loom_handshake/mutants.rs"]
mod mutants;
#[path = "loom_handshake/pool.rs"]
mod pool;
#[path = "loom_handshake/scenarios.rs"]
mod scenarios;

/// What `src/sync.rs` is to the pool.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

    /// Lets the others run.
    pub(crate) fn relax(_round: u32) {
        loom::thread::yield_now();
    }
}

/// What `src/mutant.rs` is to the pool, but set by the test: loom runs all threads of a model on the thread
/// that called it, so a thread-local names the rule to drop.
mod mutant {
    use std::cell::Cell;

    thread_local!(static ACTIVE: Cell<&'static str> = const { Cell::new("") });

    pub(crate) fn is(name: &str) -> bool {
        ACTIVE.get() == name
    }

    pub(crate) fn set(name: &'static str) {
        ACTIVE.set(name);
    }
}
