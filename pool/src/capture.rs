//! Capture windows and arenas.

use std::sync::Arc;

use crate::core::{StreamKey, Uses};
use crate::driver::DevicePtr;
use crate::outputs::Book;
use crate::shared::Shared;
use crate::state::{Dep, Graph, Home, NONE, OpenWindow, Record, Site, Standing, State, WindowBlock};
use crate::token::Place;
use crate::{Dependency, Dependent, HandedOut, Hold, PoolError, ScratchPolicy, Stream, Token, Use, Window, mutant};

impl Shared {
    pub(crate) fn begin_window(
        self: &Arc<Self>,
        dependent: Arc<dyn Dependent>,
        stream: Option<Stream>,
        policy: ScratchPolicy,
    ) -> Result<Window, PoolError> {
        // Foreign code, if only getters: before the lock.
        let launch_stream = dependent.stream().clone();
        let lease = Arc::clone(dependent.lease());
        let cost_us = dependent.rebuild_cost_us();
        if let Some(stream) = &stream {
            self.same_device("stream", stream)?;
            if let ScratchPolicy::Shared(arena) = &policy {
                if arena.0.shared.id != self.id {
                    return Err(PoolError::OtherPool { expected: self.id, found: arena.0.shared.id });
                }
                if arena.0.stream != *stream {
                    return Err(PoolError::Config("the arena belongs to another stream than the window"));
                }
            }
            stream.not_capturing("a second capture window")?;
            self.settle();
        }
        let mut state = self.lock();
        let state = &mut *state;
        let key = self.stream_key(state, &launch_stream);
        let window_key = match &stream {
            Some(stream) => {
                let key = self.stream_key(state, stream);
                if state.streams[key.0 as usize].window != NONE {
                    return Err(PoolError::Capturing { what: "a second capture window" });
                }
                // In this critical section: nobody orders anything after the stream between the event and
                // "capturing".
                stream.open_window()?;
                Some(key)
            }
            None => None,
        };
        let private = match &policy {
            ScratchPolicy::Shared(arena) => state.arenas.get(arena.0.index).map(|a| a.0),
            _ => None,
        };
        let private = private.unwrap_or_else(|| state.take_private());
        let thread = window_key.map(|_| crate::capture_thread::Mark::new());
        let window = OpenWindow {
            thread,
            stream: window_key,
            private,
            handed: Vec::new(),
            freed: Vec::new(),
            limbo: Vec::new(),
        };
        let index = state.graphs.insert(Graph {
            dependent,
            lease,
            stream: key,
            cost_us,
            policy,
            deps: Vec::new(),
            window: Some(window),
            evicted: false,
            good: false,
        });
        state.streams[key.0 as usize].live += 1;
        if let Some(key) = window_key {
            state.streams[key.0 as usize].window = index as u32;
        }
        Ok(Window { shared: Arc::clone(self), dependent: index, stream, open: true })
    }

    pub(crate) fn handed_out(&self, graph: usize) -> Vec<HandedOut> {
        let state = self.lock();
        let window = state.graphs.get(graph).and_then(|g| g.window.as_ref());
        window.map(|w| w.handed.iter().map(|h| h.handed).collect()).unwrap_or_default()
    }

    pub(crate) fn window_owns(&self, graph: usize, ptr: DevicePtr) -> bool {
        let state = self.lock();
        let window = state.graphs.get(graph).and_then(|g| g.window.as_ref());
        window.is_some_and(|w| w.handed.iter().any(|h| (h.base..=h.base + h.block_bytes).contains(&ptr.0)))
    }

    /// The end of a window: its memory becomes the graph's.
    pub(crate) fn finish_window(&self, graph: usize, stream: Option<&Stream>) -> Result<(), PoolError> {
        let event = {
            let mut state = self.lock();
            let state = &mut *state;
            let Some(g) = state.graphs.get(graph) else {
                return Err(PoolError::Internal("a window without a graph"));
            };
            let Some(window) = &g.window else { return Err(PoolError::Internal("a window that is not open")) };
            let policy = g.policy.clone();
            let shared = matches!(policy, ScratchPolicy::Shared(_));
            let live: Vec<WindowBlock> =
                window.handed.iter().copied().filter(|h| still_live(state, graph, h)).collect();
            let reused = |h: &WindowBlock| {
                window.freed.iter().any(|f| f.start < h.base + h.block_bytes && h.base < f.end)
                    && !mutant::is("outliving-unchecked")
            };
            if let Some(bad) = live.iter().find(|h| shared || reused(h)) {
                let HandedOut { token, ptr, bytes } = bad.handed;
                return Err(PoolError::OutlivesWindow { token, ptr, bytes });
            }
            let Some(window) = state.graphs.get_mut(graph).and_then(|g| g.window.take()) else {
                return Err(PoolError::Internal("a window that is not open"));
            };
            let hold = if matches!(policy, ScratchPolicy::Track) { Hold::Weak } else { Hold::Strong };
            for block in live {
                state.info_mut(block.home).window = NONE;
                if let Some(record) = state.record_of_block(block.home) {
                    state.hold_scratch(graph, record, hold);
                }
            }
            if !shared && mutant::is("reissue-scratch") {
                let now = state.tick();
                let to = window.stream.map(Uses::one).unwrap_or_default();
                for heap in &mut state.heaps {
                    heap.retag(window.private, &to, now);
                }
                state.release_private(window.private);
            } else if !shared {
                for heap in 0..state.heaps.len() {
                    for block in state.heaps[heap].take_private(window.private) {
                        state.adopt(graph, Home { heap, block }, window.stream, hold);
                    }
                }
                state.release_private(window.private);
            }
            state.end_limbo(window.limbo);
            state.open_stream(window.stream);
            state.note_active();
            // A graph that was evicted from elsewhere meanwhile stays a registration; its walk says so.
            stream.and_then(Stream::close_window)
        };
        // The event's destructor calls the driver.
        drop(event);
        Ok(())
    }

