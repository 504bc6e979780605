//! Memory that moves, shrinks, or changes hands under a captured graph.

use std::cell::{Cell, RefCell};

use evergraph_graphcache::{CacheError, Cause, GraphKey, Ran, Request};
use evergraph_pool::driver::Args;
use evergraph_pool::{AllocationId, DeviceSlice, PoolMode, Purpose, ScratchPolicy, Use};

use crate::rig::{Affine, BIG, BOTH, KIB, MIB, Rig, config};

/// llama.cpp 26738: a pool flush frees a block that 3 of 74 cached graphs have baked in. One global counter would
/// recapture all 74 of them.
#[test]
fn flush_74_makes_exactly_three_graphs_stale_and_the_others_only_launch() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let graphs: Vec<Affine> = (0..74).map(|n| Affine::new(&rig, n, 300, ScratchPolicy::Pin)).collect();
        // In a heap of its own, so that nothing small shares its slab.
        let make = || rig.pool.alloc_for::<u32>(BIG, Purpose::State, &rig.stream).unwrap();
        let workspace = RefCell::new(make());
        let run = |n: usize| {
            let graph = &graphs[n];
            if !n.is_multiple_of(30) {
                return graph.only_run(&rig).unwrap();
            }
            // 0, 30 and 60 go by way of the shared workspace.
            rig.cache
                .run(&Request::new(&graph.key, &rig.pool, &rig.stream), |scope| {
                    let workspace = workspace.borrow();
                    scope.declare(&*workspace, Use::Scratch)?;
                    scope.declare(&graph.input, Use::Input)?;
                    scope.declare(&graph.out, Use::State)?;
                    rig.op(scope, "add", workspace.ptr(), graph.input.ptr(), 4, graph.form.0)?;
                    rig.op(scope, "mul", graph.out.ptr(), workspace.ptr(), 4, graph.form.1)
                })
                .unwrap()
        };
        let feed = |turn: u32| {
            for (n, graph) in graphs.iter().enumerate() {
                rig.stream.upload(&[turn, n as u32, turn * 3, 9], &graph.input).unwrap();
                rig.stream.fill(&graph.out, 0xee).unwrap();
            }
        };
        let check = |turn: u32| {
            for (n, graph) in graphs.iter().enumerate() {
                let expected = [turn, n as u32, turn * 3, 9].map(|x| (x + graph.form.0) * graph.form.1);
                assert_eq!(rig.read(&graph.out), expected, "graph {n}, turn {turn}, {mode}");
            }
        };
        for turn in 0..4 {
            feed(turn);
            (0..74).for_each(|n| drop(run(n)));
            check(turn);
        }
        let before = rig.count();
        assert_eq!((before.captures, before.replays), (74, 74));

        // The library makes itself another workspace, and the flush takes the old one.
        drop(workspace.replace(make()));
        feed(4);
        let reserved = rig.pool.stats().reserved_bytes.current as usize;
        let given = rig.pool.trim_to(reserved - 11 * MIB).unwrap();
        assert!(given >= 11 * MIB, "{given}");

        let mut stale = Vec::new();
        for n in 0..74 {
            rig.faulty.set_logging(true);
            let outcome = run(n);
            rig.faulty.set_logging(false);
            let calls: Vec<_> = rig.faulty.take_log().iter().map(|c| c.name).collect();
            match outcome.ran {
                Ran::Replayed => assert_eq!(calls, ["launch"], "graph {n}"),
                _ => {
                    assert!(matches!(outcome.cause, Some(Cause::Stale(_))));
                    stale.push((n, outcome.ran));
                }
            }
        }
        check(4);
        let repair = if mode == PoolMode::Vmm { Ran::Remapped } else { Ran::Updated };
        assert_eq!(stale, [(0, repair), (30, repair), (60, repair)]);
        let after = rig.count();
        assert_eq!((after.stale - before.stale, after.replays - before.replays), (3, 71));

        for turn in 5..8 {
            feed(turn);
            (0..74).for_each(|n| assert_eq!(run(n).ran, Ran::Replayed));
            check(turn);
        }
        assert_eq!(rig.host.live().execs, 74);
    }
}

