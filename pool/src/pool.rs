//! The pool's public face.

use std::marker::PhantomData;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::driver::host_memory::HostMemory;
use crate::driver::{DeviceOrdinal, DevicePtr, DynDriver};
use crate::handshake::Epoch;
use crate::shared::Shared;
use crate::*;

/// A memory pool of one device. Clones are the same pool.
///
/// With the last clone the pool *closes*: every graph that depends on it goes stale and its free memory goes
/// back. Slices that still live stay good, and their memory goes back with the last of them.
///
/// # Reuse and capture
/// Freed memory is reused by the same stream at once, by other streams behind an event, and by nobody while a
/// graph may still write it (see [`ScratchPolicy`]).
#[derive(Clone)]
pub struct Pool(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("id", &self.id()).field("mode", &self.mode()).finish_non_exhaustive()
    }
}

/// What an address points at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// The allocation, if the memory is anybody's.
    pub token: Option<Token>,
    /// Where the block or range starts.
    pub base: DevicePtr,
    /// Where the address lies in it, bytes.
    pub offset_bytes: usize,
    /// How long it is, bytes.
    pub bytes: usize,
    /// What kind of memory.
    pub kind: RangeKind,
    /// Whether its owner still has it. Memory that only graphs hold, or nobody, is not live.
    pub live: bool,
}

/// A kind of memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RangeKind {
    /// The pool's own.
    Pool(Purpose),
    /// A registered foreign range.
    Foreign,
    /// Page-locked or registered host memory.
    Host,
}

impl Pool {
    /// A pool on `driver`'s device. Takes no memory yet.
    ///
    /// # Errors
    /// `Config`, `Unsupported` (vmm on a device without it), `TooManyPools`, those of the driver.
    pub fn new(driver: DynDriver, config: PoolConfig) -> Result<Self, PoolError> {
        Ok(Self(Arc::new(Handle { shared: Shared::new(driver, config)? })))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Its number in this process.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.shared().id
    }

    /// Its mode.
    #[must_use]
    pub fn mode(&self) -> PoolMode {
        self.shared().config.mode
    }

