#![allow(clippy::unwrap_used)]

use super::*;

const STREAM: u64 = 7;
const GRAPH: u64 = 100;
const EXEC: u64 = 200;
const KEY: u64 = 2;

fn call(name: &'static str, args: &[(&'static str, u64)], result: u64) -> Call {
    Call {
        name,
        thread: std::thread::current().id(),
        args: args.iter().copied().collect(),
        result: Ok(result),
        payload: Vec::new(),
    }
}

fn kernel(addresses: &[u64]) -> Call {
    let mut call = call("launch_kernel", &[("stream", STREAM)], 0);
    call.payload = addresses.iter().flat_map(|a| a.to_ne_bytes()).collect();
    call
}

/// A graph of `KEY` on what `addresses` point at, launched once.
fn captured(addresses: &[u64]) -> Vec<Call> {
    vec![
        call(STEP, &[("key", KEY)], 0),
        call("begin_capture", &[("stream", STREAM)], 0),
        kernel(addresses),
        call("end_capture", &[("stream", STREAM)], GRAPH),
        call("instantiate", &[("graph", GRAPH)], EXEC),
        launch(),
    ]
}

fn launch() -> Call {
    call("launch", &[("exec", EXEC), ("stream", STREAM)], 0)
}

fn step() -> Call {
    call(STEP, &[("key", KEY)], 0)
}

/// Two pages at 0x10000, one slice over both, and a graph on it.
fn mapped() -> Witness {
    let mut witness = Witness::default();
    witness.read(&[call("address_reserve", &[("bytes", 0x10000)], 0x10000)]);
    witness.read(&[page("map", 0), page("map", 1), call("set_access", &[("ptr", 0x10000), ("bytes", 0x2000)], 0)]);
    witness.read(&[call(TAKE, &[("ptr", 0x10000), ("bytes", 0x1800), ("owner", KEY)], 0)]);
    witness.read(&captured(&[0x10000, 5]));
    assert_eq!(witness.end_step().unwrap().way, Way::Captured);
    witness
}

fn page(name: &'static str, index: u64) -> Call {
    call(name, &[("ptr", 0x10000 + 0x1000 * index), ("bytes", 0x1000)], 0)
}

#[test]
fn a_good_graph_that_is_launched_is_an_undisturbed_replay() {
    let mut witness = mapped();
    witness.read(&[step(), launch()]);
    assert_eq!(witness.end_step().unwrap().way, Way::Replayed);
    let findings = witness.findings();
    assert_eq!((findings.undisturbed, findings.undisturbed_replays, findings.bad_launches), (1, 1, 0));
    // Another call beside the launch is a disturbance of the cache's making.
    witness.read(&[step(), call("event_record", &[], 0), launch()]);
    witness.end_step();
    assert_eq!((witness.findings().undisturbed, witness.findings().undisturbed_replays), (2, 1));
}

#[test]
fn a_launch_without_the_last_page_is_bad_and_one_after_a_remap_is_not() {
    let mut witness = mapped();
    // The second page, which no argument points at: it is inside the slice.
    witness.read(&[page("unmap", 1), step(), launch()]);
    witness.end_step();
    assert_eq!(witness.findings().bad_launches, 1);
    witness.read(&[step(), page("map", 1)]);
    witness.read(&[call("set_access", &[("ptr", 0x11000), ("bytes", 0x1000)], 0), launch()]);
    assert_eq!(witness.end_step().unwrap().way, Way::Remapped);
    let findings = witness.findings();
    assert_eq!((findings.bad_launches, findings.stale[&Cause::Unbacked], findings.met_stale), (1, 1, 2));
}

#[test]
fn a_page_that_nobody_may_touch_is_not_there() {
    let mut witness = mapped();
    witness.read(&[page("unmap", 0), page("map", 0), step(), launch()]);
    witness.end_step();
    assert_eq!(witness.findings().bad_launches, 1);
}

