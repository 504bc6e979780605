//! Everything slower than a launch: warm-up, capture, and the repair of graphs that went stale.

use std::sync::Arc;
use std::time::Instant;

use evergraph_pool::driver::{DriverError, UpdateResult};
use evergraph_pool::handshake::{Launcher, Proven};
use evergraph_pool::{
    Awake, BadReason, Dependent, Hold, Pool, PoolError, Purpose, Registration, ScratchPolicy, Stale, mutant,
};
use smallvec::SmallVec;

use crate::cache::Inner;
use crate::capture::{Captured, Failure, Setup, capture};
use crate::cost::{Case, Pages, Repair, Step};
use crate::entry::CheckedOut;
use crate::graph::{Exec, Graph, Handle, Part, Recipe, asleep, only_retiring};
use crate::outcome::{Cause, Outcome, Ran};
use crate::scope::{Lost, Made, Miss, Notes};
use crate::{CacheError, Request, Scope};

/// A miss names one request. After that many the closure runs once eagerly, which readies all of them.
const GROWTHS: usize = 1;
/// The same for the run after such an eager run: somebody took the memory in between, and would again.
const GROWTHS_THEN: usize = 32;
/// Walks and repairs before the closure runs instead.
const ROUNDS: u32 = 8;

pub(crate) type Body<'b, E> = dyn FnMut(&Scope<'_>) -> Result<(), E> + 'b;

/// One run of one key, with the key's state in hand.
pub(crate) struct Run<'a, 'b, E> {
    pub(crate) inner: &'a Arc<Inner>,
    pub(crate) request: &'a Request<'a>,
    pub(crate) body: &'a mut Body<'b, E>,
    pub(crate) work: CheckedOut,
}

impl Inner {
    /// Runs the closure itself.
    pub(crate) fn eager<E: From<CacheError>>(
        &self,
        request: &Request<'_>,
        body: &mut Body<'_, E>,
        cause: Cause,
        lost: &Lost,
    ) -> Result<Outcome, E> {
        let (outcome, made) = self.eager_made(request, body, cause, lost)?;
        self.keep_loose(request, made);
        Ok(outcome)
    }

    /// The same; the results are the caller's to keep.
    fn eager_made<E: From<CacheError>>(
        &self,
        request: &Request<'_>,
        body: &mut Body<'_, E>,
        cause: Cause,
        lost: &Lost,
    ) -> Result<(Outcome, Vec<Made>), E> {
        if cause == Cause::GraphsOff {
            tracing::debug!(graph = %request.key, %cause, "eager run");
        } else {
            tracing::info!(graph = %request.key, %cause, "eager run");
        }
        let made = self.closure(request, body, lost)?;
        self.tally.eager.one();
        Ok((Outcome { ran: Ran::Eager, cause: Some(cause) }, made))
    }

    fn closure<E: From<CacheError>>(
        &self,
        request: &Request<'_>,
        body: &mut Body<'_, E>,
        lost: &Lost,
    ) -> Result<Vec<Made>, E> {
        request.stream.driver().bind().map_err(|e| self.refused::<E>(e))?;
        // A run without a graph has no lease that a sleep would wait for.
        let _awake: SmallVec<[Awake; 2]> = request.pools().map(|pool| pool.hold_awake(request.stream)).collect();
        let notes = Notes::default();
        body(&Scope::new(request, &[], &notes, Hold::Weak, lost))?;
        Ok(notes.outputs.take())
    }
}

impl<E: From<CacheError>> Run<'_, '_, E> {
    pub(crate) fn slow(mut self) -> Result<Outcome, E> {
        let state = &mut self.work.state;
        if state.graph.is_none() && state.warmed < self.inner.config.warm_ups {
            let made = self.inner.closure(self.request, self.body, &self.work.state.lost)?;
            self.work.state.own = made;
            self.work.state.warmed += 1;
            self.inner.tally.warm_ups.one();
            return Ok(Outcome::plain(Ran::WarmUp));
        }
        let invalid = self.work.entry.take_invalid();
        if invalid {
            self.work.state.lost.clear();
        }
        if invalid && self.work.state.captured {
            return self.recapture(Cause::Invalidated);
        }
        match &self.work.state.graph {
            Some(graph) if graph.bound.as_slice() != self.request.bound => self.recapture(Cause::Rebound),
            Some(_) => self.repair(),
            None if self.work.state.captured => self.recapture(Cause::Stale(Vec::new())),
            None => self.first_capture(),
        }
    }

