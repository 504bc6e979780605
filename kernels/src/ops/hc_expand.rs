//! The residual streams after a block.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[t, dst] = post[t, dst] * y[t] + sum over src of comb[t, src, dst] * z[t, src]`, summed in that order. `out` may be
/// `z`.
#[derive(Clone, Debug)]
pub struct HcExpand {
    /// `[T, D]` F32: what the block made.
    pub y: TensorView,
    /// `[T, n, D]` F32, at most 32 streams.
    pub z: TensorView,
    /// `[T, n]` F32.
    pub post: TensorView,
    /// `[T, n, n]` F32, contiguous.
    pub comb: TensorView,
    /// Shaped like `z`, F32.
    pub out: TensorView,
}

/// Most residual streams: a thread keeps the elements of all.
const MOST_STREAMS: usize = 32;

impl Op for HcExpand {
    fn name(&self) -> &'static str {
        "hc_expand"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.y, &self.z, &self.post, &self.comb]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.y, &mut self.z, &mut self.post, &mut self.comb]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("z", &self.z, &["T", "n", "D"])?;
        check.f32("z", &self.z)?;
        let (tokens, n, width) = (self.z.dim(0), self.z.dim(1), self.z.dim(2));
        check.parameter(n <= MOST_STREAMS, "streams", n, "at most 32")?;
        for (role, view, shape) in [
            ("y", &self.y, &[tokens, width][..]),
            ("post", &self.post, &[tokens, n]),
            ("comb", &self.comb, &[tokens, n, n]),
            ("out", &self.out, &[tokens, n, width]),
        ] {
            check.f32(role, view)?;
            check.shape(role, view, shape)?;
        }
        check.contiguous("comb", &self.comb)?;
        check.same_or_apart("out", &self.out, "z", &self.z)?;
        check.apart("out", &self.out, &[("y", &self.y), ("post", &self.post), ("comb", &self.comb)])
    }

    fn call(&self) -> Call {
        Call::pieces(self.z.dim(0), self.z.dim(2))
            .shared_floats(self.z.dim(1) * (self.z.dim(1) + 1))
            .view(&self.y)
            .stride(&self.y, 0)
            .view(&self.z)
            .stride(&self.z, 0)
            .stride(&self.z, 1)
            .view(&self.post)
            .stride(&self.post, 0)
            .view(&self.comb)
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .dim(self.z.dim(0))
            .dim(self.z.dim(1))
            .dim(self.z.dim(2))
    }
}
