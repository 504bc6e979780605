//! Probe kernels: tiny, with arithmetic that can be done in the head.
//!
//! Scenarios, stress and tests launch them to see *which bytes* a graph reads and writes. Each works on
//! 32-bit words, wraps around, and lists every address that it touches among its arguments, but for
//! [`Probe::gather`], which finds its sources in a table in device memory, as batched products do, and [`Probe::append`], whose
//! reach is in device memory.
//!
//! | kernel | does |
//! |---|---|
//! | [`fill`](Probe::fill) | `out[i] = value + i` |
//! | [`add`](Probe::add) | `out[i] = input[i] + k` |
//! | [`mix`](Probe::mix) | `out[i] = 3 a[i] + b[i]` |
//! | [`accumulate`](Probe::accumulate) | `state[i] += input[i]` |
//! | [`gather`](Probe::gather) | `out[i] = Σ_j table[j][i]` |
//! | [`count`](Probe::count) | `cell[0] += 1`, `cell[1] = the old cell[0]`: right only if the cell was zero |
//! | [`append`](Probe::append) | `p = place[0]`, `seq[p] = 3 p`, `place[1] = seq[0] + … + seq[p]`, `place[0] += 1`: a text that grows |

#![allow(unsafe_code)]

use std::fmt;

use evergraph_pool::driver::host::{HostKernel, KernelContext};
use evergraph_pool::driver::{
    Args, DevicePtr, DriverError, DriverErrorKind, DriverResult, DynDriver, Fault, FunctionHandle, LaunchConfig,
    ModuleHandle, ModuleImage, StreamHandle,
};

use crate::cuda::{self, DiskCache, SOURCES, Source, Target};

/// A run of 32-bit words in device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Words {
    /// Where it starts.
    pub ptr: DevicePtr,
    /// How many words.
    pub len: usize,
}

impl Words {
    /// `len` words at `ptr`.
    #[must_use]
    pub fn new(ptr: DevicePtr, len: usize) -> Self {
        Self { ptr, len }
    }
}

/// The probe kernels of one device, loaded once, unloaded on drop.
///
/// The host device checks each span against its map, so that a launch on memory that is gone ends in the sticky fault of
/// real hardware, and never in undefined behaviour. Hardware checks by page: what is launched there must be sound.
///
/// # Reuse and capture
/// Everything is loaded here, so a launch may be captured. Graphs must not outlive the value.
pub struct Probe {
    driver: DynDriver,
    module: ModuleHandle,
    functions: [FunctionHandle; KERNELS.len()],
    /// Whether a launch is spread over many threads; a host body is one.
    wide: bool,
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe").field("device", &self.driver.info().ordinal).field("module", &self.module).finish()
    }
}

impl Probe {
    /// Loads the kernels on the driver's device.
    ///
    /// # Errors
    /// The driver's; where the kernels have to be compiled and can not be, `Other` with the compiler's words.
    pub fn load(driver: DynDriver) -> DriverResult<Self> {
        driver.bind()?;
        let module = match driver.info().backend {
            "host" => driver.module_load(ModuleImage::Host(&KERNELS))?,
            _ => driver.module_load(ModuleImage::Binary(&compiled(&driver)?))?,
        };
        let mut functions = [FunctionHandle(0); KERNELS.len()];
        for (function, kernel) in functions.iter_mut().zip(&KERNELS) {
            match driver.function(module, kernel.name) {
                Ok(found) => *function = found,
                Err(error) => {
                    let _ = driver.module_unload(module);
                    return Err(error);
                }
            }
        }
        let wide = driver.info().backend != "host";
        Ok(Self { driver, module, functions, wide })
    }

    /// The module, which graphs that use these kernels depend on.
    #[must_use]
    pub fn module(&self) -> ModuleHandle {
        self.module
    }

