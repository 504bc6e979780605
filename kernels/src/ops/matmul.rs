//! Matrix product with a weight.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `y[t] = W x[t]`, products and sums in `f32` on exactly dequantised weights.
///
/// Each element of `y` is summed in an order that depends on the columns and on whether the launch has
/// few tokens or many, never on the number of threads.
#[derive(Clone, Debug)]
pub struct MatMul {
    /// `[out, in]`, any supported type; rows without gaps.
    pub w: TensorView,
    /// `[T, in]` F32.
    pub x: TensorView,
    /// `[T, out]` F32.
    pub y: TensorView,
}

impl Op for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.w, &self.x]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.y]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("w", &self.w, &["out", "in"])?;
        check.weight("w", &self.w)?;
        check.contiguous("w", &self.w)?;
        check.rank("x", &self.x, &["T", "in"])?;
        check.f32("x", &self.x)?;
        check.f32("y", &self.y)?;
        check.shape("x", &self.x, &[self.x.dim(0), self.w.dim(1)])?;
        check.shape("y", &self.y, &[self.x.dim(0), self.w.dim(0)])?;
        check.apart("y", &self.y, &[("w", &self.w), ("x", &self.x)])
    }

    fn call(&self) -> Call {
        Call::new(self.w.dim(0).div_ceil(64))
            .view(&self.w)
            .ty(&self.w)
            .dim(self.w.dim(0))
            .dim(self.w.dim(1))
            .view(&self.x)
            .dim(self.x.dim(0))
            .stride(&self.x, 0)
            .view(&self.y)
            .stride(&self.y, 0)
    }
}
