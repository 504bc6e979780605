//! What the suite needs to run on a GPU, and the stories that only the host device can tell.

use super::Body;

/// CUDA C++ of the stories' kernels, and of the module in which `add` subtracts.
pub const SOURCES: [&str; 2] = [include_str!("kernels.cu"), include_str!("other_kernels.cu")];

/// Needs what only the host device has.
const HOST_ONLY: &[(&str, &str)] = &[
    ("a_module_load_breaks_a_capture_on_old_drivers", "the driver's age is a setting of the host device"),
    ("a_strict_device_refuses_more_during_captures", "strictness is a setting of the host device"),
    (
        "branches_without_an_edge_do_not_run_in_the_order_of_capture",
        "the order is nobody's promise; the host device takes the unkindest",
    ),
    ("a_function_goes_with_its_module", "dead handles are not checked, and need not come back"),
    ("a_handle_of_another_kind_is_refused", "handles are not checked"),
    ("handles_belong_to_their_device", "handles are not checked"),
    ("graphs_belong_to_their_device", "handles are not checked"),
    ("modules_belong_to_their_device", "handles are not checked"),
    ("an_update_needs_live_handles", "handles are not checked"),
    ("a_replay_of_an_unloaded_function_is_a_fault", "the code of an unloaded module still ran when tried"),
    ("device_memory_is_not_host_memory", "addresses are unified: a copy finds out which memory it is given"),
    ("an_access_does_not_run_into_the_neighbour", "accesses are checked by 2 MiB page"),
    ("one_byte_past_the_end_is_a_fault", "accesses are checked by 2 MiB page"),
    ("memory_freed_before_the_op_runs_is_gone", "a free waits for the device"),
    (
        "memory_pulled_from_under_a_running_op_is_a_fault",
        "a free waits for the device; an unmap of memory in use is undefined",
    ),
    ("a_fault_stays_in_its_context", "the other machine would be the same context"),
    ("each_device_has_its_own_memory", "other processes and the driver itself count too"),
    ("a_peer_copy_that_names_the_wrong_device_is_a_fault", "addresses are unified: the copy finds the devices"),
    ("two_machines_do_not_interfere", "there is one machine"),
    ("layouts_and_arguments_may_be_hidden", "hiding is a switch of the host device"),
    ("an_exec_takes_memory", "the cost of an exec is a setting of the host device"),
    ("a_stepped_graph_runs_a_node_a_step", "hardware can not be stepped"),
    ("a_stepped_stream_runs_a_piece_a_step", "hardware can not be stepped"),
    ("fresh_memory_is_never_zero_by_luck", "poison is a setting of the host device"),
    ("out_of_memory_is_typed_and_passes", "the memory size is a setting of the host device"),
    ("large_reservations_can_be_refused", "the limit is a setting of the host device"),
    ("a_device_may_have_no_vmm", "this device has it"),
    ("a_machine_may_have_no_links", "the links are a setting of the host device"),
    ("an_update_keeps_hidden_attributes_and_says_updated", "reads back what no driver shows"),
];

/// Stories with a second device.
const TWO_DEVICES: &[&str] = &[
    "a_wait_for_another_device_breaks_nothing",
    "a_capture_may_span_devices",
    "a_wait_crosses_devices",
    "plain_memory_of_a_peer_needs_peer_access",
    "the_start_of_a_peers_memory_is_no_end_of_ones_own",
    "the_end_of_ones_own_memory_is_no_access",
    "new_pages_need_a_grant_of_their_own",
    "peer_access_is_one_way",
    "a_range_is_granted_by_set_access",
    "a_peer_copy_needs_no_peer_access",
    "each_thread_has_its_own_current_device",
];

/// What hardware does not check and virtual devices do.
const TOLD_BY_VIRTUAL: &[&str] = &[
    "handles_belong_to_their_device",
    "graphs_belong_to_their_device",
    "modules_belong_to_their_device",
    "a_peer_copy_that_names_the_wrong_device_is_a_fault",
];

/// Why a story is not told on a machine with `devices` GPUs, if it is not.
#[must_use]
pub fn untold(body: Body, story: &str, devices: u32) -> Option<&'static str> {
    if let Some(why) = not_virtual(body, story) {
        return Some(why);
    }
    if body.is_virtual() && TOLD_BY_VIRTUAL.contains(&story) {
        return None;
    }
    if let Some((_, why)) = HOST_ONLY.iter().find(|(name, _)| *name == story) {
        return Some(why);
    }
    (devices < 2 && !body.is_virtual() && TWO_DEVICES.contains(&story)).then_some("needs two devices")
}

/// Needs devices that are apart.
const APART: &[(&str, &str)] = &[
    ("a_fault_stays_in_its_context", "one context serves all virtual devices of a physical one"),
    ("a_machine_may_have_no_links", "virtual devices of a physical one always reach each other"),
    ("an_exec_takes_memory", "execs are not a part of a virtual device's share"),
];

/// Why a story is not told on virtual devices, if it is not.
#[must_use]
pub fn not_virtual(body: Body, story: &str) -> Option<&'static str> {
    let found = APART.iter().filter(|_| body.is_virtual()).find(|(name, _)| *name == story);
    found.map(|(_, why)| *why)
}
