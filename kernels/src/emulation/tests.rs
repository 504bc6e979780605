#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use evergraph_pool::driver::StreamHandle;
use evergraph_pool::driver::host::{HostConfig, HostDevice};

use super::*;
use crate::KernelError;
use crate::cases::{Bench, Case, Tensors, cases};
use crate::ops::{Attention, Call, ExpertMatMul, GatherExperts, GetRows, Op, Spread, TensorView};
use crate::quant::QuantType;

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

/// Runs the cases of these ops: against the host device's bodies, and in other orders of threads for the same bits.
#[track_caller]
fn run(ops: &[&str]) {
    let Some(emulation) = emulation() else { return };
    let bench = |kernels: Result<Kernels, KernelError>| Bench::new(kernels.unwrap(), 0).unwrap();
    let host = bench(Kernels::load(driver()));
    let all = [Order::Up, Order::Down, Order::Mixed].map(|order| bench(emulation.on(driver(), order)));
    let only = std::env::var("EVERGRAPH_CASE").unwrap_or_default();
    let mut told = BTreeSet::new();
    for case in cases().into_iter().filter(|case| ops.contains(&case.op()) && case.name().contains(&only)) {
        told.insert(case.op());
        if case.is_large() && only.is_empty() {
            continue;
        }
        let outcome = case.run(&all[0], &host).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        assert!(outcome.passed(), "{case:?}: {} > {} at {}", outcome.error, outcome.tolerance, outcome.place);
        for other in &all[1..] {
            let outcome = case.run(other, &all[0]).unwrap_or_else(|e| panic!("{case:?}: {e}"));
            assert_eq!(outcome.error, 0.0, "{case:?}: another order of threads gives other bits at {}", outcome.place);
        }
    }
    assert_eq!(told, ops.iter().copied().collect(), "each op has cases");
}

/// The parameters that a kernel takes are those that its op packs for the host device's kernel of that name.
#[test]
fn kernels_take_what_their_ops_pack() {
    let Some(emulation) = emulation() else { return };
    let mut compared = 0;
    for host in crate::cpu::KERNELS {
        if let Some(kernel) = emulation.kernels().iter().find(|k| k.name == host.name) {
            assert_eq!(kernel.params, host.params, "{}", host.name);
            compared += 1;
        }
    }
    assert!(compared >= 19, "{compared} kernels have the name of their op");
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
    run(&["expert_matmul", "head_matmul"]);
}

#[test]
fn ops_in_one_launch_give_what_they_give_one_after_the_other() {
    run(&["fused_norm", "fused_router", "fused_down"]);
}

/// What came of the ops that read numbers from device memory, when the last one is `id`.
fn launch_with(emulation: &Emulation, which: usize, id: i32) -> Result<(), KernelError> {
    let bench = Bench::new(emulation.on(driver(), Order::Up).unwrap(), 0).unwrap();
    let mut t = Tensors::new(&bench)?;
    let op: Box<dyn Op> = if which == 3 {
        let (w, ids, out) = (t.noise(&[4, 3, 2])?, t.ints(&[2], &[0, id])?, t.output(&[2, 3, 2])?);
        Box::new(GatherExperts { w, ids, out })
    } else if which == 0 {
        let (table, ids, out) = (t.noise(&[4, 3])?, t.ints(&[2], &[0, id])?, t.output(&[2, 3])?);
        Box::new(GetRows { table, ids, out, scale: 1.0 })
    } else {
        // Few tokens and many take different kernels.
        let tokens = [2, 30][which - 1];
        let mut ids = vec![3; 2 * tokens];
        ids[2 * tokens - 1] = id;
        let (w, x) = (t.noise(&[4, 3, 32])?, t.noise(&[tokens, 32])?);
        Box::new(ExpertMatMul::new(w, x, t.ints(&[tokens, 2], &ids)?, t.output(&[tokens, 2, 3])?))
    };
    op.launch(bench.kernels(), bench.stream())?;
    Ok(bench.driver().stream_synchronize(bench.stream())?)
}

#[test]
fn numbers_out_of_range_in_device_memory_are_faults_that_say_why() {
    let Some(emulation) = emulation() else { return };
    for (which, reason) in
        ["row number out of range", "expert id out of range", "expert id out of range", "expert id out of range"]
            .iter()
            .enumerate()
    {
        launch_with(emulation, which, 3).unwrap();
        // No expert is fine.
        if which > 0 {
            launch_with(emulation, which, -1).unwrap();
        }
        for id in [4, if which > 0 { -2 } else { -1 }, i32::MIN] {
            let fault = launch_with(emulation, which, id).unwrap_err();
            assert!(format!("{fault:?}").contains(reason), "{which} {id}: {fault:?}");
        }
    }
}

