//! Giving back: taking free memory out of reach before the host waits for its streams.

use std::cmp::Reverse;
use std::ops::Range;

use smallvec::SmallVec;

use super::block::NONE;
use super::*;

/// Free memory taken out of reach, to be given back to the driver after the host has seen `uses` complete.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    /// The block that now covers it, in state [`BlockState::Claimed`].
    pub(crate) block: BlockKey,
    /// In which segment.
    pub(crate) segment: SegmentKey,
    /// Which chunks; `None`: the whole slab.
    pub(crate) chunks: Option<Range<u32>>,
    /// Where it starts.
    pub(crate) base: u64,
    /// How long it is.
    pub(crate) bytes: u64,
    /// Streams to wait for, on the host.
    pub(crate) uses: Uses,
}

/// Whole chunks that could be claimed together.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) streams: usize,
    pub(super) segment: u32,
    pub(super) chunks: Range<u32>,
    pub(super) base: u64,
}

impl Heap {
    /// Claims whole free chunks, just enough for `want_bytes` (all there is, if less): idle ones first, then
    /// those with the fewest streams; high addresses first. A chunk counts even where its bytes are free
    /// blocks of several streams; it does not where `usable` says no to one of them, nor where it touches `except`.
    /// A bundle goes as a whole. Bundles larger than what is still wanted go last, the smallest that is enough first, and
    /// only if `beyond`.
    pub(crate) fn claim_chunks(
        &mut self,
        want_bytes: u64,
        except: &Range<u64>,
        usable: &dyn Fn(StreamKey) -> bool,
        beyond: bool,
    ) -> Vec<Claim> {
        self.settle_completed();
        if self.asleep {
            return Vec::new();
        }
        let mut candidates = self.whole_bundles(self.whole_chunks(usable));
        if !except.is_empty() {
            candidates = candidates.into_iter().flat_map(|c| self.outside(c, except)).collect();
        }
        candidates.sort_by_key(|c| (c.streams, Reverse(c.base)));
        candidates.reverse();
        let mut claims = Vec::new();
        let mut claimed_bytes = 0;
        // Bundles larger than what was wanted when it was their turn.
        let mut passed: Vec<Candidate> = Vec::new();
        while claimed_bytes < want_bytes
            && let Some(candidate) = candidates.pop()
        {
            let Some(pages) = self.segments[candidate.segment as usize].chunks.as_ref() else { continue };
            let Range { mut start, end } = candidate.chunks;
            let needed = (want_bytes - claimed_bytes).div_ceil(pages.bytes);
            if needed < u64::from(end - start) {
                let cut = pages.bundle(end - needed as u32);
                if cut.start < end - needed as u32 {
                    candidates.push(Candidate { chunks: start..cut.start, ..candidate });
                    start = cut.end;
                    passed.push(Candidate { chunks: cut, ..candidate });
                } else {
                    start = cut.start;
                }
            }
            claimed_bytes += self.claim_into(&mut claims, candidate.segment, start..end);
        }
        if beyond && claimed_bytes < want_bytes {
            let left_bytes = want_bytes - claimed_bytes;
            // All of them have more than that.
            if let Some(bundle) = passed.into_iter().min_by_key(|c| c.chunks.len()) {
                claimed_bytes += self.claim_into(&mut claims, bundle.segment, bundle.chunks);
                debug_assert!(
                    claimed_bytes >= want_bytes,
                    "a bundle was passed over that was not too large: {left_bytes}"
                );
            }
        }
        claims
    }

    /// Claims chunks of one segment; their bytes.
    fn claim_into(&mut self, claims: &mut Vec<Claim>, segment: u32, chunks: Range<u32>) -> u64 {
        let segment = SegmentKey(segment);
        let Some((base, bytes)) = self.chunk_span(segment, &chunks) else { return 0 };
        let Some(first) = self.find(base) else { return 0 };
        claims.push(self.claim(first.0, segment, Some(chunks), base, bytes));
        bytes
    }

    /// What is left of a candidate without the chunks that touch a range of addresses.
    fn outside(&self, candidate: Candidate, except: &Range<u64>) -> SmallVec<[Candidate; 2]> {
        let Some(entry) = self.segments.get(candidate.segment as usize) else { return SmallVec::new() };
        if except.start < entry.base || except.end > entry.end() {
            return smallvec::smallvec![candidate];
        }
        let mut taken = entry.outer_chunks(except.start, except.end);
        if let Some(pages) = &entry.chunks
            && !taken.is_empty()
        {
            taken = pages.bundle(taken.start).start..pages.bundle(taken.end - 1).end;
        }
        let Range { start, end } = candidate.chunks.clone();
        [start..end.min(taken.start), start.max(taken.end)..end]
            .into_iter()
            .filter(|rest| !rest.is_empty())
            .filter_map(|chunks| {
                let (base, _) = self.chunk_span(SegmentKey(candidate.segment), &chunks)?;
                Some(Candidate { chunks, base, ..candidate })
            })
            .collect()
    }

