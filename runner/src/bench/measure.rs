//! One test: fill the cache, warm up, repeat, count.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::parameters::{FlashAttn, Row};
use super::{Settings, Stage};
use crate::engine::{ExpertTally, Mark, Runtime, Session, SessionConfig};
use crate::error::Result;
use crate::models::Decoder;
use crate::placement::Account;
use crate::sampling::Sampling;

/// Warm-ups go on while graphs have yet to be captured, but not for longer than this.
const LONG_WARM_UP: Duration = Duration::from_secs(1);

/// Most warm-ups: a step is captured when it runs for the third time.
const MOST_WARM_UPS: usize = 3;

/// Tokens generated in a warm-up.
const WARM_UP_TOKENS: usize = 4;

/// What a test gave.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct Measured {
    /// Tokens in one repetition.
    pub tokens: usize,
    /// Time of each repetition, nanoseconds.
    pub samples_ns: Vec<u64>,
    /// What pool and graph cache had to do, from the first allocation of the test to the end of its last repetition.
    pub events: Events,
    /// The most that the pool held from the driver meanwhile, with the model where that is the pool's.
    pub peak_reserved_bytes: u64,
    /// Bytes that one repetition can not do without reading: weights and cache once for each step.
    pub read_bytes: u64,
    /// The device's copies of experts that stay on the host.
    pub expert_cache_bytes: u64,
    /// How often single tokens chose experts of the host in the repetitions, and how often there was a copy; where there are copies.
    pub experts: ExpertTally,
}

impl Measured {
    /// Tokens a second, of each repetition.
    #[must_use]
    pub fn samples_ts(&self) -> Vec<f64> {
        self.samples_ns.iter().map(|&ns| self.tokens as f64 * 1e9 / ns.max(1) as f64).collect()
    }

    /// Times as floats.
    #[must_use]
    pub fn samples(&self) -> Vec<f64> {
        self.samples_ns.iter().map(|&ns| ns as f64).collect()
    }

    /// Gigabytes a second that were read at least.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        let mean = super::mean(&self.samples());
        if mean > 0.0 { self.read_bytes as f64 / mean } else { 0.0 }
    }
}

/// How often what happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Events {
    /// Times that the pool gave memory back to the driver.
    pub give_backs: u64,
    /// Steps that found their graph stale.
    pub stale: u64,
    /// Repaired by pages put back under the same addresses.
    pub remaps: u64,
    /// Repaired by a new capture into the same exec.
    pub updates: u64,
    /// Repaired by a new capture and exec.
    pub recaptures: u64,
    /// Steps run without a graph, warm-ups of graphs aside.
    pub eager: u64,
    /// Steps that were one launch of a graph that was good as it was.
    pub replays: u64,
}

impl Events {
    /// Everything so far.
    fn of(runtime: &Runtime) -> Self {
        let graphs = runtime.graph_counters();
        Self {
            give_backs: runtime.units().iter().map(|unit| unit.pool().counters().give_backs).sum(),
            stale: graphs.stale,
            remaps: graphs.remaps,
            updates: graphs.updates,
            recaptures: graphs.recaptures,
            eager: graphs.eager,
            replays: graphs.replays,
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            give_backs: self.give_backs.saturating_sub(before.give_backs),
            stale: self.stale.saturating_sub(before.stale),
            remaps: self.remaps.saturating_sub(before.remaps),
            updates: self.updates.saturating_sub(before.updates),
            recaptures: self.recaptures.saturating_sub(before.recaptures),
            eager: self.eager.saturating_sub(before.eager),
            replays: self.replays.saturating_sub(before.replays),
        }
    }
}

/// Random token ids: which they are does not matter, but that they differ does, where tokens pick experts.
struct Ids {
    state: u64,
    vocabulary: u64,
}

impl Ids {
    fn next(&mut self) -> u32 {
        // Splitmix64.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % self.vocabulary) as u32
    }

    fn take(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// A sequence that the test runs on.
struct Work<'a> {
    row: &'a Row,
    session: Session,
    ids: Ids,
}

impl Work<'_> {
    /// Reads tokens, a batch at a time; after each the first token behind it is chosen, as where logits are asked for.
    fn prompt(&mut self, tokens: &[u32]) -> Result<()> {
        for batch in tokens.chunks(self.row.sequence.batch.max(1) as usize) {
            self.session.feed(batch, |_, _, _| Ok(()))?;
            self.session.pick()?;
        }
        Ok(())
    }

    /// Takes tokens in, one by one. Each step chooses a token and tells it, but the next one goes on with a random one.
    fn generate(&mut self, tokens: &[u32]) -> Result<()> {
        for &id in tokens {
            self.session.take_next(id)?;
            self.session.decode()?;
        }
        Ok(())
    }