    /// Whether the last try was no launch because somebody holds a result.
    fn blocked(&self) -> bool {
        self.work.state.graph.as_ref().is_some_and(|graph| graph.blocked)
    }

    fn refused(&self, error: impl Into<CacheError>) -> E {
        self.inner.refused(error)
    }

    fn eager(&mut self, cause: Cause) -> Result<Outcome, E> {
        self.work.state.tempo.ran();
        let (outcome, made) = self.inner.eager_made(self.request, self.body, cause, &self.work.state.lost)?;
        self.work.state.own = made;
        Ok(outcome)
    }

    /// The epoch moved: walk, repair what is bad, walk again, launch.
    fn repair(&mut self) -> Result<Outcome, E> {
        let mut ran = Ran::Replayed;
        let mut cause = None;
        let mut rounds = 0;
        let mut waits = 0u32;
        while rounds < ROUNDS {
            let Some(graph) = &mut self.work.state.graph else { break };
            let mut stale = graph.prove();
            if mutant::is("cache.stale-is-fine") {
                stale.clear();
                graph
                    .parts
                    .iter_mut()
                    .for_each(|p| p.registration.walk().map(|proven| p.proven = proven).unwrap_or(()));
            }
            if stale.is_empty() && !mutant::is("cache.every-bump-is-stale") {
                match self.launch(ran, cause.clone())? {
                    Some(outcome) => return Ok(outcome),
                    None if self.blocked() => return self.eager(Cause::OutputHeld),
                    // Disturbed between walk and launch.
                    None => rounds += 1,
                }
                continue;
            }
            if let Some(error) = asleep(&stale)
                && !mutant::is("cache.asleep-runs-eagerly")
            {
                return Err(self.refused(error));
            }
            if only_retiring(&stale) && !stale.is_empty() {
                // Whoever retires it is at work; the mark goes when they are done.
                waits += 1;
                pause(waits);
                continue;
            }
            rounds += 1;
            if cause.is_none() {
                self.inner.tally.stale.one();
            }
            self.work.state.lost.note(&stale);
            let remap = stale.iter().all(Stale::is_remap) && !stale.is_empty();
            cause = Some(Cause::Stale(stale));
            let Some(cause) = &cause else { break };
            match self.cheapest(cause, remap) {
                Repair::Remap => match self.remap() {
                    Ok(()) => ran = Ran::Remapped,
                    // It fell asleep since the walk: the next one says so.
                    Err(CacheError::Pool(PoolError::Asleep { .. })) => {}
                    Err(error) => {
                        tracing::debug!(%error, "no remap");
                        return self.recapture(cause.clone());
                    }
                },
                Repair::Eager => return self.eager(Cause::Cheaper),
                Repair::Capture => return self.recapture(cause.clone()),
            }
        }
        self.eager(Cause::Unsettled)
    }

    /// The cheapest repair by predicted price.
    fn cheapest(&mut self, cause: &Cause, remap: bool) -> Repair {
        let life = self.work.state.tempo.stale();
        let Some(graph) = &self.work.state.graph else { return Repair::Capture };
        let nodes = graph.exec.shape.nodes.len();
        let (pages, at_hand) = match cause {
            Cause::Stale(stale) if remap => (Some(self.pages(stale)), self.at_hand(stale)),
            _ => (None, true),
        };
        // Never twice in a row: what disturbed the graph may be over.
        let may_wait = !self.work.state.put_off;
        let repair = self.inner.costs.cheapest(&Case { nodes, pages, at_hand, life, may_wait });
        self.work.state.put_off = repair == Repair::Eager;
        repair
    }

    fn pool(&self, stale: &Stale) -> Option<&Pool> {
        self.request.pools().find(|pool| pool.id() == stale.pool)
    }

