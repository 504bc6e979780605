//! What the devices of one machine share: the map, the streams, the objects, and the rules of entry.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use slab::Slab;
use smallvec::SmallVec;

use super::capture::Capture;
use super::graph::{Exec, ExecBody, Graph};
use super::module::Module;
use super::slots::Slots;
use super::space::Space;
use super::work::{Function, Touched, Work, run};
use super::{HostConfig, thread};
use crate::driver::Fault;
use crate::mutant;

/// Key of a stream; unlike its handle it lives until the stream's last work is done.
pub(super) type StreamKey = usize;

/// A point in a stream.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) stream: StreamKey,
    pub(super) done: AtomicBool,
    pub(super) at: Mutex<Option<Instant>>,
}

impl Record {
    pub(super) fn new(stream: StreamKey) -> Arc<Self> {
        Arc::new(Self { stream, done: AtomicBool::new(false), at: Mutex::new(None) })
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    fn finish(&self) {
        *self.at.lock() = Some(Instant::now());
        self.done.store(true, Ordering::Release);
    }
}

/// One entry of a stream's queue.
#[derive(Debug)]
pub(super) enum Op {
    Work(Work),
    Record(Arc<Record>),
    Wait(Arc<Record>),
    /// A graph launch: waits for the exec's run before it, then marks its own end. A stepped device runs a node a
    /// step; `next` says which.
    Graph {
        body: Arc<ExecBody>,
        after: Option<Arc<Record>>,
        done: Arc<Record>,
        next: usize,
    },
}

impl Op {
    fn blocked_by(&self) -> Option<&Arc<Record>> {
        match self {
            Self::Wait(record) => Some(record),
            Self::Graph { after, .. } => after.as_ref(),
            _ => None,
        }
        .filter(|record| !record.is_done())
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: u64,
    pub(super) device: u32,
    pub(super) queue: VecDeque<Op>,
    pub(super) submitted: u64,
    pub(super) completed: u64,
    running: bool,
    pub(super) destroyed: bool,
    /// The worker's bell, once it has one.
    bell: Option<Arc<Condvar>>,
    pub(super) touched: Arc<Touched>,
    /// The capture it records into, by key, and the nodes that its next node depends on.
    pub(super) capture: Option<usize>,
    pub(super) frontier: SmallVec<[u32; 4]>,
}

#[derive(Debug)]
pub(super) struct Event {
    pub(super) device: u32,
    pub(super) timing: bool,
    pub(super) record: Option<Arc<Record>>,
    /// Recorded inside this capture (by id), behind these nodes.
    pub(super) captured: Option<(u64, SmallVec<[u32; 4]>)>,
}

/// Everything under the machine's lock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) queues: Slab<Stream>,
    pub(super) streams: Slots<StreamKey>,
    pub(super) events: Slots<Event>,
    pub(super) graphs: Slots<Graph>,
    pub(super) execs: Slots<Exec>,
    pub(super) modules: Slots<Module>,
    pub(super) functions: Slots<Arc<Function>>,
    pub(super) captures: Slab<Capture>,
    pub(super) next_stream_id: u64,
    pub(super) next_capture_id: u64,
}

#[derive(Debug, Default)]
struct Context {
    faulted: AtomicBool,
    fault: Mutex<Option<Fault>>,
}

#[derive(Debug)]
pub(super) struct Machine {
    pub(super) config: HostConfig,
    /// Identity for what threads carry.
    pub(super) token: Arc<()>,
    pub(super) space: RwLock<Space>,
    pub(super) state: Mutex<State>,
    /// Rung whenever an op has completed.
    pub(super) progress: Condvar,
    /// What runs this moment, one entry a stream.
    pub(super) touched: Mutex<Vec<Arc<Touched>>>,
    contexts: Vec<Context>,
    /// Device objects alive; the last one closes the machine.
    open: AtomicUsize,
    closing: AtomicBool,
}

impl Machine {
    pub(super) fn new(devices: usize, config: HostConfig) -> Arc<Self> {
        let state = State {
            queues: Slab::new(),
            streams: Slots::new(1),
            events: Slots::new(2),
            graphs: Slots::new(3),
            execs: Slots::new(4),
            modules: Slots::new(5),
            functions: Slots::new(6),
            captures: Slab::new(),
            next_stream_id: 1,
            next_capture_id: 1,
        };
        Arc::new(Self {
            token: Arc::new(()),
            space: RwLock::new(Space::new(devices, config.clone())),
            state: Mutex::new(state),
            progress: Condvar::new(),
            touched: Mutex::default(),
            contexts: (0..devices).map(|_| Context::default()).collect(),
            open: AtomicUsize::new(devices),
            closing: AtomicBool::new(false),
            config,
        })
    }

