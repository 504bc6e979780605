//! One rule of the protocol out at a time; the model must notice.
//!
//! Mutants of the shipped code are switches in `src/handshake.rs`; the others are switches in the model, at
//! the place where the pool or the cache has the rule.

use crate::mutant;
use crate::scenarios::{self, Scenario};

/// (mutant, what is taken out, the scenario that must fail).
pub(crate) const MUTANTS: &[(&str, &str, Scenario)] = &[
    ("launcher-fence-removed", "no fence between taking the lease and loading the epoch", scenarios::BASIC),
    ("launcher-fence-acqrel", "that fence weakened to AcqRel", scenarios::BASIC),
    ("retirer-fence-removed", "no fence between the bump and reading the leases", scenarios::BASIC),
    ("retirer-fence-acqrel", "that fence weakened to AcqRel", scenarios::BASIC),
    ("lease-clear-relaxed", "the lease is cleared relaxed", scenarios::BASIC),
    ("lease-read-relaxed", "the lease is read relaxed", scenarios::BASIC),
    ("number-after-clear", "the launch number is noted after the lease was cleared", scenarios::BASIC),
    ("number-before-lease", "the launch numbers are read before the leases", scenarios::BASIC),
    ("epoch-before-lease", "the epoch is read before the lease is set", scenarios::BASIC),
    ("bump-after-reads", "the epoch moves after the leases were read", scenarios::BASIC),
    ("no-bump", "the epoch does not move", scenarios::BASIC),
    ("leases-not-read", "the leases are not read", scenarios::BASIC),
    ("no-ordering", "nothing is waited for before the unmap", scenarios::BASIC),
    ("no-ordering", "the new owner is not ordered behind the last launch", scenarios::REISSUE),
    ("retiring-ignored", "the lock is dropped to wait, and a walk ignores the mark", scenarios::BASIC),
    ("proven-after-unlock", "the proven epoch is read after the walk's critical section", scenarios::FIRST_RUN),
    ("proven-by-capture-end", "the end of a capture sets the proven epoch, without a walk", scenarios::HAND_OUT),
    ("late-registration", "the dependent is registered after the hand-out's critical section", scenarios::HAND_OUT),
    ("capture-begun-unlocked", "a capture begins before the pool knows", scenarios::HAND_OUT),
    ("one-device-unread", "one device's epoch is not compared", scenarios::TWO_DEVICES),
    ("eviction-forgets-launch", "unregistering drops the graph's last launch", scenarios::EVICT),
    ("eviction-skips-handshake", "a graph is unregistered without bump, fence and lease", scenarios::EVICT),
    ("reissue-forgets-uses", "a reissue drops the uses that it inherits", scenarios::REISSUE_THEN_GIVE_BACK),
    (
        "second-victim-without-bump",
        "a second victim after relocking rides on the first one's bump",
        scenarios::TWO_RETIRES,
    ),
    ("boolean-lease", "two launchers share a flag instead of a count", scenarios::TWO_LAUNCHERS),
    ("lease-kept", "the lease is kept into the slow path", scenarios::SELF_EVICT),
    ("lease-wait-under-lock", "the retirer waits for a lease under the lock", scenarios::BUSY_DEVICE),
    ("device-wait-under-lock", "the retirer waits for the device under the lock", scenarios::BUSY_DEVICE),
];

/// Runs a scenario with a rule taken out, on a thread of its own; what it panicked with, if it did.
fn run(name: &'static str, scenario: Scenario) -> Option<String> {
    let thread = std::thread::spawn(move || {
        mutant::set(name);
        scenario.explore();
    });
    thread.join().err().map(|panic| match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text.lines().next().unwrap_or_default().to_owned(),
        (_, Some(text)) => (*text).to_owned(),
        _ => "a panic".to_owned(),
    })
}

#[test]
fn every_mutant_is_caught() {
    let only = std::env::var("ONLY").ok();
    let mut missed = Vec::new();
    for &(name, what, scenario) in MUTANTS.iter().filter(|(name, ..)| only.as_deref().is_none_or(|only| only == *name))
    {
        let start = std::time::Instant::now();
        let caught = run(name, scenario);
        println!(
            "{name:<27} {what:<75} {:>6.2} s  {}",
            start.elapsed().as_secs_f64(),
            caught.as_deref().unwrap_or("MISSED")
        );
        if caught.is_none() {
            missed.push(name);
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
