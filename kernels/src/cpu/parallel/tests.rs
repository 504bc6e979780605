#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::*;

thread_local! {
    static OWN: RefCell<Option<Arc<Pool>>> = const { RefCell::new(None) };
}

pub(super) fn own_pool() -> Option<Arc<Pool>> {
    OWN.with_borrow(Clone::clone)
}

/// Runs `f` where so many threads work for this one.
pub(in crate::cpu) fn on_threads<R>(threads: usize, f: impl FnOnce() -> R) -> R {
    OWN.set(Some(Arc::new(Pool::new(threads))));
    let result = f();
    OWN.set(None);
    result
}

/// Waits for something that another thread does.
fn eventually(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        thread::yield_now();
    }
}

#[test]
fn each_call_is_made_once() {
    for threads in [1, 2, 3, 8] {
        let pool = Pool::new(threads);
        for round in 0..300 {
            let (n, step) = (1 + round * 7 % 97, 1 + round % 5);
            let calls: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            pool.run(n, step, &|i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1), "{threads} threads, {n} calls");
        }
    }
}

#[test]
fn helpers_work_beside_the_caller_awake_or_asleep() {
    let pool = Pool::new(3);
    for _ in 0..3 {
        // Each call waits for the others: one thread alone would wait forever.
        let together = Barrier::new(3);
        pool.run(3, 1, &|_| {
            together.wait();
        });
        eventually("helpers without work go to sleep", || pool.shared.sleepers.load(Ordering::SeqCst) == 2);
    }
}

#[test]
fn threads_beyond_the_limit_rest_until_it_is_raised() {
    let pool = Pool::new(4);
    let ids = |pool: &Pool, at_once: usize| {
        let (together, ids) = (Barrier::new(at_once), Mutex::new(std::collections::HashSet::new()));
        pool.run(at_once, 1, &|_| {
            lock(&ids).insert(thread::current().id());
            together.wait();
        });
        ids.into_inner().unwrap().len()
    };
    for most in [2, 1, 4, 3, 9] {
        pool.limit(most);
        let most = most.min(4);
        assert_eq!(pool.threads(), most);
        assert_eq!(ids(&pool, most), most, "as many as the limit work at once");
        // With more to do than threads, still no other joins.
        let seen = Mutex::new(std::collections::HashSet::new());
        for _ in 0..20 {
            pool.run(64, 1, &|_| {
                lock(&seen).insert(thread::current().id());
                thread::sleep(Duration::from_micros(20));
            });
        }
        assert!(seen.into_inner().unwrap().len() <= most, "limit {most}");
        eventually("helpers without work sleep, those beyond the limit are no sleepers", || {
            pool.shared.sleepers.load(Ordering::SeqCst) == most - 1
        });
    }
}

#[test]
fn who_finds_the_pool_taken_works_alone() {
    let pool = Pool::new(2);
    let count = AtomicUsize::new(0);
    pool.run(2, 1, &|_| {
        pool.run(10, 1, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
    });
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(5, 1, &|_| {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(count.into_inner(), 20 + 4 * 200 * 5);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = Pool::new(3);
    for bad in [0, 50, 99] {
        let call = |i: usize| assert!(i != bad, "call {bad}");
        let panic = catch_unwind(AssertUnwindSafe(|| pool.run(100, 1, &call))).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), &format!("call {bad}"));
        let count = AtomicUsize::new(0);
        pool.run(100, 1, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 100);
    }
}

/// Two threads on the two halves of one core are hardly faster than one.
#[test]
fn threads_are_put_on_cores_of_their_own_before_halves_of_cores() {
    use super::pin::apart;
    assert_eq!(apart(&[0, 1, 2, 3, 4, 5, 6, 7], |core| core / 2 * 2), [0, 2, 4, 6, 1, 3, 5, 7], "neighbours share");
    assert_eq!(apart(&[0, 1, 2, 3, 4, 5, 6, 7], |core| core % 4), [0, 1, 2, 3, 4, 5, 6, 7], "far ones share");
    assert_eq!(apart(&[3, 4, 5], |core| core / 2 * 2), [3, 4, 5], "a part of the machine");
    assert_eq!(apart(&[4, 5, 6], |core| core / 2 * 2), [4, 6, 5], "a part of the machine");
    assert_eq!(apart(&[2, 9], |core| core), [2, 9]);
}
