//! Stress: random steps against a plain model of what must be true.
//!
//! Workers take and drop memory, use it across streams, capture and replay graphs, make room, move limits,
//! cancel, panic, and make driver calls fail, on a small device, or in a small part of a large one. Beside them
//! stand two accounts which ask neither the pool nor the cache: the *model* knows what each slice must hold and
//! what an eager run of each closure gives with the current inputs; the *ledger* reads the driver's log and knows
//! which bytes are backed, whose they are, and what each graph was captured with.
//!
//! With one thread the streams are stepped and everything follows from the seed. The steps are decoded from
//! bytes ([`Op`]), so that a fuzzer can drive the same machine through [`run_ops`].

mod beds;
pub(crate) mod ledger;
mod ops;
pub(crate) mod quiet;
mod recipe;
mod slot;
mod tally;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use evergraph_graphcache::{CacheConfig, CostTable, GraphCache};
use evergraph_kernels::probe::Probe;
use evergraph_pool::driver::host::{HostConfig, Live};
use evergraph_pool::driver::{Driver, DynDriver, Faulty};
use evergraph_pool::{ChunkClass, Pool, PoolConfig, PoolError, PoolMode};
use parking_lot::Mutex;
use serde::Serialize;

pub use ops::{Op, Seeded};

use crate::device::Device;
use beds::Beds;
use ledger::{Ledger, Seen};
use tally::Tally;
use world::{Shared, World, Wrong};

/// What to run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The device.
    pub device: Device,
    /// The pool's mode.
    pub mode: PoolMode,
    /// Steps in all.
    pub steps: u64,
    /// Workers. With one, everything follows from the seed.
    pub threads: usize,
    /// Whether driver calls are made to fail.
    pub faults: bool,
    /// Stops after this long, steps or no.
    pub longest: Option<Duration>,
    /// The seed.
    pub seed: u64,
}

impl Options {
    /// 20 000 steps of one worker with failures, seed 1, on a host device.
    #[must_use]
    pub fn new(mode: PoolMode) -> Self {
        Self { device: Device::host(), mode, steps: 20_000, threads: 1, faults: true, longest: None, seed: 1 }
    }

    /// Sets the device.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Sets the steps.
    #[must_use]
    pub fn steps(mut self, steps: u64) -> Self {
        self.steps = steps;
        self
    }

    /// Sets the workers (at least one).
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets whether driver calls are made to fail.
    #[must_use]
    pub fn faults(mut self, on: bool) -> Self {
        self.faults = on;
        self
    }

    /// Sets the longest time.
    #[must_use]
    pub fn longest(mut self, longest: Option<Duration>) -> Self {
        self.longest = longest;
        self
    }

    /// Sets the seed.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

/// Where model and world first differed.
#[derive(Clone, Debug, Serialize)]
pub struct Divergence {
    /// Which of the worker's steps, from 0; `None` after the last one.
    pub step: Option<u64>,
    /// Which worker.
    pub worker: usize,
    /// The step.
    pub op: Option<String>,
    /// What differed.
    pub what: String,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Steps done.
    pub steps: u64,
    /// How often what happened. From `give_back` on by the driver's log.
    pub events: BTreeMap<String, u64>,
    /// Kinds that could have happened and did not.
    pub missing: Vec<String>,
    /// Launches of a graph with memory that was gone, or somebody else's.
    pub bad_launches: u64,
    /// Good graphs that did not replay although nobody disturbed them.
    pub needless_refusals: u64,
    /// Objects of the driver that were made and not given back.
    pub leaks: u64,
    /// Slices handed out on top of others.
    pub overlaps: u64,
    /// Reads that did not find what the model says.
    pub corrupt_reads: u64,
    /// Errors that nothing explains, panics included.
    pub unexplained_errors: u64,
    /// The first difference.
    pub first_divergence: Option<Divergence>,
    /// The seed.
    pub seed: u64,
    /// The pool's mode.
    pub pool: String,
    /// The device.
    pub device: &'static str,
}

impl Report {
    /// Whether nothing went wrong, whatever happened or did not happen.
    #[must_use]
    pub fn sound(&self) -> bool {
        self.first_divergence.is_none()
            && self.bad_launches
                + self.needless_refusals
                + self.leaks
                + self.overlaps
                + self.corrupt_reads
                + self.unexplained_errors
                == 0
    }

