//! Who has to give when memory is short, and what a trim takes.
//!
//! In this order, and never more than is needed:
//! 1. vmm: free chunks, moved under the range that lacks them (see `stitch.rs`; blocks were already joined across
//!    streams by then);
//! 2. slab: free slabs that no graph depends on;
//! 3. vmm: what growable slices no longer need; then the pages under what idle graphs hold weakly, moved likewise, which a remap brings back; slab: those blocks
//!    themselves;
//! 4. idle graphs, cheapest to rebuild first, for what they hold strongly;
//! 5. slab: whole slabs that graphs still depend on weakly, fewest graphs first.
//!
//! Graphs between check and launch are passed over at first, and waited for only when nothing else is left.

use std::ops::Range;

use crate::alloc::{GRANULE_BYTES, keeps_addresses};
use crate::core::{BlockState, Heap, Request, SegmentKey};
use crate::give_back::{Parcel, Reason};
use crate::growth::Short;
use crate::handshake::Patience;
use crate::shared::{Cold, Notices, Shared};
use crate::state::{Home, NONE, Record, Standing, State};
use crate::{PoolError, Purpose, RetireReason, Stream};

/// What is missing.
pub(crate) struct Need<'a> {
    pub(crate) short_bytes: u64,
    /// A request that would also be served by memory in its own heap.
    pub(crate) request: Option<(&'a Request, Purpose, &'a Stream)>,
    /// The graph that the memory is for: it does not pay itself.
    pub(crate) keep: Option<usize>,
}

