//! The tiny golden models: every value of their reference runs, in every way of running them.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use evergraph_graphcache::Counters;
use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_runner::device::Device;
use evergraph_runner::engine::{ActType, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::{self, Gguf, MetaValue, ValueType, Writer};
use evergraph_runner::models;
use evergraph_runner::sampling::Sampling;
use serde_json::Value;

/// Models whose weights are floats.
const FLOATS: [&str; 6] = [
    "gemma3.gguf",
    "gemma4-dense.gguf",
    "gemma4-moe.gguf",
    "gemma4-e.gguf",
    "deepseek-v2-lite.gguf",
    "deepseek-v3.gguf",
];

/// Models of several residual streams, with compressed keys.
const STREAMS: [&str; 2] = ["deepseek-v4.gguf", "deepseek-v4-q.gguf"];

/// Models whose weights are in blocks, of several types.
const BLOCKS: [&str; 1] = ["gemma4-moe-q.gguf"];

/// One of each kind: what goes with keys and values, experts in blocks of several types, per-layer embeddings, residual
/// streams with compressed keys, one compressed cache for all heads.
const KINDS: [&str; 6] = [
    "gemma3.gguf",
    "gemma4-dense.gguf",
    "gemma4-moe-q.gguf",
    "gemma4-e.gguf",
    "deepseek-v4-q.gguf",
    "deepseek-v3.gguf",
];

/// How far from its reference a model may be, as a part of the greatest value of a row.
fn tolerance(model: &str) -> f64 {
    if model.contains("-q.") { 2e-3 } else { 2e-4 }
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(data(name)).unwrap()).unwrap()
}

fn list<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).unwrap()
}

fn config(mode: PoolMode, graphs: bool, limit_bytes: Option<usize>) -> RuntimeConfig {
    let mut config = RuntimeConfig::default();
    config.pool = PoolConfig::new(mode);
    config.pool.limit_bytes = limit_bytes;
    config.graphs = graphs;
    config.act = ActType::F32;
    config.strict = true;
    config
}

/// Everything a run produces, position by position.
#[derive(Debug, Default, PartialEq)]
struct Trace {
    /// Logits of each prompt position.
    prompt: Vec<Vec<f32>>,
    /// Output of each block and of the last norm, for all prompt positions.
    outputs: Vec<Vec<f32>>,
    /// Greedy tokens.
    tokens: Vec<u32>,
    /// Logits after each of them was taken in.
    decode: Vec<Vec<f32>>,
}

/// The prompt in steps of `ubatch` tokens, then greedy steps.
fn trace(model: &str, config: RuntimeConfig, kv: KvType, ubatch: usize) -> Trace {
    trace_with(model, config, kv, ubatch, true)
}

/// The same, with flash attention or without.
fn trace_with(model: &str, config: RuntimeConfig, kv: KvType, ubatch: usize, flash: bool) -> Trace {
    let golden = json(&model.replace(".gguf", ".json"));
    let prompt: Vec<u32> = list(&golden["prompt_tokens"]);
    let steps = golden["decode"]["tokens"].as_array().unwrap().len();
    let runtime = Arc::new(Runtime::on(&Device::asked().unwrap(), config).unwrap());
    let model = Arc::new(models::load(Arc::new(Gguf::open(&data(model)).unwrap()), &runtime).unwrap());
    let (vocabulary, blocks) = (model.vocabulary, model.depth());
    let mut settings = SessionConfig::default();
    settings.context = Some(prompt.len() + steps);
    settings.ubatch = ubatch;
    settings.kv = (kv, kv);
    settings.logit_rows = 5;
    settings.taps = true;
    settings.flash_attention = flash;
    let mut session = Session::new(runtime, model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &prompt).unwrap();

    let mut trace = Trace { outputs: vec![Vec::new(); blocks + 1], ..Trace::default() };
    session
        .feed(&prompt, |session, _, count| {
            for first in (0..count).step_by(session.logit_rows()) {
                let rows = session.logit_rows().min(count - first);
                let logits = session.logits(first, rows)?;
                trace.prompt.extend(logits.chunks(vocabulary).map(<[f32]>::to_vec));
            }
            for (index, output) in trace.outputs.iter_mut().enumerate() {
                output.extend(session.output(index)?);
            }
            Ok(())
        })
        .unwrap();
    trace.tokens.push(session.pick().unwrap());
    for _ in 0..steps {
        trace.tokens.push(session.decode().unwrap());
        trace.decode.push(session.last_logits().unwrap());
    }
    trace.tokens.truncate(steps);
    trace
}

