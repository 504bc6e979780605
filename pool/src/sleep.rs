//! Sleep and wake (vmm): all pages of a purpose go back to the driver and come again under the same addresses.
//!
//! A purpose is a heap, and a heap sleeps as a whole. Going down, under the cold lock:
//! 1. the heap hands nothing out any more, every used block gets a record, and every record says "asleep": from here on
//!    walks refuse, with a reason of their own and not with *retiring*, since this may take long;
//! 2. the give-back: graphs that depend on a record or share an arena there are retired (mark, bump, fence, leases), and the
//!    host waits for every stream that the pool knows. A live slice does not tell the pool which streams use it right
//!    now; besides, whoever lets memory sleep wants all of it to be quiet;
//! 3. bytes that are kept are copied down (`kept.rs`): those of live slices, and of what graphs read although its owner is
//!    gone. Scratch that only graphs hold is not worth it: they write it first;
//! 4. all chunks are unmapped, and `backing` moves for all records, `content` for those whose bytes were not copied.
//!
//! While it sleeps the heap's books still say "backed" for every chunk in which somebody has a byte. Frees change
//! blocks as ever. Waking (`wake.rs`) takes the chunks off that became wholly free, maps the rest, copies back what still
//! is the same allocation, and lets the heap hand out again. If that fails half way, pages go again and everything sleeps
//! on.
//!
//! An unmap that fails half way leaves the heap asleep with some chunks still mapped, and the error says so: the bytes are
//! safe on the host, the chunks that went may be somebody else's by now, and a second call takes the rest. That is the one
//! failure after which the state is not as before.
//!
//! Free chunks are not given back beforehand: the heap goes as a whole anyway, and step 4 takes them too. Nor is there a
//! bump when a heap wakes: nothing that was proven before it slept is proven still.

use std::ops::Range;

use crate::alloc::keeps_addresses;
use crate::core::{BlockKey, SegmentKey, StreamKey, Uses, runs};
use crate::driver::DriverError;
use crate::give_back::{Parcel, Reason};
use crate::handshake::{Begun, Cleared, Patience, begin};
use crate::kept::Saved;
use crate::retire::Victim;
use crate::shared::{Cold, Notices, Shared};
use crate::state::{Backing, Home, Record, Standing, State};
use crate::{PoolError, Purpose, RetireReason, mutant};

/// What becomes of the bytes of memory that [sleeps](crate::Pool::sleep).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Content {
    /// They are lost: the `content` of every token moves.
    Drop,
    /// They are kept in plain host memory.
    Keep,
    /// They are kept in page-locked host memory: faster both ways, and dearer to get.
    KeepPinned,
}

/// A heap that sleeps, or is about to.
#[derive(Debug)]
pub(crate) struct Sleeping {
    /// Bytes whose chunks are still mapped: all until the unmap, none after it unless it failed.
    pub(crate) mapped_bytes: u64,
    /// The arenas that have memory in it.
    pub(crate) arenas: Uses,
    /// Its pages went, and its generations moved.
    pub(crate) down: bool,
    pub(crate) saved: Option<Saved>,
}

/// A heap on its way down: what the give-back is told.
#[derive(Debug)]
pub(crate) struct Bed {
    pub(crate) heap: usize,
    pub(crate) content: Content,
    pub(crate) saved: Option<Saved>,
    /// Records whose bytes are in `saved`, ascending.
    pub(crate) kept: Vec<usize>,
}

/// Chunks, segment by segment.
pub(crate) type Chunks = Vec<(SegmentKey, Vec<Range<u32>>)>;

impl Shared {
    pub(crate) fn sleep(&self, content: Content, purposes: &[Purpose]) -> Result<usize, PoolError> {
        if !keeps_addresses(self.config.mode) {
            return Err(PoolError::Unsupported { device: self.device, what: "sleep in the slab mode; use vmm" });
        }
        self.may_call_driver("a sleep")?;
        self.settle();
        let mut notices = Notices::default();
        let heaps = heaps(purposes);
        let result = {
            let gate = self.books().shut_gate()?;
            let cold = self.cold();
            self.retry_leftovers(&cold, &mut notices);
            let lain = self.lie_down(&heaps);
            drop(gate);
            let result = lain.and_then(|()| self.sleep_cold(&cold, content, &heaps, &mut notices));
            self.retry_leftovers(&cold, &mut notices);
            result
        };
        notices.deliver();
        result
    }

