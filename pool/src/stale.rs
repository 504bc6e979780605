//! Why a graph may not be launched.

use std::fmt;

use crate::{Dependency, PoolId, Purpose};

/// What is wrong with a dependency.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum BadReason {
    /// It is being retired at this moment.
    Retiring,
    /// The bytes belong to another allocation.
    Reissued,
    /// The memory went back to the driver.
    GivenBack,
    /// The pages went back to the driver, the address stays: [`Registration::reback`](crate::Registration::reback).
    Unbacked,
    /// Other pages came under the same address, and the bytes are what they were: it slept.
    /// [`Registration::reback`](crate::Registration::reback) takes note of them.
    Rebacked,
    /// The bytes were lost; same address.
    ContentLost,
    /// It is asleep: no pages, until [`Pool::wake`](crate::Pool::wake).
    Asleep,
    /// The owner of a foreign range took it away or moved it.
    Withdrawn,
    /// The graph itself was evicted for its memory.
    Evicted,
    /// No such allocation, or not any more.
    Gone,
}

impl fmt::Display for BadReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Retiring => "it is being retired",
            Self::Reissued => "its memory belongs to another allocation now",
            Self::GivenBack => "its memory went back to the driver",
            Self::Unbacked => "its pages were taken",
            Self::Rebacked => "other pages came under it",
            Self::ContentLost => "its content was lost",
            Self::Asleep => "it is asleep",
            Self::Withdrawn => "its owner withdrew it",
            Self::Evicted => "the graph was evicted for its memory",
            Self::Gone => "it is gone",
        })
    }
}

/// One bad dependency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bad {
    /// Its index in [`Registration::dependencies`](crate::Registration::dependencies).
    pub index: usize,
    /// The dependency as recorded.
    pub dependency: Dependency,
    /// What is wrong.
    pub reason: BadReason,
}

/// A walk found bad dependencies: the graph must not be launched.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stale {
    /// The pool that was walked.
    pub pool: PoolId,
    /// The graph was evicted: nothing can be repaired, capture again.
    pub evicted: bool,
    /// Memory of this purpose, which the graph uses, is asleep: only a wake brings it back.
    pub asleep: Option<Purpose>,
    /// The bad ones. Empty for an eviction, and where all that is wrong is that the graph's arena is asleep.
    pub bad: Vec<Bad>,
}

impl Stale {
    pub(crate) fn evicted(pool: PoolId) -> Self {
        Self { pool, evicted: true, asleep: None, bad: Vec::new() }
    }

    /// Whether putting pages back is all that is needed: no capture, no update.
    #[must_use]
    pub fn is_remap(&self) -> bool {
        let by_pages = |bad: &Bad| match bad.reason {
            BadReason::Unbacked => bad.dependency.use_.is_scratch(),
            BadReason::Rebacked => true,
            _ => false,
        };
        !self.evicted && self.asleep.is_none() && self.bad.iter().all(by_pages)
    }
}

impl std::error::Error for Stale {}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.evicted {
            return write!(f, "the graph was evicted from {} for its memory", self.pool);
        }
        if let Some(purpose) = self.asleep {
            return write!(f, "{purpose:?} memory of {} that the graph uses is asleep", self.pool);
        }
        write!(f, "{} of the graph's dependencies on {} are bad", self.bad.len(), self.pool)?;
        if let Some(first) = self.bad.first() {
            write!(f, "; the first: allocation {}: {}", first.dependency.token.allocation, first.reason)?;
        }
        Ok(())
    }
}
