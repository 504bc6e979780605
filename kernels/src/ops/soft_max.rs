//! Softmax over the last dimension.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[t, h] = softmax(x[t, h])`, in `f32`; `-inf` becomes exactly 0. A row of nothing but `-inf` becomes zeros.
/// `out` may be `x`.
#[derive(Clone, Debug)]
pub struct SoftMax {
    /// `[T, H, C]` F32.
    pub x: TensorView,
    /// Shaped like `x`, F32.
    pub out: TensorView,
}

impl Op for SoftMax {
    fn name(&self) -> &'static str {
        "soft_max"
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
        check.rank("x", &self.x, &["T", "H", "C"])?;
        check.floats_to(&self.x, &self.out)
    }

    fn call(&self) -> Call {
        Call::new(self.x.rows())
            .threads(self.x.dim(2), 4)
            .view(&self.x)
            .stride(&self.x, 0)
            .stride(&self.x, 1)
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .dim(self.x.dim(0))
            .dim(self.x.dim(1))
            .dim(self.x.dim(2))
    }
}
