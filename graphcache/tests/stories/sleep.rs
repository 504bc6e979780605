//! The pool sleeps under captured graphs: kept bytes cost a note, lost ones are refused, and asleep nothing runs at all.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use evergraph_graphcache::{CacheError, Cause, GraphKey, Outcome, Ran, Request};
use evergraph_pool::driver::host::Live;
use evergraph_pool::{Content, DeviceSlice, PoolError, PoolMode, Purpose, ScratchPolicy, Stream, Use};

use crate::rig::{Affine, BIG, Rig, config};

fn is_asleep(result: &Result<Outcome, CacheError>) -> bool {
    matches!(result, Err(CacheError::Pool(PoolError::Asleep { .. })))
}

/// state += input, by way of scratch: what it computes depends on all that it ever read.
struct Sum {
    key: GraphKey,
    input: DeviceSlice<u32>,
    state: DeviceSlice<u32>,
    policy: ScratchPolicy,
    called: Cell<u32>,
    expected: Cell<u32>,
}

const LEN: usize = 3;

impl Sum {
    fn new(rig: &Rig, stream: &Stream, name: u32, policy: ScratchPolicy) -> Self {
        let upload = |word: u32| rig.pool.upload(&[word; LEN], Purpose::State, stream).unwrap();
        let (input, state) = (upload(0), upload(name));
        Self { key: GraphKey::new(("sum", name)), input, state, policy, called: 0.into(), expected: name.into() }
    }

    fn run(&self, rig: &Rig, stream: &Stream) -> Result<Outcome, CacheError> {
        let request = Request::new(&self.key, &rig.pool, stream).policy(self.policy.clone());
        let outcome = rig.cache.run(&request, |scope| -> Result<(), CacheError> {
            self.called.set(self.called.get() + 1);
            scope.declare(&self.input, Use::Input)?;
            scope.declare(&self.state, Use::State)?;
            let scratch = scope.alloc::<u32>(1000)?;
            rig.op(scope, "add", scratch.ptr(), self.input.ptr(), LEN, 1)?;
            // The temporary first, so that a lost one shows.
            rig.op(scope, "add", self.state.ptr(), self.state.ptr(), LEN, 5)
        })?;
        self.expected.set(self.expected.get().wrapping_add(5));
        Ok(outcome)
    }

    fn step(&self, rig: &Rig, word: u32) -> Result<Ran, CacheError> {
        rig.stream.upload(&[word; LEN], &self.input)?;
        let outcome = self.run(rig, &rig.stream)?;
        assert_eq!(rig.read(&self.state), [self.expected.get(); LEN], "{outcome:?}");
        Ok(outcome.ran)
    }
}

#[test]
fn kept_bytes_cost_a_note_and_no_capture() {
    for content in [Content::Keep, Content::KeepPinned] {
        // Pages at a price that nobody would pay: none are missing.
        let mut dear = config();
        dear.costs = dear.costs.flat_remap(1e9);
        let rig = Rig::with(PoolMode::Vmm, dear);
        let arena = rig.pool.arena(&rig.stream).unwrap();
        let policies = [ScratchPolicy::Pin, ScratchPolicy::Track, ScratchPolicy::Shared(arena)];
        let sums: Vec<_> = (0..).zip(policies).map(|(n, p)| Sum::new(&rig, &rig.stream, n, p)).collect();
        for word in 0..4 {
            sums.iter().for_each(|sum| drop(sum.step(&rig, word).unwrap()));
        }
        for cycle in 0..3 {
            rig.pool.sleep(content, &[]).unwrap();
            assert_eq!(rig.host.live().used_bytes, 0);
            rig.pool.wake(&[]).unwrap();
            rig.pool.check().unwrap();
            rig.faulty.set_logging(true);
            for sum in &sums {
                assert_eq!(sum.step(&rig, 100 + cycle).unwrap(), Ran::Remapped);
                assert_eq!(sum.step(&rig, 200 + cycle).unwrap(), Ran::Replayed);
            }
            rig.faulty.set_logging(false);
            let names = rig.names();
            let dear = ["begin_capture", "instantiate", "exec_update", "map", "create", "launch_kernel"];
            assert!(!names.iter().any(|n| dear.contains(n)), "{names:?}");
        }
        assert!(sums.iter().all(|sum| sum.called.get() == 3), "two warm-ups and a capture");
        assert_eq!(rig.count().eager, 0);
        assert_eq!(rig.driver.fault(), None);
    }
}

