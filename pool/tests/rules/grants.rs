//! Memory that another device may touch: granted once, kept by everything that brings pages.

use std::sync::Arc;

use evergraph_pool::driver::host::{HostDevice, HostMachine};
use evergraph_pool::driver::{DevicePtr, DriverErrorKind, DynDriver, Faulty, VirtualMachine};
use evergraph_pool::{Content, DeviceSlice, Pool, PoolError, PoolMode, Purpose, ScratchPolicy, Stream, Use};

use crate::common::*;

/// Two devices: two host devices, or two virtual ones of one. The pool is on the first.
struct Pair {
    faulty: Arc<Faulty>,
    near: DynDriver,
    far: DynDriver,
    pool: Pool,
    stream: Stream,
    far_stream: Stream,
    landing: DevicePtr,
}

fn pairs(story: impl Fn(&Pair)) {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        for is_virtual in [false, true] {
            eprintln!("-- {mode}, virtual devices: {is_virtual}");
            story(&Pair::new(mode, is_virtual, 8 * CHUNK));
        }
    }
}

impl Pair {
    fn new(mode: PoolMode, is_virtual: bool, limit_bytes: usize) -> Self {
        let (near, far): (DynDriver, DynDriver) = if is_virtual {
            let one: DynDriver = HostDevice::new(device()).unwrap();
            let devices = VirtualMachine::new(&[one], 2).unwrap();
            (devices[0].clone(), devices[1].clone())
        } else {
            let devices = HostMachine::new(2, device()).unwrap();
            (devices[0].clone(), devices[1].clone())
        };
        let faulty = Faulty::new(near);
        let near: DynDriver = faulty.clone();
        near.bind().unwrap();
        let pool = Pool::new(near.clone(), config(mode).smallest_slab(CHUNK).limit(limit_bytes)).unwrap();
        let stream = Stream::new(&near).unwrap();
        let far_stream = Stream::new(&far).unwrap();
        far.bind().unwrap();
        let landing = far.malloc(64).unwrap();
        Self { faulty, near, far, pool, stream, far_stream, landing }
    }

    fn slice(&self, bytes: usize, purpose: Purpose) -> DeviceSlice<u8> {
        let slice = self.pool.alloc_for(bytes, purpose, &self.stream).unwrap();
        self.stream.fill(&slice, 7).unwrap();
        self.stream.synchronize().unwrap();
        slice
    }

    /// The far device reads the first and the last bytes of a range.
    fn reach(&self, ptr: DevicePtr, bytes: usize) -> Result<(), DriverErrorKind> {
        for at in [ptr, DevicePtr(ptr.0 + bytes as u64 - 64)] {
            self.far.bind().unwrap();
            let stream = self.far_stream.handle();
            let copied = self.far.memcpy_dtod(self.landing, at, 64, stream);
            copied.and_then(|()| self.far.stream_synchronize(stream)).map_err(|error| error.kind)?;
        }
        Ok(())
    }

    fn reach_slice(&self, slice: &DeviceSlice<u8>) -> Result<(), DriverErrorKind> {
        self.reach(slice.ptr(), slice.bytes())
    }
}

#[test]
fn what_was_not_granted_is_out_of_reach() {
    pairs(|pair| {
        let state = pair.slice(CHUNK, Purpose::State);
        let far = pair.far.info().ordinal;
        assert!(!pair.pool.is_granted(far, Purpose::State));
        let kind = pair.reach_slice(&state).unwrap_err();
        assert!(matches!(kind, DriverErrorKind::Foreign(_) | DriverErrorKind::Fault(_)), "{kind}");
    });
}

#[test]
fn a_grant_is_for_a_purpose() {
    for is_virtual in [false, true] {
        let pair = Pair::new(PoolMode::Vmm, is_virtual, 8 * CHUNK);
        let (state, weight) = (pair.slice(CHUNK, Purpose::State), pair.slice(CHUNK, Purpose::Weight));
        pair.pool.grant(&pair.far, &[Purpose::State]).unwrap();
        let far = pair.far.info().ordinal;
        assert!(pair.pool.is_granted(far, Purpose::State) && !pair.pool.is_granted(far, Purpose::Weight));
        assert!(pair.pool.is_granted(pair.near.info().ordinal, Purpose::Weight));
        pair.reach_slice(&state).unwrap();
        assert!(pair.reach_slice(&weight).is_err());
    }
}

