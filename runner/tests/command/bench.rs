//! `evergraph bench` as users and scripts see it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::data;

fn command(words: &[&str]) -> Command {
    super::command(&[&["bench", "--device", "host"][..], words].concat())
}

fn bench(words: &[&str]) -> Output {
    command(words).output().unwrap()
}

/// What a run that must work writes.
#[track_caller]
fn works(words: &[&str]) -> (String, String) {
    let output = bench(words);
    let talk = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{words:?}: {talk}");
    (String::from_utf8(output.stdout).unwrap(), talk)
}

/// What a run that must fail says, before it measured anything.
#[track_caller]
fn fails(words: &[&str], status: i32) -> String {
    let output = bench(words);
    let talk = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{words:?}: {talk}");
    assert!(output.stdout.is_empty(), "{words:?} wrote {}", String::from_utf8_lossy(&output.stdout));
    assert!(!talk.contains("panicked"), "{words:?}: {talk}");
    talk
}

#[test]
fn lists_are_measured_in_every_combination_and_all_formats_tell_it() {
    let model = data("gemma3.gguf");
    let (text, _) = works(&[
        "-m", &model, "-p", "8-16*2", "-n", "4", "-pg", "8,2", "-d", "0,20", "-ub", "4,8", "-t", "1,2", "-ngl", "99",
        "-fa", "1", "-r", "2", "-o", "json",
    ]);
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(rows.len(), 2 * 2 * 2 * 4);
    let key =
        |row: &Value| ["n_ubatch", "n_threads", "n_depth", "n_prompt", "n_gen"].map(|name| row[name].as_u64().unwrap());
    assert_eq!(key(&rows[0]), [4, 1, 0, 8, 0]);
    assert_eq!(key(&rows[2]), [4, 1, 0, 0, 4]);
    assert_eq!(key(&rows[31]), [8, 2, 20, 8, 2]);
    for row in &rows {
        assert_eq!(row["samples_ns"].as_array().unwrap().len(), 2, "{row}");
        assert!(row["avg_ts"].as_f64().unwrap() > 0.0 && row["achieved_gb_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!((&row["n_gpu_layers"], &row["flash_attn"], &row["eager"]), (&99.into(), &1.into(), &0.into()));
        assert!(row["error"].is_null() && row["backends"] == "CPU");
    }

    let quick = ["-m", model.as_str(), "-p", "0", "-n", "2", "-r", "1", "--no-warmup", "--graphs", "off"];
    let with = |more: &[&str]| works(&[&quick, more].concat());
    let (text, _) = with(&["-fa", "0,1", "-d", "600", "-o", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
    let columns = |name: &str| rows.iter().map(|row| row[name].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(columns("flash_attn"), [0, 1]);
    let peaks = columns("peak_reserved_bytes");
    assert!(peaks[0] > peaks[1] + (2 << 20), "scores are written out: {peaks:?}");
    let (csv, beside) = with(&["-o", "csv", "-oe", "sql"]);
    assert!(csv.starts_with("build_commit,build_number,") && csv.lines().count() == 2, "{csv}");
    assert!(
        beside.contains("CREATE TABLE IF NOT EXISTS llama_bench (\n") && beside.contains("\nINSERT INTO llama_bench (")
    );
    let (lines, talk) = with(&["-o", "jsonl", "--pool", "slab", "--progress"]);
    let row: Value = serde_json::from_str(&lines).unwrap();
    assert_eq!((&row["pool"], &row["graphs"], &row["replays"]), (&"slab".into(), &false.into(), &0.into()));
    assert!(talk.contains("test 1 of 1: tg2: run 1") && !talk.contains("warm up"), "{talk}");
    let (json, _) = with(&["--json"]);
    assert_eq!(serde_json::from_str::<Vec<Value>>(&json).unwrap().len(), 1);
    let (people, _) = with(&[]);
    assert!(people.starts_with("| model ") && people.contains("|             tg2 |"), "{people}");
    let (nothing, beside) = with(&["-o", "none", "-oe", "md"]);
    assert!(nothing.is_empty() && beside.contains("|             tg2 |"), "{beside}");
}

#[test]
fn flags_have_twins_in_the_environment() {
    let model = data("gemma3.gguf");
    let mut command = command(&["-m", &model, "-r", "1", "--no-warmup", "-o", "jsonl"]);
    let output = command.env("LLAMA_ARG_N_PROMPT", "3,4").env("EVERGRAPH_N_GEN", "0").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let prompts: Vec<Value> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["n_prompt"].clone()).collect();
    assert_eq!(prompts, [3, 4], "{text}");
}

#[test]
fn what_can_not_be_measured_is_said_and_nothing_is() {
    let model = data("gemma3.gguf");
    for (words, said) in [
        (&["-p", "x"][..], "is no number or range"),
        (&["-p", "1--2"], "is no number or range"),
        (&["-n", "0-64*2"], "does not go on"),
        (&["-n", "9-1"], "smaller number first"),
        (&["-d", "0-2000000000"], "more than 1024"),
        (&["-p", "-5"], "-5"),
        (&["-p", "99999999999"], "is not in 0 to"),
        (&["-p", "0", "-n", "0"], "at least one token"),
        (&["-p", "1-1000", "-d", "1-1000"], "at most 10000 combinations"),
        (&["-pg", "5"], "no pair of numbers"),
        (&["-pg", "5,6,7"], "no pair of numbers"),
        (&["-pg", "0,0", "-p", "0", "-n", "0"], "at least one token"),
        (&["-b", "0"], "is not in 1 to"),
        (&["-ub", "0"], "is not in 1 to"),
        (&["-t", "0"], "is not in 1 to"),
        (&["-ngl", "-2"], "is not in -1 to"),
        (&["-cmoe", "-ncmoe", "4"], "cannot be used with"),
        (&["-ot", "exps=moon"], "-ot: expected PATTERN=CPU"),
        (&["-ot", "exps"], "is not PATTERN=DEVICE"),
        (&["-fa", "maybe"], "is not on, off or auto"),
        (&["-sm", "row"], "-sm: expected none or layer"),
        (&["-sm", "diagonal"], "is not none, layer, row or tensor"),
        (&["-mg", "1"], "-mg: expected 0"),
        (&["-ts", "1/1"], "-ts: expected a share of one device"),
        (&["-ctk", "q8_0"], "caches can be f16, bf16 or f32"),
        (&["-ctk", "f32"], "the same type for both"),
        (&["-r", "0"], "0 is not in 1..=1000000"),
        (&["--prio", "2"], "--prio: expected 0"),
        (&["--delay", "-1"], "-1"),
        (&["-o", "xml"], "is not csv, json, jsonl, md, sql or none"),
        (&["--mem-limit", "lots"], "is no unit"),
        (&["--devices", "2", "-mg", "2"], "-mg: expected a device from 0 to 1"),
        (&["--nonsense"], "unexpected argument"),
    ] {
        let talk = fails(&[&["-m", &model], words].concat(), 2);
        // Long messages are wrapped, with a bar at the side.
        let flat = talk.replace(['│', '\n'], " ").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(said), "{words:?} should say {said:?}: {talk}");
    }
    assert!(fails(&[], 2).contains("--model"));
    let both = bench(&["-m", &model, "--json", "-o", "csv"]);
    assert!(String::from_utf8_lossy(&both.stderr).contains("cannot be used with"));
    assert!(fails(&["-m", "no-such.gguf"], 1).contains("no-such.gguf"));
    assert!(fails(&["-m", &data("tokenizer.json")], 1).contains("GGUF"));
}

#[test]
fn a_row_that_fails_is_told_and_the_others_stand() {
    let model = data("gemma3.gguf");
    let words =
        ["-m", &model, "-p", "8", "-n", "0", "-d", "0,40000,16", "-r", "1", "--mem-limit", "6MiB", "-o", "jsonl"];
    let output = bench(&words);
    let (text, talk) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1), "{talk}");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 3, "{text}");
    assert!(rows[0]["avg_ts"].is_f64() && rows[2]["avg_ts"].is_f64() && rows[1]["avg_ts"].is_null(), "{text}");
    assert!(rows[1]["error"].as_str().unwrap().starts_with("out of memory: "), "{}", rows[1]["error"]);
    assert_eq!(rows[1]["mem_limit_bytes"], 6 << 20);
    assert!(talk.contains("pp8 @ d40000 failed: out of memory") && talk.contains("1 of 3 tests failed"), "{talk}");
}

