//! Plays events on a pool.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evergraph_graphcache::{CacheConfig, CacheError, CostTable, Counters, GraphCache, GraphKey, Ran, Request, Scope};
use evergraph_kernels::probe::{Probe, Words};
use evergraph_pool::driver::host::{HostConfig, Poison};
use evergraph_pool::driver::{DynDriver, Faulty};
use evergraph_pool::{
    AllocationId, Arena, DeviceSlice, Pool, PoolConfig, PoolError, PoolMode, ScratchPolicy, Stream, Use,
};

use super::event::{Event, Header, Scratch, Summary, Work};
use super::lines::bad;
use super::report::{Graphs, Miss, Report};
use super::settling::Settling;
use super::{Options, Policy};
use crate::error::{Error, Result};

/// Memory of the host device: more than any card. Traces do not touch what they allocate, so it costs nothing.
const HOST_BYTES: usize = 192 << 30;
/// Most graphs that a trace may define at a time.
const MOST_GRAPHS: usize = 4096;
/// A graph's kernels touch this many words of each slice: what they compute is no matter.
const TOUCHED_WORDS: usize = 64;

type Slice = DeviceSlice<u8>;

/// What an id names.
#[derive(Debug)]
enum Slot {
    Live {
        slice: Slice,
        stream: u32,
    },
    /// There was no memory for it.
    Missed,
}

#[derive(Debug)]
struct Graph {
    work: Work,
    policy: ScratchPolicy,
}

/// Counts at a moment, to be taken from later ones.
#[derive(Clone, Debug, Default)]
struct Mark {
    given_back_bytes: u64,
    driver_calls: u64,
    lost: u64,
    captures: u64,
}

#[derive(Debug)]
pub(super) struct Player {
    // Dropped in this order: graphs, then memory, then code, then the device.
    cache: GraphCache,
    graphs: HashMap<String, Graph>,
    slots: HashMap<u64, Slot>,
    arenas: HashMap<u32, Arena>,
    pool: Pool,
    probe: Option<Arc<Probe>>,
    streams: Vec<Option<Stream>>,
    driver: Arc<Faulty>,
    policy: Policy,
    /// Driver calls that were made before the first event.
    calls_before: Vec<(&'static str, u64)>,
    settling: Settling,
    steady: Option<Mark>,
    /// Graphs that the policy dropped.
    dropped: u64,
    playing: Duration,
    report: Report,
}

impl Player {
    pub(super) fn new(options: &Options, header: &Header) -> Result<Self> {
        let device = options.device.driver(HostConfig::default().memory(HOST_BYTES).poison(Poison::Off))?;
        let driver = Faulty::new(device);
        let dynamic: DynDriver = driver.clone();
        let limit_bytes = options.limit_bytes.or(header.limit_bytes.map(|bytes| bytes as usize));
        let mut config = PoolConfig::new(options.mode);
        config.limit_bytes = limit_bytes;
        if let Some(bytes) = header.slab_bytes {
            config.slab_bytes = bytes as usize;
        }
        if options.policy == Policy::FlushAll {
            if options.mode != PoolMode::Slab {
                return Err(Error::argument("--policy", "flush-all with --pool slab", "--pool vmm"));
            }
            // Buffers as they were asked for; none goes before all go.
            config = config.smallest_slab(1 << 20);
            config.slab_cached_percent = 1 << 20;
        }
        let pool = Pool::new(dynamic, config)?;
        let report = Report {
            trace: header.name.clone(),
            format: header.format.name(),
            device: options.device.backend(),
            pool: options.mode.to_string(),
            policy: options.policy.name(),
            limit_bytes,
            ..Report::default()
        };
        // Repairs are chosen by price; fixed ones make a replay the same each time, on every device.
        let mut costs = CostTable::h200().flat_remap(0.05);
        costs.refine = false;
        Ok(Self {
            cache: GraphCache::new(CacheConfig::default().max_entries(MOST_GRAPHS).costs(costs)),
            graphs: HashMap::new(),
            slots: HashMap::new(),
            arenas: HashMap::new(),
            pool,
            probe: None,
            streams: Vec::new(),
            calls_before: driver.counts(),
            driver,
            policy: options.policy,
            settling: Settling::default(),
            steady: None,
            dropped: 0,
            playing: Duration::ZERO,
            report,
        })
    }

