//! Streams: queues of device work, and what memory is ordered by.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::driver::{CaptureStatus, DeviceOrdinal, DriverResult, DynDriver, StreamHandle};
use crate::event::Event;
use crate::{PoolError, PoolId};

/// A stream. Clones are the same stream; it is destroyed with the last clone.
///
/// # Reuse and capture
/// A pool keeps a clone while memory waits for work on the stream, so dropping yours never lets memory go
/// early. A stream that a [`Window`](crate::Window) is open on is *capturing*: the pool neither records nor
/// waits for events on it until the window is closed.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    driver: DynDriver,
    handle: StreamHandle,
    id: u64,
    /// The pool that met it first, and its number there: (pool + 1) << 32 | key. Later pools use a map.
    home: AtomicU64,
    gate: Mutex<Gate>,
}

/// What may be done with the stream, decided and done in one critical section: otherwise a capture could begin
/// between "not capturing" and the event's record.
#[derive(Default)]
struct Gate {
    /// Open windows. They all share the event that the first one recorded.
    windows: u32,
    before_capture: Option<Arc<Event>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.0.id).field("handle", &self.0.handle).finish_non_exhaustive()
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

impl Eq for Stream {}

impl Stream {
    /// A new stream of the driver's device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(driver: &DynDriver) -> Result<Self, PoolError> {
        Self::with_priority(driver, 0)
    }

    /// A new stream; lower is more urgent.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn with_priority(driver: &DynDriver, priority: i32) -> Result<Self, PoolError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        driver.bind()?;
        let handle = driver.stream_create(priority)?;
        Ok(Self(Arc::new(Inner {
            driver: Arc::clone(driver),
            handle,
            // Not the driver's own id: two devices could give the same one.
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            home: AtomicU64::new(0),
            gate: Mutex::default(),
        })))
    }

    /// The driver's handle. It may be given to another stream once this one is gone.
    #[must_use]
    pub fn handle(&self) -> StreamHandle {
        self.0.handle
    }

    /// Process-unique and never reused.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// The driver it belongs to.
    #[must_use]
    pub fn driver(&self) -> &DynDriver {
        &self.0.driver
    }

    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> DeviceOrdinal {
        self.0.driver.info().ordinal
    }

    /// Waits on the host for everything queued.
    ///
    /// # Errors
    /// `Capturing`, and those of the driver.
    pub fn synchronize(&self) -> Result<(), PoolError> {
        self.not_capturing("waiting for the stream")?;
        self.0.driver.bind()?;
        Ok(self.0.driver.stream_synchronize(self.0.handle)?)
    }

    /// Waits on the host for everything queued so far. While the stream captures, that is everything queued
    /// before the capture: what is being captured does not run.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn settle(&self) -> Result<(), PoolError> {
        Ok(self.mark()?.synchronize()?)
    }

    /// Whether everything queued is complete; asks the driver.
    ///
    /// # Errors
    /// `Capturing`, and those of the driver.
    pub fn is_idle(&self) -> Result<bool, PoolError> {
        self.0.driver.bind()?;
        // Asked and answered in one critical section: a capture that another thread began in between would be broken by
        // the question, or worse (NVIDIA's driver 580 once died of it).
        let gate = self.0.gate.lock();
        if gate.windows > 0 {
            return Err(PoolError::Capturing { what: "asking whether the stream is idle" });
        }
        Ok(self.0.driver.stream_query(self.0.handle)?)
    }

    /// Whether a window is open on it.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.0.gate.lock().windows > 0
    }

    pub(crate) fn not_capturing(&self, what: &'static str) -> Result<(), PoolError> {
        if self.is_capturing() { Err(PoolError::Capturing { what }) } else { Ok(()) }
    }

    /// An event behind everything queued so far. On a capturing stream: behind everything queued before the
    /// capture, since what is being captured does not run.
    pub(crate) fn mark(&self) -> DriverResult<Arc<Event>> {
        self.0.driver.bind()?;
        let gate = self.0.gate.lock();
        if let Some(event) = &gate.before_capture {
            return Ok(Arc::clone(event));
        }
        Event::record(&self.0.driver, self.0.handle)
    }

    /// Work queued from here on waits for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), PoolError> {
        self.0.driver.bind()?;
        let gate = self.0.gate.lock();
        if gate.windows > 0 {
            return Err(PoolError::Capturing { what: "ordering after another stream" });
        }
        Ok(self.0.driver.stream_wait_event(self.0.handle, event.handle())?)
    }

    /// A window opens: records the event that stands for the stream's earlier work, and shuts the gate.
    pub(crate) fn open_window(&self) -> Result<(), PoolError> {
        self.0.driver.bind()?;
        let mut gate = self.0.gate.lock();
        if gate.windows == 0 {
            if self.0.driver.capture_status(self.0.handle)? != CaptureStatus::None {
                return Err(PoolError::Capturing { what: "opening a capture window after the capture began" });
            }
            gate.before_capture = Some(Event::record(&self.0.driver, self.0.handle)?);
        }
        gate.windows += 1;
        Ok(())
    }

    /// A window closes. The driver's capture has ended. What is returned is to be dropped without a lock.
    pub(crate) fn close_window(&self) -> Option<Arc<Event>> {
        let mut gate = self.0.gate.lock();
        gate.windows = gate.windows.saturating_sub(1);
        if gate.windows == 0 { gate.before_capture.take() } else { None }
    }

    /// Its number in `pool`, if that is the pool that it met first.
    #[inline]
    pub(crate) fn home_key(&self, pool: PoolId) -> Option<u32> {
        let home = self.0.home.load(Ordering::Relaxed);
        (home >> 32 == u64::from(pool.0) + 1).then_some(home as u32)
    }

    pub(crate) fn set_home_key(&self, pool: PoolId, key: u32) {
        let home = (u64::from(pool.0) + 1) << 32 | u64::from(key);
        // Whoever is first wins; the others find their number in the pool's map.
        let _ = self.0.home.compare_exchange(0, home, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// `key` of `pool` is no longer its number there.
    pub(crate) fn clear_home_key(&self, pool: PoolId) {
        if self.home_key(pool).is_some() {
            self.0.home.store(0, Ordering::Relaxed);
        }
    }

    /// How many clones there are, the pool's own included.
    pub(crate) fn clones(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Queued work still completes. Silent: drops have nobody to tell.
        let _ = (0..3).any(|_| self.driver.bind().and_then(|()| self.driver.stream_destroy(self.handle)).is_ok());
    }
}
