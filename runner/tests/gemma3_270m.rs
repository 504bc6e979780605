//! The real Gemma 3 270M: the reference's text, logits and perplexity. `tools/get-gemma3-270m` fetches the file;
//! without it these tests say that they were skipped.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use evergraph_runner::device::Device;
use evergraph_runner::engine::{ActType, KvType, Runtime, RuntimeConfig, Session, SessionConfig};
use evergraph_runner::gguf::Gguf;
use evergraph_runner::models;
use evergraph_runner::sampling::Sampling;
use evergraph_runner::tokenizer::{Encode, Tokenizer};
use serde_json::Value;

fn model() -> Option<PathBuf> {
    let path = models::find_file("gemma-3-270m-q4_k_m.gguf");
    if path.is_none() {
        eprintln!("skipped: no Gemma 3 270M (tools/get-gemma3-270m fetches it)");
    }
    path
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn golden() -> Value {
    serde_json::from_str(&std::fs::read_to_string(data("gemma3-270m.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The ids and values of a reference list, within 2e-4 of the greatest logit, and the best one first.
#[track_caller]
fn check_top(what: &str, logits: &[f32], expected: &Value) {
    let most = logits.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    for (place, pair) in expected.as_array().unwrap().iter().enumerate() {
        let (id, value) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap() as f32);
        let found = logits[id];
        assert!((found - value).abs() <= 2e-4 * most, "{what}, token {id}: {found} instead of {value}");
        let better = logits.iter().filter(|&&other| other > found + 4e-4 * most).count();
        assert!(better <= place, "{what}, token {id} is number {better}, not {place}");
    }
}

#[test]
fn the_greedy_text_and_its_logits_are_the_references() {
    let Some(path) = model() else { return };
    let golden = golden()["greedy"].clone();
    let file = Arc::new(Gguf::open(&path).unwrap());
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let prompt = tokenizer.encode(golden["prompt"].as_str().unwrap(), Encode::default()).unwrap();
    assert_eq!(prompt, ids(&golden["prompt_tokens"]));

    let mut config = RuntimeConfig::default();
    config.act = ActType::F32;
    let runtime = Arc::new(Runtime::on(&Device::asked().unwrap(), config).unwrap());
    let model = Arc::new(models::load(file, &runtime).unwrap());
    let mut settings = SessionConfig::default();
    settings.context = Some(64);
    settings.kv = (KvType::F32, KvType::F32);
    let mut session = Session::new(Arc::clone(&runtime), model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &prompt).unwrap();
    session.feed(&prompt, |_, _, _| Ok(())).unwrap();

    let expected = ids(&golden["tokens"]);
    let mut tokens = vec![session.pick().unwrap()];
    check_top("first", &session.last_logits().unwrap(), &golden["first_logits_top10"]);
    for step in 0..expected.len() {
        check_top(&format!("step {step}"), &session.last_logits().unwrap(), &golden["top5"][step]);
        tokens.push(session.decode().unwrap());
    }
    check_top("last", &session.last_logits().unwrap(), &golden["last_logits_top10"]);
    tokens.pop();
    assert_eq!(tokens, expected);
    assert_eq!(tokenizer.decode(&tokens, false).unwrap(), golden["text"].as_str().unwrap());
    let counters = runtime.graph_counters();
    assert!(counters.replays >= 21 && counters.eager == 0, "{counters:?}");
}

/// The perplexity of the reference's text, with activations of a kind.
fn perplexity(path: &Path, act: &str) -> f64 {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evergraph"));
    command.args(["perplexity", "--json", "-ctk", "f32", "-ctv", "f32", "--act", act, "-m"]);
    command.arg(path).arg("--device").arg(std::env::var("EVERGRAPH_DEVICE").unwrap_or_else(|_| "host".to_owned()));
    let output = command.arg("-f").arg(data("ppl_text.txt")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let golden = &golden()["perplexity"];
    assert_eq!((&found["tokens"], &found["chunks"]), (&golden["n_tokens"], &1.into()));
    assert_eq!(found["act"], act);
    found["ppl"].as_f64().unwrap()
}

#[test]
fn the_perplexity_is_the_references() {
    let Some(path) = model() else { return };
    let (found, expected) = (perplexity(&path, "f32"), golden()["perplexity"]["ppl"].as_f64().unwrap());
    assert!((found / expected - 1.0).abs() < 0.005, "{found} instead of {expected}");
}

#[test]
fn quantised_activations_cost_no_more_than_llama_cpps() {
    let Some(path) = model() else { return };
    let golden = golden()["perplexity"].clone();
    let (exact, most) = (golden["ppl"].as_f64().unwrap(), golden["llama_cpp_native_ppl"].as_f64().unwrap());
    let found = perplexity(&path, "q8");
    assert!(most < 6.18, "the reference's own figure: {most}");
    assert!(found <= most, "{found} with q8, {exact} with f32; llama.cpp has {most}");
    assert!((found / exact - 1.0).abs() > 1e-6, "{found}: the same as with f32, so nothing was quantised");
}