/// Checks values against a reference, within a part of the greatest magnitude of a row.
#[derive(Clone, Copy)]
struct Checker(f64);

impl Checker {
    #[track_caller]
    fn close(self, what: &str, row: &[f32], found: f32, expected: f64) {
        let scale = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let difference = (f64::from(found) - expected).abs();
        let most = self.0 * f64::from(scale);
        assert!(difference <= most, "{what}: {found} instead of {expected} (row up to {scale})");
    }

    #[track_caller]
    fn norm(self, what: &str, row: &[f32], expected: &Value) {
        let (found, expected) = (l2(row), expected.as_f64().unwrap());
        assert!((found - expected).abs() <= self.0 * expected, "norm of {what}: {found} not {expected}");
    }

    #[track_caller]
    fn top(self, what: &str, row: &[f32], expected: &Value) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        for (place, pair) in expected.as_array().unwrap().iter().enumerate() {
            let (id, value) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
            self.close(what, row, row[id], value);
            // The same order, but for neighbours that are too close to tell apart.
            self.close(what, row, row[order[place]], value);
        }
    }

    #[track_caller]
    fn row(self, what: &str, row: &[f32], expected: &Value) {
        let expected: Vec<f64> = list(expected);
        assert_eq!(row.len(), expected.len(), "{what}");
        for (index, (&found, &expected)) in row.iter().zip(&expected).enumerate() {
            self.close(&format!("{what}[{index}]"), row, found, expected);
        }
    }
}

