//! What commands do on hardware, played on a host device that is used as hardware is: its streams run by themselves, its
//! pages are those of a GPU, nothing can be set on it, and all stories share it.

#![allow(clippy::unwrap_used, missing_docs)]

use evergraph_pool::driver::host::{HostConfig, HostDevice, Poison};
use evergraph_pool::{Pool, PoolConfig, PoolMode, Purpose, Staging, Stream};
use evergraph_runner::demo::{self, Settings};
use evergraph_runner::device::Device;
use evergraph_runner::scenario::{self, Report};
use evergraph_runner::stress::{self, Options};

const PAGE: usize = 2 << 20;

fn hardware() -> Device {
    let config = HostConfig::default().memory(4 << 30).granularity(PAGE).poison(Poison::Off);
    Device::of(HostDevice::new(config).unwrap())
}

fn tell_all(mode: PoolMode, untold: &[&str]) {
    let device = hardware();
    let stories = scenario::list().filter(|s| s.modes.contains(&mode) && !s.deadly);
    // Streams run by themselves: where a machine has much else to do, a story may come too late for what it wants to show,
    // for example work that is still in flight. What is wrong is wrong three times.
    let tell = |s| {
        let once = || Report::new(s, mode, &device, scenario::tell_on(s, mode, &device));
        (0..2).fold(once(), |report, _| if report.failed() { once() } else { report })
    };
    let told: Vec<Report> = stories.map(tell).collect();
    let failed: Vec<String> = told.iter().filter(|report| report.failed()).map(ToString::to_string).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    let skipped: Vec<&str> = told.iter().filter(|report| report.skipped.is_some()).map(|report| report.name).collect();
    assert_eq!(skipped, untold);
    assert!(told.iter().all(|report| report.passed != report.skipped.is_some()), "skipped and passed");
}

/// They want all the memory of a small card, or room for one. Stories of two devices are told on virtual ones.
const UNTOLD: &[&str] = &["flush-growing-scratch", "flush-large-request", "luminal-467-room-for-one"];

#[test]
fn stories_are_told_with_the_pages_of_a_gpu() {
    let refused = "llama.cpp-4680-reservation-refused";
    tell_all(PoolMode::Vmm, &[UNTOLD, &[refused]].concat());
}

#[test]
fn stories_are_told_with_slabs_beside_others() {
    tell_all(PoolMode::Slab, UNTOLD);
}

#[test]
fn the_demo_tells_the_same_story_with_the_pages_of_a_gpu() {
    let (device, settings) = (hardware(), Settings::default());
    assert_eq!(demo::scale(&device, PoolMode::Vmm).unwrap(), PAGE / (32 << 10));
    let report = demo::run_on(&device, &settings, &mut |_| Ok(())).unwrap();
    let failed: Vec<_> = report.failed().collect();
    assert!(failed.is_empty(), "{failed:?}");
    let small = demo::run(&settings, &mut |_| Ok(())).unwrap();
    println!("{:?} {:?}", (report.stale, report.repairs, report.replays), (small.stale, small.repairs, small.replays));
    assert_eq!(report.tokens, small.tokens);
}

#[test]
fn staged_uploads_arrive_in_order() {
    let device = hardware().driver(HostConfig::default()).unwrap();
    let pool = Pool::new(device.clone(), PoolConfig::vmm()).unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut staging = Staging::new(&stream).unwrap();
    // Of no round size, and more than all buffers hold, so that each is used again.
    let data: Vec<Vec<u32>> =
        [1usize, 3, 5_000_003, 9_000_001, 0].map(|n| (0..n as u32).map(|i| i ^ n as u32).collect()).into();
    let slices: Vec<_> = data
        .iter()
        .map(|data| {
            let slice = pool.alloc_for::<u32>(data.len(), Purpose::Weight, &stream).unwrap();
            staging.upload(data, &slice).unwrap();
            slice
        })
        .collect();
    assert!(staging.upload(&[1, 2], &slices[0]).is_err(), "it does not fit");
    staging.finish().unwrap();
    for (data, slice) in data.iter().zip(&slices) {
        assert!(stream.download(slice).unwrap() == *data, "{} words", data.len());
    }
}

#[test]
fn stress_runs_in_a_part_of_a_large_device() {
    for (mode, threads) in [(PoolMode::Vmm, 1), (PoolMode::Slab, 2)] {
        let options = Options::new(mode).device(hardware()).threads(threads).steps(3000);
        let report = stress::run(&options).unwrap();
        assert!(report.sound(), "{report}");
    }
}
