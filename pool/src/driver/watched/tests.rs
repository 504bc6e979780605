#![allow(unsafe_code, clippy::unwrap_used)]

use parking_lot::Mutex;

use super::*;
use crate::driver::conformance::KERNELS;
use crate::driver::debugging::{Debugging, name_at, name_range};
use crate::driver::host::{HostConfig, HostMachine};
use crate::driver::{Args, DriverErrorKind, VirtualMachine};

const HERE: DeviceOrdinal = DeviceOrdinal(0);
const THERE: DeviceOrdinal = DeviceOrdinal(1);

/// Two devices, the copies of the first one watched.
struct Bench {
    near: DynDriver,
    lines: Arc<Mutex<Vec<String>>>,
    stream: StreamHandle,
    own: DevicePtr,
    theirs: DevicePtr,
}

impl Bench {
    fn new() -> Self {
        let devices = HostMachine::new(2, HostConfig::default()).unwrap();
        Self::of([devices[0].clone(), devices[1].clone()])
    }

    fn of([near, far]: [DynDriver; 2]) -> Self {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let said = Arc::clone(&lines);
        let near: DynDriver = WatchedCopies::new(near, Arc::new(move |line| said.lock().push(line.to_owned())));
        far.bind().unwrap();
        let theirs = far.malloc(1024).unwrap();
        near.bind().unwrap();
        let (own, stream) = (near.malloc(1024).unwrap(), near.stream_create(0).unwrap());
        Self { near, lines, stream, own, theirs }
    }

    fn bad_kernel(&self) {
        let module = self.near.module_load(ModuleImage::Host(KERNELS)).unwrap();
        let function = self.near.function(module, "fill").unwrap();
        let args = Args::new().ptr(self.theirs).u32(4).u32(1).clone();
        // SAFETY: the host device checks what the arguments point at.
        unsafe {
            self.near.launch_kernel(function, &LaunchConfig::linear(1, 1), args.as_bytes(), self.stream).unwrap()
        };
    }

    fn said(&self) -> String {
        self.lines.lock().join("\n")
    }
}

#[test]
fn a_copy_is_said_before_it_is_issued() {
    let bench = Bench::new();
    name_range(bench.theirs, 1024, THERE, "cache of layer 3");
    bench.near.memcpy_peer(bench.own, HERE, DevicePtr(bench.theirs.0 + 64), THERE, 256, bench.stream).unwrap();
    let line = format!(
        "memcpy_peer on device 0: 256 bytes from device 1 {:#x} cache of layer 3+64 to device 0 {}",
        bench.theirs.0 + 64,
        bench.own
    );
    assert_eq!(bench.said(), line);
    // It is complete when the call is back: nobody has to wait for it.
    let host = bench.near.as_host().unwrap();
    assert_eq!(host.queued(bench.stream).unwrap(), 0);
    let mut bytes = [0u8; 16];
    // SAFETY: the bytes live through the copies, which are waited for.
    unsafe {
        bench.near.memcpy_dtoh(bytes.as_mut_ptr(), bench.own, 16, bench.stream).unwrap();
        bench.near.memcpy_htod(bench.own, bytes.as_ptr(), 16, bench.stream).unwrap();
    }
    bench.near.memcpy_dtod(bench.own, DevicePtr(bench.own.0 + 512), 16, bench.stream).unwrap();
    let said = bench.said();
    for call in [
        "memcpy_dtoh on device 0: 16 bytes from device 0",
        "memcpy_htod on device 0: 16 bytes from host",
        "memcpy_dtod",
    ] {
        assert!(said.contains(call), "{call:?} is not in {said}");
    }
}

#[test]
fn an_older_error_is_not_the_copys() {
    let bench = Bench::new();
    bench.bad_kernel();
    let error = bench.near.memcpy_dtod(bench.own, DevicePtr(bench.own.0 + 512), 64, bench.stream).unwrap_err();
    assert_eq!(error.call, "work before memcpy_dtod");
    let DriverErrorKind::Fault(fault) = error.kind else { panic!("{error}") };
    assert_eq!(fault.op, "fill");
    let said = bench.said();
    assert!(said.contains("memcpy_dtod was not issued: work before it failed") && said.contains("fill"), "{said}");
}

#[test]
fn the_copys_own_error_is_found_at_the_copy() {
    let bench = Bench::new();
    // The source is device 1's, and the call says that it is device 0's.
    let error = bench.near.memcpy_peer(bench.own, HERE, bench.theirs, HERE, 64, bench.stream).unwrap_err();
    assert_eq!(error.call, "memcpy_peer");
    assert!(matches!(&error.kind, DriverErrorKind::Fault(fault) if fault.op == "memcpy_peer"), "{error}");
    let said = bench.said();
    assert!(said.contains("from device 0 (it is device 1's)") && said.contains("memcpy_peer failed"), "{said}");
}

#[test]
fn virtual_devices_know_whose_memory_it_is() {
    let one = HostMachine::new(1, HostConfig::default()).unwrap();
    let devices = VirtualMachine::new(&[one[0].clone() as DynDriver], 2).unwrap();
    let bench = Bench::of([devices[0].clone(), devices[1].clone()]);
    let error = bench.near.memcpy_dtod(bench.own, bench.theirs, 64, bench.stream).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::Foreign(_)), "{error}");
    assert!(bench.said().contains(&format!("from device 1 {}", bench.theirs)), "{}", bench.said());
    bench.near.memcpy_peer(bench.own, HERE, bench.theirs, THERE, 64, bench.stream).unwrap();
}

#[test]
fn a_recording_stream_is_not_waited_for() {
    let bench = Bench::new();
    bench.near.begin_capture(bench.stream, CaptureMode::ThreadLocal).unwrap();
    bench.near.memcpy_dtod(bench.own, DevicePtr(bench.own.0 + 512), 64, bench.stream).unwrap();
    let graph = bench.near.end_capture(bench.stream).unwrap();
    assert_eq!(bench.near.graph_nodes(graph).unwrap().len(), 1);
    assert!(bench.said().contains("is recorded, not run"));
}

#[test]
fn names_give_way_to_newer_ones() {
    let bench = Bench::new();
    let at = |offset: u64| DevicePtr(bench.own.0 + offset);
    name_range(at(0), 512, HERE, "old");
    name_range(at(512), 256, HERE, "beside");
    name_range(at(256), 512, THERE, "new");
    assert_eq!(name_at(at(0)), None, "a part of what is gone is gone");
    assert_eq!(name_at(at(256)), Some((THERE, "new".to_owned())));
    assert_eq!(name_at(at(700)), Some((THERE, "new+444".to_owned())));
    assert_eq!(name_at(at(768)), None);
}

#[test]
fn words_ask_for_what_there_is() {
    let both = Debugging { ops: true, copies: true };
    for (words, wanted) in [
        ("", Debugging::default()),
        ("ops", Debugging { ops: true, copies: false }),
        ("copies", Debugging { ops: false, copies: true }),
        ("ops,copies", both),
        ("copies, ops", both),
    ] {
        assert_eq!(words.parse(), Ok(wanted), "{words}");
        assert_eq!(wanted.to_string().parse(), Ok(wanted));
        assert_eq!(wanted.any(), !words.is_empty());
    }
    for words in ["op", "all", "ops;copies", "ops,", "1"] {
        let error = words.parse::<Debugging>().unwrap_err().to_string();
        assert!(error.contains("EVERGRAPH_DEBUG takes ops, copies, or ops,copies"), "{error}");
    }
}
