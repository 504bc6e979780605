//! Sleep and wake: all pages of a purpose go and come, addresses and graphs stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use evergraph_pool::driver::host::Live;
use evergraph_pool::{
    BadReason, Content, Dependent, DeviceSlice, Hold, Pool, PoolError, PoolMode, Purpose, RetireReason, ScratchPolicy,
    Stream, Use,
};

use crate::common::*;

const KEPT: [Content; 2] = [Content::Keep, Content::KeepPinned];

fn is_asleep<T>(result: Result<T, PoolError>, purpose: Purpose) -> bool {
    matches!(result, Err(PoolError::Asleep { purpose: found, .. }) if found == purpose)
}

/// A slice with words of its own.
fn words(rig: &Rig, purpose: Purpose, seed: u32, len: usize) -> (DeviceSlice<u32>, Vec<u32>) {
    let data: Vec<u32> = (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(seed)).collect();
    (rig.pool.upload(&data, purpose, &rig.stream).unwrap(), data)
}

/// What the device has of the pool.
fn memory(live: &Live) -> (usize, usize, usize, usize) {
    (live.chunks, live.mappings, live.used_bytes, live.host)
}

#[test]
fn kept_bytes_are_there_again_at_the_same_addresses() {
    for content in KEPT {
        let rig = Rig::new(PoolMode::Vmm);
        // Small ones share chunks, large ones have several, and between them memory is free.
        let mut slices = Vec::new();
        for (n, purpose) in Purpose::ALL.into_iter().cycle().take(24).enumerate() {
            slices.push(words(&rig, purpose, n as u32, [3, 700, 40_000][n / 3 % 3]));
            drop(rig.pool.alloc_for::<u8>(100 * KIB, purpose, &rig.stream).unwrap());
        }
        let before: Vec<_> = slices.iter().map(|(slice, _)| slice.token()).collect();
        let reserved = rig.pool.stats().reserved_bytes.current;
        let allocated = rig.pool.stats().allocated_bytes.current;

        let gone = rig.pool.sleep(content, &[]).unwrap();
        assert_eq!(gone as u64, reserved);
        rig.pool.check().unwrap();
        let live = rig.host.live();
        assert_eq!((live.chunks, live.mappings, live.used_bytes), (0, 0, 0), "something kept its pages");
        assert_eq!(live.reservations, 3, "the ranges stay");
        let stats = rig.pool.stats();
        assert_eq!((stats.reserved_bytes.current, stats.segments.current), (0, 0));
        assert_eq!(stats.allocated_bytes.current, allocated, "the slices live");
        assert!(Purpose::ALL.iter().all(|p| rig.pool.is_asleep(*p)));

        let back = rig.pool.wake(&[]).unwrap();
        assert!(back <= gone && back > 0, "free chunks need no pages: {back} of {gone}");
        rig.pool.check().unwrap();
        for ((slice, data), before) in slices.iter().zip(before) {
            assert_eq!(rig.stream.download(slice).unwrap(), *data, "{content:?}");
            let after = slice.token();
            let moved =
                (after.address - before.address, after.backing - before.backing, after.content - before.content);
            assert_eq!((after.allocation, moved), (before.allocation, (0, 1, 0)));
        }
        assert_eq!(rig.host.live().host, 0, "the kept bytes were let go");
        assert_eq!((rig.pool.counters().sleeps, rig.pool.counters().wakes), (3, 3));
        drop(slices);
        rig.pool.trim_to(0).unwrap();
        assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
        assert_eq!(rig.driver.fault(), None);
    }
}

