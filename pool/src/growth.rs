//! Growth: chunks mapped under reserved ranges, or slabs by `malloc`.
//!
//! Driver calls are made without the books' lock (a `malloc` may wait for the device); the cold lock keeps
//! other growth and give-backs away meanwhile. A failure half way is undone, and memory that can not be
//! handed back at once is kept as a leftover and tried again.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::bundles::{Stretch, lay};
use crate::chunk_class::Gap;
use crate::core::{Claim, Growth, Request, SegmentKey};
use crate::driver::{DevicePtr, DriverError, DriverErrorKind};
use crate::give_back::{Parcel, Reason};
use crate::handshake::Patience;
use crate::shared::{Cold, Notices, Shared};
use crate::state::{Backing, Bundle, Leftover, Spare, State};
use crate::{PoolError, PoolMode, Purpose, Stream};

/// Why the pool could not grow.
#[derive(Debug)]
pub(crate) enum Short {
    /// The byte limit: this many bytes over.
    Limit(u64),
    /// The device has no memory left; what the growth needs, bytes.
    Driver(DriverError, u64),
    /// Every slot of the slab table is taken and nothing free could go.
    Slots,
    /// Something else.
    Fail(PoolError),
}

impl From<PoolError> for Short {
    fn from(error: PoolError) -> Self {
        Self::Fail(error)
    }
}

/// A chunk that was mapped just now.
struct Laying {
    /// Where it begins.
    chunk: u32,
    spare: Spare,
    /// It came from elsewhere in the pool.
    moved: bool,
}

/// How far `bytes` more would go over the byte limit.
pub(crate) fn over_limit(state: &State, bytes: u64) -> Option<u64> {
    let limit = state.limit_bytes?;
    let after = state.reserved_bytes().saturating_add(bytes);
    (after > limit).then(|| after - limit)
}

/// A driver error while `bytes` bytes were wanted.
pub(crate) fn short(error: DriverError, bytes: u64) -> Short {
    if error.is_out_of_memory() { Short::Driver(error, bytes) } else { Short::Fail(error.into()) }
}

impl Shared {
    /// Takes from the driver what the request lacks. `stitch` (vmm): first take what is free elsewhere in the pool,
    /// busy or not.
    pub(crate) fn grow(
        &self,
        cold: &Cold<'_>,
        request: &Request,
        purpose: Purpose,
        stream: &Stream,
        stitch: bool,
        notices: &mut Notices,
    ) -> Result<(), Short> {
        self.driver.bind().map_err(PoolError::from)?;
        match self.config.mode {
            PoolMode::Vmm => self.grow_chunks(cold, request, purpose, stream, stitch, notices),
            PoolMode::Slab => self.grow_slab(cold, request, purpose, notices),
        }
    }

    // ---- vmm

    fn grow_chunks(
        &self,
        cold: &Cold<'_>,
        request: &Request,
        purpose: Purpose,
        stream: &Stream,
        stitch: bool,
        notices: &mut Notices,
    ) -> Result<(), Short> {
        let heap = purpose.index();
        let plan = {
            let mut state = self.lock();
            let key = self.stream_key(&mut state, stream);
            state.heaps[heap].plan_growth(request, key)
        };
        let Some(Growth { segment, chunks, window }) = plan else {
            return self.reserve_range(request, 0, heap);
        };
        let bytes: u64 = chunks.iter().map(|r| r.len() as u64 * self.chunk_bytes).sum();
        let wanted = [(segment, chunks)];
        self.gather_idle(cold, self.lack(heap, &wanted).0, &window, notices);
        if stitch {
            let over = self.lack(heap, &wanted).1;
            self.gather(cold, over, &window, notices)?;
        }
        let (lack, over) = self.lack(heap, &wanted);
        if over > 0 {
            return Err(Short::Limit(over));
        }
        let mapped = match self.map_chunks(cold, heap, segment, &wanted[0].1) {
            // No limit told how short it would be: all that is free may be needed.
            Err(error) if stitch && error.is_out_of_memory() => {
                if self.gather(cold, lack, &window, notices)? == 0 {
                    return Err(short(error, lack));
                }
                self.map_chunks(cold, heap, segment, &wanted[0].1)
            }
            mapped => mapped,
        };
        mapped.map_err(|e| short(e, self.lack(heap, &wanted).0.max(self.chunk_bytes)))?;
        tracing::debug!(pool = self.id.0, bytes, segment = segment.index(), epoch = self.epoch_now(), "mapped");
        Ok(())
    }

    /// Puts pages under chunks, all or none, and tells the heap. Chunks that wait for a range go first.
    pub(crate) fn map_chunks(
        &self,
        cold: &Cold<'_>,
        heap: usize,
        segment: SegmentKey,
        chunks: &[Range<u32>],
    ) -> Result<(), DriverError> {
        self.map_pages(cold, heap, segment, chunks)?;
        let mut state = self.lock();
        for range in chunks {
            let backed = state.heaps[heap].back(segment, range.clone());
            debug_assert!(backed.is_ok(), "the plan named unbacked chunks: {backed:?}");
            state.tie_chunks(heap, segment, range.clone());
        }
        state.counters.growths += 1;
        state.note_reserved();
        Ok(())
    }

