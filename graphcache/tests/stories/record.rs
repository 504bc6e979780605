//! The dependency record: declared, handed out, scanned.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use evergraph_graphcache::{CacheError, GraphKey, Outcome, Ran, Request, Scope};
use evergraph_pool::driver::{Args, CaptureMode, DevicePtr, ExecHandle, GraphHandle, HostCallback};
use evergraph_pool::{DeviceSlice, PoolMode, ScratchPolicy, Use};

use crate::rig::{Affine, BIG, BOTH, Rig, config};

fn run(
    rig: &Rig,
    key: &GraphKey,
    body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
) -> Result<Outcome, CacheError> {
    rig.cache.run(&Request::new(key, &rig.pool, &rig.stream), body)
}

/// Two good runs, then the third, which captures.
fn third(rig: &Rig, mut body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>) -> Result<Outcome, CacheError> {
    let key = GraphKey::new("third");
    for _ in 0..2 {
        let _ = run(rig, &key, &mut body)?;
    }
    run(rig, &key, &mut body)
}

#[test]
fn strict_mode_names_a_pointer_that_nobody_declared() {
    let rig = Rig::new(PoolMode::Vmm);
    let (input, out) = (rig.slice(&[1; 4]), rig.slice(&[0; 4]));
    let error = third(&rig, |scope| {
        scope.declare(&out, Use::State)?;
        rig.op(scope, "add", out.ptr(), input.ptr(), 4, 1)
    })
    .unwrap_err();
    let CacheError::Undeclared { address, node, owner, .. } = error else { panic!("{error}") };
    assert_eq!((address, node.as_str()), (input.ptr(), "node 0 (kernel)"));
    assert_eq!(owner, format!("allocation {}", input.allocation()));
    assert_eq!((rig.host.live().graphs, rig.host.live().execs), (0, 0));
}

#[test]
fn otherwise_the_undeclared_memory_is_pinned() {
    for mode in BOTH {
        let rig = Rig::with(mode, config().strict(false));
        let out = rig.slice(&[0; 4]);
        let forgotten = rig.pool.upload(&[5u32; BIG], evergraph_pool::Purpose::Weight, &rig.stream).unwrap();
        let ptr = forgotten.ptr();
        let outcome = third(&rig, |scope| {
            scope.declare(&out, Use::State)?;
            rig.op(scope, "add", out.ptr(), ptr, 4, 1)
        });
        assert_eq!(outcome.unwrap().ran, Ran::Captured);
        assert_eq!(rig.count().undeclared, 1);
        // Its owner lets go, memory is wanted back: the graph still has it.
        drop(forgotten);
        rig.pool.trim_to(0).unwrap();
        rig.stream.fill(&out, 0).unwrap();
        let again = run(&rig, &GraphKey::new("third"), |_| unreachable!()).unwrap();
        assert_eq!(again.ran, Ran::Replayed);
        assert_eq!(rig.read(&out), [6; 4]);
    }
}

#[test]
fn pointers_inside_structs_by_value_are_found() {
    let rig = Rig::new(PoolMode::Vmm);
    let (input, out) = (rig.slice(&[1; 4]), rig.slice(&[0; 4]));
    let error = third(&rig, |scope| {
        scope.declare(&out, Use::State)?;
        let mut args = Args::new();
        let mut packed = [0u8; 24];
        packed[..8].copy_from_slice(&out.ptr().0.to_ne_bytes());
        packed[8..16].copy_from_slice(&input.ptr().0.to_ne_bytes());
        rig.launch(scope.stream(), "by_struct", args.push_bytes(&packed, 8).u32(4))
    })
    .unwrap_err();
    assert!(matches!(error, CacheError::Undeclared { address, .. } if address == input.ptr()), "{error}");
}

