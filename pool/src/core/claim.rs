//! Giving back: taking free memory out of reach before the host waits for its streams.

use std::ops::Range;

use super::*;

/// Free memory taken out of reach, to be given back to the driver after the host has seen `uses` complete.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    /// The block that now covers it, in state [`BlockState::Claimed`].
    pub(crate) block: BlockKey,
    /// In which segment.
    pub(crate) segment: SegmentKey,
    /// Which chunks; `None`: the whole slab.
    pub(crate) chunks: Option<Range<u32>>,
    /// Where it starts and how long it is.
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// Streams to wait for, on the host.
    pub(crate) uses: Uses,
}

impl Heap {
    /// Claims whole free chunks, just enough for `want_bytes` (all there is, if less): idle ones first, then
    /// those with the fewest streams; high addresses first.
    pub(crate) fn claim_chunks(&mut self, want_bytes: u64) -> Vec<Claim> {
        unimplemented!()
    }

    /// Claims wholly free slabs: fewest bytes that reach `want_bytes` (all there is, if less).
    pub(crate) fn claim_slabs(&mut self, want_bytes: u64) -> Vec<Claim> {
        unimplemented!()
    }

    /// The claim fell through: free again, with the uses it had.
    pub(crate) fn release_claim(&mut self, block: BlockKey) -> Result<(), Misuse> {
        unimplemented!()
    }

    /// The pages of a claim of chunks are gone: its block is unbacked. (A slab's claim ends with
    /// [`remove_segment`](Self::remove_segment).)
    pub(crate) fn unback_claim(&mut self, block: BlockKey) -> Result<(), Misuse> {
        unimplemented!()
    }

    /// The backed chunks that lie wholly inside a used block (scratch of an idle graph): what could be
    /// unmapped under it.
    #[must_use]
    pub(crate) fn chunks_inside(&self, block: BlockKey) -> Vec<Range<u32>> {
        unimplemented!()
    }

    /// The pages of chunks inside a used block are gone. The block stays used; its address stays its own.
    pub(crate) fn unback_used(&mut self, block: BlockKey, chunks: Range<u32>) -> Result<(), Misuse> {
        unimplemented!()
    }

    /// The chunks of a used block without memory: what a remap must map.
    #[must_use]
    pub(crate) fn missing_chunks(&self, block: BlockKey) -> Vec<Range<u32>> {
        unimplemented!()
    }
}
