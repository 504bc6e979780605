//! Capture windows: sealed, panic-safe, and what happens to the memory of a graph.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::*;
use evergraph_pool::driver::{CaptureMode, CaptureStatus};
use evergraph_pool::{BadReason, DeviceSlice, Hold, Pool, PoolError, Purpose, RangeKind, ScratchPolicy, Stream, Use};

fn overlaps(a: (u64, usize), b: (u64, usize)) -> bool {
    a.0 < b.0 + b.1 as u64 && b.0 < a.0 + a.1 as u64
}

fn span<T: evergraph_pool::Element>(slice: &DeviceSlice<T>) -> (u64, usize) {
    (slice.ptr().0, slice.bytes())
}

/// Puts `bytes` of free memory into the pool, ready for the rig's stream.
fn warm(rig: &Rig, bytes: usize) {
    drop(rig.alloc(bytes));
}

#[test]
fn scratch_freed_inside_a_capture_is_never_handed_to_somebody_else() {
    // x+1 in a temporary, dropped in the window: every replay writes it again.
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, MIB);
        let mut tmp = (0, 0);
        let graph = rig.graph(ScratchPolicy::Pin, |_| {
            let temporary = rig.alloc(96 * KIB);
            tmp = span(&temporary);
        });
        assert!(graph.registration.held_bytes() >= tmp.1);
        let canaries: Vec<_> = (0..12).map(|_| rig.alloc(96 * KIB)).collect();
        assert!(canaries.iter().all(|c| !overlaps(span(c), tmp)), "a canary sits on the graph's scratch");
        rig.pool.check().unwrap();
        drop(graph);
        rig.pool.check().unwrap();
        drop(canaries);
        assert_eq!(rig.pool.stats().active_bytes.current, 0, "the scratch came back with the end of the graph");
    });
}

#[test]
fn temporaries_are_reused_inside_the_window() {
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, MIB);
        let graph = rig.graph(ScratchPolicy::Pin, |window| {
            let first = span(&rig.alloc(96 * KIB));
            for _ in 0..20 {
                assert_eq!(span(&rig.alloc(96 * KIB)), first);
            }
            assert_eq!(window.handed_out().len(), 21);
            assert!(window.owns(evergraph_pool::driver::DevicePtr(first.0 + 5)));
        });
        assert_eq!(graph.registration.dependencies().len(), 1);
        assert!(graph.registration.dependencies()[0].use_.is_scratch());
    });
}

#[test]
fn a_slice_on_a_reused_temporary_may_not_outlive_the_window() {
    // A workspace first allocated inside the window, on the bytes of an earlier temporary: each replay clobbers it.
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, MIB);
        let mut workspace = None;
        let result = TestGraph::capture(&rig.pool, &rig.stream, ScratchPolicy::Pin, |_| {
            drop(rig.alloc(96 * KIB));
            workspace = Some(rig.alloc(64 * KIB));
        });
        match result {
            Err(PoolError::OutlivesWindow { bytes, ptr, .. }) => {
                assert_eq!((ptr.0, bytes), span(workspace.as_ref().unwrap()));
            }
            other => panic!("{other:?}"),
        }
        // Everything as before: the slice is an ordinary one, and the next capture works.
        rig.pool.check().unwrap();
        drop(workspace);
        rig.graph(ScratchPolicy::Pin, |_| drop(rig.alloc(96 * KIB)));
        assert_eq!(rig.pool.stats().active_bytes.current, 0);
    });
}

