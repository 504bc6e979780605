//! Streams, events, copies, host functions.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::sys;

use super::flight::Note;
use super::{CudaDevice, cuda};
use crate::driver::{
    CaptureStatus, DeviceOrdinal, DevicePtr, DriverErrorKind as Kind, DriverResult, EventHandle, HostCallback,
    StreamHandle, Streams,
};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, the only flag there is.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes the reference over.
const USER_OBJECT_MOVE: u32 = 1;
const NOT_READY: u32 = 600;

pub(super) fn raw_stream(stream: StreamHandle) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn raw_event(event: EventHandle) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(event.0 as usize)
}

/// A query's answer.
fn ready(result: DriverResult<()>) -> DriverResult<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind, Kind::Other { code: NOT_READY, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn call(callback: &HostCallback) {
    // A panic must not cross the driver's frames.
    let _ = catch_unwind(AssertUnwindSafe(|| (callback.0)()));
}

/// Runs a callback once and drops it.
unsafe extern "C" fn run_once(data: *mut c_void) {
    // SAFETY: the box that `launch_host_fn` gave away; the driver calls this once.
    let callback = unsafe { Box::from_raw(data.cast::<HostCallback>()) };
    call(&callback);
}

/// Runs a callback that a graph owns.
unsafe extern "C" fn run_recorded(data: *mut c_void) {
    // SAFETY: the box that the graph owns through its user object, which outlives every launch.
    call(unsafe { &*data.cast::<HostCallback>() });
}

/// Drops a callback that a graph owned.
unsafe extern "C" fn drop_recorded(data: *mut c_void) {
    // SAFETY: the box that `launch_host_fn` gave away; the last reference is gone.
    drop(unsafe { Box::from_raw(data.cast::<HostCallback>()) });
}

impl CudaDevice {
    /// The capture that a stream records into, and its graph.
    pub(super) fn capture(
        &self,
        call: &'static str,
        stream: StreamHandle,
    ) -> DriverResult<(CaptureStatus, sys::CUgraph)> {
        let mut status = 0u32;
        let mut id = 0;
        let mut graph = std::ptr::null_mut();
        let none: *mut c_void = std::ptr::null_mut();
        let result = cuda!(
            self,
            call,
            cuStreamGetCaptureInfo_v3(
                raw_stream(stream),
                (&raw mut status).cast(),
                &raw mut id,
                &raw mut graph,
                none.cast(),
                none.cast(),
                none.cast()
            )
        );
        result?;
        let status = match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active { id },
            _ => CaptureStatus::Invalidated,
        };
        Ok((status, graph))
    }

    /// Puts a recorded callback under the graph's ownership, its clones' and its execs'.
    fn give_to_graph(&self, call: &'static str, graph: sys::CUgraph, data: *mut c_void) -> DriverResult<()> {
        let mut object = std::ptr::null_mut();
        let made =
            cuda!(self, call, cuUserObjectCreate(&raw mut object, data, Some(drop_recorded), 1, NO_DESTRUCTOR_SYNC));
        if let Err(error) = made {
            // SAFETY: no object took the box over.
            drop(unsafe { Box::from_raw(data.cast::<HostCallback>()) });
            return Err(error);
        }
        cuda!(self, call, cuGraphRetainUserObject(graph, object, 1, USER_OBJECT_MOVE))
    }
}

