//! One worker's slices, streams and recipes, next to a plain model of what their bytes must be.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evergraph_graphcache::{CacheError, GraphCache, GraphKey, Ran, Request};
use evergraph_kernels::probe::Probe;
use evergraph_pool::driver::faulty::CALLS;
use evergraph_pool::driver::{Driver, DynDriver, Faulty};
use evergraph_pool::{Arena, Awake, Content, Pool, PoolError, PoolMode, Purpose, ScratchPolicy, Stream};
use parking_lot::Mutex;

use super::beds::{Beds, purposes};
use super::ledger::{Ledger, mark, named};
use super::recipe::{Ending, Halt, OnPurpose, Scratch, Shape, Work};
use super::slot::{Slot, copy, disown, fill, order, order_streams, own};
use super::tally::Tally;
use super::{Op, quiet};

/// Slots of a worker.
pub(super) const SLOTS: usize = 20;
/// Streams of a worker.
pub(super) const STREAMS: usize = 3;
/// Recipes of a worker; the first two have inputs of their own, which nobody else touches.
pub(super) const RECIPES: usize = 10;
/// Recipes with inputs of their own.
pub(super) const STEADY: usize = 2;

/// Calls that are not made to fail: a destroy that did not happen can only leak, and a driver that refuses to
/// destroy has lost its context; there every call fails.
const NEVER_FAIL: &[&str] =
    &["bind", "stream_destroy", "event_destroy", "graph_destroy", "exec_destroy", "module_unload", "host_free"];

/// What all workers share. Dropped in this order.
pub(super) struct Shared {
    pub(super) cache: GraphCache,
    pub(super) pool: Pool,
    pub(super) probe: Probe,
    pub(super) driver: Arc<Faulty>,
    pub(super) ledger: Mutex<Ledger>,
    pub(super) serials: AtomicU64,
    /// Moves with everything that may cost an innocent graph its memory.
    pub(super) disturbed: AtomicU64,
    pub(super) beds: Beds,
    pub(super) memory_bytes: usize,
    /// The limit that holds when no other does; a host device is small by itself.
    pub(super) most_bytes: Option<usize>,
    /// How much larger slices and scratch are than on a host device.
    pub(super) scale: usize,
    pub(super) faults: bool,
    /// Whether there are several workers: then nobody can tell whether a graph was left alone between two of its runs.
    pub(super) crowd: bool,
}

