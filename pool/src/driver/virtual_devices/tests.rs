#![allow(unsafe_code, clippy::unwrap_used)]

use super::*;
use crate::driver::conformance::KERNELS;
use crate::driver::host::{HostConfig, HostDevice, HostMachine};
use crate::driver::{Args, Faulty, LaunchConfig, Memory, ModuleImage, Modules, Streams};

const PAGE: usize = 64 << 10;

fn config() -> HostConfig {
    HostConfig::default().memory(64 * PAGE).granularity(PAGE)
}

fn two() -> Vec<Arc<VirtualDevice>> {
    VirtualMachine::new(&[HostDevice::new(config()).unwrap() as DynDriver], 2).unwrap()
}

fn mapped(device: &VirtualDevice, at: Option<DevicePtr>) -> DevicePtr {
    let ptr = at.unwrap_or_else(|| device.address_reserve(PAGE, 0, None).unwrap());
    let chunk = device.create(PAGE).unwrap();
    device.map(ptr, PAGE, 0, chunk).unwrap();
    device.set_access(ptr, PAGE, &[device.info().ordinal]).unwrap();
    device.release(chunk).unwrap();
    ptr
}

fn launch(device: &VirtualDevice, kernel: &str, args: &Args, stream: StreamHandle) -> DriverResult<()> {
    let module = device.module_load(ModuleImage::Host(KERNELS))?;
    let function = device.function(module, kernel)?;
    // SAFETY: the host device checks arguments and spans.
    unsafe { device.launch_kernel(function, &LaunchConfig::linear(1, 1), args.as_bytes(), stream) }
}

#[test]
fn a_refused_launch_names_all_that_is_needed_to_find_it() {
    let devices = two();
    devices[1].bind().unwrap();
    let theirs = devices[1].malloc(64).unwrap();
    devices[0].bind().unwrap();
    let (mine, stream) = (devices[0].malloc(64).unwrap(), devices[0].stream_create(0).unwrap());
    let inside = DevicePtr(theirs.0 + 16);
    let error = launch(&devices[0], "add", Args::new().ptr(mine).ptr(inside).u32(4).u32(1), stream).unwrap_err();
    let text = error.to_string();
    for part in ["launch_kernel on device 0", "parameter 1 of add", &inside.to_string(), "memory of device 1"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    assert!(text.contains("device 0 may not touch"), "{text}");
    devices[0].enable_peer_access(DeviceOrdinal(1)).unwrap();
    launch(&devices[0], "add", Args::new().ptr(mine).ptr(inside).u32(4).u32(1), stream).unwrap();
    devices[0].stream_synchronize(stream).unwrap();
}

#[test]
fn an_address_inside_a_struct_is_seen_and_one_without_a_layout_too() {
    let devices = two();
    devices[1].bind().unwrap();
    let theirs = devices[1].malloc(64).unwrap();
    devices[0].bind().unwrap();
    let (mine, stream) = (devices[0].malloc(64).unwrap(), devices[0].stream_create(0).unwrap());
    // `mixed` takes a struct of two words first.
    let mut args = Args::new();
    args.push_bytes(&[mine.0.to_ne_bytes(), theirs.0.to_ne_bytes()].concat(), 8).push_bytes(&[1], 1).ptr(mine);
    let error = launch(&devices[0], "mixed", &args, stream).unwrap_err();
    let DriverErrorKind::Foreign(foreign) = error.kind else { panic!("{error}") };
    assert_eq!((foreign.argument, foreign.address), (Argument::Parameter(0), theirs));
    // A function of which nobody can tell the parameters.
    let unreadable = Function::new(0, ModuleHandle(1), "mixed", None);
    let error = devices[0].may_launch("launch_kernel", Some(&unreadable), args.as_bytes()).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::Foreign(f) if f.address == theirs));
}

