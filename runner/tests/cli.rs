//! The command line as users and scripts see it: results, exit statuses, bad input.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use evergraph_runner::gguf::{Bytes, Gguf, MetaValue, QuantType, Value, Writer};

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).display().to_string()
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evergraph"));
    for (name, _) in
        std::env::vars().filter(|(name, _)| name.starts_with("EVERGRAPH_") || name.starts_with("LLAMA_ARG_"))
    {
        command.env_remove(name);
    }
    command.args(words);
    command
}

fn evergraph(words: &[&str]) -> Output {
    command(words).output().unwrap()
}

/// Runs a command that must work; returns its JSON document.
#[track_caller]
fn works(words: &[&str]) -> serde_json::Value {
    let mut words = words.to_vec();
    words.push("--json");
    let output = evergraph(&words);
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {talk}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command that must fail with a status; returns what it said.
#[track_caller]
fn fails(words: &[&str], status: i32) -> String {
    let output = evergraph(words);
    let talk = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{words:?}: {talk}");
    assert!(output.stdout.is_empty(), "{words:?} wrote a result: {}", String::from_utf8_lossy(&output.stdout));
    assert!(!talk.contains("panicked"), "{words:?}: {talk}");
    assert!(!talk.trim().is_empty(), "{words:?} said nothing");
    talk
}

/// A scratch file that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("evergraph-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }
    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The tiny golden model, taken apart so that one thing can be changed.
struct Parts {
    keys: Vec<(String, MetaValue)>,
    tensors: Vec<(String, QuantType, Vec<u64>, Vec<u8>)>,
}

impl Parts {
    fn new() -> Self {
        let file = Gguf::open(data("gemma3.gguf").as_ref()).unwrap();
        let keys = file.metadata().map(|(key, value)| (key.to_owned(), owned(value))).collect();
        let tensors = file
            .tensors()
            .iter()
            .map(|tensor| {
                let data = file.data(tensor).to_vec();
                (tensor.name().to_owned(), tensor.quant_type(), tensor.dims().to_vec(), data)
            })
            .collect();
        Self { keys, tensors }
    }
    fn set(mut self, key: &str, value: impl Into<MetaValue>) -> Self {
        self.keys.retain(|(name, _)| name != key);
        self.keys.push((key.to_owned(), value.into()));
        self
    }
    fn without_key(mut self, key: &str) -> Self {
        self.keys.retain(|(name, _)| name != key);
        self
    }
    fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }
    fn reshaped(mut self, name: &str, ty: QuantType, dims: &[u64]) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap();
        let bytes = dims.iter().product::<u64>() / ty.block_size() as u64 * ty.type_bytes() as u64;
        (tensor.1, tensor.2) = (ty, dims.to_vec());
        tensor.3.resize(bytes as usize, 0);
        self
    }
    fn bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        for (key, value) in &self.keys {
            writer.put(key.as_str(), value.clone());
        }
        for (name, ty, dims, data) in &self.tensors {
            writer.tensor(name.as_str(), *ty, dims, data.clone());
        }
        writer.to_bytes().unwrap()
    }
}

fn owned(value: Value<'_>) -> MetaValue {
    match value {
        Value::U32(value) => value.into(),
        Value::I32(value) => value.into(),
        Value::F32(value) => value.into(),
        Value::Bool(value) => value.into(),
        Value::String(value) => value.into(),
        Value::Array(list) => match list.iter().next() {
            Some(Value::F32(_)) => list.iter().filter_map(Value::as_f32).collect::<Vec<_>>().into(),
            Some(Value::I32(_)) => {
                list.iter().filter_map(|value| Some(value.as_i64()? as i32)).collect::<Vec<_>>().into()
            }
            _ => list.iter().filter_map(|value| Some(value.as_str()?.to_owned())).collect::<Vec<_>>().into(),
        },
        other => panic!("{other}"),
    }
}

#[test]
fn a_model_taken_apart_and_put_together_is_the_same_model() {
    let copy = Scratch::new("copy.gguf", &Parts::new().bytes());
    let words =
        |model: &str| works(&["logits", "-m", model, "--tokens", "2,315,331", "--decode", "3"])["last_logits"].clone();
    assert_eq!(words(copy.path()), words(&data("gemma3.gguf")));
}

