//! The lock of the books.
//!
//! It is taken twice in the life of every slice, held for moments, and nearly always free. So what counts is the
//! undisturbed case. A lock whose waiters sleep is given back by a locked instruction, which also waits until every
//! store of the critical section has reached the cache; this one is given back by a plain store. The price is
//! that a waiter is not woken but looks again, ever more rarely.

use std::time::Duration;

use spin::mutex::{SpinMutex, SpinMutexGuard};

/// Looks without a pause in between to speak of, then looks with other threads let through.
const SPINS: u32 = 64;
const YIELDS: u32 = 64;
/// Then the holder is not running, perhaps because the waiter has its core and goes first: make room.
const REST: Duration = Duration::from_micros(50);

#[derive(Debug)]
pub(crate) struct Lock<T>(SpinMutex<T>);

/// Gives the lock back when dropped.
pub(crate) type Guard<'a, T> = SpinMutexGuard<'a, T>;

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(SpinMutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self.0.try_lock() {
            Some(guard) => guard,
            None => self.wait(),
        }
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) -> Guard<'_, T> {
        let mut round = 0;
        loop {
            if round < SPINS {
                std::hint::spin_loop();
            } else if round < SPINS + YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(REST);
            }
            round = round.saturating_add(1);
            // Looking leaves the line with the holder; trying takes it away.
            if !self.0.is_locked()
                && let Some(guard) = self.0.try_lock()
            {
                return guard;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let lock = Lock::new((0u32, 0u32));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..2000 {
                        let mut pair = lock.lock();
                        assert_eq!(pair.0, pair.1, "nobody is seen half-way");
                        pair.0 += 1;
                        // Long enough that waiters come to each of their ways to wait.
                        if round % 500 == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        pair.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (8000, 8000));
    }

    #[test]
    fn a_panic_gives_it_back() {
        let lock = Lock::new(0);
        let panicked = std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                let _guard = lock.lock();
                panic!("on purpose");
            });
            held.join().is_err()
        });
        assert!(panicked);
        *lock.lock() += 1;
    }
}