#[test]
fn the_end_of_own_memory_is_told_from_the_start_of_anothers() {
    let devices = two();
    let mut ranges = Vec::new();
    for device in [0usize, 1, 0, 1] {
        devices[device].bind().unwrap();
        ranges.push((device as u32, devices[device].malloc(512).unwrap(), 512));
        ranges.push((device as u32, mapped(&devices[device], None), PAGE));
    }
    let map = devices[0].machine.map.read();
    for &(owner, ptr, bytes) in &ranges {
        let other = 1 - owner;
        assert_eq!(map.check_address(owner, ptr.0), Ok(()));
        assert_eq!(map.check_address(owner, ptr.0 + bytes as u64), Ok(()), "the end of {ptr}");
        let stranger = Stranger { address: ptr, owner: DeviceOrdinal(owner) };
        assert_eq!(map.check_address(other, ptr.0), Err(stranger));
        assert_eq!(map.check(owner, ptr, bytes), Ok(()));
        assert_eq!(map.check(other, ptr, bytes), Err(stranger));
        assert_eq!(map.check(other, ptr, 0), Ok(()), "nothing is no access");
    }
    // A range that runs into another device's memory is an access to it.
    let (_, first, _) = ranges[0];
    assert!(map.check(0, first, 1 << 40).is_err());
    // Where they touch all the same, an end stays an end.
    let mut map = Map::new(2);
    map.add_plain(DevicePtr(0x1000), 0x100, 0);
    map.add_plain(DevicePtr(0x1100), 0x100, 1);
    assert!(map.touches_other(DevicePtr(0x1200), 8, 0) && map.touches_other(DevicePtr(0xF00), 0x100, 1));
    assert!(!map.touches_other(DevicePtr(0x1200), 8, 1) && !map.touches_other(DevicePtr(0x1201), 8, 0));
    assert_eq!(map.check_address(0, 0x1100), Ok(()));
    assert!(map.check_address(0, 0x1101).is_err() && map.check(0, DevicePtr(0x1100), 1).is_err());
}

#[test]
fn each_has_its_share() {
    let devices = two();
    assert_eq!(devices[0].info().total_bytes, 32 * PAGE);
    devices[0].bind().unwrap();
    let most = devices[0].malloc(32 * PAGE).unwrap();
    assert!(devices[0].malloc(1).unwrap_err().is_out_of_memory());
    assert!(devices[0].create(PAGE).unwrap_err().is_out_of_memory());
    devices[1].bind().unwrap();
    assert_eq!(devices[1].mem_info().unwrap().free_bytes, 32 * PAGE);
    let chunk = devices[1].create(32 * PAGE).unwrap();
    let ptr = devices[1].address_reserve(32 * PAGE, 0, None).unwrap();
    devices[1].map(ptr, 32 * PAGE, 0, chunk).unwrap();
    devices[1].release(chunk).unwrap();
    // Mapped memory is there without its handle.
    assert!(devices[1].malloc(1).unwrap_err().is_out_of_memory());
    devices[1].unmap(ptr, 32 * PAGE).unwrap();
    let _again = devices[1].create(32 * PAGE).unwrap();
    devices[0].bind().unwrap();
    devices[0].free(most).unwrap();
    assert_eq!(devices[0].mem_info().unwrap().free_bytes, 32 * PAGE);
}

