//! Streams, events, copies, host functions.
#![allow(unsafe_code)]

use parking_lot::MutexGuard;

use super::HostDevice;
use super::graph::NodeWork;
use super::machine::{Event, Op, Record, State, StreamKey};
use super::work::{Copy, Set, Work};
use crate::driver::{
    CopySide, DeviceOrdinal, DevicePtr, DriverErrorKind as Kind, DriverResult, EventHandle, HostCallback, StreamHandle,
    Streams,
};

impl HostDevice {
    /// The key of a live stream of this device.
    pub(super) fn stream(&self, call: &'static str, state: &State, stream: StreamHandle) -> DriverResult<StreamKey> {
        let key = state.streams.get(stream.0).copied();
        let key = key.filter(|&key| state.queues[key].device == self.ordinal());
        key.ok_or_else(|| self.err(call, Kind::InvalidHandle("stream")))
    }

    /// A live event of this device.
    pub(super) fn event<'s>(
        &self,
        call: &'static str,
        state: &'s State,
        event: EventHandle,
    ) -> DriverResult<&'s Event> {
        let found = state.events.get(event.0).filter(|event| event.device == self.ordinal());
        found.ok_or_else(|| self.err(call, Kind::InvalidHandle("event")))
    }

    /// Queues an op.
    pub(super) fn push(&self, call: &'static str, state: &mut State, key: StreamKey, op: Op) -> DriverResult<()> {
        if self.machine.enqueue(state, key, op) {
            Ok(())
        } else {
            let name = "no thread for the stream".to_owned();
            Err(self.err(call, Kind::Other { code: 0, name }))
        }
    }

    /// Work for a stream: a node while it records, else the queue.
    pub(super) fn submit_locked(
        &self,
        call: &'static str,
        state: &mut MutexGuard<'_, State>,
        key: StreamKey,
        work: Work,
    ) -> DriverResult<()> {
        if state.queues[key].capture.is_some() {
            self.add_node(call, state, key, NodeWork::Work(work))
        } else {
            self.push(call, state, key, Op::Work(work))
        }
    }

    fn submit(&self, call: &'static str, stream: StreamHandle, work: Work) -> DriverResult<()> {
        self.enter(call)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(call, &state, stream)?;
        self.submit_locked(call, &mut state, key, work)
    }

    fn copy(
        &self,
        call: &'static str,
        dst: CopySide,
        src: CopySide,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let device = self.ordinal();
        let copy = Copy { dst, dst_device: device, src, src_device: device, bytes, homes: false };
        self.submit_copy(call, copy, stream)
    }

    fn submit_copy(&self, call: &'static str, copy: Copy, stream: StreamHandle) -> DriverResult<()> {
        if copy.bytes == 0 {
            self.enter(call)?;
            return self.stream(call, &self.machine.state.lock(), stream).map(drop);
        }
        self.submit(call, stream, Work::Copy(copy))
    }

    fn set(&self, call: &'static str, set: Set, stream: StreamHandle) -> DriverResult<()> {
        if set.count == 0 {
            self.enter(call)?;
            return self.stream(call, &self.machine.state.lock(), stream).map(drop);
        }
        self.submit(call, stream, Work::Set(set))
    }

    /// Stepped mode: runs the next piece of work of a stream, or of one that it waits for. False if it has none.
    ///
    /// With threads this is an error: they run by themselves.
    pub fn step(&self, stream: StreamHandle) -> DriverResult<bool> {
        const CALL: &str = "step";
        if !self.machine.config.stepped {
            return Err(self.err(CALL, Kind::NotSupported("streams have threads of their own")));
        }
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        Ok(self.machine.step(&mut state, key))
    }

    /// How many pieces of work a stream has queued or running.
    pub fn queued(&self, stream: StreamHandle) -> DriverResult<u64> {
        let state = self.machine.state.lock();
        let key = self.stream("queued", &state, stream)?;
        Ok(state.queues[key].submitted - state.queues[key].completed)
    }
}

