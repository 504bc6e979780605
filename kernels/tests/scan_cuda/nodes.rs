//! Every kind of node: what is found in it, or why not.

use std::ffi::CStr;

use cudarc::driver::sys;
use evergraph_graphcache::{CacheError, Contents};
use evergraph_pool::driver::{Args, HostCallback, Node, NodeArgs};
use evergraph_pool::{Purpose, Tracked};

use super::Story;
use super::rig::{Rig, has};

pub(crate) const STORIES: &[Story] = &[
    ("an_own_kernel", an_own_kernel),
    ("pointers_into_the_middle", pointers_into_the_middle),
    ("a_struct_by_value", a_struct_by_value),
    ("packed_arguments", packed_arguments),
    ("a_kernel_of_a_library", a_kernel_of_a_library),
    ("copies_and_sets", copies_and_sets),
    ("a_child_graph", a_child_graph),
    ("a_host_function", a_host_function),
    ("event_nodes", event_nodes),
    ("allocation_nodes_are_refused", allocation_nodes_are_refused),
    ("a_batched_memory_operation_is_opaque", a_batched_memory_operation_is_opaque),
    ("a_conditional_is_opaque", a_conditional_is_opaque),
    ("an_external_semaphore_is_opaque", an_external_semaphore_is_opaque),
];

macro_rules! words {
    ($rig:expr, $n:expr) => {
        $rig.pool.upload(&[1u32; $n], Purpose::State, &$rig.stream).unwrap()
    };
}
pub(crate) use words;

fn an_own_kernel(rig: &Rig) -> super::Told {
    let (a, b, _other) = (words!(rig, 4), words!(rig, 4), words!(rig, 4));
    let graph = rig.capture(|| rig.add(b.ptr(), a.ptr(), 4, 5));
    let contents = rig.expect(graph, &[&a, &b]);
    assert_eq!((contents.nodes, contents.kernels), (1, 1));
    rig.run(graph);
    assert_eq!(rig.stream.download(&b).unwrap(), [6; 4]);
    Ok(())
}

fn pointers_into_the_middle(rig: &Rig) -> super::Told {
    let (a, b) = (words!(rig, 1024), words!(rig, 1024));
    let graph = rig.capture(|| rig.add(b.ptr_at(1020).unwrap(), a.ptr_at(512).unwrap(), 4, 5));
    rig.expect(graph, &[&a, &b]);
    Ok(())
}

fn a_struct_by_value(rig: &Rig) -> super::Told {
    let (a, b) = (words!(rig, 4), words!(rig, 4));
    let mut args = Args::new();
    args.ptr(b.ptr()).ptr(a.ptr()).u32(4).u32(10).u32(100);
    let graph = rig.capture(|| rig.launch("by_struct", &args));
    rig.expect(graph, &[&a, &b]);
    rig.run(graph);
    assert_eq!(rig.stream.download(&b).unwrap(), [111; 4]);
    Ok(())
}

/// The form that libraries use.
fn packed_arguments(rig: &Rig) -> super::Told {
    let (a, b) = (words!(rig, 4), words!(rig, 4));
    let mut args = Args::new();
    args.ptr(b.ptr()).ptr(a.ptr()).u32(4).u32(7);
    let function: sys::CUfunction =
        std::ptr::with_exposed_provenance_mut(rig.module.function("add").unwrap().0 as usize);
    let graph = rig.capture(|| {
        let mut size = args.as_bytes().len();
        let key = std::ptr::without_provenance_mut;
        let buffer = args.as_bytes().as_ptr().cast_mut().cast();
        let mut extra = [key(1), buffer, key(2), (&raw mut size).cast(), key(0)];
        // SAFETY: live handles; the list and what it names live through the call, which copies the buffer.
        let status = unsafe {
            sys::cuLaunchKernel(
                function,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                rig.raw_stream(),
                std::ptr::null_mut(),
                extra.as_mut_ptr(),
            )
        };
        assert_eq!(status as u32, 0);
    });
    rig.expect(graph, &[&a, &b]);
    Ok(())
}

