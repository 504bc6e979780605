//! The step from one token to the next.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `positions[i] += by`: the last op of a decode step. Wraps on overflow.
#[derive(Clone, Debug)]
pub struct Advance {
    /// `[n]` I32.
    pub positions: TensorView,
    /// How far.
    pub by: i32,
}

impl Op for Advance {
    fn name(&self) -> &'static str {
        "advance"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.positions]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.positions]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("positions", &self.positions, &["n"])?;
        check.i32("positions", &self.positions)
    }

    fn call(&self) -> Call {
        Call::new(1).view(&self.positions).dim(self.positions.dim(0)).int(self.by)
    }
}
