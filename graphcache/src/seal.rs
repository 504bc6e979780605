//! Whether this thread is inside a capture.

use std::cell::{Cell, RefCell};

use evergraph_pool::driver::{CaptureMode, DynDriver};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static NOT_LOADED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// This thread captures until the seal is dropped, by return, error or panic.
#[derive(Debug)]
pub(crate) struct Seal(());

impl Seal {
    pub(crate) fn new() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self(())
    }
}

impl Drop for Seal {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get().saturating_sub(1));
    }
}

pub(crate) fn sealed() -> bool {
    DEPTH.get() > 0
}

/// Notes code that this thread's capture needs and that was not loaded before it.
pub(crate) fn note_not_loaded(name: &str) {
    NOT_LOADED.set(Some(name.to_owned()));
}

/// Takes that note.
pub(crate) fn take_not_loaded() -> Option<String> {
    NOT_LOADED.take()
}

/// Sets this thread's capture mode until it is dropped (`cuThreadExchangeStreamCaptureMode`).
///
/// A thread that queries events or destroys things while others may be capturing puts itself in
/// [`CaptureMode::Relaxed`] or [`CaptureMode::ThreadLocal`] for that, and breaks nobody's capture.
#[must_use = "the mode goes back when this is dropped"]
#[derive(Debug)]
pub struct CaptureModeGuard {
    driver: DynDriver,
    before: Option<CaptureMode>,
}

impl CaptureModeGuard {
    /// Sets the mode. Where the driver refuses, nothing changes and nothing is put back.
    pub fn new(driver: &DynDriver, mode: CaptureMode) -> Self {
        Self { before: driver.exchange_capture_mode(mode).ok(), driver: DynDriver::clone(driver) }
    }
}

impl Drop for CaptureModeGuard {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // Silent: drops have nobody to tell.
            let _ = self.driver.exchange_capture_mode(before);
        }
    }
}
