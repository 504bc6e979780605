//! What goes stale is repaired, at the lowest price, and only that.

use std::cell::Cell;

use evergraph_graphcache::{CacheError, Cause, GraphKey, Ran, Request};
use evergraph_pool::driver::Args;
use evergraph_pool::{PoolMode, Purpose, ScratchPolicy, Use};

use crate::rig::{Affine, BIG, BOTH, Rig, config};

/// vmm: pages back under the same addresses; slab: a new capture into the old exec. Other graphs only launch.
#[test]
fn taken_scratch_comes_back_by_the_cheapest_way() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let tracked = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
        let pinned = Affine::new(&rig, 1, 5000, ScratchPolicy::Pin);
        tracked.settle(&rig);
        pinned.settle(&rig);
        for _ in 0..3 {
            assert!(rig.pool.trim_to(0).unwrap() > 0);
            assert_eq!(pinned.run(&rig).ran, Ran::Replayed);
            let outcome = tracked.run(&rig);
            assert_eq!(outcome.ran, if mode == PoolMode::Vmm { Ran::Remapped } else { Ran::Updated });
            assert!(matches!(outcome.cause, Some(Cause::Stale(_))));
            assert_eq!(tracked.run(&rig).ran, Ran::Replayed);
        }
        let count = rig.count();
        assert_eq!((count.stale, count.remaps + count.updates, count.recaptures, count.eager), (3, 3, 0, 0));
        assert_eq!(count.created, 2, "no exec was made for a repair");
    }
}

/// The epoch moved for somebody else's sake: the walk says so and the graph is launched as it is.
#[test]
fn graphs_that_do_not_depend_on_what_was_retired_are_only_walked() {
    for mode in BOTH {
        let mut calm = config();
        calm.storm_captures = 1000;
        let rig = Rig::with(mode, calm);
        let graphs: Vec<_> = (0..4).map(|n| Affine::new(&rig, n, 500, ScratchPolicy::Pin)).collect();
        graphs.iter().for_each(|g| g.settle(&rig));
        let victim = Affine::new(&rig, 9, BIG, ScratchPolicy::Track);
        victim.settle(&rig);
        for _ in 0..20 {
            assert!(rig.pool.trim_to(0).unwrap() > 0);
            for graph in &graphs {
                rig.faulty.set_logging(true);
                let outcome = graph.only_run(&rig).unwrap();
                rig.faulty.set_logging(false);
                assert_eq!((outcome.ran, outcome.cause), (Ran::Replayed, None));
                assert_eq!(rig.names(), ["launch"], "no needless work");
                let _ = rig.faulty.take_log();
            }
            drop(victim.run(&rig));
        }
        assert_eq!(rig.count().stale, 20);
    }
}

/// The closure has another shape by now: the old exec can not be updated, and goes before the new one comes.
#[test]
fn another_shape_is_a_new_exec_and_the_old_one_goes_first() {
    let rig = Rig::new(PoolMode::Slab);
    let key = GraphKey::new("shape");
    let (input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
    let steps = Cell::new(1);
    let run = |turn: u32| {
        rig.stream.upload(&[turn; 4], &input).unwrap();
        let request = Request::new(&key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track);
        let outcome = rig
            .cache
            .run(&request, |scope| -> Result<(), CacheError> {
                scope.declare(&input, Use::Input)?;
                scope.declare(&out, Use::State)?;
                let temp = scope.alloc::<u32>(BIG)?;
                rig.op(scope, "add", temp.ptr(), input.ptr(), 4, 1)?;
                for _ in 1..steps.get() {
                    rig.op(scope, "add", temp.ptr(), temp.ptr(), 4, 1)?;
                }
                rig.op(scope, "add", out.ptr(), temp.ptr(), 4, 0)
            })
            .unwrap();
        assert_eq!(rig.read(&out), [turn + steps.get(); 4]);
        outcome.ran
    };
    assert_eq!([run(1), run(2), run(3), run(4)], [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed]);
    steps.set(3);
    rig.pool.trim_to(0).unwrap();
    rig.faulty.set_logging(true);
    assert_eq!(run(5), Ran::Recaptured);
    rig.faulty.set_logging(false);
    let names = rig.names();
    let at = |name| names.iter().position(|n| *n == name).unwrap();
    assert!(at("exec_destroy") < at("instantiate"), "{names:?}");
    assert!(!names.contains(&"exec_update"), "nothing proves it: {names:?}");
    assert_eq!(run(6), Ran::Replayed);
    assert_eq!((rig.count().live(), rig.host.live().execs), (1, 1));
}

/// Memory that must start as zero is cleared again after every re-backing, and not at every replay.
#[test]
fn zeroed_scratch_is_cleared_after_new_pages_and_only_then() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("counters");
        let (input, out) = (rig.slice(&[0]), rig.slice(&[0]));
        let run = |turn: u32| {
            rig.stream.upload(&[turn], &input).unwrap();
            let request = Request::new(&key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track);
            let outcome = rig
                .cache
                .run(&request, |scope| -> Result<(), CacheError> {
                    scope.declare(&input, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    let counter = scope.alloc_zeroed_scratch::<u32>(BIG)?;
                    let mut args = Args::new();
                    args.ptr(out.ptr()).ptr(input.ptr()).ptr(counter.ptr());
                    rig.launch(scope.stream(), "ticket", &args)
                })
                .unwrap();
            assert_eq!(rig.read(&out), [turn], "the counter was not zero: {outcome:?}");
            outcome.ran
        };
        (1..5).for_each(|turn| drop(run(turn)));
        for turn in 5..9 {
            assert!(rig.pool.trim_to(0).unwrap() > 0);
            assert_ne!(run(turn), Ran::Replayed);
            let before = rig.faulty.count("memset_d8");
            assert_eq!(run(turn + 10), Ran::Replayed);
            assert_eq!(rig.faulty.count("memset_d8"), before);
        }
    }
}

