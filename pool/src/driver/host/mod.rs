//! The host device: a complete device on the CPU, at least as strict as the hardware.

mod kernel;

pub use kernel::{HostKernel, KernelContext, SpanCheck};

/// A device on the CPU.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostDevice {}
