//! Statistics in PyTorch's vocabulary, and the pool's own counters.

/// One quantity over time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most so far (since the last reset).
    pub peak: u64,
    /// Everything ever added.
    pub allocated: u64,
    /// Everything ever taken away.
    pub freed: u64,
}

impl Stat {
    #[inline]
    pub(crate) fn add(&mut self, n: u64) {
        self.current += n;
        self.allocated += n;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(crate) fn sub(&mut self, n: u64) {
        self.current = self.current.saturating_sub(n);
        self.freed += n;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// Memory in numbers, as PyTorch counts: bytes unless the name says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Live slices, rounded sizes.
    pub allocated_bytes: Stat,
    /// Live slices and blocks held by graphs.
    pub active_bytes: Stat,
    /// Held from the driver.
    pub reserved_bytes: Stat,
    /// Live slices, as asked for.
    pub requested_bytes: Stat,
    /// Free, in segments that also have live blocks.
    pub inactive_split_bytes: Stat,
    /// Number of live slices.
    pub allocations: Stat,
    /// Number of segments (slabs, or mapped chunks, small or large).
    pub segments: Stat,
    /// Allocations that had to take memory from somebody.
    pub num_alloc_retries: u64,
    /// Allocations that failed for want of memory.
    pub num_ooms: u64,
}

/// How often what happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Give-backs: runs of the one function through which memory leaves the pool.
    pub give_backs: u64,
    /// Bytes that they gave back to the driver. What was moved to where it was needed is not among them.
    pub given_back_bytes: u64,
    /// Times that free chunks were moved under the range of a request or of a graph's scratch (vmm).
    pub stitches: u64,
    /// Bytes that were moved so.
    pub stitched_bytes: u64,
    /// Blocks with dependents that went to another owner.
    pub reissues: u64,
    /// Blocks with dependents that lost their pages.
    pub unbacked: u64,
    /// Blocks that got pages again under the same address.
    pub rebacks: u64,
    /// Graphs evicted for their memory.
    pub evictions: u64,
    /// Times that a dependent went from good to stale.
    pub stale: u64,
    /// Epoch moves.
    pub epoch_bumps: u64,
    /// Hand-outs that another stream's work had to be ordered before.
    pub cross_stream: u64,
    /// Driver calls that grew the pool (chunks mapped, slabs allocated).
    pub growths: u64,
    /// Times that memory of one purpose fell asleep.
    pub sleeps: u64,
    /// Times that it woke.
    pub wakes: u64,
}
