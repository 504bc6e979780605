//! Every scenario in both pool modes, and rules taken out that a scenario must notice.

use std::process::Command;

use evergraph_pool::PoolMode;
use evergraph_runner::scenario;

fn tell_all(mode: PoolMode) {
    let failed: Vec<String> = scenario::list()
        .filter(|s| s.modes.contains(&mode))
        .filter_map(|s| scenario::tell(s.name, mode))
        .filter(|report| !report.passed)
        .map(|report| report.to_string())
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

#[test]
fn every_scenario_holds_with_pages() {
    tell_all(PoolMode::Vmm);
}

#[test]
fn every_scenario_holds_with_slabs() {
    tell_all(PoolMode::Slab);
}

#[test]
fn names_are_unique_and_the_agreed_ones_exist() {
    let names: Vec<&str> = scenario::list().map(|s| s.name).collect();
    let unique: std::collections::HashSet<&&str> = names.iter().collect();
    assert_eq!(unique.len(), names.len());
    let agreed = [
        "flush-74",
        "slot-table-full",
        "trim",
        "pool-drop",
        "aba",
        "reissue",
        "sleep-wake",
        "grow-kv",
        "stitch",
        "foreign-workspace",
        "pointer-table",
        "capture-miss",
        "capture-panic",
        "other-device",
        "set-rows-home",
        "peer-copy-blame",
    ];
    for name in agreed {
        assert!(names.contains(&name), "{name}");
    }
}

/// Mutant, scenario, pool: with the rule taken out the scenario must fail.
const MUTANTS: &[(&str, &str, &str)] = &[
    ("cache.stale-is-fine", "trim", "vmm"),
    ("cache.every-bump-is-stale", "flush-74", "vmm"),
    ("cache.every-bump-is-stale", "flush-large-request", "slab"),
    ("no-bump", "flush-large-request", "vmm"),
    ("cache.capture-left-open", "capture-panic", "vmm"),
    ("kept-content-not-restored", "sleep-wake", "vmm"),
    ("dropped-content-unnoticed", "sleep-wake", "vmm"),
    ("cache.table-members-ignored", "pointer-table", "slab"),
    ("cache.update-believed", "sglang-37657-hidden-attribute", "vmm"),
    ("cache.empty-accepted", "pytorch-87894-wrong-device", "vmm"),
    ("cache.global-mode", "pytorch-104487-poller", "vmm"),
    ("outliving-unchecked", "aiter-5393-workspace-in-window", "slab"),
    ("window-unsealed", "capture-miss", "vmm"),
    ("window-forgets-streams", "warp-1418-fork-in-capture", "vmm"),
];

/// Runs the command with a rule taken out; whether it held all the same.
fn holds_without(mutant: &str, args: &[&str]) -> bool {
    Command::new(env!("CARGO_BIN_EXE_evergraph"))
        .args(args)
        .env("EVERGRAPH_MUTANT", mutant)
        .output()
        .is_ok_and(|out| out.status.success())
}

#[test]
fn a_scenario_notices_when_its_rule_is_gone() {
    let survived: Vec<_> = MUTANTS
        .iter()
        .filter(|(mutant, name, pool)| holds_without(mutant, &["scenario", name, "--pool", pool]))
        .collect();
    assert!(survived.is_empty(), "survived: {survived:?}");
    assert!(holds_without("no rule of this name", &["scenario", "flush-74"]), "without a mutant it holds");
}