#[test]
fn dropped_bytes_move_the_content_and_are_never_taken_for_what_they_were() {
    let rig = Rig::new(PoolMode::Vmm);
    let (state, _) = words(&rig, Purpose::State, 5, 1000);
    let before = state.token();
    let mut reader = rig.depends(&state, Use::Input, Hold::Weak);
    let mut writer = rig.depends(&state, Use::Scratch, Hold::Weak);
    assert!(reader.prove() && writer.prove());
    rig.pool.sleep(Content::Drop, &[]).unwrap();
    rig.pool.wake(&[]).unwrap();
    let after = state.token();
    assert_eq!((after.backing - before.backing, after.content - before.content), (1, 1));
    assert!(!reader.replay(|| panic!("launched on bytes that are lost")));
    let stale = reader.registration.walk().unwrap_err();
    assert_eq!((stale.bad[0].reason, stale.is_remap()), (BadReason::ContentLost, false));
    assert!(matches!(reader.registration.reback(), Err(PoolError::Stale(_))), "pages do not bring bytes back");
    assert!(reader.registration.walk().is_err());
    // Who writes before reading only wants pages.
    assert!(writer.registration.walk().unwrap_err().is_remap());
    assert_eq!(writer.registration.reback().unwrap().len(), 1);
    assert!(writer.replay(|| ()));
    // The old token is refused, a new one is not.
    let refused = TestGraph::capture(&rig.pool, &rig.stream, ScratchPolicy::Pin, |w| {
        let error = w.declare(before, Use::Input, 0, 4, Hold::Weak).unwrap_err();
        assert!(matches!(error, PoolError::StaleToken { reason: BadReason::ContentLost, .. }), "{error}");
        declare(w, &state, Use::Input, Hold::Weak);
    });
    assert!(refused.unwrap().prove());
    rig.pool.check().unwrap();
}