    /// Puts pages under chunks, all or none. The heap's books do not know yet.
    pub(crate) fn map_pages(
        &self,
        cold: &Cold<'_>,
        heap: usize,
        segment: SegmentKey,
        chunks: &[Range<u32>],
    ) -> Result<(), DriverError> {
        self.driver.bind()?;
        let (base, stretches, laid) = {
            let mut state = self.lock();
            let base = match state.segment_backing(heap, segment) {
                Some(Backing::Range { ptr, .. }) => *ptr,
                _ => {
                    return Err(DriverError::new("map", self.device, DriverErrorKind::InvalidValue("no such segment")));
                }
            };
            let stretches = state.stretches(heap, segment, chunks);
            let mut spare: Vec<u64> = state.spare.iter().map(|s| s.bytes).collect();
            let laid = lay(&mut spare, &stretches, self.chunk_bytes);
            (base, stretches, laid)
        };
        self.give_misfits(cold, &laid.misfits)?;
        let at = |chunk: u32| DevicePtr(base.0 + u64::from(chunk) * self.chunk_bytes);
        let access = self.access(heap);
        let mut done: Vec<Laying> = Vec::new();
        let mut mapped = || -> Result<(), DriverError> {
            let mut largest = u64::MAX;
            let mut stretches = stretches.iter().peekable();
            for range in chunks {
                while let Some(stretch) = stretches.next_if(|(stretch, _)| stretch.start < range.end) {
                    self.map_stretch(heap, stretch, &at, &mut largest, &mut done)?;
                }
                let bytes = range.len() * self.chunk_bytes as usize;
                self.driver.set_access(at(range.start), bytes, &access)?;
            }
            Ok(())
        };
        if let Err(error) = mapped() {
            // Nobody has seen these pages: nothing to wait for.
            if crate::mutant::is("failed-map-leaks") {
                return Err(error);
            }
            for Laying { chunk, spare, moved } in done {
                if moved {
                    self.undo_move(at(chunk), spare);
                } else {
                    self.undo_map(at(chunk), spare);
                }
            }
            return Err(error);
        }
        let mut state = self.lock();
        let state = &mut *state;
        state.tally.segments.add(done.len() as u64);
        if let Some(Backing::Range { chunks: bundles, .. }) = state.segment_backing(heap, segment) {
            for Laying { chunk, spare, .. } in done {
                let count = (spare.bytes / self.chunk_bytes) as u32;
                let bundle = NonZeroU32::new(count).map(|count| Bundle { handle: spare.handle, first: chunk, count });
                if let Some(places) = bundles.get_mut(chunk as usize..(chunk + count) as usize) {
                    places.fill(bundle);
                }
            }
        }
        Ok(())
    }

    /// Maps chunks one after another: those that wait for a range first, the largest that fits.
    fn map_stretch(
        &self,
        heap: usize,
        (chunks, bundles): &Stretch,
        at: &dyn Fn(u32) -> DevicePtr,
        largest: &mut u64,
        done: &mut Vec<Laying>,
    ) -> Result<(), DriverError> {
        let purpose = Purpose::ALL[heap.min(Purpose::ALL.len() - 1)];
        let bytes = chunks.len() as u64 * self.chunk_bytes;
        let mut chunk = chunks.start;
        while chunk < chunks.end {
            let left_bytes = u64::from(chunks.end - chunk) * self.chunk_bytes;
            let gap = Gap { purpose, bytes, left_bytes };
            let waiting = self.lock().take_spare(if *bundles { left_bytes } else { self.chunk_bytes });
            let (spare, moved) = match waiting {
                Some(spare) => (spare, true),
                None => {
                    let gap = if *bundles { gap } else { Gap { left_bytes: self.chunk_bytes, ..gap } };
                    let (handle, bytes) = self.make_chunk(gap, largest)?;
                    (Spare { handle, bytes }, false)
                }
            };
            if let Err(error) = self.driver.map(at(chunk), spare.bytes as usize, 0, spare.handle) {
                if moved {
                    self.lock().spare.push(spare);
                } else {
                    self.release_chunk(spare);
                }
                return Err(error);
            }
            done.push(Laying { chunk, spare, moved });
            chunk += (spare.bytes / self.chunk_bytes) as u32;
        }
        Ok(())
    }

