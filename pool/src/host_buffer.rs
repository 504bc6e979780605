//! Host memory with a token: page-locked buffers, and registered memory that the device reads in place.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use zerocopy::IntoBytes;

use crate::driver::DevicePtr;
use crate::driver::host_memory::Pinned;
use crate::shared::Shared;
use crate::{Element, PoolError, Stream, Token, Tracked};

/// `len` elements of page-locked host memory, which copies use without a detour. Starts zeroed.
///
/// # Reuse and capture
/// A graph that was captured with a copy from or to the buffer keeps it: dropping the buffer while a graph
/// depends on it frees the memory with the graph. It is never handed to somebody else.
#[derive(Debug)]
pub struct HostBuffer<T: Element> {
    pub(crate) shared: Arc<Shared>,
    pub(crate) tracked: usize,
    pub(crate) len: usize,
    pub(crate) element: PhantomData<fn() -> T>,
}

impl<T: Element> HostBuffer<T> {
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

    /// Waits for the copies that use the buffer and fills it from the start.
    ///
    /// # Errors
    /// `Length` if `data` is longer than the buffer; those of the driver.
    pub fn write(&self, data: &[T]) -> Result<(), PoolError> {
        if data.len() > self.len {
            return Err(PoolError::Length { expected: self.len, found: data.len() });
        }
        self.shared.wait_outside(self.tracked)?;
        self.shared.with_pinned(self.tracked, |pinned| pinned.write(0, data.as_bytes()));
        Ok(())
    }

    /// Says that work queued on a stream so far uses the buffer: it is kept until that is done. For kernels and host
    /// functions; copies say it themselves.
    ///
    /// # Errors
    /// `Internal` for a buffer that is gone, which a bug would be.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), PoolError> {
        self.shared.copy_host(self.tracked, stream, |_, _| Ok(()))
    }

    /// Its whole words, for what host and device tell each other while both are at work. Empty for an empty buffer.
    #[must_use]
    pub fn words(&self) -> HostWords {
        HostWords(self.shared.pinned(self.tracked))
    }

    /// Waits for the copies that use the buffer and copies it out.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn read(&self) -> Result<Vec<T>, PoolError> {
        self.shared.wait_outside(self.tracked)?;
        let mut out = vec![T::new_zeroed(); self.len];
        self.shared.with_pinned(self.tracked, |pinned| pinned.read(0, out.as_mut_bytes()));
        Ok(out)
    }
}

/// Words of a [`HostBuffer`] that host and device may read and write at any time. Keeps the memory.
#[derive(Clone, Debug)]
pub struct HostWords(Option<Arc<Pinned>>);

impl Deref for HostWords {
    type Target = [AtomicU32];
    fn deref(&self) -> &[AtomicU32] {
        self.0.as_ref().map_or(&[], |pinned| pinned.words())
    }
}

impl<T: Element> Tracked for HostBuffer<T> {
    fn token(&self) -> Token {
        self.shared.outside_token(self.tracked)
    }
    fn ptr(&self) -> DevicePtr {
        self.shared.outside_span(self.tracked).0
    }
    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: Element> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        self.shared.drop_host(self.tracked);
    }
}

/// Host memory (a mapped file) that the device reads in place, without a copy. Owns the memory.
///
/// # Reuse and capture
/// As for [`HostBuffer`]: a graph that depends on it keeps the registration and its owner.
#[derive(Debug)]
pub struct RegisteredHost {
    pub(crate) shared: Arc<Shared>,
    pub(crate) tracked: usize,
}

impl Tracked for RegisteredHost {
    fn token(&self) -> Token {
        self.shared.outside_token(self.tracked)
    }
    fn ptr(&self) -> DevicePtr {
        self.shared.outside_span(self.tracked).0
    }
    fn bytes(&self) -> usize {
        self.shared.outside_span(self.tracked).1
    }
}

impl Drop for RegisteredHost {
    fn drop(&mut self) {
        self.shared.drop_host(self.tracked);
    }
}
