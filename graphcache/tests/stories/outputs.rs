//! Results in a shared arena: they share bytes with other graphs' scratch, but not while somebody holds them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use evergraph_graphcache::{CacheError, Cause, GraphKey, Ran, Request};
use evergraph_pool::{Arena, Content, DeviceSlice, Output, PoolError, ScratchPolicy, Use};

use crate::rig::{BOTH, CHUNK, Rig, config};

/// Words of a result, and of the scratch of whoever comes after: more than the arena gives without using bytes again.
const WORDS: usize = CHUNK;

struct Layer {
    key: GraphKey,
    input: DeviceSlice<u32>,
    k: u32,
    arena: Arena,
}

impl Layer {
    fn new(rig: &Rig, name: u32, arena: &Arena) -> Self {
        Self { key: GraphKey::new(("layer", name)), input: rig.slice(&[0; 4]), k: name + 1, arena: arena.clone() }
    }

    fn request<'a>(&'a self, rig: &'a Rig) -> Request<'a> {
        Request::new(&self.key, &rig.pool, &rig.stream).policy(ScratchPolicy::Shared(self.arena.clone()))
    }

    /// result = (input + k) * 3, the first words of it.
    fn run(&self, rig: &Rig, x: u32) -> (Ran, Option<Cause>) {
        rig.stream.upload(&[x; 4], &self.input).unwrap();
        let outcome = rig.cache.run(&self.request(rig), |scope| {
            scope.declare(&self.input, Use::Input)?;
            scope.keep(rig.module.clone());
            let temporary = scope.alloc::<u32>(WORDS)?;
            scope.stream().fill(&temporary, 0xee)?;
            rig.op(scope, "add", temporary.ptr(), self.input.ptr(), 4, self.k)?;
            let result = scope.output::<u32>(WORDS)?;
            rig.op(scope, "mul", result.ptr(), temporary.ptr(), 4, 3)
        });
        let outcome = outcome.unwrap();
        (outcome.ran, outcome.cause)
    }

    fn hold(&self, rig: &Rig) -> Result<Output<u32>, CacheError> {
        rig.cache.output(&self.request(rig), 0)
    }

    fn is(&self, rig: &Rig, output: &Output<u32>, x: u32) -> bool {
        let mut found = [0; 4];
        rig.stream.download_into(output, &mut found).unwrap();
        found == [(x + self.k) * 3; 4]
    }
}

fn settled(rig: &Rig) -> (Layer, Layer) {
    let arena = rig.pool.arena(&rig.stream).unwrap();
    let (a, b) = (Layer::new(rig, 0, &arena), Layer::new(rig, 1, &arena));
    for layer in [&a, &b] {
        for x in 0..4 {
            layer.run(rig, x);
            assert!(
                layer.is(rig, &layer.hold(rig).unwrap(), x),
                "warm-ups, the capture and replays have results alike"
            );
        }
        assert_eq!(layer.run(rig, 9).0, Ran::Replayed);
    }
    // Two temporaries and two results have room for one of each.
    assert!(arena.bytes() <= 2 * WORDS * 4 + 2 * CHUNK, "{} bytes", arena.bytes());
    (a, b)
}

#[test]
fn what_a_caller_holds_is_not_written_over() {
    for mode in BOTH {
        let rig = Rig::new(mode);
        let (a, b) = settled(&rig);
        assert_eq!(a.run(&rig, 20).0, Ran::Replayed);
        let held = a.hold(&rig).unwrap();
        // Neither the other graph nor the next launch of its own.
        for (layer, x) in [(&b, 30), (&a, 40), (&b, 50)] {
            let (ran, cause) = layer.run(&rig, x);
            assert_eq!((ran, cause), (Ran::Eager, Some(Cause::OutputHeld)));
            assert!(layer.is(&rig, &layer.hold(&rig).unwrap(), x), "and the run has its result all the same");
            assert!(a.is(&rig, &held, 20));
        }
        drop(held);
        for x in 60..64 {
            assert_eq!(a.run(&rig, x).0, Ran::Replayed, "nobody holds it any more");
            assert_eq!(b.run(&rig, x).0, Ran::Replayed);
        }
        assert_eq!(rig.count().eager, 3);
        rig.pool.check().unwrap();
    }
}

