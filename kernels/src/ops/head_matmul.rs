//! Matrix product of each head with a weight of its own.

use evergraph_pool::driver::DeviceInfo;
use evergraph_pool::driver::DevicePtr;

use super::check::Check;
use super::{Call, Launches, Op, TensorView};
use crate::KernelError;

/// `y[t, h] = W[h] x[t, h]`: what takes queries to a compressed cache, and sums over it back to values, in attention that
/// keeps one latent row a token (DeepSeek's).
///
/// The kernels are those of [`ExpertMatMul`](super::ExpertMatMul), where head `h` takes expert `h`. Activations are floats.
#[derive(Clone, Debug)]
pub struct HeadMatMul {
    /// `[H, out, in]`, any supported type; without gaps.
    pub w: TensorView,
    /// `[T, H, in]` F32.
    pub x: TensorView,
    /// `[T, H, out]` F32.
    pub y: TensorView,
}

impl Op for HeadMatMul {
    fn name(&self) -> &'static str {
        "head_matmul"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.w, &self.x]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.y]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.w, &mut self.x]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("w", &self.w, &["H", "out", "in"])?;
        check.weight("w", &self.w)?;
        check.contiguous("w", &self.w)?;
        check.rank("x", &self.x, &["T", "H", "in"])?;
        check.f32("x", &self.x)?;
        let (tokens, heads) = (self.x.dim(0), self.w.dim(0));
        check.shape("x", &self.x, &[tokens, heads, self.w.dim(2)])?;
        check.f32("y", &self.y)?;
        check.shape("y", &self.y, &[tokens, heads, self.w.dim(1)])?;
        check.apart("y", &self.y, &[("w", &self.w), ("x", &self.x)])
    }

    fn call(&self) -> Call {
        let (tokens, heads) = (self.x.dim(0), self.w.dim(0));
        let mut call = Call::new(tokens.saturating_mul(heads).saturating_mul(self.w.dim(1).div_ceil(64)))
            .view(&self.w)
            .ty(&self.w)
            .dim(heads)
            .dim(self.w.dim(1))
            .dim(self.w.dim(2));
        // No ids: each slot of a token takes the expert of its own number.
        call.args.ptr(DevicePtr::NULL);
        call.dim(tokens)
            .dim(heads)
            .view(&self.x)
            .stride(&self.x, 0)
            .stride(&self.x, 1)
            .view(&self.y)
            .stride(&self.y, 0)
            .stride(&self.y, 1)
            .optional(None)
            .optional_stride(None, 0)
            .optional_stride(None, 0)
            .optional(None)
            .dim(0)
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::head_matmul(self, device) } else { super::single(self) }
    }
}
