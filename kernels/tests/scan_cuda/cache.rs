//! The scan as a part of a capture: what it costs, what opaque graphs do, what a dead context says.

use std::time::Instant;

use cudarc::driver::sys;
use evergraph_graphcache::{CacheConfig, CacheError, Contents, GraphCache, GraphKey, Ran, Request};
use evergraph_pool::driver::{DevicePtr, DriverErrorKind};
use evergraph_pool::{Purpose, ScratchPolicy, Use};

use super::nodes::words;
use super::rig::Rig;
use super::{Story, Told};

pub(crate) const STORIES: &[Story] = &[
    ("three_hundred_nodes_are_read_quickly", three_hundred_nodes_are_read_quickly),
    ("an_opaque_graph_is_pinned", an_opaque_graph_is_pinned),
    ("a_fault_names_its_graph", a_fault_names_its_graph),
];

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn three_hundred_nodes_are_read_quickly(rig: &Rig) -> Told {
    const NODES: usize = 300;
    let weights: Vec<_> = (0..NODES).map(|_| words!(rig, 64)).collect();
    let (x, y) = (words!(rig, 64), words!(rig, 64));
    let record = || {
        for (i, w) in weights.iter().enumerate() {
            let (dst, src) = if i % 2 == 0 { (x.ptr(), w.ptr()) } else { (y.ptr(), x.ptr()) };
            rig.add(dst, src, 4, i as u32);
        }
    };
    let graph = rig.capture(record);
    let us = |f: &mut dyn FnMut()| {
        let one = |f: &mut dyn FnMut()| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64() * 1e6
        };
        let first = one(f);
        (first, median((0..51).map(|_| one(f)).collect()))
    };
    let nodes = us(&mut || {
        for node in rig.driver.graph_nodes(graph).unwrap() {
            std::hint::black_box(rig.driver.node(node).unwrap());
        }
    });
    let edges = us(&mut || {
        std::hint::black_box(rig.driver.graph_edges(graph).unwrap());
    });
    let whole = us(&mut || {
        std::hint::black_box(Contents::read(&rig.driver, graph).unwrap());
    });
    println!("{NODES} nodes, first and median us: driver {nodes:.1?}, edges {edges:.1?}, contents {whole:.1?}");
    let (cache, key) = (GraphCache::new(CacheConfig::default()), GraphKey::new("300 nodes"));
    let mut scans = Vec::new();
    for turn in 0..24 {
        let request = Request::new(&key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track);
        let outcome = cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.keep(rig.module.clone());
            for w in &weights {
                scope.declare(w, Use::Weight)?;
            }
            scope.declare(&x, Use::State)?;
            scope.declare(&y, Use::State)?;
            record();
            Ok(())
        });
        let _ = outcome.unwrap();
        if turn >= 2 {
            scans.push(f64::from(cache.info(&request).unwrap().scan_us));
            cache.invalidate(&key);
        }
    }
    println!("with look-ups of all pointers: first {:.1} us, median {:.1} us", scans[0], median(scans.clone()));
    Ok(())
}

/// What can not be read may use more than anybody can see: what is known of it stays where it is.
fn an_opaque_graph_is_pinned(rig: &Rig) -> Told {
    let (a, b, word) = (words!(rig, 4), words!(rig, 4), words!(rig, 1));
    let (cache, key) = (GraphCache::new(CacheConfig::default()), GraphKey::new("opaque"));
    let request = || Request::new(&key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track);
    let mut refused = 0;
    for expected in [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed] {
        let outcome = cache.run(&request(), |scope| -> Result<(), CacheError> {
            scope.declare(&a, Use::Input)?;
            scope.declare(&b, Use::State)?;
            scope.declare(&word, Use::State)?;
            let middle = scope.alloc::<u32>(4 << 20)?;
            rig.add_in(scope, middle.ptr(), a.ptr(), 5)?;
            rig.add_in(scope, b.ptr(), middle.ptr(), 1)?;
            // SAFETY: a live stream and word.
            refused |= unsafe { sys::cuStreamWriteValue32_v2(rig.raw_stream(), word.ptr().0, 7, 0) } as u32;
            Ok(())
        });
        if refused != 0 {
            return Err(format!("the driver refuses memory operations: {refused}"));
        }
        assert_eq!(outcome.unwrap().ran, expected);
        assert_eq!(rig.stream.download(&b).unwrap(), [7; 4]);
    }
    let info = cache.info(&request()).unwrap();
    assert!(info.opaque.is_some(), "{info:?}");
    assert_eq!(cache.counters().opaque, 1);
    // Pinned: nothing of it goes back, so the next run is a plain replay.
    rig.pool.trim_to(0).unwrap();
    let outcome = cache.run(&request(), |_| -> Result<(), CacheError> { panic!("a replay calls nothing") });
    assert_eq!(outcome.unwrap().ran, Ran::Replayed);
    assert_eq!(rig.stream.download(&word).unwrap(), [7]);
    Ok(())
}

/// An illegal address in a replay is reported by a later call, with the graph's key; and that again by every call.
fn a_fault_names_its_graph(rig: &Rig) -> Told {
    let (a, table) = (words!(rig, 4), rig.pool.alloc_for::<u8>(8 << 20, Purpose::State, &rig.stream).unwrap());
    let wrong = DevicePtr(table.ptr().0 + (1 << 40));
    let (cache, key) = (GraphCache::new(CacheConfig::default()), GraphKey::new("writes nowhere"));
    let mut armed = false;
    let mut last = None;
    for turn in 0..4 {
        let outcome = cache.run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
            armed = scope.capturing();
            scope.declare(&a, Use::State)?;
            rig.add_in(scope, if armed { wrong } else { a.ptr() }, a.ptr(), 1)
        });
        let seen = outcome.map(drop).and_then(|()| Ok(rig.stream.synchronize()?));
        if let Err(error) = seen {
            println!("run {turn}: {error}");
            last = Some(error.to_string());
            break;
        }
        rig.stream.synchronize().unwrap();
    }
    let text = last.unwrap();
    assert!(text.contains("illegal address") && text.contains("writes nowhere"), "{text}");
    let again = rig.driver.mem_info().unwrap_err();
    let DriverErrorKind::Fault(fault) = &again.kind else { panic!("found {again}") };
    assert_eq!(rig.driver.fault().as_ref(), Some(fault));
    assert!(fault.op.contains("writes nowhere"), "{fault}");
    Ok(())
}