#[test]
fn copies_and_sets_are_scanned_as_well() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let (source, out, other) = (rig.slice(&[1; 4]), rig.slice(&[0; 4]), rig.slice(&[0; 4]));
        let host = rig.pool.host_buffer::<u32>(4).unwrap();
        let missing = Cell::new(0);
        let body = |scope: &Scope<'_>| -> Result<(), CacheError> {
            if missing.get() != 1 {
                scope.declare(&source, Use::Input)?;
            }
            scope.declare(&out, Use::State)?;
            if missing.get() != 2 {
                scope.declare(&other, Use::State)?;
            }
            if missing.get() != 3 {
                scope.declare(&host, Use::Input)?;
            }
            scope.stream().copy(&source, &out)?;
            scope.stream().fill(&other, 7)?;
            Ok(scope.stream().copy_from_host(&host, &source)?)
        };
        let key = GraphKey::new("copies");
        for _ in 0..2 {
            let _ = run(&rig, &key, body).unwrap();
        }
        for (what, found) in [(1, source.ptr()), (2, other.ptr())] {
            missing.set(what);
            let error = run(&rig, &key, body).unwrap_err();
            assert!(matches!(error, CacheError::Undeclared { address, .. } if address == found), "{error}");
        }
        missing.set(3);
        assert!(matches!(run(&rig, &key, body).unwrap_err(), CacheError::Undeclared { .. }));
        missing.set(0);
        assert_eq!(run(&rig, &key, body).unwrap().ran, Ran::Captured);
        // The graph keeps the host buffer that its copy reads.
        host.write(&[42; 4]).unwrap();
        drop(host);
        for _ in 0..2 {
            assert_eq!(run(&rig, &key, body_never).unwrap().ran, Ran::Replayed);
        }
        assert_eq!(rig.read(&out), [42; 4]);
    }
}

fn body_never(_: &Scope<'_>) -> Result<(), CacheError> {
    unreachable!("a replay does not call the closure")
}

#[test]
fn a_copy_from_host_memory_that_nobody_keeps_is_refused() {
    let rig = Rig::new(PoolMode::Vmm);
    let out = rig.slice(&[0; 4]);
    let host: Arc<[u32; 4]> = Arc::new([9; 4]);
    let kept = Cell::new(false);
    let body = |scope: &Scope<'_>| -> Result<(), CacheError> {
        scope.declare(&out, Use::State)?;
        if kept.get() {
            scope.keep(host.clone());
        }
        // SAFETY: `host` outlives the test's graphs.
        unsafe { rig.driver.memcpy_htod(out.ptr(), host.as_ptr().cast(), 16, scope.stream().handle())? };
        Ok(())
    };
    let error = third(&rig, body).unwrap_err();
    assert!(matches!(error, CacheError::UnownedHost { .. }), "{error}");
    kept.set(true);
    let count = Arc::strong_count(&host);
    assert_eq!(run(&rig, &GraphKey::new("third"), body).unwrap().ran, Ran::Captured);
    assert_eq!(Arc::strong_count(&host), count + 1, "the graph is an owner");
    rig.cache.clear();
    assert_eq!(Arc::strong_count(&host), count);
}

/// A graph of one `add`, captured by hand, to be launched into a capture.
fn small_graph(rig: &Rig, dst: DevicePtr, src: DevicePtr) -> (GraphHandle, ExecHandle) {
    let side = evergraph_pool::Stream::new(&rig.driver).unwrap();
    rig.driver.begin_capture(side.handle(), CaptureMode::ThreadLocal).unwrap();
    let mut args = Args::new();
    rig.launch(&side, "add", args.ptr(dst).ptr(src).u32(4).u32(5)).unwrap();
    let graph = rig.driver.end_capture(side.handle()).unwrap();
    (graph, rig.driver.instantiate(graph).unwrap())
}

