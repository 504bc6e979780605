//! A device, a pool, a stream, a cache, and kernels with visible arithmetic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use evergraph_graphcache::{
    CacheConfig, CacheError, CostTable, Counters, GraphCache, GraphKey, Module, Outcome, Ran, Request, Scope,
};
use evergraph_pool::driver::host::{HostConfig, HostDevice, HostKernel, KernelContext};
use evergraph_pool::driver::{Args, Call, DevicePtr, DynDriver, Fault, Faulty, LaunchConfig, ModuleImage};
use evergraph_pool::{DeviceSlice, Pool, PoolConfig, PoolMode, ScratchPolicy, Stream, Use};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
/// Words of a temporary that has a slab (or chunks) of its own.
pub(crate) const BIG: usize = 3 * MIB - KIB;
pub(crate) const CHUNK: usize = 64 * KIB;

const P: (u32, u32) = (8, 8);
const U: (u32, u32) = (4, 4);

pub(crate) static KERNELS: &[HostKernel] = &[
    HostKernel { name: "add", params: &[P, P, U, U], hidden_attribute: 1, body: add },
    HostKernel { name: "add2", params: &[P, P, U, U], hidden_attribute: 2, body: add },
    HostKernel { name: "mul", params: &[P, P, U, U], hidden_attribute: 3, body: mul },
    HostKernel { name: "sum_table", params: &[P, P, U], hidden_attribute: 0, body: sum_table },
    HostKernel { name: "ticket", params: &[P, P, P], hidden_attribute: 0, body: ticket },
    HostKernel { name: "random", params: &[P, P], hidden_attribute: 0, body: random },
    HostKernel { name: "append", params: &[P, P, P], hidden_attribute: 0, body: append },
    HostKernel { name: "wait", params: &[P], hidden_attribute: 0, body: wait },
    HostKernel { name: "by_struct", params: &[(24, 8), U], hidden_attribute: 0, body: by_struct },
];

/// A second module with a kernel of the same name: another handle, another attribute.
pub(crate) static TWINS: &[HostKernel] =
    &[HostKernel { name: "add", params: &[P, P, U, U], hidden_attribute: 7, body: add }];

type Done = Result<(), Fault>;

/// dst[i] = src[i] + k
fn add(c: &KernelContext<'_>) -> Done {
    let (n, k) = (c.arg::<u32>(2)? as usize, c.arg::<u32>(3)?);
    // SAFETY: streams order the kernels of a test; nobody else has the spans.
    let (dst, src) = unsafe { (c.slice_mut::<u32>(c.ptr(0)?, n)?, c.slice::<u32>(c.ptr(1)?, n)?) };
    dst.iter_mut().zip(src).for_each(|(d, s)| *d = s.wrapping_add(k));
    Ok(())
}

/// dst[i] = src[i] * k
fn mul(c: &KernelContext<'_>) -> Done {
    let (n, k) = (c.arg::<u32>(2)? as usize, c.arg::<u32>(3)?);
    // SAFETY: as in `add`.
    let (dst, src) = unsafe { (c.slice_mut::<u32>(c.ptr(0)?, n)?, c.slice::<u32>(c.ptr(1)?, n)?) };
    dst.iter_mut().zip(src).for_each(|(d, s)| *d = s.wrapping_mul(k));
    Ok(())
}

/// dst[0] = sum of the first word behind each of `n` addresses in device memory
fn sum_table(c: &KernelContext<'_>) -> Done {
    let n = c.arg::<u32>(2)? as usize;
    // SAFETY: as in `add`.
    let (dst, table) = unsafe { (c.slice_mut::<u32>(c.ptr(0)?, 1)?, c.slice::<u64>(c.ptr(1)?, n)?) };
    dst[0] = 0;
    for &address in table {
        // SAFETY: as in `add`.
        dst[0] += unsafe { c.slice::<u32>(DevicePtr(address), 1)? }[0];
    }
    Ok(())
}

/// dst[0] = src[0] + counter, where the counter starts as zero and is left as zero
fn ticket(c: &KernelContext<'_>) -> Done {
    // SAFETY: as in `add`.
    let (dst, src, counter) = unsafe {
        (c.slice_mut::<u32>(c.ptr(0)?, 1)?, c.slice::<u32>(c.ptr(1)?, 1)?, c.slice_mut::<u32>(c.ptr(2)?, 1)?)
    };
    dst[0] = src[0].wrapping_add(counter[0]);
    counter[0] = 0;
    Ok(())
}