#[test]
fn nothing_is_handed_out_or_touched_while_it_sleeps() {
    let rig = Rig::new(PoolMode::Vmm);
    let (weights, data) = words(&rig, Purpose::Weight, 1, 5000);
    let scratch = rig.alloc(3000);
    // The same size is free right here: the warm path would have it.
    drop(rig.pool.alloc_for::<u8>(64 * KIB, Purpose::Weight, &rig.stream).unwrap());
    let buffer = rig.pool.host_buffer::<u32>(5000).unwrap();
    rig.pool.sleep(Content::Keep, &[Purpose::Weight]).unwrap();
    rig.faulty.set_logging(true);
    let asleep = |result| is_asleep(result, Purpose::Weight);
    for bytes in [1, 64 * KIB, 20 * MIB] {
        assert!(asleep(rig.pool.alloc_for::<u8>(bytes, Purpose::Weight, &rig.stream).map(drop)));
    }
    assert!(asleep(rig.pool.alloc_aligned::<u8>(9, 4096, Purpose::Weight, &rig.stream).map(drop)));
    assert!(asleep(rig.pool.reserve(9, Purpose::Weight, &rig.stream)));
    let other = Stream::new(&rig.driver).unwrap();
    assert!(asleep(rig.pool.alloc_for::<u8>(1, Purpose::Weight, &other).map(drop)));
    assert!(asleep(rig.stream.download(&weights).map(drop)));
    assert!(asleep(rig.stream.upload(&data, &weights)));
    assert!(asleep(rig.stream.fill(&weights, 0)));
    assert!(asleep(rig.stream.copy(&weights, &weights)));
    assert!(asleep(rig.stream.copy_from_host(&buffer, &weights)));
    assert!(asleep(rig.stream.copy_to_host(&weights, &buffer)));
    let window = TestGraph::capture(&rig.pool, &rig.stream, ScratchPolicy::Pin, |w| {
        assert!(asleep(rig.pool.alloc_for::<u8>(1, Purpose::Weight, &rig.stream).map(drop)));
        assert!(asleep(w.declare(weights.token(), Use::Weight, 0, 4, Hold::Weak)));
        declare(w, &scratch, Use::Scratch, Hold::Weak);
    });
    assert!(window.unwrap().prove(), "what does not sleep is as ever");
    let calls: Vec<_> = rig.faulty.take_log().into_iter().map(|c| c.name).collect();
    let touching = ["map", "create", "memcpy_htod", "memcpy_dtoh", "memcpy_dtod", "memset_d8"];
    assert!(!calls.iter().any(|c| touching.contains(c)), "{calls:?}");
    rig.stream.fill(&scratch, 1).unwrap();
    drop(rig.alloc(MIB));
    assert!(rig.pool.is_asleep(Purpose::Weight) && !rig.pool.is_asleep(Purpose::Scratch));
    // Again, and in the middle of it: nothing new.
    assert_eq!(rig.pool.sleep(Content::Drop, &[Purpose::Weight]).unwrap(), 0);
    rig.pool.check().unwrap();
    rig.pool.wake(&[Purpose::Weight]).unwrap();
    assert_eq!(rig.stream.download(&weights).unwrap(), data, "what slept already stayed as it was");
    assert_eq!(rig.pool.wake(&[]).unwrap(), 0, "nothing sleeps");
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn a_graph_launches_again_once_it_took_note_of_the_pages() {
    for content in KEPT {
        let rig = Rig::new(PoolMode::Vmm);
        let (state, data) = words(&rig, Purpose::State, 9, 3000);
        let (weights, _) = words(&rig, Purpose::Weight, 2, 3000);
        drop(rig.alloc(MIB));
        let mut graph = rig.graph(ScratchPolicy::Track, |w| {
            declare(w, &state, Use::State, Hold::Weak);
            declare(w, &weights, Use::Weight, Hold::Strong);
            drop(rig.alloc(MIB));
        });
        let mut bystander = rig.graph(ScratchPolicy::Pin, |_| ());
        assert!(graph.replay(|| ()) && bystander.replay(|| ()));
        rig.pool.sleep(content, &[]).unwrap();
        assert!(!graph.replay(|| panic!("launched asleep")));
        let stale = graph.registration.walk().unwrap_err();
        assert!(stale.asleep.is_some() && !stale.is_remap() && !stale.evicted, "{stale}");
        assert!(stale.bad.iter().all(|b| b.reason == BadReason::Asleep) && stale.bad.len() == 3, "{stale:?}");
        assert!(matches!(graph.registration.reback(), Err(PoolError::Asleep { .. })));
        assert!(bystander.replay(|| ()), "a graph without memory here has nothing to wait for");
        assert_eq!(graph.node.told.lock()[0].reason, RetireReason::Asleep);

        rig.pool.wake(&[]).unwrap();
        let stale = graph.registration.walk().unwrap_err();
        assert!(stale.is_remap() && stale.asleep.is_none(), "{stale}");
        assert!(stale.bad.iter().all(|b| b.reason == BadReason::Rebacked), "{stale:?}");
        rig.faulty.set_logging(true);
        let back = graph.registration.reback().unwrap();
        assert!(rig.faulty.take_log().is_empty(), "the pages are there");
        assert!(back.len() == 3 && back.iter().all(|b| !b.mapped));
        assert!(graph.replay(|| ()));
        assert_eq!(rig.stream.download(&state).unwrap(), data);
        // And what a trim takes afterwards is repaired as ever.
        rig.pool.trim_to(0).unwrap();
        assert!(graph.registration.walk().unwrap_err().is_remap());
        assert!(graph.registration.reback().unwrap().iter().any(|b| b.mapped));
        assert!(graph.replay(|| ()));
        rig.pool.check().unwrap();
    }
}

#[test]
fn what_is_freed_asleep_gets_no_pages_and_what_is_asked_for_then_does() {
    let rig = Rig::new(PoolMode::Vmm);
    let (keep, data) = words(&rig, Purpose::State, 3, 100);
    let (near, _) = words(&rig, Purpose::State, 4, 100);
    let large: Vec<_> = (0..4).map(|n| words(&rig, Purpose::State, n, 64 * KIB)).collect();
    let graph = rig.depends(&large[3].0, Use::State, Hold::Strong);
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    drop(near);
    drop(large);
    rig.pool.check().unwrap();
    let back = rig.pool.wake(&[]).unwrap();
    assert!((256 * KIB + CHUNK..=256 * KIB + 3 * CHUNK).contains(&back), "{back} bytes for one graph and one slice");
    rig.pool.check().unwrap();
    assert_eq!(rig.stream.download(&keep).unwrap(), data);
    let (new, data) = words(&rig, Purpose::State, 77, 100);
    assert_eq!(rig.stream.download(&new).unwrap(), data);
    drop(graph);
    drop((keep, new));
    rig.pool.trim_to(0).unwrap();
    assert_eq!(memory(&rig.host.live()), (0, 0, 0, 0));
    rig.pool.check().unwrap();
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn bytes_of_a_dead_allocation_do_not_come_back_under_a_new_one() {
    let rig = Rig::new(PoolMode::Vmm);
    let (old, _) = words(&rig, Purpose::State, 1, 1000);
    let (rest, data) = words(&rig, Purpose::State, 2, 1000);
    let ptr = old.ptr();
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    drop(old);
    rig.faulty.set_logging(true);
    rig.pool.wake(&[]).unwrap();
    let log = rig.faulty.take_log();
    let written: Vec<_> = log.iter().filter(|c| c.name == "memcpy_htod").filter_map(|c| c.arg("dst")).collect();
    assert!(!written.contains(&ptr.0) && written.contains(&rest.ptr().0), "{written:x?}");
    assert_eq!(rig.stream.download(&rest).unwrap(), data);
}

#[test]
fn the_host_has_seen_all_work_before_anything_is_unmapped() {
    for content in [Content::Drop, Content::Keep] {
        let rig = Rig::new(PoolMode::Vmm);
        let other = Stream::new(&rig.driver).unwrap();
        let (slice, mut data) = words(&rig, Purpose::State, 6, 64 * KIB);
        // Nothing tells the pool of the first two: a live slice is used on its own stream, and by graphs.
        for _ in 0..3 {
            rig.stream.fill(&slice, 7).unwrap();
        }
        slice.record_stream(&other).unwrap();
        let mut graph = TestGraph::capture(&rig.pool, &other, ScratchPolicy::Pin, |w| {
            declare(w, &slice, Use::State, Hold::Weak);
        });
        let graph = graph.as_mut().unwrap();
        let fill = || rig.driver.memset_d32(slice.ptr(), 0x0101_0101, 1000, other.handle()).unwrap();
        rig.stream.settle().unwrap();
        assert!(graph.replay(fill));
        data.fill(0x0707_0707);
        data[..1000].fill(0x0101_0101);
        rig.faulty.set_logging(true);
        rig.pool.sleep(content, &[]).unwrap();
        let names: Vec<_> = rig.faulty.take_log().into_iter().map(|c| c.name).collect();
        let at = |name| names.iter().position(|n| *n == name);
        assert!(at("event_synchronize").is_some_and(|wait| wait < at("unmap").unwrap()), "{names:?}");
        rig.pool.wake(&[]).unwrap();
        if content == Content::Keep {
            assert_eq!(rig.stream.download(&slice).unwrap(), data, "the copy came before the work was done");
        }
        assert_eq!(rig.driver.fault(), None);
    }
}

#[test]
fn a_sleep_waits_for_a_lease_and_nobody_waits_for_the_sleep() {
    let rig = Rig::new(PoolMode::Vmm);
    let (slice, data) = words(&rig, Purpose::State, 8, 5000);
    let spare = rig.alloc(100);
    let mut graph = rig.depends(&slice, Use::State, Hold::Weak);
    assert!(graph.prove());
    let lease = Arc::clone(graph.node.lease());
    let guard = lease.enter();
    assert!(guard.undisturbed([(&**graph.registration.epoch(), graph.proven)]));
    std::thread::scope(|s| {
        let sleep = s.spawn(|| rig.pool.sleep(Content::Keep, &[]).unwrap());
        while rig.pool.counters().epoch_bumps < 1 {
            assert!(!sleep.is_finished(), "the lease was ignored");
            std::thread::yield_now();
        }
        assert_eq!(rig.faulty.count("unmap"), 0);
        // Typed at once, not after the wait.
        assert_eq!(graph.registration.walk().unwrap_err().bad[0].reason, BadReason::Asleep);
        assert!(is_asleep(rig.pool.alloc_for::<u8>(1, Purpose::State, &rig.stream), Purpose::State));
        drop(spare);
        drop(guard);
        assert!(sleep.join().unwrap() > 0);
    });
    rig.pool.wake(&[]).unwrap();
    assert_eq!(rig.stream.download(&slice).unwrap(), data);
    rig.pool.check().unwrap();
}

#[test]
fn a_sleep_waits_for_a_run_without_a_graph() {
    let rig = Rig::new(PoolMode::Vmm);
    let (slice, mut data) = words(&rig, Purpose::State, 8, 5000);
    // A stream that nobody told the pool of otherwise.
    let other = Stream::new(&rig.driver).unwrap();
    rig.stream.synchronize().unwrap();
    let awake = rig.pool.hold_awake(&other);
    assert!(matches!(rig.pool.sleep(Content::Keep, &[]), Err(PoolError::Busy { .. })), "it would wait for itself");
    std::thread::scope(|s| {
        let sleep = s.spawn(|| rig.pool.sleep(Content::Keep, &[]).unwrap());
        for _ in 0..100 {
            std::thread::yield_now();
        }
        // Memory may be taken in a run; what holds the cold lock does not wait for the run's end.
        drop(rig.alloc(4 * MIB));
        rig.driver.memset_d32(slice.ptr(), 3, 5000, other.handle()).unwrap();
        assert!(!sleep.is_finished() && !rig.pool.is_asleep(Purpose::State));
        drop(awake);
        assert!(sleep.join().unwrap() > 0);
    });
    rig.pool.wake(&[]).unwrap();
    data.fill(3);
    assert_eq!(rig.stream.download(&slice).unwrap(), data);
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn a_window_and_a_sleep_exclude_each_other() {
    let rig = Rig::new(PoolMode::Vmm);
    let (slice, data) = words(&rig, Purpose::State, 8, 50);
    rig.graph(ScratchPolicy::Pin, |_| {
        assert!(matches!(rig.pool.sleep(Content::Drop, &[]), Err(PoolError::Capturing { .. })));
        assert!(matches!(rig.pool.wake(&[]), Err(PoolError::Capturing { .. })));
        std::thread::scope(|s| {
            let elsewhere = s.spawn(|| rig.pool.sleep(Content::Drop, &[]));
            assert!(matches!(elsewhere.join().unwrap(), Err(PoolError::Capturing { .. })));
        });
        assert!(!rig.pool.is_asleep(Purpose::State));
    });
    assert_eq!(rig.stream.download(&slice).unwrap(), data);
    // A wake on another thread is none of the window's business.
    rig.pool.sleep(Content::Keep, &[Purpose::State]).unwrap();
    rig.graph(ScratchPolicy::Pin, |_| {
        std::thread::scope(|s| drop(s.spawn(|| rig.pool.wake(&[]).unwrap())));
    });
    assert_eq!(rig.stream.download(&slice).unwrap(), data);
    rig.pool.check().unwrap();
}

#[test]
fn graphs_that_share_an_arena_sleep_with_it() {
    // They have no record of its memory: nobody but the arena's tag knows.
    let rig = Rig::new(PoolMode::Vmm);
    let arena = rig.pool.arena(&rig.stream).unwrap();
    drop(rig.alloc(MIB));
    let mut at = None;
    let mut graph = rig.graph(ScratchPolicy::Shared(arena.clone()), |_| {
        at = Some(rig.alloc(MIB).ptr());
    });
    let at = at.unwrap();
    let fill = || rig.driver.memset_d8(at, 1, MIB, rig.stream.handle()).unwrap();
    assert!(graph.replay(fill));
    let epoch = rig.pool.counters().epoch_bumps;
    rig.pool.sleep(Content::Drop, &[]).unwrap();
    assert!(rig.pool.counters().epoch_bumps > epoch);
    assert!(!graph.replay(|| panic!("launched asleep")));
    let stale = graph.registration.walk().unwrap_err();
    assert_eq!((stale.asleep, stale.bad.len(), stale.is_remap()), (Some(Purpose::Scratch), 0, false));
    assert!(matches!(graph.registration.reback(), Err(PoolError::Asleep { .. })));
    rig.pool.wake(&[]).unwrap();
    assert!(graph.replay(fill), "its pages are back");
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.driver.fault(), None);
    rig.pool.sleep(Content::Drop, &[]).unwrap();
    drop((graph, arena));
    rig.pool.check().unwrap();
    assert_eq!(rig.pool.wake(&[]).unwrap(), 0, "nobody needs it any more");
    rig.pool.check().unwrap();
}

#[test]
fn pages_that_were_gone_before_are_gone_after() {
    let rig = Rig::new(PoolMode::Vmm);
    drop(rig.alloc(2 * MIB));
    let mut graph = rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(2 * MIB)));
    assert!(graph.replay(|| ()));
    assert!(rig.pool.trim_to(0).unwrap() >= 2 * MIB);
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    assert_eq!(rig.pool.wake(&[]).unwrap(), 0);
    rig.pool.check().unwrap();
    let stale = graph.registration.walk().unwrap_err();
    assert_eq!((stale.bad[0].reason, stale.is_remap()), (BadReason::Unbacked, true));
    assert!(graph.registration.reback().unwrap()[0].mapped);
    assert!(graph.replay(|| ()));
    rig.pool.check().unwrap();
}

