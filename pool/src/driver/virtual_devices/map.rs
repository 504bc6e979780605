//! Whose memory is where, as far as virtual devices made it.

use std::collections::BTreeMap;

use slab::Slab;

use crate::driver::{DeviceOrdinal, DevicePtr, HandleMap, PhysHandle};
use crate::mutant;

/// What a range is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// From `malloc`: reached by who has peer access.
    Plain,
    /// A mapped chunk, by its key: reached by whom set-access named.
    Chunk(usize),
}

/// A range of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    bytes: usize,
    content: Content,
    /// The device whose memory it is.
    owner: u32,
    /// Devices that set-access named, as bits.
    access: u64,
}

/// Ranges that were taken out because they are about to go, to be put back should they not.
#[derive(Debug)]
pub(super) struct Taken(Vec<(u64, Span)>);

/// Physical memory. Its handle may come back as another chunk's while it is still mapped.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    owner: u32,
    bytes: usize,
    mappings: usize,
    released: bool,
}

/// All ranges, and who was let in.
#[derive(Debug)]
pub(super) struct Map {
    spans: BTreeMap<u64, Span>,
    chunks: Slab<Chunk>,
    handles: HandleMap<PhysHandle, usize>,
    /// Reservations by address: the bytes asked for, and those that the driver was asked for.
    reservations: BTreeMap<u64, (usize, usize)>,
    devices: Vec<Account>,
}

/// What a device has.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    used_bytes: usize,
    /// Devices whose plain memory it may touch, as bits.
    peers: u64,
}

/// Plain allocations take at least that much of a device.
const PLAIN_UNIT: usize = 512;

/// An access that is not permitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stranger {
    pub(super) address: DevicePtr,
    pub(super) owner: DeviceOrdinal,
}

impl Map {
    pub(super) fn new(devices: usize) -> Self {
        let devices = vec![Account::default(); devices];
        Self {
            spans: BTreeMap::new(),
            chunks: Slab::new(),
            handles: HandleMap::default(),
            reservations: BTreeMap::new(),
            devices,
        }
    }

    pub(super) fn used_bytes(&self, device: u32) -> usize {
        self.devices[device as usize].used_bytes
    }

    /// Takes memory of a device's share, before it is asked for; false where the share is too small.
    pub(super) fn charge(&mut self, device: u32, bytes: usize, share_bytes: usize) -> bool {
        let used = &mut self.devices[device as usize].used_bytes;
        match used.checked_add(bytes).filter(|&sum| sum <= share_bytes) {
            Some(sum) => {
                *used = sum;
                true
            }
            None => false,
        }
    }

    /// Gives it back.
    pub(super) fn credit(&mut self, device: u32, bytes: usize) {
        let used = &mut self.devices[device as usize].used_bytes;
        *used = used.saturating_sub(bytes);
    }

    pub(super) fn add_reservation(&mut self, ptr: DevicePtr, asked: usize, whole: usize) {
        self.reservations.insert(ptr.0, (asked, whole));
    }

    /// A reservation is about to go: what the driver knows of its size.
    pub(super) fn take_reservation(&mut self, ptr: DevicePtr, asked: usize) -> Option<(usize, usize)> {
        self.reservations.get(&ptr.0).filter(|known| known.0 == asked)?;
        self.reservations.remove(&ptr.0)
    }

    /// Whether a range that begins in a reservation ends in what was asked for of it.
    pub(super) fn fits_reservation(&self, ptr: DevicePtr, bytes: usize) -> bool {
        match self.reservations.range(..=ptr.0).next_back() {
            Some((&start, &(asked, whole))) if ptr.0 - start < whole as u64 => {
                (ptr.0 - start).checked_add(bytes as u64).is_some_and(|end| end <= asked as u64)
            }
            _ => true,
        }
    }

    pub(super) fn plain_bytes(bytes: usize) -> usize {
        bytes.checked_next_multiple_of(PLAIN_UNIT).unwrap_or(usize::MAX)
    }

    pub(super) fn add_plain(&mut self, ptr: DevicePtr, bytes: usize, owner: u32) {
        self.spans.insert(ptr.0, Span { bytes, content: Content::Plain, owner, access: 0 });
    }

    pub(super) fn add_chunk(&mut self, handle: PhysHandle, owner: u32, bytes: usize) {
        let key = self.chunks.insert(Chunk { owner, bytes, mappings: 0, released: false });
        self.handles.insert(handle, key);
    }

    /// A handle is about to be dropped.
    pub(super) fn take_handle(&mut self, handle: PhysHandle) -> Option<usize> {
        self.handles.remove(&handle)
    }

    /// It was not.
    pub(super) fn put_handle_back(&mut self, handle: PhysHandle, key: usize) {
        self.handles.insert(handle, key);
    }

    /// It was.
    pub(super) fn released(&mut self, key: usize) {
        if let Some(chunk) = self.chunks.get_mut(key) {
            chunk.released = true;
        }
        self.drop_unused(key);
    }

    fn drop_unused(&mut self, key: usize) {
        if let Some(&Chunk { owner, bytes, .. }) = self.chunks.get(key).filter(|c| c.released && c.mappings == 0) {
            self.chunks.remove(key);
            self.credit(owner, bytes);
        }
    }

    /// A chunk was mapped.
    pub(super) fn add_mapping(&mut self, ptr: DevicePtr, bytes: usize, handle: PhysHandle) {
        let Some(&key) = self.handles.get(&handle) else { return };
        let Some(chunk) = self.chunks.get_mut(key) else { return };
        chunk.mappings += 1;
        let owner = chunk.owner;
        let access = if mutant::is("virtual.new-pages-open") { u64::MAX } else { 0 };
        self.spans.insert(ptr.0, Span { bytes, content: Content::Chunk(key), owner, access });
    }

