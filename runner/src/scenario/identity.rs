//! Addresses are not identities: the same one comes back for somebody else.

use evergraph_graphcache::{Ran, Scope};
use evergraph_kernels::probe::Words;
use evergraph_pool::{Hold, Pool, PoolError, PoolMode, ScratchPolicy, Use};

use super::stage::{Slice, Stage, stepped};
use super::story::{Story, Told};
use super::{Scenario, both};

pub(super) static SCENARIOS: &[Scenario] = &[
    both("aba", "same address, same size, other allocation: the graph does not take it for the old one", aba),
    both(
        "reissue",
        "a block changes hands inside the pool: no driver call, and the graph is stale all the same",
        reissue,
    ),
    both(
        "librediffusion-14-setter",
        "a setter that frees and allocates 512 times, at the old address half of the time",
        setter,
    ),
    both(
        "vllm-46067-workspace-grows",
        "a later capture needs a larger workspace: earlier graphs never use the old one",
        workspace_grows,
    ),
];

/// An allocation of `words` at exactly `ptr`: tries a few, keeps the others until it has it.
fn same_address(
    stage: &Stage,
    words: usize,
    ptr: evergraph_pool::driver::DevicePtr,
) -> Result<Option<Slice>, PoolError> {
    let mut others = Vec::new();
    for _ in 0..16 {
        let slice = stage.scratch(words)?;
        if slice.ptr() == ptr {
            return Ok(Some(slice));
        }
        others.push(slice);
    }
    Ok(None)
}

fn aba(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (x, out) = (stage.scratch(4 * stage.page_words())?, stage.state(256)?);
    stage.fill(&x, 1)?;
    let run = |x: &Slice| {
        stage.run_bound("reader", &[x.allocation()], |scope| stage.step_held(scope, x, Hold::Weak, 1, &out))
    };
    for _ in 0..4 {
        run(&x)?;
    }
    let (ptr, token) = (x.ptr(), x.token());
    drop(x);
    stage.stream.synchronize()?;
    if story.vmm() {
        story.say("X is dropped. Its range is nobody else's while a graph depends on it; so the graph goes, too");
        story
            .holds("nobody gets the address before that", same_address(&stage, 4 * stage.page_words(), ptr)?.is_none());
        stage.evict("reader");
    } else {
        story.say(
            "X is dropped and its slab goes back to the driver, which hands the same address out for the next slab",
        );
        stage.pool.trim_to(0)?;
    }
    let Some(y) = same_address(&stage, 4 * stage.page_words(), ptr)? else {
        story.host_only("the driver did not hand the address out again, which it need not")?;
        return Err("the address did not come back".into());
    };
    story.check("the address", ptr, y.ptr());
    story.holds("the allocation is another one", y.token().allocation != token.allocation);
    let canary = stage.fill(&y, 5_000)?;
    story.say("Y belongs to somebody else, who never gave it to the graph");
    let own = stage.scratch(4 * stage.page_words())?;
    let data = stage.fill(&own, 30)?;
    let outcome = run(&own)?;
    story.holds("the graph is repaired, not replayed", outcome != Ran::Replayed);
    story.check("it reads its own input", stepped(&data[..256], 1), stage.read(&out)?);
    story.check("Y's bytes", canary, stage.read(&y)?);
    let resolved = stage.pool.resolve(ptr).and_then(|r| r.token).map(|t| t.allocation);
    story.check("who owns the address", Some(y.token().allocation), resolved);
    Ok(())
}