#[test]
fn scratch_that_only_graphs_hold_is_not_copied() {
    let rig = Rig::new(PoolMode::Vmm);
    drop(rig.alloc(4 * MIB));
    let mut graph = rig.graph(ScratchPolicy::Pin, |_| drop(rig.alloc(4 * MIB)));
    let read = rig.alloc(1000);
    let reader = rig.depends(&read, Use::Input, Hold::Strong);
    rig.stream.fill(&read, 3).unwrap();
    let at = read.ptr();
    drop(read);
    assert!(graph.replay(|| ()));
    rig.faulty.set_logging(true);
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    let copied: u64 =
        rig.faulty.take_log().iter().filter(|c| c.name == "memcpy_dtoh").filter_map(|c| c.arg("bytes")).sum();
    assert_eq!(copied, 1000, "what a graph reads is kept, its owner gone or not; what it writes first is not");
    rig.pool.wake(&[]).unwrap();
    reader.registration.reback().unwrap();
    reader.registration.walk().unwrap();
    let mut back = [0u8; 1000];
    // SAFETY: `back` outlives the copy, which is waited for.
    #[allow(unsafe_code)]
    unsafe {
        rig.driver.memcpy_dtoh(back.as_mut_ptr(), at, 1000, rig.stream.handle()).unwrap();
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(back, [3; 1000]);
    graph.registration.reback().unwrap();
    assert!(graph.replay(|| ()));
}

#[test]
fn a_slice_that_grows_sleeps_as_far_as_it_has_grown() {
    let rig = Rig::new(PoolMode::Vmm);
    let mut cache = rig.pool.alloc_growable::<u32>(6 * CHUNK / 4, 64 * CHUNK / 4, Purpose::State, &rig.stream).unwrap();
    rig.stream.fill(&cache, 5).unwrap();
    let mut graph = rig.graph(ScratchPolicy::Pin, |w| declare(w, &cache, Use::State, Hold::Weak));
    assert!(graph.replay(|| ()));
    // Four chunks behind its length wait for somebody who is short of memory.
    cache.shrink_to(2 * CHUNK / 4).unwrap();
    assert_eq!(rig.pool.stats().reserved_bytes.current, 6 * CHUNK as u64);
    rig.faulty.set_logging(true);
    assert_eq!(rig.pool.sleep(Content::Keep, &[]).unwrap(), 6 * CHUNK);
    let log = rig.faulty.take_log();
    let copied: u64 = log.iter().filter(|c| c.name == "memcpy_dtoh").filter_map(|c| c.arg("bytes")).sum();
    assert_eq!(copied, 2 * CHUNK as u64, "behind its length there is no content");
    rig.pool.check().unwrap();
    assert!(is_asleep(cache.grow_to(3 * CHUNK / 4), Purpose::State));
    assert!(is_asleep(rig.stream.fill(&cache, 1), Purpose::State));
    assert!(is_asleep(rig.pool.alloc_growable::<u32>(0, 9, Purpose::State, &rig.stream), Purpose::State));
    cache.shrink_to(CHUNK / 4).unwrap();
    assert_eq!(rig.pool.wake(&[]).unwrap(), CHUNK, "only what is there now");
    rig.pool.check().unwrap();
    assert!(rig.stream.download(&cache).unwrap().iter().all(|word| *word == 0x0505_0505));
    assert!(!graph.registration.reback().unwrap()[0].mapped);
    assert!(graph.replay(|| ()));
    cache.grow_to(3 * CHUNK / 4).unwrap();
    rig.stream.fill(&cache, 6).unwrap();
    assert!(rig.stream.download(&cache).unwrap().iter().all(|word| *word == 0x0606_0606));
    rig.pool.check().unwrap();
    rig.pool.sleep(Content::Drop, &[]).unwrap();
    drop(cache);
    drop(graph);
    assert_eq!(rig.pool.wake(&[]).unwrap(), 0);
    rig.pool.check().unwrap();
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn a_slab_does_not_sleep() {
    let rig = Rig::new(PoolMode::Slab);
    let (slice, data) = words(&rig, Purpose::State, 1, 10);
    assert!(matches!(rig.pool.sleep(Content::Keep, &[]), Err(PoolError::Unsupported { .. })));
    assert_eq!(rig.pool.wake(&[]).unwrap(), 0);
    assert_eq!(rig.stream.download(&slice).unwrap(), data);
}

#[test]
fn a_wake_without_memory_sleeps_on_and_can_be_tried_again() {
    for content in KEPT {
        let rig = Rig::limited(PoolMode::Vmm, 8 * MIB);
        let (state, data) = words(&rig, Purpose::State, 1, MIB);
        rig.pool.sleep(content, &[Purpose::State]).unwrap();
        let other = rig.pool.alloc::<u8>(6 * MIB, &rig.stream).unwrap();
        let error = rig.pool.wake(&[]).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(rig.pool.is_asleep(Purpose::State));
        rig.pool.check().unwrap();
        drop(other);
        // Cached now: the wake takes it, as any growth would.
        assert_eq!(rig.pool.wake(&[]).unwrap(), 4 * MIB);
        assert_eq!(rig.stream.download(&state).unwrap(), data);
        rig.pool.check().unwrap();
    }
}

#[test]
fn everything_may_go_while_it_sleeps() {
    for content in [Content::Drop, Content::Keep, Content::KeepPinned] {
        for order in 0..3 {
            let rig = Rig::new(PoolMode::Vmm);
            let before = rig.host.live();
            let slices: Vec<_> = (0..9).map(|n| words(&rig, Purpose::ALL[n % 3], 1, 3000 * n + 1)).collect();
            let arena = rig.pool.arena(&rig.stream).unwrap();
            let shared = rig.graph(ScratchPolicy::Shared(arena), |_| drop(rig.alloc(100)));
            let graph = rig.depends(&slices[4].0, Use::State, Hold::Strong);
            rig.pool.sleep(content, &[]).unwrap();
            let Rig { host, pool, stream, .. } = rig;
            match order {
                0 => drop((slices, graph, shared, pool)),
                1 => drop((pool, graph, slices, shared)),
                _ => drop((graph, pool, shared, slices)),
            }
            let live = host.live();
            assert_eq!((memory(&live), live.reservations), ((0, 0, 0, 0), 0), "{content:?}, order {order}");
            assert_eq!((live.events, live.streams), (before.events, before.streams));
            drop(stream);
        }
    }
}

#[test]
fn two_thousand_cycles_with_launches_from_other_threads() {
    const CYCLES: u32 = 2000;
    let rig = Rig::with(device().stepped(false), config(PoolMode::Vmm));
    let streams: Vec<Stream> = (0..2).map(|_| Stream::new(&rig.driver).unwrap()).collect();
    let kept: Vec<_> = (0..3).map(|n| words(&rig, Purpose::ALL[n], n as u32, 3000)).collect();
    let own: Vec<_> = (0..2).map(|n| words(&rig, Purpose::State, n, 500).0).collect();
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    let asleep = rig.host.live();
    rig.pool.wake(&[]).unwrap();
    rig.pool.trim_to(0).unwrap();
    let awake = rig.host.live();
    let (over, launches, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    /// Ends the launchers, also when the cycles end in a panic.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|s| {
        let _ends = Ends(&over);
        for (n, (stream, slice)) in streams.iter().zip(&own).enumerate() {
            let (rig, over, launches, refused) = (&rig, &over, &launches, &refused);
            s.spawn(move || launch_until(rig, stream, slice, n as u8 + 1, over, launches, refused));
        }
        for cycle in 0..CYCLES {
            let content = [Content::Keep, Content::KeepPinned][cycle as usize % 2];
            let purposes: &[Purpose] = if cycle % 5 == 0 { &[Purpose::State] } else { &[] };
            // A launcher that begins has a window open for a moment, and no sleep comes into that.
            while let Err(error) = rig.pool.sleep(content, purposes) {
                assert!(matches!(error, PoolError::Capturing { .. }), "cycle {cycle}: {error}");
                std::thread::yield_now();
            }
            if cycle % 100 == 0 {
                let live = rig.host.live();
                assert!(!purposes.is_empty() || memory(&live).0 == 0, "chunks left in cycle {cycle}");
            }
            rig.pool.wake(&[]).unwrap();
        }
    });
    assert_eq!(rig.driver.fault(), None);
    rig.pool.check().unwrap();
    for (slice, data) in &kept {
        assert_eq!(rig.stream.download(slice).unwrap(), *data);
    }
    let (launches, refused) = (launches.into_inner(), refused.into_inner());
    assert!(launches > 100 && refused > 10, "{launches} launches, {refused} refused: the two did not meet");
    let counts = |live: &Live| (memory(live), live.reservations, live.streams, live.events);
    rig.pool.trim_to(0).unwrap();
    assert_eq!(counts(&rig.host.live()), counts(&awake), "something was left behind awake");
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    assert_eq!(counts(&rig.host.live()), counts(&asleep), "something was left behind asleep");
    rig.pool.wake(&[]).unwrap();
    drop((kept, own));
    rig.pool.trim_to(0).unwrap();
    assert_eq!(memory(&rig.host.live()), (0, 0, 0, 0));
}

/// Launches a graph that writes a slice, with whatever repair it takes, and takes and drops memory on the way.
fn launch_until(
    rig: &Rig,
    stream: &Stream,
    slice: &DeviceSlice<u32>,
    value: u8,
    over: &AtomicBool,
    launches: &AtomicU64,
    refused: &AtomicU64,
) {
    rig.driver.bind().unwrap();
    let mut graph = loop {
        // A window keeps sleeps away, and what sleeps can not be declared.
        let captured = TestGraph::capture(&rig.pool, stream, ScratchPolicy::Track, |_| ());
        drop(captured);
        let node = Node::new(stream, 1);
        let window = rig.pool.begin_declarations(node.0.clone()).unwrap();
        if window.declare(slice.token(), Use::State, 0, slice.bytes(), Hold::Weak).is_ok() {
            let (registration, launcher) = (window.finish().unwrap(), node.1);
            let proven = evergraph_pool::handshake::Proven::NONE;
            break TestGraph { node: node.0, launcher, registration, proven, launches: 0 };
        }
    };
    while !over.load(Ordering::Relaxed) {
        let work = || {
            rig.driver.memset_d8(slice.ptr(), value, slice.bytes(), stream.handle()).unwrap();
        };
        if graph.replay(work) {
            launches.fetch_add(1, Ordering::Relaxed);
        } else {
            match graph.registration.reback() {
                Ok(_) => {}
                Err(PoolError::Asleep { .. }) => {
                    refused.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                }
                // Being retired at this moment.
                Err(PoolError::Stale(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        match rig.pool.alloc::<u8>(100 * KIB, stream) {
            Ok(scratch) => drop(scratch),
            Err(PoolError::Asleep { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    stream.synchronize().unwrap();
}

#[test]
fn a_pool_of_the_same_books_starts_awake() {
    // The books of a pool that is gone are bound again.
    let rig = Rig::new(PoolMode::Vmm);
    let pool = Pool::new(Arc::clone(&rig.driver), config(PoolMode::Vmm)).unwrap();
    pool.sleep(Content::Drop, &[]).unwrap();
    drop(pool);
    let pool = Pool::new(Arc::clone(&rig.driver), config(PoolMode::Vmm)).unwrap();
    let slice = pool.upload(&[1u8, 2], Purpose::State, &rig.stream).unwrap();
    assert_eq!(rig.stream.download(&slice).unwrap(), [1, 2]);
}
