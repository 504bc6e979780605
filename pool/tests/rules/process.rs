//! The end of the process, and of threads.

use std::process::Command;
use std::sync::OnceLock;

use evergraph_pool::{DeviceSlice, PoolMode, ScratchPolicy};

use crate::common::*;

fn again(test: &str, key: &str) -> std::process::ExitStatus {
    let exe = std::env::current_exe().unwrap();
    Command::new(exe).args([test, "--exact", "--nocapture", "--test-threads=1"]).env(key, "1").status().unwrap()
}

#[test]
fn a_static_pool_with_a_live_graph_does_not_crash_at_exit() {
    static KEPT: OnceLock<(Rig, TestGraph, DeviceSlice<u8>)> = OnceLock::new();
    const KEY: &str = "EVERGRAPH_TEST_EXIT";
    if std::env::var_os(KEY).is_some() {
        KEPT.get_or_init(|| {
            let rig = Rig::with(device().stepped(false), config(PoolMode::Vmm));
            drop(rig.alloc(MIB));
            let graph = rig.graph(ScratchPolicy::Pin, |_| drop(rig.alloc(MIB)));
            let slice = rig.alloc(1000);
            rig.stream.fill(&slice, 1).unwrap();
            (rig, graph, slice)
        });
        return;
    }
    assert!(again("process::a_static_pool_with_a_live_graph_does_not_crash_at_exit", KEY).success());
}

#[test]
fn slices_may_be_dropped_on_any_thread_after_the_pool() {
    both(|mode| {
        let rig = Rig::with(device().stepped(false), config(mode));
        let slices: Vec<_> = (0..100).map(|i| rig.alloc(1000 * (i + 1))).collect();
        let Rig { host, pool, .. } = rig;
        drop(pool);
        let halves: Vec<_> = slices.into_iter().collect();
        std::thread::scope(|s| {
            for slice in halves {
                s.spawn(move || drop(slice));
            }
        });
        assert_eq!(host.live().used_bytes, 0);
    });
}
