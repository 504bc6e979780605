//! The capture window: sealed, and over in every case.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

use evergraph_graphcache::{CacheConfig, Ran, Scope};
use evergraph_kernels::probe::Probe;
use evergraph_pool::driver::{CaptureMode, CaptureStatus, DriverErrorKind};
use evergraph_pool::{PoolError, Purpose, ScratchPolicy, Stream};

use super::stage::{Stage, count, device, names, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, both};

pub(super) static SCENARIOS: &[Scenario] = &[
    both("capture-miss", "what is not ready inside a window is a typed error before any driver call", miss),
    both(
        "cuopt-1748-allocation-in-window",
        "a lost capture costs one eager pass, and the next one succeeds",
        lost_capture,
    ),
    both("capture-panic", "a panic in the closure ends and discards the capture; stream and pool stay usable", panic),
    both(
        "pytorch-180395-fail-each-step",
        "every driver call of a capture fails once: nothing is kept, a retry works",
        each_step,
    ),
    both(
        "llama.cpp-13990-calls-of-other-threads",
        "another thread frees, allocates and waits at each point of a capture",
        other_threads,
    ),
    both(
        "pytorch-104487-poller",
        "a watchdog polls an old event during a capture: only a global capture minds",
        poller,
    ),
    both(
        "vllm-48053-side-stream",
        "a background thread copies on a stream of its own while a graph is captured",
        side_stream,
    ),
    both("burn-5772-module-in-window", "a kernel variant is loaded inside the window", module_in_window),
    both(
        "cudarc-590-event-of-a-dead-capture",
        "a buffer outlives the graph that it was captured in; nobody is blamed later",
        dead_capture,
    ),
    both(
        "pytorch-193982-recorded-capturing-stream",
        "memory recorded on a capturing stream is freed and asked for elsewhere",
        recorded,
    ),
    both(
        "pytorch-175015-frees-while-capturing",
        "one stream captures; frees and retries of others go on as ever",
        frees_go_on,
    ),
];

fn miss(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let (large, missed) = (Cell::new(false), RefCell::new(None));
    let run = || {
        stage.run("miss", ScratchPolicy::Pin, |scope| {
            if large.get() && scope.capturing() {
                let asked = scope.alloc::<u32>(40 * stage.page_words());
                if let Err(error) = &asked {
                    missed.borrow_mut().get_or_insert(error.to_string());
                }
                drop(asked?);
            }
            stage.step(scope, &input, 1, &out)
        })
    };
    run()?;
    run()?;
    large.set(true);
    let bytes = 40 * stage.page();
    story.say(format!("the captured pass asks for {bytes} bytes that no warm-up asked for"));
    let (ran, calls) = stage.calls(run);
    let inside: Vec<&str> = names(&calls)
        .into_iter()
        .skip_while(|n| *n != "begin_capture")
        .skip(1)
        .take_while(|n| *n != "end_capture")
        .collect();
    story.check("driver calls inside the window", Vec::<&str>::new(), inside);
    let missed = missed.borrow_mut().take();
    story.refused("the error in there names the request", &format!("{bytes} bytes"), &missed.map_or(Ok(()), Err));
    story.say("the cache makes the memory ready outside, and captures once more; without memory it would run eagerly");
    story.check("the run", Some(Ran::Captured), ran.ok());
    story.holds(
        "the stream is not capturing",
        stage.dynamic().capture_status(stage.stream.handle())? == CaptureStatus::None,
    );
    large.set(false);
    let data = stage.fill(&input, 12)?;
    let outcomes: Vec<Ran> = (0..4).map(|_| run()).collect::<Result<_, _>>()?;
    story.check("without the request it is captured and replays", Some(&Ran::Replayed), outcomes.last());
    story.check("and computes", stepped(&data, 1), stage.read(&out)?);
    Ok(())
}

