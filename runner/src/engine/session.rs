//! One sequence of tokens: its cache, its place, its sampling state, all at fixed addresses.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evergraph_kernels::ops::{Advance, Sample, SampleState, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::DeviceOrdinal;
use evergraph_pool::{DeviceSlice, Element, Stream};

use super::buffers::{Buffer, Buffers};
use super::config::SessionConfig;
use super::expert_cache::ExpertCache;
use super::host::{HostSide, Shares};
use super::residents::ExpertTally;
use super::runtime::{Runtime, StepKey};
use super::shortage::{StepSize, Without};
use crate::error::{Error, Result};
use crate::models::{Decoder, KvCache, Rings, Taps};
use crate::sampling::Sampling;

/// A sequence of tokens on a model.
///
/// # Reuse and capture
/// What changes from token to token (the token, its position, the sampling state) lies in device memory at
/// fixed addresses, so that every decode step is the same graph; without [flash attention](SessionConfig::flash_attention), the
/// same for 256 tokens.
#[derive(Debug)]
pub struct Session {
    runtime: Arc<Runtime>,
    /// The device of the output matrix: there steps begin and end, and tokens are chosen.
    home: DeviceOrdinal,
    model: Arc<Decoder>,
    id: u64,
    context: usize,
    ubatch: usize,
    logit_rows: usize,
    cache: KvCache,
    io: Buffers,
    /// Where a part of the model is on the host.
    side: Option<HostSide>,
    lost: Cell<bool>,
    size: StepSize,
    /// Tokens in the cache.
    taken: usize,
    /// Tokens of the last step of a prompt.
    last_batch: usize,
    /// The position that the device takes the next decoded token for; none if that was never said, or is no longer true.
    placed: Option<usize>,
}

/// A place in a sequence, to go [back](Session::rewind) to.
#[derive(Debug)]
pub struct Mark {
    session: u64,
    taken: usize,
    /// What sliding windows held there.
    rings: Option<Rings>,
}

impl Mark {
    /// Tokens before it.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.taken
    }
}

/// From how many tokens on experts of the host come to the device. They are copied at a speed at which some thirty tokens are
/// worth it, and need room.
fn experts_come_from(runtime: &Runtime, model: &Decoder, ubatch: usize) -> Result<Option<usize>> {
    const WORTH: usize = 32;
    let places = model.streamed_bytes();
    if places == 0 || ubatch < WORTH || runtime.target().backend == "host" || !model.weights.host_is_registered() {
        return Ok(None);
    }
    // Where the rest of a step has no room beside them after all, it does without them.
    Ok((runtime.free_bytes()? / 5 * 4 >= places).then_some(WORTH))
}

