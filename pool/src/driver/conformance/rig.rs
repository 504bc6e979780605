//! What the stories run on.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use super::kernels::{KERNELS, OTHER_KERNELS};
use crate::driver::cuda::{self, CudaDevice};
use crate::driver::host::{HostConfig, HostDevice, HostMachine, Live};
use crate::driver::{
    Args, CaptureMode, DevicePtr, DriverError, DriverErrorKind, DynDriver, EventHandle, ExecHandle, Faulty,
    FunctionHandle, GraphHandle, HostPtr, LaunchConfig, ModuleHandle, ModuleImage, StreamHandle, VirtualMachine,
};

/// The bodies under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// Host device, a thread a stream.
    Threads,
    /// Host device, stepped.
    Stepped,
    /// Host device with threads behind [`Faulty`].
    Faulty,
    /// Two virtual devices of one host device with threads.
    Virtual,
    /// The first CUDA device, and the second where there is one.
    Cuda,
    /// The same behind [`Faulty`].
    FaultyCuda,
    /// Two virtual devices of the first CUDA device.
    VirtualCuda,
}

impl Body {
    /// Whether it is hardware.
    #[must_use]
    pub fn is_cuda(self) -> bool {
        matches!(self, Self::Cuda | Self::FaultyCuda | Self::VirtualCuda)
    }

    /// Whether its devices are virtual: one context for all, and an access to another's memory is refused when the call
    /// is made.
    #[must_use]
    pub fn is_virtual(self) -> bool {
        matches!(self, Self::Virtual | Self::VirtualCuda)
    }

    fn kernels(self) -> ModuleImage<'static> {
        if self.is_cuda() { ModuleImage::Binary(&images()[0]) } else { ModuleImage::Host(KERNELS) }
    }
}

static IMAGES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();

/// Sets the compiled `kernels.cu` and `other_kernels.cu`, before the first rig of a CUDA body. The first call wins.
pub fn set_cuda_images(kernels: Vec<u8>, other: Vec<u8>) {
    let _ = IMAGES.set([kernels, other]);
}

fn images() -> &'static [Vec<u8>; 2] {
    IMAGES.get().unwrap()
}

/// One or two devices of a body, bound, with the kernels loaded.
#[derive(Debug)]
pub struct Rig {
    /// Which body.
    pub body: Body,
    /// Device 0.
    pub driver: DynDriver,
    /// Device 1 of the same machine; device 0 again on a machine with one GPU, where stories that need two are not told.
    pub peer: DynDriver,
    /// The kernels, on device 0.
    pub module: ModuleHandle,
    flag: HostPtr,
}

/// Unit of the rigs' VMM calls, bytes.
pub const GRANULE: usize = 2 << 20;

impl Rig {
    /// A rig with 256 MiB a device (on hardware, with what there is).
    #[must_use]
    pub fn new(body: Body) -> Self {
        if body.is_cuda() {
            return Self::cuda(body);
        }
        // No stricter during captures than current drivers, so that the stories hold on both.
        let config = HostConfig::default().memory(256 << 20).granularity(GRANULE);
        Self::with(body, config.strict_captures(false).module_load_breaks_capture(false))
    }

    fn cuda(body: Body) -> Self {
        let open = |ordinal| -> DynDriver {
            let device = CudaDevice::open(ordinal).unwrap();
            if body == Body::FaultyCuda { Faulty::new(device) } else { device }
        };
        let driver = open(0);
        if body.is_virtual() {
            let (driver, peer) = two_of(driver);
            driver.bind().unwrap();
            return Self::over(body, driver, peer);
        }
        let peer = if cuda::device_count() > 1 { open(1) } else { driver.clone() };
        driver.bind().unwrap();
        assert_eq!(driver.granularity_bytes().unwrap(), GRANULE);
        Self::over(body, driver, peer)
    }

    /// A rig of another configuration of the host device.
    #[must_use]
    pub fn with(body: Body, config: HostConfig) -> Self {
        assert!(!body.is_cuda(), "hardware has no configuration");
        if body.is_virtual() {
            // Each has what a device of the configuration has.
            let memory_bytes = config.memory_bytes * 2;
            let (driver, peer) = two_of(HostDevice::new(config.memory(memory_bytes)).unwrap());
            driver.bind().unwrap();
            return Self::over(body, driver, peer);
        }
        let devices = HostMachine::new(2, config.stepped(body == Body::Stepped)).unwrap();
        let wrap = |device: &Arc<HostDevice>| -> DynDriver {
            if body == Body::Faulty { Faulty::new(device.clone()) } else { device.clone() }
        };
        let (driver, peer) = (wrap(&devices[0]), wrap(&devices[1]));
        driver.bind().unwrap();
        Self::over(body, driver, peer)
    }

