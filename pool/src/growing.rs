//! Slices that grow in place (vmm): address space for the most, memory as it is needed.
//!
//! A growable slice is one block of whole chunks, used from the beginning, with holes where no memory is. What a
//! launch may touch is the slice's *extent*, its length now: growth maps what is missing and then moves the extent, so no
//! graph on the slice changes and none is stale; a launch says how far it reaches, and is refused before it is made where
//! that is beyond the extent.
//!
//! Shrinking only moves the extent. The chunks behind it stay mapped until somebody is short of memory: an unmap that is
//! pending, and that growing again cancels. Before the chunks go they are retired like anything else, by the one
//! function, after the host saw all work on the slice complete.
//!
//! In slab mode addresses can not be kept for what is not there, so a slice takes its most at once.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::alloc::keeps_addresses;
use crate::core::{BlockKey, Request, StreamKey, Uses};
use crate::driver::DevicePtr;
use crate::give_back::{Parcel, Reason};
use crate::growth::{Short, short};
use crate::handshake::Patience;
use crate::retire::Victim;
use crate::shared::{Cold, Notices, Shared};
use crate::slice::Raw;
use crate::state::{Home, NONE, State};
use crate::{AllocationId, Awake, Element, PoolError, Purpose, Stream, Token, Tracked, mutant};

/// How much of a growable slice may be touched now, bytes. Shared with the graphs that depend on it.
#[derive(Clone, Debug)]
pub struct Extent(Arc<AtomicU64>);

impl Extent {
    /// Bytes from the slice's start that may be touched.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Acquire) as usize
    }

    fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Release);
    }
}

/// How far a launch reaches into a growable slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Touch {
    /// Which slice.
    pub allocation: AllocationId,
    /// Bytes from its start.
    pub bytes: usize,
}

/// What the pool keeps about a growable block while its slice lives.
#[derive(Debug)]
pub(crate) struct Growing {
    /// As the owner asked for.
    pub(crate) requested_bytes: u64,
    /// Of the chunks that the extent needs.
    pub(crate) allocated_bytes: u64,
    /// The stream that it was made for.
    pub(crate) stream: StreamKey,
}

/// Up to [`most`](Self::most) elements of device memory at one fixed address, of which the first
/// [`len`](Self::len) are there. Dropped like a [`DeviceSlice`](crate::DeviceSlice).
///
/// # Reuse and capture
/// Declared to a graph it is one range of its full length, and stays good while the slice grows. A launch says
/// [how much of it it touches](Self::touch). What lies behind the length has no content: growing never brings bytes back.
#[must_use = "a slice that is dropped is given back"]
pub struct GrowableSlice<T: Element> {
    raw: Raw,
    most: usize,
    len: usize,
    extent: Extent,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> GrowableSlice<T> {
    /// Number of elements that are there.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most elements that it can grow to.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// Where it starts, always.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.raw.ptr
    }

    /// The identity of this hand-out.
    #[must_use]
    pub fn allocation(&self) -> AllocationId {
        self.raw.allocation
    }

    /// How much of it may be touched.
    #[must_use]
    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// For a launch that reads or writes the first `len` elements and no others.
    #[must_use]
    pub fn touch(&self, len: usize) -> Touch {
        Touch { allocation: self.raw.allocation, bytes: len.saturating_mul(size_of::<T>()) }
    }

    /// Grows to at least `len` elements. What was there stays, at the same address; what is new has no content.
    ///
    /// # Errors
    /// `TooLarge` beyond [`most`](Self::most); `OutOfMemory`, `Capturing`, those of the driver. Nothing has changed then.
    pub fn grow_to(&mut self, len: usize) -> Result<(), PoolError> {
        if len <= self.len {
            return Ok(());
        }
        if len > self.most {
            return Err(PoolError::TooLarge { requested: len, element_bytes: size_of::<T>() });
        }
        let bytes = (len * size_of::<T>()) as u64;
        self.owner()?.set_extent(&self.raw, &self.extent, bytes)?;
        self.len = len;
        Ok(())
    }

