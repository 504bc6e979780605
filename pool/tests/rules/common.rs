//! A pool on a host device whose every driver call can be counted, logged and failed.

use std::sync::Arc;

use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::driver::{DynDriver, Faulty};
use evergraph_pool::handshake::{Epoch, Launcher, Lease, Proven};
use evergraph_pool::{
    ChunkClass, Dependent, DeviceSlice, Element, Hold, Pool, PoolConfig, PoolError, PoolMode, Purpose, Registration,
    Retired, ScratchPolicy, Stream, Tracked, Use, Window,
};
use parking_lot::Mutex;

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;
/// Granularity of the test device, and so the chunk.
pub const CHUNK: usize = 64 * KIB;

pub struct Rig {
    pub host: Arc<HostDevice>,
    pub faulty: Arc<Faulty<HostDevice>>,
    pub driver: DynDriver,
    pub pool: Pool,
    pub stream: Stream,
}

pub fn device() -> HostConfig {
    HostConfig::default().memory(64 * MIB).granularity(CHUNK).stepped(true)
}

/// Small chunks and slabs, so that little memory tells the whole story.
pub fn config(mode: PoolMode) -> PoolConfig {
    PoolConfig::new(mode).chunk(CHUNK)
}

/// A large chunk, where the pool has them: what 32 MiB are to 2.
pub const LARGE: usize = 16 * CHUNK;

/// The usual table of chunk sizes, on a small device.
pub const CLASSES: [ChunkClass; 3] = [
    ChunkClass { purpose: None, from_bytes: 2 * LARGE, chunk_bytes: LARGE },
    ChunkClass { purpose: Some(Purpose::Weight), from_bytes: LARGE, chunk_bytes: LARGE },
    ChunkClass { purpose: Some(Purpose::Weight), from_bytes: 4 * LARGE, chunk_bytes: 4 * LARGE },
];

/// With large chunks for large requests.
pub fn classed() -> PoolConfig {
    config(PoolMode::Vmm).chunk_classes(&CLASSES)
}

impl Rig {
    pub fn new(mode: PoolMode) -> Self {
        Self::with(device(), config(mode))
    }

    pub fn limited(mode: PoolMode, bytes: usize) -> Self {
        Self::with(device(), config(mode).limit(bytes))
    }

    pub fn with(device: HostConfig, config: PoolConfig) -> Self {
        let host = HostDevice::new(device).unwrap();
        let faulty = Faulty::new(Arc::clone(&host));
        let driver: DynDriver = faulty.clone();
        driver.bind().unwrap();
        let pool = Pool::new(Arc::clone(&driver), config).unwrap();
        let stream = Stream::new(&driver).unwrap();
        Self { host, faulty, driver, pool, stream }
    }

    pub fn alloc(&self, bytes: usize) -> DeviceSlice<u8> {
        self.pool.alloc(bytes, &self.stream).unwrap()
    }

    /// A graph captured in a window of its own: `body` runs inside it.
    pub fn graph(&self, policy: ScratchPolicy, body: impl FnOnce(&Window)) -> TestGraph {
        TestGraph::capture(&self.pool, &self.stream, policy, body).unwrap()
    }

    /// A graph that only depends on a slice.
    pub fn depends<T: Element>(&self, slice: &DeviceSlice<T>, use_: Use, hold: Hold) -> TestGraph {
        self.graph(ScratchPolicy::Pin, |w| declare(w, slice, use_, hold))
    }
}

pub fn declare(window: &Window, memory: &dyn Tracked, use_: Use, hold: Hold) {
    window.declare(memory.token(), use_, 0, memory.bytes(), hold).unwrap();
}

/// Runs a story in both modes.
pub fn both(story: impl Fn(PoolMode)) {
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        eprintln!("-- {mode}");
        story(mode);
    }
}

#[derive(Debug)]
pub struct Node {
    lease: Arc<Lease>,
    stream: Stream,
    pub cost_us: u32,
    pub told: Mutex<Vec<Retired>>,
}

impl Node {
    pub fn new(stream: &Stream, cost_us: u32) -> (Arc<Self>, Launcher) {
        let launcher = Launcher::new();
        let lease = Arc::clone(launcher.lease());
        (Arc::new(Self { lease, stream: stream.clone(), cost_us, told: Mutex::default() }), launcher)
    }
}

impl Dependent for Node {
    fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }
    fn stream(&self) -> &Stream {
        &self.stream
    }
    fn rebuild_cost_us(&self) -> u32 {
        self.cost_us
    }
    fn retired(&self, notice: &Retired) {
        self.told.lock().push(notice.clone());
    }
}

/// The least that can stand for a captured graph: a registration and a launcher.
#[derive(Debug)]
pub struct TestGraph {
    pub node: Arc<Node>,
    pub launcher: Launcher,
    pub registration: Registration,
    pub proven: Proven,
    pub launches: u64,
}

impl TestGraph {
    pub fn capture(
        pool: &Pool,
        stream: &Stream,
        policy: ScratchPolicy,
        body: impl FnOnce(&Window),
    ) -> Result<Self, PoolError> {
        Self::capture_at(pool, stream, policy, 100, body)
    }

    pub fn capture_at(
        pool: &Pool,
        stream: &Stream,
        policy: ScratchPolicy,
        cost_us: u32,
        body: impl FnOnce(&Window),
    ) -> Result<Self, PoolError> {
        let (node, launcher) = Node::new(stream, cost_us);
        let window = pool.begin_window(node.clone(), policy)?;
        body(&window);
        let registration = window.finish()?;
        Ok(Self { node, launcher, registration, proven: Proven::NONE, launches: 0 })
    }

    /// Walks, and remembers what was proven.
    pub fn prove(&mut self) -> bool {
        match self.registration.walk() {
            Ok(proven) => {
                self.proven = proven;
                true
            }
            Err(_) => false,
        }
    }

    /// One launch under the protocol: `work` queues something. `false`: disturbed, nothing was queued.
    pub fn launch(&mut self, work: impl FnOnce()) -> bool {
        self.launches += 1;
        let epoch: &Epoch = self.registration.epoch();
        self.launcher.launch([(epoch, self.proven)], self.launches, work).is_some()
    }

    /// As a cache launches: check, walk if disturbed, give up if stale.
    pub fn replay(&mut self, work: impl Fn()) -> bool {
        self.launch(&work) || (self.prove() && self.launch(&work))
    }
}
