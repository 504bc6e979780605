//! Traces good and bad, and what the shipped ones measure.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use evergraph_pool::PoolMode::{Slab, Vmm};

use super::*;
use crate::Error;

const MIB: u64 = 1 << 20;
const HEADER: &str = "{\"trace\":\"evergraph\",\"version\":1}";

/// A trace of ours with these events, and its end.
fn trace(events: &[&str]) -> String {
    let end = format!("{{\"do\":\"end\",\"events\":{}}}", events.len() + 1);
    let lines: Vec<&str> = std::iter::once(HEADER).chain(events.iter().copied()).chain([end.as_str()]).collect();
    lines.join("\n") + "\n"
}

#[track_caller]
fn plays(text: &str, options: &Options) -> Report {
    replay(text.as_bytes(), options).unwrap()
}

/// The line of a trace that is refused, and what is said of it.
#[track_caller]
fn refused(text: &[u8]) -> (u64, String) {
    match replay(text, &Options::new(Vmm)) {
        Err(Error::Trace(bad)) => (bad.line, bad.to_string()),
        other => panic!("not refused: {other:?}"),
    }
}

fn shipped(file: &str) -> String {
    SHIPPED.iter().find(|shipped| shipped.file == file).unwrap().text()
}

#[test]
fn the_files_are_what_is_written_here() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../traces");
    let mut bytes = 0;
    for shipped in SHIPPED {
        let path = folder.join(shipped.file);
        if std::env::var_os("EVERGRAPH_BLESS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, shipped.text()).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(text == shipped.text(), "{} differs; EVERGRAPH_BLESS=1 writes it anew", path.display());
        bytes += text.len();
    }
    assert!(bytes < 1 << 20, "{bytes} bytes of traces");
}

#[test]
fn pages_hold_hardly_more_than_was_asked_for() {
    for shipped in SHIPPED {
        let report = plays(&shipped.text(), &Options::new(Vmm));
        assert!(report.fragmentation() <= 1.05, "{}: {}\n{report}", shipped.file, report.fragmentation());
        assert!(!report.oom, "{}\n{report}", shipped.file);
    }
}

#[test]
fn growing_sizes_one_at_a_time_do_not_pile_up() {
    let text = shipped("sizes-8k.jsonl");
    let report = plays(&text, &Options::new(Vmm));
    assert_eq!(report.largest_bytes, 512 * MIB);
    assert!(report.reserved_peak_bytes <= report.largest_bytes + 2 * MIB, "{report}");
    let report = plays(&text, &Options::new(Slab));
    assert!(report.reserved_peak_bytes <= 3 * report.largest_bytes, "{report}");
}

#[test]
fn a_trace_is_played_and_measured() {
    let text = trace(&[
        r#"{"do":"alloc","id":1,"bytes":3000000,"for":"state"}"#,
        r#"{"do":"alloc","id":2,"bytes":1000000,"stream":7}"#,
        r#"{"do":"step","name":"first"}"#,
        r#"{"do":"free","id":2,"stream":3}"#,
        r#"{"do":"wait","stream":3}"#,
        r#"{"do":"alloc","id":2,"bytes":500}"#,
        r#"{"do":"free","id":2}"#,
        r#"{"do":"trim","bytes":0}"#,
    ]);
    for mode in [Vmm, Slab] {
        let report = plays(&text, &Options::new(mode));
        assert_eq!((report.events, report.allocs, report.frees, report.steps), (8, 3, 2, 1));
        assert_eq!(report.requested_peak_bytes, 4_000_000);
        assert_eq!(report.largest_bytes, 3_000_000);
        assert!(report.allocated_peak_bytes >= report.requested_peak_bytes);
        assert!(report.reserved_peak_bytes >= report.allocated_peak_bytes);
        assert_eq!((report.leaked_allocations, report.leaked_bytes), (1, 3_000_000));
        assert!(report.give_backs > 0 && report.given_back_bytes > 0, "{report}");
        let calls = &report.driver_calls;
        let (taken, returned) = if mode == Vmm { ("map", "unmap") } else { ("malloc", "free") };
        assert!(calls[taken] >= 2 && calls[returned] >= 1, "{calls:?}");
        assert!(!calls.contains_key("bind"), "{calls:?}");
        assert!(!report.oom && report.first_oom.is_none());
    }
}

