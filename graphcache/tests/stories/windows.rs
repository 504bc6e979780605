//! The sealed capture window, and who may break it.

use std::cell::Cell;
use std::sync::Barrier;

use evergraph_graphcache::{CacheError, CaptureModeGuard, Cause, GraphKey, Module, Ran, Request};
use evergraph_pool::driver::{CaptureMode, ModuleImage};
use evergraph_pool::{PoolMode, ScratchPolicy, Stream, Use};

use crate::rig::{Affine, BIG, BOTH, KIB, Rig, TWINS, config, device};

/// cuOpt 1748: an allocation inside the window. It is refused before any driver call, the pool grows outside, and
/// the capture is tried again.
#[test]
fn a_miss_in_the_window_reaches_no_driver_and_is_grown_for_outside() {
    for mode in BOTH {
        let rig = Rig::with(mode, config().warm_ups(0));
        let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Pin);
        rig.faulty.set_logging(true);
        assert_eq!(graph.only_run(&rig).unwrap().ran, Ran::Captured);
        rig.faulty.set_logging(false);
        let names = rig.names();
        let growth = |name: &&str| ["malloc", "create", "map", "set_access", "address_reserve"].contains(name);
        let mut capturing = false;
        for name in &names {
            match *name {
                "begin_capture" => capturing = true,
                "end_capture" => capturing = false,
                _ => assert!(!(capturing && growth(name)), "{name} inside the window: {names:?}"),
            }
        }
        assert!(names.iter().any(growth), "{names:?}");
        assert_eq!((rig.count().window_misses, names.iter().filter(|n| **n == "begin_capture").count()), (1, 2));
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
    }
}

/// The same with more to grow for than one miss tells: one eager run readies everything, and the next run captures.
#[test]
fn a_second_miss_is_one_eager_run_and_a_capture_the_next_time() {
    for mode in BOTH {
        let rig = Rig::with(mode, config().warm_ups(0));
        let key = GraphKey::new("two temporaries");
        let (input, out) = (rig.slice(&[3; 4]), rig.slice(&[0; 4]));
        let run = |expect: Ran| {
            let outcome = rig
                .cache
                .run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
                    scope.declare(&input, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    let (a, b) = (scope.alloc::<u32>(BIG)?, scope.alloc::<u32>(BIG + 400 * KIB)?);
                    let c = scope.alloc::<u32>(BIG + 500 * KIB)?;
                    rig.op(scope, "add", a.ptr(), input.ptr(), 4, 1)?;
                    rig.op(scope, "add", b.ptr(), a.ptr(), 4, 1)?;
                    rig.op(scope, "add", c.ptr(), b.ptr(), 4, 1)?;
                    rig.op(scope, "add", out.ptr(), c.ptr(), 4, 1)
                })
                .unwrap();
            assert_eq!(outcome.ran, expect, "{outcome:?}");
            assert_eq!(rig.read(&out), [7; 4]);
            rig.stream.fill(&out, 0).unwrap();
            outcome
        };
        assert!(matches!(run(Ran::Eager).cause, Some(Cause::WindowMiss { .. })));
        let _ = run(Ran::Captured);
        let _ = run(Ran::Replayed);
        assert_eq!((rig.count().eager, rig.count().window_misses), (1, 2));
    }
}

/// After such an eager run somebody takes the memory again. The next capture is grown for all of its misses at once:
/// a graph does not stay eager because others are short of memory, too.
#[test]
fn memory_taken_after_the_eager_run_does_not_make_the_next_run_eager() {
    for mode in BOTH {
        let rig = Rig::with(mode, config().warm_ups(0));
        let key = GraphKey::new("two temporaries");
        let (input, out) = (rig.slice(&[3; 4]), rig.slice(&[0; 4]));
        let run = || {
            let outcome = rig
                .cache
                .run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
                    scope.declare(&input, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    // Of one size: what is ready for one is not ready for the other.
                    let (a, b) = (scope.alloc::<u32>(BIG)?, scope.alloc::<u32>(BIG)?);
                    let c = scope.alloc::<u32>(BIG)?;
                    rig.op(scope, "add", a.ptr(), input.ptr(), 4, 1)?;
                    rig.op(scope, "add", b.ptr(), a.ptr(), 4, 1)?;
                    rig.op(scope, "add", c.ptr(), b.ptr(), 4, 1)?;
                    rig.op(scope, "add", out.ptr(), c.ptr(), 4, 1)
                })
                .unwrap();
            assert_eq!(rig.read(&out), [7; 4]);
            rig.stream.fill(&out, 0).unwrap();
            outcome.ran
        };
        assert_eq!(run(), Ran::Eager);
        assert!(rig.pool.trim_to(0).unwrap() > 0);
        assert_eq!(run(), Ran::Captured);
        assert_eq!(run(), Ran::Replayed);
    }
}

