//! What pages under fixed addresses are good for: stitching, growing.

use evergraph_graphcache::{CacheConfig, CacheError, GraphKey, Ran, Request};
use evergraph_pool::{GrowableSlice, PoolError, Purpose, ScratchPolicy, Use};

use super::stage::{Run, Slice, Stage, count, is_out_of_memory, stepped, words};
use super::story::{Story, Told};
use super::{Scenario, both, vmm};

pub(super) static SCENARIOS: &[Scenario] = &[
    vmm(
        "stitch",
        "a request that no free block fits is served by the chunks of several, and nothing goes back",
        stitch,
    ),
    vmm(
        "stitch-across-purposes",
        "what weights left behind serves scratch, whose graph gets free pages back first",
        lent,
    ),
    both("grow-kv", "a cache grows under its decode graph: one address, no repair, memory as long as the text", grow),
    vmm("grow-kv-full", "a growth that fails changes nothing; a shrunk cache gives its tail to whoever needs it", full),
];

fn stitch(story: &mut Story) -> Told {
    const PAGES: usize = 32;
    let stage = Stage::with(story, story.pages().limit(PAGES * story.page()), CacheConfig::default())?;
    let page = stage.page_words();
    let (input, out) = (stage.state(page / 2)?, stage.state(page / 2)?);
    stage.settle("bystander", ScratchPolicy::Pin, |scope| stage.step(scope, &input, 1, &out))?;
    story.say("blocks of two pages until the pool is full; then every second one goes");
    let mut blocks = Vec::new();
    while let Ok(block) = stage.scratch(2 * page) {
        stage.fill(&block, blocks.len() as u32)?;
        blocks.push(block);
    }
    let mut index = 0;
    blocks.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    let free = stage.pool.stats().reserved_bytes.current - stage.pool.stats().active_bytes.current;
    story.say(format!("{} bytes are free, in pieces of {}", free, 2 * stage.page()));
    let before = stage.pool.counters();
    let (large, calls) = stage.calls(|| stage.scratch(6 * page));
    let large = large?;
    let after = stage.pool.counters();
    story.say("six pages in one piece: three pieces are put under one range");
    story.check("chunks made", 0, count(&calls, "create"));
    story.check("chunks given back", 0, count(&calls, "release"));
    story.check("bytes given back", 0, after.given_back_bytes - before.given_back_bytes);
    story.holds("each chunk is unmapped before it is mapped anew", {
        count(&calls, "unmap") == count(&calls, "map") && count(&calls, "map") > 0
    });
    let written = stage.fill(&large, 77)?;
    story.holds("the new block holds what is written", stage.read(&large)? == written);
    let kept = blocks.iter().enumerate().map(|(i, block)| Ok(stage.read(block)?[0] == 2 * i as u32 + 1));
    story.holds(
        "and the blocks between keep theirs",
        kept.collect::<Result<Vec<_>, PoolError>>()?.into_iter().all(|k| k),
    );
    let data = stage.fill(&input, 5)?;
    let ran = stage.run("bystander", ScratchPolicy::Pin, |_| Ok(()))?;
    story.check("the graph beside it", Ran::Replayed, ran);
    story.holds("its result is right", stage.read(&out)? == stepped(&data, 1));
    story.check("the pool's own books", Ok(()), stage.pool.check());
    story.check("faults", None, stage.fault());
    Ok(())
}

fn lent(story: &mut Story) -> Told {
    let stage = Stage::with(story, story.pages().limit(24 * story.page()), CacheConfig::default())?;
    let page = stage.page_words();
    let (input, out) = (stage.state(4 * page)?, stage.state(4 * page)?);
    let step = |scope: &evergraph_graphcache::Scope<'_>| stage.step(scope, &input, 3, &out);
    stage.settle("step", ScratchPolicy::Track, step)?;
    let weights = stage.pool.alloc_for::<u32>(12 * page, Purpose::Weight, &stage.stream)?;
    drop(weights);
    story.say("weights were loaded and dropped; scratch wants nearly all there is");
    let (large, calls) = stage.calls(|| stage.scratch(14 * page));
    let large = large?;
    story.check("chunks given back", 0, count(&calls, "release"));
    story.holds("the graph's pages went too", stage.pool.counters().unbacked > 0);
    drop(large);
    stage.fill(&input, 9)?;
    let ((ran, data), calls) = stage.calls(|| (stage.run("step", ScratchPolicy::Track, step), stage.fill(&input, 9)));
    story.check("the graph is repaired by", Ran::Remapped, ran?);
    story.check("with chunks made for it", 0, count(&calls, "create"));
    story.holds("its result is right", stage.read(&out)? == stepped(&data?, 3));
    story.check("faults", None, stage.fault());
    Ok(())
}

/// A text: what was appended, and where the next word goes.
struct Text {
    seq: GrowableSlice<u32>,
    /// The position, and the sum of all words.
    place: Slice,
}

impl Text {
    fn new(stage: &Stage, most: usize) -> Result<Self, PoolError> {
        let seq = stage.pool.alloc_growable(1, most, Purpose::State, &stage.stream)?;
        let place = stage.state(2)?;
        stage.stream.fill(&place, 0)?;
        Ok(Self { seq, place })
    }

