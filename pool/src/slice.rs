//! Typed owners of live blocks.

use std::fmt;
use std::marker::PhantomData;

use crate::core::{BlockKey, StreamKey};
use crate::driver::DevicePtr;
use crate::shared::{Awake, Books};
use crate::token::Place;
use crate::{AllocationId, Element, Extent, PoolError, PoolId, Purpose, Stream, Token};

/// Memory with a token: what a graph can depend on.
pub trait Tracked {
    /// Which allocation, in which state, right now.
    fn token(&self) -> Token;
    /// Where it starts for the device.
    fn ptr(&self) -> DevicePtr;
    /// How long it is, bytes.
    fn bytes(&self) -> usize;
    /// How much of it may be touched, where that changes.
    fn extent(&self) -> Option<&Extent> {
        None
    }
}

/// `len` elements of device memory, owned.
///
/// Dropping it gives the block back to the pool in stream order: work that was queued before the drop, on the
/// stream of the allocation and on every stream it was [recorded](Self::record_stream) on, still has the
/// memory to itself. A drop never fails and never calls the driver. Contents start undefined.
///
/// # Reuse and capture
/// The address is stable for the life of the slice. Identity is the [`Token`], never the address: the pool
/// hands the same address out again. A slice that was declared to a graph may be dropped: a strong
/// dependency keeps the block until the graph is gone, a weak one makes the graph stale when the block is taken.
#[must_use = "a slice that is dropped is given back"]
pub struct DeviceSlice<T: Element> {
    raw: Raw,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// The untyped part: what is needed to give it back.
pub(crate) struct Raw {
    pub(crate) books: &'static Books,
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: usize,
    pub(crate) allocation: AllocationId,
    /// Unused for zero bytes.
    pub(crate) block: BlockKey,
    pub(crate) stream: StreamKey,
    pub(crate) purpose: Purpose,
}

impl Raw {
    #[inline]
    pub(crate) fn place(&self) -> Place {
        if self.bytes == 0 { Place::NOWHERE } else { Place::block(self.purpose.index(), self.block.index()) }
    }
}

impl Drop for Raw {
    #[inline]
    fn drop(&mut self) {
        if self.bytes != 0 {
            self.books.free(self);
        }
    }
}

impl<T: Element> DeviceSlice<T> {
    pub(crate) fn new(raw: Raw, len: usize) -> Self {
        Self { raw, len, element: PhantomData }
    }

    /// Number of elements.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing. An empty slice has the null address and never reaches the driver.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> usize {
        self.raw.bytes
    }

    /// Where it starts.
    #[must_use]
    #[inline]
    pub fn ptr(&self) -> DevicePtr {
        self.raw.ptr
    }

    /// Where the address itself lies, for a launch that wants a pointer to it.
    #[inline]
    pub(crate) fn address(&self) -> &u64 {
        &self.raw.ptr.0
    }

    /// Where element `index` starts; one past the end is allowed.
    #[must_use]
    pub fn ptr_at(&self, index: usize) -> Option<DevicePtr> {
        (index <= self.len).then(|| DevicePtr(self.raw.ptr.0 + (index * size_of::<T>()) as u64))
    }

    /// The identity of this hand-out.
    #[must_use]
    #[inline]
    pub fn allocation(&self) -> AllocationId {
        self.raw.allocation
    }

    /// Which allocation, in which state, right now. Takes the pool's lock.
    #[must_use]
    pub fn token(&self) -> Token {
        self.raw.books.token_of(&self.raw)
    }

    /// What it was allocated for.
    #[must_use]
    pub fn purpose(&self) -> Purpose {
        self.raw.purpose
    }

    /// The pool it came from.
    #[must_use]
    pub fn pool_id(&self) -> PoolId {
        self.raw.allocation.pool()
    }

    /// Keeps its memory from falling asleep while a call queues work on it.
    pub(crate) fn hold_awake(&self, what: &'static str) -> Result<Awake, PoolError> {
        self.raw.books.awake(self.raw.purpose, what)
    }

    /// Says that work queued on `stream` uses the slice, so that its memory waits for that work too.
    ///
    /// # Errors
    /// `OtherDevice`.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), PoolError> {
        self.raw.books.record_stream(&self.raw, stream)
    }
}

impl<T: Element> Tracked for DeviceSlice<T> {
    fn token(&self) -> Token {
        self.token()
    }
    fn ptr(&self) -> DevicePtr {
        self.ptr()
    }
    fn bytes(&self) -> usize {
        self.bytes()
    }
}

impl<T: Element> fmt::Debug for DeviceSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("allocation", &self.raw.allocation)
            .field("ptr", &self.raw.ptr)
            .field("len", &self.len)
            .field("element_bytes", &size_of::<T>())
            .finish_non_exhaustive()
    }
}
