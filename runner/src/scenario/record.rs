//! What a graph depends on besides plain slices: workspaces, tables, host memory, things that must be kept.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use evergraph_graphcache::{CacheConfig, CacheError, Ran};
use evergraph_pool::{PoolError, Purpose, ScratchPolicy, Use};

use super::stage::{Slice, Stage, count, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, both};
use evergraph_kernels::probe::Words;

pub(super) static SCENARIOS: &[Scenario] = &[
    both(
        "foreign-workspace",
        "a library's workspace moves: its owner says so, and the graphs on it are stale",
        foreign,
    ),
    both(
        "flashinfer-4553-resize-in-ninth-window",
        "a workspace grows by 256 bytes in the ninth capture; eight graphs stay right",
        ninth_window,
    ),
    both(
        "fak-969-library-allocates-in-window",
        "a library allocates inside the window: typed error, and all stays usable",
        lazy_library,
    ),
    both(
        "pytorch-192061-workspace-of-a-thread",
        "the thread that captured ends, and its workspace with it, unless the graph owns it",
        thread_workspace,
    ),
    both("pointer-table", "addresses in device memory, which no scan can see", pointer_table),
    both(
        "undeclared-input",
        "a pointer that nobody declared is found in the arguments: pinned, or refused when strict",
        undeclared,
    ),
    both("candle-3352-host-vector", "a copy from host memory was captured, and the host memory dropped", host_vector),
    both(
        "hip-3887-many-nodes",
        "graphs of 1 to 1000 nodes all see a scalar that was copied in before the launch",
        many_nodes,
    ),
    both("pytorch-84967-seed-in-a-slot", "a seed read from device memory: replays differ, a re-seed reproduces", seed),
    both("zeroed-scratch", "counters that must start as zero are cleared again when their pages come back", zeroed),
];

fn foreign(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    driver.bind()?;
    let old = driver.malloc(stage.page())?;
    let mut range = stage.pool.register_foreign(old, stage.page(), "blas workspace")?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let at = Cell::new(old);
    let run = |range: &evergraph_pool::ForeignRange| {
        stage.run("gemm", ScratchPolicy::Pin, |scope| {
            scope.declare(&input, Use::Input)?;
            scope.declare(&out, Use::State)?;
            scope.declare(range, Use::Scratch)?;
            let (stream, workspace) = (scope.stream().handle(), Words::new(at.get(), 256));
            stage.probe.add(stream, words(&input), 2, workspace)?;
            stage.probe.mix(stream, workspace, words(&input), words(&out))?;
            Ok(())
        })
    };
    story.say("a library has its workspace from the driver; the pool knows it as a foreign range with a token");
    for _ in 0..3 {
        run(&range)?;
    }
    let data = stage.fill(&input, 10)?;
    story.check("the graph replays", Ran::Replayed, run(&range)?);
    story.check("and computes", stepped(&data, 2), stage.read(&out)?);
    story.say("the library wants a larger one: it announces the move, frees the old one, and goes on");
    driver.bind()?;
    let new = driver.malloc(2 * stage.page())?;
    let stale = stage.pool.counters().stale;
    range.move_to(new, 2 * stage.page())?;
    driver.free(old)?;
    at.set(new);
    story.check("graphs that went stale", 1, stage.pool.counters().stale - stale);
    let data = stage.fill(&input, 20)?;
    story.holds("the graph is repaired", run(&range)? != Ran::Replayed);
    story.check("and computes", stepped(&data, 2), stage.read(&out)?);
    story.check("then it replays", Ran::Replayed, {
        run(&range)?;
        run(&range)?
    });
    story.check("faults of the device", None, stage.fault());
    stage.cache.clear();
    drop(range);
    stage.stream.synchronize()?;
    driver.bind()?;
    driver.free(new)?;
    Ok(())
}

