//! The index of the greatest element.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[t]` = index of the greatest element of `x[t]`, ties to the lowest; NaN is less than everything.
#[derive(Clone, Debug)]
pub struct ArgMax {
    /// `[T, V]` F32.
    pub x: TensorView,
    /// `[T]` I32.
    pub out: TensorView,
}

impl Op for ArgMax {
    fn name(&self) -> &'static str {
        "argmax"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.x]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.x]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("x", &self.x, &["T", "V"])?;
        check.f32("x", &self.x)?;
        check.i32("out", &self.out)?;
        check.shape("out", &self.out, &[self.x.dim(0)])?;
        check.apart("out", &self.out, &[("x", &self.x)])
    }

    fn call(&self) -> Call {
        Call::new(self.x.dim(0))
            .threads(self.x.dim(1), 4)
            .view(&self.x)
            .stride(&self.x, 0)
            .view(&self.out)
            .dim(self.x.dim(0))
            .dim(self.x.dim(1))
    }
}
