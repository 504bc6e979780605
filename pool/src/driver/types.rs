//! Handles and plain data of the driver traits.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

/// A device address. Never an identity: drivers hand the same one out again.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address, which no device maps.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on, or `None` past the end of the address space.
    #[must_use]
    pub fn checked_add(self, bytes: usize) -> Option<Self> {
        self.0.checked_add(bytes as u64).map(Self)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        ///
        /// An opaque driver handle. The driver may reuse the value after it was destroyed.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub u64);
    )*};
}

handles! {
    /// A physical chunk (`CUmemGenericAllocationHandle`).
    PhysHandle
    /// A stream (`CUstream`).
    StreamHandle
    /// An event (`CUevent`).
    EventHandle
    /// A graph, not launchable (`CUgraph`).
    GraphHandle
    /// A node of a graph (`CUgraphNode`).
    NodeHandle
    /// An instantiated graph (`CUgraphExec`).
    ExecHandle
    /// Loaded code (`CUmodule`).
    ModuleHandle
    /// A kernel of a module (`CUfunction`).
    FunctionHandle
}

/// Page-locked host memory. Plain data; whoever allocated it frees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HostPtr(pub u64);

impl HostPtr {
    /// As a raw pointer.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        self.0 as usize as *mut u8
    }
}

/// A device's number in this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceOrdinal(pub u32);

impl fmt::Display for DeviceOrdinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What a device is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its number.
    pub ordinal: DeviceOrdinal,
    /// `host` or `cuda`.
    pub backend: &'static str,
    /// A name for people.
    pub name: String,
    /// Memory size, bytes.
    pub total_bytes: usize,
    /// Whether address ranges and pages can be managed apart (VMM).
    pub vmm: bool,
    /// Multiprocessors (CUDA) or worker threads (host).
    pub multiprocessors: u32,
    /// Most shared memory of a block, bytes, static and dynamic together.
    pub shared_bytes: u32,
    /// Compute capability (major, minor); (0, 0) on the host device.
    pub compute_capability: (u32, u32),
    /// The physical device that it is a part of, if it is a virtual one.
    pub virtual_of: Option<DeviceOrdinal>,
}

impl DeviceInfo {
    /// A description; fields can be changed afterwards.
    #[must_use]
    pub fn new(
        ordinal: DeviceOrdinal,
        backend: &'static str,
        name: impl Into<String>,
        total_bytes: usize,
        vmm: bool,
    ) -> Self {
        Self {
            ordinal,
            backend,
            name: name.into(),
            total_bytes,
            vmm,
            multiprocessors: 1,
            shared_bytes: 48 << 10,
            compute_capability: (0, 0),
            virtual_of: None,
        }
    }
}

/// Free and total device memory, bytes. Device-wide: other processes count too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemInfo {
    /// Bytes nobody holds.
    pub free_bytes: usize,
    /// Bytes there are.
    pub total_bytes: usize,
}

/// Whose unsafe calls break a capture (`CUstreamCaptureMode`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CaptureMode {
    /// Any thread's.
    Global,
    /// Only the capturing thread's. The default here.
    #[default]
    ThreadLocal,
    /// Nobody's, but for calls that conflict by nature.
    Relaxed,
}

/// Whether a stream records (`CUstreamCaptureStatus`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// It does not.
    None,
    /// It does; the id is unique per capture.
    Active {
        /// The capture's id.
        id: u64,
    },
    /// It did, until an illegal call; it must still be ended.
    Invalidated,
}

/// The shape of a kernel launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, bytes.
    pub shared_bytes: u32,
    /// Whether the kernel may start before the one before it has ended (programmatic dependent launch). A captured
    /// launch of CUDA shows that at its [`Edge`], not at its node.
    pub programmatic: bool,
    /// Whether all blocks must be resident at once.
    pub cooperative: bool,
}

impl LaunchConfig {
    /// A one-dimensional launch.
    #[must_use]
    pub fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, programmatic: false, cooperative: false }
    }
}

/// One kernel parameter in the packed argument buffer, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Param {
    /// Where it starts.
    pub offset: u32,
    /// How long it is.
    pub bytes: u32,
}

/// Where each parameter of a kernel lies in the packed argument buffer.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct ParamLayout {
    /// In declaration order.
    pub params: Vec<Param>,
}

impl ParamLayout {
    /// Length of the packed buffer, bytes.
    #[must_use]
    pub fn packed_bytes(&self) -> usize {
        self.params.iter().map(|p| (p.offset + p.bytes) as usize).max().unwrap_or(0)
    }

