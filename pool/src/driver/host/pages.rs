//! Real pages: reservations, shared chunks, poison.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

use super::Poison;

/// The system's page, and the smallest granularity.
pub(super) const PAGE_BYTES: usize = 4096;

/// NaN as f32, f64 and (every second) half; no canonical address; no likely index.
const PATTERN: [u8; 8] = 0xFFF7_A5A5_FFF7_A5A5_u64.to_ne_bytes();
const END_BYTES: usize = 64 << 10;

/// Reserves address space without pages. `align` is a power of two.
pub(super) fn reserve(bytes: usize, align: usize) -> Option<u64> {
    let align = align.max(PAGE_BYTES);
    let padded = bytes.checked_add(align - PAGE_BYTES)?;
    // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), padded, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) }
            .ok()? as u64;
    let aligned = start.next_multiple_of(align as u64);
    let head = (aligned - start) as usize;
    let tail = padded - head - bytes;
    if head > 0 {
        give_up(start, head);
    }
    if tail > 0 {
        give_up(aligned + bytes as u64, tail);
    }
    Some(aligned)
}

/// Reserves exactly this range if nobody has it.
pub(super) fn reserve_at(address: u64, bytes: usize) -> bool {
    // SAFETY: NOREPLACE fails rather than touch an existing mapping.
    let result = unsafe {
        mmap_anonymous(
            address as usize as *mut _,
            bytes,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE,
        )
    };
    match result {
        Ok(got) if got as u64 == address => true,
        Ok(got) => {
            give_up(got as u64, bytes);
            false
        }
        Err(_) => false,
    }
}

/// Unmaps a range that this device reserved.
pub(super) fn give_up(address: u64, bytes: usize) {
    // SAFETY: callers pass only ranges that they mapped themselves and that nothing runs on any more.
    let _ = unsafe { munmap(address as usize as *mut _, bytes) };
}

/// Makes a reserved range readable and writable, or neither; false if the system has no room.
#[must_use]
pub(super) fn protect(address: u64, bytes: usize, accessible: bool) -> bool {
    let flags = if accessible { MprotectFlags::READ | MprotectFlags::WRITE } else { MprotectFlags::empty() };
    // SAFETY: the range is one of this device's own mappings.
    unsafe { mprotect(address as usize as *mut _, bytes, flags) }.is_ok()
}

/// Puts a bare reservation where pages were.
#[must_use]
pub(super) fn uncover(address: u64, bytes: usize) -> bool {
    // SAFETY: replaces one of this device's own mappings, on which no op runs (the caller checked).
    unsafe {
        mmap_anonymous(
            address as usize as *mut _,
            bytes,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
        )
    }
    .is_ok()
}

/// Gives the pages of a private range back; they read as zero afterwards.
pub(super) fn discard(address: u64, bytes: usize) {
    let start = address.next_multiple_of(PAGE_BYTES as u64);
    let end = (address + bytes as u64) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if end > start {
        // SAFETY: whole pages inside one freed allocation of this device's own arena.
        let _ = unsafe { madvise(start as usize as *mut _, (end - start) as usize, Advice::LinuxDontNeed) };
    }
}

/// Fills fresh, mapped, writable memory.
pub(super) fn poison(address: u64, bytes: usize, how: Poison) {
    let fill = |start: u64, len: usize| {
        // SAFETY: inside a mapped, writable allocation that nobody else has been given yet.
        let slice = unsafe { std::slice::from_raw_parts_mut(start as usize as *mut u8, len) };
        for piece in slice.chunks_mut(8) {
            piece.copy_from_slice(&PATTERN[..piece.len()]);
        }
    };
    let how = if crate::mutant::is("host.fresh-memory-is-zero") { Poison::Off } else { how };
    match how {
        Poison::Off if crate::mutant::is("host.fresh-memory-is-zero") => {
            // SAFETY: as below.
            unsafe { std::slice::from_raw_parts_mut(address as usize as *mut u8, bytes) }.fill(0);
        }
        Poison::Off => {}
        Poison::Ends if bytes > 2 * END_BYTES => {
            fill(address, END_BYTES);
            fill(address + (bytes - END_BYTES) as u64, END_BYTES);
        }
        Poison::Ends | Poison::Full => fill(address, bytes),
    }
}

/// The physical memory of one device: a sparse anonymous file, a chunk is a piece of it.
#[derive(Debug)]
pub(super) struct Store {
    file: OwnedFd,
    end: u64,
    free: BTreeMap<usize, Vec<u64>>,
}

impl Store {
    pub(super) fn new() -> Option<Self> {
        let file = memfd_create("evergraph-host-device", MemfdFlags::CLOEXEC).ok()?;
        Some(Self { file, end: 0, free: BTreeMap::new() })
    }

    /// A piece of `bytes`, poisoned; the piece freed last comes first.
    pub(super) fn take(&mut self, bytes: usize, how: Poison) -> Option<u64> {
        let offset = match self.free.get_mut(&bytes).and_then(Vec::pop) {
            Some(offset) => offset,
            None => {
                let end = self.end.checked_add(bytes as u64)?;
                ftruncate(&self.file, end).ok()?;
                std::mem::replace(&mut self.end, end)
            }
        };
        if !self.fill(offset, bytes, how) {
            self.give(offset, bytes);
            return None;
        }
        Some(offset)
    }

    /// Takes a piece back and its pages away.
    pub(super) fn give(&mut self, offset: u64, bytes: usize) {
        let _ = fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes as u64);
        self.free.entry(bytes).or_default().push(offset);
    }

    /// Maps a piece over a reserved range, not accessible yet.
    #[must_use]
    pub(super) fn map(&self, offset: u64, bytes: usize, address: u64) -> bool {
        // SAFETY: the range is reserved by this device and bare (the caller checked).
        unsafe {
            mmap(
                address as usize as *mut _,
                bytes,
                ProtFlags::empty(),
                MapFlags::SHARED | MapFlags::FIXED,
                &self.file,
                offset,
            )
        }
        .is_ok()
    }

    fn fill(&self, offset: u64, bytes: usize, how: Poison) -> bool {
        let block: Vec<u8> = PATTERN.iter().copied().cycle().take(END_BYTES.min(bytes)).collect();
        let write = |start: u64, len: usize| {
            (0..len).step_by(block.len()).all(|at| {
                let piece = &block[..block.len().min(len - at)];
                rustix::io::pwrite(&self.file, piece, start + at as u64).is_ok_and(|n| n == piece.len())
            })
        };
        match how {
            Poison::Off => true,
            Poison::Ends if bytes > 2 * END_BYTES => {
                write(offset, END_BYTES) && write(offset + (bytes - END_BYTES) as u64, END_BYTES)
            }
            Poison::Ends | Poison::Full => write(offset, bytes),
        }
    }
}

/// Whether nobody has anything mapped in this range right now.
pub(super) fn reserve_probe(address: u64, bytes: usize) -> bool {
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let free = reserve_at(address, bytes);
    if free {
        give_up(address, bytes);
    }
    free
}
