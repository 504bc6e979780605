//! One capture: the sealed window, the driver's recording, the dependency record.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evergraph_pool::driver::{CaptureMode, DevicePtr, DriverResult, DynDriver, HandleMap};
use evergraph_pool::{
    AllocationId, Dependent, Hold, Pool, Registration, Resolved, ScratchPolicy, Stream, Use, Window, mutant,
};
use smallvec::SmallVec;

use crate::graph::OwnedGraph;
use crate::reach::Reaches;
use crate::results::Results;
use crate::scan::{Found, Layouts, Scan, Shape, scan};
use crate::scope::{Keep, Lost, Miss, Notes};
use crate::seal::{Seal, take_not_loaded};
use crate::{CacheConfig, CacheError, Request, Scope};

/// A recorded graph with its dependency record, registered with its pools; not instantiated yet.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) graph: OwnedGraph,
    pub(crate) shape: Shape,
    pub(crate) registrations: SmallVec<[Registration; 2]>,
    pub(crate) keeps: SmallVec<[Keep; 4]>,
    pub(crate) reaches: Reaches,
    pub(crate) results: Results,
    pub(crate) zeroed: Vec<(DevicePtr, usize)>,
    pub(crate) opaque: Option<String>,
    /// Undeclared pointers that were pinned.
    pub(crate) undeclared: usize,
    pub(crate) capture_took: Duration,
    pub(crate) scan_took: Duration,
}

/// Why there is no capture. The stream records no more, and everything handed out went back.
#[derive(Debug)]
pub(crate) enum Failure<E> {
    /// Memory was not ready inside the window.
    Miss(Miss),
    /// Code was not loaded before the window.
    NotLoaded(String),
    /// The driver called the capture off, for somebody's illegal call.
    Lost,
    /// The cache, a pool or the driver refused it.
    Refused(CacheError),
    /// The closure's own error.
    Error(E),
}

impl<E> Failure<E> {
    fn of(error: impl Into<CacheError>) -> Self {
        Self::Refused(error.into())
    }
}

/// Ends and discards the driver's capture on every way out that did not end it.
struct Recording<'a> {
    driver: &'a DynDriver,
    stream: &'a Stream,
    open: bool,
}

impl<'a> Recording<'a> {
    fn begin(stream: &'a Stream, mode: CaptureMode) -> DriverResult<Self> {
        let driver = stream.driver();
        driver.bind()?;
        driver.begin_capture(stream.handle(), mode)?;
        Ok(Self { driver, stream, open: true })
    }

    fn end(mut self) -> DriverResult<OwnedGraph> {
        // A call that failed may not have reached the driver: then the drop ends the recording.
        let handle = self.driver.bind().and_then(|()| self.driver.end_capture(self.stream.handle()))?;
        self.open = false;
        Ok(OwnedGraph::new(self.driver, handle))
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.open && !mutant::is("cache.capture-left-open") {
            let end = || self.driver.bind().and_then(|()| self.driver.end_capture(self.stream.handle()));
            // Once more, because a stream that captures for ever is of no use to anybody.
            if let Ok(handle) = end().or_else(|_| end()) {
                drop(OwnedGraph::new(self.driver, handle));
            }
        }
    }
}

/// What a capture is made with.
pub(crate) struct Setup<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) dependent: Arc<dyn Dependent>,
    pub(crate) policy: ScratchPolicy,
    /// How declared memory is held.
    pub(crate) hold: Hold,
    pub(crate) config: &'a CacheConfig,
    pub(crate) layouts: &'a Layouts,
    pub(crate) lost: &'a Lost,
}