    /// The devices may reach what is mapped in the range, from now on.
    pub(super) fn add_access(&mut self, ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) {
        let mask = devices.iter().fold(0u64, |mask, device| mask | 1 << device.0);
        let end = ptr.0.saturating_add(bytes as u64);
        for (_, span) in self.spans.range_mut(ptr.0..end).filter(|(_, span)| span.content != Content::Plain) {
            span.access |= mask;
        }
    }

    /// `device` may touch plain memory of `peer`; false if it may already.
    pub(super) fn add_peer(&mut self, device: u32, peer: u32) -> bool {
        let peers = &mut self.devices[device as usize].peers;
        let new = *peers >> peer & 1 == 0;
        *peers |= 1 << peer;
        new
    }

    pub(super) fn remove_peer(&mut self, device: u32, peer: u32) {
        self.devices[device as usize].peers &= !(1 << peer);
    }

    /// Whether memory of another device ends where a range begins, or begins where it ends.
    pub(super) fn touches_other(&self, ptr: DevicePtr, bytes: usize, device: u32) -> bool {
        let others = |span: &Span| span.owner != device;
        let before = self.spans.range(..ptr.0).next_back();
        let ends_here = before.is_some_and(|(&start, span)| others(span) && start + span.bytes as u64 == ptr.0);
        ends_here || ptr.checked_add(bytes).and_then(|end| self.spans.get(&end.0)).is_some_and(others)
    }

    /// The plain allocation that starts there.
    pub(super) fn take_plain(&mut self, ptr: DevicePtr) -> Option<Taken> {
        let span = *self.spans.get(&ptr.0).filter(|span| span.content == Content::Plain)?;
        self.spans.remove(&ptr.0);
        Some(Taken(vec![(ptr.0, span)]))
    }

    /// Whether a plain allocation of another device starts there.
    pub(super) fn is_plain_of_other(&self, ptr: DevicePtr, device: u32) -> bool {
        self.spans.get(&ptr.0).is_some_and(|span| span.content == Content::Plain && span.owner != device)
    }

    /// The mappings that begin in a range.
    pub(super) fn take_mappings(&mut self, ptr: DevicePtr, bytes: usize) -> Taken {
        let end = ptr.0.saturating_add(bytes as u64);
        let inside = self.spans.range(ptr.0..end).filter(|(_, span)| span.content != Content::Plain);
        let taken: Vec<(u64, Span)> = inside.map(|(&start, &span)| (start, span)).collect();
        for (start, _) in &taken {
            self.spans.remove(start);
        }
        Taken(taken)
    }

    /// They did not go after all.
    pub(super) fn put_back(&mut self, taken: Taken) {
        self.spans.extend(taken.0);
    }

    /// They went.
    pub(super) fn gone(&mut self, taken: Taken) {
        for (_, span) in taken.0 {
            match span.content {
                Content::Plain => self.credit(span.owner, Self::plain_bytes(span.bytes)),
                Content::Chunk(key) => {
                    if let Some(chunk) = self.chunks.get_mut(key) {
                        chunk.mappings = chunk.mappings.saturating_sub(1);
                    }
                    self.drop_unused(key);
                }
            }
        }
    }

    fn at(&self, address: u64) -> Option<(u64, &Span)> {
        let (&start, span) = self.spans.range(..=address).next_back()?;
        (address - start < span.bytes as u64).then_some((start, span))
    }

    fn reaches(&self, device: u32, span: &Span) -> bool {
        span.owner == device
            || match span.content {
                Content::Plain => self.devices[device as usize].peers >> span.owner & 1 == 1,
                Content::Chunk(_) => span.access >> device & 1 == 1,
            }
            || mutant::is("virtual.all-may-reach")
    }

    /// Whether a kernel of `device` may be given an address. Addresses that nobody here made are not looked into.
    pub(super) fn check_address(&self, device: u32, address: u64) -> Result<(), Stranger> {
        let Some((start, span)) = self.at(address).filter(|(_, span)| !self.reaches(device, span)) else {
            return Ok(());
        };
        // One past the end of one's own memory is an address that kernels are given. Ranges of two devices seldom touch
        // (see `apart`); where they do, hardware's word is the last.
        let ends_there = start == address
            && self
                .spans
                .range(..start)
                .next_back()
                .is_some_and(|(&before, span)| before + span.bytes as u64 == start && self.reaches(device, span));
        let owner = DeviceOrdinal(span.owner);
        if ends_there { Ok(()) } else { Err(Stranger { address: DevicePtr(address), owner }) }
    }

    /// Whether `device` may touch a range.
    pub(super) fn check(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<(), Stranger> {
        self.each(ptr, bytes, |span| self.reaches(device, span))
    }

    /// Whether what is known of a range is memory of `device`.
    pub(super) fn check_home(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<(), Stranger> {
        self.each(ptr, bytes, |span| span.owner == device || mutant::is("virtual.homes-unchecked"))
    }

    fn each(&self, ptr: DevicePtr, bytes: usize, fine: impl Fn(&Span) -> bool) -> Result<(), Stranger> {
        if bytes == 0 {
            return Ok(());
        }
        let end = ptr.0.saturating_add(bytes as u64);
        let first = self.at(ptr.0).map_or(ptr.0, |(start, _)| start);
        for (&start, span) in self.spans.range(first..end) {
            if !fine(span) {
                return Err(Stranger { address: DevicePtr(start.max(ptr.0)), owner: DeviceOrdinal(span.owner) });
            }
        }
        Ok(())
    }

    /// Whose memory is at an address, if any virtual device's is.
    pub(super) fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        self.at(ptr.0).map(|(_, span)| DeviceOrdinal(span.owner))
    }
}
