//! Turns between a device and the host: the device asks, the host works, the device waits for the answer.
//!
//! Both sides are kernels, so a graph holds them like any others, and what stands between them in the stream runs while
//! the host works. The words are counted up and never reset by the device, so a replay asks anew.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `turn += 1; told = turn`: what earlier ops of the stream wrote, into host memory too, is there for whoever sees `told`.
#[derive(Clone, Debug)]
pub struct HostAsk {
    /// `[1]` I32 in device memory: how often the device has asked.
    pub turn: TensorView,
    /// `[1]` I32 in page-locked host memory.
    pub told: TensorView,
}

/// Waits until `done[0]` is `turn`, or `done[1]` is not 0: the host gave up then, and what follows reads what is there.
#[derive(Clone, Debug)]
pub struct HostWait {
    /// As in [`HostAsk`].
    pub turn: TensorView,
    /// `[2]` I32 in page-locked host memory: the last turn that the host has done, and whether it gave up.
    pub done: TensorView,
}

impl Op for HostAsk {
    fn name(&self) -> &'static str {
        "host_ask"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.turn]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.turn, &self.told]
    }

    fn is_barrier(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.i32("turn", &self.turn)?;
        check.shape("turn", &self.turn, &[1])?;
        check.i32("told", &self.told)?;
        check.shape("told", &self.told, &[1])?;
        check.apart("told", &self.told, &[("turn", &self.turn)])
    }

    fn call(&self) -> Call {
        Call::new(1).threads(1, 1).view(&self.turn).view(&self.told)
    }
}

impl Op for HostWait {
    fn name(&self) -> &'static str {
        "host_wait"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.turn, &self.done]
    }

    fn writes(&self) -> Vec<&TensorView> {
        // Nothing; but a place where it runs. `turn` is left as it is.
        vec![&self.turn]
    }

    fn is_barrier(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.i32("turn", &self.turn)?;
        check.shape("turn", &self.turn, &[1])?;
        check.i32("done", &self.done)?;
        check.shape("done", &self.done, &[2])?;
        check.contiguous("done", &self.done)?;
        check.apart("turn", &self.turn, &[("done", &self.done)])
    }

    fn call(&self) -> Call {
        Call::new(1).threads(1, 1).view(&self.turn).view(&self.done)
    }
}
