//! Several devices: whose memory, whose graphs, whose fault.

use std::sync::Arc;

use evergraph_graphcache::{CacheConfig, CacheError, GraphKey, Ran, Request};
use evergraph_kernels::ops::{KvStore, Plan, Root, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_kernels::{KernelError, Kernels};
use evergraph_pool::driver::{DeviceOrdinal, Driver, DriverErrorKind, EventHandle, Streams};
use evergraph_pool::{DeviceSlice, PoolError, Purpose, ScratchPolicy, Use};

use super::stage::{Slice, Stage, count, device, stepped, words};
use super::story::{Story, Told, Untold};
use super::{Scenario, both};

pub(super) static SCENARIOS: &[Scenario] = &[
    both(
        "other-device",
        "a give-back on a device that is not current; the graphs of the other one notice nothing",
        other_device,
    ),
    both(
        "pytorch-153025-graphs-over-two-devices",
        "graphs with memory on two devices, the first one replayed last",
        over_two,
    ),
    both(
        "over-two-devices-flush",
        "a graph that forks to a stream of a second device; either device takes its memory back",
        over_two_flush,
    ),
    both(
        "pytorch-87894-wrong-device",
        "a capture is opened on one device and the work goes to the other",
        wrong_device,
    ),
    both("set-rows-home", "a row write into a view of a cache runs where the cache is", set_rows_home),
    both(
        "peer-copy-blame",
        "a bad peer copy among good work: the error names the copy, not its neighbours",
        peer_copy_blame,
    ),
];

fn two(story: &Story) -> Result<[Stage; 2], Box<dyn std::error::Error>> {
    let [first, second] = story.device().pair(device())?;
    let stage = |device| Stage::on(story, device, story.pages(), CacheConfig::default());
    Ok([stage(first)?, stage(second)?])
}

fn other_device(story: &mut Story) -> Told {
    let [first, second] = two(story)?;
    let mut graphs = Vec::new();
    for stage in [&first, &second] {
        let (input, out) = (stage.state(2 * stage.page_words())?, stage.state(2 * stage.page_words())?);
        stage.settle("graph", ScratchPolicy::Track, |scope| stage.step(scope, &input, 1, &out))?;
        graphs.push((input, out));
    }
    story.say("device 0 is current on this thread; the pool of device 1 gives everything back");
    drop(second.pool.alloc::<u32>(8 * first.page_words(), &second.stream)?);
    second.stream.synchronize()?;
    first.driver.bind()?;
    let epoch = first.pool.counters().epoch_bumps;
    let (trimmed, calls) = second.calls(|| second.pool.trim_to(0));
    story.holds("bytes went back", trimmed? > 0);
    story.check("calls that failed for the wrong device", 0, {
        calls.iter().filter(|c| c.result == Err(DriverErrorKind::InvalidContext)).count()
    });
    story.check("epoch moves on device 0", 0, first.pool.counters().epoch_bumps - epoch);
    let (input, out) = &graphs[0];
    let data = first.fill(input, 60)?;
    let (ran, calls) =
        first.calls(|| first.run("graph", ScratchPolicy::Track, |scope| first.step(scope, input, 1, out)));
    story.check("device 0's graph", (Ran::Replayed, vec!["launch"]), (ran?, super::stage::names(&calls)));
    story.check("computes", stepped(&data, 1), first.read(out)?);
    let (input, out) = &graphs[1];
    let data = second.fill(input, 70)?;
    let ran = second.run("graph", ScratchPolicy::Track, |scope| second.step(scope, input, 1, out))?;
    story.holds("device 1's graph is repaired", ran != Ran::Replayed);
    story.check("and computes", stepped(&data, 1), second.read(out)?);
    Ok(())
}

fn over_two(story: &mut Story) -> Told {
    let [first, second] = two(story)?;
    let sources: Vec<Slice> = (0..3).map(|_| second.scratch(first.page_words())).collect::<Result<_, _>>()?;
    let (landing, outs) = (
        first.state(first.page_words())?,
        (0..3).map(|_| first.state(first.page_words())).collect::<Result<Vec<_>, _>>()?,
    );
    let (here, there) = (first.pool.device(), second.pool.device());
    let run = |i: usize, source: &Slice| -> Result<Ran, CacheError> {
        let key = GraphKey::new(("over two devices", i));
        let (others, bound) = ([&second.pool], [source.allocation()]);
        let request = Request::new(&key, &first.pool, &first.stream).others(&others).bound(&bound);
        let outcome = first.cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.declare(source, Use::Input)?;
            scope.declare(&landing, Use::Scratch)?;
            scope.declare(&outs[i], Use::State)?;
            let (stream, bytes) = (scope.stream().handle(), source.bytes());
            first.driver.memcpy_peer(landing.ptr(), here, source.ptr(), there, bytes, stream)?;
            first.probe.add(stream, words(&landing), i as u32, words(&outs[i]))?;
            Ok(())
        })?;
        Ok(outcome.ran)
    };
    story.say("three graphs on device 0 copy from buffers of device 1");
    for _ in 0..3 {
        for (i, source) in sources.iter().enumerate() {
            run(i, source)?;
        }
    }
    for (i, source) in sources.iter().enumerate().rev() {
        let data: Vec<u32> = second.fill(source, 100 * i as u32)?.iter().map(|x| x + i as u32).collect();
        story.check(format!("graph {i}"), (Ran::Replayed, data), (run(i, source)?, first.read(&outs[i])?));
    }
    story.say("device 1 takes one of the buffers back: only the graph that copies from it is stale");
    let mut sources = sources;
    drop(sources.remove(1));
    let stale = second.pool.counters().stale;
    second.pool.trim_to(0)?;
    story.check("graphs that went stale", 1, second.pool.counters().stale - stale);
    let replaced = second.scratch(first.page_words())?;
    sources.insert(1, replaced);
    let mut ran = Vec::new();
    for (i, source) in sources.iter().enumerate() {
        let data: Vec<u32> = second.fill(source, 7000 + i as u32)?.iter().map(|x| x + i as u32).collect();
        ran.push(run(i, source)? == Ran::Replayed);
        story.check(format!("graph {i} computes"), data, first.read(&outs[i])?);
    }
    story.check("replayed", vec![true, false, true], ran);
    Ok(())
}

