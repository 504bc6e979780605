//! Giving memory back to the driver: one function, whatever the reason.
//!
//! [`Shared::give_back`] bumps generations, tells the dependents, waits on the host for every stream that
//! used the memory, makes the owning device current, and only then calls the driver. This file is the only one
//! with a `free`, `unmap`, `release` or `address_free` of pool memory in it, and a test reads the sources to keep it so.

use std::ops::Range;
use std::sync::Arc;

use crate::core::{Claim, SegmentKey, Uses};
use crate::driver::{DevicePtr, DriverError, DriverErrorKind};
use crate::handshake::{Begun, Cleared, Patience, begin};
use crate::kept::Saved;
use crate::mutant;
use crate::retire::Victim;
use crate::shared::{Cold, Notices, Shared};
use crate::sleep::Bed;
use crate::state::{Backing, Home, Leftover, Outside, Site, Spare, State};
use crate::victims::takeable;
use crate::{PoolError, RetireReason};

/// Why memory goes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// Somebody needs it more.
    OutOfMemory,
    /// vmm: free chunks go under another range. They stay with the pool.
    Stitch,
    /// vmm: the pages of idle graphs go under another range. They stay with the pool.
    Move,
    /// The slab table is full.
    SlotTable,
    /// The caller asked.
    Trim,
    /// Growth made it superfluous.
    GarbageCollection,
    /// The caller let it fall asleep, or a wake failed half way.
    Sleep,
    /// The pool is closing.
    Drop,
}

impl Reason {
    /// Whether chunks stay with the pool, mapped nowhere, for the range that they are meant for.
    fn keeps_chunks(self) -> bool {
        matches!(self, Self::Stitch | Self::Move)
    }
}

/// What goes back.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// Free memory, taken out of reach.
    Claim { heap: usize, claim: Claim },
    /// The pages under a block that only idle graphs still hold, and weakly; the address stays theirs.
    Pages { record: usize, home: Home, segment: SegmentKey, chunks: Vec<Range<u32>> },
    /// What lies behind the extent of a growable slice.
    Surplus { record: usize, home: Home, segment: SegmentKey, chunks: Vec<Range<u32>> },
    /// All pages of a heap; tiling and addresses stay. See [`sleep`](crate::sleep).
    Sleep(Bed),
}

impl Parcel {
    pub(crate) fn claim(heap: usize, claim: Claim) -> Self {
        Self::Claim { heap, claim }
    }
}

/// A parcel on its way, with the proof that nobody launches on it any more.
pub(crate) struct Going {
    pub(crate) parcel: Parcel,
    retired: Option<(Victim, Cleared)>,
}

impl Shared {
    /// Gives parcels back; the bytes that went. On a driver error everything that did not go is as before, and
    /// what went is gone for good: nothing leaks, nothing is freed twice, and a retry works.
    pub(crate) fn give_back(
        &self,
        _cold: &Cold<'_>,
        parcels: Vec<Parcel>,
        reason: Reason,
        patience: Patience,
        notices: &mut Notices,
    ) -> Result<u64, PoolError> {
        if parcels.is_empty() {
            return Ok(0);
        }
        let (mut going, uses) = self.shut(parcels, patience);
        let waited = self.host_wait(&uses).and_then(|()| self.save(&mut going)).and_then(|()| Ok(self.bind_owner()?));
        let mut freed = 0;
        let mut failed = waited.err();
        going.reverse();
        while let Some(parcel) = going.pop() {
            if failed.is_some() {
                self.put_back(parcel);
                continue;
            }
            match self.send(parcel, reason, notices) {
                Ok(bytes) => freed += bytes,
                Err((bytes, error)) => {
                    freed += bytes;
                    failed = Some(error.into());
                }
            }
        }
        let mut state = self.lock();
        let counters = &mut state.counters;
        if reason == Reason::Stitch {
            counters.stitches += 1;
            counters.stitched_bytes += freed;
        } else {
            counters.give_backs += 1;
        }
        if !reason.keeps_chunks() {
            counters.given_back_bytes += freed;
        }
        state.note_reserved();
        let epoch = state.counters.epoch_bumps;
        drop(state);
        tracing::info!(pool = self.id.0, bytes = freed, ?reason, epoch, "give-back");
        match failed {
            Some(error) => Err(error),
            None => Ok(freed),
        }
    }

