//! Stories of several devices.
#![allow(unsafe_code)]

use super::rig::{GRANULE, Rig, kind, refused};
use super::stories;
use crate::driver::host::HostConfig;
use crate::driver::{
    Args, CaptureMode, DeviceOrdinal, DevicePtr, DriverErrorKind, DynDriver, LaunchConfig, StreamHandle,
};

const HERE: DeviceOrdinal = DeviceOrdinal(0);
const THERE: DeviceOrdinal = DeviceOrdinal(1);

/// Words of plain memory on device 1, and a stream of it.
fn there(rig: &Rig, value: u32) -> (DevicePtr, StreamHandle) {
    rig.peer.bind().unwrap();
    let (ptr, stream) = (rig.peer.malloc(64).unwrap(), rig.peer.stream_create(0).unwrap());
    rig.peer.memset_d32(ptr, value, 16, stream).unwrap();
    rig.peer.stream_synchronize(stream).unwrap();
    rig.driver.bind().unwrap();
    (ptr, stream)
}

stories! { in peers as conformance_peers;

    /// A kernel may not touch plain memory of another device before peer access is on.
    fn plain_memory_of_a_peer_needs_peer_access(rig) {
        let (ptr, _) = there(rig, 3);
        let stream = rig.stream();
        let queued = rig.try_launch("peek", Args::new().ptr(ptr).u32(4), stream);
        let words = "malloc of 64 bytes of device 1, no access for device 0";
        rig.expect_foreign(queued, (&rig.driver, stream), "peek", (ptr, words));
    }

    /// Peer access is one way, switched on once, and not for oneself.
    fn peer_access_is_one_way(rig) {
        let (ptr, stream) = there(rig, 3);
        let here = rig.words(16, 0);
        assert!(rig.driver.can_access_peer(THERE).unwrap());
        assert!(!rig.driver.can_access_peer(HERE).unwrap());
        assert!(matches!(kind(rig.driver.can_access_peer(DeviceOrdinal(9))), DriverErrorKind::InvalidValue(_)));
        rig.driver.enable_peer_access(THERE).unwrap();
        assert!(matches!(kind(rig.driver.enable_peer_access(THERE)), DriverErrorKind::Other { code: 704, .. }));
        assert!(rig.driver.enable_peer_access(HERE).is_err());
        let own = rig.stream();
        rig.add(here, ptr, 16, 1, own);
        rig.wait(own);
        assert_eq!(rig.read(here, 16), [4; 16]);
        rig.peer.bind().unwrap();
        let queued = rig.peer.memcpy_dtod(ptr, here, 64, stream);
        if rig.body.is_cuda() && !rig.body.is_virtual() {
            // On hardware copies find their way without peer access; kernels do not.
            queued.and_then(|()| rig.peer.stream_synchronize(stream)).unwrap();
        } else {
            let words = "malloc of 64 bytes of device 0, no access for device 1";
            rig.expect_foreign(queued, (&rig.peer, stream), "memcpy_dtod", (here, words));
        }
        rig.driver.bind().unwrap();
        assert_eq!(rig.driver.fault(), None);
    }

    /// Ranges are granted device by device, by set-access.
    fn a_range_is_granted_by_set_access(rig) {
        let ptr = rig.mapped(GRANULE);
        rig.set(ptr, 16, 5);
        let (dst, stream) = there(rig, 0);
        rig.driver.set_access(ptr, GRANULE, &[THERE]).unwrap();
        rig.peer.bind().unwrap();
        rig.peer.memcpy_dtod(dst, ptr, 64, stream).unwrap();
        rig.peer.stream_synchronize(stream).unwrap();
        rig.driver.bind().unwrap();
        rig.driver.enable_peer_access(THERE).unwrap();
        assert_eq!(rig.read(dst, 16), [5; 16]);
        // Peer access is for plain memory: it does not open ranges.
        let other = rig.mapped(GRANULE);
        rig.peer.bind().unwrap();
        rig.peer.enable_peer_access(HERE).unwrap();
        let queued = rig.peer.memcpy_dtod(dst, other, 64, stream);
        if rig.body.is_cuda() && !rig.body.is_virtual() {
            refused(queued); // hardware looks at once
        } else {
            rig.expect_foreign(queued, (&rig.peer, stream), "memcpy_dtod", (other, "of device 0, no access for device 1"));
        }
        rig.driver.bind().unwrap();
        assert!(rig.driver.set_access(ptr, GRANULE, &[]).is_err());
        assert!(rig.driver.set_access(ptr, GRANULE, &[DeviceOrdinal(9)]).is_err());
    }

    /// A peer copy needs no peer access: it names both devices.
    fn a_peer_copy_needs_no_peer_access(rig) {
        let (far, _) = there(rig, 0);
        let near = rig.words(16, 0);
        let stream = rig.stream();
        for value in [1, 2, 3] {
            rig.fill(near, 16, value, stream);
            rig.driver.memcpy_peer(far, THERE, near, HERE, 64, stream).unwrap();
            rig.fill(near, 16, 0, stream);
            rig.driver.memcpy_peer(near, HERE, far, THERE, 32, stream).unwrap();
            rig.wait(stream);
            assert_eq!(rig.read(near, 9), [[value; 8].as_slice(), &[0]].concat());
        }
    }

    /// And is blamed where it names the wrong one.
    fn a_peer_copy_that_names_the_wrong_device_is_a_fault(rig) {
        let (far, _) = there(rig, 0);
        let near = rig.words(16, 0);
        let stream = rig.stream();
        rig.driver.enable_peer_access(THERE).unwrap();
        assert!(matches!(
            kind(rig.driver.memcpy_peer(far, DeviceOrdinal(7), near, HERE, 64, stream)),
            DriverErrorKind::InvalidValue(_)
        ));
        let queued = rig.driver.memcpy_peer(near, HERE, far, HERE, 64, stream);
        let words = "memory of device 1, named as device 0";
        rig.expect_foreign(queued, (&rig.driver, stream), "memcpy_peer", (far, words));
    }

    /// Machines without a link: no peer access at all, peer copies still work.
    fn a_machine_may_have_no_links(rig) {
        let apart = rig.like(HostConfig::default().memory(64 << 20).granularity(GRANULE).peers(false));
        assert!(!apart.driver.can_access_peer(THERE).unwrap());
        assert_eq!(kind(apart.driver.enable_peer_access(THERE)), DriverErrorKind::PeerAccess);
        let ptr = apart.mapped(GRANULE);
        assert_eq!(kind(apart.driver.set_access(ptr, GRANULE, &[THERE])), DriverErrorKind::PeerAccess);
        let (far, _) = there(&apart, 6);
        let near = apart.words(16, 0);
        let stream = apart.stream();
        apart.driver.memcpy_peer(near, HERE, far, THERE, 64, stream).unwrap();
        apart.wait(stream);
        assert_eq!(apart.read(near, 16), [6; 16]);
    }

    /// What is mapped at a granted address later is not granted: pages come without access.
    fn new_pages_need_a_grant_of_their_own(rig) {
        let ptr = rig.driver.address_reserve(2 * GRANULE, 0, None).unwrap();
        let map = |at: DevicePtr| {
            let chunk = rig.driver.create(GRANULE).unwrap();
            rig.driver.map(at, GRANULE, 0, chunk).unwrap();
            rig.driver.set_access(at, GRANULE, &[HERE]).unwrap();
            rig.driver.release(chunk).unwrap();
        };
        let second = ptr.checked_add(GRANULE).unwrap();
        map(ptr);
        rig.driver.set_access(ptr, GRANULE, &[HERE, THERE]).unwrap();
        map(second);
        rig.set(second, 16, 9);
        let (dst, stream) = there(rig, 0);
        rig.driver.set_access(second, GRANULE, &[THERE]).unwrap();
        rig.peer.bind().unwrap();
        rig.peer.memcpy_dtod(dst, second, 64, stream).unwrap();
        rig.peer.stream_synchronize(stream).unwrap();
        rig.driver.bind().unwrap();
        // Other pages under the same address.
        rig.driver.unmap(second, GRANULE).unwrap();
        map(second);
        rig.peer.bind().unwrap();
        // From the granted page into the new one.
        let last = ptr.checked_add(GRANULE - 32).unwrap();
        let queued = rig.peer.memcpy_dtod(dst, last, 64, stream);
        if rig.body.is_cuda() && !rig.body.is_virtual() {
            refused(queued);
        } else {
            let words = "of device 0, no access for device 1";
            rig.expect_foreign(queued, (&rig.peer, stream), "memcpy_dtod", (second, words));
        }
    }

    /// One past the end is an address that kernels are given, wherever the other device's memory begins.
    fn the_end_of_ones_own_memory_is_no_access(rig) {
        let stream = rig.stream();
        let mut ends = vec![rig.mapped(GRANULE).checked_add(GRANULE).unwrap()];
        for _ in 0..8 {
            ends.push(rig.driver.malloc(512).unwrap().checked_add(512).unwrap());
            rig.peer.bind().unwrap();
            let _ = rig.peer.malloc(512).unwrap();
            rig.driver.bind().unwrap();
        }
        for end in ends {
            rig.launch("peek", Args::new().ptr(end).u32(0), stream);
        }
        rig.wait(stream);
        assert_eq!(rig.driver.fault(), None);
    }

    /// And the start of the other's memory is an access, wherever one's own ends.
    fn the_start_of_a_peers_memory_is_no_end_of_ones_own(rig) {
        let _ = rig.driver.malloc(512).unwrap();
        rig.peer.bind().unwrap();
        let ptr = rig.peer.malloc(512).unwrap();
        rig.driver.bind().unwrap();
        let stream = rig.stream();
        let queued = rig.try_launch("peek", Args::new().ptr(ptr).u32(4), stream);
        let words = "malloc of 512 bytes of device 1, no access for device 0";
        rig.expect_foreign(queued, (&rig.driver, stream), "peek", (ptr, words));
    }

    /// Two threads with a device each capture and replay at the same time; neither sees the other's current device.
    fn each_thread_has_its_own_current_device(rig) {
        let there = rig.peer.clone();
        let work = |driver: &DynDriver, value: u32| {
            driver.bind().unwrap();
            let module = driver.module_load(rig.kernels()).unwrap();
            let step = driver.function(module, "step").unwrap();
            let (ptr, stream) = (driver.malloc(64).unwrap(), driver.stream_create(0).unwrap());
            driver.memset_d32(ptr, value, 1, stream).unwrap();
            let mut args = Args::new();
            args.ptr(ptr);
            for _ in 0..20 {
                driver.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
                for _ in 0..5 {
                    // SAFETY: `step` takes a pointer to a live word.
                    unsafe {
                        driver.launch_kernel(step, &LaunchConfig::linear(1, 1), args.as_bytes(), stream).unwrap();
                    }
                }
                let graph = driver.end_capture(stream).unwrap();
                let exec = driver.instantiate(graph).unwrap();
                driver.launch(exec, stream).unwrap();
                driver.stream_synchronize(stream).unwrap();
                driver.exec_destroy(exec).unwrap();
                driver.graph_destroy(graph).unwrap();
            }
            let mut word = 0u32;
            // SAFETY: `word` outlives the copy, which the wait ends.
            unsafe { driver.memcpy_dtoh((&raw mut word).cast(), ptr, 4, stream).unwrap() };
            driver.stream_synchronize(stream).unwrap();
            assert_eq!(word, value + 100);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| work(&there, 1000));
            work(&rig.driver, 7);
        });
    }

    /// Memory is counted on the device that made it.
    fn each_device_has_its_own_memory(rig) {
        let before = rig.driver.mem_info().unwrap();
        let _far = there(rig, 0);
        assert_eq!(rig.driver.mem_info().unwrap(), before);
        rig.peer.bind().unwrap();
        let info = rig.peer.mem_info().unwrap();
        assert_eq!(info.total_bytes - info.free_bytes, 512);
    }
}