    /// Plays events with the numbers of their lines.
    pub(super) fn play(&mut self, events: &[(u64, Event)]) -> Result<()> {
        let since = Instant::now();
        let played = events.iter().try_for_each(|(line, event)| self.event(*line, event));
        self.playing += since.elapsed();
        played
    }

    fn event(&mut self, line: u64, event: &Event) -> Result<()> {
        self.report.events += 1;
        match event {
            Event::Alloc { id, bytes, .. } | Event::Free { id, bytes: Some(bytes), .. } if *id == 0 && *bytes == 0 => {
                // RMM's log: nothing, at no address.
                Ok(())
            }
            Event::Alloc { id, bytes, purpose, stream } => {
                if self.slots.contains_key(id) {
                    return Err(bad(line, "an id that is free", format!("{id:#x}, which is allocated")));
                }
                self.report.allocs += 1;
                self.report.largest_bytes = self.report.largest_bytes.max(*bytes);
                let on = self.stream(*stream)?;
                let watched = self.watched();
                let taken = self.pool.alloc_for::<u8>(*bytes as usize, *purpose, &on);
                self.relieve(watched)?;
                let slot = match taken {
                    Ok(slice) => Slot::Live { slice, stream: *stream },
                    Err(error) if error.is_out_of_memory() => {
                        self.miss(line, *bytes);
                        Slot::Missed
                    }
                    Err(error) => return Err(error.into()),
                };
                self.slots.insert(*id, slot);
                Ok(())
            }
            Event::Free { id, bytes, stream } => {
                let Entry::Occupied(slot) = self.slots.entry(*id) else {
                    return Err(bad(line, "an id that is allocated", format!("{id:#x}, which is not")));
                };
                if let (Slot::Live { slice, .. }, Some(bytes)) = (slot.get(), bytes)
                    && slice.bytes() as u64 != *bytes
                {
                    return Err(bad(line, format!("a free of {} bytes", slice.bytes()), bytes.to_string()));
                }
                self.report.frees += 1;
                if let Slot::Live { slice, stream: home } = slot.remove()
                    && let Some(last) = stream
                    && *last != home
                {
                    let last = self.stream(*last)?;
                    slice.record_stream(&last)?;
                }
                Ok(())
            }
            Event::Graph { graph, work } => self.define(line, graph, work),
            Event::Run { graph } => self.run(line, graph),
            Event::Drop { graph } => match self.graphs.remove(graph) {
                Some(_) => {
                    self.cache.remove(&GraphKey::new(graph.as_str()));
                    Ok(())
                }
                None => Err(bad(line, "a graph that was defined", graph)),
            },
            Event::Wait { stream } => Ok(self.stream(*stream)?.synchronize()?),
            Event::Trim { bytes } => {
                self.pool.trim_to(usize::try_from(*bytes).unwrap_or(usize::MAX)).map(drop).map_err(Error::from)
            }
            Event::Step => {
                self.report.steps += 1;
                if self.settling.step() {
                    self.steady = Some(self.mark());
                }
                Ok(())
            }
        }
    }

    fn stream(&mut self, number: u32) -> Result<Stream> {
        let place = number as usize;
        if self.streams.len() <= place {
            self.streams.resize(place + 1, None);
        }
        if let Some(stream) = &self.streams[place] {
            return Ok(stream.clone());
        }
        let stream = Stream::new(self.pool.driver())?;
        self.streams[place] = Some(stream.clone());
        Ok(stream)
    }

    fn miss(&mut self, line: u64, bytes: u64) {
        self.report.ooms += 1;
        self.report.oom = true;
        self.report.first_oom.get_or_insert(Miss { line, bytes });
    }

    // ---- shortage

    /// What is to be compared after an event, where anybody wants to know.
    fn watched(&self) -> Option<(u64, Instant)> {
        let wanted = self.policy == Policy::FlushAll || !self.graphs.is_empty();
        wanted.then(|| (self.pool.counters().give_backs, Instant::now()))
    }

