//! The small world that a story plays in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use evergraph_graphcache::{CacheConfig, CacheError, CostTable, GraphCache, GraphKey, Ran, Request, Scope};
use evergraph_kernels::probe::{Probe, Words};
use parking_lot::Mutex;

use evergraph_pool::driver::host::{HostConfig, HostDevice, Live};
use evergraph_pool::driver::{Call, Driver, DynDriver, Faulty, HostCallback};
use evergraph_pool::{
    AllocationId, DeviceSlice, Element, Hold, Pool, PoolConfig, PoolError, Purpose, ScratchPolicy, Stream, Use,
};

use super::story::Story;
use crate::stress::ledger::{Ledger, Seen, named};

/// Bytes of a page of a host device: what a chunk and the smallest slab hold.
pub(super) const HOST_PAGE: usize = 64 << 10;
/// Pages of the device, or of what a pool may take of a large one.
pub(super) const PAGES: usize = 256;
/// How long a gate stays shut at most: a story that forgot it fails instead of hanging.
const LONGEST_HOLD: Duration = Duration::from_secs(20);

pub(super) type Slice = DeviceSlice<u32>;
pub(super) type Run = Result<Ran, CacheError>;

/// A device of 256 pages wrapped in [`Faulty`], a pool in pages, a cache. Host devices are stepped: nothing queued runs
/// before somebody waits for it. Of a real device the pool may take 256 pages.
#[derive(Debug)]
pub(super) struct Stage {
    // Dropped in this order: graphs, then memory, then code, then the device.
    pub(super) cache: GraphCache,
    pub(super) pool: Pool,
    pub(super) stream: Stream,
    pub(super) probe: Arc<Probe>,
    pub(super) driver: Arc<Faulty>,
    ledger: Mutex<Ledger>,
    page: usize,
    /// A real device: its streams run by themselves, and what is live on it only the log can tell.
    hardware: bool,
}

/// The host device that stories play on.
pub(super) fn device() -> HostConfig {
    HostConfig::default().memory(PAGES * HOST_PAGE).granularity(HOST_PAGE).stepped(true)
}

impl Stage {
    /// The usual one.
    pub(super) fn new(story: &Story) -> Result<Self, PoolError> {
        Self::with(story, story.pages(), CacheConfig::default())
    }

    /// Of a pool and a cache of choice.
    pub(super) fn with(story: &Story, pool: PoolConfig, cache: CacheConfig) -> Result<Self, PoolError> {
        Self::on(story, story.device().driver(device())?, pool, cache)
    }

    /// On a host device of choice.
    pub(super) fn host(
        story: &Story,
        device: HostConfig,
        pool: PoolConfig,
        cache: CacheConfig,
    ) -> Result<Self, PoolError> {
        Self::on(story, HostDevice::new(device)?, pool, cache)
    }

    /// On a device of choice.
    pub(super) fn on(
        story: &Story,
        device: DynDriver,
        pool: PoolConfig,
        cache: CacheConfig,
    ) -> Result<Self, PoolError> {
        let mut cache = cache;
        // Repairs are chosen by price; fixed ones, the same on every device, make a story the same each time. Pages are
        // small here.
        cache.costs = CostTable::h200().flat_remap(0.05);
        cache.costs.refine = false;
        let driver = Faulty::new(device);
        driver.set_logging(true);
        let dynamic: DynDriver = driver.clone();
        let probe = Arc::new(Probe::load(dynamic.clone())?);
        let stream = Stream::new(&dynamic)?;
        let pool = Pool::new(dynamic, pool)?;
        let cache = GraphCache::new(cache);
        Ok(Self {
            cache,
            pool,
            stream,
            probe,
            driver,
            ledger: Mutex::default(),
            page: story.page(),
            hardware: story.hardware(),
        })
    }

    /// Bytes of a page: what a chunk and the smallest slab hold.
    pub(super) fn page(&self) -> usize {
        self.page
    }

    /// Words of a page.
    pub(super) fn page_words(&self) -> usize {
        self.page / 4
    }

    /// What is live on the device: by its own account, or where it has none by the log of the calls made here.
    pub(super) fn live(&self) -> Live {
        self.account();
        let seen = self.ledger.lock().live();
        self.driver.as_host().filter(|_| !self.hardware).map_or(seen, HostDevice::live)
    }

