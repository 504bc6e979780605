//! The two sides of a turn between a device and the host.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::span::Reader;

/// `len` words that the host reads and writes too.
fn words<'a>(ctx: &KernelContext<'a>, ptr: DevicePtr, len: usize, write: bool) -> Result<&'a [AtomicU32], Fault> {
    ctx.span::<u32>(ptr, len, write)?;
    // SAFETY: the span is mapped and aligned (checked), and atomic words may be shared by anyone.
    Ok(unsafe { std::slice::from_raw_parts(ptr.0 as usize as *const AtomicU32, len) })
}

/// `host_ask`.
pub(super) fn ask(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (turn, told) = (words(ctx, a.ptr()?, 1, true)?, words(ctx, a.ptr()?, 1, true)?);
    let next = turn[0].load(Ordering::Relaxed).wrapping_add(1);
    turn[0].store(next, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    told[0].store(next, Ordering::Release);
    Ok(())
}

/// `host_wait`.
pub(super) fn wait(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (turn, done) = (words(ctx, a.ptr()?, 1, false)?, words(ctx, a.ptr()?, 2, false)?);
    let mine = turn[0].load(Ordering::Relaxed);
    while done[0].load(Ordering::Acquire) != mine && done[1].load(Ordering::Acquire) == 0 {
        // The host may need this core for its answer.
        std::thread::yield_now();
    }
    Ok(())
}