/// Kernels of a `CUlibrary` are known by another handle, in a launch and in a node made by hand.
fn a_kernel_of_a_library(rig: &Rig) -> super::Told {
    let (a, b) = (words!(rig, 4), words!(rig, 4));
    let name: &CStr = c"add";
    let (mut library, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
    let (no_option, no_value, no_library_option) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a cubin for this device, and live places.
    let loaded = unsafe {
        sys::cuLibraryLoadData(
            &raw mut library,
            rig.cubin.as_ptr().cast(),
            no_option,
            no_value,
            0,
            no_library_option,
            std::ptr::null_mut(),
            0,
        )
    };
    assert_eq!(loaded as u32, 0);
    // SAFETY: a live library and place.
    assert_eq!(unsafe { sys::cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr()) } as u32, 0);
    let (mut dst, mut src, mut n, mut k) = (b.ptr().0, a.ptr().0, 4u32, 7u32);
    let mut params = [(&raw mut dst).cast(), (&raw mut src).cast(), (&raw mut n).cast(), (&raw mut k).cast()];
    let launched = rig.capture(|| {
        // SAFETY: a kernel stands for its function here; the arguments are the kernel's.
        let status = unsafe {
            sys::cuLaunchKernel(
                kernel.cast(),
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                rig.raw_stream(),
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        assert_eq!(status as u32, 0);
    });
    rig.expect(launched, &[&a, &b]);
    rig.run(launched);
    assert_eq!(rig.stream.download(&b).unwrap(), [8; 4]);
    let by_hand = rig.capture(|| {
        // SAFETY: all zero is a valid value of these plain fields.
        let mut node: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
        (node.gridDimX, node.gridDimY, node.gridDimZ) = (1, 1, 1);
        (node.blockDimX, node.blockDimY, node.blockDimZ) = (32, 1, 1);
        (node.kern, node.kernelParams) = (kernel, params.as_mut_ptr());
        let made = rig.add_node(|graph, after, count, out| {
            // SAFETY: live places; the arguments are copied.
            unsafe { sys::cuGraphAddKernelNode_v2(out, graph, after, count, &raw const node) as u32 }
        });
        let node = made.unwrap();
        let read = rig.driver.node(node).unwrap();
        let Node::Kernel { function, args: NodeArgs::Packed { .. }, .. } = read else { panic!("found {read:?}") };
        println!("kernel {:p}, read back as {:#x}", kernel, function.0);
    });
    rig.expect(by_hand, &[&a, &b]);
    Ok(())
}

fn copies_and_sets(rig: &Rig) -> super::Told {
    let (a, b, c, d) = (words!(rig, 64), words!(rig, 64), words!(rig, 64), words!(rig, 64));
    let (from, to) = (rig.pool.host_buffer::<u32>(64).unwrap(), rig.pool.host_buffer::<u32>(64).unwrap());
    from.write(&[3; 64]).unwrap();
    let stream = &rig.stream;
    let graph = rig.capture(|| {
        stream.copy(&a, &b).unwrap();
        stream.copy_from_host(&from, &c).unwrap();
        stream.copy_to_host(&c, &to).unwrap();
        rig.driver.memset_d8(d.ptr_at(8).unwrap(), 0, 32, stream.handle()).unwrap();
    });
    let contents = rig.expect(graph, &[&a, &b, &c, &d, &from, &to]);
    assert_eq!((contents.nodes, contents.host.len()), (4, 2), "{contents:?}");
    rig.run(graph);
    assert_eq!(to.read().unwrap(), [3; 64]);
    Ok(())
}

fn a_child_graph(rig: &Rig) -> super::Told {
    let (a, b, c) = (words!(rig, 4), words!(rig, 4), words!(rig, 4));
    let inner = rig.capture(|| rig.add(b.ptr(), a.ptr(), 4, 5));
    let outer = rig.capture(|| {
        rig.driver.add_child(rig.stream.handle(), inner).unwrap();
        rig.add(c.ptr(), b.ptr(), 4, 1);
    });
    rig.driver.graph_destroy(inner).unwrap();
    let contents = rig.expect(outer, &[&a, &b, &c]);
    assert_eq!((contents.nodes, contents.kernels), (3, 2));
    rig.run(outer);
    assert_eq!(rig.stream.download(&c).unwrap(), [7; 4]);
    Ok(())
}

fn a_host_function(rig: &Rig) -> super::Told {
    let (a, b) = (words!(rig, 4), words!(rig, 4));
    let graph = rig.capture(|| {
        rig.add(b.ptr(), a.ptr(), 4, 5);
        rig.driver.launch_host_fn(rig.stream.handle(), HostCallback::new(|| ())).unwrap();
    });
    let contents = rig.expect(graph, &[&a, &b]);
    assert!(contents.needs_owner.is_some_and(|why| why.contains("host function")));
    Ok(())
}

fn event_nodes(rig: &Rig) -> super::Told {
    const EXTERNAL: u32 = 1;
    if !has("cuEventRecordWithFlags") {
        return Err("the driver has no external events".to_owned());
    }
    let event = rig.driver.event_create(false).unwrap();
    let raw: sys::CUevent = std::ptr::with_exposed_provenance_mut(event.0 as usize);
    let graph = rig.capture(|| {
        // SAFETY: live handles.
        let recorded = unsafe { sys::cuEventRecordWithFlags(raw, rig.raw_stream(), EXTERNAL) };
        // SAFETY: as above.
        let waits = unsafe { sys::cuStreamWaitEvent(rig.raw_stream(), raw, EXTERNAL) };
        assert_eq!((recorded as u32, waits as u32), (0, 0));
    });
    let nodes = rig.driver.graph_nodes(graph).unwrap();
    let read: Vec<Node> = nodes.iter().map(|&node| rig.driver.node(node).unwrap()).collect();
    assert!(matches!(read[..], [Node::EventRecord(r), Node::EventWait(w)] if (r, w) == (event, event)), "{read:?}");
    let contents = rig.expect(graph, &[]);
    assert!(contents.needs_owner.is_some_and(|why| why.contains("event")));
    rig.run(graph);
    Ok(())
}

fn allocation_nodes_are_refused(rig: &Rig) -> super::Told {
    let graph = rig.capture(|| {
        let mut ptr = 0;
        // SAFETY: live places; the memory is the graph's.
        let taken = unsafe { sys::cuMemAllocAsync(&raw mut ptr, 4096, rig.raw_stream()) };
        // SAFETY: as above.
        let given = unsafe { sys::cuMemFreeAsync(ptr, rig.raw_stream()) };
        assert_eq!((taken as u32, given as u32), (0, 0));
    });
    assert!(matches!(Contents::read(&rig.driver, graph), Err(CacheError::AllocationNode)));
    Ok(())
}

/// Reads a graph that must be opaque, for a node of that number.
fn opaque(rig: &Rig, graph: evergraph_pool::driver::GraphHandle, number: u32, known: &[&dyn Tracked]) {
    let contents = rig.read(graph);
    let why = contents.opaque.clone().unwrap();
    assert!(why.contains(&format!("({number})")), "{why}");
    assert_eq!(rig.found(&contents), super::rig::ids(known), "what can be read still is");
}

fn a_batched_memory_operation_is_opaque(rig: &Rig) -> super::Told {
    if !has("cuStreamWriteValue32_v2") {
        return Err("the driver has no memory operations".to_owned());
    }
    let (a, b, word) = (words!(rig, 4), words!(rig, 4), words!(rig, 1));
    let mut status = 0;
    let graph = rig.capture(|| {
        rig.add(b.ptr(), a.ptr(), 4, 5);
        // SAFETY: a live stream and word.
        status = unsafe { sys::cuStreamWriteValue32_v2(rig.raw_stream(), word.ptr().0, 7, 0) } as u32;
    });
    if status != 0 {
        return Err(format!("the driver refuses to record one: {status}"));
    }
    opaque(rig, graph, 12, &[&a, &b]);
    Ok(())
}

fn a_conditional_is_opaque(rig: &Rig) -> super::Told {
    if !has("cuGraphConditionalHandleCreate") || !has("cuGraphAddNode_v2") {
        return Err("the driver has no conditional nodes".to_owned());
    }
    let (a, b) = (words!(rig, 4), words!(rig, 4));
    let mut made = Err(0);
    let graph = rig.capture(|| {
        rig.add(b.ptr(), a.ptr(), 4, 5);
        made = rig.add_node(|graph, after, count, out| {
            let (mut context, mut handle) = (std::ptr::null_mut(), 0);
            // SAFETY: live places and graph.
            let handled = unsafe {
                sys::cuCtxGetCurrent(&raw mut context);
                sys::cuGraphConditionalHandleCreate(&raw mut handle, graph, context, 0, 1)
            };
            if handled as u32 != 0 {
                return handled as u32;
            }
            // SAFETY: all zero is a valid value of these plain fields.
            let mut params: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
            params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
            params.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
                handle,
                type_: sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF,
                size: 1,
                phGraph_out: std::ptr::null_mut(),
                ctx: context,
            };
            // SAFETY: live places.
            unsafe { sys::cuGraphAddNode_v2(out, graph, after, std::ptr::null(), count, &raw mut params) as u32 }
        });
    });
    if let Err(status) = made {
        return Err(format!("the driver refuses to make one: {status}"));
    }
    opaque(rig, graph, 13, &[&a, &b]);
    Ok(())
}

fn an_external_semaphore_is_opaque(rig: &Rig) -> super::Told {
    let (a, b) = (words!(rig, 4), words!(rig, 4));
    let mut made = Err(0);
    let graph = rig.capture(|| {
        rig.add(b.ptr(), a.ptr(), 4, 5);
        // SAFETY: all zero is "of no semaphore", which some drivers take.
        let params: sys::CUDA_EXT_SEM_SIGNAL_NODE_PARAMS = unsafe { std::mem::zeroed() };
        made = rig.add_node(|graph, after, count, out| {
            // SAFETY: live places.
            unsafe { sys::cuGraphAddExternalSemaphoresSignalNode(out, graph, after, count, &raw const params) as u32 }
        });
    });
    if let Err(status) = made {
        return Err(format!("the driver refuses one of no semaphore ({status}), and this machine has no other"));
    }
    opaque(rig, graph, 8, &[&a, &b]);
    Ok(())
}
