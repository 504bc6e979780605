//! What the pool shows: statistics, the report, whose memory an address is in.

use smallvec::SmallVec;

use crate::core::{BlockState, BlockView, Heap, SegmentView};
use crate::driver::DevicePtr;
use crate::pool::{RangeKind, Resolved};
use crate::report::{Bytes, Holder, MemoryReport};
use crate::shared::Shared;
use crate::state::{Home, NONE, Outside, Site, Standing, State};
use crate::token::Place;
use crate::{AllocationId, Counters, PoolStats, Purpose, Stat, Token};

/// Characters in a segment's strip.
const STRIP_CELLS: usize = 64;
/// Holders and segments in a report.
const MOST_HOLDERS: usize = 8;

impl Shared {
    pub(crate) fn stats(&self) -> PoolStats {
        let mut state = self.lock();
        let split: u64 = state.heaps.iter().map(|h| h.stats().inactive_split_bytes).sum();
        let tally = &mut state.tally;
        tally.split_peak = tally.split_peak.max(split);
        let active = tally.allocated.current + tally.held.current;
        PoolStats {
            allocated_bytes: tally.allocated,
            active_bytes: Stat {
                current: active,
                peak: tally.active_peak.max(active),
                allocated: tally.allocated.allocated + tally.held.allocated,
                freed: tally.allocated.freed + tally.held.freed,
            },
            reserved_bytes: tally.reserved,
            requested_bytes: tally.requested,
            // Totals of a derived quantity mean nothing; current and peak (as seen when asked) do.
            inactive_split_bytes: Stat { current: split, peak: tally.split_peak, allocated: 0, freed: 0 },
            allocations: tally.slices,
            segments: tally.segments,
            num_alloc_retries: tally.retries,
            num_ooms: tally.ooms,
        }
    }

    pub(crate) fn free_bytes(&self, purpose: Purpose) -> usize {
        let state = self.lock();
        let heap = &state.heaps[purpose.index()];
        if heap.is_asleep() { 0 } else { heap.stats().free_bytes as usize }
    }

    pub(crate) fn reset_peaks(&self) {
        let mut state = self.lock();
        let tally = &mut state.tally;
        for stat in
            [&mut tally.allocated, &mut tally.requested, &mut tally.slices, &mut tally.reserved, &mut tally.segments]
        {
            stat.reset_peak();
        }
        tally.active_peak = tally.allocated.current + tally.held.current;
        tally.split_peak = 0;
    }

    pub(crate) fn counters(&self) -> Counters {
        self.lock().counters
    }

