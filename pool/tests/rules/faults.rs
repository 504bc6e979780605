//! Any driver call may fail at any point: the state is as before, nothing leaks, a retry works.

use std::sync::Arc;

use evergraph_pool::driver::host::HostDevice;
use evergraph_pool::{
    Content, DeviceSlice, Hold, PoolError, PoolMode, Purpose, RegisteredHost, ScratchPolicy, Stream, Tracked, Use,
};

use crate::common::*;

/// Destroying events and streams is left out: a drop can not try again, and nothing of the pool depends on it.
const KINDS: [&str; 23] = [
    "address_reserve",
    "create",
    "map",
    "set_access",
    "unmap",
    "release",
    "address_free",
    "malloc",
    "free",
    "host_alloc",
    "host_free",
    "host_register",
    "host_unregister",
    "event_create",
    "event_record",
    "event_synchronize",
    "stream_wait_event",
    "stream_query",
    "stream_synchronize",
    "stream_create",
    "memcpy_htod",
    "memcpy_dtoh",
    "capture_status",
];

/// Fails every call of every kind that `op` makes, in turn. `op` is run again afterwards and must work then.
fn each_call<S>(setup: impl Fn(PoolMode) -> (Rig, S), op: impl Fn(&Rig, &mut S) -> Result<(), PoolError>) {
    both(|mode| {
        let calls = {
            let (rig, mut story) = setup(mode);
            let before: Vec<u64> = KINDS.iter().map(|k| rig.faulty.count(k)).collect();
            op(&rig, &mut story).unwrap();
            KINDS.iter().zip(before).map(|(k, b)| rig.faulty.count(k) - b).collect::<Vec<_>>()
        };
        for (kind, count) in KINDS.iter().zip(calls) {
            for nth in 1..=count {
                let (rig, mut story) = setup(mode);
                rig.faulty.fail_nth(kind, nth);
                let result = op(&rig, &mut story);
                assert!(rig.faulty.injected() > 0, "{kind} {nth} was not reached");
                rig.faulty.clear();
                rig.pool.check().unwrap_or_else(|e| panic!("{kind} {nth}: {e} after {result:?}"));
                if result.is_err() {
                    op(&rig, &mut story).unwrap_or_else(|e| panic!("{kind} {nth}: the retry failed: {e}"));
                }
                rig.pool.check().unwrap_or_else(|e| panic!("{kind} {nth}: {e} after the retry"));
                let host = Arc::clone(&rig.host);
                drop(story);
                drop(rig);
                nothing_left(&host, kind, nth);
            }
        }
    });
}

fn nothing_left(host: &HostDevice, kind: &str, nth: u64) {
    let live = host.live();
    let left = (live.mallocs, live.chunks, live.mappings, live.reservations, live.host, live.used_bytes, live.events);
    assert_eq!(
        left,
        (0, 0, 0, 0, 0, 0, 0),
        "{kind} {nth}: mallocs, chunks, mappings, reservations, host, bytes, events"
    );
    assert_eq!(host_fault(host), None, "{kind} {nth}");
}

fn host_fault(host: &HostDevice) -> Option<evergraph_pool::driver::Fault> {
    evergraph_pool::driver::Driver::fault(host)
}

#[test]
fn growth() {
    each_call(
        |mode| (Rig::new(mode), Vec::new()),
        |rig, slices: &mut Vec<DeviceSlice<u8>>| {
            slices.push(rig.pool.alloc(300 * KIB, &rig.stream)?);
            Ok(())
        },
    );
}

#[test]
fn sleeping_and_waking() {
    // A failed sleep leaves everything awake, or, once chunks went, asleep; a failed wake leaves it asleep. Either way
    // nothing that was kept is lost, and doing it again does the rest.
    for content in [Content::Drop, Content::Keep, Content::KeepPinned] {
        each_call(
            |mode| {
                let rig = Rig::new(mode);
                let data: Vec<u32> = (0..40_000).collect();
                let upload = |purpose| rig.pool.upload(&data, purpose, &rig.stream).unwrap();
                let slices: Vec<_> = Purpose::ALL.into_iter().map(upload).collect();
                rig.stream.fill(&slices[0], 7).unwrap();
                let graph = rig.depends(&slices[1], Use::Scratch, Hold::Weak);
                (rig, (slices, graph, data))
            },
            |rig, (slices, graph, data)| {
                if rig.pool.mode() == PoolMode::Slab {
                    return Ok(());
                }
                rig.pool.sleep(content, &[])?;
                rig.pool.check().unwrap();
                assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
                rig.pool.wake(&[])?;
                graph.registration.reback()?;
                graph.registration.walk()?;
                if content != Content::Drop {
                    assert!(rig.stream.download(&slices[0])?.iter().all(|word| *word == 0x0707_0707));
                    assert_eq!(rig.stream.download(&slices[1])?, *data);
                    assert_eq!(rig.stream.download(&slices[2])?, *data);
                }
                Ok(())
            },
        );
    }
}