fn l2(row: &[f32]) -> f64 {
    row.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

fn mean(row: &[f32]) -> f64 {
    row.iter().map(|&value| f64::from(value)).sum::<f64>() / row.len() as f64
}

/// Every value of the reference file.
fn check(model: &str, trace: &Trace) {
    let golden = json(&model.replace(".gguf", ".json"));
    let checker = Checker(tolerance(model));
    let prefill = &golden["prefill"];
    let positions = golden["prompt_tokens"].as_array().unwrap().len();
    assert_eq!(trace.prompt.len(), positions);
    checker.row(&format!("{model}: last logits"), trace.prompt.last().unwrap(), &prefill["logits_last"]);
    for (position, row) in trace.prompt.iter().enumerate() {
        let what = format!("{model}: position {position}");
        checker.top(&what, row, &prefill["top5"][position]);
        checker.close(&what, row, mean(row) as f32, prefill["logits_mean"][position].as_f64().unwrap());
        checker.norm(&what, row, &prefill["logits_l2"][position]);
    }

    let decode = &golden["decode"];
    assert_eq!(trace.tokens, list::<u32>(&decode["tokens"]), "{model}");
    for (step, row) in trace.decode.iter().enumerate() {
        checker.top(&format!("{model}: step {step}"), row, &decode["top5"][step]);
    }
    checker.row(&format!("{model}: final logits"), trace.decode.last().unwrap(), &decode["logits_final"]);

    let layers = golden["layers"].as_array().unwrap();
    assert_eq!(layers.len(), trace.outputs.len());
    for (layer, output) in layers.iter().zip(&trace.outputs) {
        let name = format!("{model}: {}", layer["name"].as_str().unwrap());
        let width = output.len() / positions;
        let (first, last) = (&output[..width], &output[output.len() - width..]);
        checker.close(&name, output, mean(output) as f32, layer["mean"].as_f64().unwrap());
        let magnitudes: Vec<f32> = output.iter().map(|value| value.abs()).collect();
        checker.close(&name, output, mean(&magnitudes) as f32, layer["abs_mean"].as_f64().unwrap());
        for (row, key) in [(first, "l2_first"), (last, "l2_last")] {
            checker.norm(&format!("{name} {key}"), row, &layer[key]);
        }
        for (index, expected) in list::<f64>(&layer["last_first8"]).iter().enumerate() {
            checker.close(&format!("{name}[{index}]"), last, last[index], *expected);
        }
    }
}

#[test]
fn the_prompt_in_one_step_gives_every_reference_value() {
    for model in FLOATS.into_iter().chain(BLOCKS) {
        check(model, &trace(model, config(PoolMode::Vmm, true, None), KvType::F32, 512));
    }
}

#[test]
fn the_prompt_in_small_steps_gives_every_reference_value() {
    // 7 does not divide 48, and the window of 16 spans several steps: the ring of the local layers wraps.
    for model in FLOATS.into_iter().chain(BLOCKS) {
        check(model, &trace(model, config(PoolMode::Slab, true, None), KvType::F32, 7));
    }
}

#[test]
fn the_prompt_token_by_token_gives_every_reference_value() {
    for model in FLOATS.into_iter().chain(BLOCKS) {
        check(model, &trace(model, config(PoolMode::Vmm, false, None), KvType::F32, 1));
    }
}

#[test]
fn scores_that_are_written_out_give_every_reference_value() {
    for model in FLOATS.into_iter().chain(BLOCKS) {
        let run = |mode, graphs, ubatch| trace_with(model, config(mode, graphs, None), KvType::F32, ubatch, false);
        let sevens = run(PoolMode::Slab, true, 7);
        check(model, &run(PoolMode::Vmm, true, 512));
        check(model, &sevens);
        check(model, &run(PoolMode::Vmm, false, 1));
        assert!(sevens == run(PoolMode::Vmm, false, 7), "{model}: graphs and pools do not change a bit");
        assert!(sevens != trace(model, config(PoolMode::Slab, true, None), KvType::F32, 7), "{model}: another way");
    }
}

#[test]
fn half_precision_caches_change_little() {
    for model in FLOATS.into_iter().chain(BLOCKS) {
        let exact = trace(model, config(PoolMode::Vmm, true, None), KvType::F32, 512);
        let greatest = |rows: &[Vec<f32>]| rows.iter().flatten().fold(0.0f32, |most, value| most.max(value.abs()));
        let scale = greatest(&exact.prompt);
        // These models answer to rounding more than large ones do: with the keys and values rounded to half precision and
        // everything else in double precision, the logits of gemma4-dense move by 2.4e-3 in the median, and by up to 6e-3
        // in gemma4-e.
        for (kv, factor) in [(KvType::F16, 1.0), (KvType::Bf16, 8.0)] {
            let rounded = trace(model, config(PoolMode::Vmm, true, None), kv, 512);
            assert_ne!(exact.prompt, rounded.prompt, "{model}, {kv:?} rounds");
            let apart = |(a, b): (&Vec<f32>, &Vec<f32>)| {
                a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max) / scale
            };
            let mut errors: Vec<f32> = exact.prompt.iter().zip(&rounded.prompt).map(apart).collect();
            errors.sort_by(f32::total_cmp);
            let median = errors[errors.len() / 2];
            assert!(median <= 3e-3 * factor, "{model}, {kv:?}: {median:e} in the median");
            // Where two experts are about as good, a rounded cache may choose the other: one position in ten may be off.
            let most = errors[errors.len() * 9 / 10];
            assert!(most <= 8e-3 * factor, "{model}, {kv:?}: {most:e}");
        }
    }
}

#[test]
fn graphs_pools_and_limits_do_not_change_a_bit() {
    // On a GPU the weights and the workspace of its library are in the pool as well.
    let tight: usize = if Device::asked().unwrap().backend() == "host" { 24 << 20 } else { 96 << 20 };
    for model in KINDS {
        let ubatches = if model == KINDS[0] { &[512, 7, 1][..] } else { &[7] };
        for &ubatch in ubatches {
            let plain = trace(model, config(PoolMode::Vmm, false, None), KvType::F16, ubatch);
            for mode in [PoolMode::Vmm, PoolMode::Slab] {
                for (graphs, limit) in [(true, None), (true, Some(tight)), (false, Some(tight))] {
                    let other = trace(model, config(mode, graphs, limit), KvType::F16, ubatch);
                    assert!(other == plain, "{model}, {mode}, graphs {graphs}, limit {limit:?}, steps of {ubatch}");
                }
            }
        }
    }
}

