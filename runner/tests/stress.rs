//! Short runs of the stress with fixed seeds, and rules taken out that it must notice.

#![allow(clippy::unwrap_used)]

use std::process::Command;

use evergraph_pool::PoolMode;
use evergraph_runner::stress::{self, Options};

fn sound(options: Options) -> stress::Report {
    let report = stress::run(&options).unwrap();
    assert!(report.sound(), "{report}");
    report
}

#[test]
fn everything_happens_and_nothing_goes_wrong_with_pages() {
    let report = sound(Options::new(PoolMode::Vmm).steps(6000).seed(11));
    assert!(report.passed(), "{report}");
}

#[test]
fn everything_happens_and_nothing_goes_wrong_with_slabs() {
    let report = sound(Options::new(PoolMode::Slab).steps(6000).seed(12));
    assert!(report.passed(), "{report}");
}

#[test]
fn a_crowd_is_sound_too() {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        sound(Options::new(mode).steps(3000).threads(3).seed(13));
    }
}

#[test]
fn one_worker_follows_from_the_seed() {
    let events = |seed| sound(Options::new(PoolMode::Vmm).steps(800).seed(seed)).events;
    assert_eq!(events(5), events(5));
    assert_ne!(events(5), events(6));
}

#[test]
fn bytes_of_a_fuzzer_are_steps() {
    stress::run_ops(&[]);
    let bytes: Vec<u8> = stress::Seeded::new(21).take(600).collect();
    stress::run_ops(&bytes);
}

/// Mutant and pool: with the rule taken out the stress must fail.
const MUTANTS: &[(&str, &str)] = &[
    ("cache.check-skipped", "slab"),
    ("cache.zeroed-shares-bytes", "vmm"),
    ("reissue-scratch", "slab"),
    ("no-bump-on-reissue", "slab"),
    ("backing-unchecked", "vmm"),
];

#[test]
fn the_stress_notices_when_a_rule_is_gone() {
    let survived: Vec<_> = MUTANTS
        .iter()
        .filter(|(mutant, pool)| {
            Command::new(env!("CARGO_BIN_EXE_evergraph"))
                .args(["stress", "--steps", "4000", "--seed", "3", "--faults", "off", "--pool", pool])
                .env("EVERGRAPH_MUTANT", mutant)
                .output()
                .is_ok_and(|out| out.status.success())
        })
        .collect();
    assert!(survived.is_empty(), "survived: {survived:?}");
}
