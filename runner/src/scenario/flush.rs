//! What a flush costs: traces with 74 graphs on a full card, beside the policy that drops everything.

use evergraph_pool::PoolMode;

use super::story::{Story, Told, Untold};
use super::{Scenario, both};
use crate::cli::format_size;
use crate::replay::{Graphs, Options, Policy, Report, SHIPPED, replay};

pub(super) static SCENARIOS: &[Scenario] = &[
    both(
        "flush-growing-scratch",
        "scratch grows on a full card beside 74 graphs, and beside a pool that flushes all and drops all",
        growing_scratch,
    ),
    both(
        "flush-large-request",
        "one request takes what three of 74 graphs need: those three pay, and nobody else",
        large_request,
    ),
];

/// Graphs that were captured when the report's five flushes came.
const DROPPED: [u64; 5] = [74, 37, 37, 64, 37];

fn growing_scratch(story: &mut Story) -> Told {
    story.say(
        "a card of which 626 MiB are left; 74 captured graphs hold 25.5 MiB of them; attention's scratch climbs from",
    );
    story.say("25.2 to 252 MiB, a piece of a long prompt at a time, and between the pieces the graphs run");
    let (ours, flushed) = beside(story, "growing-scratch-74.jsonl")?;
    let (graphs, rival) = (graphs(&ours), graphs(&flushed));
    story
        .say("the pool that flushes: a request fails, all cached memory goes, and all graphs with it, five times over");
    story.check("flushes", DROPPED.len() as u64, flushed.flushes);
    story.check("graphs that were dropped", DROPPED.iter().sum::<u64>(), rival.lost_since);
    story.holds("and captured again", rival.captures_since >= rival.lost_since - DROPPED[4]);
    story.say("the same with this pool");
    story.check("requests without memory", 0, ours.ooms);
    story.check("graphs that were dropped", 0, graphs.lost_since);
    story.check("captures", 0, graphs.captures_since);
    if story.vmm() {
        story.check("bytes that went back to the driver", 0, graphs.given_back_bytes_since);
    } else {
        story.holds("outgrown slabs went back, none of them a graph's", graphs.given_back_bytes_since > 0);
    }
    Ok(())
}

fn large_request(story: &mut Story) -> Told {
    story.say("the same card and the same 74 graphs, three of them with 8.4 MiB of scratch each; then somebody asks for 612 MiB");
    let (ours, flushed) = beside(story, "large-request-74.jsonl")?;
    let (graphs, rival) = (graphs(&ours), graphs(&flushed));
    story.check("requests without memory", 0, ours.ooms + flushed.ooms);
    story.check("graphs that the flush drops", 74, rival.lost_since);
    story.say("with this pool only graphs whose scratch was taken have to be repaired");
    story.holds("at least one and at most three", (1..=3).contains(&graphs.stale));
    if story.vmm() {
        story.check("captures: pages come back under the same addresses", 0, graphs.captures_since);
        story.check("remaps", graphs.stale, graphs.remaps);
    } else {
        story.holds("captures: those alone", (1..=3).contains(&graphs.captures_since));
    }
    Ok(())
}

/// The trace with the story's pool, and with the pool that flushes.
fn beside(story: &mut Story, file: &str) -> Result<(Report, Report), Box<dyn std::error::Error>> {
    let trace = SHIPPED.iter().find(|shipped| shipped.file == file).ok_or("a trace that comes with the project")?;
    let text = trace.text();
    let run = |mode, policy| replay(text.as_bytes(), &Options::new(mode).device(story.device().clone()).policy(policy));
    let reports = (run(story.mode(), Policy::Pool)?, run(PoolMode::Slab, Policy::FlushAll)?);
    if story.hardware() && reports.0.oom {
        return Err(Box::new(Untold("the device has less than 7.5 GiB free".to_owned())));
    }
    for (name, report) in [("this pool", &reports.0), ("flush all, drop all", &reports.1)] {
        let graphs = graphs(report);
        story.say(format!(
            "{name}: {} returned, {} driver calls, {} graphs lost, {} captures, {} remaps, {:.2} ms until steady again",
            format_size(graphs.given_back_bytes_since),
            graphs.driver_calls_since,
            graphs.lost_since,
            graphs.captures_since,
            graphs.remaps,
            graphs.unsteady_ms,
        ));
    }
    Ok(reports)
}

fn graphs(report: &Report) -> Graphs {
    report.graphs.unwrap_or_default()
}
