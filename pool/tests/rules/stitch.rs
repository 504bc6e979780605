//! Free chunks go under one range before anybody gives anything back.

use evergraph_pool::{DeviceSlice, PoolMode, Purpose, ScratchPolicy};

use crate::common::*;

/// A full pool whose free memory lies in pieces: every other block was let go.
fn in_pieces(rig: &Rig, blocks: usize) -> Vec<DeviceSlice<u8>> {
    let all: Vec<DeviceSlice<u8>> = (0..blocks).map(|_| rig.alloc(MIB)).collect();
    for (i, slice) in all.iter().enumerate() {
        rig.stream.fill(slice, i as u8 + 1).unwrap();
    }
    all.into_iter().enumerate().filter(|(i, _)| i % 2 == 0).map(|(_, slice)| slice).collect()
}

fn intact(rig: &Rig, kept: &[DeviceSlice<u8>]) {
    for (i, slice) in kept.iter().enumerate() {
        assert!(rig.stream.download(slice).unwrap().iter().all(|&b| b == 2 * i as u8 + 1), "block {i} was touched");
    }
}

#[test]
fn a_request_that_no_free_block_fits_is_served_from_several() {
    let rig = Rig::limited(PoolMode::Vmm, 16 * MIB);
    let kept = in_pieces(&rig, 16);
    let made = rig.faulty.count("create");
    rig.faulty.set_logging(true);
    let large = rig.alloc(6 * MIB + 1);
    let names: Vec<_> = rig.faulty.take_log().into_iter().map(|c| c.name).collect();
    let counters = rig.pool.counters();
    assert_eq!((rig.faulty.count("create"), rig.faulty.count("release")), (made, 0), "nothing was made or given back");
    assert_eq!((counters.give_backs, counters.given_back_bytes), (0, 0));
    assert!(counters.stitches > 0 && counters.stitched_bytes >= 5 * MIB as u64, "{counters:?}");
    // The freed blocks were still being written when they were taken: the host waits before the unmap.
    let gone = names.iter().position(|&n| n == "unmap").unwrap();
    assert!(names.iter().position(|&n| n == "event_synchronize").is_some_and(|w| w < gone), "{names:?}");
    rig.stream.fill(&large, 99).unwrap();
    intact(&rig, &kept);
    assert_eq!(rig.pool.stats().reserved_bytes.peak, 16 * MIB as u64);
    rig.pool.check().unwrap();
    assert_eq!(rig.driver.fault(), None);
    drop((large, kept));
    rig.pool.trim_to(0).unwrap();
    assert_eq!(rig.host.live().used_bytes, 0);
}

#[test]
fn a_device_that_is_full_is_as_good_as_a_limit() {
    let rig = Rig::with(device().memory(16 * MIB), config(PoolMode::Vmm));
    let kept = in_pieces(&rig, 16);
    let large = rig.alloc(5 * MIB);
    assert_eq!(rig.faulty.count("release"), 0);
    rig.stream.fill(&large, 99).unwrap();
    intact(&rig, &kept);
    rig.pool.check().unwrap();
}

#[test]
fn free_state_serves_scratch() {
    let rig = Rig::limited(PoolMode::Vmm, 8 * MIB);
    let state: Vec<_> = (0..8).map(|_| rig.pool.alloc_for::<u8>(MIB, Purpose::State, &rig.stream).unwrap()).collect();
    drop(state);
    let made = rig.faulty.count("create");
    let scratch = rig.alloc(8 * MIB);
    assert_eq!((rig.faulty.count("create"), rig.faulty.count("release")), (made, 0));
    assert!(rig.pool.alloc::<u8>(1, &rig.stream).unwrap_err().is_out_of_memory());
    drop(scratch);
    rig.pool.check().unwrap();
}

#[test]
fn idle_chunks_go_before_new_ones() {
    let rig = Rig::new(PoolMode::Vmm);
    let kept = in_pieces(&rig, 16);
    rig.stream.synchronize().unwrap();
    let large = rig.alloc(6 * MIB);
    assert_eq!(rig.pool.stats().reserved_bytes.peak, 16 * MIB as u64, "there was no limit, and no growth either");
    // What the device is still at work on is not waited for while the pool may grow.
    drop(large);
    rig.stream.synchronize().unwrap();
    let busy = rig.alloc(6 * MIB);
    rig.stream.fill(&busy, 1).unwrap();
    drop(busy);
    rig.faulty.set_logging(true);
    let _state = rig.pool.alloc_for::<u8>(4 * MIB, Purpose::State, &rig.stream).unwrap();
    assert!(rig.faulty.take_log().iter().all(|c| c.name != "event_synchronize"));
    drop(kept);
}

#[test]
fn a_workload_that_repeats_itself_comes_to_rest() {
    let rig = Rig::new(PoolMode::Vmm);
    let round = |rig: &Rig| {
        let mut live = Vec::new();
        for i in 0..24 {
            live.push(rig.alloc((i * 37 % 11 + 1) * 100 * KIB));
            if i % 3 == 2 {
                drop(live.swap_remove(i / 3));
            }
            rig.stream.synchronize().unwrap();
        }
    };
    let calls = || ["create", "map", "unmap", "set_access", "release"].map(|call| rig.faulty.count(call));
    for _ in 0..60 {
        round(&rig);
    }
    let before = calls();
    for _ in 0..20 {
        round(&rig);
    }
    assert_eq!(calls(), before, "a steady state makes no driver call");
    rig.pool.check().unwrap();
}

#[test]
fn one_at_a_time_of_growing_sizes_takes_what_the_largest_takes() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let rig = Rig::new(mode);
        for k in 1..=64 {
            drop(rig.alloc(k * 8 * CHUNK));
        }
        let peak = rig.pool.stats().reserved_bytes.peak as usize;
        let most = if mode == PoolMode::Vmm { 64 * 8 * CHUNK + CHUNK } else { 3 * 64 * 8 * CHUNK };
        assert!(peak <= most, "{mode}: {peak} of {most}");
    }
}

#[test]
fn scratch_that_lost_its_pages_gets_free_ones_first() {
    let rig = Rig::limited(PoolMode::Vmm, 8 * MIB);
    drop(rig.alloc(4 * MIB));
    let mut graph = rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(4 * MIB)));
    assert!(graph.prove());
    let other = rig.alloc(8 * MIB);
    assert!(!graph.prove(), "its pages went to the other");
    assert_eq!(rig.faulty.count("release"), 0, "and did not pass through the driver's hands");
    drop(other);
    let made = rig.faulty.count("create");
    assert!(!graph.registration.reback().unwrap().is_empty());
    assert!(graph.prove());
    assert_eq!((rig.faulty.count("create"), rig.faulty.count("release")), (made, 0));
    rig.pool.check().unwrap();
}

#[test]
fn a_trim_gives_back_what_waits_for_a_range() {
    let rig = Rig::limited(PoolMode::Vmm, 8 * MIB);
    let kept = in_pieces(&rig, 8);
    // The map fails after the chunks were taken from their places.
    rig.faulty.fail_nth("map", 1);
    assert!(rig.pool.alloc::<u8>(3 * MIB, &rig.stream).is_err());
    rig.pool.check().unwrap();
    assert_eq!(rig.pool.stats().reserved_bytes.current, 8 * MIB as u64, "a chunk without a range is still reserved");
    intact(&rig, &kept);
    assert_eq!(rig.pool.trim_to(0).unwrap(), 4 * MIB);
    assert_eq!(rig.host.live().used_bytes, 4 * MIB);
    rig.pool.check().unwrap();
}
