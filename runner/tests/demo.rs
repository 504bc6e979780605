//! The demo: graphs go stale under a limit, every kind of repair occurs, the tokens stay the same; and with a rule of
//! pool or cache taken out it says so.

#![allow(clippy::unwrap_used, missing_docs)]

use std::process::{Command, Output};

use evergraph_pool::PoolMode;
use evergraph_runner::demo::{self, Report, Settings};
use serde_json::Value;

fn settings(pool: PoolMode, seed: u64) -> Settings {
    let mut settings = Settings::default();
    (settings.pool, settings.seed) = (pool, seed);
    settings
}

fn play(settings: &Settings) -> Report {
    demo::run(settings, &mut |_| Ok(())).unwrap()
}

#[track_caller]
fn holds(report: &Report) {
    let failed: Vec<_> = report.failed().collect();
    assert!(failed.is_empty(), "{failed:?} in {report:?}");
}

fn evergraph(words: &[&str], mutant: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evergraph"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("EVERGRAPH_")) {
        command.env_remove(name);
    }
    command.arg("demo").args(words);
    if let Some(mutant) = mutant {
        command.env("EVERGRAPH_MUTANT", mutant);
    }
    command.output().unwrap()
}

/// Every kind of repair, in both modes, with several seeds; and whatever the memory did, the same tokens.
#[test]
fn the_tokens_do_not_depend_on_pool_limit_or_graphs() {
    let mut texts = Vec::new();
    for seed in [1, 2, 3] {
        let vmm = play(&settings(PoolMode::Vmm, seed));
        let slab = play(&settings(PoolMode::Slab, seed));
        holds(&vmm);
        holds(&slab);
        assert_eq!(vmm.tokens, slab.tokens, "seed {seed}: vmm and slab");
        assert!(vmm.repairs.remap > 0 && slab.repairs.remap == 0, "addresses of slabs die with them");
        // Not one token again and again, and not the same text for each seed.
        let kinds: std::collections::BTreeSet<i32> = vmm.tokens.iter().flatten().copied().collect();
        assert!(kinds.len() > 50, "{kinds:?}");
        assert!(!texts.contains(&vmm.tokens));
        texts.push(vmm.tokens);
    }
}

#[test]
fn without_graphs_nothing_can_go_stale_and_the_tokens_are_compared_all_the_same() {
    for pool in [PoolMode::Vmm, PoolMode::Slab] {
        let mut settings = settings(pool, 1);
        settings.graphs = false;
        let report = play(&settings);
        holds(&report);
        assert!(report.tokens_equal);
        assert_eq!((report.stale, report.replays, report.counted.log_launches), (0, 0, 0));
    }
}

#[test]
fn the_json_holds_what_scripts_rely_on() {
    let output = evergraph(&["--json", "--pool", "vmm", "--seed", "4"], None);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["tokens_equal"], true);
    assert_eq!(report["bad_launches"], 0);
    for name in ["give_backs", "stale", "reissues", "replays"] {
        assert!(report[name].as_u64().unwrap() > 0, "{name}");
    }
    for kind in ["remap", "update", "recapture", "eager"] {
        assert!(report["repairs"][kind].as_u64().unwrap() > 0, "{kind}");
    }
    assert!(report["steady"]["percent"].as_f64().unwrap() >= 99.0);
}

#[test]
fn plenty_of_memory_makes_a_demo_that_shows_nothing_and_says_so() {
    let output = evergraph(&["--mem-limit", "48MiB"], None);
    assert_eq!(output.status.code(), Some(1));
    let talk = String::from_utf8_lossy(&output.stderr);
    assert!(talk.contains("stale"), "{talk}");
}

#[test]
fn too_little_memory_is_an_error_with_a_report() {
    for pool in ["vmm", "slab"] {
        for limit in ["1MiB", "4MiB", "5MiB"] {
            let output = evergraph(&["--pool", pool, "--mem-limit", limit], None);
            let talk = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{pool}, {limit}: {talk}");
            assert!(talk.contains("out of memory") && !talk.contains("panicked"), "{pool}, {limit}: {talk}");
        }
    }
}

#[test]
fn a_device_that_is_not_there_and_words_that_are_off_have_their_own_status() {
    assert_eq!(evergraph(&["--device", "toaster"], None).status.code(), Some(2));
    assert_eq!(evergraph(&["--pool", "bathtub"], None).status.code(), Some(2));
}

/// Rules that the demo stands on. With one of them taken out it must fail: by its checks, or by the device's fault.
const MUTANTS: &[(&str, &str, &str)] = &[
    ("a launch is checked", "cache.check-skipped", "vmm"),
    ("a launch is checked", "cache.check-skipped", "slab"),
    ("a retirement moves the epoch", "no-bump", "vmm"),
    ("a retirement moves the epoch", "no-bump", "slab"),
    ("a reissue counts, too", "no-bump-on-reissue", "slab"),
    ("pages count, not only addresses", "backing-unchecked", "vmm"),
    ("identity is the allocation, not the address", "identity-by-address", "slab"),
    ("scratch of a graph is nobody else's", "reissue-scratch", "vmm"),
    ("what is declared is recorded", "cache.declared-ignored", "vmm"),
    ("an undisturbed step is one launch", "cache.every-bump-is-stale", "slab"),
    ("nothing leaks", "cache.graph-leaked", "slab"),
];

#[test]
fn with_a_rule_taken_out_the_demo_fails() {
    for (rule, mutant, pool) in MUTANTS {
        let output = evergraph(&["--json", "--pool", pool], Some(mutant));
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{rule}: {mutant} ({pool}) went unnoticed");
        println!("{mutant} ({pool}): {}", talk.lines().next().unwrap_or_default());
    }
}
