//! Events that destroy themselves.

use std::sync::Arc;

use crate::driver::{DriverResult, DynDriver, EventHandle, StreamHandle};

/// A recorded event: complete when the work queued on its stream at that moment is.
#[derive(Debug)]
pub(crate) struct Event {
    driver: DynDriver,
    handle: EventHandle,
}

impl Event {
    /// Creates an event and records it. The device is current.
    pub(crate) fn record(driver: &DynDriver, stream: StreamHandle) -> DriverResult<Arc<Self>> {
        let handle = driver.event_create(false)?;
        let event = Arc::new(Self { driver: Arc::clone(driver), handle });
        driver.event_record(handle, stream)?;
        Ok(event)
    }

    pub(crate) fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Waits on the host.
    pub(crate) fn synchronize(&self) -> DriverResult<()> {
        self.driver.bind()?;
        self.driver.event_synchronize(self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // Tried again, since nobody else will. Silent: a dead context fails every call, and there is nobody to tell.
        let _ = (0..3).any(|_| self.driver.bind().and_then(|()| self.driver.event_destroy(self.handle)).is_ok());
    }
}
