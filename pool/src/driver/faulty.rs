//! An adaptor that fails the n-th call of a kind and logs every call with its thread.
//!
//! ```
//! use evergraph_pool::driver::{Driver, DynDriver, Faulty, Memory, host::{HostConfig, HostDevice}};
//! let host = HostDevice::new(HostConfig::default())?;
//! let faulty = Faulty::new(host);
//! faulty.bind()?;
//! faulty.fail_nth("malloc", 2);
//! let first = faulty.malloc(4096)?;
//! assert!(faulty.malloc(4096).unwrap_err().is_out_of_memory());
//! faulty.set_logging(true);
//! faulty.free(first)?;
//! assert_eq!(faulty.take_log()[0].arg("ptr"), Some(first.0));
//! let _driver: DynDriver = faulty;
//! # Ok::<(), evergraph_pool::driver::DriverError>(())
//! ```

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    CaptureMode, CaptureStatus, DeviceInfo, DeviceOrdinal, DevicePtr, Driver, DriverError, DriverErrorKind,
    DriverResult, Edge, EventHandle, ExecHandle, Fault, FunctionHandle, GraphHandle, Graphs, HostCallback, HostPtr,
    LaunchConfig, MemInfo, Memory, ModuleHandle, ModuleImage, Modules, Node, NodeHandle, ParamLayout, PhysHandle,
    StreamHandle, Streams, UpdateResult, host,
};

/// One logged call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The trait method.
    pub name: &'static str,
    /// The calling thread.
    pub thread: ThreadId,
    /// Arguments by name, as words: handles and pointers by value, slices and names by length, modes and
    /// switches by number.
    pub args: SmallVec<[(&'static str, u64); 6]>,
    /// What came back: the handle, pointer, count or switch as a word (0 where there is none), or why not.
    pub result: Result<u64, DriverErrorKind>,
    /// The contents of a byte-slice argument: the packed arguments of a kernel launch.
    pub payload: Vec<u8>,
}

impl Call {
    /// The argument of that name.
    #[must_use]
    pub fn arg(&self, name: &str) -> Option<u64> {
        self.args.iter().find(|(n, _)| *n == name).map(|&(_, word)| word)
    }
}

struct Rule {
    call: &'static str,
    /// Calls of the kind still to let through before the failure.
    skip: u64,
    kind: Option<DriverErrorKind>,
    sticky: bool,
    spent: bool,
    /// Done before the call, in place of a failure.
    action: Option<Action>,
}

type Action = Box<dyn FnOnce() + Send>;

/// Wraps a driver: fails chosen calls *before* they reach it, counts and logs all.
pub struct Faulty<D: ?Sized = dyn Driver> {
    rules: Mutex<Vec<Rule>>,
    log: Mutex<Vec<Call>>,
    counts: [AtomicU64; CALLS.len()],
    injected: AtomicU64,
    armed: AtomicBool,
    logging: AtomicBool,
    inner: Arc<D>,
}

impl<D: Driver + ?Sized> fmt::Debug for Faulty<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").field("inner", &self.inner).field("injected", &self.injected()).finish_non_exhaustive()
    }
}

impl<D: Driver + ?Sized> Faulty<D> {
    /// Wraps `driver`; nothing fails and nothing is logged yet.
    #[must_use]
    pub fn new(driver: Arc<D>) -> Arc<Self> {
        Arc::new(Self {
            rules: Mutex::default(),
            log: Mutex::default(),
            counts: std::array::from_fn(|_| AtomicU64::new(0)),
            injected: AtomicU64::new(0),
            armed: AtomicBool::new(false),
            logging: AtomicBool::new(false),
            inner: driver,
        })
    }

    /// The driver underneath; calls on it are neither failed nor logged.
    #[must_use]
    pub fn inner(&self) -> &Arc<D> {
        &self.inner
    }