    /// Whether nothing went wrong and everything that could happen did.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.sound() && self.missing.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} steps on the {} device, {} pool, seed {}", self.steps, self.device, self.pool, self.seed)?;
        for (what, n) in &self.events {
            writeln!(f, "  {what:<20} {n}")?;
        }
        let bad = [
            ("bad launches", self.bad_launches),
            ("needless refusals", self.needless_refusals),
            ("leaks", self.leaks),
            ("overlaps", self.overlaps),
            ("corrupt reads", self.corrupt_reads),
            ("unexplained errors", self.unexplained_errors),
        ];
        for (what, n) in bad {
            writeln!(f, "  {what}: {n}")?;
        }
        if !self.missing.is_empty() {
            writeln!(f, "  never happened: {}", self.missing.join(", "))?;
        }
        if let Some(first) = &self.first_divergence {
            let step = first.step.map_or_else(|| "at the end".to_owned(), |s| format!("at step {s}"));
            let op = first.op.as_deref().unwrap_or("-");
            writeln!(f, "  first divergence {step} of worker {} ({op}): {}", first.worker, first.what)?;
        }
        write!(f, "  {}", if self.passed() { "passed" } else { "FAILED" })
    }
}

/// Runs random steps from a seed.
///
/// # Errors
/// Only if the world can not be set up; what goes wrong later is in the report.
pub fn run(options: &Options) -> Result<Report, PoolError> {
    let sources = (0..options.threads.max(1)).map(|n| Seeded::new(options.seed ^ (n as u64) << 32)).collect();
    drive(options, sources)
}

/// Runs the steps that `bytes` decode to, on one thread with made-up failures, in both pool modes. For fuzzers.
///
/// # Panics
/// If anything was unsound: that is what a fuzzer looks for.
pub fn run_ops(bytes: &[u8]) {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        let options = Options::new(mode).steps(u64::MAX);
        let report = match drive(&options, vec![bytes.iter().copied()]) {
            Ok(report) => report,
            Err(error) => panic!("the world was not set up: {error}"),
        };
        assert!(report.sound(), "{report}");
    }
}

const MEMORY_BYTES: usize = 8 << 20;
const PAGE_BYTES: usize = 64 << 10;
/// How much larger memory and what is asked of it are on hardware, whose pages are 32 times as large: enough that a slice
/// can have several, little enough that copies do not take all the time.
const HARDWARE_SCALE: usize = 8;
/// Steps between two looks at the books.
const ROUND: u64 = 128;

/// What the workers find together.
#[derive(Default)]
struct Found {
    corrupt: AtomicU64,
    needless: AtomicU64,
    errors: AtomicU64,
    first: Mutex<Option<Divergence>>,
    stop: AtomicBool,
    over: AtomicBool,
    steps: AtomicU64,
}

impl Found {
    fn note(&self, worker: usize, step: Option<u64>, op: Option<Op>, wrong: Wrong) {
        let (count, what) = match wrong {
            Wrong::Corrupt(what) => (&self.corrupt, what),
            Wrong::Needless(what) => (&self.needless, what),
            Wrong::Error(what) => (&self.errors, what),
        };
        count.fetch_add(1, Ordering::Relaxed);
        self.diverged(Divergence { step, worker, op: op.map(|op| format!("{op:?}")), what });
    }

    fn diverged(&self, divergence: Divergence) {
        self.first.lock().get_or_insert(divergence);
        self.stop.store(true, Ordering::SeqCst);
    }
}

fn shared(options: &Options) -> Result<Shared, PoolError> {
    let hardware = !options.device.is_host();
    let scale = if hardware { HARDWARE_SCALE } else { 1 };
    let memory_bytes = MEMORY_BYTES * scale * options.threads.max(1);
    let chunk_bytes = options.device.page_bytes(PAGE_BYTES)?;
    let host = HostConfig::default()
        .memory(memory_bytes)
        .granularity(PAGE_BYTES)
        .stepped(options.threads <= 1)
        .exec_bytes_per_node(256);
    let driver = Faulty::new(options.device.driver(host)?);
    driver.set_logging(true);
    let dynamic: DynDriver = driver.clone();
    let probe = Probe::load(dynamic.clone())?;
    let class =
        |from, pages| ChunkClass { purpose: None, from_bytes: from * chunk_bytes, chunk_bytes: pages * chunk_bytes };
    let mut pool = PoolConfig::new(options.mode)
        .chunk(chunk_bytes)
        // Chunks of several sizes in a pool that is always short.
        .chunk_classes(&[class(2, 2), class(8, 4)])
        .smallest_slab(PAGE_BYTES * scale)
        .slots(48);
    let most_bytes = hardware.then_some(memory_bytes);
    pool.limit_bytes = most_bytes;
    let pool = Pool::new(dynamic, pool)?;
    let mut config = CacheConfig::default().max_entries(8 * options.threads.max(1));
    // Repairs are chosen by price. Fixed prices: with measured ones a seed would not say what happens.
    config.costs = CostTable::h200().flat_remap(0.05);
    config.costs.refine = false;
    let cache = GraphCache::new(config);
    Ok(Shared {
        cache,
        pool,
        probe,
        driver,
        ledger: Mutex::new(Ledger::default()),
        serials: AtomicU64::new(1),
        disturbed: AtomicU64::new(0),
        beds: Beds::default(),
        memory_bytes,
        most_bytes,
        scale,
        faults: options.faults,
        crowd: options.threads > 1,
    })
}

