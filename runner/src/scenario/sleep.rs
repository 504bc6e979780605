//! Sleep and wake: memory goes and comes under graphs that stay.

use std::error::Error;

use evergraph_graphcache::{CacheError, Ran};
use evergraph_pool::driver::DevicePtr;
use evergraph_pool::{BadReason, Content, DeviceSlice, PoolError, Purpose, ScratchPolicy, Token, Tracked, Use};

use super::stage::{Run, Stage, count, stepped};
use super::story::{Story, Told};
use super::{Scenario, vmm};

pub(super) static SCENARIOS: &[Scenario] = &[
    vmm("sleep-wake", "all pages go and come under captured graphs: kept bytes replay, dropped ones are refused", wake),
    vmm(
        "torch-memory-saver-88-registration",
        "other pages under the same address: what was registered for the old ones is told",
        registration,
    ),
    vmm(
        "vllm-28714-sleep-during-requests",
        "a sleep arrives while work is in flight, and in the middle of a capture",
        requests,
    ),
    vmm("vllm-36651-cycles", "memory falls asleep, wakes, is freed and taken in every order: nothing twice", cycles),
];

/// Somebody else's mapping of a buffer's pages.
struct Mapping {
    token: Token,
    ptr: DevicePtr,
    bytes: usize,
}