/// dst[0] = hash(seed, offset); offset += 1, both in device memory
fn random(c: &KernelContext<'_>) -> Done {
    // SAFETY: as in `add`.
    let (dst, state) = unsafe { (c.slice_mut::<u32>(c.ptr(0)?, 1)?, c.slice_mut::<u32>(c.ptr(1)?, 2)?) };
    dst[0] = (state[0] ^ state[1].wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    state[1] += 1;
    Ok(())
}

/// seq[p] = 3 p; sum[0] = seq[0] + … + seq[p], where p is read from device memory
fn append(c: &KernelContext<'_>) -> Done {
    // SAFETY: as in `add`.
    unsafe {
        let p = c.slice::<u32>(c.ptr(1)?, 1)?[0];
        c.slice_mut::<u32>(c.ptr(0)?, p as usize + 1)?[p as usize] = p.wrapping_mul(3);
        let sum = c.slice::<u32>(c.ptr(0)?, p as usize + 1)?.iter().fold(0u32, |sum, x| sum.wrapping_add(*x));
        c.slice_mut::<u32>(c.ptr(2)?, 1)?[0] = sum;
    }
    Ok(())
}

/// Waits until the flag at the host address is set.
fn wait(c: &KernelContext<'_>) -> Done {
    let flag = c.ptr(0)?.0 as usize as *const AtomicBool;
    // SAFETY: tests pass flags that live for ever.
    while !unsafe { (*flag).load(Ordering::Acquire) } {
        std::thread::yield_now();
    }
    Ok(())
}

/// As `add` with k = 1, but the pointers are in a struct by value.
fn by_struct(c: &KernelContext<'_>) -> Done {
    let [dst, src, _] = c.arg::<[u64; 3]>(0)?;
    let n = c.arg::<u32>(1)? as usize;
    // SAFETY: as in `add`.
    let (dst, src) = unsafe { (c.slice_mut::<u32>(DevicePtr(dst), n)?, c.slice::<u32>(DevicePtr(src), n)?) };
    dst.iter_mut().zip(src).for_each(|(d, s)| *d = s.wrapping_add(1));
    Ok(())
}

pub(crate) fn flag() -> &'static AtomicBool {
    Box::leak(Box::new(AtomicBool::new(false)))
}

/// Everything that a story needs.
pub(crate) struct Rig {
    pub(crate) host: Arc<HostDevice>,
    pub(crate) faulty: Arc<Faulty<HostDevice>>,
    pub(crate) driver: DynDriver,
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
    pub(crate) module: Arc<Module>,
    pub(crate) cache: GraphCache,
}

pub(crate) fn device() -> HostConfig {
    HostConfig::default().memory(KIB * MIB).granularity(CHUNK)
}

/// Strict, and with prices that do not depend on the machine: pages are cheap.
pub(crate) fn config() -> CacheConfig {
    let mut config = CacheConfig::default().strict(true);
    config.costs = CostTable::h200().flat_remap(0.01);
    config.costs.refine = false;
    config
}

impl Rig {
    pub(crate) fn new(mode: PoolMode) -> Self {
        Self::with(mode, config())
    }

    pub(crate) fn with(mode: PoolMode, cache: CacheConfig) -> Self {
        Self::on(device(), PoolConfig::new(mode).chunk(CHUNK).smallest_slab(CHUNK), cache)
    }

    pub(crate) fn on(device: HostConfig, pool: PoolConfig, cache: CacheConfig) -> Self {
        let host = HostDevice::new(device).unwrap();
        let faulty = Faulty::new(Arc::clone(&host));
        let driver: DynDriver = faulty.clone();
        driver.bind().unwrap();
        let pool = Pool::new(Arc::clone(&driver), pool).unwrap();
        let stream = Stream::new(&driver).unwrap();
        let module = Module::load(&driver, ModuleImage::Host(KERNELS)).unwrap();
        for kernel in KERNELS {
            module.function(kernel.name).unwrap();
        }
        Self { host, faulty, driver, pool, stream, module, cache: GraphCache::new(cache) }
    }

    pub(crate) fn slice(&self, data: &[u32]) -> DeviceSlice<u32> {
        let slice = self.pool.alloc(data.len(), &self.stream).unwrap();
        self.stream.upload(data, &slice).unwrap();
        slice
    }

    pub(crate) fn read(&self, slice: &DeviceSlice<u32>) -> Vec<u32> {
        self.stream.download(slice).unwrap()
    }