fn lost_capture(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let careless = Cell::new(true);
    let run = || {
        stage.run("solver", ScratchPolicy::Pin, |scope| {
            if careless.get() && scope.capturing() {
                driver.bind()?;
                // Thread-local mode calls this unsafe, and the capture is lost.
                driver.malloc(4096).map(|ptr| driver.free(ptr))??;
            }
            stage.step(scope, &input, 2, &out)
        })
    };
    run()?;
    run()?;
    story.say("the captured pass allocates behind the pool's back");
    let (ran, calls) = stage.calls(run);
    story.holds("typed error or eager pass", ran.is_err() || matches!(ran, Ok(Ran::Eager)));
    story.holds("the capture was ended", count(&calls, "begin_capture") <= count(&calls, "end_capture"));
    careless.set(false);
    let data = stage.fill(&input, 4)?;
    let mut eager = 0;
    let mut captured = false;
    for _ in 0..6 {
        match run()? {
            Ran::Eager | Ran::WarmUp => eager += 1,
            _ => captured = true,
        }
    }
    story.holds("the capture succeeds on a later pass", captured);
    story.holds("after few eager ones", eager <= 3);
    story.check("the result", stepped(&data, 2), stage.read(&out)?);
    Ok(())
}

fn panic(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let explode = Cell::new(false);
    let run = || {
        stage.run("fragile", ScratchPolicy::Pin, |scope| {
            stage.step(scope, &input, 3, &out)?;
            if explode.get() && scope.capturing() {
                std::panic::panic_any("the closure's own panic");
            }
            Ok(())
        })
    };
    run()?;
    run()?;
    let reserved = stage.pool.stats().active_bytes.current;
    explode.set(true);
    story.say("the closure panics in the middle of its capture; the caller catches the panic");
    let (caught, calls) = stage.calls(|| quietly(|| catch_unwind(AssertUnwindSafe(run))));
    let text = caught.err().and_then(|panic| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
    story.check("the panic goes through to the caller", Some("the closure's own panic".to_owned()), text);
    story.holds("the capture was ended", count(&calls, "begin_capture") <= count(&calls, "end_capture"));
    story.check("graphs left", count(&calls, "end_capture"), count(&calls, "graph_destroy"));
    story.check("the stream", CaptureStatus::None, stage.dynamic().capture_status(stage.stream.handle())?);
    story.check("bytes in use", reserved, stage.pool.stats().active_bytes.current);
    story.holds("the next allocation", stage.scratch(1024).is_ok());
    explode.set(false);
    let data = stage.fill(&input, 31)?;
    let outcomes: Vec<Ran> = (0..4).map(|_| run()).collect::<Result<_, _>>()?;
    story.check("the next capture replays", Some(&Ran::Replayed), outcomes.last());
    story.check("and computes", stepped(&data, 3), stage.read(&out)?);
    Ok(())
}

/// Runs something that panics on purpose without the message of the panic hook.
fn quietly<R>(f: impl FnOnce() -> R) -> R {
    crate::stress::quiet::panics_here(f)
}

fn each_step(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let run = |key: &str| stage.run(key, ScratchPolicy::Pin, |scope| stage.step(scope, &input, 5, &out));
    story.say("the calls of one good capture, first to last");
    run("good")?;
    run("good")?;
    let (captured, calls) = stage.calls(|| run("good"));
    story.check("the capture", Ran::Captured, captured?);
    let steps = calls.len() as u64;
    stage.cache.clear();
    stage.stream.synchronize()?;
    let start = stage.pool.stats();
    let live = stage.live();
    story.say(format!("now each of its {steps} driver calls fails in turn, in a capture of its own"));
    let (mut leaked, mut left, mut wrong, mut stuck, mut injected) = (0, 0, 0, 0, 0);
    for nth in 1..=steps {
        let key = format!("failing {nth}");
        run(&key)?;
        run(&key)?;
        let before = stage.driver.injected();
        stage.driver.fail_nth_with("any", nth, DriverErrorKind::Injected);
        let _ = run(&key);
        injected += stage.driver.injected() - before;
        stage.driver.clear();
        stuck += u32::from(stage.dynamic().capture_status(stage.stream.handle())? != CaptureStatus::None);
        let data = stage.fill(&input, nth as u32)?;
        let retried = (0..3).map(|_| run(&key)).collect::<Result<Vec<_>, _>>()?;
        wrong += u32::from(retried.last() != Some(&Ran::Replayed) || stage.read(&out)? != stepped(&data, 5));
        stage.cache.clear();
        stage.stream.synchronize()?;
        leaked += u32::from(stage.pool.stats().active_bytes.current != start.active_bytes.current);
        let now = stage.live();
        left += u32::from((now.graphs, now.execs) != (live.graphs, live.execs));
    }
    story.check("failures injected", steps, injected);
    story.check("captures after which the stream was still capturing", 0, stuck);
    story.check("captures after which memory was still in use", 0, leaked);
    story.check("captures after which a graph was left", 0, left);
    story.check("retries that were wrong or did not end in a replay", 0, wrong);
    story.check("the pool's own books", Ok(()), stage.pool.check());
    Ok(())
}

/// A call that another thread tries.
type Attempt<'a> = &'a (dyn Fn() -> Result<(), PoolError> + Sync);

fn other_threads(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let driver = stage.dynamic();
    driver.bind()?;
    let spare = driver.malloc(4096)?;
    let event = driver.event_create(false)?;
    let calls: [(&str, Attempt<'_>); 5] = [
        ("pool alloc that must grow", &|| {
            stage.pool.alloc::<u32>(20 * stage.page_words(), &Stream::new(&stage.dynamic())?).map(drop)
        }),
        ("malloc and free", &|| Ok(driver.malloc(4096).and_then(|ptr| driver.free(ptr))?)),
        ("event destroy", &|| Ok(driver.event_create(false).and_then(|e| driver.event_destroy(e))?)),
        ("module load and unload", &|| Ok(Probe::load(stage.dynamic()).map(drop)?)),
        ("trim", &|| stage.pool.trim_to(0).map(|_| ())),
    ];
    for (n, (what, call)) in calls.iter().enumerate() {
        let key = format!("captured beside {n}");
        let mut outcomes = Vec::new();
        for pass in 0..4 {
            let (enter, leave) = (Barrier::new(2), Barrier::new(2));
            let (driver, stage, input, out, enter, leave) = (&driver, &stage, &input, &out, &enter, &leave);
            let met = Cell::new(false);
            let (ran, other) = std::thread::scope(|scope| {
                let other = scope.spawn(move || {
                    enter.wait();
                    let result = driver.bind().map_err(PoolError::from).and_then(|()| call());
                    leave.wait();
                    result.map_err(|e| e.to_string())
                });
                let ran = stage.run(&key, ScratchPolicy::Pin, |scope| {
                    // A window that misses memory is captured once more; the other thread comes once.
                    if scope.capturing() && !met.replace(true) {
                        // In the middle of the window the other thread makes its call.
                        enter.wait();
                        leave.wait();
                    }
                    stage.step(scope, input, 6, out)
                });
                if !met.get() {
                    enter.wait();
                    leave.wait();
                }
                (ran, other.join().unwrap_or_else(|_| Err("panicked".to_owned())))
            });
            if pass == 2 {
                story.check(format!("{what}: the other thread's call, inside the window"), Ok(()), other);
            }
            outcomes.push(ran?);
        }
        story.check(format!("{what}: the capture and its replay"), &[Ran::Captured, Ran::Replayed][..], &outcomes[2..]);
    }
    let data = stage.fill(&input, 3)?;
    stage.run("captured beside 1", ScratchPolicy::Pin, |scope| stage.step(scope, &input, 6, &out))?;
    story.check("the graph computes", stepped(&data, 6), stage.read(&out)?);
    driver.bind()?;
    driver.event_destroy(event)?;
    driver.free(spare)?;
    Ok(())
}

fn poller(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    driver.bind()?;
    let old = driver.event_create(false)?;
    driver.event_record(old, stage.other_stream()?.handle())?;
    let poll = || {
        let driver = &driver;
        std::thread::scope(|scope| {
            scope.spawn(move || driver.bind().and_then(|()| driver.event_query(old)).is_ok()).join().unwrap_or(false)
        })
    };
    story.say(
        "a raw capture in global mode: the poller on another thread breaks it, which shows that the device is strict",
    );
    driver.bind()?;
    let stream = driver.stream_create(0)?;
    driver.begin_capture(stream, CaptureMode::Global)?;
    story.check("the poller's query goes through", false, poll());
    story.check("the capture ends well", false, driver.end_capture(stream).is_ok());
    driver.stream_destroy(stream)?;
    story.say("the cache captures thread-locally");
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let mut polled = Vec::new();
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        outcomes.push(stage.run("polled", ScratchPolicy::Pin, |scope| {
            if scope.capturing() {
                polled.push(poll());
            }
            stage.step(scope, &input, 7, &out)
        })?);
    }
    story.check("the poller's query goes through", vec![true], polled);
    story.check("the capture and its replay", &[Ran::Captured, Ran::Replayed][..], &outcomes[2..]);
    driver.bind()?;
    driver.event_destroy(old)?;
    Ok(())
}

fn side_stream(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let (from, to) = (stage.state(256)?, stage.state(256)?);
    let side = stage.other_stream()?;
    let words_of = stage.fill(&from, 123)?;
    let nodes = |key: &str, busy: bool| -> Result<usize, Box<dyn std::error::Error>> {
        let mut kernels = 0;
        for _ in 0..3 {
            let (ran, calls) = stage.calls(|| {
                stage.run(key, ScratchPolicy::Pin, |scope: &Scope<'_>| {
                    if busy && scope.capturing() {
                        let (side, from, to) = (&side, &from, &to);
                        let copied = std::thread::scope(|s| s.spawn(move || side.copy(from, to)).join());
                        copied.unwrap_or(Err(PoolError::Config("the copying thread panicked")))?;
                    }
                    stage.step(scope, &input, 8, &out)
                })
            });
            ran?;
            kernels = count(&calls, "node");
        }
        Ok(kernels)
    };
    story.say("one graph is captured in peace, one while another thread copies on a side stream");
    let quiet = nodes("quiet", false)?;
    story.check("nodes captured", quiet, nodes("busy", true)?);
    story.check("the side stream's copy", words_of, {
        side.synchronize()?;
        stage.read(&to)?
    });
    let data = stage.fill(&input, 40)?;
    let outcome = stage.run("busy", ScratchPolicy::Pin, |scope| stage.step(scope, &input, 8, &out))?;
    story.check("the graph", (Ran::Replayed, stepped(&data, 8)), (outcome, stage.read(&out)?));
    Ok(())
}