impl Streams for HostDevice {
    fn stream_create(&self, _priority: i32) -> DriverResult<StreamHandle> {
        self.enter("stream_create")?;
        let mut state = self.machine.state.lock();
        Ok(StreamHandle(self.machine.new_stream(&mut state, self.ordinal())))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "stream_destroy";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        self.stream_not_capturing(CALL, &mut state, key)?;
        state.streams.remove(stream.0);
        self.machine.retire_stream(&mut state, key);
        Ok(())
    }

    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        const CALL: &str = "stream_id";
        self.enter(CALL)?;
        let state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        Ok(state.queues[key].id)
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "stream_synchronize";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        self.stream_not_capturing(CALL, &mut state, key)?;
        self.not_capturing(CALL, &mut state)?;
        self.machine.drain(&mut state, key);
        self.alive(CALL)
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        const CALL: &str = "stream_query";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        self.stream_not_capturing(CALL, &mut state, key)?;
        self.not_capturing(CALL, &mut state)?;
        let queue = &state.queues[key];
        let done = queue.completed == queue.submitted;
        if !done && self.machine.config.stepped {
            self.machine.step(&mut state, key);
            self.alive(CALL)?;
        }
        Ok(done)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        const CALL: &str = "stream_wait_event";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        if self.wait_captured(CALL, &mut state, key, event)? {
            return Ok(());
        }
        match state.events.get(event.0).and_then(|event| event.record.clone()) {
            Some(record) if !record.is_done() => self.push(CALL, &mut state, key, Op::Wait(record)),
            _ => Ok(()),
        }
    }

    fn synchronize(&self) -> DriverResult<()> {
        const CALL: &str = "synchronize";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.device_not_capturing(CALL, &mut state)?;
        self.not_capturing(CALL, &mut state)?;
        let mine = state.queues.iter().filter(|(_, s)| s.device == self.ordinal());
        let keys: Vec<(StreamKey, u64)> = mine.map(|(key, s)| (key, s.id)).collect();
        for (key, id) in keys {
            if state.queues.get(key).is_some_and(|s| s.id == id) {
                self.machine.drain(&mut state, key);
            }
        }
        self.alive(CALL)
    }

    fn event_create(&self, timing: bool) -> DriverResult<EventHandle> {
        self.enter("event_create")?;
        let event = Event { device: self.ordinal(), timing, record: None, captured: None };
        Ok(EventHandle(self.machine.state.lock().events.insert(event)))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        const CALL: &str = "event_destroy";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.event(CALL, &state, event)?;
        state.events.remove(event.0);
        Ok(())
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "event_record";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        self.event(CALL, &state, event)?;
        if state.queues[key].capture.is_some() {
            return self.record_captured(CALL, &mut state, key, event);
        }
        let record = Record::new(key);
        self.push(CALL, &mut state, key, Op::Record(record.clone()))?;
        if let Some(event) = state.events.get_mut(event.0) {
            event.record = Some(record);
            event.captured = None;
        }
        Ok(())
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        const CALL: &str = "event_query";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.event_not_captured(CALL, &mut state, event, true)?;
        self.not_capturing(CALL, &mut state)?;
        let Some(record) = self.event(CALL, &state, event)?.record.clone() else { return Ok(true) };
        let done = record.is_done();
        if !done && self.machine.config.stepped {
            self.machine.step(&mut state, record.stream);
        }
        self.alive(CALL)?;
        Ok(done)
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        const CALL: &str = "event_synchronize";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.event_not_captured(CALL, &mut state, event, true)?;
        self.not_capturing(CALL, &mut state)?;
        if let Some(record) = self.event(CALL, &state, event)?.record.clone() {
            self.machine.wait_until(&mut state, record.stream, |_| record.is_done());
        }
        self.alive(CALL)
    }

    fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> DriverResult<f32> {
        const CALL: &str = "event_elapsed_ms";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let mut times = Vec::with_capacity(2);
        for event in [start, end] {
            self.event_not_captured(CALL, &mut state, event, false)?;
            let event = self.event(CALL, &state, event)?;
            if !event.timing {
                return Err(self.err(CALL, Kind::InvalidHandle("event without timing")));
            }
            let Some(record) = &event.record else {
                return Err(self.err(CALL, Kind::InvalidHandle("event that was never recorded")));
            };
            let Some(at) = *record.at.lock() else {
                let name = "CUDA_ERROR_NOT_READY".to_owned();
                return Err(self.err(CALL, Kind::Other { code: 600, name }));
            };
            times.push(at);
        }
        let (start, end) = (times[0], times[1]);
        let ahead = end.saturating_duration_since(start).as_secs_f32();
        let behind = start.saturating_duration_since(end).as_secs_f32();
        Ok((ahead - behind) * 1e3)
    }

    unsafe fn memcpy_htod(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let src = CopySide::Host(src.expose_provenance() as u64);
        self.copy("memcpy_htod", CopySide::Device(dst), src, bytes, stream)
    }

    unsafe fn memcpy_dtoh(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let dst = CopySide::Host(dst.expose_provenance() as u64);
        self.copy("memcpy_dtoh", dst, CopySide::Device(src), bytes, stream)
    }

    fn memcpy_dtod(&self, dst: DevicePtr, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        self.copy("memcpy_dtod", CopySide::Device(dst), CopySide::Device(src), bytes, stream)
    }

    fn memcpy_peer(
        &self,
        dst: DevicePtr,
        dst_device: DeviceOrdinal,
        src: DevicePtr,
        src_device: DeviceOrdinal,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        const CALL: &str = "memcpy_peer";
        if [dst_device, src_device].iter().any(|device| device.0 as usize >= self.machine.devices()) {
            return Err(self.err(CALL, Kind::InvalidValue("no such device")));
        }
        let copy = Copy {
            dst: CopySide::Device(dst),
            dst_device: dst_device.0,
            src: CopySide::Device(src),
            src_device: src_device.0,
            bytes,
            homes: true,
        };
        self.submit_copy(CALL, copy, stream)
    }

    fn memset_d8(&self, dst: DevicePtr, value: u8, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        self.set("memset_d8", Set { dst, value: value.into(), width: 1, count: bytes }, stream)
    }

    fn memset_d32(&self, dst: DevicePtr, value: u32, words: usize, stream: StreamHandle) -> DriverResult<()> {
        const CALL: &str = "memset_d32";
        if !dst.0.is_multiple_of(4) || words.checked_mul(4).is_none() {
            return Err(self.err(CALL, Kind::InvalidValue("destination is not 4-byte aligned, or the size wraps")));
        }
        self.set(CALL, Set { dst, value, width: 4, count: words }, stream)
    }

    fn launch_host_fn(&self, stream: StreamHandle, callback: HostCallback) -> DriverResult<()> {
        self.submit("launch_host_fn", stream, Work::Host(callback))
    }
}
