//! The cache: look-up, the launch of undisturbed graphs, the bounds.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evergraph_pool::driver::{DriverResult, ExecHandle};
use evergraph_pool::{Element, Output, mutant};
use parking_lot::Mutex;

use crate::cost::{Costs, StepTimes};
use crate::counters::Tally;
use crate::entry::{Entry, State};
use crate::graph::Graph;
use crate::key::FullKey;
use crate::lru::Lru;
use crate::near;
use crate::outcome::{Cause, Outcome, Ran};
use crate::repair::Run;
use crate::results;
use crate::scan::Layouts;
use crate::scope::{Lost, Made};
use crate::seal::sealed;
use crate::{CacheConfig, CacheError, Counters, GraphKey, Request, Scope};

/// A bounded cache of captured graphs. Clones are the same cache; any thread may use it.
///
/// # Reuse and capture
/// A graph belongs to one key and one stream. It is launched only while every token that it depends on is
/// good; otherwise it is repaired, at the lowest predicted price. The memory that it holds is part of the
/// cache's bounds and goes when the graph is evicted, [removed](Self::remove), or dropped with the cache.
#[derive(Clone)]
pub struct GraphCache(Arc<Inner>);

pub(crate) struct Inner {
    /// Process-unique.
    id: u64,
    /// Counts uses, for the age of entries. Two threads may note the same number: then the two are of one age.
    clock: AtomicU64,
    pub(crate) config: CacheConfig,
    pub(crate) tally: Arc<Tally>,
    pub(crate) costs: Costs,
    pub(crate) layouts: Layouts,
    /// Never held while a pool, a driver or a destructor runs.
    entries: Mutex<Lru>,
    /// Results of runs that have no entry.
    loose: Mutex<Vec<(FullKey, Vec<Made>)>>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphCache").field("counters", &self.tally.snapshot()).finish_non_exhaustive()
    }
}

impl fmt::Debug for GraphCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the cache has for a request.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct GraphInfo {
    /// The driver's handle, for logs, profilers and measurements: a launch of it goes around every check.
    pub exec: ExecHandle,
    /// Nodes, children's included.
    pub nodes: usize,
    /// What it keeps to itself, bytes.
    pub bytes: usize,
    /// Dependencies on all pools.
    pub dependencies: usize,
    /// Launches since it was captured.
    pub launches: u64,
    /// Why it can not be read to its end, if so: then everything known of it is pinned.
    pub opaque: Option<String>,
    /// Whether its memory was pinned because it had to be captured again too often.
    pub pinned: bool,
    /// How long it took to read it back and look every pointer up, microseconds.
    pub scan_us: f32,
}