fn module_in_window(story: &mut Story) -> Told {
    // An old driver and a new one; or the one that there is.
    let drivers: &[Option<bool>] = if story.hardware() { &[None] } else { &[Some(true), Some(false)] };
    for &strict in drivers {
        let stage = match strict {
            None => Stage::new(story)?,
            Some(strict) => {
                let device = device().module_load_breaks_capture(strict);
                Stage::host(story, device, story.pages(), CacheConfig::default())?
            }
        };
        let (input, out) = (stage.state(256)?, stage.state(256)?);
        story.say(match strict {
            Some(true) => "an older driver: a load inside a capture breaks it",
            Some(false) => "a newer driver permits it",
            None => "a driver may permit a load inside a capture, or break it",
        });
        let mut passes = 0;
        let mut loaded = Vec::new();
        let lazy = Cell::new(true);
        let mut run = || {
            passes += 1;
            stage.run("variant", ScratchPolicy::Pin, |scope| {
                if lazy.get() && scope.capturing() {
                    // The warm-up took another branch, so this variant was never loaded.
                    let variant = Probe::load(stage.dynamic())?;
                    variant.fill(scope.stream().handle(), words(&out), 1)?;
                    loaded.push(variant);
                }
                stage.step(scope, &input, 9, &out)
            })
        };
        run()?;
        run()?;
        let ran = run();
        let refused = ran.is_err() || matches!(ran, Ok(Ran::Eager));
        match strict {
            Some(true) => story.holds("the capture fails typed, or the run was made eagerly", refused),
            Some(false) => story.check("the capture succeeds", Some(Ran::Captured), ran.ok()),
            None => {
                story.say(if refused { "this one breaks it" } else { "this one permits it" });
                story.holds(
                    "it is captured, fails typed, or is run eagerly",
                    refused || matches!(ran, Ok(Ran::Captured)),
                );
            }
        }
        lazy.set(false);
        let data = stage.fill(&input, 6)?;
        let outcomes: Vec<Ran> = (0..4).map(|_| run()).collect::<Result<_, _>>()?;
        story.check("afterwards it replays", Some(&Ran::Replayed), outcomes.last());
        story.check("and computes", stepped(&data, 9), stage.read(&out)?);
        stage.cache.clear();
        stage.stream.synchronize()?;
    }
    Ok(())
}