impl Shared {
    pub(super) fn serial(&self) -> u64 {
        self.serials.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn disturb(&self) {
        self.disturbed.fetch_add(1, Ordering::SeqCst);
    }

    /// Brings the ledger up to date.
    pub(super) fn account(&self) {
        let mut ledger = self.ledger.lock();
        let log = self.driver.take_log();
        ledger.read(&log, &|function, args| named(&self.probe, function, args));
    }

    /// A number that moves with every disturbance, by the ledger's and the world's account.
    fn disturbances(&self) -> u64 {
        self.account();
        let seen = self.ledger.lock().seen();
        // Graphs that had to go for the cache's bounds, or for memory.
        let evictions = self.pool.counters().evictions + self.cache.counters().evictions;
        self.disturbed.load(Ordering::SeqCst) + seen.give_backs + self.driver.injected() + evictions
    }

    pub(super) fn dynamic(&self) -> DynDriver {
        self.driver.clone()
    }
}

/// A recipe: a key of the cache, with its inputs and output.
struct Recipe {
    shape: Shape,
    stream: usize,
    inputs: [usize; 2],
    own: Option<[Slot; 2]>,
    out: Slot,
    /// Bytes were dropped that its graph may read: it is to be told that they were filled again.
    outdated: bool,
    /// The stream and inputs of the last graph launch, with the disturbances at that time.
    settled: Option<Settled>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Settled {
    stream: u64,
    serials: [u64; 2],
    shape: Shape,
    disturbances: u64,
}

/// What went wrong, if anything.
pub(super) type Step = Result<(), Wrong>;

/// A way in which the world differed from the model.
#[derive(Debug)]
pub(super) enum Wrong {
    /// Bytes were not what their owner wrote, or not what an eager run gives.
    Corrupt(String),
    /// A good graph did not replay although nobody disturbed it.
    Needless(String),
    /// An error that nothing explains.
    Error(String),
}

pub(super) struct World {
    id: u64,
    slots: Vec<Option<Slot>>,
    recipes: Vec<Recipe>,
    sink: Slot,
    arena: Option<Arena>,
    streams: Vec<Stream>,
    pub(super) tally: Tally,
    pub(super) thread_next: bool,
    /// What was dropped when the worker last looked.
    seen: [u64; 3],
}

/// How much work a recipe with inputs in these slots does. A graph is told from another by its inputs' allocations only,
/// so the work must follow from them: a recipe that came back to inputs which it had before, with other work, once was
/// taken for a corrupt read (seed 17179869186 in slab mode, step 80466).
fn parts_of(inputs: [usize; 2]) -> u8 {
    (inputs[1] % 3) as u8
}

impl World {
    pub(super) fn new(shared: &Shared, id: usize) -> Result<Self, PoolError> {
        let streams = (0..STREAMS).map(|_| Stream::new(&shared.dynamic())).collect::<Result<Vec<_>, _>>()?;
        let arena = shared.pool.arena(&streams[0])?;
        let state = |words: usize| -> Result<Slot, PoolError> {
            let slice = shared.pool.alloc_for(words, Purpose::State, &streams[0])?;
            let data: Vec<u32> = (0..words as u32).collect();
            streams[0].upload(&data, &slice)?;
            Ok(own(shared, slice, Some(data), 0))
        };
        let mut recipes = Vec::new();
        for n in 0..RECIPES {
            let scratch = [Scratch::Pin, Scratch::Track, Scratch::Track, Scratch::Shared][n % 4];
            let inputs = [n % SLOTS, (n * 3 + 1) % SLOTS];
            recipes.push(Recipe {
                shape: Shape {
                    k: n as u32 + 1,
                    parts: if n < STEADY { n as u8 % 3 } else { parts_of(inputs) },
                    words: if n % 5 == 1 { 48 << 10 } else { 1 << 10 } * shared.scale,
                    adds: n % 3 == 2,
                    counts: n % 4 == 1,
                    scratch,
                    strong: n < STEADY || n % 4 == 3,
                },
                stream: if scratch == Scratch::Shared { 0 } else { n % STREAMS },
                inputs,
                own: if n < STEADY { Some([state(512)?, state(512)?]) } else { None },
                out: state(1 << 10)?,
                outdated: false,
                settled: None,
            });
        }
        let sink = state(1 << 10)?;
        let slots = (0..SLOTS).map(|_| None).collect();
        let tally = Tally::default();
        let seen = shared.beds.dropped();
        Ok(Self { id: id as u64, slots, recipes, sink, arena: Some(arena), streams, tally, thread_next: false, seen })
    }

