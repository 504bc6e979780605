use std::thread;

use evergraph_pool::driver::Call;

use super::*;

/// A line of a log, as [`Faulty`](evergraph_pool::driver::Faulty) writes it.
fn call(name: &'static str, list: &[(&'static str, u64)], result: u64) -> Call {
    let payload = Vec::new();
    Call { name, thread: thread::current().id(), args: list.iter().copied().collect(), result: Ok(result), payload }
}

const STREAM: (&str, u64) = ("stream", 7);

/// A memset of `bytes` at `at` captured as graph 1 and instantiated as exec 2.
fn captured(at: u64, bytes: u64) -> Vec<Call> {
    vec![
        call(mark::RUN, &[("recipe", 3)], 0),
        call("begin_capture", &[STREAM], 0),
        call("memset_d8", &[("dst", at), ("value", 0), ("bytes", bytes), STREAM], 0),
        call("end_capture", &[STREAM], 1),
        call("instantiate", &[("graph", 1)], 2),
        call("launch", &[("exec", 2), STREAM], 0),
        call(mark::RAN, &[("recipe", 3), ("good", 1)], 0),
    ]
}

fn launch() -> Call {
    call("launch", &[("exec", 2), STREAM], 0)
}

fn own(serial: u64, ptr: u64, bytes: u64) -> Call {
    call(mark::OWN, &[("serial", serial), ("ptr", ptr), ("bytes", bytes)], 0)
}

fn read(parts: &[Vec<Call>]) -> Ledger {
    let mut ledger = Ledger::default();
    for part in parts {
        ledger.read(part, &|_, _| None);
    }
    ledger
}

#[test]
fn a_launch_on_freed_memory_is_bad() {
    let start = vec![call("malloc", &[("bytes", 4096)], 0x1000), own(1, 0x1000, 64)];
    let good = read(&[start.clone(), captured(0x1000, 64), vec![launch()]]);
    assert_eq!((good.seen().bad_launches, good.seen().replays), (0, 2));
    let freed = vec![call("free", &[("ptr", 0x1000)], 0), launch()];
    let bad = read(&[start, captured(0x1000, 64), freed]);
    assert_eq!((bad.seen().bad_launches, bad.seen().stale, bad.seen().give_backs), (1, 1, 1));
    assert!(bad.first().is_some_and(|what| what.contains("freed")));
}

#[test]
fn the_same_address_from_the_driver_again_does_not_help() {
    let start = vec![call("malloc", &[("bytes", 4096)], 0x1000)];
    let again = vec![call("free", &[("ptr", 0x1000)], 0), call("malloc", &[("bytes", 4096)], 0x1000), launch()];
    assert_eq!(read(&[start, captured(0x1000, 64), again]).seen().bad_launches, 1);
}

#[test]
fn scratch_may_be_unmapped_and_mapped_again_but_an_owners_bytes_may_not() {
    let map = |handle| call("map", &[("ptr", 0x1000), ("bytes", 4096), ("handle", handle)], 0);
    let unmap = call("unmap", &[("ptr", 0x1000), ("bytes", 4096)], 0);
    let away = vec![unmap.clone(), launch()];
    let back = vec![unmap, map(9), launch()];
    let scratch = call(mark::OWN, &[("serial", 1), ("ptr", 0x1000), ("bytes", 64), ("scratch", 1)], 0);
    for (owner, bad) in [(scratch, 0), (own(1, 0x1000, 64), 1)] {
        let start = vec![map(8), owner];
        assert_eq!(read(&[start.clone(), captured(0x1000, 64), away.clone()]).seen().bad_launches, 1);
        let ledger = read(&[start, captured(0x1000, 64), back.clone()]);
        assert_eq!((ledger.seen().bad_launches, ledger.seen().bad_maps), (bad, 0));
    }
}

#[test]
fn bytes_that_went_to_somebody_else_are_bad() {
    let start = vec![call("malloc", &[("bytes", 4096)], 0x1000), own(1, 0x1000, 64)];
    let taken = vec![call(mark::DISOWN, &[("serial", 1)], 0), own(2, 0x1020, 64), launch()];
    let ledger = read(&[start.clone(), captured(0x1000, 64), taken]);
    assert_eq!((ledger.seen().bad_launches, ledger.seen().reissues, ledger.seen().overlaps), (1, 1, 0));
    let dropped = vec![call(mark::DISOWN, &[("serial", 1)], 0), launch()];
    assert_eq!(read(&[start, captured(0x1000, 64), dropped]).seen().bad_launches, 0);
}

#[test]
fn an_update_makes_a_stale_exec_good_again() {
    let start = vec![call("malloc", &[("bytes", 8192)], 0x1000), own(1, 0x1000, 64)];
    let taken = vec![call(mark::DISOWN, &[("serial", 1)], 0), own(2, 0x1000, 64), own(3, 0x2000, 64)];
    let updated = vec![
        call("begin_capture", &[STREAM], 0),
        call("memset_d8", &[("dst", 0x2000), ("value", 0), ("bytes", 64), STREAM], 0),
        call("end_capture", &[STREAM], 4),
        call("exec_update", &[("exec", 2), ("graph", 4)], UpdateResult::Updated as u64),
        launch(),
    ];
    let ledger = read(&[start, captured(0x1000, 64), taken, updated]);
    assert_eq!((ledger.seen().bad_launches, ledger.seen().updates), (0, 1));
}

#[test]
fn two_live_slices_on_one_byte_are_an_overlap() {
    let ledger = read(&[vec![own(1, 0x1000, 64), own(2, 0x1040, 64), own(3, 0x107f, 1)]]);
    assert_eq!(ledger.seen().overlaps, 1);
}

#[test]
fn what_is_made_and_not_given_back_is_a_leak() {
    let log = vec![call("event_create", &[("timing", 0)], 5), call("malloc", &[("bytes", 1)], 6)];
    assert_eq!(read(std::slice::from_ref(&log)).leaks(), [("event", 1), ("malloc", 1)]);
    let back = vec![call("event_destroy", &[("event", 5)], 0), call("free", &[("ptr", 6)], 0)];
    assert!(read(&[log, back]).leaks().is_empty());
}

#[test]
fn one_chunk_at_two_ranges_is_noticed() {
    let map = |ptr| call("map", &[("ptr", ptr), ("bytes", 4096), ("handle", 8)], 0);
    assert_eq!(read(&[vec![map(0x1000), map(0x9000)]]).seen().bad_maps, 1);
}
