//! Slices: hand-out, stream-ordered reuse, copies, numbers.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use evergraph_pool::driver::Streams;
use evergraph_pool::{PoolError, Purpose, Stream};

#[test]
fn a_slice_holds_what_was_put_in() {
    both(|mode| {
        let rig = Rig::new(mode);
        let data: Vec<u32> = (0..5000).collect();
        let slice = rig.pool.upload(&data, Purpose::State, &rig.stream).unwrap();
        assert_eq!(rig.stream.download(&slice).unwrap(), data);
        let copy = rig.pool.alloc_zeroed::<u32>(5000, Purpose::Scratch, &rig.stream).unwrap();
        assert_eq!(rig.stream.download(&copy).unwrap(), vec![0; 5000]);
        rig.stream.copy(&slice, &copy).unwrap();
        assert_eq!(rig.stream.download(&copy).unwrap(), data);
        rig.pool.check().unwrap();
        drop((slice, copy));
        rig.pool.check().unwrap();
    });
}

#[test]
fn the_same_stream_gets_its_memory_back_at_once() {
    both(|mode| {
        let rig = Rig::new(mode);
        let first = rig.alloc(10_000);
        let (ptr, id) = (first.ptr(), first.allocation());
        drop(first);
        let calls = rig.faulty.count("any");
        let second = rig.alloc(10_000);
        assert_eq!(second.ptr(), ptr);
        assert_ne!(second.allocation(), id, "an id is never reused");
        assert_eq!(rig.faulty.count("any"), calls, "no driver call on the warm path");
        rig.pool.check().unwrap();
    });
}

#[test]
fn another_stream_waits_for_the_first_one() {
    // A delayed write on stream A must not land in memory that B was handed afterwards.
    both(|mode| {
        let rig = Rig::limited(mode, 2 * MIB);
        let other = Stream::new(&rig.driver).unwrap();
        let slice = rig.alloc(MIB + 512 * KIB);
        rig.stream.fill(&slice, 0xaa).unwrap();
        let ptr = slice.ptr();
        drop(slice);
        let mine = rig.pool.alloc::<u8>(MIB + 512 * KIB, &other).unwrap();
        assert_eq!(mine.ptr(), ptr, "there is no other memory");
        other.fill(&mine, 0x55).unwrap();
        assert!(other.download(&mine).unwrap().iter().all(|&b| b == 0x55));
        rig.stream.synchronize().unwrap();
        assert!(other.download(&mine).unwrap().iter().all(|&b| b == 0x55), "the late write came after all");
        assert!(rig.faulty.count("stream_wait_event") > 0);
        rig.pool.check().unwrap();
    });
}
