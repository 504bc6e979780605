//! Streams and threads: who may have freed memory, and when.

use std::sync::Arc;

use evergraph_graphcache::Ran;
use evergraph_pool::{Pool, PoolError, ScratchPolicy, Stream};

use super::stage::{Slice, Stage, names, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, both};

pub(super) static SCENARIOS: &[Scenario] = &[
    both(
        "cub-373-one-handle-two-streams",
        "a stream is destroyed and its handle comes back for another: no reuse without order",
        one_handle,
    ),
    both(
        "rmm-1393-freed-elsewhere",
        "allocated on one thread, freed on another, in the middle of a clean-up",
        freed_elsewhere,
    ),
    both("record-stream", "a slice is dropped while another stream still reads it", record_stream),
    both(
        "pytorch-97833-destructor-calls-back",
        "a destructor that allocates and frees runs without the pool's lock",
        destructor,
    ),
];

fn one_handle(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let result = stage.state(4096)?;
    let first = stage.other_stream()?;
    let handle = first.handle();
    let slice = stage.pool.alloc::<u32>(4096, &first)?;
    let gate = stage.hold(&first)?;
    stage.probe.fill(first.handle(), words(&slice), 10)?;
    stage.probe.add(first.handle(), words(&slice), 1, words(&result))?;
    story.say("work that reads a slice is queued; the slice and its stream are dropped before it has run");
    let at = slice.ptr();
    drop(slice);
    drop(first);
    let second = stage.other_stream()?;
    story.say(format!(
        "the driver's next stream handle: {}",
        if second.handle() == handle { "the same one" } else { "another one" }
    ));
    let next = stage.pool.alloc::<u32>(4096, &second)?;
    stage.probe.fill(second.handle(), words(&next), 5000)?;
    gate.open_behind(&[&second])?;
    second.synchronize()?;
    if next.ptr() == at {
        story.say("the new stream got the same bytes: it had to wait for the old one's work");
    }
    stage.stream.driver().synchronize()?;
    let want: Vec<u32> = (0..4096).map(|i| 11 + i).collect();
    story.check("the old stream's result", want, stage.read(&result)?);
    let want: Vec<u32> = (0..4096).map(|i| 5000 + i).collect();
    story.check("the new stream's bytes", want, second.download(&next)?);
    Ok(())
}

fn freed_elsewhere(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let slices: Vec<Slice> = (0..32).map(|i| stage.scratch(512 * (i % 5 + 1))).collect::<Result<_, _>>()?;
    story.say("32 slices of one thread are dropped by two others, while the first trims and moves on");
    let mut halves = slices.into_iter();
    let (left, right): (Vec<Slice>, Vec<Slice>) = (halves.by_ref().take(16).collect(), halves.collect());
    let trimmed = std::thread::scope(|scope| {
        scope.spawn(move || drop(left));
        scope.spawn(move || drop(right));
        (0..8).all(|_| stage.pool.trim_to(0).is_ok())
    });
    story.holds("every trim went well", trimmed);
    story.check("slices alive", 0, stage.pool.stats().allocations.current);
    stage.stream.synchronize()?;
    stage.pool.trim_to(0)?;
    story.check("bytes held", 0, stage.pool.stats().reserved_bytes.current);
    story.check("the pool's own books", Ok(()), stage.pool.check());
    Ok(())
}

fn record_stream(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let side = stage.other_stream()?;
    let result = stage.state(4096)?;
    let slice = stage.scratch(4096)?;
    let data = stage.fill(&slice, 3)?;
    story.say("a side stream is told to read the slice; nothing has run yet when the slice is dropped");
    let gate = stage.hold(&side)?;
    stage.probe.add(side.handle(), words(&slice), 100, words(&result))?;
    slice.record_stream(&side)?;
    let at = slice.ptr();
    drop(slice);
    story.say("the owner's stream asks for memory of that size, and writes it at once");
    let mut takers = Vec::new();
    for i in 0..4 {
        let taker = stage.scratch(4096)?;
        stage.probe.fill(stage.stream.handle(), words(&taker), 9000 + i)?;
        takers.push(taker);
    }
    gate.open_behind(&[&stage.stream])?;
    stage.stream.synchronize()?;
    side.synchronize()?;
    let want: Vec<u32> = data.iter().map(|x| x + 100).collect();
    story.check("what the side stream read", want, stage.read(&result)?);
    story.say("once the host saw the side stream complete, the bytes are free for everybody");
    drop(takers);
    // As many as two pages hold: whichever the pool prefers, these are among them.
    let many = 2 * stage.page_words() / 4096;
    let again: Vec<Slice> = (0..many).map(|_| stage.scratch(4096)).collect::<Result<_, _>>()?;
    story.holds("they are reused", again.iter().any(|s| s.ptr() == at));
    Ok(())
}

/// A destructor as users write them: it takes and returns memory.
struct CallsBack {
    pool: Pool,
    stream: Stream,
    words: usize,
    called: Arc<std::sync::atomic::AtomicUsize>,
}

impl Drop for CallsBack {
    fn drop(&mut self) {
        let made: Result<(), PoolError> = (|| {
            let slices: Vec<Slice> =
                (0..4).map(|_| self.pool.alloc(self.words, &self.stream)).collect::<Result<_, _>>()?;
            drop(slices);
            self.pool.trim_to(0)?;
            Ok(())
        })();
        self.called.fetch_add(usize::from(made.is_ok()), std::sync::atomic::Ordering::SeqCst);
    }
}

fn destructor(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let called = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let run = |key: &str| {
        let owner = Arc::new(CallsBack {
            pool: stage.pool.clone(),
            stream: stage.stream.clone(),
            words: stage.page_words(),
            called: called.clone(),
        });
        stage.run(key, ScratchPolicy::Track, |scope| {
            scope.keep(owner.clone());
            stage.step(scope, &input, 1, &out)
        })
    };
    story.say("graphs keep an object whose destructor allocates, frees and trims");
    for key in ["a", "b"] {
        for _ in 0..3 {
            run(key)?;
        }
    }
    let before = called.load(std::sync::atomic::Ordering::SeqCst);
    story.say("one graph is evicted, one goes with the cache");
    stage.evict("a");
    stage.stream.synchronize()?;
    let data = stage.fill(&input, 3)?;
    let outcome = run("b")?;
    story.holds(
        "the other one runs",
        matches!(outcome, Ran::Replayed | Ran::Remapped | Ran::Updated | Ran::Recaptured | Ran::Eager),
    );
    story.check("and computes", stepped(&data, 1), stage.read(&out)?);
    stage.cache.clear();
    stage.stream.synchronize()?;
    let after = called.load(std::sync::atomic::Ordering::SeqCst);
    story.holds("the destructors came through the pool", after > before);
    story.check("the pool's own books", Ok(()), stage.pool.check());
    let second = Pool::new(stage.dynamic(), story.pages())?;
    let (refused, calls) = stage.calls(|| drop(second));
    let () = refused;
    story.check("calls for a pool that never had memory", Vec::<&str>::new(), names(&calls));
    Ok(())
}
