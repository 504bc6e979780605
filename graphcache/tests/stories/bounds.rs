//! The cache is bounded, and what it holds adds up.

use std::cell::Cell;

use evergraph_graphcache::{Cause, Ran};
use evergraph_pool::{PoolMode, ScratchPolicy};

use crate::rig::{Affine, BOTH, KIB, MIB, Rig, config, device};

/// llama.cpp 20315: memory climbs with every new shape, and "0 evictions" was read as healthy.
#[test]
fn ten_thousand_keys_stay_within_the_bounds_and_the_hot_one_stays() {
    let rig = Rig::with(PoolMode::Vmm, config().max_entries(16).warm_ups(0));
    let hot = Affine::new(&rig, 1 << 20, 100, ScratchPolicy::Pin);
    drop((hot.run(&rig), hot.run(&rig)));
    let (input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
    let mut most = 0;
    for shape in 0..10_000u32 {
        let key = evergraph_graphcache::GraphKey::new(("shape", shape));
        let request = evergraph_graphcache::Request::new(&key, &rig.pool, &rig.stream);
        let outcome = rig.cache.run(&request, |scope| rig.affine(scope, &input, &out, 100, (shape, 1))).unwrap();
        assert!(outcome.ran == Ran::Captured, "{outcome:?}");
        if shape % 8 == 0 {
            assert_eq!(hot.only_run(&rig).unwrap().ran, Ran::Replayed, "the hot one was evicted at {shape}");
        }
        let live = rig.host.live().execs;
        most = most.max(live);
        assert!(live <= 16 && rig.cache.len() <= 16, "{live} execs after {shape}");
        if shape % 1000 == 0 {
            let count = rig.count();
            assert_eq!((count.created - count.destroyed, count.live()), (live as u64, live as u64));
        }
    }
    let count = rig.count();
    assert_eq!((most, count.captures, count.evictions), (16, 10_001, 10_001 - 16));
    assert_eq!(hot.run(&rig).ran, Ran::Replayed);
}

/// The bound in bytes: held blocks and the execs' own. What does not fit at all runs without a graph.
#[test]
fn bytes_are_bounded_too() {
    for mode in BOTH {
        let rig = Rig::with(mode, config().max_bytes(MIB).warm_ups(0));
        let graphs: Vec<_> = (0..12).map(|n| Affine::new(&rig, n, 64 * KIB, ScratchPolicy::Pin)).collect();
        for graph in &graphs {
            assert_eq!(graph.run(&rig).ran, Ran::Captured);
            assert!(rig.cache.bytes() <= MIB, "{}", rig.cache.bytes());
        }
        assert!(rig.host.live().execs >= 2 && rig.count().evictions > 0);
        let oversized = Affine::new(&rig, 99, 512 * KIB, ScratchPolicy::Pin);
        for _ in 0..2 {
            let outcome = oversized.run(&rig);
            assert_eq!((outcome.ran, outcome.cause), (Ran::Eager, Some(Cause::Full)));
        }
        assert!(rig.cache.bytes() <= MIB);
    }
}

/// No memory for another exec: the oldest graph goes, then the new one comes.
#[test]
fn when_the_device_is_short_the_old_graph_goes_before_the_new_one_comes() {
    let rig = Rig::on(
        device().memory(MIB).exec_bytes_per_node(64 * KIB),
        evergraph_pool::PoolConfig::vmm().chunk(64 * KIB).limit(256 * KIB),
        config().warm_ups(0),
    );
    let graphs: Vec<_> = (0..10).map(|n| Affine::new(&rig, n, 16, ScratchPolicy::Pin)).collect();
    for graph in &graphs {
        assert_eq!(graph.run(&rig).ran, Ran::Captured);
    }
    let live = rig.host.live().execs as u64;
    assert!(live < 10 && rig.count().evictions == 10 - live, "{live} live");
    assert_eq!(graphs[9].run(&rig).ran, Ran::Replayed);
}

/// An evicted graph comes back as a new one, with the right results; `remove` and `clear` free everything.
#[test]
fn evicted_and_removed_graphs_come_back() {
    for mode in BOTH {
        let rig = Rig::with(mode, config().max_entries(2));
        let graphs: Vec<_> = (0..3).map(|n| Affine::new(&rig, n, 1000, ScratchPolicy::Pin)).collect();
        for _ in 0..3 {
            graphs.iter().for_each(|g| g.settle(&rig));
        }
        rig.cache.remove(&graphs[2].key);
        assert_eq!(rig.host.live().execs, 1);
        rig.cache.clear();
        assert_eq!((rig.host.live().execs, rig.cache.len(), rig.cache.bytes()), (0, 0, 0));
        rig.pool.check().unwrap();
        assert_eq!(rig.pool.report().held_by_graphs_bytes, 0);
        graphs[0].settle(&rig);
    }
}

/// All entries are being worked on: the closure runs without a graph rather than over the bound.
#[test]
fn a_cache_full_of_busy_graphs_runs_eagerly() {
    let rig = Rig::with(PoolMode::Vmm, config().max_entries(1));
    let (outer, inner) = (Affine::new(&rig, 0, 100, ScratchPolicy::Pin), Affine::new(&rig, 1, 100, ScratchPolicy::Pin));
    let seen = Cell::new(None);
    let request = evergraph_graphcache::Request::new(&outer.key, &rig.pool, &rig.stream);
    let _ = rig
        .cache
        .run(&request, |_| -> Result<(), evergraph_graphcache::CacheError> {
            seen.set(inner.run(&rig).cause);
            Ok(())
        })
        .unwrap();
    assert_eq!(seen.take(), Some(Cause::Full));
    assert_eq!(rig.cache.len(), 1);
}

/// A thread keeps the entries that it used last at hand; that must not keep a graph alive, nor show one of another cache.
#[test]
fn what_a_thread_has_at_hand_lives_no_longer_than_its_cache() {
    let rig = Rig::with(PoolMode::Vmm, config().warm_ups(0));
    let out = rig.slice(&[0; 4]);
    let key = evergraph_graphcache::GraphKey::new("the same in every cache");
    for round in 0..3 {
        let cache = evergraph_graphcache::GraphCache::new(config().warm_ups(0));
        let request = evergraph_graphcache::Request::new(&key, &rig.pool, &rig.stream);
        let input = rig.slice(&[round; 4]);
        let run = || cache.run(&request, |scope| rig.affine(scope, &input, &out, 4, (1, 1))).unwrap().ran;
        assert_eq!((run(), run(), run()), (Ran::Captured, Ran::Replayed, Ran::Replayed));
        assert_eq!((rig.read(&out)[0], rig.host.live().execs), (round + 1, 1));
        drop(cache);
        assert_eq!(rig.host.live().execs, 0, "round {round}");
    }
}
