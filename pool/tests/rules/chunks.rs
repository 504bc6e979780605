//! Large requests get large physical chunks: few driver calls, nothing rounded up, and all that memory does between owners,
//! ranges, sleep and wake goes on as with small ones.

use evergraph_pool::driver::DriverErrorKind;
use evergraph_pool::driver::host::HostConfig;
use evergraph_pool::{
    BadReason, ChunkClass, Content, DeviceSlice, Hold, Pool, PoolConfig, PoolMode, Purpose, ScratchPolicy, Use,
};

use crate::common::*;

/// 252 MiB in chunks of 2 MiB, on a small device.
const MANY: usize = 126 * CHUNK;
fn rig() -> Rig {
    Rig::with(device(), classed())
}

fn limited(bytes: usize) -> Rig {
    Rig::with(device(), classed().limit(bytes))
}

/// Sizes of the chunks that were made meanwhile.
fn made<T>(rig: &Rig, work: impl FnOnce() -> T) -> (T, Vec<usize>) {
    rig.faulty.set_logging(true);
    let done = work();
    rig.faulty.set_logging(false);
    let creates = rig.faulty.take_log().into_iter().filter(|call| call.name == "create" && call.result.is_ok());
    (done, creates.map(|call| call.arg("bytes").unwrap() as usize).collect())
}

fn sizes(of_each: &[(usize, usize)]) -> Vec<usize> {
    of_each.iter().flat_map(|&(bytes, times)| std::iter::repeat_n(bytes, times)).collect()
}

/// Every call of the kinds that cost.
fn calls(rig: &Rig) -> u64 {
    ["create", "map", "set_access", "unmap", "release"].iter().map(|kind| rig.faulty.count(kind)).sum()
}