#[test]
fn child_graphs_are_scanned_to_the_bottom() {
    let rig = Rig::new(PoolMode::Vmm);
    let (input, out) = (rig.slice(&[1; 4]), rig.slice(&[0; 4]));
    let (graph, exec) = small_graph(&rig, out.ptr(), input.ptr());
    let declares = Cell::new(false);
    let body = |scope: &Scope<'_>| -> Result<(), CacheError> {
        scope.declare(&out, Use::State)?;
        if declares.get() {
            scope.declare(&input, Use::Input)?;
        }
        let stream = scope.stream().handle();
        // A launch can not be recorded; a graph can be put in.
        if scope.capturing() {
            rig.driver.add_child(stream, graph)?;
        } else {
            rig.driver.launch(exec, stream)?;
        }
        Ok(())
    };
    let error = third(&rig, body).unwrap_err();
    assert!(matches!(error, CacheError::Undeclared { address, .. } if address == input.ptr()), "{error}");
    declares.set(true);
    assert_eq!(run(&rig, &GraphKey::new("third"), body).unwrap().ran, Ran::Captured);
    rig.stream.upload(&[10; 4], &input).unwrap();
    assert_eq!(run(&rig, &GraphKey::new("third"), body_never).unwrap().ran, Ran::Replayed);
    assert_eq!(rig.read(&out), [15; 4]);
    rig.driver.exec_destroy(exec).unwrap();
    rig.driver.graph_destroy(graph).unwrap();
}

/// A kernel whose arguments can not be read back: nobody knows what it uses, so all that is known stays.
#[test]
fn an_opaque_graph_pins_what_is_known_of_it() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
        rig.host.set_args_readable(rig.module.function("mul").unwrap(), false).unwrap();
        graph.settle(&rig);
        let request = Request::new(&graph.key, &rig.pool, &rig.stream);
        let info = rig.cache.info(&request).unwrap();
        assert!(info.opaque.is_some());
        assert_eq!(rig.count().opaque, 1);
        rig.pool.trim_to(0).unwrap();
        for _ in 0..3 {
            assert_eq!(graph.run(&rig).ran, Ran::Replayed, "tracked scratch of an opaque graph is not taken");
        }
    }
}

/// Where the driver can not tell a layout, every aligned word is looked at.
#[test]
fn without_a_layout_every_aligned_word_is_looked_at() {
    let rig = Rig::new(PoolMode::Vmm);
    let (input, out) = (rig.slice(&[1; 4]), rig.slice(&[0; 4]));
    rig.host.set_layout_readable(rig.module.function("add").unwrap(), false).unwrap();
    let error = third(&rig, |scope| {
        scope.declare(&out, Use::State)?;
        rig.op(scope, "add", out.ptr(), input.ptr(), 4, 1)
    })
    .unwrap_err();
    assert!(matches!(error, CacheError::Undeclared { address, .. } if address == input.ptr()), "{error}");
}

#[test]
fn a_host_function_needs_an_owner_or_the_graph_is_opaque() {
    let rig = Rig::new(PoolMode::Vmm);
    let out = rig.slice(&[0; 4]);
    for owned in [false, true] {
        let calls = Arc::new(AtomicU32::new(0));
        let key = GraphKey::new(("host function", owned));
        let body = |scope: &Scope<'_>| -> Result<(), CacheError> {
            scope.declare(&out, Use::State)?;
            scope.stream().fill(&out, 1)?;
            if owned {
                scope.keep(calls.clone());
            }
            let calls = calls.clone();
            let callback = HostCallback::new(move || drop(calls.fetch_add(1, Ordering::Relaxed)));
            Ok(rig.driver.launch_host_fn(scope.stream().handle(), callback)?)
        };
        for _ in 0..4 {
            let _ = run(&rig, &key, body).unwrap();
        }
        rig.stream.synchronize().unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 4);
        let info = rig.cache.info(&Request::new(&key, &rig.pool, &rig.stream)).unwrap();
        assert_eq!(info.opaque.is_none(), owned);
    }
}

