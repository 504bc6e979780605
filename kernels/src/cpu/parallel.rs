//! Spreading work over threads, without an influence on results.
//!
//! The thread that asks works too; the others of the pool, each on a core of its own, help while there is something left. They look
//! for work for a short while after the last, since the next launch is mostly near, and then sleep. One caller has the pool at a
//! time; others do their work alone meanwhile. Threads beyond a [limit] rest, and nobody wakes them before it is raised.

mod pin;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};

/// Below this many elementary steps (about 1 ns each) waking other threads costs more than it saves.
const WORTH_WAKING: usize = 32 * 1024;

/// How often a thread without work looks for some before it sleeps: about 0.1 ms.
const LOOKS: usize = 2000;

/// Calls `f(0) .. f(n - 1)`, each of about `cost` elementary steps, in any order and on any thread.
pub(super) fn each(n: usize, cost: usize, f: impl Fn(usize) + Send + Sync) {
    let total = n.saturating_mul(cost);
    if n < 2 || total < WORTH_WAKING {
        return (0..n).for_each(f);
    }
    #[cfg(test)]
    if let Some(pool) = tests::own_pool() {
        return pool.each(n, cost, &f);
    }
    pool().each(n, cost, &f);
}

/// The pool of the process.
static POOL: OnceLock<Pool> = OnceLock::new();

fn pool() -> &'static Pool {
    POOL.get_or_init(|| Pool::new(start(0)))
}

/// Lets `n` threads work from here on, or as many as there are. Returns how many.
pub(super) fn limit(n: usize) -> usize {
    let pool = pool();
    pool.limit(n);
    pool.threads()
}

/// Sets the number of threads, if that has not been done; 0 means one per core. Returns the number that it is.
pub(super) fn start(n: usize) -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    *THREADS.get_or_init(|| if n == 0 { cores() } else { n })
}

/// The number of threads that work.
pub(super) fn threads() -> usize {
    #[cfg(test)]
    if let Some(pool) = tests::own_pool() {
        return pool.threads();
    }
    POOL.get().map_or_else(|| start(0), Pool::threads)
}

/// Threads that help.
struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Whether there is work to join ([`OPEN`]), its number, and how many helpers are at it ([`INSIDE`]).
    state: AtomicU64,
    /// Valid while the work is open or a helper is at it.
    work: AtomicPtr<Work<'static>>,
    /// Held by the one that has the pool.
    turn: Mutex<()>,
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
    /// Threads that work, the caller included; helpers of higher numbers rest.
    most: AtomicUsize,
    /// Where they wait for that to change, with `asleep`.
    more: Condvar,
    ended: AtomicBool,
}

const OPEN: u64 = 1 << 63;
const INSIDE: u64 = u32::MAX as u64;

/// The number of the work in a state.
fn number(state: u64) -> u64 {
    (state & !OPEN) >> 32
}

struct Work<'a> {
    f: &'a (dyn Fn(usize) + Send + Sync),
    n: usize,
    step: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Work<'_> {
    /// Does what is left of it. A panic is kept, and ends it for all.
    fn take_part(&self) {
        let calls = || {
            loop {
                let first = self.next.fetch_add(self.step, Ordering::Relaxed);
                if first >= self.n {
                    return;
                }
                (first..self.n.min(first + self.step)).for_each(self.f);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(calls)) {
            self.next.store(self.n, Ordering::Relaxed);
            *lock(&self.panic) = Some(panic);
        }
    }
}

/// No panic happens under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool in which `threads` work, one of which is the caller. Threads that the system refuses are missing.
    fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            work: AtomicPtr::default(),
            turn: Mutex::new(()),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
            most: AtomicUsize::new(threads),
            more: Condvar::new(),
            ended: AtomicBool::new(false),
        });
        let core = pin::cores(threads);
        let start = |i: usize| {
            let (shared, core) = (Arc::clone(&shared), core.get(i).copied());
            let helper = move || {
                if let Some(core) = core {
                    pin::to(core);
                }
                shared.help(i);
            };
            thread::Builder::new().name(format!("kernel-{i}")).spawn(helper).ok()
        };
        let helpers = (1..threads).filter_map(start).collect();
        Self { shared, helpers }
    }

    /// `f(0) .. f(n - 1)`, each of about `cost` steps.
    fn each(&self, n: usize, cost: usize, f: &(dyn Fn(usize) + Send + Sync)) {
        let threads = self.threads();
        if threads < 2 {
            return (0..n).for_each(f);
        }
        let step = (WORTH_WAKING / 4 / cost.max(1)).min(n / (2 * threads)).max(1);
        self.run(n, step, f);
    }

    fn threads(&self) -> usize {
        self.shared.most.load(Ordering::Relaxed).min(self.helpers.len() + 1)
    }

    /// Lets so many threads work, the caller among them; at least that one.
    fn limit(&self, threads: usize) {
        let _guard = lock(&self.shared.asleep);
        self.shared.most.store(threads.max(1), Ordering::SeqCst);
        self.shared.more.notify_all();
    }

    /// `f(0) .. f(n - 1)`, `step` calls at a time.
    fn run(&self, n: usize, step: usize, f: &(dyn Fn(usize) + Send + Sync)) {
        let shared = &*self.shared;
        let turn = match shared.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..n).for_each(f),
        };
        let work = Work { f, n, step, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        shared.work.store(std::ptr::from_ref(&work).cast_mut().cast(), Ordering::Relaxed);
        // Closed, and nobody inside: the last caller waited for that.
        let number = number(shared.state.load(Ordering::Relaxed)).wrapping_add(1) << 32;
        shared.state.store(OPEN | number & !OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&shared.asleep));
            shared.wake.notify_all();
        }
        work.take_part();
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        // Who is inside finishes the calls that it took.
        let mut looks = 0;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            looks += 1;
            if looks < LOOKS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        drop(turn);
        let panic = lock(&work.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.asleep));
        self.shared.wake.notify_all();
        self.shared.more.notify_all();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// What the helper of this number does.
    fn help(&self, own: usize) {
        let (mut seen, mut looks) = (0, 0);
        while !self.ended.load(Ordering::Relaxed) {
            if own >= self.most.load(Ordering::Relaxed) {
                self.rest(own);
                continue;
            }
            let state = self.state.load(Ordering::Acquire);
            if !self.joinable(state, seen) {
                looks += 1;
                if looks < LOOKS {
                    std::hint::spin_loop();
                } else {
                    self.sleep(seen);
                    looks = 0;
                }
                continue;
            }
            if self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            (seen, looks) = (number(state), 0);
            // SAFETY: the work was open when this thread was counted, and its owner waits until nobody is.
            #[allow(unsafe_code)]
            let work = unsafe { &*self.work.load(Ordering::Relaxed) };
            work.take_part();
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether there is work other than the last that was seen.
    fn joinable(&self, state: u64, seen: u64) -> bool {
        state & OPEN != 0 && number(state) != seen
    }

    /// Until the limit lets this helper work, or the end. It is no sleeper: nobody with work looks for it.
    fn rest(&self, own: usize) {
        let mut guard = lock(&self.asleep);
        while !self.ended.load(Ordering::SeqCst) && own >= self.most.load(Ordering::SeqCst) {
            guard = self.more.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Until there is work, or the end.
    fn sleep(&self, seen: u64) {
        let mut guard = lock(&self.asleep);
        // The owner opens the work and then looks for sleepers; here it is the other way round: one sees the other.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.ended.load(Ordering::SeqCst) && !self.joinable(self.state.load(Ordering::SeqCst), seen) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
pub(super) mod tests;
