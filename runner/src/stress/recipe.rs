//! The graphs of the stress: small closures whose results can be computed without a device.

use std::cell::Cell;

use evergraph_graphcache::{CacheError, Scope};
use evergraph_kernels::probe::{Probe, Words};
use evergraph_pool::driver::Faulty;
use evergraph_pool::{AllocationId, DeviceSlice, Use};

use super::ledger::mark;

/// Words of device memory, owned.
pub(super) type Slice = DeviceSlice<u32>;

/// Why a closure gave up.
#[derive(Debug, thiserror::Error)]
pub(super) enum Halt {
    /// The cache, the pool or the driver.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// On purpose.
    #[error("given up on purpose")]
    OnPurpose,
}

impl From<evergraph_pool::PoolError> for Halt {
    fn from(error: evergraph_pool::PoolError) -> Self {
        Self::Cache(error.into())
    }
}

impl From<evergraph_pool::driver::DriverError> for Halt {
    fn from(error: evergraph_pool::driver::DriverError) -> Self {
        Self::Cache(error.into())
    }
}

/// Where the scratch of a recipe's graph comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scratch {
    Pin,
    Shared,
    Track,
}

/// The shape of a recipe's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    /// Added to the first input.
    pub(super) k: u32,
    /// Scratch buffers in a row, each one more.
    pub(super) parts: u8,
    /// Words of each.
    pub(super) words: usize,
    /// Whether the result is added to the output instead of replacing it.
    pub(super) adds: bool,
    /// Whether a counter in zeroed scratch takes part.
    pub(super) counts: bool,
    /// Where scratch comes from.
    pub(super) scratch: Scratch,
    /// Whether the graph keeps its inputs.
    pub(super) strong: bool,
}

/// How the closure is to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Well,
    /// With an error, after so many parts, and only inside a capture if asked so.
    Cancel(u8),
    /// With a panic, after so many parts.
    Panic(u8),
}

/// The panic of [`Ending::Panic`].
pub(super) struct OnPurpose;

impl Shape {
    /// What the work makes of its inputs; `before` is what the output holds.
    pub(super) fn eager(&self, a: &[u32], b: &[u32], before: &[u32]) -> Vec<u32> {
        let mut out = before.to_vec();
        let touched = a.len().min(b.len()).min(out.len());
        for i in 0..touched {
            let mut word = a[i].wrapping_add(self.k).wrapping_mul(3).wrapping_add(b[i]);
            for part in 0..self.parts {
                word = word.wrapping_add(u32::from(part) + 1);
            }
            out[i] = if self.adds { out[i].wrapping_add(word) } else { word };
        }
        if self.counts {
            out[0] = out[0].wrapping_add(1);
        }
        out
    }
}

/// One run of a recipe's closure.
pub(super) struct Work<'a> {
    pub(super) driver: &'a Faulty,
    pub(super) probe: &'a Probe,
    pub(super) shape: Shape,
    pub(super) a: &'a Slice,
    pub(super) b: &'a Slice,
    pub(super) out: &'a Slice,
    pub(super) ending: Ending,
    pub(super) arena: u64,
    pub(super) serials: &'a dyn Fn() -> u64,
    /// Whether the closure was called at all.
    pub(super) called: Cell<bool>,
}

/// Scratch that the ledger knows of while the closure has it.
struct Lent<'a> {
    driver: &'a Faulty,
    slice: Slice,
    serial: u64,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.driver.mark(mark::DISOWN, &[("serial", self.serial)]);
    }
}

impl Work<'_> {
    /// The allocations that the run is meant for.
    pub(super) fn bound(&self) -> [AllocationId; 3] {
        [self.a.allocation(), self.b.allocation(), self.out.allocation()]
    }

    /// The closure.
    pub(super) fn body(&self, scope: &Scope<'_>) -> Result<(), Halt> {
        self.called.set(true);
        let shape = self.shape;
        for input in [self.a, self.b] {
            if shape.strong {
                scope.declare_held(input, Use::Input)?;
            } else {
                scope.declare(input, Use::Input)?;
            }
        }
        scope.declare(self.out, Use::State)?;
        let stream = scope.stream().handle();
        let touched = self.a.len().min(self.b.len()).min(self.out.len());
        let cut = |slice: &Slice| Words::new(slice.ptr(), touched);
        self.stop(0)?;
        let mut last = self.lend(scope.alloc(shape.words.max(touched))?);
        self.probe.add(stream, cut(self.a), shape.k, cut(&last.slice))?;
        self.probe.mix(stream, cut(&last.slice), cut(self.b), cut(&last.slice))?;
        for part in 0..shape.parts {
            self.stop(part + 1)?;
            let next = self.lend(scope.alloc(shape.words.max(touched) + 64 * usize::from(part))?);
            self.probe.add(stream, cut(&last.slice), u32::from(part) + 1, cut(&next.slice))?;
            // The one before goes back here, in the middle of the window.
            last = next;
        }
        let out = cut(self.out);
        if shape.adds {
            self.probe.accumulate(stream, cut(&last.slice), out)?;
        } else {
            self.probe.add(stream, cut(&last.slice), 0, out)?;
        }
        if shape.counts {
            let counter = self.lend(scope.alloc_zeroed_scratch(2)?);
            let cell = Words::new(counter.slice.ptr(), 2);
            self.probe.count(stream, cell)?;
            self.probe.accumulate(stream, Words::new(cell.ptr, 1), Words::new(self.out.ptr(), 1))?;
            scope.stream().fill(&counter.slice, 0)?;
        }
        self.stop(u8::MAX)
    }

    fn lend(&self, slice: Slice) -> Lent<'_> {
        let serial = (self.serials)();
        let (ptr, bytes) = (slice.ptr().0, slice.bytes() as u64);
        let args = [("serial", serial), ("ptr", ptr), ("bytes", bytes), ("scratch", 1), ("arena", self.arena)];
        self.driver.mark(mark::OWN, &args);
        Lent { driver: self.driver, slice, serial }
    }

    fn stop(&self, after: u8) -> Result<(), Halt> {
        let last = after == u8::MAX;
        match self.ending {
            Ending::Cancel(at) if at == after || last => Err(Halt::OnPurpose),
            // Only a panic that a capture has to survive is worth the noise.
            Ending::Panic(at) if at == after || last => std::panic::panic_any(OnPurpose),
            _ => Ok(()),
        }
    }
}