    fn over(body: Body, driver: DynDriver, peer: DynDriver) -> Self {
        let module = driver.module_load(body.kernels()).unwrap();
        let flag = driver.host_alloc(4).unwrap();
        let rig = Self { body, driver, peer, module, flag };
        rig.flag().store(0, Ordering::Release);
        rig
    }

    /// The same rig on another configuration.
    #[must_use]
    pub fn like(&self, config: HostConfig) -> Self {
        Self::with(self.body, config)
    }

    /// The host device underneath.
    #[must_use]
    pub fn host(&self) -> &HostDevice {
        self.driver.as_host().unwrap()
    }

    /// Whether a dead handle is an error and not the end of the process, and comes back to the next object of its kind.
    /// The host device is as strict, and as unkind, as that; hardware checks nothing and promises nothing.
    #[must_use]
    pub fn tracks_handles(&self) -> bool {
        !self.body.is_cuda()
    }

    /// What is live on device 0, where the device can tell.
    #[must_use]
    pub fn live(&self) -> Option<Live> {
        self.driver.as_host().map(HostDevice::live)
    }

    /// The stories' kernels.
    #[must_use]
    pub fn kernels(&self) -> ModuleImage<'static> {
        self.body.kernels()
    }

    /// Another module, in which `add` subtracts.
    #[must_use]
    pub fn other_kernels(&self) -> ModuleImage<'static> {
        if self.body.is_cuda() { ModuleImage::Binary(&images()[1]) } else { ModuleImage::Host(OTHER_KERNELS) }
    }

    /// The gate's word.
    #[must_use]
    pub fn flag(&self) -> &AtomicU32 {
        // SAFETY: pinned, aligned, and freed only with the rig's device.
        unsafe { AtomicU32::from_ptr(self.flag.as_ptr().cast()) }
    }

    /// The gate's word as the device sees it.
    #[must_use]
    pub fn flag_ptr(&self) -> DevicePtr {
        DevicePtr(self.flag.0)
    }

    /// Lets nothing queued on the stream after this run before [`open`](Self::open). A stepped stream runs nothing
    /// before it is waited for anyway.
    pub fn hold(&self, stream: StreamHandle) {
        self.flag().store(0, Ordering::Release);
        if self.body != Body::Stepped {
            self.launch("gate", Args::new().ptr(self.flag_ptr()), stream);
        }
    }

    /// Opens the gate.
    pub fn open(&self) {
        self.flag().store(1, Ordering::Release);
    }

    /// A stream of device 0.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.driver.stream_create(0).unwrap()
    }

    /// An event of device 0.
    #[must_use]
    pub fn event(&self) -> EventHandle {
        self.driver.event_create(false).unwrap()
    }

    /// A kernel by name.
    #[must_use]
    pub fn function(&self, name: &str) -> FunctionHandle {
        self.driver.function(self.module, name).unwrap()
    }

    /// Launches a kernel; must be taken.
    pub fn launch(&self, name: &str, args: &Args, stream: StreamHandle) {
        self.try_launch(name, args, stream).unwrap();
    }

    /// Launches a kernel.
    pub fn try_launch(&self, name: &str, args: &Args, stream: StreamHandle) -> Result<(), DriverError> {
        let function = self.driver.function(self.module, name)?;
        // SAFETY: the host device checks arguments and spans.
        unsafe { self.driver.launch_kernel(function, &LaunchConfig::linear(1, 1), args.as_bytes(), stream) }
    }

    /// `fill(dst, n, value)`.
    pub fn fill(&self, dst: DevicePtr, n: u32, value: u32, stream: StreamHandle) {
        self.launch("fill", Args::new().ptr(dst).u32(n).u32(value), stream);
    }

    /// `dst[i] = src[i] + value`.
    pub fn add(&self, dst: DevicePtr, src: DevicePtr, n: u32, value: u32, stream: StreamHandle) {
        self.launch("add", Args::new().ptr(dst).ptr(src).u32(n).u32(value), stream);
    }

    /// Words of plain memory, all `value`.
    #[must_use]
    pub fn words(&self, n: u32, value: u32) -> DevicePtr {
        let ptr = self.driver.malloc(n as usize * 4).unwrap();
        self.set(ptr, n, value);
        ptr
    }

    /// Sets words and waits for it.
    pub fn set(&self, ptr: DevicePtr, n: u32, value: u32) {
        let stream = self.stream();
        self.driver.memset_d32(ptr, value, n as usize, stream).unwrap();
        self.driver.stream_synchronize(stream).unwrap();
        self.driver.stream_destroy(stream).unwrap();
    }

    /// Reads words, on a stream of its own.
    #[must_use]
    pub fn read(&self, ptr: DevicePtr, n: u32) -> Vec<u32> {
        let stream = self.stream();
        let mut out = vec![0u32; n as usize];
        // SAFETY: `out` outlives the copy, which the wait ends.
        unsafe { self.driver.memcpy_dtoh(out.as_mut_ptr().cast(), ptr, out.len() * 4, stream).unwrap() };
        self.driver.stream_synchronize(stream).unwrap();
        self.driver.stream_destroy(stream).unwrap();
        out
    }

    /// Captures what `record` puts on the stream.
    #[must_use]
    pub fn capture(&self, stream: StreamHandle, record: impl FnOnce()) -> GraphHandle {
        self.driver.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
        record();
        self.driver.end_capture(stream).unwrap()
    }

    /// Captures and instantiates.
    #[must_use]
    pub fn exec(&self, stream: StreamHandle, record: impl FnOnce()) -> ExecHandle {
        let graph = self.capture(stream, record);
        let exec = self.driver.instantiate(graph).unwrap();
        self.driver.graph_destroy(graph).unwrap();
        exec
    }

    /// Launches an exec and waits.
    pub fn replay(&self, exec: ExecHandle, stream: StreamHandle) {
        self.driver.launch(exec, stream).unwrap();
        self.wait(stream);
    }

    /// Waits for a stream.
    pub fn wait(&self, stream: StreamHandle) {
        self.driver.stream_synchronize(stream).unwrap();
    }

    /// A reserved, mapped, accessible range of one chunk.
    #[must_use]
    pub fn mapped(&self, bytes: usize) -> DevicePtr {
        let ptr = self.driver.address_reserve(bytes, 0, None).unwrap();
        let chunk = self.driver.create(bytes).unwrap();
        self.driver.map(ptr, bytes, 0, chunk).unwrap();
        self.driver.set_access(ptr, bytes, &[self.driver.info().ordinal]).unwrap();
        self.driver.release(chunk).unwrap();
        ptr
    }

    /// The stream's wait must report a fault of that op whose owner contains those words.
    pub fn expect_fault(&self, stream: StreamHandle, op: &str, owner: &str) {
        let error = self.driver.stream_synchronize(stream).unwrap_err();
        let DriverErrorKind::Fault(fault) = &error.kind else { panic!("expected a fault, found {error}") };
        if self.body.is_cuda() {
            // Hardware reports that there was a fault; what was in flight is known, of a graph no more than that.
            assert!(fault.op.contains(op) || fault.op.contains("graph"), "expected {op:?} in {fault}");
        } else {
            assert_eq!(fault.op, op, "{fault}");
            assert!(fault.owner.contains(owner), "expected {owner:?} in {fault}");
        }
        assert_eq!(self.driver.fault().as_ref(), Some(fault));
    }
}

