//! The slow search: windows over runs of neighbouring blocks that could be joined.
//!
//! Blocks freed on different streams do not merge by themselves, and unbacked space is no free block. A
//! window is a place for a request that spans several such neighbours; the cheapest one is carved out.

use super::block::{Block, NONE, Segment, Zone};
use super::*;

/// A place for a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Window {
    /// Chunks to map first.
    pub(super) chunks: u64,
    /// Other streams to order after.
    foreign: usize,
    /// Bytes of the blocks that it cuts into: less is a tighter fit.
    covered_bytes: u64,
    pub(super) start: u64,
    first: u32,
}

/// What a window may span besides free blocks that the stream may use at once.
pub(super) struct Reach<'a> {
    pub(super) stream: StreamKey,
    /// Other streams that may be waited for.
    pub(super) foreign: &'a dyn Fn(StreamKey) -> bool,
    /// Whether chunks may be mapped.
    pub(super) unbacked: bool,
    /// `None`: in any zone.
    pub(super) zone: Option<Zone>,
}

impl Reach<'_> {
    fn takes(&self, block: &Block) -> bool {
        if self.zone.is_some_and(|z| z != block.zone) {
            return false;
        }
        match block.state {
            BlockState::Free => {
                !block.quick
                    && (block.uses.within(self.stream)
                        || block.uses.iter().all(|s| s == self.stream || (self.foreign)(s)))
            }
            BlockState::Unbacked => self.unbacked,
            BlockState::Used | BlockState::Claimed => false,
        }
    }
}

impl Heap {
    /// The warm path's last resort: neighbours that do not merge by themselves but that `stream` may use.
    #[cold]
    pub(super) fn alloc_run(&mut self, request: &Request, stream: StreamKey, zone: Zone) -> Option<BlockKey> {
        // With a single stream everything that could be joined is joined.
        if self.uniform() {
            return None;
        }
        let reach = Reach { stream, foreign: &|_| false, unbacked: false, zone: Some(zone) };
        let window = self.best_window(request, &reach)?;
        Some(self.take_window(window, request).0)
    }

    /// Before growth: also considers blocks that other streams may still touch, joined across streams. The
    /// streams returned (never `stream`) must be ordered before the new owner's work, by an event or by the
    /// host. `usable` says which streams may be waited for (not a capturing one).
    pub(crate) fn alloc_cross(
        &mut self,
        request: &Request,
        stream: StreamKey,
        usable: &dyn Fn(StreamKey) -> bool,
    ) -> Option<(BlockKey, Uses)> {
        if self.asleep {
            return None;
        }
        if self.alone(stream) {
            return self.alloc(request, stream).map(|block| (block, Uses::none()));
        }
        self.settle_completed();
        if let Some(block) = self.alloc(request, stream) {
            return Some((block, Uses::none()));
        }
        let zone = self.zone(request);
        let window =
            self.best_window(request, &Reach { stream, foreign: usable, unbacked: false, zone: Some(zone) })?;
        let (block, mut uses) = self.take_window(window, request);
        uses.remove(stream);
        Some((block, uses))
    }

    /// When the heap can not grow: as [`alloc_cross`](Self::alloc_cross), but a small request may also go
    /// between large blocks, and a large one between small ones.
    pub(crate) fn alloc_squeezed(
        &mut self,
        request: &Request,
        stream: StreamKey,
        usable: &dyn Fn(StreamKey) -> bool,
    ) -> Option<(BlockKey, Uses)> {
        if let Some(found) = self.alloc_cross(request, stream, usable) {
            return Some(found);
        }
        if self.asleep || self.config().small_bytes == 0 {
            return None;
        }
        let window = self.best_window(request, &Reach { stream, foreign: usable, unbacked: false, zone: None })?;
        let (block, mut uses) = self.take_window(window, request);
        uses.remove(stream);
        Some((block, uses))
    }