fn nothing_left(rig: &Rig) {
    rig.pool.check().unwrap();
    rig.pool.trim_to(0).unwrap();
    rig.pool.check().unwrap();
    assert_eq!((rig.pool.stats().reserved_bytes.current, rig.pool.stats().segments.current), (0, 0));
    let live = rig.host.live();
    assert_eq!((live.chunks, live.mappings, live.used_bytes), (0, 0, 0));
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn a_large_request_takes_few_driver_calls() {
    let rig = rig();
    let (large, chunks) = made(&rig, || rig.alloc(MANY));
    assert_eq!(chunks, sizes(&[(LARGE, 7), (CHUNK, 14)]));
    assert_eq!(calls(&rig), 2 * 21 + 1, "each made and mapped, and access set once, not 126 times");
    let stats = rig.pool.stats();
    assert_eq!(stats.reserved_bytes.current as usize, MANY, "nothing was rounded up");
    assert_eq!(stats.segments.current, 21);
    rig.stream.fill(&large, 7).unwrap();
    assert!(rig.stream.download(&large).unwrap().iter().all(|&b| b == 7));
    rig.pool.check().unwrap();
    drop(large);
    let before = calls(&rig);
    assert_eq!(rig.pool.trim_to(0).unwrap(), MANY);
    assert_eq!(calls(&rig) - before, 2 * 21);
    nothing_left(&rig);

    let (weights, chunks) =
        made(&rig, || rig.pool.alloc_for::<u8>(9 * LARGE + CHUNK, Purpose::Weight, &rig.stream).unwrap());
    assert_eq!(chunks, sizes(&[(4 * LARGE, 2), (LARGE, 1), (CHUNK, 1)]));
    drop(weights);
    nothing_left(&rig);
}

#[test]
fn small_requests_and_small_cards_have_small_chunks() {
    let rig = rig();
    let (_slices, chunks) = made(&rig, || [rig.alloc(LARGE), rig.alloc(LARGE - 1)]);
    assert_eq!(chunks, sizes(&[(CHUNK, 32)]), "many small requests are no large one");
    // A sixteenth is the least: the limit of the moment counts.
    for (limit, largest) in [(16 * LARGE, LARGE), (16 * LARGE - 1, CHUNK)] {
        let rig = limited(limit);
        let (_slice, chunks) = made(&rig, || rig.alloc(2 * LARGE));
        assert_eq!(chunks.into_iter().max(), Some(largest));
    }
    let small = Rig::with(device().memory(15 * LARGE), classed());
    let (_slice, chunks) = made(&small, || small.alloc(2 * LARGE));
    assert_eq!(chunks.into_iter().max(), Some(CHUNK));
    // Who names one size has one size.
    let plain = Rig::new(PoolMode::Vmm);
    let (_slice, chunks) = made(&plain, || plain.alloc(MANY));
    assert_eq!(chunks, sizes(&[(CHUNK, 126)]));
}

#[test]
fn the_usual_table_is_there_unless_it_is_turned_off() {
    let device = HostConfig::default().memory(1 << 30).stepped(true);
    let rig = Rig::with(device, PoolConfig::vmm());
    let (slice, chunks) = made(&rig, || rig.alloc(70 * MIB));
    assert_eq!(chunks, sizes(&[(32 * MIB, 2), (2 * MIB, 3)]));
    assert_eq!(rig.pool.chunks_for(Purpose::Scratch, 70 * MIB), Some((5, 32 * MIB)));
    assert_eq!(rig.pool.chunks_for(Purpose::Scratch, 0), Some((0, 0)));
    assert!(rig.pool.chunks_for(Purpose::Weight, usize::MAX).is_some());
    drop(slice);
    nothing_left(&rig);
    let off = Pool::new(rig.driver.clone(), PoolConfig::vmm().chunk_classes(&[])).unwrap();
    assert_eq!(off.chunks_for(Purpose::Scratch, 70 * MIB), Some((35, 2 * MIB)));
    let odd = ChunkClass { purpose: None, from_bytes: 4 * MIB, chunk_bytes: 3 * MIB };
    assert!(Pool::new(rig.driver.clone(), PoolConfig::vmm().chunk_classes(&[odd])).is_err());
}

#[test]
fn a_chunk_that_the_driver_has_not_is_made_of_smaller_ones() {
    let rig = rig();
    rig.faulty.fail_nth("create", 3);
    let (large, chunks) = made(&rig, || rig.pool.alloc::<u8>(MANY, &rig.stream));
    assert_eq!(chunks, sizes(&[(LARGE, 2), (CHUNK, 94)]), "what failed once is not asked for again");
    rig.stream.fill(&large.unwrap(), 1).unwrap();
    rig.faulty.clear();
    nothing_left(&rig);
    // Any other error is an error.
    rig.faulty.fail_from_with("create", 3, DriverErrorKind::Injected);
    assert!(!rig.pool.alloc::<u8>(MANY, &rig.stream).unwrap_err().is_out_of_memory());
    rig.faulty.clear();
    nothing_left(&rig);
    // Where nothing at all is left the pool says so, and has nothing more than before.
    rig.faulty.fail_from("create", 5);
    assert!(rig.pool.alloc::<u8>(MANY, &rig.stream).unwrap_err().is_out_of_memory());
    rig.faulty.clear();
    assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
    nothing_left(&rig);
}

#[test]
fn weights_sleep_and_wake_at_the_same_addresses() {
    for content in [Content::Keep, Content::Drop] {
        let rig = rig();
        let upload = |len: usize, seed: u32| {
            let data: Vec<u32> = (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ seed).collect();
            (rig.pool.upload(&data, Purpose::Weight, &rig.stream).unwrap(), data)
        };
        // Small ones between large ones: they share chunks with nobody's bundle.
        let tensors: Vec<_> = [700_000, 900, 300_000, 20_000, 1_200_000, 7]
            .into_iter()
            .enumerate()
            .map(|(seed, len)| upload(len, seed as u32))
            .collect();
        let (mut reader, ptr) = (rig.depends(&tensors[0].0, Use::Weight, Hold::Weak), tensors[0].0.ptr());
        assert!(reader.prove());
        let reserved = rig.pool.stats().reserved_bytes.current;
        let asleep = calls(&rig);
        assert_eq!(rig.pool.sleep(content, &[Purpose::Weight]).unwrap() as u64, reserved);
        rig.pool.check().unwrap();
        let live = rig.host.live();
        assert_eq!((live.chunks, live.mappings, live.used_bytes), (0, 0, 0));
        assert!(calls(&rig) - asleep < reserved / CHUNK as u64, "fewer calls than small chunks");
        let (back, chunks) = made(&rig, || rig.pool.wake(&[Purpose::Weight]).unwrap());
        assert_eq!(back as u64, reserved);
        assert!(chunks.contains(&LARGE) && chunks.contains(&(4 * LARGE)), "{chunks:?}");
        assert_eq!(chunks.iter().sum::<usize>() as u64, reserved);
        rig.pool.check().unwrap();
        assert_eq!(tensors[0].0.ptr(), ptr);
        if content == Content::Keep {
            for (slice, data) in &tensors {
                assert_eq!(rig.stream.download(slice).unwrap(), *data);
            }
            assert!(reader.prove() || reader.registration.reback().is_ok(), "the graph is good again");
            assert!(reader.replay(|| ()));
        }
        // What is let go next to a large one goes without it.
        let kept: Vec<_> = tensors.into_iter().skip(1).collect();
        drop(reader);
        nothing_but(&rig, kept.iter().map(|(slice, _)| slice.bytes()).sum());
        if content == Content::Keep {
            assert!(kept.iter().all(|(slice, data)| rig.stream.download(slice).unwrap() == *data));
        }
        drop(kept);
        nothing_left(&rig);
    }
}

#[test]
fn what_wakes_has_the_chunks_of_its_time() {
    let rig = limited(15 * LARGE);
    let data: Vec<u8> = (0..5 * LARGE).map(|i| (i / 77) as u8).collect();
    let (weights, chunks) = made(&rig, || rig.pool.upload(&data, Purpose::Weight, &rig.stream).unwrap());
    assert_eq!(chunks, sizes(&[(CHUNK, 80)]));
    let asleep_and_awake = |limit| {
        rig.pool.sleep(Content::Keep, &[]).unwrap();
        rig.pool.set_limit(limit);
        let ((), chunks) = made(&rig, || assert_eq!(rig.pool.wake(&[]).unwrap(), data.len()));
        rig.pool.check().unwrap();
        assert!(rig.stream.download(&weights).unwrap() == data);
        chunks
    };
    assert_eq!(asleep_and_awake(None), sizes(&[(4 * LARGE, 1), (LARGE, 1)]));
    assert_eq!(asleep_and_awake(Some(16 * LARGE)), sizes(&[(LARGE, 5)]));
    assert_eq!(asleep_and_awake(Some(15 * LARGE)), sizes(&[(CHUNK, 80)]));
    drop(weights);
    nothing_left(&rig);
}

/// All that can go goes; at most what is live and three large chunks around it stay.
fn nothing_but(rig: &Rig, live: usize) {
    rig.pool.trim_to(0).unwrap();
    rig.pool.check().unwrap();
    let reserved = rig.pool.stats().reserved_bytes.current as usize;
    assert!(reserved >= live && reserved < live + 3 * LARGE, "{reserved} for {live}");
}

#[test]
fn what_was_freed_asleep_is_not_mapped_again() {
    let rig = rig();
    let large = rig.pool.alloc_for::<u8>(4 * LARGE, Purpose::Weight, &rig.stream).unwrap();
    let kept = rig.pool.upload(&vec![5u8; LARGE + 3], Purpose::Weight, &rig.stream).unwrap();
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    drop(large);
    let back = rig.pool.wake(&[]).unwrap();
    assert!(back <= LARGE + 2 * CHUNK, "{back}");
    rig.pool.check().unwrap();
    assert!(rig.stream.download(&kept).unwrap().iter().all(|&b| b == 5));
    drop(kept);
    nothing_left(&rig);
}

#[test]
fn a_small_request_takes_a_large_free_chunk_rather_than_none() {
    // As a limit has it, and as a full device has it.
    for rig in [limited(16 * LARGE), Rig::with(device().memory(16 * LARGE), classed())] {
        let state = rig.pool.alloc_for::<u8>(16 * LARGE, Purpose::State, &rig.stream).unwrap();
        rig.stream.fill(&state, 3).unwrap();
        drop(state);
        let (one, chunks) = made(&rig, || rig.alloc(CHUNK));
        assert_eq!(chunks, [CHUNK]);
        assert_eq!(rig.faulty.count("release"), 1, "one large chunk went, no more");
        assert_eq!(rig.pool.stats().reserved_bytes.current as usize, 15 * LARGE + CHUNK);
        assert!(rig.pool.stats().reserved_bytes.peak as usize <= 16 * LARGE);
        rig.stream.fill(&one, 4).unwrap();
        rig.pool.check().unwrap();
        // The rest of it is there for the asking.
        let rest: Vec<_> = (0..15).map(|_| rig.alloc(CHUNK)).collect();
        assert_eq!(rig.faulty.count("release"), 1);
        let more = rig.alloc(15 * LARGE);
        assert!(rig.pool.alloc::<u8>(1, &rig.stream).unwrap_err().is_out_of_memory());
        assert!(rig.stream.download(&one).unwrap().iter().all(|&b| b == 4));
        drop((one, rest, more));
        nothing_left(&rig);
    }
}

#[test]
fn small_free_chunks_go_before_a_large_one() {
    let rig = limited(16 * LARGE);
    // A large chunk at high addresses, small ones below it: the last in a plain order.
    let (small, large) = (rig.alloc(LARGE), rig.alloc(15 * LARGE));
    assert!(large.ptr().0 > small.ptr().0);
    drop((small, large));
    let made_before = rig.faulty.count("create");
    let state = rig.pool.alloc_for::<u8>(5 * CHUNK, Purpose::State, &rig.stream).unwrap();
    assert_eq!((rig.faulty.count("create"), rig.faulty.count("release")), (made_before, 0), "five moved");
    assert_eq!(rig.pool.counters().stitched_bytes as usize, 5 * CHUNK);
    drop(state);
    nothing_left(&rig);
}

#[test]
fn large_chunks_move_as_they_are() {
    let rig = limited(16 * LARGE);
    let blocks: Vec<DeviceSlice<u8>> = (0..8).map(|_| rig.alloc(2 * LARGE)).collect();
    for (i, block) in blocks.iter().enumerate() {
        rig.stream.fill(block, i as u8 + 1).unwrap();
    }
    let kept: Vec<_> = blocks.into_iter().skip(1).step_by(2).collect();
    let made_before = rig.faulty.count("create");
    let unmapped = rig.faulty.count("unmap");
    let large = rig.alloc(6 * LARGE);
    assert_eq!(
        (rig.faulty.count("create"), rig.faulty.count("release")),
        (made_before, 0),
        "nothing made or given back"
    );
    assert!(rig.faulty.count("unmap") - unmapped <= 8, "whole chunks went");
    rig.stream.fill(&large, 99).unwrap();
    for (i, slice) in kept.iter().enumerate() {
        assert!(rig.stream.download(slice).unwrap().iter().all(|&b| b == 2 * i as u8 + 2), "block {i} was touched");
    }
    rig.pool.check().unwrap();
    drop((kept, large));
    nothing_left(&rig);
}

#[test]
fn a_graphs_scratch_comes_back_in_few_calls() {
    let rig = rig();
    drop(rig.alloc(MANY));
    let mut graph = rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(MANY)));
    assert!(graph.prove());
    rig.pool.trim_to(0).unwrap();
    assert_eq!(rig.pool.stats().reserved_bytes.current, 0);
    assert_eq!(graph.registration.walk().unwrap_err().bad[0].reason, BadReason::Unbacked);
    let before = calls(&rig);
    let (back, chunks) = made(&rig, || graph.registration.reback().unwrap());
    assert_eq!((back.len(), back[0].bytes), (1, MANY));
    assert_eq!(chunks, sizes(&[(LARGE, 7), (CHUNK, 14)]));
    assert_eq!(calls(&rig) - before, 2 * 21 + 1);
    assert!(graph.replay(|| rig.driver.memset_d8(back[0].ptr, 1, MANY, rig.stream.handle()).unwrap()));
    rig.pool.check().unwrap();
    drop(graph);
    nothing_left(&rig);
}