#[test]
fn a_free_that_fails_changes_nothing() {
    let faulty: Arc<Faulty> = Faulty::new(HostDevice::new(config()).unwrap() as DynDriver);
    let devices = VirtualMachine::new(&[faulty.clone() as DynDriver], 2).unwrap();
    devices[1].bind().unwrap();
    let (plain, page) = (devices[1].malloc(64).unwrap(), mapped(&devices[1], None));
    let used = devices[1].mem_info().unwrap();
    for call in ["free", "unmap"] {
        faulty.fail_nth(call, 1);
    }
    assert!(devices[1].free(plain).is_err());
    assert!(devices[1].unmap(page, PAGE).is_err());
    assert_eq!(devices[1].mem_info().unwrap(), used);
    devices[0].bind().unwrap();
    let stream = devices[0].stream_create(0).unwrap();
    for theirs in [plain, page] {
        assert!(matches!(
            devices[0].memset_d8(theirs, 1, 4, stream).unwrap_err().kind,
            DriverErrorKind::Foreign(f) if f.owner == DeviceOrdinal(1)
        ));
    }
    assert!(matches!(devices[0].free(plain).unwrap_err().kind, DriverErrorKind::InvalidValue(_)));
    devices[1].bind().unwrap();
    devices[1].free(plain).unwrap();
    devices[1].unmap(page, PAGE).unwrap();
    assert_eq!(devices[1].home(plain).or(devices[1].home(page)), None);
}

#[test]
fn more_devices_than_there_are() {
    let physical = HostMachine::new(2, config()).unwrap();
    let physical: Vec<DynDriver> = physical.into_iter().map(|device| device as DynDriver).collect();
    let devices = VirtualMachine::new(&physical, 3).unwrap();
    assert_eq!(devices.iter().map(|d| d.info().total_bytes / PAGE).collect::<Vec<_>>(), [32, 64, 32]);
    assert_eq!(devices.iter().map(|d| d.inner().info().ordinal.0).collect::<Vec<_>>(), [0, 1, 0]);
    let pages: Vec<DevicePtr> = devices
        .iter()
        .map(|device| {
            device.bind().unwrap();
            mapped(device, None)
        })
        .collect();
    let write = |by: usize, to: usize| {
        devices[by].bind().unwrap();
        let stream = devices[by].stream_create(0).unwrap();
        devices[by].memset_d8(pages[to], 1, 8, stream).and_then(|()| devices[by].stream_synchronize(stream))
    };
    for (by, to) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        assert!(matches!(write(by, to).unwrap_err().kind, DriverErrorKind::Foreign(_)), "{by} to {to}");
    }
    // To one on the other physical device, and to one on the same.
    devices[0].bind().unwrap();
    devices[0].set_access(pages[0], PAGE, &[DeviceOrdinal(1), DeviceOrdinal(2)]).unwrap();
    write(1, 0).unwrap();
    write(2, 0).unwrap();
    assert!(write(2, 1).is_err());
    // Both on device 0 reach plain memory of device 1 through one link, which is switched on once.
    for by in [0, 2] {
        devices[by].bind().unwrap();
        devices[by].enable_peer_access(DeviceOrdinal(1)).unwrap();
        assert!(matches!(
            devices[by].enable_peer_access(DeviceOrdinal(1)).unwrap_err().kind,
            DriverErrorKind::Other { code: 704, .. }
        ));
    }
    // Copies between any two.
    devices[2].bind().unwrap();
    let stream = devices[2].stream_create(0).unwrap();
    for (from, to) in [(0u32, 1u32), (1, 2), (2, 0), (0, 2)] {
        let (src, dst) = (pages[from as usize], pages[to as usize]);
        devices[2].memcpy_peer(dst, DeviceOrdinal(to), src, DeviceOrdinal(from), 64, stream).unwrap();
    }
    devices[2].stream_synchronize(stream).unwrap();
    let error = devices[2].memcpy_peer(pages[0], DeviceOrdinal(0), pages[1], DeviceOrdinal(2), 64, stream).unwrap_err();
    assert!(error.to_string().contains("src of memcpy_peer"), "{error}");
}

#[test]
fn odd_numbers_of_devices() {
    let one = HostDevice::new(config()).unwrap() as DynDriver;
    assert!(VirtualMachine::new(&[], 2).is_err());
    assert!(VirtualMachine::new(std::slice::from_ref(&one), 0).is_err());
    assert!(VirtualMachine::new(std::slice::from_ref(&one), 65).is_err());
    assert_eq!(VirtualMachine::new(&[one], 64).unwrap().len(), 64);
}
