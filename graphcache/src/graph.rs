//! A captured graph: its exec, its registrations, its lease.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use evergraph_pool::driver::{
    CaptureMode, DevicePtr, DriverErrorKind, DriverResult, DynDriver, ExecHandle, GraphHandle, StreamHandle,
};
use evergraph_pool::handshake::{Epoch, Launcher, Lease, Proven};
use evergraph_pool::{
    AllocationId, BadReason, Dependent, PoolError, Registration, RetireReason, Retired, Stale, Stream, mutant,
};
use smallvec::SmallVec;

use crate::CaptureModeGuard;
use crate::cache::Inner;
use crate::counters::Tally;
use crate::key::FullKey;
use crate::reach::Reaches;
use crate::results::Results;
use crate::scan::Shape;
use crate::scope::Keep;

/// What the pools know of a graph.
#[derive(Debug)]
pub(crate) struct Handle {
    lease: Arc<Lease>,
    stream: Stream,
    cost_us: AtomicU32,
    evicted: AtomicBool,
    cache: Weak<Inner>,
    key: FullKey,
}

impl Handle {
    pub(crate) fn new(launcher: &Launcher, stream: &Stream, cost_us: f32, cache: Weak<Inner>, key: FullKey) -> Self {
        Self {
            lease: Arc::clone(launcher.lease()),
            stream: stream.clone(),
            cost_us: AtomicU32::new(cost_us as u32),
            evicted: AtomicBool::new(false),
            cache,
            key,
        }
    }

    pub(crate) fn set_cost(&self, us: f32) {
        self.cost_us.store(us as u32, Ordering::Relaxed);
    }

    pub(crate) fn evicted(&self) -> bool {
        self.evicted.load(Ordering::Relaxed)
    }
}

impl Dependent for Handle {
    fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn rebuild_cost_us(&self) -> u32 {
        self.cost_us.load(Ordering::Relaxed)
    }

    fn retired(&self, notice: &Retired) {
        tracing::info!(
            graph = %self.key.key,
            pool = %notice.pool,
            reason = ?notice.reason,
            tokens = notice.tokens.len(),
            "graph went stale"
        );
        // Staleness itself is found by the walk. An evicted graph also frees what the driver keeps for it.
        if notice.reason == RetireReason::Evicted {
            self.evicted.store(true, Ordering::Relaxed);
            if let Some(cache) = self.cache.upgrade() {
                cache.drop_evicted(&self.key);
            }
        }
    }
}

/// A captured `CUgraph`, destroyed with this.
#[derive(Debug)]
pub(crate) struct OwnedGraph {
    driver: DynDriver,
    handle: GraphHandle,
}

impl OwnedGraph {
    pub(crate) fn new(driver: &DynDriver, handle: GraphHandle) -> Self {
        Self { driver: Arc::clone(driver), handle }
    }

    pub(crate) fn handle(&self) -> GraphHandle {
        self.handle
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        if mutant::is("cache.graph-leaked") {
            return;
        }
        // Silent: drops have nobody to tell.
        if insist(|| self.driver.bind()) {
            let _mode = CaptureModeGuard::new(&self.driver, CaptureMode::Relaxed);
            insist(|| self.driver.graph_destroy(self.handle));
        }
    }
}

/// An instantiated graph with all that must outlive it. Destroyed once the host has seen its last run complete.
///
/// Field order is drop order: the exec goes in `drop`, then its graph, then what both refer to.
#[derive(Debug)]
pub(crate) struct Exec {
    driver: DynDriver,
    pub(crate) handle: ExecHandle,
    stream: Stream,
    /// Launched since the host last saw the stream's work complete.
    pub(crate) in_flight: bool,
    tally: Arc<Tally>,
    /// Kept as long as the exec: execs can not be read.
    pub(crate) graph: OwnedGraph,
    pub(crate) shape: Shape,
    pub(crate) keeps: SmallVec<[Keep; 4]>,
}

impl Exec {
    /// `handle` is `graph`'s exec, just instantiated.
    pub(crate) fn new(stream: &Stream, handle: ExecHandle, recipe: Recipe, tally: &Arc<Tally>) -> Self {
        tally.created.one();
        let Recipe { graph, shape, keeps } = recipe;
        let (driver, tally) = (Arc::clone(stream.driver()), Arc::clone(tally));
        Self { driver, handle, stream: stream.clone(), in_flight: false, tally, graph, shape, keeps }
    }

    /// The driver has updated the exec from `recipe`'s graph.
    pub(crate) fn refill(&mut self, recipe: Recipe) {
        let Recipe { graph, shape, keeps } = recipe;
        (self.graph, self.shape, self.keeps) = (graph, shape, keeps);
    }

    /// Waits on the host until no run is in flight: a graph in flight is neither updated nor destroyed.
    pub(crate) fn settle(&mut self) {
        if self.in_flight && !mutant::is("cache.in-flight-ignored") {
            let _mode = CaptureModeGuard::new(&self.driver, CaptureMode::Relaxed);
            // An error means a dead context: nothing runs there any more.
            let _ = self.stream.settle();
        }
        self.in_flight = false;
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if insist(|| self.driver.bind()) {
            self.settle();
            let _mode = CaptureModeGuard::new(&self.driver, CaptureMode::Relaxed);
            insist(|| self.driver.exec_destroy(self.handle));
        }
        self.tally.destroyed.one();
    }
}

