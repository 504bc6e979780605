//! A second stream beside the one of a step, for copies that run while it computes.
//!
//! Events tie the two: a step that is captured takes the lane into its capture, so that copies and kernels become one graph.

use std::fmt;
use std::sync::Arc;

use evergraph_pool::driver::{DriverResult, DynDriver, EventHandle, StreamHandle};

use crate::host::HOST;
use crate::ops::{Op, TensorView};
use crate::{KernelError, Kernels};

/// A stream and events of its own.
///
/// # Reuse and capture
/// An event is recorded and waited for in the order in which ops are queued, again and again. A step must wait for the last event
/// that the lane records, or a capture of it can not end.
pub struct Lane {
    driver: DynDriver,
    stream: StreamHandle,
    /// As many as [`EVENTS`](Self::EVENTS).
    events: Vec<EventHandle>,
}

impl Lane {
    /// Number of events.
    pub const EVENTS: usize = 8;

    /// A lane of its own.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(driver: &DynDriver) -> DriverResult<Arc<Self>> {
        driver.bind()?;
        let stream = driver.stream_create(0)?;
        let mut events = Vec::with_capacity(Self::EVENTS);
        for _ in 0..Self::EVENTS {
            match driver.event_create(false) {
                Ok(event) => events.push(event),
                Err(error) => {
                    destroy(driver, stream, &events);
                    return Err(error);
                }
            }
        }
        Ok(Arc::new(Self { driver: Arc::clone(driver), stream, events }))
    }

    fn event(&self, index: usize) -> EventHandle {
        self.events[index % Self::EVENTS]
    }
}

fn destroy(driver: &DynDriver, stream: StreamHandle, events: &[EventHandle]) {
    // A device that died can not; there is nobody to tell.
    if driver.bind().is_ok() {
        events.iter().for_each(|event| drop(driver.event_destroy(*event)));
        let _ = driver.stream_destroy(stream);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        destroy(&self.driver, self.stream, &self.events);
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// Copies a tensor from the host to the device, on the lane, once the step has come to event `after`; then records `done`.
#[derive(Clone, Debug)]
pub struct Upload {
    /// Where it runs.
    pub lane: Arc<Lane>,
    /// The event that it waits for.
    pub after: usize,
    /// The event that says that it is done.
    pub done: usize,
    /// On [`HOST`], without gaps. Page-locked or registered memory is copied at full speed.
    pub src: TensorView,
    /// On the device, without gaps; of the same type and shape.
    pub dst: TensorView,
}

/// Records an event of a lane on the step's stream: what was queued there so far is done then.
#[derive(Clone, Debug)]
pub struct Record {
    /// Whose event.
    pub lane: Arc<Lane>,
    /// Which.
    pub event: usize,
}

/// Makes the step's stream wait for an event of a lane.
#[derive(Clone, Debug)]
pub struct Wait {
    /// Whose event.
    pub lane: Arc<Lane>,
    /// Which.
    pub event: usize,
}

impl Op for Upload {
    fn name(&self) -> &'static str {
        "upload"
    }

    fn reads(&self) -> Vec<&TensorView> {
        // The step between two sides: what it reads is on the other, which `check` sees to.
        Vec::new()
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.dst]
    }

    fn check(&self) -> Result<(), KernelError> {
        let (src, dst) = (&self.src, &self.dst);
        let layout = |tensor: &TensorView, what| KernelError::Layout {
            op: "upload",
            tensor: format!("{tensor:?} of {}", tensor.root().name),
            what,
        };
        if src.root().device != HOST {
            return Err(layout(src, "it is not on the host"));
        }
        if src.ty() != dst.ty() || src.shape() != dst.shape() {
            return Err(layout(dst, "it is of another type or shape than what is copied there"));
        }
        match [src, dst].into_iter().find(|tensor| !tensor.is_contiguous()) {
            Some(tensor) => Err(layout(tensor, "it has gaps")),
            None => Ok(()),
        }
    }

    fn enqueue(&self, kernels: &Kernels, _: StreamHandle) -> Result<(), KernelError> {
        let (driver, lane) = (kernels.driver(), &self.lane);
        driver.bind()?;
        driver.stream_wait_event(lane.stream, lane.event(self.after))?;
        let bytes = self.src.range().len();
        let from = std::ptr::with_exposed_provenance(self.src.ptr().0 as usize);
        // SAFETY: the bytes lie inside the tensor's root; whether that is still there is the caller's promise, as for every
        // launch: weights are kept by whoever runs steps with them, and by their graphs.
        #[allow(unsafe_code)]
        unsafe {
            driver.memcpy_htod(self.dst.ptr(), from, bytes, lane.stream)?;
        }
        Ok(driver.event_record(lane.event(self.done), lane.stream)?)
    }
}

macro_rules! event_op {
    ($op:ident, $name:literal, |$driver:ident, $stream:ident, $event:ident| $enqueue:expr) => {
        impl Op for $op {
            fn name(&self) -> &'static str {
                $name
            }

            fn reads(&self) -> Vec<&TensorView> {
                Vec::new()
            }

            fn writes(&self) -> Vec<&TensorView> {
                Vec::new()
            }

            fn check(&self) -> Result<(), KernelError> {
                Ok(())
            }

            fn enqueue(&self, kernels: &Kernels, $stream: StreamHandle) -> Result<(), KernelError> {
                let ($driver, $event) = (kernels.driver(), self.lane.event(self.event));
                $driver.bind()?;
                Ok($enqueue?)
            }
        }
    };
}

event_op!(Record, "record", |driver, stream, event| driver.event_record(event, stream));
event_op!(Wait, "wait", |driver, stream, event| driver.stream_wait_event(stream, event));
