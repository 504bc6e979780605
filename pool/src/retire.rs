//! Retiring: any change that a dependent could notice.
//!
//! The order of steps lives in [`handshake`](crate::handshake), which is what the model checks; this file says
//! what a victim is, what is marked, whose leases are read, and what changes.

use smallvec::SmallVec;
use std::sync::Arc;

use crate::core::{StreamKey, Uses};
use crate::handshake::{Begun, Cleared, EpochWriter, Lease, Patience, Retire, begin};
use crate::mutant;
use crate::shared::{Notices, Shared};
use crate::state::{Graph, Info, Standing, State};
use crate::victims::takeable;
use crate::{BadReason, RetireReason, Retired, ScratchPolicy};

/// What is retired together: records, or a whole graph.
#[derive(Clone, Debug, Default)]
pub(crate) struct Victim {
    pub(crate) records: SmallVec<[usize; 4]>,
    pub(crate) graph: Option<usize>,
    /// Only if the records still are what graphs hold weakly, and nobody else: they were picked under an earlier lock.
    pub(crate) weak: bool,
    /// Arenas, by their tags: the graphs that share their memory, without a record of it.
    pub(crate) arenas: Uses,
}

impl Victim {
    pub(crate) fn record(record: usize) -> Self {
        Self { records: SmallVec::from_slice(&[record]), ..Self::default() }
    }

    pub(crate) fn graph(graph: usize) -> Self {
        Self { graph: Some(graph), ..Self::default() }
    }
}

impl Retire for State {
    type Victim = Victim;

    fn epoch(&mut self) -> &mut EpochWriter {
        self.counters.epoch_bumps += 1;
        &mut self.epoch
    }

    fn mark(&mut self, victim: &Victim) -> bool {
        let free = |r: &usize| self.records.get(*r).is_some_and(|r| !r.retiring && (!victim.weak || takeable(self, r)));
        let graph_free =
            victim.graph.is_none_or(|g| self.graphs.get(g).is_some_and(|g| !g.evicted && !g.lease.is_dead()));
        if !graph_free || !victim.records.iter().all(free) {
            return false;
        }
        for &record in &victim.records {
            if let Some(record) = self.records.get_mut(record) {
                record.retiring = true;
            }
        }
        if let Some(graph) = victim.graph.and_then(|g| self.graphs.get(g)) {
            graph.lease.mark_dead();
        }
        true
    }

    fn unmark(&mut self, victim: &Victim) {
        for index in &victim.records {
            if let Some(record) = self.records.get_mut(*index) {
                record.retiring = false;
                if std::mem::take(&mut record.drop_later) && record.holders.is_empty() {
                    self.drop_record(*index);
                }
            }
        }
        if let Some(graph) = victim.graph.and_then(|g| self.graphs.get(g)).filter(|g| !g.evicted) {
            graph.lease.unmark_dead();
        }
    }

    fn leases(&self, victim: &Victim, visit: &mut dyn FnMut(&Arc<Lease>)) {
        let mut graphs: SmallVec<[usize; 8]> = victim.graph.into_iter().collect();
        for &record in &victim.records {
            graphs.extend(self.records.get(record).into_iter().flat_map(|r| r.holders.iter().map(|h| h.graph)));
        }
        if !victim.arenas.is_empty() {
            let shares = |g: &Graph| self.arena_tag(g).is_some_and(|tag| victim.arenas.contains(tag));
            graphs.extend(self.graphs.iter().filter(|(_, g)| shares(g)).map(|(index, _)| index));
        }
        graphs.sort_unstable();
        graphs.dedup();
        for graph in graphs {
            if let Some(graph) = self.graphs.get(graph).filter(|g| !g.evicted) {
                visit(&graph.lease);
            }
        }
    }
}

impl State {
    /// Whose work must be over before the victim changes: the victim's own uses, and the streams of dependents
    /// that were launched.
    pub(crate) fn order_after(&self, victim: &Victim, cleared: &Cleared) -> Uses {
        let mut uses = Uses::none();
        for &record in &victim.records {
            if let Some(record) = self.records.get(record) {
                uses.extend(&record.uses);
            }
        }
        for (lease, number) in cleared.last_launches() {
            if number == 0 || mutant::is("retire-forgets-launches") {
                continue;
            }
            for (_, graph) in self.graphs.iter().filter(|(_, g)| Arc::ptr_eq(&g.lease, lease)) {
                uses.insert(graph.stream);
            }
        }
        uses
    }

    /// The tag of the arena that a graph shares.
    pub(crate) fn arena_tag(&self, graph: &Graph) -> Option<StreamKey> {
        match &graph.policy {
            ScratchPolicy::Shared(arena) => self.arenas.get(arena.0.index).map(|a| a.0),
            _ => None,
        }
    }

    /// Moves a record's generations and notes whom to tell. Its bytes are lost.
    pub(crate) fn change(&mut self, index: usize, reason: RetireReason, notices: &mut Notices) {
        if let Some(record) = self.records.get_mut(index) {
            record.content = record.content.wrapping_add(1);
        }
        self.change_pages(index, reason, notices);
    }

