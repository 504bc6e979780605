//! Growth and give-back: one function, after the host has seen everything, just enough, nothing lost.

use std::sync::Arc;

use evergraph_pool::driver::host::{HostConfig, HostDevice, HostMachine, Poison};
use evergraph_pool::driver::{Driver, DynDriver, Faulty};
use evergraph_pool::{Hold, Pool, PoolConfig, PoolError, PoolMode, Purpose, ScratchPolicy, Stream, Use};

use crate::common::*;

#[test]
fn only_one_file_calls_the_drivers_free() {
    // Rule 2: everything else goes through it.
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&root).unwrap().to_owned();
            if path.is_dir() {
                if !name.starts_with("driver") && !name.starts_with("core") {
                    folders.push(path);
                }
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for call in ["driver.free(", "driver.unmap(", "driver.release(", "driver.address_free("] {
                let path_found = if evergraph_pool::mutant::is("second-free-path") { "pool.rs" } else { "" };
                if text.contains(call) || path_found == name.to_string_lossy() {
                    seen.push(name.to_string_lossy().into_owned());
                }
            }
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen, ["give_back.rs"]);
}

#[test]
fn the_host_has_seen_the_work_before_the_memory_goes() {
    both(|mode| {
        let rig = Rig::new(mode);
        let slice = rig.alloc(4 * MIB);
        rig.stream.fill(&slice, 1).unwrap();
        drop(slice);
        rig.faulty.set_logging(true);
        assert!(rig.pool.trim_to(0).unwrap() >= 4 * MIB);
        let names: Vec<_> = rig.faulty.take_log().into_iter().map(|c| c.name).collect();
        let gone = names.iter().position(|&n| n == "unmap" || n == "free").unwrap();
        let waited = names.iter().position(|&n| n == "event_synchronize");
        assert!(waited.is_some_and(|w| w < gone), "{names:?}");
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.driver.fault(), None);
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_stream_that_was_dropped_is_waited_for_too() {
    both(|mode| {
        let rig = Rig::new(mode);
        let short_lived = Stream::new(&rig.driver).unwrap();
        let slice = rig.pool.alloc::<u8>(4 * MIB, &short_lived).unwrap();
        for _ in 0..3 {
            short_lived.fill(&slice, 1).unwrap();
        }
        drop(slice);
        drop(short_lived);
        // The same handle may now be another stream's.
        let next = Stream::new(&rig.driver).unwrap();
        assert!(rig.pool.trim_to(0).unwrap() >= 4 * MIB);
        next.synchronize().unwrap();
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.driver.fault(), None, "memory went while the dropped stream was writing");
        rig.pool.trim_to(0).unwrap();
        assert_eq!(rig.host.live().streams, 2, "the pool let the dropped stream go once it was idle");
    });
}

#[test]
fn the_owning_device_is_current_when_memory_goes() {
    both(|mode| {
        let devices = HostMachine::new(2, device()).unwrap();
        let near: DynDriver = devices[0].clone();
        let far: DynDriver = devices[1].clone();
        near.bind().unwrap();
        let pool = Pool::new(Arc::clone(&near), config(mode)).unwrap();
        let stream = Stream::new(&near).unwrap();
        let far_stream = Stream::new(&far).unwrap();
        let slice = pool.alloc::<u8>(4 * MIB, &stream).unwrap();
        let (node, mut launcher) = Node::new(&far_stream, 1);
        let window = pool.begin_declarations(node).unwrap();
        declare(&window, &slice, Use::Scratch, Hold::Weak);
        let registration = window.finish().unwrap();
        let proven = registration.walk().unwrap();
        drop(slice);
        assert!(launcher.launch([(&**registration.epoch(), proven)], 1, || ()).is_some());
        // Waiting for the graph's stream made the other device current.
        far.bind().unwrap();
        assert!(pool.trim_to(0).unwrap() >= 4 * MIB);
        pool.check().unwrap();
        // And from a thread that has no device at all.
        let slice = pool.alloc::<u8>(4 * MIB, &stream).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                drop(slice);
                assert!(pool.trim_to(0).unwrap() >= 4 * MIB);
            });
        });
        drop(registration);
        std::thread::spawn(move || drop((pool, stream))).join().unwrap();
        assert_eq!(devices[0].live().used_bytes, 0);
    });
}

