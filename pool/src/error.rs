//! What can go wrong.

use std::sync::Arc;

use crate::driver::{DeviceOrdinal, DevicePtr, DriverError};
use crate::{MemoryReport, PoolId, Stale, Token};

/// Errors of the pool. Each leaves the pool as it was.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A driver call failed.
    #[error(transparent)]
    Driver(Arc<DriverError>),
    /// No memory, and nothing left to take it from.
    #[error("{0}")]
    OutOfMemory(Arc<OutOfMemory>),
    /// More than any device's address space, or the size does not fit a number.
    #[error("{requested} elements of {element_bytes} bytes are more than an address space; ask for less")]
    TooLarge {
        /// Elements asked for.
        requested: usize,
        /// Bytes of one.
        element_bytes: usize,
    },
    /// Not a power of two, or larger than the mode can give.
    #[error("alignment of {align} bytes is not a power of two up to {most}")]
    Alignment {
        /// The alignment asked for, bytes.
        align: usize,
        /// The largest there is, bytes.
        most: usize,
    },
    /// Nothing ready inside a capture window, where the driver must not be asked.
    #[error(
        "{requested_bytes} bytes are not ready inside the capture window (largest ready block: {largest_ready_bytes} \
         bytes); reserve them before the capture, or warm up once more"
    )]
    WindowMiss {
        /// What was asked for, bytes.
        requested_bytes: usize,
        /// What for.
        purpose: crate::Purpose,
        /// The largest free block of the pool for that purpose, ready or not, bytes.
        largest_ready_bytes: usize,
    },
    /// A slice that lives on after the window sits on bytes that the graph writes before (a reused temporary),
    /// or in an arena that other graphs write to.
    #[error(
        "a slice of {bytes} bytes at {ptr} outlives the capture window on bytes that every replay overwrites; \
         allocate it before the capture"
    )]
    OutlivesWindow {
        /// The slice.
        token: Token,
        /// Its address.
        ptr: DevicePtr,
        /// Its size.
        bytes: usize,
    },
    /// An output that is not there: its graph has not run, or another graph of the arena has written over it since.
    #[error("the output of {bytes} bytes at {ptr} is gone; take hold of it before the next graph of its arena runs")]
    OutputGone {
        /// Where it was.
        ptr: DevicePtr,
        /// Its size.
        bytes: usize,
    },
    /// Something is in the way that would not go by waiting.
    #[error("{what} is not possible now: {why}")]
    Busy {
        /// What was asked for.
        what: &'static str,
        /// What is in the way.
        why: &'static str,
    },
    /// Memory of this purpose is asleep: it has no pages.
    #[error("{what} needs {purpose:?} memory, which is asleep; wake it first")]
    Asleep {
        /// What for.
        purpose: crate::Purpose,
        /// What was asked for.
        what: &'static str,
    },
    /// The host has no room for the bytes that are to be kept.
    #[error("the host has no {bytes} bytes to keep what is asleep; drop some of it, or let fewer purposes sleep")]
    NoHostMemory {
        /// How many.
        bytes: usize,
    },
    /// Not while the stream is capturing.
    #[error("{what} is not possible while the stream is capturing")]
    Capturing {
        /// What was asked for.
        what: &'static str,
    },
    /// A token or slice of another pool.
    #[error("the token belongs to {found}, not to {expected}")]
    OtherPool {
        /// The pool that was asked.
        expected: PoolId,
        /// The pool that issued it.
        found: PoolId,
    },
    /// A stream or slice of another device.
    #[error("the {what} belongs to device {found}, not to device {expected}")]
    OtherDevice {
        /// What it was.
        what: &'static str,
        /// The device that was asked.
        expected: DeviceOrdinal,
        /// The device it belongs to.
        found: DeviceOrdinal,
    },
    /// There is no way from one device to the memory of the other.
    #[error("device {device} can not reach the memory of device {owner}; copy it there instead")]
    Unreachable {
        /// Whose memory it is.
        owner: DeviceOrdinal,
        /// Who was to touch it.
        device: DeviceOrdinal,
    },
    /// The token is not good any more.
    #[error("the token of allocation {} is stale: {reason}", token.allocation)]
    StaleToken {
        /// The token.
        token: Token,
        /// Why.
        reason: crate::BadReason,
    },
    /// A registration with bad dependencies.
    #[error("{0}")]
    Stale(#[from] Stale),
    /// A byte range outside its allocation.
    #[error("bytes {offset_bytes}..{offset_bytes}+{bytes} are outside an allocation of {allocation_bytes} bytes")]
    Range {
        /// Where it starts.
        offset_bytes: usize,
        /// How long it is.
        bytes: usize,
        /// How long the allocation is.
        allocation_bytes: usize,
    },
    /// Two lengths that must be equal.
    #[error("{found} elements where {expected} are needed")]
    Length {
        /// What is needed.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// More than the byte limit, whatever is given back.
    #[error("the setting is off: {0}")]
    Config(&'static str),
    /// The device can not do this.
    #[error("device {device} can not do this: {what}")]
    Unsupported {
        /// The device.
        device: DeviceOrdinal,
        /// What.
        what: &'static str,
    },
    /// A process can make 65 535 pools.
    #[error("this process has made 65535 pools, which is all the tokens can name")]
    TooManyPools,
    /// A foreign range that overlaps memory of the pool or another range.
    #[error("{bytes} bytes at {ptr} overlap memory that the pool knows already ({name})")]
    Overlap {
        /// Where.
        ptr: DevicePtr,
        /// How many.
        bytes: usize,
        /// Who is there.
        name: String,
    },
    /// The pool's own books do not add up. A bug: please report it.
    #[error("the pool's books do not add up: {0}")]
    Internal(&'static str),
}

impl PoolError {
    /// Whether there was no memory left.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Driver(e) => e.is_out_of_memory(),
            _ => false,
        }
    }
}

impl From<DriverError> for PoolError {
    fn from(error: DriverError) -> Self {
        Self::Driver(Arc::new(error))
    }
}

/// The request that failed, and the state of the pool at that moment.
#[derive(Clone, Debug, thiserror::Error)]
#[error("out of memory: {requested_bytes} bytes for {purpose:?} do not fit\n{report}")]
#[non_exhaustive]
pub struct OutOfMemory {
    /// What was asked for, bytes.
    pub requested_bytes: usize,
    /// What for.
    pub purpose: crate::Purpose,
    /// What the pool looked like.
    pub report: MemoryReport,
    /// The driver's word, if it was asked.
    pub driver: Option<DriverError>,
}
