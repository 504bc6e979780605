//! The address space of a machine: what is reserved, what is mapped, who may touch it, who had it before.

mod access;

use std::collections::{BTreeMap, VecDeque};

use super::arena::Arena;
use super::pages::{self, PAGE_BYTES, Store};
use super::slots::Slots;
use super::{HostConfig, Live};
use crate::driver::{DriverErrorKind, HostPtr};
use crate::mutant;

type Kind = DriverErrorKind;

/// What is mapped at a span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Content {
    /// A plain allocation, this many bytes rounded.
    Malloc { taken_bytes: usize },
    /// A chunk.
    Chunk { handle: u64 },
    /// Pinned host memory.
    Pinned,
    /// Registered host memory: read-only.
    Registered,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    bytes: usize,
    content: Content,
    /// The device that it was allocated on.
    device: u32,
    /// Devices that [`set_access`](Space::set_access) listed; chunks only.
    access: u64,
    /// Start of the allocation or reservation: an access may cross spans of one owner only.
    owner: u64,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    device: u32,
    bytes: usize,
    offset: u64,
    mappings: usize,
    released: bool,
}

#[derive(Debug)]
struct DeviceMemory {
    used_bytes: usize,
    arena: Option<Arena>,
    store: Option<Store>,
    /// Devices whose plain allocations this one may touch.
    peers: u64,
}

/// Something that is gone, for the blame.
#[derive(Clone, Debug)]
struct Grave {
    start: u64,
    bytes: usize,
    what: &'static str,
    device: u32,
}

const GRAVES: usize = 4096;
const SPARE_RANGES: usize = 64;

/// The address space of a machine.
#[derive(Debug)]
pub(super) struct Space {
    config: HostConfig,
    spans: BTreeMap<u64, Span>,
    /// Reservations: length, and the device that made it.
    reservations: BTreeMap<u64, (usize, u32)>,
    chunks: Slots<Chunk>,
    devices: Vec<DeviceMemory>,
    graves: VecDeque<Grave>,
    /// Given-back address ranges, the next reservation of that size gets the newest.
    spare: Vec<(u64, usize)>,
}