    /// Does one step.
    pub(super) fn apply(&mut self, shared: &Shared, op: Op) -> Step {
        self.tally.note(op);
        match op {
            Op::Alloc { slot, size, stream } => self.alloc(shared, slot.into(), size, stream.into()),
            Op::Free { slot } => {
                if let Some(slot) = self.slots[usize::from(slot) % SLOTS].take() {
                    disown(shared, &slot);
                }
                Ok(())
            }
            Op::Fill { slot, stream, value } => self.fill(shared, slot.into(), stream.into(), value.into()),
            Op::Copy { from, to, stream } => self.copy(shared, from.into(), to.into(), stream.into()),
            Op::UseAndFree { slot, stream } => self.use_and_free(shared, slot.into(), stream.into()),
            Op::Read { slot } => self.read(shared, slot.into()),
            Op::Run { recipe, value, compare } => {
                let recipe = usize::from(recipe) % RECIPES;
                self.freshen(shared, recipe, value.into())?;
                self.run(shared, recipe, Ending::Well)?;
                if compare { self.compare(shared, recipe) } else { Ok(()) }
            }
            Op::Rebind { recipe, slot } => {
                let recipe = &mut self.recipes[STEADY + usize::from(recipe) % (RECIPES - STEADY)];
                recipe.inputs = [recipe.inputs[1], usize::from(slot) % SLOTS];
                recipe.shape.parts = parts_of(recipe.inputs);
                Ok(())
            }
            Op::Cancel { recipe, after } => self.run(shared, usize::from(recipe) % RECIPES, Ending::Cancel(after % 4)),
            Op::Panic { recipe, after } => self.run(shared, usize::from(recipe) % RECIPES, Ending::Panic(after % 4)),
            Op::Evict { recipe } => self.evict(shared, usize::from(recipe) % RECIPES),
            Op::Flush { sixteenths } => self.flush(shared, sixteenths.into()),
            Op::Trim { sixteenths } => {
                shared.disturb();
                let result = shared.pool.trim_to(shared.memory_bytes / 16 * (usize::from(sixteenths) % 17));
                shared.disturb();
                self.explained(shared, "trim", result.map(drop))
            }
            Op::Limit { sixteenths } => {
                shared.disturb();
                let sixteenths = usize::from(sixteenths) % 17;
                let limit = (sixteenths > 6).then(|| shared.memory_bytes / 16 * sixteenths);
                shared.pool.set_limit(limit.or(shared.most_bytes));
                Ok(())
            }
            Op::Fail { call, nth } => {
                if shared.faults {
                    shared.disturb();
                    let mut kinds = CALLS.iter().filter(|name| !NEVER_FAIL.contains(name));
                    let kind = usize::from(call) % (CALLS.len() - NEVER_FAIL.len());
                    if let Some(kind) = kinds.nth(kind) {
                        // One at a time: what must be ended is tried twice, and two failures in a row beat that.
                        shared.driver.clear();
                        shared.driver.fail_nth(kind, u64::from(nth % 8) + 1);
                    }
                }
                Ok(())
            }
            Op::Thread => {
                self.thread_next = true;
                Ok(())
            }
            Op::Step { stream, pieces } => {
                let stream = &self.streams[usize::from(stream) % STREAMS];
                // Hardware runs what it likes when it likes.
                let Some(host) = shared.driver.as_host().filter(|_| shared.most_bytes.is_none()) else { return Ok(()) };
                for _ in 0..=pieces % 8 {
                    let _ = shared.driver.bind();
                    if !matches!(host.step(stream.handle()), Ok(true)) {
                        break;
                    }
                }
                Ok(())
            }
            Op::Sync { stream } => {
                let result = self.streams[usize::from(stream) % STREAMS].synchronize();
                self.explained(shared, "synchronize", result)
            }
            Op::Restream { stream } => self.restream(shared, usize::from(stream) % STREAMS),
            Op::Sleep { purposes, content } => self.sleep(shared, purposes, content),
            Op::Wake { purposes } => self.wake(shared, purposes),
            Op::Quiet => self.quiet(shared),
        }
    }

    fn sleep(&mut self, shared: &Shared, chosen: u8, content: u8) -> Step {
        let mut content = [Content::Keep, Content::KeepPinned, Content::Keep, Content::Drop][usize::from(content) % 4];
        let result = {
            let _turn = shared.beds.turn.lock();
            let chosen = purposes(chosen);
            // What sleeps already keeps its bytes, whatever is said now; an unmap that failed before is done now, and is not a loss.
            let all = if chosen.is_empty() { &Purpose::ALL[..] } else { &chosen };
            let again = all.iter().any(|purpose| shared.pool.is_asleep(*purpose));
            if again {
                content = Content::Keep;
            }
            shared.disturb();
            shared.driver.mark(mark::SLEEP, &[("kept", u64::from(content != Content::Drop))]);
            let result = shared.pool.sleep(content, &chosen);
            shared.driver.mark(mark::SLEPT, &[]);
            shared.beds.note(&shared.pool, content == Content::Drop);
            shared.disturb();
            result
        };
        match result {
            Ok(_) => {
                self.tally.slept += 1;
                Ok(())
            }
            Err(PoolError::Unsupported { .. }) if shared.pool.mode() == PoolMode::Slab => Ok(()),
            // Another worker captures.
            Err(PoolError::Capturing { .. }) if shared.crowd => Ok(()),
            Err(error) => self.explained(shared, "a sleep", Err(error)),
        }
    }

