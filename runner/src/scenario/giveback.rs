//! Memory that leaves the pool: exactly the graphs that used it go stale, and nobody else pays.

use evergraph_graphcache::{CacheConfig, Ran};
use evergraph_pool::driver::Driver;
use evergraph_pool::{Arena, Hold, PoolError, ScratchPolicy};

use super::stage::{Slice, Stage, count, is_out_of_memory, names, stepped};
use super::story::{Story, Told};
use super::{Scenario, both};
use crate::cli::format_size;

pub(super) static SCENARIOS: &[Scenario] = &[
    both("flush-74", "74 graphs, 3 of which use the flushed block: exactly those go stale", flush_74),
    both(
        "ggml-26738-flush-under-graph",
        "an allocation fails, cached blocks go back, and a graph had used them",
        ggml_26738,
    ),
    both(
        "slot-table-full",
        "a full slot table gives a slab back at once: the path that was never tested",
        slot_table_full,
    ),
    both("trim", "a trim takes what graphs hold weakly, and only those graphs notice", trim),
    both(
        "ggml-22075-trim-one-of-three",
        "three graphs, one on trimmed memory: the other two replay",
        trim_one_of_three,
    ),
    both("pool-drop", "the pool goes while its graphs live: none of them launches again", pool_drop),
    both(
        "pytorch-159594-out-of-memory-in-window",
        "a miss in a capture stays a miss: no free is tried in there",
        miss_frees_nothing,
    ),
];

/// A graph of its own input and output, with scratch from an arena: evicting it would gain nothing.
struct Bystander {
    arena: Arena,
    key: String,
    input: Slice,
    out: Slice,
    k: u32,
}

impl Bystander {
    fn new(stage: &Stage, arena: &Arena, i: u32) -> Result<Self, PoolError> {
        let arena = arena.clone();
        Ok(Self { arena, key: format!("bystander {i}"), input: stage.state(256)?, out: stage.state(256)?, k: i })
    }

    /// New input, one run; the outcome, the driver calls of the run alone, and whether the result was right.
    fn run(&self, stage: &Stage, value: u32) -> Result<(Ran, Vec<&'static str>, bool), Box<dyn std::error::Error>> {
        let data = stage.fill(&self.input, value)?;
        let (ran, calls) = stage.calls(|| {
            stage.run(&self.key, ScratchPolicy::Shared(self.arena.clone()), |scope| {
                stage.step(scope, &self.input, self.k, &self.out)
            })
        });
        let right = stage.read(&self.out)? == stepped(&data, self.k);
        Ok((ran?, names(&calls), right))
    }

    fn settle(&self, stage: &Stage) -> Result<Ran, Box<dyn std::error::Error>> {
        Ok(stage.settle(&self.key, ScratchPolicy::Shared(self.arena.clone()), |scope| {
            stage.step(scope, &self.input, self.k, &self.out)
        })?)
    }
}

