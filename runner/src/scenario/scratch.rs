//! Memory that a graph writes on replay, and who else may have it meanwhile.

use std::cell::RefCell;

use evergraph_graphcache::{CacheError, Ran, Scope};
use evergraph_kernels::probe::Words;
use evergraph_pool::driver::Streams;
use evergraph_pool::{DeviceSlice, ScratchPolicy, Use};

use super::stage::{Slice, Stage, count, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, both};

pub(super) static SCENARIOS: &[Scenario] = &[
    both(
        "cubecl-1612-temporary-reissued",
        "a temporary freed in a capture is not handed to a tensor allocated after it",
        temporary,
    ),
    both(
        "aiter-5393-workspace-in-window",
        "a slice made inside a window never outlives it on a temporary's bytes",
        outlives,
    ),
    both(
        "pytorch-three-successive-graphs",
        "three graphs replayed out of order: right apart, refused when an output is shared",
        successive,
    ),
    both(
        "trtllm-16290-shared-scratch",
        "two graphs share an arena, and other memory comes and goes between their replays",
        shared,
    ),
    both(
        "warp-1418-fork-in-capture",
        "a buffer that a forked stream uses is not handed out again before the window ends",
        fork,
    ),
    both(
        "rocm-5325-two-graphs-one-page",
        "graphs of the same size in turns: never two of them on one page",
        two_graphs,
    ),
];

fn temporary(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(1024)?, stage.state(1024)?);
    let at = RefCell::new(None);
    let run = |policy: ScratchPolicy, key: &str| {
        stage.run(key, policy, |scope| {
            scope.declare(&input, Use::Input)?;
            scope.declare(&out, Use::State)?;
            let temporary = scope.alloc::<u32>(1024)?;
            at.replace(Some(temporary.ptr()));
            let stream = scope.stream().handle();
            stage.probe.add(stream, words(&input), 1, words(&temporary))?;
            stage.probe.mix(stream, words(&temporary), words(&input), words(&out))?;
            Ok(())
        })
    };
    story.say("(x + 1) · 3 + x through a temporary; the temporary is dropped inside the capture");
    for _ in 0..3 {
        run(ScratchPolicy::Pin, "pinned")?;
    }
    let temporary = at.take().ok_or("nothing was captured")?;
    let canaries: Vec<Slice> = (0..8).map(|_| stage.scratch(1024)).collect::<Result<_, _>>()?;
    story.holds("none of eight tensors of that size gets its address", canaries.iter().all(|c| c.ptr() != temporary));
    let written: Vec<Vec<u32>> =
        canaries.iter().zip(0..).map(|(c, i)| stage.fill(c, i * 10_000)).collect::<Result<_, _>>()?;
    for value in [3, 14, 15] {
        let data = stage.fill(&input, value)?;
        story.check("the graph", Ran::Replayed, run(ScratchPolicy::Pin, "pinned")?);
        story.check("computes", stepped(&data, 1), stage.read(&out)?);
    }
    let read: Vec<Vec<u32>> = canaries.iter().map(|c| stage.read(c)).collect::<Result<_, _>>()?;
    story.holds("the tensors are intact", read == written);
    story.say("a graph that only tracks its scratch lets others take it, and is stale from then on");
    for _ in 0..3 {
        run(ScratchPolicy::Track, "tracked")?;
    }
    let canaries: Vec<Slice> = (0..64).map(|_| stage.scratch(1024)).collect::<Result<_, _>>()?;
    let written: Vec<Vec<u32>> =
        canaries.iter().zip(0..).map(|(c, i)| stage.fill(c, i * 10_000)).collect::<Result<_, _>>()?;
    for value in [9, 26] {
        let data = stage.fill(&input, value)?;
        run(ScratchPolicy::Track, "tracked")?;
        story.check("the tracked graph computes", stepped(&data, 1), stage.read(&out)?);
    }
    let read: Vec<Vec<u32>> = canaries.iter().map(|c| stage.read(c)).collect::<Result<_, _>>()?;
    story.holds("the new tensors are intact", read == written);
    Ok(())
}