fn reissue(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let (x, out) = (stage.scratch(4 * stage.page_words())?, stage.state(256)?);
    stage.fill(&x, 1)?;
    let run = |x: &Slice| {
        stage.run_bound("reader", &[x.allocation()], |scope| stage.step_held(scope, x, Hold::Weak, 1, &out))
    };
    for _ in 0..3 {
        run(&x)?;
    }
    story.check("the graph replays", Ran::Replayed, run(&x)?);
    let ptr = x.ptr();
    drop(x);
    let before = stage.pool.counters();
    story.say("X is dropped and the next slice on the stream takes its bytes: the warm path");
    let (taker, calls) = stage.calls(|| same_address(&stage, 4 * stage.page_words(), ptr));
    let after = stage.pool.counters();
    match taker? {
        None => story.say("the pool prefers other memory while a graph depends on this: nothing is reissued"),
        Some(taker) => {
            story.check("calls that take or give memory", 0, {
                calls.iter().filter(|c| matches!(c.name, "free" | "unmap")).count()
            });
            story.check("blocks with dependents that changed hands", 1, after.reissues - before.reissues);
            story.check("graphs that went stale", 1, after.stale - before.stale);
            let canary = stage.fill(&taker, 9_000)?;
            let own = stage.scratch(4 * stage.page_words())?;
            let data = stage.fill(&own, 7)?;
            let outcome = run(&own)?;
            story.holds("the graph is repaired, not replayed", outcome != Ran::Replayed);
            story.check("it computes", stepped(&data[..256], 1), stage.read(&out)?);
            story.check("the taker's bytes", canary, stage.read(&taker)?);
        }
    }
    story.say("a strong hold is another matter: the block stays with the graph although its owner dropped it");
    let held = stage.scratch(4 * stage.page_words())?;
    let data = stage.fill(&held, 21)?;
    let run = |held: Option<&Slice>| {
        stage.run("holder", ScratchPolicy::Pin, |scope| match held {
            Some(held) => stage.step(scope, held, 1, &out),
            None => Err(PoolError::Config("the closure of a good graph is not called").into()),
        })
    };
    for _ in 0..3 {
        run(Some(&held))?;
    }
    let ptr = held.ptr();
    drop(held);
    story.holds("nobody gets its address", same_address(&stage, 4 * stage.page_words(), ptr)?.is_none());
    story.check("the graph still replays", Ran::Replayed, run(None)?);
    story.check("with the bytes it held", stepped(&data[..256], 1), stage.read(&out)?);
    Ok(())
}

fn setter(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let out = stage.state(64)?;
    let mut parameter = stage.scratch(64)?;
    let (mut wrong, mut same, mut replays, mut blocker) = (0, 0, 0, None);
    story.say("a live parameter is a slice; its setter frees it and allocates it anew; the graph reads it weakly");
    for i in 0..512u32 {
        let before = parameter.ptr();
        drop(parameter);
        // Half of the time somebody else is quicker, and the address is another one.
        let taken = if i % 2 == 0 { Some(stage.scratch(64)?) } else { None };
        parameter = stage.scratch(64)?;
        blocker = taken.or(blocker);
        same += u32::from(parameter.ptr() == before);
        for frame in 0..4 {
            let data = stage.fill(&parameter, i * 3 + frame)?;
            let body = |scope: &Scope<'_>| stage.step_held(scope, &parameter, Hold::Weak, i, &out);
            // The request names what is read: the allocation, not its address.
            let ran = stage.run_bound("picture", &[parameter.allocation()], body)?;
            replays += u32::from(ran == Ran::Replayed);
            wrong += u32::from(stage.read(&out)? != stepped(&data, i));
        }
    }
    story.say(format!("the address was the old one {same} times"));
    story.check("pictures broken", 0, wrong);
    story.holds("most frames replayed", replays >= 3 * 400);
    drop(blocker);
    Ok(())
}

fn workspace_grows(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let pool = Pool::new(stage.dynamic(), story.pages_of(PoolMode::Slab))?;
    let mut workspace = pool.alloc::<u32>(64, &stage.stream)?;
    let (input, out) = (stage.state(256)?, stage.state(256)?);
    story.say("graphs for batches of 1, 2 and 4 share a workspace; the third needs more, so it is replaced");
    let mut wrong = 0;
    let mut reused = 0;
    for round in 0..4u32 {
        for batch in [1usize, 2, 4] {
            let need = 64 * batch;
            if workspace.len() < need {
                // The old one goes to the driver at once: its address is free for anybody.
                drop(workspace);
                pool.trim_to(0)?;
                workspace = pool.alloc::<u32>(need, &stage.stream)?;
            }
            let data = stage.fill(&input, round * 100 + batch as u32)?;
            stage.run_with(&format!("batch {batch}"), &pool, |scope| {
                scope.declare(&workspace, Use::Scratch)?;
                scope.declare(&input, Use::Input)?;
                scope.declare(&out, Use::State)?;
                let cut = |slice: &Slice| Words::new(slice.ptr(), 64 * batch);
                let stream = scope.stream().handle();
                stage.probe.add(stream, cut(&input), batch as u32, cut(&workspace))?;
                stage.probe.mix(stream, cut(&workspace), cut(&input), cut(&out))?;
                Ok(())
            })?;
            let got = stage.read(&out)?;
            wrong += usize::from(got[..64 * batch] != stepped(&data, batch as u32)[..64 * batch]);
        }
        if round == 2 {
            story.say("once more it grows, after the last capture: a late warm-up asked for it");
            drop(workspace);
            pool.trim_to(0)?;
            workspace = pool.alloc::<u32>(stage.page(), &stage.stream)?;
            reused += 1;
        }
    }
    story.check("wrong results", 0, wrong);
    story.check("workspaces replaced late", 1, reused);
    story.check("faults of the device", None, stage.fault());
    drop(workspace);
    Ok(())
}
