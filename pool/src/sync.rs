//! The few primitives that [`handshake`](crate::handshake) is built from.
//!
//! The handshake names them only through this module. The model tests include the same source file and put
//! loom's types here, so what is checked exhaustively is the code that ships.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Lets another thread go on while this one waits for a lease. Leases last well under a microsecond unless
/// the holder was descheduled, so a short spin comes first.
pub(crate) fn relax(round: u32) {
    if round < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