#[test]
fn a_request_without_memory_is_counted_and_the_trace_goes_on() {
    let text = trace(&[
        r#"{"do":"alloc","id":1,"bytes":4000000}"#,
        r#"{"do":"alloc","id":2,"bytes":9000000}"#,
        r#"{"do":"free","id":2}"#,
        r#"{"do":"free","id":1}"#,
        r#"{"do":"alloc","id":2,"bytes":7000000}"#,
        r#"{"do":"free","id":2}"#,
    ]);
    for mode in [Vmm, Slab] {
        let report = plays(&text, &Options::new(mode).limit(Some(8 << 20)));
        assert!(report.oom && report.ooms == 1, "{report}");
        assert_eq!(report.first_oom.map(|miss| (miss.line, miss.bytes)), Some((3, 9_000_000)));
        assert_eq!((report.allocs, report.frees, report.leaked_allocations), (3, 3, 0));
        // The trace's own limit does the same.
        let limited = text.replacen("\"version\":1", "\"version\":1,\"limit_bytes\":8388608", 1);
        assert_eq!(plays(&limited, &Options::new(mode)).ooms, 1);
    }
}

#[test]
fn broken_traces_are_refused_with_the_line() {
    let alloc = r#"{"do":"alloc","id":1,"bytes":64}"#;
    let cases: &[(&[&str], u64, &str)] = &[
        (&[alloc, alloc], 3, "0x1, which is allocated"),
        (&[r#"{"do":"free","id":1}"#], 2, "0x1, which is not"),
        (&[alloc, r#"{"do":"free","id":1}"#, r#"{"do":"free","id":1}"#], 4, "0x1, which is not"),
        (&[r#"{"do":"alloc","id":1,"bytes":18446744073709551615}"#], 2, "18446744073709551615"),
        (&[r#"{"do":"alloc","id":1,"bytes":18446744073709551616}"#], 2, "an event"),
        (&[r#"{"do":"alloc","id":1,"bytes":-5}"#], 2, "an event"),
        (&[r#"{"do":"alloc","id":1,"bytes":1.5}"#], 2, "an event"),
        (&[r#"{"do":"alloc","id":1}"#], 2, "bytes"),
        (&[r#"{"do":"alloc","id":1,"bytes":1,"for":"fun"}"#], 2, "fun"),
        (&[r#"{"do":"alloc","id":1,"bytes":1,"colour":2}"#], 2, "colour"),
        (&[r#"{"do":"melt"}"#], 2, "melt"),
        (&[r#"{"do":"run","graph":"g"}"#], 2, "a graph that was defined"),
        (&[r#"{"do":"drop","graph":"g"}"#], 2, "a graph that was defined"),
        (&[r#"{"do":"graph","graph":"g"}"#], 2, "scratch of 4 bytes"),
        (&[r#"{"do":"graph","graph":"g","scratch":[18446744073709551615]}"#], 2, "18446744073709551615"),
        (
            &[r#"{"do":"graph","graph":"g","scratch":[64],"reads":[5]}"#, r#"{"do":"run","graph":"g"}"#],
            3,
            "0x5, which is not",
        ),
        (&[alloc, "{\"do\":\"alloc\",\"id\":2,\"byt"], 3, "an event"),
        (&[alloc, "not json"], 3, "an event"),
        (&[r#"{"do":"end","events":1}"#], 3, "nothing after the end event"),
        (&[r#"{"do":"end","events":7}"#], 2, "counts 7"),
    ];
    for (events, line, says) in cases {
        let text = trace(events);
        let (at, words) = refused(text.as_bytes());
        assert!(at == *line && words.contains(says), "{events:?}: line {at}: {words}");
    }
    // Cut short anywhere, a trace is never taken for a whole one.
    let whole = trace(&[alloc, r#"{"do":"free","id":1}"#]);
    for cut in 1..whole.len() - 1 {
        refused(&whole.as_bytes()[..cut]);
    }
    for (bytes, line) in [
        (&b""[..], 1),
        (b"\n\n", 1),
        (b"hello\n", 1),
        (b"\xff\xfe\n", 1),
        (b"{}\n", 1),
        (b"{\"trace\":\"evergraph\",\"version\":2}\n", 1),
        (b"{\"trace\":\"evergraph\",\"version\":1,\"limit_bytes\":18446744073709551615}\n", 1),
    ] {
        assert_eq!(refused(bytes).0, line, "{bytes:?}");
    }
    let endless = vec![b'x'; 200 << 10];
    assert!(refused(&endless).1.contains("at most 64 KiB"));
    let streams: Vec<String> = (0..300).map(|i| format!("{{\"do\":\"wait\",\"stream\":{i}}}")).collect();
    let streams: Vec<&str> = streams.iter().map(String::as_str).collect();
    assert_eq!(refused(trace(&streams).as_bytes()).0, 258);
}

#[test]
fn the_first_fault_of_a_trace_is_the_one_that_is_reported() {
    let text = trace(&[r#"{"do":"free","id":9}"#, "not json"]);
    assert_eq!(refused(text.as_bytes()).0, 2);
}

#[test]
fn rmm_logs_are_read() {
    let text = "Thread,Time,Action,Pointer,Size,Stream\n\
        1,10:00:00:000001,allocate,0x7f0000000000,1000,0x0\n\
        1,10:00:00:000002,allocate,7f0000000400,2000,0x55\r\n\
        2,10:00:00:000003,allocate failure,(nil),99999999999,0x0\n\
        2,10:00:00:000003,allocate,(nil),0,0x0\n\
        2,10:00:00:000003,free,(nil),0,0x0\n\
        1,10:00:00:000004,free,0x7f0000000400,2000,0x0\n\
        1,10:00:00:000005,allocate,0x7f0000000400,500,0x55\n\
        1,10:00:00:000006,deallocate,0x7f0000000000,1000,0x0\n";
    let report = plays(text, &Options::new(Vmm));
    assert_eq!((report.format, report.allocs, report.frees, report.recorded_failures), ("rmm", 3, 2, 1));
    assert_eq!((report.requested_peak_bytes, report.leaked_bytes), (3000, 500));
    // Columns go by their names.
    let shuffled = "\"Stream\",\"Size\",\"Pointer\",\"Action\"\n0x1,64,0x10,\"allocate\"\n0x1,64,0x10,free\n";
    assert_eq!(plays(shuffled, &Options::new(Slab)).allocs, 1);
    let header = "Thread,Time,Action,Pointer,Size,Stream\n";
    for (rows, line, says) in [
        ("1,t,allocate,0x10,64,0\n1,t,allocate,0x10,64,0\n", 3, "0x10, which is allocated"),
        ("1,t,free,0x10,64,0\n", 2, "0x10, which is not"),
        ("1,t,allocate,0x10,64,0\n1,t,free,0x10,32,0\n", 3, "a free of 64 bytes"),
        ("1,t,allocate,0x10,64\n", 2, "6 columns"),
        ("1,t,allocate,zebra,64,0\n", 2, "zebra"),
        ("1,t,allocate,-0x1,64,0\n", 2, "hexadecimal"),
        ("1,t,allocate,0x10,-64,0\n", 2, "-64"),
        ("1,t,allocate,0x10,18446744073709551615,0\n", 2, "18446744073709551615"),
        ("1,t,melt,0x10,64,0\n", 2, "melt"),
    ] {
        let (at, words) = refused(format!("{header}{rows}").as_bytes());
        assert!(at == line && words.contains(says), "{rows}: line {at}: {words}");
    }
    assert!(refused(b"Thread,Time,Action,Pointer,Size\n").1.contains("Stream"));
    let report = plays(&shipped("rmm-sample.csv"), &Options::new(Vmm));
    assert!(report.allocs > 100 && report.recorded_failures == 1, "{report}");
}

#[test]
fn graphs_of_a_trace_are_captured_replayed_and_repaired() {
    let mut events = vec![
        r#"{"do":"alloc","id":1,"bytes":4096,"for":"state"}"#,
        r#"{"do":"graph","graph":"g","scratch":[9000000],"writes":[1]}"#,
        r#"{"do":"graph","graph":"h","scratch":[9000000],"policy":"share","stream":1}"#,
    ];
    for _ in 0..5 {
        events.extend([r#"{"do":"run","graph":"g"}"#, r#"{"do":"run","graph":"h"}"#, r#"{"do":"step"}"#]);
    }
    events.push(r#"{"do":"trim","bytes":0}"#);
    events.extend([r#"{"do":"run","graph":"g"}"#, r#"{"do":"run","graph":"h"}"#, r#"{"do":"step"}"#]);
    events.extend([r#"{"do":"drop","graph":"g"}"#, r#"{"do":"graph","graph":"g","scratch":[8]}"#]);
    let text = trace(&events);
    for mode in [Vmm, Slab] {
        let report = plays(&text, &Options::new(mode));
        let graphs = report.graphs.unwrap();
        assert_eq!((graphs.runs, graphs.captures, graphs.skipped), (12, 2, 0), "{report}");
        assert!(graphs.was_steady && graphs.spells == 1, "{graphs:?}");
        assert_eq!(graphs.stale, 1, "the trim takes what one graph holds weakly: {report}");
        assert_eq!((graphs.remaps, graphs.captures_since), if mode == Vmm { (1, 0) } else { (0, 1) }, "{report}");
        assert_eq!((graphs.lost, graphs.lost_since), (0, 0), "{report}");
    }
}

#[test]
fn the_report_of_five_flushes_is_told_again() {
    let text = shipped("growing-scratch-74.jsonl");
    let report = plays(&text, &Options::new(Slab).policy(Policy::FlushAll));
    let graphs = report.graphs.unwrap();
    assert_eq!((report.flushes, graphs.lost_since), (5, 74 + 37 + 37 + 64 + 37), "{report}");
    assert!(matches!(
        replay(text.as_bytes(), &Options::new(Vmm).policy(Policy::FlushAll)),
        Err(Error::Argument { .. })
    ));
}