#[test]
fn reuse_across_streams() {
    each_call(
        |mode| {
            let rig = Rig::limited(mode, 2 * MIB);
            let other = Stream::new(&rig.driver).unwrap();
            let slice = rig.alloc(MIB + 512 * KIB);
            for _ in 0..40 {
                rig.stream.fill(&slice, 1).unwrap();
            }
            (rig, (other, None))
        },
        |rig, (other, slice): &mut (Stream, Option<DeviceSlice<u8>>)| {
            *slice = Some(rig.pool.alloc(MIB + 512 * KIB, other)?);
            Ok(())
        },
    );
}

#[test]
fn victims_under_a_limit() {
    each_call(
        |mode| {
            let rig = Rig::limited(mode, 8 * MIB);
            let free = rig.pool.alloc_for::<u8>(MIB, Purpose::State, &rig.stream).unwrap();
            rig.stream.fill(&free, 1).unwrap();
            let weak = rig.alloc(2 * MIB);
            let graph = rig.depends(&weak, Use::Scratch, Hold::Weak);
            drop((free, weak));
            rig.pool.reserve(MIB, Purpose::Scratch, &rig.stream).unwrap();
            let pinned = rig.graph(ScratchPolicy::Pin, |_| drop(rig.alloc(MIB)));
            (rig, (vec![graph, pinned], None))
        },
        |rig, (_, slice): &mut (Vec<TestGraph>, Option<DeviceSlice<u8>>)| {
            *slice = Some(rig.pool.alloc(7 * MIB, &rig.stream)?);
            Ok(())
        },
    );
}

#[test]
fn a_trim() {
    each_call(
        |mode| {
            let rig = Rig::new(mode);
            let weak = rig.alloc(2 * MIB);
            let graph = rig.depends(&weak, Use::Scratch, Hold::Weak);
            let free: Vec<_> = (0..3).map(|_| rig.alloc(MIB)).collect();
            for slice in &free {
                rig.stream.fill(slice, 1).unwrap();
            }
            drop((weak, free));
            (rig, graph)
        },
        |rig, _| {
            rig.pool.trim_to(0)?;
            assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
            Ok(())
        },
    );
}

#[test]
fn a_window() {
    each_call(
        |mode| {
            let rig = Rig::new(mode);
            drop(rig.alloc(MIB));
            (rig, Vec::new())
        },
        |rig, graphs: &mut Vec<TestGraph>| {
            let capture = |_: &_| {
                drop(rig.alloc(1000));
                drop(rig.alloc(2000));
            };
            graphs.push(TestGraph::capture(&rig.pool, &rig.stream, ScratchPolicy::Pin, capture)?);
            Ok(())
        },
    );
}

#[test]
fn pages_back() {
    each_call(
        |_| {
            let rig = Rig::new(PoolMode::Vmm);
            drop(rig.alloc(300 * KIB));
            let graph = rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(300 * KIB)));
            rig.pool.trim_to(0).unwrap();
            (rig, graph)
        },
        |_, graph| {
            graph.registration.reback()?;
            graph.registration.walk()?;
            Ok(())
        },
    );
}

#[test]
fn stitching() {
    each_call(
        |_| {
            let rig = Rig::limited(PoolMode::Vmm, MIB);
            let blocks: Vec<_> = (0..8).map(|_| rig.alloc(MIB / 8)).collect();
            let kept: Vec<_> = blocks.into_iter().step_by(2).collect();
            for slice in &kept {
                rig.stream.fill(slice, 7).unwrap();
            }
            (rig, (kept, None))
        },
        |rig, (kept, large)| {
            *large = Some(rig.pool.alloc::<u8>(MIB / 4, &rig.stream)?);
            for slice in kept {
                assert!(rig.stream.download(slice)?.iter().all(|&b| b == 7));
            }
            Ok(())
        },
    );
}

#[test]
fn large_chunks_made() {
    each_call(
        |_| (Rig::with(device(), classed()), Vec::new()),
        |rig, slices: &mut Vec<DeviceSlice<u8>>| {
            slices.push(rig.pool.alloc(3 * LARGE + 2 * CHUNK, &rig.stream)?);
            Ok(())
        },
    );
}

#[test]
fn large_chunks_moved_and_broken_up() {
    each_call(
        |_| {
            let rig = Rig::with(device(), classed().limit(16 * LARGE));
            let blocks: Vec<_> = (0..8).map(|_| rig.alloc(2 * LARGE)).collect();
            let kept: Vec<_> = blocks.into_iter().skip(1).step_by(2).collect();
            for slice in &kept {
                rig.stream.fill(slice, 7).unwrap();
            }
            (rig, (kept, Vec::new()))
        },
        |rig, (kept, more)| {
            more.clear();
            more.push(rig.pool.alloc_for::<u8>(3 * LARGE, Purpose::Weight, &rig.stream)?);
            more.push(rig.pool.alloc_for::<u8>(CHUNK, Purpose::State, &rig.stream)?);
            for slice in kept {
                assert!(rig.stream.download(slice)?.iter().all(|&b| b == 7));
            }
            Ok(())
        },
    );
}