    /// Fails the `nth` call of a kind from now on (1 is the next), once. `call` is a trait method's name or
    /// `"any"`. Calls that hand out memory fail with `OutOfMemory`, others with `Injected`.
    ///
    /// A name that no call has never fails anything.
    pub fn fail_nth(&self, call: &'static str, nth: u64) {
        self.add_rule(call, nth, None, false);
    }

    /// As [`fail_nth`](Self::fail_nth), with an error of your choice.
    pub fn fail_nth_with(&self, call: &'static str, nth: u64, kind: DriverErrorKind) {
        self.add_rule(call, nth, Some(kind), false);
    }

    /// Fails the `nth` call of a kind and every one after it until [`clear`](Self::clear).
    pub fn fail_from(&self, call: &'static str, nth: u64) {
        self.add_rule(call, nth, None, true);
    }

    /// As [`fail_from`](Self::fail_from), with an error of your choice.
    pub fn fail_from_with(&self, call: &'static str, nth: u64, kind: DriverErrorKind) {
        self.add_rule(call, nth, Some(kind), true);
    }

    /// Runs `action` before the `nth` call of a kind from now on (1 is the next), on the thread that makes the call and with no
    /// lock of this held: for tests of what may happen just then.
    pub fn before_nth(&self, call: &'static str, nth: u64, action: impl FnOnce() + Send + 'static) {
        let skip = nth.saturating_sub(1);
        let action: Option<Action> = Some(Box::new(action));
        self.rules.lock().push(Rule { call, skip, kind: None, sticky: false, spent: false, action });
        self.armed.store(true, Ordering::Release);
    }

    /// Takes every rule back.
    pub fn clear(&self) {
        self.rules.lock().clear();
        self.armed.store(false, Ordering::Release);
    }

    /// How many failures were made up so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.injected.load(Ordering::Relaxed)
    }

    /// Switches the log on or off; it costs one load a call while off.
    pub fn set_logging(&self, on: bool) {
        self.logging.store(on, Ordering::Release);
    }

    /// Takes the log out, oldest call first.
    #[must_use]
    pub fn take_log(&self) -> Vec<Call> {
        std::mem::take(&mut *self.log.lock())
    }

    /// Puts a line of the caller's own into the log, between the calls around it: `name`, with `args`. Only while
    /// the log is on. Lets a checker tell what came before what, across threads.
    pub fn mark(&self, name: &'static str, args: &[(&'static str, u64)]) {
        if self.logging.load(Ordering::Acquire) {
            let args = SmallVec::from_slice(args);
            let thread = std::thread::current().id();
            self.log.lock().push(Call { name, thread, args, result: Ok(0), payload: Vec::new() });
        }
    }

    /// Calls of that kind so far, failed ones included; 0 for a name that no call has. `"any"` adds all.
    #[must_use]
    pub fn count(&self, call: &str) -> u64 {
        if call == "any" {
            return self.counts.iter().map(|c| c.load(Ordering::Relaxed)).sum();
        }
        CALLS.iter().position(|name| *name == call).map_or(0, |i| self.counts[i].load(Ordering::Relaxed))
    }

    /// Every kind that was called, with its count, in the traits' order.
    #[must_use]
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        CALLS
            .iter()
            .zip(&self.counts)
            .map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    fn add_rule(&self, call: &'static str, nth: u64, kind: Option<DriverErrorKind>, sticky: bool) {
        self.rules.lock().push(Rule { call, skip: nth.saturating_sub(1), kind, sticky, spent: false, action: None });
        self.armed.store(true, Ordering::Release);
    }

    fn gate(&self, index: usize) -> DriverResult<()> {
        self.counts[index].fetch_add(1, Ordering::Relaxed);
        if !self.armed.load(Ordering::Acquire) {
            return Ok(());
        }
        let name = CALLS[index];
        let mut rules = self.rules.lock();
        let (mut failure, mut actions) = (None, SmallVec::<[Action; 1]>::new());
        for rule in rules.iter_mut().filter(|r| !r.spent && (r.call == name || r.call == "any")) {
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            rule.spent = !rule.sticky;
            if let Some(action) = rule.action.take() {
                actions.push(action);
                continue;
            }
            failure.get_or_insert_with(|| rule.kind.clone().unwrap_or_else(|| default_failure(name)));
        }
        drop(rules);
        actions.into_iter().for_each(|action| action());
        match failure {
            None => Ok(()),
            Some(kind) => {
                self.injected.fetch_add(1, Ordering::Relaxed);
                Err(DriverError::new(name, self.inner.info().ordinal, kind))
            }
        }
    }
}

