//! Who depends on what: declarations, walks, the end of a graph.

use crate::core::Uses;
use crate::handshake::Proven;
use crate::shared::Shared;
use crate::state::{Dep, Holder, NONE, Record, Standing, State};
use crate::token::PlaceKind;
use crate::{Bad, BadReason, Dependency, Hold, PoolError, Purpose, Stale, mutant};

impl Shared {
    pub(crate) fn declare(&self, graph: usize, dependency: Dependency) -> Result<(), PoolError> {
        let token = dependency.token;
        if token.allocation.pool() != self.id {
            return Err(PoolError::OtherPool { expected: self.id, found: token.allocation.pool() });
        }
        let range = |allocation_bytes: usize| {
            let fits = dependency.offset_bytes.checked_add(dependency.bytes).is_some_and(|end| end <= allocation_bytes);
            let (offset_bytes, bytes) = (dependency.offset_bytes, dependency.bytes);
            if fits { Ok(()) } else { Err(PoolError::Range { offset_bytes, bytes, allocation_bytes }) }
        };
        let mut state = self.lock();
        let state = &mut *state;
        let index = match token.place.kind() {
            PlaceKind::Nowhere => return range(0),
            PlaceKind::Block { .. } => {
                let home = state.block_of(&token).ok_or(PoolError::StaleToken { token, reason: BadReason::Gone })?;
                if state.info(home).window == graph as u32 {
                    // This window's own hand-out: registered as such when the window is finished.
                    return range(state.heaps[home.heap].block(home.block).map_or(0, |b| b.requested_bytes as usize));
                }
                state.record_of_block(home)
            }
            PlaceKind::Outside(index) => {
                state.records.get(index).is_some_and(|r| r.allocation == token.allocation).then_some(index)
            }
        };
        let index = index.ok_or(PoolError::StaleToken { token, reason: BadReason::Gone })?;
        let record = state.records.get(index).ok_or(PoolError::StaleToken { token, reason: BadReason::Gone })?;
        let checked = match judge(record, &dependency) {
            Some(BadReason::Asleep) => Err(PoolError::Asleep { purpose: purpose_of(record), what: "a declaration" }),
            Some(reason) => Err(PoolError::StaleToken { token, reason }),
            None => range(record.bytes as usize),
        };
        if checked.is_err() && record.holders.is_empty() {
            state.drop_record(index);
        }
        checked?;
        state.hold(graph, Dep { dependency, record: index });
        Ok(())
    }

    /// Checks every dependency, and takes the proven epoch in the same critical section.
    pub(crate) fn walk(&self, graph: usize) -> Result<Proven, Stale> {
        let mut state = self.lock();
        let state = &mut *state;
        let pool = self.id;
        let Some(g) = state.graphs.get(graph).filter(|g| !g.evicted && !g.lease.is_dead()) else {
            return Err(Stale::evicted(pool));
        };
        let bad: Vec<Bad> = g
            .deps
            .iter()
            .enumerate()
            .filter_map(|(index, dep)| {
                let record = state.records.get(dep.record)?;
                let reason = if mutant::is("identity-by-address") {
                    same_address(state, record, dep)
                } else {
                    judge(record, &dep.dependency)
                };
                reason.map(|reason| Bad { index, dependency: dep.dependency, reason })
            })
            .collect();
        let asleep = state.asleep_for(graph);
        let proven = state.epoch.proven();
        let good = bad.is_empty() && asleep.is_none();
        if let Some(g) = state.graphs.get_mut(graph) {
            g.good = good;
        }
        if good { Ok(proven) } else { Err(Stale { pool, evicted: false, asleep, bad }) }
    }

    pub(crate) fn dependencies(&self, graph: usize) -> Vec<Dependency> {
        let state = self.lock();
        state.graphs.get(graph).map(|g| g.deps.iter().map(|d| d.dependency).collect()).unwrap_or_default()
    }

    pub(crate) fn held_bytes(&self, graph: usize) -> usize {
        let state = self.lock();
        let Some(g) = state.graphs.get(graph) else { return 0 };
        let mut records: Vec<usize> = g.deps.iter().map(|d| d.record).collect();
        records.sort_unstable();
        records.dedup();
        let alone = |r: &&Record| r.standing == Standing::Held && r.holders.len() == 1;
        records.iter().filter_map(|&r| state.records.get(r)).filter(alone).map(|r| r.bytes as usize).sum()
    }