/// Two 32-bit numbers in a row were once taken for an address in a reserved range that nothing was mapped to.
#[test]
fn numbers_side_by_side_are_no_address() {
    const FUNCTION: u64 = 9;
    let launched = |witness: &mut Witness| {
        witness.read(&[call("address_reserve", &[("bytes", 1 << 40)], 0x80_0000_0000)]);
        let mut one = captured(&[0x80_0000_0100]);
        one.iter_mut().filter(|call| call.name == "launch_kernel").for_each(|call| {
            call.args.push(("function", FUNCTION));
        });
        witness.read(&one);
        witness.end_step();
        witness.read(&[step(), launch()]);
        witness.findings().bad_launches
    };
    let layout = |params: &[(u32, u32)]| Arc::new(ParamLayout::c_layout(params));
    let told = |params| Witness::of(std::iter::once((FunctionHandle(FUNCTION), layout(params))));
    assert_eq!(launched(&mut told(&[(4, 4), (4, 4)])), 0);
    assert_eq!(launched(&mut told(&[(8, 8)])), 2, "an address is one");
    assert_eq!(launched(&mut Witness::default()), 2, "without a layout every word counts");
}

#[test]
fn the_same_address_from_another_malloc_is_not_the_same_memory() {
    let mut witness = Witness::default();
    witness.read(&[call("malloc", &[("bytes", 64)], 0x5000)]);
    witness.read(&captured(&[0x5010]));
    witness.end_step();
    witness.read(&[call("free", &[("ptr", 0x5000)], 0), call("malloc", &[("bytes", 64)], 0x5000), step(), launch()]);
    witness.end_step();
    assert_eq!(witness.findings().bad_launches, 1);
    assert_eq!(witness.findings().stale[&Cause::Freed], 1);
}

#[test]
fn memory_that_others_took_makes_a_launch_bad_until_the_exec_has_new_addresses() {
    let mut witness = mapped();
    witness.read(&[call(TAKE, &[("ptr", 0x11000), ("bytes", 0x100), ("owner", KEY)], 0), step(), launch()]);
    witness.end_step();
    assert_eq!(witness.findings().bad_launches, 0, "its own");
    witness.read(&[call(TAKE, &[("ptr", 0x11000), ("bytes", 0x100), ("owner", OTHERS)], 0), step(), launch()]);
    witness.end_step();
    assert_eq!((witness.findings().bad_launches, witness.findings().stale[&Cause::Reissued]), (1, 1));
    assert_eq!(witness.blows()[0].keys, [KEY]);
    let update = |result| call("exec_update", &[("exec", EXEC), ("graph", GRAPH)], result);
    witness.read(&[step(), update(1), launch()]);
    witness.end_step();
    assert_eq!(witness.findings().bad_launches, 2, "a refused update changes nothing");
    witness.read(&[step(), update(0), launch()]);
    assert_eq!(witness.end_step().unwrap().way, Way::Updated);
    assert_eq!(witness.findings().bad_launches, 2);
}

#[test]
fn a_step_without_a_launch_is_a_warm_up_or_an_eager_run() {
    let mut witness = Witness::default();
    witness.read(&[step(), kernel(&[])]);
    assert_eq!(witness.end_step().unwrap().way, Way::WarmUp);
    witness.read(&[step(), call("begin_capture", &[("stream", STREAM)], 0)]);
    witness.read(&[call("end_capture", &[("stream", STREAM)], GRAPH), kernel(&[])]);
    assert_eq!(witness.end_step().unwrap().way, Way::Eager, "a capture that came to nothing");
    let mut witness = mapped();
    witness.read(&[step(), kernel(&[])]);
    assert_eq!(witness.end_step().unwrap().way, Way::Eager);
    witness.read(&[call("exec_destroy", &[("exec", EXEC)], 0)]);
    witness.read(&captured(&[0x10000]));
    assert_eq!(witness.end_step().unwrap().way, Way::Recaptured);
    witness.read(&[call("exec_destroy", &[("exec", EXEC)], 0), step(), launch()]);
    witness.end_step();
    assert_eq!(witness.findings().bad_launches, 1, "an exec that is gone");
}
