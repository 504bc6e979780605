//! Stories of streams: order, independence, host functions, life and handles.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::rig::{Body, Rig, kind, refused};
use super::stories;
use crate::driver::{Args, CaptureMode, DriverErrorKind, HostCallback, StreamHandle};

stories! { in streams as conformance_streams;

    /// One stream stuck does not stop another.
    fn streams_do_not_wait_for_each_other(rig) {
        let (stuck, free) = (rig.stream(), rig.stream());
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        rig.hold(stuck);
        rig.fill(a, 4, 1, stuck);
        rig.fill(b, 4, 2, free);
        rig.wait(free);
        assert_eq!(rig.read(a, 4), [0; 4]);
        assert_eq!(rig.read(b, 4), [2; 4]);
        assert!(!rig.driver.stream_query(stuck).unwrap());
        rig.open();
        rig.wait(stuck);
        assert!(rig.driver.stream_query(stuck).unwrap());
        assert_eq!(rig.read(a, 4), [1; 4]);
    }

    /// A stream runs its work in order.
    fn a_stream_runs_in_order(rig) {
        let stream = rig.stream();
        let order = Arc::new(Mutex::new(Vec::new()));
        for i in 0..100 {
            let order = order.clone();
            rig.driver.launch_host_fn(stream, HostCallback::new(move || order.lock().push(i))).unwrap();
        }
        rig.wait(stream);
        assert_eq!(*order.lock(), (0..100).collect::<Vec<_>>());
    }

    /// Polling gets there.
    fn polling_ends(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        for value in 0..3 {
            rig.fill(ptr, 4, value, stream);
        }
        while !rig.driver.stream_query(stream).unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(rig.read(ptr, 4), [2; 4]);
    }

    /// Waiting for the device waits for all its streams, destroyed ones included.
    fn a_device_wait_waits_for_every_stream(rig) {
        let ptrs = [rig.words(4, 0), rig.words(4, 0)];
        let streams = [rig.stream(), rig.stream()];
        for (ptr, stream) in ptrs.into_iter().zip(streams) {
            rig.fill(ptr, 4, 8, stream);
        }
        rig.driver.stream_destroy(streams[1]).unwrap();
        rig.driver.synchronize().unwrap();
        assert_eq!(rig.read(ptrs[0], 4), [8; 4]);
        assert_eq!(rig.read(ptrs[1], 4), [8; 4]);
    }

    /// Destroying a stream leaves its queue to complete.
    fn a_destroyed_stream_completes_its_work(rig) {
        let stream = rig.stream();
        let event = rig.event();
        let ptr = rig.words(4, 0);
        rig.hold(stream);
        rig.fill(ptr, 4, 3, stream);
        rig.driver.event_record(event, stream).unwrap();
        rig.driver.stream_destroy(stream).unwrap();
        assert!(!rig.driver.event_query(event).unwrap());
        rig.open();
        rig.driver.event_synchronize(event).unwrap();
        assert_eq!(rig.read(ptr, 4), [3; 4]);
    }

    /// A destroyed stream's handle is the next stream's; its id never comes back.
    fn a_stream_handle_comes_back_but_its_id_does_not(rig) {
        let first = rig.stream();
        let id = rig.driver.stream_id(first).unwrap();
        rig.driver.stream_destroy(first).unwrap();
        if rig.tracks_handles() {
            assert!(matches!(kind(rig.driver.stream_query(first)), DriverErrorKind::InvalidHandle(_)));
            assert!(matches!(kind(rig.driver.stream_destroy(first)), DriverErrorKind::InvalidHandle(_)));
        }
        let second = rig.stream();
        assert_eq!(first, second);
        assert_ne!(rig.driver.stream_id(second).unwrap(), id);
    }

    /// A new stream under an old handle does not inherit the old one's queue.
    fn a_reused_stream_handle_is_another_stream(rig) {
        let old = rig.stream();
        let ptr = rig.words(4, 0);
        rig.hold(old);
        rig.fill(ptr, 4, 1, old);
        rig.driver.stream_destroy(old).unwrap();
        let new = rig.stream();
        assert_eq!(old, new);
        assert!(rig.driver.stream_query(new).unwrap());
        rig.wait(new);
        assert_eq!(rig.read(ptr, 4), [0; 4]);
        rig.open();
        rig.driver.synchronize().unwrap();
        assert_eq!(rig.read(ptr, 4), [1; 4]);
    }

    /// Kernel arguments are taken at the launch; copies read their source when they run.
    fn arguments_are_taken_at_launch_and_copies_read_late(rig) {
        let stream = rig.stream();
        let (ptr, dst) = (rig.words(4, 0), rig.words(4, 0));
        let source = rig.driver.host_alloc(16).unwrap();
        // SAFETY: pinned, 16 bytes, written only here and before the copy may run.
        let words = unsafe { std::slice::from_raw_parts_mut(source.as_ptr().cast::<u32>(), 4) };
        words.fill(1);
        rig.hold(stream);
        let mut args = Args::new();
        args.ptr(ptr).u32(4).u32(11);
        rig.launch("fill", &args, stream);
        args = Args::new();
        args.ptr(ptr).u32(4).u32(99);
        drop(args);
        // SAFETY: `source` stays pinned until the wait.
        unsafe { rig.driver.memcpy_htod(dst, source.as_ptr(), 16, stream).unwrap() };
        words.fill(2);
        rig.open();
        rig.wait(stream);
        assert_eq!(rig.read(ptr, 4), [11; 4]);
        assert_eq!(rig.read(dst, 4), [2; 4]);
    }

    /// A host function may not call the driver, not even on another device.
    fn a_host_function_may_not_call_the_driver(rig) {
        let stream = rig.stream();
        let refused = Arc::new(AtomicUsize::new(0));
        let (driver, count) = (Arc::downgrade(&rig.driver), refused.clone());
        let callback = HostCallback::new(move || {
            let driver = driver.upgrade().unwrap();
            for refused in [kind(driver.bind()), kind(driver.malloc(4))] {
                if matches!(refused, DriverErrorKind::NotSupported(_)) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        rig.driver.launch_host_fn(stream, callback).unwrap();
        rig.wait(stream);
        assert_eq!(refused.load(Ordering::Relaxed), 2);
        rig.driver.malloc(4).unwrap();
    }

    /// A callback is dropped once it ran, and not under the driver's lock.
    fn a_callback_is_dropped_after_it_ran(rig) {
        struct Caller(crate::driver::DynDriver, Arc<AtomicUsize>);
        impl Drop for Caller {
            fn drop(&mut self) {
                // A destructor that calls in would hang if the machine's lock were held.
                let _ = self.0.as_host().map(crate::driver::host::HostDevice::live);
                self.1.fetch_add(1, Ordering::Release);
            }
        }
        fn keep(_: &Caller) {}
        let drops = Arc::new(AtomicUsize::new(0));
        let stream = rig.stream();
        let caller = Caller(rig.driver.clone(), drops.clone());
        rig.driver.launch_host_fn(stream, HostCallback::new(move || keep(&caller))).unwrap();
        rig.wait(stream);
        let caller = Caller(rig.driver.clone(), drops.clone());
        let graph = rig.capture(stream, || {
            rig.driver.launch_host_fn(stream, HostCallback::new(move || keep(&caller))).unwrap();
        });
        rig.driver.graph_destroy(graph).unwrap();
        while drops.load(Ordering::Acquire) < 2 {
            std::thread::yield_now();
        }
    }

    /// The device must be current on the thread, for every call but bind, info and fault.
    fn calls_need_the_device_current(rig) {
        let ptr = rig.words(4, 0);
        let stream = rig.stream();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let wrong = |kind| kind == DriverErrorKind::InvalidContext;
                assert!(wrong(kind(rig.driver.malloc(4))));
                if !rig.body.is_cuda() || rig.body.is_virtual() {
                    // Hardware takes the context from the handle where there is one.
                    assert!(wrong(kind(rig.driver.free(ptr))));
                    assert!(wrong(kind(rig.driver.stream_synchronize(stream))));
                    assert!(wrong(kind(rig.driver.function(rig.module, "fill"))));
                    assert!(wrong(kind(rig.driver.memset_d8(ptr, 0, 4, stream))));
                    assert_eq!(rig.driver.fault(), None);
                    // And does not know which object a call came through: what it allocates is the current device's.
                    rig.peer.bind().unwrap();
                    assert!(wrong(kind(rig.driver.malloc(4))));
                    rig.driver.bind().unwrap();
                    assert!(wrong(kind(rig.peer.malloc(4))));
                }
                rig.driver.bind().unwrap();
                rig.fill(ptr, 4, 1, stream);
            });
        });
        rig.wait(stream);
    }

    /// A stream or event of one device is not one of another.
    fn handles_belong_to_their_device(rig) {
        let (stream, event) = (rig.stream(), rig.event());
        rig.peer.bind().unwrap();
        let ptr = rig.peer.malloc(4).unwrap();
        assert!(matches!(kind(rig.peer.memset_d8(ptr, 0, 4, stream)), DriverErrorKind::InvalidHandle(_)));
        let own = rig.peer.stream_create(0).unwrap();
        assert!(matches!(kind(rig.peer.event_record(event, own)), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.peer.free(rig.flag_ptr())), DriverErrorKind::InvalidValue(_)));
    }

    /// A handle of another kind is not a handle.
    fn a_handle_of_another_kind_is_refused(rig) {
        let event = rig.event();
        assert!(matches!(kind(rig.driver.stream_query(StreamHandle(event.0))), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.driver.stream_query(StreamHandle(0))), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.driver.stream_query(StreamHandle(u64::MAX))), DriverErrorKind::InvalidHandle(_)));
    }

    /// Copying or setting nothing is fine, whatever the pointers say.
    fn nothing_can_be_copied_from_anywhere(rig) {
        use crate::driver::DevicePtr;
        let stream = rig.stream();
        rig.driver.memcpy_dtod(DevicePtr::NULL, DevicePtr(1), 0, stream).unwrap();
        rig.driver.memset_d8(DevicePtr::NULL, 1, 0, stream).unwrap();
        rig.driver.memset_d32(DevicePtr::NULL, 1, 0, stream).unwrap();
        rig.wait(stream);
        let ptr = rig.words(4, 0);
        refused(rig.driver.memset_d32(DevicePtr(ptr.0 + 1), 1, 1, stream));
        refused(rig.driver.memset_d32(ptr, 1, usize::MAX, stream));
    }

    /// Two machines of one process do not know each other.
    fn two_machines_do_not_interfere(rig) {
        let other = Rig::new(rig.body);
        let (a, b) = (rig.stream(), other.stream());
        let (p, q) = (rig.words(4, 1), other.words(4, 2));
        rig.hold(a);
        rig.fill(p, 4, 5, a);
        other.fill(q, 4, 6, b);
        other.driver.synchronize().unwrap();
        assert_eq!(other.read(q, 4), [6; 4]);
        assert_eq!(rig.read(p, 4), [1; 4]);
        drop(other);
        rig.open();
        rig.wait(a);
        assert_eq!(rig.read(p, 4), [5; 4]);
    }

    /// Threads with streams, memory, captures and graphs of their own do not disturb each other.
    fn threads_on_streams_of_their_own_do_not_disturb_each_other(rig) {
        let before = rig.live();
        std::thread::scope(|scope| {
            for id in 0..8u32 {
                scope.spawn(move || {
                    rig.driver.bind().unwrap();
                    rig.driver.exchange_capture_mode(CaptureMode::ThreadLocal).unwrap();
                    let stream = rig.stream();
                    let event = rig.event();
                    for round in 0..20 {
                        let (a, b) = (rig.driver.malloc(400).unwrap(), rig.driver.malloc(400).unwrap());
                        let value = id * 1000 + round;
                        let exec = rig.exec(stream, || rig.add(b, a, 100, 1, stream));
                        rig.fill(a, 100, value, stream);
                        rig.driver.launch(exec, stream).unwrap();
                        rig.driver.event_record(event, stream).unwrap();
                        rig.driver.event_synchronize(event).unwrap();
                        assert_eq!(rig.read(b, 100), [value + 1; 100]);
                        rig.driver.exec_destroy(exec).unwrap();
                        rig.driver.free(a).unwrap();
                        rig.driver.free(b).unwrap();
                    }
                    rig.driver.event_destroy(event).unwrap();
                    rig.driver.stream_destroy(stream).unwrap();
                });
            }
        });
        assert_eq!(rig.live(), before);
    }

    /// A stepped device runs nothing by itself, and one piece of work a step.
    fn a_stepped_stream_runs_a_piece_a_step(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        if rig.body != Body::Stepped {
            assert!(matches!(kind(rig.host().step(stream)), DriverErrorKind::NotSupported(_)));
            return;
        }
        rig.fill(ptr, 4, 1, stream);
        rig.fill(ptr, 4, 2, stream);
        assert_eq!(rig.host().queued(stream).unwrap(), 2);
        assert_eq!(rig.read(ptr, 4), [0; 4]);
        assert!(rig.host().step(stream).unwrap());
        assert_eq!(rig.read(ptr, 4), [1; 4]);
        assert!(rig.host().step(stream).unwrap());
        assert_eq!(rig.read(ptr, 4), [2; 4]);
        assert!(!rig.host().step(stream).unwrap());
        assert_eq!(rig.host().queued(stream).unwrap(), 0);
    }
}