#[test]
fn a_model_that_is_not_there_is_named_and_the_others_are_measured() {
    let models = format!("{},/no/such.gguf,{}", data("gemma3.gguf"), data("gemma4-e.gguf"));
    let output = bench(&["-m", &models, "-p", "4", "-n", "0", "-r", "1", "--no-warmup", "-o", "jsonl"]);
    let (text, talk) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1), "{talk}");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows[0]["avg_ts"].is_f64() && rows[1]["avg_ts"].is_null() && rows[2]["avg_ts"].is_f64(), "{text}");
    assert_eq!(rows[1]["model_filename"], "/no/such.gguf");
    assert!(rows[1]["error"].as_str().unwrap().contains("/no/such.gguf"), "{}", rows[1]["error"]);
    assert!(talk.contains("/no/such.gguf") && talk.contains("1 of 3 tests failed"), "{talk}");
    // None at all: nothing is written.
    assert!(fails(&["-m", "/no/such.gguf,/nor/this.gguf"], 1).contains("/no/such.gguf"));
}

#[test]
fn a_reader_that_leaves_ends_the_run_quietly() {
    let model = data("gemma3.gguf");
    let words = ["-m", &model, "-p", "4-400", "-n", "0", "-r", "1", "--no-warmup", "-o", "csv"];
    let mut child = command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // Rows come one by one: here the header and a row, while hundreds are still to be measured.
    for _ in 0..2 {
        lines.next().unwrap().unwrap();
    }
    drop(lines);
    let output = child.wait_with_output().unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !talk.contains("panicked"), "{talk}");
}