/// An illegal call of the closure's own loses the capture, not the run.
#[test]
fn a_lost_capture_is_one_eager_run_and_is_tried_again() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graph = Affine::new(&rig, 0, 100, ScratchPolicy::Pin);
        let naughty = Cell::new(false);
        let run = || {
            let request = Request::new(&graph.key, &rig.pool, &rig.stream);
            rig.cache
                .run(&request, |scope| -> Result<(), CacheError> {
                    if naughty.get() {
                        let ptr = rig.driver.malloc(4096)?;
                        rig.driver.free(ptr)?;
                    }
                    rig.affine(scope, &graph.input, &graph.out, 100, (1, 2))
                })
                .unwrap()
        };
        let check = |turn: u32, ran: Ran| {
            rig.stream.upload(&[turn; 4], &graph.input).unwrap();
            let outcome = run();
            assert_eq!(outcome.ran, ran);
            assert_eq!(rig.read(&graph.out), [(turn + 1) * 2; 4]);
            outcome
        };
        drop(check(1, Ran::WarmUp));
        drop(check(2, Ran::WarmUp));
        naughty.set(true);
        assert_eq!(check(3, Ran::Eager).cause, Some(Cause::CaptureLost));
        naughty.set(false);
        drop(check(4, Ran::Captured));
        drop(check(5, Ran::Replayed));
        assert_eq!((rig.count().lost_captures, rig.count().eager), (1, 1));
    }
}

/// burn 5772: the warm-up took another branch, so a kernel is loaded inside the window. It is named, before the
/// driver hears of it.
#[test]
fn a_kernel_that_the_warm_up_did_not_load_is_named_and_loaded_by_an_eager_run() {
    for strict_driver in [true, false] {
        let rig = Rig::on(
            device().module_load_breaks_capture(strict_driver),
            evergraph_pool::PoolConfig::vmm().chunk(64 * KIB),
            config(),
        );
        let twins = Module::load(&rig.driver, ModuleImage::Host(TWINS)).unwrap();
        let key = GraphKey::new("variants");
        let (input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
        let variant = Cell::new(false);
        let run = |turn: u32| {
            rig.stream.upload(&[turn; 4], &input).unwrap();
            let outcome = rig
                .cache
                .run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
                    scope.declare(&input, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    if variant.get() {
                        twins.function("add")?;
                    }
                    rig.op(scope, "add", out.ptr(), input.ptr(), 4, 1)
                })
                .unwrap();
            assert_eq!(rig.read(&out), [turn + 1; 4]);
            outcome
        };
        drop((run(1), run(2)));
        variant.set(true);
        let before = rig.faulty.count("function");
        let outcome = run(3);
        assert_eq!((outcome.ran, outcome.cause), (Ran::Eager, Some(Cause::NotLoaded { name: "add".into() })));
        assert_eq!(rig.faulty.count("function"), before + 1, "looked up by the eager run only");
        assert_eq!(run(4).ran, Ran::Captured);
        assert_eq!(run(5).ran, Ran::Replayed);
    }
}

/// llama.cpp 13990, vLLM 48053: other threads synchronise, query, allocate and copy during the window. With the
/// default mode none of it breaks the capture.
#[test]
fn other_threads_do_not_break_a_capture() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
        let quiet = Affine::new(&rig, 1, 1000, ScratchPolicy::Pin);
        quiet.settle(&rig);
        drop((graph.run(&rig), graph.run(&rig)));
        let side = Stream::new(&rig.driver).unwrap();
        let barrier = Barrier::new(2);
        let driver = &rig.driver;
        let event = driver.event_create(false).unwrap();
        driver.event_record(event, side.handle()).unwrap();
        let other = rig.slice(&[0; 64]);
        let request = Request::new(&graph.key, &rig.pool, &rig.stream);
        let failed = std::sync::Mutex::new(Vec::new());
        let outcome = std::thread::scope(|s| {
            let (barrier, side, other, pool, failed) = (&barrier, &side, &other, &rig.pool, &failed);
            s.spawn(move || {
                driver.bind().unwrap();
                for step in 0..6 {
                    barrier.wait();
                    // No panic here: the capturing thread waits for the other side of the barrier.
                    let done: Result<(), CacheError> = (|| match step {
                        0 => Ok(driver.event_query(event).map(drop)?),
                        1 => Ok(driver.stream_synchronize(side.handle())?),
                        2 => Ok(driver.free(driver.malloc(1 << 16)?)?),
                        3 => Ok(side.upload(&[step; 64], other)?),
                        4 => Ok(pool.alloc::<u8>(1 << 20, side).map(drop)?),
                        _ => Ok(Stream::new(driver).map(drop)?),
                    })();
                    if let Err(error) = done {
                        failed.lock().unwrap().push((step, error));
                    }
                    barrier.wait();
                }
            });
            rig.cache
                .run(&request, |scope| -> Result<(), CacheError> {
                    let turns = if scope.capturing() { 3 } else { 0 };
                    for _ in 0..turns {
                        barrier.wait();
                        barrier.wait();
                    }
                    let done = rig.affine(scope, &graph.input, &graph.out, 1000, graph.form);
                    for _ in 0..turns {
                        barrier.wait();
                        barrier.wait();
                    }
                    done
                })
                .unwrap()
        });
        assert!(failed.lock().unwrap().is_empty(), "{failed:?}");
        assert_eq!(outcome.ran, Ran::Captured);
        driver.event_destroy(event).unwrap();
        let nodes = |key| rig.cache.info(&Request::new(key, &rig.pool, &rig.stream)).unwrap().nodes;
        assert_eq!(nodes(&graph.key), nodes(&quiet.key), "as many nodes as in a quiet run");
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
    }
}