    /// `out[i] = value + i`.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill(&self, stream: StreamHandle, out: Words, value: u32) -> DriverResult<()> {
        self.launch(FILL, out.len, Args::new().ptr(out.ptr).u32(words(out.len)).u32(value), stream)
    }

    /// `out[i] = input[i] + k`, as far as both reach.
    ///
    /// # Errors
    /// The driver's.
    pub fn add(&self, stream: StreamHandle, input: Words, k: u32, out: Words) -> DriverResult<()> {
        let len = input.len.min(out.len);
        self.launch(ADD, len, Args::new().ptr(input.ptr).ptr(out.ptr).u32(words(len)).u32(k), stream)
    }

    /// `out[i] = 3 a[i] + b[i]`, as far as all reach.
    ///
    /// # Errors
    /// The driver's.
    pub fn mix(&self, stream: StreamHandle, a: Words, b: Words, out: Words) -> DriverResult<()> {
        let len = a.len.min(b.len).min(out.len);
        self.launch(MIX, len, Args::new().ptr(a.ptr).ptr(b.ptr).ptr(out.ptr).u32(words(len)), stream)
    }

    /// `state[i] += input[i]`, as far as both reach.
    ///
    /// # Errors
    /// The driver's.
    pub fn accumulate(&self, stream: StreamHandle, input: Words, state: Words) -> DriverResult<()> {
        let len = input.len.min(state.len);
        self.launch(ACCUMULATE, len, Args::new().ptr(input.ptr).ptr(state.ptr).u32(words(len)), stream)
    }

    /// `out[i] = Σ_j table[j][i]`: `table` holds `rows` device addresses of runs as long as `out`.
    ///
    /// # Errors
    /// The driver's.
    pub fn gather(&self, stream: StreamHandle, table: DevicePtr, rows: usize, out: Words) -> DriverResult<()> {
        self.launch(GATHER, out.len, Args::new().ptr(table).ptr(out.ptr).u32(words(rows)).u32(words(out.len)), stream)
    }

    /// `cell[1] = cell[0]`, then `cell[0] += 1`: a counter that must start as zero.
    ///
    /// # Errors
    /// The driver's.
    pub fn count(&self, stream: StreamHandle, cell: Words) -> DriverResult<()> {
        self.launch(COUNT, 1, Args::new().ptr(cell.ptr), stream)
    }

    /// `p = place[0]`, `seq[p] = 3 p`, `place[1] = seq[0] + … + seq[p]`, `place[0] = p + 1`.
    ///
    /// # Errors
    /// The driver's.
    pub fn append(&self, stream: StreamHandle, seq: DevicePtr, place: Words) -> DriverResult<()> {
        self.launch(APPEND, 1, Args::new().ptr(seq).ptr(place.ptr), stream)
    }

    /// The words that a launch of `function` with these packed arguments names, the written run last; `None` for
    /// a kernel that is not a probe. What [`gather`](Self::gather) finds in its table is not named, nor the sequence of
    /// [`append`](Self::append).
    #[must_use]
    pub fn named(&self, function: FunctionHandle, args: &[u8]) -> Option<Vec<Words>> {
        let kernel = self.functions.iter().position(|known| *known == function)?;
        let ptr = |at: usize| Some(DevicePtr(u64::from_ne_bytes(args.get(at..at + 8)?.try_into().ok()?)));
        let len = |at: usize| Some(u32::from_ne_bytes(args.get(at..at + 4)?.try_into().ok()?) as usize);
        Some(match kernel {
            FILL => vec![Words::new(ptr(0)?, len(8)?)],
            ADD | ACCUMULATE => vec![Words::new(ptr(0)?, len(16)?), Words::new(ptr(8)?, len(16)?)],
            MIX => [0, 8, 16].into_iter().map(|at| Some(Words::new(ptr(at)?, len(24)?))).collect::<Option<_>>()?,
            GATHER => vec![Words::new(ptr(0)?, 2 * len(16)?), Words::new(ptr(8)?, len(20)?)],
            APPEND => vec![Words::new(ptr(8)?, 2)],
            _ => vec![Words::new(ptr(0)?, 2)],
        })
    }

    fn launch(&self, kernel: usize, words: usize, args: &Args, stream: StreamHandle) -> DriverResult<()> {
        self.driver.bind()?;
        let config = if self.wide {
            let blocks = words.div_ceil(BLOCK as usize).clamp(1, MOST_BLOCKS);
            LaunchConfig::linear(blocks as u32, BLOCK)
        } else {
            LaunchConfig::linear(1, 1)
        };
        // SAFETY: the arguments were packed in the order of the kernel's parameters. The host device checks every span
        // that a body touches against its map. Elsewhere the words are the caller's slices; whether these are still
        // live is what tokens and leases are for.
        unsafe { self.driver.launch_kernel(self.functions[kernel], &config, args.as_bytes(), stream) }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if self.driver.bind().is_ok() {
            let _ = self.driver.module_unload(self.module);
        }
    }
}

/// The kernels as code for a CUDA device.
fn compiled(driver: &DynDriver) -> DriverResult<Vec<u8>> {
    let other =
        |name: String| DriverError::new("module_load", driver.info().ordinal, DriverErrorKind::Other { code: 0, name });
    let sources: Vec<Source> = SOURCES.iter().filter(|source| source.name == "probe").copied().collect();
    let target = Target::of(driver.info().compute_capability);
    let images = cuda::images(&sources, target, &DiskCache::of_user()).map_err(|error| other(error.to_string()))?;
    images.into_iter().next().map(|image| image.cubin).ok_or_else(|| other("no source of the probes".to_owned()))
}

/// Threads of a block where there are many.
const BLOCK: u32 = 256;
/// Blocks at most: each thread strides over the words.
const MOST_BLOCKS: usize = 1024;