    /// First half of retiring: from here on no graph is launched on the parcels' memory. A parcel whose
    /// dependents are between check and launch right now is waited for, or left out. Returns whom to wait for.
    fn shut(&self, parcels: Vec<Parcel>, patience: Patience) -> (Vec<Going>, Uses) {
        let mut uses = Uses::none();
        let mut going = Vec::with_capacity(parcels.len());
        for parcel in parcels {
            let (record, home, chunks) = match &parcel {
                Parcel::Sleep(bed) => {
                    let retired = self.shut_heap(bed.heap, &mut uses);
                    going.push(Going { parcel, retired });
                    continue;
                }
                Parcel::Claim { claim, .. } => {
                    uses.extend(&claim.uses);
                    going.push(Going { parcel, retired: None });
                    continue;
                }
                Parcel::Pages { record, home, chunks, .. } | Parcel::Surplus { record, home, chunks, .. } => {
                    (*record, *home, chunks)
                }
            };
            let surplus = matches!(parcel, Parcel::Surplus { .. });
            let victim = Victim::record(record);
            let mut state = self.lock();
            // The lock was let go since it was picked: its graphs may be gone, and the block somebody else's.
            let there = if surplus {
                state.still_surplus(home, chunks, self.chunk_bytes)
            } else {
                still_takeable(&state, record, home, chunks)
            };
            if !there {
                continue;
            }
            let cleared = match begin(&mut *state, &victim) {
                Begun::Cleared(cleared) => cleared,
                Begun::Taken => continue,
                Begun::Held(held) if patience == Patience::Skip => {
                    held.abandon(&mut *state, &victim);
                    continue;
                }
                Begun::Held(held) => {
                    // The mark stays; the lock does not: the holder's slow path needs it.
                    drop(state);
                    let cleared = held.wait();
                    state = self.lock();
                    cleared
                }
            };
            if surplus {
                uses.extend(&state.live_uses(home, &victim, &cleared));
            } else {
                uses.extend(&state.order_after(&victim, &cleared));
            }
            going.push(Going { parcel, retired: Some((victim, cleared)) });
        }
        (going, uses)
    }

    fn bind_owner(&self) -> Result<(), DriverError> {
        // The waits may have made another device current.
        if mutant::is("wrong-device-on-free") { Ok(()) } else { self.driver.bind() }
    }

    /// The driver calls for one parcel, and the books after them.
    fn send(&self, going: Going, reason: Reason, notices: &mut Notices) -> Result<u64, (u64, DriverError)> {
        let surplus = matches!(going.parcel, Parcel::Surplus { .. });
        match going.parcel {
            Parcel::Claim { heap, claim } => match claim.chunks.clone() {
                Some(chunks) => self.send_chunks(heap, &claim, chunks, reason),
                None => self.send_slab(heap, &claim),
            },
            Parcel::Sleep(bed) => self.send_to_sleep(bed, going.retired, notices),
            Parcel::Pages { record, home, segment, chunks } | Parcel::Surplus { record, home, segment, chunks } => {
                let mut gone = Vec::new();
                let mut failed = None;
                for range in &chunks {
                    let (bytes, error) = self.unmap_chunks(home.heap, segment, range.clone(), reason);
                    if bytes > 0 {
                        gone.push(range.start..range.start + (bytes / self.chunk_bytes) as u32);
                    }
                    failed = error;
                    if failed.is_some() {
                        break;
                    }
                }
                let bytes: u64 = gone.iter().map(|r| r.len() as u64 * self.chunk_bytes).sum();
                let mut state = self.lock();
                let state = &mut *state;
                if let Some((victim, cleared)) = going.retired {
                    cleared.commit(state, &victim, |state| {
                        for range in &gone {
                            let done = state.heaps[home.heap].unback_used(home.block, range.clone());
                            debug_assert!(done.is_ok(), "the chunks lie inside a held block: {done:?}");
                        }
                        // Behind the extent there is nothing that anybody could notice.
                        if !gone.is_empty() && !surplus {
                            state.counters.unbacked += 1;
                            state.change(record, RetireReason::Unbacked, notices);
                        }
                    });
                }
                state.note_reserved();
                match failed {
                    None => Ok(bytes),
                    Some(error) => Err((bytes, error)),
                }
            }
        }
    }