#[test]
fn part_of_a_graphs_scratch_goes_in_whole_chunks() {
    let rig = limited(16 * LARGE);
    drop(rig.alloc(4 * LARGE));
    let mut graph = rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(4 * LARGE)));
    assert!(graph.prove());
    let other = rig.alloc(12 * LARGE);
    let small = rig.alloc(3 * CHUNK);
    assert_eq!(rig.pool.counters().unbacked, 1);
    let reserved = rig.pool.stats().reserved_bytes.current as usize;
    assert_eq!(reserved, 15 * LARGE + 3 * CHUNK, "one large chunk went for three small ones");
    rig.stream.fill(&small, 1).unwrap();
    assert!(!graph.replay(|| panic!("launched without pages")));
    drop((other, small));
    let (_, chunks) = made(&rig, || graph.registration.reback().unwrap());
    assert!(chunks.is_empty(), "a free one was moved there: {chunks:?}");
    assert!(graph.replay(|| ()));
    drop(graph);
    nothing_left(&rig);
}

#[test]
fn scratch_in_a_chunk_that_somebody_else_lives_in_costs_its_graph_and_nobody_is_out_of_memory() {
    let rig = limited(16 * LARGE);
    // A tenant in each of the large chunks.
    let all = rig.alloc(16 * LARGE);
    drop(all);
    let mut tenants = Vec::new();
    let mut graphs = Vec::new();
    for _ in 0..16 {
        graphs.push(rig.graph(ScratchPolicy::Track, |_| drop(rig.alloc(LARGE - CHUNK))));
        tenants.push(rig.alloc(CHUNK));
    }
    for tenant in &tenants {
        rig.stream.fill(tenant, 6).unwrap();
    }
    rig.pool.check().unwrap();
    // Each chunk has one tenant; what the graphs hold is free for scratch once they are gone.
    let more: Vec<_> = (0..8).map(|_| rig.alloc(LARGE - CHUNK)).collect();
    assert!(more.iter().all(|slice| rig.stream.fill(slice, 1).is_ok()));
    assert!(tenants.iter().all(|tenant| rig.stream.download(tenant).unwrap().iter().all(|&b| b == 6)));
    rig.pool.check().unwrap();
    drop((graphs, tenants, more));
    nothing_left(&rig);
}