fn drive<S: Iterator<Item = u8> + Send>(options: &Options, sources: Vec<S>) -> Result<Report, PoolError> {
    let shared = Arc::new(shared(options)?);
    let threads = sources.len();
    let worlds = (0..threads).map(|n| World::new(&shared, n)).collect::<Result<Vec<_>, _>>()?;
    let found = Found::default();
    let until = options.longest.and_then(|longest| Instant::now().checked_add(longest));
    let steps = options.steps / threads.max(1) as u64;
    let barrier = Barrier::new(threads);
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = worlds
            .into_iter()
            .zip(sources)
            .enumerate()
            .map(|(n, (world, source))| {
                let (shared, found, barrier) = (&*shared, &found, &barrier);
                let order = options.seed.wrapping_add(n as u64);
                // One worker needs no thread of its own; its steps ask for one now and then.
                scope.spawn(move || work(shared, found, barrier, n, world, source, steps, until, order))
            })
            .collect();
        for worker in workers {
            if let Ok(counts) = worker.join() {
                tally.add(&counts);
            }
        }
    });
    let (seen, first, leaks) = leave(shared, options.seed);
    if let Some(what) = first {
        found.diverged(Divergence { step: None, worker: 0, op: None, what });
    }
    let leaked: u64 = leaks.iter().map(|(_, n)| n.unsigned_abs()).sum();
    if leaked > 0 && !found.stop.load(Ordering::SeqCst) {
        found.diverged(Divergence { step: None, worker: 0, op: None, what: format!("left behind: {leaks:?}") });
    }
    Ok(report(options, &found, &tally, seen, leaked))
}

#[allow(clippy::too_many_arguments)]
fn work(
    shared: &Shared,
    found: &Found,
    barrier: &Barrier,
    n: usize,
    mut world: World,
    mut source: impl Iterator<Item = u8> + Send,
    steps: u64,
    until: Option<Instant>,
    order: u64,
) -> Tally {
    let (mut step, mut dry) = (0, false);
    loop {
        while !dry && step < steps && !found.stop.load(Ordering::SeqCst) {
            let Some(op) = Op::decode(&mut source) else {
                dry = true;
                break;
            };
            // In a crowd nobody can tell whether a good graph was left alone; the rounds' ends are for that.
            let skip = matches!(op, Op::Quiet) && shared.crowd;
            if !skip && let Err(wrong) = on_a_thread(shared, &mut world, op) {
                found.note(n, Some(step), Some(op), wrong);
            }
            step += 1;
            found.steps.fetch_add(1, Ordering::Relaxed);
            if step % ROUND == 0 || until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
        }
        if barrier.wait().is_leader() {
            shared.account();
            if let Some(what) = shared.ledger.lock().first() {
                let what = what.to_owned();
                found.diverged(Divergence { step: Some(step), worker: n, op: None, what });
            }
            if let Err(what) = shared.pool.check() {
                found.diverged(Divergence { step: Some(step), worker: n, op: None, what });
            }
            let late = until.is_some_and(|until| Instant::now() >= until);
            // Decided once for all: a worker that left alone would leave the others at the barrier.
            let over = dry || late || step >= steps || found.stop.load(Ordering::SeqCst);
            found.over.store(over, Ordering::SeqCst);
        }
        barrier.wait();
        if found.over.load(Ordering::SeqCst) {
            break;
        }
    }
    shared.driver.clear();
    barrier.wait();
    let sound = found.first.lock().is_none();
    if sound && let Err(wrong) = world.quiet(shared).and_then(|()| world.read_all(shared)) {
        found.note(n, None, None, wrong);
    }
    barrier.wait();
    world.leave(shared, order)
}