    fn append(&self, stage: &Stage, touched: usize) -> Run {
        let (key, touches) = (GraphKey::new("append"), [self.seq.touch(touched)]);
        let request = Request::new(&key, &stage.pool, &stage.stream).touches(&touches);
        let outcome = stage.cache.run(&request, |scope| {
            scope.declare(&self.seq, Use::State)?;
            scope.declare(&self.place, Use::State)?;
            stage.probe.append(scope.stream().handle(), self.seq.ptr(), words(&self.place))?;
            Ok::<_, CacheError>(())
        })?;
        Ok(outcome.ran)
    }

    /// The sum that the device finds, against that of all words up to `last`.
    fn is_right(&self, stage: &Stage, last: u32) -> Result<bool, PoolError> {
        let sum = (0..=last).map(|p| p.wrapping_mul(3)).fold(0, u32::wrapping_add);
        Ok(stage.read(&self.place)? == [last + 1, sum])
    }
}

fn grow(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let page = stage.page_words();
    let mut text = Text::new(&stage, 64 * page)?;
    let ptr = text.seq.ptr();
    story.say("a text may get as long as 64 pages; each step appends a word at a position in device memory");
    for step in 0..4 {
        text.seq.grow_to(step + 1)?;
        text.append(&stage, step + 1)?;
    }
    let (mut replays, mut right, mut long) = (0, true, true);
    let mut position = 4;
    for target in [page - 1, page, page + 1, 2 * page, 3 * page + 7] {
        story.say(format!("on to {target} words"));
        // The device counts by itself; the words between are written by hand.
        let between: Vec<u32> = (0..target as u32).map(|p| p.wrapping_mul(3)).collect();
        text.seq.grow_to(target + 1)?;
        stage.stream.upload(&between, &text.seq)?;
        stage.stream.upload(&[target as u32, 0], &text.place)?;
        let ran = text.append(&stage, target + 1)?;
        replays += usize::from(ran == Ran::Replayed);
        right &= text.is_right(&stage, target as u32)?;
        let held = stage.pool.stats().requested_bytes.current as usize;
        long &= !story.vmm() || held == (target + 1) * 4 + text.place.bytes();
        position = target;
    }
    story.check("steps that were plain replays", 5, replays);
    story.holds("every sum is right", right);
    story.holds("memory was as long as the text", long);
    story.check("the address", ptr, text.seq.ptr());
    story.check("graphs that went stale", 0, stage.cache.counters().stale);
    let (refused, calls) = stage.calls(|| text.append(&stage, 64 * page + 1));
    if story.vmm() {
        story.say("a step that says it goes further than the text has grown");
        story.holds("is refused, typed", matches!(refused, Err(CacheError::NotGrown { .. })));
        story.check("before any launch", 0, count(&calls, "launch"));
        text.seq.grow_to(position + 2)?;
        story.check("and the next one is", Ran::Replayed, text.append(&stage, position + 2)?);
    }
    story.check("the pool's own books", Ok(()), stage.pool.check());
    story.check("faults", None, stage.fault());
    Ok(())
}

fn full(story: &mut Story) -> Told {
    let stage = Stage::with(story, story.pages().limit(16 * story.page()), CacheConfig::default())?;
    let page = stage.page_words();
    let mut text = Text::new(&stage, 64 * page)?;
    for step in 0..4 {
        text.seq.grow_to(step + 1)?;
        text.append(&stage, step + 1)?;
    }
    let other = stage.scratch(10 * page)?;
    let before = stage.pool.stats();
    story.say("room for four pages more; the text asks for eight");
    story.holds("out of memory, typed", is_out_of_memory(&text.seq.grow_to(9 * page)));
    let after = stage.pool.stats();
    story.check("bytes reserved", before.reserved_bytes.current, after.reserved_bytes.current);
    story.check("length", 4, text.seq.len());
    story.check("the next step", Ran::Replayed, {
        text.seq.grow_to(5)?;
        text.append(&stage, 5)?
    });
    story.holds("its sum is right", text.is_right(&stage, 4)?);
    drop(other);
    text.seq.grow_to(14 * page)?;
    story.say("the text got long, and starts anew: its tail stays mapped until somebody needs it");
    text.seq.shrink_to(6)?;
    let ((), calls) = stage.calls(|| {
        let _ = text.seq.grow_to(14 * page);
        let _ = text.seq.shrink_to(6);
    });
    story.check("driver calls to grow and shrink again", 0, calls.len());
    let (other, calls) = stage.calls(|| stage.scratch(12 * page));
    story.holds("twelve pages for somebody else are there", other.is_ok());
    story.check("chunks given back", 0, count(&calls, "release"));
    story.check("the next step", Ran::Replayed, text.append(&stage, 6)?);
    story.holds("its sum is right", text.is_right(&stage, 5)?);
    story.check("the pool's own books", Ok(()), stage.pool.check());
    story.check("faults", None, stage.fault());
    Ok(())
}