/// One graph over both devices: the first computes, hands over, the second goes on in a stream of its own, and the first
/// takes the result back. Each device has scratch in it that its pool may take.
struct Relay {
    input: Slice,
    here: Slice,
    there: Slice,
    far: Slice,
    out: Slice,
    events: [EventHandle; 2],
}

impl Relay {
    fn new(first: &Stage, second: &Stage) -> Result<Self, PoolError> {
        let words = first.page_words();
        let event = |stage: &Stage| {
            stage.driver.bind()?;
            stage.driver.event_create(false)
        };
        Ok(Self {
            input: first.state(words)?,
            here: first.scratch(words)?,
            there: second.scratch(words)?,
            far: second.state(words)?,
            out: first.state(words)?,
            events: [event(first)?, event(second)?],
        })
    }

    /// `out = input + 7`, a 5 of which is added on the second device.
    fn run(&self, first: &Stage, second: &Stage) -> Result<Ran, CacheError> {
        let key = GraphKey::new("relay");
        let others = [&second.pool];
        let bound = [self.here.allocation(), self.there.allocation()];
        let request = Request::new(&key, &first.pool, &first.stream).others(&others).bound(&bound);
        let outcome = first.cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.declare(&self.input, Use::Input)?;
            scope.declare(&self.here, Use::Scratch)?;
            scope.declare(&self.there, Use::Scratch)?;
            scope.declare(&self.far, Use::State)?;
            scope.declare(&self.out, Use::State)?;
            let (near, far) = (first.stream.handle(), second.stream.handle());
            let (zero, one) = (first.pool.device(), second.pool.device());
            let bytes = self.input.bytes();
            first.driver.bind()?;
            first.probe.add(near, words(&self.input), 2, words(&self.here))?;
            first.driver.memcpy_peer(self.there.ptr(), one, self.here.ptr(), zero, bytes, near)?;
            first.driver.event_record(self.events[0], near)?;
            second.driver.bind()?;
            second.driver.stream_wait_event(far, self.events[0])?;
            second.probe.add(far, words(&self.there), 5, words(&self.far))?;
            second.driver.event_record(self.events[1], far)?;
            first.driver.bind()?;
            first.driver.stream_wait_event(near, self.events[1])?;
            first.driver.memcpy_peer(self.out.ptr(), zero, self.far.ptr(), one, bytes, near)?;
            Ok(())
        })?;
        Ok(outcome.ran)
    }

    /// Runs on new input: what it was, and whether the result is right.
    fn turn(&self, first: &Stage, second: &Stage, value: u32) -> Result<(Ran, bool), Box<dyn std::error::Error>> {
        let data = first.fill(&self.input, value)?;
        let ran = self.run(first, second)?;
        first.stream.synchronize()?;
        let want: Vec<u32> = data.iter().map(|word| word + 7).collect();
        Ok((ran, first.read(&self.out)? == want))
    }
}