/// What an exec is made of.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) graph: OwnedGraph,
    pub(crate) shape: Shape,
    pub(crate) keeps: SmallVec<[Keep; 4]>,
}

/// One pool's part of a graph.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) registration: Registration,
    pub(crate) epoch: Arc<Epoch>,
    pub(crate) proven: Proven,
}

/// A graph that can be launched, as long as its parts can be proven.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) launcher: Launcher,
    pub(crate) exec: Exec,
    /// Dropped after the exec: its last launch moves into the blocks' uses.
    pub(crate) parts: SmallVec<[Part; 2]>,
    pub(crate) handle: Arc<Handle>,
    pub(crate) launches: u64,
    pub(crate) opaque: Option<String>,
    pub(crate) bytes: usize,
    /// Zeroed scratch of its own window.
    pub(crate) zeroed: Vec<(DevicePtr, usize)>,
    /// What must be cleared before the next launch. Queued under the lease, like the launch itself: before that nothing keeps the
    /// memory from being taken, and whoever takes it waits for launches only.
    pub(crate) unclean: Vec<(DevicePtr, usize)>,
    /// Where it leaves its results.
    pub(crate) results: Results,
    /// The last try was no launch: it would have written over a result that somebody holds.
    pub(crate) blocked: bool,
    /// The growable slices in it.
    pub(crate) reaches: Reaches,
    /// The allocations that the request named when it was captured.
    pub(crate) bound: SmallVec<[AllocationId; 4]>,
    /// How long it took to read it back.
    pub(crate) scan_us: f32,
}

impl Graph {
    /// The fast path of the launch protocol. `None`: disturbed, nothing happened.
    #[inline]
    pub(crate) fn launch(&mut self) -> Option<DriverResult<()>> {
        let number = self.launches + 1;
        let (exec, stream, driver) = (self.exec.handle, self.exec.stream.handle(), &self.exec.driver);
        if mutant::is("cache.bind-every-launch") {
            let _ = driver.bind();
        }
        let (results, mut blocked) = (&self.results, false);
        let unclean = &mut self.unclean;
        let launch = || {
            if !results.may_launch() {
                blocked = true;
                return Ok(());
            }
            results.note_launch();
            if !unclean.is_empty() {
                clear_scratch(driver, stream, unclean)?;
            }
            match driver.launch(exec, stream) {
                // The one error that says "another device was current". Checking before every launch would be a
                // second driver call.
                Err(e) if e.kind == DriverErrorKind::InvalidContext => {
                    driver.bind().and_then(|()| driver.launch(exec, stream))
                }
                result => result,
            }
        };
        let result = if mutant::is("cache.check-skipped") {
            Some(self.launcher.launch(std::iter::empty(), number, launch)?)
        } else {
            let read = if mutant::is("cache.one-epoch") { 1 } else { self.parts.len() };
            let epochs = self.parts.iter().take(read).map(|part| (&*part.epoch, part.proven));
            self.launcher.launch(epochs, number, launch)
        };
        self.blocked = blocked;
        if blocked {
            return None;
        }
        if result.is_some() {
            self.launches = number;
            self.exec.in_flight = true;
        }
        result
    }

    /// Clears at once what is to be cleared before the next launch. Only a mutant does.
    #[cold]
    pub(crate) fn clear(&mut self) -> DriverResult<()> {
        clear_scratch(&self.exec.driver, self.exec.stream.handle(), &mut self.unclean)
    }

    /// Walks every part under its pool's lock. What is bad, pool by pool; empty: all proven.
    pub(crate) fn prove(&mut self) -> Vec<Stale> {
        let mut stale = Vec::new();
        for part in &mut self.parts {
            match part.registration.walk() {
                Ok(proven) => part.proven = proven,
                Err(bad) => {
                    part.proven = Proven::NONE;
                    stale.push(bad);
                }
            }
        }
        stale
    }

    /// Lets the registrations go, and with them the memory: the old graph goes before the new one comes. The exec
    /// stays, for an update.
    pub(crate) fn into_exec(self) -> Exec {
        let Self { exec, parts, .. } = self;
        drop(parts);
        exec
    }
}

/// Clears scratch that the work expects to start as zero, in stream order before the launch.
#[cold]
fn clear_scratch(driver: &DynDriver, stream: StreamHandle, unclean: &mut Vec<(DevicePtr, usize)>) -> DriverResult<()> {
    driver.bind()?;
    for &(ptr, bytes) in unclean.iter().filter(|_| !mutant::is("cache.zeroed-not-cleared")) {
        driver.memset_d8(ptr, 0, bytes, stream)?;
    }
    unclean.clear();
    Ok(())
}

/// A call that ends something is tried again: nobody else will. Silent, since drops have nobody to tell.
pub(crate) fn insist(call: impl Fn() -> DriverResult<()>) -> bool {
    (0..3).any(|_| call().is_ok())
}

/// The refusal of a graph whose memory is asleep, if it is: no repair brings that back, and an eager run would touch it too.
pub(crate) fn asleep(stale: &[Stale]) -> Option<PoolError> {
    let purpose = stale.iter().find_map(|s| s.asleep)?;
    Some(PoolError::Asleep { purpose, what: "a captured graph" })
}

/// Whether all that is wrong is that somebody is changing something at this moment.
pub(crate) fn only_retiring(stale: &[Stale]) -> bool {
    stale.iter().all(|s| !s.evicted && s.asleep.is_none() && s.bad.iter().all(|bad| bad.reason == BadReason::Retiring))
}