    fn claim(&mut self, first: u32, segment: SegmentKey, chunks: Option<Range<u32>>, base: u64, bytes: u64) -> Claim {
        let (key, uses) = self.carve(first, base, base + bytes);
        Claim { block: BlockKey(key), segment, chunks, base, bytes, uses }
    }

    fn whole_chunks(&self, usable: &dyn Fn(StreamKey) -> bool) -> Vec<Candidate> {
        let mut found: Vec<Candidate> = Vec::new();
        for (segment, entry) in &self.segments {
            if entry.chunks.is_none() {
                continue;
            }
            let mut key = entry.first;
            // Where the current run of free blocks began, and the uses of its chunk that is not whole yet.
            let mut run_start = None;
            let mut open = Uses::none();
            while key != NONE {
                let block = &self.blocks[key as usize];
                if block.state != BlockState::Free || !block.uses.iter().all(usable) {
                    run_start = None;
                    open = Uses::none();
                    key = block.next;
                    continue;
                }
                let start: u64 = *run_start.get_or_insert(block.base);
                let mut push = |chunks: Range<u32>, uses: &Uses| {
                    if let Some((base, _)) = self.chunk_span(SegmentKey(segment as u32), &chunks) {
                        found.push(Candidate { streams: uses.len(), segment: segment as u32, chunks, base });
                    }
                };
                // The chunk that earlier blocks of the run began and this one ends.
                let inner = entry.inner_chunks(block.base, block.end());
                let run = entry.inner_chunks(start, block.end());
                let begun = entry.outer_chunks(block.base, block.end()).start;
                let ends_open = !inner.contains(&begun) && run.contains(&begun);
                open.extend(&block.uses);
                if ends_open {
                    push(begun..begun + 1, &open);
                }
                push(inner.clone(), &block.uses);
                if ends_open || !inner.is_empty() {
                    open = block.uses.clone();
                }
                key = block.next;
            }
        }
        found
    }

    /// Size and key of every slab that is free from end to end.
    pub(super) fn whole_slabs(&self, usable: &dyn Fn(StreamKey) -> bool) -> Vec<(u64, u32)> {
        let slabs = self.segments.iter().filter(|(_, s)| s.chunks.is_none());
        slabs
            .filter(|&(_, s)| {
                let mut key = s.first;
                while key != NONE {
                    let block = &self.blocks[key as usize];
                    if block.state != BlockState::Free || !block.uses.iter().all(usable) {
                        return false;
                    }
                    key = block.next;
                }
                true
            })
            .map(|(key, s)| (s.bytes, key as u32))
            .collect()
    }

    /// Claims wholly free slabs until they hold `want_bytes` (all there are, if less): the smallest one that
    /// is enough alone, else the largest first. None with a use that `usable` says no to.
    pub(crate) fn claim_slabs(&mut self, want_bytes: u64, usable: &dyn Fn(StreamKey) -> bool) -> Vec<Claim> {
        self.settle_completed();
        let mut slabs = self.whole_slabs(usable);
        slabs.sort_unstable();
        let mut claims = Vec::new();
        let mut wanted_bytes = want_bytes;
        while wanted_bytes > 0 && !slabs.is_empty() {
            let enough = slabs.partition_point(|&(bytes, _)| bytes < wanted_bytes);
            let (bytes, segment) = slabs.remove(enough.min(slabs.len() - 1));
            wanted_bytes = wanted_bytes.saturating_sub(bytes);
            let entry = &self.segments[segment as usize];
            let (first, base) = (entry.first, entry.base);
            claims.push(self.claim(first, SegmentKey(segment), None, base, bytes));
        }
        claims
    }

    /// The claim fell through: free again, with the uses it had.
    pub(crate) fn release_claim(&mut self, block: BlockKey) -> Result<(), Misuse> {
        let key = self.claimed(block)?;
        self.blocks[key as usize].state = BlockState::Free;
        self.settle_free(key);
        Ok(())
    }

    fn claimed(&self, block: BlockKey) -> Result<u32, Misuse> {
        match self.blocks.get(block.index()) {
            Some(b) if b.state == BlockState::Claimed => Ok(block.0),
            _ => Err(Misuse::Block(block)),
        }
    }

    /// The pages of a claim of chunks are gone: its block is unbacked. (A slab's claim ends with
    /// [`remove_segment`](Self::remove_segment).)
    pub(crate) fn unback_claim(&mut self, block: BlockKey) -> Result<(), Misuse> {
        let key = self.claimed(block)?;
        let (segment, base, end) = {
            let b = &self.blocks[key as usize];
            (b.segment, b.base, b.end())
        };
        let entry = &mut self.segments[segment as usize];
        let inner = entry.inner_chunks(base, end);
        let Some(pages) = &mut entry.chunks else { return Err(Misuse::Block(block)) };
        pages.set(inner, false);
        self.chunked_bytes -= end - base;
        self.make_unbacked(key);
        Ok(())
    }