#[test]
fn rows_agree_with_the_host_device() {
    run(&["rms_norm", "residual_norm", "rope", "kv_store", "copy", "fill", "advance", "host_ask", "host_wait"]);
}

#[test]
fn experts_agree_with_the_host_device() {
    run(&["router", "expert_sum", "gather_experts", "share_experts"]);
}

#[test]
fn attention_agrees_with_the_host_device() {
    run(&["attention", "attention_heads", "latent_heads", "attention_scores", "attention_values", "soft_max"]);
}

#[test]
fn samples_are_those_of_the_host_device() {
    run(&["argmax", "sample"]);
}

#[test]
fn residual_streams_and_tails_of_heads_agree_with_the_host_device() {
    run(&["rope_tail", "hc_split_sinkhorn", "hc_weighted_sum", "hc_expand", "fp8_kv_quantize"]);
}

#[test]
fn compressed_keys_and_attention_over_them_agree_with_the_host_device() {
    run(&["compress_keys", "index_scores", "index_top", "compressed_attention", "hash_router"]);
}

/// Attention whose keys are spread over so many slices as on a large device, of at least so many keys. One block puts them
/// together: emulated blocks run one after the other, and can not wait for each other.
#[derive(Debug)]
struct Wide {
    op: Attention,
    slices: u32,
    least: u32,
}

impl Op for Wide {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn reads(&self) -> Vec<&TensorView> {
        self.op.reads()
    }

    fn writes(&self) -> Vec<&TensorView> {
        self.op.writes()
    }

    fn leftovers(&self) -> Vec<&TensorView> {
        self.op.leftovers()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.op.check()
    }

    fn call(&self) -> Call {
        self.op.call()
    }

    fn enqueue(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        if kernels.device().backend == "host" {
            return self.op.enqueue(kernels, stream);
        }
        let launches = self.op.launches(kernels.device());
        let [launch] = &launches[..] else { panic!("{launches:?}") };
        let mut config = launch.config;
        config.grid[0] = self.slices;
        let mut args = launch.args.as_bytes().to_vec();
        let last = args.len() - 12;
        for (to, value) in args[last..].chunks_exact_mut(4).zip([self.slices, self.least, 1]) {
            to.copy_from_slice(&value.to_ne_bytes());
        }
        kernels.launch(launch.kernel, &config, &args, stream)
    }
}

#[test]
fn slices_of_a_long_text_are_put_together_however_many_there_are() {
    let Some(emulation) = emulation() else { return };
    let host = Bench::new(Kernels::load(driver()).unwrap(), 0).unwrap();
    let orders = [Order::Up, Order::Mixed].map(|order| Bench::new(emulation.on(driver(), order).unwrap(), 0).unwrap());
    // As many keys as make so many slices of 16.
    for (slices, heads, dv) in
        [(3, 2, 64), (8, 3, 128), (9, 9, 64), (16, 2, 256), (17, 1, 64), (33, 2, 64), (71, 2, 64), (256, 1, 64)]
    {
        let case = Case::new("attention", format!("{slices} slices"), 5e-6, move |t| {
            let rows = 16 * slices;
            let typed = |t: &mut Tensors<'_>, cols: usize| {
                let values = t.random(rows * cols);
                t.typed(QuantType::F16, &[rows, 1, cols], &values)
            };
            let (k, v) = (typed(t, 32)?, typed(t, dv)?);
            let (room, counters) =
                (Attention::room(1, heads, 1, dv).unwrap(), Attention::counters(1, heads, 1).unwrap());
            let op = Attention {
                q: t.noise(&[1, heads, 32])?,
                k,
                v,
                positions: t.ints(&[1], &[rows as i32 - 1])?,
                out: t.output(&[1, heads, dv])?,
                scale: 0.7,
                window: None,
                softcap: None,
                sinks: Some(t.noise(&[heads])?),
                ring: false,
                codes: None,
                spread: Some(Spread { room: t.output(&[room])?, counters: t.ints(&[counters], &vec![0; counters])? }),
            };
            Ok(Box::new(Wide { op, slices: slices as u32, least: 16 }))
        });
        let outcome = case.run(&orders[0], &host).unwrap();
        assert!(outcome.passed(), "{case:?}: {} at {}", outcome.error, outcome.place);
        let outcome = case.run(&orders[1], &orders[0]).unwrap();
        assert_eq!(outcome.error, 0.0, "{case:?}: another order gives other bits at {}", outcome.place);
    }
}