#[test]
fn a_growable_slice_grows_by_large_chunks_and_keeps_what_its_extent_ends_in() {
    let rig = limited(16 * LARGE);
    let mut slice = rig.pool.alloc_growable::<u8>(0, 64 * LARGE, Purpose::State, &rig.stream).unwrap();
    let ((), chunks) = made(&rig, || slice.grow_to(CHUNK).unwrap());
    assert_eq!(chunks, [CHUNK]);
    let ((), chunks) = made(&rig, || slice.grow_to(CHUNK + 4 * LARGE).unwrap());
    assert_eq!(chunks, sizes(&[(LARGE, 4)]));
    assert_eq!(rig.pool.stats().reserved_bytes.current as usize, CHUNK + 4 * LARGE);
    rig.driver.memset_d8(slice.ptr(), 9, slice.extent().bytes(), rig.stream.handle()).unwrap();
    // It ends in the middle of its second large chunk; two are behind it.
    slice.shrink_to(CHUNK + LARGE + LARGE / 2).unwrap();
    let other = rig.alloc(13 * LARGE);
    rig.pool.check().unwrap();
    assert!(rig.pool.stats().reserved_bytes.current as usize <= 16 * LARGE);
    let mut there = vec![0; slice.len()];
    rig.stream.download_into(&slice, &mut there).unwrap();
    assert!(there.iter().all(|&b| b == 9), "what the extent covers was taken");
    rig.stream.fill(&other, 1).unwrap();
    assert!(rig.pool.alloc::<u8>(LARGE, &rig.stream).unwrap_err().is_out_of_memory());
    drop(other);
    slice.grow_to(8 * LARGE).unwrap();
    rig.driver.memset_d8(slice.ptr(), 8, slice.extent().bytes(), rig.stream.handle()).unwrap();
    rig.pool.check().unwrap();
    drop(slice);
    nothing_left(&rig);
}

