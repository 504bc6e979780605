//! Random long walks against a naive model of intervals.
//!
//! The model knows nothing of bins, merging or zones. It keeps lists: what is live, which chunks have pages,
//! and which stream's queued work touches which bytes. Whatever the heap answers is judged by it.

use std::collections::BTreeSet;
use std::ops::Range;

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::*;

const GRANULE: u64 = 64;
const CHUNK: u64 = 512;
const CHUNKS: u32 = 48;
const SLAB: u64 = 3000;
const STREAMS: u32 = 3;
/// Stands for a capture window.
const PRIVATE: StreamKey = StreamKey(STREAMS);
/// Past the first word of a set.
const FAR: StreamKey = StreamKey(70);

fn config() -> HeapConfig {
    HeapConfig {
        granule_bytes: GRANULE,
        look_ahead_divisor: 0,
        absorb_bytes: CHUNK,
        small_bytes: 200,
        zoned_from_bytes: 6 * CHUNK,
    }
}

#[derive(Clone, Copy, Debug)]
enum How {
    Warm,
    Cross,
    Grow,
    Squeeze,
}

#[derive(Clone, Debug)]
enum Step {
    Alloc { bytes: u64, align: u64, stream: usize, how: How },
    Free { at: usize, streams: Vec<usize> },
    Complete { stream: usize, back: u64 },
    Forget { stream: usize },
    Claim { want_bytes: u64, slabs: bool },
    EndClaim { at: usize, gone: bool },
    UnbackUsed { at: usize },
    Reback { at: usize },
    Bundles { chunks: u32 },
    AddSlab { bytes: u64 },
    Retag { to: Vec<usize> },
    TakePrivate,
}

fn key(stream: usize) -> StreamKey {
    [A, B, StreamKey(2), PRIVATE, FAR][stream % 5]
}

/// Streams that nobody may be made to wait for: the window.
fn usable(stream: StreamKey) -> bool {
    stream != PRIVATE
}

/// The reference is the list of steps itself; the model lives beside the heap because it follows its answers.
#[derive(Debug)]
struct Reference;

impl ReferenceStateMachine for Reference {
    type State = ();
    type Transition = Step;

    fn init_state() -> BoxedStrategy<()> {
        Just(()).boxed()
    }

    fn transitions((): &()) -> BoxedStrategy<Step> {
        let how = prop_oneof![
            Just(How::Warm),
            Just(How::Cross),
            Just(How::Grow),
            Just(How::Grow),
            Just(How::Grow),
            Just(How::Squeeze)
        ];
        let bytes = prop_oneof![1..260u64, 1..1500u64, 500..4000u64];
        let align = prop_oneof![4 => Just(0u64), 1 => Just(128), 1 => Just(512), 1 => Just(1024)];
        let streams = || proptest::collection::vec(0..5usize, 0..3);
        prop_oneof![
            12 => (bytes, align, 0..5usize, how)
                .prop_map(|(bytes, align, stream, how)| Step::Alloc { bytes, align, stream, how }),
            9 => (any::<usize>(), streams()).prop_map(|(at, streams)| Step::Free { at, streams }),
            2 => (0..5usize, 0..6u64).prop_map(|(stream, back)| Step::Complete { stream, back }),
            1 => (0..5usize).prop_map(|stream| Step::Forget { stream }),
            2 => (1..5000u64, any::<bool>()).prop_map(|(want_bytes, slabs)| Step::Claim { want_bytes, slabs }),
            3 => (any::<usize>(), any::<bool>()).prop_map(|(at, gone)| Step::EndClaim { at, gone }),
            1 => any::<usize>().prop_map(|at| Step::UnbackUsed { at }),
            1 => any::<usize>().prop_map(|at| Step::Reback { at }),
            1 => (1..6u32).prop_map(|chunks| Step::Bundles { chunks }),
            1 => (1..2 * SLAB).prop_map(|bytes| Step::AddSlab { bytes }),
            1 => streams().prop_map(|to| Step::Retag { to }),
            1 => Just(Step::TakePrivate),
        ]
        .boxed()
    }

    fn apply((): (), _: &Step) {}
}

#[derive(Clone, Debug)]
struct Queued {
    span: Range<u64>,
    stream: StreamKey,
    at: u64,
    forced: bool,
}