#[test]
fn compressed_keys_give_every_reference_value_however_tokens_come() {
    for model in STREAMS {
        check(model, &trace(model, config(PoolMode::Vmm, true, None), KvType::F32, 512));
        let sevens = trace(model, config(PoolMode::Slab, true, None), KvType::F32, 7);
        check(model, &sevens);
        check(model, &trace(model, config(PoolMode::Vmm, false, None), KvType::F32, 1));
        assert!(
            sevens == trace(model, config(PoolMode::Vmm, false, None), KvType::F32, 7),
            "{model}: graphs and pools"
        );
    }
}

#[test]
fn half_precision_compressed_keys_change_little_but_where_the_index_chooses_others() {
    for model in STREAMS {
        let exact = trace(model, config(PoolMode::Vmm, true, None), KvType::F32, 512);
        let rounded = trace(model, config(PoolMode::Vmm, true, None), KvType::F16, 512);
        assert_ne!(exact.prompt, rounded.prompt, "{model} rounds");
        let scale = exact.prompt.iter().flatten().fold(0.0f32, |most, value| most.max(value.abs()));
        let apart =
            |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max) / scale;
        let mut errors: Vec<f32> = exact.prompt.iter().zip(&rounded.prompt).map(apart).collect();
        errors.sort_by(f32::total_cmp);
        // In these models of random weights two keys are often about as good: three positions in ten may see another.
        let (median, most) = (errors[errors.len() / 2], errors[errors.len() * 7 / 10]);
        assert!(median <= 1e-3 && most <= 2e-2, "{model}: {median:e} in the median, {most:e}");
    }
}

/// What came out of [`rounds`].
struct Rounds {
    picked: Vec<u32>,
    reserved_peak_bytes: usize,
    /// Give-backs to the driver, and blocks that went from a graph to another owner.
    given_back: u64,
    graphs: Counters,
}

/// Reads a text over and over in steps of several lengths, so that graphs come and go and come back. Each
/// graph's scratch is more than one chunk (of 64 KiB here) or slab (of 2 MiB).
fn rounds(mut config: RuntimeConfig) -> Rounds {
    let scale = if config.pool.mode == PoolMode::Vmm { 1 } else { 9 };
    config.pool = config.pool.chunk(64 << 10);
    let driver = HostDevice::new(HostConfig::default().granularity(64 << 10)).unwrap();
    let runtime = Arc::new(Runtime::new(driver, config).unwrap());
    let file = Arc::new(Gguf::open(&data("gemma3.gguf")).unwrap());
    let model = Arc::new(models::load(file, &runtime).unwrap());
    let mut settings = SessionConfig::default();
    settings.ubatch = 64 * scale;
    settings.context = Some(256 * scale);
    let mut session = Session::new(Arc::clone(&runtime), model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &[]).unwrap();
    let mut picked = Vec::new();
    for round in 0..6u32 {
        session.clear().unwrap();
        for length in [64, 64, 50, 37] {
            let tokens: Vec<u32> = (0..length * scale as u32).map(|index| 5 + (index + round) * 7919 % 500).collect();
            session.feed(&tokens, |_, _, _| Ok(())).unwrap();
        }
        picked.push(session.pick().unwrap());
        for _ in 0..6 {
            picked.push(session.decode().unwrap());
        }
    }
    runtime.pool().check().unwrap();
    Rounds {
        picked,
        reserved_peak_bytes: runtime.pool().stats().reserved_bytes.peak as usize,
        given_back: runtime.pool().counters().give_backs + runtime.pool().counters().reissues,
        graphs: runtime.graph_counters(),
    }
}