    /// The window came to nothing: everything is as if it had not been.
    pub(crate) fn cancel_window(&self, graph: usize, stream: Option<&Stream>) {
        let gone = {
            let mut state = self.lock();
            let state = &mut *state;
            state.release_holds(graph);
            let Some(mut gone) = state.graphs.try_remove(graph) else { return };
            if let Some(slot) = state.streams.get_mut(gone.stream.0 as usize) {
                slot.live = slot.live.saturating_sub(1);
            }
            if let Some(window) = gone.window.take() {
                for block in &window.handed {
                    if still_live(state, graph, block) {
                        state.info_mut(block.home).window = NONE;
                    }
                }
                if !matches!(gone.policy, ScratchPolicy::Shared(_)) {
                    let now = state.tick();
                    let to = window.stream.map(Uses::one).unwrap_or_default();
                    for heap in &mut state.heaps {
                        heap.retag(window.private, &to, now);
                    }
                    state.release_private(window.private);
                }
                state.end_limbo(window.limbo);
                state.open_stream(window.stream);
            }
            (gone, stream.and_then(Stream::close_window))
        };
        drop(gone);
        self.end_host_memory();
    }

    // ---- arenas

    pub(crate) fn add_arena(&self, stream: &Stream) -> Result<(usize, Arc<Book>), PoolError> {
        self.same_device("stream", stream)?;
        let mut state = self.lock();
        let state = &mut *state;
        let key = self.stream_key(state, stream);
        state.streams[key.0 as usize].live += 1;
        let private = state.take_private();
        let book = Arc::<Book>::default();
        Ok((state.arenas.insert((private, key, Arc::clone(&book))), book))
    }

    pub(crate) fn arena_bytes(&self, index: usize) -> usize {
        let state = self.lock();
        let Some(private) = state.arenas.get(index).map(|a| a.0) else { return 0 };
        let books = state.heaps.iter();
        let blocks = books.flat_map(|h| h.segments().flat_map(|s| h.blocks_of(s.key)).collect::<Vec<_>>());
        blocks.filter(|b| b.uses.contains(private)).map(|b| b.bytes as usize).sum()
    }

    /// No graph and no user has the arena any more: its memory is the pool's, behind the stream's work.
    pub(crate) fn drop_arena(&self, index: usize) {
        let mut state = self.lock();
        let state = &mut *state;
        let Some((private, key, _)) = state.arenas.try_remove(index) else { return };
        let now = state.tick();
        for heap in &mut state.heaps {
            heap.retag(private, &Uses::one(key), now);
        }
        state.release_private(private);
        if let Some(slot) = state.streams.get_mut(key.0 as usize) {
            slot.live = slot.live.saturating_sub(1);
        }
    }
}

/// Whether the slice of a window's hand-out is still there.
fn still_live(state: &State, graph: usize, block: &WindowBlock) -> bool {
    let info = state.info(block.home);
    info.window == graph as u32 && info.allocation == block.handed.token.allocation.get()
}

impl State {
    fn take_private(&mut self) -> StreamKey {
        let key = self.take_slot(None);
        for heap in &mut self.heaps {
            heap.set_private(key, true);
        }
        key
    }

    /// Nothing is tagged with it any more.
    fn release_private(&mut self, key: StreamKey) {
        for heap in &mut self.heaps {
            heap.set_private(key, false);
        }
        self.release_slot(key);
    }

    /// Memory freed inside a window becomes the graph's.
    fn adopt(&mut self, graph: usize, home: Home, stream: Option<StreamKey>, hold: Hold) {
        let (Some((base, bytes)), Some(allocation)) = (self.heaps[home.heap].span(home.block), self.next_allocation())
        else {
            return;
        };
        let mut record = Record::new(allocation, base, bytes, Site::Block(home), Standing::Held);
        if let Some(stream) = stream {
            record.uses.insert(stream);
        }
        let record = self.records.insert(record);
        let info = self.info_mut(home);
        *info = crate::state::Info::EMPTY;
        info.allocation = allocation.get();
        info.record = record as u32;
        self.tally.held.add(bytes);
        self.hold_scratch(graph, record, hold);
    }

    fn hold_scratch(&mut self, graph: usize, record: usize, hold: Hold) {
        let Some(r) = self.records.get(record) else { return };
        let place = r.home().map_or(Place::NOWHERE, |h| Place::block(h.heap, h.block.index()));
        let token: Token = r.token(place);
        let bytes = r.bytes as usize;
        let dependency = Dependency { token, use_: Use::Scratch, offset_bytes: 0, bytes, hold };
        self.hold(graph, Dep { dependency, record });
    }

    /// Slices that were dropped inside the window: their blocks are the graph's if it declared them.
    fn end_limbo(&mut self, limbo: Vec<(Home, Uses)>) {
        for (home, uses) in limbo {
            self.info_mut(home).limbo = false;
            Self::let_go(self, home, uses);
        }
    }

    fn open_stream(&mut self, stream: Option<StreamKey>) {
        if let Some(slot) = stream.and_then(|key| self.streams.get_mut(key.0 as usize)) {
            slot.window = NONE;
        }
    }
}