impl Shared {
    /// Makes some room for a request that is `short_bytes` short. `false`: nobody has anything left to give.
    pub(crate) fn relieve(&self, cold: &Cold<'_>, need: &Need<'_>, notices: &mut Notices) -> Result<bool, PoolError> {
        let short_bytes = need.short_bytes;
        if !self.could_fit(need) {
            return Ok(false);
        }
        tracing::info!(pool = self.id.0, short_bytes, "an allocation failed: memory is given up for it");
        let own = need.request.map(|(_, purpose, _)| purpose);
        if keeps_addresses(self.config.mode) {
            // The free chunks around the place of a request were taken before; here they are needed elsewhere.
            if own.is_none() && self.gather(cold, short_bytes, &(0..0), notices)? > 0 {
                return Ok(true);
            }
        } else if self.give_free(cold, short_bytes, own, Reason::OutOfMemory, notices)? > 0 {
            return Ok(true);
        }
        for patience in [Patience::Skip, Patience::Wait] {
            if keeps_addresses(self.config.mode) {
                if self.give_surplus(cold, short_bytes, Reason::Move, patience, notices)? > 0 {
                    return Ok(true);
                }
                if self.give_pages(cold, short_bytes, need.keep, patience, Reason::Move, notices)? > 0 {
                    return Ok(true);
                }
            } else if let Some((request, purpose, stream)) = need.request
                && self.reissue(request, purpose, stream, patience, notices)
            {
                return Ok(true);
            }
            if self.evict_cheapest(need.keep, patience, notices) {
                return Ok(true);
            }
            if self.give_slab_with_dependents(cold, short_bytes, patience, Reason::OutOfMemory, notices)? > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes room for pages under a place that has its addresses already, after `bytes` bytes of them fell short. The
    /// graph `keep` does not pay.
    ///
    /// # Errors
    /// What it fell short of, if that was no lack of memory; `OutOfMemory` if nobody has anything left to give.
    pub(crate) fn make_room(
        &self,
        cold: &Cold<'_>,
        shortage: Short,
        bytes: u64,
        heap: usize,
        keep: Option<usize>,
        notices: &mut Notices,
    ) -> Result<(), PoolError> {
        let (short_bytes, driver) = match shortage {
            Short::Limit(over) => (over, None),
            Short::Driver(error, bytes) => (bytes, Some(error)),
            Short::Slots => (bytes, None),
            Short::Fail(error) => return Err(error),
        };
        if self.relieve(cold, &Need { short_bytes, request: None, keep }, notices)? {
            return Ok(());
        }
        let purpose = Purpose::ALL[heap.min(Purpose::ALL.len() - 1)];
        Err(self.out_of_memory(bytes as usize, purpose, driver))
    }

    /// Whether giving could help at all: memory is not flushed for a request that can never fit.
    pub(crate) fn could_fit(&self, need: &Need<'_>) -> bool {
        let request_bytes = need.request.map_or(0, |(request, ..)| request.bytes());
        let state = self.lock();
        // What sleeps takes no memory.
        let live = state.tally.allocated.current.saturating_sub(state.asleep_bytes());
        let most = state.limit_bytes.unwrap_or(u64::MAX).min(self.driver.info().total_bytes as u64);
        if live.saturating_add(request_bytes) > most {
            return false;
        }
        if need.short_bytes == 0 {
            return true;
        }
        let free: u64 = state.heaps.iter().filter(|h| !h.is_asleep()).map(|h| h.stats().free_bytes).sum();
        free + state.tally.held.current + state.surplus_bytes(self.chunk_bytes) >= need.short_bytes
    }

    /// Step 1: whole free chunks or slabs, just enough. A heap's own free memory goes last when it is its own
    /// request that misses.
    pub(crate) fn give_free(
        &self,
        cold: &Cold<'_>,
        want_bytes: u64,
        own: Option<Purpose>,
        reason: Reason,
        notices: &mut Notices,
    ) -> Result<u64, PoolError> {
        let parcels = {
            let mut state = self.lock();
            let state = &mut *state;
            let streams = &state.streams;
            let usable = |k| State::usable(streams, k);
            let mut order = [0, 1, 2];
            order.sort_by_key(|&h| own.is_some_and(|p| p.index() == h));
            let mut parcels = Vec::new();
            let mut claimed = 0;
            let vmm = keeps_addresses(state.mode);
            let bundles = vmm && state.heaps.iter().any(Heap::has_bundles);
            // Bundles that hold more than is wanted only where nothing else is left.
            for beyond in [false, true].into_iter().take(1 + usize::from(bundles)) {
                for heap in order {
                    if claimed >= want_bytes {
                        break;
                    }
                    let books = &mut state.heaps[heap];
                    let claims = if vmm {
                        books.claim_chunks(want_bytes - claimed, &(0..0), &usable, beyond)
                    } else {
                        books.claim_slabs(want_bytes - claimed, &usable)
                    };
                    for claim in claims {
                        claimed += claim.bytes;
                        parcels.push(Parcel::claim(heap, claim));
                    }
                }
            }
            parcels
        };
        self.give_back(cold, parcels, reason, Patience::Skip, notices)
    }

    /// Step 3, vmm: pages under weakly held blocks.
    fn give_pages(
        &self,
        cold: &Cold<'_>,
        want_bytes: u64,
        keep: Option<usize>,
        patience: Patience,
        reason: Reason,
        notices: &mut Notices,
    ) -> Result<u64, PoolError> {
        let mut freed = 0;
        // One block at a time: what is enough is known only afterwards, because leases may be in the way.
        let mut passed: Vec<usize> = Vec::new();
        while freed < want_bytes {
            let Some(parcel) = self.pick_pages(want_bytes - freed, keep, &passed) else { break };
            if let Parcel::Pages { record, .. } = &parcel {
                passed.push(*record);
            }
            freed += self.give_back(cold, vec![parcel], reason, patience, notices)?;
        }
        Ok(freed)
    }

    fn pick_pages(&self, want_bytes: u64, keep: Option<usize>, passed: &[usize]) -> Option<Parcel> {
        let state = self.lock();
        type Rank = (usize, bool, u64);
        let mut best: Option<(Rank, usize, Home, Vec<Range<u32>>)> = None;
        for (index, record) in &state.records {
            let kept = record.holders.iter().any(|h| Some(h.graph) == keep);
            if kept || passed.contains(&index) || !takeable(&state, record) {
                continue;
            }
            let Some(home) = record.home() else { continue };
            let chunks = state.heaps[home.heap].chunks_inside(home.block);
            let bytes = chunks.iter().map(|r| r.len() as u64).sum::<u64>() * self.chunk_bytes;
            if bytes == 0 {
                continue;
            }
            // Fewest graphs; then the smallest that is enough, else the largest.
            let rank =
                (record.holders.len(), bytes < want_bytes, if bytes < want_bytes { u64::MAX - bytes } else { bytes });
            if best.as_ref().is_none_or(|(b, ..)| rank < *b) {
                best = Some((rank, index, home, chunks));
            }
        }
        let (_, record, home, chunks) = best?;
        let segment = state.heaps[home.heap].block(home.block)?.segment;
        let mut left = want_bytes.div_ceil(self.chunk_bytes.max(1));
        let mut enough = Vec::new();
        for range in chunks {
            let take = left.min(range.len() as u64) as u32;
            if take > 0 {
                let end = state.heaps[home.heap].bundle(segment, range.start + take - 1).end;
                enough.push(range.start..end);
            }
            left -= u64::from(take);
        }
        Some(Parcel::Pages { record, home, segment, chunks: enough })
    }

    /// Step 3, slab: the run of free and weakly held blocks that fits and that the fewest graphs depend on.
    fn reissue(
        &self,
        request: &Request,
        purpose: Purpose,
        stream: &Stream,
        patience: Patience,
        notices: &mut Notices,
    ) -> bool {
        let run = {
            let mut state = self.lock();
            let key = self.stream_key(&mut state, stream);
            let heap = purpose.index();
            let mut best: Option<(usize, Vec<usize>)> = None;
            let segments: Vec<SegmentKey> = state.heaps[heap].segments().map(|s| s.key).collect();
            for segment in segments {
                // Bytes and record of each block of the current run.
                let mut run: Vec<(u64, Option<usize>)> = Vec::new();
                let mut bytes = 0;
                for block in state.heaps[heap].blocks_of(segment) {
                    let record = state.info(Home { heap, block: block.key }).record;
                    let member = match block.state {
                        BlockState::Free => {
                            block.uses.iter().all(|k| k == key || State::usable(&state.streams, k)).then_some(None)
                        }
                        BlockState::Used if record != NONE => state
                            .records
                            .get(record as usize)
                            .filter(|r| takeable(&state, r))
                            .map(|_| Some(record as usize)),
                        _ => None,
                    };
                    let Some(member) = member else {
                        run.clear();
                        bytes = 0;
                        continue;
                    };
                    run.push((block.bytes, member));
                    bytes += block.bytes;
                    while run.first().is_some_and(|&(first, _)| {
                        bytes - first >= request.bytes() + (request.align_bytes() - GRANULE_BYTES)
                    }) {
                        bytes -= run.remove(0).0;
                    }
                    if bytes >= request.bytes() + (request.align_bytes() - GRANULE_BYTES) {
                        let records: Vec<usize> = run.iter().filter_map(|&(_, r)| r).collect();
                        let cost = records.iter().filter_map(|&r| state.records.get(r)).map(|r| r.holders.len()).sum();
                        if !records.is_empty() && best.as_ref().is_none_or(|(b, _)| cost < *b) {
                            best = Some((cost, records));
                        }
                    }
                }
            }
            best
        };
        run.is_some_and(|(_, records)| self.take_blocks(&records, RetireReason::Reissued, patience, notices))
    }

    /// Step 4: the cheapest graph that holds memory which nothing gentler can get.
    fn evict_cheapest(&self, keep: Option<usize>, patience: Patience, notices: &mut Notices) -> bool {
        let mut candidates: Vec<(bool, u32, usize)> = {
            let state = self.lock();
            state
                .graphs
                .iter()
                .filter(|(i, g)| !g.evicted && g.window.is_none() && Some(*i) != keep)
                .filter_map(|(index, g)| {
                    let mut own = 0;
                    let mut any = 0;
                    for dep in &g.deps {
                        let Some(record) = state.records.get(dep.record) else { continue };
                        let has_memory = record.standing == Standing::Held && !record.asleep;
                        let Some(home) = record.home().filter(|_| has_memory) else { continue };
                        if record.all_weak() && !keeps_addresses(state.mode) {
                            continue;
                        }
                        let bytes = state.heaps[home.heap].span(home.block).map_or(0, |s| s.1);
                        any += bytes;
                        if record.holders.len() == 1 {
                            own += bytes;
                        }
                    }
                    // Those that free something by themselves first.
                    (any > 0).then_some((own == 0, g.cost_us, index))
                })
                .collect()
        };
        candidates.sort_unstable();
        candidates.into_iter().any(|(_, _, graph)| self.evict(graph, patience, notices))
    }

    /// Step 5, slab: the slab with the fewest dependents, all of them weak and idle.
    fn give_slab_with_dependents(
        &self,
        cold: &Cold<'_>,
        want_bytes: u64,
        patience: Patience,
        reason: Reason,
        notices: &mut Notices,
    ) -> Result<u64, PoolError> {
        if keeps_addresses(self.config.mode) {
            return Ok(0);
        }
        let mut slabs: Vec<(usize, Vec<usize>)> = {
            let state = self.lock();
            let mut slabs = Vec::new();
            for (heap, books) in state.heaps.iter().enumerate() {
                for segment in books.segments() {
                    if let Some(records) = weak_slab(&state, heap, segment.key) {
                        let dependents = records.iter().filter_map(|&r| state.records.get(r)).map(|r| r.holders.len());
                        slabs.push((dependents.sum(), records));
                    }
                }
            }
            slabs
        };
        slabs.sort_by_key(|(dependents, _)| *dependents);
        for (_, records) in slabs {
            if self.take_blocks(&records, RetireReason::GivenBack, patience, notices) {
                return self.give_free(cold, want_bytes, None, reason, notices);
            }
        }
        Ok(0)
    }

    /// Gives memory back until at most `bytes` are held, or nothing more can go without ending a graph.
    pub(crate) fn trim_to(&self, bytes: usize) -> Result<usize, PoolError> {
        self.may_call_driver("a trim")?;
        self.settle();
        let mut notices = Notices::default();
        let result = {
            let cold = self.cold();
            self.retry_leftovers(&cold, &mut notices);
            self.trim_cold(&cold, bytes as u64, &mut notices)
        };
        notices.deliver();
        result
    }

    fn trim_cold(&self, cold: &Cold<'_>, target: u64, notices: &mut Notices) -> Result<usize, PoolError> {
        let start = self.lock().reserved_bytes();
        let over = || self.lock().reserved_bytes().saturating_sub(target);
        self.give_spare(cold, over())?;
        if over() > 0 {
            self.give_free(cold, over(), None, Reason::Trim, notices)?;
        }
        for patience in [Patience::Skip, Patience::Wait] {
            if over() > 0 && keeps_addresses(self.config.mode) {
                self.give_surplus(cold, over(), Reason::Trim, patience, notices)?;
            }
            if over() > 0 && keeps_addresses(self.config.mode) {
                self.give_pages(cold, over(), None, patience, Reason::Trim, notices)?;
            }
            while over() > 0 && self.give_slab_with_dependents(cold, over(), patience, Reason::Trim, notices)? > 0 {}
        }
        // Handles that the driver would not take at once.
        self.retry_leftovers(cold, notices);
        Ok(start.saturating_sub(self.lock().reserved_bytes()) as usize)
    }

    /// The last handle is gone: graphs end, free memory goes back. What live slices need stays.
    pub(crate) fn close(&self) {
        let mut notices = Notices::default();
        {
            let cold = self.cold();
            let graphs: Vec<usize> = {
                let mut state = self.lock();
                state.closed = true;
                state.graphs.iter().filter(|(_, g)| !g.evicted && g.window.is_none()).map(|(i, _)| i).collect()
            };
            for graph in graphs {
                self.evict(graph, Patience::Wait, &mut notices);
            }
            // Silent: what the driver refuses now is tried again with the last slice.
            let _ = self.give_spare(&cold, u64::MAX);
            let _ = self.give_free(&cold, u64::MAX, None, Reason::Drop, &mut notices);
            self.retry_leftovers(&cold, &mut notices);
        }
        notices.deliver();
        let mut state = self.lock();
        let owner = if state.tally.slices.current == 0 { state.owner.take() } else { None };
        drop(state);
        drop(owner);
    }
}

/// Whether a record's memory may be taken from the graphs that hold it.
pub(crate) fn takeable(state: &State, record: &Record) -> bool {
    record.standing == Standing::Held
        && !record.retiring
        && !record.asleep
        && !record.holders.is_empty()
        && record.all_weak()
        && record.holders.iter().all(|h| state.graphs.get(h.graph).is_some_and(|g| g.window.is_none()))
        && record.home().is_some_and(|home| !state.info(home).limbo)
}

/// The records on a slab, if everything on it is free or weakly held, and something is.
fn weak_slab(state: &State, heap: usize, segment: SegmentKey) -> Option<Vec<usize>> {
    let mut records = Vec::new();
    for block in state.heaps[heap].blocks_of(segment) {
        match block.state {
            BlockState::Free if block.uses.iter().all(|k| State::usable(&state.streams, k)) => {}
            BlockState::Used => {
                let record = state.info(Home { heap, block: block.key }).record;
                state.records.get(record as usize).filter(|r| takeable(state, r))?;
                records.push(record as usize);
            }
            _ => return None,
        }
    }
    (!records.is_empty()).then_some(records)
}
