//! Retiring: what a graph may notice, and who waits for whom.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use evergraph_pool::driver::HostCallback;
use evergraph_pool::{
    BadReason, Dependent, DeviceSlice, Hold, Pool, PoolError, PoolMode, Purpose, RetireReason, Retired, ScratchPolicy,
    Stream, Use,
};
use parking_lot::Mutex;

use crate::common::*;

/// A weakly held block of its own segment or chunks, without a live slice.
fn held(rig: &Rig, bytes: usize, use_: Use) -> TestGraph {
    let slice = rig.alloc(bytes);
    let mut graph = rig.depends(&slice, use_, Hold::Weak);
    assert!(graph.prove());
    graph
}

#[test]
fn a_flush_makes_exactly_its_graphs_stale() {
    // The out-of-memory flush once freed blocks that a captured graph still held, and the graph was replayed.
    both(|mode| {
        let rig = Rig::limited(mode, 8 * MIB);
        let live = rig.pool.alloc_for::<u8>(64 * KIB, Purpose::State, &rig.stream).unwrap();
        let flushed = rig.alloc(3 * MIB);
        let mut graphs: Vec<_> = (0..74)
            .map(|i| {
                if i % 30 == 7 {
                    rig.depends(&flushed, Use::State, Hold::Weak)
                } else {
                    rig.depends(&live, Use::State, Hold::Weak)
                }
            })
            .collect();
        assert!(graphs.iter_mut().all(TestGraph::prove));
        drop(flushed);
        let big = rig.alloc(5 * MIB + 512 * KIB);
        rig.faulty.set_logging(true);
        let launched: Vec<bool> = graphs.iter_mut().map(|g| g.replay(|| ())).collect();
        assert!(rig.faulty.take_log().is_empty(), "the check made a driver call");
        for (i, launched) in launched.into_iter().enumerate() {
            assert_eq!(launched, i % 30 != 7, "graph {i}");
        }
        let counters = rig.pool.counters();
        assert_eq!(counters.stale, 3);
        assert!(counters.give_backs + counters.reissues > 0);
        assert_eq!(graphs[7].node.told.lock().len(), 1);
        assert!(graphs[8].node.told.lock().is_empty());
        rig.pool.check().unwrap();
        drop((big, graphs));
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_trim_hits_only_the_graph_whose_memory_it_takes() {
    both(|mode| {
        let rig = Rig::new(mode);
        let live = rig.pool.alloc_for::<u8>(MIB, Purpose::Weight, &rig.stream).unwrap();
        let mut a = rig.depends(&live, Use::Weight, Hold::Strong);
        let mut b = rig.depends(&live, Use::Weight, Hold::Weak);
        let mut c = held(&rig, 4 * MIB, Use::Scratch);
        assert!(a.prove() && b.prove());
        assert!(rig.pool.trim_to(0).unwrap() >= 4 * MIB);
        assert!(a.replay(|| ()) && b.replay(|| ()));
        assert!(!c.replay(|| ()));
        let stale = c.registration.walk().unwrap_err();
        assert_eq!(stale.is_remap(), mode == PoolMode::Vmm, "{stale}");
        let reason = if mode == PoolMode::Vmm { RetireReason::Unbacked } else { RetireReason::GivenBack };
        assert_eq!(c.node.told.lock()[0].reason, reason);
        rig.pool.check().unwrap();
    });
}

#[test]
fn the_same_address_is_not_the_same_allocation() {
    // The driver, or the pool, hands the address out again: size and address are equal, the owner is not.
    let rig = Rig::limited(PoolMode::Slab, 2 * MIB + 512 * KIB);
    let slice = rig.alloc(MIB + 256 * KIB);
    let (ptr, token) = (slice.ptr(), slice.token());
    let mut graph = rig.depends(&slice, Use::Input, Hold::Weak);
    assert!(graph.prove());
    drop(slice);
    let other = rig.alloc(MIB + 256 * KIB);
    assert_eq!(other.ptr(), ptr, "the story needs the same address");
    assert_ne!(other.token().allocation, token.allocation);
    assert!(!graph.replay(|| ()), "launched on somebody else's memory");
    assert_eq!(graph.registration.walk().unwrap_err().bad[0].reason, BadReason::Reissued);
    assert_eq!(rig.pool.counters().reissues, 1);
    rig.pool.check().unwrap();
}

#[test]
fn a_range_that_a_graph_depends_on_keeps_its_address() {
    // vmm: only the pages may be taken.
    let rig = Rig::limited(PoolMode::Vmm, 2 * MIB);
    let slice = rig.alloc(MIB + 512 * KIB);
    let ptr = slice.ptr();
    let mut graph = rig.depends(&slice, Use::Scratch, Hold::Weak);
    drop(slice);
    let other = rig.alloc(MIB + 512 * KIB);
    assert_ne!(other.ptr(), ptr);
    assert!(!graph.replay(|| ()));
    rig.pool.check().unwrap();
    drop(graph);
    rig.pool.check().unwrap();
    drop(other);
    // With the graph gone the range is anybody's.
    drop(rig.alloc(2 * MIB));
    rig.pool.trim_to(0).unwrap();
    assert_eq!(rig.pool.stats().active_bytes.current, 0);
    rig.pool.check().unwrap();
}

#[test]
fn pages_come_back_under_the_same_address() {
    let rig = Rig::new(PoolMode::Vmm);
    drop(rig.alloc(MIB));
    let mut scratch = None;
    let mut graph = rig.graph(ScratchPolicy::Track, |_| {
        let tmp = rig.alloc(MIB);
        scratch = Some(tmp.ptr());
    });
    assert!(graph.replay(|| ()));
    let reserved = rig.pool.stats().reserved_bytes.current;
    assert!(rig.pool.trim_to(0).unwrap() > 0);
    assert!(!graph.replay(|| ()));
    assert!(graph.registration.walk().unwrap_err().is_remap());
    let filled = graph.registration.reback().unwrap();
    assert_eq!((filled[0].ptr, filled[0].bytes, filled[0].clear), (scratch.unwrap(), MIB, false));
    assert!(graph.replay(|| ()));
    let counters = rig.pool.counters();
    assert_eq!((counters.unbacked, counters.rebacks, counters.stale), (1, 1, 1));
    assert_eq!(rig.pool.stats().reserved_bytes.current, reserved);
    assert!(graph.registration.reback().unwrap().is_empty(), "nothing is missing now");
    rig.driver.memset_d8(scratch.unwrap(), 1, MIB, rig.stream.handle()).unwrap();
    rig.stream.synchronize().unwrap();
    rig.pool.check().unwrap();
}

#[test]
fn lost_content_is_not_repaired_by_pages() {
    let rig = Rig::new(PoolMode::Vmm);
    for use_ in [Use::Input, Use::State, Use::Weight] {
        let graph = held(&rig, MIB, use_);
        rig.pool.trim_to(0).unwrap();
        assert!(!graph.registration.walk().unwrap_err().is_remap());
        assert!(matches!(graph.registration.reback(), Err(PoolError::Stale(_))));
    }
    let graph = held(&rig, MIB, Use::ZeroedScratch);
    rig.pool.trim_to(0).unwrap();
    assert!(graph.registration.reback().unwrap()[0].clear);
    graph.registration.walk().unwrap();
    rig.pool.check().unwrap();
}

#[test]
fn undisturbed_graphs_notice_nothing() {
    // The epoch moves only when a block with dependents is retired.
    both(|mode| {
        let rig = Rig::new(mode);
        let state = rig.alloc(64 * KIB);
        let mut graph = rig.depends(&state, Use::State, Hold::Strong);
        assert!(graph.prove());
        for round in 0..100 {
            let other: Vec<_> = (0..10).map(|i| rig.alloc(1000 + i * 100 * KIB)).collect();
            drop(other);
            if round % 10 == 0 {
                rig.pool.trim_to(0).unwrap();
            }
            assert!(graph.launch(|| ()), "a needless refusal in round {round}");
        }
        assert_eq!(rig.pool.counters().epoch_bumps, 0);
    });
}

#[test]
fn memory_is_not_taken_while_a_lease_is_held() {
    both(|mode| {
        let rig = Rig::new(mode);
        let live = rig.alloc(1000);
        let graph = held(&rig, 12 * MIB, Use::Scratch);
        let lease = Arc::clone(graph.node.lease());
        let guard = lease.enter();
        assert!(guard.undisturbed([(&**graph.registration.epoch(), graph.proven)]));
        std::thread::scope(|s| {
            let trim = s.spawn(|| rig.pool.trim_to(0).unwrap());
            // Passed over once, then waited for: two bumps.
            while rig.pool.counters().epoch_bumps < 2 {
                assert!(!trim.is_finished(), "the lease was ignored");
                std::thread::yield_now();
            }
            assert_eq!(rig.faulty.count("unmap") + rig.faulty.count("free"), 0);
            // Nobody waits under the pool's lock: drops and questions go through.
            drop(live);
            assert!(rig.pool.stats().reserved_bytes.current > 0);
            drop(guard);
            let gone = trim.join().unwrap();
            assert!(gone >= 11 * MIB, "{gone} bytes of {:?}", rig.pool.report());
        });
        assert!(graph.registration.walk().is_err());
        rig.pool.check().unwrap();
    });
}

#[test]
fn retiring_is_bad_for_a_walk() {
    // Between the mark and the change the memory is on its way out: a walk must not prove it good.
    let rig = Rig::with(device().stepped(false), config(PoolMode::Vmm));
    let mut graph = held(&rig, 4 * MIB, Use::Scratch);
    let gate = Arc::new(AtomicBool::new(false));
    let open = Arc::clone(&gate);
    let wait = HostCallback::new(move || {
        while !open.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    });
    assert!(graph.launch(|| rig.driver.launch_host_fn(rig.stream.handle(), wait.clone()).unwrap()));
    std::thread::scope(|s| {
        let trim = s.spawn(|| rig.pool.trim_to(0).unwrap());
        while rig.faulty.count("event_synchronize") == 0 {
            std::thread::yield_now();
        }
        let walked = graph.registration.walk();
        gate.store(true, Ordering::Release);
        assert!(trim.join().unwrap() > 0);
        assert_eq!(walked.unwrap_err().bad[0].reason, BadReason::Retiring);
    });
    rig.pool.check().unwrap();
}

#[test]
fn the_last_launch_is_waited_for_before_pages_go() {
    both(|mode| {
        let rig = Rig::new(mode);
        let other = Stream::new(&rig.driver).unwrap();
        let slice = rig.alloc(4 * MIB);
        let ptr = slice.ptr();
        let mut graph = TestGraph::capture(&rig.pool, &other, ScratchPolicy::Pin, |w| {
            declare(w, &slice, Use::Scratch, Hold::Weak);
        })
        .unwrap();
        assert!(graph.prove());
        drop(slice);
        assert!(graph.launch(|| rig.driver.memset_d8(ptr, 7, 4 * MIB, other.handle()).unwrap()));
        assert!(rig.pool.trim_to(0).unwrap() > 0);
        other.synchronize().unwrap();
        assert_eq!(rig.driver.fault(), None, "the launch ran on memory that was gone");
        rig.pool.check().unwrap();
    });
}

#[test]
fn the_last_launch_outlives_the_graph() {
    // Unregistering moves the last launch into the blocks' uses.
    both(|mode| {
        let rig = Rig::new(mode);
        let other = Stream::new(&rig.driver).unwrap();
        let slice = rig.alloc(4 * MIB);
        let ptr = slice.ptr();
        let mut graph = TestGraph::capture(&rig.pool, &other, ScratchPolicy::Pin, |w| {
            declare(w, &slice, Use::Scratch, Hold::Strong);
        })
        .unwrap();
        assert!(graph.prove());
        assert!(graph.launch(|| rig.driver.memset_d8(ptr, 7, 4 * MIB, other.handle()).unwrap()));
        drop(graph);
        drop(slice);
        assert!(rig.pool.trim_to(0).unwrap() > 0);
        other.synchronize().unwrap();
        assert_eq!(rig.driver.fault(), None, "the launch ran on memory that was gone");
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_new_owner_is_ordered_after_the_old_graph() {
    // slab: the block goes to another stream; the graph's queued launch must not land in it.
    let rig = Rig::limited(PoolMode::Slab, 2 * MIB + 512 * KIB);
    let other = Stream::new(&rig.driver).unwrap();
    let slice = rig.alloc(MIB + 256 * KIB);
    let (ptr, bytes) = (slice.ptr(), slice.bytes());
    let mut graph = TestGraph::capture(&rig.pool, &other, ScratchPolicy::Pin, |w| {
        declare(w, &slice, Use::Scratch, Hold::Weak);
    })
    .unwrap();
    assert!(graph.prove());
    drop(slice);
    let work = || {
        for _ in 0..3 {
            rig.driver.memset_d8(ptr, 7, bytes, other.handle()).unwrap();
        }
    };
    assert!(graph.launch(work));
    let mine = rig.alloc(bytes);
    assert_eq!(mine.ptr(), ptr);
    rig.stream.fill(&mine, 9).unwrap();
    assert!(rig.stream.download(&mine).unwrap().iter().all(|&b| b == 9));
    other.synchronize().unwrap();
    assert!(rig.stream.download(&mine).unwrap().iter().all(|&b| b == 9), "the old graph wrote into it");
    assert!(!graph.replay(work));
}

#[test]
fn the_cheapest_graph_is_evicted_first() {
    both(|mode| {
        let rig = Rig::limited(mode, 8 * MIB);
        let mut graphs: Vec<TestGraph> = [300, 100, 200]
            .into_iter()
            .map(|cost| {
                rig.pool.reserve(2 * MIB, Purpose::Scratch, &rig.stream).unwrap();
                let capture = |_: &_| drop(rig.alloc(2 * MIB));
                TestGraph::capture_at(&rig.pool, &rig.stream, ScratchPolicy::Pin, cost, capture).unwrap()
            })
            .collect();
        assert!(graphs.iter_mut().all(|g| g.replay(|| ())));
        let slice = rig.alloc(2 * MIB + 512 * KIB);
        let launched: Vec<bool> = graphs.iter_mut().map(|g| g.replay(|| ())).collect();
        assert_eq!(launched, [true, false, true], "just one, and the cheapest");
        assert_eq!(graphs[1].node.told.lock()[0].reason, RetireReason::Evicted);
        assert!(graphs[1].registration.walk().unwrap_err().evicted);
        assert!(matches!(graphs[1].registration.reback(), Err(PoolError::Stale(s)) if s.evicted));
        assert_eq!(rig.pool.counters().evictions, 1);
        rig.pool.check().unwrap();
        drop((graphs, slice));
        rig.pool.check().unwrap();
        assert_eq!(rig.pool.stats().active_bytes.current, 0);
    });
}

#[test]
fn an_evicted_graphs_last_launch_is_waited_for() {
    both(|mode| {
        let rig = Rig::limited(mode, 4 * MIB);
        let other = Stream::new(&rig.driver).unwrap();
        drop(rig.pool.alloc::<u8>(2 * MIB, &other).unwrap());
        let mut place = None;
        let mut graph = TestGraph::capture(&rig.pool, &other, ScratchPolicy::Pin, |_| {
            place = Some(rig.pool.alloc::<u8>(2 * MIB, &other).unwrap().ptr());
        })
        .unwrap();
        assert!(graph.prove());
        let ptr = place.unwrap();
        assert!(graph.launch(|| {
            for _ in 0..4 {
                rig.driver.memset_d8(ptr, 7, 2 * MIB, other.handle()).unwrap();
            }
        }));
        let mine = rig.alloc(3 * MIB);
        rig.stream.fill(&mine, 9).unwrap();
        other.synchronize().unwrap();
        assert!(rig.stream.download(&mine).unwrap().iter().all(|&b| b == 9));
        assert_eq!(rig.driver.fault(), None);
        assert!(!graph.replay(|| ()));
    });
}

#[test]
fn nothing_is_taken_for_a_request_that_can_never_fit() {
    both(|mode| {
        let rig = Rig::limited(mode, 8 * MIB);
        let mut graph = held(&rig, 2 * MIB, Use::Scratch);
        let _live = rig.alloc(2 * MIB);
        drop(rig.alloc(MIB));
        let before = (rig.pool.stats().reserved_bytes.current, rig.pool.counters());
        assert!(rig.pool.alloc::<u8>(7 * MIB, &rig.stream).unwrap_err().is_out_of_memory());
        assert_eq!((rig.pool.stats().reserved_bytes.current, rig.pool.counters()), before);
        assert!(graph.launch(|| ()));
    });
}

/// A dependent that uses the pool from its callback.
#[derive(Debug)]
struct Busy {
    inner: Arc<Node>,
    pool: Pool,
    kept: Mutex<Vec<DeviceSlice<u8>>>,
}

impl Dependent for Busy {
    fn lease(&self) -> &Arc<evergraph_pool::handshake::Lease> {
        self.inner.lease()
    }
    fn stream(&self) -> &Stream {
        self.inner.stream()
    }
    fn rebuild_cost_us(&self) -> u32 {
        1
    }
    fn retired(&self, _: &Retired) {
        let mut kept = self.kept.lock();
        kept.clear();
        kept.extend(self.pool.alloc(1000, self.inner.stream()).ok());
        self.pool.trim_to(usize::MAX).unwrap();
        assert!(self.pool.report().reserved_bytes > 0);
    }
}

#[test]
fn a_callback_may_use_the_pool() {
    // User code under the allocator's lock is a deadlock. A watchdog tells.
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let (done, watch) = mpsc::channel();
        std::thread::spawn(move || {
            let rig = Rig::limited(mode, 7 * MIB);
            let (node, _launcher) = Node::new(&rig.stream, 1);
            let busy = Arc::new(Busy { inner: node, pool: rig.pool.clone(), kept: Mutex::default() });
            busy.kept.lock().push(rig.alloc(64 * KIB));
            rig.pool.reserve(2 * MIB, Purpose::Scratch, &rig.stream).unwrap();
            let window = rig.pool.begin_window(busy.clone(), ScratchPolicy::Pin).unwrap();
            drop(rig.alloc(2 * MIB));
            let registration = window.finish().unwrap();
            let slice = rig.alloc(5 * MIB - 4 * KIB);
            assert!(registration.walk().unwrap_err().evicted);
            assert_eq!(busy.kept.lock().len(), 1);
            drop((slice, registration));
            busy.kept.lock().clear();
            rig.pool.check().unwrap();
            done.send(()).unwrap();
        });
        watch.recv_timeout(Duration::from_secs(8)).expect("the callback deadlocked, or died");
    }
}

#[test]
fn closing_the_pool_ends_its_graphs() {
    both(|mode| {
        let rig = Rig::new(mode);
        drop(rig.alloc(MIB));
        let mut graph = rig.graph(ScratchPolicy::Pin, |_| drop(rig.alloc(MIB)));
        assert!(graph.replay(|| ()));
        let kept = rig.alloc(1000);
        let Rig { host, pool, stream, driver, faulty } = rig;
        drop(pool);
        assert!(!graph.replay(|| ()));
        assert!(graph.registration.walk().unwrap_err().evicted);
        assert_eq!(graph.node.told.lock()[0].reason, RetireReason::Evicted);
        assert!(host.live().used_bytes > 0, "the live slice is still good");
        stream.fill(&kept, 3).unwrap();
        assert_eq!(stream.download(&kept).unwrap(), [3; 1000]);
        drop(kept);
        drop(graph);
        assert_eq!((host.live().used_bytes, host.live().reservations), (0, 0));
        drop((stream, driver, faulty));
    });
}
