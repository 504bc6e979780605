//! Slices that grow in place: a fixed address, memory as it is needed, nothing stale.

use evergraph_pool::{GrowableSlice, Hold, PoolError, PoolMode, Purpose, ScratchPolicy, Tracked, Use};

use crate::common::*;

fn growable(rig: &Rig, len: usize, most: usize) -> GrowableSlice<u8> {
    rig.pool.alloc_growable(len, most, Purpose::State, &rig.stream).unwrap()
}

/// Fills `len` bytes from the start on.
fn write(rig: &Rig, slice: &GrowableSlice<u8>, value: u8, len: usize) {
    assert!(len <= slice.extent().bytes());
    rig.driver.memset_d8(slice.ptr(), value, len, rig.stream.handle()).unwrap();
}

fn read(rig: &Rig, slice: &GrowableSlice<u8>, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    rig.stream.download_into(slice, &mut out).unwrap();
    out
}

#[test]
fn memory_follows_the_length_and_the_address_stays() {
    let rig = Rig::new(PoolMode::Vmm);
    // More address space than the device has memory.
    let mut slice = growable(&rig, 0, 1 << 30);
    assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
    let ptr = slice.ptr();
    for k in 1..=20 {
        slice.grow_to(k * 100 * KIB).unwrap();
        write(&rig, &slice, 7, k * 100 * KIB);
        let stats = rig.pool.stats();
        assert_eq!(stats.reserved_bytes.current as usize, (k * 100 * KIB).next_multiple_of(CHUNK));
        assert_eq!(stats.requested_bytes.current as usize, k * 100 * KIB);
        assert_eq!((slice.ptr(), slice.extent().bytes()), (ptr, k * 100 * KIB));
        rig.pool.check().unwrap();
    }
    assert!(read(&rig, &slice, 2000 * KIB).iter().all(|&b| b == 7));
    assert_eq!(rig.driver.fault(), None);
    drop(slice);
    rig.pool.check().unwrap();
    assert_eq!(rig.pool.stats().requested_bytes.current, 0);
    assert_eq!(rig.pool.stats().allocated_bytes.current, 0);
    rig.pool.trim_to(0).unwrap();
    assert_eq!(rig.host.live().used_bytes, 0);
}

#[test]
fn growth_makes_no_graph_stale_and_moves_no_epoch() {
    let rig = Rig::new(PoolMode::Vmm);
    let mut slice = growable(&rig, CHUNK, 64 * CHUNK);
    let mut graph = rig.graph(ScratchPolicy::Pin, |w| {
        w.declare(slice.token(), Use::State, 0, slice.bytes(), Hold::Weak).unwrap();
    });
    assert!(graph.prove());
    let bumps = rig.pool.counters().epoch_bumps;
    for k in 2..=64 {
        slice.grow_to(k * CHUNK).unwrap();
        assert!(graph.launch(|| write(&rig, &slice, k as u8, k * CHUNK)), "grown to {k} chunks");
    }
    assert_eq!(rig.pool.counters().epoch_bumps, bumps);
    assert!(read(&rig, &slice, 64 * CHUNK).iter().all(|&b| b == 64));
}

#[test]
fn a_failed_growth_changes_nothing() {
    let rig = Rig::limited(PoolMode::Vmm, 8 * CHUNK);
    let mut slice = growable(&rig, 2 * CHUNK, 64 * CHUNK);
    write(&rig, &slice, 5, 2 * CHUNK);
    let other = rig.alloc(4 * CHUNK);
    let before = rig.pool.stats();
    let error = slice.grow_to(5 * CHUNK).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let after = rig.pool.stats();
    assert_eq!(
        (after.reserved_bytes.current, after.requested_bytes),
        (before.reserved_bytes.current, before.requested_bytes)
    );
    assert_eq!((slice.len(), slice.extent().bytes()), (2 * CHUNK, 2 * CHUNK));
    assert!(matches!(slice.grow_to(64 * CHUNK + 1), Err(PoolError::TooLarge { .. })));
    assert!(read(&rig, &slice, 2 * CHUNK).iter().all(|&b| b == 5));
    drop(other);
    // Now it fits, with the chunks that the other left behind.
    let made = rig.faulty.count("create");
    slice.grow_to(6 * CHUNK).unwrap();
    assert_eq!(rig.faulty.count("create"), made, "free chunks go before new ones");
    rig.pool.check().unwrap();
}