#[test]
fn memory_that_comes_and_goes_does_not_change_a_token() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let eager = rounds(config(mode, false, None));
        assert_eq!(eager.given_back, 0);
        assert!(eager.picked.iter().any(|token| *token != eager.picked[0]), "{:?}", eager.picked);
        let roomy = rounds(config(mode, true, None));
        assert!(roomy.picked == eager.picked && roomy.graphs.stale == 0, "{mode}, no limit: {:?}", roomy.graphs);
        let slack = if mode == PoolMode::Vmm { 128 << 10 } else { 0 };
        // Room for one step at a time and a little more, not for the scratch that every graph would keep.
        let tight = rounds(config(mode, true, Some(eager.reserved_peak_bytes + slack)));
        assert_eq!(tight.picked, eager.picked, "{mode}, limited");
        assert!(roomy.reserved_peak_bytes > eager.reserved_peak_bytes + slack, "{mode}: graphs keep scratch");
        assert!(tight.given_back > 0, "{mode}: the limit was to take memory from graphs: {:?}", tight.graphs);
        assert!(tight.graphs.stale > 0 && tight.graphs.replays > 0, "{mode}: {:?}", tight.graphs);
        assert_eq!(tight.graphs.refusals, 0, "{mode}: {:?}", tight.graphs);
    }
}

#[test]
fn a_step_of_another_length_is_another_graph() {
    let last = |graphs: bool| {
        let runtime = Arc::new(Runtime::on(&Device::asked().unwrap(), config(PoolMode::Vmm, graphs, None)).unwrap());
        let file = Arc::new(Gguf::open(&data("gemma3.gguf")).unwrap());
        let model = Arc::new(models::load(file, &runtime).unwrap());
        let mut settings = SessionConfig::default();
        settings.context = Some(64);
        let mut session = Session::new(runtime, model, settings).unwrap();
        let mut rows = Vec::new();
        // Three of a length capture it; then a longer one, a shorter one, and the captured one again.
        for (step, length) in [3, 3, 3, 3, 5, 2, 3].into_iter().enumerate() {
            let tokens: Vec<u32> = (0..length).map(|index| 10 + 50 * step as u32 + index).collect();
            session.feed(&tokens, |_, _, _| Ok(())).unwrap();
            rows.push(session.logits(tokens.len() - 1, 1).unwrap());
        }
        rows
    };
    assert_eq!(last(true), last(false));
}

/// A metadata value, to be written again.
fn copied(value: gguf::Value<'_>) -> MetaValue {
    match value {
        gguf::Value::F32(value) => value.into(),
        gguf::Value::Bool(value) => value.into(),
        gguf::Value::String(text) => text.into(),
        gguf::Value::Array(list) => match list.element_type() {
            ValueType::String => list.iter().map(|text| text.as_str().unwrap().to_owned()).collect::<Vec<_>>().into(),
            ValueType::F32 => list.iter().map(|value| value.as_f32().unwrap()).collect::<Vec<_>>().into(),
            ValueType::Bool => list.iter().map(|value| value.as_bool().unwrap()).collect::<Vec<_>>().into(),
            _ => list.iter().map(|value| value.as_i64().unwrap() as i32).collect::<Vec<_>>().into(),
        },
        number => (number.as_u64().unwrap() as u32).into(),
    }
}

#[test]
fn a_model_in_three_files_is_the_same_model() {
    let folder = std::env::temp_dir().join(format!("evergraph-{}-parts", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = Gguf::open(&data("gemma4-e.gguf")).unwrap();
    let all = file.tensors().len();
    for (number, tensors) in file.tensors().chunks(all.div_ceil(3)).enumerate() {
        let mut writer = Writer::new();
        if number == 0 {
            for (key, value) in file.metadata() {
                writer.put(key, copied(value));
            }
        }
        writer.put("split.no", number as u32).put("split.count", 3u32).put("split.tensors.count", all as u32);
        for tensor in tensors {
            writer.tensor(tensor.name(), tensor.quant_type(), tensor.dims(), file.data(tensor).to_vec());
        }
        writer.write_file(&folder.join(format!("e-{:05}-of-00003.gguf", number + 1))).unwrap();
    }
    std::fs::copy(data("gemma4-e.json"), folder.join("e-00001-of-00003.json")).unwrap();
    let first = folder.join("e-00001-of-00003.gguf");
    let parts = trace(first.to_str().unwrap(), config(PoolMode::Vmm, true, None), KvType::F32, 7);
    std::fs::remove_dir_all(&folder).unwrap();
    check("gemma4-e.gguf", &parts);
    assert!(parts == trace("gemma4-e.gguf", config(PoolMode::Vmm, true, None), KvType::F32, 7));
}