    fn sleep_cold(
        &self,
        cold: &Cold<'_>,
        content: Content,
        heaps: &[usize],
        notices: &mut Notices,
    ) -> Result<usize, PoolError> {
        let bed = |&heap: &usize| Parcel::Sleep(Bed { heap, content, saved: None, kept: Vec::new() });
        let result = self.give_back(cold, heaps.iter().map(bed).collect(), Reason::Sleep, Patience::Wait, notices);
        self.note_awake();
        // Chunks without a range are nobody's to keep.
        let bytes = result? + self.give_spare(cold, u64::MAX)?;
        let state = self.lock();
        if heaps.iter().any(|&heap| state.sleeping[heap].as_ref().is_none_or(|s| !s.down)) {
            return Err(PoolError::Internal("memory that should sleep was being retired"));
        }
        Ok(bytes as usize)
    }

    /// Nothing new is handed out, no call of this crate queues work on it, no walk succeeds. The gate is shut.
    fn lie_down(&self, heaps: &[usize]) -> Result<(), PoolError> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.graphs.iter().any(|(_, g)| g.window.is_some()) {
            return Err(PoolError::Capturing { what: "a sleep" });
        }
        for &heap in heaps {
            if state.sleeping[heap].is_some() {
                continue;
            }
            let books = &mut state.heaps[heap];
            books.set_asleep(!mutant::is("sleeping-heap-hands-out"));
            let (mapped_bytes, arenas) = (books.backed_bytes(), books.private_tags());
            let blocks: Vec<BlockKey> = books.used_blocks();
            state.sleeping[heap] = Some(Sleeping { mapped_bytes, arenas, down: false, saved: None });
            for block in blocks {
                let record = state.record_of_block(Home { heap, block });
                if let Some(record) = record.and_then(|r| state.records.get_mut(r)) {
                    record.asleep = true;
                }
            }
        }
        self.books().tell_asleep(state);
        Ok(())
    }

    /// Tells who queues work of what woke, or did not fall asleep after all. Drops records that nobody needs.
    pub(crate) fn note_awake(&self) {
        let mut state = self.lock();
        self.books().tell_asleep(&state);
        let idle = |(index, r): (usize, &Record)| {
            let idle = r.home().is_some() && r.holders.is_empty() && r.standing == Standing::Live && !r.asleep;
            idle.then_some(index)
        };
        let idle: Vec<usize> = state.records.iter().filter_map(idle).collect();
        for index in idle {
            state.drop_record(index);
        }
    }

    // ---- what the give-back calls

    /// No graph launches on the heap from here on. Adds whom to wait for.
    pub(crate) fn shut_heap(&self, heap: usize, uses: &mut Uses) -> Option<(Victim, Cleared)> {
        let mut state = self.lock();
        let arenas = state.sleeping[heap].as_ref().filter(|s| !s.down)?.arenas.clone();
        if !mutant::is("sleep-forgets-streams") {
            let known = state.streams.iter().enumerate().filter(|(_, slot)| slot.stream.is_some());
            known.for_each(|(key, _)| uses.insert(StreamKey(key as u32)));
        }
        let inside = |(index, r): (usize, &Record)| r.home().is_some_and(|home| home.heap == heap).then_some(index);
        let records = state.records.iter().filter_map(inside).collect();
        let victim = Victim { records, arenas, ..Victim::default() };
        match begin(&mut *state, &victim) {
            Begun::Cleared(cleared) => Some((victim, cleared)),
            Begun::Taken => None,
            Begun::Held(held) => {
                // The mark stays; the lock does not: the holder's slow path needs it.
                drop(state);
                Some((victim, held.wait()))
            }
        }
    }

    /// Unmaps everything, and moves the generations.
    pub(crate) fn send_to_sleep(
        &self,
        bed: Bed,
        retired: Option<(Victim, Cleared)>,
        notices: &mut Notices,
    ) -> Result<u64, (u64, DriverError)> {
        let heap = bed.heap;
        let first = self.lock().sleeping[heap].as_ref().is_some_and(|s| !s.down);
        if first && retired.is_none() {
            self.lock().stay_awake(bed);
            return Ok(0);
        }
        let mapped = self.lock().mapped_chunks(heap);
        let (gone, failed) = self.unmap_all(heap, &mapped);
        let mut state = self.lock();
        let state = &mut *state;
        let left_bytes = state.mapped_bytes(heap, self.chunk_bytes);
        if let Some((victim, cleared)) = retired {
            if let Some(error) = &failed
                && gone == 0
            {
                let error = error.clone();
                state.stay_awake(bed);
                cleared.abandon(state, &victim);
                return Err((0, error));
            }
            cleared.commit(state, &victim, |state| {
                for &record in &victim.records {
                    if bed.kept.binary_search(&record).is_ok() || mutant::is("dropped-content-unnoticed") {
                        state.change_pages(record, RetireReason::Asleep, notices);
                    } else {
                        state.change(record, RetireReason::Asleep, notices);
                    }
                }
            });
            state.counters.sleeps += 1;
        }
        if let Some(sleeping) = &mut state.sleeping[heap] {
            sleeping.down = true;
            sleeping.mapped_bytes = left_bytes;
            if first {
                sleeping.saved = bed.saved;
            }
        }
        // What wakes gets chunks anew, of what sizes ever.
        state.tie_heap(heap);
        if left_bytes == 0 {
            state.forget_pages(heap, self.chunk_bytes);
        }
        state.note_reserved();
        tracing::info!(pool = self.id.0, bytes = gone, purpose = ?Purpose::ALL[heap], content = ?bed.content, "asleep");
        match failed {
            None => Ok(gone),
            Some(error) => Err((gone, error)),
        }
    }

    pub(crate) fn unmap_all(
        &self,
        heap: usize,
        chunks: &[(SegmentKey, Vec<Range<u32>>)],
    ) -> (u64, Option<DriverError>) {
        let mut gone = 0;
        for (segment, ranges) in chunks {
            for range in ranges {
                let (bytes, error) = self.unmap_chunks(heap, *segment, range.clone(), Reason::Sleep);
                gone += bytes;
                if error.is_some() {
                    return (gone, error);
                }
            }
        }
        (gone, None)
    }

    // ---- waking
}