    /// The driver it takes memory from.
    #[must_use]
    pub fn driver(&self) -> &DynDriver {
        &self.shared().driver
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> DeviceOrdinal {
        self.shared().device
    }

    /// Its epoch: moves when memory that a graph depends on is retired.
    #[must_use]
    pub fn epoch(&self) -> &Arc<Epoch> {
        &self.shared().epoch
    }

    /// `len` elements of scratch for work on `stream`. Contents are undefined.
    ///
    /// # Errors
    /// `OutOfMemory` with a report; `TooLarge`; `WindowMiss` inside a window; `OtherDevice`; those of the driver.
    #[inline]
    pub fn alloc<T: Element>(&self, len: usize, stream: &Stream) -> Result<DeviceSlice<T>, PoolError> {
        self.alloc_for(len, Purpose::Scratch, stream)
    }

    /// `len` elements for a purpose.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_for<T: Element>(
        &self,
        len: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<DeviceSlice<T>, PoolError> {
        self.alloc_aligned(len, 0, purpose, stream)
    }

    /// `len` elements at an alignment, bytes: a power of two. Everything is aligned to 256 bytes at least.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc), and `Alignment`.
    #[inline]
    pub fn alloc_aligned<T: Element>(
        &self,
        len: usize,
        align: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<DeviceSlice<T>, PoolError> {
        let bytes = if crate::mutant::is("wrap-sizes") {
            Some(len.wrapping_mul(size_of::<T>()))
        } else {
            len.checked_mul(size_of::<T>())
        };
        let Some(bytes) = bytes else {
            return Err(PoolError::TooLarge { requested: len, element_bytes: size_of::<T>() });
        };
        Ok(DeviceSlice::new(self.shared().alloc(bytes, align, purpose, stream)?, len))
    }

    /// `len` elements of zero bytes; the clearing is queued on `stream`.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed<T: Element>(
        &self,
        len: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<DeviceSlice<T>, PoolError> {
        let slice = self.alloc_for(len, purpose, stream)?;
        stream.fill(&slice, 0)?;
        Ok(slice)
    }

    /// A slice of `len` elements that can grow to `most` at the same address. In slab mode it takes them all at once.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `TooLarge` also where `len` is more than `most`; `Capturing`.
    pub fn alloc_growable<T: Element>(
        &self,
        len: usize,
        most: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<GrowableSlice<T>, PoolError> {
        self.shared().alloc_growable(len, most, purpose, stream)
    }

    /// A slice filled from host memory; waits for the copy.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn upload<T: Element>(
        &self,
        data: &[T],
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<DeviceSlice<T>, PoolError> {
        let slice = self.alloc_for(data.len(), purpose, stream)?;
        stream.upload(data, &slice)?;
        Ok(slice)
    }

    /// Grows ahead, so that one block of `bytes` bytes is free for `stream` and a capture will not miss.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn reserve(&self, bytes: usize, purpose: Purpose, stream: &Stream) -> Result<(), PoolError> {
        stream.not_capturing("growing the pool")?;
        drop(self.shared().alloc(bytes, 0, purpose, stream)?);
        Ok(())
    }

    /// Gives free memory back until the pool holds at most `bytes` bytes, or nothing more can go. Takes
    /// memory without dependents first, then what graphs hold weakly; live slices and strong holds stay.
    /// Waits for the work that uses it. Returns the bytes that went back.
    ///
    /// # Errors
    /// Those of the driver; what went back before stays back.
    pub fn trim_to(&self, bytes: usize) -> Result<usize, PoolError> {
        self.shared().trim_to(bytes)
    }

    /// Gives the pages of these purposes (none named: of all) back to the driver, to be [woken](Self::wake) at the same
    /// addresses. Slices, graphs and addresses stay; [`Content`] says what becomes of the bytes.
    ///
    /// Waits for launches and [runs](Self::hold_awake) that are being made, and for all work on streams that the pool knows.
    /// Until they wake, allocations for these purposes, copies by this crate and declarations are refused with `Asleep`, and
    /// no graph that needs them is launched. Other kernels that the caller launches on slices are the caller's to hold
    /// back. What sleeps already stays as it is. vmm only; foreign ranges and host memory do not sleep.
    ///
    /// Returns the bytes that went back.
    ///
    /// # Errors
    /// `Unsupported` in slab mode; `Capturing` while a window of the pool is open or this thread captures; `Busy` inside a
    /// run of this thread, or while a result in an arena is held; `NoHostMemory`; those of the driver. Then all is awake as before, but for an unmap that failed half way: then what is
    /// left goes with the next call.
    pub fn sleep(&self, content: Content, purposes: &[Purpose]) -> Result<usize, PoolError> {
        self.shared().sleep(content, purposes)
    }

    /// Puts pages back under what sleeps of these purposes (none named: of all), at the same addresses, and the bytes that
    /// were kept. What was freed meanwhile gets none. Takes memory from elsewhere in the pool like any growth.
    ///
    /// A graph whose bytes were kept launches again after a [`reback`](Registration::reback) that only takes note of the
    /// pages. Bytes that were dropped are undefined, and graphs that read them are told so.
    ///
    /// Returns the bytes that were mapped.
    ///
    /// # Errors
    /// `OutOfMemory`; `Capturing`; those of the driver. What did not wake sleeps on with its bytes kept; call again.
    pub fn wake(&self, purposes: &[Purpose]) -> Result<usize, PoolError> {
        self.shared().wake(purposes)
    }

    /// For who is about to queue work on `stream` that uses memory of the pool without a graph: until the guard is dropped
    /// nothing falls asleep, and a sleep waits for the stream afterwards. The graph cache takes one for every run of a
    /// closure.
    pub fn hold_awake(&self, stream: &Stream) -> Awake {
        let shared = self.shared();
        let awake = shared.books().hold_awake();
        shared.stream_key(&mut shared.lock(), stream);
        awake
    }

    /// Whether memory for a purpose is asleep.
    #[must_use]
    pub fn is_asleep(&self, purpose: Purpose) -> bool {
        self.shared().lock().heaps[purpose.index()].is_asleep()
    }

    /// Lets another device touch the pool's memory for these purposes (none named: all), as long as the pool lives: what is
    /// mapped now, and whatever pages come later by growth, remap, stitch or wake. In slab mode the device may touch all
    /// plain memory of this one. Nothing for the pool's own device. May be called from any thread; leaves one of the two
    /// devices current.
    ///
    /// Work of the other device on slices is told by [`record_stream`](DeviceSlice::record_stream), or is in graphs that
    /// declare them.
    ///
    /// # Errors
    /// `Unreachable`; `Capturing`; those of the driver. Pages that were granted before it failed stay so until they go;
    /// call again.
    pub fn grant(&self, peer: &DynDriver, purposes: &[Purpose]) -> Result<(), PoolError> {
        self.shared().grant(peer, purposes)
    }

    /// Whether a device may touch memory for a purpose: its own, or by a [grant](Self::grant).
    #[must_use]
    pub fn is_granted(&self, device: DeviceOrdinal, purpose: Purpose) -> bool {
        self.shared().is_granted(device, purpose.index())
    }

    /// Changes the byte limit. What is held above a lower limit goes back as requests come.
    pub fn set_limit(&self, bytes: Option<usize>) {
        self.shared().set_limit(bytes);
    }

    /// The byte limit.
    #[must_use]
    pub fn limit(&self) -> Option<usize> {
        self.shared().limit()
    }

    /// Statistics in PyTorch's vocabulary.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.shared().stats()
    }

    /// Free memory with pages behind, for one purpose, bytes. Looks at every block.
    #[must_use]
    pub fn free_bytes(&self, purpose: Purpose) -> usize {
        self.shared().free_bytes(purpose)
    }

    /// Bytes of the smallest physical chunk (vmm): what is mapped is a multiple of it. `None` in slab mode.
    #[must_use]
    pub fn chunk_bytes(&self) -> Option<usize> {
        (self.mode() == PoolMode::Vmm).then_some(self.shared().chunk_bytes as usize)
    }

    /// How many physical chunks come under `bytes` that are missing at one place, and the bytes of the largest (vmm), as
    /// long as the driver has some so large and none wait for a range. `None` in slab mode.
    #[must_use]
    pub fn chunks_for(&self, purpose: Purpose, bytes: usize) -> Option<(usize, usize)> {
        let vmm = self.mode() == PoolMode::Vmm;
        vmm.then(|| self.shared().chunks_for(purpose, bytes as u64))
            .map(|(count, largest)| (count as usize, largest as usize))
    }

    /// Starts the peaks anew.
    pub fn reset_peak_stats(&self) {
        self.shared().reset_peaks();
    }

    /// How often what happened.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared().counters()
    }