    pub(super) fn devices(&self) -> usize {
        self.contexts.len()
    }

    /// One device object is gone; with the last, the workers go. Work still queued is dropped with the machine.
    pub(super) fn close_one(&self) {
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            let state = self.state.lock();
            self.closing.store(true, Ordering::Release);
            for (_, stream) in &state.queues {
                if let Some(bell) = &stream.bell {
                    bell.notify_all();
                }
            }
            self.progress.notify_all();
        }
    }

    // ---- faults

    pub(super) fn is_faulted(&self, device: u32) -> bool {
        self.contexts[device as usize].faulted.load(Ordering::Acquire)
    }

    pub(super) fn fault(&self, device: u32) -> Option<Fault> {
        self.contexts[device as usize].fault.lock().clone()
    }

    /// The first fault stays.
    pub(super) fn set_fault(&self, device: u32, fault: Fault) {
        if mutant::is("host.faults-vanish") {
            return;
        }
        let context = &self.contexts[device as usize];
        context.fault.lock().get_or_insert(fault);
        context.faulted.store(true, Ordering::Release);
    }

    /// Whether an op runs on the range right now; then memory is being taken from under it, which kills the context
    /// that the op runs in.
    pub(super) fn pulled_from_under(&self, start: u64, bytes: usize, call: &str) -> bool {
        let mut any = false;
        for touched in self.touched.lock().iter() {
            if let Some((device, op)) = touched.touching(start, bytes)
                && !mutant::is("host.running-ops-unwatched")
            {
                any = true;
                let owner = format!("{call} while the op was running on it");
                let address = crate::driver::DevicePtr(start);
                self.set_fault(device, Fault { address, bytes, write: true, op: op.to_owned(), owner });
            }
        }
        any
    }

    // ---- streams

    pub(super) fn new_stream(&self, state: &mut State, device: u32) -> u64 {
        let touched = Arc::new(Touched::default());
        self.touched.lock().push(touched.clone());
        let id = state.next_stream_id;
        state.next_stream_id += 1;
        let key = state.queues.insert(Stream {
            id,
            device,
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            running: false,
            destroyed: false,
            bell: None,
            touched,
            capture: None,
            frontier: SmallVec::new(),
        });
        state.streams.insert(key)
    }

    /// Marks a stream as destroyed; it goes once it is drained.
    pub(super) fn retire_stream(&self, state: &mut State, key: StreamKey) {
        if let Some(stream) = state.queues.get_mut(key) {
            stream.destroyed = true;
            if let Some(bell) = &stream.bell {
                bell.notify_all();
            } else {
                self.remove_if_drained(state, key);
            }
        }
    }

    fn remove_if_drained(&self, state: &mut State, key: StreamKey) {
        if state.queues.get(key).is_some_and(|s| s.destroyed && !s.running && s.queue.is_empty()) {
            let stream = state.queues.remove(key);
            self.touched.lock().retain(|t| !Arc::ptr_eq(t, &stream.touched));
        }
    }

    /// Queues an op and, with threads, sees that somebody runs it. False if no thread could be had.
    #[must_use]
    pub(super) fn enqueue(self: &Arc<Self>, state: &mut State, key: StreamKey, op: Op) -> bool {
        let Some(stream) = state.queues.get_mut(key) else { return false };
        if !self.config.stepped && stream.bell.is_none() {
            let bell = Arc::new(Condvar::new());
            let (machine, ring) = (self.clone(), bell.clone());
            let name = format!("stream-{}", stream.id);
            if std::thread::Builder::new().name(name).spawn(move || machine.work(key, &ring)).is_err() {
                return false;
            }
            stream.bell = Some(bell);
        }
        stream.queue.push_back(op);
        stream.submitted += 1;
        if let Some(bell) = &stream.bell {
            bell.notify_one();
        }
        true
    }