    /// The pages that a remap must bring.
    fn pages(&self, stale: &[Stale]) -> Pages {
        let mut pages = Pages::default();
        for stale in stale {
            let Some(pool) = self.pool(stale) else { continue };
            // The pages of what slept are there already.
            for bad in stale.bad.iter().filter(|bad| bad.reason == BadReason::Unbacked) {
                pages.add(pool, bad.dependency.bytes);
            }
        }
        pages
    }

    /// Whether the pools have as much free memory as a new capture would ask for.
    fn at_hand(&self, stale: &[Stale]) -> bool {
        stale.iter().all(|stale| {
            let wanted: usize = stale.bad.iter().map(|bad| bad.dependency.bytes).sum();
            self.pool(stale).is_some_and(|pool| pool.free_bytes(Purpose::Scratch) >= wanted)
        })
    }

    /// Puts pages back under unbacked scratch, and notes what must start as zero.
    fn remap(&mut self) -> Result<(), CacheError> {
        let Some(graph) = &mut self.work.state.graph else { return Ok(()) };
        let start = Instant::now();
        let mut pages = Pages::default();
        for part in &graph.parts {
            let pool = self.request.pools().find(|pool| pool.id() == part.registration.pool_id());
            for reback in part.registration.reback()? {
                if let Some(pool) = pool.filter(|_| reback.mapped) {
                    pages.add(pool, reback.bytes);
                }
                let back = reback.ptr.0..reback.ptr.0 + reback.bytes as u64;
                let own = graph.zeroed.iter().copied().filter(|(ptr, _)| back.contains(&ptr.0));
                let whole = reback.clear.then_some((reback.ptr, reback.bytes));
                for piece in own.chain(whole) {
                    if !graph.unclean.contains(&piece) {
                        graph.unclean.push(piece);
                    }
                }
            }
        }
        if pages.chunks > 0 {
            self.inner.costs.remapped(pages, start.elapsed());
        }
        if mutant::is("cache.cleared-without-lease") {
            graph.clear()?;
        }
        Ok(())
    }

    fn first_capture(&mut self) -> Result<Outcome, E> {
        self.capture_into(None, None)
    }

    /// Captures anew. The old registrations go first, so that the new capture finds their memory; the old exec
    /// waits for a proven update.
    fn recapture(&mut self, cause: Cause) -> Result<Outcome, E> {
        let config = &self.inner.config;
        let state = &mut self.work.state;
        if matches!(cause, Cause::Stale(_))
            && state.tempo.recaptured(config.storm_captures, config.storm_launches)
            && !state.pinned
        {
            tracing::info!("captured again too often: pinned");
            state.pinned = true;
            self.inner.tally.storms.one();
        }
        let old = state.graph.take().map(Graph::into_exec);
        self.inner.set_bytes(&self.work.entry.key, 0);
        self.capture_into(old, Some(cause))
    }

