//! The cache itself: bounds, updates, refusals.

use std::cell::Cell;
use std::sync::Arc;

use evergraph_graphcache::{CacheConfig, Ran};
use evergraph_kernels::probe::Probe;
use evergraph_pool::driver::host::HostKernel;
use evergraph_pool::driver::{Driver, Fault, ModuleImage};
use evergraph_pool::{Hold, ScratchPolicy, Use};

use super::stage::{Slice, Stage, count, device, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, both};

pub(super) static SCENARIOS: &[Scenario] = &[
    both(
        "llama.cpp-20315-keys-without-end",
        "2000 distinct keys: graphs and bytes stay within the bounds, the hot one resident",
        endless_keys,
    ),
    both(
        "luminal-467-room-for-one",
        "there is room for one graph and a bit: the old one goes before the new one comes",
        room_for_one,
    ),
    both(
        "sglang-37657-hidden-attribute",
        "an update that the driver believes and that changes nothing",
        hidden_attribute,
    ),
    both(
        "cccl-11041-two-streams",
        "the same work on two streams: two graphs in flight, neither waits for the other",
        two_streams,
    ),
    both(
        "tornadovm-1006-swapped-buffer",
        "a consumer's input is swapped under its graph: seen, counted, right after the repair",
        swapped,
    ),
    both(
        "pytorch-115388-drop-order",
        "code, memory and streams are dropped in any order: execs go first, nothing hangs",
        drop_order,
    ),
];

fn endless_keys(story: &mut Story) -> Told {
    let bound = 8;
    let stage = Stage::with(story, story.pages(), CacheConfig::default().max_entries(bound).warm_ups(0))?;
    let (input, out) = (stage.state(64)?, stage.state(64)?);
    let run = |key: &str, k: u32| stage.run(key, ScratchPolicy::Pin, |scope| stage.step(scope, &input, k, &out));
    run("hot", 1)?;
    story.say(format!("2000 shapes come by, with a cache of {bound} graphs; one of them is asked for again and again"));
    let (mut most, mut hot, mut wrong, mut bytes) = (0, 0, 0, Vec::new());
    for i in 0..2000u32 {
        run(&format!("shape {i}"), i)?;
        hot += u32::from(run("hot", 1)? == Ran::Replayed);
        most = most.max(stage.cache.counters().live());
        if i % 250 == 100 {
            let data = stage.fill(&input, i)?;
            run("hot", 1)?;
            wrong += u32::from(stage.read(&out)? != stepped(&data, 1));
            bytes.push(stage.pool.stats().reserved_bytes.current);
        }
    }
    let counters = stage.cache.counters();
    story.holds("never more graphs than the bound", most <= bound as u64);
    story.check("created − destroyed, by the driver", counters.live(), stage.live().execs as u64);
    story.check("the hot graph replayed", 2000, hot);
    story.check("wrong results", 0, wrong);
    story.holds("the bytes are flat", bytes.windows(2).all(|w| w[0] == w[1]));
    Ok(())
}

fn room_for_one(story: &mut Story) -> Told {
    story.host_only("what an executable graph takes of the device's memory is up to the driver")?;
    // A graph of two nodes takes 40 pages here; the device has 64, memory for one graph and a bit.
    let device = device().memory(64 * story.page()).exec_bytes_per_node(20 * story.page());
    let stage = Stage::host(story, device, story.pages(), CacheConfig::default())?;
    let (out, x) = (stage.state(256)?, stage.scratch(256)?);
    stage.fill(&x, 1)?;
    let run = |x: &Slice| {
        stage.run_bound("large graph", &[x.allocation()], |scope| stage.step_held(scope, x, Hold::Weak, 2, &out))
    };
    for _ in 0..3 {
        run(&x)?;
    }
    story.check("execs on the device", 1, stage.live().execs);
    story.say("its input goes, so it has to be captured again; a device with room for both would not notice the order");
    drop(x);
    stage.pool.trim_to(0)?;
    let x = stage.scratch(256)?;
    let mut outcomes = Vec::new();
    for value in 0..3 {
        let data = stage.fill(&x, value * 9)?;
        outcomes.push(run(&x)?);
        story.check(format!("run {value} computes"), stepped(&data, 2), stage.read(&out)?);
    }
    story.check("in the end it replays", Some(&Ran::Replayed), outcomes.last());
    story.say("and a second graph makes the first go");
    for _ in 0..4 {
        stage.run("another", ScratchPolicy::Pin, |scope| stage.step_held(scope, &x, Hold::Weak, 3, &out))?;
    }
    let data = stage.fill(&x, 70)?;
    let outcome = stage.run("another", ScratchPolicy::Pin, |scope| stage.step_held(scope, &x, Hold::Weak, 3, &out))?;
    story.check("the second replays or runs eagerly, right in any case", stepped(&data, 3), stage.read(&out)?);
    story.holds("as a graph", matches!(outcome, Ran::Replayed));
    story.check("execs on the device", 1, stage.live().execs);
    Ok(())
}