#[test]
fn large_chunks_of_idle_graphs() {
    each_call(
        |_| {
            let rig = Rig::with(device(), classed().limit(16 * LARGE));
            drop(rig.alloc(4 * LARGE));
            let graph = rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(4 * LARGE)));
            (rig, graph)
        },
        |rig, graph| {
            drop(rig.pool.alloc::<u8>(13 * LARGE, &rig.stream)?);
            graph.registration.reback()?;
            graph.registration.walk()?;
            rig.pool.trim_to(0)?;
            assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
            Ok(())
        },
    );
}

#[test]
fn large_chunks_asleep_and_awake() {
    each_call(
        |_| {
            let rig = Rig::with(device(), classed());
            let data: Vec<u32> = (0..600_000).collect();
            let weights = rig.pool.upload(&data, Purpose::Weight, &rig.stream).unwrap();
            let small = rig.pool.upload(&data[..9], Purpose::Weight, &rig.stream).unwrap();
            (rig, (weights, small, data))
        },
        |rig, (weights, small, data)| {
            rig.pool.sleep(Content::Keep, &[])?;
            rig.pool.check().unwrap();
            rig.pool.wake(&[])?;
            rig.pool.check().unwrap();
            assert!(rig.stream.download(weights)? == *data);
            assert_eq!(rig.stream.download(small)?, data[..9]);
            Ok(())
        },
    );
}

#[test]
fn large_chunks_behind_an_extent() {
    each_call(
        |_| {
            let rig = Rig::with(device(), classed().limit(16 * LARGE));
            let slice = rig.pool.alloc_growable::<u8>(0, 32 * LARGE, Purpose::State, &rig.stream).unwrap();
            (rig, slice)
        },
        |rig, slice| {
            slice.grow_to(5 * LARGE)?;
            slice.shrink_to(LARGE + 1)?;
            drop(rig.pool.alloc::<u8>(13 * LARGE, &rig.stream)?);
            Ok(())
        },
    );
}

#[test]
fn growing() {
    each_call(
        |_| {
            let rig = Rig::limited(PoolMode::Vmm, MIB);
            let block = rig.alloc(MIB / 2);
            rig.stream.fill(&block, 7).unwrap();
            drop(block);
            (rig, None)
        },
        |rig, slice| {
            if slice.is_none() {
                *slice = Some(rig.pool.alloc_growable::<u8>(0, 4 * MIB, Purpose::State, &rig.stream)?);
            }
            if let Some(slice) = slice {
                slice.grow_to(MIB / 4)?;
                slice.grow_to(3 * MIB / 4)?;
                slice.shrink_to(1)?;
                drop(rig.pool.alloc::<u8>(7 * MIB / 8, &rig.stream)?);
            }
            Ok(())
        },
    );
}

#[test]
fn host_memory() {
    each_call(
        |mode| (Rig::new(mode), None),
        |rig, kept: &mut Option<RegisteredHost>| {
            let buffer = rig.pool.host_buffer::<u32>(1000)?;
            buffer.write(&[7; 1000])?;
            let slice = rig.pool.alloc::<u32>(1000, &rig.stream)?;
            rig.stream.copy_from_host(&buffer, &slice)?;
            assert_eq!(rig.stream.download(&slice)?, [7; 1000]);
            drop(buffer);
            *kept = Some(rig.pool.register_host(Arc::new(vec![1u8; 100_000]))?);
            assert_eq!(kept.as_ref().unwrap().bytes(), 100_000);
            *kept = None;
            Ok(())
        },
    );
}

#[test]
fn the_end_of_the_pool() {
    // No retry is possible afterwards, so each call is tried again at once.
    each_call(
        |mode| {
            let rig = Rig::new(mode);
            let slices: Vec<_> = (0..3).map(|_| rig.alloc(500 * KIB)).collect();
            for slice in &slices {
                rig.stream.fill(slice, 1).unwrap();
            }
            let buffer = rig.pool.host_buffer::<u8>(1000).unwrap();
            (rig, Some((slices, buffer)))
        },
        |rig, story| {
            // The pool that ends is a second one on the same device.
            let pool = evergraph_pool::Pool::new(Arc::clone(&rig.driver), config(rig.pool.mode()))?;
            let slice = pool.alloc::<u8>(300 * KIB, &rig.stream)?;
            rig.stream.fill(&slice, 1)?;
            drop(slice);
            drop(pool);
            *story = None;
            Ok(())
        },
    );
}
