//! Uploads of much memory: through page-locked buffers, the next one filled while the last one is copied.

use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::driver::host_memory::Pinned;
use crate::driver::{DevicePtr, DriverResult};
use crate::event::Event;
use crate::{DeviceSlice, Element, PoolError, Stream};

/// Bytes of one buffer.
const BUFFER_BYTES: usize = 16 << 20;
/// Buffers: one is filled while the others are copied.
const BUFFERS: usize = 3;
/// Threads that fill a buffer: one can not read as fast as the device takes.
const MOST_THREADS: usize = 8;
/// Below this many bytes a second thread costs more than it brings.
const BYTES_A_THREAD: usize = 1 << 20;

/// Copies host memory to slices on one stream, without waiting for each.
///
/// # Reuse and capture
/// The data is read before a call returns, so it may go then; slices must live until [`finish`](Self::finish), or until
/// the stream was waited for. Nothing can be uploaded while the stream captures.
#[derive(Debug)]
pub struct Staging {
    stream: Stream,
    buffers: Vec<Buffer>,
    next: usize,
}

#[derive(Debug)]
struct Buffer {
    pinned: Pinned,
    /// Behind its last copy.
    copied: Option<Arc<Event>>,
}

impl Staging {
    /// Takes its buffers, 48 MiB of page-locked memory.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(stream: &Stream) -> Result<Self, PoolError> {
        stream.not_capturing("a host allocation")?;
        let mut staging = Self { stream: stream.clone(), buffers: Vec::with_capacity(BUFFERS), next: 0 };
        for _ in 0..BUFFERS {
            let pinned = Pinned::new(stream.driver(), BUFFER_BYTES)?;
            staging.buffers.push(Buffer { pinned, copied: None });
        }
        Ok(staging)
    }

    /// Queues a copy of `data` into the start of `dst`.
    ///
    /// # Errors
    /// `Length` if it does not fit; `Capturing`; `OtherDevice`; `Asleep`; those of the driver.
    pub fn upload<T: Element>(&mut self, data: &[T], dst: &DeviceSlice<T>) -> Result<(), PoolError> {
        self.stream.not_capturing("a copy from plain host memory")?;
        if data.len() > dst.len() {
            return Err(PoolError::Length { expected: dst.len(), found: data.len() });
        }
        let _awake = dst.hold_awake("an upload")?;
        dst.record_stream(&self.stream)?;
        for (i, part) in data.as_bytes().chunks(BUFFER_BYTES).enumerate() {
            let to = DevicePtr(dst.ptr().0 + (i * BUFFER_BYTES) as u64);
            let index = self.next;
            self.next = (index + 1) % self.buffers.len();
            let Some(buffer) = self.buffers.get_mut(index) else { continue };
            buffer.wait()?;
            fill(&buffer.pinned, part);
            // Marked whether the copy was queued or not: what is in doubt is waited for.
            let queued = buffer.pinned.copy_to_device(to, part.len(), self.stream.handle());
            buffer.copied = Some(self.stream.mark()?);
            queued?;
        }
        Ok(())
    }

    /// Waits for all copies and gives the buffers back.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn finish(mut self) -> Result<(), PoolError> {
        Ok(self.end()?)
    }

    fn end(&mut self) -> DriverResult<()> {
        // A buffer that can not be waited for is leaked: see `Pinned`.
        while let Some(mut buffer) = self.buffers.pop() {
            buffer.wait()?;
            buffer.pinned.free()?;
        }
        Ok(())
    }
}

impl Buffer {
    fn wait(&mut self) -> DriverResult<()> {
        match &self.copied {
            Some(event) => event.synchronize()?,
            None => return Ok(()),
        }
        self.copied = None;
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Silent: what a dead device can not give back is leaked.
        let _ = self.end();
    }
}

/// Writes `data` to the start of a buffer, on as many threads as it is worth.
fn fill(pinned: &Pinned, data: &[u8]) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (data.len() / BYTES_A_THREAD).clamp(1, cores.min(MOST_THREADS));
    if threads == 1 {
        return pinned.write(0, data);
    }
    let share = data.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (i, part) in data.chunks(share).enumerate() {
            scope.spawn(move || pinned.write(i * share, part));
        }
    });
}
