//! Launching a plan over several devices.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use evergraph_pool::driver::{DeviceOrdinal, DriverResult, DynDriver, EventHandle, StreamHandle};
use smallvec::SmallVec;

use super::Plan;
use crate::{KernelError, Kernels};

/// Events of one device's stream, recorded in turn.
///
/// # Reuse and capture
/// All are recorded on the same stream, so one that is recorded again before somebody waited for it makes that one wait for
/// more, never for less. Inside a capture they tie the streams of all devices into one graph.
pub struct Events {
    driver: DynDriver,
    events: Vec<EventHandle>,
    next: AtomicUsize,
}

impl Events {
    const COUNT: usize = 16;

    /// Events of a driver's device.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(driver: &DynDriver) -> DriverResult<Self> {
        driver.bind()?;
        let mut made =
            Self { driver: driver.clone(), events: Vec::with_capacity(Self::COUNT), next: AtomicUsize::new(0) };
        for _ in 0..Self::COUNT {
            let event = driver.event_create(false)?;
            made.events.push(event);
        }
        Ok(made)
    }

    /// Records the next event on the device's stream.
    fn record(&self, stream: StreamHandle) -> DriverResult<EventHandle> {
        let event = self.events[self.next.fetch_add(1, Ordering::Relaxed) % Self::COUNT];
        self.driver.bind()?;
        self.driver.event_record(event, stream)?;
        Ok(event)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // A device that died can not; there is nobody to tell.
        if self.driver.bind().is_ok() {
            self.events.iter().for_each(|event| drop(self.driver.event_destroy(*event)));
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("device", &self.driver.info().ordinal).finish_non_exhaustive()
    }
}

/// Where the steps of one device go.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLane<'a> {
    /// The device.
    pub device: DeviceOrdinal,
    /// Its kernels.
    pub kernels: &'a Kernels,
    /// Its stream.
    pub stream: StreamHandle,
    /// Events of that stream.
    pub events: &'a Events,
}

impl DeviceLane<'_> {
    fn wait(&self, event: EventHandle) -> DriverResult<()> {
        self.kernels.driver().bind()?;
        self.kernels.driver().stream_wait_event(self.stream, event)
    }
}

/// What one lane knows of the others.
struct Seen {
    /// Of each lane, the number of its steps that are known to be done, plus one; 0: it has not begun.
    steps: SmallVec<[usize; 4]>,
}

impl Plan {
    /// Launches all in order, each step on its device's stream, with an event wherever one comes after a step of another device. The
    /// first lane is where it begins and ends: the others wait for it first, and it waits for them last, so that what is captured
    /// there is one graph over all of them. With `fenced` the others wait for that end, too, which a capture does not need: memory
    /// that they give back in the order of their streams is then no longer read by anybody.
    ///
    /// # Errors
    /// [`KernelError::Placement`] for a step on a device without a lane; the driver's.
    pub fn launch_over(&self, lanes: &[DeviceLane<'_>], fenced: bool) -> Result<(), KernelError> {
        let Some((origin, others)) = lanes.split_first() else { return Ok(()) };
        if others.is_empty() || self.is_on(origin.device) {
            return self.launch(origin.kernels, origin.stream);
        }
        let lane_of = |step: usize| {
            let device = self.devices[step];
            lanes.iter().position(|lane| lane.device == device).ok_or_else(|| KernelError::Placement {
                op: self.ops[step].name(),
                device,
                writes: String::new(),
                tensor: "no stream of that device; the step".to_owned(),
                found: origin.device,
            })
        };
        let at: Vec<usize> = (0..self.ops.len()).map(lane_of).collect::<Result<_, _>>()?;
        let order = self.order();
        // The last step of each lane that each step comes after, and which steps others wait for.
        let mut told = vec![false; self.ops.len()];
        for (step, after) in order.iter().enumerate() {
            after.iter().filter(|before| at[**before] != at[step]).for_each(|before| told[*before] = true);
        }
        let mut events: Vec<Option<EventHandle>> = vec![None; self.ops.len()];
        let mut known: Vec<Seen> = lanes.iter().map(|_| Seen { steps: SmallVec::from_elem(0, lanes.len()) }).collect();
        let mut begun: SmallVec<[bool; 4]> = SmallVec::from_elem(false, lanes.len());
        let start = origin.events.record(origin.stream)?;
        begun[0] = true;
        for (step, op) in self.ops.iter().enumerate() {
            let (own, lane) = (at[step], &lanes[at[step]]);
            if !begun[own] {
                lane.wait(start)?;
                begun[own] = true;
            }
            for before in order[step].iter().rev().copied().filter(|before| at[*before] != own) {
                let Some(event) = events[before].filter(|_| known[own].steps[at[before]] <= before) else { continue };
                lane.wait(event)?;
                known[own].steps[at[before]] = before + 1;
            }
            tracing::trace!(target: "evergraph::ops", op = op.name(), device = %lane.device, writes = ?op.writes(), reads = ?op.reads());
            op.enqueue(lane.kernels, lane.stream)?;
            if told[step] {
                events[step] = Some(lane.events.record(lane.stream)?);
            }
        }
        let used = || lanes.iter().zip(&begun).skip(1).filter(|(_, begun)| **begun).map(|(lane, _)| lane);
        for lane in used() {
            origin.wait(lane.events.record(lane.stream)?)?;
        }
        if fenced {
            let end = origin.events.record(origin.stream)?;
            used().try_for_each(|lane| lane.wait(end))?;
        }
        Ok(())
    }
}
