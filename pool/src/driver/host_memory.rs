//! Safe faces of the driver's host-memory and copy calls, for the rest of the crate.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::{DevicePtr, DriverResult, DynDriver, HostPtr, StreamHandle};

/// Host memory that never moves and never changes: a file mapping, a boxed slice.
///
/// # Safety
/// [`bytes`](Self::bytes) returns the same address and length every time, and the memory behind it stays
/// allocated and unchanged as long as the value lives.
pub unsafe trait HostMemory: Send + Sync {
    /// The memory.
    fn bytes(&self) -> &[u8];
}

// SAFETY: a boxed slice behind a shared owner neither moves nor changes.
unsafe impl HostMemory for Box<[u8]> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: nobody can push into a vector that is only shared, so it neither moves nor changes.
unsafe impl HostMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: static memory lives for ever and a shared reference to plain bytes forbids changes.
unsafe impl HostMemory for &'static [u8] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Page-locked host memory. Only the pool's give-back ends it, after the host has seen every copy complete;
/// dropping one leaks it, which is always sound.
pub(crate) struct Pinned {
    driver: DynDriver,
    ptr: HostPtr,
    bytes: usize,
}

impl Pinned {
    pub(crate) fn new(driver: &DynDriver, bytes: usize) -> DriverResult<Self> {
        driver.bind()?;
        let ptr = driver.host_alloc(bytes)?;
        // SAFETY: the memory was just allocated with that length and nobody else knows it. Zeroed so that
        // reading it is defined.
        unsafe { std::ptr::write_bytes(ptr.as_ptr(), 0, bytes) };
        Ok(Self { driver: Arc::clone(driver), ptr, bytes })
    }