#[derive(Debug)]
struct Walk {
    heap: Heap,
    now: u64,
    live: Vec<(BlockKey, Range<u64>)>,
    claims: Vec<Claim>,
    /// Addresses of chunks with pages.
    backed: BTreeSet<u64>,
    /// Chunks that hang on one handle with others.
    bundles: Vec<Range<u64>>,
    /// How many chunks the next handles have.
    bundle_chunks: u32,
    slabs: Vec<(SegmentKey, Range<u64>)>,
    /// Work that may still touch bytes that nobody owns any more.
    queued: Vec<Queued>,
    next_slab: u64,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Walk {
    fn new() -> Self {
        let mut walk = Self::new_without_windows();
        walk.heap.set_private(PRIVATE, true);
        walk
    }

    fn new_without_windows() -> Self {
        let mut heap = Heap::new(config());
        heap.reserve_segment(BASE, u64::from(CHUNKS) * CHUNK, CHUNK).unwrap();
        heap.reserve_segment(BASE + (1 << 20), u64::from(CHUNKS) * CHUNK, CHUNK).unwrap();
        Self {
            heap,
            now: 0,
            live: Vec::new(),
            claims: Vec::new(),
            backed: BTreeSet::new(),
            bundles: Vec::new(),
            bundle_chunks: 1,
            slabs: Vec::new(),
            queued: Vec::new(),
            next_slab: BASE + (1 << 30) + 17,
        }
    }

    /// What nobody has and that has memory: maximal runs that never cross from a segment into the next.
    fn free_runs(&self) -> Vec<Range<u64>> {
        let mut spans: Vec<Range<u64>> = self.backed.iter().map(|&c| c..c + CHUNK).collect();
        spans.extend(self.slabs.iter().map(|(_, s)| s.start.next_multiple_of(GRANULE)..s.end / GRANULE * GRANULE));
        let taken = self.live.iter().map(|(_, s)| s.clone());
        for hole in taken.chain(self.claims.iter().map(|c| c.base..c.base + c.bytes)) {
            spans = spans
                .into_iter()
                .flat_map(|s| [s.start..s.end.min(hole.start), s.start.max(hole.end)..s.end])
                .filter(|s| s.start < s.end)
                .collect();
        }
        spans.sort_by_key(|s| s.start);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for span in spans {
            match runs.last_mut() {
                // The small zone of a range ends after three chunks: nothing may span it.
                Some(last) if last.end == span.start && !self.zone_edge(span.start) => last.end = span.end,
                _ => runs.push(span),
            }
        }
        runs
    }

    fn zone_edge(&self, address: u64) -> bool {
        let edge = u64::from(CHUNKS / 16) * CHUNK;
        address == BASE + edge
            || address == BASE + (1 << 20) + edge
            || self.slabs.iter().any(|(_, s)| s.start == address)
    }

    /// No queued work that counts touches these bytes any more.
    fn untouched(&mut self, span: &Range<u64>) {
        self.queued = std::mem::take(&mut self.queued)
            .into_iter()
            .flat_map(|q| {
                let (low, high) = (q.span.start..q.span.end.min(span.start), q.span.start.max(span.end)..q.span.end);
                [Queued { span: low, ..q.clone() }, Queued { span: high, ..q }]
            })
            .filter(|q| q.span.start < q.span.end)
            .collect();
    }

    fn took(&mut self, block: BlockKey, request: &Request, stream: StreamKey, ordered: &Uses) {
        let view = self.heap.block(block).unwrap();
        let span = view.base..view.base + view.bytes;
        assert_eq!(view.state, BlockState::Used);
        assert_eq!(view.requested_bytes, request.requested_bytes);
        assert!(view.bytes >= request.bytes && span.start.is_multiple_of(request.align));
        assert!(!ordered.contains(stream), "a stream is not ordered after itself");
        for (_, other) in &self.live {
            assert!(!overlap(&span, other), "{span:x?} is live already as {other:x?}");
        }
        for claim in &self.claims {
            assert!(!overlap(&span, &(claim.base..claim.base + claim.bytes)), "claimed memory was handed out");
        }
        let inside = |s: &Range<u64>| s.start <= span.start && span.end <= s.end;
        let paged = (span.start / CHUNK..span.end.div_ceil(CHUNK)).all(|c| self.backed.contains(&(c * CHUNK)));
        assert!(paged || self.slabs.iter().any(|(_, s)| inside(s)), "{span:x?} has no memory behind it");
        for use_ in &self.queued {
            if overlap(&span, &use_.span) {
                let safe = use_.stream == stream || ordered.contains(use_.stream);
                assert!(safe, "{stream:?} got {span:x?} that {:?} may still write", use_.stream);
                assert!(
                    usable(use_.stream) || use_.stream == stream || use_.forced,
                    "somebody was made to wait for the window"
                );
            }
        }
        // Ordered now: whoever comes after the new owner comes after them too.
        self.untouched(&span);
        self.live.push((block, span));
    }

    fn alloc(&mut self, bytes: u64, align: u64, stream: StreamKey, how: How) {
        let request = self.heap.request(bytes, align).unwrap();
        match how {
            How::Warm => {
                if let Some(block) = self.heap.alloc(&request, stream) {
                    self.took(block, &request, stream, &Uses::none());
                }
            }
            How::Cross => {
                if let Some((block, uses)) = self.heap.alloc_cross(&request, stream, &usable) {
                    self.took(block, &request, stream, &uses);
                }
            }
            How::Squeeze => {
                let found = self.heap.alloc_squeezed(&request, stream, &|_| true);
                let fits = |run: &Range<u64>| run.start.next_multiple_of(request.align) + request.bytes <= run.end;
                let expected = self.free_runs().iter().any(fits);
                assert_eq!(found.is_some(), expected, "{request:?} against {:x?}", self.free_runs());
                if let Some((block, uses)) = found {
                    // Here the window itself was declared fair game.
                    for q in &mut self.queued {
                        q.forced = true;
                    }
                    self.took(block, &request, stream, &uses);
                    for q in &mut self.queued {
                        q.forced = false;
                    }
                }
            }
            How::Grow => {
                if let Some(block) = self.heap.alloc(&request, stream) {
                    return self.took(block, &request, stream, &Uses::none());
                }
                let Some(growth) = self.heap.plan_growth(&request, stream) else { return };
                let count: usize = growth.chunks.iter().map(ExactSizeIterator::len).sum();
                let fewest = self.fewest_chunks(&request, stream);
                // Free blocks are looked for by size: one that only holds an unusual alignment because of where it lies may be passed over.
                let unusual =
                    request.align > self.heap.config().granule_bytes && fewest.is_some_and(|fewest| fewest < count);
                assert!(Some(count) == fewest || unusual, "{count} chunks planned, {fewest:?} are enough");
                for chunks in growth.chunks {
                    self.back(growth.segment, chunks);
                }
                let block = self.heap.alloc(&request, stream);
                let block = block.or_else(|| self.heap.alloc_squeezed(&request, stream, &|_| false).map(|f| f.0));
                self.took(block.expect("the plan makes room"), &request, stream, &Uses::none());
            }
        }
    }

    /// By trying every place: how many chunks a request lacks at best, in its own zone if that has room.
    fn fewest_chunks(&mut self, request: &Request, stream: StreamKey) -> Option<usize> {
        let zones = self.heap.config().zoned_from_bytes <= self.backed.len() as u64 * CHUNK;
        let small = request.bytes < self.heap.config().small_bytes && zones;
        let best = |own: bool| {
            let mut best: Option<usize> = None;
            for segment in self.heap.segments() {
                let ranged = segment.chunk_bytes.is_some();
                let edge = segment.base + if ranged { u64::from(CHUNKS / 16) * CHUNK } else { 0 };
                let mut bad: Vec<Range<u64>> = self
                    .heap
                    .blocks_of(segment.key)
                    .filter(|b| match b.state {
                        BlockState::Free => !b.uses.within(stream),
                        BlockState::Unbacked => false,
                        BlockState::Used | BlockState::Claimed => true,
                    })
                    .map(|b| b.base..b.base + b.bytes)
                    .collect();
                bad.push(edge..edge);
                let mut at = segment.base.next_multiple_of(request.align);
                while at + request.bytes <= segment.base + segment.bytes {
                    let span = at..at + request.bytes;
                    let crosses = span.start < edge && edge < span.end;
                    let in_small = span.start < edge;
                    if !crosses && (!own || in_small == small) && !bad.iter().any(|b| overlap(b, &span)) {
                        let missing = (span.start / CHUNK..span.end.div_ceil(CHUNK))
                            .filter(|c| ranged && !self.backed.contains(&(c * CHUNK)))
                            .count();
                        best = Some(best.map_or(missing, |b| b.min(missing)));
                    }
                    at += request.align;
                }
            }
            best
        };
        best(true).or_else(|| best(false))
    }

    fn back(&mut self, segment: SegmentKey, chunks: Range<u32>) {
        let (base, bytes) = self.heap.chunk_span(segment, &chunks).unwrap();
        let stretches = self.heap.stretches(segment, &chunks);
        self.heap.back(segment, chunks.clone()).unwrap();
        assert!(self.heap.back(segment, chunks.clone()).is_err(), "pages can not come twice");
        let mut at = chunks.start;
        for (stretch, inside) in stretches {
            assert_eq!(stretch.start, at, "stretches leave something out");
            at = stretch.end;
            let step = self.bundle_chunks.max(1) as usize;
            for first in stretch.clone().step_by(step).filter(|_| inside && step > 1) {
                let bundle = first..(first + step as u32).min(stretch.end);
                let (base, bytes) = self.heap.chunk_span(segment, &bundle).unwrap();
                let touched = self.live.iter().filter(|(_, s)| overlap(s, &(base..base + bytes))).count();
                assert!(touched <= 1, "a bundle under two blocks");
                self.heap.tie(segment, bundle.clone()).unwrap();
                assert!(bundle.len() < 2 || self.heap.tie(segment, bundle.clone()).is_err(), "a bundle is tied once");
                self.bundles.extend((bundle.len() > 1).then_some(base..base + bytes));
            }
        }
        assert_eq!(at, chunks.end, "stretches leave something out");
        self.backed.extend((base..base + bytes).step_by(CHUNK as usize));
        // New pages: what a freed block had queued before its pages went is over.
        self.untouched(&(base..base + bytes));
    }

    fn unbacked(&mut self, base: u64, bytes: u64) {
        for chunk in (base..base + bytes).step_by(CHUNK as usize) {
            assert!(self.backed.remove(&chunk), "a chunk without pages was given back");
        }
        for bundle in self.bundles.iter().filter(|b| overlap(b, &(base..base + bytes))) {
            assert!(base <= bundle.start && bundle.end <= base + bytes, "a part of {bundle:x?} was given back");
        }
        self.bundles.retain(|b| !overlap(b, &(base..base + bytes)));
        // Nothing touches pages that the host saw idle.
        self.untouched(&(base..base + bytes));
    }

    fn claimed(&mut self, claims: Vec<Claim>) {
        for claim in claims {
            let span = claim.base..claim.base + claim.bytes;
            assert!(self.live.iter().all(|(_, s)| !overlap(s, &span)), "live memory was claimed");
            for q in self.queued.iter().filter(|q| overlap(&q.span, &span)) {
                assert!(claim.uses.contains(q.stream), "a claim hides that {:?} still writes to it", q.stream);
                assert!(usable(q.stream), "the window's memory was claimed");
            }
            self.claims.push(claim);
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Alloc { bytes, align, stream, how } => self.alloc(bytes, align, key(stream), how),
            Step::Free { at, streams } => {
                if self.live.is_empty() {
                    return;
                }
                let (block, span) = self.live.swap_remove(at % self.live.len());
                self.now += 1;
                let uses: Uses = streams.into_iter().map(key).collect();
                for stream in uses.iter() {
                    self.queued.push(Queued { span: span.clone(), stream, at: self.now, forced: false });
                }
                // Where its pages are gone, nothing can be touched.
                if span.start < BASE + (1 << 29) {
                    let chunks = span.start / CHUNK..span.end.div_ceil(CHUNK);
                    for chunk in chunks.map(|c| c * CHUNK).filter(|c| !self.backed.contains(c)).collect::<Vec<_>>() {
                        self.untouched(&(chunk..chunk + CHUNK));
                    }
                }
                self.heap.free(block, uses.clone(), Stamp(self.now)).unwrap();
                assert!(self.heap.free(block, uses, Stamp(self.now)).is_err(), "a block can not be freed twice");
            }
            Step::Complete { stream, back } => {
                let (stream, upto) = (key(stream), self.now.saturating_sub(back));
                if stream != PRIVATE {
                    self.heap.completed(stream, Stamp(upto));
                    self.queued.retain(|q| q.stream != stream || q.at > upto);
                }
            }
            Step::Forget { stream } => {
                if key(stream) != PRIVATE {
                    self.heap.forget_stream(key(stream));
                    self.queued.retain(|q| q.stream != key(stream));
                }
            }
            Step::Claim { want_bytes, slabs } => {
                let claims = if slabs {
                    self.heap.claim_slabs(want_bytes, &usable)
                } else {
                    self.heap.claim_chunks(want_bytes, &(0..0), &usable, true)
                };
                if !slabs {
                    self.enough(&claims, want_bytes);
                }
                self.claimed(claims);
            }
            Step::EndClaim { at, gone } => self.end_claim(at, gone),
            Step::UnbackUsed { at } => {
                if let Some((block, _)) = self.pick(at) {
                    for chunks in self.heap.chunks_inside(block) {
                        let segment = self.heap.block(block).unwrap().segment;
                        let (base, bytes) = self.heap.chunk_span(segment, &chunks).unwrap();
                        for part in [chunks.start + 1..chunks.end, chunks.start..chunks.end - 1] {
                            let whole = self.heap.whole(segment, part.clone()) == part;
                            assert!(whole || self.heap.unback_used(block, part).is_err(), "a part of a bundle");
                        }
                        self.heap.unback_used(block, chunks.clone()).unwrap();
                        assert!(self.heap.unback_used(block, chunks).is_err(), "pages can not go twice");
                        self.unbacked(base, bytes);
                    }
                }
            }
            Step::Reback { at } => {
                if let Some((block, _)) = self.pick(at) {
                    for chunks in self.heap.missing_chunks(block) {
                        let segment = self.heap.block(block).unwrap().segment;
                        self.back(segment, chunks);
                    }
                    assert!(self.heap.missing_chunks(block).is_empty());
                }
            }
            Step::Bundles { chunks } => self.bundle_chunks = chunks,
            Step::AddSlab { bytes } => {
                let base = self.next_slab;
                if let Ok(segment) = self.heap.add_segment(base, bytes) {
                    self.slabs.push((segment, base..base + bytes));
                    // The next one begins where this one ends: slabs must not merge all the same.
                    self.next_slab += bytes;
                    let inside = base.next_multiple_of(GRANULE);
                    assert!(self.heap.add_segment(inside, GRANULE).is_err(), "two segments overlap");
                }
            }
            Step::Retag { to } => {
                self.now += 1;
                let to: Uses = to.into_iter().map(key).filter(|&s| usable(s)).collect();
                self.heap.retag(PRIVATE, &to, Stamp(self.now));
                let (mine, mut others): (Vec<_>, Vec<_>) =
                    std::mem::take(&mut self.queued).into_iter().partition(|q| q.stream == PRIVATE);
                for q in mine {
                    others.extend(to.iter().map(|stream| Queued {
                        span: q.span.clone(),
                        stream,
                        at: self.now,
                        forced: false,
                    }));
                }
                self.queued = others;
            }
            Step::TakePrivate => {
                for block in self.heap.take_private(PRIVATE) {
                    let view = self.heap.block(block).unwrap();
                    let span = view.base..view.base + view.bytes;
                    assert!(self.live.iter().all(|(_, s)| !overlap(s, &span)));
                    self.live.push((block, span));
                }
                for q in self.queued.iter().filter(|q| q.stream == PRIVATE) {
                    let owned = |b: u64| self.live.iter().any(|(_, s)| s.contains(&b));
                    assert!(owned(q.span.start) && owned(q.span.end - 1), "the window left memory behind");
                }
                // Whatever its graph queued before is the graph's to order now.
                let live = self.live.clone();
                self.queued.retain(|q| q.stream != PRIVATE && !live.iter().any(|(_, s)| overlap(s, &q.span)));
            }
        }
    }

    fn pick(&self, at: usize) -> Option<(BlockKey, Range<u64>)> {
        (!self.live.is_empty()).then(|| self.live[at % self.live.len()].clone())
    }

    /// Chunks and bundles that could be claimed.
    fn free_units(&self, claims: &[Claim]) -> Vec<Range<u64>> {
        let private: Vec<_> = self.queued.iter().filter(|q| q.stream == PRIVATE).collect();
        let single = |c: &u64| !self.bundles.iter().any(|b| b.contains(c));
        let chunks = self.backed.iter().copied().filter(single).map(|c| c..c + CHUNK);
        let free = |span: &Range<u64>| {
            self.live.iter().all(|(_, s)| !overlap(s, span))
                && self.claims.iter().chain(claims).all(|c| !overlap(&(c.base..c.base + c.bytes), span))
                && private.iter().all(|q| !overlap(&q.span, span))
        };
        chunks.chain(self.bundles.iter().cloned()).filter(free).collect()
    }

    /// A claim of chunks takes just enough, and all there is where that is too little.
    fn enough(&self, claims: &[Claim], want_bytes: u64) {
        let got: u64 = claims.iter().map(|c| c.bytes).sum();
        let left = self.free_units(claims);
        if got < want_bytes {
            assert!(left.is_empty(), "{left:x?} is free but was not claimed");
        }
        if got >= want_bytes + CHUNK {
            let last = claims.last().unwrap();
            let last = last.base..last.base + last.bytes;
            assert!(self.bundles.contains(&last) && got - (last.end - last.start) < want_bytes, "more than needed");
            let smaller = left.iter().find(|unit| unit.end - unit.start < last.end - last.start);
            assert!(smaller.is_none(), "{smaller:x?} would have done instead of {last:x?}");
        }
    }

    fn end_claim(&mut self, at: usize, gone: bool) {
        if self.claims.is_empty() {
            return;
        }
        let claim = self.claims.swap_remove(at % self.claims.len());
        if !gone {
            self.heap.release_claim(claim.block).unwrap();
            return;
        }
        match claim.chunks {
            Some(_) => {
                self.heap.unback_claim(claim.block).unwrap();
                self.unbacked(claim.base, claim.bytes);
            }
            None => {
                self.heap.remove_segment(claim.segment).unwrap();
                self.slabs.retain(|(s, _)| *s != claim.segment);
                self.untouched(&(claim.base..claim.base + claim.bytes));
            }
        }
    }

    fn judge(&mut self) {
        self.heap.check().unwrap();
        for bundle in &self.bundles {
            let block = self.heap.find(bundle.start).unwrap();
            let view = self.heap.block(block).unwrap();
            let base = self.heap.segments().find(|s| s.key == view.segment).unwrap().base;
            let chunks = ((bundle.start - base) / CHUNK) as u32..((bundle.end - base) / CHUNK) as u32;
            assert!(
                chunks.clone().all(|c| self.heap.bundle(view.segment, c) == chunks),
                "bundle {bundle:x?} came apart"
            );
        }
        for (block, span) in &self.live {
            let view = self.heap.block(*block).unwrap();
            assert_eq!((view.base..view.base + view.bytes, view.state), (span.clone(), BlockState::Used));
            assert_eq!(self.heap.find(span.start), Some(*block));
            assert_eq!(self.heap.find(span.end - 1), Some(*block));
        }
        let free: u64 = self.free_runs().iter().map(|r| r.end - r.start).sum();
        let stats = self.heap.stats();
        assert_eq!(stats.free_bytes, free, "bytes were lost or doubled");
        assert_eq!(stats.largest_free_bytes, self.heap.largest_free_bytes());
        assert_eq!(stats.used_blocks as usize, self.live.len());
    }
}

impl StateMachineTest for Walk {
    type SystemUnderTest = Self;
    type Reference = Reference;

