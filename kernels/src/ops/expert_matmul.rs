//! Matrix product with the chosen experts' weights.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `y[t, k] = W[ids[t, k]] x[t]`, or `… x[t, k]` where each slot has its own input (the down projection).
///
/// Merged gate and up weights are one such product with `out = 2 F`; narrow `y` for the two halves.
/// Only chosen experts' weights are touched. An id outside `0 .. E` is a fault.
#[derive(Clone, Debug)]
pub struct ExpertMatMul {
    /// `[E, out, in]`, any supported type; without gaps.
    pub w: TensorView,
    /// `[T, in]` or `[T, K, in]` F32.
    pub x: TensorView,
    /// `[T, K]` I32, contiguous, in device memory.
    pub ids: TensorView,
    /// `[T, K, out]` F32.
    pub y: TensorView,
}

impl Op for ExpertMatMul {
    fn name(&self) -> &'static str {
        "expert_matmul"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.w, &self.x, &self.ids]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.y]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("w", &self.w, &["E", "out", "in"])?;
        check.weight("w", &self.w)?;
        check.contiguous("w", &self.w)?;
        check.rank("ids", &self.ids, &["T", "K"])?;
        check.i32("ids", &self.ids)?;
        check.contiguous("ids", &self.ids)?;
        let (tokens, used) = (self.ids.dim(0), self.ids.dim(1));
        check.f32("x", &self.x)?;
        if self.x.rank() == 3 {
            check.shape("x", &self.x, &[tokens, used, self.w.dim(2)])?;
        } else {
            check.shape("x", &self.x, &[tokens, self.w.dim(2)])?;
        }
        check.f32("y", &self.y)?;
        check.shape("y", &self.y, &[tokens, used, self.w.dim(1)])?;
        check.apart("y", &self.y, &[("w", &self.w), ("x", &self.x), ("ids", &self.ids)])
    }

    fn call(&self) -> Call {
        let slots = self.ids.dim(0).saturating_mul(self.ids.dim(1));
        let call = Call::new(slots.saturating_mul(self.w.dim(1).div_ceil(64)))
            .view(&self.w)
            .ty(&self.w)
            .dim(self.w.dim(0))
            .dim(self.w.dim(1))
            .dim(self.w.dim(2))
            .view(&self.ids)
            .dim(self.ids.dim(0))
            .dim(self.ids.dim(1))
            .view(&self.x)
            .stride(&self.x, 0);
        // A shared input has stride 0 from slot to slot.
        let call = if self.x.rank() == 3 { call.stride(&self.x, 1) } else { call.stride(&self.x, 3) };
        call.view(&self.y).stride(&self.y, 0).stride(&self.y, 1)
    }
}