fn no_op(_: &evergraph_pool::driver::host::KernelContext<'_>) -> Result<(), Fault> {
    Ok(())
}

fn hidden_attribute(story: &mut Story) -> Told {
    static CLUSTERED: [HostKernel; 2] = [
        HostKernel { name: "probe_fill", params: &[(8, 8), (4, 4), (4, 4)], hidden_attribute: 0, body: no_op },
        HostKernel {
            name: "probe_fill_clustered",
            params: &[(8, 8), (4, 4), (4, 4)],
            hidden_attribute: 7,
            body: no_op,
        },
    ];
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    driver.bind()?;
    // Attributes that no driver shows can only be made on a host device.
    let mut clustered = None;
    if !story.hardware() {
        let module = driver.module_load(ModuleImage::Host(&CLUSTERED))?;
        let functions = (driver.function(module, "probe_fill")?, driver.function(module, "probe_fill_clustered")?);
        story.check("two functions of one shape have their own handles", false, functions.0 == functions.1);
        clustered = Some(module);
    }
    story.say("one key is captured on one code generation and then on another with functions of the same names");
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let (first, second) = (Arc::new(Probe::load(stage.dynamic())?), Arc::new(Probe::load(stage.dynamic())?));
    let turn = Cell::new(0u32);
    let run = |probe: &Arc<Probe>, bound: &Slice| {
        stage.run_bound("kernel by name", &[bound.allocation()], |scope| {
            turn.set(turn.get() + 1);
            scope.declare(&input, Use::Input)?;
            scope.declare(bound, Use::Scratch)?;
            scope.declare(&out, Use::State)?;
            scope.keep(probe.clone());
            probe.add(scope.stream().handle(), words(&input), 1, words(bound))?;
            probe.mix(scope.stream().handle(), words(bound), words(&input), words(&out))?;
            Ok(())
        })
    };
    let scratch: Vec<Slice> = (0..3).map(|_| stage.scratch(256)).collect::<Result<_, _>>()?;
    for _ in 0..4 {
        run(&first, &scratch[0])?;
    }
    let (ran, calls) = stage.calls(|| run(&first, &scratch[1]));
    story.check(
        "same functions, other memory: the exec is updated",
        (Some(Ran::Updated), 1),
        (ran.ok(), count(&calls, "exec_update")),
    );
    let (ran, calls) = stage.calls(|| run(&second, &scratch[2]));
    story.check("other functions of the same names: instantiated anew, no update tried", (Some(Ran::Recaptured), 0), {
        (ran.ok(), calls.iter().filter(|c| c.name == "exec_update" && c.result == Ok(0)).count())
    });
    let data = stage.fill(&input, 90)?;
    let outcome = run(&second, &scratch[2])?;
    story.check("it computes", (Ran::Replayed, stepped(&data, 1)), (outcome, stage.read(&out)?));
    story.check("faults of the device", None, stage.fault());
    driver.bind()?;
    if let Some(module) = clustered {
        driver.module_unload(module)?;
    }
    stage.cache.clear();
    Ok(())
}