impl GraphCache {
    /// An empty cache.
    #[must_use]
    pub fn new(config: CacheConfig) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let costs = Costs::new(config.costs.clone());
        Self(Arc::new(Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            clock: AtomicU64::new(0),
            config,
            tally: Arc::default(),
            costs,
            layouts: Layouts::default(),
            entries: Mutex::new(Lru::new()),
            loose: Mutex::default(),
        }))
    }

    /// Runs the work of `body` once: by a launch of its graph where that is good, by repairing or capturing it
    /// where it is not, or by the closure itself.
    ///
    /// `body` queues the work on the scope's stream, and declares what the work depends on. It is called for
    /// warm-ups, captures and eager runs, several times if need be, and not at all for a replay. While it runs no
    /// lock of the cache is held.
    ///
    /// # Errors
    /// What `body` returned; errors of the cache, the pools and the driver. Stream, pools and cache stay usable;
    /// a panic of `body` leaves them usable too.
    pub fn run<E: From<CacheError>>(
        &self,
        request: &Request<'_>,
        mut body: impl FnMut(&Scope<'_>) -> Result<(), E>,
    ) -> Result<Outcome, E> {
        let inner = &self.0;
        if sealed() {
            return Err(CacheError::Nested.into());
        }
        if !inner.config.graphs {
            return inner.eager(request, &mut body, Cause::GraphsOff, &Lost::default());
        }
        let replayed = |launched: DriverResult<()>| match launched {
            Ok(()) => Ok(Outcome::plain(Ran::Replayed)),
            Err(error) => Err(inner.refused(error)),
        };
        if let Some(launched) = near::find(inner.id, request, |entry| inner.replay(request, entry)) {
            return replayed(launched);
        }
        let key = request.full_key();
        loop {
            let Some(entry) = inner.entry(&key) else {
                return inner.eager(request, &mut body, Cause::Full, &Lost::default());
            };
            near::keep(inner.id, request, &entry);
            if let Some(launched) = inner.replay(request, &entry) {
                return replayed(launched);
            }
            let slot = match entry.lock() {
                Ok(Some(slot)) => slot,
                Ok(None) => continue,
                Err(error) => return Err(inner.refused(error)),
            };
            entry.note_use(inner.now());
            let work = entry.check_out(slot);
            return Run { inner, request, body: &mut body, work }.slow();
        }
    }

    /// Takes hold of result `index` of the last run of a request, in the order in which the closure
    /// [asked](Scope::output) for them. While it is held no graph writes over it: a graph of its arena that would is run
    /// eagerly instead.
    ///
    /// # Errors
    /// `NoOutput`; `OutputGone` if another graph of the arena has written over it since; `Reentrant`.
    pub fn output<T: Element>(&self, request: &Request<'_>, index: usize) -> Result<Output<T>, CacheError> {
        let key = request.full_key();
        let entry = self.0.entries.lock().get(&key).map(Arc::clone);
        if let Some(entry) = entry
            && let Some(slot) = entry.lock()?
            && let Some(state) = &slot.state
        {
            match &state.graph {
                _ if !state.own.is_empty() => return results::own(&state.own, index),
                Some(graph) => return graph.results.hold(index),
                None => {}
            }
        }
        let loose = self.0.loose.lock();
        let made = loose.iter().find(|(known, _)| *known == key).map(|(_, made)| made.as_slice());
        results::own(made.unwrap_or(&[]), index)
    }

    /// What happened so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let entries = self.0.entries.lock();
        let mut counters = self.0.tally.snapshot();
        counters.replays += entries.all().map(|entry| entry.replays()).sum::<u64>();
        counters
    }

    /// What each step of captures and repairs took when it was last done.
    #[must_use]
    pub fn step_times(&self) -> StepTimes {
        self.0.costs.times()
    }

    /// Number of entries, those still warming up included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.entries.lock().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the graphs keep to themselves, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.entries.lock().bytes()
    }

    /// What there is for a request. `None`: no graph, or it is being worked on.
    #[must_use]
    pub fn info(&self, request: &Request<'_>) -> Option<GraphInfo> {
        let entry = Arc::clone(self.0.entries.lock().get(&request.full_key())?);
        let slot = entry.slot.lock();
        let state = slot.state.as_ref()?;
        let graph = state.graph.as_ref()?;
        Some(GraphInfo {
            exec: graph.exec.handle,
            nodes: graph.exec.shape.nodes.len(),
            bytes: graph.bytes,
            dependencies: graph.parts.iter().map(|p| p.registration.dependencies().len()).sum(),
            launches: graph.launches,
            opaque: graph.opaque.clone(),
            pinned: state.pinned,
            scan_us: graph.scan_us,
        })
    }

    /// Makes the next run of every graph of `key` capture it anew: the buffers behind it were exchanged, or
    /// filled again after their bytes were lost. The exec stays and is updated where that is proven.
    pub fn invalidate(&self, key: &GraphKey) {
        for entry in self.0.entries.lock().all().filter(|e| e.key.key == *key) {
            entry.invalidate();
        }
    }

    /// Drops every graph of `key` that nobody is working with.
    pub fn remove(&self, key: &GraphKey) {
        self.0.drop_where(|entry| entry.key.key == *key);
    }

    /// Destroys the graph of every key that nobody is working with, so that the driver gets back what it keeps for them; how
    /// many there were. Their keys stay, warmed up as they are: the next run of one captures anew. What only these
    /// graphs held goes back to the pools.
    pub fn evict_graphs(&self) -> usize {
        self.0.evict_graphs()
    }

    /// Drops every graph that nobody is working with.
    pub fn clear(&self) {
        self.0.drop_where(|_| true);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Threads may still have entries at hand: what is in them goes now.
        self.drop_where(|_| true);
    }
}

impl Inner {
    /// Launches an undisturbed graph. `None`: nothing happened, and it has to be looked into.
    #[inline]
    fn replay(&self, request: &Request<'_>, entry: &Entry) -> Option<DriverResult<()>> {
        let mut slot = entry.try_lock()?;
        let State { graph: Some(graph), tempo, own, .. } = slot.state.as_mut()? else { return None };
        if graph.bound.as_slice() != request.bound || entry.is_invalid() {
            return None;
        }
        if graph.reaches.beyond(request.touches).is_some() {
            return None;
        }
        let launched = graph.launch()?;
        if !own.is_empty() {
            own.clear();
        }
        tempo.ran();
        entry.note_use(self.now());
        if launched.is_ok() {
            entry.note_replay();
        }
        Some(launched)
    }

    /// Keeps the results of a run without an entry until the next run of its key, of as many keys as there may be entries.
    pub(crate) fn keep_loose(&self, request: &Request<'_>, made: Vec<Made>) {
        if made.is_empty() {
            return;
        }
        let key = request.full_key();
        let old = {
            let mut loose = self.loose.lock();
            let at = loose.iter().position(|(known, _)| *known == key);
            let full = loose.len() >= self.config.max_entries;
            let old = at.or(full.then_some(0)).map(|index| loose.remove(index));
            loose.push((key, made));
            old
        };
        drop(old);
    }