/// Captures `body` once.
pub(crate) fn capture<E>(
    setup: Setup<'_>,
    body: &mut dyn FnMut(&Scope<'_>) -> Result<(), E>,
) -> Result<Captured, Failure<E>> {
    let Setup { request, dependent, policy, hold, config, layouts, lost } = setup;
    let start = Instant::now();
    // Windows open before the recording and close after it; on an early way out they cancel after it ended.
    let mut windows: SmallVec<[Window; 2]> = SmallVec::new();
    // An arena is of one stream.
    let there = if matches!(policy, ScratchPolicy::Shared(_)) { ScratchPolicy::Pin } else { policy.clone() };
    let first = request.pool.begin_window(Arc::clone(&dependent), policy);
    windows.push(first.map_err(Failure::of)?);
    for pool in request.others {
        windows.push(pool.begin_declarations(Arc::clone(&dependent)).map_err(Failure::of)?);
    }
    for (pool, stream) in request.beside {
        let window = pool.begin_window_on(Arc::clone(&dependent), stream, there.clone());
        windows.push(window.map_err(Failure::of)?);
    }
    let notes = Notes::default();
    let mode = if mutant::is("cache.global-mode") { CaptureMode::Global } else { config.mode };
    let recording = Recording::begin(request.stream, mode).map_err(Failure::of)?;
    let result = {
        let _seal = Seal::new();
        let _ = take_not_loaded();
        body(&Scope::new(request, &windows, &notes, hold, lost))
    };
    if let Err(error) = result {
        let lost = recording.end().err();
        let not_loaded = take_not_loaded();
        return Err(match (notes.miss.get(), not_loaded, lost) {
            (Some(miss), ..) => Failure::Miss(miss),
            (_, Some(name), _) => Failure::NotLoaded(name),
            (.., Some(lost)) => {
                tracing::warn!(%lost, "an illegal call broke a capture");
                Failure::Lost
            }
            _ => Failure::Error(error),
        });
    }
    let graph = recording.end().map_err(|lost| {
        tracing::warn!(%lost, "an illegal call broke a capture");
        Failure::Lost
    })?;
    let capture_took = start.elapsed();

    let start = Instant::now();
    let mut scan = scan(request.stream.driver(), graph.handle(), layouts, span_of(request)).map_err(Failure::of)?;
    if scan.shape.nodes.is_empty() && !mutant::is("cache.empty-accepted") {
        return Err(Failure::of(CacheError::EmptyGraph { device: request.stream.device() }));
    }
    let undeclared = Audit { request, windows: &windows, notes: &notes, strict: config.strict }
        .run(&mut scan)
        .map_err(Failure::of)?;
    let scan_took = start.elapsed();

    let results = Results::of(request, &notes);
    let mut registrations = SmallVec::new();
    for window in windows {
        registrations.push(window.finish().map_err(Failure::of)?);
    }
    Ok(Captured {
        graph,
        shape: scan.shape,
        registrations,
        keeps: notes.take_keeps(),
        reaches: notes.reaches.take(),
        results,
        zeroed: notes.zeroed.take(),
        opaque: scan.opaque,
        undeclared,
        capture_took,
        scan_took,
    })
}

/// Compares what the scan found with what was declared and handed out.
struct Audit<'a> {
    request: &'a Request<'a>,
    windows: &'a [Window],
    notes: &'a Notes,
    strict: bool,
}

/// Where a pointer leads.
type Hits = SmallVec<[Resolved; 4]>;

/// Where the pools of a request have anything.
fn span_of(request: &Request<'_>) -> RangeInclusive<u64> {
    let spans = request.pools().filter_map(Pool::address_span);
    // Without any, null, which is nobody's.
    spans.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).map_or(0..=0, |(low, high)| low.0..=high.0)
}

/// Memory that was handed out, for look-ups.
struct Handed {
    /// Disjoint, ascending: start and end.
    spans: Vec<(u64, u64)>,
    /// Where a hand-out ends, ascending.
    ends: Vec<u64>,
}

impl Handed {
    fn new(handed: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut all: Vec<(u64, u64)> = handed.collect();
        let mut ends: Vec<u64> = all.iter().map(|span| span.1).collect();
        ends.sort_unstable();
        all.sort_unstable();
        let mut spans: Vec<(u64, u64)> = Vec::with_capacity(all.len());
        for (start, end) in all {
            match spans.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => spans.push((start, end)),
            }
        }
        Self { spans, ends }
    }

    fn has(&self, address: u64) -> bool {
        let after = self.spans.partition_point(|span| span.0 <= address);
        after.checked_sub(1).is_some_and(|index| address < self.spans[index].1)
    }

    fn ends_at(&self, address: u64) -> bool {
        self.ends.binary_search(&address).is_ok()
    }
}