#[test]
fn what_was_written_over_is_not_to_be_had() {
    let rig = Rig::new(BOTH[0]);
    let (a, b) = settled(&rig);
    assert_eq!((a.run(&rig, 1).0, b.run(&rig, 2).0), (Ran::Replayed, Ran::Replayed));
    let gone = a.hold(&rig).unwrap_err();
    assert!(matches!(gone, CacheError::Pool(PoolError::OutputGone { .. })), "{gone}");
    assert!(b.is(&rig, &b.hold(&rig).unwrap(), 2));
    // A refused hold holds nothing.
    assert_eq!((a.run(&rig, 3).0, b.run(&rig, 4).0), (Ran::Replayed, Ran::Replayed));
    let other: Result<Output<f32>, _> = rig.cache.output(&a.request(&rig), 0);
    assert!(matches!(other, Err(CacheError::NoOutput { index: 0 })));
    let beyond: Result<Output<u32>, _> = rig.cache.output(&b.request(&rig), 1);
    assert!(matches!(beyond, Err(CacheError::NoOutput { index: 1 })));
}

/// The arena's bytes go when it sleeps, kept or not: what is held keeps it awake, and what is not is gone afterwards.
#[test]
fn a_pool_does_not_sleep_under_a_held_result() {
    let rig = Rig::new(BOTH[0]);
    let (a, b) = settled(&rig);
    assert_eq!((a.run(&rig, 1).0, b.run(&rig, 2).0), (Ran::Replayed, Ran::Replayed));
    let held = b.hold(&rig).unwrap();
    for content in [Content::Keep, Content::Drop] {
        assert!(matches!(rig.pool.sleep(content, &[]), Err(PoolError::Busy { .. })));
        assert!(b.is(&rig, &held, 2));
        rig.pool.check().unwrap();
    }
    drop(held);
    assert!(b.is(&rig, &b.hold(&rig).unwrap(), 2), "nothing happened to it");
    rig.pool.sleep(Content::Keep, &[]).unwrap();
    assert!(b.hold(&rig).is_err());
    rig.pool.wake(&[]).unwrap();
    let gone = b.hold(&rig).unwrap_err();
    assert!(matches!(gone, CacheError::Pool(PoolError::OutputGone { .. })), "{gone}");
    assert_eq!(b.run(&rig, 3).0, Ran::Remapped);
    assert!(b.is(&rig, &b.hold(&rig).unwrap(), 3));
    assert_eq!(rig.driver.fault(), None);
}

#[test]
fn graphs_off_have_the_same_results() {
    let rig = Rig::with(BOTH[0], config().graphs(false));
    let arena = rig.pool.arena(&rig.stream).unwrap();
    let layer = Layer::new(&rig, 0, &arena);
    let mut before: Option<Output<u32>> = None;
    for x in 0..4 {
        layer.run(&rig, x);
        let held = layer.hold(&rig).unwrap();
        assert!(layer.is(&rig, &held, x));
        if let Some(before) = before.replace(held) {
            assert!(layer.is(&rig, &before, x - 1));
        }
    }
    let pinned = Request::new(&layer.key, &rig.pool, &rig.stream);
    let refused = rig.cache.run(&pinned, |scope| scope.output::<u32>(1).map(drop)).unwrap_err();
    assert!(matches!(refused, CacheError::NoArena));
}

/// One thread launches, another holds and reads: what it holds stays what it was when it took hold.
#[test]
fn holders_and_launchers_race() {
    let rig = Rig::new(BOTH[0]);
    let (a, b) = settled(&rig);
    let done = AtomicBool::new(false);
    let held_so_far = AtomicU32::new(0);
    let held_at_all = std::thread::scope(|scope| {
        let holder = scope.spawn(|| {
            let (mut held, mut torn) = (0, 0);
            while !done.load(Ordering::Acquire) {
                let Ok(output) = a.hold(&rig) else { continue };
                let mut first = [0; 4];
                let mut again = [0; 4];
                rig.stream.download_into(&output, &mut first).unwrap();
                std::thread::yield_now();
                rig.stream.download_into(&output, &mut again).unwrap();
                held += 1;
                held_so_far.fetch_add(1, Ordering::Relaxed);
                torn += usize::from(first != again || first[0] % 3 != 0 || first.iter().any(|w| *w != first[0]));
            }
            assert_eq!(torn, 0, "of {held}");
            held
        });
        // As often as it takes for the two to meet, on a machine with other things to do.
        let since = std::time::Instant::now();
        let met = || held_so_far.load(Ordering::Relaxed) > 0 || since.elapsed().as_secs() > 30;
        for x in (0..).take_while(|&x| x < 400 || !met()) {
            a.run(&rig, x);
            std::thread::yield_now();
            b.run(&rig, x);
        }
        done.store(true, Ordering::Release);
        holder.join().unwrap()
    });
    assert!(held_at_all > 0);
    rig.pool.check().unwrap();
}