fn flush_74(story: &mut Story) -> Told {
    let limit = 80 * story.page();
    let stage = Stage::with(story, story.pages().limit(limit), CacheConfig::default())?;
    let arena = stage.pool.arena(&stage.stream)?;
    story.say("a decode step was cut into 74 graphs; three of them read a block X of 8 pages");
    let bystanders: Vec<Bystander> = (0..71).map(|i| Bystander::new(&stage, &arena, i)).collect::<Result<_, _>>()?;
    let outs: Vec<Slice> = (0..3).map(|_| stage.state(8 * stage.page_words())).collect::<Result<_, _>>()?;
    let x = stage.scratch(8 * stage.page_words())?;
    let run_user = |i: usize, x: &Slice| {
        let policy = ScratchPolicy::Shared(arena.clone());
        stage.run_bound_as(&format!("user {i}"), &[x.allocation()], policy, |scope| {
            stage.step_held(scope, x, Hold::Weak, i as u32, &outs[i])
        })
    };
    for bystander in &bystanders {
        bystander.settle(&stage)?;
    }
    let data = stage.fill(&x, 1)?;
    for _ in 0..3 {
        for i in 0..3 {
            run_user(i, &x)?;
        }
    }
    let before: Vec<Ran> = (0..3).map(|i| run_user(i, &x)).collect::<Result<_, _>>()?;
    story.check("the three users of X replay", vec![Ran::Replayed; 3], before);
    story.check("and compute", stepped(&data, 2), stage.read(&outs[2])?);

    story.say("X is dropped: it is cached in the pool, and the three graphs still know its address");
    stage.stream.synchronize()?;
    stage.pool.trim_to(0)?;
    drop(x);
    stage.stream.synchronize()?;
    let free = limit - stage.pool.stats().reserved_bytes.current as usize;
    let stale_before = stage.pool.counters().stale;
    story.say("a larger request does not fit beside it: cached memory has to go back to the driver");
    let (large, calls) = stage.calls(|| stage.pool.alloc::<u8>(free + 4 * stage.page(), &stage.stream));
    let large = large?;
    story.holds("memory went back", count(&calls, "free") + count(&calls, "unmap") > 0);
    story.check("graphs that went stale, by the pool's count", 3, stage.pool.counters().stale - stale_before);

    story.say("all 71 others replay: the launch is their only driver call");
    let mut ran = Vec::new();
    for (i, bystander) in bystanders.iter().enumerate() {
        ran.push(bystander.run(&stage, 1000 + i as u32)?);
    }
    story.check("replayed", 71, ran.iter().filter(|(outcome, ..)| *outcome == Ran::Replayed).count());
    story.check(
        "with the launch as their only call",
        71,
        ran.iter().filter(|(_, calls, _)| *calls == ["launch"]).count(),
    );
    story.check("and right results for new inputs", 71, ran.iter().filter(|(.., right)| *right).count());

    story.say("the three are asked for again, with a new X: none launches the old graph, all are right");
    drop(large);
    let x = stage.scratch(8 * stage.page_words())?;
    let data = stage.fill(&x, 77)?;
    for (i, out) in outs.iter().enumerate() {
        let outcome = run_user(i, &x)?;
        story.holds(format!("user {i} is repaired, not replayed"), outcome != Ran::Replayed);
        story.check(format!("user {i} computes"), stepped(&data, i as u32), stage.read(out)?);
    }
    story.check("faults of the device", None, stage.fault());
    Ok(())
}

fn ggml_26738(story: &mut Story) -> Told {
    let limit = 128 * story.page();
    let stage = Stage::with(story, story.pages().limit(limit), CacheConfig::default())?;
    let size = |pages: usize| format_size((pages * stage.page()) as u64);
    story.say(format!(
        "a card of {}; a graph writes through {} of scratch, freed to the pool when the capture ended",
        size(128),
        size(48)
    ));
    let (input, out) = (stage.state(48 * stage.page_words())?, stage.state(256)?);
    let mut data = stage.fill(&input, 5)?;
    let run = |n: u32| {
        stage.run("step", ScratchPolicy::Track, |scope| {
            scope.declare(&input, evergraph_pool::Use::Input)?;
            scope.declare(&out, evergraph_pool::Use::State)?;
            let scratch = scope.alloc::<u32>(input.len())?;
            let (stream, short) = (scope.stream().handle(), super::stage::words(&out));
            stage.probe.add(stream, super::stage::words(&input), 9, super::stage::words(&scratch))?;
            let head = evergraph_kernels::probe::Words::new(scratch.ptr(), out.len());
            stage.probe.mix(stream, head, super::stage::words(&input), short)?;
            let _ = n;
            Ok(())
        })
    };
    for n in 0..3 {
        run(n)?;
    }
    story.check("the graph replays", Ran::Replayed, run(3)?);
    story.say(format!("a request of {} can only be served by taking the {} back", size(72), size(48)));
    stage.stream.synchronize()?;
    let (large, calls) = stage.calls(|| stage.pool.alloc::<u8>(72 * stage.page(), &stage.stream));
    let large = large?;
    story.holds("memory went back, or was taken over", count(&calls, "free") + count(&calls, "unmap") > 0);
    data = {
        data.clear();
        stage.fill(&input, 500)?
    };
    story
        .say(format!("with {} taken there is no room for the scratch: the run says so instead of launching", size(72)));
    let (short, calls) = stage.calls(|| run(4));
    story.check("launches of the stale graph", 0, count(&calls, "launch"));
    story.holds(
        "the run ends in a typed error, or right",
        short.is_err() || stage.read(&out)? == stepped(&data[..256], 9),
    );
    drop(large);
    let outcome = run(5)?;
    story.holds("with the memory back the graph is repaired", outcome != Ran::Replayed);
    story.check("and computes", stepped(&data[..256], 9), stage.read(&out)?);
    story.check("faults of the device", None, stage.fault());
    Ok(())
}

