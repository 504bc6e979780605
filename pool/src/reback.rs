//! Remap repair: pages back under the addresses that a graph depends on.

use std::ops::Range;

use crate::core::SegmentKey;
use crate::driver::DevicePtr;
use crate::growth::{Short, short};
use crate::register::judge;
use crate::shared::{Cold, Notices, Shared};
use crate::state::Home;
use crate::{Bad, BadReason, PoolError, Reback, Stale};

/// A block whose pages are missing.
struct Hole {
    record: usize,
    home: Home,
    segment: SegmentKey,
    chunks: Vec<Range<u32>>,
}

impl Shared {
    pub(crate) fn reback(&self, graph: usize) -> Result<Vec<Reback>, PoolError> {
        self.may_call_driver("putting pages back")?;
        let mut notices = Notices::default();
        let result = {
            let cold = self.cold();
            self.retry_leftovers(&cold, &mut notices);
            self.reback_cold(&cold, graph, &mut notices)
        };
        notices.deliver();
        result
    }

    fn reback_cold(&self, cold: &Cold<'_>, graph: usize, notices: &mut Notices) -> Result<Vec<Reback>, PoolError> {
        if let Some(purpose) = self.lock().asleep_for(graph) {
            return Err(PoolError::Asleep { purpose, what: "putting pages back" });
        }
        let holes = self.holes(graph)?;
        for hole in &holes {
            self.fill(cold, graph, hole, notices)?;
        }
        let mut state = self.lock();
        let state = &mut *state;
        let mut again = Vec::new();
        let Some(g) = state.graphs.get_mut(graph) else { return Ok(again) };
        for dep in &mut g.deps {
            let Some(record) = state.records.get(dep.record) else { continue };
            let dependency = &mut dep.dependency;
            if judge(record, dependency) != Some(BadReason::Rebacked) {
                continue;
            }
            dependency.token.backing = record.backing;
            dependency.token.content = record.content;
            again.push(Reback {
                ptr: DevicePtr(record.ptr + dependency.offset_bytes as u64),
                bytes: dependency.bytes,
                clear: dependency.use_ == crate::Use::ZeroedScratch,
                mapped: holes.iter().any(|hole| hole.record == dep.record),
            });
        }
        Ok(again)
    }

    /// What pages can repair; a refusal if something else is wrong too.
    fn holes(&self, graph: usize) -> Result<Vec<Hole>, Stale> {
        let state = self.lock();
        let pool = self.id;
        let evicted = || Stale::evicted(pool);
        let g = state.graphs.get(graph).filter(|g| !g.evicted && !g.lease.is_dead()).ok_or_else(evicted)?;
        let mut holes: Vec<Hole> = Vec::new();
        let mut bad = Vec::new();
        for (index, dep) in g.deps.iter().enumerate() {
            let Some(record) = state.records.get(dep.record) else { continue };
            let Some(reason) = judge(record, &dep.dependency) else { continue };
            if reason == BadReason::Rebacked {
                continue;
            }
            if reason != BadReason::Unbacked || !dep.dependency.use_.is_scratch() {
                bad.push(Bad { index, dependency: dep.dependency, reason });
                continue;
            }
            if !record.unbacked || holes.iter().any(|h| h.record == dep.record) {
                continue;
            }
            let Some(home) = record.home() else { continue };
            let Some(block) = state.heaps[home.heap].block(home.block) else { continue };
            let chunks = state.heaps[home.heap].missing_chunks(home.block);
            holes.push(Hole { record: dep.record, home, segment: block.segment, chunks });
        }
        if bad.is_empty() { Ok(holes) } else { Err(Stale { pool, evicted: false, asleep: None, bad }) }
    }

    fn fill(&self, cold: &Cold<'_>, graph: usize, hole: &Hole, notices: &mut Notices) -> Result<(), PoolError> {
        let bytes: u64 = hole.chunks.iter().map(|r| r.len() as u64 * self.chunk_bytes).sum();
        // Free chunks first: they are there, and the peak stays where it is.
        let wanted = [(hole.segment, hole.chunks.clone())];
        let lack = self.lack(hole.home.heap, &wanted).0;
        self.gather(cold, lack, &(0..0), notices)?;
        loop {
            let shortage = match self.lack(hole.home.heap, &wanted) {
                (_, over) if over > 0 => Short::Limit(over),
                (lack, _) => match self.map_chunks(cold, hole.home.heap, hole.segment, &hole.chunks) {
                    Ok(()) => break,
                    Err(error) => short(error, lack.max(self.chunk_bytes)),
                },
            };
            self.make_room(cold, shortage, bytes, hole.home.heap, Some(graph), notices)?;
        }
        let mut state = self.lock();
        if let Some(record) = state.records.get_mut(hole.record) {
            record.unbacked = false;
        }
        state.counters.rebacks += 1;
        tracing::debug!(pool = self.id.0, bytes, epoch = state.counters.epoch_bumps, "backed again");
        Ok(())
    }
}