    fn send_chunks(
        &self,
        heap: usize,
        claim: &Claim,
        chunks: Range<u32>,
        reason: Reason,
    ) -> Result<u64, (u64, DriverError)> {
        let (bytes, error) = self.unmap_chunks(heap, claim.segment, chunks.clone(), reason);
        let gone = (bytes / self.chunk_bytes) as u32;
        let mut state = self.lock();
        let state = &mut *state;
        let books = &mut state.heaps[heap];
        if gone == 0 {
            let _ = books.release_claim(claim.block);
        } else {
            let done = books.unback_claim(claim.block);
            debug_assert!(done.is_ok(), "a claim is unbacked once: {done:?}");
            if gone < chunks.len() as u32 {
                // The host saw everything complete, so what stays is idle.
                let stays = chunks.start + gone..chunks.end;
                let _ = books.back(claim.segment, stays.clone());
                state.tie_chunks(heap, claim.segment, stays);
            }
        }
        state.note_reserved();
        match error {
            None => Ok(bytes),
            Some(error) => Err((bytes, error)),
        }
    }

    /// Takes the pages of chunks away, in order; the bytes that went, and what stopped it.
    pub(crate) fn unmap_chunks(
        &self,
        heap: usize,
        segment: SegmentKey,
        chunks: Range<u32>,
        reason: Reason,
    ) -> (u64, Option<DriverError>) {
        let mut gone = 0;
        let mut chunk = chunks.start;
        while chunk < chunks.end {
            let place = match self.lock().segment_backing(heap, segment) {
                Some(Backing::Range { ptr, chunks, .. }) => {
                    chunks.get(chunk as usize).copied().flatten().map(|bundle| (*ptr, bundle))
                }
                _ => None,
            };
            let Some((base, bundle)) = place else { break };
            let there = bundle.chunks();
            if there.start != chunk || there.end > chunks.end {
                // Whoever names chunks names whole bundles; a part of a mapping can not go.
                let kind = DriverErrorKind::InvalidValue("a part of a physical chunk");
                return (gone, Some(DriverError::new("unmap", self.device, kind)));
            }
            let bytes = there.len() as u64 * self.chunk_bytes;
            let spare = Spare { handle: bundle.handle, bytes };
            let at = DevicePtr(base.0 + u64::from(chunk) * self.chunk_bytes);
            if let Err(error) = self.driver.unmap(at, bytes as usize) {
                return (gone, Some(error));
            }
            if !reason.keeps_chunks() {
                self.release_chunk(spare);
            }
            let mut state = self.lock();
            let state = &mut *state;
            if let Some(Backing::Range { chunks, .. }) = state.segment_backing(heap, segment)
                && let Some(places) = chunks.get_mut(there.start as usize..there.end as usize)
            {
                places.fill(None);
            }
            if reason.keeps_chunks() {
                state.spare.push(spare);
            }
            state.tally.segments.sub(1);
            gone += bytes;
            chunk = there.end;
        }
        (gone, None)
    }

    fn send_slab(&self, heap: usize, claim: &Claim) -> Result<u64, (u64, DriverError)> {
        let slab = match self.lock().segment_backing(heap, claim.segment) {
            Some(Backing::Slab { ptr, bytes }) => Some((*ptr, *bytes)),
            _ => None,
        };
        let Some((ptr, bytes)) = slab else { return Ok(0) };
        if let Err(error) = self.driver.free(ptr) {
            let _ = self.lock().heaps[heap].release_claim(claim.block);
            return Err((0, error));
        }
        let mut state = self.lock();
        *state.segment_backing(heap, claim.segment) = None;
        let done = state.heaps[heap].remove_segment(claim.segment);
        debug_assert!(done.is_ok(), "a claimed slab is removed once: {done:?}");
        state.tally.segments.sub(1);
        Ok(bytes)
    }

    /// A parcel that does not go after all.
    fn put_back(&self, going: Going) {
        let mut state = self.lock();
        let state = &mut *state;
        match going.parcel {
            Parcel::Claim { heap, claim } => {
                let _ = state.heaps[heap].release_claim(claim.block);
            }
            Parcel::Pages { .. } | Parcel::Surplus { .. } => {}
            Parcel::Sleep(bed) => state.stay_awake(bed),
        }
        if let Some((victim, cleared)) = going.retired {
            cleared.abandon(state, &victim);
        }
    }