    /// Whether work on a stream is still on its way, after another stream was waited for.
    pub(super) fn in_flight(&self, stream: &Stream) -> Result<bool, PoolError> {
        match self.driver.as_host().filter(|_| !self.hardware) {
            Some(host) => Ok(host.step(stream.handle())?),
            None => Ok(!stream.is_idle()?),
        }
    }

    /// Holds back what is queued on a stream from here on. On a host device nothing runs before it is waited for.
    pub(super) fn hold(&self, stream: &Stream) -> Result<Gate, PoolError> {
        let open = Arc::new(AtomicBool::new(false));
        let gate = Gate { open: Arc::clone(&open), real: self.hardware };
        if self.hardware {
            self.driver.bind()?;
            let wait = move || {
                let since = Instant::now();
                while !open.load(Ordering::Acquire) && since.elapsed() < LONGEST_HOLD {
                    std::thread::sleep(Duration::from_micros(50));
                }
            };
            // Not through the log: what the story counts are calls of pool and cache.
            self.driver.inner().launch_host_fn(stream.handle(), HostCallback::new(wait))?;
        }
        Ok(gate)
    }

    /// The driver, type erased.
    pub(super) fn dynamic(&self) -> DynDriver {
        self.driver.clone()
    }

    /// The sticky fault of the device, in words.
    pub(super) fn fault(&self) -> Option<String> {
        self.driver.fault().map(|fault| fault.to_string())
    }

    /// A second stream.
    pub(super) fn other_stream(&self) -> Result<Stream, PoolError> {
        Stream::new(&self.dynamic())
    }

    /// A slice for state, which no scratch is mixed with.
    pub(super) fn state(&self, words: usize) -> Result<Slice, PoolError> {
        self.pool.alloc_for(words, Purpose::State, &self.stream)
    }

    /// A slice for scratch.
    pub(super) fn scratch(&self, words: usize) -> Result<Slice, PoolError> {
        self.pool.alloc(words, &self.stream)
    }

    /// Writes `value, value + 1, …` and returns the same words.
    pub(super) fn fill(&self, slice: &Slice, value: u32) -> Result<Vec<u32>, PoolError> {
        let data: Vec<u32> = (0..slice.len() as u32).map(|i| value.wrapping_add(i)).collect();
        self.stream.upload(&data, slice)?;
        Ok(data)
    }

    /// Reads a slice back.
    pub(super) fn read<T: Element>(&self, slice: &DeviceSlice<T>) -> Result<Vec<T>, PoolError> {
        self.stream.download(slice)
    }

    /// Runs a closure through the cache, on the stage's stream.
    pub(super) fn run(
        &self,
        key: &str,
        policy: ScratchPolicy,
        body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
    ) -> Run {
        self.run_on(key, policy, &self.stream, body)
    }

    /// Runs a closure through the cache, on any stream.
    pub(super) fn run_on(
        &self,
        key: &str,
        policy: ScratchPolicy,
        stream: &Stream,
        body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
    ) -> Run {
        let key = GraphKey::new(key);
        self.ran(Request::new(&key, &self.pool, stream).policy(policy), body)
    }

    /// Runs a closure through the cache, for these allocations.
    pub(super) fn run_bound(
        &self,
        key: &str,
        bound: &[AllocationId],
        body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
    ) -> Run {
        self.run_bound_as(key, bound, ScratchPolicy::Pin, body)
    }

    /// Runs a closure through the cache, for these allocations, with a choice for its scratch.
    pub(super) fn run_bound_as(
        &self,
        key: &str,
        bound: &[AllocationId],
        policy: ScratchPolicy,
        body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
    ) -> Run {
        let key = GraphKey::new(key);
        self.ran(Request::new(&key, &self.pool, &self.stream).bound(bound).policy(policy), body)
    }

    /// Runs a closure through the cache, with memory of a second pool.
    pub(super) fn run_with(
        &self,
        key: &str,
        pool: &Pool,
        body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
    ) -> Run {
        let (key, others) = (GraphKey::new(key), [pool]);
        self.ran(Request::new(&key, &self.pool, &self.stream).others(&others), body)
    }

    fn ran(&self, request: Request<'_>, body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>) -> Run {
        Ok(self.cache.run(&request, body)?.ran)
    }

    /// Drops a graph.
    pub(super) fn evict(&self, key: &str) {
        self.cache.remove(&GraphKey::new(key));
    }

