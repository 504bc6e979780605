//! Panics on purpose, without the noise.

use std::cell::Cell;
use std::sync::Once;

thread_local! {
    static EXPECTED: Cell<u32> = const { Cell::new(0) };
}

/// Runs `f`; panics of this thread meanwhile print nothing. They still unwind.
pub(crate) fn panics_here<R>(f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            EXPECTED.with(|expected| expected.set(expected.get().saturating_sub(1)));
        }
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if EXPECTED.with(Cell::get) == 0 {
                before(info);
            }
        }));
    });
    EXPECTED.with(|expected| expected.set(expected.get() + 1));
    let _leave = Leave;
    f()
}
