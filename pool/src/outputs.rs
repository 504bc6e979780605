//! Outputs in shared arenas.
//!
//! Graphs of one stream never overlap in time, so in an [`Arena`](crate::Arena) they share bytes: what one graph leaves behind
//! another writes over, and so does its own next launch. Whoever wants to keep a result takes [hold](ArenaGraph::hold) of it,
//! and while it is held no graph that would write there is launched. That is asked at every launch, because whether somebody
//! holds an output is not known when a graph is recorded.
//!
//! The same handshake as for retiring memory, with sides exchanged. A launcher sets its lease, fences, looks whether
//! anything is held; a holder says what it holds, fences, and waits for the leases of the graphs that write there. So
//! either the launcher sees the hold, or the holder sees the launch; and a launch that came between is told by its number:
//! the output is gone then.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::driver::DevicePtr;
use crate::handshake::Lease;
use crate::{Arena, Awake, DeviceSlice, Element, PoolError, Stream, mutant};

/// What an arena knows of its graphs and of what is held.
#[derive(Debug, Default)]
pub(crate) struct Book {
    /// How many holds there are: zero nearly always, and one load then.
    holds: AtomicUsize,
    /// Numbers launches across the graphs of the arena.
    order: AtomicU64,
    /// Held for moments, never while anybody is waited for.
    pages: Mutex<Pages>,
}

impl Book {
    pub(crate) fn is_held(&self) -> bool {
        !self.pages.lock().held.is_empty()
    }

    /// The arena's bytes are about to go, and none of its graphs can be launched now: nothing that was left in it can be
    /// held any more. `false`: something is.
    pub(crate) fn forget_outputs(&self) -> bool {
        let pages = self.pages.lock();
        if !pages.held.is_empty() {
            return false;
        }
        for graph in pages.graphs.iter().filter_map(Weak::upgrade) {
            graph.launched.store(0, Ordering::Relaxed);
        }
        true
    }
}

#[derive(Debug, Default)]
struct Pages {
    graphs: Vec<Weak<ArenaGraph>>,
    held: Vec<Range<u64>>,
}

/// A captured graph as its arena knows it: where it writes, and when it last ran.
#[derive(Debug)]
pub struct ArenaGraph {
    arena: Arena,
    lease: Arc<Lease>,
    spans: Vec<Range<u64>>,
    /// Number of its last launch among the arena's; 0: none yet.
    launched: AtomicU64,
}

impl Arena {
    /// Makes a captured graph known that has scratch here. `spans`: all that it writes, addresses and bytes.
    #[must_use]
    pub fn enlist(&self, lease: &Arc<Lease>, spans: &[(DevicePtr, usize)]) -> Arc<ArenaGraph> {
        let spans = spans.iter().map(|(ptr, bytes)| ptr.0..ptr.0 + *bytes as u64).collect();
        let graph =
            Arc::new(ArenaGraph { arena: self.clone(), lease: Arc::clone(lease), spans, launched: AtomicU64::new(0) });
        let mut pages = self.0.book.pages.lock();
        pages.graphs.retain(|graph| graph.strong_count() > 0);
        pages.graphs.push(Arc::downgrade(&graph));
        graph
    }

    /// Whether anything in it is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.book.holds.load(Ordering::Relaxed) > 0
    }
}

impl ArenaGraph {
    /// Whether nothing is held that the graph would write over. To be asked under its lease.
    #[inline]
    #[must_use]
    pub fn may_launch(&self) -> bool {
        self.arena.0.book.holds.load(Ordering::Relaxed) == 0 || self.is_clear()
    }

    #[cold]
    fn is_clear(&self) -> bool {
        let pages = self.arena.0.book.pages.lock();
        !pages.held.iter().any(|held| self.writes(held)) || mutant::is("held-outputs-ignored")
    }

    fn writes(&self, span: &Range<u64>) -> bool {
        self.spans.iter().any(|own| own.start < span.end && span.start < own.end)
    }

    /// Notes a launch, under its lease.
    #[inline]
    pub fn note_launch(&self) {
        let number = self.arena.0.book.order.fetch_add(1, Ordering::Relaxed) + 1;
        self.launched.store(number, Ordering::Relaxed);
    }

