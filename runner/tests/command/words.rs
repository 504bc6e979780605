//! Words: how llama.cpp spells them, which of several win, and what is said of those that are off.

use std::path::Path;

use super::{command, data, evergraph, fails, works};

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
    let words = ["run", "-m", &model, "--tokens", "1", "--devices", "2", "-fit", "on"];
    assert!(fails(&words, 1).contains("--devices 2"));
    assert!(fails(&["run", "-m", &model, "-p", "x", "-n", "1", "--mem-limit", "64KiB"], 1).contains("out of memory"));
    assert!(fails(&["perplexity", "-m", &model, "-f", "/no/such/text"], 1).contains("/no/such/text"));
}

#[test]
fn a_failure_is_one_json_document_where_one_was_asked_for() {
    let model = data("gemma3.gguf");
    for (words, status, said) in [
        (&["run", "-m", "/no/such.gguf", "-p", "x"][..], 1, "/no/such.gguf"),
        (&["bench", "-m", "/no/such.gguf"], 1, "/no/such.gguf"),
        (&["run", "-m", &model, "-p", "x", "--temp", "-1"], 2, "--temp"),
        (&["run", "-m", &model, "-p", "x", "-c", "-5"], 2, "-5"),
        (&["run", "-m", &model], 2, "-p"),
        (&["logits", "-m", &model, "--tokens", "2", "--device", "cuda:77"], 3, "cuda:77"),
    ] {
        let output = evergraph(&[words, &["--json"]].concat());
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {talk}");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let error = &found["error"];
        assert!(error["what"].as_str().unwrap().contains(said), "{found}");
        assert!(error["try"].is_string() && error["exit_status"] == status, "{found}");
        assert!(talk.contains(said), "people are told too: {talk}");
    }
    // A check that failed has its document already.
    let output = evergraph(&["stress", "--steps", "1", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && found["steps"].is_number(), "{found}");
    // A text is no flag.
    assert!(fails(&["run", "-m", &model, "-p", "--json", "--tokens", "1"], 2).contains("--tokens"));
}

#[test]
fn the_last_of_several_values_wins() {
    let model = data("gemma3.gguf");
    let count = |words: &[&str]| {
        let words = [&["run", "-m", &model, "--tokens", "2,5", "--temp", "0"][..], words].concat();
        works(&words)["tokens"].as_array().unwrap().len()
    };
    assert_eq!(count(&["-n", "1", "-n", "3", "--predict", "2", "--graphs", "off", "--graphs", "on"]), 2);
    let negative = fails(&["run", "-m", &model, "--tokens", "2", "-c", "-5"], 2);
    assert!(negative.contains("-5") && negative.contains("--ctx-size"), "{negative}");
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
fn a_window_that_predicts_nothing_is_refused() {
    let (model, text) = (data("gemma3.gguf"), data("ppl_text.txt"));
    let talk = fails(&["perplexity", "-m", &model, "-f", &text, "-c", "2"], 2);
    assert!(talk.contains("-c"), "{talk}");
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