fn outlives(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(1024)?, stage.state(1024)?);
    let kept: RefCell<Vec<DeviceSlice<u32>>> = RefCell::default();
    let run = || {
        stage.run("lazy", ScratchPolicy::Pin, |scope| {
            scope.declare(&input, Use::Input)?;
            scope.declare(&out, Use::State)?;
            let stream = scope.stream().handle();
            let temporary = scope.alloc::<u32>(1024)?;
            stage.probe.add(stream, words(&input), 1, words(&temporary))?;
            stage.probe.mix(stream, words(&temporary), words(&input), words(&out))?;
            drop(temporary);
            // The library keeps this one for ever, and it took the temporary's bytes.
            let workspace = scope.alloc::<u32>(1024)?;
            stage.probe.fill(stream, words(&workspace), 7)?;
            kept.borrow_mut().push(workspace);
            Ok(())
        })
    };
    story.say(
        "a library makes its workspace on the first call, inside the capture, on the bytes of an earlier temporary",
    );
    let mut ran = Vec::new();
    for value in 0..4 {
        let data = stage.fill(&input, value)?;
        ran.push(run());
        if ran.last().is_some_and(Result::is_ok) {
            story.check(format!("run {value} computes"), stepped(&data, 1), stage.read(&out)?);
        }
    }
    let refused = ran.iter().find(|r| r.is_err()).unwrap_or(&Ok(Ran::Captured));
    story.refused("the capture", "outlives the capture window", refused);
    story.holds("nothing is left capturing", !stage.stream.is_capturing());
    story.check("the pool's own books", Ok(()), stage.pool.check());
    Ok(())
}

fn successive(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let input = stage.state(256)?;
    let outs: Vec<Slice> = (0..3).map(|_| stage.state(256)).collect::<Result<_, _>>()?;
    story.say("graph 2 reads what graph 1 wrote; graph 3 is on its own; all three have scratch of one size");
    let run = |i: usize| {
        let from = if i == 1 { &outs[0] } else { &input };
        stage.run(&format!("graph {i}"), ScratchPolicy::Pin, |scope| stage.step(scope, from, i as u32, &outs[i]))
    };
    for i in 0..3 {
        for _ in 0..3 {
            run(i)?;
        }
    }
    for (round, order) in [[0, 1, 2], [0, 2, 1], [2, 0, 1]].into_iter().enumerate() {
        let data = stage.fill(&input, 100 * round as u32)?;
        let outcomes: Vec<Ran> = order.iter().map(|i| run(*i)).collect::<Result<_, _>>()?;
        story.check(format!("order {order:?}"), vec![Ran::Replayed; 3], outcomes);
        let first = stepped(&data, 0);
        story.check("graph 2 sums", stepped(&first, 1), stage.read(&outs[1])?);
        story.check("graph 3 sums", stepped(&data, 2), stage.read(&outs[2])?);
    }
    story
        .say("kept in a shared arena, graph 1's output would be overwritten by graph 3: that is refused when captured");
    let arena = stage.pool.arena(&stage.stream)?;
    let kept: RefCell<Vec<DeviceSlice<u32>>> = RefCell::default();
    let mut refused = None;
    for _ in 0..4 {
        let ran = stage.run("arena", ScratchPolicy::Shared(arena.clone()), |scope| {
            scope.declare(&input, Use::Input)?;
            let out = scope.alloc::<u32>(256)?;
            stage.probe.add(scope.stream().handle(), words(&input), 1, words(&out))?;
            if scope.capturing() {
                kept.borrow_mut().push(out);
            }
            Ok(())
        });
        refused = refused.or(ran.err());
    }
    story.refused("an output kept in the arena", "outlives the capture window", &refused.map_or(Ok(()), Err));
    Ok(())
}

fn shared(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let arena = stage.pool.arena(&stage.stream)?;
    let (input, out) = (stage.state(4096)?, stage.state(4096)?);
    let run = |k: u32, len: usize| {
        stage.run(&format!("shared {k}"), ScratchPolicy::Shared(arena.clone()), |scope| {
            cut_step(&stage, scope, &input, k, len, &out)
        })
    };
    story.say("A and B take their scratch from one arena; B needs more of it than A");
    for _ in 0..3 {
        run(1, 1024)?;
        run(2, 4096)?;
    }
    let mut wrong = 0;
    let mut outcomes = Vec::new();
    story.say("between their replays another subsystem takes and drops memory of all sizes");
    for round in 0..16u32 {
        let others: Vec<Slice> =
            (1..5).map(|i| stage.scratch(i * 512 * (round as usize % 5 + 1))).collect::<Result<_, _>>()?;
        let written: Vec<Vec<u32>> = others.iter().map(|o| stage.fill(o, round)).collect::<Result<_, _>>()?;
        for (k, len) in [(1, 1024), (2, 4096)] {
            let data = stage.fill(&input, round * 10 + k)?;
            outcomes.push(run(k, len)?);
            wrong += usize::from(stage.read(&out)?[..len] != stepped(&data, k)[..len]);
        }
        let read: Vec<Vec<u32>> = others.iter().map(|o| stage.read(o)).collect::<Result<_, _>>()?;
        wrong += usize::from(read != written);
    }
    story.check("wrong results or bytes", 0, wrong);
    story.check("replays", 32, outcomes.iter().filter(|o| **o == Ran::Replayed).count());
    story.holds(
        "the arena is as large as B's scratch, not as both",
        (16 << 10..=(32 << 10)).contains(&arena.bytes()) || arena.bytes() <= 64 << 10,
    );
    Ok(())
}

