//! A worker's slices, what they must hold, and the work on them that the model can follow.

use evergraph_kernels::probe::Words;
use evergraph_pool::driver::{Driver, Streams};
use evergraph_pool::{PoolError, Stream};

use super::ledger::mark;
use super::recipe::Slice;
use super::world::Shared;

/// A live slice and what it must hold.
pub(super) struct Slot {
    pub(super) slice: Slice,
    pub(super) serial: u64,
    /// `None`: nobody wrote it yet, or a failure left it open.
    pub(super) words: Option<Vec<u32>>,
    /// The stream of the last use.
    pub(super) last: usize,
}

pub(super) fn own(shared: &Shared, slice: Slice, words: Option<Vec<u32>>, last: usize) -> Slot {
    let serial = shared.serial();
    let (ptr, bytes) = (slice.ptr().0, slice.bytes() as u64);
    shared.driver.mark(mark::OWN, &[("serial", serial), ("ptr", ptr), ("bytes", bytes)]);
    Slot { slice, serial, words, last }
}

/// Says in the log that the slot is about to be dropped.
pub(super) fn disown(shared: &Shared, slot: &Slot) {
    shared.driver.mark(mark::DISOWN, &[("serial", slot.serial)]);
}

/// Work on `after` waits for the work on `before` so far.
pub(super) fn order_streams(shared: &Shared, before: &Stream, after: &Stream) -> Result<(), PoolError> {
    shared.driver.bind()?;
    let event = shared.driver.event_create(false)?;
    let ordered = shared
        .driver
        .event_record(event, before.handle())
        .and_then(|()| shared.driver.stream_wait_event(after.handle(), event));
    // A destroy that was made to fail is tried again: this is the world's own event, not the pool's.
    if shared.driver.event_destroy(event).is_err() {
        shared.driver.event_destroy(event)?;
    }
    Ok(ordered?)
}

/// Before a use on `stream`: after the last use, and known to the pool.
pub(super) fn order(shared: &Shared, streams: &[Stream], slot: &mut Slot, stream: usize) -> Result<(), PoolError> {
    if slot.last != stream {
        order_streams(shared, &streams[slot.last], &streams[stream])?;
    }
    slot.slice.record_stream(&streams[stream])?;
    slot.last = stream;
    Ok(())
}

pub(super) fn words(slice: &Slice) -> Words {
    Words::new(slice.ptr(), slice.len())
}

pub(super) fn fill(
    shared: &Shared,
    streams: &[Stream],
    slot: &mut Slot,
    stream: usize,
    value: u32,
) -> Result<(), PoolError> {
    if slot.slice.is_empty() || shared.pool.is_asleep(slot.slice.purpose()) {
        return Ok(());
    }
    order(shared, streams, slot, stream)?;
    shared.probe.fill(streams[stream].handle(), words(&slot.slice), value)?;
    slot.words = Some((0..slot.slice.len() as u32).map(|i| value.wrapping_add(i)).collect());
    Ok(())
}

/// `to = from + 1`, as far as both reach.
pub(super) fn copy(
    shared: &Shared,
    streams: &[Stream],
    from: &mut Slot,
    to: &mut Slot,
    stream: usize,
) -> Result<(), PoolError> {
    let len = from.slice.len().min(to.slice.len());
    let asleep = |slot: &Slot| shared.pool.is_asleep(slot.slice.purpose());
    if len == 0 || from.words.is_none() || asleep(from) || asleep(to) {
        return Ok(());
    }
    order(shared, streams, from, stream)?;
    order(shared, streams, to, stream)?;
    shared.probe.add(streams[stream].handle(), words(&from.slice), 1, words(&to.slice))?;
    if let (Some(from), Some(to)) = (&from.words, &mut to.words) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.wrapping_add(1);
        }
    }
    Ok(())
}
