//! A cached graph of your own kernel, that survives a flush of the memory it was captured with.
//!
//! `cargo run -p evergraph-graphcache --example own_kernel [-- --device host|cuda]`
//!
//! On a CUDA device the kernel is CUDA C++, compiled here by NVRTC through cudarc; on the host device it is a function of
//! this program. Everything else is the same.
#![allow(unsafe_code)]

use std::error::Error;

use cudarc::nvrtc;
use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Module, Request};
use evergraph_pool::driver::host::{HostConfig, HostKernel, KernelContext};
use evergraph_pool::driver::{Args, DeviceChoice, DevicePtr, DynDriver, Fault, LaunchConfig, ModuleImage, open};
use evergraph_pool::{Pool, PoolConfig, PoolMode, Purpose, ScratchPolicy, Stream, Use};

/// `y[i] = a * x[i] + 1`
const SOURCE: &str = r#"
extern "C" __global__ void axpy(float* y, const float* x, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + 1.0f;
}
"#;

/// The same for the host device, which runs a body once a launch.
static HOST: &[HostKernel] =
    &[HostKernel { name: "axpy", params: &[(8, 8), (8, 8), (4, 4), (4, 4)], hidden_attribute: 0, body: axpy }];

fn axpy(context: &KernelContext<'_>) -> Result<(), Fault> {
    let (a, n) = (context.arg::<f32>(2)?, context.arg::<u32>(3)? as usize);
    // SAFETY: the stream orders everything that touches the two vectors, which do not overlap.
    let (y, x) = unsafe { (context.slice_mut::<f32>(context.ptr(0)?, n)?, context.slice::<f32>(context.ptr(1)?, n)?) };
    y.iter_mut().zip(x).for_each(|(y, x)| *y = a * x + 1.0);
    Ok(())
}

/// Compiles the source for a device, to PTX.
fn compile(driver: &DynDriver) -> Result<Vec<u8>, Box<dyn Error>> {
    // SAFETY: loads and drops the library; its initialisers are the vendor's.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err("NVRTC is not on the loader's path; try --device host".into());
    }
    let (major, minor) = driver.info().compute_capability;
    let options = vec![format!("--gpu-architecture=compute_{major}{minor}")];
    let ptx = nvrtc::compile_ptx_with_opts(SOURCE, nvrtc::CompileOptions { options, ..Default::default() })?;
    Ok(ptx.as_bytes().ok_or("NVRTC gave no text")?.to_vec())
}

fn main() -> Result<(), Box<dyn Error>> {
    const N: usize = 1 << 20;
    let driver = open(DeviceChoice::asked()?, HostConfig::default())?;
    let module = match driver.info().backend {
        "cuda" => Module::load(&driver, ModuleImage::Binary(&compile(&driver)?))?,
        _ => Module::load(&driver, ModuleImage::Host(HOST))?,
    };
    // Looked up before the capture: inside it nothing is loaded.
    let function = module.function("axpy")?;
    for mode in [PoolMode::Vmm, PoolMode::Slab] {
        println!("-- {mode} on {}", driver.info().name);
        let pool = Pool::new(driver.clone(), PoolConfig::new(mode))?;
        let stream = Stream::new(&driver)?;
        let cache = GraphCache::new(CacheConfig::default().strict(true));
        let x = pool.upload(&[0f32; N], Purpose::State, &stream)?;
        let y = pool.upload(&[0f32; N], Purpose::State, &stream)?;
        let launch = |y: DevicePtr, x: DevicePtr, a: f32| {
            let mut args = Args::new();
            args.ptr(y).ptr(x).f32(a).u32(N as u32);
            let config = LaunchConfig::linear(N.div_ceil(256) as u32, 256);
            // SAFETY: the arguments are the kernel's, and both vectors have N elements.
            unsafe { driver.launch_kernel(function, &config, args.as_bytes(), stream.handle()) }
        };
        let key = GraphKey::new("axpy, twice");
        let run = |turn: usize| -> Result<(), Box<dyn Error>> {
            stream.upload(&[turn as f32; N], &x)?;
            let request = Request::new(&key, &pool, &stream).policy(ScratchPolicy::Track).modules(module.generation());
            let outcome = cache.run(&request, |scope| -> Result<(), CacheError> {
                // The graph keeps the code; the scan would find an undeclared vector.
                scope.keep(module.clone());
                scope.declare(&x, Use::Input)?;
                scope.declare(&y, Use::State)?;
                let between = scope.alloc::<f32>(N)?;
                launch(between.ptr(), x.ptr(), 2.0)?;
                Ok(launch(y.ptr(), between.ptr(), 3.0)?)
            })?;
            let cause = outcome.cause.map_or(String::new(), |cause| format!(": {cause}"));
            println!("run {turn}: {}{cause}", outcome.ran);
            let expected = 3.0 * (2.0 * turn as f32 + 1.0) + 1.0;
            assert!(stream.download(&y)?.iter().all(|&y| y == expected), "every element is {expected}");
            Ok(())
        };
        (1..=4).try_for_each(run)?;
        println!("flush: {} KiB went back", pool.trim_to(0)? >> 10);
        (5..=6).try_for_each(run)?;
    }
    Ok(())
}