    /// Back to the mark, then the prompt and single tokens. Returns the time of the latter two.
    fn run(&mut self, mark: &Mark, prompt: usize, generation: usize) -> Result<Duration> {
        self.session.rewind(mark)?;
        let (prompt, generation) = (self.ids.take(prompt), self.ids.take(generation));
        self.session.runtime().stream().synchronize()?;
        let start = Instant::now();
        self.prompt(&prompt)?;
        self.generate(&generation)?;
        // The last token was read back, so all is done; a prompt's too.
        Ok(start.elapsed())
    }

    /// What a repetition reads at least.
    fn read_bytes(&self) -> u64 {
        let (model, sequence, test) = (self.session.model(), &self.row.sequence, &self.row.test);
        let types = (sequence.type_k, sequence.type_v);
        let step = |at: usize, tokens: usize, logits: usize| {
            model.weight_bytes(tokens, logits).saturating_add(model.cache_bytes(at..at + tokens, types))
        };
        let (mut bytes, mut at) = (0u64, test.depth as usize);
        let mut left = test.prompt as usize;
        while left > 0 {
            let mut batch = left.min(sequence.batch.max(1) as usize);
            left -= batch;
            while batch > 0 {
                let tokens = batch.min(sequence.ubatch.max(1) as usize);
                batch -= tokens;
                bytes = bytes.saturating_add(step(at, tokens, usize::from(batch == 0)));
                at += tokens;
            }
        }
        for position in at..at + test.generation as usize {
            bytes = bytes.saturating_add(step(position, 1, 1));
        }
        bytes
    }
}

/// Runs one test on a loaded model.
pub(super) fn measure(
    runtime: &Arc<Runtime>,
    model: &Arc<Decoder>,
    row: &Row,
    settings: &Settings,
    stage: &mut dyn FnMut(Stage),
) -> Result<Measured> {
    let (sequence, test) = (&row.sequence, &row.test);
    evergraph_kernels::limit_threads(sequence.threads as usize)?;
    let before = Events::of(runtime);
    runtime.units().iter().for_each(|unit| unit.pool().reset_peak_stats());
    let config = SessionConfig {
        context: Some(test.tokens() + test.depth as usize),
        ubatch: sequence.ubatch.min(sequence.batch) as usize,
        kv: (sequence.type_k, sequence.type_v),
        stream_experts: settings.stream_experts,
        device_experts: settings.device_experts,
        expert_cache: settings.expert_cache,
        flash_attention: sequence.flash_attn != FlashAttn::Off,
        ..SessionConfig::default()
    };
    let ids = Ids { state: settings.seed, vocabulary: model.vocabulary.max(1) as u64 };
    let session = Session::new(Arc::clone(runtime), Arc::clone(model), config)?;
    stage(Stage::Placed(Account::of(&session)));
    let mut work = Work { row, session, ids };
    work.session.set_sampling(&Sampling::greedy(), &[])?;
    if test.depth > 0 {
        stage(Stage::Fill);
        let tokens = work.ids.take(test.depth as usize);
        work.prompt(&tokens)?;
    }
    let mark = work.session.mark()?;
    if settings.warm_up {
        warm_up(&mut work, &mark, stage)?;
    }
    let chosen = work.session.expert_tally()?.unwrap_or_default();
    let mut samples_ns = Vec::new();
    for number in 1..=settings.repetitions {
        stage(Stage::Repetition(number));
        let time = work.run(&mark, test.prompt as usize, test.generation as usize)?;
        samples_ns.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
    Ok(Measured {
        tokens: test.tokens(),
        samples_ns,
        events: Events::of(runtime).since(before),
        peak_reserved_bytes: runtime.units().iter().map(|unit| unit.pool().stats().reserved_bytes.peak).sum(),
        read_bytes: work.read_bytes(),
        expert_cache_bytes: work.session.expert_cache_bytes() as u64,
        experts: work.session.expert_tally()?.unwrap_or_default().since(chosen),
    })
}

/// The whole prompt and a few tokens, once at least, and again while steps ran that are to be graphs.
fn warm_up(work: &mut Work<'_>, mark: &Mark, stage: &mut dyn FnMut(Stage)) -> Result<()> {
    let start = Instant::now();
    for _ in 0..MOST_WARM_UPS {
        stage(Stage::WarmUp);
        let before = work.session.runtime().graph_counters().warm_ups;
        let test = &work.row.test;
        work.run(mark, test.prompt as usize, WARM_UP_TOKENS.min(test.generation as usize))?;
        let ready = work.session.runtime().graph_counters().warm_ups == before;
        if ready || start.elapsed() > LONG_WARM_UP {
            break;
        }
    }
    Ok(())
}
