//! Each rule taken out once: its test must fail then.
//!
//! The table is the inventory of the pool's rules. Every row runs its test in a child process of this very
//! binary, once as it is (it must pass) and once with the rule switched off (it must fail).

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Rule of the design, mutant, the test that kills it.
const ROWS: &[(&str, &str, &str)] = &[
    ("1 no launch with a bad token", "no-bump-on-reissue", "retire::the_same_address_is_not_the_same_allocation"),
    ("1 no launch with a bad token", "no-generation-change", "retire::the_same_address_is_not_the_same_allocation"),
    ("1 no launch with a bad token", "no-bump", "retire::a_flush_makes_exactly_its_graphs_stale"),
    ("1 leases are read", "leases-not-read", "retire::memory_is_not_taken_while_a_lease_is_held"),
    ("1 retiring is bad", "walk-ignores-retiring", "retire::retiring_is_bad_for_a_walk"),
    ("1 new pages are noticed", "backing-unchecked", "retire::pages_come_back_under_the_same_address"),
    ("1 no needless refusal", "epoch-on-every-free", "retire::undisturbed_graphs_notice_nothing"),
    ("2 one give-back function", "second-free-path", "give_back::only_one_file_calls_the_drivers_free"),
    ("2 wait before unmap", "no-wait-before-unmap", "give_back::the_host_has_seen_the_work_before_the_memory_goes"),
    ("2 wait on the host", "stream-wait-before-unmap", "give_back::the_host_has_seen_the_work_before_the_memory_goes"),
    ("2 the last launch too", "retire-forgets-launches", "retire::a_new_owner_is_ordered_after_the_old_graph"),
    ("2 of graphs that are gone too", "evict-forgets-launch", "retire::the_last_launch_outlives_the_graph"),
    ("2 owning device current", "wrong-device-on-free", "give_back::the_owning_device_is_current_when_memory_goes"),
    ("3 identity is the id", "identity-by-address", "retire::the_same_address_is_not_the_same_allocation"),
    (
        "4 scratch is not reissued",
        "reissue-scratch",
        "windows::scratch_freed_inside_a_capture_is_never_handed_to_somebody_else",
    ),
    ("4 outliving slices", "outliving-unchecked", "windows::a_slice_on_a_reused_temporary_may_not_outlive_the_window"),
    (
        "4 strong holds",
        "free-ignores-holders",
        "windows::a_slice_dropped_inside_the_window_can_still_be_declared_by_the_scan",
    ),
    ("4 order across streams", "cross-stream-unordered", "slices::another_stream_waits_for_the_first_one"),
    ("4 inherited uses", "reissue-forgets-uses", "slices::inherited_uses_stay_until_the_host_has_seen_them"),
    ("6 the window is sealed", "window-unsealed", "windows::a_miss_is_a_typed_error_before_any_driver_call"),
    (
        "6 the window ends on panic",
        "window-stays-open",
        "windows::a_panic_inside_the_window_leaves_stream_and_pool_usable",
    ),
    ("new pages are granted too", "grant-forgets-new-pages", "grants::a_grant_is_kept_by_whatever_brings_pages"),
    ("old pages are granted", "grant-skips-mapped-pages", "grants::a_grant_is_for_a_purpose"),
    ("growth is there before it is said", "extent-before-pages", "growing::a_failed_growth_changes_nothing"),
    ("stitch before give-back", "no-stitch", "stitch::a_request_that_no_free_block_fits_is_served_from_several"),
    (
        "2 wait on the host for a move",
        "no-wait-before-unmap",
        "stitch::a_request_that_no_free_block_fits_is_served_from_several",
    ),
    (
        "a physical chunk goes as a whole",
        "bundles-cut",
        "chunks::a_small_request_takes_a_large_free_chunk_rather_than_none",
    ),
    ("no bytes beyond the limit", "misfits-stay", "chunks::a_small_request_takes_a_large_free_chunk_rather_than_none"),
    ("smaller before none", "bundle-or-nothing", "chunks::a_chunk_that_the_driver_has_not_is_made_of_smaller_ones"),
    ("small cards, small chunks", "bundles-on-small-cards", "chunks::small_requests_and_small_cards_have_small_chunks"),
    ("what wakes is known anew", "bundles-untold", "chunks::what_wakes_has_the_chunks_of_its_time"),
    ("kept bytes come back", "kept-content-not-restored", "sleep::kept_bytes_are_there_again_at_the_same_addresses"),
    ("shared chunks come back", "wake-skips-shared-chunks", "sleep::kept_bytes_are_there_again_at_the_same_addresses"),
    (
        "lost bytes are noticed",
        "dropped-content-unnoticed",
        "sleep::dropped_bytes_move_the_content_and_are_never_taken_for_what_they_were",
    ),
    (
        "nothing is handed out asleep",
        "sleeping-heap-hands-out",
        "sleep::nothing_is_handed_out_or_touched_while_it_sleeps",
    ),
    (
        "2 a sleep waits on the host",
        "sleep-forgets-streams",
        "sleep::the_host_has_seen_all_work_before_anything_is_unmapped",
    ),
    ("10 failure changes nothing", "failed-map-leaks", "faults::growth"),
    ("11 numbers are checked", "wrap-sizes", "slices::absurd_sizes_are_refused_and_change_nothing"),
    ("12 no lock while foreign code runs", "callback-under-lock", "retire::a_callback_may_use_the_pool"),
];

fn run(test: &str, mutant: Option<&str>) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1"]).stdout(Stdio::piped()).stderr(Stdio::null());
    match mutant {
        Some(mutant) => command.env("EVERGRAPH_MUTANT", mutant),
        None => command.env_remove("EVERGRAPH_MUTANT"),
    };
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    // A mutant that hangs is as dead as one that fails.
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            child.wait().unwrap();
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "there is no test {test}");
    output.status.success()
}

#[test]
fn every_rule_has_a_test_that_notices_when_it_is_gone() {
    let tests: BTreeSet<&str> = ROWS.iter().map(|(_, _, test)| *test).collect();
    let jobs: Vec<(&str, Option<&str>)> =
        tests.into_iter().map(|test| (test, None)).chain(ROWS.iter().map(|(_, m, test)| (*test, Some(*m)))).collect();
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                while let Some(&(test, mutant)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if run(test, mutant) != mutant.is_none() {
                        wrong.lock().unwrap().push((test, mutant));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    for (rule, mutant, test) in ROWS {
        println!("{rule:36} {mutant:28} {test}");
    }
    assert!(wrong.is_empty(), "tests that fail with every rule in place, or pass with one taken out: {wrong:#?}");
}

#[test]
fn every_row_has_a_switch_in_the_sources() {
    let mut text = String::new();
    let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    folders.push(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rules"));
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with("mutants.rs") {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    for (_, mutant, _) in ROWS {
        assert!(text.contains(&format!("is(\"{mutant}\")")), "no switch for {mutant}");
    }
}