/// Weakly declared state whose owner exchanged it: once its bytes are gone, the graph is captured for the new state. No
/// pages are put back under the old one.
#[test]
fn state_is_never_resurrected_by_a_remap() {
    let rig = Rig::new(PoolMode::Vmm);
    let key = GraphKey::new("state");
    let out = rig.slice(&[0; 4]);
    let state = std::cell::RefCell::new(rig.pool.upload(&vec![7u32; BIG], Purpose::State, &rig.stream).unwrap());
    let run = || {
        rig.cache.run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
            let state = state.borrow();
            scope.declare(&*state, Use::State)?;
            scope.declare(&out, Use::State)?;
            rig.op(scope, "add", out.ptr(), state.ptr(), 4, 1)
        })
    };
    for _ in 0..4 {
        let _ = run().unwrap();
    }
    assert_eq!(rig.read(&out), [8; 4]);
    // The owner exchanges it and the old bytes go: the new capture is of the new state.
    drop(state.replace(rig.pool.upload(&vec![20u32; BIG], Purpose::State, &rig.stream).unwrap()));
    assert!(rig.pool.trim_to(0).unwrap() > 0);
    let outcome = run().unwrap();
    assert_eq!(outcome.ran, Ran::Updated, "{outcome:?}");
    assert_eq!(rig.read(&out), [21; 4]);
}

/// A graph that is captured again and again gets its memory pinned instead.
#[test]
fn a_storm_of_recaptures_ends_in_a_pin() {
    let rig = Rig::new(PoolMode::Slab);
    let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
    graph.settle(&rig);
    let mut repairs = 0;
    for _ in 0..20 {
        rig.pool.trim_to(0).unwrap();
        repairs += u32::from(graph.run(&rig).ran != Ran::Replayed);
    }
    assert_eq!(repairs, 9, "more than 8 within 64 launches");
    assert_eq!(rig.count().storms, 1);
    assert!(rig.cache.info(&Request::new(&graph.key, &rig.pool, &rig.stream)).unwrap().pinned);
}

/// Where putting pages back is predicted to be dear and there is memory elsewhere, the graph is captured anew; without that
/// memory a capture would need the same pages, so they go back. Where captures are dear too, and the graph goes stale at
/// every run, the closure runs instead, but never twice in a row.
#[test]
fn prices_decide_how_to_repair() {
    let mut dear = config();
    dear.costs = dear.costs.flat_remap(1e6);
    let rig = Rig::with(PoolMode::Vmm, dear.clone());
    let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
    graph.settle(&rig);
    let take_its_memory = |rig: &Rig, elsewhere: bool| {
        assert!(rig.pool.trim_to(0).unwrap() > 0);
        if elsewhere {
            rig.pool.reserve(4 * BIG, Purpose::Scratch, &rig.stream).unwrap();
        }
    };
    take_its_memory(&rig, true);
    assert_eq!(graph.run(&rig).ran, Ran::Updated);
    take_its_memory(&rig, false);
    assert_eq!(graph.run(&rig).ran, Ran::Remapped);

    dear.costs.capture_us = [1e6; 3];
    let rig = Rig::with(PoolMode::Vmm, dear);
    let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
    graph.settle(&rig);
    take_its_memory(&rig, true);
    let outcome = graph.run(&rig);
    assert_eq!((outcome.ran, outcome.cause), (Ran::Eager, Some(Cause::Cheaper)));
    assert_ne!(graph.run(&rig).ran, Ran::Eager);
    assert_eq!(graph.run(&rig).ran, Ran::Replayed);
}

/// A pool that evicted the graph for its memory: captured anew at the next run, and its exec is gone at once.
#[test]
fn a_graph_evicted_by_its_pool_frees_its_exec_and_comes_back() {
    for mode in BOTH {
        let rig = Rig::on(
            crate::rig::device(),
            evergraph_pool::PoolConfig::new(mode).chunk(crate::rig::CHUNK).limit(20 << 20),
            config(),
        );
        let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Pin);
        graph.settle(&rig);
        let hungry = rig.pool.alloc::<u32>(BIG, &rig.stream).unwrap();
        assert_eq!((rig.host.live().execs, rig.count().pool_evictions), (0, 1));
        drop(hungry);
        let outcome = graph.run(&rig);
        assert_eq!(outcome.ran, Ran::Recaptured, "{outcome:?}");
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
        // And when there is no room at all for its temporary: an error, not a crash, and it recovers.
        let hungry = rig.pool.alloc::<u32>(BIG, &rig.stream).unwrap();
        let error = graph.try_run(&rig).unwrap_err();
        assert!(matches!(&error, CacheError::Pool(e) if e.is_out_of_memory()), "{error}");
        drop(hungry);
        assert!(graph.run(&rig).ran.is_graph());
    }
}
