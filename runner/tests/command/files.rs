//! Model files: what is wrong with them is named, and what is made up runs.

use std::path::Path;

use evergraph_runner::gguf::{Bytes, Gguf, MetaValue, QuantType, Value, Writer};

use super::{Scratch, data, evergraph, fails, works};

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
    let bytes = Parts::new().bytes();
    assert!(Gguf::parse(Bytes::copy_of(&bytes)).is_ok(), "it can be held in memory");
    let copy = Scratch::new("copy.gguf", &bytes);
    let words =
        |model: &str| works(&["logits", "-m", model, "--tokens", "2,315,331", "--decode", "3"])["last_logits"].clone();
    assert_eq!(words(copy.path()), words(&data("gemma3.gguf")));
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
fn a_file_without_end_is_not_read() {
    let talk = fails(&["info", "-m", "/dev/zero", "--no-mmap"], 1);
    assert!(talk.contains("not a regular file"), "{talk}");
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
    for temp in ["0", "1"] {
        let talk = fails(&["run", "-m", &path, "--tokens", "1,2", "-n", "3", "--temp", temp], 1);
        assert!(talk.contains("numbers"), "{talk}");
    }
    // Those that come later too: here after the first token that is chosen.
    let model = data("deepseek-v2-lite.gguf");
    let words = |model: &str| ["run", "-m", model, "--tokens", "1,2", "-n", "3", "--temp", "0"].map(str::to_owned);
    let first = works(&words(&model).each_ref().map(String::as_str))["tokens"][0].as_u64().unwrap() as usize;
    let (file, mut bytes) = (Gguf::open(model.as_ref()).unwrap(), std::fs::read(&model).unwrap());
    let embedding = file.tensor("token_embd.weight").unwrap();
    let row = (embedding.bytes() / 512) as usize;
    let at = embedding.start_bytes() as usize + first * row;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let broken = Scratch::new("nan-later.gguf", &bytes);
    let output = evergraph(&words(broken.path()).each_ref().map(String::as_str));
    let talk = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && talk.contains("numbers"), "{talk}");
}