fn slot_table_full(story: &mut Story) -> Told {
    let slots = 8;
    let stage = Stage::with(story, story.pages().slots(slots), CacheConfig::default())?;
    let arena = stage.pool.arena(&stage.stream)?;
    let bystander = Bystander::new(&stage, &arena, 3)?;
    bystander.settle(&stage)?;
    story
        .say(format!("a table of {slots} slabs; one graph reads a slice W that was dropped since: its slab is cached"));
    let (w, out) = (stage.scratch(stage.page_words())?, stage.state(256)?);
    let data = stage.fill(&w, 40)?;
    let run = |w: &Slice| {
        let policy = ScratchPolicy::Shared(arena.clone());
        stage.run_bound_as("reader", &[w.allocation()], policy, |scope| stage.step_held(scope, w, Hold::Weak, 1, &out))
    };
    for _ in 0..3 {
        run(&w)?;
    }
    story.check("the reader replays", Ran::Replayed, run(&w)?);
    story.check("and computes", stepped(&data[..256], 1), stage.read(&out)?);
    drop(w);
    stage.stream.synchronize()?;
    story.say("more memory is taken, slab by slab, none of it fitting into the cached one");
    let stale = stage.pool.counters().stale;
    let (held, calls) = stage.calls(|| -> Result<Vec<_>, PoolError> {
        (0..slots).map(|_| stage.pool.alloc::<u8>(stage.page() + 4096, &stage.stream)).collect()
    });
    if story.vmm() {
        story.say("the pool of pages has no table: nothing has to go back, and the graph stays good");
        story.holds("every request is served", held.is_ok());
        story.check("pages given back", 0, count(&calls, "unmap"));
        story.check("graphs that went stale", 0, stage.pool.counters().stale - stale);
    } else {
        story.say("the table fills up: the cached slab goes back to the driver at once, out-of-memory or not");
        story.check("slabs given back", 1, count(&calls, "free"));
        story.check("graphs that went stale", 1, stage.pool.counters().stale - stale);
        story.say("when every slot holds live memory, the answer is a typed error");
        story.holds("out of memory, typed", held.is_err_and(|e| e.is_out_of_memory()));
    }
    let (outcome, calls, right) = bystander.run(&stage, 70)?;
    story.check("the graph that did not use it", (Ran::Replayed, vec!["launch"], true), (outcome, calls, right));
    let w = stage.scratch(stage.page_words())?;
    let data = stage.fill(&w, 90)?;
    let outcome =
        stage.run("reader again", ScratchPolicy::Pin, |scope| stage.step_held(scope, &w, Hold::Weak, 1, &out))?;
    story.check(
        "a reader of a new W is captured anew",
        (Ran::WarmUp, stepped(&data[..256], 1)),
        (outcome, stage.read(&out)?),
    );
    Ok(())
}

