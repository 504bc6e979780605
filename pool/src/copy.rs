//! Copies that can not go wrong: lengths are checked, and whoever waits for memory waits for them too.

use zerocopy::IntoBytes;

use crate::driver::host_memory::{download, upload};
use crate::{DeviceSlice, Element, HostBuffer, PoolError, Stream};

impl Stream {
    /// Copies `data` into the start of `dst` and waits for it.
    ///
    /// # Errors
    /// `Length` if it does not fit; `Capturing`; `OtherDevice`; those of the driver.
    pub fn upload<T: Element>(&self, data: &[T], dst: &DeviceSlice<T>) -> Result<(), PoolError> {
        self.not_capturing("a copy from plain host memory")?;
        fits(data.len(), dst.len())?;
        dst.record_stream(self)?;
        Ok(upload(self.driver(), dst.ptr(), data.as_bytes(), self.handle())?)
    }

    /// Copies the whole of `src` out and waits for it.
    ///
    /// # Errors
    /// `Capturing`; `OtherDevice`; those of the driver.
    pub fn download<T: Element>(&self, src: &DeviceSlice<T>) -> Result<Vec<T>, PoolError> {
        let mut out = vec![T::new_zeroed(); src.len()];
        self.download_into(src, &mut out)?;
        Ok(out)
    }

    /// Copies the start of `src` out and waits for it.
    ///
    /// # Errors
    /// `Length` if `out` is longer; `Capturing`; `OtherDevice`; those of the driver.
    pub fn download_into<T: Element>(&self, src: &DeviceSlice<T>, out: &mut [T]) -> Result<(), PoolError> {
        self.not_capturing("a copy to plain host memory")?;
        fits(out.len(), src.len())?;
        src.record_stream(self)?;
        Ok(download(self.driver(), out.as_mut_bytes(), src.ptr(), self.handle())?)
    }

    /// Queues a copy of `src` into the start of `dst`. May be captured.
    ///
    /// # Errors
    /// `Length` if it does not fit; `OtherDevice`; those of the driver.
    pub fn copy<T: Element>(&self, src: &DeviceSlice<T>, dst: &DeviceSlice<T>) -> Result<(), PoolError> {
        fits(src.len(), dst.len())?;
        src.record_stream(self)?;
        dst.record_stream(self)?;
        if src.is_empty() {
            return Ok(());
        }
        self.driver().bind()?;
        Ok(self.driver().memcpy_dtod(dst.ptr(), src.ptr(), src.bytes(), self.handle())?)
    }

    /// Queues setting every byte of `dst` to `value`. May be captured.
    ///
    /// # Errors
    /// `OtherDevice`; those of the driver.
    pub fn fill<T: Element>(&self, dst: &DeviceSlice<T>, value: u8) -> Result<(), PoolError> {
        dst.record_stream(self)?;
        if dst.is_empty() {
            return Ok(());
        }
        self.driver().bind()?;
        Ok(self.driver().memset_d8(dst.ptr(), value, dst.bytes(), self.handle())?)
    }

    /// Queues a copy of a host buffer into the start of `dst`. May be captured: declare the buffer then.
    ///
    /// # Errors
    /// `Length` if it does not fit; `OtherDevice`; those of the driver.
    pub fn copy_from_host<T: Element>(&self, src: &HostBuffer<T>, dst: &DeviceSlice<T>) -> Result<(), PoolError> {
        fits(src.len(), dst.len())?;
        dst.record_stream(self)?;
        src.shared.copy_host(src.tracked, self, |pinned, handle| {
            pinned.copy_to_device(dst.ptr(), src.len() * size_of::<T>(), handle)
        })
    }

    /// Queues a copy of the start of `src` into a whole host buffer. May be captured: declare the buffer then.
    ///
    /// # Errors
    /// `Length` if the buffer is longer; `OtherDevice`; those of the driver.
    pub fn copy_to_host<T: Element>(&self, src: &DeviceSlice<T>, dst: &HostBuffer<T>) -> Result<(), PoolError> {
        fits(dst.len(), src.len())?;
        src.record_stream(self)?;
        dst.shared.copy_host(dst.tracked, self, |pinned, handle| {
            pinned.copy_from_device(src.ptr(), dst.len() * size_of::<T>(), handle)
        })
    }
}

fn fits(found: usize, expected: usize) -> Result<(), PoolError> {
    if found > expected { Err(PoolError::Length { expected, found }) } else { Ok(()) }
}
