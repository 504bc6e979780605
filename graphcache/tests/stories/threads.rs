//! Many threads on one cache: get, launch, evict, flush.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use evergraph_graphcache::{CacheError, GraphKey, Ran, Request};
use evergraph_pool::driver::{Args, LaunchConfig};
use evergraph_pool::{PoolConfig, PoolMode, Purpose, ScratchPolicy, Stream, Use};

use crate::rig::{BIG, CHUNK, KIB, MIB, Rig, config, device};

/// tiny-cuda-nn 225, mxnet 20324: unsynchronised graph objects. Each thread works on its stream and checks every
/// result, while one flushes the pool, one evicts and one invalidates.
fn hammer(mode: PoolMode, rounds: u32) {
    let mut settings = config().max_entries(14).strict(true);
    settings.warm_ups = 1;
    let rig = Rig::on(
        device().granularity(2 * MIB),
        PoolConfig::new(mode).chunk(2 * MIB).smallest_slab(CHUNK).limit(400 * MIB),
        settings,
    );
    let [add, mul] = ["add", "mul"].map(|name| rig.module.function(name).unwrap());
    let (cache, pool, driver) = (&rig.cache, &rig.pool, &rig.driver);
    let left = AtomicU64::new(4);
    let done = &left;
    std::thread::scope(|s| {
        for thread in 0..4u32 {
            s.spawn(move || {
                driver.bind().unwrap();
                let stream = Stream::new(driver).unwrap();
                let input = pool.upload(&[0u32; 4], Purpose::State, &stream).unwrap();
                let out = pool.upload(&[0u32; 4], Purpose::State, &stream).unwrap();
                // Four keys; two of them are the same for all threads, and still each stream has its own graph.
                let keys: Vec<_> =
                    (0..4).map(|k| GraphKey::new(if k < 2 { (0, k) } else { (thread + 1, k) })).collect();
                for round in 0..rounds {
                    let k = (round % 4) as usize;
                    stream.upload(&[round, thread, 7, round * 3], &input).unwrap();
                    let policy = if k.is_multiple_of(2) { ScratchPolicy::Track } else { ScratchPolicy::Pin };
                    let request = Request::new(&keys[k], pool, &stream).policy(policy);
                    let len = BIG + k * KIB;
                    let _ = cache
                        .run(&request, |scope| -> Result<(), CacheError> {
                            scope.declare(&input, Use::Input)?;
                            scope.declare(&out, Use::State)?;
                            let temp = scope.alloc::<u32>(len)?;
                            for (f, dst, src, x) in
                                [(add, temp.ptr(), input.ptr(), k as u32 + 1), (mul, out.ptr(), temp.ptr(), 5)]
                            {
                                let mut args = Args::new();
                                args.ptr(dst).ptr(src).u32(4).u32(x);
                                let config = LaunchConfig::linear(1, 1);
                                // SAFETY: the arguments fit the kernels; the device checks the spans.
                                unsafe { driver.launch_kernel(f, &config, args.as_bytes(), stream.handle())? };
                            }
                            Ok(())
                        })
                        .unwrap();
                    let expected = [round, thread, 7, round * 3].map(|x| (x + k as u32 + 1) * 5);
                    assert_eq!(stream.download(&out).unwrap(), expected, "thread {thread}, round {round}, key {k}");
                }
                done.fetch_sub(1, Ordering::Relaxed);
            });
        }
        s.spawn(move || {
            driver.bind().unwrap();
            let mut turn = 0u32;
            while done.load(Ordering::Relaxed) > 0 {
                turn += 1;
                match turn % 4 {
                    0 => drop(pool.trim_to(0).unwrap()),
                    1 => cache.invalidate(&GraphKey::new((0, 0))),
                    2 if turn % 64 == 2 => cache.remove(&GraphKey::new((0, 1))),
                    _ => drop(pool.trim_to(8 * MIB).unwrap()),
                }
                std::thread::yield_now();
            }
        });
    });
    assert!(driver.fault().is_none());
    pool.check().unwrap();
    let count = rig.count();
    assert_eq!(count.runs(), u64::from(4 * rounds), "every run ended as exactly one thing: {count:?}");
    assert!(count.stale > 0 && count.replays > 0 && count.refusals == 0, "{count:?}");
    assert!(count.live() <= 14 && count.live() == rig.host.live().execs as u64, "{count:?}");
    cache.clear();
    assert_eq!((rig.host.live().execs, rig.host.live().graphs), (0, 0));
}

