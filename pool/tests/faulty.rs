//! The adaptor that fails and logs.

#![allow(clippy::unwrap_used, unsafe_code)]

use std::sync::Arc;

use evergraph_pool::driver::conformance::KERNELS;
use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::driver::{
    Args, CaptureMode, Driver, DriverError, DriverErrorKind, DriverResult, DynDriver, Faulty, LaunchConfig, Memory,
    ModuleImage, Streams,
};

const GRANULE: usize = 64 << 10;

fn faulty() -> Arc<Faulty<HostDevice>> {
    let host = HostDevice::new(HostConfig::default().memory(64 << 20).granularity(GRANULE)).unwrap();
    host.bind().unwrap();
    Faulty::new(host)
}

/// Every object once, made, used and destroyed.
fn whole_life(driver: &DynDriver) -> DriverResult<()> {
    let ordinal = driver.info().ordinal;
    driver.bind()?;
    let module = driver.module_load(ModuleImage::Host(KERNELS))?;
    let fill = driver.function(module, "fill")?;
    driver.param_layout(fill)?;
    let stream = driver.stream_create(0)?;
    driver.stream_id(stream)?;
    let event = driver.event_create(true)?;
    let plain = driver.malloc(4096)?;
    let pinned = driver.host_alloc(4096)?;
    driver.mem_info()?;
    let bytes = driver.granularity_bytes()?;
    let range = driver.address_reserve(bytes, 0, None)?;
    let chunk = driver.create(bytes)?;
    driver.map(range, bytes, 0, chunk)?;
    driver.set_access(range, bytes, &[ordinal])?;
    driver.memset_d8(plain, 1, 4096, stream)?;
    driver.memset_d32(range, 1, 16, stream)?;
    driver.memcpy_dtod(range, plain, 64, stream)?;
    driver.memcpy_peer(range, ordinal, plain, ordinal, 64, stream)?;
    // SAFETY: the pinned memory is freed after the waits below.
    unsafe {
        driver.memcpy_htod(plain, pinned.as_ptr(), 64, stream)?;
        driver.memcpy_dtoh(pinned.as_ptr(), plain, 64, stream)?;
    }
    driver.event_record(event, stream)?;
    driver.stream_wait_event(stream, event)?;
    driver.event_synchronize(event)?;
    driver.event_query(event)?;
    driver.event_elapsed_ms(event, event)?;
    driver.begin_capture(stream, CaptureMode::ThreadLocal)?;
    let mut args = Args::new();
    args.ptr(plain).u32(4).u32(9);
    // SAFETY: the host device checks arguments and spans.
    unsafe { driver.launch_kernel(fill, &LaunchConfig::linear(1, 1), args.as_bytes(), stream)? };
    driver.capture_status(stream)?;
    let graph = driver.end_capture(stream)?;
    let nodes = driver.graph_nodes(graph)?;
    driver.graph_edges(graph)?;
    driver.node(nodes[0])?;
    let exec = driver.instantiate(graph)?;
    driver.exec_update(exec, graph)?;
    driver.upload(exec, stream)?;
    driver.launch(exec, stream)?;
    driver.stream_synchronize(stream)?;
    driver.stream_query(stream)?;
    driver.synchronize()?;
    driver.exec_destroy(exec)?;
    driver.graph_destroy(graph)?;
    driver.unmap(range, bytes)?;
    driver.release(chunk)?;
    driver.address_free(range, bytes)?;
    // SAFETY: nothing is queued.
    unsafe { driver.host_free(pinned)? };
    driver.free(plain)?;
    driver.event_destroy(event)?;
    driver.stream_destroy(stream)?;
    driver.module_unload(module)?;
    Ok(())
}

#[test]
fn each_call_of_a_whole_life_can_be_failed_and_only_that_one() {
    let counted = faulty();
    whole_life(&(counted.clone() as DynDriver)).unwrap();
    let kinds = counted.counts();
    assert!(kinds.len() > 45, "{kinds:?}");
    assert_eq!(counted.count("any"), kinds.iter().map(|(_, count)| count).sum());
    assert_eq!(counted.injected(), 0);
    for (call, count) in kinds {
        for nth in 1..=count {
            let faulty = faulty();
            faulty.fail_nth(call, nth);
            let error = whole_life(&(faulty.clone() as DynDriver)).unwrap_err();
            assert_eq!(error.call, call);
            let memory = ["malloc", "create", "address_reserve", "host_alloc"].contains(&call);
            let expected = if memory { DriverErrorKind::OutOfMemory } else { DriverErrorKind::Injected };
            assert_eq!(error.kind, expected, "{call}");
            assert_eq!((faulty.injected(), faulty.count(call)), (1, nth));
        }
    }
}

