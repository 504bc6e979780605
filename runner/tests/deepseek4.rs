//! What is particular to DeepSeek V4: graphs that go on over the ends of windows, state that is taken back, and what is refused.
//! Its values are checked with the other golden models.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use evergraph_runner::Error;
use evergraph_runner::device::Device;
use evergraph_runner::engine::{ActType, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::{Bytes, Gguf, MetaValue, QuantType, Value, Writer};
use evergraph_runner::models;
use evergraph_runner::placement::Placement;
use evergraph_runner::sampling::Sampling;

/// Layers with windows of 16 tokens alone, with keys of 4 tokens of which 8 are seen, and with keys of 128.
const MODEL: &str = "deepseek-v4.gguf";

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn config(mode: PoolMode, graphs: bool) -> RuntimeConfig {
    let mut config = RuntimeConfig::default();
    (config.pool, config.graphs, config.act, config.strict) = (PoolConfig::new(mode), graphs, ActType::F32, true);
    config
}

fn settings(context: usize, ubatch: usize) -> SessionConfig {
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.kv) = (Some(context), ubatch, (KvType::F32, KvType::F32));
    settings
}

fn session(model: &str, config: RuntimeConfig, context: usize, ubatch: usize) -> Session {
    let runtime = Arc::new(Runtime::on(&Device::asked().unwrap(), config).unwrap());
    let model = Arc::new(models::load(Arc::new(Gguf::open(&data(model)).unwrap()), &runtime).unwrap());
    let mut session = Session::new(runtime, model, settings(context, ubatch)).unwrap();
    session.set_sampling(&Sampling::greedy(), &[]).unwrap();
    session
}

fn ids(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).map(|id| 3 + id * 37 % 500).collect()
}

#[test]
fn a_decode_step_is_one_graph_over_the_ends_of_all_windows() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        // From before the index chooses at all, through ends of windows of 16, 4 and 128 tokens.
        let decode = |graphs| {
            let mut session = session(MODEL, config(mode, graphs), 300, 16);
            session.feed(&ids(1, 13), |_, _, _| Ok(())).unwrap();
            let mut tokens = vec![session.pick().unwrap()];
            let mut captures = Vec::new();
            for _ in 0..270 {
                tokens.push(session.decode().unwrap());
                captures.push(session.runtime().graph_counters().captures);
            }
            (tokens, session.last_logits().unwrap(), captures, session.runtime().graph_counters())
        };
        let (tokens, logits, captures, counters) = decode(true);
        assert_eq!(captures[3], captures[269], "{mode}: nothing is captured after the third token: {counters:?}");
        assert!(counters.recaptures == 0 && counters.stale == 0 && counters.replays >= 265, "{mode}: {counters:?}");
        let eager = decode(false);
        assert!((&tokens, &logits) == (&eager.0, &eager.1), "{mode}: the same bits without graphs");
    }
}

#[test]
fn texts_of_every_length_around_the_ends_of_windows_go_on_alike() {
    // The same state, whether a prompt came at once, in pieces that end inside of windows, or token by token.
    for length in [1u32, 3, 4, 5, 15, 16, 17, 31, 32, 33, 36, 127, 128, 129, 131, 132, 133] {
        let logits = [length as usize, 5, 1].map(|ubatch| {
            let mut session = session(MODEL, config(PoolMode::Vmm, false), 140, ubatch);
            session.feed(&ids(9, length), |_, _, _| Ok(())).unwrap();
            session.pick().unwrap();
            let mut rows = vec![session.last_logits().unwrap()];
            for id in ids(700, 5) {
                session.take_next(id).unwrap();
                session.decode().unwrap();
                rows.push(session.last_logits().unwrap());
            }
            rows.concat()
        });
        let most = logits[0].iter().fold(0f32, |most, value| most.max(value.abs()));
        for other in &logits[1..] {
            let far = logits[0].iter().zip(other).fold(0f32, |far, (a, b)| far.max((a - b).abs()));
            assert!(far <= 1e-4 * most, "{length} tokens: {far} of {most}");
        }
    }
}