#[test]
fn lost_bytes_are_refused_until_they_were_filled() {
    let rig = Rig::new(PoolMode::Vmm);
    let sum = Sum::new(&rig, &rig.stream, 7, ScratchPolicy::Track);
    (0..4).for_each(|word| drop(sum.step(&rig, word).unwrap()));
    rig.pool.sleep(Content::Drop, &[]).unwrap();
    rig.pool.wake(&[]).unwrap();
    let called = sum.called.get();
    for _ in 0..2 {
        let refused = sum.run(&rig, &rig.stream);
        assert!(matches!(refused, Err(CacheError::ContentLost(_))), "{refused:?}");
    }
    // It asks the closure once, whose declaration is refused; no kernel runs.
    assert!(sum.called.get() <= called + 2);
    sum.expected.set(40);
    rig.stream.upload(&[40; LEN], &sum.state).unwrap();
    rig.cache.invalidate(&sum.key);
    assert!(matches!(sum.step(&rig, 9).unwrap(), Ran::Updated | Ran::Recaptured));
    assert_eq!(sum.step(&rig, 10).unwrap(), Ran::Replayed);
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn asleep_a_run_is_a_typed_refusal_and_nothing_runs_in_its_place() {
    let rig = Rig::new(PoolMode::Vmm);
    let arena = rig.pool.arena(&rig.stream).unwrap();
    let settled = Sum::new(&rig, &rig.stream, 1, ScratchPolicy::Track);
    let shared = Sum::new(&rig, &rig.stream, 2, ScratchPolicy::Shared(arena));
    let (new, warm) =
        (Sum::new(&rig, &rig.stream, 3, ScratchPolicy::Pin), Sum::new(&rig, &rig.stream, 4, ScratchPolicy::Pin));
    for word in 0..4 {
        settled.step(&rig, word).unwrap();
        shared.step(&rig, word).unwrap();
    }
    warm.step(&rig, 1).unwrap();
    warm.step(&rig, 2).unwrap();
    for purposes in [&[][..], &[Purpose::State], &[Purpose::Scratch]] {
        rig.pool.sleep(Content::Keep, purposes).unwrap();
        let called = settled.called.get();
        rig.faulty.set_logging(true);
        for sum in [&settled, &shared, &new, &warm] {
            let refused = sum.run(&rig, &rig.stream);
            assert!(is_asleep(&refused), "{purposes:?}: {refused:?}");
        }
        rig.faulty.set_logging(false);
        let names = rig.names();
        let work = ["launch", "map", "create", "instantiate", "memset_d8"];
        assert!(!names.iter().any(|n| work.contains(n)), "{names:?}");
        if purposes != [Purpose::Scratch] {
            assert!(!names.contains(&"launch_kernel"), "{names:?}");
        }
        assert_eq!(settled.called.get(), called, "the closure of a captured graph is not asked");
        assert_eq!(rig.count().eager, 0);
        rig.pool.wake(&[]).unwrap();
        assert_eq!(settled.step(&rig, 50).unwrap(), Ran::Remapped);
    }
    (0..4).for_each(|word| drop(new.step(&rig, word).unwrap()));
    assert_eq!(warm.step(&rig, 3).unwrap(), Ran::Captured);
    assert_eq!(rig.driver.fault(), None);
    assert_eq!(rig.host.live().captures, 0);
}

#[test]
fn evicted_graphs_leave_nothing_with_the_driver_and_come_back() {
    let rig = Rig::new(PoolMode::Vmm);
    let graphs: Vec<_> = (0..5).map(|n| Affine::new(&rig, n, BIG, ScratchPolicy::Pin)).collect();
    graphs.iter().for_each(|g| g.settle(&rig));
    assert!(rig.cache.bytes() > 0);
    assert_eq!((rig.host.live().execs, rig.host.live().graphs), (5, 5));
    assert_eq!(rig.cache.evict_graphs(), 5);
    assert_eq!(rig.cache.evict_graphs(), 0);
    let Live { execs, graphs: left, .. } = rig.host.live();
    assert_eq!((execs, left, rig.cache.bytes(), rig.cache.len()), (0, 0, 0, 5));
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    assert_eq!(rig.host.live().used_bytes, 0);
    rig.pool.wake(&[]).unwrap();
    for graph in &graphs {
        let outcome = graph.run(&rig);
        assert_eq!(outcome.ran, Ran::Recaptured, "no warm-ups again");
        assert!(matches!(outcome.cause, Some(Cause::Stale(_))));
        assert_eq!(graph.run(&rig).ran, Ran::Replayed);
    }
    assert_eq!(rig.count().evictions, 5);
    rig.pool.check().unwrap();
}

#[test]
fn threads_run_while_the_pool_sleeps_and_wakes() {
    let rig = Rig::new(PoolMode::Vmm);
    let (over, refused) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|s| {
        for n in 0..2u32 {
            let (rig, over, refused) = (&rig, &over, &refused);
            let stream = Stream::new(&rig.driver).unwrap();
            let sum = Sum::new(rig, &stream, 1000 * n, ScratchPolicy::Track);
            s.spawn(move || {
                rig.driver.bind().unwrap();
                while !over.load(Ordering::Relaxed) {
                    match sum.run(rig, &stream) {
                        Ok(_) => {}
                        Err(CacheError::Pool(PoolError::Asleep { .. })) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            std::thread::yield_now();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                assert!(sum.expected.get() > 1000 * n + 50);
                assert_eq!(stream.download(&sum.state).unwrap(), [sum.expected.get(); LEN]);
            });
        }
        for cycle in 0..300u32 {
            let content = [Content::Keep, Content::KeepPinned][cycle as usize % 2];
            // A capture and a sleep exclude each other.
            while let Err(error) = rig.pool.sleep(content, &[]) {
                assert!(matches!(error, PoolError::Capturing { .. }), "{error}");
                std::thread::yield_now();
            }
            rig.pool.wake(&[]).unwrap();
            std::thread::yield_now();
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(refused.into_inner() > 0);
    assert_eq!(rig.driver.fault(), None);
    rig.pool.check().unwrap();
}