    /// The state of the pool, for people.
    #[must_use]
    pub fn report(&self) -> MemoryReport {
        self.shared().report()
    }

    /// What `ptr` points into.
    #[must_use]
    pub fn resolve(&self, ptr: DevicePtr) -> Option<Resolved> {
        self.shared().resolve_all(ptr).into_iter().find(|r| r.offset_bytes < r.bytes)
    }

    /// What `ptr` may belong to: what it points into, and what ends right there (one past the end is a pointer
    /// that kernels use).
    #[must_use]
    pub fn resolve_all(&self, ptr: DevicePtr) -> SmallVec<[Resolved; 2]> {
        self.shared().resolve_all(ptr)
    }

    /// The same for many addresses under one lock, in their order: each hit with the index of its address.
    #[must_use]
    pub fn resolve_many(&self, ptrs: &[DevicePtr]) -> Vec<(usize, Resolved)> {
        self.shared().resolve_many(ptrs)
    }

    /// Where the pool's memory begins and ends, foreign ranges and host memory included; `None` if it has none. No
    /// address outside resolves (the end itself may).
    #[must_use]
    pub fn address_span(&self) -> Option<(DevicePtr, DevicePtr)> {
        self.shared().address_span()
    }

    /// Makes memory known that the pool did not issue.
    ///
    /// # Errors
    /// `Overlap`, `Range` (the end would wrap).
    pub fn register_foreign(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        name: impl Into<String>,
    ) -> Result<ForeignRange, PoolError> {
        let tracked = self.shared().add_foreign(ptr, bytes, name.into())?;
        Ok(ForeignRange { shared: Arc::clone(self.shared()), tracked })
    }

