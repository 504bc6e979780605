//! The small world that a story plays in.

use std::sync::Arc;

use evergraph_graphcache::{CacheConfig, CacheError, CostTable, GraphCache, GraphKey, Ran, Request, Scope};
use evergraph_kernels::probe::{Probe, Words};
use parking_lot::Mutex;

use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::driver::{Call, Driver, DynDriver, Faulty};
use evergraph_pool::{
    AllocationId, DeviceSlice, Element, Hold, Pool, PoolConfig, PoolError, PoolMode, Purpose, ScratchPolicy, Stream,
    Use,
};

use crate::stress::ledger::{Ledger, Seen, named};

/// Pages of a small device: what a chunk and the smallest slab hold.
pub(super) const PAGE: usize = 64 << 10;
/// Words of a page.
pub(super) const PAGE_WORDS: usize = PAGE / 4;

pub(super) type Slice = DeviceSlice<u32>;
pub(super) type Run = Result<Ran, CacheError>;

/// A device of 16 MiB with stepped streams, wrapped in [`Faulty`]; a pool in pages of 64 KiB; a cache.
#[derive(Debug)]
pub(super) struct Stage {
    // Dropped in this order: graphs, then memory, then code, then the device.
    pub(super) cache: GraphCache,
    pub(super) pool: Pool,
    pub(super) stream: Stream,
    pub(super) probe: Arc<Probe>,
    pub(super) driver: Arc<Faulty<HostDevice>>,
    ledger: Mutex<Ledger>,
}

/// The device that stories play on.
pub(super) fn device() -> HostConfig {
    HostConfig::default().memory(16 << 20).granularity(PAGE).stepped(true)
}

/// The pool that they play with.
pub(super) fn pages(mode: PoolMode) -> PoolConfig {
    PoolConfig::new(mode).chunk(PAGE).smallest_slab(PAGE)
}

impl Stage {
    /// The usual one.
    pub(super) fn new(mode: PoolMode) -> Result<Self, PoolError> {
        Self::with(device(), pages(mode), CacheConfig::default())
    }

    /// Of a device, a pool and a cache of choice.
    pub(super) fn with(device: HostConfig, pool: PoolConfig, cache: CacheConfig) -> Result<Self, PoolError> {
        Self::on(HostDevice::new(device)?, pool, cache)
    }

    /// On a device of a machine.
    pub(super) fn on(host: Arc<HostDevice>, pool: PoolConfig, cache: CacheConfig) -> Result<Self, PoolError> {
        let mut cache = cache;
        // Repairs are chosen by price; fixed ones make a story the same each time. Pages are small here.
        cache.costs = CostTable::of(host.info()).flat_remap(0.05);
        cache.costs.refine = false;
        let driver = Faulty::new(host);
        driver.set_logging(true);
        let dynamic: DynDriver = driver.clone();
        let probe = Arc::new(Probe::load(dynamic.clone())?);
        let stream = Stream::new(&dynamic)?;
        let pool = Pool::new(dynamic, pool)?;
        Ok(Self { cache: GraphCache::new(cache), pool, stream, probe, driver, ledger: Mutex::default() })
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

    /// Its parts but for the driver, to be dropped in an order of choice.
    pub(super) fn into_parts(self) -> (GraphCache, Pool, Stream, Arc<Probe>) {
        (self.cache, self.pool, self.stream, self.probe)
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