    /// Where pointers may lie: parameters of 8 bytes, and every word of longer ones (structs by value). Two numbers
    /// side by side are none. Each with the parameter's number.
    pub fn words(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        let long = self.params.iter().enumerate().filter(|(_, param)| param.bytes >= 8);
        long.flat_map(|(number, param)| (0..param.bytes / 8).map(move |i| (number, param.offset + 8 * i)))
    }

    /// The layout C gives to parameters of these (size, alignment) pairs.
    #[must_use]
    pub fn c_layout(params: &[(u32, u32)]) -> Self {
        let mut offset = 0u32;
        let params = params
            .iter()
            .map(|&(bytes, align)| {
                offset = offset.next_multiple_of(align.max(1));
                let param = Param { offset, bytes };
                offset += bytes;
                param
            })
            .collect();
        Self { params }
    }
}

/// Kernel arguments, packed as C lays out parameters: each at its natural alignment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Args {
    bytes: SmallVec<[u8; 128]>,
}

impl Args {
    /// No arguments yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends raw bytes at an alignment.
    pub fn push_bytes(&mut self, bytes: &[u8], align: usize) -> &mut Self {
        let start = self.bytes.len().next_multiple_of(align.max(1));
        self.bytes.resize(start, 0);
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends a device address.
    pub fn ptr(&mut self, ptr: DevicePtr) -> &mut Self {
        self.push_bytes(&ptr.0.to_ne_bytes(), 8)
    }

    /// Appends a `u32`.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes(), 4)
    }

    /// Appends an `i32`.
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes(), 4)
    }

    /// Appends a `u64`.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes(), 8)
    }

    /// Appends an `f32`.
    pub fn f32(&mut self, value: f32) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes(), 4)
    }

    /// The packed buffer.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A function for a stream's queue. Kept alive while queued, and as long as a graph that holds it.
#[derive(Clone)]
pub struct HostCallback(pub Arc<dyn Fn() + Send + Sync>);

impl HostCallback {
    /// Wraps a closure.
    #[must_use]
    pub fn new(callback: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }
}

impl fmt::Debug for HostCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostCallback({:p})", Arc::as_ptr(&self.0))
    }
}

/// Kernel arguments as read back from a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NodeArgs {
    /// The packed buffer, a copy, with the layout where known.
    Packed {
        /// The bytes.
        bytes: SmallVec<[u8; 128]>,
        /// The function's layout, if the driver can tell; else every aligned word is a candidate.
        layout: Option<Arc<ParamLayout>>,
    },
    /// Not readable: the graph is opaque.
    Unreadable,
}

/// An edge of a graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Edge {
    /// What runs first.
    pub from: NodeHandle,
    /// What runs after it.
    pub to: NodeHandle,
    /// Whether `to` may start before `from` has ended: a programmatic dependent launch.
    pub programmatic: bool,
}

/// One side of a copy node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopySide {
    /// Device memory.
    Device(DevicePtr),
    /// Host memory, by address.
    Host(u64),
}

/// What a node of a graph does.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Node {
    /// A kernel launch.
    Kernel {
        /// Which kernel. Identity is the handle, never the name.
        function: FunctionHandle,
        /// Its launch shape.
        config: LaunchConfig,
        /// Its arguments.
        args: NodeArgs,
    },
    /// A one-dimensional copy.
    Copy {
        /// To.
        dst: CopySide,
        /// From.
        src: CopySide,
        /// How much.
        bytes: usize,
    },
    /// A memset.
    Set {
        /// To.
        dst: DevicePtr,
        /// How much.
        bytes: usize,
    },
    /// A nested graph (a clone).
    Child(GraphHandle),
    /// A host function.
    Host,
    /// Nothing; orders others.
    Empty,
    /// Records an event.
    EventRecord(EventHandle),
    /// Waits for an event.
    EventWait(EventHandle),
    /// Stream-ordered allocation or free: refused by the cache.
    Alloc,
    /// Anything that this version can not read, by its driver number: makes the graph opaque.
    Unknown(u32),
}

/// The driver's word on an exec-update.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum UpdateResult {
    /// Done, it says.
    Updated,
    /// Node or edge count or order differs.
    TopologyChanged,
    /// A node changed its type.
    NodeTypeChanged,
    /// A kernel node changed its function in a way that is not allowed.
    FunctionChanged,
    /// A parameter changed that must not (copy direction, memset shape, context).
    ParametersChanged,
    /// Refused for another reason.
    NotSupported,
}

/// Code to load.
#[derive(Clone, Copy, Debug)]
pub enum ModuleImage<'a> {
    /// A cubin, fatbin or PTX text (with its final NUL).
    Binary(&'a [u8]),
    /// Functions of this process, for the host device.
    Host(&'static [super::host::HostKernel]),
}