fn two_streams(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let other = stage.other_stream()?;
    let input = stage.state(256)?;
    let outs = [stage.state(256)?, stage.state(256)?];
    let run = |i: usize| {
        let stream = if i == 0 { &stage.stream } else { &other };
        stage.run_on("one key", ScratchPolicy::Pin, stream, |scope| stage.step(scope, &input, 4, &outs[i]))
    };
    let data = stage.fill(&input, 1)?;
    other.synchronize()?;
    // One eager pass more where memory was not ready inside a window.
    for _ in 0..5 {
        run(0)?;
        run(1)?;
    }
    stage.stream.synchronize()?;
    other.synchronize()?;
    story.say("one key, two streams: an exec runs one launch at a time, so each stream has its own");
    story.check("execs", 2, stage.live().execs);
    let gate = stage.hold(&stage.stream)?;
    let outcomes = (run(0)?, run(1)?);
    story.check("both are launched", (Ran::Replayed, Ran::Replayed), outcomes);
    story.say("the second one's stream is waited for; the first one's work still lies in its queue");
    other.synchronize()?;
    let in_flight = stage.in_flight(&stage.stream)?;
    story.holds("the first was still in flight", in_flight);
    drop(gate);
    stage.stream.synchronize()?;
    for out in &outs {
        story.check("the result", stepped(&data, 4), stage.read(out)?);
    }
    Ok(())
}

fn swapped(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, middle, out) = (stage.state(256)?, stage.state(256)?, stage.state(256)?);
    let mut own = stage.state(256)?;
    stage.fill(&own, 1)?;
    let produce = || stage.run("producer", ScratchPolicy::Pin, |scope| stage.step(scope, &input, 1, &middle));
    let consume =
        |from: &Slice| stage.run_bound("consumer", &[from.allocation()], |scope| stage.step(scope, from, 2, &out));
    story.say("a consumer was captured on a buffer of its own; then its input is pointed at the producer's output");
    for _ in 0..4 {
        produce()?;
        consume(&own)?;
    }
    let data = stage.fill(&input, 44)?;
    let before = stage.cache.counters();
    produce()?;
    let outcome = consume(&middle)?;
    let after = stage.cache.counters();
    story.holds("the swap is seen", outcome != Ran::Replayed);
    story.check("and counted once", 1, {
        (after.updates + after.recaptures + after.eager) - (before.updates + before.recaptures + before.eager)
    });
    story.check("the result", stepped(&stepped(&data, 1), 2), stage.read(&out)?);
    let data = stage.fill(&input, 55)?;
    produce()?;
    let outcome = consume(&middle)?;
    story.check("then it replays", (Ran::Replayed, stepped(&stepped(&data, 1), 2)), (outcome, stage.read(&out)?));
    own = stage.state(stage.page_words())?;
    drop(own);
    Ok(())
}

/// Something to drop, by name.
type Part = (&'static str, Box<dyn FnOnce()>);

fn drop_order(story: &mut Story) -> Told {
    for order in 0..6 {
        let stage = Stage::new(story)?;
        let (input, out) = (stage.state(256)?, stage.state(256)?);
        stage.settle("graph", ScratchPolicy::Pin, |scope| stage.step(scope, &input, 1, &out))?;
        let (cache, pool, stream, probe, mut rest) = stage.into_parts();
        let mut parts: Vec<Part> = vec![
            ("slices", Box::new(move || drop((input, out)))),
            ("cache", Box::new(move || drop(cache))),
            ("pool", Box::new(move || drop(pool))),
            ("stream", Box::new(move || drop(stream))),
        ];
        parts.rotate_left(order % 4);
        if order >= 3 {
            parts.reverse();
        }
        let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
        for (_, part) in parts {
            part();
        }
        drop(probe);
        let live = rest.live();
        let left = (live.execs + live.graphs, live.used_bytes, live.streams, live.events);
        story.check(format!("left after {}", names.join(", ")), (0, 0, 0, 0), left);
        story.check("faults of the device", None, rest.driver.fault().map(|f| f.to_string()));
    }
    Ok(())
}