/// PyTorch 104487: in global mode a poller's event query breaks the capture, unless the poller relaxes its own mode
/// around the query. The first half proves that the device is strict.
#[test]
fn in_global_mode_a_poller_needs_the_mode_guard() {
    for guarded in [false, true] {
        let rig = Rig::with(PoolMode::Vmm, config().mode(CaptureMode::Global));
        let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
        drop((graph.run(&rig), graph.run(&rig)));
        let event = rig.driver.event_create(false).unwrap();
        let side = Stream::new(&rig.driver).unwrap();
        rig.driver.event_record(event, side.handle()).unwrap();
        let driver = &rig.driver;
        let request = Request::new(&graph.key, &rig.pool, &rig.stream);
        let outcome = rig
            .cache
            .run(&request, |scope| -> Result<(), CacheError> {
                if scope.capturing() {
                    std::thread::scope(|s| {
                        s.spawn(|| {
                            driver.bind().unwrap();
                            let _mode = guarded.then(|| CaptureModeGuard::new(driver, CaptureMode::ThreadLocal));
                            let _ = driver.event_query(event);
                        });
                    });
                }
                rig.affine(scope, &graph.input, &graph.out, 1000, graph.form)
            })
            .unwrap();
        assert_eq!(outcome.ran, if guarded { Ran::Captured } else { Ran::Eager }, "{outcome:?}");
        driver.event_destroy(event).unwrap();
    }
}

/// Another graph of the same stream is evicted, and memory is retired, while a capture is open on that stream: no
/// event is recorded on or waited for by the capturing stream.
#[test]
fn evicting_and_trimming_beside_a_capture_leave_it_alone() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let old = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
        old.settle(&rig);
        let graph = Affine::new(&rig, 1, 1000, ScratchPolicy::Pin);
        drop((graph.run(&rig), graph.run(&rig)));
        let request = Request::new(&graph.key, &rig.pool, &rig.stream);
        let (cache, pool, driver) = (&rig.cache, &rig.pool, &rig.driver);
        let outcome = rig
            .cache
            .run(&request, |scope| -> Result<(), CacheError> {
                if scope.capturing() {
                    std::thread::scope(|s| {
                        s.spawn(|| {
                            driver.bind().unwrap();
                            let _ = pool.trim_to(0).unwrap();
                            cache.remove(&old.key);
                        });
                    });
                }
                rig.affine(scope, &graph.input, &graph.out, 1000, graph.form)
            })
            .unwrap();
        assert_eq!(outcome.ran, Ran::Captured, "{outcome:?}");
        assert_eq!(rig.host.live().execs, 1);
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
    }
}

/// Capture on one stream, work on another: nothing is recorded, and nothing would be replayed.
#[test]
fn a_capture_that_recorded_nothing_is_an_error() {
    let rig = Rig::new(PoolMode::Vmm);
    let other = Stream::new(&rig.driver).unwrap();
    let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
    let key = GraphKey::new("elsewhere");
    let request = Request::new(&key, &rig.pool, &rig.stream);
    let run = || {
        rig.cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.declare(&graph.input, Use::Input)?;
            scope.declare(&graph.out, Use::State)?;
            let mut args = evergraph_pool::driver::Args::new();
            args.ptr(graph.out.ptr()).ptr(graph.input.ptr()).u32(4).u32(1);
            rig.launch(&other, "add", &args)
        })
    };
    assert!(run().is_ok() && run().is_ok());
    assert!(matches!(run(), Err(CacheError::EmptyGraph { .. })));
    assert!(matches!(run(), Err(CacheError::EmptyGraph { .. })));
    assert_eq!(rig.count().refusals, 2);
    assert_eq!(rig.host.live().graphs, 0);
}