fn trim(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let arena = stage.pool.arena(&stage.stream)?;
    let (input, out) = (stage.state(2 * stage.page_words())?, stage.state(2 * stage.page_words())?);
    let bystander = Bystander::new(&stage, &arena, 8)?;
    bystander.settle(&stage)?;
    let run =
        |k: u32| stage.run("tracked", ScratchPolicy::Track, |scope| stage.step(scope, &input, 2, &out)).map(|o| (o, k));
    stage.fill(&input, 3)?;
    for k in 0..4 {
        run(k)?;
    }
    story.say("everything is quiet: a trim to what is alive gives cached memory back, scratch of idle graphs included");
    let reserved = stage.pool.stats().reserved_bytes.current;
    let (trimmed, calls) = stage.calls(|| stage.pool.trim_to(0));
    let trimmed = trimmed?;
    story.holds("bytes went back", trimmed > 0);
    story.check("bytes held", reserved - trimmed as u64, stage.pool.stats().reserved_bytes.current);
    story.check("what went back, by the driver's log", trimmed as u64, {
        let unmapped = calls.iter().filter(|c| c.name == "unmap").filter_map(|c| c.arg("bytes")).sum::<u64>();
        if story.vmm() { unmapped } else { reserved - stage.pool.stats().reserved_bytes.current }
    });
    let data = stage.fill(&input, 33)?;
    let (ran, calls) = stage.calls(|| run(9));
    let (outcome, _) = ran?;
    if story.vmm() {
        story.say("addresses are stable: pages come back under the same scratch, and nothing is captured again");
        story.check("the tracked graph", Ran::Remapped, outcome);
        story.check("captures", 0, count(&calls, "begin_capture"));
    } else {
        story.say("the slab and its addresses are gone: the graph is captured again");
        story.holds("the tracked graph is repaired", matches!(outcome, Ran::Updated | Ran::Recaptured | Ran::Eager));
    }
    story.check("and computes", stepped(&data, 2), stage.read(&out)?);
    let (outcome, calls, right) = bystander.run(&stage, 12)?;
    story.check("the graph with an arena", (Ran::Replayed, vec!["launch"], true), (outcome, calls, right));
    Ok(())
}

fn trim_one_of_three(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let arena = stage.pool.arena(&stage.stream)?;
    let two = [Bystander::new(&stage, &arena, 1)?, Bystander::new(&stage, &arena, 2)?];
    for one in &two {
        one.settle(&stage)?;
    }
    let (x, out) = (stage.scratch(4 * stage.page_words())?, stage.state(256)?);
    stage.fill(&x, 1)?;
    let third =
        |x: &Slice| stage.run_bound("third", &[x.allocation()], |scope| stage.step_held(scope, x, Hold::Weak, 3, &out));
    for _ in 0..3 {
        third(&x)?;
    }
    story.say(
        "the third graph's input is dropped and the pool trimmed; users of llama.cpp had to clear all graphs by hand",
    );
    drop(x);
    let stale = stage.pool.counters().stale;
    stage.pool.trim_to(0)?;
    story.check("graphs that went stale", 1, stage.pool.counters().stale - stale);
    for (i, one) in two.iter().enumerate() {
        let (outcome, calls, right) = one.run(&stage, 50 + i as u32)?;
        story.check(format!("graph {}", i + 1), (Ran::Replayed, vec!["launch"], true), (outcome, calls, right));
    }
    let x = stage.scratch(4 * stage.page_words())?;
    let data = stage.fill(&x, 60)?;
    let outcome = third(&x)?;
    story.holds("the third is repaired", outcome != Ran::Replayed);
    story.check("and computes", stepped(&data[..256], 3), stage.read(&out)?);
    Ok(())
}