    /// The cheapest place: fewest chunks, then fewest foreign streams, then the tightest, then the lowest.
    pub(super) fn best_window(&self, request: &Request, reach: &Reach<'_>) -> Option<Window> {
        let mut best: Option<Window> = None;
        let mut run: Vec<&Block> = Vec::new();
        for &segment in self.by_base.values() {
            let entry = &self.segments[segment as usize];
            let mut key = entry.first;
            loop {
                let block = (key != NONE).then(|| &self.blocks[key as usize]);
                // Zones never merge.
                let joins = |b: &Block| reach.takes(b) && run.last().is_none_or(|last| last.zone == b.zone);
                match block {
                    Some(block) if joins(block) => run.push(block),
                    _ => {
                        windows(entry, &run, request, reach.stream, |w| {
                            if best.is_none_or(|b| w < b) {
                                best = Some(w);
                            }
                        });
                        run.clear();
                        run.extend(block.filter(|b| reach.takes(b)));
                    }
                }
                match block {
                    Some(block) => key = block.next,
                    None => break,
                }
            }
        }
        best.map(|w| Window { first: self.find(w.start).map_or(NONE, |b| b.0), ..w })
    }

    /// As [`best_window`](Self::best_window) with unbacked space. Where nothing is to be had without mapping,
    /// it looks only at the runs around unbacked blocks.
    pub(super) fn growth_window(&self, request: &Request, reach: &Reach<'_>) -> Option<Window> {
        if !self.alone(reach.stream) {
            return self.best_window(request, reach);
        }
        let mut best: Option<Window> = None;
        let mut run: Vec<&Block> = Vec::new();
        let mut unbacked = self.unbacked;
        while unbacked != NONE {
            let middle = &self.blocks[unbacked as usize];
            unbacked = middle.bin_next;
            if !reach.takes(middle) {
                continue;
            }
            let joins = |key: u32| {
                let block = (key != NONE).then(|| &self.blocks[key as usize])?;
                (reach.takes(block) && block.zone == middle.zone).then_some(block)
            };
            run.clear();
            run.extend(std::iter::successors(Some(middle), |b| joins(b.prev)));
            // A run with several is looked at from its lowest one.
            if run[1..].iter().any(|b| b.state == BlockState::Unbacked) {
                continue;
            }
            run.reverse();
            run.extend(std::iter::successors(joins(middle.next), |b| joins(b.next)));
            windows(&self.segments[middle.segment as usize], &run, request, reach.stream, |w| {
                if best.is_none_or(|b| w < b) {
                    best = Some(w);
                }
            });
        }
        best.map(|w| Window { first: self.find(w.start).map_or(NONE, |b| b.0), ..w })
    }

    pub(super) fn take_window(&mut self, window: Window, request: &Request) -> (BlockKey, Uses) {
        let (key, uses) = self.carve(window.first, window.start, window.start + request.bytes);
        (self.hand_out(key, request), uses)
    }

    /// Makes `[start, end)`, all of it settled free blocks beginning with `first`, one block that is in no
    /// index; returns it and the streams that may still touch it.
    pub(super) fn carve(&mut self, first: u32, start: u64, end: u64) -> (u32, Uses) {
        self.unindex(first);
        let mut key = first;
        if self.blocks[key as usize].base < start {
            key = self.split(first, start - self.blocks[first as usize].base);
            self.index(first);
        }
        while self.blocks[key as usize].end() < end {
            let next = self.blocks[key as usize].next;
            self.unindex(next);
            if self.blocks[next as usize].end() > end {
                let rest = self.split(next, end - self.blocks[next as usize].base);
                self.index(rest);
            }
            self.join(key, next);
        }
        if self.blocks[key as usize].end() > end {
            let rest = self.split(key, end - self.blocks[key as usize].base);
            self.index(rest);
        }
        let uses = self.blocks[key as usize].uses.clone();
        // The rests may now be small enough to join their outer neighbours.
        self.blocks[key as usize].state = BlockState::Claimed;
        for rest in [self.blocks[key as usize].prev, self.blocks[key as usize].next] {
            if rest != NONE && self.blocks[rest as usize].settled_free() {
                self.unindex(rest);
                self.settle_free(rest);
            }
        }
        (key, uses)
    }
}