    pub(crate) fn report(&self) -> MemoryReport {
        let mut state = self.lock();
        let state = &mut *state;
        let mut free = 0;
        let mut largest = 0;
        let mut cached = 0;
        for heap in state.heaps.iter_mut().filter(|heap| !heap.is_asleep()) {
            let stats = heap.stats();
            free += stats.free_bytes;
            largest = largest.max(stats.largest_free_bytes);
        }
        cached += state.spare.iter().map(|s| s.bytes).sum::<u64>() + state.surplus_bytes(self.chunk_bytes);
        let mut strips = Vec::new();
        for (heap, books) in state.heaps.iter().enumerate() {
            for segment in books.segments() {
                let blocks: Vec<BlockView> = books.blocks_of(segment.key).collect();
                if !books.is_asleep() {
                    cached += cached_bytes(state, books, &segment, &blocks);
                }
                if segment.backed_bytes > 0 && strips.len() < MOST_HOLDERS {
                    let purpose = Purpose::ALL[heap];
                    strips.push(format!("{purpose:?} {:#x} [{}]", segment.base, strip(state, heap, &blocks)));
                }
            }
        }
        let mut holders: Vec<Holder> = Vec::new();
        for (heap, books) in state.heaps.iter().enumerate() {
            let live = books.segments().flat_map(|s| books.blocks_of(s.key).collect::<Vec<_>>());
            for block in live.filter(|b| b.state == BlockState::Used) {
                let home = Home { heap, block: block.key };
                let info = state.info(home);
                let bytes = state.growing.get(&home).map_or(block.bytes, |g| g.allocated_bytes);
                let who = match state.records.get(info.record as usize) {
                    Some(r) if r.standing == Standing::Held => format!("held by {} graph(s)", r.holders.len()),
                    _ => match AllocationId::from_raw(info.allocation) {
                        Some(id) => format!("allocation {id} ({:?})", Purpose::ALL[heap]),
                        None => continue,
                    },
                };
                holders.push(Holder { bytes: bytes as usize, who });
            }
        }
        holders.sort_by_key(|h| std::cmp::Reverse(h.bytes));
        holders.truncate(MOST_HOLDERS);
        let held = state.tally.held.current as usize;
        let mut advice = Vec::new();
        if held > 0 {
            advice.push("drop graphs, or capture with ScratchPolicy::Track or an arena: graphs hold memory");
        }
        if free as usize > largest as usize * 2 {
            advice.push("free memory is in pieces: allocate large blocks early, or use the vmm mode");
        }
        if state.limit_bytes.is_some() {
            advice.push("raise the byte limit");
        }
        advice.push("use a smaller batch or context, or keep some layers on the host");
        MemoryReport {
            pool: self.id,
            mode: self.config.mode,
            device: self.device,
            limit_bytes: state.limit_bytes.map(|b| b as usize),
            reserved_bytes: state.reserved_bytes() as usize,
            allocated_bytes: state.tally.allocated.current as usize,
            requested_bytes: state.tally.requested.current as usize,
            free_bytes: free as usize,
            largest_free_bytes: largest as usize,
            cached_bytes: cached as usize,
            held_by_graphs_bytes: held,
            holders,
            strips,
            advice,
        }
    }

    pub(crate) fn resolve_all(&self, ptr: DevicePtr) -> SmallVec<[Resolved; 2]> {
        let state = self.lock();
        resolve(&state, ptr)
    }

    pub(crate) fn resolve_many(&self, ptrs: &[DevicePtr]) -> Vec<(usize, Resolved)> {
        let state = self.lock();
        let mut found = Vec::new();
        for (index, &ptr) in ptrs.iter().enumerate() {
            found.extend(resolve(&state, ptr).into_iter().map(|resolved| (index, resolved)));
        }
        found
    }

    pub(crate) fn address_span(&self) -> Option<(DevicePtr, DevicePtr)> {
        let state = self.lock();
        let heaps = state.heaps.iter().flat_map(|heap| heap.segments()).map(|s| (s.base, s.base + s.bytes));
        let outside = state.outside.iter().filter_map(|&(base, index)| {
            let record = state.records.get(index)?;
            Some((base, base + record.bytes))
        });
        let (low, high) = heaps.chain(outside).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
        Some((DevicePtr(low), DevicePtr(high)))
    }

    // ---- the books