    /// A stream's worker.
    fn work(&self, key: StreamKey, bell: &Condvar) {
        let mut state = self.state.lock();
        loop {
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            let Some(stream) = state.queues.get(key) else { return };
            match stream.queue.front() {
                None if stream.destroyed => {
                    self.remove_if_drained(&mut state, key);
                    self.progress.notify_all();
                    return;
                }
                None => bell.wait(&mut state),
                Some(op) if op.blocked_by().is_some() => self.progress.wait(&mut state),
                Some(_) => self.run_front(&mut state, key),
            }
        }
    }

    /// Runs the front op of a stream, which is not blocked, with the lock released meanwhile.
    fn run_front(&self, state: &mut MutexGuard<'_, State>, key: StreamKey) {
        let Some(stream) = state.queues.get_mut(key) else { return };
        let Some(mut op) = stream.queue.pop_front() else { return };
        stream.running = true;
        let device = stream.device;
        let touched = stream.touched.clone();
        let rest = MutexGuard::unlocked(state, || {
            match &mut op {
                Op::Work(work) => run(self, &touched, device, work, None),
                Op::Graph { body, next, .. } => {
                    let nodes = if self.config.stepped { 1 } else { usize::MAX };
                    for (device, work) in body.work.iter().skip(*next).take(nodes) {
                        run(self, &touched, *device, work, Some(&body.name));
                        *next += 1;
                    }
                    if *next < body.work.len() {
                        return Some(op);
                    }
                }
                Op::Record(_) | Op::Wait(_) => {}
            }
            match op {
                Op::Record(record) | Op::Graph { done: record, .. } => record.finish(),
                Op::Work(_) | Op::Wait(_) => {}
            }
            None
        });
        let unfinished = rest.is_some();
        if let Some(stream) = state.queues.get_mut(key) {
            if let Some(op) = rest {
                stream.queue.push_front(op);
            }
            stream.running = false;
            stream.completed += u64::from(!unfinished);
            if self.config.stepped {
                self.remove_if_drained(state, key);
            }
        }
        self.progress.notify_all();
    }

    /// Stepped mode: runs one op that `key`'s front needs (its own, or one that it waits for). False if there is
    /// none.
    pub(super) fn step(&self, state: &mut MutexGuard<'_, State>, key: StreamKey) -> bool {
        let mut at = key;
        loop {
            let Some(stream) = state.queues.get(at) else { return false };
            if stream.running {
                self.progress.wait(state);
                return true;
            }
            match stream.queue.front() {
                None => return false,
                Some(op) => match op.blocked_by() {
                    Some(record) => at = record.stream,
                    None => {
                        self.run_front(state, at);
                        return true;
                    }
                },
            }
        }
    }

    /// Waits until `done` says so; in stepped mode by running `key`'s stream.
    pub(super) fn wait_until(
        &self,
        state: &mut MutexGuard<'_, State>,
        key: StreamKey,
        mut done: impl FnMut(&State) -> bool,
    ) {
        while !done(state) && !self.closing.load(Ordering::Acquire) {
            if !self.config.stepped {
                self.progress.wait(state);
            } else if !self.step(state, key) {
                return;
            }
        }
    }

    /// Waits for everything queued on a stream so far.
    pub(super) fn drain(&self, state: &mut MutexGuard<'_, State>, key: StreamKey) {
        let Some((id, target)) = state.queues.get(key).map(|s| (s.id, s.submitted)) else { return };
        self.wait_until(state, key, |state| {
            state.queues.get(key).is_none_or(|stream| stream.id != id || stream.completed >= target)
        });
    }

    pub(super) fn current_device(&self) -> Option<u32> {
        thread::current(&self.token)
    }
}
