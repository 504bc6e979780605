//! The driver's rules, told over every body that needs no hardware, and the proof that the stories notice.

#![allow(clippy::unwrap_used)]

evergraph_pool::driver_conformance!(threads, Body::Threads);
evergraph_pool::driver_conformance!(stepped, Body::Stepped);
evergraph_pool::driver_conformance!(faulty, Body::Faulty);
evergraph_pool::driver_conformance!(virtual_devices, Body::Virtual);

/// A rule of the host device that can be taken out (see `mutant`), and a story that must fail without it.
const RULES: &[(&str, &str)] = &[
    ("host.unsafe-calls-pass", "the_modes_rule_who_breaks_whose_capture"),
    ("host.other-threads-pass", "a_poller_kills_a_global_capture_unless_it_pushes_its_mode"),
    ("host.refused-calls-break-nothing", "a_broken_capture_must_be_ended"),
    ("host.device-wait-passes", "a_device_wait_breaks_captures_in_every_mode"),
    ("host.captured-event-passes", "a_captured_event_can_not_be_asked"),
    ("host.strictness-ignored", "a_strict_device_refuses_more_during_captures"),
    ("host.ends-elsewhere-unnoticed", "a_capture_ends_where_it_began"),
    ("host.programmatic-edges-alike", "a_programmatic_start_is_part_of_the_topology"),
    ("host.no-isolation", "waiting_inside_for_work_outside_breaks_the_capture"),
    ("host.any-thread-ends", "a_capture_ends_on_its_thread_unless_relaxed"),
    ("host.unjoined-passes", "an_unjoined_fork_is_an_error_at_the_end"),
    ("host.order-of-capture", "branches_without_an_edge_do_not_run_in_the_order_of_capture"),
    ("host.update-carries-hidden", "an_update_keeps_hidden_attributes_and_says_updated"),
    ("host.update-takes-anything", "a_refused_update_leaves_the_exec_as_it_was"),
    ("host.runs-overlap", "runs_of_one_exec_never_overlap"),
    ("host.unloaded-runs", "a_replay_of_an_unloaded_function_is_a_fault"),
    ("host.faults-vanish", "a_bad_kernel_surfaces_at_the_next_wait_and_sticks"),
    ("host.faults-unstick", "a_bad_kernel_surfaces_at_the_next_wait_and_sticks"),
    ("host.running-ops-unwatched", "memory_pulled_from_under_a_running_op_is_a_fault"),
    ("host.any-device-is-current", "calls_need_the_device_current"),
    ("host.callbacks-call", "a_host_function_may_not_call_the_driver"),
    ("host.fresh-addresses", "a_freed_address_is_the_next_one_handed_out"),
    ("host.fresh-handles", "a_stream_handle_comes_back_but_its_id_does_not"),
    ("host.fresh-memory-is-zero", "fresh_memory_is_never_zero_by_luck"),
    ("host.access-open", "mapped_memory_needs_access"),
    ("host.peers-open", "plain_memory_of_a_peer_needs_peer_access"),
    ("host.homes-unchecked", "a_peer_copy_that_names_the_wrong_device_is_a_fault"),
    ("host.partial-unmaps", "an_unmap_takes_whole_mappings"),
    ("host.registered-writable", "registered_memory_is_read_only"),
];

/// The same of virtual devices.
const VIRTUAL_RULES: &[(&str, &str)] = &[
    ("virtual.all-may-reach", "plain_memory_of_a_peer_needs_peer_access"),
    ("virtual.all-may-reach", "a_range_is_granted_by_set_access"),
    ("virtual.new-pages-open", "new_pages_need_a_grant_of_their_own"),
    ("virtual.ranges-touch", "the_start_of_a_peers_memory_is_no_end_of_ones_own"),
    ("virtual.homes-unchecked", "a_peer_copy_that_names_the_wrong_device_is_a_fault"),
    ("virtual.any-device-is-current", "calls_need_the_device_current"),
];

/// Whether one story of this binary passes with a rule taken out.
fn passes(body: &str, rule: &str, story: &str) -> bool {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("{body}::{story}")])
        .env("EVERGRAPH_MUTANT", rule)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "no story {story}: {text}");
    output.status.success()
}

#[test]
fn each_rule_of_the_host_device_has_a_story_that_notices() {
    noticed("threads", RULES);
}

#[test]
fn each_rule_of_virtual_devices_has_a_story_that_notices() {
    noticed("virtual_devices", VIRTUAL_RULES);
}

fn noticed(body: &str, rules: &[(&str, &str)]) {
    for (rule, story) in rules {
        assert!(passes(body, "none", story), "{story} fails with every rule in place");
        assert!(!passes(body, rule, story), "{story} does not notice that {rule}");
    }
}
