//! One run: a small card, the model on it, and texts that come and go.

use std::sync::Arc;
use std::time::Instant;

use evergraph_graphcache::{
    CacheConfig, CostTable, Counters as CacheCounters, GraphCache, GraphKey, Outcome, Ran, Request, Scope,
};
use evergraph_kernels::Kernels;
use evergraph_kernels::ops::TensorView;
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::host::{HostConfig, HostDevice, Live, Poison};
use evergraph_pool::driver::{Driver, DynDriver, Faulty};
use evergraph_pool::{
    Arena, Counters as PoolCounters, Pool, PoolConfig, PoolMode, PoolStats, ScratchPolicy, Stream, Use,
};

use super::account::Account;
use super::model::{Model, Random, root};
use super::sequence::{Script, Sequence};
use super::step::{Bench, FUSED_UP_TO, Room};
use super::witness::{Findings, STEP, Seen, Way, Witness};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stress::ledger::Ledger;

/// Memory of the card, bytes.
const CARD_BYTES: usize = 64 << 20;
/// Unit of mapping on the card, bytes: a sixty-fourth of what real cards have.
const GRANULARITY_BYTES: usize = 32 << 10;
/// The smallest slab, bytes.
const SLAB_BYTES: usize = 32 << 10;
/// Rounds after which something must be wrong.
const MOST_ROUNDS: usize = 1000;

/// How one run is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) mode: PoolMode,
    pub(super) limit_bytes: Option<usize>,
    pub(super) graphs: bool,
    pub(super) seed: u64,
    /// `host` or `cuda`.
    pub(super) backend: &'static str,
    /// How much larger everything is than on the smallest card.
    pub(super) scale: usize,
}

/// How much larger the pages of a device are than those that the story was written for. A slab is as large as we like.
pub(super) fn scale(device: &Device, mode: PoolMode) -> Result<usize> {
    match mode {
        PoolMode::Vmm => Ok((device.page_bytes(GRANULARITY_BYTES)? / GRANULARITY_BYTES).max(1)),
        PoolMode::Slab => Ok(1),
    }
}

/// What is left of a run.
#[derive(Debug)]
pub(super) struct Played {
    /// The sampled tokens, text by text.
    pub(super) tokens: Vec<Vec<i32>>,
    pub(super) findings: Findings,
    pub(super) pool: PoolCounters,
    pub(super) stats: PoolStats,
    pub(super) cache: CacheCounters,
    /// Decode steps (one token each).
    pub(super) steps: u64,
    pub(super) seconds: f64,
    /// What was still live on the card after everything was dropped.
    pub(super) left: Live,
}

/// The part of a decode step that a graph is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Layers,
    Head,
}

/// A step's number for the witness and the account.
fn key(text: u64, part: Part) -> u64 {
    2 * text + 2 + u64::from(part == Part::Head)
}

/// A step by its number, for people.
pub(super) fn name(key: u64) -> String {
    format!("text {} {}", (key - 2) / 2, if key.is_multiple_of(2) { "layers" } else { "head" })
}

/// The texts: when they arrive, the length of their prompts, the tokens that they want. Short ones and long
/// ones, so that some outgrow their cache, some need much scratch while others decode, and some leave early.
fn scripts(seed: u64) -> Vec<Script> {
    let mut random = Random::new(seed ^ 0x7e47);
    [(0, 24, 150), (0, 26, 80), (4, 100, 80), (30, 220, 70), (50, 230, 60), (72, 400, 50), (100, 28, 50)]
        .into_iter()
        .map(|(arrives, prompt, wants)| {
            let vary = |n: usize, random: &mut Random| n + random.below(5) - 2;
            let (prompt, wants) = (vary(prompt, &mut random), vary(wants, &mut random));
            Script::new(&mut random, arrives, prompt, wants)
        })
        .collect()
}