/// vLLM 46067: a shared scratch arena grows for a later, larger capture, and graphs captured before it keep the old
/// address.
#[test]
fn an_arena_that_grows_for_a_later_capture_leaves_earlier_graphs_good() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let arena = rig.pool.arena(&rig.stream).unwrap();
        let graph = |n, len| Affine::new(&rig, n, len, ScratchPolicy::Shared(arena.clone()));
        let small: Vec<Affine> = [(1, 100), (2, 200)].map(|(n, len)| graph(n, len)).into();
        small.iter().for_each(|g| g.settle(&rig));
        let before = arena.bytes();
        let large = graph(4, 200 * KIB);
        large.settle(&rig);
        assert!(arena.bytes() > before, "the arena had to grow");
        for _ in 0..3 {
            for graph in small.iter().chain([&large]) {
                assert!(graph.run(&rig).ran.is_graph());
            }
        }
        // Growth after the last capture: other work wants room, and takes what nobody holds.
        let others: Vec<_> = (0..20).map(|_| rig.slice(&vec![7; 20 * KIB])).collect();
        rig.pool.trim_to(0).unwrap();
        for graph in small.iter().chain([&large]) {
            assert_eq!(graph.run(&rig).ran, Ran::Replayed);
        }
        assert!(others.iter().all(|o| rig.read(o).iter().all(|&x| x == 7)));
    }
}

/// flashinfer 4553: a library's workspace is resized by 256 bytes in the middle of the ninth capture, and the eight
/// graphs before it are poisoned.
#[test]
fn a_library_that_resizes_its_workspace_inside_a_capture_poisons_nobody() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let bytes = Cell::new(32 * KIB);
        let ptr = Cell::new(rig.driver.malloc(bytes.get()).unwrap());
        let workspace = RefCell::new(rig.pool.register_foreign(ptr.get(), bytes.get(), "library").unwrap());
        let resize = |want: usize| -> Result<(), CacheError> {
            if want > bytes.get() {
                rig.driver.bind()?;
                let new = rig.driver.malloc(want)?;
                workspace.borrow_mut().move_to(new, want)?;
                rig.driver.free(ptr.replace(new))?;
                bytes.set(want);
            }
            Ok(())
        };
        let graphs: Vec<Affine> = (0..9).map(|n| Affine::new(&rig, n, 0, ScratchPolicy::Pin)).collect();
        let wants_more = Cell::new(false);
        let run = |n: usize, turn: u32| {
            let graph = &graphs[n];
            rig.stream.upload(&[turn, n as u32, 5, turn + 8], &graph.input).unwrap();
            let ran = rig.cache.run(&Request::new(&graph.key, &rig.pool, &rig.stream), |scope| {
                resize(if wants_more.get() && n == 8 { 32 * KIB + 256 } else { 32 * KIB })?;
                let workspace = workspace.borrow();
                scope.declare(&*workspace, Use::Scratch)?;
                scope.declare(&graph.input, Use::Input)?;
                scope.declare(&graph.out, Use::State)?;
                rig.op(scope, "add", workspace.ptr(), graph.input.ptr(), 4, 1)?;
                rig.op(scope, "mul", graph.out.ptr(), workspace.ptr(), 4, n as u32 + 1)
            });
            let expected = [turn, n as u32, 5, turn + 8].map(|x| (x + 1) * (n as u32 + 1));
            let outcome = ran.unwrap();
            assert_eq!(rig.read(&graph.out), expected, "graph {n}");
            outcome
        };
        for turn in 0..3 {
            (0..8).for_each(|n| drop(run(n, turn)));
        }
        (0..2).for_each(|turn| drop(run(8, turn)));
        // The warm-ups took a branch that needed less.
        wants_more.set(true);
        let outcome = run(8, 3);
        assert_eq!((outcome.ran, outcome.cause), (Ran::Eager, Some(Cause::CaptureLost)));
        for n in 0..8 {
            let outcome = run(n, 4);
            assert_eq!(outcome.ran, Ran::Updated, "{outcome:?}");
        }
        assert_eq!(run(8, 5).ran, Ran::Captured);
        assert!((0..9).all(|n| run(n, 6).ran == Ran::Replayed));
        drop(workspace);
        rig.driver.free(ptr.get()).unwrap();
    }
}