/// Every sensible window in one run. Moving a window changes its price only where one of its ends crosses an
/// edge between blocks, so it is enough to try the places next to those: starting at an edge and, where there
/// is unbacked space, ending at one, with the start rounded up and down to the alignment.
fn windows(segment: &Segment, run: &[&Block], request: &Request, stream: StreamKey, mut found: impl FnMut(Window)) {
    let (Some(low), Some(high)) = (run.first().map(|b| b.base), run.last().map(|b| b.end())) else { return };
    if high - low < request.bytes {
        return;
    }
    let down = |address: u64| address & !(request.align - 1);
    let up = |address: u64| down(address + (request.align - 1));
    let mut slide_over = |place: &dyn Fn(&Block) -> Option<u64>| {
        let mut slide = Slide { segment, run, stream, from: 0, to: 0, foreign: Vec::new(), inner_chunks: 0 };
        for start in run.iter().filter_map(|b| place(b)) {
            if start >= low && start <= high - request.bytes {
                found(slide.at(start, start + request.bytes));
            }
        }
    };
    slide_over(&|b| Some(up(b.base)));
    if run.iter().any(|b| b.state == BlockState::Unbacked) {
        slide_over(&|b| b.end().checked_sub(request.bytes).map(down));
        // With the smallest alignment every edge is a multiple of it.
        if run.iter().any(|b| b.base & (request.align - 1) != 0) || request.bytes & (request.align - 1) != 0 {
            slide_over(&|b| Some(down(b.base)));
            slide_over(&|b| b.end().checked_sub(request.bytes).map(up));
        }
    }
}

/// Two pointers over a run, both only moving up.
struct Slide<'a> {
    segment: &'a Segment,
    run: &'a [&'a Block],
    stream: StreamKey,
    /// Blocks `from..to` are counted.
    from: usize,
    to: usize,
    /// How many counted blocks each other stream uses.
    foreign: Vec<(StreamKey, u32)>,
    inner_chunks: u64,
}

impl Slide<'_> {
    fn at(&mut self, start: u64, end: u64) -> Window {
        while self.to < self.run.len() && self.run[self.to].base < end {
            let block = self.run[self.to];
            for s in block.uses.iter().filter(|&s| s != self.stream) {
                match self.foreign.iter_mut().find(|(f, _)| *f == s) {
                    Some((_, count)) => *count += 1,
                    None => self.foreign.push((s, 1)),
                }
            }
            self.inner_chunks += self.chunks(block, block.base, block.end());
            self.to += 1;
        }
        while self.run[self.from].end() <= start {
            let block = self.run[self.from];
            for s in block.uses.iter() {
                if let Some(at) = self.foreign.iter().position(|(f, _)| *f == s) {
                    self.foreign[at].1 -= 1;
                    if self.foreign[at].1 == 0 {
                        self.foreign.swap_remove(at);
                    }
                }
            }
            self.inner_chunks -= self.chunks(block, block.base, block.end());
            self.from += 1;
        }
        let (first, last) = (self.run[self.from], self.run[self.to - 1]);
        // Chunks of the outer blocks that the window does not touch.
        let mut chunks = self.inner_chunks;
        if self.to - self.from == 1 {
            chunks = self.chunks(first, start, end);
        } else {
            chunks -= self.chunks(first, first.base, first.end()) - self.chunks(first, start, first.end());
            chunks -= self.chunks(last, last.base, last.end()) - self.chunks(last, last.base, end.min(last.end()));
        }
        Window { chunks, foreign: self.foreign.len(), covered_bytes: last.end() - first.base, start, first: NONE }
    }

    /// Chunks that `[start, end)` of an unbacked block touches.
    fn chunks(&self, block: &Block, start: u64, end: u64) -> u64 {
        match block.state {
            BlockState::Unbacked => self.segment.outer_chunks(start, end).len() as u64,
            _ => 0,
        }
    }
}