    // ---- single driver calls

    /// Drops a chunk's handle; kept and tried again if the driver will not.
    pub(crate) fn release_chunk(&self, Spare { handle, bytes }: Spare) {
        if self.driver.release(handle).is_err() {
            self.keep_leftover(Leftover::Chunk(handle, bytes));
        }
    }

    /// Undoes a map that nobody has seen.
    pub(crate) fn undo_map(&self, at: DevicePtr, spare: Spare) {
        // The growth that follows, after room was made, maps at this very address.
        if again(|| Ok(self.driver.unmap(at, spare.bytes as usize)?)).is_err() {
            self.keep_leftover(Leftover::Mapped(at, spare.handle, spare.bytes));
        } else {
            self.release_chunk(spare);
        }
    }

    /// Gives chunks back that are mapped nowhere, just enough; the bytes that went.
    pub(crate) fn give_spare(&self, _cold: &Cold<'_>, want_bytes: u64) -> Result<u64, DriverError> {
        let mut freed = 0;
        while freed < want_bytes {
            let Some(spare) = self.lock().spare.pop() else { break };
            self.end_spare(spare)?;
            freed += spare.bytes;
        }
        Ok(freed)
    }

    /// Gives chunks of these sizes back that are mapped nowhere: smaller ones are made in their place.
    pub(crate) fn give_misfits(&self, _cold: &Cold<'_>, sizes: &[u64]) -> Result<(), DriverError> {
        for &bytes in sizes.iter().filter(|_| !mutant::is("misfits-stay")) {
            // The largest of at most its size: of exactly its size.
            let Some(spare) = self.lock().take_spare(bytes) else { break };
            self.end_spare(spare)?;
        }
        Ok(())
    }

    fn end_spare(&self, spare: Spare) -> Result<(), DriverError> {
        let done = self.driver.bind().and_then(|()| self.driver.release(spare.handle));
        let mut state = self.lock();
        if done.is_err() {
            state.spare.push(spare);
        } else {
            state.counters.given_back_bytes += spare.bytes;
        }
        state.note_reserved();
        done
    }

    /// Undoes a map of a chunk that was taken from elsewhere; it waits for another range.
    pub(crate) fn undo_move(&self, at: DevicePtr, spare: Spare) {
        if again(|| Ok(self.driver.unmap(at, spare.bytes as usize)?)).is_err() {
            self.keep_leftover(Leftover::Mapped(at, spare.handle, spare.bytes));
        } else {
            self.lock().spare.push(spare);
        }
    }

    /// Undoes a reservation that nobody has seen.
    pub(crate) fn free_range(&self, ptr: DevicePtr, bytes: u64) {
        let _ = self.driver.address_free(ptr, bytes as usize);
    }

    /// Undoes a slab that nobody has seen.
    pub(crate) fn free_slab(&self, ptr: DevicePtr) {
        let _ = self.driver.free(ptr);
    }

    /// Host memory whose owner and graphs are gone, and handles that the driver would not take: again.
    pub(crate) fn retry_leftovers(&self, _cold: &Cold<'_>, notices: &mut Notices) {
        let leftovers = {
            let mut state = self.lock();
            if state.leftovers.is_empty() {
                return;
            }
            std::mem::take(&mut state.leftovers)
        };
        for leftover in leftovers {
            if let Some(again) = self.end_leftover(leftover, notices) {
                self.keep_leftover(again);
            }
        }
        self.lock().note_reserved();
    }