#[test]
fn run_answers_as_promised() {
    let model = data("gemma3.gguf");
    let found = works(&["run", "-m", &model, "-p", "hello", "-n", "6", "--temp", "0", "--device", "host"]);
    assert_eq!(found["prompt_tokens"][0], 2, "starts with bos");
    assert_eq!(found["tokens"].as_array().unwrap().len(), 6);
    assert!(found["text"].is_string());
    for key in ["load_ms", "prompt_ms", "decode_ms", "prompt_per_s", "decode_per_s"] {
        assert!(found["timings"][key].is_number(), "{key}");
    }
    assert_eq!(found["pool"]["mode"], "vmm");
    for key in ["reserved_peak_bytes", "allocated_peak_bytes", "give_backs"] {
        assert!(found["pool"][key].is_number(), "{key}");
    }
    for key in ["captures", "replays", "remaps", "updates", "recaptures", "eager", "evictions"] {
        assert!(found["graphs"][key].is_number(), "{key}");
    }
    assert_eq!(found["act"], "q8");
    assert_eq!(found["cache_type_k"], "f16");

    // text mode: the same text, and nothing else, on standard output
    let output = evergraph(&["run", "-m", &model, "-p", "hello", "-n", "6", "--temp", "0"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\n", found["text"].as_str().unwrap()));
    assert!(String::from_utf8(output.stderr).unwrap().contains("device: host"));
}

#[test]
fn the_kind_of_activations_is_told_and_leaves_weights_of_floats_alone() {
    let (model, text) = (data("gemma3.gguf"), data("ppl_text.txt"));
    for act in ["f32", "q8"] {
        let output = evergraph(&["run", "-m", &model, "-p", "x", "-n", "1", "--act", act]);
        assert!(String::from_utf8(output.stderr).unwrap().contains(&format!("activations: {act}")));
        assert_eq!(works(&["perplexity", "-m", &model, "-f", &text, "-c", "64", "--act", act])["act"], act);
    }
    let logits = |act: &str| works(&["logits", "-m", &model, "--tokens", "2,315,331", "--decode", "2", "--act", act]);
    let (floats, integers) = (logits("f32"), logits("q8"));
    assert_eq!((&floats["act"], &integers["act"]), (&"f32".into(), &"q8".into()));
    assert_eq!(floats["final_logits"], integers["final_logits"], "this model's weights are floats");
}

#[test]
fn steady_decode_replays_and_every_mode_gives_the_same_tokens() {
    let model = data("gemma3.gguf");
    let words = ["run", "-m", &model, "-p", "once upon", "-n", "300", "--ignore-eos", "--seed", "7", "--temp", "1.5"];
    let plain = works(&[&words[..], &["--graphs", "off"]].concat());
    assert_eq!(plain["tokens"].as_array().unwrap().len(), 300);
    assert_eq!(plain["graphs"]["replays"], 0);
    for extra in [
        &["--pool", "vmm"][..],
        &["--pool", "slab"],
        &["--mem-limit", "6MiB"],
        &["--pool", "slab", "--mem-limit", "6MiB"],
    ] {
        let found = works(&[&words[..], extra].concat());
        assert_eq!(found["tokens"], plain["tokens"], "{extra:?}");
        let graphs = |key: &str| found["graphs"][key].as_u64().unwrap();
        assert!(graphs("replays") >= 290, "{extra:?}: {}", found["graphs"]);
        assert!(graphs("eager") + graphs("recaptures") + graphs("updates") <= 3, "{extra:?}: {}", found["graphs"]);
    }
    let other = works(&[&words[..8], &["--seed", "8", "--temp", "1.5"]].concat());
    assert_ne!(other["tokens"], plain["tokens"], "another seed");
}

#[test]
fn tokens_go_in_and_come_out() {
    let model = data("gemma3.gguf");
    let ids = works(&["tokenize", "-m", &model, "-p", "héllo <bos>"]);
    assert_eq!(ids["tokens"][0], 2);
    assert_eq!(ids["pieces"][2], serde_json::json!([195]), "half a character is a list of bytes");
    let plain = works(&["tokenize", "-m", &model, "-p", "<bos>", "--no-bos"]);
    assert!(plain["tokens"].as_array().unwrap().len() > 1);
    let special = works(&["tokenize", "-m", &model, "-p", "<bos>", "--no-bos", "--special"]);
    assert_eq!(special["tokens"], serde_json::json!([2]));
    let list = ids["tokens"].as_array().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let text = works(&["detokenize", "-m", &model, "--tokens", &list]);
    assert_eq!(text["text"], "héllo <bos>");
    let output = evergraph(&["detokenize", "-m", &model, "--tokens", &list]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "héllo <bos>\n");
}

#[test]
fn info_lists_metadata_and_tensors() {
    let found = works(&["info", "-m", &data("gemma3.gguf")]);
    assert_eq!(found["architecture"], "gemma3");
    assert_eq!(found["metadata"]["gemma3.block_count"], 7);
    let embedding = &found["tensors"][0];
    assert_eq!((embedding["name"].as_str(), embedding["type"].as_str()), (Some("token_embd.weight"), Some("F32")));
    assert_eq!(embedding["shape"], serde_json::json!([512, 64]));
    assert_eq!(embedding["bytes"], 512 * 64 * 4);
}

#[test]
fn perplexity_and_doctor_answer() {
    let text = Scratch::new("text.txt", b"the quick brown fox jumps over the lazy dog, again and again and again\n\n");
    let model = data("gemma3.gguf");
    let whole = works(&["perplexity", "-m", &model, "-f", text.path()]);
    assert_eq!(whole["chunks"], 1);
    assert!(whole["ppl"].as_f64().unwrap() > 1.0);
    assert_eq!(whole["predictions"].as_u64().unwrap() + 1, whole["tokens"].as_u64().unwrap());
    let small_steps = works(&["perplexity", "-m", &model, "-f", text.path(), "-ub", "3"]);
    let apart = whole["ppl"].as_f64().unwrap() / small_steps["ppl"].as_f64().unwrap();
    assert!((apart - 1.0).abs() < 1e-3, "{apart}");
    let cut = works(&["perplexity", "-m", &model, "-f", text.path(), "-c", "16"]);
    assert!(cut["chunks"].as_u64().unwrap() > 1);
    let doctor = works(&["doctor"]);
    assert_eq!(doctor["devices"][0]["backend"], "host");
    for key in ["nvrtc", "cublas", "nccl"] {
        assert!(doctor.get(key).is_some(), "{key}");
    }
}

#[test]
fn doctor_says_what_is_computed_with_and_why_not_with_more() {
    let sets = |asked: &str| {
        let output = command(&["doctor", "--json"]).env("EVERGRAPH_CPU", asked).output().unwrap();
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        found["devices"][0]["instruction_sets"].clone()
    };
    let plain = sets("plain");
    for what in ["floats", "integers", "integers_of_many_tokens"] {
        assert_eq!(plain[what], "plain");
    }
    assert_eq!(plain["amx_int8_missing"], "EVERGRAPH_CPU keeps it out");
    let all = sets("amx_int8");
    assert_eq!(all["amx_int8_missing"].is_null(), all["integers_of_many_tokens"] == "amx_int8", "{all}");
    let odd = sets("mmx");
    assert_eq!(odd["integers"], all["integers"]);
    assert!(odd["ignored"].as_str().unwrap().contains("one of plain, avx2"), "{odd}");
}

#[test]
fn files_that_are_no_models_are_refused() {
    let whole = std::fs::read(data("gemma3.gguf")).unwrap();
    let mut absurd_keys = whole.clone();
    absurd_keys[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut absurd_tensors = whole.clone();
    absurd_tensors[8..16].copy_from_slice(&(1u64 << 40).to_le_bytes());
    let mut version = whole.clone();
    version[4] = 9;
    let mut quant = Parts::new();
    quant.tensors[1].0 = "blk.0.attn_norm.weight".to_owned();
    let mut unknown = quant.bytes();
    let at = unknown.windows(22).position(|window| window == b"blk.0.attn_norm.weight").unwrap() + 22;
    let rank = u32::from_le_bytes(unknown[at..at + 4].try_into().unwrap()) as usize;
    unknown[at + 4 + 8 * rank..at + 8 + 8 * rank].copy_from_slice(&99u32.to_le_bytes());

    for (name, bytes, word) in [
        ("magic", b"PK\x03\x04 this is a zip".to_vec(), "GGUF"),
        ("empty", Vec::new(), "GGUF"),
        ("truncated", whole[..whole.len() / 2].to_vec(), "inside the file"),
        ("header", whole[..100].to_vec(), "found"),
        ("keys", absurd_keys, "18446744073709551615"),
        ("tensors", absurd_tensors, "1099511627776"),
        ("version", version, "version"),
        ("quant", unknown, "type number 99"),
    ] {
        let file = Scratch::new(&format!("{name}.gguf"), &bytes);
        for words in [
            &["info", "-m", file.path()][..],
            &["run", "-m", file.path(), "-p", "x", "-n", "1"],
            &["tokenize", "-m", file.path(), "-p", "x"],
            &["run", "-m", file.path(), "--no-mmap", "-p", "x", "-n", "1"],
        ] {
            let talk = fails(words, 1);
            assert!(talk.contains(word), "{name}: {talk}");
            assert!(talk.contains("help:"), "{name}: {talk}");
        }
    }
    assert!(fails(&["info", "-m", "/no/such/file.gguf"], 1).contains("/no/such/file.gguf"));
    fails(&["info", "-m", "/"], 1);
}

#[test]
fn models_that_do_not_hold_together_are_refused_by_name() {
    let cases: Vec<(&str, Parts, &str)> = vec![
        ("architecture", Parts::new().set("general.architecture", "llama9"), "llama9"),
        ("no architecture", Parts::new().without_key("general.architecture"), "general.architecture"),
        ("missing tensor", Parts::new().without("blk.3.ffn_up.weight"), "blk.3.ffn_up.weight"),
        ("missing norm", Parts::new().without("output_norm.weight"), "output_norm.weight"),
        ("missing embedding", Parts::new().without("token_embd.weight"), "token_embd.weight"),
        ("wrong shape", Parts::new().reshaped("blk.2.attn_k.weight", QuantType::F32, &[64, 31]), "blk.2.attn_k.weight"),
        ("wrong rank", Parts::new().reshaped("blk.2.attn_k.weight", QuantType::F32, &[64 * 32]), "blk.2.attn_k.weight"),
        ("norm type", Parts::new().reshaped("blk.0.attn_norm.weight", QuantType::F16, &[64]), "blk.0.attn_norm.weight"),
        ("no kernels", Parts::new().reshaped("blk.0.ffn_up.weight", QuantType::I8, &[64, 192]), "I8"),
        ("embedding", Parts::new().reshaped("token_embd.weight", QuantType::F32, &[64, 500]), "tokenizer.ggml.tokens"),
        ("blocks", Parts::new().set("gemma3.block_count", 0u32), "gemma3.block_count"),
        ("many blocks", Parts::new().set("gemma3.block_count", 600u32), "gemma3.block_count"),
        ("more blocks", Parts::new().set("gemma3.block_count", 8u32), "blk.7."),
        ("fewer blocks", Parts::new().set("gemma3.block_count", 6u32), "blk.6."),
        ("no width", Parts::new().without_key("gemma3.embedding_length"), "gemma3.embedding_length"),
        ("width", Parts::new().set("gemma3.embedding_length", -64i32), "gemma3.embedding_length"),
        ("width text", Parts::new().set("gemma3.embedding_length", "64"), "gemma3.embedding_length"),
        ("heads", Parts::new().set("gemma3.attention.head_count_kv", 3u32), "head_count_kv"),
        ("no heads", Parts::new().set("gemma3.attention.head_count", 0u32), "head_count"),
        ("odd head", Parts::new().set("gemma3.attention.key_length", 31u32), "key_length"),
        ("eps", Parts::new().set("gemma3.attention.layer_norm_rms_epsilon", 0.0f32), "epsilon"),
        ("no eps", Parts::new().without_key("gemma3.attention.layer_norm_rms_epsilon"), "no such key"),
        ("eps nan", Parts::new().set("gemma3.attention.layer_norm_rms_epsilon", f32::NAN), "epsilon"),
        ("base", Parts::new().set("gemma3.rope.freq_base", -1.0f32), "freq_base"),
        ("scaling", Parts::new().set("gemma3.rope.scaling.type", "yarn"), "yarn"),
        ("pattern", Parts::new().set("gemma3.attention.sliding_window_pattern", 0u32), "sliding_window_pattern"),
        ("experts", Parts::new().set("gemma3.expert_count", 4u32), "expert_used_count"),
        ("tokens", Parts::new().set("tokenizer.ggml.bos_token_id", 512u32), "bos_token_id"),
        ("scores", Parts::new().set("tokenizer.ggml.scores", vec![0.0f32; 4]), "scores"),
        ("tokenizer", Parts::new().set("tokenizer.ggml.model", "rwkv"), "rwkv"),
        ("softcap", Parts::new().set("gemma3.final_logit_softcapping", -30.0f32), "softcapping"),
        ("context", Parts::new().set("gemma3.context_length", 0u32), "context_length"),
    ];
    for (name, parts, word) in cases {
        let file = Scratch::new(&format!("model-{}.gguf", name.replace(' ', "-")), &parts.bytes());
        let talk = fails(&["run", "-m", file.path(), "-p", "x", "-n", "1"], 1);
        assert!(talk.contains(word), "{name}: {talk}");
    }
}

#[test]
fn a_pattern_as_a_list_and_fused_projections_are_the_same_model() {
    let tokens = ["--tokens", "2,315,331,330,350,360,359,280,392,301,463,476,326,474,344,312,429,469,484,384"];
    let logits = |path: &str| works(&[&["logits", "-m", path][..], &tokens].concat())["last_logits"].clone();
    let plain = logits(&data("gemma3.gguf"));

    let local = (0..7).map(|index| index % 6 < 5).collect::<Vec<bool>>();
    let mut parts = Parts::new().set("gemma3.attention.sliding_window_pattern", local);
    for block in 0..7 {
        let name = |part: &str| format!("blk.{block}.{part}.weight");
        let mut fused = Vec::new();
        for part in ["attn_q", "attn_k", "attn_v"] {
            let index = parts.tensors.iter().position(|tensor| tensor.0 == name(part)).unwrap();
            fused.extend(parts.tensors.remove(index).3);
        }
        let rows = fused.len() as u64 / (64 * 4);
        parts.tensors.push((name("attn_qkv"), QuantType::F32, vec![64, rows], fused));
    }
    let file = Scratch::new("fused.gguf", &parts.bytes());
    assert_eq!(logits(file.path()), plain);

    let global = Scratch::new("global.gguf", &Parts::new().set("gemma3.attention.sliding_window", 0u32).bytes());
    assert_ne!(logits(global.path()), plain, "the window matters for 20 tokens");
}

#[test]
fn requests_that_can_not_be_met_are_refused() {
    let model = data("gemma3.gguf");
    let long = "2,".repeat(70);
    assert!(fails(&["run", "-m", &model, "--tokens", &long, "-c", "64", "-n", "1"], 1).contains("70 tokens"));
    assert!(fails(&["run", "-m", &model, "--tokens", "2,512", "-n", "1"], 1).contains("512"));
    assert!(fails(&["logits", "-m", &model, "--tokens", "2,-1"], 1).contains("-1"));
    assert!(fails(&["logits", "-m", &model, "--tokens", "2,3", "--decode", "5000"], 1).contains("4096"));
    assert!(fails(&["run", "-m", &model, "-p", "x", "-ngl", "some"], 2).contains("-ngl"));
    assert!(fails(&["run", "-m", &model, "-p", "x", "-ot", "blk=moon"], 2).contains("CUDA0"));
    assert!(fails(&["run", "-m", &model, "-p", "x", "-ctk", "f32"], 1).contains("-ctv f16"));
    assert!(fails(&["run", "-m", &model, "-p", "x", "--devices", "2"], 1).contains("--devices 2"));
    assert!(fails(&["run", "-m", &model, "-p", "x", "-n", "1", "--mem-limit", "64KiB"], 1).contains("out of memory"));
    assert!(fails(&["perplexity", "-m", &model, "-f", "/no/such/text"], 1).contains("/no/such/text"));
}

#[test]
fn words_that_are_off_end_with_status_2() {
    let model = data("gemma3.gguf");
    for words in [
        &["frobnicate"][..],
        &[],
        &["run"],
        &["run", "-m", &model],
        &["run", "-m", &model, "-p", "x", "--tokens", "1"],
        &["run", "-m", &model, "--tokens", ""],
        &["run", "-m", &model, "--tokens", "1,x"],
        &["run", "-m", &model, "-p", "x", "-c", "-5"],
        &["demo", "--devices", "2"],
        &["run", "-m", &model, "-p", "x", "-c", "99999999999"],
        &["run", "-m", &model, "-p", "x", "-ub", "0"],
        &["run", "-m", &model, "-p", "x", "--pool", "heap"],
        &["run", "-m", &model, "-p", "x", "--graphs", "maybe"],
        &["run", "-m", &model, "-p", "x", "--mem-limit", "lots"],
        &["run", "-m", &model, "-p", "x", "-ctk", "q3"],
        &["run", "-m", &model, "-p", "x", "--act", "q4"],
        &["run", "-m", &model, "-p", "x", "--temp", "-1"],
        &["run", "-m", &model, "-p", "x", "--top-p", "2"],
        &["run", "-m", &model, "-p", "x", "--device", "tpu"],
        &["run", "-m", &model, "-p", "x", "--system-prompt", "y"],
        &["run", "-m", &model, "-p", "x", "-t", "0"],
        &["run", "-m", &model, "-p", "x", "-ngl", "most"],
        &["tokenize", "-m", &model],
        &["detokenize", "-m", &model, "--tokens", "one"],
    ] {
        fails(words, 2);
    }
}

#[test]
fn help_and_version_are_results() {
    for words in [&["--help"][..], &["run", "--help"], &["--version"]] {
        let output = evergraph(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        assert!(!output.stdout.is_empty(), "{words:?}");
    }
}

#[test]
fn a_missing_device_ends_with_status_3() {
    if Path::new("/proc/driver/nvidia/version").exists() {
        eprintln!("skipped: there is a device");
        return;
    }
    let model = data("gemma3.gguf");
    let commands: &[&[&str]] = &[
        &["run", "-m", &model, "-p", "x"],
        &["logits", "-m", &model, "--tokens", "2"],
        &["perplexity", "-m", &model, "-f", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")],
        &["demo"],
        &["scenario", "aba"],
        &["stress", "--steps", "10"],
    ];
    for words in commands {
        for device in ["cuda", "cuda:3"] {
            let talk = fails(&[words, &["--device", device][..]].concat(), 3);
            let whole: Vec<&str> = talk.split_whitespace().collect();
            let whole = whole.join(" ");
            assert!(whole.contains("NVIDIA driver"), "{words:?}: what is missing: {talk}");
            assert!(whole.contains("install") && whole.contains("--device host"), "{words:?}: what to do: {talk}");
        }
    }
}

#[test]
fn llama_cpps_words_and_environment_work() {
    let model = data("gemma3.gguf");
    let words = [
        "run", "-m", &model, "-p", "hello", "-n", "2", "--temp", "0", "-ngl", "99999", "-fa", "on", "-ctk", "f32",
        "-ctv", "f32",
    ];
    let found = works(&words);
    assert_eq!((&found["cache_type_k"], &found["flash_attention"]), (&"f32".into(), &true.into()));
    let off = works(&words.map(|word| if word == "on" { "off" } else { word }));
    assert_eq!((&off["flash_attention"], &off["tokens"]), (&false.into(), &found["tokens"]));
    let by = |name: &str, value: &str| {
        let output = command(&["run", "-p", "hello", "--temp", "0", "--json"])
            .env("LLAMA_ARG_N_PREDICT", "3")
            .env("LLAMA_ARG_MODEL", &model)
            .env(name, value)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let found = by("LLAMA_ARG_UBATCH", "2");
    assert_eq!(found["tokens"].as_array().unwrap().len(), 3);
    assert_eq!((&found["act"], &by("EVERGRAPH_ACT", "f32")["act"]), (&"q8".into(), &"f32".into()));
    assert_eq!(by("EVERGRAPH_PREDICT", "5")["tokens"].as_array().unwrap().len(), 5, "ours come first");
}

#[test]
fn chats_use_a_template() {
    let model = data("gemma3.gguf");
    let text = |extra: &[&str]| {
        let found = works(&[&["run", "-m", &model, "-p", " Hi ", "--chat", "-n", "1"], extra].concat());
        let ids = found["prompt_tokens"].as_array().unwrap();
        assert_eq!(ids.iter().filter(|id| **id == 2).count(), 1, "one begin token: {ids:?}");
        let list = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        works(&["detokenize", "-m", &model, "--special", "--tokens", &list])["text"].as_str().unwrap().to_owned()
    };
    let expected = "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n";
    assert_eq!(text(&["--system-prompt", "Be kind.", "--chat-template", "gemma"]), expected);
    // the file's own
    assert_eq!(text(&[]), "<bos><start_of_turn>user\n Hi <end_of_turn>\n<start_of_turn>model\n");
    fails(&["run", "-m", &model, "-p", "x", "--chat", "--chat-template", "{{ broken", "-n", "1"], 1);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let model = data("gemma3.gguf");
    let mut child = command(&["run", "-m", &model, "-p", "x", "-n", "2000", "--ignore-eos", "--temp", "0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{talk}");
    assert!(!talk.contains("panicked"), "{talk}");
}

#[test]
fn a_verdict_does_not_change_when_nobody_reads_it() {
    // Too few steps for every kind of event: exit 1, read to the end or not.
    let words = ["stress", "--steps", "1"];
    assert_eq!(evergraph(&words).status.code(), Some(1));
    let mut child = command(&words).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(1), "a closed pipe made a failed check pass");
}

#[test]
fn a_window_that_predicts_nothing_is_refused() {
    let (model, text) = (data("gemma3.gguf"), data("ppl_text.txt"));
    let talk = fails(&["perplexity", "-m", &model, "-f", &text, "-c", "2"], 2);
    assert!(talk.contains("-c"), "{talk}");
}

#[test]
fn a_file_without_end_is_not_read() {
    let talk = fails(&["info", "-m", "/dev/zero", "--no-mmap"], 1);
    assert!(talk.contains("not a regular file"), "{talk}");
}

#[test]
fn talk_that_nobody_hears_is_no_error() {
    let mut child = command(&["doctor", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().flush();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
    // the file can also be held in memory
    let bytes = Parts::new().bytes();
    assert!(Gguf::parse(Bytes::copy_of(&bytes)).is_ok());
}

#[test]
fn an_allocation_trace_is_replayed() {
    let trace = Scratch::new(
        "trace.csv",
        b"Thread,Time,Action,Pointer,Size,Stream\n1,t,allocate,0x10,1000,0x0\n1,t,allocate,0x20,3000000,0x0\n1,t,free,0x10,1000,0x0\n",
    );
    for pool in ["vmm", "slab"] {
        let report = works(&["replay", trace.path(), "--pool", pool, "--device", "host"]);
        assert_eq!(report["requested_peak_bytes"], 3_001_000);
        assert!(report["reserved_peak_bytes"].as_u64() >= report["allocated_peak_bytes"].as_u64());
        assert!(report["fragmentation"].as_f64() > Some(1.0) && report["seconds"].as_f64() > Some(0.0));
        assert_eq!((&report["oom"], &report["leaked_allocations"]), (&false.into(), &1.into()));
        let kind = if pool == "vmm" { "map" } else { "malloc" };
        assert!(report["driver_calls"][kind].as_u64() >= Some(1), "{report}");
    }
    let report = works(&["replay", trace.path(), "--device", "host", "--mem-limit", "2MiB"]);
    assert_eq!((&report["oom"], &report["first_oom"]["line"]), (&true.into(), &3.into()));
    let runs = works(&["replay", trace.path(), "--device", "host", "--beside"]);
    assert_eq!(runs["runs"].as_array().map(Vec::len), Some(3));

    assert!(fails(&["replay", "/nowhere/trace", "--device", "host"], 1).contains("/nowhere/trace"));
    let broken = Scratch::new("broken.csv", b"Thread,Time,Action,Pointer,Size,Stream\n1,t,free,0x10,1000,0x0\n");
    assert!(fails(&["replay", broken.path(), "--device", "host"], 1).contains("line 2"));
}

#[test]
fn where_the_parts_of_a_model_are_is_told_and_chosen_where_asked_for() {
    let model = data("gemma4-moe.gguf");
    let plain = ["run", "--device", "host", "-m", &model, "--tokens", "2,5,7", "-n", "2", "--temp", "0", "-c", "64"];
    let with = |more: &[&'static str]| [&plain[..], more].concat();
    let number = |found: &serde_json::Value, path: &str| found["placement"].pointer(path).unwrap().as_u64().unwrap();

    let found = works(&with(&["-ncmoe", "1"]));
    let (here, there) = (number(&found, "/device/experts_bytes"), number(&found, "/host/experts_bytes"));
    assert!(here > 0 && there > 0, "{}", found["placement"]);
    assert!(number(&found, "/device/prompt_scratch_bytes") > number(&found, "/device/decode_scratch_bytes"));
    assert_eq!(number(&found, "/device/cache_most_bytes"), found["cache_bytes"].as_u64().unwrap());
    assert!(found["placement"]["fit"].is_null());
    let whole = works(&plain);
    assert_eq!(number(&whole, "/device/experts_bytes"), here + there);
    assert_eq!(number(&whole, "/host/weights_bytes"), 0);

    let chosen = works(&with(&["-fit", "on", "--mem-limit", "1GiB"]));
    assert_eq!(chosen["tokens"], whole["tokens"]);
    assert_eq!(number(&chosen, "/fit/chosen/n_cpu_moe"), 0);
    assert_eq!(number(&chosen, "/fit/margin_bytes"), (1 << 30) / 10);
    let (foretold, taken) =
        (number(&chosen, "/fit/needs_bytes"), chosen["pool"]["reserved_peak_bytes"].as_u64().unwrap());
    assert!(taken <= foretold, "{foretold} foretold, {taken} taken");

    let given = evergraph(&with(&["-ncmoe", "1", "-fit", "on", "-fitt", "900", "--mem-limit", "900MiB"]));
    let talk = String::from_utf8_lossy(&given.stderr);
    assert!(given.status.success() && talk.contains("though that does not fit"), "{talk}");
    assert!(talk.lines().any(|line| line.trim_start().starts_with("host ") && line.contains("KiB")), "{talk}");
    let talk = fails(&with(&["-fit", "on", "--mem-limit", "1MiB"]), 1);
    assert!(talk.contains("no placement of the model fits") && talk.contains("--mem-limit"), "{talk}");
}

#[test]
fn a_model_is_made_up_and_run() {
    let model = Scratch::new("synth.gguf", b"");
    let words = ["synth", "gemma3-270m", "-o", model.path(), "--layers", "2", "--quant", "q8_0", "--seed", "7"];
    let made = works(&words);
    assert_eq!(made["bytes"].as_u64(), std::fs::metadata(model.path()).map(|file| file.len()).ok());
    let info = works(&["info", "-m", model.path()]);
    assert_eq!(info["architecture"], "gemma3");
    assert_eq!(info["tensors"].as_array().map(|list| list.len() as u64), made["tensors"].as_u64());
    let logits = works(&[
        "logits",
        "-m",
        model.path(),
        "--tokens",
        "2,700,90000",
        "--decode",
        "2",
        "--device",
        "host",
        "-c",
        "64",
    ]);
    let values: Vec<f64> = logits["last_logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(values.len(), 262_144);
    let deviation = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
    assert!((0.3..3.0).contains(&deviation), "logits have a deviation of {deviation}");

    let talk = fails(&["synth", "gemma9", "-o", model.path()], 2);
    assert!(talk.contains("gemma4-26b-a4b"), "{talk}");
    assert!(fails(&["synth", "gemma3-270m", "-o", model.path(), "--quant", "Q9"], 2).contains("Q4_K"));
    fails(&["synth", "gemma3-270m", "-o", model.path(), "--layers", "0"], 2);
    fails(&["synth", "gemma3-270m", "-o", "/nowhere/model.gguf"], 1);
}

/// As letters they were other flags: `-hf` asked for help and got it, with status 0.
#[test]
fn flags_of_llama_cpp_that_are_not_here_are_refused_by_their_names() {
    let model = data("gemma3.gguf");
    for (flag, name) in [("-hf", "--hf-repo"), ("-mmp", "--mmap"), ("-nkvo", "--no-kv-offload"), ("-rpc", "--rpc")] {
        let said = fails(&["run", "-m", &model, flag, "0", "-p", "hi"], 2);
        assert!(said.contains(name), "{flag}: {said}");
    }
}

#[test]
fn switches_in_the_environment_are_spelled_as_llama_cpp_spells_them() {
    let words =
        ["run", "-m", &data("gemma4-moe.gguf"), "--tokens", "5,6", "-n", "1", "--temp", "0", "--device", "host"];
    for (value, status) in [("1", 0), ("on", 0), ("0", 0), ("false", 0), ("maybe", 2)] {
        let output = command(&words).env("LLAMA_ARG_CPU_MOE", value).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{value}: {said}");
    }
}

#[test]
fn logits_that_are_no_numbers_are_an_error() {
    let file = Gguf::open(Path::new(&data("gemma3.gguf"))).unwrap();
    let mut bytes = std::fs::read(data("gemma3.gguf")).unwrap();
    let norm = file.data(file.tensor("output_norm.weight").unwrap());
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let broken = Scratch::new("nan.gguf", &bytes);
    let path = broken.0.display().to_string();
    assert!(fails(&["logits", "-m", &path, "--tokens", "1,2"], 1).contains("numbers"));
}
