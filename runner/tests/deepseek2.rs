//! What is particular to DeepSeek V2 and V3: decode steps that are one graph however long the text is, files of older kinds, and
//! what is refused. Values are checked with the other golden models.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use evergraph_runner::Error;
use evergraph_runner::device::Device;
use evergraph_runner::engine::{ActType, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::{Bytes, Gguf, MetaValue, Value, ValueType, Writer};
use evergraph_runner::models;
use evergraph_runner::placement::Placement;
use evergraph_runner::sampling::Sampling;

const MODELS: [&str; 2] = ["deepseek-v2-lite.gguf", "deepseek-v3.gguf"];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn config(mode: PoolMode, graphs: bool) -> RuntimeConfig {
    let mut config = RuntimeConfig::default();
    (config.pool, config.graphs, config.act, config.strict) = (PoolConfig::new(mode), graphs, ActType::F32, true);
    config
}

fn session(file: Gguf, config: RuntimeConfig, placement: &Placement, context: usize) -> Result<Session, Error> {
    let runtime = Arc::new(Runtime::on(&Device::asked()?, config)?);
    let model = Arc::new(models::load_placed(Arc::new(file), &runtime, placement)?);
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.kv) = (Some(context), 16, (KvType::F32, KvType::F32));
    let mut session = Session::new(runtime, model, settings)?;
    session.set_sampling(&Sampling::greedy(), &[])?;
    Ok(session)
}

fn ids(count: u32) -> Vec<u32> {
    (1..=count).map(|id| 3 + id * 37 % 500).collect()
}

/// Tokens, and the logits after the last one.
fn generate(session: &mut Session, prompt: u32, steps: usize) -> (Vec<u32>, Vec<f32>) {
    session.feed(&ids(prompt), |_, _, _| Ok(())).unwrap();
    let mut tokens = vec![session.pick().unwrap()];
    tokens.extend((0..steps).map(|_| session.decode().unwrap()));
    (tokens, session.last_logits().unwrap())
}

#[test]
fn a_decode_step_is_one_graph() {
    for model in MODELS {
        let run = |mode, graphs| {
            let file = Gguf::open(&data(model)).unwrap();
            let mut session = session(file, config(mode, graphs), &Placement::default(), 100).unwrap();
            let first = generate(&mut session, 13, 3);
            let before = session.runtime().graph_counters();
            let tokens: Vec<u32> = (0..60).map(|_| session.decode().unwrap()).collect();
            let after = session.runtime().graph_counters();
            (first, tokens, session.last_logits().unwrap(), before, after)
        };
        let eager = run(PoolMode::Vmm, false);
        for mode in [PoolMode::Vmm, PoolMode::Slab] {
            let (first, tokens, logits, before, after) = run(mode, true);
            assert!((&first, &tokens, &logits) == (&eager.0, &eager.1, &eager.2), "{model}, {mode}: the same bits");
            let replays = after.replays - before.replays;
            // On a GPU a longer text has its attention spread over keys: another graph, twice warmed up.
            assert!(after.captures <= before.captures + 1 && replays >= 57, "{model}, {mode}: {before:?} {after:?}");
            assert!(after.recaptures == 0 && after.stale == 0, "{model}, {mode}: {after:?}");
        }
    }
}

/// A metadata value, to be written again.
fn copied(value: Value<'_>) -> MetaValue {
    match value {
        Value::F32(value) => value.into(),
        Value::Bool(value) => value.into(),
        Value::String(text) => text.into(),
        Value::Array(list) => match list.element_type() {
            ValueType::String => list.iter().map(|text| text.as_str().unwrap().to_owned()).collect::<Vec<_>>().into(),
            _ => list.iter().map(|value| value.as_i64().unwrap() as i32).collect::<Vec<_>>().into(),
        },
        number => (number.as_u64().unwrap() as u32).into(),
    }
}

fn parsed(writer: &Writer) -> Gguf {
    Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()
}

/// The same model as older files have it: keys and values of a head in one tensor, and lengths of heads as such.
fn older(file: &Gguf) -> Writer {
    let mut writer = Writer::new();
    let number = |key: &str| file.get_in(&format!("deepseek2.{key}"), 0..=9999).unwrap().unwrap();
    let heads = number("attention.head_count") as usize;
    for (key, value) in file.metadata() {
        let value = match key {
            "deepseek2.attention.key_length" => (number("attention.key_length_mla") as u32).into(),
            "deepseek2.attention.value_length" => (number("attention.value_length_mla") as u32).into(),
            "deepseek2.attention.head_count_kv" => (heads as u32).into(),
            _ if key.ends_with("_mla") => continue,
            _ => copied(value),
        };
        writer.put(key, value);
    }
    for tensor in file.tensors() {
        let bytes = file.data(tensor);
        let Some(start) = tensor.name().strip_suffix("attn_k_b.weight") else {
            if !tensor.name().ends_with("attn_v_b.weight") {
                writer.tensor(tensor.name(), tensor.quant_type(), tensor.dims(), bytes.to_vec());
            }
            continue;
        };
        let values = file.tensor(&format!("{start}attn_v_b.weight")).unwrap();
        // [heads, rank, own] of floats, and [heads, value, rank].
        let [own, rank, _] = tensor.dims()[..] else { panic!("{:?}", tensor.dims()) };
        let (own, rank, value) = (own as usize, rank as usize, values.dims()[1] as usize);
        let mut both = Vec::new();
        for head in 0..heads {
            for row in 0..own {
                for column in 0..rank {
                    both.extend_from_slice(&bytes[4 * ((head * rank + column) * own + row)..][..4]);
                }
            }
            both.extend_from_slice(&file.data(values)[4 * head * value * rank..][..4 * value * rank]);
        }
        let dims = [rank as u64, (heads * (own + value)) as u64];
        writer.tensor(format!("{start}attn_kv_b.weight"), tensor.quant_type(), &dims, both);
    }
    writer
}