#[test]
fn a_grant_is_kept_by_whatever_brings_pages() {
    pairs(|pair| {
        let vmm = pair.pool.mode() == PoolMode::Vmm;
        let before = pair.slice(CHUNK, Purpose::Scratch);
        pair.pool.grant(&pair.far, &[]).unwrap();
        pair.reach_slice(&before).unwrap();
        // Growth.
        let grown = pair.slice(2 * CHUNK, Purpose::Scratch);
        pair.reach_slice(&grown).unwrap();
        // Given back, and taken again.
        drop((before, grown));
        pair.pool.trim_to(0).unwrap();
        let again = pair.slice(2 * CHUNK, Purpose::Scratch);
        pair.reach_slice(&again).unwrap();
        drop(again);
        // A slice that grows in place.
        let mut growing = pair.pool.alloc_growable::<u8>(CHUNK, 3 * CHUNK, Purpose::State, &pair.stream).unwrap();
        growing.grow_to(3 * CHUNK).unwrap();
        pair.reach(growing.ptr(), 3 * CHUNK).unwrap();
        drop(growing);
        if !vmm {
            return;
        }
        // Stitch: the pages of two places under one range.
        pair.pool.trim_to(0).unwrap();
        let mut singles: Vec<_> = (0..8).map(|_| pair.slice(CHUNK, Purpose::Scratch)).collect();
        let moved = pair.pool.counters().stitches;
        drop((singles.remove(5), singles.remove(2)));
        pair.stream.synchronize().unwrap();
        let stitched = pair.slice(2 * CHUNK, Purpose::Scratch);
        assert!(pair.pool.counters().stitches > moved, "the story needs a stitch");
        pair.reach_slice(&stitched).unwrap();
        drop((singles, stitched));
        // Sleep and wake.
        pair.pool.trim_to(0).unwrap();
        let state = pair.slice(CHUNK, Purpose::State);
        pair.pool.sleep(Content::Keep, &[]).unwrap();
        assert!(pair.pool.grant(&pair.far, &[]).is_ok(), "granted already, asleep or not");
        pair.pool.wake(&[]).unwrap();
        pair.reach_slice(&state).unwrap();
        // Remap: pages back under a graph's scratch.
        let mut scratch = None;
        pair.pool.reserve(CHUNK, Purpose::Scratch, &pair.stream).unwrap();
        let mut graph = TestGraph::capture(&pair.pool, &pair.stream, ScratchPolicy::Track, |_| {
            scratch = Some(pair.pool.alloc::<u8>(CHUNK, &pair.stream).unwrap().ptr());
        })
        .unwrap();
        assert!(graph.replay(|| ()));
        pair.pool.trim_to(0).unwrap();
        assert!(!graph.replay(|| ()));
        graph.registration.reback().unwrap();
        pair.reach(scratch.unwrap(), CHUNK).unwrap();
        pair.pool.check().unwrap();
    });
}

/// New pages come by whoever asks for memory, whatever device is current there.
#[test]
fn a_grant_is_made_and_kept_from_any_thread() {
    pairs(|pair| {
        let state = pair.slice(CHUNK, Purpose::State);
        std::thread::scope(|scope| {
            // Nothing is current on a fresh thread.
            scope.spawn(|| pair.pool.grant(&pair.far, &[]).unwrap()).join().unwrap();
        });
        pair.reach_slice(&state).unwrap();
        let grown = std::thread::scope(|scope| {
            let grow = || {
                pair.far.bind().unwrap();
                pair.slice(3 * CHUNK, Purpose::State)
            };
            scope.spawn(grow).join().unwrap()
        });
        pair.reach_slice(&grown).unwrap();
    });
}

#[test]
fn a_grant_that_fails_is_none_and_can_be_made_again() {
    let pair = Pair::new(PoolMode::Vmm, false, 8 * CHUNK);
    let (state, scratch) = (pair.slice(CHUNK, Purpose::State), pair.slice(CHUNK, Purpose::Scratch));
    pair.faulty.fail_nth("set_access", 2);
    assert!(pair.pool.grant(&pair.far, &[]).is_err());
    let far = pair.far.info().ordinal;
    assert!(Purpose::ALL.iter().all(|purpose| !pair.pool.is_granted(far, *purpose)));
    pair.pool.grant(&pair.far, &[]).unwrap();
    pair.reach_slice(&state).unwrap();
    pair.reach_slice(&scratch).unwrap();
    // A page that could not be opened to all is none.
    let reserved = pair.pool.stats().reserved_bytes.current;
    pair.faulty.fail_from("set_access", 1);
    assert!(pair.pool.alloc_for::<u8>(4 * CHUNK, Purpose::Weight, &pair.stream).is_err());
    assert_eq!(pair.pool.stats().reserved_bytes.current, reserved);
    pair.pool.check().unwrap();
}

#[test]
fn a_grant_needs_a_way_and_no_capture() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let devices = HostMachine::new(2, device().peers(false)).unwrap();
        let (near, far): (DynDriver, DynDriver) = (devices[0].clone(), devices[1].clone());
        near.bind().unwrap();
        let pool = Pool::new(near.clone(), config(mode)).unwrap();
        let error = pool.grant(&far, &[]).unwrap_err();
        assert!(matches!(error, PoolError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("device 1 can not reach the memory of device 0"), "{error}");
        pool.grant(&near, &[]).unwrap();
        let stream = Stream::new(&near).unwrap();
        let (node, _) = Node::new(&stream, 1);
        let _window = pool.begin_window(node, ScratchPolicy::Pin).unwrap();
        assert!(matches!(pool.grant(&far, &[]), Err(PoolError::Capturing { .. })));
    }
}

/// A graph that rests on a grant is a dependent like any other, on pages too: it notices new ones.
#[test]
fn a_graph_of_the_other_device_notices_new_pages() {
    let pair = Pair::new(PoolMode::Vmm, false, 8 * CHUNK);
    let state = pair.slice(CHUNK, Purpose::State);
    pair.pool.grant(&pair.far, &[]).unwrap();
    let (node, mut launcher) = Node::new(&pair.far_stream, 1);
    let window = pair.pool.begin_declarations(node).unwrap();
    declare(&window, &state, Use::State, evergraph_pool::Hold::Weak);
    let registration = window.finish().unwrap();
    let proven = registration.walk().unwrap();
    let epoch = registration.epoch().clone();
    assert!(launcher.launch([(&*epoch, proven)], 1, || ()).is_some());
    pair.pool.sleep(Content::Keep, &[Purpose::State]).unwrap();
    pair.pool.wake(&[Purpose::State]).unwrap();
    assert!(launcher.launch([(&*epoch, proven)], 2, || ()).is_none(), "other pages: proven no more");
    let stale = registration.walk().unwrap_err();
    assert!(stale.is_remap(), "{stale}");
    registration.reback().unwrap();
    let proven = registration.walk().unwrap();
    assert!(launcher.launch([(&*epoch, proven)], 3, || pair.reach_slice(&state).unwrap()).is_some());
}