#[test]
fn what_a_shrink_leaves_is_the_owners_until_somebody_needs_it() {
    let rig = Rig::limited(PoolMode::Vmm, 16 * CHUNK);
    let mut slice = growable(&rig, 12 * CHUNK, 64 * CHUNK);
    let calls =
        || ["create", "map", "unmap", "set_access", "release", "event_record"].map(|call| rig.faulty.count(call));
    let before = calls();
    for _ in 0..50 {
        slice.shrink_to(CHUNK).unwrap();
        slice.grow_to(12 * CHUNK).unwrap();
        write(&rig, &slice, 1, 12 * CHUNK);
    }
    assert_eq!(calls(), before, "the pending unmap is cancelled: no driver call");
    slice.shrink_to(2 * CHUNK).unwrap();
    assert_eq!(rig.pool.stats().requested_bytes.current as usize, 2 * CHUNK);
    // The device is still writing what was let go when somebody else needs it.
    rig.faulty.set_logging(true);
    let other = rig.alloc(12 * CHUNK);
    let names: Vec<_> = rig.faulty.take_log().into_iter().map(|c| c.name).collect();
    let gone = names.iter().position(|&n| n == "unmap").unwrap();
    assert!(names.iter().position(|&n| n == "event_synchronize").is_some_and(|w| w < gone), "{names:?}");
    assert_eq!(rig.faulty.count("release"), 0);
    rig.pool.check().unwrap();
    assert!(slice.grow_to(8 * CHUNK).unwrap_err().is_out_of_memory());
    write(&rig, &slice, 9, 2 * CHUNK);
    drop(other);
    slice.grow_to(16 * CHUNK).unwrap();
    assert_eq!(read(&rig, &slice, 2 * CHUNK), vec![9; 2 * CHUNK]);
    rig.pool.check().unwrap();
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn a_trim_takes_what_a_shrink_left() {
    let rig = Rig::new(PoolMode::Vmm);
    let mut slice = growable(&rig, 12 * CHUNK, 64 * CHUNK);
    slice.shrink_to(3 * CHUNK + 1).unwrap();
    assert_eq!(rig.pool.trim_to(0).unwrap(), 8 * CHUNK);
    assert_eq!(rig.pool.stats().reserved_bytes.current as usize, 4 * CHUNK);
    write(&rig, &slice, 9, 3 * CHUNK + 1);
    rig.stream.synchronize().unwrap();
    rig.pool.check().unwrap();
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn in_slab_mode_it_is_as_long_as_it_will_ever_be() {
    let rig = Rig::new(PoolMode::Slab);
    let mut slice = growable(&rig, 1, 64 * CHUNK);
    slice.grow_to(64 * CHUNK).unwrap();
    write(&rig, &slice, 3, 64 * CHUNK);
    slice.shrink_to(1).unwrap();
    assert_eq!(slice.extent().bytes(), 64 * CHUNK);
    drop(slice);
    rig.pool.check().unwrap();
}

#[test]
fn absurd_sizes_are_refused() {
    both(|mode| {
        let rig = Rig::new(mode);
        for (len, most) in [(0, usize::MAX), (usize::MAX, usize::MAX), (2, 1), (0, 1 << 60)] {
            assert!(rig.pool.alloc_growable::<u32>(len, most, Purpose::State, &rig.stream).is_err(), "{len} {most}");
        }
        let mut empty = rig.pool.alloc_growable::<u32>(0, 0, Purpose::State, &rig.stream).unwrap();
        empty.grow_to(0).unwrap();
        assert!(empty.grow_to(1).is_err());
        rig.pool.check().unwrap();
    });
}

#[test]
fn dropped_while_a_graph_holds_it() {
    let rig = Rig::limited(PoolMode::Vmm, 16 * CHUNK);
    for hold in [Hold::Weak, Hold::Strong] {
        let slice = growable(&rig, 8 * CHUNK, 64 * CHUNK);
        let mut graph = rig.graph(ScratchPolicy::Track, |w| {
            w.declare(slice.token(), Use::Scratch, 0, slice.bytes(), hold).unwrap();
        });
        assert!(graph.prove());
        drop(slice);
        rig.pool.check().unwrap();
        assert!(graph.prove(), "the graph keeps it");
        drop(graph);
        rig.pool.check().unwrap();
        assert_eq!(rig.alloc(16 * CHUNK).len(), 16 * CHUNK);
    }
}