impl Streams for CudaDevice {
    fn stream_create(&self, priority: i32) -> DriverResult<StreamHandle> {
        let mut stream: sys::CUstream = std::ptr::null_mut();
        cuda!(self, "stream_create", cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, priority))?;
        Ok(StreamHandle(stream.expose_provenance() as u64))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        cuda!(self, "stream_destroy", cuStreamDestroy_v2(raw_stream(stream)))
    }

    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        let mut id = 0;
        cuda!(self, "stream_id", cuStreamGetId(raw_stream(stream), &raw mut id))?;
        Ok(id)
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        cuda!(self, "stream_synchronize", cuStreamSynchronize(raw_stream(stream)))?;
        self.flight.note(Note::StreamDone, 0, stream);
        Ok(())
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        let done = ready(cuda!(self, "stream_query", cuStreamQuery(raw_stream(stream))))?;
        if done {
            self.flight.note(Note::StreamDone, 0, stream);
        }
        Ok(done)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let call = || cuda!(self, "stream_wait_event", cuStreamWaitEvent(raw_stream(stream), raw_event(event), 0));
        self.queue(Note::Awaits, event.0, stream, call)
    }

    fn synchronize(&self) -> DriverResult<()> {
        cuda!(self, "synchronize", cuCtxSynchronize())?;
        self.flight.note(Note::AllDone, 0, StreamHandle(0));
        Ok(())
    }

    fn event_create(&self, timing: bool) -> DriverResult<EventHandle> {
        let mut event: sys::CUevent = std::ptr::null_mut();
        let flags = if timing { 0 } else { DISABLE_TIMING };
        cuda!(self, "event_create", cuEventCreate(&raw mut event, flags))?;
        Ok(EventHandle(event.expose_provenance() as u64))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        cuda!(self, "event_destroy", cuEventDestroy_v2(raw_event(event)))
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let call = || cuda!(self, "event_record", cuEventRecord(raw_event(event), raw_stream(stream)));
        self.queue(Note::Recorded, event.0, stream, call)
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let done = ready(cuda!(self, "event_query", cuEventQuery(raw_event(event))))?;
        if done {
            self.flight.note(Note::EventDone, event.0, StreamHandle(0));
        }
        Ok(done)
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        cuda!(self, "event_synchronize", cuEventSynchronize(raw_event(event)))?;
        self.flight.note(Note::EventDone, event.0, StreamHandle(0));
        Ok(())
    }

    fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> DriverResult<f32> {
        let mut ms = 0.0;
        cuda!(self, "event_elapsed_ms", cuEventElapsedTime(&raw mut ms, raw_event(start), raw_event(end)))?;
        Ok(ms)
    }

    unsafe fn memcpy_htod(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let call = || cuda!(self, "memcpy_htod", cuMemcpyHtoDAsync_v2(dst.0, src.cast(), bytes, raw_stream(stream)));
        self.queue(Note::Copy, dst.0, stream, call)
    }

    unsafe fn memcpy_dtoh(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let call = || cuda!(self, "memcpy_dtoh", cuMemcpyDtoHAsync_v2(dst.cast(), src.0, bytes, raw_stream(stream)));
        self.queue(Note::Copy, dst.addr() as u64, stream, call)
    }

    fn memcpy_dtod(&self, dst: DevicePtr, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let call = || cuda!(self, "memcpy_dtod", cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes, raw_stream(stream)));
        self.queue(Note::Copy, dst.0, stream, call)
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
        if self.capture(CALL, stream)?.0 != CaptureStatus::None {
            // The peer call is refused while recording; addresses are unified, so the plain one finds the devices.
            let call = || cuda!(self, CALL, cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes, raw_stream(stream)));
            return self.queue(Note::Copy, dst.0, stream, call);
        }
        let to = self.context_of(CALL, dst_device)?;
        let from = self.context_of(CALL, src_device)?;
        let call = || cuda!(self, CALL, cuMemcpyPeerAsync(dst.0, to, src.0, from, bytes, raw_stream(stream)));
        self.queue(Note::Copy, dst.0, stream, call)
    }

    fn memset_d8(&self, dst: DevicePtr, value: u8, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let call = || cuda!(self, "memset_d8", cuMemsetD8Async(dst.0, value, bytes, raw_stream(stream)));
        self.queue(Note::Set, dst.0, stream, call)
    }

    fn memset_d32(&self, dst: DevicePtr, value: u32, words: usize, stream: StreamHandle) -> DriverResult<()> {
        // The driver's own product wraps.
        if !dst.0.is_multiple_of(4) || words.checked_mul(4).is_none() {
            let why = "destination is not 4-byte aligned, or the size wraps";
            return Err(self.err("memset_d32", Kind::InvalidValue(why)));
        }
        let call = || cuda!(self, "memset_d32", cuMemsetD32Async(dst.0, value, words, raw_stream(stream)));
        self.queue(Note::Set, dst.0, stream, call)
    }

    fn launch_host_fn(&self, stream: StreamHandle, callback: HostCallback) -> DriverResult<()> {
        const CALL: &str = "launch_host_fn";
        let (status, graph) = self.capture(CALL, stream)?;
        let data: *mut c_void = Box::into_raw(Box::new(callback)).cast();
        if matches!(status, CaptureStatus::Active { .. }) {
            self.give_to_graph(CALL, graph, data)?;
            return cuda!(self, CALL, cuLaunchHostFunc(raw_stream(stream), Some(run_recorded), data));
        }
        let call = || cuda!(self, CALL, cuLaunchHostFunc(raw_stream(stream), Some(run_once), data));
        let queued = self.queue(Note::Host, 0, stream, call);
        if queued.is_err() {
            // SAFETY: the driver refused, so it will not call back and the box is still ours.
            drop(unsafe { Box::from_raw(data.cast::<HostCallback>()) });
        }
        queued
    }
}
