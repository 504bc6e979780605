//! Instruction counts over a driver that does nothing, with hard limits: deterministic where clocks are not.
//!
//! `benches/icount.sh` runs it and says what is missing; it needs valgrind and gungraun-runner. Each count is
//! of the loop in the function, not of its setup. A limit that is broken fails the run: find out why before
//! you raise it.

#![allow(missing_docs, reason = "the macros make functions without")]

use std::hint::black_box;

use evergraph_benches::churn::{Churn, null_pool};
use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Ran, Request};
use evergraph_pool::handshake::{Epoch, EpochWriter, Launcher, Proven};
use evergraph_pool::{DeviceSlice, Pool, Stream, Use};
use gungraun::{Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};

const TIMES: u64 = 1000;

/// At most so many instructions for one of the `TIMES` rounds.
fn at_most(each: u64) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, each * TIMES)]);
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(callgrind);
    config
}

fn warm_pool(bytes: usize) -> (Pool, Stream, DeviceSlice<u8>, usize) {
    let (pool, stream) = null_pool();
    let other = pool.alloc(3000, &stream).expect("memory without end");
    for _ in 0..3 {
        drop(pool.alloc::<u8>(bytes, &stream).expect("memory without end"));
    }
    (pool, stream, other, bytes)
}

#[library_benchmark(config = at_most(LIMIT_PAIR))]
#[bench::small(warm_pool(512))]
#[bench::large(warm_pool(64 << 20))]
fn pair(state: (Pool, Stream, DeviceSlice<u8>, usize)) -> (Pool, Stream, DeviceSlice<u8>, usize) {
    for _ in 0..TIMES {
        drop(black_box(state.0.alloc::<u8>(black_box(state.3), &state.1).expect("memory without end")));
    }
    state
}

fn worn_churn(live: usize) -> Churn {
    let mut churn = Churn::new(live, 8 << 20, 8000, 1).expect("memory without end");
    // Worn in, until the pool has as much memory as this needs and moves none of it any more.
    (0..live * 60).try_for_each(|_| churn.step()).expect("memory without end");
    churn
}

#[library_benchmark(config = at_most(LIMIT_CHURN))]
#[bench::live_1000(worn_churn(1000))]
#[bench::live_5000(worn_churn(5000))]
fn churn(mut churn: Churn) -> Churn {
    for _ in 0..TIMES {
        churn.step().expect("memory without end");
    }
    churn
}

fn undisturbed() -> (EpochWriter, std::sync::Arc<Epoch>, Proven, Launcher) {
    let writer = EpochWriter::new();
    let (epoch, proven) = (writer.published(), writer.proven());
    (writer, epoch, proven, Launcher::new())
}

#[library_benchmark(config = at_most(LIMIT_CHECK))]
#[bench::one_device(undisturbed())]
fn launch_check(
    mut state: (EpochWriter, std::sync::Arc<Epoch>, Proven, Launcher),
) -> (EpochWriter, std::sync::Arc<Epoch>, Proven, Launcher) {
    for number in 1..=TIMES {
        let done = state.3.launch([(&*state.1, state.2)], black_box(number), || ());
        assert!(done.is_some(), "nobody disturbs");
    }
    state
}

struct Replays {
    pool: Pool,
    stream: Stream,
    input: DeviceSlice<f32>,
    cache: GraphCache,
    key: GraphKey,
}

impl Replays {
    fn new() -> Self {
        let (pool, stream) = null_pool();
        let input = pool.alloc(1024, &stream).expect("memory without end");
        let replays =
            Self { pool, stream, input, cache: GraphCache::new(CacheConfig::default()), key: GraphKey::new(1) };
        while replays.run() != Ran::Replayed {}
        replays
    }

    fn run(&self) -> Ran {
        let request = Request::new(&self.key, &self.pool, &self.stream);
        let outcome = self.cache.run::<CacheError>(&request, |scope| {
            let _scratch = scope.alloc::<f32>(1 << 16)?;
            scope.declare(&self.input, Use::Input)
        });
        outcome.expect("nothing can fail").ran
    }
}

#[library_benchmark(config = at_most(LIMIT_REPLAY))]
#[bench::undisturbed(Replays::new())]
fn replay(replays: Replays) -> Replays {
    for _ in 0..TIMES {
        assert!(black_box(replays.run()) == Ran::Replayed, "nobody disturbs");
    }
    replays
}

/// An `alloc` and its drop.
const LIMIT_PAIR: u64 = 485;
/// A drop of a random slice and an `alloc` of a random size.
const LIMIT_CHURN: u64 = 1620;
/// Lease, fence, compare, note, clear.
const LIMIT_CHECK: u64 = 25;
/// A run of the cache that ends in a replay: key, lookup, check, launch.
const LIMIT_REPLAY: u64 = 425;

library_benchmark_group!(name = counts, benchmarks = [pair, churn, launch_check, replay]);
main!(library_benchmark_groups = counts);
