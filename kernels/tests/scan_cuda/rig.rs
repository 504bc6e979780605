//! A device, a pool, a stream, and kernels with visible arithmetic.

use std::collections::BTreeSet;
use std::sync::Arc;

use cudarc::driver::sys;
use evergraph_graphcache::{CacheError, Contents, Module, Scope};
use evergraph_kernels::cuda::{Source, Target, compile};
use evergraph_pool::driver::host::HostConfig;
use evergraph_pool::driver::{
    Args, CaptureMode, DeviceChoice, DevicePtr, DynDriver, GraphHandle, LaunchConfig, ModuleImage, NodeHandle, open,
};
use evergraph_pool::{AllocationId, Pool, PoolConfig, Stream, Tracked};

/// The stories' kernels. One thread does the work.
pub(crate) const SOURCE: Source = Source {
    name: "stories",
    text: r#"
typedef unsigned int u32;

extern "C" __global__ void add(u32* dst, const u32* src, u32 n, u32 k) {
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) dst[i] = src[i] + k;
}

struct Span { u32* dst; const u32* src; u32 n; u32 k; };

extern "C" __global__ void by_struct(Span span, u32 extra) {
    for (u32 i = threadIdx.x; i < span.n; i += blockDim.x) span.dst[i] = span.src[i] + span.k + extra;
}

extern "C" __global__ void scale(float* y, const float* x, float factor, u32 n) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = x[i] * factor;
}
"#,
};

pub(crate) struct Rig {
    pub(crate) driver: DynDriver,
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
    pub(crate) cubin: Vec<u8>,
    pub(crate) module: Arc<Module>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let driver = open(DeviceChoice::Cuda(0), HostConfig::default()).unwrap();
        let pool = Pool::new(driver.clone(), PoolConfig::vmm()).unwrap();
        let stream = Stream::new(&driver).unwrap();
        let target = Target::of(driver.info().compute_capability);
        let cubin = compile(&SOURCE, target).unwrap().cubin;
        let module = Module::load(&driver, ModuleImage::Binary(&cubin)).unwrap();
        for name in ["add", "by_struct", "scale"] {
            module.function(name).unwrap();
        }
        Self { driver, pool, stream, cubin, module }
    }

    pub(crate) fn raw_stream(&self) -> sys::CUstream {
        std::ptr::with_exposed_provenance_mut(self.stream.handle().0 as usize)
    }

    /// `dst[i] = src[i] + k`, as a driver launch.
    pub(crate) fn add(&self, dst: DevicePtr, src: DevicePtr, n: u32, k: u32) {
        let mut args = Args::new();
        args.ptr(dst).ptr(src).u32(n).u32(k);
        self.launch("add", &args);
    }

    pub(crate) fn launch(&self, name: &str, args: &Args) {
        let function = self.module.function(name).unwrap();
        // SAFETY: the stories pass what the kernels take.
        unsafe {
            self.driver
                .launch_kernel(function, &LaunchConfig::linear(1, 32), args.as_bytes(), self.stream.handle())
                .unwrap();
        }
    }

    /// The same inside a closure of the cache, which keeps the module.
    pub(crate) fn add_in(&self, scope: &Scope<'_>, dst: DevicePtr, src: DevicePtr, k: u32) -> Result<(), CacheError> {
        scope.keep(self.module.clone());
        self.add(dst, src, 4, k);
        Ok(())
    }

    /// Captures what `record` puts on the stream.
    pub(crate) fn capture(&self, record: impl FnOnce()) -> GraphHandle {
        self.driver.begin_capture(self.stream.handle(), CaptureMode::ThreadLocal).unwrap();
        record();
        self.driver.end_capture(self.stream.handle()).unwrap()
    }

    pub(crate) fn read(&self, graph: GraphHandle) -> Contents {
        Contents::read(&self.driver, graph).unwrap()
    }

    /// The allocations that the words of a graph lead into.
    pub(crate) fn found(&self, contents: &Contents) -> BTreeSet<AllocationId> {
        let ptrs: Vec<DevicePtr> = contents.words.iter().chain(&contents.host).map(|word| word.address).collect();
        let hits = self.pool.resolve_many(&ptrs).into_iter();
        hits.filter(|(_, hit)| hit.offset_bytes < hit.bytes)
            .filter_map(|(_, hit)| Some(hit.token?.allocation))
            .collect()
    }

    /// The graph must lead into exactly these, and be readable to its end.
    #[track_caller]
    pub(crate) fn expect(&self, graph: GraphHandle, expected: &[&dyn Tracked]) -> Contents {
        let contents = self.read(graph);
        assert_eq!(contents.opaque, None);
        assert_eq!(self.found(&contents), ids(expected), "{contents:?}");
        contents
    }

    /// Runs a captured graph once.
    pub(crate) fn run(&self, graph: GraphHandle) {
        let exec = self.driver.instantiate(graph).unwrap();
        self.driver.launch(exec, self.stream.handle()).unwrap();
        self.stream.synchronize().unwrap();
        self.driver.exec_destroy(exec).unwrap();
    }

    /// Adds a node by hand to the capture that is going on, behind the stream's last work.
    pub(crate) fn add_node(
        &self,
        make: impl FnOnce(sys::CUgraph, *const sys::CUgraphNode, usize, *mut sys::CUgraphNode) -> u32,
    ) -> Result<NodeHandle, u32> {
        let (mut status, mut id, mut graph, mut count) = (0u32, 0, std::ptr::null_mut(), 0);
        let (mut after, mut data) = (std::ptr::null(), std::ptr::null());
        // SAFETY: live places; the stream captures.
        let asked = unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                self.raw_stream(),
                (&raw mut status).cast(),
                &raw mut id,
                &raw mut graph,
                &raw mut after,
                &raw mut data,
                &raw mut count,
            )
        };
        assert_eq!((asked as u32, status), (0, 1));
        let mut node: sys::CUgraphNode = std::ptr::null_mut();
        let made = make(graph, after, count, &raw mut node);
        if made != 0 {
            return Err(made);
        }
        // SAFETY: the node is the graph's.
        let set = unsafe {
            sys::cuStreamUpdateCaptureDependencies_v2(self.raw_stream(), &raw mut node, std::ptr::null(), 1, 1)
        };
        assert_eq!(set as u32, 0);
        Ok(NodeHandle(node.expose_provenance() as u64))
    }
}

pub(crate) fn ids(tracked: &[&dyn Tracked]) -> BTreeSet<AllocationId> {
    tracked.iter().map(|t| t.token().allocation).collect()
}

/// Whether the driver has a function. cudarc panics at the first call of one that it has not.
pub(crate) fn has(symbol: &str) -> bool {
    // SAFETY: only the presence of the symbol is asked for; it is not called under this type.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.as_bytes()).is_ok() }
}
