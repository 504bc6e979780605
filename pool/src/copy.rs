//! Copies that can not go wrong: lengths are checked, and whoever waits for memory waits for them too.

use zerocopy::IntoBytes;

use crate::driver::DevicePtr;
use crate::driver::host_memory::{download, upload};
use crate::{Awake, DeviceSlice, Element, GrowableSlice, HostBuffer, Output, PoolError, Stream};

/// Typed device memory of a pool, to copy from and to: a slice, what there is of a growable one, a result that is held.
pub trait Elements<T: Element>: sealed::Sealed {
    /// Where it starts.
    fn start(&self) -> DevicePtr;
    /// How many elements are there.
    fn count(&self) -> usize;
    /// See [`DeviceSlice::record_stream`].
    ///
    /// # Errors
    /// `OtherDevice`.
    fn record(&self, stream: &Stream) -> Result<(), PoolError>;
    /// Keeps its memory from falling asleep while a call queues work on it; `what` names the call.
    ///
    /// # Errors
    /// `Asleep`.
    fn awake(&self, what: &'static str) -> Result<Awake, PoolError>;
}

mod sealed {
    pub trait Sealed {}
    impl<T: super::Element> Sealed for super::DeviceSlice<T> {}
    impl<T: super::Element> Sealed for super::GrowableSlice<T> {}
    impl<T: super::Element> Sealed for super::Output<T> {}
}

/// The three kinds say the same by methods of their own.
macro_rules! elements {
    ($($kind:ident)*) => {$(
        impl<T: Element> Elements<T> for $kind<T> {
            fn start(&self) -> DevicePtr {
                self.ptr()
            }
            fn count(&self) -> usize {
                self.len()
            }
            fn record(&self, stream: &Stream) -> Result<(), PoolError> {
                self.record_stream(stream)
            }
            fn awake(&self, what: &'static str) -> Result<Awake, PoolError> {
                self.hold_awake(what)
            }
        }
    )*};
}

elements!(DeviceSlice GrowableSlice Output);

impl Stream {
    /// Copies `data` into the start of `dst` and waits for it.
    ///
    /// # Errors
    /// `Length` if it does not fit; `Capturing`; `OtherDevice`; `Asleep`; those of the driver.
    pub fn upload<T: Element>(&self, data: &[T], dst: &impl Elements<T>) -> Result<(), PoolError> {
        self.not_capturing("a copy from plain host memory")?;
        fits(data.len(), dst.count())?;
        let _awake = dst.awake("a copy")?;
        dst.record(self)?;
        Ok(upload(self.driver(), dst.start(), data.as_bytes(), self.handle())?)
    }

    /// Copies the whole of `src` out and waits for it.
    ///
    /// # Errors
    /// `Capturing`; `OtherDevice`; `Asleep`; those of the driver.
    pub fn download<T: Element>(&self, src: &impl Elements<T>) -> Result<Vec<T>, PoolError> {
        let mut out = vec![T::new_zeroed(); src.count()];
        self.download_into(src, &mut out)?;
        Ok(out)
    }

    /// Copies the start of `src` out and waits for it.
    ///
    /// # Errors
    /// `Length` if `out` is longer; `Capturing`; `OtherDevice`; `Asleep`; those of the driver.
    pub fn download_into<T: Element>(&self, src: &impl Elements<T>, out: &mut [T]) -> Result<(), PoolError> {
        self.not_capturing("a copy to plain host memory")?;
        fits(out.len(), src.count())?;
        let _awake = src.awake("a copy")?;
        src.record(self)?;
        Ok(download(self.driver(), out.as_mut_bytes(), src.start(), self.handle())?)
    }

    /// Queues a copy of `src` into the start of `dst`. May be captured.
    ///
    /// # Errors
    /// `Length` if it does not fit; `OtherDevice`; `Asleep`; those of the driver.
    pub fn copy<T: Element>(&self, src: &impl Elements<T>, dst: &impl Elements<T>) -> Result<(), PoolError> {
        fits(src.count(), dst.count())?;
        let _awake = (src.awake("a copy")?, dst.awake("a copy")?);
        src.record(self)?;
        dst.record(self)?;
        if src.count() == 0 {
            return Ok(());
        }
        self.driver().bind()?;
        Ok(self.driver().memcpy_dtod(dst.start(), src.start(), src.count() * size_of::<T>(), self.handle())?)
    }

    /// Queues setting every byte of `dst` to `value`. May be captured.
    ///
    /// # Errors
    /// `OtherDevice`; `Asleep`; those of the driver.
    pub fn fill<T: Element>(&self, dst: &impl Elements<T>, value: u8) -> Result<(), PoolError> {
        let _awake = dst.awake("a fill")?;
        dst.record(self)?;
        if dst.count() == 0 {
            return Ok(());
        }
        self.driver().bind()?;
        Ok(self.driver().memset_d8(dst.start(), value, dst.count() * size_of::<T>(), self.handle())?)
    }

    /// Queues a copy of a host buffer into the start of `dst`. May be captured: declare the buffer then.
    ///
    /// # Errors
    /// `Length` if it does not fit; `OtherDevice`; `Asleep`; those of the driver.
    pub fn copy_from_host<T: Element>(&self, src: &HostBuffer<T>, dst: &impl Elements<T>) -> Result<(), PoolError> {
        fits(src.len(), dst.count())?;
        let _awake = dst.awake("a copy")?;
        dst.record(self)?;
        src.shared.copy_host(src.tracked, self, |pinned, handle| {
            pinned.copy_to_device(dst.start(), src.len() * size_of::<T>(), handle)
        })
    }

    /// Queues a copy of the start of `src` into a whole host buffer. May be captured: declare the buffer then.
    ///
    /// # Errors
    /// `Length` if the buffer is longer; `OtherDevice`; `Asleep`; those of the driver.
    pub fn copy_to_host<T: Element>(&self, src: &impl Elements<T>, dst: &HostBuffer<T>) -> Result<(), PoolError> {
        fits(dst.len(), src.count())?;
        let _awake = src.awake("a copy")?;
        src.record(self)?;
        dst.shared.copy_host(dst.tracked, self, |pinned, handle| {
            pinned.copy_from_device(src.start(), dst.len() * size_of::<T>(), handle)
        })
    }
}

fn fits(found: usize, expected: usize) -> Result<(), PoolError> {
    if found > expected { Err(PoolError::Length { expected, found }) } else { Ok(()) }
}