#[test]
fn one_live_at_a_time_holds_no_more_than_the_largest() {
    let steps: Vec<usize> = (1..=40).map(|k| k * LARGE / 4).collect();
    let orders: [Vec<usize>; 3] =
        [steps.clone(), steps.iter().rev().copied().collect(), (0..40).map(|i| steps[i * 17 % 40]).collect()];
    for order in orders {
        let rig = rig();
        let mut largest = 0;
        for bytes in order {
            rig.stream.fill(&rig.alloc(bytes), 1).unwrap();
            largest = largest.max(bytes);
            let reserved = rig.pool.stats().reserved_bytes.peak as usize;
            assert!(reserved <= largest + CHUNK, "{reserved} bytes for {largest}");
        }
        nothing_left(&rig);
    }
}

#[test]
fn what_can_go_at_once_is_reported_by_whole_chunks() {
    let rig = rig();
    let large = rig.alloc(2 * LARGE);
    let base = large.ptr();
    drop(large);
    let small = rig.alloc(100);
    assert_eq!(small.ptr(), base, "it lives in the first large chunk");
    assert_eq!(rig.pool.report().cached_bytes, LARGE);
    assert_eq!(rig.pool.trim_to(0).unwrap(), LARGE);
    assert_eq!(rig.pool.report().cached_bytes, 0);
    rig.stream.fill(&small, 1).unwrap();
    drop(small);
    nothing_left(&rig);
}