fn over_two_flush(story: &mut Story) -> Told {
    let [first, second] = two(story)?;
    let (input, out) = (first.state(first.page_words())?, first.state(first.page_words())?);
    first.settle("own", ScratchPolicy::Track, |scope| first.step(scope, &input, 1, &out))?;
    let mut relay = Relay::new(&first, &second)?;
    story.say("a graph goes from device 0 to a stream of device 1 and back; a second graph is device 0's alone");
    let turns = (0..4).map(|i| relay.turn(&first, &second, 10 * i)).collect::<Result<Vec<_>, _>>()?;
    let ran: Vec<Ran> = turns.iter().map(|turn| turn.0).collect();
    story.check("runs", vec![Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed], ran);
    story.check("right results", vec![true; 4], turns.iter().map(|turn| turn.1).collect());
    for (number, name) in ["device 0", "device 1"].into_iter().enumerate() {
        let stages = [&first, &second];
        let (flushed, other) = (stages[number], stages[1 - number]);
        story.say(format!("{name} takes back a buffer that the graph used, and gives all that is free to the driver"));
        let epochs = [flushed, other].map(|stage| stage.pool.counters().epoch_bumps);
        let fresh = flushed.scratch(flushed.page_words())?;
        drop(std::mem::replace(if number == 0 { &mut relay.here } else { &mut relay.there }, fresh));
        flushed.stream.synchronize()?;
        flushed.pool.trim_to(0)?;
        let moved = [flushed, other].map(|stage| stage.pool.counters().epoch_bumps);
        story.holds(format!("{name}'s epoch moved"), moved[0] > epochs[0]);
        story.check("epoch moves on the other device", 0, moved[1] - epochs[1]);
        let (ran, right) = relay.turn(&first, &second, 1000 + number as u32)?;
        story.holds("the graph over both is not replayed as it was", ran != Ran::Replayed);
        story.holds("and computes", right);
        let mut ran = ran;
        for turn in 0..4 {
            let (next, right) = relay.turn(&first, &second, 2000 + turn)?;
            story.holds("computes", right);
            ran = next;
        }
        story.check("and replays again", Ran::Replayed, ran);
        let data = first.fill(&input, 50)?;
        let own = first.run("own", ScratchPolicy::Track, |scope| first.step(scope, &input, 1, &out))?;
        if number == 1 {
            story.check("device 0's own graph noticed nothing of device 1's flush", Ran::Replayed, own);
        }
        story.check("it computes", stepped(&data, 1), first.read(&out)?);
    }
    story.check("faults", (None, None), (first.fault(), second.fault()));
    first.cache.clear();
    for (stage, event) in [(&first, relay.events[0]), (&second, relay.events[1])] {
        stage.driver.bind()?;
        stage.driver.event_destroy(event)?;
    }
    Ok(())
}

fn wrong_device(story: &mut Story) -> Told {
    let [first, second] = two(story)?;
    let (input, out) = (first.state(256)?, first.state(256)?);
    story.say("the closure of a graph on device 1 queues its kernel on device 0's stream");
    let mut refused = None;
    for _ in 0..4 {
        let key = GraphKey::new("astray");
        let others = [&first.pool];
        let request = Request::new(&key, &second.pool, &second.stream).others(&others);
        let ran = second.cache.run(&request, |_| -> Result<(), CacheError> {
            Ok(first.probe.add(first.stream.handle(), words(&input), 1, words(&out))?)
        });
        refused = refused.or(ran.err());
    }
    story.refused("an empty graph is not taken for a good one", "recorded nothing", &refused.map_or(Ok(()), Err));
    second.driver.bind()?;
    story.check("graphs left on device 1", 0, second.live().graphs);
    story.holds("device 1's stream is usable", second.stream.synchronize().is_ok());
    Ok(())
}

fn root(name: &str, slice: &DeviceSlice<f32>, device: DeviceOrdinal) -> Arc<Root> {
    Root::with_allocation(name, slice.ptr(), slice.bytes(), device, slice.allocation().get())
}

