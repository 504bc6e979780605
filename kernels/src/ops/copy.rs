//! Copies with conversion and strides.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// `dst = src`, between F32, F16 and BF16 in any combination, or any type of one element per block to itself.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Up to three dimensions.
    pub src: TensorView,
    /// Shaped like `src`.
    pub dst: TensorView,
}

const FLOATS: [QuantType; 3] = [QuantType::F32, QuantType::F16, QuantType::BF16];

impl Op for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.src]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.dst]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.src]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        if self.src.rank() > 3 {
            return Err(check.bad_shape("src", &self.src, "at most three dimensions".to_owned()));
        }
        check.shape("dst", &self.dst, self.src.shape())?;
        let same = self.src.ty() == self.dst.ty() && self.src.ty().block_size() == 1;
        if !same {
            check.ty("src", &self.src, &FLOATS, "F32, F16 or BF16")?;
            check.ty("dst", &self.dst, &FLOATS, "F32, F16 or BF16")?;
        }
        check.apart("dst", &self.dst, &[("src", &self.src)])
    }

    fn call(&self) -> Call {
        // Fewer dimensions are leading ones of length 1.
        let axis = |view: &TensorView, from_end: usize| view.rank().checked_sub(from_end).unwrap_or(super::MAX_RANK);
        let dim = |from_end: usize| self.src.dim(axis(&self.src, from_end));
        Call::pieces(self.src.rows(), self.src.cols())
            .view(&self.src)
            .ty(&self.src)
            .stride(&self.src, axis(&self.src, 3))
            .stride(&self.src, axis(&self.src, 2))
            .view(&self.dst)
            .ty(&self.dst)
            .stride(&self.dst, axis(&self.dst, 3))
            .stride(&self.dst, axis(&self.dst, 2))
            .dim(dim(3))
            .dim(dim(2))
            .dim(dim(1))
    }
}
