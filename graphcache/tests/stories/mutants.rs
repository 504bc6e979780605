//! One rule out at a time: the story that guards it must fail. Each row runs in a child process of this very binary, so
//! nothing is built again.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// (rule of the design, mutant, the story that must fail).
const TABLE: &[(&str, &str, &str)] = &[
    (
        "1 no launch unchecked",
        "cache.check-skipped",
        "moved::tracked_scratch_that_was_taken_is_repaired_before_the_next_launch",
    ),
    ("1 every device's epoch is read", "cache.one-epoch", "devices::the_epoch_of_the_second_device_is_read_too"),
    ("1 no launch stale", "cache.stale-is-fine", "repairs::taken_scratch_comes_back_by_the_cheapest_way"),
    (
        "1 no needless refusal",
        "cache.every-bump-is-stale",
        "repairs::graphs_that_do_not_depend_on_what_was_retired_are_only_walked",
    ),
    (
        "4 zeroed scratch",
        "cache.zeroed-not-cleared",
        "repairs::zeroed_scratch_is_cleared_after_new_pages_and_only_then",
    ),
    (
        "4 cleared under the lease",
        "cache.cleared-without-lease",
        "threads::nobody_takes_scratch_between_its_clearing_and_the_launch",
    ),
    (
        "5 declared",
        "cache.declared-ignored",
        "replay::two_warm_ups_a_capture_and_then_the_launch_is_the_only_driver_call",
    ),
    ("5 scanned", "cache.scan-off", "record::strict_mode_names_a_pointer_that_nobody_declared"),
    ("5 child graphs", "cache.child-graphs-unscanned", "record::child_graphs_are_scanned_to_the_bottom"),
    ("5 copies", "cache.copies-unscanned", "record::copies_and_sets_are_scanned_as_well"),
    ("5 tables bring members", "cache.table-members-ignored", "record::a_pointer_table_pulls_in_its_members"),
    ("5 opaque pins", "cache.opaque-unpinned", "record::an_opaque_graph_pins_what_is_known_of_it"),
    (
        "6 guard ends the capture",
        "cache.capture-left-open",
        "replay::a_closure_that_fails_or_panics_leaves_stream_pool_and_cache_usable",
    ),
    ("6 thread-local mode", "cache.global-mode", "windows::other_threads_do_not_break_a_capture"),
    (
        "6 nothing loads inside",
        "cache.load-in-window",
        "windows::a_kernel_that_the_warm_up_did_not_load_is_named_and_loaded_by_an_eager_run",
    ),
    ("6 empty captures", "cache.empty-accepted", "windows::a_capture_that_recorded_nothing_is_an_error"),
    (
        "7 launch only",
        "cache.bind-every-launch",
        "replay::two_warm_ups_a_capture_and_then_the_launch_is_the_only_driver_call",
    ),
    (
        "growth is checked at the launch",
        "cache.reach-unchecked",
        "growing::a_run_beyond_what_has_grown_is_refused_before_anything_is_queued",
    ),
    ("held results", "held-outputs-ignored", "outputs::what_a_caller_holds_is_not_written_over"),
    ("8 bounded", "cache.unbounded", "bounds::evicted_and_removed_graphs_come_back"),
    (
        "8 least recently used",
        "cache.evicts-newest",
        "bounds::ten_thousand_keys_stay_within_the_bounds_and_the_hot_one_stays",
    ),
    ("8 never in flight", "cache.in-flight-ignored", "updates::a_graph_in_flight_is_neither_updated_nor_destroyed"),
    ("8 old before new", "cache.new-before-old", "repairs::another_shape_is_a_new_exec_and_the_old_one_goes_first"),
    (
        "9 updates are proven",
        "cache.update-believed",
        "updates::kernels_of_one_name_and_two_handles_never_share_an_exec",
    ),
    ("10 nothing leaks", "cache.graph-leaked", "replay::everything_goes_with_the_cache_and_the_pool"),
    (
        "asleep is a typed refusal",
        "cache.asleep-runs-eagerly",
        "sleep::asleep_a_run_is_a_typed_refusal_and_nothing_runs_in_its_place",
    ),
    ("storms end in a pin", "cache.storms-ignored", "repairs::a_storm_of_recaptures_ends_in_a_pin"),
];

/// Whether the story passed with the mutant switched on. A hang counts as a failure.
fn passes(mutant: &str, story: &str) -> bool {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", story, "--test-threads", "1"])
        .env("EVERGRAPH_MUTANT", mutant)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            child.wait().unwrap();
            return false;
        }
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn every_rule_taken_out_fails_its_story() {
    let listed = Command::new(std::env::current_exe().unwrap()).arg("--list").output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut missed = Vec::new();
    for (rule, mutant, story) in TABLE {
        assert!(listed.contains(&format!("{story}: test")), "no such story: {story}");
        let caught = !passes(mutant, story);
        println!("{rule:<26} {mutant:<30} {story:<90} {}", if caught { "caught" } else { "MISSED" });
        if !caught {
            missed.push(mutant);
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
