//! One device: driver, pool, stream, kernels, graphs.

use std::sync::Arc;

use evergraph_graphcache::{CacheConfig, CostTable, Counters, GraphCache, GraphKey, Outcome, Request};
use evergraph_kernels::cuda::{Blas, BlasError};
use evergraph_kernels::plan::{DeviceLane, Events};
use evergraph_kernels::{KernelError, Kernels};
use evergraph_pool::driver::host::HostConfig;
use evergraph_pool::driver::{DeviceOrdinal, DynDriver};
use evergraph_pool::{Pool, Purpose, ScratchPolicy, Stream, Touch, Tracked, Use};
pub use evergraph_pool::{PoolConfig, PoolMode};

use super::host::{HostSide, HostWork};
use super::rehearsal::Rehearsal;
use super::step::Step;
use crate::device::Device;
use crate::error::{Error, Result};

/// What products with weights in blocks take as their other factor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ActType {
    /// 32-bit floats.
    F32,
    /// 8-bit integers with a scale for each 32, made anew for each input.
    #[default]
    Q8,
}

/// How a device's memory and graphs are set up, and what its products are made of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RuntimeConfig {
    /// The pool: its mode, its limit.
    pub pool: PoolConfig,
    /// Whether steps are captured and replayed.
    pub graphs: bool,
    /// Activations in products with weights in blocks; weights of floats always take floats.
    pub act: ActType,
    /// Whether a CUDA device does ops of one token together, in few launches.
    pub fuse: bool,
    /// How the host gets to know of its share of a step, where it has one; none means what is best for the device.
    pub host_work: Option<HostWork>,
    /// Whether a captured address that no step declared is an error; else it is pinned. For tests.
    pub strict: bool,
    /// Whether weights are copied to the device also where it could read the files in place. For tests.
    pub copy_weights: bool,
    /// Whether models whose keys an 8-bit cache was made for round them as that would (all but the rotated part, in groups of 64).
    pub rounded_keys: bool,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            pool: PoolConfig::vmm(),
            graphs: true,
            act: ActType::default(),
            fuse: true,
            host_work: None,
            strict: false,
            copy_weights: false,
            rounded_keys: false,
        }
    }
}

/// One device of a runtime: where its memory comes from, where its work goes, and what does it.
#[derive(Debug)]
pub struct Unit {
    kernels: Arc<Kernels>,
    /// That tie its stream to those of others.
    events: Arc<Events>,
    stream: Stream,
    pool: Pool,
}

impl Unit {
    fn new(driver: DynDriver, config: &RuntimeConfig) -> Result<Self> {
        let pool = Pool::new(Arc::clone(&driver), config.pool.clone())?;
        let stream = Stream::new(&driver)?;
        let events = Arc::new(Events::new(&driver)?);
        Ok(Self { kernels: Arc::new(Kernels::load(driver)?), events, stream, pool })
    }

    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Its stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its kernels.
    #[must_use]
    pub fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// Its number.
    #[must_use]
    pub fn device(&self) -> DeviceOrdinal {
        self.pool.device()
    }

    fn lane(&self) -> DeviceLane<'_> {
        let (kernels, stream) = (&*self.kernels, self.stream.handle());
        DeviceLane { device: self.device(), kernels, stream, events: &self.events }
    }
}

/// Lets devices of hardware copy what crosses from one to another: inside a graph that is a plain copy, which needs access to the
/// mapped pages of the other. Virtual devices of one physical device need none, and are watched the better without.
fn grant(units: &[Unit]) -> Result<()> {
    let physical = |unit: &Unit| {
        let info = unit.pool.driver().info();
        info.virtual_of.unwrap_or(info.ordinal)
    };
    for unit in units.iter().filter(|unit| unit.pool.driver().info().backend == "cuda") {
        for peer in units.iter().filter(|peer| physical(peer) != physical(unit)) {
            peer.pool.driver().bind()?;
            if peer.pool.driver().can_access_peer(unit.device())? {
                unit.pool.grant(peer.pool.driver(), &[Purpose::Scratch, Purpose::State])?;
            }
        }
    }
    Ok(())
}

