use std::collections::BTreeSet;

use evergraph_pool::driver::host::{HostConfig, HostDevice};

use super::*;
use crate::cases::{Bench, cases};

fn emulation() -> Option<&'static Emulation> {
    match Emulation::of_this_crate() {
        Ok(emulation) => Some(emulation),
        Err(EmulationError::NoCompiler(why)) => {
            eprintln!("skipped: no g++ to emulate CUDA kernels with ({why})");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn driver() -> DynDriver {
    HostDevice::new(HostConfig::default().memory(1 << 30)).unwrap()
}

/// Runs the cases of these ops: against the host device's bodies, and in another order of threads for the same bits.
#[track_caller]
fn run(ops: &[&str]) {
    let Some(emulation) = emulation() else { return };
    let mut told = BTreeSet::new();
    for case in cases().into_iter().filter(|case| ops.contains(&case.op()) && !case.is_large()) {
        // A device for each: a fault is the end of one.
        let bench = |kernels| Bench::new(kernels, 0).unwrap();
        let host = bench(Kernels::load(driver()).unwrap());
        let up = bench(emulation.on(driver(), Order::Up).unwrap());
        let outcome = case.run(&up, &host).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        assert!(outcome.passed(), "{case:?}: {} > {} at {}", outcome.error, outcome.tolerance, outcome.place);
        for order in [Order::Down, Order::Mixed] {
            let other = bench(emulation.on(driver(), order).unwrap());
            let outcome = case.run(&other, &up).unwrap_or_else(|e| panic!("{case:?} {order:?}: {e}"));
            assert_eq!(outcome.error, 0.0, "{case:?}: {order:?} gives other bits at {}", outcome.place);
        }
        told.insert(case.op());
    }
    assert_eq!(told, ops.iter().copied().collect(), "each op has cases");
}

#[test]
fn elementwise_kernels_agree_with_the_host_device() {
    run(&["add", "mul", "scale", "softcap", "glu"]);
}

#[test]
fn rows_are_decoded_and_activations_quantised_to_the_same_bits() {
    run(&["get_rows", "quantize"]);
}

#[test]
fn products_agree_with_the_host_device_for_every_type_and_number_of_tokens() {
    run(&["matmul"]);
}

#[test]
fn products_with_experts_agree_with_the_host_device() {
    run(&["expert_matmul"]);
}