    pub(crate) fn check(&self) -> Result<(), String> {
        let state = self.lock();
        let mut live = 0;
        let mut held = 0;
        for (heap, books) in state.heaps.iter().enumerate() {
            books.check().map_err(|e| format!("heap {heap}: {e}"))?;
            for segment in books.segments() {
                check_backing(&state, heap, &segment)?;
                for block in books.blocks_of(segment.key).filter(|b| b.state == BlockState::Used) {
                    let home = Home { heap, block: block.key };
                    let info = state.info(home);
                    let record = state.records.get(info.record as usize);
                    if info.record != NONE && record.is_none_or(|r| r.home() != Some(home)) {
                        return Err(format!("block {home:?} points at a record that is not its own"));
                    }
                    if info.limbo || record.is_some_and(|r| r.standing == Standing::Held) {
                        held += block.bytes;
                    } else if info.allocation != 0 {
                        live += state.growing.get(&home).map_or(block.bytes, |g| g.allocated_bytes);
                    } else {
                        return Err(format!("block {home:?} of {} is used by nobody", Bytes(block.bytes as usize)));
                    }
                }
            }
        }
        let tally = &state.tally;
        for (what, counted, noted) in [
            ("live", live, tally.allocated.current),
            ("held", held, tally.held.current),
            ("reserved", state.reserved_bytes(), tally.reserved.current),
        ] {
            if counted != noted {
                return Err(format!("{what}: {counted} bytes are there, {noted} are noted"));
            }
        }
        for (index, record) in &state.records {
            if record.retiring {
                return Err(format!("record {index} is retiring for ever"));
            }
            for holder in &record.holders {
                let known = state.graphs.get(holder.graph).is_some_and(|g| g.deps.iter().any(|d| d.record == index));
                if !known {
                    return Err(format!("record {index} is held by graph {}, which does not know", holder.graph));
                }
            }
        }
        for (index, graph) in &state.graphs {
            for dep in &graph.deps {
                let holds = state.records.get(dep.record).is_some_and(|r| r.holders.iter().any(|h| h.graph == index));
                if !holds {
                    return Err(format!("graph {index} depends on record {}, which does not know", dep.record));
                }
            }
        }
        Ok(())
    }
}

/// The token of a used block, and whether a slice still owns it.
/// What an address may belong to.
fn resolve(state: &State, ptr: DevicePtr) -> SmallVec<[Resolved; 2]> {
    let mut found: SmallVec<[Resolved; 2]> = SmallVec::new();
    for (heap, books) in state.heaps.iter().enumerate() {
        let inside = books.find(ptr.0);
        // What ends there matters only if something else begins there, or nothing is there.
        let begins = inside.is_none_or(|block| books.span(block).is_none_or(|(base, _)| base == ptr.0));
        let before = if begins { books.find(ptr.0.wrapping_sub(1)) } else { None };
        for key in inside.into_iter().chain(before) {
            let Some(block) = books.block(key) else { continue };
            if block.state == BlockState::Unbacked {
                continue;
            }
            let home = Home { heap, block: block.key };
            let (token, live) = if block.state == BlockState::Used { owner(state, home) } else { (None, false) };
            found.push(Resolved {
                token,
                base: DevicePtr(block.base),
                offset_bytes: (ptr.0 - block.base) as usize,
                bytes: block.bytes as usize,
                kind: RangeKind::Pool(Purpose::ALL[heap]),
                live,
            });
        }
    }
    for &(base, index) in state.outside.range(..=(ptr.0, usize::MAX)) {
        let Some(record) = state.records.get(index) else { continue };
        if ptr.0 - base > record.bytes {
            continue;
        }
        let kind = match &record.site {
            Site::Outside(Outside::Foreign { .. }) => RangeKind::Foreign,
            _ => RangeKind::Host,
        };
        found.push(Resolved {
            token: Some(record.token(Place::outside(index))),
            base: DevicePtr(base),
            offset_bytes: (ptr.0 - base) as usize,
            bytes: record.bytes as usize,
            kind,
            live: record.standing == Standing::Live,
        });
    }
    // What the address points into comes before what ends there.
    found.sort_by_key(|f| f.offset_bytes >= f.bytes);
    found
}

fn owner(state: &State, home: Home) -> (Option<Token>, bool) {
    let info = state.info(home);
    let place = Place::block(home.heap, home.block.index());
    if let Some(record) = state.records.get(info.record as usize) {
        return (Some(record.token(place)), record.standing == Standing::Live);
    }
    let token = AllocationId::from_raw(info.allocation).map(|allocation| Token {
        allocation,
        address: 1,
        backing: 1,
        content: 1,
        place,
    });
    (token, token.is_some() && !info.limbo)
}