#[test]
fn an_index_that_could_only_choose_all_keys_is_left_out() {
    // 35 tokens make 8 keys, which is what a token sees; 36 make one more.
    let run = |context| {
        let mut session = session(MODEL, config(PoolMode::Vmm, true), context, 16);
        session.feed(&ids(1, 34), |_, _, _| Ok(())).unwrap();
        session.pick().unwrap();
        (session.last_logits().unwrap(), session.cache_bytes())
    };
    let ((short, few), (long, more)) = (run(35), run(36));
    assert!(short == long, "the same bits");
    assert!(more > few + 2 * 2 * 64 * 4, "and no cache for it: {few} bytes, {more} with one");
}

#[test]
fn whole_blocks_on_the_host_and_scores_written_out_are_refused_by_name() {
    let runtime = Arc::new(Runtime::host(config(PoolMode::Vmm, true)).unwrap());
    let file = Arc::new(Gguf::open(&data(MODEL)).unwrap());
    let placement = Placement { device_layers: Some(2), ..Placement::default() };
    let error = models::load_placed(Arc::clone(&file), &runtime, &placement).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("-cmoe"), "{error}");
    let model = Arc::new(models::load(file, &runtime).unwrap());
    let mut settings = settings(64, 8);
    settings.flash_attention = false;
    let error = Session::new(runtime, model, settings).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("-fa on"), "{error}");
}

#[test]
fn rounded_keys_change_what_comes_out_and_not_much() {
    let logits = |rounded_keys| {
        let mut config = config(PoolMode::Vmm, true);
        config.rounded_keys = rounded_keys;
        let mut session = session(MODEL, config, 64, 16);
        session.feed(&ids(1, 40), |_, _, _| Ok(())).unwrap();
        session.pick().unwrap();
        session.last_logits().unwrap()
    };
    let (exact, rounded) = (logits(false), logits(true));
    let most = exact.iter().fold(0f32, |most, value| most.max(value.abs()));
    let mut far: Vec<f32> = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs() / most).collect();
    far.sort_by(f32::total_cmp);
    let median = far[far.len() / 2];
    assert!(median > 1e-6 && median < 0.1, "{median}");
}

#[test]
fn inputs_of_eight_bits_give_numbers_near_those_of_floats() {
    let logits = |act| {
        let mut config = config(PoolMode::Vmm, true);
        config.act = act;
        let mut session = session("deepseek-v4-q.gguf", config, 64, 16);
        session.feed(&ids(1, 8), |_, _, _| Ok(())).unwrap();
        session.pick().unwrap();
        session.last_logits().unwrap()
    };
    let (floats, codes) = (logits(ActType::F32), logits(ActType::Q8));
    assert_ne!(floats, codes);
    let square = |row: &mut dyn Iterator<Item = f32>| row.map(|x| x * x).sum::<f32>().sqrt();
    let far = square(&mut floats.iter().zip(&codes).map(|(a, b)| a - b)) / square(&mut floats.iter().copied());
    assert!(far < 0.3, "{far}");
}

/// The model's file with one number of its metadata changed.
fn changed(key: &str, value: impl Into<MetaValue>) -> Vec<u8> {
    rewritten(&[(key, value.into())], &|_, _| ()).to_bytes().unwrap()
}

