//! Stories of stream capture.

use parking_lot::Mutex;

use super::rig::{GRANULE, Rig, kind, refused};
use super::stories;
use crate::driver::host::HostConfig;
use crate::driver::{Args, CaptureMode, CaptureStatus, DriverError, DriverErrorKind, Edge, Node};

use CaptureMode::{Global, Relaxed, ThreadLocal};

const MODES: [CaptureMode; 3] = [Global, ThreadLocal, Relaxed];

/// A capture that is or is not broken must end so, and its stream work again.
fn end(rig: &Rig, stream: crate::driver::StreamHandle, broken: bool) {
    let status = rig.driver.capture_status(stream).unwrap();
    assert_eq!(status == CaptureStatus::Invalidated, broken, "{status:?}");
    let ended = rig.driver.end_capture(stream);
    if broken {
        assert_eq!(kind(ended), DriverErrorKind::CaptureInvalidated);
    } else {
        rig.driver.graph_destroy(ended.unwrap()).unwrap();
    }
    assert_eq!(rig.driver.capture_status(stream).unwrap(), CaptureStatus::None);
    rig.wait(stream);
}

type UnsafeCall<'a> = Box<dyn Fn() -> Result<(), DriverError> + Send + Sync + 'a>;

/// The calls that the modes rule, made on old objects that no capture knows.
fn unsafe_calls(rig: &Rig) -> Vec<(&'static str, UnsafeCall<'_>)> {
    let (event, stream) = (rig.event(), rig.stream());
    rig.driver.event_record(event, stream).unwrap();
    rig.wait(stream);
    let graph = rig.capture(stream, || ());
    let driver = &rig.driver;
    // One for each case.
    let spare = Mutex::new((0..18).map(|_| driver.malloc(4).unwrap()).collect::<Vec<_>>());
    let execs = Mutex::new((0..18).map(|_| driver.instantiate(graph).unwrap()).collect::<Vec<_>>());
    let modules = Mutex::new((0..18).map(|_| driver.module_load(rig.kernels()).unwrap()).collect::<Vec<_>>());
    vec![
        ("malloc", Box::new(|| driver.malloc(4).map(drop))),
        ("free", Box::new(move || spare.lock().pop().map_or(Ok(()), |ptr| driver.free(ptr)))),
        ("host_alloc", Box::new(|| driver.host_alloc(4).map(drop))),
        ("event_query", Box::new(move || driver.event_query(event).map(drop))),
        ("event_synchronize", Box::new(move || driver.event_synchronize(event))),
        ("stream_query", Box::new(move || driver.stream_query(stream).map(drop))),
        ("stream_synchronize", Box::new(move || driver.stream_synchronize(stream))),
        ("instantiate", Box::new(move || driver.instantiate(graph).map(drop))),
        ("exec_destroy", Box::new(move || execs.lock().pop().map_or(Ok(()), |exec| driver.exec_destroy(exec)))),
        ("module_unload", Box::new(move || modules.lock().pop().map_or(Ok(()), |module| driver.module_unload(module)))),
    ]
}

/// The calls that pass in every mode, and that only a strict device refuses.
fn lenient_calls(rig: &Rig) -> Vec<(&'static str, UnsafeCall<'_>)> {
    let stream = rig.stream();
    let graph = rig.capture(stream, || ());
    let exec = rig.driver.instantiate(graph).unwrap();
    let driver = &rig.driver;
    vec![
        (
            "vmm",
            Box::new(move || {
                let ptr = driver.address_reserve(GRANULE, 0, None)?;
                let chunk = driver.create(GRANULE)?;
                driver.map(ptr, GRANULE, 0, chunk)?;
                driver.set_access(ptr, GRANULE, &[driver.info().ordinal])?;
                driver.unmap(ptr, GRANULE)?;
                driver.release(chunk)?;
                driver.address_free(ptr, GRANULE)
            }),
        ),
        ("exec_update", Box::new(move || driver.exec_update(exec, graph).map(drop))),
        ("upload", Box::new(move || driver.upload(exec, stream))),
        ("module_load", Box::new(|| driver.module_load(rig.kernels()).map(drop))),
    ]
}