    fn wake(&mut self, shared: &Shared, chosen: u8) -> Step {
        let result = {
            let _turn = shared.beds.turn.lock();
            shared.disturb();
            // Half way it may go back to sleep.
            shared.driver.mark(mark::SLEEP, &[("kept", 1)]);
            let result = shared.pool.wake(&purposes(chosen));
            shared.driver.mark(mark::SLEPT, &[]);
            shared.beds.note(&shared.pool, false);
            shared.disturb();
            result
        };
        self.explained(shared, "a wake", result.map(drop))
    }

    /// Until the guard is dropped nothing falls asleep. What was dropped before is not what the model says any more.
    fn awake(&mut self, shared: &Shared) -> Awake {
        let (awake, now) = {
            // Not while somebody falls asleep and has yet to note what that cost: it could be awake again before the bytes are read.
            let _turn = shared.beds.turn.lock();
            (shared.pool.hold_awake(&self.streams[0]), shared.beds.dropped())
        };
        if now != self.seen {
            let lost = |slot: &Slot| now[slot.slice.purpose() as usize] != self.seen[slot.slice.purpose() as usize];
            let slots = self.slots.iter_mut().flatten();
            let own = self.recipes.iter_mut().flat_map(|r| r.own.iter_mut().flatten().chain([&mut r.out]));
            for slot in slots.chain(own).chain([&mut self.sink]) {
                if lost(slot) {
                    slot.words = None;
                }
            }
            for recipe in &mut self.recipes {
                recipe.outdated = true;
            }
            self.seen = now;
        }
        awake
    }

    /// Reads everything back and compares it.
    pub(super) fn read_all(&mut self, shared: &Shared) -> Step {
        for slot in 0..SLOTS {
            self.read(shared, slot)?;
        }
        for recipe in 0..RECIPES {
            self.compare(shared, recipe)?;
        }
        let _awake = self.awake(shared);
        self.compare_slot(shared, &self.sink, "the sink")
    }

    /// Lets go of everything, in an order that the seed decides.
    pub(super) fn leave(mut self, shared: &Shared, order: u64) -> Tally {
        for step in 0..4 {
            match (order + step) % 4 {
                0 => self.slots.drain(..).flatten().for_each(|slot| disown(shared, &slot)),
                1 => drop(self.arena.take()),
                2 => self.streams.clear(),
                _ => {
                    for recipe in self.recipes.drain(..) {
                        disown(shared, &recipe.out);
                        recipe.own.iter().flatten().for_each(|slot| disown(shared, slot));
                    }
                }
            }
        }
        disown(shared, &self.sink);
        self.tally
    }

    fn alloc(&mut self, shared: &Shared, slot: usize, size: u8, stream: usize) -> Step {
        let (slot, stream) = (slot % SLOTS, stream % STREAMS);
        let words = match size {
            0..=7 => 0,
            8..=159 => usize::from(size - 7) * 24,
            160..=239 => usize::from(size - 159) * 512,
            _ => usize::from(size - 239) * (16 << 10),
        } * shared.scale;
        if let Some(old) = self.slots[slot].take() {
            disown(shared, &old);
        }
        let purpose = [Purpose::Scratch, Purpose::Scratch, Purpose::State, Purpose::Weight][usize::from(size) % 4];
        match shared.pool.alloc_for(words, purpose, &self.streams[stream]) {
            Ok(slice) => {
                self.slots[slot] = Some(own(shared, slice, None, stream));
                Ok(())
            }
            Err(error) => {
                shared.disturb();
                self.explained(shared, "alloc", Err(error))
            }
        }
    }

