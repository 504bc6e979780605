//! Stitching (vmm): free chunks of several places go under one new range.
//!
//! Address space is plentiful, physical memory is not. Where no free block fits, the chunks that lie free elsewhere
//! are taken from under their ranges and mapped where the request will be, and nothing goes back to the driver. A
//! chunk is one physical handle and has one range at any time: the host waits for all streams that used it, it is unmapped,
//! waits among the spare chunks, and is mapped anew. No token stands on free memory, so no graph notices. A large chunk moves
//! as a whole; one that fits nowhere is given back for smaller ones (see `bundles.rs`).
//!
//! Taken from: whatever is free, when the pool may not grow ([`Shared::gather`]); and, while it may, only what is idle as
//! the host saw it ([`Shared::gather_idle`]). The second kind keeps the peak low, at the price of an unmap for a create.
//! Workloads that repeat themselves could move the same chunks for ever, so new load pays for it: never more is moved
//! so than was ever live at a time. After that the pool grows to what the workload needs, and rests.

use std::ops::Range;

use crate::alloc::keeps_addresses;
use crate::core::{Heap, StreamKey};
use crate::give_back::{Parcel, Reason};
use crate::handshake::Patience;
use crate::shared::{Cold, Notices, Shared};
use crate::state::State;
use crate::{PoolError, mutant};

impl Shared {
    /// Takes free chunks outside `window` for a range that lacks `want_bytes`; the bytes that it took, to be found
    /// among the spare chunks. Waits for the streams that used them.
    pub(crate) fn gather(
        &self,
        cold: &Cold<'_>,
        want_bytes: u64,
        window: &Range<u64>,
        notices: &mut Notices,
    ) -> Result<u64, PoolError> {
        if want_bytes == 0 || !keeps_addresses(self.config.mode) || mutant::is("no-stitch") {
            return Ok(0);
        }
        let parcels = {
            let mut state = self.lock();
            let state = &mut *state;
            let streams = &state.streams;
            claim(&mut state.heaps, want_bytes, window, &|key| State::usable(streams, key), true)
        };
        self.give_back(cold, parcels, Reason::Stitch, Patience::Skip, notices)
    }

    /// Before a growth makes `lack_bytes` of new chunks: idle free ones, as far as the load's peak pays for it.
    pub(crate) fn gather_idle(&self, cold: &Cold<'_>, lack_bytes: u64, window: &Range<u64>, notices: &mut Notices) {
        let parcels = {
            let mut state = self.lock();
            let state = &mut *state;
            state.note_active();
            let paid = state.tally.active_peak.saturating_sub(state.moved_bytes);
            let want = lack_bytes.min(paid);
            // A look at every block is for those times only when there may be something to find.
            let worth = state.heaps.iter().any(|h| h.largest_free_bytes() >= self.chunk_bytes);
            if want == 0 || !worth || mutant::is("no-stitch") {
                return;
            }
            claim(&mut state.heaps, want, window, &|_| false, false)
        };
        // An error here is none of the request's: it can be served with new chunks.
        if let Ok(taken) = self.give_back(cold, parcels, Reason::Stitch, Patience::Skip, notices) {
            self.lock().moved_bytes += taken;
        }
    }
}

/// Claims whole free chunks outside `window`. `beyond`: in bundles larger than what is wanted, too, but only where nothing
/// else is left.
fn claim(
    heaps: &mut [Heap],
    want_bytes: u64,
    window: &Range<u64>,
    usable: &dyn Fn(StreamKey) -> bool,
    beyond: bool,
) -> Vec<Parcel> {
    let mut parcels = Vec::new();
    let mut claimed = 0;
    let bundles = heaps.iter().any(Heap::has_bundles);
    for beyond in [false, true].into_iter().take(1 + usize::from(beyond && bundles)) {
        for (heap, books) in heaps.iter_mut().enumerate() {
            if claimed >= want_bytes {
                break;
            }
            for claim in books.claim_chunks(want_bytes - claimed, window, usable, beyond) {
                claimed += claim.bytes;
                parcels.push(Parcel::claim(heap, claim));
            }
        }
    }
    parcels
}