fn ninth_window(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    driver.bind()?;
    let bytes = 32 * 1024;
    let old = driver.malloc(bytes)?;
    let range = RefCell::new(stage.pool.register_foreign(old, bytes, "attention workspace")?);
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let resize = Cell::new(false);
    let run = |i: u32| {
        stage.run(&format!("batch {i}"), ScratchPolicy::Pin, |scope| {
            scope.declare(&input, Use::Input)?;
            scope.declare(&out, Use::State)?;
            scope.declare(&*range.borrow(), Use::Scratch)?;
            if resize.get() && scope.capturing() {
                // The careless way: a new workspace right here, in the middle of the captures.
                driver.bind()?;
                let new = driver.malloc(bytes + 256)?;
                driver.free(new)?;
            }
            let workspace = Words::new(old, 256);
            stage.probe.add(scope.stream().handle(), words(&input), i, workspace)?;
            stage.probe.mix(scope.stream().handle(), workspace, words(&input), words(&out))?;
            Ok(())
        })
    };
    for i in 0..8 {
        for _ in 0..3 {
            run(i)?;
        }
    }
    run(8)?;
    run(8)?;
    story.say("eight graphs share a workspace of 32 KiB; in the ninth window the library asks for 256 bytes more");
    resize.set(true);
    let ninth = run(8);
    story.holds(
        "the ninth capture fails with a typed error, or ran eagerly",
        ninth.is_err() || matches!(ninth, Ok(Ran::Eager)),
    );
    story.holds("the stream is usable", !stage.stream.is_capturing() && stage.stream.synchronize().is_ok());
    let mut right = 0;
    for i in 0..8 {
        let data = stage.fill(&input, 10 * i)?;
        let outcome = run(i)?;
        right += u32::from(outcome == Ran::Replayed && stage.read(&out)? == stepped(&data, i));
    }
    story.check("of the others, replays with right results", 8, right);
    resize.set(false);
    story.holds(
        "the ninth succeeds when nobody resizes",
        (0..4).any(|_| matches!(run(8), Ok(Ran::Captured | Ran::Recaptured))),
    );
    stage.cache.clear();
    drop(range);
    stage.stream.synchronize()?;
    driver.bind()?;
    driver.free(old)?;
    Ok(())
}

fn lazy_library(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let workspace = Cell::new(None);
    let library = |scope: &evergraph_graphcache::Scope<'_>, lazy: bool| -> Result<(), CacheError> {
        if lazy && scope.capturing() {
            driver.bind()?;
            workspace.set(Some(driver.malloc(4096)?));
        }
        stage.step(scope, &input, 3, &out)
    };
    story.say("the first product of a library inside the window makes it allocate its workspace there");
    for _ in 0..2 {
        stage.run("lazy", ScratchPolicy::Pin, |scope| library(scope, true))?;
    }
    let (ran, calls) = stage.calls(|| stage.run("lazy", ScratchPolicy::Pin, |scope| library(scope, true)));
    story.holds("the capture fails typed, or the run was made eagerly", ran.is_err() || matches!(ran, Ok(Ran::Eager)));
    story.holds("the capture was ended", count(&calls, "begin_capture") <= count(&calls, "end_capture"));
    story.check("graphs instantiated", 0, count(&calls, "instantiate"));
    story.holds("the stream is usable", !stage.stream.is_capturing() && stage.stream.synchronize().is_ok());
    story.holds("the pool is usable", stage.scratch(256).is_ok());
    story.say("with the workspace made before, the next capture succeeds");
    let mut outcomes = Vec::new();
    for _ in 0..5 {
        outcomes.push(stage.run("lazy", ScratchPolicy::Pin, |scope| library(scope, false))?);
    }
    let data = stage.fill(&input, 66)?;
    let last = stage.run("lazy", ScratchPolicy::Pin, |scope| library(scope, false))?;
    story.check("it replays", (Ran::Replayed, stepped(&data, 3)), (last, stage.read(&out)?));
    if let Some(workspace) = workspace.get() {
        driver.bind()?;
        driver.free(workspace)?;
    }
    Ok(())
}

/// Frees its memory when the last owner lets go.
struct Workspace {
    slice: Slice,
    gone: Arc<std::sync::atomic::AtomicBool>,
}