impl Space {
    pub(super) fn new(devices: usize, config: HostConfig) -> Self {
        let devices =
            (0..devices).map(|_| DeviceMemory { used_bytes: 0, arena: None, store: None, peers: 0 }).collect();
        Self {
            config,
            spans: BTreeMap::new(),
            reservations: BTreeMap::new(),
            chunks: Slots::new(7),
            devices,
            graves: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    fn vmm(&self) -> Result<(), Kind> {
        if self.config.vmm { Ok(()) } else { Err(Kind::NotSupported("virtual memory management")) }
    }

    fn whole(&self, ptr: u64, bytes: usize) -> Result<u64, Kind> {
        let granularity = self.config.granularity_bytes;
        if bytes == 0 || !bytes.is_multiple_of(granularity) {
            return Err(Kind::InvalidValue("size is not a positive multiple of the granularity"));
        }
        if !ptr.is_multiple_of(granularity as u64) {
            return Err(Kind::InvalidValue("address is not a multiple of the granularity"));
        }
        ptr.checked_add(bytes as u64).ok_or(Kind::InvalidValue("range wraps"))
    }

    fn charge(&mut self, device: u32, bytes: usize) -> Result<(), Kind> {
        let memory = &mut self.devices[device as usize];
        match memory.used_bytes.checked_add(bytes) {
            Some(used) if used <= self.config.memory_bytes => {
                memory.used_bytes = used;
                Ok(())
            }
            _ => Err(Kind::OutOfMemory),
        }
    }

    fn credit(&mut self, device: u32, bytes: usize) {
        self.devices[device as usize].used_bytes -= bytes;
    }

    /// Takes memory that no address shows (instantiated graphs).
    pub(super) fn charge_hidden(&mut self, device: u32, bytes: usize) -> Result<(), Kind> {
        self.charge(device, bytes)
    }

    /// Gives [`charge_hidden`](Self::charge_hidden)'s memory back.
    pub(super) fn credit_hidden(&mut self, device: u32, bytes: usize) {
        self.credit(device, bytes);
    }

    pub(super) fn used_bytes(&self, device: u32) -> usize {
        self.devices[device as usize].used_bytes
    }

    fn bury(&mut self, start: u64, bytes: usize, what: &'static str, device: u32) {
        if self.graves.len() == GRAVES {
            self.graves.pop_front();
        }
        self.graves.push_back(Grave { start, bytes, what, device });
    }

    // ---- reservations and chunks

    pub(super) fn granularity(&self) -> Result<usize, Kind> {
        self.vmm()?;
        Ok(self.config.granularity_bytes)
    }

    pub(super) fn reserve(&mut self, device: u32, bytes: usize, align: usize, hint: Option<u64>) -> Result<u64, Kind> {
        self.vmm()?;
        self.whole(0, bytes)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(Kind::InvalidValue("alignment is not a power of two"));
        }
        let align = align.max(self.config.granularity_bytes);
        if self.config.va_limit_bytes.is_some_and(|limit| bytes > limit) {
            return Err(Kind::OutOfMemory);
        }
        let wished = hint.filter(|h| *h != 0 && h.is_multiple_of(align as u64));
        let spare = |(start, len): &(u64, usize)| *len == bytes && start.is_multiple_of(align as u64);
        let start = if let Some(address) = wished.filter(|&address| {
            match self.spare.iter().rposition(|&(start, len)| start == address && len == bytes) {
                Some(at) => {
                    self.spare.remove(at);
                    true
                }
                None => pages::reserve_at(address, bytes),
            }
        }) {
            address
        } else if let Some(at) = self.spare.iter().rposition(spare) {
            self.spare.remove(at).0
        } else {
            pages::reserve(bytes, align).ok_or(Kind::OutOfMemory)?
        };
        self.reservations.insert(start, (bytes, device));
        Ok(start)
    }

    pub(super) fn unreserve(&mut self, ptr: u64, bytes: usize) -> Result<(), Kind> {
        self.vmm()?;
        let end = self.whole(ptr, bytes)?;
        match self.reservations.get(&ptr) {
            Some(&(len, _)) if len == bytes => {}
            Some(_) => return Err(Kind::InvalidValue("size differs from the reservation's")),
            None => return Err(Kind::InvalidValue("no reservation starts there")),
        }
        if self.spans.range(ptr..end).next().is_some() {
            return Err(Kind::InvalidValue("something is mapped in the reservation"));
        }
        let (_, device) = self.reservations.remove(&ptr).unwrap_or((0, 0));
        self.bury(ptr, bytes, "freed reservation", device);
        if self.spare.len() == SPARE_RANGES {
            let (start, len) = self.spare.remove(0);
            pages::give_up(start, len);
        }
        self.spare.push((ptr, bytes));
        Ok(())
    }

    pub(super) fn create(&mut self, device: u32, bytes: usize) -> Result<u64, Kind> {
        self.vmm()?;
        self.whole(0, bytes)?;
        self.charge(device, bytes)?;
        let poison = self.config.poison;
        let memory = &mut self.devices[device as usize];
        if memory.store.is_none() {
            memory.store = Store::new();
        }
        let Some(offset) = memory.store.as_mut().and_then(|store| store.take(bytes, poison)) else {
            self.credit(device, bytes);
            return Err(Kind::OutOfMemory);
        };
        Ok(self.chunks.insert(Chunk { device, bytes, offset, mappings: 0, released: false }))
    }

    pub(super) fn map(&mut self, ptr: u64, bytes: usize, offset: usize, handle: u64) -> Result<(), Kind> {
        self.vmm()?;
        let end = self.whole(ptr, bytes)?;
        let chunk = self.chunk(handle)?;
        if offset != 0 {
            return Err(Kind::NotSupported("a map starts at offset 0 of its chunk"));
        }
        if chunk.bytes != bytes {
            return Err(Kind::NotSupported("a map covers its whole chunk"));
        }
        let owner = match self.reservations.range(..=ptr).next_back() {
            Some((&start, &(len, _))) if end <= start + len as u64 => start,
            _ => return Err(Kind::InvalidValue("the range is not inside one reservation")),
        };
        if self.overlaps(ptr, end) {
            return Err(Kind::InvalidValue("something is already mapped there"));
        }
        let store = self.devices[chunk.device as usize].store.as_ref();
        if !store.is_some_and(|store| store.map(chunk.offset, bytes, ptr)) {
            return Err(Kind::OutOfMemory);
        }
        if let Some(chunk) = self.chunks.get_mut(handle) {
            chunk.mappings += 1;
        }
        let content = Content::Chunk { handle };
        self.spans.insert(ptr, Span { bytes, content, device: chunk.device, access: 0, owner });
        Ok(())
    }

    fn chunk(&self, handle: u64) -> Result<Chunk, Kind> {
        match self.chunks.get(handle) {
            Some(chunk) if !chunk.released => Ok(*chunk),
            _ => Err(Kind::InvalidHandle("physical chunk")),
        }
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.spans.range(..end).next_back().is_some_and(|(&at, span)| at + span.bytes as u64 > start)
    }

    /// The mappings that tile the range exactly, or what is wrong with it.
    fn tiles(&self, ptr: u64, end: u64) -> Result<Vec<u64>, Kind> {
        let mut at = ptr;
        let mut starts = Vec::new();
        for (&start, span) in self.spans.range(ptr..end) {
            if start != at || !matches!(span.content, Content::Chunk { .. }) {
                break;
            }
            starts.push(start);
            at = start + span.bytes as u64;
        }
        if at == end || mutant::is("host.partial-unmaps") {
            Ok(starts)
        } else {
            Err(Kind::InvalidValue("the range is not made of whole mappings"))
        }
    }

    pub(super) fn set_access(&mut self, ptr: u64, bytes: usize, devices: u64) -> Result<(), Kind> {
        self.vmm()?;
        let end = self.whole(ptr, bytes)?;
        let starts = self.tiles(ptr, end)?;
        for start in &starts {
            let span = self.spans[start];
            if !self.config.peers && devices & !(1 << span.device) != 0 {
                return Err(Kind::PeerAccess);
            }
        }
        if !pages::protect(ptr, bytes, true) {
            return Err(Kind::OutOfMemory);
        }
        for start in starts {
            if let Some(span) = self.spans.get_mut(&start) {
                span.access |= devices;
            }
        }
        Ok(())
    }

    /// Takes whole mappings away. `in_use` says whether an op runs on the range this moment: then the pages stay
    /// under it, so that the process survives to tell the tale.
    pub(super) fn unmap(&mut self, ptr: u64, bytes: usize, in_use: impl FnOnce() -> bool) -> Result<(), Kind> {
        self.vmm()?;
        let end = self.whole(ptr, bytes)?;
        let starts = self.tiles(ptr, end)?;
        if !in_use() && !pages::uncover(ptr, bytes) {
            return Err(Kind::OutOfMemory);
        }
        for start in starts {
            let Some(span) = self.spans.remove(&start) else { continue };
            self.bury(start, span.bytes, "unmapped chunk", span.device);
            if let Content::Chunk { handle } = span.content {
                if let Some(chunk) = self.chunks.get_mut(handle) {
                    chunk.mappings -= 1;
                }
                self.drop_chunk(handle);
            }
        }
        Ok(())
    }

    pub(super) fn release(&mut self, handle: u64) -> Result<(), Kind> {
        self.vmm()?;
        self.chunk(handle)?;
        if let Some(chunk) = self.chunks.get_mut(handle) {
            chunk.released = true;
        }
        self.drop_chunk(handle);
        Ok(())
    }

    fn drop_chunk(&mut self, handle: u64) {
        if self.chunks.get(handle).is_some_and(|chunk| chunk.released && chunk.mappings == 0)
            && let Some(chunk) = self.chunks.remove(handle)
        {
            if let Some(store) = &mut self.devices[chunk.device as usize].store {
                store.give(chunk.offset, chunk.bytes);
            }
            self.credit(chunk.device, chunk.bytes);
        }
    }

    // ---- plain and host memory

    pub(super) fn malloc(&mut self, device: u32, bytes: usize) -> Result<u64, Kind> {
        if bytes == 0 {
            return Err(Kind::InvalidValue("zero bytes"));
        }
        let taken_bytes = Arena::rounded(bytes).ok_or(Kind::OutOfMemory)?;
        self.charge(device, taken_bytes)?;
        let memory_bytes = self.config.memory_bytes;
        let memory = &mut self.devices[device as usize];
        if memory.arena.is_none() {
            memory.arena = Arena::new(memory_bytes);
        }
        let Some(ptr) = memory.arena.as_mut().and_then(|arena| arena.take(taken_bytes)) else {
            self.credit(device, taken_bytes);
            return Err(Kind::OutOfMemory);
        };
        pages::poison(ptr, bytes, self.config.poison);
        let content = Content::Malloc { taken_bytes };
        self.spans.insert(ptr, Span { bytes, content, device, access: 0, owner: ptr });
        Ok(ptr)
    }

    pub(super) fn free(&mut self, device: u32, ptr: u64) -> Result<usize, Kind> {
        match self.spans.get(&ptr) {
            Some(&Span { content: Content::Malloc { taken_bytes }, device: owner, bytes, .. }) => {
                if owner != device {
                    return Err(Kind::InvalidValue("another device's allocation"));
                }
                self.spans.remove(&ptr);
                self.bury(ptr, bytes, "freed malloc", device);
                if let Some(arena) = &mut self.devices[device as usize].arena {
                    arena.give(ptr, taken_bytes);
                }
                self.credit(device, taken_bytes);
                Ok(bytes)
            }
            _ => Err(Kind::InvalidValue("no allocation starts there")),
        }
    }

    pub(super) fn host_alloc(&mut self, device: u32, bytes: usize) -> Result<HostPtr, Kind> {
        if bytes == 0 {
            return Err(Kind::InvalidValue("zero bytes"));
        }
        let mapped = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Kind::OutOfMemory)?;
        let ptr = pages::reserve(mapped, PAGE_BYTES).ok_or(Kind::OutOfMemory)?;
        if !pages::protect(ptr, mapped, true) {
            pages::give_up(ptr, mapped);
            return Err(Kind::OutOfMemory);
        }
        pages::poison(ptr, bytes, self.config.poison);
        self.spans.insert(ptr, Span { bytes, content: Content::Pinned, device, access: 0, owner: ptr });
        Ok(HostPtr(ptr))
    }