/// Plays the story once.
pub(super) fn play(device: &Device, setting: &Setting, account: &mut Account<'_>) -> Result<Played> {
    let host = HostConfig::default().memory(CARD_BYTES).granularity(GRANULARITY_BYTES).poison(Poison::Full);
    let own = device.is_host();
    let device = Faulty::new(device.driver(host)?);
    device.set_logging(true);
    let start = Instant::now();
    let mut stage = Stage::new(setting, Arc::clone(&device))?;
    let result = stage.perform(setting, account);
    let (pool, stats) = (stage.pool.counters(), stage.pool.stats());
    let cache = stage.cache.counters();
    let steps = stage.steps;
    let (findings, mut books) = stage.curtain();
    let seconds = start.elapsed().as_secs_f64();
    books.read(&device.take_log(), &|_, _| None);
    // By the account of a device of its own, or where it has none by the log.
    let left = device.as_host().filter(|_| own).map_or_else(|| books.live(), HostDevice::live);
    Ok(Played { tokens: result?, findings, pool, stats, cache, steps, seconds, left })
}

#[derive(Debug)]
struct Stage {
    // Dropped in this order: graphs before what they are made of.
    cache: GraphCache,
    arena: Arena,
    texts: Vec<Sequence>,
    model: Model,
    kernels: Kernels,
    pool: Pool,
    stream: Stream,
    device: Arc<Faulty>,
    witness: Witness,
    /// What was made and not given back.
    books: Ledger,
    scale: usize,
    steps: u64,
    round: usize,
}

impl Stage {
    fn new(setting: &Setting, device: Arc<Faulty>) -> Result<Self> {
        let driver: DynDriver = Arc::clone(&device) as _;
        let mut config =
            PoolConfig::new(setting.mode).chunk(GRANULARITY_BYTES * setting.scale).smallest_slab(SLAB_BYTES);
        config.limit_bytes = setting.limit_bytes;
        let pool = Pool::new(Arc::clone(&driver), config)?;
        let stream = Stream::new(&driver)?;
        let kernels = Kernels::load(driver)?;
        let room = Room { pool: &pool, stream: &stream, device: &device, scale: setting.scale };
        let model = Model::generate(setting.seed, room)?;
        let layout = |function| Some((function, pool.driver().param_layout(function).ok()??));
        let witness = Witness::of(kernels.functions().filter_map(|(_, function)| layout(function)));
        // Prices of a made-up card, whatever this machine is busy with: the story is the same each time, and has every kind
        // of repair in it. (On this device itself captures are so cheap that pages are put back only where nothing is free.)
        let mut costs = CostTable::h200();
        costs.capture_us = [60.0, 184.0, 1138.0];
        costs.scan_us = [117.0, 576.0, 1215.0];
        costs.instantiate_us = [127.0, 416.0, 1645.0];
        costs.update_us = [3.5, 12.0, 54.0];
        costs.eager_us = [412.0, 1294.0, 4080.0];
        costs.launch_us = [86.0, 246.0, 803.0];
        costs.remap_us = [[44.6, 64.6], [357.0, 517.0], [2854.0, 4134.0]];
        let mut config = CacheConfig::default().graphs(setting.graphs).strict(true).costs(costs);
        config.costs.refine = false;
        let cache = GraphCache::new(config);
        let arena = pool.arena(&stream)?;
        Ok(Self {
            cache,
            arena,
            texts: Vec::new(),
            model,
            kernels,
            pool,
            stream,
            device,
            witness,
            books: Ledger::default(),
            scale: setting.scale,
            steps: 0,
            round: 0,
        })
    }