    fn init_test((): &()) -> Self {
        Self::new()
    }

    fn apply(mut walk: Self, (): &(), step: Step) -> Self {
        walk.step(step);
        walk.judge();
        walk
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_walk_breaks_a_rule(sequential 1..120 => Walk);
}

/// The same with one stream, where the heap takes its short cuts.
#[derive(Debug)]
struct Alone;

impl ReferenceStateMachine for Alone {
    type State = ();
    type Transition = Step;

    fn init_state() -> BoxedStrategy<()> {
        Just(()).boxed()
    }

    fn transitions((): &()) -> BoxedStrategy<Step> {
        let alone = |step| match step {
            Step::Alloc { bytes, align, how, .. } => Step::Alloc { bytes, align, stream: 0, how },
            Step::Free { at, streams } => Step::Free { at, streams: streams.into_iter().map(|_| 0).collect() },
            Step::Complete { back, .. } => Step::Complete { stream: 0, back },
            Step::Forget { .. } | Step::Retag { .. } | Step::TakePrivate => Step::Reback { at: 0 },
            other => other,
        };
        Reference::transitions(&()).prop_map(alone).boxed()
    }

    fn apply((): (), _: &Step) {}
}

#[derive(Debug)]
struct LoneWalk;

impl StateMachineTest for LoneWalk {
    type SystemUnderTest = Walk;
    type Reference = Alone;

    fn init_test((): &()) -> Walk {
        Walk::new_without_windows()
    }

    fn apply(walk: Walk, (): &(), step: Step) -> Walk {
        <Walk as StateMachineTest>::apply(walk, &(), step)
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_walk_of_one_stream_breaks_a_rule(sequential 1..120 => LoneWalk);
}
