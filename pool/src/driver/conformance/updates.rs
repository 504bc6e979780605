//! Stories of exec-update: what it accepts, what it refuses, and what it keeps while saying that it did not.
#![allow(unsafe_code)]

use super::rig::{Rig, kind};
use super::stories;
use crate::driver::{
    Args, DevicePtr, DriverErrorKind, ExecHandle, GraphHandle, HostCallback, LaunchConfig, StreamHandle, UpdateResult,
};

/// The exec still does what it did: `out = input + 1`, on fresh input each time.
fn intact(rig: &Rig, exec: ExecHandle, stream: StreamHandle, out: DevicePtr, input: DevicePtr) {
    for value in [11, 222, 3333] {
        rig.set(input, 4, value);
        rig.replay(exec, stream);
        assert_eq!(rig.read(out, 4), [value + 1; 4]);
    }
}

fn launch_with(rig: &Rig, name: &str, config: &LaunchConfig, args: &Args, stream: StreamHandle) {
    // SAFETY: the host device checks arguments and spans.
    unsafe { rig.driver.launch_kernel(rig.function(name), config, args.as_bytes(), stream).unwrap() };
}

stories! { in updates as conformance_updates;

    /// The same shape with other addresses and values goes in.
    fn an_update_puts_new_addresses_in(rig) {
        let stream = rig.stream();
        let (input, old, new) = (rig.words(4, 0), rig.words(4, 0), rig.words(4, 0));
        let exec = rig.exec(stream, || rig.add(old, input, 4, 1, stream));
        let graph = rig.capture(stream, || rig.add(new, input, 4, 2, stream));
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        for value in [5, 60] {
            rig.set(input, 4, value);
            rig.replay(exec, stream);
            assert_eq!(rig.read(new, 4), [value + 2; 4]);
        }
        assert_eq!(rig.read(old, 4), [0; 4]);
    }

    /// An update is for launches to come; the one in flight keeps its arguments.
    fn a_launch_keeps_the_arguments_of_its_time(rig) {
        let stream = rig.stream();
        let (old, new) = (rig.words(4, 0), rig.words(4, 0));
        let exec = rig.exec(stream, || rig.fill(old, 4, 1, stream));
        let graph = rig.capture(stream, || rig.fill(new, 4, 2, stream));
        rig.hold(stream);
        rig.driver.launch(exec, stream).unwrap();
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        rig.driver.launch(exec, stream).unwrap();
        rig.driver.graph_destroy(graph).unwrap();
        rig.open();
        rig.wait(stream);
        assert_eq!((rig.read(old, 4), rig.read(new, 4)), (vec![1; 4], vec![2; 4]));
    }

    /// Refusals are results, each with its reason, and leave the exec as it was.
    fn a_refused_update_leaves_the_exec_as_it_was(rig) {
        let stream = rig.stream();
        let (out, input, host) = (rig.words(4, 0), rig.words(4, 0), rig.driver.host_alloc(16).unwrap());
        let peers_memory = {
            rig.peer.bind().unwrap();
            let ptr = rig.peer.malloc(64).unwrap();
            rig.driver.bind().unwrap();
            ptr
        };
        let base = || {
            rig.add(out, input, 4, 1, stream);
            rig.driver.memcpy_dtod(out, out, 4, stream).unwrap();
            rig.driver.memset_d32(DevicePtr(out.0 + 4), 0, 0, stream).unwrap();
            rig.driver.memset_d8(DevicePtr(input.0), 0, 1, stream).unwrap();
        };
        let exec = rig.exec(stream, base);
        let args = {
            let mut args = Args::new();
            args.ptr(out).ptr(input).u32(4).u32(1);
            args
        };
        let copy = || rig.driver.memcpy_dtod(out, out, 4, stream).unwrap();
        let set = || rig.driver.memset_d8(input, 0, 1, stream).unwrap();
        let kernel = || rig.launch("add", &args, stream);
        let odd = |edit: fn(&mut LaunchConfig)| {
            let mut config = LaunchConfig::linear(1, 1);
            edit(&mut config);
            launch_with(rig, "add", &config, &args, stream);
        };
        let graph = |record: &dyn Fn()| -> GraphHandle { rig.capture(stream, record) };
        let cases: Vec<(&str, GraphHandle, UpdateResult)> = vec![
            ("a node less", graph(&|| { kernel(); copy(); }), UpdateResult::TopologyChanged),
            ("a node more", graph(&|| { kernel(); copy(); set(); set(); }), UpdateResult::TopologyChanged),
            ("other order", graph(&|| { copy(); kernel(); set(); }), UpdateResult::NodeTypeChanged),
            ("host for set", graph(&|| {
                kernel();
                copy();
                rig.driver.launch_host_fn(stream, HostCallback::new(|| ())).unwrap();
            }), UpdateResult::NodeTypeChanged),
            ("cooperative", graph(&|| { odd(|c| c.cooperative = true); copy(); set(); }),
                UpdateResult::ParametersChanged),
            ("copy from host", graph(&|| {
                kernel();
                // SAFETY: never launched.
                unsafe { rig.driver.memcpy_htod(out, host.as_ptr(), 4, stream).unwrap() };
                set();
            }), UpdateResult::ParametersChanged),
            ("copy to another device's memory", graph(&|| {
                kernel();
                let far = if rig.body.is_virtual() { out } else { peers_memory };
                rig.driver.memcpy_dtod(far, out, 4, stream).unwrap();
                set();
            }), UpdateResult::ParametersChanged),
        ];
        let lone = rig.body.is_virtual() || rig.peer.info().ordinal == rig.driver.info().ordinal;
        for (case, graph, expected) in cases {
            if lone && case.contains("another device") {
                continue;
            }
            assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), expected, "{case}");
            for value in [11u32, 222 << 8] {
                rig.set(input, 4, value);
                rig.replay(exec, stream);
                assert_eq!(rig.read(out, 4), [value + 1; 4], "{case}");
                assert_eq!(rig.read(input, 1), [value & !0xFF], "{case}");
            }
        }
    }

    /// What hardware takes: another shape, another length, another width of a set.
    fn an_update_takes_shapes_and_lengths(rig) {
        let stream = rig.stream();
        let (out, input) = (rig.words(8, 0), rig.words(8, 0));
        let mut args = Args::new();
        args.ptr(out).ptr(input).u32(4).u32(1);
        let record = |config: LaunchConfig, bytes: usize, wide: bool| {
            launch_with(rig, "add", &config, &args, stream);
            rig.driver.memcpy_dtod(DevicePtr(out.0 + 16), out, bytes, stream).unwrap();
            if wide {
                rig.driver.memset_d32(input, 0, 1, stream).unwrap();
            } else {
                rig.driver.memset_d8(input, 0, 1, stream).unwrap();
            }
        };
        let exec = rig.exec(stream, || record(LaunchConfig::linear(1, 1), 4, false));
        let graph = rig.capture(stream, || record(LaunchConfig::linear(2, 32), 8, true));
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        for value in [0x0101, 0x2222] {
            rig.set(input, 4, value);
            rig.replay(exec, stream);
            assert_eq!(rig.read(out, 7), [[value + 1; 6].as_slice(), &[0]].concat());
            assert_eq!(rig.read(input, 2), [0, value]);
        }
    }

    /// A programmatic start is an edge of another kind: between two kernels it is another topology.
    fn a_programmatic_start_is_part_of_the_topology(rig) {
        let stream = rig.stream();
        let (out, input) = (rig.words(4, 0), rig.words(4, 0));
        let mut args = Args::new();
        args.ptr(out).ptr(input).u32(4).u32(1);
        let early = LaunchConfig { programmatic: true, ..LaunchConfig::linear(1, 1) };
        let plain = LaunchConfig::linear(1, 1);
        let record = |first: &LaunchConfig, second: &LaunchConfig| {
            launch_with(rig, "add", first, &args, stream);
            launch_with(rig, "add", second, &args, stream);
        };
        let exec = rig.exec(stream, || record(&plain, &plain));
        let graph = rig.capture(stream, || record(&plain, &early));
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::TopologyChanged);
        intact(rig, exec, stream, out, input);
        // The first kernel has nobody to start before.
        let graph = rig.capture(stream, || record(&early, &plain));
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        intact(rig, exec, stream, out, input);
    }

    /// A branch is not a chain: same nodes, other edges.
    fn other_edges_are_another_topology(rig) {
        let (main, side) = (rig.stream(), rig.stream());
        let (out, input) = (rig.words(4, 0), rig.words(4, 0));
        let (fork, join) = (rig.event(), rig.event());
        let exec = rig.exec(main, || {
            rig.add(out, input, 4, 0, main);
            rig.add(out, out, 4, 1, main);
        });
        let branched = rig.capture(main, || {
            rig.driver.event_record(fork, main).unwrap();
            rig.driver.stream_wait_event(side, fork).unwrap();
            rig.add(out, input, 4, 0, main);
            rig.add(out, out, 4, 1, side);
            rig.driver.event_record(join, side).unwrap();
            rig.driver.stream_wait_event(main, join).unwrap();
        });
        assert_eq!(rig.driver.exec_update(exec, branched).unwrap(), UpdateResult::TopologyChanged);
        intact(rig, exec, main, out, input);
    }

    /// The trap: another function with another hidden attribute goes in, the driver says "updated", and the exec
    /// runs the new function with the old attribute. On hardware that hung; here it is a fault that says so.
    fn an_update_keeps_hidden_attributes_and_says_updated(rig) {
        let stream = rig.stream();
        let (out, input) = (rig.words(4, 0), rig.words(4, 0));
        let wide = |value: u32| {
            let mut args = Args::new();
            args.ptr(out).ptr(input).u32(4).u32(value);
            args
        };
        let exec = rig.exec(stream, || rig.add(out, input, 4, 1, stream));
        let graph = rig.capture(stream, || rig.launch("add_wide", &wide(2), stream));
        assert_eq!(rig.host().exec_hidden_attributes(exec).unwrap(), [0]);
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        assert_eq!(rig.host().exec_hidden_attributes(exec).unwrap(), [0]);
        // Instantiated anew it is right.
        let fresh = rig.driver.instantiate(graph).unwrap();
        assert_eq!(rig.host().exec_hidden_attributes(fresh).unwrap(), [4]);
        for value in [8, 90] {
            rig.set(input, 4, value);
            rig.replay(fresh, stream);
            assert_eq!(rig.read(out, 4), [value + 2; 4]);
        }
        rig.driver.launch(exec, stream).unwrap();
        rig.expect_fault(stream, "add_wide", "hidden attribute 0, the function needs 4");
    }

    /// The same function keeps its attribute, so such an update can be believed.
    fn an_update_to_the_same_function_is_sound(rig) {
        let stream = rig.stream();
        let (out, input) = (rig.words(4, 0), rig.words(4, 0));
        let launch = |value: u32| rig.launch("add_wide", Args::new().ptr(out).ptr(input).u32(4).u32(value), stream);
        let exec = rig.exec(stream, || launch(5));
        let graph = rig.capture(stream, || launch(1));
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        assert!(rig.driver.as_host().is_none_or(|host| host.exec_hidden_attributes(exec).unwrap() == [4]));
        intact(rig, exec, stream, out, input);
    }

    /// Names are not identity: a function of the same name in another module is another function.
    fn a_name_is_not_an_identity(rig) {
        use crate::driver::Node;
        let stream = rig.stream();
        let (out, input) = (rig.words(4, 0), rig.words(4, 0));
        let other = rig.driver.module_load(rig.other_kernels()).unwrap();
        let subtract = rig.driver.function(other, "add").unwrap();
        assert_ne!(subtract, rig.function("add"));
        let mut args = Args::new();
        args.ptr(out).ptr(input).u32(4).u32(1);
        let graph = rig.capture(stream, || {
            // SAFETY: the host device checks arguments and spans.
            unsafe { rig.driver.launch_kernel(subtract, &LaunchConfig::linear(1, 1), args.as_bytes(), stream).unwrap() };
        });
        let node = rig.driver.node(rig.driver.graph_nodes(graph).unwrap()[0]).unwrap();
        assert!(matches!(node, Node::Kernel { function, .. } if function == subtract));
        let exec = rig.exec(stream, || rig.add(out, input, 4, 1, stream));
        intact(rig, exec, stream, out, input);
        assert_eq!(rig.driver.exec_update(exec, graph).unwrap(), UpdateResult::Updated);
        rig.set(input, 4, 10);
        rig.replay(exec, stream);
        assert_eq!(rig.read(out, 4), [9; 4]);
    }

    /// Child graphs are updated with their parent, or refused with it.
    fn children_follow_their_parent(rig) {
        let stream = rig.stream();
        let (out, input) = (rig.words(4, 0), rig.words(4, 0));
        let one = rig.capture(stream, || rig.add(out, input, 4, 9, stream));
        let two = rig.capture(stream, || rig.add(out, input, 4, 1, stream));
        let set = rig.capture(stream, || rig.driver.memset_d8(out, 1, 4, stream).unwrap());
        let outer = |inner: GraphHandle| rig.capture(stream, || rig.driver.add_child(stream, inner).unwrap());
        let exec = rig.driver.instantiate(outer(one)).unwrap();
        assert_eq!(rig.driver.exec_update(exec, outer(two)).unwrap(), UpdateResult::Updated);
        intact(rig, exec, stream, out, input);
        assert_eq!(rig.driver.exec_update(exec, outer(set)).unwrap(), UpdateResult::NodeTypeChanged);
        intact(rig, exec, stream, out, input);
    }

    /// Updates name live execs and graphs.
    fn an_update_needs_live_handles(rig) {
        let stream = rig.stream();
        let graph = rig.capture(stream, || ());
        let exec = rig.driver.instantiate(graph).unwrap();
        assert!(matches!(kind(rig.driver.exec_update(exec, GraphHandle(1))), DriverErrorKind::InvalidHandle(_)));
        rig.driver.exec_destroy(exec).unwrap();
        assert!(matches!(kind(rig.driver.exec_update(exec, graph)), DriverErrorKind::InvalidHandle(_)));
    }
}