fn dead_capture(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let side = stage.other_stream()?;
    let (input, out) = (stage.scratch(256)?, stage.state(256)?);
    story.say(
        "a long-lived buffer is used by a capture and on two streams; the graph is destroyed, then the buffer dropped",
    );
    stage.settle("short-lived", ScratchPolicy::Pin, |scope| {
        input.record_stream(&side)?;
        stage.step(scope, &input, 1, &out)
    })?;
    side.copy(&input, &out)?;
    stage.cache.clear();
    let ((), calls) = stage.calls(|| drop(input));
    story.check("calls that fail on the drop", 0, calls.iter().filter(|c| c.result.is_err()).count());
    let (next, calls) = stage.calls(|| -> Result<(), PoolError> {
        let next = stage.pool.alloc::<u32>(256, &side)?;
        drop(stage.pool.alloc::<u32>(256, &stage.stream)?);
        drop(next);
        side.synchronize()
    });
    story.check(
        "the next, unrelated calls",
        (true, 0),
        (next.is_ok(), calls.iter().filter(|c| c.result.is_err()).count()),
    );
    Ok(())
}

fn recorded(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let other = stage.other_stream()?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let mut inside = Vec::new();
    // A few of that size are free on its stream, between two that are not.
    let mut kept =
        (0..8).map(|_| stage.pool.alloc_for::<u32>(4096, Purpose::Weight, &other)).collect::<Result<Vec<_>, _>>()?;
    drop(kept.drain(1..7));
    story.say(
        "mid-capture a slice is recorded on the capturing stream, dropped, and its size asked for on another stream",
    );
    for _ in 0..3 {
        let (ran, calls) = stage.calls(|| {
            stage.run("recorded", ScratchPolicy::Pin, |scope| {
                if scope.capturing() {
                    let slice = stage.pool.alloc_for::<u32>(4096, Purpose::Weight, &other)?;
                    slice.record_stream(scope.stream())?;
                    drop(slice);
                    drop(stage.pool.alloc_for::<u32>(4096, Purpose::Weight, &other)?);
                }
                stage.step(scope, &input, 1, &out)
            })
        });
        ran?;
        let from = calls.iter().position(|c| c.name == "begin_capture");
        let to = calls.iter().position(|c| c.name == "end_capture");
        if let (Some(from), Some(to)) = (from, to) {
            inside = calls[from + 1..to].to_vec();
        }
    }
    let handle = stage.stream.handle().0;
    let events =
        ["event_record", "event_query", "event_synchronize", "stream_wait_event", "stream_query", "stream_synchronize"];
    let bad = inside.iter().filter(|c| events.contains(&c.name) && c.arg("stream").is_none_or(|s| s == handle)).count();
    story.check("events recorded or asked for on the capturing stream", 0, bad);
    let failed: Vec<&str> = inside.iter().filter(|c| c.result.is_err()).map(|c| c.name).collect();
    story.check("calls that failed in the window", Vec::<&str>::new(), failed);
    let data = stage.fill(&input, 2)?;
    let outcome = stage.run("recorded", ScratchPolicy::Pin, |scope| stage.step(scope, &input, 1, &out))?;
    story.check("the graph", (Ran::Replayed, stepped(&data, 1)), (outcome, stage.read(&out)?));
    drop(kept);
    Ok(())
}