#[test]
fn older_files_with_keys_and_values_in_one_tensor_give_the_same_bits() {
    for model in MODELS {
        let file = || Gguf::open(&data(model)).unwrap();
        let on_host = |layers| Placement { device_layers: Some(layers), ..Placement::default() };
        for (mode, graphs) in [(PoolMode::Vmm, true), (PoolMode::Slab, false)] {
            let wanted =
                generate(&mut session(file(), config(mode, graphs), &Placement::default(), 40).unwrap(), 20, 6);
            // All on the device, two blocks of four with the output, all on the host.
            for placement in [Placement::default(), on_host(3), on_host(0)] {
                let mut session = session(parsed(&older(&file())), config(mode, graphs), &placement, 40).unwrap();
                let found = generate(&mut session, 20, 6);
                assert_eq!(found.0, wanted.0, "{model}, {mode}, {placement:?}");
                let same_bodies = Device::asked().unwrap().is_host() || placement.is_plain();
                assert!(!same_bodies || found.1 == wanted.1, "{model}, {mode}, {placement:?}");
            }
        }
    }
}

/// The model with some keys left out, changed or added, and without some tensors.
fn changed(model: &str, keys: &[(&str, Option<MetaValue>)], without: &str) -> Gguf {
    let file = Gguf::open(&data(model)).unwrap();
    let mut writer = Writer::new();
    for (key, value) in file.metadata() {
        match keys.iter().find(|(changed, _)| key.strip_prefix("deepseek2.") == Some(*changed)) {
            Some((_, None)) => {}
            Some((_, Some(value))) => drop(writer.put(key, value.clone())),
            None => drop(writer.put(key, copied(value))),
        }
    }
    for (key, value) in keys {
        let key = format!("deepseek2.{key}");
        if let (None, Some(value)) = (file.get(&key), value) {
            writer.put(key, value.clone());
        }
    }
    for tensor in file.tensors().iter().filter(|tensor| without.is_empty() || !tensor.name().contains(without)) {
        writer.tensor(tensor.name(), tensor.quant_type(), tensor.dims(), file.data(tensor).to_vec());
    }
    parsed(&writer)
}

fn open(file: Gguf) -> Result<Session, Error> {
    session(file, config(PoolMode::Vmm, true), &Placement::default(), 40)
}

#[test]
fn blocks_that_predict_further_tokens_are_left_alone() {
    let last = |session: &mut Session| generate(session, 20, 2);
    let three = [("block_count", Some(3u32.into()))];
    let wanted = last(&mut open(changed("deepseek-v3.gguf", &three, "blk.3.")).unwrap());
    let further = [("nextn_predict_layers", Some(1u32.into()))];
    let mut session = open(changed("deepseek-v3.gguf", &further, "")).unwrap();
    assert_eq!(session.model().depth(), 3);
    assert!(last(&mut session) == wanted);
}

#[test]
fn shared_experts_are_told_by_their_tensors_too() {
    for model in MODELS {
        let wanted = generate(&mut open(changed(model, &[], "")).unwrap(), 20, 2);
        let untold = generate(&mut open(changed(model, &[("expert_shared_count", None)], "")).unwrap(), 20, 2);
        assert!(untold == wanted, "{model}");
    }
}

#[test]
fn files_that_do_not_hold_together_are_refused_by_name() {
    let model = "deepseek-v3.gguf";
    for part in ["attn_k_b", "attn_v_b", "attn_kv_a_norm", "attn_q_a.weight", "ffn_down_shexp", "ffn_gate_inp"] {
        let error = open(changed(model, &[], part)).unwrap_err();
        let named = matches!(&error, Error::Tensor { .. }) && error.to_string().contains(part);
        assert!(named, "{part}: {error}");
    }
    for (key, value) in [("attention.kv_lora_rank", 63u32), ("attention.head_count", 3), ("expert_count", 8)] {
        assert!(matches!(open(changed(model, &[(key, Some(value.into()))], "")), Err(Error::Tensor { .. })), "{key}");
    }
    let gating = [("expert_gating_func", Some(9u32.into()))];
    assert!(matches!(open(changed(model, &gating, "")), Err(Error::Unsupported { .. })));
}
