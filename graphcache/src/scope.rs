//! What a graph's closure sees.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

use evergraph_pool::driver::{DevicePtr, DynDriver, HandleMap};
use evergraph_pool::{
    AllocationId, BadReason, Dependency, DeviceSlice, Element, Hold, PointerTable, Pool, PoolError, PoolId,
    ScratchPolicy, Stale, Stream, Token, Tracked, Use, Window, mutant,
};
use smallvec::SmallVec;

use crate::reach::{Reach, Reaches};
use crate::{CacheError, Request};

/// What an owner of a captured graph's odds and ends looks like.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// The closure's view of one run: where to queue work, where to take memory from, and where to say what the
/// work depends on.
///
/// The same closure serves warm-ups, eager runs and captures: everything it queues must go to
/// [`stream`](Self::stream), and whatever it depends on is declared each time it runs.
#[derive(Debug)]
pub struct Scope<'a> {
    request: &'a Request<'a>,
    windows: &'a [Window],
    notes: &'a Notes,
    hold: Hold,
    lost: &'a Lost,
}

/// Where memory starts, and how many bytes it has.
pub(crate) type Span = (DevicePtr, usize);

/// What a run of the closure left behind.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub(crate) declared: RefCell<Vec<Dependency>>,
    /// Zeroed scratch of the window, to be cleared before the first launch.
    pub(crate) zeroed: RefCell<Vec<Span>>,
    /// All scratch of the capture.
    pub(crate) handed: RefCell<Vec<Span>>,
    pub(crate) keeps: RefCell<Vec<Keep>>,
    /// Results, in the order in which they were asked for.
    pub(crate) outputs: RefCell<Vec<Made>>,
    /// Growable slices that were declared.
    pub(crate) reaches: RefCell<Reaches>,
    pub(crate) miss: Cell<Option<Miss>>,
}

/// Input, state and weights whose bytes are gone. Declaring one of them again does not bring them back: it is
/// refused until somebody says that they were filled.
#[derive(Debug, Default)]
pub(crate) struct Lost(Vec<(AllocationId, Stale)>);

impl Lost {
    /// Notes what a walk found.
    pub(crate) fn note(&mut self, stale: &[Stale]) {
        let gone = [BadReason::ContentLost, BadReason::Unbacked];
        for stale in stale {
            for bad in stale.bad.iter().filter(|b| !b.dependency.use_.is_scratch() && gone.contains(&b.reason)) {
                let allocation = bad.dependency.token.allocation;
                if self.of(allocation).is_none() {
                    self.0.push((allocation, Stale { bad: vec![*bad], ..stale.clone() }));
                }
            }
        }
    }

    /// They were filled again.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    fn of(&self, allocation: AllocationId) -> Option<&Stale> {
        self.0.iter().find(|(lost, _)| *lost == allocation).map(|(_, stale)| stale)
    }
}

/// A result of a run: the slice by its type, and where it is.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) slice: Keep,
    pub(crate) span: Span,
}

/// Memory that was not ready inside a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Miss {
    pub(crate) pool: PoolId,
    pub(crate) requested_bytes: usize,
    pub(crate) purpose: evergraph_pool::Purpose,
}

impl<'a> Scope<'a> {
    pub(crate) fn new(
        request: &'a Request<'a>,
        windows: &'a [Window],
        notes: &'a Notes,
        hold: Hold,
        lost: &'a Lost,
    ) -> Self {
        Self { request, windows, notes, hold, lost }
    }

