//! An update is proven, not believed.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use evergraph_graphcache::{CacheError, Cause, GraphKey, Module, Ran, Request, Scope};
use evergraph_pool::driver::{Args, ExecHandle, LaunchConfig, ModuleImage};
use evergraph_pool::{AllocationId, DeviceSlice, PoolMode, Stream, Use};

use crate::rig::{BOTH, Rig, TWINS, flag};

/// SGLang 37657: two kernels of one name, and launch attributes that no getter shows. An exec-update reports success
/// and keeps the old attribute; the graph hangs.
#[test]
fn kernels_of_one_name_and_two_handles_never_share_an_exec() {
    let rig = Rig::new(PoolMode::Slab);
    let twins = Module::load(&rig.driver, ModuleImage::Host(TWINS)).unwrap();
    let functions = [rig.module.function("add").unwrap(), twins.function("add").unwrap()];
    let key = GraphKey::new("twins");
    let (input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
    let which = Cell::new(0);
    let body = |scope: &Scope<'_>| -> Result<(), CacheError> {
        scope.declare(&input, Use::Input)?;
        scope.declare(&out, Use::State)?;
        scope.keep(twins.clone());
        let mut args = Args::new();
        args.ptr(out.ptr()).ptr(input.ptr()).u32(4).u32(1);
        let config = LaunchConfig::linear(1, 32);
        // SAFETY: the arguments fit the kernel; the device checks the spans.
        unsafe {
            rig.driver.launch_kernel(functions[which.get()], &config, args.as_bytes(), scope.stream().handle())?;
        }
        Ok(())
    };
    let run = |turn: u32| {
        rig.stream.upload(&[turn; 4], &input).unwrap();
        let outcome = rig.cache.run(&Request::new(&key, &rig.pool, &rig.stream), body).unwrap();
        assert_eq!(rig.read(&out), [turn + 1; 4]);
        outcome.ran
    };
    (1..5).for_each(|turn| drop(run(turn)));
    which.set(1);
    rig.cache.invalidate(&key);
    rig.faulty.set_logging(true);
    assert_eq!(run(5), Ran::Recaptured);
    rig.faulty.set_logging(false);
    let calls = rig.faulty.take_log();
    assert!(!calls.iter().any(|c| c.name == "exec_update"), "no proof, no update");
    let exec = calls.iter().find(|c| c.name == "instantiate").unwrap().result.clone().unwrap();
    assert_eq!(
        rig.host.exec_hidden_attributes(ExecHandle(exec)).unwrap(),
        [7],
        "the attribute of the kernel that runs"
    );
    // Same handle again: now it is proven.
    rig.cache.invalidate(&key);
    assert_eq!(run(6), Ran::Updated);
}

/// A refused or failed update leaves the exec as it was, and the graph is instantiated anew.
#[test]
fn a_failed_update_is_a_new_exec() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("refused");
        let (mut input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
        let run = |input: &DeviceSlice<u32>, turn: u32| {
            rig.stream.upload(&[turn; 4], input).unwrap();
            let bound: [AllocationId; 1] = [input.allocation()];
            let request = Request::new(&key, &rig.pool, &rig.stream).bound(&bound);
            let outcome = rig
                .cache
                .run(&request, |scope| -> Result<(), CacheError> {
                    scope.declare(input, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    rig.op(scope, "add", out.ptr(), input.ptr(), 4, 1)
                })
                .unwrap();
            assert_eq!(rig.read(&out), [turn + 1; 4]);
            outcome
        };
        (1..5).for_each(|turn| drop(run(&input, turn)));
        rig.faulty.fail_nth("exec_update", 1);
        input = rig.slice(&[0; 4]);
        let outcome = run(&input, 5);
        assert_eq!((outcome.ran, outcome.cause), (Ran::Recaptured, Some(Cause::Rebound)));
        for turn in 6..12 {
            assert_eq!(run(&input, turn).ran, Ran::Replayed);
        }
        assert_eq!(rig.host.live().execs, 1);
    }
}

