//! A device, a stream, and one kernel that is in no module but this.

// One launch: see its SAFETY comment.
#![allow(unsafe_code)]

use std::sync::Arc;

use evergraph_graphcache::{CacheError, Module};
use evergraph_pool::driver::host::{HostKernel, KernelContext};
use evergraph_pool::driver::{Args, DevicePtr, DynDriver, Fault, FunctionHandle, LaunchConfig, ModuleImage};
use evergraph_pool::{PoolError, Stream};

const PTX: &[u8] = concat!(include_str!("step.ptx"), "\0").as_bytes();

static HOST: &[HostKernel] =
    &[HostKernel { name: "step", params: &[(8, 8), (8, 8), (4, 4), (4, 4)], hidden_attribute: 0, body: step }];

/// dst[i] = src[i] + k
fn step(c: &KernelContext<'_>) -> Result<(), Fault> {
    let (n, k) = (c.arg::<u32>(2)? as usize, c.arg::<u32>(3)?);
    // SAFETY: all launches of a bench are on one stream, which orders them; nobody else has the spans.
    let (dst, src) = unsafe { (c.slice_mut::<u32>(c.ptr(0)?, n)?, c.slice::<u32>(c.ptr(1)?, n)?) };
    for (d, s) in dst.iter_mut().zip(src) {
        *d = s.wrapping_add(k);
    }
    Ok(())
}

/// A device with a stream and the kernel.
#[derive(Debug)]
pub struct Rig {
    /// The device.
    pub driver: DynDriver,
    /// A stream of it.
    pub stream: Stream,
    module: Arc<Module>,
    function: FunctionHandle,
}

/// One launch of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// To.
    pub dst: DevicePtr,
    /// From.
    pub src: DevicePtr,
    /// Words.
    pub words: u32,
    /// Threads a block: graphs that differ in it have different shapes.
    pub threads: u32,
}

impl Rig {
    /// On a device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(driver: DynDriver) -> Result<Self, CacheError> {
        driver.bind()?;
        let stream = Stream::new(&driver)?;
        let image = if driver.info().backend == "cuda" { ModuleImage::Binary(PTX) } else { ModuleImage::Host(HOST) };
        let module = Module::load(&driver, image)?;
        let function = module.function("step")?;
        Ok(Self { driver, stream, module, function })
    }

    /// What graphs must keep.
    #[must_use]
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// Launches the kernel.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self, step: Step, stream: &Stream) -> Result<(), CacheError> {
        let mut args = Args::new();
        args.ptr(step.dst).ptr(step.src).u32(step.words).u32(1);
        let config = LaunchConfig::linear(step.words.div_ceil(step.threads.max(1)), step.threads);
        // SAFETY: the arguments fit the kernel, whose words lie in slices that the benches keep until the stream is idle
        // or that their graphs depend on.
        unsafe { self.driver.launch_kernel(self.function, &config, args.as_bytes(), stream.handle())? };
        Ok(())
    }

    /// Waits until the stream is idle.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn settle(&self) -> Result<(), PoolError> {
        self.stream.synchronize()
    }
}
