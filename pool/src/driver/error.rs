//! Errors of the driver traits.

use std::fmt;

use super::{DeviceOrdinal, DevicePtr};

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// A driver call that failed: which, where, why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} on device {device}: {kind}")]
pub struct DriverError {
    /// The call, by its trait method name.
    pub call: &'static str,
    /// The device.
    pub device: DeviceOrdinal,
    /// Why.
    pub kind: DriverErrorKind,
}

impl DriverError {
    /// An error of a call.
    #[must_use]
    pub fn new(call: &'static str, device: DeviceOrdinal, kind: DriverErrorKind) -> Self {
        Self { call, device, kind }
    }

    /// Whether the device had no memory left.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == DriverErrorKind::OutOfMemory
    }
}

/// Why a driver call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverErrorKind {
    /// No memory left.
    #[error("out of memory")]
    OutOfMemory,
    /// An argument was off.
    #[error("invalid value: {0}")]
    InvalidValue(&'static str),
    /// A handle that is not live.
    #[error("invalid handle: {0}")]
    InvalidHandle(&'static str),
    /// The device is not current on this thread.
    #[error("the device is not current on this thread")]
    InvalidContext,
    /// No such function in the module.
    #[error("no function of that name")]
    NotFound,
    /// The call is not legal while a capture runs; the capture is invalid from here on.
    #[error("not permitted while a stream is capturing")]
    CaptureUnsupported,
    /// An earlier call invalidated the capture.
    #[error("the capture was invalidated by an earlier call")]
    CaptureInvalidated,
    /// The capture was begun by another thread.
    #[error("the capture belongs to another thread")]
    CaptureWrongThread,
    /// The stream does not capture, or already does.
    #[error("the stream is in the wrong capture state")]
    CaptureState,
    /// An event recorded in a capture was used outside it.
    #[error("the event was recorded inside a capture")]
    CapturedEvent,
    /// Work forked into the capture was not joined back.
    #[error("the capture has streams that were not joined")]
    CaptureUnjoined,
    /// The context died; sticky.
    #[error("{0}")]
    Fault(Fault),
    /// Made up by [`Faulty`](super::Faulty).
    #[error("injected failure")]
    Injected,
    /// The device can not do this.
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    /// Peer access is missing.
    #[error("peer access is not enabled")]
    PeerAccess,
    /// The address is in memory of another device that was not granted to this one. Found by virtual devices when the
    /// call is made; between real devices it is a [`Fault`] later.
    #[error("{0}")]
    Foreign(ForeignAccess),
    /// The driver itself, by number and name.
    #[error("driver error {code} ({name})")]
    Other {
        /// The driver's number.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
}

/// An access to memory of another device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignAccess {
    /// The op: the kernel's name, or the call's.
    pub op: String,
    /// Which of the kernel's parameters, from 0, or of the call's (`dst`, `src`).
    pub argument: Argument,
    /// The address.
    pub address: DevicePtr,
    /// Whose memory it is.
    pub owner: DeviceOrdinal,
    /// The device that was to touch it; of a peer copy, the one that it named.
    pub device: DeviceOrdinal,
}

/// Which argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A kernel's parameter, from 0.
    Parameter(usize),
    /// A call's, by name.
    Named(&'static str),
}

impl fmt::Display for ForeignAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.argument {
            Argument::Parameter(number) => write!(f, "parameter {number} of {}", self.op)?,
            Argument::Named(name) => write!(f, "{name} of {}", self.op)?,
        }
        write!(
            f,
            " is {}, memory of device {}, which device {} may not touch: copy it there first, or grant it",
            self.address, self.owner, self.device
        )
    }
}

/// An illegal access: the context is lost. Hardware does not say where; there the address is null, the owner is the
/// driver's name of what happened, and the op is one that was in flight, or those that were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The address, where known.
    pub address: DevicePtr,
    /// How many bytes were to be touched there.
    pub bytes: usize,
    /// Whether it was a write.
    pub write: bool,
    /// The op (kernel name, `memcpy`, `memset`), where known.
    pub op: String,
    /// Who owns or last owned the address, where known.
    pub owner: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.address == DevicePtr::NULL && self.bytes == 0 {
            return write!(f, "the context died in {}: {}", self.op, self.owner);
        }
        let access = if self.write { "write" } else { "read" };
        write!(
            f,
            "illegal address: {} in {} of {} bytes at {} ({})",
            self.op, access, self.bytes, self.address, self.owner
        )
    }
}