    /// As [`change`](Self::change), but its bytes are kept somewhere.
    pub(crate) fn change_pages(&mut self, index: usize, reason: RetireReason, notices: &mut Notices) {
        let place = self.place_of(index);
        let pool = self.id;
        let Some(record) = self.records.get_mut(index) else { return };
        match reason {
            RetireReason::Reissued => {
                record.address = record.address.wrapping_add(1);
                record.standing = Standing::Gone(BadReason::Reissued);
            }
            RetireReason::GivenBack => {
                record.address = record.address.wrapping_add(1);
                record.backing = record.backing.wrapping_add(1);
                record.standing = Standing::Gone(BadReason::GivenBack);
            }
            RetireReason::Unbacked => {
                record.backing = record.backing.wrapping_add(1);
                record.unbacked = true;
            }
            RetireReason::Asleep => record.backing = record.backing.wrapping_add(1),
            RetireReason::Withdrawn => {
                record.address = record.address.wrapping_add(1);
                record.backing = record.backing.wrapping_add(1);
            }
            RetireReason::Evicted => {}
        }
        let token = record.token(place);
        let holders: SmallVec<[usize; 4]> = record.holders.iter().map(|h| h.graph).collect();
        for holder in holders {
            let Some(graph) = self.graphs.get_mut(holder).filter(|g| !g.evicted) else { continue };
            if std::mem::take(&mut graph.good) {
                self.counters.stale += 1;
            }
            let told = notices.news.iter_mut().find(|(d, n)| {
                n.reason == reason && Arc::as_ptr(d).cast::<()>() == Arc::as_ptr(&graph.dependent).cast::<()>()
            });
            match told {
                Some((_, notice)) => notice.tokens.push(token),
                None => {
                    notices.news.push((Arc::clone(&graph.dependent), Retired { pool, reason, tokens: vec![token] }))
                }
            }
        }
    }

    /// A held block leaves its record and is free for others behind `uses`.
    fn surrender(&mut self, index: usize, uses: &Uses, reason: RetireReason, notices: &mut Notices) {
        let Some(record) = self.records.get(index) else { return };
        let Some(home) = record.home() else { return };
        if !mutant::is("no-generation-change") {
            self.change(index, reason, notices);
        }
        let bytes = self.heaps[home.heap].span(home.block).map_or(0, |s| s.1);
        self.tally.held.sub(bytes);
        *self.info_mut(home) = Info::EMPTY;
        let now = self.tick();
        let freed = self.heaps[home.heap].free(home.block, uses.clone(), now);
        debug_assert!(freed.is_ok(), "a held block is used: {freed:?}");
    }
}

impl Shared {
    /// Takes held blocks away from the graphs that hold them weakly: free for others, in stream order behind
    /// the graphs' last launches. `false`: a lease was held and `patience` was short.
    pub(crate) fn take_blocks(
        &self,
        records: &[usize],
        reason: RetireReason,
        patience: Patience,
        notices: &mut Notices,
    ) -> bool {
        let victim = Victim { records: SmallVec::from_slice(records), weak: true, ..Victim::default() };
        if mutant::is("no-bump-on-reissue") {
            let mut state = self.lock();
            for &record in records {
                let uses = state.records.get(record).map(|r| r.uses.clone()).unwrap_or_default();
                state.surrender(record, &uses, reason, notices);
            }
            return true;
        }
        self.retire(&victim, patience, |state, cleared| {
            let uses = state.order_after(&victim, cleared);
            if reason == RetireReason::Reissued {
                state.counters.reissues += victim.records.len() as u64;
            }
            for &record in &victim.records {
                state.surrender(record, &uses, reason, notices);
            }
        })
    }

    /// Ends a graph from the pool's side: it can not be launched any more, and what only it held is free
    /// behind its last launch.
    pub(crate) fn evict(&self, graph: usize, patience: Patience, notices: &mut Notices) -> bool {
        let victim = Victim::graph(graph);
        let pool = self.id;
        let mut arena = None;
        let done = self.retire(&victim, patience, |state, _| {
            // Reads the number of the last launch, which the cleared lease has published.
            state.release_holds(graph);
            let Some(g) = state.graphs.get_mut(graph) else { return };
            g.evicted = true;
            arena = Some(std::mem::take(&mut g.policy));
            if std::mem::take(&mut g.good) {
                state.counters.stale += 1;
            }
            state.counters.evictions += 1;
            let notice = Retired { pool, reason: RetireReason::Evicted, tokens: Vec::new() };
            notices.news.push((Arc::clone(&g.dependent), notice));
        });
        // An arena's last owner takes the lock when it goes.
        drop(arena);
        if done {
            tracing::debug!(pool = self.id.0, graph, epoch = self.epoch_now(), "graph evicted");
        }
        done
    }

    /// One victim from begin to end, for changes that need stream order only: what is freed carries the uses.
    pub(crate) fn retire(
        &self,
        victim: &Victim,
        patience: Patience,
        change: impl FnOnce(&mut State, &Cleared),
    ) -> bool {
        let mut state = self.lock();
        let cleared = match begin(&mut *state, victim) {
            Begun::Taken => return false,
            Begun::Cleared(cleared) => cleared,
            Begun::Held(held) if patience == Patience::Skip => {
                held.abandon(&mut *state, victim);
                return false;
            }
            Begun::Held(held) => {
                // The mark stays; the lock does not: the holder's slow path needs it.
                drop(state);
                let cleared = held.wait();
                state = self.lock();
                cleared
            }
        };
        let state = &mut *state;
        change(state, &cleared);
        cleared.commit(state, victim, |_| ());
        true
    }
}
