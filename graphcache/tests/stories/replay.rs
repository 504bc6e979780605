//! Plain use: warm up, capture, replay.

use std::panic::{AssertUnwindSafe, catch_unwind};

use evergraph_graphcache::{CacheError, Cause, GraphKey, Ran, Request};
use evergraph_pool::driver::Args;
use evergraph_pool::{PoolMode, ScratchPolicy, Use};

use crate::rig::{Affine, BOTH, Rig, config, nothing_left};

#[test]
fn two_warm_ups_a_capture_and_then_the_launch_is_the_only_driver_call() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
        graph.settle(&rig);
        for _ in 0..5 {
            assert_eq!(graph.run(&rig).ran, Ran::Replayed);
        }
        rig.faulty.set_logging(true);
        for _ in 0..3 {
            assert_eq!(graph.only_run(&rig).unwrap().ran, Ran::Replayed);
        }
        rig.faulty.set_logging(false);
        let calls = rig.faulty.take_log();
        assert_eq!(calls.iter().map(|c| c.name).collect::<Vec<_>>(), ["launch"; 3]);
        let count = rig.count();
        assert_eq!((count.warm_ups, count.captures, count.replays, count.runs()), (2, 1, 8, 11));
    }
}

#[test]
fn graphs_off_runs_the_same_work_eagerly() {
    let rig = Rig::with(PoolMode::Vmm, config().graphs(false));
    let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
    for _ in 0..5 {
        let outcome = graph.run(&rig);
        assert_eq!((outcome.ran, outcome.cause), (Ran::Eager, Some(Cause::GraphsOff)));
    }
    assert_eq!((rig.count().eager, rig.count().created), (5, 0));
}

#[test]
fn another_thread_may_launch_without_having_made_the_device_current() {
    let rig = Rig::new(PoolMode::Vmm);
    let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
    graph.settle(&rig);
    let (cache, pool, stream, key) = (&rig.cache, &rig.pool, &rig.stream, &graph.key);
    std::thread::scope(|s| {
        let run = || cache.run(&Request::new(key, pool, stream), |_| -> Result<(), CacheError> { unreachable!() });
        assert_eq!(s.spawn(run).join().unwrap().unwrap().ran, Ran::Replayed);
    });
}

#[test]
fn a_closure_that_fails_or_panics_leaves_stream_pool_and_cache_usable() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
        let request = Request::new(&graph.key, &rig.pool, &rig.stream);
        let error = CacheError::NotLoaded { name: "of the closure's own".into() };
        // As warm-up and, after two good ones, as capture; half-way through its work each time.
        for round in 0..3 {
            let before = rig.pool.stats().allocated_bytes.current;
            let result = rig.cache.run(&request, |scope| {
                rig.affine(scope, &graph.input, &graph.out, 1000, graph.form)?;
                Err(error.clone())
            });
            assert!(matches!(result, Err(CacheError::NotLoaded { .. })));
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                rig.cache.run(&request, |scope| -> Result<(), CacheError> {
                    let _temp = scope.alloc::<u32>(5000)?;
                    rig.affine(scope, &graph.input, &graph.out, 1000, graph.form)?;
                    panic!("half-way")
                })
            }));
            assert!(panicked.is_err());
            assert!(!rig.stream.is_capturing());
            assert_eq!(rig.pool.stats().allocated_bytes.current, before);
            rig.stream.synchronize().unwrap();
            rig.pool.check().unwrap();
            if round < 2 {
                assert_eq!(graph.run(&rig).ran, Ran::WarmUp);
            }
        }
        assert_eq!(rig.host.live().graphs, 0, "half captures are discarded");
        assert_eq!(graph.run(&rig).ran, Ran::Captured);
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
    }
}

#[test]
fn a_graph_can_not_run_itself_nor_inside_another_capture() {
    let rig = Rig::new(PoolMode::Vmm);
    let (key, other) = (GraphKey::new("outer"), GraphKey::new("inner"));
    let request = Request::new(&key, &rig.pool, &rig.stream);
    let inner = Request::new(&other, &rig.pool, &rig.stream);
    let itself = rig.cache.run(&request, |_| rig.cache.run(&request, |_| Ok(())).map(drop));
    assert!(matches!(itself, Err(CacheError::Reentrant)));
    // Another graph in an eager run is fine.
    for _ in 0..2 {
        let _ = rig.cache.run(&request, |_| rig.cache.run(&inner, |_| Ok::<(), CacheError>(())).map(drop)).unwrap();
    }
    let nested = rig.cache.run(&request, |_| rig.cache.run(&inner, |_| Ok::<(), CacheError>(())).map(drop));
    assert!(matches!(nested, Err(CacheError::Nested)));
}

#[test]
fn everything_goes_with_the_cache_and_the_pool() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        for name in 0..5 {
            Affine::new(&rig, name, 3000, ScratchPolicy::Pin).settle(&rig);
        }
        let Rig { host, faulty, driver, pool, stream, module, cache } = rig;
        assert_eq!(host.live().execs, 5);
        drop((cache, module, stream, pool, driver, faulty));
        nothing_left(&host);
    }
}

/// PyTorch 84967: a seed that was captured as a constant, and one random timeline for all graphs. Seed and offset live
/// in device memory here: replays differ, a re-seed reproduces them, and graphs do not disturb each other.
#[test]
fn random_state_lives_in_device_memory_and_advances_with_each_replay() {
    let rig = Rig::new(PoolMode::Vmm);
    let keys = [GraphKey::new("first"), GraphKey::new("second")];
    let states = [rig.slice(&[1, 0]), rig.slice(&[2, 0])];
    let out = rig.slice(&[0]);
    let draw = |i: usize| {
        let _ = rig
            .cache
            .run(&Request::new(&keys[i], &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
                scope.declare(&states[i], Use::State)?;
                scope.declare(&out, Use::State)?;
                rig.launch(scope.stream(), "random", Args::new().ptr(out.ptr()).ptr(states[i].ptr()))
            })
            .unwrap();
        rig.read(&out)[0]
    };
    let alone: Vec<u32> = (0..6).map(|_| draw(0)).collect();
    assert!((1..6).all(|i| alone[i] != alone[i - 1]), "{alone:?}");
    rig.stream.upload(&[1, 0], &states[0]).unwrap();
    let interleaved: Vec<u32> = (0..6).map(|_| (draw(0), draw(1)).0).collect();
    assert_eq!(interleaved, alone);
}
