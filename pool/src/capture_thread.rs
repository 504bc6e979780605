//! Which threads have a capture window open.
//!
//! In the driver's thread-local mode a capture breaks when *its thread* makes an unsafe call on any stream. So a
//! thread with an open window makes none through the pool, whatever stream it asks for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

static COUNT: AtomicUsize = AtomicUsize::new(0);
static THREADS: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

/// One open window of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Mark(ThreadId);

impl Mark {
    pub(crate) fn new() -> Self {
        let id = std::thread::current().id();
        THREADS.lock().push(id);
        COUNT.fetch_add(1, Ordering::Relaxed);
        Self(id)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let mut threads = THREADS.lock();
        if let Some(at) = threads.iter().position(|t| *t == self.0) {
            threads.swap_remove(at);
            COUNT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Whether the calling thread has a window open.
pub(crate) fn is_capturing() -> bool {
    // Windows of this thread were counted by this thread: relaxed is enough.
    COUNT.load(Ordering::Relaxed) != 0 && THREADS.lock().contains(&std::thread::current().id())
}
