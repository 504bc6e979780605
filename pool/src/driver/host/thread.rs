//! What a thread carries: its current device and its capture mode, per machine.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use crate::driver::CaptureMode;

#[derive(Debug)]
struct Entry {
    machine: Weak<()>,
    device: u32,
    mode: CaptureMode,
}

thread_local! {
    static ENTRIES: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Enough that a purge is rare, few enough that the search stays short.
const PURGE_ABOVE: usize = 16;

/// Makes `device` of a machine current on this thread.
pub(in crate::driver) fn set_current(machine: &Arc<()>, device: u32) {
    ENTRIES.with_borrow_mut(|entries| match entries.iter_mut().find(|e| e.machine.as_ptr() == Arc::as_ptr(machine)) {
        Some(entry) => entry.device = device,
        None => {
            if entries.len() >= PURGE_ABOVE {
                entries.retain(|e| e.machine.strong_count() > 0);
            }
            entries.push(Entry { machine: Arc::downgrade(machine), device, mode: CaptureMode::Global });
        }
    });
}

/// The device of a machine that is current on this thread.
pub(in crate::driver) fn current(machine: &Arc<()>) -> Option<u32> {
    ENTRIES.with_borrow(|entries| entries.iter().find(|e| e.machine.as_ptr() == Arc::as_ptr(machine)).map(|e| e.device))
}

/// This thread's own capture mode; global until swapped, as CUDA has it.
pub(super) fn mode(machine: &Arc<()>) -> CaptureMode {
    ENTRIES.with_borrow(|entries| {
        entries.iter().find(|e| e.machine.as_ptr() == Arc::as_ptr(machine)).map_or(CaptureMode::Global, |e| e.mode)
    })
}

/// Swaps this thread's capture mode.
pub(super) fn exchange_mode(machine: &Arc<()>, new: CaptureMode) -> CaptureMode {
    ENTRIES.with_borrow_mut(|entries| {
        entries
            .iter_mut()
            .find(|e| e.machine.as_ptr() == Arc::as_ptr(machine))
            .map_or(CaptureMode::Global, |e| std::mem::replace(&mut e.mode, new))
    })
}

/// Whether this thread is inside a host function or kernel, where driver calls are forbidden.
pub(in crate::driver) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Runs foreign code with driver calls forbidden.
pub(super) fn as_callback<R>(body: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_CALLBACK.set(self.0);
        }
    }
    let _restore = Restore(IN_CALLBACK.replace(true));
    body()
}