    /// The stream to queue work on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.request.stream
    }

    /// The driver of that stream.
    #[must_use]
    pub fn driver(&self) -> &DynDriver {
        self.request.stream.driver()
    }

    /// The request's first pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.request.pool
    }

    /// Whether this run is recorded and not executed. Nothing may be read back then.
    #[must_use]
    pub fn capturing(&self) -> bool {
        !self.windows.is_empty()
    }

    /// `len` elements of scratch. When captured, they are the graph's: what every replay uses.
    ///
    /// # Errors
    /// Those of [`Pool::alloc`]; inside a capture `WindowMiss`, which the cache repairs by itself.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<DeviceSlice<T>, CacheError> {
        if self.capturing() {
            let zeroed = |span: &Span| self.notes.zeroed.borrow().iter().any(|other| overlap(span, other));
            return self.alloc_apart(len, zeroed);
        }
        self.noted(self.request.pool.alloc(len, self.request.stream))
    }

    /// `len` elements of scratch of the device of this number among those [beside](Request::beside) the request's own, in the
    /// order of its stream there.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `NoLane` for a number that the request does not have.
    pub fn alloc_beside<T: Element>(&self, lane: usize, len: usize) -> Result<DeviceSlice<T>, CacheError> {
        let Some((pool, stream)) = self.request.beside.get(lane) else { return Err(CacheError::NoLane { lane }) };
        let slice = self.noted_of(pool, pool.alloc(len, stream))?;
        if self.capturing() {
            self.notes.handed.borrow_mut().push((slice.ptr(), slice.bytes()));
        }
        Ok(slice)
    }

    /// `len` elements of scratch that start as zero, and that the work leaves as zero. They are cleared once,
    /// and again after other pages came under them; not at every replay.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed_scratch<T: Element>(&self, len: usize) -> Result<DeviceSlice<T>, CacheError> {
        if !self.capturing() || matches!(self.request.policy, ScratchPolicy::Shared(_)) {
            // In an arena other graphs write between two launches: there the clearing is part of the graph.
            let slice = self.alloc(len)?;
            self.request.stream.fill(&slice, 0)?;
            return Ok(slice);
        }
        let used = |span: &Span| self.notes.handed.borrow().iter().any(|other| overlap(span, other));
        let slice = self.alloc_apart(len, used)?;
        // Cleared before the first launch, outside the graph.
        self.declare(&slice, Use::ZeroedScratch)?;
        self.notes.zeroed.borrow_mut().push((slice.ptr(), slice.bytes()));
        Ok(slice)
    }

    /// Scratch at a place that does not clash. Zeroed scratch shares no byte with other scratch of its capture: what
    /// a launch leaves in the other would not be zero when the next launch begins.
    fn alloc_apart<T: Element>(
        &self,
        len: usize,
        clashes: impl Fn(&Span) -> bool,
    ) -> Result<DeviceSlice<T>, CacheError> {
        let mut clashing = Vec::new();
        loop {
            let slice = self.noted(self.request.pool.alloc(len, self.request.stream))?;
            let span = (slice.ptr(), slice.bytes());
            if slice.is_empty() || !clashes(&span) || mutant::is("cache.zeroed-shares-bytes") {
                self.notes.handed.borrow_mut().push(span);
                return Ok(slice);
            }
            // Kept until another place is found, so that the next try can not find this one again.
            clashing.push(slice);
        }
    }

    /// `len` elements for a result that the caller may keep, in a request whose policy is an arena. After the run the
    /// result is to be had by its number ([`GraphCache::output`](crate::GraphCache::output)). It shares its bytes with the
    /// scratch of other graphs of the arena, except while somebody holds it.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `NoArena` for another policy.
    pub fn output<T: Element>(&self, len: usize) -> Result<Arc<DeviceSlice<T>>, CacheError> {
        if !matches!(self.request.policy, ScratchPolicy::Shared(_)) {
            return Err(CacheError::NoArena);
        }
        let slice = Arc::new(self.alloc::<T>(len)?);
        let span = (slice.ptr(), slice.bytes());
        // Kept to the end of the capture, so that nothing else of this graph gets its bytes.
        self.notes.outputs.borrow_mut().push(Made { slice: Arc::clone(&slice) as Keep, span });
        Ok(slice)
    }

    /// Declares that the work uses all of `memory`. Its block may be taken once its owner has dropped it, and
    /// the graph goes stale with it.
    ///
    /// # Errors
    /// `UnknownPool`, `StaleToken`; `ContentLost` if a graph of this key found its bytes gone and nobody
    /// [said](crate::GraphCache::invalidate) that they were filled again.
    pub fn declare(&self, memory: &(impl Tracked + ?Sized), use_: Use) -> Result<(), CacheError> {
        self.declare_range(memory, use_, 0, memory.bytes())
    }

    /// Declares that the work uses a range of `memory`, bytes.
    ///
    /// # Errors
    /// As [`declare`](Self::declare), and `Range`.
    pub fn declare_range(
        &self,
        memory: &(impl Tracked + ?Sized),
        use_: Use,
        offset_bytes: usize,
        bytes: usize,
    ) -> Result<(), CacheError> {
        self.reach(memory, offset_bytes.saturating_add(bytes))?;
        self.declare_token(memory.token(), use_, offset_bytes, bytes, self.hold)
    }

    /// As [`declare`](Self::declare), but the graph keeps the block: dropping the slice gives it back only when
    /// the graph is gone.
    ///
    /// # Errors
    /// As [`declare`](Self::declare).
    pub fn declare_held(&self, memory: &(impl Tracked + ?Sized), use_: Use) -> Result<(), CacheError> {
        self.reach(memory, memory.bytes())?;
        self.declare_token(memory.token(), use_, 0, memory.bytes(), Hold::Strong)
    }

    /// Whether memory that grows is there as far as this run goes; a graph keeps the question.
    fn reach(&self, memory: &(impl Tracked + ?Sized), end_bytes: usize) -> Result<(), CacheError> {
        let Some(extent) = memory.extent() else { return Ok(()) };
        let reach = Reach { allocation: memory.token().allocation, end_bytes, extent: extent.clone() };
        if let Some(error) = reach.beyond(0, self.request.touches) {
            return Err(error);
        }
        if self.capturing() {
            self.notes.reaches.borrow_mut().add(reach);
        }
        Ok(())
    }

    /// Declares a table of addresses and everything that it points at. A scan sees the table's own address only.
    ///
    /// # Errors
    /// As [`declare`](Self::declare).
    pub fn declare_table(&self, table: &PointerTable) -> Result<(), CacheError> {
        self.declare(table.slice(), Use::Input)?;
        if mutant::is("cache.table-members-ignored") {
            return Ok(());
        }
        for member in table.members() {
            self.declare_token(member.token, member.use_, 0, member.bytes, self.hold)?;
        }
        Ok(())
    }

    /// Keeps `owner` as long as the graph: a module, a callback's data, an event, a library's handle.
    pub fn keep(&self, owner: Keep) {
        if self.capturing() {
            self.notes.keeps.borrow_mut().push(owner);
        }
    }

    fn declare_token(
        &self,
        token: Token,
        use_: Use,
        offset_bytes: usize,
        bytes: usize,
        hold: Hold,
    ) -> Result<(), CacheError> {
        let found = token.allocation.pool();
        if !self.request.pools().any(|pool| pool.id() == found) {
            return Err(CacheError::UnknownPool { found });
        }
        if let Some(stale) = self.lost.of(token.allocation)
            && !use_.is_scratch()
        {
            return Err(CacheError::ContentLost(stale.clone()));
        }
        // An eager run has no window that would say so: what sleeps has no pages.
        if !self.capturing()
            && let Some(purpose) = token.purpose()
            && self.request.pools().any(|pool| pool.id() == found && pool.is_asleep(purpose))
            && !mutant::is("cache.asleep-runs-eagerly")
        {
            return Err(PoolError::Asleep { purpose, what: "a declaration" }.into());
        }
        if mutant::is("cache.declared-ignored") {
            return Ok(());
        }
        if let Some(window) = self.windows.iter().find(|w| w.pool_id() == found) {
            window.declare(token, use_, offset_bytes, bytes, hold)?;
            self.notes.declared.borrow_mut().push(Dependency { token, use_, offset_bytes, bytes, hold });
        }
        Ok(())
    }

    fn noted<T>(&self, result: Result<T, PoolError>) -> Result<T, CacheError> {
        self.noted_of(self.request.pool, result)
    }

    fn noted_of<T>(&self, pool: &Pool, result: Result<T, PoolError>) -> Result<T, CacheError> {
        if let Err(PoolError::WindowMiss { requested_bytes, purpose, .. }) = &result {
            let miss = Miss { pool: pool.id(), requested_bytes: *requested_bytes, purpose: *purpose };
            self.notes.miss.set(Some(miss));
        }
        Ok(result?)
    }
}

fn overlap(a: &Span, b: &Span) -> bool {
    a.0.0 < b.0.0 + b.1 as u64 && b.0.0 < a.0.0 + a.1 as u64
}

impl Notes {
    pub(crate) fn declared_set(&self) -> HandleMap<AllocationId, ()> {
        self.declared.borrow().iter().map(|d| (d.token.allocation, ())).collect()
    }

    pub(crate) fn take_keeps(&self) -> SmallVec<[Keep; 4]> {
        self.keeps.take().into()
    }
}

#[cfg(test)]
mod tests;