    /// Takes hold of what the last launch left in a part of its memory. Until the hold is dropped, no graph of the arena is
    /// launched that would write there.
    ///
    /// # Errors
    /// `OutputGone` if the graph was not launched, or another one has written there since; `Range` for bytes that are not
    /// the graph's, or no whole elements.
    pub fn hold<T: Element>(self: &Arc<Self>, ptr: DevicePtr, bytes: usize) -> Result<Output<T>, PoolError> {
        let span = ptr.0..ptr.0.saturating_add(bytes as u64);
        let inside = self.spans.iter().any(|own| own.start <= span.start && span.end <= own.end);
        if !inside || size_of::<T>() == 0 || !bytes.is_multiple_of(size_of::<T>()) {
            let allocation_bytes = self.spans.iter().map(|s| (s.end - s.start) as usize).max().unwrap_or(0);
            return Err(PoolError::Range { offset_bytes: 0, bytes, allocation_bytes });
        }
        let book = &self.arena.0.book;
        let writers: Vec<Arc<ArenaGraph>> = {
            let mut pages = book.pages.lock();
            pages.held.push(span.clone());
            book.holds.fetch_add(1, Ordering::Relaxed);
            pages.graphs.iter().filter_map(Weak::upgrade).filter(|graph| graph.writes(&span)).collect()
        };
        // From here on it is let go on every way out.
        let hold = Hold { graph: Arc::clone(self), span };
        fence(Ordering::SeqCst);
        for graph in &writers {
            graph.lease.wait_clear();
        }
        let launched = self.launched.load(Ordering::Relaxed);
        let newer = |graph: &Arc<ArenaGraph>| graph.launched.load(Ordering::Relaxed) > launched;
        if launched == 0 || writers.iter().any(newer) {
            return Err(PoolError::OutputGone { ptr, bytes });
        }
        Ok(Output { kind: Kind::Held(hold), len: bytes / size_of::<T>(), element: PhantomData })
    }
}

/// A span that is held.
#[derive(Debug)]
struct Hold {
    graph: Arc<ArenaGraph>,
    span: Range<u64>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let book = &self.graph.arena.0.book;
        let mut pages = book.pages.lock();
        if let Some(index) = pages.held.iter().position(|held| *held == self.span) {
            pages.held.swap_remove(index);
            book.holds.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
enum Kind<T: Element> {
    /// Of a run without a graph: memory of its own.
    Own(Arc<DeviceSlice<T>>),
    Held(Hold),
}

/// A result that its caller keeps. While it lives nothing writes over it.
#[must_use = "an output that is dropped may be written over by the next launch"]
#[derive(Debug)]
pub struct Output<T: Element> {
    kind: Kind<T>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> Output<T> {
    /// Of a run that was no graph's: a slice of its own.
    pub fn of(slice: Arc<DeviceSlice<T>>) -> Self {
        let len = slice.len();
        Self { kind: Kind::Own(slice), len, element: PhantomData }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is, as long as it is held.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        match &self.kind {
            Kind::Own(slice) => slice.ptr(),
            Kind::Held(hold) => DevicePtr(hold.span.start),
        }
    }

    /// Keeps its memory from falling asleep while a call queues work on it. What is held of an arena keeps the arena from
    /// falling asleep anyway.
    pub(crate) fn hold_awake(&self, what: &'static str) -> Result<Awake, PoolError> {
        match &self.kind {
            Kind::Own(slice) => slice.hold_awake(what),
            Kind::Held(hold) => Ok(hold.graph.arena.0.shared.books().hold_awake()),
        }
    }

    /// Says that work queued on `stream` reads it. In an arena that is the arena's own stream, on which the next launch comes
    /// after the work.
    ///
    /// # Errors
    /// `Config` for another stream than the arena's: copy it there first.
    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), PoolError> {
        match &self.kind {
            Kind::Own(slice) => slice.record_stream(stream),
            Kind::Held(hold) if hold.graph.arena.stream() == stream => Ok(()),
            Kind::Held(_) => Err(PoolError::Config("an output in an arena is read on the arena's own stream")),
        }
    }
}