/// TensorRT-LLM 16290: another subsystem's large temporaries change the layout of the pool that two captures share.
#[test]
fn what_others_allocate_between_capture_and_replay_does_not_move_a_graphs_memory() {
    for mode in BOTH {
        for policy in [ScratchPolicy::Pin, ScratchPolicy::Track] {
            let rig = Rig::new(mode);
            let a = Affine::new(&rig, 1, 5000, policy.clone());
            a.settle(&rig);
            let mut temporaries: Vec<DeviceSlice<u32>> = Vec::new();
            for round in 0..12 {
                temporaries.push(rig.slice(&vec![round; 1000 << round.min(7)]));
                if round % 3 == 2 {
                    drop(temporaries.remove(0));
                }
                assert_eq!(a.run(&rig).ran, Ran::Replayed, "{policy:?}");
            }
            for temporary in &temporaries {
                let words = rig.read(temporary);
                assert!(words.iter().all(|&w| w == words[0]), "a replay wrote to somebody else's memory");
            }
        }
    }
}

/// TornadoVM 1006: the consumer's buffer is re-pointed to the producer's after the capture, and a fallback hides it.
#[test]
fn a_swapped_buffer_is_seen_and_repaired_visibly() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("consumer");
        let out = rig.slice(&[0; 4]);
        let mut source = rig.slice(&[1, 2, 3, 4]);
        let run = |source: &DeviceSlice<u32>| {
            let bound = [source.allocation(), out.allocation()];
            let request = Request::new(&key, &rig.pool, &rig.stream).bound(&bound);
            rig.cache
                .run(&request, |scope| {
                    scope.declare(source, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    rig.op(scope, "add", out.ptr(), source.ptr(), 4, 100)
                })
                .unwrap()
        };
        for _ in 0..3 {
            let _ = run(&source);
        }
        let produced = rig.slice(&[5, 6, 7, 8]);
        let old = std::mem::replace(&mut source, produced);
        let outcome = run(&source);
        assert_eq!((outcome.ran, outcome.cause), (Ran::Updated, Some(Cause::Rebound)));
        assert_eq!(rig.read(&out), [105, 106, 107, 108]);
        drop(old);
        rig.stream.upload(&[9, 9, 9, 9], &source).unwrap();
        assert_eq!(run(&source).ran, Ran::Replayed);
        assert_eq!(rig.read(&out), [109; 4]);
        assert_eq!(rig.count().updates, 1);
    }
}

/// librediffusion 14: setters reallocate, and the allocator sometimes returns the same address. Addresses are no
/// identity.
#[test]
fn a_setter_that_reallocates_a_thousand_times_is_noticed_each_time() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("parameters");
        let out = rig.slice(&[0; 4]);
        let mut parameter = rig.slice(&[0; 4]);
        let mut spare = Vec::new();
        let mut same_address = 0;
        for turn in 0..1u32 << 10 {
            let before = parameter.ptr();
            if turn % 4 == 0 {
                // The graph is gone as well, so the freed block comes back.
                rig.cache.remove(&key);
                drop(parameter);
            } else if turn % 2 == 0 {
                drop(parameter);
            } else {
                spare.push(parameter);
                if spare.len() > 8 {
                    spare.clear();
                }
            }
            parameter = rig.slice(&[turn; 4]);
            same_address += u32::from(parameter.ptr() == before);
            let bound: [AllocationId; 1] = [parameter.allocation()];
            let request = Request::new(&key, &rig.pool, &rig.stream).bound(&bound);
            let outcome = rig
                .cache
                .run(&request, |scope| -> Result<(), CacheError> {
                    scope.declare(&parameter, Use::Input)?;
                    scope.declare(&out, Use::State)?;
                    rig.op(scope, "add", out.ptr(), parameter.ptr(), 4, 1)
                })
                .unwrap();
            assert_eq!(rig.read(&out), [turn + 1; 4], "turn {turn}: {outcome:?}");
            assert_ne!(outcome.ran, Ran::Replayed, "turn {turn}: the buffer is another one each time");
        }
        assert!(same_address > 100, "the story needs equal addresses: {same_address}");
    }
}