#[test]
fn threads_replay_while_others_flush_evict_and_invalidate_vmm() {
    hammer(PoolMode::Vmm, 120);
}

#[test]
fn threads_replay_while_others_flush_evict_and_invalidate_slab() {
    hammer(PoolMode::Slab, 120);
}

/// Several threads, one key, one stream: they take turns, and the graph is captured once.
#[test]
fn threads_that_want_the_same_graph_take_turns() {
    for mode in crate::rig::BOTH {
        let rig = Rig::new(mode);
        let key = GraphKey::new("shared");
        let out = rig.slice(&[0; 4]);
        let add = rig.module.function("add").unwrap();
        let (cache, pool, driver, stream, out_ref) = (&rig.cache, &rig.pool, &rig.driver, &rig.stream, &out);
        std::thread::scope(|s| {
            for _ in 0..4 {
                let key = &key;
                s.spawn(move || {
                    driver.bind().unwrap();
                    for _ in 0..100 {
                        let _ = cache
                            .run(&Request::new(key, pool, stream), |scope| -> Result<(), CacheError> {
                                scope.declare(out_ref, Use::State)?;
                                let mut args = Args::new();
                                args.ptr(out_ref.ptr()).ptr(out_ref.ptr()).u32(4).u32(1);
                                // SAFETY: the arguments fit the kernel; the device checks the spans.
                                unsafe {
                                    driver.launch_kernel(
                                        add,
                                        &LaunchConfig::linear(1, 1),
                                        args.as_bytes(),
                                        stream.handle(),
                                    )?;
                                }
                                Ok(())
                            })
                            .unwrap();
                    }
                });
            }
        });
        assert_eq!(rig.read(&out), [400; 4], "every run ran once");
        let count = rig.count();
        assert_eq!((count.warm_ups, count.captures, count.replays), (2, 1, 397));
    }
}

/// Scratch that must start as zero is cleared right before the launch that needs it. A thread that was short of memory took the pages
/// in between, waited for the last launch only, and the clearing hit what was not there any more.
#[test]
fn nobody_takes_scratch_between_its_clearing_and_the_launch() {
    let rig = Rig::new(PoolMode::Vmm);
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
    // Somebody else wants all memory just when it is to be cleared, and gets a while to take it.
    let met = |ran: &dyn Fn() -> Ran| {
        let (pool, driver) = (rig.pool.clone(), rig.driver.clone());
        let (say, said) = mpsc::channel();
        rig.faulty.before_nth("memset_d8", 1, move || {
            let taker = std::thread::spawn(move || {
                driver.bind().unwrap();
                pool.trim_to(0).unwrap();
            });
            let until = Instant::now() + Duration::from_millis(100);
            while !taker.is_finished() && Instant::now() < until {
                std::thread::yield_now();
            }
            say.send(taker).unwrap();
        });
        let ran = ran();
        said.recv().unwrap().join().unwrap();
        ran
    };
    let warm_ups: Vec<Ran> = (1..3).map(run).collect();
    assert_eq!(warm_ups, [Ran::WarmUp, Ran::WarmUp]);
    assert_eq!(met(&|| run(3)), Ran::Captured);
    for turn in 4..8 {
        rig.pool.trim_to(0).unwrap();
        assert_eq!(met(&|| run(turn)), Ran::Remapped);
    }
    assert!(rig.driver.fault().is_none());
}