    /// The graph is gone: its last launch becomes a use of its blocks, and what only it held is free.
    pub(crate) fn unregister(&self, graph: usize) {
        let gone = {
            let mut state = self.lock();
            state.release_holds(graph);
            let gone = state.graphs.try_remove(graph);
            if let Some(slot) = gone.as_ref().and_then(|g| state.streams.get_mut(g.stream.0 as usize)) {
                slot.live = slot.live.saturating_sub(1);
            }
            gone
        };
        // Foreign destructors, and the arena's, which takes the lock.
        drop(gone);
        self.end_host_memory();
    }

    /// Host memory whose last graph just went. Silent: what fails is tried again later.
    pub(crate) fn end_host_memory(&self) {
        if self.lock().leftovers.is_empty() || crate::capture_thread::is_capturing() {
            return;
        }
        let mut notices = crate::shared::Notices::default();
        {
            let cold = self.cold();
            self.retry_leftovers(&cold, &mut notices);
        }
        notices.deliver();
    }
}

impl State {
    /// Makes a graph depend on a record.
    pub(crate) fn hold(&mut self, graph: usize, dep: Dep) {
        let Some(record) = self.records.get_mut(dep.record) else { return };
        let (strong, weak) = match dep.dependency.hold {
            Hold::Strong => (1, 0),
            Hold::Weak => (0, 1),
        };
        match record.holders.iter_mut().find(|h| h.graph == graph) {
            Some(holder) => {
                holder.strong += strong;
                holder.weak += weak;
            }
            None => record.holders.push(Holder { graph, strong, weak }),
        }
        if let Some(g) = self.graphs.get_mut(graph) {
            g.deps.push(dep);
        }
    }

    /// Memory that a graph uses and that is asleep, if there is any.
    pub(crate) fn asleep_for(&self, graph: usize) -> Option<Purpose> {
        if self.sleeping.iter().all(Option::is_none) {
            return None;
        }
        let graph = self.graphs.get(graph)?;
        let tag = self.arena_tag(graph);
        let arena = self.sleeping.iter().position(|sleeping| match (sleeping, tag) {
            (Some(sleeping), Some(tag)) => sleeping.arenas.contains(tag),
            _ => false,
        });
        let mut records = graph.deps.iter().filter_map(|dep| self.records.get(dep.record));
        arena.map(|heap| Purpose::ALL[heap]).or_else(|| records.find(|r| r.asleep).map(purpose_of))
    }

    /// Uses of a record by those who hold it now: its own, and the streams of graphs that were launched.
    pub(crate) fn uses_of(&self, record: usize) -> Uses {
        let mut uses = Uses::none();
        let Some(record) = self.records.get(record) else { return uses };
        uses.extend(&record.uses);
        for holder in &record.holders {
            if let Some(graph) = self.graphs.get(holder.graph)
                && graph.lease.last_launch() != 0
            {
                uses.insert(graph.stream);
            }
        }
        uses
    }
}

/// What is wrong with a dependency, if anything is.
pub(crate) fn judge(record: &Record, dependency: &Dependency) -> Option<BadReason> {
    let token = &dependency.token;
    if record.asleep {
        return Some(BadReason::Asleep);
    }
    if record.retiring && !mutant::is("walk-ignores-retiring") {
        return Some(BadReason::Retiring);
    }
    if let Standing::Gone(reason) = record.standing {
        return Some(reason);
    }
    if record.allocation != token.allocation {
        return Some(BadReason::Gone);
    }
    if record.address != token.address {
        return Some(BadReason::Withdrawn);
    }
    // First: no pages bring lost bytes back.
    let content_matters = !dependency.use_.is_scratch();
    if content_matters && record.content != token.content {
        return Some(BadReason::ContentLost);
    }
    if mutant::is("backing-unchecked") {
        return None;
    }
    if record.unbacked {
        return Some(BadReason::Unbacked);
    }
    (record.backing != token.backing).then_some(BadReason::Rebacked)
}

/// What the memory of a record is for; anything outside the heaps never sleeps.
fn purpose_of(record: &Record) -> Purpose {
    record.home().and_then(|home| Purpose::ALL.get(home.heap).copied()).unwrap_or_default()
}

/// The mistake that rule 3 forbids, for its mutant: whatever now lives at the address is taken for the same.
fn same_address(state: &State, record: &Record, dep: &Dep) -> Option<BadReason> {
    let _ = dep;
    let alive = state.heaps.iter().enumerate().any(|(heap, books)| {
        books.find(record.ptr).and_then(|b| books.block(b)).is_some_and(|b| {
            let info = state.info(crate::state::Home { heap, block: b.key });
            b.base == record.ptr && b.requested_bytes == record.bytes && (info.allocation != 0 || info.record != NONE)
        })
    });
    (!alive).then_some(BadReason::Gone)
}