fn cut_step(
    stage: &Stage,
    scope: &Scope<'_>,
    input: &Slice,
    k: u32,
    len: usize,
    out: &Slice,
) -> Result<(), CacheError> {
    scope.declare(input, Use::Input)?;
    scope.declare(out, Use::State)?;
    let scratch = scope.alloc::<u32>(len)?;
    let stream = scope.stream().handle();
    stage.probe.add(stream, Words::new(input.ptr(), len), k, words(&scratch))?;
    stage.probe.mix(stream, words(&scratch), Words::new(input.ptr(), len), Words::new(out.ptr(), len))?;
    Ok(())
}

fn fork(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let side = stage.other_stream()?;
    let (input, out, other) = (stage.state(1024)?, stage.state(1024)?, stage.state(1024)?);
    let driver = stage.dynamic();
    driver.bind()?;
    let (start, join) = (driver.event_create(false)?, driver.event_create(false)?);
    let addresses: RefCell<Vec<_>> = RefCell::default();
    let run = || {
        stage.run("forked", ScratchPolicy::Pin, |scope| {
            scope.declare(&input, Use::Input)?;
            scope.declare(&out, Use::State)?;
            scope.declare(&other, Use::State)?;
            let (origin, fork) = (scope.stream().handle(), side.handle());
            stage.driver.event_record(start, origin)?;
            stage.driver.stream_wait_event(fork, start)?;
            // Used on the fork, dropped before the join.
            let forked = scope.alloc::<u32>(1024)?;
            forked.record_stream(&side)?;
            stage.probe.add(fork, words(&input), 1, words(&forked))?;
            stage.probe.mix(fork, words(&forked), words(&input), words(&out))?;
            let at = forked.ptr();
            drop(forked);
            let next = scope.alloc::<u32>(1024)?;
            addresses.borrow_mut().push((scope.capturing(), at, next.ptr()));
            stage.probe.fill(origin, words(&next), 0)?;
            stage.probe.add(origin, words(&next), 5, words(&other))?;
            stage.driver.event_record(join, fork)?;
            stage.driver.stream_wait_event(origin, join)?;
            Ok(())
        })
    };
    story.say(
        "inside a capture work is forked to a side stream, which uses a buffer; the buffer is dropped before the join",
    );
    for value in 0..5 {
        let data = stage.fill(&input, value * 7)?;
        run()?;
        story.check(format!("run {value}: the fork's result"), stepped(&data, 1), stage.read(&out)?);
    }
    let reused = addresses.borrow().iter().filter(|(capturing, a, b)| *capturing && a == b).count();
    story.check("buffers reused on the origin before the join", 0, reused);
    driver.bind()?;
    driver.event_destroy(start)?;
    driver.event_destroy(join)?;
    Ok(())
}

fn two_graphs(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(stage.page_words())?, stage.state(stage.page_words())?);
    let at = RefCell::new(Vec::new());
    let run = |k: u32| {
        stage.run(&format!("graph {k}"), ScratchPolicy::Track, |scope| {
            scope.declare(&input, Use::Input)?;
            scope.declare(&out, Use::State)?;
            let scratch = scope.alloc::<u32>(stage.page_words())?;
            if scope.capturing() {
                at.borrow_mut().push(scratch.ptr());
            }
            stage.probe.add(scope.stream().handle(), words(&input), k, words(&scratch))?;
            stage.probe.mix(scope.stream().handle(), words(&scratch), words(&input), words(&out))?;
            Ok(())
        })
    };
    story.say("two graphs with scratch of one page each; a trim takes the pages, the runs put them back");
    for _ in 0..3 {
        run(1)?;
        run(2)?;
    }
    let mut wrong = 0;
    let (result, calls) = stage.calls(|| -> Told {
        for round in 0..4u32 {
            stage.stream.synchronize()?;
            stage.pool.trim_to(0)?;
            for k in [1, 2, 1, 2] {
                let data = stage.fill(&input, round * 100 + k)?;
                run(k)?;
                wrong += usize::from(stage.read(&out)? != stepped(&data, k));
            }
        }
        Ok(())
    });
    result?;
    story.check("wrong results", 0, wrong);
    story.check("faults of the device", None, stage.fault());
    story.check("launches on pages that were gone", 0, stage.account().bad_launches);
    if story.vmm() {
        story.holds("pages went and came", count(&calls, "unmap") >= 4 && count(&calls, "map") >= 4);
        story.check("pages at two ranges at once", 0, stage.account().bad_maps);
    }
    Ok(())
}