    /// As an address that the device can use too.
    pub(crate) fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr.0)
    }

    /// All whole words of it, for what host and device tell each other while both are at work.
    pub(crate) fn words(&self) -> &[AtomicU32] {
        // SAFETY: the allocation is page-aligned, initialised (`new`) and lives as long as `self`; atomic words may be
        // shared with anyone, the device included. Copies in and out of the same bytes race with nobody but their caller.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.bytes / size_of::<AtomicU32>()) }
    }

    /// Copies out; out-of-range parts are left alone.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let n = out.len().min(self.bytes.saturating_sub(offset));
        // SAFETY: `offset + n` is inside the allocation, which is initialised (`new`) and lives as long as
        // `self`; `out` is a separate Rust slice.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr.as_ptr().add(offset.min(self.bytes)), out.as_mut_ptr(), n) };
    }

    /// Copies in; out-of-range parts are dropped.
    pub(crate) fn write(&self, offset: usize, data: &[u8]) {
        let n = data.len().min(self.bytes.saturating_sub(offset));
        // SAFETY: `offset + n` is inside the allocation, which lives as long as `self`; no reference into it
        // is ever handed out; `data` is a separate Rust slice.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.ptr.as_ptr().add(offset.min(self.bytes)), n) };
    }

    /// Queues a copy to the device from the start of the buffer. At most its own length.
    pub(crate) fn copy_to_device(&self, dst: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        self.driver.bind()?;
        let bytes = bytes.min(self.bytes);
        // SAFETY: the memory is freed only by the give-back, after the host saw this stream complete, and
        // after every graph that was captured with it is gone.
        unsafe { self.driver.memcpy_htod(dst, self.ptr.as_ptr(), bytes, stream) }
    }

    /// Queues a copy from the device to the start of the buffer. At most its own length.
    pub(crate) fn copy_from_device(&self, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        self.driver.bind()?;
        let bytes = bytes.min(self.bytes);
        // SAFETY: as in `copy_to_device`; no reference into the memory is ever handed out.
        unsafe { self.driver.memcpy_dtoh(self.ptr.as_ptr(), src, bytes, stream) }
    }

    /// Queues a copy from the device to `offset` in the buffer. At most up to the buffer's end.
    pub(crate) fn keep(&self, offset: usize, src: DevicePtr, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        self.driver.bind()?;
        let offset = offset.min(self.bytes);
        let bytes = bytes.min(self.bytes - offset);
        // SAFETY: `offset + bytes` is inside the allocation; the rest as in `copy_from_device`.
        unsafe { self.driver.memcpy_dtoh(self.ptr.as_ptr().add(offset), src, bytes, stream) }
    }

    /// Queues a copy from `offset` in the buffer to the device. At most up to the buffer's end.
    pub(crate) fn restore(
        &self,
        offset: usize,
        dst: DevicePtr,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.driver.bind()?;
        let offset = offset.min(self.bytes);
        let bytes = bytes.min(self.bytes - offset);
        // SAFETY: `offset + bytes` is inside the allocation; the rest as in `copy_to_device`.
        unsafe { self.driver.memcpy_htod(dst, self.ptr.as_ptr().add(offset), bytes, stream) }
    }

    /// Gives the memory back. The caller has seen, on the host, everything complete that uses it, and no graph
    /// holds it. On an error it is still there: call again.
    pub(crate) fn free(&mut self) -> DriverResult<()> {
        if self.ptr.0 == 0 {
            return Ok(());
        }
        self.driver.bind()?;
        // SAFETY: the caller's promise; no reference into the memory exists.
        unsafe { self.driver.host_free(self.ptr) }?;
        self.ptr = HostPtr(0);
        self.bytes = 0;
        Ok(())
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pinned").field("ptr", &self.ptr).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Host memory that the device can read in place. Dropping one leaks the registration and its owner.
pub(crate) struct Registered {
    driver: DynDriver,
    owner: std::mem::ManuallyDrop<Option<Arc<dyn HostMemory>>>,
    device: DevicePtr,
}

impl Registered {
    pub(crate) fn new(driver: &DynDriver, owner: Arc<dyn HostMemory>) -> DriverResult<Self> {
        driver.bind()?;
        let bytes = owner.bytes();
        // SAFETY: `HostMemory` promises that the range neither moves nor changes while the owner lives, and the
        // owner is dropped only after the registration was ended (`end`), or never.
        let device = unsafe { driver.host_register(bytes.as_ptr(), bytes.len()) }?;
        Ok(Self { driver: Arc::clone(driver), owner: std::mem::ManuallyDrop::new(Some(owner)), device })
    }

    pub(crate) fn device(&self) -> DevicePtr {
        self.device
    }

    /// Ends the registration; under the same conditions as [`Pinned::free`]. The owner comes back to be
    /// dropped where no lock is held.
    pub(crate) fn end(&mut self) -> DriverResult<Option<Arc<dyn HostMemory>>> {
        if let Some(owner) = &*self.owner {
            self.driver.bind()?;
            self.driver.host_unregister(owner.bytes().as_ptr())?;
        }
        Ok(self.owner.take())
    }
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registered").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Bytes copied through one staging buffer at a time: what is leaked if a wait fails half way.
const STAGING_BYTES: usize = 4 << 20;

/// Copies to the device and waits for it.
pub(crate) fn upload(driver: &DynDriver, dst: DevicePtr, data: &[u8], stream: StreamHandle) -> DriverResult<()> {
    driver.bind()?;
    for (i, part) in data.chunks(STAGING_BYTES).enumerate() {
        let staging = part.to_vec();
        let to = DevicePtr(dst.0 + (i * STAGING_BYTES) as u64);
        // SAFETY: `staging` is dropped only after the stream was seen complete; if that fails it is leaked.
        let queued = unsafe { driver.memcpy_htod(to, staging.as_ptr(), staging.len(), stream) };
        let done = queued.and_then(|()| driver.stream_synchronize(stream));
        if let Err(error) = done {
            std::mem::forget(staging);
            return Err(error);
        }
    }
    Ok(())
}

/// Copies from the device and waits for it.
pub(crate) fn download(driver: &DynDriver, out: &mut [u8], src: DevicePtr, stream: StreamHandle) -> DriverResult<()> {
    driver.bind()?;
    for (i, part) in out.chunks_mut(STAGING_BYTES).enumerate() {
        let mut staging = vec![0u8; part.len()];
        let from = DevicePtr(src.0 + (i * STAGING_BYTES) as u64);
        // SAFETY: `staging` is read and dropped only after the stream was seen complete; if that fails it is
        // leaked.
        let queued = unsafe { driver.memcpy_dtoh(staging.as_mut_ptr(), from, staging.len(), stream) };
        let done = queued.and_then(|()| driver.stream_synchronize(stream));
        if let Err(error) = done {
            std::mem::forget(staging);
            return Err(error);
        }
        part.copy_from_slice(&staging);
    }
    Ok(())
}