/// Pointers in device memory are invisible to the scan: the table brings its members.
#[test]
fn a_pointer_table_pulls_in_its_members() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("experts");
        let out = rig.slice(&[0]);
        let experts = |base: u32| -> Vec<DeviceSlice<u32>> {
            (0..4).map(|i| rig.pool.upload(&vec![base + i; BIG], Default::default(), &rig.stream).unwrap()).collect()
        };
        let table = |experts: &[DeviceSlice<u32>]| {
            let members: Vec<_> = experts.iter().map(|e| (e as &dyn evergraph_pool::Tracked, Use::Weight)).collect();
            rig.pool.pointer_table(&members, Default::default(), &rig.stream).unwrap()
        };
        let mut owned = experts(10);
        let mut current = table(&owned);
        for turn in 0..6 {
            if turn == 4 {
                // The weights are replaced, and the old ones given back: the graph must notice.
                owned = experts(20);
                current = table(&owned);
                rig.pool.trim_to(0).unwrap();
            }
            rig.stream.fill(&out, 0xee).unwrap();
            let outcome = run(&rig, &key, |scope| {
                scope.declare(&out, Use::State)?;
                scope.declare_table(&current)?;
                let mut args = Args::new();
                rig.launch(scope.stream(), "sum_table", args.ptr(out.ptr()).ptr(current.slice().ptr()).u32(4))
            })
            .unwrap();
            let base = if turn < 4 { 10 } else { 20 };
            assert_eq!(rig.read(&out), [4 * base + 6], "turn {turn}: {outcome:?}");
            if turn == 4 {
                assert!(matches!(outcome.ran, Ran::Updated | Ran::Recaptured), "{outcome:?}");
            }
        }
        assert_eq!(owned.len(), 4);
    }
}

/// One past the end of a block is where its neighbour starts: a pointer there belongs to both, so the neighbour
/// counts as used. In strict mode that is an undeclared use, since it is mostly meant as the neighbour's start.
#[test]
fn an_end_pointer_belongs_to_both_neighbours() {
    for mode in BOTH {
        for strict in [false, true] {
            let rig = Rig::with(mode, config().strict(strict));
            // Neighbours: 512-byte granules, carved one after the other.
            let (mut first, mut second) = (rig.slice(&[1; 128]), rig.slice(&[2; 128]));
            if second.ptr().0 + 512 == first.ptr().0 {
                std::mem::swap(&mut first, &mut second);
            }
            assert_eq!(first.ptr().0 + 512, second.ptr().0, "the story needs neighbours");
            let out = rig.slice(&[0; 4]);
            let (begin, end) = (first.ptr(), first.ptr_at(128).unwrap());
            // Mode 0: first declared, pointer to its end. Mode 1: nothing declared, pointer to the second's start.
            let body = |scope: &Scope<'_>| {
                scope.declare(&out, Use::State)?;
                scope.declare(&first, Use::Input)?;
                let mut args = Args::new();
                let mut packed = [0u8; 24];
                packed[..8].copy_from_slice(&out.ptr().0.to_ne_bytes());
                packed[8..16].copy_from_slice(&begin.0.to_ne_bytes());
                packed[16..].copy_from_slice(&end.0.to_ne_bytes());
                rig.launch(scope.stream(), "by_struct", args.push_bytes(&packed, 8).u32(4))
            };
            match third(&rig, body) {
                Ok(outcome) => assert!(!strict && outcome.ran == Ran::Captured),
                Err(CacheError::Undeclared { address, .. }) => assert!(strict && address == end),
                Err(error) => panic!("{error}"),
            }
            assert_eq!(rig.count().undeclared, u64::from(!strict));
            // A free neighbour is nobody's: then it is just an end.
            drop(second);
            rig.cache.clear();
            assert_eq!(third(&rig, body).unwrap().ran, Ran::Captured);
        }
    }
}

/// The scratch of a window is on record without a declaration.
#[test]
fn what_the_window_hands_out_needs_no_declaration() {
    let rig = Rig::new(PoolMode::Vmm);
    let graph = Affine::new(&rig, 0, 1000, ScratchPolicy::Pin);
    graph.settle(&rig);
    let info = rig.cache.info(&Request::new(&graph.key, &rig.pool, &rig.stream)).unwrap();
    assert!(info.dependencies >= 3, "{info:?}");
    assert!(info.bytes >= 4000, "the temporary is the graph's: {info:?}");
}