    /// Turns a block into unbacked space and joins it with its like.
    fn make_unbacked(&mut self, key: u32) {
        let block = &mut self.blocks[key as usize];
        block.state = BlockState::Unbacked;
        block.uses = Uses::none();
        block.stamp = Stamp(0);
        let (prev, next, zone) = (block.prev, block.next, block.zone);
        self.list_unbacked(key);
        let unbacked = |heap: &Self, k: u32| {
            k != NONE && heap.blocks[k as usize].state == BlockState::Unbacked && heap.blocks[k as usize].zone == zone
        };
        if unbacked(self, next) {
            self.join(key, next);
        }
        if unbacked(self, prev) {
            self.join(prev, key);
        }
    }

    /// The backed chunks that lie, with the whole of their bundle, inside a used block (scratch of an idle graph): what
    /// could be unmapped under it.
    #[must_use]
    pub(crate) fn chunks_inside(&self, block: BlockKey) -> Vec<Range<u32>> {
        let chunks = self.chunks_of(block, true);
        let pages = self.blocks.get(block.index()).and_then(|b| self.segments.get(b.segment as usize)?.chunks.as_ref());
        match pages.filter(|pages| pages.has_ties()) {
            Some(pages) => chunks.into_iter().map(|run| pages.whole(run)).filter(|run| !run.is_empty()).collect(),
            None => chunks,
        }
    }

    /// The chunks of a used block without memory: what a remap must map.
    #[must_use]
    pub(crate) fn missing_chunks(&self, block: BlockKey) -> Vec<Range<u32>> {
        self.chunks_of(block, false)
    }

    /// The number of the chunk that a block begins in.
    #[must_use]
    pub(crate) fn first_chunk(&self, block: BlockKey) -> Option<u32> {
        let entry = self.blocks.get(block.index())?;
        Some(self.segments.get(entry.segment as usize)?.outer_chunks(entry.base, entry.base + 1).start)
    }

    fn chunks_of(&self, block: BlockKey, backed: bool) -> Vec<Range<u32>> {
        let mut found: Vec<Range<u32>> = Vec::new();
        let Some(entry) = self.blocks.get(block.index()).filter(|b| b.state == BlockState::Used) else {
            return found;
        };
        let segment = &self.segments[entry.segment as usize];
        let Some(pages) = &segment.chunks else { return found };
        for chunk in segment.inner_chunks(entry.base, entry.end()) {
            if pages.is_backed(chunk) == backed {
                match found.last_mut() {
                    Some(last) if last.end == chunk => last.end += 1,
                    _ => found.push(chunk..chunk + 1),
                }
            }
        }
        found
    }

    /// The pages of chunks inside a used block are gone. The block stays used; its address stays its own.
    pub(crate) fn unback_used(&mut self, block: BlockKey, chunks: Range<u32>) -> Result<(), Misuse> {
        let inside = self.chunks_inside(block);
        let segment = match self.blocks.get(block.index()) {
            Some(b) => SegmentKey(b.segment),
            None => return Err(Misuse::Block(block)),
        };
        let backed = inside.iter().any(|r| r.start <= chunks.start && chunks.end <= r.end);
        let whole = backed && self.whole(segment, chunks.clone()) == chunks;
        let (_, bytes) = self.chunk_span(segment, &chunks).filter(|_| whole).ok_or(Misuse::Chunks(segment))?;
        if let Some(pages) = &mut self.segments[segment.index()].chunks {
            pages.set(chunks, false);
        }
        self.chunked_bytes -= bytes;
        self.blocks[block.index()].holes = true;
        Ok(())
    }

    /// A used block with holes was freed: its backed parts are free, its holes unbacked space.
    #[cold]
    pub(super) fn free_with_holes(&mut self, key: u32) {
        self.blocks[key as usize].holes = false;
        let (segment, end) = (self.blocks[key as usize].segment, self.blocks[key as usize].end());
        let mut at = self.blocks[key as usize].base;
        let mut rest = key;
        while at < end {
            // Whether the stretch from here is a hole, and where it ends.
            let entry = &self.segments[segment as usize];
            let Some(pages) = &entry.chunks else { break };
            let hole_at = |address: u64| {
                let chunk = entry.outer_chunks(address, address + 1).start;
                !pages.is_backed(chunk)
            };
            let hole = hole_at(at);
            let mut stop = at;
            while stop < end && hole_at(stop) == hole {
                let chunk = entry.outer_chunks(stop, stop + 1).end;
                stop = (entry.base + u64::from(chunk) * pages.bytes).min(end);
            }
            let piece = rest;
            // The rest must look busy while this piece merges.
            self.blocks[piece as usize].state = BlockState::Claimed;
            if stop < end {
                rest = self.split(piece, stop - at);
            }
            if hole {
                self.make_unbacked(piece);
            } else {
                self.blocks[piece as usize].state = BlockState::Free;
                self.settle_free(piece);
            }
            at = stop;
        }
    }
}