/// The calls that pass in every mode on every device.
fn safe_calls(rig: &Rig) -> Vec<(&'static str, UnsafeCall<'_>)> {
    let (stream, event, ptr) = (rig.stream(), rig.event(), rig.words(4, 0));
    let exec = rig.exec(stream, || rig.fill(ptr, 4, 1, stream));
    let driver = &rig.driver;
    vec![
        ("mem_info", Box::new(|| driver.mem_info().map(drop))),
        ("stream_create", Box::new(|| driver.stream_create(0).and_then(|new| driver.stream_destroy(new)))),
        ("event_create", Box::new(|| driver.event_create(false).and_then(|new| driver.event_destroy(new)))),
        ("event_record", Box::new(move || driver.event_record(event, stream))),
        ("memset", Box::new(move || driver.memset_d8(ptr, 0, 4, stream))),
        ("kernel", Box::new(move || rig.try_launch("fill", Args::new().ptr(ptr).u32(1).u32(1), stream))),
        ("launch", Box::new(move || driver.launch(exec, stream))),
    ]
}

stories! { in captures as conformance_captures;

    /// While a stream records, nothing runs; the graph runs at its launch, on the bytes of that day.
    fn a_capture_records_instead_of_running(rig) {
        let stream = rig.stream();
        let (a, b) = (rig.words(4, 1), rig.words(4, 0));
        let exec = rig.exec(stream, || {
            rig.add(b, a, 4, 10, stream);
            rig.driver.memcpy_dtod(a, b, 8, stream).unwrap();
            assert!(matches!(rig.driver.capture_status(stream).unwrap(), CaptureStatus::Active { .. }));
        });
        assert_eq!(rig.read(b, 4), [0; 4]);
        for input in [5, 70, 900] {
            rig.set(a, 4, input);
            rig.replay(exec, stream);
            assert_eq!(rig.read(b, 4), [input + 10; 4]);
            assert_eq!(rig.read(a, 4), [input + 10, input + 10, input, input]);
        }
    }

    /// Nothing recorded is a graph with nothing in it, not an error: a capture on the wrong stream looks like this.
    fn an_empty_capture_is_a_graph(rig) {
        let stream = rig.stream();
        let graph = rig.capture(stream, || ());
        assert_eq!(rig.driver.graph_nodes(graph).unwrap(), []);
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.replay(exec, stream);
    }

    /// Work on a stream that does not record runs at once, recorded or not on the other.
    fn other_streams_run_during_a_capture(rig) {
        let (stream, other) = (rig.stream(), rig.stream());
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        rig.driver.begin_capture(stream, ThreadLocal).unwrap();
        rig.fill(a, 4, 1, stream);
        rig.fill(b, 4, 2, other);
        let graph = rig.driver.end_capture(stream).unwrap();
        rig.wait(other);
        assert_eq!((rig.read(a, 4), rig.read(b, 4)), (vec![0; 4], vec![2; 4]));
        assert_eq!(rig.driver.graph_nodes(graph).unwrap().len(), 1);
    }

    /// Whose unsafe call breaks whose capture: capture mode × the caller's own mode × own or other thread.
    fn the_modes_rule_who_breaks_whose_capture(rig) {
        let breaking = unsafe_calls(rig);
        let passing: Vec<_> = lenient_calls(rig).into_iter().chain(safe_calls(rig)).collect();
        let calls = breaking.iter().map(|call| (true, call)).chain(passing.iter().map(|call| (false, call)));
        for (breaks, (name, call)) in calls {
            for capture in MODES {
                for caller in MODES {
                    for foreign in [false, true] {
                        let expected = breaks && match caller {
                            Relaxed => false,
                            ThreadLocal => !foreign && capture != Relaxed,
                            Global => if foreign { capture == Global } else { capture != Relaxed },
                        };
                        let case = format!("{name}, capture {capture:?}, caller {caller:?}, other thread {foreign}");
                        let stream = rig.stream();
                        rig.driver.begin_capture(stream, capture).unwrap();
                        let made = || {
                            rig.driver.bind().unwrap();
                            let old = rig.driver.exchange_capture_mode(caller).unwrap();
                            let result = call();
                            assert_eq!(rig.driver.exchange_capture_mode(old).unwrap(), caller);
                            result
                        };
                        let result = if foreign {
                            std::thread::scope(|scope| scope.spawn(made).join().unwrap())
                        } else {
                            made()
                        };
                        match expected {
                            true => assert_eq!(kind(result), DriverErrorKind::CaptureUnsupported, "{case}"),
                            false => assert_eq!(result, Ok(()), "{case}"),
                        }
                        end(rig, stream, expected);
                        rig.driver.stream_destroy(stream).unwrap();
                    }
                }
            }
        }
    }

    /// The watchdog story: a poller's query kills a global capture of another thread, unless the poller pushes its
    /// own mode around the query.
    fn a_poller_kills_a_global_capture_unless_it_pushes_its_mode(rig) {
        let (stream, old) = (rig.stream(), rig.event());
        for guarded in [true, false] {
            rig.driver.begin_capture(stream, Global).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    rig.driver.bind().unwrap();
                    if guarded {
                        rig.driver.exchange_capture_mode(ThreadLocal).unwrap();
                    }
                    assert_eq!(rig.driver.event_query(old).is_ok(), guarded);
                });
            });
            end(rig, stream, !guarded);
        }
    }

    /// Waiting for the device breaks its captures in every mode, whoever waits.
    fn a_device_wait_breaks_captures_in_every_mode(rig) {
        for mode in MODES {
            let stream = rig.stream();
            rig.driver.begin_capture(stream, mode).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    rig.driver.bind().unwrap();
                    rig.driver.exchange_capture_mode(Relaxed).unwrap();
                    assert_eq!(kind(rig.driver.synchronize()), DriverErrorKind::CaptureUnsupported);
                });
            });
            end(rig, stream, true);
        }
    }

    /// The other device's wait does not.
    fn a_wait_for_another_device_breaks_nothing(rig) {
        let stream = rig.stream();
        rig.driver.begin_capture(stream, ThreadLocal).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rig.peer.bind().unwrap();
                rig.peer.synchronize().unwrap();
            });
        });
        end(rig, stream, false);
    }

    /// Waiting for or asking after the recording stream conflicts by nature, as do uploading and launching a graph on
    /// it and destroying it.
    fn asking_after_a_recording_stream_breaks_it(rig) {
        let exec = { let other = rig.stream(); rig.exec(other, || ()) };
        // Hardware lets a recording stream be destroyed, and its capture is gone; that helps nobody.
        for what in if rig.body.is_cuda() { 0..4 } else { 0..5 } {
            let stream = rig.stream();
            rig.driver.begin_capture(stream, Relaxed).unwrap();
            let result = match what {
                0 => rig.driver.stream_synchronize(stream),
                1 => rig.driver.stream_query(stream).map(drop),
                2 => rig.driver.upload(exec, stream),
                3 => rig.driver.launch(exec, stream),
                _ => rig.driver.stream_destroy(stream),
            };
            assert_eq!(kind(result), DriverErrorKind::CaptureUnsupported);
            end(rig, stream, true);
        }
    }

    /// An event recorded inside a capture can not be asked outside, in any mode; asking breaks the capture (but for the
    /// question after times).
    fn a_captured_event_can_not_be_asked(rig) {
        for what in 0..3 {
            let stream = rig.stream();
            let event = rig.driver.event_create(true).unwrap();
            rig.driver.begin_capture(stream, Relaxed).unwrap();
            rig.driver.event_record(event, stream).unwrap();
            let ask = || match what {
                0 => rig.driver.event_query(event).map(drop),
                1 => rig.driver.event_synchronize(event),
                _ => rig.driver.event_elapsed_ms(event, event).map(drop),
            };
            assert_eq!(kind(ask()), DriverErrorKind::CapturedEvent);
            end(rig, stream, what < 2);
            // Nor after the capture: there is nothing behind it. A record outside makes it an event again.
            refused(ask());
            refused(rig.driver.stream_wait_event(stream, event));
            rig.driver.begin_capture(stream, Relaxed).unwrap();
            refused(rig.driver.stream_wait_event(stream, event));
            end(rig, stream, true);
            rig.driver.event_record(event, stream).unwrap();
            rig.wait(stream);
            ask().unwrap();
        }
    }

    /// Waiting inside a capture for work outside would tie the graph to what will not run again.
    fn waiting_inside_for_work_outside_breaks_the_capture(rig) {
        let (stream, other, event) = (rig.stream(), rig.stream(), rig.event());
        rig.driver.event_record(event, other).unwrap();
        rig.driver.begin_capture(stream, Relaxed).unwrap();
        assert_eq!(kind(rig.driver.stream_wait_event(stream, event)), DriverErrorKind::CaptureUnsupported);
        end(rig, stream, true);
    }

    /// A stream that waits for a captured event joins the capture; joined back, the graph has both branches.
    fn a_fork_that_joins_back_is_part_of_the_graph(rig) {
        let (main, side) = (rig.stream(), rig.stream());
        let (fork, join) = (rig.event(), rig.event());
        let (a, b, c) = (rig.words(4, 0), rig.words(4, 0), rig.words(4, 0));
        let driver = &rig.driver;
        let graph = rig.capture(main, || {
            rig.add(b, a, 4, 1, main);
            driver.event_record(fork, main).unwrap();
            driver.stream_wait_event(side, fork).unwrap();
            assert!(matches!(driver.capture_status(side).unwrap(), CaptureStatus::Active { .. }));
            rig.add(c, b, 4, 10, side);
            rig.fill(a, 4, 0, main);
            driver.event_record(join, side).unwrap();
            driver.stream_wait_event(main, join).unwrap();
            rig.add(b, c, 4, 100, main);
        });
        assert_eq!(driver.capture_status(side).unwrap(), CaptureStatus::None);
        let nodes = driver.graph_nodes(graph).unwrap();
        let mut edges = driver.graph_edges(graph).unwrap();
        edges.sort();
        let edge = |from: usize, to: usize| Edge { from: nodes[from], to: nodes[to], programmatic: false };
        assert_eq!(edges, [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)]);
        let exec = driver.instantiate(graph).unwrap();
        for input in [1, 50] {
            rig.set(a, 4, input);
            rig.replay(exec, main);
            assert_eq!(rig.read(b, 4), [input + 111; 4]);
            assert_eq!(rig.read(a, 4), [0; 4]);
        }
    }

    /// Branches run in an order that only the edges bind: a forgotten edge shows.
    fn branches_without_an_edge_do_not_run_in_the_order_of_capture(rig) {
        let (main, side) = (rig.stream(), rig.stream());
        let (fork, join) = (rig.event(), rig.event());
        let (a, b) = (rig.words(4, 1), rig.words(4, 0));
        let exec = rig.exec(main, || {
            rig.driver.event_record(fork, main).unwrap();
            rig.driver.stream_wait_event(side, fork).unwrap();
            rig.fill(a, 4, 2, main);
            rig.add(b, a, 4, 0, side); // meant to come after the fill, but nobody said so
            rig.driver.event_record(join, side).unwrap();
            rig.driver.stream_wait_event(main, join).unwrap();
        });
        rig.replay(exec, main);
        assert_eq!(rig.read(b, 4), [1; 4]);
    }

    /// A branch left dangling is an error at the end, and both streams are free again.
    fn an_unjoined_fork_is_an_error_at_the_end(rig) {
        let (main, side, fork) = (rig.stream(), rig.stream(), rig.event());
        let ptr = rig.words(4, 0);
        rig.driver.begin_capture(main, ThreadLocal).unwrap();
        rig.driver.event_record(fork, main).unwrap();
        rig.driver.stream_wait_event(side, fork).unwrap();
        rig.fill(ptr, 4, 1, side);
        assert_eq!(kind(rig.driver.end_capture(main)), DriverErrorKind::CaptureUnjoined);
        for stream in [main, side] {
            assert_eq!(rig.driver.capture_status(stream).unwrap(), CaptureStatus::None);
            rig.fill(ptr, 4, 2, stream);
            rig.wait(stream);
        }
    }

    /// A capture ends on the stream that began it; ending it elsewhere breaks it.
    fn a_capture_ends_where_it_began(rig) {
        let (main, side, fork) = (rig.stream(), rig.stream(), rig.event());
        rig.driver.begin_capture(main, ThreadLocal).unwrap();
        rig.driver.event_record(fork, main).unwrap();
        rig.driver.stream_wait_event(side, fork).unwrap();
        assert_eq!(kind(rig.driver.end_capture(side)), DriverErrorKind::CaptureState);
        end(rig, main, true);
        assert_eq!(kind(rig.driver.end_capture(main)), DriverErrorKind::CaptureState);
    }

    /// And on the thread that began it, unless relaxed: another thread ends it without a graph.
    fn a_capture_ends_on_its_thread_unless_relaxed(rig) {
        for mode in MODES {
            let stream = rig.stream();
            rig.driver.begin_capture(stream, mode).unwrap();
            let foreign = std::thread::scope(|scope| {
                let ended = scope.spawn(|| {
                    rig.driver.bind().unwrap();
                    rig.driver.end_capture(stream)
                });
                ended.join().unwrap()
            });
            if mode == Relaxed {
                foreign.unwrap();
            } else {
                assert_eq!(kind(foreign), DriverErrorKind::CaptureWrongThread);
                assert_eq!(rig.driver.capture_status(stream).unwrap(), CaptureStatus::None);
                assert_eq!(kind(rig.driver.end_capture(stream)), DriverErrorKind::CaptureState);
                rig.wait(stream);
            }
        }
    }

    /// Beginning twice is refused; the first capture goes on.
    fn a_recording_stream_can_not_begin_again(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        rig.driver.begin_capture(stream, ThreadLocal).unwrap();
        rig.fill(ptr, 4, 1, stream);
        assert_eq!(kind(rig.driver.begin_capture(stream, ThreadLocal)), DriverErrorKind::CaptureState);
        let graph = rig.driver.end_capture(stream).unwrap();
        assert_eq!(rig.driver.graph_nodes(graph).unwrap().len(), 1);
    }

    /// A broken capture refuses work and must be ended; then the stream captures again.
    fn a_broken_capture_must_be_ended(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        rig.driver.begin_capture(stream, ThreadLocal).unwrap();
        rig.fill(ptr, 4, 1, stream);
        assert_eq!(kind(rig.driver.malloc(4)), DriverErrorKind::CaptureUnsupported);
        let again = rig.driver.memset_d8(ptr, 1, 4, stream);
        assert_eq!(kind(again), DriverErrorKind::CaptureInvalidated);
        let event = rig.event();
        assert_eq!(kind(rig.driver.event_record(event, stream)), DriverErrorKind::CaptureInvalidated);
        assert_eq!(kind(rig.driver.begin_capture(stream, ThreadLocal)), DriverErrorKind::CaptureState);
        end(rig, stream, true);
        let exec = rig.exec(stream, || rig.fill(ptr, 4, 3, stream));
        rig.replay(exec, stream);
        assert_eq!(rig.read(ptr, 4), [3; 4]);
        assert!(rig.live().is_none_or(|live| live.captures == 0));
    }

    /// Two captures can not merge: both break.
    fn two_captures_can_not_merge(rig) {
        let (a, b, event) = (rig.stream(), rig.stream(), rig.event());
        rig.driver.begin_capture(a, ThreadLocal).unwrap();
        rig.driver.begin_capture(b, ThreadLocal).unwrap();
        rig.driver.event_record(event, a).unwrap();
        assert_eq!(kind(rig.driver.stream_wait_event(b, event)), DriverErrorKind::CaptureUnsupported);
        for stream in [a, b] {
            assert_eq!(rig.driver.capture_status(stream).unwrap(), CaptureStatus::Invalidated);
            assert_eq!(kind(rig.driver.end_capture(stream)), DriverErrorKind::CaptureInvalidated);
        }
    }

    /// Each capture has an id of its own.
    fn capture_ids_are_unique(rig) {
        let stream = rig.stream();
        let mut ids = Vec::new();
        for _ in 0..3 {
            rig.driver.begin_capture(stream, ThreadLocal).unwrap();
            let CaptureStatus::Active { id } = rig.driver.capture_status(stream).unwrap() else { panic!("active") };
            ids.push(id);
            end(rig, stream, false);
        }
        ids.dedup();
        assert_eq!(ids.len(), 3);
    }

    /// Drivers before 12.3 break a capture on a module load; later ones do not.
    fn a_module_load_breaks_a_capture_on_old_drivers(rig) {
        for old in [true, false] {
            let rig = rig.like(HostConfig::default().module_load_breaks_capture(old));
            let stream = rig.stream();
            rig.driver.begin_capture(stream, ThreadLocal).unwrap();
            assert_eq!(rig.driver.module_load(rig.kernels()).is_err(), old);
            end(&rig, stream, old);
        }
    }

    /// A strict device refuses what no driver promises to let pass, by the same rule of modes.
    fn a_strict_device_refuses_more_during_captures(rig) {
        let rig = rig.like(HostConfig::default().memory(256 << 20).granularity(GRANULE));
        for (name, call) in lenient_calls(&rig) {
            for mode in [ThreadLocal, Relaxed] {
                let stream = rig.stream();
                rig.driver.begin_capture(stream, mode).unwrap();
                assert_eq!(call().is_err(), mode == ThreadLocal, "{name}");
                end(&rig, stream, mode == ThreadLocal);
            }
        }
    }

    /// A graph put into a capture is a clone behind the stream's last work; the original may go.
    fn a_child_of_a_capture_is_a_clone(rig) {
        let stream = rig.stream();
        let (a, b, c) = (rig.words(4, 0), rig.words(4, 0), rig.words(4, 0));
        let inner = rig.capture(stream, || rig.add(b, a, 4, 1, stream));
        assert_eq!(kind(rig.driver.add_child(stream, inner)), DriverErrorKind::CaptureState);
        let graph = rig.capture(stream, || {
            rig.add(a, c, 4, 10, stream);
            rig.driver.add_child(stream, inner).unwrap();
            rig.add(b, b, 4, 1000, stream);
        });
        rig.driver.graph_destroy(inner).unwrap();
        let nodes = rig.driver.graph_nodes(graph).unwrap();
        let edges = rig.driver.graph_edges(graph).unwrap();
        let ends: Vec<_> = edges.iter().map(|edge| (edge.from, edge.to)).collect();
        assert_eq!(ends, [(nodes[0], nodes[1]), (nodes[1], nodes[2])]);
        let Node::Child(child) = rig.driver.node(nodes[1]).unwrap() else { panic!("a child") };
        assert_eq!(rig.driver.graph_nodes(child).unwrap().len(), 1);
        if rig.tracks_handles() {
            refused(rig.driver.graph_destroy(child));
        }
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.driver.graph_destroy(graph).unwrap();
        assert!(!rig.tracks_handles() || rig.driver.graph_nodes(child).is_err());
        for input in [3, 30] {
            rig.set(c, 4, input);
            rig.replay(exec, stream);
            assert_eq!(rig.read(b, 4), [input + 1011; 4]);
        }
    }

    /// A capture on one thread, a copy on a side stream by another: in thread-local mode both are as if alone.
    fn a_thread_local_capture_does_not_mind_its_neighbours(rig) {
        let (stream, ptr) = (rig.stream(), rig.words(4, 0));
        rig.driver.begin_capture(stream, ThreadLocal).unwrap();
        rig.fill(ptr, 4, 1, stream);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rig.driver.bind().unwrap();
                let (a, b) = (rig.words(4, 5), rig.words(4, 0));
                let side = rig.stream();
                rig.driver.memcpy_dtod(b, a, 16, side).unwrap();
                rig.wait(side);
                assert_eq!(rig.read(b, 4), [5; 4]);
            });
        });
        rig.fill(ptr, 4, 2, stream);
        let graph = rig.driver.end_capture(stream).unwrap();
        assert_eq!(rig.driver.graph_nodes(graph).unwrap().len(), 2);
    }

    /// A graph may span devices, forked by an event.
    fn a_capture_may_span_devices(rig) {
        let stream = rig.stream();
        let (fork, driver) = (rig.event(), &rig.driver);
        let here = rig.words(4, 0);
        rig.peer.bind().unwrap();
        let there = rig.peer.malloc(16).unwrap();
        let (side, join) = (rig.peer.stream_create(0).unwrap(), rig.peer.event_create(false).unwrap());
        driver.bind().unwrap();
        driver.begin_capture(stream, ThreadLocal).unwrap();
        rig.fill(here, 4, 1, stream);
        driver.event_record(fork, stream).unwrap();
        rig.peer.bind().unwrap();
        rig.peer.stream_wait_event(side, fork).unwrap();
        rig.peer.memset_d32(there, 6, 4, side).unwrap();
        rig.peer.event_record(join, side).unwrap();
        driver.bind().unwrap();
        driver.stream_wait_event(stream, join).unwrap();
        driver.memcpy_peer(here, driver.info().ordinal, there, rig.peer.info().ordinal, 8, stream).unwrap();
        let graph = driver.end_capture(stream).unwrap();
        let exec = driver.instantiate(graph).unwrap();
        assert_eq!(rig.read(here, 4), [0; 4]);
        rig.replay(exec, stream);
        assert_eq!(rig.read(here, 4), [6, 6, 1, 1]);
    }
}