    fn fill(&mut self, shared: &Shared, slot: usize, stream: usize, value: u32) -> Step {
        let (slot, stream) = (slot % SLOTS, stream % STREAMS);
        let _awake = self.awake(shared);
        let Some(slot) = self.slots[slot].as_mut() else { return Ok(()) };
        let result = fill(shared, &self.streams, slot, stream, value.wrapping_mul(0x0101_0101));
        self.explained(shared, "fill", result)
    }

    fn copy(&mut self, shared: &Shared, from: usize, to: usize, stream: usize) -> Step {
        let (from, to, stream) = (from % SLOTS, to % SLOTS, stream % STREAMS);
        let _awake = self.awake(shared);
        let Ok([Some(from), Some(to)]) = self.slots.get_disjoint_mut([from, to]) else { return Ok(()) };
        let result = copy(shared, &self.streams, from, to, stream);
        self.explained(shared, "copy", result)
    }

    fn use_and_free(&mut self, shared: &Shared, slot: usize, stream: usize) -> Step {
        let stream = stream % STREAMS;
        let _awake = self.awake(shared);
        let Some(mut slot) = self.slots[slot % SLOTS].take() else { return Ok(()) };
        let result = copy(shared, &self.streams, &mut slot, &mut self.sink, stream);
        disown(shared, &slot);
        drop(slot);
        self.explained(shared, "copy before a free", result)
    }

    fn read(&mut self, shared: &Shared, slot: usize) -> Step {
        let _awake = self.awake(shared);
        match &self.slots[slot % SLOTS] {
            Some(found) => self.compare_slot(shared, found, &format!("slot {}", slot % SLOTS)),
            None => Ok(()),
        }
    }

    fn compare(&mut self, shared: &Shared, recipe: usize) -> Step {
        let _awake = self.awake(shared);
        let found = &self.recipes[recipe];
        self.compare_slot(shared, &found.out, &format!("the output of recipe {recipe} ({:?})", found.shape))
    }

    fn compare_slot(&self, shared: &Shared, slot: &Slot, what: &str) -> Step {
        let Some(want) = &slot.words else { return Ok(()) };
        match self.streams[slot.last].download(&slot.slice) {
            Ok(found) if found == *want => Ok(()),
            Ok(found) => {
                let at = found.iter().zip(want).position(|(f, w)| f != w).unwrap_or(0);
                Err(Wrong::Corrupt(format!(
                    "{what}: word {at} of {} at {} is {}, should be {}",
                    want.len(),
                    slot.slice.ptr(),
                    found[at],
                    want[at]
                )))
            }
            Err(error) => self.explained(shared, "download", Err(error)),
        }
    }

    /// New input for a recipe: its first input is written anew.
    fn freshen(&mut self, shared: &Shared, recipe: usize, value: u32) -> Step {
        let _awake = self.awake(shared);
        let found = &mut self.recipes[recipe];
        let stream = if value.is_multiple_of(3) { (found.stream + 1) % STREAMS } else { found.stream };
        let input = match &mut found.own {
            Some([input, _]) => input,
            None => match &mut self.slots[found.inputs[0]] {
                Some(input) => input,
                None => return Ok(()),
            },
        };
        let result = fill(shared, &self.streams, input, stream, value.wrapping_mul(7919));
        self.explained(shared, "new input", result)
    }

    fn run(&mut self, shared: &Shared, recipe: usize, ending: Ending) -> Step {
        match self.run_once(shared, recipe, ending) {
            Err(wrong) => Err(wrong),
            Ok(_) => Ok(()),
        }
    }