/// One device or several, ready for work.
///
/// # Reuse and capture
/// All steps begin and end on one stream of one device, so memory that one step frees is the next one's at once. A step over several
/// devices forks into a stream of each, by events, and is one graph that depends on the memory of all. Scratch of an idle
/// graph may be taken when memory is short; its next launch repairs it.
#[derive(Debug)]
pub struct Runtime {
    // Graphs go before the kernels that they launch and the pools that they depend on.
    cache: GraphCache,
    /// At least one.
    units: Vec<Unit>,
    /// What this stands in for, if it does.
    pub(super) rehearsal: Option<Rehearsal>,
    config: RuntimeConfig,
}

impl Runtime {
    /// Takes a host device of its own.
    ///
    /// # Errors
    /// Those of the driver and the pool.
    pub fn host(config: RuntimeConfig) -> Result<Self> {
        Self::on(&Device::host(), config)
    }

    /// Takes the device that was chosen, or the devices.
    ///
    /// # Errors
    /// Those of the drivers and the pools.
    pub fn on(device: &Device, config: RuntimeConfig) -> Result<Self> {
        Self::several(device.drivers(HostConfig::default())?, config)
    }

    /// Takes a device by its driver.
    ///
    /// # Errors
    /// Those of the driver and the pool.
    pub fn new(driver: DynDriver, config: RuntimeConfig) -> Result<Self> {
        Self::several(vec![driver], config)
    }

    /// Takes several devices, each with a pool, a stream and kernels of its own.
    ///
    /// # Errors
    /// [`Error::Argument`] for none; those of the drivers and the pools.
    pub fn several(drivers: Vec<DynDriver>, config: RuntimeConfig) -> Result<Self> {
        let Some(first) = drivers.first() else { return Err(Error::argument("--devices", "at least one", 0)) };
        let costs = CostTable::of(first.info());
        let units = drivers.into_iter().map(|driver| Unit::new(driver, &config)).collect::<Result<Vec<_>>>()?;
        grant(&units)?;
        let cache = GraphCache::new(CacheConfig::default().graphs(config.graphs).strict(config.strict).costs(costs));
        Ok(Self { cache, units, rehearsal: None, config })
    }

    /// The devices, in their order.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The device of this number; of a number that no device here has, the first.
    #[must_use]
    pub fn unit(&self, device: DeviceOrdinal) -> &Unit {
        self.units.iter().find(|unit| unit.device() == device).unwrap_or(&self.units[0])
    }

    /// Makes cuBLAS ready for large dense products, where there is such a device and the library. It takes memory for a
    /// workspace, and time, so it is for models that have such weights.
    ///
    /// # Errors
    /// None for a library that is not there: the kernels of this crate do it too. Those of the library and the pool.
    pub fn prepare_products(&self) -> Result<()> {
        if self.is_rehearsal() {
            return self.rehearse_products();
        }
        for unit in &self.units {
            if unit.pool.driver().info().backend != "cuda" || unit.kernels.blas().is_some() {
                continue;
            }
            match Blas::new(&unit.pool, &unit.stream) {
                Ok(blas) => unit.kernels.use_blas(blas),
                Err(error @ BlasError::Missing { .. }) => {
                    tracing::info!(%error, "large dense products are left to the kernels of this program");
                }
                Err(error) => return Err(KernelError::Product(error.to_string()).into()),
            }
        }
        Ok(())
    }