impl Drop for Workspace {
    fn drop(&mut self) {
        self.gone.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

fn thread_workspace(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    let gone = Arc::new(std::sync::atomic::AtomicBool::new(false));
    story.say("a short-lived thread captures a graph with a workspace of its own, hands it to the graph, and ends");
    let stage_ref = &stage;
    let (input_ref, out_ref, gone_ref) = (&input, &out, &gone);
    let captured = std::thread::scope(|scope| {
        scope
            .spawn(move || -> Result<Ran, String> {
                let slice = stage_ref.scratch(256).map_err(|e| e.to_string())?;
                let workspace = Arc::new(Workspace { slice, gone: Arc::clone(gone_ref) });
                let mut last = Ran::Eager;
                for _ in 0..3 {
                    last = stage_ref
                        .run("worker", ScratchPolicy::Pin, |scope| {
                            scope.declare(input_ref, Use::Input)?;
                            scope.declare(out_ref, Use::State)?;
                            scope.declare(&workspace.slice, Use::Scratch)?;
                            scope.keep(workspace.clone());
                            let stream = scope.stream().handle();
                            stage_ref.probe.add(stream, words(input_ref), 4, words(&workspace.slice))?;
                            stage_ref.probe.mix(stream, words(&workspace.slice), words(input_ref), words(out_ref))?;
                            Ok(())
                        })
                        .map_err(|e| e.to_string())?;
                }
                Ok(last)
            })
            .join()
            .unwrap_or_else(|_| Err("the thread panicked".to_owned()))
    });
    story.check("the thread's last run", Ok(Ran::Captured), captured);
    story.holds("the graph keeps the workspace", !gone.load(std::sync::atomic::Ordering::SeqCst));
    let others: Vec<Slice> = (0..8).map(|_| stage.scratch(256)).collect::<Result<_, _>>()?;
    let data = stage.fill(&input, 8)?;
    let outcome =
        stage.run("worker", ScratchPolicy::Pin, |_| Err(PoolError::Config("not called for a good graph").into()))?;
    story.check("a replay from another thread", (Ran::Replayed, stepped(&data, 4)), (outcome, stage.read(&out)?));
    drop(others);
    stage.evict("worker");
    stage.stream.synchronize()?;
    story.holds("with the graph the workspace goes", gone.load(std::sync::atomic::Ordering::SeqCst));
    Ok(())
}

fn pointer_table(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let out = stage.state(256)?;
    let experts: Vec<Slice> = (0..4).map(|_| stage.scratch(256)).collect::<Result<_, _>>()?;
    for (expert, i) in experts.iter().zip(1..) {
        stage.fill(expert, i * 100)?;
    }
    let sum = |values: &[u32]| -> Vec<u32> { (0..256).map(|i| values.iter().map(|v| v + i).sum()).collect() };
    story.say("four experts' addresses lie in a table in device memory; the kernel loads them from there");
    let members: Vec<(&dyn evergraph_pool::Tracked, Use)> =
        experts.iter().map(|e| (e as &dyn evergraph_pool::Tracked, Use::Input)).collect();
    let table = stage.pool.pointer_table(&members, Purpose::State, &stage.stream)?;
    let run = |table: &evergraph_pool::PointerTable| {
        stage.run("experts", ScratchPolicy::Pin, |scope| {
            scope.declare(&out, Use::State)?;
            scope.declare_table(table)?;
            stage.probe.gather(scope.stream().handle(), table.slice().ptr(), 4, words(&out))?;
            Ok(())
        })
    };
    for _ in 0..3 {
        run(&table)?;
    }
    story.check("the graph replays", (Ran::Replayed, sum(&[100, 200, 300, 400])), (run(&table)?, stage.read(&out)?));
    stage.fill(&experts[2], 3000)?;
    story.check(
        "with an expert's new words",
        (Ran::Replayed, sum(&[100, 200, 3000, 400])),
        (run(&table)?, stage.read(&out)?),
    );
    story.say(
        "two experts are dropped; others take memory. The table still holds their addresses, and so does the graph",
    );
    let mut experts = experts;
    drop(experts.drain(1..3));
    let takers: Vec<Slice> = (0..8).map(|_| stage.scratch(256)).collect::<Result<_, _>>()?;
    for (taker, i) in takers.iter().zip(0..) {
        stage.fill(taker, 1_000_000 + i)?;
    }
    let held = run(&table);
    match held {
        Ok(Ran::Replayed) => {
            story.check(
                "the graph holds its members: the dropped experts' words are intact",
                sum(&[100, 200, 3000, 400]),
                stage.read(&out)?,
            );
        }
        Ok(outcome) => story.holds(format!("the graph was not replayed ({outcome:?})"), true),
        Err(error) => story.refused("the stale table is refused", "stale", &Err::<(), _>(error)),
    }
    story.say("a new table with live experts");
    let members: Vec<(&dyn evergraph_pool::Tracked, Use)> = [&experts[0], &takers[0], &takers[1], &experts[1]]
        .map(|e| (e as &dyn evergraph_pool::Tracked, Use::Input))
        .to_vec();
    let table = stage.pool.pointer_table(&members, Purpose::State, &stage.stream)?;
    stage.evict("experts");
    for _ in 0..3 {
        run(&table)?;
    }
    let want = sum(&[100, 1_000_000, 1_000_001, 400]);
    story.check("replays", (Ran::Replayed, want), (run(&table)?, stage.read(&out)?));
    Ok(())
}

fn undeclared(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let out = stage.state(256)?;
    let hidden = stage.scratch(256)?;
    let data = stage.fill(&hidden, 5)?;
    story.say("the closure forgets to declare its input; the scan of the captured nodes finds the pointer");
    let run = |stage: &Stage, hidden: &Slice, out: &Slice| {
        stage.run("forgetful", ScratchPolicy::Pin, |scope| {
            scope.declare(out, Use::State)?;
            stage.probe.add(scope.stream().handle(), words(hidden), 1, words(out))?;
            Ok(())
        })
    };
    for _ in 0..3 {
        run(&stage, &hidden, &out)?;
    }
    drop(hidden);
    let takers: Vec<Slice> = (0..8).map(|_| stage.scratch(256)).collect::<Result<_, _>>()?;
    for taker in &takers {
        stage.fill(taker, 999)?;
    }
    let plus_one: Vec<u32> = data.iter().map(|x| x + 1).collect();
    let outcome =
        stage.run("forgetful", ScratchPolicy::Pin, |_| Err(PoolError::Config("not called for a good graph").into()))?;
    story.check(
        "not strict: the memory was pinned for the graph",
        (Ran::Replayed, plus_one),
        (outcome, stage.read(&out)?),
    );
    story.say("strict: the same capture is an error that names the allocation");
    let strict = Stage::with(story, story.pages(), CacheConfig::default().strict(true))?;
    let (out, hidden) = (strict.state(256)?, strict.scratch(256)?);
    let ran: Vec<_> = (0..3).map(|_| run(&strict, &hidden, &out)).collect();
    story.refused("strict", "declare", ran.iter().find(|r| r.is_err()).unwrap_or(&Ok(Ran::Captured)));
    Ok(())
}

fn host_vector(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (staged, out) = (stage.state(256)?, stage.state(256)?);
    let host = stage.pool.host_buffer::<u32>(256)?;
    let shape: Vec<u32> = (0..256).collect();
    host.write(&shape)?;
    story.say("a shape vector is copied to the device inside the capture; then every handle to it is dropped");
    let run = |host: Option<&evergraph_pool::HostBuffer<u32>>| {
        stage.run("shapes", ScratchPolicy::Pin, |scope| {
            let host = host.ok_or(PoolError::Config("not called for a good graph"))?;
            scope.declare(&staged, Use::Scratch)?;
            scope.declare(&out, Use::State)?;
            scope.declare(host, Use::Input)?;
            scope.stream().copy_from_host(host, &staged)?;
            stage.probe.add(scope.stream().handle(), words(&staged), 1, words(&out))?;
            Ok(())
        })
    };
    for _ in 0..3 {
        run(Some(&host))?;
    }
    let next: Vec<u32> = shape.iter().map(|x| x * 2).collect();
    host.write(&next)?;
    let want: Vec<u32> = next.iter().map(|x| x + 1).collect();
    story.check(
        "a replay reads the host's new words",
        (Ran::Replayed, want.clone()),
        (run(Some(&host))?, stage.read(&out)?),
    );
    drop(host);
    let other = stage.pool.host_buffer::<u32>(256)?;
    other.write(&[9; 256])?;
    stage.fill(&staged, 0)?;
    story.check(
        "after the drop the graph still owns what it copies",
        (Ran::Replayed, want),
        (run(None)?, stage.read(&out)?),
    );
    stage.cache.clear();
    drop(other);
    stage.stream.synchronize()?;
    story.check("host buffers left with the driver", 0, stage.live().host);
    Ok(())
}

fn many_nodes(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (scalar, out) = (stage.state(1)?, stage.state(1)?);
    story.say("all nodes of a graph read one scalar, which a copy before the launch changes");
    for nodes in [1u32, 50, 199, 200, 201, 1000] {
        let run = || {
            stage.run(&format!("{nodes} nodes"), ScratchPolicy::Pin, |scope| {
                scope.declare(&scalar, Use::Input)?;
                scope.declare(&out, Use::State)?;
                for node in 0..nodes {
                    stage.probe.add(scope.stream().handle(), words(&scalar), node, words(&out))?;
                }
                Ok(())
            })
        };
        for _ in 0..3 {
            run()?;
        }
        let mut stale = 0;
        for value in 0..20u32 {
            stage.stream.upload(&[value * 17], &scalar)?;
            let outcome = run()?;
            stale += u32::from(outcome != Ran::Replayed || stage.read(&out)? != [value * 17 + nodes - 1]);
        }
        story.check(format!("{nodes} nodes: old values seen"), 0, stale);
    }
    Ok(())
}

fn seed(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let one = stage.state(1)?;
    stage.stream.upload(&[1u32], &one)?;
    let slots: Vec<(Slice, Slice)> =
        (0..2).map(|_| Ok((stage.state(1)?, stage.state(1)?))).collect::<Result<_, PoolError>>()?;
    let sample = |i: usize| -> Result<(Ran, u32), Box<dyn std::error::Error>> {
        let (state, out) = &slots[i];
        let outcome = stage.run(&format!("sampler {i}"), ScratchPolicy::Pin, |scope| {
            scope.declare(&one, Use::Input)?;
            scope.declare(state, Use::State)?;
            scope.declare(out, Use::State)?;
            let stream = scope.stream().handle();
            // A counter-based generator: the offset advances on the device.
            stage.probe.accumulate(stream, words(&one), words(state))?;
            stage.probe.mix(stream, words(state), words(state), words(out))?;
            Ok(())
        })?;
        Ok((outcome, stage.read(out)?[0]))
    };
    story.say("two graphs draw from generators of their own, whose state lies in device memory, not in the capture");
    for (i, (state, _)) in slots.iter().enumerate() {
        stage.stream.upload(&[0u32], state)?;
        for _ in 0..3 {
            sample(i)?;
        }
    }
    let reseed = |i: usize, seed: u32| stage.stream.upload(&[seed], &slots[i].0);
    reseed(0, 1000)?;
    let first: Vec<_> = (0..3).map(|_| sample(0)).collect::<Result<_, _>>()?;
    story.check("draws", vec![(Ran::Replayed, 4004), (Ran::Replayed, 4008), (Ran::Replayed, 4012)], first.clone());
    reseed(0, 1000)?;
    reseed(1, 5000)?;
    let mut again = Vec::new();
    for _ in 0..3 {
        again.push(sample(0)?);
        sample(1)?;
    }
    story.check("the same seed, with another graph in between", first, again);
    Ok(())
}

fn zeroed(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let out = stage.state(2)?;
    let run = || {
        stage.run("split-k", ScratchPolicy::Track, |scope| {
            scope.declare(&out, Use::State)?;
            let counters = scope.alloc_zeroed_scratch::<u32>(2 * stage.page_words())?;
            let stream = scope.stream().handle();
            // Right only on zeroed counters, and it leaves them as it found them.
            stage.probe.count(stream, words(&counters))?;
            stage.probe.add(stream, words(&counters), 0, words(&out))?;
            scope.stream().fill(&counters, 0)?;
            Ok(())
        })
    };
    story.say("a split product counts its parts in zeroed scratch");
    for _ in 0..4 {
        run()?;
    }
    story.check("counted", vec![1, 0], stage.read(&out)?);
    story.say("the scratch goes back to the driver, and the pages that come are full of other people's bytes");
    let other = stage.scratch(64 * 1024)?;
    stage.fill(&other, 77)?;
    drop(other);
    stage.stream.synchronize()?;
    stage.pool.trim_to(0)?;
    let outcome = run()?;
    story.holds("the graph is repaired", outcome != Ran::Replayed);
    story.check("counted", vec![1, 0], stage.read(&out)?);
    story.check("and again", (Ran::Replayed, vec![1, 0]), (run()?, stage.read(&out)?));
    Ok(())
}