    fn capture_into(&mut self, old: Option<Exec>, cause: Option<Cause>) -> Result<Outcome, E> {
        let launcher = Launcher::new();
        let handle = {
            let cost = self.inner.costs.recapture_us(old.as_ref().map_or(100, |o| o.shape.nodes.len()));
            let key = self.work.entry.key.clone();
            Arc::new(Handle::new(&launcher, self.request.stream, cost, Arc::downgrade(self.inner), key))
        };
        let captured = match self.capture(&handle) {
            Ok(captured) => captured,
            Err(Failure::Error(error)) => return Err(error),
            Err(Failure::Refused(error)) => return Err(self.refused(error)),
            // The remedy for a lost capture: no graph this time, and another try at the next run.
            Err(Failure::Miss(miss)) => return self.eager(Cause::WindowMiss { requested_bytes: miss.requested_bytes }),
            Err(Failure::NotLoaded(name)) => return self.eager(Cause::NotLoaded { name }),
            Err(Failure::Lost) => {
                self.inner.tally.lost_captures.one();
                return self.eager(Cause::CaptureLost);
            }
        };
        let Captured { graph, shape, registrations, keeps, reaches, mut results, zeroed, opaque, undeclared, .. } =
            captured;
        let (costs, tally) = (&self.inner.costs, &self.inner.tally);
        let nodes = shape.nodes.len();
        costs.measured(Step::Capture, nodes, captured.capture_took);
        costs.measured(Step::Scan, nodes, captured.scan_took);
        tally.undeclared.add(undeclared as u64);
        let held: usize = registrations.iter().map(Registration::held_bytes).sum();
        let bytes = held.saturating_add(nodes.saturating_mul(self.inner.config.node_bytes));
        if !self.inner.make_room(&self.work.entry.key, bytes) {
            drop((graph, registrations, old));
            return self.eager(Cause::Full);
        }

        let (exec, updated) = match self.exec(old, Recipe { graph, shape, keeps }) {
            Ok(done) => done,
            Err(error) => {
                self.inner.set_bytes(&self.work.entry.key, 0);
                drop(registrations);
                if !error.is_out_of_memory() {
                    return Err(self.refused(error));
                }
                return self.eager(Cause::NoMemory);
            }
        };
        if opaque.is_some() {
            self.inner.tally.opaque.one();
        }
        handle.set_cost(self.inner.costs.recapture_us(nodes));
        let parts: SmallVec<[Part; 2]> = registrations
            .into_iter()
            .map(|r| Part { epoch: Arc::clone(r.epoch()), proven: Proven::NONE, registration: r })
            .collect();
        let bound = SmallVec::from_slice(self.request.bound);
        let scan_us = captured.scan_took.as_secs_f32() * 1e6;
        results.enlist(launcher.lease());
        let graph = Graph {
            launcher,
            exec,
            parts,
            handle,
            launches: 0,
            opaque,
            bytes,
            unclean: zeroed.clone(),
            zeroed,
            reaches,
            results,
            blocked: false,
            bound,
            scan_us,
        };
        let graph = self.work.state.graph.insert(graph);
        if mutant::is("cache.cleared-without-lease") {
            graph.clear().map_err(|e| self.inner.refused::<E>(e))?;
        }
        let ran = match (self.work.state.captured, updated) {
            (false, _) => Ran::Captured,
            (true, true) => Ran::Updated,
            (true, false) => Ran::Recaptured,
        };
        self.work.state.captured = true;
        self.first_launch(ran, cause)
    }

    /// Captures, growing the pool outside the window where memory was not ready inside it.
    fn capture(&mut self, handle: &Arc<Handle>) -> Result<Captured, Failure<E>> {
        let dependent: Arc<dyn Dependent> = Arc::clone(handle) as _;
        let most = if self.work.state.missed { GROWTHS_THEN } else { GROWTHS };
        let mut misses: SmallVec<[Miss; 4]> = SmallVec::new();
        let mut pin = self.work.state.pinned;
        loop {
            let (policy, hold) = match &self.request.policy {
                // What is in an arena stays where it is anyway.
                ScratchPolicy::Shared(arena) => {
                    (ScratchPolicy::Shared(arena.clone()), if pin { Hold::Strong } else { Hold::Weak })
                }
                _ if pin => (ScratchPolicy::Pin, Hold::Strong),
                policy => (policy.clone(), Hold::Weak),
            };
            let Inner { config, layouts, .. } = &**self.inner;
            let setup = Setup {
                request: self.request,
                dependent: Arc::clone(&dependent),
                policy,
                hold,
                config,
                layouts,
                lost: &self.work.state.lost,
            };
            let result = capture(setup, self.body);
            match result {
                Err(Failure::Miss(miss)) => {
                    self.inner.tally.window_misses.one();
                    misses.push(miss);
                    if misses.len() > most || !self.ready(&misses) {
                        self.work.state.missed = true;
                        return Err(Failure::Miss(miss));
                    }
                }
                // An opaque graph may use more than anybody can see: what is known of it stays where it is.
                Ok(captured) if captured.opaque.is_some() && !pin && !mutant::is("cache.opaque-unpinned") => pin = true,
                result => {
                    self.work.state.missed = false;
                    return result;
                }
            }
        }
    }

    /// Grows the pools so that all of these are free at the same time; `false`: there is no memory.
    fn ready(&self, misses: &[Miss]) -> bool {
        let mut held = Vec::with_capacity(misses.len());
        misses.iter().all(|miss| {
            let request = self.request;
            let pool = request.pools().find(|pool| pool.id() == miss.pool);
            let lane = request.beside.iter().find(|(pool, _)| pool.id() == miss.pool);
            let stream = lane.map_or(request.stream, |(_, stream)| *stream);
            let slice = pool.map(|pool| pool.alloc_for::<u8>(miss.requested_bytes, miss.purpose, stream));
            slice.is_some_and(|slice| slice.map(|slice| held.push(slice)).is_ok())
        })
    }