    /// Two warm-ups, the capture, and one replay: from here on the graph replays.
    pub(super) fn settle(
        &self,
        key: &str,
        policy: ScratchPolicy,
        mut body: impl FnMut(&Scope<'_>) -> Result<(), CacheError>,
    ) -> Run {
        for _ in 0..3 {
            self.run(key, policy.clone(), &mut body)?;
        }
        self.run(key, policy, &mut body)
    }

    /// The driver calls that are made meanwhile. Making a device current that already is current is none.
    pub(super) fn calls<R>(&self, during: impl FnOnce() -> R) -> (R, Vec<Call>) {
        self.account();
        let result = during();
        let mut log = self.driver.take_log();
        self.ledger.lock().read(&log, &|function, args| named(&self.probe, function, args));
        log.retain(|call| call.name != "bind");
        (result, log)
    }

    /// What the stress's independent account makes of every call so far.
    pub(super) fn account(&self) -> Seen {
        let mut ledger = self.ledger.lock();
        ledger.read(&self.driver.take_log(), &|function, args| named(&self.probe, function, args));
        ledger.seen()
    }

    /// Its parts but for the driver, to be dropped in an order of choice, and what tells what is left then.
    pub(super) fn into_parts(self) -> (GraphCache, Pool, Stream, Arc<Probe>, Rest) {
        self.account();
        let (driver, ledger, hardware) = (self.driver, self.ledger.into_inner(), self.hardware);
        (self.cache, self.pool, self.stream, self.probe, Rest { driver, ledger, hardware })
    }

    /// The usual graph of these stories: `out = 4 input + 3 k`, by way of scratch.
    pub(super) fn step(&self, scope: &Scope<'_>, input: &Slice, k: u32, out: &Slice) -> Result<(), CacheError> {
        self.step_held(scope, input, Hold::Strong, k, out)
    }

    /// The same, with a choice for the input.
    pub(super) fn step_held(
        &self,
        scope: &Scope<'_>,
        input: &Slice,
        hold: Hold,
        k: u32,
        out: &Slice,
    ) -> Result<(), CacheError> {
        match hold {
            Hold::Strong => scope.declare_held(input, Use::Input)?,
            Hold::Weak => scope.declare(input, Use::Input)?,
        }
        scope.declare(out, Use::State)?;
        let scratch = scope.alloc::<u32>(out.len())?;
        let stream = scope.stream().handle();
        self.probe.add(stream, words(input), k, words(&scratch))?;
        self.probe.mix(stream, words(&scratch), words(input), words(out))?;
        Ok(())
    }
}

/// Work that is held back until this is opened or dropped.
#[derive(Debug)]
pub(super) struct Gate {
    open: Arc<AtomicBool>,
    real: bool,
}

impl Gate {
    /// Opens once the other streams had a fair chance to run what does not wait for the held one.
    pub(super) fn open_behind(self, others: &[&Stream]) -> Result<(), PoolError> {
        let since = Instant::now();
        for other in others {
            while self.real && !other.is_idle()? && since.elapsed() < Duration::from_millis(100) {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open.store(true, Ordering::Release);
    }
}

/// What is left of a stage whose parts go their own ways.
#[derive(Debug)]
pub(super) struct Rest {
    pub(super) driver: Arc<Faulty>,
    ledger: Ledger,
    hardware: bool,
}

impl Rest {
    /// As [`Stage::live`].
    pub(super) fn live(&mut self) -> Live {
        self.ledger.read(&self.driver.take_log(), &|_, _| None);
        let seen = self.ledger.live();
        self.driver.as_host().filter(|_| !self.hardware).map_or(seen, HostDevice::live)
    }
}

/// What [`Stage::step`] computes.
pub(super) fn stepped(input: &[u32], k: u32) -> Vec<u32> {
    input.iter().map(|x| x.wrapping_add(k).wrapping_mul(3).wrapping_add(*x)).collect()
}

/// A slice as the probes take it.
pub(super) fn words(slice: &Slice) -> Words {
    Words::new(slice.ptr(), slice.len())
}

/// The names of calls, in order.
pub(super) fn names(calls: &[Call]) -> Vec<&'static str> {
    calls.iter().map(|call| call.name).collect()
}

/// How many of the calls are of a kind.
pub(super) fn count(calls: &[Call], name: &str) -> usize {
    calls.iter().filter(|call| call.name == name).count()
}

/// Whether an error was typed as a lack of memory.
pub(super) fn is_out_of_memory<T>(result: &Result<T, PoolError>) -> bool {
    result.as_ref().err().is_some_and(PoolError::is_out_of_memory)
}