const PTR: (u32, u32) = (8, 8);
const U32: (u32, u32) = (4, 4);

const FILL: usize = 0;
const ADD: usize = 1;
const MIX: usize = 2;
const ACCUMULATE: usize = 3;
const GATHER: usize = 4;
const COUNT: usize = 5;
const APPEND: usize = 6;

static KERNELS: [HostKernel; 7] = [
    HostKernel { name: "probe_fill", params: &[PTR, U32, U32], hidden_attribute: 0, body: fill },
    HostKernel { name: "probe_add", params: &[PTR, PTR, U32, U32], hidden_attribute: 0, body: add },
    HostKernel { name: "probe_mix", params: &[PTR, PTR, PTR, U32], hidden_attribute: 0, body: mix },
    HostKernel { name: "probe_accumulate", params: &[PTR, PTR, U32], hidden_attribute: 0, body: accumulate },
    HostKernel { name: "probe_gather", params: &[PTR, PTR, U32, U32], hidden_attribute: 0, body: gather },
    HostKernel { name: "probe_count", params: &[PTR], hidden_attribute: 0, body: count },
    HostKernel { name: "probe_append", params: &[PTR, PTR], hidden_attribute: 0, body: append },
];

/// Word counts are `u32` on the device. A longer run is refused there: nothing maps `u32::MAX` words.
fn words(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

fn fill(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let (out, len, value) = (launch.ptr(0)?, launch.arg::<u32>(1)?, launch.arg::<u32>(2)?);
    write(launch, out, (0..len).map(|i| value.wrapping_add(i)).collect())
}

fn add(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let (input, out, len, k) = (launch.ptr(0)?, launch.ptr(1)?, launch.arg::<u32>(2)?, launch.arg::<u32>(3)?);
    let words = read(launch, input, len)?;
    write(launch, out, words.into_iter().map(|w| w.wrapping_add(k)).collect())
}

fn mix(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let (a, b, out, len) = (launch.ptr(0)?, launch.ptr(1)?, launch.ptr(2)?, launch.arg::<u32>(3)?);
    let (a, b) = (read(launch, a, len)?, read(launch, b, len)?);
    write(launch, out, a.into_iter().zip(b).map(|(a, b)| a.wrapping_mul(3).wrapping_add(b)).collect())
}

fn accumulate(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let (input, state, len) = (launch.ptr(0)?, launch.ptr(1)?, launch.arg::<u32>(2)?);
    let (input, old) = (read(launch, input, len)?, read(launch, state, len)?);
    write(launch, state, input.into_iter().zip(old).map(|(a, b)| a.wrapping_add(b)).collect())
}

fn gather(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let (table, out) = (launch.ptr(0)?, launch.ptr(1)?);
    let (rows, len) = (launch.arg::<u32>(2)?, launch.arg::<u32>(3)?);
    // SAFETY: as in `read`.
    let table = unsafe { launch.slice::<u64>(table, rows as usize)? }.to_vec();
    let mut sum = vec![0u32; len as usize];
    for row in table {
        for (sum, word) in sum.iter_mut().zip(read(launch, DevicePtr(row), len)?) {
            *sum = sum.wrapping_add(word);
        }
    }
    write(launch, out, sum)
}

fn count(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let cell = launch.ptr(0)?;
    let old = read(launch, cell, 2)?;
    write(launch, cell, vec![old[0].wrapping_add(1), old[0]])
}

fn append(launch: &KernelContext<'_>) -> Result<(), Fault> {
    let (seq, place) = (launch.ptr(0)?, launch.ptr(1)?);
    let position = read(launch, place, 2)?[0];
    let at = seq.checked_add(position as usize * 4).unwrap_or_default();
    write(launch, at, vec![position.wrapping_mul(3)])?;
    let sum = read(launch, seq, position.wrapping_add(1))?.into_iter().fold(0, u32::wrapping_add);
    write(launch, place, vec![position.wrapping_add(1), sum])
}

/// Copied out, so that a kernel may write where it reads.
fn read(launch: &KernelContext<'_>, ptr: DevicePtr, len: u32) -> Result<Vec<u32>, Fault> {
    // SAFETY: the span is checked against the map, and the reference ends before anything is written. Kernels
    // of one stream run one after another; ordering streams is what scenarios are about, and words are plain.
    Ok(unsafe { launch.slice::<u32>(ptr, len as usize)? }.to_vec())
}

fn write(launch: &KernelContext<'_>, ptr: DevicePtr, words: Vec<u32>) -> Result<(), Fault> {
    // SAFETY: as above; no other reference of this kernel is alive.
    unsafe { launch.slice_mut::<u32>(ptr, words.len())? }.copy_from_slice(&words);
    Ok(())
}