    /// Puts a captured graph into the old exec where that is proven, else into a new one; the old one goes first.
    fn exec(&mut self, old: Option<Exec>, recipe: Recipe) -> Result<(Exec, bool), DriverError> {
        let driver = self.request.stream.driver();
        let nodes = recipe.shape.nodes.len();
        let mut old = old;
        let alike = |exec: &mut Exec| exec.shape.proves_update_to(&recipe.shape);
        if let Some(mut exec) = old.take_if(|exec| alike(exec) || mutant::is("cache.update-believed")) {
            exec.settle();
            let start = Instant::now();
            driver.bind()?;
            match driver.exec_update(exec.handle, recipe.graph.handle()) {
                Ok(UpdateResult::Updated) => {
                    self.inner.costs.measured(Step::Update, nodes, start.elapsed());
                    exec.refill(recipe);
                    return Ok((exec, true));
                }
                // Refused or failed: the exec is as it was, and goes.
                Ok(why) => tracing::debug!(?why, "update refused"),
                Err(error) => tracing::debug!(%error, "update failed"),
            }
            old = Some(exec);
        }
        if !mutant::is("cache.new-before-old") {
            old = None;
        }
        let start = Instant::now();
        driver.bind()?;
        let handle = loop {
            match driver.instantiate(recipe.graph.handle()) {
                Ok(handle) => break handle,
                Err(error) if error.is_out_of_memory() && self.inner.evict_one(&self.work.entry.key) => {}
                Err(error) => return Err(error),
            }
        };
        self.inner.costs.measured(Step::Instantiate, nodes, start.elapsed());
        driver.name_exec(handle, &format!("\"{}\" of {nodes} nodes", self.request.key));
        drop(old);
        Ok((Exec::new(self.request.stream, handle, recipe, &self.inner.tally), false))
    }

    /// A new graph proves its epoch by a walk, like any other: somebody may have retired memory since its window
    /// closed.
    fn first_launch(&mut self, ran: Ran, cause: Option<Cause>) -> Result<Outcome, E> {
        for wait in 0..1 << 16 {
            let Some(graph) = &mut self.work.state.graph else { break };
            let stale = graph.prove();
            if stale.is_empty() {
                if let Some(outcome) = self.launch(ran, cause.clone())? {
                    return Ok(outcome);
                }
                if self.blocked() {
                    return self.eager(Cause::OutputHeld);
                }
            } else if let Some(error) = asleep(&stale) {
                return Err(self.refused(error));
            } else if !only_retiring(&stale) {
                break;
            }
            pause(wait);
        }
        // Stale before its first launch: memory is very short. The next run repairs it.
        self.eager(Cause::Unsettled)
    }

    fn launch(&mut self, ran: Ran, cause: Option<Cause>) -> Result<Option<Outcome>, E> {
        let state = &mut self.work.state;
        if let Some(error) = state.graph.as_ref().and_then(|graph| graph.reaches.beyond(self.request.touches)) {
            return Err(self.inner.refused(error));
        }
        let Some(launched) = state.graph.as_mut().and_then(Graph::launch) else { return Ok(None) };
        state.tempo.ran();
        state.own.clear();
        launched.map_err(|e| self.inner.refused::<E>(e))?;
        let tally = &self.inner.tally;
        match ran {
            Ran::Captured => tally.captures.one(),
            Ran::Remapped => tally.remaps.one(),
            Ran::Updated => tally.updates.one(),
            Ran::Recaptured => tally.recaptures.one(),
            _ => tally.replays.one(),
        }
        let cause = if ran == Ran::Replayed { None } else { cause };
        if let Some(cause) = &cause {
            tracing::info!(graph = %self.request.key, %ran, %cause, "graph repaired");
        }
        Ok(Some(Outcome { ran, cause }))
    }
}

/// Waits for another thread's critical section.
fn pause(round: u32) {
    if round < 32 { std::hint::spin_loop() } else { std::thread::yield_now() }
}
