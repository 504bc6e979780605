//! What all of this is about: a graph that is launched without asking. The device dies of it.

use evergraph_graphcache::Ran;
use evergraph_pool::driver::CaptureMode;
use evergraph_pool::{Hold, ScratchPolicy};

use super::stage::{Slice, Stage, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, vmm};

pub(super) static SCENARIOS: &[Scenario] = &[Scenario {
    deadly: true,
    ..vmm(
        "launched-without-asking",
        "a raw graph is launched after its pages went back: the fault that a lease would have refused",
        launched,
    )
}];

fn launched(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let driver = stage.dynamic();
    let (x, out) = (stage.scratch(4 * stage.page_words())?, stage.state(256)?);
    let data = stage.fill(&x, 1)?;
    story.say("the same work twice on one slice X: as a graph of the cache, and captured by hand, with nobody to ask");
    let cached = |x: &Slice| {
        stage.run_bound_as("reader", &[x.allocation()], ScratchPolicy::Pin, |scope| {
            stage.step_held(scope, x, Hold::Weak, 1, &out)
        })
    };
    for _ in 0..3 {
        cached(&x)?;
    }
    story.check(
        "the cache's graph replays",
        (Ran::Replayed, stepped(&data[..256], 1)),
        (cached(&x)?, stage.read(&out)?),
    );
    driver.bind()?;
    let stream = driver.stream_create(0)?;
    driver.begin_capture(stream, CaptureMode::ThreadLocal)?;
    stage.probe.add(stream, words(&x), 5, words(&out))?;
    let graph = driver.end_capture(stream)?;
    let raw = driver.instantiate(graph)?;
    driver.launch(raw, stream)?;
    driver.stream_synchronize(stream)?;
    let plus_five: Vec<u32> = data[..256].iter().map(|word| word + 5).collect();
    story.check("so does the raw one", plus_five, stage.read(&out)?);

    story.say("X is dropped and its pages go back to the driver");
    drop(x);
    stage.stream.synchronize()?;
    story.holds("bytes went back", stage.pool.trim_to(0)? > 0);
    let own = stage.scratch(4 * stage.page_words())?;
    let data = stage.fill(&own, 70)?;
    let ran = cached(&own)?;
    story.holds("the cache's graph is repaired, not replayed", ran != Ran::Replayed);
    story.check("and computes", stepped(&data[..256], 1), stage.read(&out)?);
    story.check("faults of the device", None, stage.fault());

    story.say("the raw one is launched all the same");
    driver.bind()?;
    story.holds("the launch itself goes through", driver.launch(raw, stream).is_ok());
    let waited = driver.stream_synchronize(stream);
    // A host device names the op; hardware knows only what happened.
    let named = if story.device().backend() == "cuda" { "CUDA_ERROR_ILLEGAL_ADDRESS" } else { "probe_add" };
    story.refused("the wait reports the fault", named, &waited);
    story.holds("the fault sticks: the context is lost", driver.fault().is_some() && driver.mem_info().is_err());
    story.holds("with it every graph, this cache's too", cached(&own).is_err());
    Ok(())
}