fn pool_drop(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let pool = evergraph_pool::Pool::new(stage.dynamic(), story.pages())?;
    let (input, out) = (pool.alloc::<u32>(256, &stage.stream)?, stage.state(256)?);
    stage.fill(&input, 1)?;
    story.say("a second pool lends its input to a graph, and its owner lets go of both");
    let run = |input: &Slice| stage.run_with("lent", &pool, |scope| stage.step_held(scope, input, Hold::Weak, 6, &out));
    for _ in 0..3 {
        run(&input)?;
    }
    story.check("the graph replays", Ran::Replayed, run(&input)?);
    drop(input);
    let pools = pool.clone();
    drop(pools);
    drop(pool);
    let own = stage.state(256)?;
    let data = stage.fill(&own, 9)?;
    let (ran, calls) = stage.calls(|| stage.run("lent", ScratchPolicy::Pin, |scope| stage.step(scope, &own, 6, &out)));
    story.holds("the old graph is not launched: the run repairs it or refuses", !matches!(ran, Ok(Ran::Replayed)));
    let _ = calls;
    if ran.is_ok() {
        story.check("and computes", stepped(&data, 6), stage.read(&out)?);
    }
    story.say("in the end everything goes: cache, pool, device");
    drop((own, out));
    let (cache, pool, stream, probe, mut rest) = stage.into_parts();
    drop((cache, pool, stream, probe));
    let live = rest.live();
    story.check("device memory left", 0, live.used_bytes);
    story.check(
        "mappings, mallocs, graphs, events left",
        (0, 0, 0, 0),
        (live.mappings, live.mallocs, live.graphs + live.execs, live.events),
    );
    story.check("faults of the device", None, rest.driver.fault().map(|f| f.to_string()));
    Ok(())
}

fn miss_frees_nothing(story: &mut Story) -> Told {
    let limit = 32 * story.page();
    let stage = Stage::with(story, story.pages().limit(limit), CacheConfig::default())?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    story.say("free memory is cached in pieces; inside a capture a piece is asked for that can not fit, after warm-ups that were small");
    drop((0..6).map(|_| stage.scratch(4 * stage.page_words())).collect::<Result<Vec<_>, _>>()?);
    let mut n = 0;
    let mut run = || {
        n += 1;
        let large = n == 3;
        stage.run("grows", ScratchPolicy::Pin, |scope| {
            if large && scope.capturing() {
                drop(scope.alloc::<u32>(40 * stage.page_words())?);
            }
            stage.step(scope, &input, 4, &out)
        })
    };
    let data = stage.fill(&input, 2)?;
    run()?;
    run()?;
    let (ran, calls) = stage.calls(&mut run);
    let from = calls.iter().position(|c| c.name == "begin_capture").unwrap_or(0);
    let to = calls.iter().position(|c| c.name == "end_capture").unwrap_or(calls.len());
    let inside = &calls[from..to];
    let forbidden = ["free", "unmap", "malloc", "create", "map", "event_query", "stream_synchronize"];
    story.check(
        "forbidden calls inside the window",
        0,
        forbidden.iter().map(|name| count(inside, name)).sum::<usize>(),
    );
    story.holds("the capture was ended", count(&calls, "begin_capture") == count(&calls, "end_capture"));
    story.holds("the run says so in a typed error, or ran eagerly", ran.is_err() || matches!(ran, Ok(Ran::Eager)));
    story.holds("outside a window the same request is an ordinary one", {
        stage.pool.alloc::<u32>(4 * stage.page_words(), &stage.stream).is_ok()
    });
    let fits = stage.pool.alloc::<u32>(40 * stage.page_words(), &stage.stream);
    story.holds("one that can never fit is out of memory", is_out_of_memory(&fits));
    story.holds("the next capture succeeds", (0..4).any(|_| matches!(run(), Ok(Ran::Captured | Ran::Recaptured))));
    let outcome = run()?;
    story.check("and replays", (Ran::Replayed, stepped(&data, 4)), (outcome, stage.read(&out)?));
    Ok(())
}