impl State {
    /// Refuses what needs memory that sleeps.
    pub(crate) fn awake(&self, purpose: Purpose, what: &'static str) -> Result<(), PoolError> {
        let asleep = self.heaps[purpose.index()].is_asleep();
        if asleep { Err(PoolError::Asleep { purpose, what }) } else { Ok(()) }
    }

    /// Of what is live or held: what takes no memory now.
    pub(crate) fn asleep_bytes(&self) -> u64 {
        let of_heap = |heap: usize| {
            let bytes = |block: BlockKey| match self.growing.get(&Home { heap, block }) {
                Some(growing) => growing.allocated_bytes,
                None => self.heaps[heap].span(block).map_or(0, |span| span.1),
            };
            self.heaps[heap].used_blocks().into_iter().map(bytes).sum::<u64>()
        };
        (0..self.heaps.len()).filter(|&heap| self.heaps[heap].is_asleep()).map(of_heap).sum()
    }

    /// Takes off a sleeping heap's books what nobody will need when it wakes.
    pub(crate) fn forget_pages(&mut self, heap: usize, chunk_bytes: u64) {
        for (home, chunks) in self.surplus_of(heap, chunk_bytes) {
            for range in chunks {
                let done = self.heaps[heap].unback_used(home.block, range);
                debug_assert!(done.is_ok(), "a surplus lies inside its block: {done:?}");
            }
        }
        self.heaps[heap].unback_free();
    }

    /// The heap does not sleep after all.
    pub(crate) fn stay_awake(&mut self, bed: Bed) {
        self.leftovers.extend(bed.saved.and_then(Saved::into_leftover));
        if self.sleeping[bed.heap].as_ref().is_some_and(|s| !s.down) {
            self.rouse(bed.heap);
        }
    }

    /// The heap hands out again.
    pub(crate) fn rouse(&mut self, heap: usize) {
        self.sleeping[heap] = None;
        self.heaps[heap].set_asleep(false);
        for (_, record) in &mut self.records {
            record.asleep &= record.home().is_none_or(|home| home.heap != heap);
        }
    }

    /// The chunks of a heap that are mapped.
    fn mapped_chunks(&self, heap: usize) -> Chunks {
        let mapped = |key: SegmentKey| match self.backing[heap].get(key.index()) {
            Some(Some(Backing::Range { chunks, .. })) => {
                let there = chunks.iter().enumerate().filter(|(_, handle)| handle.is_some());
                runs(there.map(|(chunk, _)| chunk as u32))
            }
            _ => Vec::new(),
        };
        self.heaps[heap].segments().map(|s| (s.key, mapped(s.key))).filter(|(_, runs)| !runs.is_empty()).collect()
    }

    pub(crate) fn mapped_bytes(&self, heap: usize, chunk_bytes: u64) -> u64 {
        chunks_in(&self.mapped_chunks(heap)) * chunk_bytes
    }
}

/// The heaps of some purposes; of all, if none is named. Each once.
pub(crate) fn heaps(purposes: &[Purpose]) -> Vec<usize> {
    let named = |purpose: &Purpose| purposes.is_empty() || purposes.contains(purpose);
    Purpose::ALL.iter().filter(|p| named(p)).map(|p| p.index()).collect()
}

pub(crate) fn chunks_in(chunks: &Chunks) -> u64 {
    chunks.iter().flat_map(|(_, ranges)| ranges).map(|range| range.len() as u64).sum()
}