/// The model's file with other numbers in its metadata, and bytes of tensors that `edit` may change.
fn rewritten(keys: &[(&str, MetaValue)], edit: &dyn Fn(&str, &mut [u8])) -> Writer {
    let file = Gguf::open(&data(MODEL)).unwrap();
    let mut writer = Writer::new();
    for (name, found) in file.metadata() {
        match found {
            _ if keys.iter().any(|(key, _)| *key == name) => continue,
            Value::F32(value) => writer.put(name, value),
            Value::Bool(value) => writer.put(name, value),
            Value::String(text) => writer.put(name, text),
            Value::Array(list) => match list.iter().map(Value::as_i64).collect::<Option<Vec<_>>>() {
                Some(list) => writer.put(name, list.into_iter().map(|value| value as i32).collect::<Vec<_>>()),
                None => match list.iter().map(Value::as_f32).collect::<Option<Vec<_>>>() {
                    Some(list) => writer.put(name, list),
                    None => continue,
                },
            },
            number => writer.put(name, number.as_u64().unwrap() as u32),
        };
    }
    for (key, value) in keys {
        writer.put(*key, value.clone());
    }
    for tensor in file.tensors() {
        let mut bytes = file.data(tensor).to_vec();
        edit(tensor.name(), &mut bytes);
        writer.tensor(tensor.name(), tensor.quant_type(), tensor.dims(), bytes);
    }
    writer
}

#[test]
fn blocks_that_predict_further_tokens_are_left_alone() {
    let further: [(&str, MetaValue); 1] = [("deepseek4.nextn_predict_layers", 1u32.into())];
    let load = |writer: Writer| {
        let runtime = Runtime::host(config(PoolMode::Vmm, true)).unwrap();
        models::load(Arc::new(Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()), &runtime).unwrap()
    };
    let plain = load(rewritten(&further, &|_, _| ()));
    assert_eq!(plain.depth(), 5, "a file may say so and not have them");
    let mut writer = rewritten(&further, &|_, _| ());
    writer.tensor("blk.4.nextn.eh_proj.weight", QuantType::F32, &[64], vec![0; 256]);
    let model = load(writer);
    assert_eq!(model.depth(), 4);
    assert!(model.weights.read().all(|tensor| !tensor.name().starts_with("blk.4.")), "they take no memory");
}

#[test]
fn a_table_that_names_experts_that_are_not_there_is_refused() {
    let load = |number: i32| {
        let runtime = Runtime::host(config(PoolMode::Vmm, true)).unwrap();
        let writer = rewritten(&[], &|name, bytes| {
            if name == "blk.0.ffn_gate_tid2eid.weight" {
                bytes[40..44].copy_from_slice(&number.to_le_bytes());
            }
        });
        models::load(Arc::new(Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()), &runtime)
    };
    assert!(load(7).is_ok(), "there are 8");
    for number in [8, -1, i32::MIN] {
        let error = load(number).unwrap_err();
        assert!(matches!(&error, Error::Tensor { name, .. } if name.contains("tid2eid")), "{error}");
        assert!(error.to_string().contains(&number.to_string()), "{error}");
    }
}

#[test]
fn numbers_that_do_not_fit_are_named() {
    let runtime = Runtime::host(config(PoolMode::Vmm, true)).unwrap();
    let load = |bytes: Vec<u8>| models::load(Arc::new(Gguf::parse(Bytes::copy_of(&bytes)).unwrap()), &runtime);
    let good = load(changed("deepseek4.expert_weights_scale", 1.5f32)).unwrap();
    assert_eq!(good.depth(), 5);
    let cases: [(&str, MetaValue); 8] = [
        ("deepseek4.attention.compress_ratios", vec![0i32, 4].into()),
        ("deepseek4.attention.compress_ratios", vec![0i32, 4, 64, 4, 0].into()),
        ("deepseek4.attention.compress_ratios", vec![0i32, -4, 128, 4, 0].into()),
        ("deepseek4.hyper_connection.count", 3u32.into()),
        ("deepseek4.hyper_connection.sinkhorn_iterations", 0u32.into()),
        ("deepseek4.attention.sliding_window", 0u32.into()),
        ("deepseek4.attention.output_group_count", 3u32.into()),
        ("deepseek4.attention.head_count_kv", 2u32.into()),
    ];
    for (key, value) in cases {
        let error = load(changed(key, value)).unwrap_err();
        assert!(matches!(error, Error::Metadata { .. } | Error::Tensor { .. }), "{key}: {error}");
    }
    let error = load(changed("deepseek4.expert_gating_func", 9u32)).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("gating"), "{error}");
}