fn line<T: Word>(index: usize, result: &DriverResult<T>, args: &[(&'static str, u64)], payload: Vec<u8>) -> Call {
    let result = match result {
        Ok(value) => Ok(value.word()),
        Err(error) => Err(error.kind.clone()),
    };
    Call { name: CALLS[index], thread: std::thread::current().id(), args: SmallVec::from_slice(args), result, payload }
}

/// Whether a call ends the life of a handle or an address. The driver may give the same one out again before the call
/// has returned; so that nobody's beginning comes into the log before the end that it follows, the log is closed to
/// others while such a call runs.
fn is_end(name: &str) -> bool {
    const ENDS: [&str; 11] = [
        "address_free",
        "unmap",
        "release",
        "free",
        "host_free",
        "host_unregister",
        "stream_destroy",
        "event_destroy",
        "graph_destroy",
        "exec_destroy",
        "module_unload",
    ];
    ENDS.contains(&name)
}

fn default_failure(call: &str) -> DriverErrorKind {
    match call {
        "malloc" | "create" | "address_reserve" | "host_alloc" => DriverErrorKind::OutOfMemory,
        _ => DriverErrorKind::Injected,
    }
}

/// A value as one word of the log.
trait Word {
    fn word(&self) -> u64;

    fn payload(&self) -> Vec<u8> {
        Vec::new()
    }
}

macro_rules! words {
    ($($ty:ty: $value:ident => $word:expr;)*) => {$(
        impl Word for $ty {
            fn word(&self) -> u64 {
                let $value = self;
                $word
            }
        }
    )*};
}

words! {
    (): _value => 0;
    usize: v => *v as u64;
    u8: v => u64::from(*v);
    u32: v => u64::from(*v);
    u64: v => *v;
    i32: v => *v as u64;
    f32: v => u64::from(v.to_bits());
    bool: v => u64::from(*v);
    *const u8: v => v.addr() as u64;
    *mut u8: v => v.addr() as u64;
    DevicePtr: v => v.0;
    Option<DevicePtr>: v => v.map_or(0, |p| p.0);
    HostPtr: v => v.0;
    PhysHandle: v => v.0;
    StreamHandle: v => v.0;
    EventHandle: v => v.0;
    GraphHandle: v => v.0;
    NodeHandle: v => v.0;
    ExecHandle: v => v.0;
    ModuleHandle: v => v.0;
    FunctionHandle: v => v.0;
    DeviceOrdinal: v => u64::from(v.0);
    &[DeviceOrdinal]: v => v.len() as u64;
    &str: v => v.len() as u64;
    &LaunchConfig: v => u64::from(v.grid[0]);
    CaptureMode: v => *v as u64;
    CaptureStatus: v => match v {
        CaptureStatus::None => 0,
        CaptureStatus::Active { id } => *id,
        CaptureStatus::Invalidated => u64::MAX,
    };
    UpdateResult: v => *v as u64;
    MemInfo: v => v.free_bytes as u64;
    HostCallback: v => Arc::as_ptr(&v.0).addr() as u64;
    ModuleImage<'_>: v => match v {
        ModuleImage::Binary(bytes) => bytes.len() as u64,
        ModuleImage::Host(kernels) => kernels.len() as u64,
    };
    Vec<NodeHandle>: v => v.len() as u64;
    Vec<Edge>: v => v.len() as u64;
    Node: _value => 0;
    Option<Arc<ParamLayout>>: v => v.as_ref().map_or(0, |l| l.params.len() as u64);
}

impl Word for &[u8] {
    fn word(&self) -> u64 {
        self.len() as u64
    }

    fn payload(&self) -> Vec<u8> {
        self.to_vec()
    }
}

const fn index_of(name: &str) -> usize {
    let mut i = 0;
    while i < CALLS.len() {
        let (a, b) = (CALLS[i].as_bytes(), name.as_bytes());
        let mut same = a.len() == b.len();
        let mut k = 0;
        while same && k < a.len() {
            same = a[k] == b[k];
            k += 1;
        }
        if same {
            return i;
        }
        i += 1;
    }
    panic!("every forwarded call is listed")
}

/// Writes the forwarding methods of the traits and the list of all calls.
macro_rules! forward {
    ($(impl $trait:ident { $($([$unsafe:tt])? fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)* })*) => {
        /// Every call that can be failed, counted and logged, in the traits' order; `bind` comes first.
        pub const CALLS: &[&str] = &["bind", $($(stringify!($name),)*)*];

        $(impl<D: Driver + ?Sized> $trait for Faulty<D> {
            $(
                #[allow(unused_unsafe)]
                $($unsafe)? fn $name(&self $(, $arg: $ty)*) -> DriverResult<$ret> {
                    const INDEX: usize = index_of(stringify!($name));
                    let args: &[(&'static str, u64)] = &[$((stringify!($arg), $arg.word())),*];
                    #[allow(unused_mut)]
                    let mut payload: Vec<u8> = Vec::new();
                    if self.logging.load(Ordering::Acquire) {
                        $(payload.extend($arg.payload());)*
                    }
                    let gate = self.gate(INDEX);
                    let first = self.logging.load(Ordering::Acquire) && is_end(stringify!($name));
                    let mut log = first.then(|| self.log.lock());
                    let result = gate.and_then(|()| {
                        // SAFETY: where the method is unsafe, its caller keeps the same contract.
                        unsafe { self.inner.$name($($arg),*) }
                    });
                    if let Some(log) = &mut log {
                        log.push(line(INDEX, &result, args, payload));
                    } else if self.logging.load(Ordering::Acquire) {
                        self.log.lock().push(line(INDEX, &result, args, payload));
                    }
                    drop(log);
                    result
                }
            )*
        })*
    };
}

forward! {
    impl Memory {
        fn granularity_bytes() -> usize;
        fn address_reserve(bytes: usize, align: usize, hint: Option<DevicePtr>) -> DevicePtr;
        fn address_free(ptr: DevicePtr, bytes: usize) -> ();
        fn create(bytes: usize) -> PhysHandle;
        fn map(ptr: DevicePtr, bytes: usize, offset_bytes: usize, handle: PhysHandle) -> ();
        fn set_access(ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) -> ();
        fn unmap(ptr: DevicePtr, bytes: usize) -> ();
        fn release(handle: PhysHandle) -> ();
        fn malloc(bytes: usize) -> DevicePtr;
        fn free(ptr: DevicePtr) -> ();
        fn mem_info() -> MemInfo;
        fn host_alloc(bytes: usize) -> HostPtr;
        [unsafe] fn host_free(ptr: HostPtr) -> ();
        [unsafe] fn host_register(ptr: *const u8, bytes: usize) -> DevicePtr;
        fn host_unregister(ptr: *const u8) -> ();
        fn can_access_peer(peer: DeviceOrdinal) -> bool;
        fn enable_peer_access(peer: DeviceOrdinal) -> ();
    }
    impl Streams {
        fn stream_create(priority: i32) -> StreamHandle;
        fn stream_destroy(stream: StreamHandle) -> ();
        fn stream_id(stream: StreamHandle) -> u64;
        fn stream_synchronize(stream: StreamHandle) -> ();
        fn stream_query(stream: StreamHandle) -> bool;
        fn stream_wait_event(stream: StreamHandle, event: EventHandle) -> ();
        fn synchronize() -> ();
        fn event_create(timing: bool) -> EventHandle;
        fn event_destroy(event: EventHandle) -> ();
        fn event_record(event: EventHandle, stream: StreamHandle) -> ();
        fn event_query(event: EventHandle) -> bool;
        fn event_synchronize(event: EventHandle) -> ();
        fn event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32;
        [unsafe] fn memcpy_htod(dst: DevicePtr, src: *const u8, bytes: usize, stream: StreamHandle) -> ();
        [unsafe] fn memcpy_dtoh(dst: *mut u8, src: DevicePtr, bytes: usize, stream: StreamHandle) -> ();
        fn memcpy_dtod(dst: DevicePtr, src: DevicePtr, bytes: usize, stream: StreamHandle) -> ();
        fn memcpy_peer(dst: DevicePtr, dst_device: DeviceOrdinal, src: DevicePtr, src_device: DeviceOrdinal, bytes: usize, stream: StreamHandle) -> ();
        fn memset_d8(dst: DevicePtr, value: u8, bytes: usize, stream: StreamHandle) -> ();
        fn memset_d32(dst: DevicePtr, value: u32, words: usize, stream: StreamHandle) -> ();
        fn launch_host_fn(stream: StreamHandle, callback: HostCallback) -> ();
    }
    impl Graphs {
        fn begin_capture(stream: StreamHandle, mode: CaptureMode) -> ();
        fn end_capture(stream: StreamHandle) -> GraphHandle;
        fn add_child(stream: StreamHandle, graph: GraphHandle) -> ();
        fn capture_status(stream: StreamHandle) -> CaptureStatus;
        fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode;
        fn graph_nodes(graph: GraphHandle) -> Vec<NodeHandle>;
        fn graph_edges(graph: GraphHandle) -> Vec<Edge>;
        fn node(node: NodeHandle) -> Node;
        fn graph_destroy(graph: GraphHandle) -> ();
        fn instantiate(graph: GraphHandle) -> ExecHandle;
        fn exec_update(exec: ExecHandle, graph: GraphHandle) -> UpdateResult;
        fn upload(exec: ExecHandle, stream: StreamHandle) -> ();
        fn launch(exec: ExecHandle, stream: StreamHandle) -> ();
        fn exec_destroy(exec: ExecHandle) -> ();
    }
    impl Modules {
        fn module_load(image: ModuleImage<'_>) -> ModuleHandle;
        fn module_unload(module: ModuleHandle) -> ();
        fn function(module: ModuleHandle, name: &str) -> FunctionHandle;
        fn param_layout(function: FunctionHandle) -> Option<Arc<ParamLayout>>;
        [unsafe] fn launch_kernel(function: FunctionHandle, config: &LaunchConfig, args: &[u8], stream: StreamHandle) -> ();
    }
}

impl<D: Driver + ?Sized> Driver for Faulty<D> {
    fn bind(&self) -> DriverResult<()> {
        const INDEX: usize = index_of("bind");
        let result = self.gate(INDEX).and_then(|()| self.inner.bind());
        if self.logging.load(Ordering::Acquire) {
            self.log.lock().push(line(INDEX, &result, &[], Vec::new()));
        }
        result
    }

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn fault(&self) -> Option<Fault> {
        self.inner.fault()
    }

    fn name_exec(&self, exec: ExecHandle, name: &str) {
        self.inner.name_exec(exec, name);
    }

    fn home(&self, ptr: DevicePtr) -> Option<DeviceOrdinal> {
        self.inner.home(ptr)
    }

    fn as_host(&self) -> Option<&host::HostDevice> {
        self.inner.as_host()
    }
}