impl Tracked for Mapping {
    fn token(&self) -> Token {
        self.token
    }
    fn ptr(&self) -> DevicePtr {
        self.ptr
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

fn is_asleep(ran: &Run) -> bool {
    matches!(ran, Err(CacheError::Pool(PoolError::Asleep { .. })))
}

fn wake(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let page = stage.page_words();
    // A device with its code loaded, and nothing else yet.
    let free = || stage.dynamic().mem_info().map(|info| info.free_bytes);
    let empty = free()?;
    let (input, out) = (stage.state(2 * page)?, stage.state(2 * page)?);
    let weights = stage.pool.alloc_for::<u32>(3 * page, Purpose::Weight, &stage.stream)?;
    let loaded = stage.fill(&weights, 1000)?;
    let step = |scope: &evergraph_graphcache::Scope<'_>| {
        scope.declare(&weights, Use::Weight)?;
        stage.step(scope, &input, 2, &out)
    };
    let run = || stage.run("step", ScratchPolicy::Track, step);
    stage.settle("step", ScratchPolicy::Track, step)?;
    let data = stage.fill(&input, 5)?;
    story.check("the graph replays", Ran::Replayed, run()?);
    for content in [Content::Keep, Content::KeepPinned] {
        story.say(format!("everything falls asleep, its bytes in host memory ({content:?})"));
        let (slept, calls) = stage.calls(|| stage.pool.sleep(content, &[]));
        story.holds("bytes went back", slept? > 0);
        story.check("chunks unmapped, and given back", count(&calls, "unmap"), count(&calls, "release"));
        let live = stage.live();
        story.check("device memory, mappings", (0, 0), (live.used_bytes, live.mappings));
        story.check("bytes reserved", 0, stage.pool.stats().reserved_bytes.current);
        let taken = empty.saturating_sub(free()?);
        story.holds("the device has all but 16 MiB of what it had before the first allocation", taken <= 16 << 20);
        let refused = stage.pool.alloc::<u32>(1, &stage.stream);
        story.holds(
            "an allocation is refused, typed",
            matches!(refused, Err(PoolError::Asleep { purpose: Purpose::Scratch, .. })),
        );
        let (ran, calls) = stage.calls(run);
        story.holds("so is the graph", is_asleep(&ran));
        story.check("work queued in its place", 0, count(&calls, "launch") + count(&calls, "launch_kernel"));
        story.say("it wakes at the same addresses");
        stage.pool.wake(&[])?;
        let (ran, calls) = stage.calls(run);
        story.check("the graph", Ran::Remapped, ran?);
        story.check(
            "captures, and chunks made, for it",
            (0, 0),
            (count(&calls, "begin_capture"), count(&calls, "create")),
        );
        story.holds("its input was kept, and its result is right", stage.read(&out)? == stepped(&data, 2));
        story.holds("weights are what they were", stage.read(&weights)? == loaded);
        let data = stage.fill(&input, 77)?;
        story.check("and then", Ran::Replayed, run()?);
        story.holds("with a new input", stage.read(&out)? == stepped(&data, 2));
        stage.fill(&input, 5)?;
    }
    story.say("now the bytes are dropped");
    let before = weights.token();
    stage.pool.sleep(Content::Drop, &[])?;
    stage.pool.wake(&[])?;
    story.holds("tokens say so", weights.token().content != before.content);
    let (ran, calls) = stage.calls(run);
    story.holds("the graph is refused, typed", matches!(ran, Err(CacheError::ContentLost(_))));
    story.check("work queued in its place", 0, count(&calls, "launch") + count(&calls, "launch_kernel"));
    story.say("weights are loaded again, and the graph is told");
    stage.fill(&weights, 1000)?;
    let data = stage.fill(&input, 9)?;
    stage.cache.invalidate(&evergraph_graphcache::GraphKey::new("step"));
    story.holds("it is captured anew", matches!(run()?, Ran::Updated | Ran::Recaptured));
    story.holds("and right", stage.read(&out)? == stepped(&data, 2));
    story.check("it replays", Ran::Replayed, run()?);
    story.check("graphs that go for the driver's sake", 1, stage.cache.evict_graphs());
    story.check("execs left", 0, stage.live().execs);
    story.check("the pool's own books", Ok(()), stage.pool.check());
    story.check("faults", None, stage.fault());
    Ok(())
}

fn registration(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let buffer = stage.state(2 * stage.page_words())?;
    stage.fill(&buffer, 1)?;
    story.say("a peer, another process or a network card maps the pages of a buffer, and keeps its token");
    let registered = buffer.token();
    stage.pool.sleep(Content::Keep, &[])?;
    stage.pool.wake(&[])?;
    let now = buffer.token();
    let rest = |token: Token| (token.allocation, token.address, token.content);
    story.check("same allocation, address and bytes", rest(registered), rest(now));
    story.holds("other pages", now.backing != registered.backing);
    story.say("a graph is captured with the token that the registration was made with");
    let out = stage.state(16)?;
    let mapping = Mapping { token: registered, ptr: buffer.ptr(), bytes: buffer.bytes() };
    let run = |declare_old: bool| {
        stage.run("registered", ScratchPolicy::Pin, |scope| {
            if declare_old {
                scope.declare(&mapping, Use::Input)?;
            }
            stage.step(scope, &buffer, 1, &out)
        })
    };
    run(true)?;
    run(true)?;
    let reason = match run(true) {
        Err(CacheError::Pool(PoolError::StaleToken { reason, .. })) => Some(reason),
        _ => None,
    };
    story.check("it is refused, because", Some(BadReason::Rebacked), reason);
    story.check("with the token of today", Ran::Captured, run(false)?);
    story.check("faults", None, stage.fault());
    Ok(())
}

fn requests(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    let page = stage.page_words();
    let (input, out) = (stage.state(2 * page)?, stage.state(2 * page)?);
    let step = |scope: &evergraph_graphcache::Scope<'_>| stage.step(scope, &input, 7, &out);
    stage.settle("request", ScratchPolicy::Track, step)?;
    let data = stage.fill(&input, 50)?;
    story.say("a request is in flight when the sleep arrives");
    let gate = stage.hold(&stage.stream)?;
    story.check("it was launched", Ran::Replayed, stage.run("request", ScratchPolicy::Track, step)?);
    let (slept, calls) = stage.calls(|| {
        std::thread::scope(|scope| {
            let sleep = scope.spawn(|| stage.pool.sleep(Content::Keep, &[]));
            let opened = gate.open_behind(&[]);
            sleep.join().map(|slept| opened.and(slept))
        })
    });
    story.holds("it sleeps", matches!(slept, Ok(Ok(bytes)) if bytes > 0));
    let at = |name| calls.iter().position(|call| call.name == name);
    story.holds("after the host saw the work complete", at("event_synchronize") < at("unmap") && at("unmap").is_some());
    stage.pool.wake(&[])?;
    story.holds("the request's result was kept", stage.read(&out)? == stepped(&data, 7));
    story.say("another arrives in the middle of a capture, from the same thread and from another one");
    let mut refused = Vec::new();
    stage.run("fresh", ScratchPolicy::Pin, step)?;
    stage.run("fresh", ScratchPolicy::Pin, step)?;
    let ran = stage.run("fresh", ScratchPolicy::Pin, |scope| {
        if scope.capturing() {
            refused.push(stage.pool.sleep(Content::Drop, &[]));
            let elsewhere = std::thread::scope(|s| s.spawn(|| stage.pool.sleep(Content::Drop, &[])).join());
            refused.extend(elsewhere);
        }
        step(scope)
    });
    story.check("the capture", Ran::Captured, ran?);
    let typed = refused.iter().filter(|r| matches!(r, Err(PoolError::Capturing { .. }))).count();
    story.check("sleeps refused, typed", 2, typed);
    story.say("and in the middle of a run without a graph: it would wait for itself");
    let mut busy = None;
    stage.run("eager", ScratchPolicy::Pin, |scope| {
        busy = Some(matches!(stage.pool.sleep(Content::Drop, &[]), Err(PoolError::Busy { .. })));
        step(scope)
    })?;
    story.check("refused, typed", Some(true), busy);
    story.check("faults", None, stage.fault());
    Ok(())
}

/// The purposes of a number's lower bits; none: all.
fn purposes(bits: u32) -> Vec<Purpose> {
    Purpose::ALL.into_iter().filter(|p| bits & (1 << *p as u32) != 0).collect()
}

fn cycles(story: &mut Story) -> Told {
    let stage = Stage::new(story)?;
    story.say("600 steps: take, drop, sleep, wake, trim, in an order that a seed decides; each slice knows its bytes");
    let before = stage.live();
    let mut slices: Vec<(DeviceSlice<u32>, Option<Vec<u32>>)> = Vec::new();
    let mut asleep = [false; 3];
    let (mut wrong, mut refusals, mut sleeps) = (Vec::new(), 0, 0);
    let mut seed = 36_651u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        seed >> 8
    };
    let index = |purpose: Purpose| purpose as usize;
    let (log, calls) = stage.calls(|| -> Result<(), Box<dyn Error>> {
        for turn in 0..600 {
            let (what, bits) = (next() % 8, next());
            match what {
                0..=2 => {
                    let purpose = Purpose::ALL[bits as usize % 3];
                    match stage.pool.alloc_for::<u32>(1 + bits as usize % 20_000, purpose, &stage.stream) {
                        Ok(slice) if !asleep[index(purpose)] => {
                            let data = stage.fill(&slice, bits)?;
                            slices.push((slice, Some(data)));
                        }
                        Ok(_) => wrong.push(format!("turn {turn}: {purpose:?} handed out asleep")),
                        Err(PoolError::Asleep { .. }) if asleep[index(purpose)] => refusals += 1,
                        Err(error) => return Err(error.into()),
                    }
                }
                3 if !slices.is_empty() => drop(slices.swap_remove(bits as usize % slices.len())),
                4 => {
                    let content = [Content::Keep, Content::KeepPinned, Content::Drop][bits as usize / 8 % 3];
                    let chosen = purposes(bits % 8);
                    stage.pool.sleep(content, &chosen)?;
                    sleeps += 1;
                    for purpose in Purpose::ALL {
                        let falls = (chosen.is_empty() || chosen.contains(&purpose)) && !asleep[index(purpose)];
                        if !falls {
                            continue;
                        }
                        asleep[index(purpose)] = true;
                        if content == Content::Drop {
                            slices
                                .iter_mut()
                                .filter(|(s, _)| s.purpose() == purpose)
                                .for_each(|(_, data)| *data = None);
                        }
                    }
                }
                5 => {
                    let chosen = purposes(bits % 8);
                    stage.pool.wake(&chosen)?;
                    for purpose in Purpose::ALL {
                        asleep[index(purpose)] &= !(chosen.is_empty() || chosen.contains(&purpose));
                    }
                }
                6 => drop(stage.pool.trim_to(0)?),
                _ => {
                    if let Some((slice, data)) = slices.get(bits as usize % slices.len().max(1)) {
                        match stage.read(slice) {
                            Ok(found) if data.as_ref().is_some_and(|data| *data != found) => {
                                wrong.push(format!("turn {turn}: {:?} bytes differ", slice.purpose()));
                            }
                            Ok(_) if asleep[index(slice.purpose())] => wrong.push(format!("turn {turn}: read asleep")),
                            Ok(_) => {}
                            Err(PoolError::Asleep { .. }) if asleep[index(slice.purpose())] => refusals += 1,
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            }
            if let Err(what) = stage.pool.check() {
                wrong.push(format!("turn {turn}: {what}"));
            }
        }
        Ok(())
    });
    log?;
    story.check("what went wrong", Vec::<String>::new(), wrong);
    story.holds("steps on what slept were refused, typed", refusals > 10 && sleeps > 10);
    slices.clear();
    stage.pool.wake(&[])?;
    let (trimmed, rest) = stage.calls(|| stage.pool.trim_to(0));
    trimmed?;
    let all = |name| count(&calls, name) + count(&rest, name);
    story.check("maps and unmaps", all("map"), all("unmap"));
    story.check("chunks made and released", all("create"), all("release"));
    story.check("page-locked buffers taken and freed", all("host_alloc"), all("host_free"));
    let live = stage.live();
    story.check("device memory, as before", before.used_bytes, live.used_bytes);
    story.check("streams and events, as before", (before.streams, before.events), (live.streams, live.events));
    story.check("faults", None, stage.fault());
    Ok(())
}
