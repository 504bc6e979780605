//! Any driver call may fail at any point: nothing changes, nothing leaks, a retry works.

use evergraph_graphcache::{CacheError, GraphKey, Ran, Request};
use evergraph_pool::{PoolConfig, PoolMode, ScratchPolicy, Use};

use crate::rig::{Affine, BOTH, MIB, Rig, config, device, nothing_left};

/// Every call of a whole life fails once, in its turn: warm-up, capture, replay, flush, repair, eviction.
#[test]
fn each_driver_call_in_turn_fails_once() {
    for mode in BOTH {
        let mut nth = 1;
        loop {
            let rig = Rig::on(
                device().memory(32 * MIB).granularity(MIB),
                PoolConfig::new(mode).chunk(MIB).smallest_slab(MIB),
                config(),
            );
            let graph = Affine::new(&rig, 0, MIB, ScratchPolicy::Track);
            rig.faulty.fail_nth("any", nth);
            let before = rig.faulty.injected();
            let life = |rig: &Rig| {
                for _ in 0..4 {
                    let _ = graph.only_run(rig);
                }
                let _ = rig.pool.trim_to(0);
                for _ in 0..2 {
                    let _ = graph.only_run(rig);
                }
                rig.cache.invalidate(&graph.key);
                let _ = graph.only_run(rig);
                rig.cache.clear();
            };
            life(&rig);
            let injected = rig.faulty.injected() > before;
            rig.faulty.clear();
            assert!(!rig.stream.is_capturing(), "call {nth}, {mode}");
            rig.pool.check().unwrap();
            // A retry works, with the right results, and ends in replays.
            for _ in 0..4 {
                drop(graph.run(&rig));
            }
            assert_eq!(graph.run(&rig).ran, Ran::Replayed, "call {nth}, {mode}");
            let count = rig.count();
            assert_eq!(count.live(), rig.host.live().execs as u64, "call {nth}, {mode}: {count:?}");
            drop(graph);
            let Rig { host, faulty, driver, pool, stream, module, cache } = rig;
            drop((cache, module, stream, pool, driver, faulty));
            nothing_left(&host);
            if !injected {
                assert!(nth > 60, "{nth} calls are no whole life");
                break;
            }
            nth += 1;
        }
    }
}

/// A dead context: every run is a typed error, nothing panics, drops are silent.
#[test]
fn a_dead_context_gives_errors_and_no_panics() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
        graph.settle(&rig);
        let key = GraphKey::new("bad");
        let bad = rig.cache.run(&Request::new(&key, &rig.pool, &rig.stream), |scope| {
            let wild = evergraph_pool::driver::DevicePtr(0xdead_0000);
            rig.op(scope, "add", wild, wild, 4, 1)
        });
        let _ = bad;
        let _ = rig.stream.synchronize();
        assert!(rig.driver.fault().is_some());
        for _ in 0..2 {
            assert!(graph.only_run(&rig).is_err());
        }
        rig.cache.clear();
        assert_eq!(rig.cache.len(), 0);
    }
}

/// A context that died in a replay says in which graph: by the caller's key, and, on the host device, by the op.
#[test]
fn a_fault_in_a_replay_names_the_graph() {
    let rig = Rig::new(PoolMode::Vmm);
    let out = rig.slice(&[0; 4]);
    let key = GraphKey::new(("layers of text", 7u32));
    let run = || -> Result<(), CacheError> {
        let _ = rig.cache.run(&Request::new(&key, &rig.pool, &rig.stream), |scope| {
            scope.declare(&out, Use::State)?;
            scope.keep(rig.module.clone());
            let wild = evergraph_pool::driver::DevicePtr(0xdead_0000);
            rig.op(scope, "add", if scope.capturing() { wild } else { out.ptr() }, out.ptr(), 4, 1)
        })?;
        Ok(rig.stream.synchronize()?)
    };
    run().unwrap();
    run().unwrap();
    let error = run().unwrap_err().to_string();
    assert!(error.contains("add in graph \"layers of text 07\" of 1 nodes"), "{error}");
    let again = run().unwrap_err().to_string();
    assert!(again.contains("layers of text"), "{again}");
}