    pub(super) fn host_free(&mut self, ptr: u64, in_use: impl FnOnce(usize) -> bool) -> Result<(), Kind> {
        let Some(&Span { content: Content::Pinned, bytes, device, .. }) = self.spans.get(&ptr) else {
            return Err(Kind::InvalidValue("no pinned allocation starts there"));
        };
        if !in_use(bytes) {
            pages::give_up(ptr, bytes.next_multiple_of(PAGE_BYTES));
        }
        self.spans.remove(&ptr);
        self.bury(ptr, bytes, "freed pinned memory", device);
        Ok(())
    }

    pub(super) fn register(&mut self, device: u32, ptr: u64, bytes: usize) -> Result<(), Kind> {
        let end = ptr.checked_add(bytes as u64).ok_or(Kind::InvalidValue("range wraps"))?;
        if ptr == 0 || bytes == 0 {
            return Err(Kind::InvalidValue("empty range"));
        }
        if self.overlaps(ptr, end) {
            return Err(Kind::InvalidValue("part of the range is already known to the device"));
        }
        self.spans.insert(ptr, Span { bytes, content: Content::Registered, device, access: 0, owner: ptr });
        Ok(())
    }

    pub(super) fn unregister(&mut self, ptr: u64) -> Result<usize, Kind> {
        let Some(&Span { content: Content::Registered, bytes, device, .. }) = self.spans.get(&ptr) else {
            return Err(Kind::InvalidValue("no registration starts there"));
        };
        self.spans.remove(&ptr);
        self.bury(ptr, bytes, "ended registration", device);
        Ok(bytes)
    }

    /// False if it already was.
    pub(super) fn enable_peer(&mut self, device: u32, peer: u32) -> bool {
        let peers = &mut self.devices[device as usize].peers;
        let fresh = *peers >> peer & 1 == 0;
        *peers |= 1 << peer;
        fresh
    }

    pub(super) fn count(&self, device: u32, live: &mut Live) {
        for span in self.spans.values().filter(|span| span.device == device) {
            match span.content {
                Content::Malloc { .. } => live.mallocs += 1,
                Content::Chunk { .. } => live.mappings += 1,
                Content::Pinned | Content::Registered => live.host += 1,
            }
        }
        live.chunks = self.chunks.iter().filter(|(_, chunk)| chunk.device == device).count();
        live.reservations = self.reservations.values().filter(|(_, owner)| *owner == device).count();
        live.used_bytes = self.used_bytes(device);
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        for (&start, &(bytes, _)) in &self.reservations {
            pages::give_up(start, bytes);
        }
        for &(start, bytes) in &self.spare {
            pages::give_up(start, bytes);
        }
        for (&start, span) in &self.spans {
            if span.content == Content::Pinned {
                pages::give_up(start, span.bytes.next_multiple_of(PAGE_BYTES));
            }
        }
    }
}
