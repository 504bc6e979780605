//! Stream capture by the driver's rules: modes, forks and joins, what breaks a capture.

use std::sync::Arc;
use std::thread::ThreadId;

use smallvec::SmallVec;

use super::HostDevice;
use super::graph::{GraphDef, NodeDef, NodeWork};
use super::machine::{State, StreamKey};
use super::thread;
use crate::driver::{
    CaptureMode, CaptureStatus, DriverErrorKind as Kind, DriverResult, EventHandle, GraphHandle, StreamHandle,
};
use crate::mutant;

/// An event whose last record was in a capture that is no more.
const ENDED: Kind = Kind::InvalidValue("the event was recorded in a capture that has ended");

/// A capture under way.
#[derive(Debug)]
pub(super) struct Capture {
    pub(super) id: u64,
    mode: CaptureMode,
    thread: ThreadId,
    origin: StreamKey,
    device: u32,
    invalid: bool,
    nodes: Vec<NodeDef>,
    /// The origin and every stream that was forked into it.
    streams: Vec<StreamKey>,
}

impl Capture {
    /// Whether `node` is one of `ends` or comes before one of them.
    fn reaches(&self, ends: &[u32], node: u32) -> bool {
        let mut seen = vec![false; self.nodes.len()];
        let mut open: Vec<u32> = ends.to_vec();
        while let Some(at) = open.pop() {
            if at == node {
                return true;
            }
            if !std::mem::replace(&mut seen[at as usize], true) {
                open.extend_from_slice(&self.nodes[at as usize].deps);
            }
        }
        false
    }
}

impl HostDevice {
    /// The rule for potentially unsafe calls: whose captures this thread may break, it must not call into. Refused,
    /// it breaks them.
    pub(super) fn not_capturing(&self, call: &'static str, state: &mut State) -> DriverResult<()> {
        if state.captures.is_empty() || mutant::is("host.unsafe-calls-pass") {
            return Ok(());
        }
        let me = std::thread::current().id();
        let mine = thread::mode(&self.machine.token);
        let mut broken = false;
        for (_, capture) in &mut state.captures {
            let own = capture.thread == me && capture.mode != CaptureMode::Relaxed;
            let foreign = capture.thread != me && capture.mode == CaptureMode::Global;
            let conflict = match mine {
                CaptureMode::Relaxed => false,
                CaptureMode::ThreadLocal => own,
                CaptureMode::Global => own || (foreign && !mutant::is("host.other-threads-pass")),
            };
            if conflict && !mutant::is("host.refused-calls-break-nothing") {
                capture.invalid = true;
            }
            broken |= conflict;
        }
        if broken { Err(self.err(call, Kind::CaptureUnsupported)) } else { Ok(()) }
    }

    /// The same for calls that only a strict device counts as unsafe.
    pub(super) fn strictly_not_capturing(&self, call: &'static str, state: &mut State) -> DriverResult<()> {
        let strict = self.machine.config.strict_captures && !mutant::is("host.strictness-ignored");
        if strict { self.not_capturing(call, state) } else { Ok(()) }
    }

    /// Entry of a call that only a strict device counts as unsafe.
    pub(super) fn enter_strictly_unsafe(&self, call: &'static str) -> DriverResult<()> {
        self.enter(call)?;
        self.strictly_not_capturing(call, &mut self.machine.state.lock())
    }

    /// Entry of a potentially unsafe call that needs nothing else of the machine's lock.
    pub(super) fn enter_unsafe(&self, call: &'static str) -> DriverResult<()> {
        self.enter(call)?;
        self.not_capturing(call, &mut self.machine.state.lock())
    }

    /// Breaks one capture and refuses, whatever the mode.
    fn conflict<T>(&self, call: &'static str, state: &mut State, capture: usize) -> DriverResult<T> {
        if let Some(capture) = state.captures.get_mut(capture) {
            capture.invalid = true;
        }
        Err(self.err(call, Kind::CaptureUnsupported))
    }

