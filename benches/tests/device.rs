//! What is measured on a device is run on the host device here: every part ends, and says something of everything.

#![allow(clippy::unwrap_used)]

use evergraph_benches::device::{Effort, Report, Rig, graphs, memory, repair};
use evergraph_benches::null::NullDriver;
use evergraph_pool::driver::host::{HostConfig, HostDevice};

fn host() -> Rig {
    Rig::new(HostDevice::new(HostConfig::default()).unwrap()).unwrap()
}

fn said(report: &Report, bench: &str, case: &str) -> f64 {
    let row = report.rows.iter().find(|row| row.bench == bench && row.case.contains(case));
    row.unwrap_or_else(|| panic!("nothing of {bench}, {case}: {:?}", report.rows)).median
}

#[test]
fn memory_on_the_host_device_and_on_none() {
    for rig in [host(), Rig::new(NullDriver::shared()).unwrap()] {
        let mut report = Report::default();
        memory::measure(&rig, Effort::Quick, &mut report).unwrap();
        for case in ["512 B", "2 MiB", "64 MiB"] {
            assert!(said(&report, "alloc + free", case) > 0.0);
        }
        assert!(said(&report, "churn step", "100 live") > 0.0);
        assert!(said(&report, "reserved / requested", "100 live") >= 1.0);
        assert_eq!(said(&report, "hand-outs ordered by an event", "one stream"), 0.0);
    }
}

/// On a device that does nothing before it is waited for, no hand-out but the first of a batch finds the other stream's
/// work done.
#[test]
fn two_streams_in_turn_are_ordered_by_events() {
    let device = HostDevice::new(HostConfig::default().stepped(true)).unwrap();
    let mut report = Report::default();
    memory::measure(&Rig::new(device).unwrap(), Effort::Quick, &mut report).unwrap();
    assert!(said(&report, "hand-outs ordered by an event", "two streams") > 0.9);
}

#[test]
fn launches_scans_and_loads() {
    let (rig, mut report) = (host(), Report::default());
    graphs::launches(&rig, Effort::Quick, &mut report).unwrap();
    graphs::scan(&rig, Effort::Quick, &mut report).unwrap();
    graphs::load(&rig, Effort::Quick, &mut report).unwrap();
    for case in ["8 kernels", "300 kernels"] {
        assert_eq!(report.rows.iter().filter(|row| row.bench == "launch" && row.case.contains(case)).count(), 5);
    }
    assert!(said(&report, "scan of 300 nodes", "the first") > 0.0 && said(&report, "scan of 300 nodes", "later") > 0.0);
    assert!(said(&report, "Kernels::load", "later") > 0.0);
}

/// Every kind of repair can be forced, at one range and at several.
#[test]
fn repairs() {
    let (rig, mut report) = (host(), Report::default());
    repair::measure(&rig, Effort::Quick, &mut report).unwrap();
    for bench in [
        "repair by remap",
        "repair by update",
        "repair by update, memory first",
        "repair by recapture",
        "eager run + sync",
    ] {
        for case in ["1 x 2 MiB", "8 x 2 MiB"] {
            assert!(said(&report, bench, case) > 0.0);
        }
    }
}