    /// The pool of the first device.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.units[0].pool
    }

    /// The stream of the first device, which all steps run on where there is one device.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.units[0].stream
    }

    /// The kernels of the first device.
    #[must_use]
    pub fn kernels(&self) -> &Arc<Kernels> {
        &self.units[0].kernels
    }

    /// The first device's number.
    #[must_use]
    pub fn device(&self) -> DeviceOrdinal {
        self.units[0].device()
    }

    /// The device that memory is of; the first one for memory of nobody here.
    pub(crate) fn unit_of(&self, memory: &(impl Tracked + ?Sized)) -> &Unit {
        let pool = memory.token().allocation.pool();
        self.units.iter().find(|unit| unit.pool.id() == pool).unwrap_or(&self.units[0])
    }

    /// Waits for everything queued on all devices.
    ///
    /// # Errors
    /// Those of the drivers.
    pub fn synchronize(&self) -> Result<()> {
        self.units.iter().try_for_each(|unit| Ok(unit.stream.synchronize()?))
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &RuntimeConfig {
        &self.config
    }

    /// How the host gets to know of its share of a step.
    #[must_use]
    pub fn host_work(&self) -> HostWork {
        self.config.host_work.unwrap_or(match self.pool().driver().info().backend {
            // Its streams are threads of this process, which would take the core that is to do the work.
            "host" => HostWork::Nodes,
            _ => HostWork::Turns,
        })
    }

    /// What the graph cache did so far.
    #[must_use]
    pub fn graph_counters(&self) -> Counters {
        self.cache.counters()
    }

    /// The graph cache.
    #[must_use]
    pub fn cache(&self) -> &GraphCache {
        &self.cache
    }

    /// Runs one step: `build` puts the ops together, with scratch from the pool; `uses` is what they need
    /// besides, and `touches` how far it reaches into what of that grows. With graphs on, a step of the same key is captured and
    /// then replayed without `build`, so the key must tell apart everything that `build` depends on. Returns how it was run.
    ///
    /// # Errors
    /// Those of `build`, the pool, the graph cache and the driver.
    pub fn step(
        &self,
        key: StepKey,
        uses: &[(&dyn Tracked, Use)],
        touches: &[Touch],
        build: impl Fn(&mut Step<'_>) -> Result<()>,
    ) -> Result<Outcome> {
        self.step_on(self.device(), key, uses, touches, None, build)
    }

    /// As [`step`](Self::step), for one that begins and ends on the stream of device `home`, and in which the host may have a
    /// share. That is done when this returns.
    ///
    /// # Errors
    /// As for [`step`](Self::step), and those of the host's share.
    pub(super) fn step_on(
        &self,
        home: DeviceOrdinal,
        key: StepKey,
        uses: &[(&dyn Tracked, Use)],
        touches: &[Touch],
        side: Option<&HostSide>,
        build: impl Fn(&mut Step<'_>) -> Result<()>,
    ) -> Result<Outcome> {
        let graph_key = GraphKey::new(key);
        let home = self.unit(home);
        let others: Vec<&Unit> = self.units.iter().filter(|unit| unit.device() != home.device()).collect();
        let beside: Vec<(&Pool, &Stream)> = others.iter().map(|unit| (&unit.pool, &unit.stream)).collect();
        // Scratch of an idle graph may be taken when memory is short; the graph is repaired at its next launch.
        let request = Request::new(&graph_key, &home.pool, &home.stream).policy(ScratchPolicy::Track);
        let request = request.beside(&beside).touches(touches);
        let ran = self.cache.run(&request, |scope| {
            for (memory, use_) in uses {
                scope.declare(*memory, *use_)?;
            }
            for unit in &self.units {
                scope.keep(Arc::clone(&unit.kernels) as _);
                if let Some(blas) = unit.kernels.blas() {
                    scope.declare(blas.workspace(), Use::Scratch)?;
                }
            }
            let allocate = |device, bytes| match others.iter().position(|unit| unit.device() == device) {
                Some(lane) => Ok(scope.alloc_beside::<u8>(lane, bytes)?),
                None => Ok(scope.alloc::<u8>(bytes)?),
            };
            let mut step = Step::new(home.device(), self.config.act, &allocate, side, scope.capturing());
            build(&mut step)?;
            if let Some(side) = side {
                side.declare(scope)?;
            }
            let parts = match &self.rehearsal {
                Some(rehearsal) => {
                    rehearsal.stand_in(key.what, step.scratch_bytes(), uses, scope.stream())?;
                    Vec::new()
                }
                None => {
                    let lanes = std::iter::once(home).chain(others.iter().copied()).map(Unit::lane);
                    step.launch(&lanes.collect::<Vec<_>>(), self.config.fuse)?
                }
            };
            if let Some(side) = side.filter(|_| scope.capturing()) {
                side.captured(key, parts);
            }
            Ok(())
        });
        let Some(side) = side else { return ran };
        let served = ran.and_then(|ran| if ran.ran.is_graph() { side.serve(key).map(|()| ran) } else { Ok(ran) });
        if served.is_err() {
            side.give_up();
        }
        served
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Kernels must not be unloaded under queued work, which an error on the way may have left behind. A
        // device that died has nothing to wait for.
        self.units.iter().for_each(|unit| drop(unit.stream.synchronize()));
    }
}

/// What tells one captured step from another: the sequence it belongs to, what it does, and its shape.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StepKey {
    /// The sequence, by its process-unique number.
    pub session: u64,
    /// What the step does.
    pub what: &'static str,
    /// The shape of the work.
    pub shape: [usize; 3],
}