    /// `len` elements of page-locked host memory.
    ///
    /// # Errors
    /// `TooLarge`, those of the driver.
    pub fn host_buffer<T: Element>(&self, len: usize) -> Result<HostBuffer<T>, PoolError> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or(PoolError::TooLarge { requested: len, element_bytes: size_of::<T>() })?;
        let tracked = self.shared().add_pinned(bytes)?;
        Ok(HostBuffer { shared: Arc::clone(self.shared()), tracked, len, element: PhantomData })
    }

    /// Makes host memory readable for the device in place, without a copy.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn register_host(&self, memory: Arc<dyn HostMemory>) -> Result<RegisteredHost, PoolError> {
        let tracked = self.shared().add_registered(memory)?;
        Ok(RegisteredHost { shared: Arc::clone(self.shared()), tracked })
    }

    /// A table of the members' addresses in device memory; waits for the copy.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn pointer_table(
        &self,
        members: &[(&dyn Tracked, Use)],
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<PointerTable, PoolError> {
        let addresses: Vec<u64> = members.iter().map(|(m, _)| m.ptr().0).collect();
        let slice = self.upload(&addresses, purpose, stream)?;
        Ok(PointerTable { slice, members: members.iter().map(|(m, u)| PointerTable::member(*m, *u)).collect() })
    }

    /// Opens a capture window on the dependent's stream, **before** the driver's capture begins.
    ///
    /// # Errors
    /// `Capturing` if a window of this pool is open on the stream already; `OtherDevice`; those of the driver.
    pub fn begin_window(&self, dependent: Arc<dyn Dependent>, policy: ScratchPolicy) -> Result<Window, PoolError> {
        let stream = dependent.stream().clone();
        self.shared().begin_window(dependent, Some(stream), policy)
    }

    /// As [`begin_window`](Self::begin_window), on another stream than the dependent's: one that the capture
    /// forks to, on this pool's device.
    ///
    /// # Errors
    /// As [`begin_window`](Self::begin_window).
    pub fn begin_window_on(
        &self,
        dependent: Arc<dyn Dependent>,
        stream: &Stream,
        policy: ScratchPolicy,
    ) -> Result<Window, PoolError> {
        self.shared().begin_window(dependent, Some(stream.clone()), policy)
    }

    /// A window that hands nothing out: for pools that a graph only declares memory of.
    ///
    /// # Errors
    /// None today.
    pub fn begin_declarations(&self, dependent: Arc<dyn Dependent>) -> Result<Window, PoolError> {
        self.shared().begin_window(dependent, None, ScratchPolicy::Pin)
    }

    /// An arena for graphs of `stream`.
    ///
    /// # Errors
    /// `OtherDevice`.
    pub fn arena(&self, stream: &Stream) -> Result<Arena, PoolError> {
        let (index, book) = self.shared().add_arena(stream)?;
        Ok(Arena(Arc::new(arena::ArenaInner {
            shared: Arc::clone(self.shared()),
            index,
            stream: stream.clone(),
            book,
        })))
    }

    /// Checks every invariant of the pool's books.
    ///
    /// # Errors
    /// What is broken. Always a bug.
    pub fn check(&self) -> Result<(), String> {
        self.shared().check()
    }
}