    /// Lets go of everything behind the first `len` elements. Its memory goes when somebody needs it, if the slice has not
    /// grown again by then.
    ///
    /// # Errors
    /// None today.
    pub fn shrink_to(&mut self, len: usize) -> Result<(), PoolError> {
        if len >= self.len {
            return Ok(());
        }
        self.owner()?.set_extent(&self.raw, &self.extent, (len * size_of::<T>()) as u64)?;
        self.len = len;
        Ok(())
    }

    /// Says that work queued on `stream` uses the slice, so that its memory waits for that work too.
    ///
    /// # Errors
    /// `OtherDevice`.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), PoolError> {
        self.raw.books.record_stream(&self.raw, stream)
    }

    pub(crate) fn hold_awake(&self, what: &'static str) -> Result<Awake, PoolError> {
        self.raw.books.awake(self.raw.purpose, what)
    }

    fn owner(&self) -> Result<Arc<Shared>, PoolError> {
        self.raw.books.lock().owner.clone().ok_or(PoolError::Internal("a live slice without a pool"))
    }
}

impl<T: Element> Tracked for GrowableSlice<T> {
    fn token(&self) -> Token {
        self.raw.books.token_of(&self.raw)
    }
    fn ptr(&self) -> DevicePtr {
        self.raw.ptr
    }
    fn bytes(&self) -> usize {
        self.raw.bytes
    }
    fn extent(&self) -> Option<&Extent> {
        Some(&self.extent)
    }
}

