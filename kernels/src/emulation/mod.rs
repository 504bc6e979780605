//! CUDA kernels without a GPU: g++ compiles the very sources into a library, in which the threads of a block are
//! fibers, and the host device runs them as kernel bodies.
//!
//! What the hardware leaves undefined or hangs on (a barrier that not all threads reach, a shuffle that not all lanes
//! reach) is a fault here. The order of threads is a parameter: a kernel with a missing barrier gives other bits in
//! another order.

#![allow(unsafe_code)]

mod build;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::Path;
use std::sync::OnceLock;

use evergraph_pool::driver::host::{HostKernel, KernelContext};
use evergraph_pool::driver::{DeviceInfo, DevicePtr, DynDriver, Fault, LaunchConfig};
use libloading::Library;
use rayon::prelude::*;

use crate::{KernelError, Kernels};

/// The order in which the threads of a block run between barriers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// From the first thread to the last.
    Up,
    /// From the last thread to the first.
    Down,
    /// Another one each time, always the same for a kernel and its grid.
    Mixed,
}

/// Why there is no emulation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmulationError {
    /// Tests say that they were skipped.
    #[error("no g++ ({0})")]
    NoCompiler(String),
    /// A source does not compile, or the library does not load.
    #[error("{0}")]
    Build(String),
}

/// The compiled kernels.
#[derive(Debug)]
pub struct Emulation {
    run: Run,
    up: &'static [HostKernel],
    down: &'static [HostKernel],
    mixed: &'static [HostKernel],
    /// Keeps the code loaded.
    _library: Library,
}

type Run =
    unsafe extern "C" fn(c_uint, *const u32, *const u32, u32, *const u8, u64, u64, c_uint, *mut c_char, usize) -> c_int;
type Describe = unsafe extern "C" fn(c_uint, *mut *const u32, *mut c_uint, *mut c_uint) -> *const c_char;

impl Emulation {
    /// The kernels of this crate, compiled at first use.
    ///
    /// # Errors
    /// The compiler is missing, or what it said.
    pub fn of_this_crate() -> Result<&'static Self, EmulationError> {
        static LOADED: OnceLock<Result<Emulation, EmulationError>> = OnceLock::new();
        let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        LOADED.get_or_init(|| Self::load(&build::library(&cuda)?)).as_ref().map_err(Clone::clone)
    }

    fn load(path: &Path) -> Result<Self, EmulationError> {
        let fail = |e: libloading::Error| EmulationError::Build(format!("{}: {e}", path.display()));
        // SAFETY: the library was built from the sources of this crate; its initialisers fill a list.
        let library = unsafe { Library::new(path) }.map_err(fail)?;
        // SAFETY: the signatures are those of `engine.cpp`, and the pointers are used while the library is loaded.
        let (count, describe, run) = unsafe {
            (
                *library.get::<unsafe extern "C" fn() -> c_uint>(b"evg_emulated_count\0").map_err(fail)?,
                *library.get::<Describe>(b"evg_emulated_kernel\0").map_err(fail)?,
                *library.get::<Run>(b"evg_emulated_run\0").map_err(fail)?,
            )
        };
        let mut kernels: Vec<(&'static str, &'static [(u32, u32)])> = Vec::new();
        // SAFETY: as above.
        for index in 0..unsafe { count() } {
            let (mut parameters, mut len, mut bytes) = (std::ptr::null(), 0, 0);
            // SAFETY: the index is below the count; what comes back are constants of the library, which is never
            // unloaded.
            let (name, parameters) = unsafe {
                let name = CStr::from_ptr(describe(index, &raw mut parameters, &raw mut len, &raw mut bytes));
                (name, std::slice::from_raw_parts(parameters, 2 * len as usize))
            };
            let name = name.to_str().map_err(|e| EmulationError::Build(e.to_string()))?;
            // Plain numbers and pointers: as aligned as they are long.
            let parameters: Vec<_> = parameters.as_chunks::<2>().0.iter().map(|&[_, bytes]| (bytes, bytes)).collect();
            kernels.push((Box::leak(name.to_owned().into_boxed_str()), Box::leak(parameters.into_boxed_slice())));
        }
        let table = |body: fn(&KernelContext<'_>) -> Result<(), Fault>| -> &'static [HostKernel] {
            let list = kernels.iter().map(|&(name, params)| HostKernel { name, params, hidden_attribute: 0, body });
            Box::leak(list.collect::<Vec<_>>().into_boxed_slice())
        };
        let (up, down, mixed) = (table(body::<0>), table(body::<1>), table(body::<2>));
        Ok(Self { run, up, down, mixed, _library: library })
    }

    /// The kernels with their parameters.
    #[must_use]
    pub fn kernels(&self) -> &'static [HostKernel] {
        self.up
    }

    /// Loads them on a host device, where ops then launch what they would on a CUDA device.
    ///
    /// # Errors
    /// The driver's.
    pub fn on(&self, driver: DynDriver, order: Order) -> Result<Kernels, KernelError> {
        let kernels = match order {
            Order::Up => self.up,
            Order::Down => self.down,
            Order::Mixed => self.mixed,
        };
        let host = driver.info().clone();
        let mut device = DeviceInfo::new(host.ordinal, "cuda", "emulated", host.total_bytes, host.vmm);
        // As the smallest device that all kernels run on, with few multiprocessors, so that grids stay small.
        (device.multiprocessors, device.compute_capability) = (4, (8, 0));
        Kernels::of_emulation(driver, kernels, device)
    }

    /// Runs all blocks of a launch; blocks are spread over the threads of the CPU bodies.
    fn launch(&self, name: &str, config: &LaunchConfig, args: &[u8], order: u32) -> Result<(), String> {
        let index = self.up.iter().position(|k| k.name == name).ok_or("no such kernel")?;
        let index = u32::try_from(index).map_err(|e| e.to_string())?;
        let blocks: u64 = config.grid.iter().map(|&n| u64::from(n)).product();
        let share = blocks.div_ceil(4 * rayon::current_num_threads() as u64).max(1);
        (0..blocks.div_ceil(share)).into_par_iter().try_for_each(|part| {
            let (first, end) = (part * share, ((part + 1) * share).min(blocks));
            let mut message = [0u8; 400];
            // SAFETY: index and argument bytes are those of the kernel (the host device compared the length with its
            // parameters); what the arguments point to is the launch's affair, as on a device.
            let faulted = unsafe {
                (self.run)(
                    index,
                    config.grid.as_ptr(),
                    config.block.as_ptr(),
                    config.shared_bytes,
                    args.as_ptr(),
                    first,
                    end - first,
                    order,
                    message.as_mut_ptr().cast(),
                    message.len(),
                )
            };
            if faulted == 0 {
                return Ok(());
            }
            Err(CStr::from_bytes_until_nul(&message)
                .map_or_else(|e| e.to_string(), |m| m.to_string_lossy().into_owned()))
        })
    }
}

fn body<const ORDER: u32>(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let fault = |reason: &str| ctx.fault(DevicePtr::NULL, 0, false, reason);
    let emulation = Emulation::of_this_crate().map_err(|e| fault(&e.to_string()))?;
    emulation.launch(ctx.name(), ctx.config(), ctx.args(), ORDER).map_err(|reason| fault(&reason))
}