    /// Refuses a call that waits for or asks after a stream that records, and breaks that capture.
    pub(super) fn stream_not_capturing(
        &self,
        call: &'static str,
        state: &mut State,
        key: StreamKey,
    ) -> DriverResult<()> {
        match state.queues[key].capture {
            Some(capture) => self.conflict(call, state, capture),
            None => Ok(()),
        }
    }

    /// Refuses a device-wide wait while any of this device's streams records; breaks those captures in every mode.
    pub(super) fn device_not_capturing(&self, call: &'static str, state: &mut State) -> DriverResult<()> {
        let captures: Vec<usize> =
            state.queues.iter().filter(|(_, s)| s.device == self.ordinal()).filter_map(|(_, s)| s.capture).collect();
        if mutant::is("host.device-wait-passes") {
            return Ok(());
        }
        for &capture in &captures {
            state.captures[capture].invalid = true;
        }
        if captures.is_empty() { Ok(()) } else { Err(self.err(call, Kind::CaptureUnsupported)) }
    }

    /// Refuses a question about an event that was recorded inside a capture; `breaks` the capture under way.
    pub(super) fn event_not_captured(
        &self,
        call: &'static str,
        state: &mut State,
        event: EventHandle,
        breaks: bool,
    ) -> DriverResult<()> {
        let Some((id, _)) = &self.event(call, state, event)?.captured else { return Ok(()) };
        if mutant::is("host.captured-event-passes") {
            return Ok(());
        }
        let id = *id;
        let Some((_, capture)) = state.captures.iter_mut().find(|(_, c)| c.id == id) else {
            return Err(self.err(call, ENDED));
        };
        capture.invalid |= breaks;
        Err(self.err(call, Kind::CapturedEvent))
    }

    /// Adds a node behind the stream's last.
    pub(super) fn add_node(
        &self,
        call: &'static str,
        state: &mut State,
        key: StreamKey,
        work: NodeWork,
    ) -> DriverResult<()> {
        let State { queues, captures, .. } = state;
        let stream = &mut queues[key];
        let Some(capture) = stream.capture.and_then(|capture| captures.get_mut(capture)) else {
            return Err(self.err(call, Kind::CaptureState));
        };
        if capture.invalid {
            return Err(self.err(call, Kind::CaptureInvalidated));
        }
        let index = capture.nodes.len() as u32;
        let deps = std::mem::replace(&mut stream.frontier, SmallVec::from_slice(&[index]));
        capture.nodes.push(NodeDef { device: stream.device, work, deps });
        Ok(())
    }

    /// Records an event inside a capture: it stands for the stream's last nodes.
    pub(super) fn record_captured(
        &self,
        call: &'static str,
        state: &mut State,
        key: StreamKey,
        event: EventHandle,
    ) -> DriverResult<()> {
        let stream = &state.queues[key];
        let frontier = stream.frontier.clone();
        let capture = stream.capture.and_then(|capture| state.captures.get(capture));
        let (id, invalid) = capture.map_or((0, true), |capture| (capture.id, capture.invalid));
        if invalid {
            return Err(self.err(call, Kind::CaptureInvalidated));
        }
        if let Some(event) = state.events.get_mut(event.0) {
            event.captured = Some((id, frontier));
            event.record = None;
        }
        Ok(())
    }