impl<T: Element> fmt::Debug for GrowableSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrowableSlice")
            .field("allocation", &self.raw.allocation)
            .field("ptr", &self.raw.ptr)
            .field("len", &self.len)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn alloc_growable<T: Element>(
        self: &Arc<Self>,
        len: usize,
        most: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<GrowableSlice<T>, PoolError> {
        let element_bytes = size_of::<T>();
        let too_large = |requested| PoolError::TooLarge { requested, element_bytes };
        let most_bytes = most.checked_mul(element_bytes).ok_or(too_large(most))?;
        if len > most {
            return Err(too_large(len));
        }
        let extent = Extent(Arc::new(AtomicU64::new(0)));
        let raw = if keeps_addresses(self.config.mode) && most_bytes > 0 {
            self.may_call_driver("a growable slice")?;
            stream.not_capturing("a growable slice")?;
            self.same_device("stream", stream)?;
            let unit = self.chunk_bytes;
            let bytes = (most_bytes as u64).checked_next_multiple_of(unit).ok_or(too_large(most))?;
            let request = Request::new(bytes, unit, crate::alloc::GRANULE_BYTES).map_err(|_| too_large(most))?;
            self.settle();
            self.place_growing(&request, most_bytes, purpose, stream)?
        } else {
            let raw = self.alloc(most_bytes, 0, purpose, stream)?;
            extent.set(most_bytes as u64);
            return Ok(GrowableSlice { raw, most, len, extent, element: PhantomData });
        };
        let mut slice = GrowableSlice { raw, most, len: 0, extent, element: PhantomData };
        slice.grow_to(len)?;
        Ok(slice)
    }

    /// Address space for a growable slice.
    fn place_growing(
        self: &Arc<Self>,
        request: &Request,
        most_bytes: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<Raw, PoolError> {
        let heap = purpose.index();
        let _cold = self.cold();
        // Whoever puts memory to sleep or wakes it holds the cold lock too.
        self.lock().awake(purpose, "an allocation")?;
        self.driver.bind()?;
        for _ in 0..2 {
            {
                let mut state = self.lock();
                let state = &mut *state;
                let key = self.stream_key(state, stream);
                if let Some(block) = state.heaps[heap].alloc_growing(request) {
                    return self.own_growing(state, Home { heap, block }, most_bytes, purpose, key);
                }
            }
            // A part of a fresh range is for small requests.
            match self.reserve_range(request, request.bytes() / 15, heap) {
                Ok(()) => {}
                Err(Short::Driver(error, _)) => return Err(error.into()),
                Err(Short::Fail(error)) => return Err(error),
                Err(_) => break,
            }
        }
        Err(PoolError::Internal("a fresh range has no room for the block that it was reserved for"))
    }

    fn own_growing(
        self: &Arc<Self>,
        state: &mut State,
        home: Home,
        most_bytes: usize,
        purpose: Purpose,
        key: StreamKey,
    ) -> Result<Raw, PoolError> {
        let allocation = state.next_allocation().ok_or(PoolError::Internal("no identity left for a hand-out"))?;
        let Some((base, _)) = state.heaps[home.heap].set_owner(home.block, allocation.get()) else {
            return Err(PoolError::Internal("a hand-out without a block"));
        };
        state.tally.slices.add(1);
        state.streams[key.0 as usize].live += 1;
        // Not plain: its end is not that of a block whose bytes are all there.
        state.info_mut(home).extra = true;
        state.extra.entry(home).or_default();
        state.growing.insert(home, Growing { requested_bytes: 0, allocated_bytes: 0, stream: key });
        Ok(Raw {
            books: self.books(),
            ptr: DevicePtr(base),
            bytes: most_bytes,
            allocation,
            block: home.block,
            stream: key,
            purpose,
        })
    }

    /// Moves the extent of a growable slice; a longer one gets its memory first.
    fn set_extent(&self, raw: &Raw, extent: &Extent, bytes: u64) -> Result<(), PoolError> {
        if !keeps_addresses(self.config.mode) {
            return Ok(());
        }
        let home = Home { heap: raw.purpose.index(), block: raw.block };
        let needed = bytes.div_ceil(self.chunk_bytes) as u32;
        if bytes > extent.bytes() as u64 {
            self.lock().awake(raw.purpose, "growth")?;
            let mut notices = Notices::default();
            let result = {
                let lacking = |state: &State| lacking(state, home, needed);
                if lacking(&self.lock()).is_empty() || mutant::is("extent-before-pages") {
                    // What an earlier shrink left behind is still there: nobody is asked for anything.
                    self.note_extent(home, bytes, needed, extent, lacking)
                } else {
                    Ok(false)
                }
                .and_then(|done| match done {
                    true => Ok(()),
                    false => {
                        self.may_call_driver("growth")?;
                        self.settle();
                        let cold = self.cold();
                        self.lock().awake(raw.purpose, "growth")?;
                        self.retry_leftovers(&cold, &mut notices);
                        self.fill_extent(&cold, home, needed, &mut notices)?;
                        self.note_extent(home, bytes, needed, extent, lacking).map(|_| ())
                    }
                })
            };
            notices.deliver();
            return result;
        }
        // Launches that were checked against the longer extent are over before anything behind the shorter one goes: whoever
        // takes it waits for them. The owner's exclusive borrow keeps new ones away meanwhile.
        let mut state = self.lock();
        extent.set(bytes);
        let unit = self.chunk_bytes;
        let State { growing, tally, .. } = &mut *state;
        if let Some(growing) = growing.get_mut(&home) {
            tally.requested.sub(growing.requested_bytes - bytes);
            let allocated = u64::from(needed) * unit;
            tally.allocated.sub(growing.allocated_bytes - allocated);
            (growing.requested_bytes, growing.allocated_bytes) = (bytes, allocated);
        }
        Ok(())
    }

    /// Takes a longer extent into the books, if its chunks are all there; whether they were.
    fn note_extent(
        &self,
        home: Home,
        bytes: u64,
        needed: u32,
        extent: &Extent,
        lacking: impl Fn(&State) -> Vec<Range<u32>>,
    ) -> Result<bool, PoolError> {
        let mut state = self.lock();
        if !lacking(&state).is_empty() && !mutant::is("extent-before-pages") {
            return Ok(false);
        }
        let retiring = state.info(home).record;
        if state.records.get(retiring as usize).is_some_and(|r| r.retiring) {
            // Somebody is taking what lies behind the extent right now: they come first.
            return Ok(false);
        }
        let unit = self.chunk_bytes;
        let State { growing, tally, .. } = &mut *state;
        let Some(growing) = growing.get_mut(&home) else {
            return Err(PoolError::Internal("a growable slice that is not in the books"));
        };
        tally.requested.add(bytes - growing.requested_bytes);
        let allocated = u64::from(needed) * unit;
        tally.allocated.add(allocated - growing.allocated_bytes);
        (growing.requested_bytes, growing.allocated_bytes) = (bytes, allocated);
        state.note_active();
        extent.set(bytes);
        Ok(true)
    }

    /// Maps what is missing among the first `needed` chunks: all or none.
    fn fill_extent(&self, cold: &Cold<'_>, home: Home, needed: u32, notices: &mut Notices) -> Result<(), PoolError> {
        loop {
            let (segment, chunks, span) = {
                let state = self.lock();
                let Some(block) = state.heaps[home.heap].block(home.block) else {
                    return Err(PoolError::Internal("a growable slice without a block"));
                };
                (block.segment, lacking(&state, home, needed), block.base..block.base + block.bytes)
            };
            if chunks.is_empty() {
                return Ok(());
            }
            let bytes: u64 = chunks.iter().map(|r| r.len() as u64 * self.chunk_bytes).sum();
            let wanted = [(segment, chunks)];
            self.gather_idle(cold, self.lack(home.heap, &wanted).0, &span, notices);
            let over = self.lack(home.heap, &wanted).1;
            self.gather(cold, over, &span, notices)?;
            let shortage = match self.lack(home.heap, &wanted) {
                (_, over) if over > 0 => Short::Limit(over),
                (lack, _) => match self.map_chunks(cold, home.heap, segment, &wanted[0].1) {
                    Ok(()) => return Ok(()),
                    Err(error) => short(error, lack.max(self.chunk_bytes)),
                },
            };
            self.make_room(cold, shortage, bytes, home.heap, None, notices)?;
        }
    }

    /// Takes chunks that lie behind the extents of growable slices, until `want_bytes` are had; the bytes that went.
    pub(crate) fn give_surplus(
        &self,
        cold: &Cold<'_>,
        want_bytes: u64,
        reason: Reason,
        patience: Patience,
        notices: &mut Notices,
    ) -> Result<u64, PoolError> {
        let mut freed = 0;
        let mut passed: Vec<Home> = Vec::new();
        while freed < want_bytes {
            let Some((home, parcel)) = self.pick_surplus(want_bytes - freed, &passed) else { break };
            passed.push(home);
            freed += self.give_back(cold, vec![parcel], reason, patience, notices)?;
            self.forget_record(home);
        }
        Ok(freed)
    }

    fn pick_surplus(&self, want_bytes: u64, passed: &[Home]) -> Option<(Home, Parcel)> {
        let mut state = self.lock();
        let state = &mut *state;
        let homes: Vec<Home> = state.growing.keys().copied().filter(|home| !passed.contains(home)).collect();
        let found = homes.into_iter().find_map(|home| {
            let chunks = surplus(state, home, self.chunk_bytes);
            (!chunks.is_empty()).then_some((home, chunks))
        });
        let (home, chunks) = found?;
        let segment = state.heaps[home.heap].block(home.block)?.segment;
        // From the far end, just enough.
        let mut left = want_bytes.div_ceil(self.chunk_bytes);
        let mut enough = Vec::new();
        for range in chunks.into_iter().rev() {
            let take = left.min(range.len() as u64) as u32;
            if take > 0 {
                let start = state.heaps[home.heap].bundle(segment, range.end - take).start;
                enough.push(start..range.end);
            }
            left -= u64::from(take);
        }
        let record = state.record_of_block(home)?;
        Some((home, Parcel::Surplus { record, home, segment, chunks: enough }))
    }

    /// A record that was made only to mark its block while something was taken goes again.
    fn forget_record(&self, home: Home) {
        let mut state = self.lock();
        let record = state.info(home).record;
        if record != NONE && state.records.get(record as usize).is_some_and(|r| r.holders.is_empty() && !r.retiring) {
            state.drop_record(record as usize);
        }
    }
}

impl State {
    /// What lies behind the extents of growable slices, bytes.
    pub(crate) fn surplus_bytes(&self, chunk_bytes: u64) -> u64 {
        let chunks = |home: &Home| surplus(self, *home, chunk_bytes).iter().map(|r| r.len() as u64).sum::<u64>();
        self.growing.keys().map(chunks).sum::<u64>() * chunk_bytes
    }

    /// What the books say of the chunks behind the extents in one heap, asleep or not.
    pub(crate) fn surplus_of(&self, heap: usize, chunk_bytes: u64) -> Vec<(Home, Vec<Range<u32>>)> {
        let homes = self.growing.keys().filter(|home| home.heap == heap);
        homes.map(|&home| (home, behind_extent(self, home, chunk_bytes))).collect()
    }

    /// Whether chunks still lie behind the extent of a growable slice.
    pub(crate) fn still_surplus(&self, home: Home, chunks: &[Range<u32>], chunk_bytes: u64) -> bool {
        let surplus = surplus(self, home, chunk_bytes);
        chunks.iter().all(|c| surplus.iter().any(|s| s.start <= c.start && c.end <= s.end))
    }

    /// Streams whose work may touch a live block: its owner's, those that were recorded, those of its graphs.
    pub(crate) fn live_uses(&self, home: Home, victim: &Victim, cleared: &crate::handshake::Cleared) -> Uses {
        let mut uses = self.order_after(victim, cleared);
        if let Some(extra) = self.extra.get(&home) {
            uses.extend(extra);
        }
        if let Some(growing) = self.growing.get(&home) {
            uses.insert(growing.stream);
        }
        uses
    }
}

/// Chunks without memory among the first `needed` of a block, by number in its segment.
fn lacking(state: &State, home: Home, needed: u32) -> Vec<Range<u32>> {
    let missing = state.heaps[home.heap].missing_chunks(home.block);
    let first = first_chunk(state, home.heap, home.block);
    let end = first + needed;
    missing.into_iter().map(|r| r.start..r.end.min(end)).filter(|r| r.start < r.end).collect()
}

/// Chunks with memory behind the extent.
fn surplus(state: &State, home: Home, chunk_bytes: u64) -> Vec<Range<u32>> {
    if state.heaps[home.heap].is_asleep() {
        return Vec::new();
    }
    behind_extent(state, home, chunk_bytes)
}

fn behind_extent(state: &State, home: Home, chunk_bytes: u64) -> Vec<Range<u32>> {
    let Some(growing) = state.growing.get(&home) else { return Vec::new() };
    let there = state.heaps[home.heap].chunks_inside(home.block);
    let start = first_chunk(state, home.heap, home.block) + (growing.allocated_bytes / chunk_bytes.max(1)) as u32;
    let Some(segment) = state.heaps[home.heap].block(home.block).map(|block| block.segment) else { return Vec::new() };
    // What the extent ends in stays with the whole of its bundle.
    let behind = |r: Range<u32>| match r.start < start {
        true if r.end <= start => None,
        true => Some(state.heaps[home.heap].whole(segment, start..r.end)),
        false => Some(r),
    };
    there.into_iter().filter_map(behind).filter(|r| r.start < r.end).collect()
}

fn first_chunk(state: &State, heap: usize, block: BlockKey) -> u32 {
    state.heaps[heap].first_chunk(block).unwrap_or(0)
}