    /// After an event that may have taken memory from somebody.
    fn relieve(&mut self, watched: Option<(u64, Instant)>) -> Result<()> {
        let Some((give_backs, since)) = watched else { return Ok(()) };
        if self.pool.counters().give_backs == give_backs {
            return Ok(());
        }
        if self.policy == Policy::FlushAll {
            self.dropped += self.cache.len() as u64;
            self.cache.clear();
            self.pool.trim_to(0)?;
            self.report.flushes += 1;
        }
        self.settling.trouble(since);
        Ok(())
    }

    // ---- graphs

    fn define(&mut self, line: u64, name: &str, work: &Work) -> Result<()> {
        if self.graphs.contains_key(name) {
            return Err(bad(line, "a name that is free", format!("{name}, which is a graph")));
        }
        if self.graphs.len() == MOST_GRAPHS {
            return Err(bad(line, format!("at most {MOST_GRAPHS} graphs at a time"), "another one"));
        }
        let stream = self.stream(work.stream)?;
        if self.probe.is_none() {
            let probe = Probe::load(Arc::clone(self.pool.driver()))?;
            self.probe = Some(Arc::new(probe));
        }
        let policy = match work.policy {
            Scratch::Track => ScratchPolicy::Track,
            Scratch::Pin => ScratchPolicy::Pin,
            Scratch::Share => ScratchPolicy::Shared(match self.arenas.entry(work.stream) {
                Entry::Occupied(arena) => arena.get().clone(),
                Entry::Vacant(place) => place.insert(self.pool.arena(&stream)?).clone(),
            }),
        };
        self.graphs.insert(name.to_owned(), Graph { work: work.clone(), policy });
        Ok(())
    }

    fn run(&mut self, line: u64, name: &str) -> Result<()> {
        let (Some(graph), Some(probe)) = (self.graphs.get(name), &self.probe) else {
            return Err(bad(line, "a graph that was defined", name));
        };
        let Some(Some(stream)) = self.streams.get(graph.work.stream as usize).cloned() else {
            return Err(bad(line, "a stream that is there", graph.work.stream.to_string()));
        };
        let watched = self.watched();
        let since = Instant::now();
        self.report.graphs.get_or_insert_default().runs += 1;
        self.settling.run();
        let (reads, writes) = (self.members(line, &graph.work.reads)?, self.members(line, &graph.work.writes)?);
        let (Some(reads), Some(writes)) = (reads, writes) else {
            // There was no memory for a part of it.
            self.report.graphs.get_or_insert_default().skipped += 1;
            return Ok(());
        };
        let bound: Vec<AllocationId> = reads.iter().chain(&writes).map(|slice| slice.allocation()).collect();
        let key = GraphKey::new(name);
        let request = Request::new(&key, &self.pool, &stream).policy(graph.policy.clone()).bound(&bound);
        let ran = self.cache.run(&request, |scope| body(scope, probe, &graph.work, &reads, &writes));
        let lacking = match ran {
            Ok(outcome) => {
                if outcome.ran != Ran::Replayed {
                    self.settling.trouble(since);
                }
                None
            }
            Err(CacheError::Pool(error)) if error.is_out_of_memory() => Some(wanted(&error)),
            Err(error) => return Err(error.into()),
        };
        if let Some(bytes) = lacking {
            self.settling.trouble(since);
            self.miss(line, bytes);
        }
        self.relieve(watched)
    }

    /// The slices of these ids; `None` if there was no memory for one of them.
    fn members(&self, line: u64, ids: &[u64]) -> Result<Option<Vec<&Slice>>> {
        let mut slices = Vec::with_capacity(ids.len());
        for id in ids {
            match self.slots.get(id) {
                Some(Slot::Live { slice, .. }) => slices.push(slice),
                Some(Slot::Missed) => return Ok(None),
                None => {
                    return Err(bad(
                        line,
                        "a graph whose reads and writes are allocated",
                        format!("{id:#x}, which is not"),
                    ));
                }
            }
        }
        Ok(Some(slices))
    }

    // ---- the end

    fn driver_calls(&self) -> Vec<(&'static str, u64)> {
        let before = |name: &str| self.calls_before.iter().find(|(known, _)| *known == name).map_or(0, |(_, n)| *n);
        // Making a device current that is current already is none.
        let counts = self.driver.counts().into_iter().filter(|(name, _)| *name != "bind");
        counts.map(|(name, n)| (name, n - before(name))).filter(|(_, n)| *n > 0).collect()
    }