#[test]
fn an_output_of_its_own_may_outlive_the_window() {
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, MIB);
        let mut output = None;
        let mut graph = rig.graph(ScratchPolicy::Pin, |_| {
            output = Some(rig.alloc(64 * KIB));
            drop(rig.alloc(96 * KIB));
        });
        assert!(graph.prove());
        let place = span(output.as_ref().unwrap());
        drop(output.take());
        // The graph still writes there: held until it is gone.
        let others: Vec<_> = (0..14).map(|_| rig.alloc(64 * KIB)).collect();
        assert!(others.iter().all(|o| !overlaps(span(o), place)));
        assert!(graph.prove());
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_miss_is_a_typed_error_before_any_driver_call() {
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, 64 * KIB);
        let before = rig.pool.stats().reserved_bytes.current;
        let (node, _) = Node::new(&rig.stream, 1);
        let window = rig.pool.begin_window(node, ScratchPolicy::Pin).unwrap();
        rig.driver.begin_capture(rig.stream.handle(), CaptureMode::ThreadLocal).unwrap();
        let calls = rig.faulty.count("any");
        match rig.pool.alloc::<u8>(8 * MIB, &rig.stream) {
            Err(PoolError::WindowMiss { requested_bytes, purpose, .. }) => {
                assert_eq!((requested_bytes, purpose), (8 * MIB, Purpose::Scratch));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.faulty.count("any"), calls, "the driver was asked inside the window");
        // The capture itself is fine, and so is the pool afterwards.
        let captured = rig.driver.end_capture(rig.stream.handle()).unwrap();
        rig.driver.graph_destroy(captured).unwrap();
        drop(window);
        rig.pool.check().unwrap();
        assert_eq!(rig.pool.stats().reserved_bytes.current, before);
        rig.pool.reserve(8 * MIB, Purpose::Scratch, &rig.stream).unwrap();
        let (node, _) = Node::new(&rig.stream, 1);
        let window = rig.pool.begin_window(node, ScratchPolicy::Pin).unwrap();
        drop(rig.pool.alloc::<u8>(8 * MIB, &rig.stream).unwrap());
        drop(window);
    });
}

#[test]
fn an_out_of_memory_inside_the_window_frees_nothing() {
    // A selective free on the out-of-memory path once called the driver inside the capture and killed it.
    both(|mode| {
        let rig = Rig::limited(mode, 4 * MIB);
        warm(&rig, 2 * MIB);
        let (node, _) = Node::new(&rig.stream, 1);
        let window = rig.pool.begin_window(node, ScratchPolicy::Pin).unwrap();
        rig.driver.begin_capture(rig.stream.handle(), CaptureMode::ThreadLocal).unwrap();
        assert!(matches!(rig.pool.alloc::<u8>(6 * MIB, &rig.stream), Err(PoolError::WindowMiss { .. })));
        // Nor on another stream, from the thread that captures.
        let other = rig.driver.stream_create(0);
        let captured = rig.driver.end_capture(rig.stream.handle()).unwrap();
        rig.driver.graph_destroy(captured).unwrap();
        drop(window);
        let _ = other.map(|s| rig.driver.stream_destroy(s));
        assert_eq!(rig.faulty.count("free") + rig.faulty.count("unmap"), 0);
    });
}

#[test]
fn a_thread_that_captures_does_not_grow_the_pool_for_another_stream() {
    both(|mode| {
        let rig = Rig::new(mode);
        let other = Stream::new(&rig.driver).unwrap();
        drop(rig.pool.alloc::<u8>(64 * KIB, &other).unwrap());
        let (node, _) = Node::new(&rig.stream, 1);
        let window = rig.pool.begin_window(node, ScratchPolicy::Pin).unwrap();
        let calls = rig.faulty.count("any");
        drop(rig.pool.alloc::<u8>(64 * KIB, &other).unwrap());
        assert!(matches!(rig.pool.alloc::<u8>(8 * MIB, &other), Err(PoolError::Capturing { .. })));
        assert!(matches!(rig.pool.trim_to(0), Err(PoolError::Capturing { .. })));
        assert_eq!(rig.faulty.count("any"), calls);
        drop(window);
        drop(rig.pool.alloc::<u8>(8 * MIB, &other).unwrap());
    });
}

#[test]
fn a_panic_inside_the_window_leaves_stream_and_pool_usable() {
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, MIB);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            rig.graph(ScratchPolicy::Pin, |_| {
                let _a = rig.alloc(10 * KIB);
                drop(rig.alloc(20 * KIB));
                panic!("user code");
            })
        }));
        assert!(panicked.is_err());
        assert!(!rig.stream.is_capturing());
        rig.pool.check().unwrap();
        assert_eq!(rig.pool.stats().active_bytes.current, 0);
        drop(rig.alloc(8 * MIB));
        rig.graph(ScratchPolicy::Pin, |_| drop(rig.alloc(20 * KIB)));
    });
}