    /// Address space for a heap that has too little. Asks for less where the driver refuses.
    pub(crate) fn reserve_range(&self, request: &Request, more_bytes: u64, heap: usize) -> Result<(), Short> {
        let chunk = self.chunk_bytes;
        let round = |bytes: u64| bytes.div_ceil(chunk).checked_mul(chunk);
        let least = request.bytes().saturating_add(more_bytes);
        let needed = least.checked_add(chunk.max(GRANULE_SLACK)).and_then(round);
        let Some(needed) = needed.filter(|&n| n <= 1 << 47) else {
            return Err(Short::Fail(PoolError::TooLarge {
                requested: request.requested_bytes() as usize,
                element_bytes: 1,
            }));
        };
        let wish = self.config.reserve_bytes.unwrap_or_else(|| self.driver.info().total_bytes.saturating_mul(2)) as u64;
        let mut bytes = round(wish).unwrap_or(needed).clamp(needed, 1 << 47);
        let (ptr, bytes) = loop {
            match self.driver.address_reserve(bytes as usize, chunk as usize, None) {
                Ok(ptr) => break (ptr, bytes),
                Err(error) if bytes <= needed => return Err(short(error, needed)),
                Err(_) => bytes = round(bytes / 2).unwrap_or(needed).max(needed),
            }
        };
        let mut state = self.lock();
        match state.heaps[heap].reserve_segment(ptr.0, bytes, chunk) {
            Ok(segment) => {
                let chunks = vec![None; (bytes / chunk) as usize];
                *state.segment_backing(heap, segment) = Some(Backing::Range { ptr, bytes, chunks });
                Ok(())
            }
            Err(_) => {
                drop(state);
                self.free_range(ptr, bytes);
                Err(Short::Fail(PoolError::Internal("the driver reserved a range that the heap can not use")))
            }
        }
    }

    // ---- slab

    fn grow_slab(
        &self,
        cold: &Cold<'_>,
        request: &Request,
        purpose: Purpose,
        notices: &mut Notices,
    ) -> Result<(), Short> {
        let heap = purpose.index();
        self.free_slot(cold, notices)?;
        // Where the rounded slab does not fit, one that just holds the request may.
        let least = request.bytes() + request.align_bytes();
        let smallest = self.config.slab_bytes as u64;
        let mut bytes = if smallest < USUAL_SLAB_BYTES {
            // Somebody counts every byte: no slab is larger than it must be.
            least.max(smallest)
        } else {
            self.lock().heaps[heap].plan_slab(request).max(smallest)
        };
        let outgrown = {
            let mut state = self.lock();
            let state = &mut *state;
            let keep = bytes / 100 * self.config.slab_cached_percent as u64;
            let streams = &state.streams;
            state.heaps[heap].claim_outgrown(keep.max(1), &|k| State::usable(streams, k))
        };
        if !outgrown.is_empty() {
            let parcels = outgrown.into_iter().map(|claim| Parcel::claim(heap, claim)).collect();
            self.give_back(cold, parcels, Reason::GarbageCollection, Patience::Skip, notices)?;
        }
        if let Some(over) = over_limit(&self.lock(), bytes) {
            if bytes - least.min(bytes) < over {
                return Err(Short::Limit(over - (bytes - least.min(bytes))));
            }
            bytes = least;
        }
        let ptr = match self.driver.malloc(bytes as usize) {
            Err(error) if error.is_out_of_memory() && bytes > least => {
                bytes = least;
                self.driver.malloc(bytes as usize)
            }
            other => other,
        };
        let ptr = ptr.map_err(|e| short(e, bytes))?;
        let mut state = self.lock();
        match state.heaps[heap].add_segment(ptr.0, bytes) {
            Ok(segment) => {
                *state.segment_backing(heap, segment) = Some(Backing::Slab { ptr, bytes });
                state.tally.segments.add(1);
                state.counters.growths += 1;
                state.note_reserved();
                drop(state);
                tracing::debug!(
                    pool = self.id.0,
                    bytes,
                    segment = segment.index(),
                    epoch = self.epoch_now(),
                    "slab allocated"
                );
                Ok(())
            }
            Err(_) => {
                drop(state);
                self.free_slab(ptr);
                Err(Short::Fail(PoolError::Internal("the driver handed out a slab that the heap can not use")))
            }
        }
    }

    /// Makes room in a full slab table: a slab goes back, by the one function.
    fn free_slot(&self, cold: &Cold<'_>, notices: &mut Notices) -> Result<(), Short> {
        let claim: Option<(usize, Claim)> = {
            let mut state = self.lock();
            let state = &mut *state;
            let slabs: usize = state.heaps.iter().map(|h| h.segments().count()).sum();
            if slabs < self.config.slab_slots {
                return Ok(());
            }
            let streams = &state.streams;
            state
                .heaps
                .iter_mut()
                .enumerate()
                .find_map(|(i, h)| Some((i, h.claim_slabs(1, &|k| State::usable(streams, k)).into_iter().next()?)))
        };
        let Some((heap, claim)) = claim else { return Err(Short::Slots) };
        self.give_back(cold, vec![Parcel::claim(heap, claim)], Reason::SlotTable, Patience::Skip, notices)?;
        Ok(())
    }

    pub(crate) fn epoch_now(&self) -> u64 {
        self.lock().counters.epoch_bumps
    }

    pub(crate) fn keep_leftover(&self, leftover: Leftover) {
        let mut state = self.lock();
        state.leftovers.push(leftover);
        state.note_reserved();
    }
}

/// The smallest slab that is usual; a pool that is set to less plans tightly.
const USUAL_SLAB_BYTES: u64 = 2 << 20;

/// Address space on top of a request, so that alignment never makes it miss.
const GRANULE_SLACK: u64 = 2 << 20;
