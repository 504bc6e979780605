//! Memory that is not the pool's own: foreign ranges, host buffers, registered files, pointer tables.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use evergraph_pool::driver::{CopySide, DevicePtr, Node as GraphNode};
use evergraph_pool::{BadReason, Hold, PoolError, Purpose, RangeKind, RetireReason, ScratchPolicy, Tracked, Use};

use crate::common::*;

#[test]
fn a_foreign_workspace_that_moves_makes_its_graphs_stale() {
    both(|mode| {
        let rig = Rig::new(mode);
        let workspace = rig.driver.malloc(MIB).unwrap();
        let mut range = rig.pool.register_foreign(workspace, MIB, "cublas workspace").unwrap();
        let found = rig.pool.resolve(DevicePtr(workspace.0 + 5)).unwrap();
        assert_eq!((found.kind, found.offset_bytes, found.token), (RangeKind::Foreign, 5, Some(range.token())));
        let mut graph = rig.graph(ScratchPolicy::Pin, |w| declare(w, &range, Use::ZeroedScratch, Hold::Strong));
        assert!(graph.replay(|| ()));
        let larger = rig.driver.malloc(2 * MIB).unwrap();
        range.move_to(larger, 2 * MIB).unwrap();
        assert!(!graph.replay(|| ()));
        assert_eq!(graph.registration.walk().unwrap_err().bad[0].reason, BadReason::Withdrawn);
        assert_eq!(graph.node.told.lock()[0].reason, RetireReason::Withdrawn);
        assert_eq!(rig.pool.resolve(workspace), None);
        let mut again = rig.graph(ScratchPolicy::Pin, |w| declare(w, &range, Use::Scratch, Hold::Strong));
        assert!(again.replay(|| ()));
        drop(range);
        assert!(!again.replay(|| ()));
        assert_eq!(rig.pool.resolve(larger), None);
        rig.driver.free(workspace).unwrap();
        rig.driver.free(larger).unwrap();
        rig.pool.check().unwrap();
    });
}