#[test]
fn memory_used_by_a_capturing_stream_is_left_alone_by_others() {
    // record_stream(capturing) + free + alloc elsewhere must neither record nor query on the capturing stream.
    both(|mode| {
        let rig = Rig::limited(mode, 2 * MIB);
        let other = Stream::new(&rig.driver).unwrap();
        let shared = rig.pool.alloc::<u8>(MIB + 512 * KIB, &other).unwrap();
        let (node, _) = Node::new(&rig.stream, 1);
        let window = rig.pool.begin_window(node, ScratchPolicy::Pin).unwrap();
        rig.driver.begin_capture(rig.stream.handle(), CaptureMode::Relaxed).unwrap();
        shared.record_stream(&rig.stream).unwrap();
        drop(shared);
        rig.faulty.set_logging(true);
        // Another thread, so that only the stream can be broken.
        let pool: &Pool = &rig.pool;
        std::thread::scope(|s| {
            s.spawn(|| assert!(pool.alloc::<u8>(MIB + 512 * KIB, &other).is_err(), "it may be captured right now"));
        });
        let touched =
            rig.faulty.take_log().into_iter().filter(|c| c.arg("stream") == Some(rig.stream.handle().0)).count();
        assert_eq!(touched, 0);
        assert!(matches!(rig.driver.capture_status(rig.stream.handle()).unwrap(), CaptureStatus::Active { .. }));
        let captured = rig.driver.end_capture(rig.stream.handle()).unwrap();
        rig.driver.graph_destroy(captured).unwrap();
        drop(window);
        drop(rig.pool.alloc::<u8>(MIB + 512 * KIB, &other).unwrap());
        rig.pool.check().unwrap();
    });
}

#[test]
fn without_a_window_a_free_is_reused_at_once() {
    // "A capture runs" and "somebody has a pool of their own" are not the same flag.
    both(|mode| {
        let rig = Rig::limited(mode, 4 * MIB);
        let arena = rig.pool.arena(&rig.stream).unwrap();
        let slice = rig.alloc(3 * MIB);
        let ptr = slice.ptr();
        drop(slice);
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.alloc(3 * MIB).ptr(), ptr);
        // Out of memory is repaired as ever: the free block goes back for a larger one.
        drop(rig.alloc(3 * MIB + 512 * KIB));
        drop(arena);
    });
}

#[test]
fn a_slice_dropped_inside_the_window_can_still_be_declared_by_the_scan() {
    both(|mode| {
        let rig = Rig::new(mode);
        let input = rig.alloc(64 * KIB);
        let place = span(&input);
        let mut graph = rig.graph(ScratchPolicy::Pin, |window| {
            let ptr = input.ptr();
            drop(input);
            let found = rig.pool.resolve(ptr).unwrap();
            assert!(!found.live);
            assert_eq!(found.kind, RangeKind::Pool(Purpose::Scratch));
            window.declare(found.token.unwrap(), Use::Input, 0, 64 * KIB, Hold::Strong).unwrap();
        });
        assert!(graph.prove());
        let others: Vec<_> = (0..8).map(|_| rig.alloc(64 * KIB)).collect();
        assert!(others.iter().all(|o| !overlaps(span(o), place)));
        rig.pool.check().unwrap();
    });
}