    /// A wait in which the stream, the event or both belong to a capture: joins, forks, or breaks.
    /// `Ok(false)` if neither does.
    pub(super) fn wait_captured(
        &self,
        call: &'static str,
        state: &mut State,
        key: StreamKey,
        event: EventHandle,
    ) -> DriverResult<bool> {
        let event = state.events.get(event.0).ok_or_else(|| self.err(call, Kind::InvalidHandle("event")))?;
        let own = state.queues[key].capture;
        let Some((id, nodes)) = event.captured.clone() else {
            return match own {
                None => Ok(false),
                // Waiting for something outside would tie the graph to work that will not run again.
                Some(capture) if event.record.is_some() && !mutant::is("host.no-isolation") => {
                    self.conflict(call, state, capture)
                }
                Some(_) => Ok(true),
            };
        };
        let Some(theirs) = state.captures.iter().find(|(_, c)| c.id == id).map(|(k, _)| k) else {
            if let Some(own) = own {
                state.captures[own].invalid = true;
            }
            return Err(self.err(call, ENDED));
        };
        if own.is_some_and(|own| own != theirs) {
            // Two captures can not merge: both break.
            state.captures[theirs].invalid = true;
            return self.conflict(call, state, own.unwrap_or(theirs));
        }
        if state.captures[theirs].invalid {
            return Err(self.err(call, Kind::CaptureInvalidated));
        }
        let stream = &mut state.queues[key];
        if own.is_none() {
            stream.capture = Some(theirs);
            stream.frontier.clear();
            state.captures[theirs].streams.push(key);
        }
        for node in nodes {
            if !stream.frontier.contains(&node) {
                stream.frontier.push(node);
            }
        }
        Ok(true)
    }

    pub(super) fn capture_begin(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        const CALL: &str = "begin_capture";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        if state.queues[key].capture.is_some() {
            return Err(self.err(CALL, Kind::CaptureState));
        }
        let id = state.next_capture_id;
        state.next_capture_id += 1;
        let capture = state.captures.insert(Capture {
            id,
            mode,
            thread: std::thread::current().id(),
            origin: key,
            device: self.ordinal(),
            invalid: false,
            nodes: Vec::new(),
            streams: vec![key],
        });
        let stream = &mut state.queues[key];
        stream.capture = Some(capture);
        stream.frontier.clear();
        Ok(())
    }

    pub(super) fn capture_end(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        const CALL: &str = "end_capture";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        let Some(capture_key) = state.queues[key].capture else { return Err(self.err(CALL, Kind::CaptureState)) };
        let capture = &mut state.captures[capture_key];
        if capture.origin != key {
            capture.invalid |= !mutant::is("host.ends-elsewhere-unnoticed");
            return Err(self.err(CALL, Kind::CaptureState));
        }
        let wrong_thread = capture.mode != CaptureMode::Relaxed
            && !mutant::is("host.any-thread-ends")
            && capture.thread != std::thread::current().id();
        let ends = state.queues[key].frontier.clone();
        let capture = &state.captures[capture_key];
        let unjoined = capture.streams.iter().filter(|&&s| s != key).any(|&s| {
            state.queues.get(s).is_some_and(|s| s.frontier.iter().any(|&node| !capture.reaches(&ends, node)))
        });
        let capture = state.captures.remove(capture_key);
        for stream in &capture.streams {
            if let Some(stream) = state.queues.get_mut(*stream).filter(|s| s.capture == Some(capture_key)) {
                stream.capture = None;
                stream.frontier.clear();
            }
        }
        let kind = match (capture.invalid, unjoined) {
            _ if wrong_thread => Kind::CaptureWrongThread,
            (true, _) => Kind::CaptureInvalidated,
            (false, true) if !mutant::is("host.unjoined-passes") => Kind::CaptureUnjoined,
            (false, _) => {
                let def = Arc::new(GraphDef { device: capture.device, nodes: capture.nodes });
                return Ok(state.insert_graph(def));
            }
        };
        // The recorded work may own callbacks: it goes without the lock.
        drop(state);
        drop(capture);
        Err(self.err(CALL, kind))
    }

    pub(super) fn capture_child(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()> {
        const CALL: &str = "add_child";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        let child = NodeWork::Child(self.graph(CALL, &state, graph)?.def().clone());
        self.add_node(CALL, &mut state, key, child)
    }

    pub(super) fn capture_state(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        const CALL: &str = "capture_status";
        self.enter(CALL)?;
        let state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        Ok(match state.queues[key].capture.map(|capture| &state.captures[capture]) {
            None => CaptureStatus::None,
            Some(capture) if capture.invalid => CaptureStatus::Invalidated,
            Some(capture) => CaptureStatus::Active { id: capture.id },
        })
    }
}