impl Audit<'_> {
    /// Pins what nobody declared; returns how many pointers that took.
    fn run(&self, scan: &mut Scan) -> Result<usize, CacheError> {
        let handed = self.windows.iter().flat_map(Window::handed_out);
        let handed = Handed::new(handed.map(|h| (h.ptr.0, h.ptr.0 + h.bytes as u64)));
        let declared = self.notes.declared_set();
        let mut pinned = 0;
        // Most pointers lead to the graph's own scratch.
        scan.pointers.retain(|found| !handed.has(found.address));
        for (found, hits) in scan.pointers.iter().zip(self.hits(&scan.pointers)) {
            pinned += usize::from(self.pointer(found, &hits, &handed, &declared)?);
        }
        for (found, hits) in scan.host.iter().zip(self.hits(&scan.host)) {
            if !self.notes.keeps.borrow().is_empty() {
                continue; // somebody keeps it
            }
            if hits.is_empty() {
                return Err(CacheError::UnownedHost { node: found.node_name(), address: DevicePtr(found.address) });
            }
            pinned += usize::from(self.pointer(found, &hits, &handed, &declared)?);
        }
        if let Some(why) = scan.needs_owner.take()
            && self.notes.keeps.borrow().is_empty()
        {
            scan.opaque.get_or_insert(why);
        }
        Ok(pinned)
    }

    /// Where each pointer leads.
    fn hits(&self, found: &[Found]) -> Vec<Hits> {
        let ptrs: Vec<DevicePtr> = found.iter().map(|f| DevicePtr(f.address)).collect();
        let mut hits = vec![Hits::new(); ptrs.len()];
        for pool in self.request.pools() {
            for (index, hit) in pool.resolve_many(&ptrs) {
                hits[index].push(hit);
            }
        }
        hits
    }

    /// Whether an undeclared pointer was pinned.
    fn pointer(
        &self,
        found: &Found,
        hits: &Hits,
        handed: &Handed,
        declared: &HandleMap<AllocationId, ()>,
    ) -> Result<bool, CacheError> {
        let address = found.address;
        let known = |hit: &Resolved| hit.token.is_some_and(|t| declared.contains_key(&t.allocation));
        if hits.is_empty() || handed.has(address) {
            return Ok(false);
        }
        // One past the end of a block is where its neighbour starts: the pointer belongs to both.
        let (within, past): (Hits, Hits) = hits.iter().copied().partition(|hit| hit.offset_bytes < hit.bytes);
        if within.iter().any(known) {
            return Ok(false);
        }
        let live = within.iter().any(|hit| hit.token.is_some());
        if !live && (past.iter().any(known) || handed.ends_at(address)) {
            return Ok(false);
        }
        let culprit = within.first().or(past.first());
        if let Some(hit) = culprit
            && (self.strict || !hits.iter().any(|hit| hit.token.is_some()))
        {
            return Err(CacheError::Undeclared {
                node: found.node_name(),
                address: DevicePtr(address),
                base: hit.base,
                bytes: hit.bytes,
                owner: hit.token.map_or("nobody's".to_owned(), |t| format!("allocation {}", t.allocation)),
            });
        }
        for hit in within.iter().chain(&past) {
            if let Some(token) = hit.token
                && let Some(window) = self.windows.iter().find(|w| w.pool_id() == token.allocation.pool())
            {
                tracing::warn!(node = found.node_name(), address = %DevicePtr(address), "undeclared pointer: pinned");
                // Unknown use: reading, writing, or both.
                window.declare(token, Use::State, 0, 0, Hold::Strong)?;
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::Handed;

    /// Hand-outs overlap, because a window hands out again what was dropped inside it; look-ups find what a plain search
    /// finds.
    #[test]
    fn memory_that_was_handed_out_is_found_and_no_other() {
        let spans = [(100, 110), (120, 130), (100, 104), (106, 116), (130, 131), (50, 50)];
        let handed = Handed::new(spans.into_iter());
        for address in 40..140 {
            assert_eq!(handed.has(address), spans.iter().any(|s| s.0 <= address && address < s.1), "{address}");
            assert_eq!(handed.ends_at(address), spans.iter().any(|s| s.1 == address), "{address}");
        }
    }
}