#[test]
fn graphs_of_one_arena_share_its_memory() {
    both(|mode| {
        let rig = Rig::new(mode);
        warm(&rig, MIB);
        let arena = rig.pool.arena(&rig.stream).unwrap();
        let mut places = Vec::new();
        let graphs: Vec<_> = (0..11)
            .map(|_| rig.graph(ScratchPolicy::Shared(arena.clone()), |_| places.push(span(&rig.alloc(128 * KIB)))))
            .collect();
        assert!(places.iter().all(|p| *p == places[0]), "one scratch for all of them");
        assert_eq!(arena.bytes(), 128 * KIB);
        let canaries: Vec<_> = (0..7).map(|_| rig.alloc(128 * KIB)).collect();
        assert!(canaries.iter().all(|c| !overlaps(span(c), places[0])));
        let kept = TestGraph::capture(&rig.pool, &rig.stream, ScratchPolicy::Shared(arena.clone()), |_| {
            std::mem::forget(rig.alloc(1024));
        });
        assert!(matches!(kept, Err(PoolError::OutlivesWindow { .. })), "a kept output does not live in an arena");
        drop(arena);
        rig.pool.check().unwrap();
        drop(graphs);
        drop(canaries);
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_window_needs_its_own_stream_and_device() {
    both(|mode| {
        let rig = Rig::new(mode);
        let other = Stream::new(&rig.driver).unwrap();
        let arena = rig.pool.arena(&other).unwrap();
        let (node, _) = Node::new(&rig.stream, 1);
        assert!(matches!(rig.pool.begin_window(node.clone(), ScratchPolicy::Shared(arena)), Err(PoolError::Config(_))));
        let window = rig.pool.begin_window(node.clone(), ScratchPolicy::Pin).unwrap();
        assert!(matches!(rig.pool.begin_window(node.clone(), ScratchPolicy::Pin), Err(PoolError::Capturing { .. })));
        assert!(matches!(rig.stream.synchronize(), Err(PoolError::Capturing { .. })));
        drop(window);
        let far = evergraph_pool::driver::host::HostMachine::new(2, device()).unwrap();
        let far: evergraph_pool::driver::DynDriver = far[1].clone();
        let elsewhere = Stream::new(&far).unwrap();
        let (node, _) = Node::new(&elsewhere, 1);
        assert!(matches!(rig.pool.begin_window(node, ScratchPolicy::Pin), Err(PoolError::OtherDevice { .. })));
        assert!(matches!(rig.pool.alloc::<u8>(1, &elsewhere), Err(PoolError::OtherDevice { .. })));
    });
}

#[test]
fn bad_declarations_change_nothing() {
    both(|mode| {
        let rig = Rig::new(mode);
        let stranger = Rig::new(mode);
        let slice = rig.alloc(1000);
        let theirs = stranger.alloc(1000);
        let gone = rig.alloc(1000).token();
        let graph = rig.graph(ScratchPolicy::Pin, |w| {
            let declare = |token, offset, bytes| w.declare(token, Use::Input, offset, bytes, Hold::Weak);
            assert!(matches!(declare(theirs.token(), 0, 1), Err(PoolError::OtherPool { .. })));
            assert!(matches!(declare(gone, 0, 1), Err(PoolError::StaleToken { reason: BadReason::Gone, .. })));
            assert!(matches!(declare(slice.token(), 1, 1000), Err(PoolError::Range { .. })));
            assert!(matches!(declare(slice.token(), usize::MAX, 2), Err(PoolError::Range { .. })));
            declare(slice.token(), 0, 1000).unwrap();
        });
        assert_eq!(graph.registration.dependencies().len(), 1);
        rig.pool.check().unwrap();
    });
}

/// A pool asks other threads' streams whether they are idle. The question used to be put after a look at "capturing", and
/// a capture could begin in between: it was broken by the question (and once the GPU's driver died of it).
#[test]
fn asking_whether_a_stream_is_idle_never_meets_a_capture() {
    let rig = Rig::with(device().stepped(false), config(evergraph_pool::PoolMode::Vmm));
    warm(&rig, MIB);
    let (stop, asked) = (std::sync::atomic::AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            while !stop.load(relaxed) {
                match rig.stream.is_idle() {
                    Ok(_) | Err(PoolError::Capturing { .. }) => asked.fetch_add(1, relaxed),
                    Err(error) => panic!("asked inside a capture: {error}"),
                };
            }
        });
        let mut broken = 0;
        for _ in 0..60_000 {
            drop(rig.graph(ScratchPolicy::Pin, |_| {
                rig.driver.begin_capture(rig.stream.handle(), CaptureMode::Relaxed).unwrap();
                let ended = rig.driver.end_capture(rig.stream.handle());
                broken += u32::from(ended.map(|graph| rig.driver.graph_destroy(graph).unwrap()).is_err());
            }));
        }
        stop.store(true, relaxed);
        asking.join().unwrap();
        assert_eq!(broken, 0, "captures broken by a question");
    });
    assert!(asked.load(relaxed) > 100, "the two went on side by side");
}