    /// One try; what is still left over comes back. Owners of host memory are put with the notices: their
    /// destructors are foreign code.
    fn end_leftover(&self, leftover: Leftover, notices: &mut Notices) -> Option<Leftover> {
        match leftover {
            Leftover::Chunk(handle, bytes) => {
                let done = self.driver.bind().and_then(|()| self.driver.release(handle));
                done.is_err().then_some(Leftover::Chunk(handle, bytes))
            }
            Leftover::Mapped(at, handle, bytes) => {
                let gone = self.driver.bind().and_then(|()| self.driver.unmap(at, bytes as usize));
                if gone.is_err() {
                    return Some(Leftover::Mapped(at, handle, bytes));
                }
                self.driver.release(handle).is_err().then_some(Leftover::Chunk(handle, bytes))
            }
            Leftover::Host(mut outside, uses) => {
                let waited = self.host_wait(&uses);
                let done = waited.and_then(|()| match &mut outside {
                    // No owner is left, so nobody can be copying in or out.
                    Outside::Pinned(pinned) => match Arc::get_mut(pinned) {
                        Some(pinned) => Ok(pinned.free()?),
                        None => Err(PoolError::Internal("host memory without an owner is in use")),
                    },
                    Outside::Registered(registered) => {
                        notices.owners.extend(registered.end()?);
                        Ok(())
                    }
                    Outside::Foreign { .. } | Outside::Nothing => Ok(()),
                });
                done.is_err().then_some(Leftover::Host(outside, uses))
            }
        }
    }

    /// The last owner is gone: everything goes. Silent; each call is tried a few times, because there will be
    /// no other chance.
    fn tear_down(&self) {
        let mut uses = Uses::none();
        {
            let mut state = self.lock();
            let state = &mut *state;
            for (key, slot) in state.streams.iter().enumerate() {
                if slot.stream.is_some() {
                    uses.insert(crate::core::StreamKey(key as u32));
                }
            }
        }
        let _ = again(|| self.host_wait(&uses));
        let _ = again(|| Ok(self.driver.bind()?));
        let (backing, records, leftovers) = {
            let mut state = self.lock();
            let backing: Vec<Backing> = state.backing.iter_mut().flat_map(std::mem::take).flatten().collect();
            let records = std::mem::take(&mut state.records);
            let mut leftovers = std::mem::take(&mut state.leftovers);
            leftovers.extend(state.spare.drain(..).map(|s| Leftover::Chunk(s.handle, s.bytes)));
            let kept = std::mem::take(&mut state.sleeping).into_iter().flatten().filter_map(|s| s.saved);
            leftovers.extend(kept.filter_map(Saved::into_leftover));
            (backing, records, leftovers)
        };
        let mut notices = Notices::default();
        let host = records.into_iter().filter_map(|(_, record)| match record.site {
            Site::Outside(outside) => Some(Leftover::Host(outside, record.uses)),
            Site::Block(_) => None,
        });
        // Before the ranges: something may still be mapped in one of them.
        for leftover in leftovers.into_iter().chain(host) {
            let mut left = Some(leftover);
            for _ in 0..3 {
                left = left.and_then(|l| self.end_leftover(l, &mut notices));
            }
        }
        for taken in backing {
            match taken {
                Backing::Slab { ptr, .. } => {
                    let _ = again(|| Ok(self.driver.free(ptr)?));
                }
                Backing::Range { ptr, bytes, chunks } => {
                    for (i, bundle) in chunks.into_iter().enumerate() {
                        let Some(bundle) = bundle.filter(|bundle| bundle.first as usize == i) else { continue };
                        let at = DevicePtr(ptr.0 + i as u64 * self.chunk_bytes);
                        let bytes = bundle.chunks().len() * self.chunk_bytes as usize;
                        let _ = again(|| Ok(self.driver.unmap(at, bytes)?));
                        let _ = again(|| Ok(self.driver.release(bundle.handle)?));
                    }
                    let _ = again(|| Ok(self.driver.address_free(ptr, bytes as usize)?));
                }
            }
        }
    }
}

/// A call that is worth trying again.
fn again(mut call: impl FnMut() -> Result<(), PoolError>) -> Result<(), PoolError> {
    let mut result = call();
    for _ in 0..2 {
        if result.is_ok() {
            break;
        }
        result = call();
    }
    result
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.tear_down();
        self.shelve();
    }
}

/// Whether pages that were picked under an earlier lock still lie under the same weakly held block.
fn still_takeable(state: &State, record: usize, home: Home, chunks: &[Range<u32>]) -> bool {
    if !state.records.get(record).is_some_and(|r| takeable(state, r) && r.home() == Some(home)) {
        return false;
    }
    let inside = state.heaps[home.heap].chunks_inside(home.block);
    chunks.iter().all(|c| inside.iter().any(|i| i.start <= c.start && c.end <= i.end))
}