fn set_rows_home(story: &mut Story) -> Told {
    let [first, second] = two(story)?;
    let kernels = Kernels::load(second.dynamic())?;
    let (rows, columns) = (8, 16);
    let cache: DeviceSlice<f32> = second.pool.alloc_zeroed(rows * columns, Purpose::State, &second.stream)?;
    let fresh: DeviceSlice<f32> = first.pool.alloc(2 * columns, &first.stream)?;
    let values: Vec<f32> = (0..2 * columns).map(|i| i as f32).collect();
    first.stream.upload(&values, &fresh)?;
    let positions = second.pool.upload(&[5i32, 2], Purpose::State, &second.stream)?;
    let position_root =
        Root::with_allocation("positions", positions.ptr(), 8, second.pool.device(), positions.allocation().get());
    let store = |fresh: &Arc<Root>| -> Result<KvStore, KernelError> {
        let whole = TensorView::new(&root("cache", &cache, second.pool.device()), QuantType::F32, &[rows, columns])?;
        Ok(KvStore {
            src: TensorView::new(fresh, QuantType::F32, &[2, columns])?,
            // A view of a reshape of a view: its root is the cache all the same.
            cache: whole.reshape(&[rows * columns])?.reshape(&[rows, 1, columns])?.reshape(&[rows, columns])?,
            positions: TensorView::new(&position_root, QuantType::I32, &[2])?,
            ring: false,
        })
    };
    story.say("the cache is on device 1; two fresh rows were computed on device 0");
    let mut plan = Plan::new();
    let refused = plan.push(store(&root("fresh rows", &fresh, first.pool.device()))?);
    story.refused("a plan that writes device 1 from device 0's rows", "copy it there first", &refused);
    story.refused("names the op, the tensor and its root", "fresh rows", &refused);
    story.check("ops in the plan", 0, plan.ops().len());
    story.say("with a visible copy to device 1 the row write runs where the cache is");
    let copied: DeviceSlice<f32> = second.pool.alloc(2 * columns, &second.stream)?;
    first.stream.synchronize()?;
    second.driver.bind()?;
    second.driver.memcpy_peer(
        copied.ptr(),
        second.pool.device(),
        fresh.ptr(),
        first.pool.device(),
        fresh.bytes(),
        second.stream.handle(),
    )?;
    plan.push(store(&root("copied rows", &copied, second.pool.device()))?)?;
    let ((), calls) = first.calls(|| ());
    drop(calls);
    let (launched, calls) = second.calls(|| plan.launch(&kernels, second.stream.handle()));
    launched?;
    story.check("kernels launched on device 1", 1, count(&calls, "launch_kernel"));
    let mut want = vec![0f32; rows * columns];
    want[5 * columns..6 * columns].copy_from_slice(&values[..columns]);
    want[2 * columns..3 * columns].copy_from_slice(&values[columns..]);
    story.check("the whole state, with the rows in it", want, second.read(&cache)?);
    story.check("kernels launched on device 0", 0, count(&first.calls(|| ()).1, "launch_kernel"));
    story.check("faults", (None, None), (first.fault(), second.fault()));
    Ok(())
}

fn peer_copy_blame(story: &mut Story) -> Told {
    let [first, second] = two(story)?;
    let is_virtual = first.driver.info().virtual_of.is_some();
    if first.driver.info().backend != "host" && !is_virtual {
        return Err(Untold("addresses are unified: a peer copy finds the devices by itself".to_owned()).into());
    }
    let (source, landing, out) = (second.state(256)?, first.state(256)?, first.state(256)?);
    second.fill(&source, 1)?;
    second.stream.synchronize()?;
    let (here, there) = (first.pool.device(), second.pool.device());
    story.say("a kernel, a peer copy, a kernel: the copy names the source's address with the wrong device");
    first.driver.bind()?;
    let stream = first.stream.handle();
    first.probe.fill(stream, words(&landing), 5)?;
    let queued = first.driver.memcpy_peer(landing.ptr(), here, source.ptr(), here, source.bytes(), stream);
    let later = first.probe.add(stream, words(&landing), 1, words(&out));
    if is_virtual {
        story.say("virtual devices look at once: the copy itself is refused, and nothing of it was queued");
        let kind = queued.as_ref().err().map(|error| error.kind.clone());
        let foreign = match &kind {
            Some(DriverErrorKind::Foreign(foreign)) => Some((foreign.op.as_str(), foreign.address, foreign.owner)),
            _ => None,
        };
        story.check("the error", Some(("memcpy_peer", source.ptr(), there)), foreign);
        story.refused("names the argument", "src of memcpy_peer", &queued);
        story.holds("its neighbours are not to blame", later.is_ok());
        story.check("and ran", (6..262).collect::<Vec<u32>>(), first.read(&out)?);
    } else {
        story.say("errors come late: the calls themselves went through, and the next wait reports");
        let waited = first.stream.synchronize();
        let error = queued.err().or(later.err()).map(PoolError::from).or(waited.err());
        let blamed = error.map_or(Ok(()), Err);
        story.refused("the error", "memcpy_peer", &blamed);
        story.refused("the error has the address", &source.ptr().to_string(), &blamed);
        let fault = first.driver.fault();
        story.check("the fault's op", Some("memcpy_peer".to_owned()), fault.as_ref().map(|f| f.op.clone()));
        story.check("a read", Some(false), fault.map(|f| f.write));
    }
    story.say("device 1 is not to blame, and works");
    story.check("fault of device 1", None, second.fault());
    story.holds("device 1's stream", second.stream.synchronize().is_ok());
    story.say("with the right device the same copy works, on a machine that did not die of the wrong one");
    let [first, second] = two(story)?;
    let (source, landing) = (second.state(256)?, first.state(256)?);
    let data = second.fill(&source, 30)?;
    first.driver.bind()?;
    first.driver.memcpy_peer(landing.ptr(), here, source.ptr(), there, source.bytes(), first.stream.handle())?;
    story.check("copied", data, first.read(&landing)?);
    Ok(())
}
