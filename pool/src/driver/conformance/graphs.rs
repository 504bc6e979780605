//! Stories of graphs: reading nodes, launching, life and handles.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::rig::{Body, kind};
use super::stories;
use crate::driver::host::HostConfig;
use crate::driver::{Args, CopySide, DevicePtr, DriverErrorKind, HostCallback, LaunchConfig, Node, NodeArgs};

stories! { in graphs as conformance_graphs;

    /// Every node can be read back: function, shape, packed arguments with their layout, copy sides, set range.
    fn every_node_can_be_read_back(rig) {
        let stream = rig.stream();
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        let pinned = rig.driver.host_alloc(16).unwrap();
        let graph = rig.capture(stream, || {
            rig.add(b, a, 4, 0xABCD, stream);
            rig.driver.memcpy_dtod(a, b, 12, stream).unwrap();
            // SAFETY: the pinned memory outlives the graph.
            unsafe { rig.driver.memcpy_htod(a, pinned.as_ptr(), 16, stream).unwrap() };
            // SAFETY: as above.
            unsafe { rig.driver.memcpy_dtoh(pinned.as_ptr(), b, 8, stream).unwrap() };
            rig.driver.memset_d32(b, 1, 3, stream).unwrap();
            rig.driver.launch_host_fn(stream, HostCallback::new(|| ())).unwrap();
        });
        let nodes = rig.driver.graph_nodes(graph).unwrap();
        let read: Vec<Node> = nodes.iter().map(|&node| rig.driver.node(node).unwrap()).collect();
        assert_eq!(read.len(), 6);
        let Node::Kernel { function, config, args: NodeArgs::Packed { bytes, layout: Some(layout) } } = &read[0] else {
            panic!("a kernel, found {:?}", read[0])
        };
        assert_eq!(*function, rig.function("add"));
        assert_eq!(*config, LaunchConfig::linear(1, 1));
        let mut expected = Args::new();
        expected.ptr(b).ptr(a).u32(4).u32(0xABCD);
        assert_eq!(bytes.as_slice(), expected.as_bytes());
        let found: Vec<(u32, u32)> = layout.params.iter().map(|p| (p.offset, p.bytes)).collect();
        assert_eq!(found, [(0, 8), (8, 8), (16, 4), (20, 4)]);
        let side = |ptr: DevicePtr| CopySide::Device(ptr);
        let host = CopySide::Host(pinned.0);
        assert!(matches!(&read[1], Node::Copy { dst, src, bytes: 12 } if (*dst, *src) == (side(a), side(b))));
        assert!(matches!(&read[2], Node::Copy { dst, src, bytes: 16 } if (*dst, *src) == (side(a), host)));
        assert!(matches!(&read[3], Node::Copy { dst, src, bytes: 8 } if (*dst, *src) == (host, side(b))));
        assert!(matches!(&read[4], Node::Set { dst, bytes: 12 } if *dst == b));
        assert!(matches!(&read[5], Node::Host));
        let edges = rig.driver.graph_edges(graph).unwrap();
        let ends: Vec<_> = edges.iter().map(|edge| (edge.from, edge.to)).collect();
        assert_eq!(ends, nodes.windows(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>());
    }

    /// A cooperative launch reads back as one; a programmatic one does, at its node or at its edge.
    fn launch_attributes_can_be_read_back(rig) {
        let stream = rig.stream();
        let ptr = rig.words(1, 0);
        let plain = LaunchConfig::linear(1, 1);
        let args = { let mut args = Args::new(); args.ptr(ptr); args };
        let launch = |config: LaunchConfig| {
            // SAFETY: `step` takes a pointer to a live word.
            unsafe { rig.driver.launch_kernel(rig.function("step"), &config, args.as_bytes(), stream).unwrap() };
        };
        let graph = rig.capture(stream, || {
            launch(plain);
            launch(LaunchConfig { cooperative: true, ..plain });
            launch(plain);
            launch(LaunchConfig { programmatic: true, ..plain });
        });
        let nodes = rig.driver.graph_nodes(graph).unwrap();
        let edges = rig.driver.graph_edges(graph).unwrap();
        let read: Vec<(bool, bool)> = nodes.iter().map(|&node| {
            let Node::Kernel { config, .. } = rig.driver.node(node).unwrap() else { panic!("a kernel") };
            let early = edges.iter().any(|edge| edge.to == node && edge.programmatic);
            (config.cooperative, config.programmatic || early)
        }).collect();
        assert_eq!(read, [(false, false), (true, false), (false, false), (false, true)]);
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.replay(exec, stream);
        assert_eq!(rig.read(ptr, 1), [4]);
    }

    /// A structure by value and a padded parameter lie where C puts them, in the launch and in the node.
    fn parameters_lie_as_c_lays_them_out(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let mut args = Args::new();
        args.ptr(ptr).u32(3).u32(0).push_bytes(&[7], 1).u64(100);
        let graph = rig.capture(stream, || rig.launch("mixed", &args, stream));
        let read = rig.driver.node(rig.driver.graph_nodes(graph).unwrap()[0]).unwrap();
        let Node::Kernel { args: NodeArgs::Packed { bytes, layout: Some(layout) }, .. } = read else {
            panic!("a kernel, found {read:?}")
        };
        assert_eq!(bytes.as_slice(), args.as_bytes());
        let found: Vec<(u32, u32)> = layout.params.iter().map(|p| (p.offset, p.bytes)).collect();
        assert_eq!(found, [(0, 16), (16, 1), (24, 8)]);
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.replay(exec, stream);
        assert_eq!(rig.read(ptr, 4), [107, 107, 107, 0]);
    }

    /// Arguments come out as copies: writing over them changes nothing in the graph.
    fn node_arguments_are_copies(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let graph = rig.capture(stream, || rig.fill(ptr, 4, 7, stream));
        let node = rig.driver.graph_nodes(graph).unwrap()[0];
        let Node::Kernel { args: NodeArgs::Packed { mut bytes, .. }, .. } = rig.driver.node(node).unwrap() else {
            panic!("a kernel")
        };
        bytes.fill(0xFF);
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.replay(exec, stream);
        assert_eq!(rig.read(ptr, 4), [7; 4]);
    }

    /// Some drivers can not tell layouts, some kernels can not be read at all.
    fn layouts_and_arguments_may_be_hidden(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let graph = rig.capture(stream, || rig.fill(ptr, 4, 7, stream));
        let node = rig.driver.graph_nodes(graph).unwrap()[0];
        let function = rig.function("fill");
        rig.host().set_layout_readable(function, false).unwrap();
        assert_eq!(rig.driver.param_layout(function).unwrap(), None);
        let read = rig.driver.node(node).unwrap();
        assert!(matches!(read, Node::Kernel { args: NodeArgs::Packed { layout: None, .. }, .. }), "{read:?}");
        rig.host().set_args_readable(function, false).unwrap();
        let read = rig.driver.node(node).unwrap();
        assert!(matches!(read, Node::Kernel { args: NodeArgs::Unreadable, .. }), "{read:?}");
    }

    /// What a caller's argument buffer holds after the capture is no concern of the graph.
    fn a_graph_keeps_its_own_arguments(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let mut args = Args::new();
        args.ptr(ptr).u32(4).u32(3);
        let exec = rig.exec(stream, || rig.launch("fill", &args, stream));
        args = Args::new();
        args.ptr(DevicePtr(0x10)).u32(4).u32(4);
        assert_ne!(args, Args::new());
        rig.replay(exec, stream);
        assert_eq!(rig.read(ptr, 4), [3; 4]);
    }

    /// Runs of one exec never overlap, whatever the streams; the driver serialises.
    fn runs_of_one_exec_never_overlap(rig) {
        let streams = [rig.stream(), rig.stream(), rig.stream()];
        let (inside, crowded) = (rig.words(1, 0), rig.words(1, 0));
        let exec = rig.exec(streams[0], || rig.launch("alone", Args::new().ptr(inside).ptr(crowded), streams[0]));
        for _ in 0..20 {
            for stream in streams {
                rig.driver.launch(exec, stream).unwrap();
            }
        }
        rig.driver.synchronize().unwrap();
        assert_eq!((rig.read(inside, 1), rig.read(crowded, 1)), (vec![0], vec![0]));
    }

    /// Two execs do: one may run while the other is stuck.
    fn two_execs_may_overlap(rig) {
        let (stuck, free) = (rig.stream(), rig.stream());
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        let first = rig.exec(stuck, || rig.fill(a, 4, 1, stuck));
        let second = rig.exec(free, || rig.fill(b, 4, 2, free));
        rig.hold(stuck);
        rig.driver.launch(first, stuck).unwrap();
        rig.replay(second, free);
        assert_eq!((rig.read(a, 4), rig.read(b, 4)), (vec![0; 4], vec![2; 4]));
        // The first exec again, on the free stream: waits for its run on the stuck one.
        rig.driver.launch(first, free).unwrap();
        assert!(!rig.driver.stream_query(free).unwrap());
        rig.open();
        rig.wait(free);
        assert_eq!(rig.read(a, 4), [1; 4]);
    }

    /// Destroying an exec lets the run in flight complete; its handle is the next exec's.
    fn a_destroyed_exec_completes_its_run(rig) {
        let stream = rig.stream();
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        let exec = rig.exec(stream, || rig.fill(a, 4, 1, stream));
        rig.hold(stream);
        rig.driver.launch(exec, stream).unwrap();
        rig.driver.exec_destroy(exec).unwrap();
        if rig.tracks_handles() {
            assert!(matches!(kind(rig.driver.launch(exec, stream)), DriverErrorKind::InvalidHandle(_)));
        }
        let next = rig.exec(stream, || rig.fill(b, 4, 2, stream));
        assert!(next == exec || !rig.tracks_handles());
        rig.open();
        rig.wait(stream);
        assert_eq!((rig.read(a, 4), rig.read(b, 4)), (vec![1; 4], vec![0; 4]));
    }

    /// An exec does not need its graph; the graph's handle is the next graph's, its nodes' handles too.
    fn a_graph_handle_comes_back(rig) {
        let stream = rig.stream();
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        let old = rig.capture(stream, || rig.fill(a, 4, 1, stream));
        let node = rig.driver.graph_nodes(old).unwrap()[0];
        let exec = rig.driver.instantiate(old).unwrap();
        rig.driver.graph_destroy(old).unwrap();
        if rig.tracks_handles() {
            assert!(matches!(kind(rig.driver.node(node)), DriverErrorKind::InvalidHandle(_)));
            assert!(matches!(kind(rig.driver.graph_destroy(old)), DriverErrorKind::InvalidHandle(_)));
        }
        let new = rig.capture(stream, || rig.driver.memset_d8(b, 1, 4, stream).unwrap());
        if rig.tracks_handles() {
            assert_eq!(old, new);
            assert!(matches!(rig.driver.node(node).unwrap(), Node::Set { .. }));
        }
        rig.replay(exec, stream);
        assert_eq!((rig.read(a, 4), rig.read(b, 1)), (vec![1; 4], vec![0]));
    }

    /// A host function in a graph runs at every launch, as long as the graph or an exec of it lives.
    fn a_recorded_host_function_runs_at_every_launch(rig) {
        let stream = rig.stream();
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        let exec = rig.exec(stream, || {
            let callback = HostCallback::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
            });
            rig.driver.launch_host_fn(stream, callback).unwrap();
        });
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        for round in 1..4 {
            rig.replay(exec, stream);
            assert_eq!(calls.load(Ordering::Relaxed), round);
        }
        rig.driver.exec_destroy(exec).unwrap();
        // Some time after the exec: hardware drops it on a thread of its own.
        while Arc::strong_count(&calls) > 1 {
            std::thread::yield_now();
        }
    }

    /// A graph on memory that was given back faults at its replay: nobody but the launcher's bookkeeping prevents it.
    fn a_replay_on_freed_memory_is_a_fault(rig) {
        let stream = rig.stream();
        let ptr = rig.words(1024, 0);
        let exec = rig.exec(stream, || rig.fill(ptr, 1024, 1, stream));
        rig.replay(exec, stream);
        rig.driver.free(ptr).unwrap();
        rig.driver.launch(exec, stream).unwrap();
        rig.expect_fault(stream, "fill", "freed malloc of 4096 bytes");
    }

    /// And on memory that somebody else has by now it writes into that somebody's bytes, silently.
    fn a_replay_on_reissued_memory_corrupts_silently(rig) {
        let stream = rig.stream();
        let ptr = rig.words(1024, 0);
        let exec = rig.exec(stream, || rig.fill(ptr, 4, 1, stream));
        rig.driver.free(ptr).unwrap();
        let other = rig.words(1024, 9);
        assert_eq!(other, ptr);
        rig.replay(exec, stream);
        assert_eq!(rig.read(other, 5), [1, 1, 1, 1, 9]);
    }

    /// Replay follows pages: new pages under the old range, and the graph writes there, no recapture.
    fn a_replay_follows_the_pages_under_its_range(rig) {
        use super::rig::GRANULE;
        let stream = rig.stream();
        let (ptr, input) = (rig.mapped(GRANULE), rig.words(4, 0));
        let exec = rig.exec(stream, || rig.add(ptr, input, 4, 1, stream));
        for round in [5, 6, 7] {
            rig.set(input, 4, round);
            rig.replay(exec, stream);
            assert_eq!(rig.read(ptr, 4), [round + 1; 4]);
            rig.driver.unmap(ptr, GRANULE).unwrap();
            let chunk = rig.driver.create(GRANULE).unwrap();
            rig.driver.map(ptr, GRANULE, 0, chunk).unwrap();
            rig.driver.set_access(ptr, GRANULE, &[rig.driver.info().ordinal]).unwrap();
            rig.driver.release(chunk).unwrap();
            assert_ne!(rig.read(ptr, 4), [round + 1; 4]);
        }
    }

    /// Instantiating takes device memory, can fail for want of it, and gives it back.
    fn an_exec_takes_memory(rig) {
        let rig = rig.like(HostConfig::default().memory(1 << 20).exec_bytes_per_node(10 << 10));
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let graph = rig.capture(stream, || (0..60).for_each(|i| rig.fill(ptr, 4, i, stream)));
        let used_bytes = || rig.live().map_or(0, |live| live.used_bytes);
        let used = used_bytes();
        let exec = rig.driver.instantiate(graph).unwrap();
        assert_eq!(used_bytes(), used + 60 * (10 << 10));
        assert!(rig.driver.instantiate(graph).unwrap_err().is_out_of_memory());
        assert!(rig.live().is_some_and(|live| live.execs == 1));
        rig.driver.exec_destroy(exec).unwrap();
        assert_eq!(used_bytes(), used);
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.driver.upload(exec, stream).unwrap();
        rig.replay(exec, stream);
        assert_eq!(rig.read(ptr, 4), [59; 4]);
    }

    /// A graph of one device is not a graph of another.
    fn graphs_belong_to_their_device(rig) {
        let stream = rig.stream();
        let graph = rig.capture(stream, || ());
        let exec = rig.driver.instantiate(graph).unwrap();
        rig.peer.bind().unwrap();
        let own = rig.peer.stream_create(0).unwrap();
        assert!(matches!(kind(rig.peer.graph_nodes(graph)), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.peer.instantiate(graph)), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.peer.launch(exec, own)), DriverErrorKind::InvalidHandle(_)));
    }

    /// A stepped device runs a graph node by node, so that a test can look at half a replay.
    fn a_stepped_graph_runs_a_node_a_step(rig) {
        if rig.body != Body::Stepped {
            return;
        }
        let stream = rig.stream();
        let counter = rig.words(1, 0);
        let exec = rig.exec(stream, || (0..3).for_each(|_| rig.launch("step", Args::new().ptr(counter), stream)));
        rig.driver.launch(exec, stream).unwrap();
        for done in 1..=3 {
            assert!(rig.host().step(stream).unwrap());
            assert_eq!(rig.read(counter, 1), [done]);
        }
        assert!(!rig.host().step(stream).unwrap());
        assert_eq!(rig.host().queued(stream).unwrap(), 0);
    }

    /// A decode step's worth of nodes costs one wake-up, not one a node.
    fn a_long_graph_is_one_piece_of_work(rig) {
        let stream = rig.stream();
        let counter = rig.words(1, 0);
        let exec = rig.exec(stream, || {
            (0..500).for_each(|_| rig.launch("step", Args::new().ptr(counter), stream));
        });
        rig.hold(stream);
        let queued = || rig.driver.as_host().map(|host| host.queued(stream).unwrap());
        let before = queued();
        rig.driver.launch(exec, stream).unwrap();
        assert_eq!(queued(), before.map(|queued| queued + 1));
        rig.open();
        rig.wait(stream);
        assert_eq!(rig.read(counter, 1), [500]);
    }
}