fn frees_go_on(story: &mut Story) -> Told {
    let limit = 96 * story.page();
    let stage = Stage::with(story, story.pages().limit(limit), CacheConfig::default())?;
    let other = stage.other_stream()?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let mut seen = Vec::new();
    story.say("while one stream captures, another thread frees, reuses, and runs into the limit");
    for _ in 0..4 {
        stage.run("capturing", ScratchPolicy::Pin, |scope| {
            if scope.capturing() {
                let (pool, other, words) = (&stage.pool, &other, stage.page_words());
                let result = std::thread::scope(|s| {
                    s.spawn(move || -> Result<(bool, bool), PoolError> {
                        pool.driver().bind()?;
                        let first = pool.alloc::<u32>(4096, other)?;
                        let at = first.ptr();
                        drop(first);
                        let reused = pool.alloc::<u32>(4096, other)?.ptr() == at;
                        // Fills the limit with cached pieces; the large request must get them back.
                        drop((0..8).map(|_| pool.alloc::<u32>(8 * words, other)).collect::<Result<Vec<_>, _>>()?);
                        let large = pool.alloc::<u32>(72 * words, other).is_ok();
                        Ok((reused, large))
                    })
                    .join()
                });
                seen.push(result.unwrap_or(Err(PoolError::Config("the thread panicked")))?);
            }
            stage.step(scope, &input, 1, &out)
        })?;
    }
    // A window that misses memory is captured once more.
    let well = !seen.is_empty() && seen.iter().all(|seen| *seen == (true, true));
    story.holds("freed memory reused at once, and the retry served", well);
    Ok(())
}
