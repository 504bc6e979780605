//! Who depends on what: declarations, walks, the end of a graph.

use crate::core::Uses;
use crate::handshake::Proven;
use crate::shared::Shared;
use crate::state::{Dep, Holder, NONE, Record, Standing, State};
use crate::token::PlaceKind;
use crate::{Bad, BadReason, Dependency, Hold, PoolError, Stale, mutant};

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
        let Some(g) = state.graphs.get(graph) else { return Err(Stale { pool, evicted: true, bad: Vec::new() }) };
        if g.evicted || g.lease.is_dead() {
            return Err(Stale { pool, evicted: true, bad: Vec::new() });
        }
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
        let proven = state.epoch.proven();
        if let Some(g) = state.graphs.get_mut(graph) {
            g.good = bad.is_empty();
        }
        if bad.is_empty() { Ok(proven) } else { Err(Stale { pool, evicted: false, bad }) }
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
    if (record.unbacked || record.backing != token.backing) && !mutant::is("backing-unchecked") {
        return Some(BadReason::Unbacked);
    }
    let content_matters = !dependency.use_.is_scratch();
    (content_matters && record.content != token.content).then_some(BadReason::ContentLost)
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
