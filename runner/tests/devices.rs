//! Models over several devices: the same numbers as on one, wherever blocks, caches and experts are.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use evergraph_pool::driver::host::{HostConfig, HostDevice, HostMachine};
use evergraph_pool::driver::{DeviceOrdinal, DynDriver, VirtualMachine};
use evergraph_runner::engine::{ActType, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::models;
use evergraph_runner::placement::{Home, Names, Placement, Rule};
use evergraph_runner::sampling::Sampling;
use serde_json::Value;

/// One of each kind, and all kinds there are.
const MODELS: [&str; 9] = [
    "gemma3.gguf",
    "gemma4-dense.gguf",
    "gemma4-moe.gguf",
    "gemma4-moe-q.gguf",
    "gemma4-e.gguf",
    "deepseek-v2-lite.gguf",
    "deepseek-v3.gguf",
    "deepseek-v4.gguf",
    "deepseek-v4-q.gguf",
];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// How a model is run.
#[derive(Clone, Copy, Debug)]
struct Way {
    devices: usize,
    mode: PoolMode,
    graphs: bool,
    act: ActType,
    ubatch: usize,
    /// Whether weights are copied to the devices, as on hardware.
    copied: bool,
    /// Whether the devices are virtual ones of one device.
    parts: bool,
}

const PLAIN: Way = Way {
    devices: 1,
    mode: PoolMode::Vmm,
    graphs: true,
    act: ActType::F32,
    ubatch: usize::MAX,
    copied: false,
    parts: false,
};

/// Logits of each prompt position, then of each greedy step, with the tokens.
#[derive(Debug, Default, PartialEq)]
struct Trace {
    logits: Vec<Vec<f32>>,
    tokens: Vec<u32>,
}

fn runtime(way: Way) -> Arc<Runtime> {
    let drivers: Vec<DynDriver> = if way.parts {
        let one = HostDevice::new(HostConfig::default()).unwrap() as DynDriver;
        VirtualMachine::new(&[one], way.devices).unwrap().into_iter().map(|device| device as DynDriver).collect()
    } else {
        let machine = HostMachine::new(way.devices, HostConfig::default()).unwrap();
        machine.into_iter().map(|device| device as DynDriver).collect()
    };
    let mut config = RuntimeConfig::default();
    config.pool = PoolConfig::new(way.mode);
    config.graphs = way.graphs;
    config.act = way.act;
    config.strict = true;
    config.copy_weights = way.copied;
    Arc::new(Runtime::several(drivers, config).unwrap())
}

fn session(model: &str, way: Way, placement: &Placement) -> (Session, Vec<u32>, usize) {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(data(&model.replace(".gguf", ".json"))).unwrap()).unwrap();
    let prompt: Vec<u32> = serde_json::from_value(golden["prompt_tokens"].clone()).unwrap();
    let steps = golden["decode"]["tokens"].as_array().unwrap().len();
    let runtime = runtime(way);
    let file = Arc::new(Gguf::open(&data(model)).unwrap());
    let model = Arc::new(models::load_placed(file, &runtime, placement).unwrap());
    let mut settings = SessionConfig::default();
    settings.context = Some(prompt.len() + steps);
    settings.ubatch = way.ubatch;
    settings.kv = (KvType::F32, KvType::F32);
    settings.logit_rows = 1 << 10;
    let mut session = Session::new(runtime, model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &prompt).unwrap();
    (session, prompt, steps)
}

fn trace(model: &str, way: Way, placement: &Placement) -> Trace {
    let (mut session, prompt, steps) = session(model, way, placement);
    let trace = run(&mut session, &prompt, steps);
    // Twice, so that graphs of the prompt are replayed.
    session.clear().unwrap();
    let again = run(&mut session, &prompt, steps);
    assert_eq!(trace, again, "{model} {way:?}: another time");
    if way.graphs {
        assert!(session.runtime().graph_counters().replays > 0, "{model} {way:?}: nothing was replayed");
    }
    session.runtime().units().iter().for_each(|unit| unit.pool().check().unwrap());
    trace
}

fn run(session: &mut Session, prompt: &[u32], steps: usize) -> Trace {
    let mut trace = Trace::default();
    let vocabulary = session.model().vocabulary;
    session
        .feed(prompt, |session, _, count| {
            let logits = session.logits(0, count)?;
            trace.logits.extend(logits.chunks(vocabulary).map(<[f32]>::to_vec));
            Ok(())
        })
        .unwrap();
    trace.tokens.push(session.pick().unwrap());
    for _ in 0..steps.min(6) {
        trace.tokens.push(session.decode().unwrap());
        trace.logits.push(session.last_logits().unwrap());
    }
    trace
}

/// Blocks go to devices one after the other; nothing of what they compute changes, to the last bit.
#[test]
fn models_over_several_devices_give_the_same_bits() {
    for model in MODELS {
        let one = trace(model, PLAIN, &Placement::default());
        for devices in 2..=4 {
            let way = Way { devices, mode: if devices == 3 { PoolMode::Slab } else { PoolMode::Vmm }, ..PLAIN };
            assert!(trace(model, way, &Placement::default()) == one, "{model} on {devices} devices");
        }
        let eager = Way { devices: 2, graphs: false, ..PLAIN };
        assert!(trace(model, eager, &Placement::default()) == one, "{model} without graphs");
    }
}

/// As on hardware: weights are copied to their devices; activations are quantised.
#[test]
fn weights_that_are_copied_go_to_their_devices() {
    for model in ["gemma4-e.gguf", "gemma4-moe-q.gguf", "deepseek-v2-lite.gguf", "deepseek-v4-q.gguf"] {
        let way = Way { act: ActType::Q8, copied: true, ..PLAIN };
        let one = trace(model, way, &Placement::default());
        assert!(trace(model, Way { devices: 3, ..way }, &Placement::default()) == one, "{model}");
    }
}