    pub(crate) fn launch(&self, stream: &Stream, name: &str, args: &Args) -> Result<(), CacheError> {
        let function = self.module.function(name)?;
        self.driver.bind()?;
        let config = LaunchConfig::linear(1, 32);
        // SAFETY: the arguments fit `KERNELS`; the host device checks what they point at.
        unsafe { self.driver.launch_kernel(function, &config, args.as_bytes(), stream.handle())? };
        Ok(())
    }

    /// Queues dst = src + k (or another kernel of that form).
    pub(crate) fn op(
        &self,
        scope: &Scope<'_>,
        name: &str,
        dst: DevicePtr,
        src: DevicePtr,
        n: usize,
        k: u32,
    ) -> Result<(), CacheError> {
        self.launch(scope.stream(), name, Args::new().ptr(dst).ptr(src).u32(n as u32).u32(k))
    }

    /// out = (input + a) * m by way of a temporary of `temp_len` words.
    pub(crate) fn affine(
        &self,
        scope: &Scope<'_>,
        input: &DeviceSlice<u32>,
        out: &DeviceSlice<u32>,
        temp_len: usize,
        (a, m): (u32, u32),
    ) -> Result<(), CacheError> {
        scope.declare(input, Use::Input)?;
        scope.declare(out, Use::State)?;
        scope.keep(self.module.clone());
        let temp = scope.alloc::<u32>(temp_len)?;
        self.op(scope, "add", temp.ptr(), input.ptr(), input.len(), a)?;
        self.op(scope, "mul", out.ptr(), temp.ptr(), input.len(), m)
    }

    /// The calls since logging was switched on, without the two that are no work for the device.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.faulty.take_log().into_iter().filter(|c| c.name != "bind").collect()
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.calls().iter().map(|c| c.name).collect()
    }

    pub(crate) fn count(&self) -> Counters {
        self.cache.counters()
    }
}

/// A graph of `Rig::affine` with buffers of its own.
pub(crate) struct Affine {
    pub(crate) key: GraphKey,
    pub(crate) input: DeviceSlice<u32>,
    pub(crate) out: DeviceSlice<u32>,
    pub(crate) temp_len: usize,
    pub(crate) policy: ScratchPolicy,
    pub(crate) form: (u32, u32),
    turn: std::cell::Cell<u32>,
}

impl Affine {
    pub(crate) fn new(rig: &Rig, name: u32, temp_len: usize, policy: ScratchPolicy) -> Self {
        let (input, out) = (rig.slice(&[0; 4]), rig.slice(&[0; 4]));
        let form = (name + 1, 3);
        Self { key: GraphKey::new(name), input, out, temp_len, policy, form, turn: 0.into() }
    }

    /// Runs once on new input and checks the result.
    pub(crate) fn run(&self, rig: &Rig) -> Outcome {
        self.try_run(rig).unwrap()
    }

    pub(crate) fn try_run(&self, rig: &Rig) -> Result<Outcome, CacheError> {
        let turn = self.turn.get() + 1;
        self.turn.set(turn);
        let data = [turn, 2 * turn, 3 * turn, turn.wrapping_mul(77)];
        rig.stream.upload(&data, &self.input).unwrap();
        rig.stream.fill(&self.out, 0xee).unwrap();
        let outcome = self.only_run(rig)?;
        let expected = data.map(|x| x.wrapping_add(self.form.0).wrapping_mul(self.form.1));
        assert_eq!(rig.read(&self.out), expected, "{outcome:?}");
        Ok(outcome)
    }

    /// Runs once, whatever the input is.
    pub(crate) fn only_run(&self, rig: &Rig) -> Result<Outcome, CacheError> {
        let request = Request::new(&self.key, &rig.pool, &rig.stream).policy(self.policy.clone());
        rig.cache.run(&request, |scope| rig.affine(scope, &self.input, &self.out, self.temp_len, self.form))
    }

    /// Two warm-ups and the capture.
    pub(crate) fn settle(&self, rig: &Rig) {
        let ran: Vec<Ran> = (0..3).map(|_| self.run(rig).ran).collect();
        assert_eq!(ran, [Ran::WarmUp, Ran::WarmUp, Ran::Captured]);
    }
}

pub(crate) const BOTH: [PoolMode; 2] = [PoolMode::Vmm, PoolMode::Slab];

/// Nothing is left on the device.
pub(crate) fn nothing_left(host: &HostDevice) {
    let live = host.live();
    assert_eq!((live.execs, live.graphs, live.mallocs, live.mappings, live.chunks), (0, 0, 0, 0, 0), "{live:?}");
    assert_eq!((live.events, live.streams, live.modules, live.reservations, live.host), (0, 0, 0, 0, 0), "{live:?}");
}
