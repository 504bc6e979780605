//! The block input that residual streams make.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[t] = sum over j of pre[t, j] * z[t, j]`, summed in the order of j.
#[derive(Clone, Debug)]
pub struct HcWeightedSum {
    /// `[T, n, D]` F32: the residual streams.
    pub z: TensorView,
    /// `[T, n]` F32.
    pub pre: TensorView,
    /// `[T, D]` F32.
    pub out: TensorView,
}

impl Op for HcWeightedSum {
    fn name(&self) -> &'static str {
        "hc_weighted_sum"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.z, &self.pre]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.z, &mut self.pre]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("z", &self.z, &["T", "n", "D"])?;
        check.f32("z", &self.z)?;
        let (tokens, n, width) = (self.z.dim(0), self.z.dim(1), self.z.dim(2));
        check.f32("pre", &self.pre)?;
        check.shape("pre", &self.pre, &[tokens, n])?;
        check.f32("out", &self.out)?;
        check.shape("out", &self.out, &[tokens, width])?;
        check.apart("out", &self.out, &[("z", &self.z), ("pre", &self.pre)])
    }

    fn call(&self) -> Call {
        Call::pieces(self.z.dim(0), self.z.dim(2))
            .view(&self.z)
            .stride(&self.z, 0)
            .stride(&self.z, 1)
            .view(&self.pre)
            .stride(&self.pre, 0)
            .view(&self.out)
            .stride(&self.out, 0)
            .dim(self.z.dim(0))
            .dim(self.z.dim(1))
            .dim(self.z.dim(2))
    }
}