    fn perform(&mut self, setting: &Setting, account: &mut Account<'_>) -> Result<Vec<Vec<i32>>> {
        let scripts = scripts(setting.seed);
        let mut tokens = vec![Vec::new(); scripts.len()];
        let mut waiting: Vec<(u64, Script)> = (0..).zip(scripts).collect();
        account.model(self.model.bytes(), self.pool.limit())?;
        for round in 0..MOST_ROUNDS {
            self.round = round;
            account.round(round);
            while waiting.first().is_some_and(|(_, script)| script.arrives <= round) {
                let (id, script) = waiting.remove(0);
                self.arrive(setting, id, script, account)?;
            }
            self.prompts(account)?;
            for text in 0..self.texts.len() {
                if !self.texts[text].in_prompt() && !self.texts[text].is_done() {
                    self.decode(text, account)?;
                }
            }
            self.leave(&mut tokens, account)?;
            if self.texts.is_empty() && waiting.is_empty() {
                return Ok(tokens);
            }
        }
        Err(Error::CheckFailed(format!("the texts were not done after {MOST_ROUNDS} rounds")))
    }

    fn room(&self) -> Room<'_> {
        Room { pool: &self.pool, stream: &self.stream, device: &self.device, scale: self.scale }
    }

    /// Brings the books up to date.
    fn read_log(&mut self) {
        let log = self.device.take_log();
        self.witness.read(&log);
        self.books.read(&log, &|_, _| None);
    }

    fn bench(&self) -> Bench<'_> {
        Bench { room: self.room(), kernels: &self.kernels, scope: None, owner: None }
    }

    fn arrive(&mut self, setting: &Setting, id: u64, script: Script, account: &mut Account<'_>) -> Result<()> {
        let length = script.prompt.len();
        let text = Sequence::new(self.room(), id, script, setting.seed)?;
        account.arrives(id, length, text.kv.capacity, text.kv.slice.bytes(), text.prompt_bytes())?;
        self.texts.push(text);
        self.blows(account)
    }

    /// One chunk of the oldest unfinished prompt.
    fn prompts(&mut self, account: &mut Account<'_>) -> Result<()> {
        let Some(index) = self.texts.iter().position(Sequence::in_prompt) else { return Ok(()) };
        let mut text = self.texts.remove(index);
        let result = text.next_chunk(self.bench(), &self.model);
        let done = !text.in_prompt();
        let (id, len) = (text.id, text.len);
        self.texts.insert(index, text);
        result?;
        account.chunk(id, len, done);
        self.blows(account)
    }

    /// One token.
    fn decode(&mut self, index: usize, account: &mut Account<'_>) -> Result<()> {
        let moved = self.texts[index].is_full();
        if moved {
            let mut text = self.texts.remove(index);
            let result = text.grow(self.bench());
            let (id, capacity) = (text.id, text.kv.capacity);
            self.texts.insert(index, text);
            result?;
            account.grows(id, capacity, capacity == 2 * FUSED_UP_TO)?;
            self.blows(account)?;
        }
        for part in [Part::Layers, Part::Head] {
            self.step(index, part, moved && part == Part::Layers, account)?;
        }
        let text = &mut self.texts[index];
        text.len += 1;
        text.sampled += 1;
        self.steps += 1;
        Ok(())
    }

    /// One part of a decode step, through the graph cache.
    fn step(&mut self, index: usize, part: Part, moved: bool, account: &mut Account<'_>) -> Result<()> {
        let text = &self.texts[index];
        let number = key(text.id, part);
        let key = GraphKey::new((text.id, part == Part::Head));
        let (kv, token, position) = (&text.kv.slice, &text.token, &text.position);
        let (hidden, sampler, recent) = (&text.hidden, &text.sampler, &text.recent);
        let bound = match part {
            Part::Layers => vec![kv.allocation(), token.allocation(), position.allocation(), hidden.allocation()],
            Part::Head => vec![hidden.allocation(), sampler.allocation(), recent.allocation(), token.allocation()],
        };
        // The oldest text keeps its scratch, come what may; the others' may be taken when memory is short; the heads
        // share theirs, because they run one after the other.
        let policy = match part {
            Part::Head => ScratchPolicy::Shared(self.arena.clone()),
            Part::Layers if text.id == 0 => ScratchPolicy::Pin,
            Part::Layers => ScratchPolicy::Track,
        };
        let ids = TensorView::new(&root("token", token, &self.pool), QuantType::I32, &[1])?;
        let positions = TensorView::new(&root("position", position, &self.pool), QuantType::I32, &[1])?;
        let request = Request::new(&key, &self.pool, &self.stream).policy(policy).bound(&bound);
        let work = |scope: &Scope<'_>| -> Result<()> {
            let bench = Bench { scope: Some(scope), ..self.bench() };
            match part {
                Part::Layers => {
                    for weight in self.model.body_weights() {
                        scope.declare(&weight.slice, Use::Weight)?;
                    }
                    scope.declare(kv, Use::State)?;
                    scope.declare(token, Use::Input)?;
                    scope.declare(position, Use::Input)?;
                    scope.declare(hidden, Use::State)?;
                    let bench = Bench { owner: Some(number), ..bench };
                    super::step::body(
                        bench,
                        &self.model,
                        &text.kv.layers,
                        &ids,
                        &positions,
                        None,
                        &text.controls.hidden,
                    )
                }
                Part::Head => {
                    for weight in self.model.head_weights() {
                        scope.declare(&weight.slice, Use::Weight)?;
                    }
                    scope.declare(hidden, Use::Input)?;
                    scope.declare(sampler, Use::State)?;
                    scope.declare(recent, Use::State)?;
                    scope.declare(token, Use::State)?;
                    scope.declare(position, Use::State)?;
                    // Inside a capture the scratch is the arena's.
                    let bench = Bench { owner: (!scope.capturing()).then_some(number), ..bench };
                    super::step::head(bench, &self.model, &text.controls)
                }
            }
        };
        self.device.mark(STEP, &[("key", number), ("moved", u64::from(moved))]);
        let start = Instant::now();
        let outcome = self.cache.run(&request, work)?;
        let took = start.elapsed();
        self.read_log();
        if let Some(seen) = self.witness.end_step() {
            agree(number, &outcome, &seen)?;
            account.step(number, &outcome, &seen, took)?;
        }
        account.blows(self.witness.blows(), Some(number))
    }

    /// Reads the log between steps.
    fn blows(&mut self, account: &mut Account<'_>) -> Result<()> {
        self.read_log();
        account.blows(self.witness.blows(), None)
    }

    /// Texts that have what they wanted leave, and so does their memory.
    fn leave(&mut self, tokens: &mut [Vec<i32>], account: &mut Account<'_>) -> Result<()> {
        while let Some(index) = self.texts.iter().position(Sequence::is_done) {
            let text = self.texts.remove(index);
            let sampled = text.tokens(&self.stream)?;
            account.leaves(text.id, sampled.len())?;
            if let Some(place) = usize::try_from(text.id).ok().and_then(|id| tokens.get_mut(id)) {
                *place = sampled;
            }
        }
        self.blows(account)
    }

    /// Everything goes; what the witness saw stays.
    fn curtain(mut self) -> (Findings, Ledger) {
        self.read_log();
        let _ = self.witness.end_step();
        (self.witness.findings().clone(), std::mem::take(&mut self.books))
    }
}

/// What the cache says it did must be what the driver's log shows.
fn agree(key: u64, outcome: &Outcome, seen: &Seen) -> Result<()> {
    let same = match outcome.ran {
        Ran::WarmUp => seen.way == Way::WarmUp,
        Ran::Captured => seen.way == Way::Captured,
        Ran::Replayed => seen.way == Way::Replayed,
        Ran::Remapped => seen.way == Way::Remapped,
        Ran::Updated => seen.way == Way::Updated,
        Ran::Recaptured => seen.way == Way::Recaptured,
        Ran::Eager => matches!(seen.way, Way::Eager | Way::WarmUp),
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(Error::CheckFailed(format!(
        "the graph cache says that it {} the {}, the driver's log shows: {:?}",
        outcome.ran,
        name(key),
        seen.way
    )))
}