impl Rig {
    /// What was just queued touches memory of the other device: a fault of that op, whose owner contains those words,
    /// when it runs; on virtual devices a refusal when it was asked for, which names the address and the owner's number.
    #[track_caller]
    pub fn expect_foreign(
        &self,
        queued: Result<(), DriverError>,
        (driver, stream): (&DynDriver, StreamHandle),
        op: &str,
        (address, words): (DevicePtr, &str),
    ) {
        if !self.body.is_virtual() {
            queued.unwrap();
            let fault = driver.stream_synchronize(stream).unwrap_err();
            let DriverErrorKind::Fault(fault) = fault.kind else { panic!("expected a fault, found {fault}") };
            let named = op.starts_with(&fault.op) && fault.owner.contains(words);
            assert!(self.body.is_cuda() || named, "expected {op} and {words:?} in {fault}");
            return;
        }
        let error = queued.unwrap_err();
        let DriverErrorKind::Foreign(foreign) = &error.kind else { panic!("expected a refusal, found {error}") };
        assert_eq!((foreign.op.as_str(), foreign.address), (op, address), "{error}");
        assert!(words.contains(&format!("device {}", foreign.owner)), "expected {words:?} in {error}");
        // Nothing was queued, and nothing broke.
        driver.stream_synchronize(stream).unwrap();
        assert_eq!(driver.fault(), None);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // A story that failed must not leave a worker at the gate.
        self.open();
    }
}

/// Two virtual devices of one.
fn two_of(device: DynDriver) -> (DynDriver, DynDriver) {
    let devices = VirtualMachine::new(&[device], 2).unwrap();
    (devices[0].clone(), devices[1].clone())
}

/// The call must be refused for an argument.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, DriverError>) {
    refused_as(result, format_args!("a bad argument"));
}

/// The same, saying which case of several it is.
#[track_caller]
pub fn refused_as<T: std::fmt::Debug>(result: Result<T, DriverError>, case: std::fmt::Arguments<'_>) {
    match result {
        Err(DriverError { kind: DriverErrorKind::InvalidValue(_), .. }) => {}
        found => panic!("{case}: expected an invalid value, found {found:?}"),
    }
}

/// The kind of an error that must be one.
#[must_use]
#[track_caller]
pub fn kind<T: std::fmt::Debug>(result: Result<T, DriverError>) -> DriverErrorKind {
    result.unwrap_err().kind
}