    /// One run of a recipe; `None` if it could not be tried or was refused with good reason.
    fn run_once(&mut self, shared: &Shared, n: usize, ending: Ending) -> Result<Option<Ran>, Wrong> {
        let awake = self.awake(shared);
        let disturbances = shared.disturbances();
        let seen = self.seen;
        let recipe = &mut self.recipes[n];
        let stream = recipe.stream;
        let (a, b) = match &mut recipe.own {
            Some([a, b]) => (a, b),
            None => {
                let [a, b] = recipe.inputs;
                match self.slots.get_disjoint_mut([a, b]) {
                    Ok([Some(a), Some(b)]) if !a.slice.is_empty() && !b.slice.is_empty() => (a, b),
                    _ => return Ok(None),
                }
            }
        };
        // An input that nobody wrote yet gets words first; so does an output that a failure left open.
        let mut ready = Ok(());
        for slot in [&mut *a, &mut *b, &mut recipe.out] {
            if slot.words.is_none() {
                ready = ready.and_then(|()| fill(shared, &self.streams, slot, stream, 1));
            }
            ready = ready.and_then(|()| order(shared, &self.streams, slot, stream));
        }
        if let Err(error) = ready {
            self.explained(shared, "ordering a run", Err(error))?;
            return Ok(None);
        }
        let key = GraphKey::new((self.id, n));
        if std::mem::take(&mut recipe.outdated) {
            // All of it was filled just now, or sleeps.
            shared.cache.invalidate(&key);
            recipe.settled = None;
        }
        drop(awake);
        let arena = if recipe.shape.scratch == Scratch::Shared { self.id + 1 } else { 0 };
        let policy = match (recipe.shape.scratch, &self.arena) {
            (Scratch::Shared, Some(arena)) if *arena.stream() == self.streams[stream] => {
                ScratchPolicy::Shared(arena.clone())
            }
            (Scratch::Track, _) => ScratchPolicy::Track,
            _ => ScratchPolicy::Pin,
        };
        let serials = || shared.serial();
        let work = Work {
            driver: &shared.driver,
            probe: &shared.probe,
            shape: recipe.shape,
            a: &a.slice,
            b: &b.slice,
            out: &recipe.out.slice,
            ending,
            arena,
            serials: &serials,
            called: Cell::new(false),
        };
        let bound = work.bound();
        let request = Request::new(&key, &shared.pool, &self.streams[stream]).policy(policy).bound(&bound);
        let name = self.id << 32 | n as u64;
        shared.driver.mark(mark::RUN, &[("recipe", name)]);
        let ran = quiet::panics_here(|| {
            catch_unwind(AssertUnwindSafe(|| shared.cache.run(&request, |scope| work.body(scope))))
        });
        let good = matches!(ran, Ok(Ok(_)));
        // Bytes may have been dropped before or after what ran: nobody knows.
        let lost = shared.beds.dropped() != seen;
        shared.driver.mark(mark::RAN, &[("recipe", name), ("good", u64::from(good))]);
        let called = work.called.get();
        for slot in [&mut *a, &mut *b, &mut recipe.out] {
            slot.last = stream;
        }
        let settled = Settled {
            stream: self.streams[stream].id(),
            serials: [a.serial, b.serial],
            shape: recipe.shape,
            disturbances,
        };
        match ran {
            Ok(Ok(outcome)) => {
                recipe.out.words = match (&a.words, &b.words, &recipe.out.words) {
                    (Some(a), Some(b), Some(before)) if !lost => Some(recipe.shape.eager(a, b, before)),
                    _ => None,
                };
                self.tally.ran(outcome.ran);
                let was = recipe.settled.take();
                let after = shared.disturbances();
                if outcome.ran.is_graph() {
                    recipe.settled = Some(Settled { disturbances: after, ..settled });
                }
                if outcome.ran != Ran::Replayed && !shared.crowd && was == Some(settled) && after == disturbances {
                    return Err(Wrong::Needless(format!(
                        "recipe {n} ({:?}): {} although nobody disturbed it{}",
                        recipe.shape,
                        outcome.ran,
                        outcome.cause.map(|c| format!(": {c}")).unwrap_or_default()
                    )));
                }
                Ok(Some(outcome.ran))
            }
            Ok(Err(Halt::OnPurpose)) => {
                (recipe.out.words, recipe.settled) = (None, None);
                self.tally.cancels += 1;
                Ok(None)
            }
            Ok(Err(Halt::Cache(error))) => {
                recipe.out.words = None;
                shared.disturb();
                let was = recipe.settled.take();
                let _ = (called, was);
                self.explained_cache(shared, n, error, lost)?;
                Ok(None)
            }
            Err(panic) => {
                (recipe.out.words, recipe.settled) = (None, None);
                if panic.downcast_ref::<OnPurpose>().is_none() {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                    return Err(Wrong::Error(format!("recipe {n}: a panic: {}", text.unwrap_or_default())));
                }
                self.tally.panics += 1;
                Ok(None)
            }
        }
    }