/// PyTorch 192061: the workspace belonged to the thread that captured, and that thread ended.
#[test]
fn a_graph_owns_the_workspace_of_a_thread_that_ended() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("worker");
        let (input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
        let (cache, pool, stream, driver) = (&rig.cache, &rig.pool, &rig.stream, &rig.driver);
        let (module, key_ref) = (&rig.module, &key);
        let old = std::thread::scope(|s| {
            let (input, out) = (&input, &out);
            s.spawn(move || {
                driver.bind().unwrap();
                let workspace = pool.alloc::<u32>(4, stream).unwrap();
                let [add, mul] = ["add", "mul"].map(|n| module.function(n).unwrap());
                for _ in 0..3 {
                    let _ = cache
                        .run(&Request::new(key_ref, pool, stream), |scope| -> Result<(), CacheError> {
                            scope.declare(input, Use::Input)?;
                            scope.declare(out, Use::State)?;
                            scope.declare_held(&workspace, Use::Scratch)?;
                            for (f, dst, src, k) in
                                [(add, workspace.ptr(), input.ptr(), 7), (mul, out.ptr(), workspace.ptr(), 2)]
                            {
                                let mut args = Args::new();
                                args.ptr(dst).ptr(src).u32(4).u32(k);
                                let config = evergraph_pool::driver::LaunchConfig::linear(1, 1);
                                // SAFETY: the arguments fit the kernels; the device checks the spans.
                                unsafe { driver.launch_kernel(f, &config, args.as_bytes(), stream.handle())? };
                            }
                            Ok(())
                        })
                        .unwrap();
                }
                workspace.ptr()
            })
            .join()
            .unwrap()
        });
        // The thread and its slice are gone; everybody else allocates.
        let others: Vec<DeviceSlice<u32>> = (0..50).map(|i| rig.slice(&[i; 4])).collect();
        assert!(others.iter().all(|o| o.ptr() != old), "the graph keeps the block");
        for turn in 1..4 {
            rig.stream.upload(&[turn; 4], &input).unwrap();
            let request = Request::new(&key, &rig.pool, &rig.stream);
            let outcome = rig.cache.run(&request, |_| -> Result<(), CacheError> { unreachable!() }).unwrap();
            assert_eq!(outcome.ran, Ran::Replayed);
            assert_eq!(rig.read(&out), [(turn + 7) * 2; 4]);
        }
        assert!(others.iter().enumerate().all(|(i, o)| rig.read(o) == [i as u32; 4]));
        rig.cache.clear();
        let again: Vec<DeviceSlice<u32>> = (0..50).map(|i| rig.slice(&[i; 4])).collect();
        assert!(again.iter().any(|o| o.ptr() == old), "and lets it go with itself");
    }
}

/// The oldest one: the buffer is freed, its address belongs to somebody else, and the graph writes there.
#[test]
fn tracked_scratch_that_was_taken_is_repaired_before_the_next_launch() {
    for mode in BOTH {
        let rig = Rig::with(mode, config());
        let graph = Affine::new(&rig, 0, BIG, ScratchPolicy::Track);
        graph.settle(&rig);
        let given = rig.pool.trim_to(0).unwrap();
        assert!(given >= 11 * MIB, "{given}");
        let others: Vec<_> = (0..10).map(|i| rig.slice(&vec![i; 30 * KIB])).collect();
        let outcome = graph.run(&rig);
        assert_eq!(outcome.ran, if mode == PoolMode::Vmm { Ran::Remapped } else { Ran::Updated }, "{outcome:?}");
        assert!(others.iter().enumerate().all(|(i, o)| rig.read(o).iter().all(|&x| x == i as u32)));
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
        assert_eq!(rig.host.live().execs, 1);
        assert!(rig.driver.fault().is_none());
    }
}
