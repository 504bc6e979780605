//! Results: what each command answers, in JSON and for people, and who does not listen.

use std::io::{Read, Write};
use std::process::Stdio;

use super::{Scratch, command, data, evergraph, fails, works};

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
fn talk_that_nobody_hears_is_no_error() {
    let mut child = command(&["doctor", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().flush();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
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
    let small = evergraph(&["replay", trace.path(), "--device", "host", "--mem-limit", "2MiB", "--json"]);
    assert_eq!(small.status.code(), Some(1), "it did not fit");
    let report: serde_json::Value = serde_json::from_slice(&small.stdout).unwrap();
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