/// CCCL 11041: one exec, updated and launched from two streams, is serialised without a word. Here each stream has
/// its own, and both are in flight together.
#[test]
fn two_streams_have_two_execs_that_overlap() {
    let rig = Rig::new(PoolMode::Vmm);
    let streams = [Stream::new(&rig.driver).unwrap(), Stream::new(&rig.driver).unwrap()];
    let key = GraphKey::new("delay");
    let flags = [flag(), flag()];
    let outs = [rig.slice(&[0]), rig.slice(&[0])];
    let zero = rig.slice(&[0]);
    let current = Cell::new(0);
    let body = |scope: &Scope<'_>| -> Result<(), CacheError> {
        let i = current.get();
        scope.declare(&outs[i], Use::State)?;
        scope.declare(&zero, Use::Input)?;
        let mut args = Args::new();
        rig.launch(scope.stream(), "wait", args.push_bytes(&(flags[i] as *const _ as u64).to_ne_bytes(), 8))?;
        rig.op(scope, "add", outs[i].ptr(), zero.ptr(), 1, 1)
    };
    let run = |i: usize| {
        current.set(i);
        rig.cache.run(&Request::new(&key, &rig.pool, &streams[i]), body).unwrap().ran
    };
    flags.iter().for_each(|f| f.store(true, Ordering::Release));
    for i in [0, 1] {
        assert_eq!([run(i), run(i), run(i)], [Ran::WarmUp, Ran::WarmUp, Ran::Captured]);
        streams[i].synchronize().unwrap();
    }
    flags.iter().for_each(|f| f.store(false, Ordering::Release));
    assert_eq!([run(0), run(1)], [Ran::Replayed, Ran::Replayed]);
    // Both wait. The second is let go first: it does not stand behind the other.
    flags[1].store(true, Ordering::Release);
    streams[1].synchronize().unwrap();
    assert!(!streams[0].is_idle().unwrap());
    flags[0].store(true, Ordering::Release);
    streams[0].synchronize().unwrap();
    assert_eq!(rig.count().live(), 2);
}

/// A graph in flight is neither updated nor destroyed: the host sees its last run complete first.
#[test]
fn a_graph_in_flight_is_neither_updated_nor_destroyed() {
    let rig = Rig::new(PoolMode::Vmm);
    let key = GraphKey::new("in flight");
    let gate = flag();
    gate.store(true, Ordering::Release);
    let out = rig.slice(&[0]);
    let run = || {
        rig.cache
            .run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
                scope.declare(&out, Use::State)?;
                let mut args = Args::new();
                rig.launch(scope.stream(), "wait", args.push_bytes(&(gate as *const _ as u64).to_ne_bytes(), 8))?;
                Ok(scope.stream().fill(&out, 1)?)
            })
            .unwrap()
            .ran
    };
    (0..4).for_each(|_| drop(run()));
    for what in ["exec_update", "exec_destroy"] {
        rig.stream.synchronize().unwrap();
        gate.store(false, Ordering::Release);
        assert_eq!(run(), Ran::Replayed);
        rig.faulty.set_logging(true);
        std::thread::scope(|s| {
            s.spawn(|| {
                // Opens once somebody waits on the host for the stream.
                while rig.faulty.count("event_synchronize") == 0 && rig.faulty.count(what) == 0 {
                    std::thread::yield_now();
                }
                gate.store(true, Ordering::Release);
            });
            if what == "exec_update" {
                rig.cache.invalidate(&key);
                assert_eq!(run(), Ran::Updated);
            } else {
                rig.cache.remove(&key);
            }
        });
        rig.faulty.set_logging(false);
        let names = rig.names();
        let at = |name| names.iter().position(|n| *n == name);
        assert!(at("event_synchronize").is_some_and(|wait| wait < at(what).unwrap()), "{what}: {names:?}");
    }
    let _ = Arc::strong_count(&rig.module);
}