    /// The next number of the clock. Not a read-modify-write, which would cost as much as the rest of the check.
    #[inline]
    fn now(&self) -> u64 {
        let now = self.clock.load(Ordering::Relaxed) + 1;
        self.clock.store(now, Ordering::Relaxed);
        now
    }

    /// Finds or makes the entry. `None`: there is no room and nobody to evict.
    fn entry(&self, key: &FullKey) -> Option<Arc<Entry>> {
        loop {
            let victim = {
                let mut entries = self.entries.lock();
                if let Some(entry) = entries.get(key) {
                    return Some(Arc::clone(entry));
                }
                if entries.len() < self.config.max_entries || mutant::is("cache.unbounded") {
                    let entry = Entry::new(key.clone());
                    entry.note_use(self.now());
                    entries.insert(Arc::clone(&entry));
                    return Some(entry);
                }
                // The old goes before the new comes.
                self.oldest_idle(&mut entries, None)
            };
            self.bury(victim?);
        }
    }

    /// Evicts the oldest graph that nobody is working with; `false`: there is none.
    pub(crate) fn evict_one(&self, except: &FullKey) -> bool {
        let victim = self.oldest_idle(&mut self.entries.lock(), Some(except));
        victim.is_some_and(|victim| {
            self.bury(victim);
            true
        })
    }

    /// Evicts until `bytes` more fit; `false`: they do not.
    pub(crate) fn make_room(&self, key: &FullKey, bytes: usize) -> bool {
        let fits = || {
            let mut entries = self.entries.lock();
            entries.set_bytes(key, 0);
            let fits = entries.bytes().saturating_add(bytes) <= self.config.max_bytes;
            if fits {
                entries.set_bytes(key, bytes);
            }
            fits
        };
        while !fits() {
            if !self.evict_one(key) {
                return mutant::is("cache.unbounded");
            }
        }
        true
    }

    pub(crate) fn set_bytes(&self, key: &FullKey, bytes: usize) {
        self.entries.lock().set_bytes(key, bytes);
    }

    /// Takes the oldest entry out whose state is at home. Owning its launcher means that nobody is between check
    /// and launch, so the eviction needs no handshake of its own.
    fn oldest_idle(&self, entries: &mut Lru, except: Option<&FullKey>) -> Option<State> {
        let mut candidates = entries.oldest(64);
        candidates.retain(|e| except != Some(&e.key));
        if mutant::is("cache.evicts-newest") {
            candidates.reverse();
        }
        let (state, entry) = candidates.into_iter().find_map(|entry| Some((entry.try_evict()?, entry)))?;
        entries.remove(&entry.key);
        self.tally.replays.add(entry.replays());
        Some(state)
    }

    /// Drops an evicted state, without any lock.
    fn bury(&self, state: State) {
        if state.graph.is_some() {
            self.tally.evictions.one();
        }
        drop(state);
    }

    /// A pool is reusing the memory of this graph: what the driver keeps for it goes too.
    pub(crate) fn drop_evicted(&self, key: &FullKey) {
        let entry = self.entries.lock().get(key).map(Arc::clone);
        let graph: Option<Graph> = entry.and_then(|entry| entry.take_evicted());
        if graph.is_some() {
            self.tally.pool_evictions.one();
            self.set_bytes(key, 0);
        }
        drop(graph);
    }

    fn evict_graphs(&self) -> usize {
        let entries: Vec<_> = self.entries.lock().all().map(Arc::clone).collect();
        // One at a time: destructors run without any lock.
        let evict = |entry: &&Arc<Entry>| {
            let graph = entry.take_graph();
            if graph.is_some() {
                self.tally.evictions.one();
                self.set_bytes(&entry.key, 0);
            }
            graph.is_some()
        };
        entries.iter().filter(evict).count()
    }

    fn drop_where(&self, doomed: impl Fn(&Entry) -> bool) {
        let mut states = Vec::new();
        {
            let mut entries = self.entries.lock();
            let doomed: Vec<_> = entries.all().filter(|e| doomed(e)).map(Arc::clone).collect();
            for entry in doomed {
                if let Some(state) = entry.try_evict() {
                    entries.remove(&entry.key);
                    self.tally.replays.add(entry.replays());
                    states.push(state);
                }
            }
        }
        drop(states);
    }

    /// Counts a run that ended in an error which is not the closure's.
    pub(crate) fn refused<E: From<CacheError>>(&self, error: impl Into<CacheError>) -> E {
        self.tally.refusals.one();
        E::from(error.into())
    }
}