impl Session {
    /// An empty sequence.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that make no sense; out of memory, and what else the pool says.
    pub fn new(runtime: Arc<Runtime>, model: Arc<Decoder>, config: SessionConfig) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = config.context.unwrap_or(model.context);
        if !(1..=i32::MAX as usize).contains(&context) {
            return Err(Error::argument("-c", "a number from 1 to 2147483647", context));
        }
        if config.ubatch == 0 {
            return Err(Error::argument("-ub", "at least 1", config.ubatch));
        }
        if model.streams.is_some() && !config.flash_attention {
            return Err(Error::Unsupported {
                what: "attention over compressed keys with its scores written out",
                found: "-fa off".to_owned(),
                advice: "-fa on".to_owned(),
            });
        }
        let ubatch = config.ubatch.min(context);
        let logit_rows = config.logit_rows.clamp(1, ubatch);
        let (width, vocabulary) = (model.width, model.vocabulary);
        let runs = &*runtime;
        let home = model.home_device(runs);
        let at = runs.unit(home);
        let outputs = if config.taps { model.depth() + 1 } else { 0 };
        let io = Buffers {
            ids: Buffer::new(at, "token ids", QuantType::I32, &[ubatch])?,
            positions: Buffer::new(at, "positions", QuantType::I32, &[ubatch])?,
            hidden: Buffer::new(at, "last hidden states", QuantType::F32, &[ubatch, width])?,
            logits: Buffer::new(at, "logits", QuantType::F32, &[logit_rows, vocabulary])?,
            token: Buffer::new(at, "next token", QuantType::I32, &[1])?,
            position: Buffer::new(at, "next position", QuantType::I32, &[1])?,
            recent: Buffer::new(at, "recent tokens", QuantType::I32, &[context])?,
            state: Buffer::new(at, "sampling state", QuantType::I8, &[SampleState::BYTES])?,
            counters: runs.units().iter().map(Buffers::counters).collect::<Result<_>>()?,
            taps: (0..outputs)
                .map(|index| {
                    Buffer::new(at, &format!("output {index}"), QuantType::F32, &[ubatch, model.tap_width(index)])
                })
                .collect::<Result<_>>()?,
        };
        let cache = KvCache::of_model(runs, &model, context, ubatch, config.kv)?;
        let cache = cache.with_scores_written(!config.flash_attention);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let streamed = config.stream_experts.filter(|_| model.weights.host_is_registered());
        let streamed = match config.stream_experts {
            None => experts_come_from(runs, &model, ubatch)?,
            Some(_) => streamed,
        };
        let on_host = runs.target().backend == "host";
        // Over the bus experts come to the device that steps begin on, and no other.
        let alone = runs.units().len() == 1;
        let device = config.device_experts.unwrap_or(if on_host { 0 } else { 3 });
        let shares = if alone { Shares { streamed, device } } else { Shares { streamed: None, device: 0 } };
        let side =
            model.uses_host().then(|| HostSide::new(&runtime, home, model.weights.keep(), shares)).transpose()?;
        let kept = match config.expert_cache.filter(|&bytes| bytes > 0 && side.is_some() && alone) {
            Some(bytes) => ExpertCache::new(runs, model.host_experts(), bytes)?,
            None => None,
        };
        let side = side.map(|side| side.with_cache(kept));
        Ok(Self {
            runtime,
            home,
            model,
            id,
            context,
            ubatch,
            logit_rows,
            cache,
            io,
            side,
            lost: Cell::new(false),
            size: StepSize::new(ubatch),
            taken: 0,
            last_batch: 0,
            placed: None,
        })
    }

    /// Tokens so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.taken
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.taken == 0
    }

    /// Most tokens there can be.
    #[must_use]
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens in a step of a prompt at most: those that were asked for, or fewer where memory was short.
    #[must_use]
    pub fn step_tokens(&self) -> usize {
        self.size.tokens
    }

    /// Queries of a step whose scores are written out at a time, where they are: all, or fewer where memory was short.
    #[must_use]
    pub fn scored_at_once(&self) -> usize {
        self.cache.queries_at_once(self.size.tokens)
    }

    /// Rows of logits made at a time.
    #[must_use]
    pub fn logit_rows(&self) -> usize {
        self.logit_rows
    }

    /// Bytes of the key and value caches, as long as the text is now.
    #[must_use]
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Bytes of the experts of the host that the device keeps.
    #[must_use]
    pub fn expert_cache_bytes(&self) -> usize {
        self.side.as_ref().and_then(HostSide::cache).map_or(0, ExpertCache::bytes)
    }

    /// How often single tokens chose experts of the host, and how often the device kept those; none where it keeps none.
    ///
    /// # Errors
    /// Those of the device.
    pub fn expert_tally(&self) -> Result<Option<ExpertTally>> {
        let cache = self.side.as_ref().and_then(HostSide::cache).filter(|_| !self.runtime.is_rehearsal());
        cache.map(|cache| cache.tally(self.stream())).transpose()
    }

    /// The key and value caches.
    pub(crate) fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Decoder> {
        &self.model
    }

    /// The device it runs on.
    #[must_use]
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Forgets all tokens. Graphs stay, and so does the memory, as long as nobody else needs it.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn clear(&mut self) -> Result<()> {
        self.taken = 0;
        self.last_batch = 0;
        self.placed = None;
        // The next text may have more memory.
        self.size = StepSize::new(self.ubatch);
        self.cache.score_at_once(self.ubatch);
        if let Some(side) = &self.side {
            side.keep_experts(false);
        }
        self.lost.set(false);
        self.cache.clear()
    }

    /// Remembers this place. Sliding windows, which later tokens write over, are copied to the host.
    ///
    /// # Errors
    /// Those of the device.
    pub fn mark(&self) -> Result<Mark> {
        let rings = if self.taken == 0 { None } else { Some(self.cache.keep_rings(&self.runtime)?) };
        Ok(Mark { session: self.id, taken: self.taken, rings })
    }

    /// Forgets the tokens after a mark. Graphs stay, and the memory that the cache grew to stays its own. Other marks that lie
    /// after this one, or were made before a [`clear`](Self::clear), are of no use from here on.
    ///
    /// # Errors
    /// [`Error::CheckFailed`] for a mark of another sequence, or one that lies ahead; those of the device.
    pub fn rewind(&mut self, mark: &Mark) -> Result<()> {
        if mark.session != self.id || mark.taken > self.taken {
            let place = format!("a mark after {} tokens to go back to from {}", mark.taken, self.taken);
            return Err(Error::CheckFailed(place));
        }
        if let Some(rings) = &mark.rings {
            self.cache.restore_rings(&self.runtime, rings)?;
        }
        (self.taken, self.last_batch, self.placed) = (mark.taken, 0, None);
        self.lost.set(false);
        Ok(())
    }

    /// Makes `id` the token that the next [`decode`](Self::decode) takes in, in place of the one that was chosen, if any.
    ///
    /// # Errors
    /// [`Error::TokenId`]; those of the device.
    pub fn take_next(&mut self, id: u32) -> Result<()> {
        let vocabulary = self.model.vocabulary;
        let Some(word) = i32::try_from(id).ok().filter(|_| (id as usize) < vocabulary) else {
            return Err(Error::TokenId { id: id.into(), vocabulary });
        };
        if self.placed != Some(self.taken) {
            self.stream().upload(&[self.taken as i32], &self.io.position.slice)?;
            self.placed = Some(self.taken);
        }
        Ok(self.stream().upload(&[word], &self.io.token.slice)?)
    }

    /// Where steps begin and end.
    fn stream(&self) -> &Stream {
        self.runtime.unit(self.home).stream()
    }

    fn key(&self, what: &'static str, shape: [usize; 3]) -> StepKey {
        StepKey { session: self.id, what, shape }
    }

    fn run(&self, key: StepKey, build: impl Fn(&mut super::Step<'_>) -> Result<()>) -> Result<()> {
        let mut uses = self.model.uses();
        uses.extend(self.cache.uses());
        uses.extend(self.io.uses());
        if self.lost.get() {
            let lost = "an earlier error left the sequence half done: clear it".to_owned();
            return Err(Error::CheckFailed(lost));
        }
        let build = |step: &mut super::Step<'_>| {
            // Blocks of the host's kernels have no need to.
            if self.runtime.target().backend != "host" {
                self.io.counters.iter().for_each(|counters| step.count_in(&counters.view));
            }
            build(step)
        };
        let ran = self.runtime.step_on(self.home, key, &uses, self.cache.touches(), self.side.as_ref(), build);
        // The device went on without the host's share.
        self.lost.set(self.side.is_some() && ran.is_err());
        ran.map(|_| ())
    }

    /// Before a single token: lets experts come that are used more than others which the device keeps. The device has them in the order
    /// of its stream.
    fn change_experts(&self) -> Result<()> {
        let Some(cache) = self.side.as_ref().and_then(HostSide::cache) else { return Ok(()) };
        if self.runtime.is_rehearsal() || !cache.turn(self.stream())? {
            return Ok(());
        }
        self.run(self.key("experts", [0; 3]), |step| cache.push(step))?;
        cache.settled();
        Ok(())
    }

    /// Appends tokens, as many at a time as fit a step; where there is no memory for so many, fewer. After each step `each` gets the session, the number of
    /// the step's first token within `tokens` and the number of its tokens; there it may ask for
    /// [`logits`](Self::logits).
    ///
    /// # Errors
    /// [`Error::ContextFull`] before anything is done, [`Error::TokenId`], those of the device and of `each`.
    pub fn feed(&mut self, tokens: &[u32], mut each: impl FnMut(&mut Self, usize, usize) -> Result<()>) -> Result<()> {
        let vocabulary = self.model.vocabulary;
        let all = self.taken.saturating_add(tokens.len());
        if all > self.context {
            return Err(Error::ContextFull { tokens: all, context: self.context });
        }
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::TokenId { id: id.into(), vocabulary });
        }
        let mut done = 0;
        while done < tokens.len() {
            let count = (tokens.len() - done).min(self.size.tokens);
            match self.feed_batch(&tokens[done..done + count]) {
                Ok(()) => {
                    each(self, done, count)?;
                    done += count;
                }
                Err(error) if error.is_out_of_memory() && self.make_do(count) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// After there was no memory for a step of `count` tokens: takes to less, from here on. Whether there is less to take to.
    fn make_do(&mut self, count: usize) -> bool {
        let (scored, side) = (self.cache.scored(count).is_some(), self.side.as_ref());
        let streamed = side.is_some_and(|side| side.lane(count).is_some());
        let Some(without) = self.size.lessen(count, scored, streamed) else { return false };
        let StepSize { tokens, queries, .. } = self.size;
        match without {
            Without::Scores => {
                self.cache.score_at_once(queries);
                tracing::info!(tokens = count, queries, "no memory for a step: fewer scores at a time");
            }
            Without::Tokens => {
                tracing::info!(tokens = count, from_now = tokens, "no memory for a step: prompts go in smaller ones");
            }
            Without::Experts => {
                if let Some(side) = side {
                    side.keep_experts(true);
                }
                tracing::info!(tokens = count, "no memory for experts of the host on the device: the host does them");
            }
        }
        // Nothing of the step was launched but what the next try does again.
        self.lost.set(false);
        true
    }

    fn feed_batch(&mut self, batch: &[u32]) -> Result<()> {
        let count = batch.len();
        self.cache.reach(self.taken + count)?;
        if count == 1 {
            self.change_experts()?;
        }
        // Both fit: ids are below the vocabulary, positions below the context.
        let ids: Vec<i32> = batch.iter().map(|&id| id as i32).collect();
        let positions: Vec<i32> = (self.taken..self.taken + count).map(|position| position as i32).collect();
        self.stream().upload(&ids, &self.io.ids.slice)?;
        self.stream().upload(&positions, &self.io.positions.slice)?;
        let scored = self.cache.scored(count);
        let queries = scored.map_or(0, |_| self.cache.queries_at_once(count));
        self.run(self.key("prompt", [count, scored.unwrap_or(0), queries]), |step| self.prompt_ops(step, count))?;
        self.taken += count;
        self.last_batch = count;
        Ok(())
    }

    /// In a [rehearsal](Runtime::rehearsal): lays out the steps of a text as long as can be, each so often that it becomes a graph
    /// where there are graphs. The sequence is of no other use.
    ///
    /// # Errors
    /// [`Error::CheckFailed`] where steps would run; those of the pool.
    pub fn rehearse(&mut self) -> Result<()> {
        const TIMES: usize = 3;
        if !self.runtime.is_rehearsal() {
            return Err(Error::CheckFailed("steps are laid out on a device that would run them".to_owned()));
        }
        let batch = vec![0; self.ubatch];
        self.stream().upload(&[0], &self.io.token.slice)?;
        for _ in 0..TIMES {
            self.taken = self.context - batch.len();
            self.feed_batch(&batch)?;
            self.pick()?;
            if self.logit_rows > 1 {
                self.logits(0, self.logit_rows)?;
            }
        }
        for _ in 0..TIMES {
            self.taken = self.context - 1;
            self.decode()?;
        }
        Ok(())
    }

    fn taps(&self) -> Option<Taps> {
        let outputs: Vec<TensorView> = self.io.taps.iter().map(|tap| tap.view.clone()).collect();
        (!outputs.is_empty()).then_some(Taps { outputs })
    }

    /// Logits of tokens of the last step: `count` rows of `vocabulary` values, from the step's token `first` on.
    /// At most [`logit_rows`](Self::logit_rows) at a time.
    ///
    /// # Errors
    /// [`Error::CheckFailed`] for rows that are not there; those of the device.
    pub fn logits(&mut self, first: usize, count: usize) -> Result<Vec<f32>> {
        let there = first.checked_add(count).is_some_and(|end| end <= self.last_batch);
        if count == 0 || count > self.logit_rows || !there {
            let rows = format!("logits of {count} rows from {first} on, {} in the step", self.last_batch);
            return Err(Error::CheckFailed(rows));
        }
        self.run(self.key("logits", [first, count, 0]), |step| {
            let hidden = self.io.hidden.view.narrow(0, first, count)?;
            self.model.head(step, &hidden, &self.io.logits.first(count)?)
        })?;
        self.read_logits(count)
    }

    /// The logits that the last [`pick`](Self::pick) or [`decode`](Self::decode) chose from.
    ///
    /// # Errors
    /// Those of the device.
    pub fn last_logits(&self) -> Result<Vec<f32>> {
        self.read_logits(1)
    }

    fn read_logits(&self, rows: usize) -> Result<Vec<f32>> {
        let mut out = vec![0.0; rows * self.model.vocabulary];
        self.download(&self.io.logits.slice, &mut out)?;
        Ok(out)
    }

    /// Sets how tokens are chosen from here on, and which tokens the repeat penalty knows of.
    ///
    /// # Errors
    /// [`Error::Argument`] for parameters that make no sense; those of the device.
    pub fn set_sampling(&mut self, sampling: &Sampling, recent: &[u32]) -> Result<()> {
        sampling.check()?;
        let kept = &recent[recent.len().saturating_sub(self.context)..];
        let ring: Vec<i32> = kept.iter().map(|&id| id as i32).collect();
        let mut state = sampling.state();
        state.recent_len = ring.len() as u64;
        self.stream().upload(&ring, &self.io.recent.slice)?;
        Ok(self.stream().upload(&[state], &self.io.state.slice)?)
    }

    /// Chooses the token after the last one fed. It is not part of the sequence before
    /// [`decode`](Self::decode) takes it in.
    ///
    /// # Errors
    /// [`Error::CheckFailed`] if nothing was fed; those of the device.
    pub fn pick(&mut self) -> Result<u32> {
        let Some(row) = self.last_batch.checked_sub(1) else {
            return Err(Error::CheckFailed("a token was asked for before the first one was fed".to_owned()));
        };
        self.stream().upload(&[self.taken as i32], &self.io.position.slice)?;
        self.placed = Some(self.taken);
        self.run(self.key("pick", [row, 0, 0]), |step| {
            let hidden = self.io.hidden.view.narrow(0, row, 1)?;
            self.model.head(step, &hidden, &self.io.logits.first(1)?)?;
            self.sample(step)
        })?;
        self.read_token()
    }

    /// Takes the chosen token in and chooses the next: one step, the same graph every time (without flash attention, for 256
    /// tokens).
    ///
    /// # Errors
    /// [`Error::ContextFull`]; those of the device.
    pub fn decode(&mut self) -> Result<u32> {
        if self.taken >= self.context {
            return Err(Error::ContextFull { tokens: self.taken + 1, context: self.context });
        }
        self.cache.reach(self.taken + 1)?;
        self.change_experts()?;
        // Not known if the step fails half-way.
        self.placed = None;
        let scored = self.cache.scored(1).unwrap_or(0);
        self.run(self.key("decode", [1, scored, 0]), |step| self.decode_ops(step))?;
        self.taken += 1;
        self.last_batch = 1;
        self.placed = Some(self.taken);
        self.read_token()
    }

    /// Appends the ops of a step of `count` tokens of a prompt.
    pub(super) fn prompt_ops(&self, step: &mut super::Step<'_>, count: usize) -> Result<()> {
        let (ids, positions) = (self.io.ids.first(count)?, self.io.positions.first(count)?);
        let out = self.io.hidden.first(count)?;
        self.model.forward(step, &ids, &positions, &self.cache, &out, self.taps().as_ref())
    }

    /// Appends the ops that take the chosen token in and choose the next.
    pub(super) fn decode_ops(&self, step: &mut super::Step<'_>) -> Result<()> {
        let (ids, positions) = (&self.io.token.view, &self.io.position.view);
        let out = self.io.hidden.first(1)?;
        self.model.forward(step, ids, positions, &self.cache, &out, self.taps().as_ref())?;
        self.model.head(step, &out, &self.io.logits.first(1)?)?;
        self.sample(step)?;
        step.push(Advance { positions: positions.clone(), by: 1 })
    }

    /// Makes room in the cache for so many tokens.
    pub(super) fn reach(&mut self, tokens: usize) -> Result<()> {
        self.cache.reach(tokens)
    }

    /// The device that steps begin and end on.
    pub(super) fn home(&self) -> DeviceOrdinal {
        self.home
    }

    pub(super) fn side(&self) -> Option<&HostSide> {
        self.side.as_ref()
    }

    fn sample(&self, step: &mut super::Step<'_>) -> Result<()> {
        step.push(Sample {
            logits: self.io.logits.view.index(0)?,
            state: self.io.state.view.clone(),
            recent: self.io.recent.view.clone(),
            token: self.io.token.view.clone(),
        })
    }

    fn download<T: Element>(&self, from: &DeviceSlice<T>, into: &mut [T]) -> Result<()> {
        self.stream().download_into(from, into)?;
        let checked = self.side.as_ref().map_or(Ok(()), HostSide::check);
        self.lost.set(self.lost.get() || checked.is_err());
        checked
    }

    fn read_token(&self) -> Result<u32> {
        let mut token = [0i32];
        self.download(&self.io.token.slice, &mut token)?;
        let vocabulary = self.model.vocabulary;
        match u32::try_from(token[0]) {
            Err(_) if token[0] == SampleState::NONE => {
                Err(Error::CheckFailed("logits that are numbers: the best is infinite, or none is one".to_owned()))
            }
            Ok(id) if (id as usize) < vocabulary => Ok(id),
            _ => Err(Error::TokenId { id: token[0].into(), vocabulary }),
        }
    }

    /// Output of block `index` for the tokens of the last step (after the last block: the last norm's), where
    /// taps were asked for.
    ///
    /// # Errors
    /// Those of the device.
    pub fn output(&self, index: usize) -> Result<Vec<f32>> {
        let Some(tap) = self.io.taps.get(index) else { return Ok(Vec::new()) };
        let mut out = vec![0.0; self.last_batch * self.model.tap_width(index)];
        self.download(&tap.slice, &mut out)?;
        Ok(out)
    }
}