#[test]
fn random_owners_of_all_sizes_keep_their_bytes() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below as u64) as usize
    };
    for limit in [16 * LARGE, 24 * LARGE, 40 * LARGE] {
        let rig = limited(limit);
        let mut live: Vec<(DeviceSlice<u8>, u8)> = Vec::new();
        let mut graphs = Vec::new();
        let (mut served, mut refused) = (0, 0);
        for step in 0..350u32 {
            let purpose = Purpose::ALL[random(3)];
            match random(20) {
                0..10 => {
                    let most = [CHUNK / 2, 4 * CHUNK, 2 * LARGE, 5 * LARGE][random(4)];
                    let bytes = 1 + random(most);
                    match rig.pool.alloc_for::<u8>(bytes, purpose, &rig.stream) {
                        Ok(slice) => {
                            rig.stream.fill(&slice, step as u8).unwrap();
                            live.push((slice, step as u8));
                            served += 1;
                        }
                        Err(error) => {
                            assert!(error.is_out_of_memory(), "{error}");
                            refused += 1;
                        }
                    }
                }
                10..15 if !live.is_empty() => {
                    let (slice, value) = live.swap_remove(random(live.len()));
                    assert!(rig.stream.download(&slice).unwrap().iter().all(|&b| b == value), "step {step}");
                }
                15 => {
                    let bytes = 1 + random(3 * LARGE);
                    if rig.pool.reserve(bytes, Purpose::Scratch, &rig.stream).is_ok() {
                        let shared = |_: &_| drop(rig.pool.alloc::<u8>(bytes, &rig.stream));
                        graphs.push(rig.graph(ScratchPolicy::Track, shared));
                    }
                    if graphs.len() > 4 {
                        graphs.swap_remove(random(5));
                    }
                }
                16 => {
                    rig.pool.trim_to(random(limit)).unwrap();
                }
                17 => {
                    rig.pool.sleep(Content::Keep, &[purpose]).unwrap();
                    if let Some(gone) = live.iter().position(|(slice, _)| slice.purpose() == purpose) {
                        drop(live.swap_remove(gone));
                    }
                    rig.pool.wake(&[]).unwrap();
                }
                _ => {
                    for graph in &mut graphs {
                        let _ = graph.registration.reback();
                    }
                }
            }
            assert!(rig.pool.stats().reserved_bytes.current as usize <= limit);
            rig.pool.check().unwrap_or_else(|e| panic!("step {step}: {e}"));
        }
        assert!(served > 60 && refused > 0, "{served} served, {refused} refused");
        assert!(live.iter().all(|(slice, value)| rig.stream.download(slice).unwrap().iter().all(|b| b == value)));
        drop((live, graphs));
        nothing_left(&rig);
    }
}