#[test]
fn any_call_can_be_failed_in_turn() {
    let counted = faulty();
    whole_life(&(counted.clone() as DynDriver)).unwrap();
    let all = counted.count("any");
    for nth in 1..=all {
        let faulty = faulty();
        faulty.fail_nth_with("any", nth, DriverErrorKind::OutOfMemory);
        let error = whole_life(&(faulty.clone() as DynDriver)).unwrap_err();
        assert!(error.is_out_of_memory());
        assert_eq!(faulty.count("any"), nth);
    }
    let faulty = faulty();
    faulty.fail_nth("any", all + 1);
    whole_life(&(faulty.clone() as DynDriver)).unwrap();
}

#[test]
fn a_failed_call_never_reaches_the_device() {
    let faulty = faulty();
    let before = faulty.inner().live();
    for call in ["malloc", "create", "stream_create", "event_create", "host_alloc", "address_reserve"] {
        faulty.fail_nth(call, 1);
    }
    let failed: Vec<DriverError> = vec![
        faulty.malloc(4).unwrap_err(),
        faulty.create(GRANULE).unwrap_err(),
        faulty.stream_create(0).unwrap_err(),
        faulty.event_create(false).unwrap_err(),
        faulty.host_alloc(4).unwrap_err(),
        faulty.address_reserve(GRANULE, 0, None).unwrap_err(),
    ];
    assert_eq!(failed.len(), 6);
    assert_eq!(faulty.inner().live(), before);
    let ptr = faulty.malloc(4).unwrap();
    faulty.fail_nth("free", 1);
    faulty.free(ptr).unwrap_err();
    assert_eq!(faulty.inner().live().mallocs, 1);
    faulty.free(ptr).unwrap();
    assert_eq!(faulty.inner().live(), before);
}

#[test]
fn a_failure_is_for_once_or_from_then_on() {
    let faulty = faulty();
    faulty.fail_nth("event_create", 2);
    assert_eq!((0..4).map(|_| faulty.event_create(false).is_ok()).collect::<Vec<_>>(), [true, false, true, true]);
    faulty.fail_from_with("event_create", 3, DriverErrorKind::NotSupported("tired"));
    assert_eq!(
        (0..5).map(|_| faulty.event_create(false).is_ok()).collect::<Vec<_>>(),
        [true, true, false, false, false]
    );
    faulty.clear();
    faulty.event_create(false).unwrap();
    assert_eq!(faulty.injected(), 4);
}

#[test]
fn the_log_tells_call_thread_arguments_and_outcome() {
    let faulty = faulty();
    faulty.event_create(false).unwrap();
    assert!(faulty.take_log().is_empty());
    faulty.set_logging(true);
    let ptr = faulty.malloc(4096).unwrap();
    let stream = faulty.stream_create(3).unwrap();
    faulty.memset_d8(ptr, 7, 100, stream).unwrap();
    faulty.free(evergraph_pool::driver::DevicePtr(1)).unwrap_err();
    let other = std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            faulty.bind().unwrap();
            faulty.stream_synchronize(stream).unwrap();
            std::thread::current().id()
        });
        made.join().unwrap()
    });
    faulty.set_logging(false);
    faulty.free(ptr).unwrap();
    let log = faulty.take_log();
    let names: Vec<_> = log.iter().map(|call| call.name).collect();
    assert_eq!(names, ["malloc", "stream_create", "memset_d8", "free", "bind", "stream_synchronize"]);
    assert_eq!((log[0].arg("bytes"), &log[0].result), (Some(4096), &Ok(ptr.0)));
    assert_eq!((log[1].arg("priority"), &log[1].result), (Some(3), &Ok(stream.0)));
    let set = ["dst", "value", "bytes", "stream"].map(|name| log[2].arg(name).unwrap());
    assert_eq!(set, [ptr.0, 7, 100, stream.0]);
    assert!(matches!(log[3].result, Err(DriverErrorKind::InvalidValue(_))));
    assert_eq!(log[0].thread, std::thread::current().id());
    assert_eq!((log[4].thread, log[5].thread), (other, other));
    assert!(faulty.take_log().is_empty());
}

#[test]
fn the_device_underneath_shows_through() {
    let faulty = faulty();
    let driver: DynDriver = faulty.clone();
    assert_eq!(driver.as_host().unwrap().live(), faulty.inner().live());
    assert_eq!(driver.info(), faulty.inner().info());
    let twice: DynDriver = Faulty::new(driver);
    assert!(twice.as_host().is_some());
    assert_eq!(twice.fault(), None);
}
