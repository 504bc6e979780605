//! Loading maps the file: nothing is copied, nothing big is built beside it.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::process::Command;

use evergraph_runner::gguf::{QuantType, Writer};
use evergraph_runner::models;

const MIB: u64 = 1 << 20;

/// Generates two tokens in a process of its own; returns (peak resident, key and value cache), bytes.
fn run(model: &Path, words: &[&str]) -> (u64, u64) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evergraph"));
    command.args(["run", "--json", "-n", "2", "--temp", "0", "--device", "host", "-m"]).arg(model).args(words);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    (found["resident_peak_bytes"].as_u64().unwrap(), found["cache_bytes"].as_u64().unwrap())
}

#[track_caller]
fn check(model: &Path, words: &[&str]) {
    let file = std::fs::metadata(model).unwrap().len();
    let (peak, cache) = run(model, words);
    assert!(
        peak <= file + cache + 64 * MIB,
        "peak {} MiB for a file of {} MiB and a cache of {} MiB",
        peak / MIB,
        file / MIB,
        cache / MIB
    );
}

#[test]
fn a_big_file_costs_its_own_size_and_little_more() {
    if !Path::new("/proc/self/status").exists() {
        eprintln!("skipped: this system does not tell the peak");
        return;
    }
    let (width, vocabulary, hidden) = (1024u64, 65_536u64, 2048u64);
    let mut writer = Writer::new();
    writer.put("general.architecture", "gemma3");
    for (key, value) in [
        ("context_length", 4096),
        ("embedding_length", width as u32),
        ("block_count", 2),
        ("feed_forward_length", hidden as u32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
    ] {
        writer.put(format!("gemma3.{key}"), value);
    }
    writer.put("gemma3.attention.layer_norm_rms_epsilon", 1e-6f32);
    let mut tensor = |name: &str, ty: QuantType, dims: &[u64]| {
        let bytes = dims.iter().product::<u64>() / ty.block_size() as u64 * ty.type_bytes() as u64;
        writer.tensor_with(format!("{name}.weight"), ty, dims, move |out| {
            // Small halves, all over the range of bytes.
            let block: Vec<u8> =
                (0..4096u32).map(|index| if index % 2 == 1 { 0x18 } else { (index * 31) as u8 }).collect();
            let mut left = bytes as usize;
            while left > 0 {
                let count = left.min(block.len());
                out.write_all(&block[..count])?;
                left -= count;
            }
            Ok(())
        });
    };
    tensor("token_embd", QuantType::F16, &[width, vocabulary]);
    tensor("output_norm", QuantType::F32, &[width]);
    for block in 0..2 {
        for (part, ty, dims) in [
            ("attn_norm", QuantType::F32, vec![width]),
            ("attn_q", QuantType::F16, vec![width, 512]),
            ("attn_k", QuantType::F16, vec![width, 128]),
            ("attn_v", QuantType::F16, vec![width, 128]),
            ("attn_q_norm", QuantType::F32, vec![128]),
            ("attn_k_norm", QuantType::F32, vec![128]),
            ("attn_output", QuantType::F16, vec![512, width]),
            ("post_attention_norm", QuantType::F32, vec![width]),
            ("ffn_norm", QuantType::F32, vec![width]),
            ("ffn_gate", QuantType::F16, vec![width, hidden]),
            ("ffn_up", QuantType::F16, vec![width, hidden]),
            ("ffn_down", QuantType::F16, vec![hidden, width]),
            ("post_ffw_norm", QuantType::F32, vec![width]),
        ] {
            tensor(&format!("blk.{block}.{part}"), ty, &dims);
        }
    }
    let path = std::env::temp_dir().join(format!("evergraph-{}-big.gguf", std::process::id()));
    let bytes = writer.write_file(&path).unwrap();
    assert!(bytes > 128 * MIB, "a copy would show");
    let result = std::panic::catch_unwind(|| check(&path, &["--tokens", "1,2,3,4,5,6,7,8"]));
    std::fs::remove_file(&path).unwrap();
    result.unwrap();
}

#[test]
fn the_real_model_costs_its_own_size_and_little_more() {
    let Some(path) = models::find_file("gemma-3-270m-q4_k_m.gguf") else {
        eprintln!("skipped: no Gemma 3 270M (tools/get-gemma3-270m fetches it)");
        return;
    };
    check(&path, &["-p", "The capital of France is", "-c", "2048"]);
}