    fn evict(&mut self, shared: &Shared, n: usize) -> Step {
        self.recipes[n].settled = None;
        shared.disturb();
        shared.cache.remove(&GraphKey::new((self.id, n)));
        Ok(())
    }

    fn flush(&mut self, shared: &Shared, sixteenths: usize) -> Step {
        shared.disturb();
        let bytes = shared.memory_bytes / 16 * (4 + sixteenths % 8);
        let result = shared.pool.alloc::<u8>(bytes, &self.streams[0]);
        shared.disturb();
        self.explained(shared, "flush", result.map(drop))
    }

    fn restream(&mut self, shared: &Shared, n: usize) -> Step {
        let made = Stream::new(&shared.dynamic()).and_then(|new| {
            order_streams(shared, &self.streams[n], &new)?;
            Ok(new)
        });
        match made {
            Ok(new) => {
                // Its queued work still lies there when the handle goes.
                self.streams[n] = new;
                if n == 0 {
                    self.arena = None;
                    self.arena = shared.pool.arena(&self.streams[0]).ok();
                }
                Ok(())
            }
            Err(error) => self.explained(shared, "a new stream", Err(error)),
        }
    }

    /// Nobody disturbs: once a recipe's graph was launched, it replays, and right.
    pub(super) fn quiet(&mut self, shared: &Shared) -> Step {
        shared.driver.clear();
        self.wake(shared, 0)?;
        for n in 0..RECIPES {
            let mut graph = false;
            for value in 0..5 {
                self.freshen(shared, n, 31 * value)?;
                match self.run_once(shared, n, Ending::Well)? {
                    Some(ran) if ran.is_graph() => {
                        graph = true;
                        break;
                    }
                    Some(_) => {}
                    None => break,
                }
            }
            if !graph {
                continue;
            }
            for value in 0..2 {
                self.freshen(shared, n, 1000 + value)?;
                let before = shared.disturbances();
                let ran = self.run_once(shared, n, Ending::Well)?;
                if ran != Some(Ran::Replayed) && !shared.crowd && shared.disturbances() == before {
                    return Err(Wrong::Needless(format!("recipe {n} in quiet: {ran:?}")));
                }
                self.tally.quiet_replays += u64::from(ran == Some(Ran::Replayed));
            }
            self.compare(shared, n)?;
        }
        Ok(())
    }

    /// An error is fine if memory was short or the failure was made up; everything else is wrong.
    fn explained(&self, shared: &Shared, what: &str, result: Result<(), PoolError>) -> Step {
        match result {
            Err(PoolError::Asleep { .. }) if shared.crowd || shared.beds.any_asleep() => Ok(()),
            Err(error) if !error.is_out_of_memory() && !error.to_string().contains("injected failure") => {
                Err(Wrong::Error(format!("{what}: {error}")))
            }
            _ => Ok(()),
        }
    }

    fn explained_cache(&mut self, shared: &Shared, n: usize, error: CacheError, lost: bool) -> Step {
        self.tally.refusals += 1;
        let fine = match &error {
            CacheError::Pool(PoolError::OutOfMemory(_)) => true,
            CacheError::Pool(PoolError::Asleep { .. }) => shared.crowd || shared.beds.any_asleep(),
            CacheError::ContentLost(_) => lost,
            CacheError::Pool(error) if error.is_out_of_memory() => true,
            CacheError::Driver(error) if error.is_out_of_memory() => true,
            error => error.to_string().contains("injected failure"),
        };
        if fine { Ok(()) } else { Err(Wrong::Error(format!("recipe {n} ({:?}): {error}", self.recipes[n].shape))) }
    }
}
