//! Hand-out and take-back: the warm path, and what happens when it misses.

use std::sync::Arc;

use crate::core::{BadRequest, BlockKey, Request, StreamKey, Uses};
use crate::driver::DevicePtr;
use crate::growth::Short;
use crate::lock::Guard;
use crate::shared::{Books, Notices, Shared, fresh};
use crate::slice::Raw;
use crate::state::{Home, Info, NONE, Standing, State};
use crate::victims::Need;
use crate::{HandedOut, PoolError, PoolMode, Purpose, Stream};

/// Every block is a multiple of this.
pub(crate) const GRANULE_BYTES: u64 = 512;

/// Largest alignment that the modes can promise, bytes.
const MOST_ALIGN_BYTES: usize = 2 << 20;

/// A miss moves memory at most this many times before it gives up; other threads may take what was freed.
const MOST_ROUNDS: usize = 4096;

impl Shared {
    #[inline]
    pub(crate) fn alloc(
        self: &Arc<Self>,
        bytes: usize,
        align: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<Raw, PoolError> {
        let request = match Request::new(bytes as u64, align as u64, GRANULE_BYTES) {
            Ok(request) if align <= MOST_ALIGN_BYTES => request,
            Ok(_) | Err(BadRequest::Align) => {
                return Err(PoolError::Alignment { align, most: MOST_ALIGN_BYTES });
            }
            Err(BadRequest::Zero) => return self.alloc_nothing(purpose),
            Err(BadRequest::TooLarge) => {
                return Err(PoolError::TooLarge { requested: bytes, element_bytes: 1 });
            }
        };
        if let Some(key) = stream.home_key(self.id) {
            let key = StreamKey(key);
            let mut state = self.lock();
            let state = &mut *state;
            if let Some(slot) = state.streams.get(key.0 as usize)
                && slot.window == NONE
                && let Some(block) = state.heaps[purpose.index()].alloc(&request, key)
            {
                return self.hand_out(state, block, &request, purpose, key);
            }
        }
        self.alloc_slow(&request, purpose, stream)
    }

    /// A block becomes a slice.
    #[inline]
    fn hand_out(
        self: &Arc<Self>,
        state: &mut State,
        block: BlockKey,
        request: &Request,
        purpose: Purpose,
        key: StreamKey,
    ) -> Result<Raw, PoolError> {
        let heap = purpose.index();
        let Some(allocation) = state.next_allocation() else {
            return Err(PoolError::Internal("no identity left for a hand-out"));
        };
        let Some((base, bytes)) = state.heaps[heap].set_owner(block, allocation.get()) else {
            return Err(PoolError::Internal("a hand-out without a block"));
        };
        state.tally.allocated.add(bytes);
        state.tally.requested.add(request.requested_bytes());
        state.tally.slices.add(1);
        state.note_active();
        state.streams[key.0 as usize].live += 1;
        Ok(Raw {
            books: self.books(),
            ptr: DevicePtr(base),
            bytes: request.requested_bytes() as usize,
            allocation,
            block,
            stream: key,
            purpose,
        })
    }

    fn alloc_nothing(self: &Arc<Self>, purpose: Purpose) -> Result<Raw, PoolError> {
        let allocation = self.lock().next_allocation().ok_or(PoolError::Internal("no identity left for a hand-out"))?;
        Ok(Raw {
            books: self.books(),
            ptr: DevicePtr::NULL,
            bytes: 0,
            allocation,
            block: BlockKey::from_index(0),
            stream: StreamKey(0),
            purpose,
        })
    }

    #[cold]
    fn alloc_slow(self: &Arc<Self>, request: &Request, purpose: Purpose, stream: &Stream) -> Result<Raw, PoolError> {
        self.same_device("stream", stream)?;
        {
            let mut state = self.lock();
            let key = self.stream_key(&mut state, stream);
            let graph = state.streams[key.0 as usize].window;
            state.awake(purpose, "an allocation")?;
            if graph != NONE {
                let found = self.alloc_in_window(&mut state, graph as usize, request, purpose, key);
                if !(crate::mutant::is("window-unsealed") && matches!(found, Err(PoolError::WindowMiss { .. }))) {
                    return found;
                }
            } else if let Some(block) = state.heaps[purpose.index()].alloc(request, key) {
                return self.hand_out(&mut state, block, request, purpose, key);
            }
        }
        if !crate::mutant::is("window-unsealed") {
            if let Some(raw) = self.alloc_quietly(request, purpose, stream)? {
                return Ok(raw);
            }
            self.may_call_driver("an allocation that needs the driver")?;
            // Another pool's window.
            stream.not_capturing("an allocation that needs the driver")?;
        }
        self.settle();
        if let Some(raw) = self.alloc_cross(request, purpose, stream, false)? {
            return Ok(raw);
        }
        let mut notices = Notices::default();
        let result = self.alloc_cold(request, purpose, stream, &mut notices);
        if crate::mutant::is("callback-under-lock") {
            let _lock = self.lock();
            notices.deliver();
            return result;
        }
        notices.deliver();
        result
    }

    /// While this thread captures something: what is free for the stream, joined as far as needed.
    fn alloc_quietly(
        self: &Arc<Self>,
        request: &Request,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<Option<Raw>, PoolError> {
        if !crate::capture_thread::is_capturing() {
            return Ok(None);
        }
        let mut state = self.lock();
        let key = self.stream_key(&mut state, stream);
        match state.heaps[purpose.index()].alloc_squeezed(request, key, &|_| false) {
            Some((block, _)) => self.hand_out(&mut state, block, request, purpose, key).map(Some),
            None => Ok(None),
        }
    }

    /// Refuses what would break a capture of this thread.
    pub(crate) fn may_call_driver(&self, what: &'static str) -> Result<(), PoolError> {
        if crate::capture_thread::is_capturing() { Err(PoolError::Capturing { what }) } else { Ok(()) }
    }

    /// Memory that other streams may still touch: ordered behind them by events recorded now. `squeezed`: in
    /// places, too, that are better kept for requests of another size.
    fn alloc_cross(
        self: &Arc<Self>,
        request: &Request,
        purpose: Purpose,
        stream: &Stream,
        squeezed: bool,
    ) -> Result<Option<Raw>, PoolError> {
        let heap = purpose.index();
        let (raw, uses, others) = {
            let mut state = self.lock();
            let state = &mut *state;
            let key = self.stream_key(state, stream);
            let streams = &state.streams;
            let (books, usable) = (&mut state.heaps[heap], |k| State::usable(streams, k));
            let found = if squeezed {
                books.alloc_squeezed(request, key, &usable)
            } else {
                books.alloc_cross(request, key, &usable)
            };
            let Some((block, uses)) = found else { return Ok(None) };
            let raw = self.hand_out(state, block, request, purpose, key)?;
            if uses.is_empty() {
                return Ok(Some(raw));
            }
            // The block is ours now; inherited uses stay with it until the host has seen them complete.
            if !crate::mutant::is("reissue-forgets-uses") {
                let home = Home { heap, block };
                state.extra.insert(home, uses.clone());
                state.info_mut(home).extra = true;
            }
            state.counters.cross_stream += 1;
            let others = state.streams_of(&uses);
            (raw, uses, others)
        };
        if !crate::mutant::is("cross-stream-unordered") {
            for other in &others {
                // On an error `raw` is dropped: back to the pool, with the uses it had.
                let mark = other.mark()?;
                stream.wait(&mark)?;
            }
        }
        tracing::trace!(
            pool = self.id.0,
            bytes = request.bytes(),
            stream = stream.id(),
            after = uses.len(),
            "cross-stream reuse"
        );
        Ok(Some(raw))
    }

    /// Nothing free fits: grow, and where that is not possible take memory from the least painful victim, one
    /// at a time.
    fn alloc_cold(
        self: &Arc<Self>,
        request: &Request,
        purpose: Purpose,
        stream: &Stream,
        notices: &mut Notices,
    ) -> Result<Raw, PoolError> {
        let cold = self.cold();
        // Whoever puts memory to sleep or wakes it holds the cold lock too.
        self.lock().awake(purpose, "an allocation")?;
        self.retry_leftovers(&cold, notices);
        // Before the driver is asked for a terabyte, chunk by chunk.
        let ever = Need { short_bytes: 0, request: Some((request, purpose, stream)), keep: None };
        if !self.could_fit(&ever) {
            drop(cold);
            return Err(self.out_of_memory(request.requested_bytes() as usize, purpose, None));
        }
        let mut took = false;
        let mut last = None;
        for _ in 0..MOST_ROUNDS {
            if let Some(raw) = self.alloc_cross(request, purpose, stream, false)? {
                return Ok(raw);
            }
            let mut short = match self.grow(&cold, request, purpose, stream, false, notices) {
                Ok(()) => continue,
                Err(short) => short,
            };
            // Before anybody's memory goes: anywhere at all.
            if let Some(raw) = self.alloc_cross(request, purpose, stream, true)? {
                return Ok(raw);
            }
            if keeps_addresses(self.config.mode) {
                short = match self.grow(&cold, request, purpose, stream, true, notices) {
                    Ok(()) => continue,
                    Err(short) => short,
                };
            }
            let (bytes, driver) = match short {
                Short::Fail(error) => return Err(error),
                Short::Limit(bytes) => (bytes, None),
                Short::Driver(error, bytes) => (bytes, Some(error)),
                Short::Slots => (1, None),
            };
            last = driver.or(last);
            if !took {
                took = true;
                self.lock().tally.retries += 1;
            }
            let need = Need { short_bytes: bytes, request: Some((request, purpose, stream)), keep: None };
            if !self.relieve(&cold, &need, notices)? {
                break;
            }
        }
        drop(cold);
        Err(self.out_of_memory(request.requested_bytes() as usize, purpose, last))
    }

    // ---- inside a window

    /// A hand-out to a graph that is being captured: from what was freed inside, else from what is free for
    /// the stream at once. Never the driver.
    fn alloc_in_window(
        self: &Arc<Self>,
        state: &mut State,
        graph: usize,
        request: &Request,
        purpose: Purpose,
        key: StreamKey,
    ) -> Result<Raw, PoolError> {
        let heap = purpose.index();
        let private = state.graphs.get(graph).and_then(|g| g.window.as_ref()).map(|w| w.private);
        let private = private.ok_or(PoolError::Internal("a capturing stream without a window"))?;
        let books = &mut state.heaps[heap];
        let found = books
            .alloc(request, private)
            .or_else(|| books.alloc(request, key))
            .or_else(|| books.alloc_squeezed(request, key, &|_| false).map(|(block, _)| block));
        let Some(block) = found else {
            return Err(PoolError::WindowMiss {
                requested_bytes: request.requested_bytes() as usize,
                purpose,
                largest_ready_bytes: books.largest_free_bytes() as usize,
            });
        };
        let raw = self.hand_out(state, block, request, purpose, key)?;
        let home = Home { heap, block };
        state.info_mut(home).window = graph as u32;
        let block_bytes = state.heaps[heap].span(block).map_or(0, |s| s.1);
        if let Some(window) = state.graphs.get_mut(graph).and_then(|g| g.window.as_mut()) {
            let handed = HandedOut { token: fresh(&raw, raw.place()), ptr: raw.ptr, bytes: raw.bytes };
            window.handed.push(crate::state::WindowBlock { home, base: raw.ptr.0, block_bytes, handed });
        }
        Ok(raw)
    }

    pub(crate) fn out_of_memory(
        &self,
        requested_bytes: usize,
        purpose: Purpose,
        driver: Option<crate::driver::DriverError>,
    ) -> PoolError {
        self.lock().tally.ooms += 1;
        let report = self.report();
        tracing::warn!(
            pool = self.id.0,
            bytes = requested_bytes,
            reserved = report.reserved_bytes,
            live = report.allocated_bytes,
            held = report.held_by_graphs_bytes,
            "out of memory"
        );
        PoolError::OutOfMemory(Arc::new(crate::OutOfMemory { requested_bytes, purpose, report, driver }))
    }
}

impl Books {
    /// A slice was dropped: stream-ordered, silent, no driver call.
    #[inline]
    pub(crate) fn free(&self, raw: &Raw) {
        let home = Home { heap: raw.purpose.index(), block: raw.block };
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(slot) = state.streams.get_mut(raw.stream.0 as usize) else { return };
        slot.live = slot.live.saturating_sub(1);
        let window = slot.window;
        state.tally.slices.sub(1);
        if crate::mutant::is("epoch-on-every-free") {
            state.epoch.bump();
        }
        let info = state.info(home);
        debug_assert_eq!(info.allocation, raw.allocation.get(), "a slice owns its block");
        if info.is_plain() && window == NONE {
            let now = state.tick();
            let freed = state.heaps[home.heap].free(raw.block, Uses::one(raw.stream), now);
            debug_assert!(freed.is_ok(), "a live block is used: {freed:?}");
            state.tally.requested.sub(raw.bytes as u64);
            state.tally.allocated.sub(freed.unwrap_or(0));
        } else {
            let bytes = state.heaps[home.heap].span(raw.block).map_or(0, |s| s.1);
            let grown = state.growing.remove(&home).map(|g| (g.requested_bytes, g.allocated_bytes));
            let (requested, allocated) = grown.unwrap_or((raw.bytes as u64, bytes));
            state.tally.requested.sub(requested);
            state.tally.allocated.sub(allocated);
            state.free_slow(home, window, raw, bytes);
        }
        if state.closed {
            Self::close_with_last(guard);
        }
    }

    /// The pool has no handle left. With its last slice it goes.
    #[cold]
    fn close_with_last(mut state: Guard<'_, State>) {
        let owner = if state.tally.slices.current == 0 { state.owner.take() } else { None };
        drop(state);
        drop(owner);
    }
}

impl State {
    #[cold]
    fn free_slow(&mut self, home: Home, window: u32, raw: &Raw, bytes: u64) {
        let state = self;
        let info = state.info(home);
        let mut uses = state.extra.remove(&home).unwrap_or_default();
        uses.insert(raw.stream);
        state.info_mut(home).extra = false;
        if window != NONE {
            let open = state.graphs.get_mut(window as usize).and_then(|g| g.window.as_mut());
            if let Some(open) = open {
                if info.window == window {
                    open.freed.push(raw.ptr.0..raw.ptr.0 + bytes);
                    let mut tag = Uses::one(open.private);
                    if !crate::mutant::is("window-forgets-streams") {
                        // Work of a forked stream: nothing in this window is ordered after it, so the block is
                        // not handed out again before the window ends.
                        uses.remove(raw.stream);
                        tag.extend(&uses);
                    }
                    *state.info_mut(home) = Info::EMPTY;
                    let now = state.tick();
                    let freed = state.heaps[home.heap].free(home.block, tag, now);
                    debug_assert!(freed.is_ok(), "a live block is used: {freed:?}");
                    return;
                }
                // The window may have captured uses of it: it waits until the scan had its say.
                open.limbo.push((home, uses));
                state.info_mut(home).limbo = true;
                state.tally.held.add(bytes);
                state.note_active();
                if let Some(record) = state.records.get_mut(info.record as usize) {
                    record.standing = Standing::Held;
                }
                return;
            }
        }
        state.tally.held.add(bytes);
        state.note_active();
        Self::let_go(state, home, uses);
    }

    /// A block without an owner: graphs keep it, or it is free. Its bytes are counted as held when called.
    pub(crate) fn let_go(state: &mut State, home: Home, uses: Uses) {
        let info = state.info(home);
        if let Some(record) = state.records.get_mut(info.record as usize) {
            record.standing = Standing::Held;
            record.uses.extend(&uses);
            if !record.holders.is_empty() && !crate::mutant::is("free-ignores-holders") {
                return;
            }
            let index = info.record as usize;
            if crate::mutant::is("free-ignores-holders") {
                let _ = state.records.get_mut(index).map(|r| r.holders.clear());
            }
            state.drop_record(index);
            return;
        }
        let bytes = state.heaps[home.heap].span(home.block).map_or(0, |s| s.1);
        state.tally.held.sub(bytes);
        *state.info_mut(home) = Info::EMPTY;
        let now = state.tick();
        let freed = state.heaps[home.heap].free(home.block, uses, now);
        debug_assert!(freed.is_ok(), "a block without an owner is used: {freed:?}");
    }
}

/// Whether the mode keeps addresses when pages go.
pub(crate) fn keeps_addresses(mode: PoolMode) -> bool {
    mode == PoolMode::Vmm
}
