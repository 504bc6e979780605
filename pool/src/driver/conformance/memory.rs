//! Stories of address space, chunks and plain memory.
#![allow(unsafe_code)]

use super::rig::{GRANULE, kind, refused, refused_as};
use super::stories;
use crate::driver::host::{HostConfig, Live, Poison};
use crate::driver::{Args, DeviceOrdinal, DevicePtr, DriverErrorKind, PhysHandle};

const HERE: &[DeviceOrdinal] = &[DeviceOrdinal(0)];

fn used_bytes(live: Option<Live>) -> Option<usize> {
    live.map(|live| live.used_bytes)
}

stories! { in memory as conformance_memory;

    /// Reserve gives addresses, not memory.
    fn a_reservation_is_not_memory(rig) {
        let used = rig.live();
        let ptr = rig.driver.address_reserve(4 * GRANULE, 0, None).unwrap();
        assert_eq!(used_bytes(rig.live()), used_bytes(used));
        let stream = rig.stream();
        rig.fill(ptr, 1, 1, stream);
        rig.expect_fault(stream, "fill", "reserved by device 0, not mapped");
    }

    /// Mapped pages are not accessible before set-access.
    fn mapped_memory_needs_access(rig) {
        let ptr = rig.driver.address_reserve(GRANULE, 0, None).unwrap();
        let chunk = rig.driver.create(GRANULE).unwrap();
        rig.driver.map(ptr, GRANULE, 0, chunk).unwrap();
        let stream = rig.stream();
        rig.fill(ptr, 1, 1, stream);
        rig.expect_fault(stream, "fill", "no access for device 0");
    }

    /// A map starts at offset 0, covers its whole chunk, lies in one reservation, on nothing mapped.
    fn a_map_takes_a_whole_chunk_into_one_reservation(rig) {
        let driver = &rig.driver;
        let ptr = driver.address_reserve(4 * GRANULE, 0, None).unwrap();
        let chunk = driver.create(2 * GRANULE).unwrap();
        let other = driver.create(GRANULE).unwrap();
        assert!(matches!(kind(driver.map(ptr, GRANULE, GRANULE, chunk)), DriverErrorKind::NotSupported(_)));
        assert!(matches!(kind(driver.map(ptr, GRANULE, 0, chunk)), DriverErrorKind::NotSupported(_)));
        if !rig.body.is_cuda() {
            // Hardware maps past the end of a reservation, and does not give the reservation back afterwards.
            refused(driver.map(DevicePtr(ptr.0 + 3 * GRANULE as u64), 2 * GRANULE, 0, chunk));
        }
        refused(driver.map(DevicePtr(ptr.0 + 1), GRANULE, 0, other));
        if rig.tracks_handles() {
            assert!(matches!(kind(driver.map(ptr, GRANULE, 0, PhysHandle(1))), DriverErrorKind::InvalidHandle(_)));
        }
        driver.map(ptr, 2 * GRANULE, 0, chunk).unwrap();
        refused(driver.map(DevicePtr(ptr.0 + GRANULE as u64), GRANULE, 0, other));
        driver.map(DevicePtr(ptr.0 + 2 * GRANULE as u64), GRANULE, 0, other).unwrap();
        assert!(rig.live().is_none_or(|live| live.mappings == 2));
    }

    /// Unmap and set-access take whole mappings without gaps, or nothing happens.
    fn an_unmap_takes_whole_mappings(rig) {
        let driver = &rig.driver;
        let ptr = driver.address_reserve(4 * GRANULE, 0, None).unwrap();
        let at = |granules: usize| DevicePtr(ptr.0 + (granules * GRANULE) as u64);
        let (wide, narrow) = (driver.create(2 * GRANULE).unwrap(), driver.create(GRANULE).unwrap());
        driver.map(ptr, 2 * GRANULE, 0, wide).unwrap();
        driver.map(at(2), GRANULE, 0, narrow).unwrap();
        refused(driver.set_access(ptr, GRANULE, HERE));
        refused(driver.set_access(ptr, 4 * GRANULE, HERE));
        driver.set_access(ptr, 3 * GRANULE, HERE).unwrap();
        // Hardware passes over what is not mapped: the last two.
        let cases = [(0, 1), (1, 1), (1, 2), (0, 4), (3, 1)];
        for &(start, granules) in if rig.body.is_cuda() { &cases[..3] } else { &cases[..] } {
            refused_as(driver.unmap(at(start), granules * GRANULE), format_args!("{start} {granules}"));
        }
        assert!(rig.live().is_none_or(|live| live.mappings == 2));
        refused(driver.address_free(ptr, 4 * GRANULE));
        driver.unmap(ptr, 3 * GRANULE).unwrap();
        assert!(rig.live().is_none_or(|live| live.mappings == 0));
        refused(driver.address_free(ptr, GRANULE));
        driver.address_free(ptr, 4 * GRANULE).unwrap();
        refused(driver.address_free(ptr, 4 * GRANULE));
    }

    /// One chunk under two ranges is one memory.
    fn a_chunk_can_be_mapped_at_two_addresses(rig) {
        let driver = &rig.driver;
        let chunk = driver.create(GRANULE).unwrap();
        let [a, b] = [(); 2].map(|()| {
            let ptr = driver.address_reserve(GRANULE, 0, None).unwrap();
            driver.map(ptr, GRANULE, 0, chunk).unwrap();
            driver.set_access(ptr, GRANULE, HERE).unwrap();
            ptr
        });
        assert_ne!(a, b);
        let stream = rig.stream();
        for round in 1..4 {
            rig.fill(a, 8, round, stream);
            rig.wait(stream);
            assert_eq!(rig.read(b, 8), [round; 8]);
        }
    }

    /// A released chunk lives as long as it is mapped.
    fn a_released_chunk_lives_while_mapped(rig) {
        let before = rig.live();
        let ptr = rig.mapped(2 * GRANULE);
        assert_eq!(used_bytes(rig.live()), used_bytes(before).map(|used| used + 2 * GRANULE));
        rig.set(ptr, 4, 9);
        assert_eq!(rig.read(ptr, 4), [9; 4]);
        rig.driver.unmap(ptr, 2 * GRANULE).unwrap();
        assert_eq!(used_bytes(rig.live()), used_bytes(before));
        rig.driver.address_free(ptr, 2 * GRANULE).unwrap();
        assert_eq!(rig.live(), before);
    }

    /// Pages keep their content from one range to the next; fresh pages under the old range do not have it.
    fn content_moves_with_the_chunk_not_with_the_address(rig) {
        let driver = &rig.driver;
        let ptr = driver.address_reserve(GRANULE, 0, None).unwrap();
        let old = driver.create(GRANULE).unwrap();
        driver.map(ptr, GRANULE, 0, old).unwrap();
        driver.set_access(ptr, GRANULE, HERE).unwrap();
        rig.set(ptr, 4, 5);
        driver.unmap(ptr, GRANULE).unwrap();
        let new = driver.create(GRANULE).unwrap();
        driver.map(ptr, GRANULE, 0, new).unwrap();
        driver.set_access(ptr, GRANULE, HERE).unwrap();
        assert_ne!(rig.read(ptr, 4), [5; 4]);
        driver.unmap(ptr, GRANULE).unwrap();
        driver.map(ptr, GRANULE, 0, old).unwrap();
        driver.set_access(ptr, GRANULE, HERE).unwrap();
        assert_eq!(rig.read(ptr, 4), [5; 4]);
    }

    /// Access does not outlive its mapping.
    fn access_goes_with_the_mapping(rig) {
        let ptr = rig.mapped(GRANULE);
        rig.driver.unmap(ptr, GRANULE).unwrap();
        let chunk = rig.driver.create(GRANULE).unwrap();
        rig.driver.map(ptr, GRANULE, 0, chunk).unwrap();
        let stream = rig.stream();
        rig.fill(ptr, 1, 1, stream);
        rig.expect_fault(stream, "fill", "no access");
    }

    /// Sizes around the granularity, zero and huge: typed, and nothing changes.
    fn odd_sizes_are_refused_everywhere(rig) {
        let before = rig.live();
        for bytes in [0, 1, GRANULE - 1, GRANULE + 1, usize::MAX, usize::MAX - 1023] {
            refused_as(rig.driver.create(bytes), format_args!("create {bytes}"));
            refused_as(rig.driver.address_reserve(bytes, 0, None), format_args!("reserve {bytes}"));
            refused_as(rig.driver.unmap(DevicePtr(GRANULE as u64), bytes), format_args!("unmap {bytes}"));
        }
        refused(rig.driver.address_reserve(GRANULE, 3, None));
        refused(rig.driver.malloc(0));
        refused(rig.driver.host_alloc(0));
        for bytes in [usize::MAX, usize::MAX - 511, 1 << 63, rig.driver.info().total_bytes + 1] {
            assert!(rig.driver.malloc(bytes).unwrap_err().is_out_of_memory(), "malloc {bytes}");
        }
        assert!(rig.driver.host_alloc(usize::MAX).unwrap_err().is_out_of_memory());
        assert_eq!(rig.live(), before);
    }

    /// The driver gives a freed address to the next allocation at once, whoever that is.
    fn a_freed_address_is_the_next_one_handed_out(rig) {
        let first = rig.words(1024, 1);
        let _kept = rig.words(16, 2);
        rig.driver.free(first).unwrap();
        let second = rig.driver.malloc(4096).unwrap();
        assert_eq!(first, second);
        rig.driver.free(second).unwrap();
        assert_eq!(rig.driver.malloc(100).unwrap(), first);
    }

    /// The same for reservations, and for chunk handles.
    fn a_freed_reservation_is_the_next_one_handed_out(rig) {
        let driver = &rig.driver;
        let first = driver.address_reserve(4 * GRANULE, 0, None).unwrap();
        let _kept = driver.address_reserve(4 * GRANULE, 0, None).unwrap();
        driver.address_free(first, 4 * GRANULE).unwrap();
        assert_eq!(driver.address_reserve(4 * GRANULE, 0, None).unwrap(), first);
        let chunk = driver.create(GRANULE).unwrap();
        driver.release(chunk).unwrap();
        if rig.tracks_handles() {
            assert!(matches!(kind(driver.release(chunk)), DriverErrorKind::InvalidHandle(_)));
            assert_eq!(driver.create(2 * GRANULE).unwrap(), chunk);
        }
    }

    /// Alignment is at least 256 bytes for plain memory and as asked for reservations.
    fn addresses_are_aligned(rig) {
        for bytes in [1, 3, 255, 257, 5000] {
            assert_eq!(rig.driver.malloc(bytes).unwrap().0 % 256, 0);
        }
        for align in [0, GRANULE, 16 * GRANULE, 256 * GRANULE] {
            let ptr = rig.driver.address_reserve(GRANULE, align, None).unwrap();
            assert_eq!(ptr.0 % align.max(GRANULE) as u64, 0, "{align}");
        }
    }

    /// A hint is a wish: taken where nobody is, passed over where somebody is.
    fn a_hint_is_a_wish(rig) {
        let driver = &rig.driver;
        let taken = driver.address_reserve(GRANULE, 0, None).unwrap();
        let other = driver.address_reserve(GRANULE, 0, Some(taken)).unwrap();
        assert_ne!(taken, other);
        driver.address_free(taken, GRANULE).unwrap();
        assert_eq!(driver.address_reserve(GRANULE, 0, Some(taken)).unwrap(), taken);
    }

    /// Who forgets to clear sees it: fresh memory is not zero, even where the old owner cleared it.
    fn fresh_memory_is_never_zero_by_luck(rig) {
        let ptr = rig.words(64, 0);
        rig.driver.free(ptr).unwrap();
        let again = rig.driver.malloc(256).unwrap();
        assert_eq!(again, ptr);
        assert!(rig.read(again, 64).iter().all(|&word| word != 0));
        let full = rig.like(HostConfig::default().memory(64 << 20).granularity(GRANULE).poison(Poison::Full));
        let mapped = full.mapped(8 * GRANULE);
        assert!(full.read(mapped, (8 * GRANULE / 4) as u32).iter().all(|&word| word != 0));
        assert!(f32::from_bits(full.read(mapped, 1)[0]).is_finite() || f32::from_bits(full.read(mapped, 2)[1]).is_nan());
    }

    /// Beyond the memory size every way of getting memory is refused, and works again after a free.
    fn out_of_memory_is_typed_and_passes(rig) {
        let small = rig.like(HostConfig::default().memory(4 * GRANULE).granularity(GRANULE));
        let driver = &small.driver;
        let half = driver.malloc(2 * GRANULE).unwrap();
        let chunk = driver.create(GRANULE).unwrap();
        assert!(driver.malloc(2 * GRANULE).unwrap_err().is_out_of_memory());
        assert!(driver.create(2 * GRANULE).unwrap_err().is_out_of_memory());
        assert_eq!(driver.mem_info().unwrap().free_bytes, GRANULE);
        let last = driver.create(GRANULE).unwrap();
        assert!(driver.malloc(1).unwrap_err().is_out_of_memory());
        driver.free(half).unwrap();
        driver.release(chunk).unwrap();
        driver.release(last).unwrap();
        assert_eq!(driver.mem_info().unwrap().free_bytes, 4 * GRANULE);
        driver.malloc(4 * GRANULE).unwrap();
    }

    /// A free names the start of a live allocation, once.
    fn only_the_start_of_a_live_allocation_can_be_freed(rig) {
        let ptr = rig.words(64, 1);
        refused(rig.driver.free(DevicePtr(ptr.0 + 16)));
        refused(rig.driver.free(DevicePtr::NULL));
        refused(rig.driver.free(rig.flag_ptr()));
        rig.driver.free(ptr).unwrap();
        refused(rig.driver.free(ptr));
    }

    /// Devices with little address space refuse large reservations.
    fn large_reservations_can_be_refused(rig) {
        let tight = rig.like(HostConfig::default().granularity(GRANULE).va_limit(32 * GRANULE));
        assert!(tight.driver.address_reserve(33 * GRANULE, 0, None).unwrap_err().is_out_of_memory());
        tight.driver.address_reserve(32 * GRANULE, 0, None).unwrap();
    }

    /// Old devices have plain memory only.
    fn a_device_may_have_no_vmm(rig) {
        let old = rig.like(HostConfig::default().vmm(false));
        assert!(!old.driver.info().vmm);
        let refused = |kind| matches!(kind, DriverErrorKind::NotSupported(_));
        assert!(refused(kind(old.driver.granularity_bytes())));
        assert!(refused(kind(old.driver.address_reserve(2 << 20, 0, None))));
        assert!(refused(kind(old.driver.create(2 << 20))));
        let ptr = old.words(4, 3);
        assert_eq!(old.read(ptr, 4), [3; 4]);
    }

    /// Pinned memory is one memory for host and device.
    fn pinned_memory_is_seen_from_both_sides(rig) {
        let pinned = rig.driver.host_alloc(64).unwrap();
        let stream = rig.stream();
        for round in 1..4u32 {
            rig.fill(DevicePtr(pinned.0), 16, round, stream);
            rig.wait(stream);
            // SAFETY: pinned, 64 bytes, nothing is queued.
            let words = unsafe { std::slice::from_raw_parts(pinned.as_ptr().cast::<u32>(), 16) };
            assert_eq!(words, [round; 16]);
        }
        // SAFETY: nothing is queued and no slice is left.
        unsafe { rig.driver.host_free(pinned).unwrap() };
        // SAFETY: refused.
        refused(unsafe { rig.driver.host_free(pinned) });
    }

    /// A registered file map can be read by kernels, not written.
    fn registered_memory_is_read_only(rig) {
        let words: Vec<u32> = (0..32).collect();
        // SAFETY: `words` outlives the registration and is not changed.
        let ptr = unsafe { rig.driver.host_register(words.as_ptr().cast(), 128).unwrap() };
        // SAFETY: refused.
        refused(unsafe { rig.driver.host_register(words.as_ptr().cast(), 4) });
        let dst = rig.words(32, 0);
        let stream = rig.stream();
        rig.add(dst, ptr, 32, 100, stream);
        rig.wait(stream);
        assert_eq!(rig.read(dst, 32), (100..132).collect::<Vec<u32>>());
        rig.fill(ptr, 1, 7, stream);
        rig.expect_fault(stream, "fill", "read-only");
        assert_eq!(words[0], 0);
    }

    /// An ended registration is out of reach.
    fn an_ended_registration_is_out_of_reach(rig) {
        let words = [1u32; 32];
        // SAFETY: `words` outlives the registration and is not changed.
        let ptr = unsafe { rig.driver.host_register(words.as_ptr().cast(), 128).unwrap() };
        rig.driver.host_unregister(words.as_ptr().cast()).unwrap();
        refused(rig.driver.host_unregister(words.as_ptr().cast()));
        let stream = rig.stream();
        rig.launch("peek", Args::new().ptr(ptr).u32(128), stream);
        rig.expect_fault(stream, "peek", "ended registration");
    }

    /// The memory of a device belongs to the streams of that device: a stream-ordered use sees the last write.
    fn a_write_is_seen_by_the_next_op_of_the_stream(rig) {
        let (a, b) = (rig.words(256, 0), rig.words(256, 0));
        let stream = rig.stream();
        for round in 0..10 {
            rig.fill(a, 256, round, stream);
            rig.add(b, a, 256, 1, stream);
            rig.driver.memcpy_dtod(a, b, 512, stream).unwrap();
            rig.driver.memset_d8(b, 0xEE, 4, stream).unwrap();
            rig.wait(stream);
            assert_eq!(rig.read(a, 256)[127..129], [round + 1, round]);
            assert_eq!(rig.read(b, 2), [0xEEEE_EEEE, round + 1]);
        }
    }
}