/// Virtual devices of one device, as several of one GPU are: each pointer of a launch is looked up, and none is another's.
#[test]
fn virtual_devices_of_one() {
    let rules = vec![Rule { names: Names::ExpertsBelow(usize::MAX), home: Home::Host }];
    let experts = Placement { rules, ..Placement::default() };
    for (model, placement) in [
        ("gemma4-e.gguf", Placement::default()),
        ("gemma4-moe.gguf", Placement::default()),
        ("deepseek-v4.gguf", Placement::default()),
        ("deepseek-v4.gguf", experts),
    ] {
        let one = trace(model, PLAIN, &placement);
        for graphs in [true, false] {
            let way = Way { devices: 2, parts: true, graphs, ..PLAIN };
            assert!(trace(model, way, &placement) == one, "{model}, graphs {graphs}");
        }
    }
}

/// A prompt crosses the boundary in steps of one row and of many: row writes into caches of both devices.
#[test]
fn prompts_in_steps_of_one_row_and_of_many() {
    for model in ["gemma3.gguf", "deepseek-v4.gguf", "deepseek-v3.gguf"] {
        for ubatch in [1, 3] {
            let one = trace(model, Way { ubatch, ..PLAIN }, &Placement::default());
            let two = trace(model, Way { devices: 2, ubatch, ..PLAIN }, &Placement::default());
            assert!(one == two, "{model} in steps of {ubatch}");
        }
    }
}

/// `-ts` and `-ngl`: any part of a model on any device, none, or the host.
#[test]
fn shares_of_devices() {
    let one = trace("gemma4-moe.gguf", PLAIN, &Placement::default());
    for shares in [vec![1.0, 3.0], vec![0.0, 1.0], vec![1.0, 0.0]] {
        let placement = Placement { shares, ..Placement::default() };
        assert!(trace("gemma4-moe.gguf", Way { devices: 2, ..PLAIN }, &placement) == one, "{placement:?}");
    }
    for layers in [0, 1, 2] {
        let placement = Placement { device_layers: Some(layers), ..Placement::default() };
        let one = trace("gemma4-moe.gguf", PLAIN, &placement);
        assert!(trace("gemma4-moe.gguf", Way { devices: 2, ..PLAIN }, &placement) == one, "-ngl {layers}");
    }
}

/// `-cmoe`, and `-ncmoe` by device, over several: what goes to the host goes from the device of its block.
#[test]
fn experts_on_the_host_of_several_devices() {
    let rules = vec![Rule { names: Names::ExpertsBelow(usize::MAX), home: Home::Host }];
    let all = Placement { rules, ..Placement::default() };
    let some = Placement { host_experts: vec![1, 0, 1], ..Placement::default() };
    for model in ["gemma4-moe.gguf", "deepseek-v4.gguf", "deepseek-v4-q.gguf", "deepseek-v3.gguf"] {
        let one = trace(model, PLAIN, &all);
        for (placement, devices) in [(&all, 2), (&some, 3)] {
            for graphs in [true, false] {
                let way = Way { devices, graphs, ..PLAIN };
                let several = trace(model, way, placement);
                assert!(several == one, "{model} on {devices} devices, graphs {graphs}");
            }
        }
    }
}

/// Sliding windows and compressor state go back to where they were, on whichever device they are.
#[test]
fn a_mark_is_kept_on_all_devices() {
    for model in ["gemma3.gguf", "deepseek-v4.gguf"] {
        let (mut session, prompt, _) = session(model, Way { devices: 2, ..PLAIN }, &Placement::default());
        let (first, rest) = prompt.split_at(prompt.len() / 2);
        session.feed(first, |_, _, _| Ok(())).unwrap();
        let mark = session.mark().unwrap();
        let mut ends = Vec::new();
        for _ in 0..2 {
            session.feed(rest, |_, _, _| Ok(())).unwrap();
            session.pick().unwrap();
            ends.push(session.last_logits().unwrap());
            session.rewind(&mark).unwrap();
        }
        assert!(ends[0] == ends[1], "{model}");
    }
}

/// A flush on either device is repaired, and nothing of the sequence is lost.
#[test]
fn a_flush_on_either_device() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let model = "gemma4-moe.gguf";
        let one = trace(model, PLAIN, &Placement::default());
        let way = Way { devices: 2, mode, ..PLAIN };
        let (mut session, prompt, steps) = session(model, way, &Placement::default());
        run(&mut session, &prompt, steps);
        for device in 0..2 {
            session.clear().unwrap();
            session.runtime().synchronize().unwrap();
            session.runtime().unit(DeviceOrdinal(device)).pool().trim_to(0).unwrap();
            assert!(run(&mut session, &prompt, steps) == one, "{mode:?}: after a flush on device {device}");
        }
    }
}

/// Memory is where the blocks are, and activations cross where devices change.
#[test]
fn memory_is_where_the_blocks_are() {
    let way = Way { devices: 2, copied: true, ..PLAIN };
    let (session, _, _) = session("gemma4-dense.gguf", way, &Placement::default());
    let allocated = |n: usize| session.runtime().units()[n].pool().stats().allocated_bytes.current;
    assert!(allocated(0) > 0 && allocated(1) > 0, "{} and {}", allocated(0), allocated(1));
    let devices: Vec<u32> = session.model().blocks.iter().map(|block| block.device.0).collect();
    assert!(devices.is_sorted() && devices[0] == 0 && devices.contains(&1), "{devices:?}");
    for block in &session.model().blocks {
        assert_eq!(block.attn_norm.root().device, block.device);
        assert_eq!(block.attention.q.root().device, block.device);
        assert_eq!(block.attention.output.root().device, block.device);
    }
}