fn check_backing(state: &State, heap: usize, segment: &SegmentView) -> Result<(), String> {
    use crate::state::{Backing, Bundle};
    match state.backing[heap].get(segment.key.index()).and_then(Option::as_ref) {
        Some(Backing::Slab { ptr, bytes }) => {
            let inside = ptr.0 <= segment.base && segment.base + segment.bytes <= ptr.0 + bytes;
            if segment.chunk_bytes.is_some() || !inside {
                return Err(format!("slab {:#x} is not what the driver gave", segment.base));
            }
        }
        Some(Backing::Range { ptr, bytes, chunks }) => {
            let there: u64 = chunks.iter().filter(|c| c.is_some()).count() as u64 * segment.chunk_bytes.unwrap_or(0);
            // Asleep, the books say what will be there again.
            let right = if state.heaps[heap].is_asleep() {
                there <= segment.backed_bytes
            } else {
                there == segment.backed_bytes
            };
            if ptr.0 != segment.base || *bytes != segment.bytes || !right {
                let noted = segment.backed_bytes;
                return Err(format!("range {:#x}: {there} bytes of chunks, {noted} noted", segment.base));
            }
            let books = &state.heaps[heap];
            for (chunk, bundle) in chunks.iter().enumerate() {
                let noted = books.bundle(segment.key, chunk as u32);
                let there = bundle.as_ref().map_or(chunk as u32..chunk as u32 + 1, Bundle::chunks);
                if noted != there && !books.is_asleep() {
                    return Err(format!("chunk {chunk} is one of {there:?}, {noted:?} are noted",));
                }
            }
        }
        None => return Err(format!("segment {:#x} has nothing behind it", segment.base)),
    }
    Ok(())
}

/// Bytes that could go back at once: whole free chunks and bundles, or the slab if all of it is free.
fn cached_bytes(state: &State, books: &Heap, segment: &SegmentView, blocks: &[BlockView]) -> u64 {
    let free = |b: &BlockView| b.state == BlockState::Free && b.uses.iter().all(|k| State::usable(&state.streams, k));
    let base = segment.base;
    let Some(chunk) = segment.chunk_bytes else {
        let all = blocks.iter().all(free);
        return if all { blocks.iter().map(|b| b.bytes).sum() } else { 0 };
    };
    let mut total = 0;
    let mut run: Option<(u64, u64)> = None;
    for block in blocks.iter().map(Some).chain([None]) {
        match block.filter(|b| free(b)) {
            Some(b) => run = Some((run.map_or(b.base, |r| r.0), b.base + b.bytes)),
            None => {
                if let Some((start, end)) = run.take() {
                    let first = (start - base).div_ceil(chunk);
                    let last = (end - base) / chunk;
                    let whole = books.whole(segment.key, first as u32..last.max(first) as u32);
                    total += whole.len() as u64 * chunk;
                }
            }
        }
    }
    total
}

/// One character for each stretch of a segment's used part: the worst that is in it.
fn strip(state: &State, heap: usize, blocks: &[BlockView]) -> String {
    let used = blocks.iter().rev().find(|b| b.state != BlockState::Unbacked);
    let (Some(first), Some(last)) = (blocks.first(), used) else { return String::new() };
    let (base, end) = (first.base, last.base + last.bytes);
    let mut cells = vec![0u8; STRIP_CELLS];
    let cell = |address: u64| ((u128::from(address - base) * STRIP_CELLS as u128) / u128::from(end - base)) as usize;
    for block in blocks.iter().filter(|b| b.base < end) {
        let rank = match block.state {
            BlockState::Unbacked => 0,
            BlockState::Free | BlockState::Claimed => 1,
            BlockState::Used => {
                let record = state.info(Home { heap, block: block.key }).record;
                let held = state.records.get(record as usize).is_some_and(|r| r.standing == Standing::Held);
                if held { 2 } else { 3 }
            }
        };
        for c in &mut cells[cell(block.base)..=cell(block.base + block.bytes - 1).min(STRIP_CELLS - 1)] {
            *c = (*c).max(rank);
        }
    }
    cells.into_iter().map(|c| [' ', '.', 'g', '#'][c as usize]).collect()
}