#[test]
fn just_enough_goes_back() {
    both(|mode| {
        let rig = Rig::limited(mode, 16 * MIB);
        let blocks: Vec<_> =
            (0..4).map(|_| rig.pool.alloc_for::<u8>(3 * MIB, Purpose::State, &rig.stream).unwrap()).collect();
        drop(blocks);
        let before = rig.pool.stats().reserved_bytes.current;
        let _slice = rig.alloc(5 * MIB);
        let after = rig.pool.stats().reserved_bytes;
        assert!(after.freed <= 6 * MIB as u64, "{} of {before} bytes went back", after.freed);
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_full_slot_table_gives_one_slab_back() {
    let rig = Rig::with(device(), config(PoolMode::Slab).slots(4));
    let mut slices: Vec<_> = (0..4).map(|_| rig.alloc(11 * MIB)).collect();
    let graph = rig.depends(&slices[0], Use::State, Hold::Strong);
    assert_eq!(rig.pool.stats().segments.current, 4);
    assert!(rig.pool.alloc::<u8>(12 * MIB, &rig.stream).unwrap_err().is_out_of_memory(), "no slot");
    slices.pop();
    let big = rig.alloc(13 * MIB);
    assert_eq!(rig.pool.stats().segments.current, 4);
    assert_eq!(rig.faulty.count("free"), 1);
    graph.registration.walk().unwrap();
    drop(big);
    rig.pool.check().unwrap();
}

#[test]
fn sizes_follow_the_granularity_in_every_call() {
    // A raw size once reached `create`; map and unmap must agree with it to the byte.
    for granularity in [64 * KIB, 2 * MIB, 32 * MIB] {
        let device =
            HostConfig::default().memory(256 * MIB).granularity(granularity).stepped(true).poison(Poison::Ends);
        let rig = Rig::with(device, PoolConfig::vmm());
        rig.faulty.set_logging(true);
        for bytes in [1, granularity - 1, granularity, granularity + 1] {
            drop(rig.alloc(bytes));
            rig.pool.check().unwrap();
        }
        rig.pool.trim_to(0).unwrap();
        assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
        let log = rig.faulty.take_log();
        let sizes =
            |name: &str| -> Vec<u64> { log.iter().filter(|c| c.name == name).filter_map(|c| c.arg("bytes")).collect() };
        assert!(!sizes("create").is_empty());
        assert_eq!(sizes("create"), sizes("map"));
        assert_eq!(sizes("map").iter().sum::<u64>(), sizes("unmap").iter().sum::<u64>());
        assert_eq!(sizes("map").iter().sum::<u64>(), sizes("set_access").iter().sum::<u64>());
        for name in ["address_reserve", "create", "map", "set_access", "unmap"] {
            assert!(sizes(name).iter().all(|b| b % granularity as u64 == 0), "{name}: {:?}", sizes(name));
        }
    }
}

#[test]
fn a_refused_reservation_is_tried_smaller() {
    let device = device().va_limit(8 * MIB);
    let rig = Rig::with(device, config(PoolMode::Vmm));
    let slices: Vec<_> = (0..6).map(|_| rig.alloc(3 * MIB)).collect();
    assert!(rig.faulty.count("address_reserve") > 1);
    assert!(rig.pool.alloc::<u8>(9 * MIB, &rig.stream).is_err());
    rig.pool.check().unwrap();
    drop(slices);
    rig.pool.check().unwrap();
}

#[test]
fn free_memory_of_two_streams_is_joined_before_growth() {
    both(|mode| {
        let rig = Rig::limited(mode, 10 * MIB);
        let other = Stream::new(&rig.driver).unwrap();
        let mut slices = Vec::new();
        for i in 0..12 {
            let (stream, bytes) = if i % 2 == 0 { (&rig.stream, 512 * KIB) } else { (&other, 256 * KIB) };
            slices.push(rig.pool.alloc::<u8>(bytes, stream).unwrap());
        }
        drop(slices);
        let all = rig.alloc(9 * MIB);
        assert_eq!(all.len(), 9 * MIB);
        rig.pool.check().unwrap();
    });
}

#[test]
fn steadily_growing_requests_do_not_pile_up() {
    // Each step asks for slightly more; smaller cached blocks are never large enough again.
    both(|mode| {
        let device = HostConfig::default().memory(4 << 30).stepped(true).poison(Poison::Off);
        let rig = Rig::with(device, PoolConfig::new(mode));
        for k in 1..=64 {
            drop(rig.alloc(8 * MIB * k));
        }
        let peak = rig.pool.stats().reserved_bytes.peak as usize;
        let most = if mode == PoolMode::Vmm { 512 * MIB + 2 * MIB } else { 3 * 512 * MIB };
        assert!(peak <= most, "{} MiB at peak", peak / MIB);
        rig.pool.check().unwrap();
    });
}

#[test]
fn growth_falls_back_to_what_is_needed() {
    // Doubling fails though the request fits.
    let rig = Rig::limited(PoolMode::Slab, 32 * MIB);
    let a = rig.alloc(15 * MIB);
    let b = rig.alloc(7 * MIB + 512 * KIB);
    let left = 32 * MIB - rig.pool.stats().reserved_bytes.current as usize;
    let c = rig.alloc(left - 64 * KIB);
    drop((a, b, c));
    rig.pool.check().unwrap();
}

#[test]
fn everything_is_back_when_the_pool_is_gone() {
    both(|mode| {
        let rig = Rig::new(mode);
        let before = rig.host.live();
        let extra = Stream::new(&rig.driver).unwrap();
        let slices: Vec<_> = (0..50).map(|i| rig.pool.alloc::<u32>(1000 * i, &extra).unwrap()).collect();
        let graph = rig.depends(&slices[7], Use::Input, Hold::Strong);
        for slice in &slices {
            extra.fill(slice, 1).unwrap();
        }
        let buffer = rig.pool.host_buffer::<u8>(1000).unwrap();
        let Rig { host, pool, stream, .. } = rig;
        drop(pool);
        drop(extra);
        drop(slices);
        drop(buffer);
        drop(graph);
        let live = host.live();
        assert_eq!(
            (live.mallocs, live.chunks, live.mappings, live.reservations, live.host, live.used_bytes),
            (0, 0, 0, 0, 0, 0)
        );
        assert_eq!((live.events, live.streams), (before.events, before.streams));
        assert_eq!(host.fault(), None);
        drop(stream);
    });
}

#[test]
fn a_mode_is_fixed_for_a_pools_life_and_refused_where_it_can_not_be() {
    let host = HostDevice::new(device().vmm(false)).unwrap();
    let driver: DynDriver = host;
    assert!(matches!(Pool::new(Arc::clone(&driver), PoolConfig::vmm()), Err(PoolError::Unsupported { .. })));
    Pool::new(Arc::clone(&driver), PoolConfig::slab()).unwrap();
    assert!(matches!(Pool::new(driver, PoolConfig::slab().slots(0)), Err(PoolError::Config(_))));
    let driver: DynDriver = Faulty::new(HostDevice::new(device()).unwrap());
    assert!(matches!(Pool::new(Arc::clone(&driver), PoolConfig::vmm().chunk(1000)), Err(PoolError::Config(_))));
    assert!(matches!(Pool::new(driver, PoolConfig::vmm().chunk(0)), Err(PoolError::Config(_))));
}

#[test]
fn two_live_slices_never_overlap() {
    // An allocator that hands one address out twice goes unnoticed, unless somebody looks.
    both(|mode| {
        let rig = Rig::limited(mode, 48 * MIB);
        let streams = [rig.stream.clone(), Stream::new(&rig.driver).unwrap()];
        let mut live: Vec<evergraph_pool::DeviceSlice<u8>> = Vec::new();
        let mut graphs = Vec::new();
        let mut seed = 12345u64;
        let mut next = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % n
        };
        for step in 0..3000 {
            let stream = &streams[next(2)];
            match next(20) {
                0..=9 => {
                    let most = 1 << (8 + next(13));
                    let bytes = 1 + next(most);
                    if let Ok(slice) = rig.pool.alloc(bytes, stream) {
                        let (start, end) = (slice.ptr().0, slice.ptr().0 + bytes as u64);
                        for other in &live {
                            let (a, b) = (other.ptr().0, other.ptr().0 + other.bytes() as u64);
                            assert!(end <= a || b <= start, "step {step}: {start:#x} is handed out twice");
                        }
                        live.push(slice);
                    }
                }
                10..=16 if !live.is_empty() => {
                    let at = next(live.len());
                    drop(live.swap_remove(at));
                }
                17 => {
                    rig.pool.trim_to(next(48 * MIB)).unwrap();
                }
                18 if !live.is_empty() => {
                    let hold = if next(2) == 0 { Hold::Strong } else { Hold::Weak };
                    let slice = &live[next(live.len())];
                    let policy = if next(2) == 0 { ScratchPolicy::Pin } else { ScratchPolicy::Track };
                    graphs.extend(TestGraph::capture(&rig.pool, &rig.stream, policy, |w| {
                        declare(w, slice, Use::Scratch, hold);
                        for _ in 0..3 {
                            drop(rig.pool.alloc::<u8>(1000, &rig.stream));
                        }
                    }));
                }
                19 if !graphs.is_empty() => {
                    let at = next(graphs.len());
                    if next(2) == 0 {
                        let _ = graphs[at].registration.reback();
                        graphs[at].replay(|| ());
                    } else {
                        graphs.swap_remove(at);
                    }
                }
                _ => {}
            }
            if step % 50 == 0 {
                rig.pool.check().unwrap();
            }
        }
        drop((live, graphs));
        rig.pool.check().unwrap();
        assert_eq!(rig.pool.stats().active_bytes.current, 0);
        assert_eq!(rig.driver.fault(), None);
    });
}