/// Does a step, on a thread of its own if the one before asked for it.
fn on_a_thread(shared: &Shared, world: &mut World, op: Op) -> Result<(), Wrong> {
    if !std::mem::take(&mut world.thread_next) {
        return world.apply(shared, op);
    }
    let joined = std::thread::scope(|scope| scope.spawn(|| world.apply(shared, op)).join());
    joined.unwrap_or_else(|_| Err(Wrong::Error("the step panicked".to_owned())))
}

/// Drops what is shared, in an order that the seed decides, and closes the books.
fn leave(shared: Arc<Shared>, seed: u64) -> (Seen, Option<String>, Vec<(&'static str, i64)>) {
    shared.account();
    let Ok(Shared { cache, pool, probe, driver, ledger, most_bytes, .. }) = Arc::try_unwrap(shared).map_err(drop)
    else {
        return (Seen::default(), Some("a worker still holds the world".to_owned()), Vec::new());
    };
    if seed.is_multiple_of(2) {
        drop(cache);
        drop(pool);
    } else {
        drop(pool);
        drop(cache);
    }
    let mut ledger = ledger.into_inner();
    ledger.read(&driver.take_log(), &|function, args| ledger::named(&probe, function, args));
    drop(probe);
    ledger.read(&driver.take_log(), &|_, _| None);
    let mut leaks = ledger.leaks();
    let live = driver.as_host().filter(|_| most_bytes.is_none()).map_or_else(|| ledger.live(), |host| host.live());
    if live != Live::default() && leaks.is_empty() {
        leaks.push(("objects of the device that its log does not show", 1));
    }
    (ledger.seen(), ledger.first().map(str::to_owned), leaks)
}

fn report(options: &Options, found: &Found, tally: &Tally, seen: Seen, leaks: u64) -> Report {
    let mut events: BTreeMap<String, u64> = tally.ops.iter().map(|(what, n)| ((*what).to_owned(), *n)).collect();
    let by_log = [
        ("capture", seen.captures),
        ("replay", seen.replays),
        ("give_back", seen.give_backs),
        ("growth", seen.growths),
        ("stale", seen.stale),
        ("reissue", seen.reissues),
        ("remap", seen.remaps),
        ("update", seen.updates),
        ("recapture", seen.recaptures),
        ("eager", seen.eager),
        ("injected", seen.injected),
        ("cancel", tally.cancels),
        ("panic", tally.panics),
        ("refusal", tally.refusals),
        ("quiet_replay", tally.quiet_replays),
        ("slept", tally.slept),
    ];
    events.extend(by_log.into_iter().map(|(what, n)| (what.to_owned(), n)));
    events.extend(tally.said().iter().map(|(what, n)| (format!("said_{what}"), *n)));
    let missing = expected(options).filter(|what| events.get(*what).is_none_or(|n| *n == 0)).map(str::to_owned);
    Report {
        steps: found.steps.load(Ordering::SeqCst),
        missing: missing.collect(),
        events,
        bad_launches: seen.bad_launches,
        needless_refusals: found.needless.load(Ordering::SeqCst),
        leaks,
        overlaps: seen.overlaps + seen.bad_maps,
        corrupt_reads: found.corrupt.load(Ordering::SeqCst),
        unexplained_errors: found.errors.load(Ordering::SeqCst),
        first_divergence: found.first.lock().clone(),
        seed: options.seed,
        pool: options.mode.to_string(),
        device: options.device.backend(),
    }
}

/// The kinds that must happen at least once in a run with these options.
fn expected(options: &Options) -> impl Iterator<Item = &'static str> {
    const ALWAYS: &[&str] = &[
        "alloc",
        "free",
        "fill",
        "copy",
        "record_stream",
        "read",
        "run",
        "rebind",
        "evict",
        "flush",
        "trim",
        "limit",
        "thread_switch",
        "sync",
        "restream",
        "sleep",
        "wake",
        "capture",
        "replay",
        "give_back",
        "growth",
        "stale",
        "reissue",
        "update",
        "recapture",
        "eager",
        "cancel",
        "panic",
        "quiet_replay",
    ];
    const ALONE: &[&str] = &["quiet"];
    const STEPPED: &[&str] = &["step"];
    const VMM: &[&str] = &["remap", "slept"];
    const FAULTS: &[&str] = &["fail_nth", "injected"];
    let when = |yes: bool, names: &'static [&'static str]| if yes { names } else { &[] };
    ALWAYS
        .iter()
        .chain(when(options.threads <= 1, ALONE))
        .chain(when(options.threads <= 1 && options.device.is_host(), STEPPED))
        .chain(when(options.mode == PoolMode::Vmm, VMM))
        .chain(when(options.faults, FAULTS))
        .copied()
}
