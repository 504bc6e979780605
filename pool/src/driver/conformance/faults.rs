//! Stories of bad accesses: the context dies, names the culprit, and takes nobody with it.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;

use super::rig::{Body, GRANULE, Rig, kind, refused};
use super::stories;
use crate::driver::{Args, CaptureMode, DevicePtr, DriverErrorKind, GraphHandle, HostCallback, NodeHandle};

fn is_fault<T: std::fmt::Debug>(result: Result<T, crate::driver::DriverError>) -> bool {
    matches!(kind(result), DriverErrorKind::Fault(_))
}

stories! { in faults as conformance_faults;

    /// The launch is taken; the next wait reports; every call after that fails the same way.
    fn a_bad_kernel_surfaces_at_the_next_wait_and_sticks(rig) {
        let stream = rig.stream();
        let event = rig.event();
        let ptr = rig.words(4, 0);
        rig.hold(stream);
        rig.fill(DevicePtr(0x10), 4, 1, stream);
        assert_eq!(rig.driver.fault(), None);
        rig.open();
        rig.expect_fault(stream, "fill", "never allocated");
        let driver = &rig.driver;
        assert!(is_fault(driver.malloc(4)));
        assert!(is_fault(driver.free(ptr)));
        assert!(is_fault(driver.mem_info()));
        assert!(is_fault(driver.stream_create(0)));
        assert!(is_fault(driver.event_query(event)));
        assert!(is_fault(driver.synchronize()));
        assert!(is_fault(driver.memset_d8(ptr, 0, 4, stream)));
        assert!(is_fault(rig.try_launch("fill", Args::new().ptr(ptr).u32(1).u32(1), stream)));
        driver.bind().unwrap();
        assert_eq!(driver.info().ordinal.0, 0);
        if rig.body.is_cuda() {
            return; // what needs no context still answers, and the fault has no address
        }
        assert!(is_fault(driver.begin_capture(stream, CaptureMode::Relaxed)));
        assert!(is_fault(driver.graph_nodes(GraphHandle(1))));
        assert!(is_fault(driver.node(NodeHandle(1))));
        assert!(is_fault(driver.function(rig.module, "fill")));
        let fault = driver.fault().unwrap();
        assert!(fault.write);
        assert_eq!((fault.address, fault.bytes), (DevicePtr(0x10), 16));
        let words = fault.to_string();
        assert!(words.contains("write") && words.contains("fill") && words.contains("0x10"), "{words}");
    }

    /// The fault names what was in flight, and neither what was known to be complete nor what was only recorded.
    fn a_fault_names_what_was_in_flight(rig) {
        let (stream, other) = (rig.stream(), rig.stream());
        let ptr = rig.words(4, 0);
        rig.add(ptr, ptr, 4, 1, stream);
        rig.wait(stream);
        let event = rig.event();
        rig.launch("step", Args::new().ptr(ptr), stream);
        rig.driver.event_record(event, stream).unwrap();
        rig.driver.event_synchronize(event).unwrap();
        let graph = rig.capture(other, || rig.launch("peek", Args::new().ptr(ptr).u32(4), other));
        rig.fill(DevicePtr(0x10), 4, 1, stream);
        rig.expect_fault(stream, "fill", "never allocated");
        assert_eq!(rig.driver.fault().unwrap().op, "fill");
        // Destroyed or not: the context is dead.
        let _ = rig.driver.graph_destroy(graph);
    }

    /// A graph that was given a name is named.
    fn a_fault_in_a_graph_names_the_graph(rig) {
        let stream = rig.stream();
        let exec = rig.exec(stream, || rig.fill(DevicePtr(0x10), 4, 1, stream));
        rig.driver.name_exec(exec, "of 7 layers");
        rig.driver.launch(exec, stream).unwrap();
        let fault = match kind(rig.driver.stream_synchronize(stream)) {
            DriverErrorKind::Fault(fault) => fault,
            other => panic!("a fault, found {other}"),
        };
        assert!(fault.op.contains("graph of 7 layers"), "{fault}");
        assert!(rig.body.is_cuda() || fault.op.contains("fill"), "{fault}");
        assert_eq!(rig.driver.fault(), Some(fault));
    }

    /// Work queued behind the fault does not run; what ran before stays.
    fn nothing_runs_after_a_fault(rig) {
        let counter = rig.driver.host_alloc(4).unwrap();
        // SAFETY: pinned and aligned; only the kernel touches it, as an atomic.
        let count = unsafe { std::sync::atomic::AtomicU32::from_ptr(counter.as_ptr().cast()) };
        count.store(0, Ordering::Release);
        let stream = rig.stream();
        rig.launch("step", Args::new().ptr(DevicePtr(counter.0)), stream);
        rig.hold(stream);
        rig.fill(DevicePtr(0x10), 1, 1, stream);
        rig.launch("step", Args::new().ptr(DevicePtr(counter.0)), stream);
        rig.open();
        assert!(is_fault(rig.driver.stream_synchronize(stream)));
        assert_eq!(count.load(Ordering::Acquire), 1);
    }

    /// The other device of the machine, and another machine, go on.
    fn a_fault_stays_in_its_context(rig) {
        let other = Rig::new(rig.body);
        rig.driver.bind().unwrap();
        let stream = rig.stream();
        rig.fill(DevicePtr(0x10), 1, 1, stream);
        assert!(is_fault(rig.driver.stream_synchronize(stream)));
        rig.peer.bind().unwrap();
        let ptr = rig.peer.malloc(64).unwrap();
        let stream = rig.peer.stream_create(0).unwrap();
        rig.peer.memset_d8(ptr, 1, 64, stream).unwrap();
        rig.peer.stream_synchronize(stream).unwrap();
        assert_eq!(rig.peer.fault(), None);
        assert_eq!(other.read(other.words(4, 6), 4), [6; 4]);
    }

    /// The blame names who had the bytes last.
    fn freed_memory_names_its_last_owner(rig) {
        let ptr = rig.words(1024, 1);
        rig.driver.free(ptr).unwrap();
        let stream = rig.stream();
        rig.launch("peek", Args::new().ptr(DevicePtr(ptr.0 + 100)).u32(8), stream);
        rig.expect_fault(stream, "peek", "freed malloc of 4096 bytes of device 0");
    }

    /// The same for pages that were taken away.
    fn unmapped_memory_names_its_last_owner(rig) {
        let ptr = rig.mapped(GRANULE);
        rig.driver.unmap(ptr, GRANULE).unwrap();
        let stream = rig.stream();
        rig.launch("peek", Args::new().ptr(ptr).u32(8), stream);
        rig.expect_fault(stream, "peek", "unmapped chunk of 2097152 bytes");
    }

    /// A queued op that finds its memory gone faults, and the memory's next owner at that address keeps its bytes
    /// only if the op is too late: this is the bug that the pool must prevent.
    fn memory_freed_before_the_op_runs_is_gone(rig) {
        let ptr = rig.words(1024, 1);
        let stream = rig.stream();
        rig.hold(stream);
        rig.fill(ptr, 1024, 2, stream);
        rig.driver.free(ptr).unwrap();
        rig.open();
        rig.expect_fault(stream, "fill", "freed malloc");
    }

    /// One byte too many is too many.
    fn one_byte_past_the_end_is_a_fault(rig) {
        let ptr = rig.driver.malloc(1000).unwrap();
        let _next = rig.driver.malloc(1000).unwrap();
        let stream = rig.stream();
        rig.launch("peek", Args::new().ptr(ptr).u32(1000), stream);
        rig.wait(stream);
        rig.launch("peek", Args::new().ptr(ptr).u32(1001), stream);
        rig.expect_fault(stream, "peek", "0 bytes past the end of a malloc of 1000 bytes");
    }

    /// An access may cross chunks of one range, not from one allocation into its neighbour.
    fn an_access_does_not_run_into_the_neighbour(rig) {
        let first = rig.driver.malloc(512).unwrap();
        let second = rig.driver.malloc(512).unwrap();
        assert_eq!(second.0, first.0 + 512);
        let ptr = rig.driver.address_reserve(2 * GRANULE, 0, None).unwrap();
        for half in 0..2 {
            let chunk = rig.driver.create(GRANULE).unwrap();
            rig.driver.map(DevicePtr(ptr.0 + (half * GRANULE) as u64), GRANULE, 0, chunk).unwrap();
        }
        rig.driver.set_access(ptr, 2 * GRANULE, &[rig.driver.info().ordinal]).unwrap();
        let stream = rig.stream();
        rig.fill(DevicePtr(ptr.0 + GRANULE as u64 - 8), 4, 1, stream);
        rig.wait(stream);
        rig.launch("peek", Args::new().ptr(first).u32(513), stream);
        rig.expect_fault(stream, "peek", "from its neighbour");
    }

    /// Copies and sets name themselves.
    fn copies_and_sets_name_themselves(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        if rig.body.is_cuda() {
            // Hardware looks at the addresses at once.
            refused(rig.driver.memcpy_dtod(ptr, DevicePtr(0x1000), 16, stream));
            refused(rig.driver.memset_d32(DevicePtr(0x1000), 1, 4, stream));
            rig.wait(stream);
            return;
        }
        rig.driver.memcpy_dtod(ptr, DevicePtr(0x1000), 16, stream).unwrap();
        rig.expect_fault(stream, "memcpy", "never allocated");
        let other = Rig::new(rig.body);
        let stream = other.stream();
        other.driver.memset_d32(DevicePtr(0x1000), 1, 4, stream).unwrap();
        other.expect_fault(stream, "memset", "never allocated");
    }

    /// A device address is not a host address.
    fn device_memory_is_not_host_memory(rig) {
        let (a, b) = (rig.words(4, 1), rig.words(4, 2));
        let stream = rig.stream();
        // SAFETY: refused before it is read.
        unsafe { rig.driver.memcpy_htod(a, b.0 as usize as *const u8, 16, stream).unwrap() };
        rig.expect_fault(stream, "memcpy", "device memory used as host memory");
    }

    /// A kernel that panics is a dead context, not a dead process.
    fn a_panicking_kernel_is_a_fault(rig) {
        let stream = rig.stream();
        rig.launch("burst", &Args::new(), stream);
        rig.expect_fault(stream, "burst", "index out of bounds");
    }

    /// A host function that panics is dropped; the stream goes on.
    fn a_panicking_host_function_is_dropped(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        rig.driver.launch_host_fn(stream, HostCallback::new(|| panic!("callback"))).unwrap();
        rig.fill(ptr, 4, 5, stream);
        rig.wait(stream);
        assert_eq!(rig.read(ptr, 4), [5; 4]);
        assert_eq!(rig.driver.fault(), None);
    }

    /// A pointer that lies in device memory is checked when the kernel follows it.
    fn a_pointer_in_device_memory_is_checked_when_followed(rig) {
        // Large, so that hardware takes its pages away when it is freed.
        let (table, target) = (rig.driver.malloc(8).unwrap(), rig.driver.malloc(2 * GRANULE).unwrap());
        let stream = rig.stream();
        let address = target.0;
        // SAFETY: `address` outlives the copy: both end with the wait.
        unsafe { rig.driver.memcpy_htod(table, (&raw const address).cast(), 8, stream).unwrap() };
        rig.launch("indirect", Args::new().ptr(table).u32(77), stream);
        rig.wait(stream);
        assert_eq!(rig.read(target, 1), [77]);
        rig.driver.free(target).unwrap();
        rig.launch("indirect", Args::new().ptr(table).u32(78), stream);
        rig.expect_fault(stream, "indirect", "freed malloc of 4194304 bytes");
    }

    /// Memory taken from under a running op kills the context; the process lives, and so does the call.
    fn memory_pulled_from_under_a_running_op_is_a_fault(rig) {
        if rig.body == Body::Stepped {
            return; // nothing runs while another call does
        }
        for vmm in [false, true] {
            let rig = Rig::new(rig.body);
            let ptr = if vmm { rig.mapped(GRANULE) } else { rig.driver.malloc(GRANULE).unwrap() };
            let stream = rig.stream();
            rig.flag().store(0, Ordering::Release);
            rig.launch("gated_fill", Args::new().ptr(rig.flag_ptr()).ptr(ptr).u32(16).u32(1), stream);
            while rig.flag().load(Ordering::Acquire) != 2 {
                std::thread::yield_now();
            }
            if vmm { rig.driver.unmap(ptr, GRANULE).unwrap() } else { rig.driver.free(ptr).unwrap() }
            rig.open();
            rig.expect_fault(stream, "gated_fill", "while the op was running on it");
        }
    }
}