#[test]
fn foreign_ranges_do_not_overlap() {
    both(|mode| {
        let rig = Rig::new(mode);
        let slice = rig.alloc(1000);
        let overlap = |ptr, bytes| matches!(rig.pool.register_foreign(ptr, bytes, "x"), Err(PoolError::Overlap { .. }));
        assert!(overlap(slice.ptr(), 10));
        let _range = rig.pool.register_foreign(DevicePtr(0x1000), 0x1000, "first").unwrap();
        assert!(overlap(DevicePtr(0x1fff), 10));
        assert!(matches!(rig.pool.register_foreign(DevicePtr(u64::MAX), 10, "x"), Err(PoolError::Range { .. })));
        let _next = rig.pool.register_foreign(DevicePtr(0x2000), 0x10, "next").unwrap();
        let both_sides = rig.pool.resolve_all(DevicePtr(0x2000));
        assert_eq!(both_sides.len(), 2, "one past the end belongs to both neighbours");
        assert_eq!(both_sides[0].offset_bytes, 0);
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_host_buffer_lives_as_long_as_the_graph_that_copies_from_it() {
    // Host vectors with shapes were dropped after the capture; the replay read freed memory.
    both(|mode| {
        let rig = Rig::new(mode);
        let slice = rig.pool.alloc::<u64>(100, &rig.stream).unwrap();
        let buffer = rig.pool.host_buffer::<u64>(100).unwrap();
        buffer.write(&[5; 100]).unwrap();
        let source = buffer.ptr();
        let mut buffer = Some(buffer);
        let graph = {
            let (node, launcher) = Node::new(&rig.stream, 1);
            let window = rig.pool.begin_window(node.clone(), ScratchPolicy::Pin).unwrap();
            rig.driver.begin_capture(rig.stream.handle(), Default::default()).unwrap();
            let buffer = buffer.take().unwrap();
            rig.stream.copy_from_host(&buffer, &slice).unwrap();
            declare(&window, &buffer, Use::Input, Hold::Strong);
            drop(buffer);
            let captured = rig.driver.end_capture(rig.stream.handle()).unwrap();
            let nodes = rig.driver.graph_nodes(captured).unwrap();
            let copied = rig.driver.node(nodes[0]).unwrap();
            assert!(matches!(copied, GraphNode::Copy { src: CopySide::Host(p), .. } if p == source.0));
            let exec = rig.driver.instantiate(captured).unwrap();
            rig.driver.graph_destroy(captured).unwrap();
            (window.finish().unwrap(), exec, node, launcher)
        };
        assert_eq!(rig.host.live().host, 1, "every user handle is gone, the graph is not");
        rig.driver.launch(graph.1, rig.stream.handle()).unwrap();
        assert_eq!(rig.stream.download(&slice).unwrap(), [5; 100]);
        rig.driver.exec_destroy(graph.1).unwrap();
        drop(graph.0);
        assert_eq!(rig.host.live().host, 0);
        rig.pool.check().unwrap();
    });
}

#[test]
fn a_host_buffer_waits_for_its_copies() {
    both(|mode| {
        let rig = Rig::new(mode);
        let slice = rig.pool.alloc::<u8>(1000, &rig.stream).unwrap();
        let buffer = rig.pool.host_buffer::<u8>(1000).unwrap();
        rig.stream.fill(&slice, 9).unwrap();
        rig.stream.copy_to_host(&slice, &buffer).unwrap();
        assert_eq!(buffer.read().unwrap(), [9; 1000]);
        buffer.write(&[4; 1000]).unwrap();
        rig.stream.copy_from_host(&buffer, &slice).unwrap();
        buffer.write(&[5; 1000]).unwrap();
        assert_eq!(rig.stream.download(&slice).unwrap(), [4; 1000], "the copy read what was written after it");
        rig.stream.copy_from_host(&buffer, &slice).unwrap();
        drop(buffer);
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.driver.fault(), None);
        assert!(matches!(
            rig.pool.host_buffer::<u8>(3).unwrap().write(&[0; 4]),
            Err(PoolError::Length { expected: 3, found: 4 })
        ));
    });
}

#[test]
fn a_registered_file_is_read_in_place_and_kept() {
    struct Weights(Vec<u8>, Arc<AtomicBool>);
    impl Drop for Weights {
        fn drop(&mut self) {
            self.1.store(true, Ordering::SeqCst);
        }
    }
    both(|mode| {
        let rig = Rig::new(mode);
        let weights = Arc::new(vec![3u8; 100_000]);
        let registered = rig.pool.register_host(weights.clone()).unwrap();
        assert_eq!(rig.pool.resolve(registered.ptr()).unwrap().kind, RangeKind::Host);
        let slice = rig.pool.alloc::<u8>(100_000, &rig.stream).unwrap();
        rig.driver.memcpy_dtod(slice.ptr(), registered.ptr(), 100_000, rig.stream.handle()).unwrap();
        assert!(rig.stream.download(&slice).unwrap().iter().all(|&b| b == 3));
        let graph = rig.graph(ScratchPolicy::Pin, |w| declare(w, &registered, Use::Weight, Hold::Strong));
        drop(registered);
        assert_eq!(Arc::strong_count(&weights), 2, "the graph keeps the file mapped");
        drop(graph);
        assert_eq!(Arc::strong_count(&weights), 1);
        assert_eq!(rig.host.live().host, 0);
        let _ = Weights(Vec::new(), Arc::default()).0.len();
    });
}

#[test]
fn a_pointer_table_knows_its_members() {
    both(|mode| {
        let rig = Rig::new(mode);
        let experts: Vec<_> = (0..4).map(|_| rig.alloc(10 * KIB)).collect();
        let members: Vec<(&dyn Tracked, Use)> = experts.iter().map(|e| (e as &dyn Tracked, Use::Weight)).collect();
        let table = rig.pool.pointer_table(&members, Purpose::State, &rig.stream).unwrap();
        let addresses: Vec<u64> = experts.iter().map(|e| e.ptr().0).collect();
        assert_eq!(rig.stream.download(table.slice()).unwrap(), addresses);
        assert_eq!(table.members()[2].token, experts[2].token());
        let graph = rig.graph(ScratchPolicy::Pin, |w| {
            declare(w, table.slice(), Use::Input, Hold::Strong);
            for member in table.members() {
                w.declare(member.token, member.use_, 0, member.bytes, Hold::Strong).unwrap();
            }
        });
        assert_eq!(graph.registration.dependencies().len(), 5);
    });
}