    fn mark(&self) -> Mark {
        let cache = self.cache.counters();
        Mark {
            given_back_bytes: self.pool.counters().given_back_bytes,
            driver_calls: self.driver_calls().iter().map(|(_, n)| n).sum(),
            lost: self.dropped + cache.pool_evictions,
            captures: captures(&cache),
        }
    }

    pub(super) fn finish(mut self, summary: Summary) -> Result<Report> {
        let since = Instant::now();
        for stream in self.streams.iter().flatten() {
            stream.synchronize()?;
        }
        self.playing += since.elapsed();
        self.settling.close();
        let end = self.mark();
        let (stats, counters, cache) = (self.pool.stats(), self.pool.counters(), self.cache.counters());
        let calls = self.driver_calls();
        let report = &mut self.report;
        report.reserved_peak_bytes = stats.reserved_bytes.peak;
        report.allocated_peak_bytes = stats.allocated_bytes.peak;
        report.requested_peak_bytes = stats.requested_bytes.peak;
        report.give_backs = counters.give_backs;
        report.given_back_bytes = counters.given_back_bytes;
        report.driver_calls = calls.into_iter().collect();
        report.recorded_failures = summary.recorded_failures;
        report.seconds = self.playing.as_secs_f64();
        let left = self.slots.values().filter_map(|slot| match slot {
            Slot::Live { slice, .. } => Some(slice.bytes() as u64),
            Slot::Missed => None,
        });
        (report.leaked_allocations, report.leaked_bytes) = left.fold((0, 0), |(n, sum), bytes| (n + 1, sum + bytes));
        if let Some(graphs) = &mut report.graphs {
            let steady = self.steady.clone().unwrap_or_else(|| end.clone());
            *graphs = Graphs {
                captures: cache.captures,
                replays: cache.replays,
                remaps: cache.remaps,
                updates: cache.updates,
                recaptures: cache.recaptures,
                eager: cache.eager,
                stale: cache.stale,
                lost: end.lost,
                was_steady: self.settling.started,
                spells: self.settling.spells,
                unsteady_ms: self.settling.unsteady.as_secs_f64() * 1e3,
                given_back_bytes_since: end.given_back_bytes - steady.given_back_bytes,
                driver_calls_since: end.driver_calls - steady.driver_calls,
                lost_since: end.lost - steady.lost,
                captures_since: end.captures - steady.captures,
                ..*graphs
            };
        }
        Ok(self.report)
    }
}

/// What a graph's work is: it touches the first words of everything that it names.
fn body(scope: &Scope<'_>, probe: &Probe, work: &Work, reads: &[&Slice], writes: &[&Slice]) -> Result<(), CacheError> {
    for slice in reads {
        scope.declare(*slice, Use::Input)?;
    }
    for slice in writes {
        scope.declare(*slice, Use::State)?;
    }
    let scratch = work.scratch.iter().map(|bytes| scope.alloc::<u8>(*bytes as usize)).collect::<Result<Vec<_>, _>>()?;
    let stream = scope.stream().handle();
    let words = |slice: &Slice| Words::new(slice.ptr(), (slice.len() / 4).min(TOUCHED_WORDS));
    let results: Vec<Words> = scratch.iter().chain(writes.iter().copied()).map(words).filter(|w| w.len > 0).collect();
    let kernels = results.len().max(work.kernels as usize);
    for (i, result) in results.iter().cycle().take(kernels).enumerate() {
        probe.fill(stream, *result, i as u32)?;
    }
    if let Some(result) = results.first() {
        for read in reads.iter().map(|slice| words(slice)).filter(|words| words.len > 0) {
            probe.add(stream, read, 1, *result)?;
        }
    }
    Ok(())
}

fn captures(counters: &Counters) -> u64 {
    counters.captures + counters.updates + counters.recaptures
}

fn wanted(error: &PoolError) -> u64 {
    match error {
        PoolError::OutOfMemory(error) => error.requested_bytes as u64,
        _ => 0,
    }
}
