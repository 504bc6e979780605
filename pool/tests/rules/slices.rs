//! Slices: hand-out, stream-ordered reuse, copies, numbers.

use crate::common::*;
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

#[test]
fn threads_hand_slices_over_without_reusing_them_early() {
    // Allocation on one thread, delayed work, free on another: the free is ordered by the stream, not the thread.
    both(|mode| {
        let rig = Rig::with(device().stepped(false), config(mode));
        let gate = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let slice = rig.alloc(64 * KIB);
        let place = slice.ptr();
        let open = gate.clone();
        let wait = evergraph_pool::driver::HostCallback::new(move || {
            while !open.load(std::sync::atomic::Ordering::Acquire) {
                std::thread::yield_now();
            }
        });
        rig.driver.launch_host_fn(rig.stream.handle(), wait).unwrap();
        rig.stream.fill(&slice, 1).unwrap();
        let other = Stream::new(&rig.driver).unwrap();
        std::thread::scope(|s| {
            s.spawn(move || drop(slice));
            s.spawn(|| {
                let mine: Vec<_> = (0..8).map(|_| rig.pool.alloc::<u8>(64 * KIB, &other).unwrap()).collect();
                for slice in &mine {
                    other.fill(slice, 2).unwrap();
                }
                gate.store(true, std::sync::atomic::Ordering::Release);
                for slice in &mine {
                    assert!(other.download(slice).unwrap().iter().all(|&b| b == 2), "{place} was handed out early");
                }
            });
        });
        rig.stream.synchronize().unwrap();
        rig.pool.check().unwrap();
    });
}

#[test]
fn empty_slices_never_reach_the_driver() {
    both(|mode| {
        let rig = Rig::new(mode);
        let calls = rig.faulty.count("any");
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for _ in 0..1000 {
                        let slice = rig.pool.alloc::<u64>(0, &rig.stream).unwrap();
                        assert!(slice.is_empty() && slice.ptr() == evergraph_pool::driver::DevicePtr::NULL);
                        assert_eq!(slice.token().allocation, slice.allocation());
                    }
                });
            }
        });
        assert_eq!(rig.faulty.count("any"), calls);
        assert_eq!(rig.pool.stats().allocations.allocated, 0);
        rig.pool.check().unwrap();
    });
}

#[test]
fn absurd_sizes_are_refused_and_change_nothing() {
    // `size + 511` once wrapped to 0: two live blocks at one address.
    both(|mode| {
        let rig = Rig::new(mode);
        let before = (rig.pool.report(), rig.faulty.count("any"));
        for bytes in (usize::MAX - 1024..=usize::MAX).chain([1 << 63, (1 << 47) + 1]) {
            let refused = rig.pool.alloc::<u8>(bytes, &rig.stream);
            assert!(matches!(refused, Err(PoolError::TooLarge { .. })), "{bytes}: {refused:?}");
        }
        for len in [usize::MAX / 8 + 2, usize::MAX / 4, 1 << 61] {
            let refused = rig.pool.alloc::<u64>(len, &rig.stream);
            assert!(matches!(refused, Err(PoolError::TooLarge { .. })), "{len}: {refused:?}");
        }
        for align in [3, 48, 4 << 20, usize::MAX] {
            let refused = rig.pool.alloc_aligned::<u8>(100, align, Purpose::Scratch, &rig.stream);
            assert!(matches!(refused, Err(PoolError::Alignment { .. })), "{align}: {refused:?}");
        }
        assert_eq!((rig.pool.report(), rig.faulty.count("any")), before);
        for bytes in [64 * MIB + 1, 65 * MIB, 1 << 40] {
            assert!(rig.pool.alloc::<u8>(bytes, &rig.stream).unwrap_err().is_out_of_memory(), "{bytes}");
        }
        for align in [1, 2, 256, 4096, MIB] {
            let slice = rig.pool.alloc_aligned::<u8>(100, align, Purpose::Scratch, &rig.stream).unwrap();
            assert_eq!(slice.ptr().0 % align as u64, 0);
        }
        rig.pool.check().unwrap();
    });
}

#[test]
fn statistics_speak_pytorch() {
    both(|mode| {
        let rig = Rig::new(mode);
        let a = rig.alloc(1000);
        let b = rig.alloc(100 * KIB);
        drop(a);
        let stats = rig.pool.stats();
        assert_eq!(stats.requested_bytes.current, 100 << 10);
        assert_eq!(stats.requested_bytes.peak, (100 << 10) + 1000);
        assert_eq!(stats.allocated_bytes.current % 512, 0);
        assert_eq!(stats.allocated_bytes.allocated - stats.allocated_bytes.freed, stats.allocated_bytes.current);
        assert_eq!((stats.allocations.current, stats.allocations.peak, stats.allocations.freed), (1, 2, 1));
        assert!(stats.reserved_bytes.current >= stats.active_bytes.current);
        rig.pool.reset_peak_stats();
        assert_eq!(rig.pool.stats().requested_bytes.peak, 100 << 10);
        drop(b);
        rig.pool.trim_to(0).unwrap();
        let stats = rig.pool.stats();
        assert_eq!((stats.reserved_bytes.current, stats.segments.current), (0, 0));
        assert_eq!(stats.reserved_bytes.allocated, stats.reserved_bytes.freed);
    });
}

#[test]
fn out_of_memory_tells_the_whole_story() {
    both(|mode| {
        let rig = Rig::limited(mode, 4 * MIB);
        let _big = rig.alloc(3 * MIB - 64 * KIB);
        let error = rig.pool.alloc::<u8>(2 * MIB, &rig.stream).unwrap_err();
        let PoolError::OutOfMemory(oom) = &error else { panic!("{error}") };
        assert_eq!(oom.requested_bytes, 2 * MIB);
        assert_eq!(oom.report.limit_bytes, Some(4 * MIB));
        assert!(oom.report.holders[0].bytes >= 3 * MIB - 64 * KIB);
        let text = error.to_string();
        for part in ["2097152", "limit 4.0 MiB", "try:", "#", "largest"] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert_eq!(rig.pool.stats().num_ooms, 1);
        rig.pool.check().unwrap();
    });
}

#[test]
fn recorded_streams_are_waited_for_too() {
    both(|mode| {
        let rig = Rig::limited(mode, 2 * MIB);
        let side = Stream::new(&rig.driver).unwrap();
        let slice = rig.alloc(MIB + 512 * KIB);
        side.fill(&slice, 0xaa).unwrap();
        drop(slice);
        // Same stream as the allocation: but the side stream's work is still queued.
        let mine = rig.alloc(MIB + 512 * KIB);
        rig.stream.fill(&mine, 0x55).unwrap();
        assert!(rig.stream.download(&mine).unwrap().iter().all(|&b| b == 0x55));
        side.synchronize().unwrap();
        assert!(rig.stream.download(&mine).unwrap().iter().all(|&b| b == 0x55), "the side stream came late");
        rig.pool.check().unwrap();
    });
}

#[test]
fn inherited_uses_stay_until_the_host_has_seen_them() {
    // B takes A's memory behind an event, uses nothing and frees: the memory still waits for A.
    both(|mode| {
        let rig = Rig::limited(mode, 2 * MIB);
        let other = Stream::new(&rig.driver).unwrap();
        let slice = rig.alloc(MIB + 512 * KIB);
        for _ in 0..4 {
            rig.stream.fill(&slice, 0xaa).unwrap();
        }
        drop(slice);
        drop(rig.pool.alloc::<u8>(MIB + 512 * KIB, &other).unwrap());
        rig.faulty.set_logging(true);
        assert!(rig.pool.trim_to(0).unwrap() > 0);
        let log = rig.faulty.take_log();
        let recorded: Vec<_> =
            log.iter().filter(|c| c.name == "event_record").filter_map(|c| c.arg("stream")).collect();
        assert!(recorded.contains(&rig.stream.handle().0), "the first stream was forgotten: {recorded:?}");
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.driver.fault(), None);
    });
}
