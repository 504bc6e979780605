//! The compressed keys that a token attends to.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// The numbers of the K greatest scores among the entries that each token sees, ascending; all of them where there are no
/// more than K.
///
/// Token `t` sees entries `0 .. n`, `n = (positions[t] + 1) / ratio` rounded down, at most N. The first `min(n, K)` places
/// of its row are written. Of equal scores the lowest number is taken; NaN loses.
#[derive(Clone, Debug)]
pub struct IndexTop {
    /// `[T, N]` F32.
    pub scores: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[T, K]` I32.
    pub ids: TensorView,
    /// Tokens of an entry.
    pub ratio: u32,
}

impl Op for IndexTop {
    fn name(&self) -> &'static str {
        "index_top"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.scores, &self.positions]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.ids]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.scores, &mut self.positions]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("scores", &self.scores, &["T", "N"])?;
        check.f32("scores", &self.scores)?;
        let tokens = self.scores.dim(0);
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        check.rank("ids", &self.ids, &["T", "K"])?;
        check.i32("ids", &self.ids)?;
        check.shape("ids", &self.ids, &[tokens, self.ids.dim(1)])?;
        check.apart("ids", &self.ids, &[("scores", &self.scores), ("positions", &self.positions)])?;
        check.parameter(self.ratio > 0, "ratio", self.ratio, "at least 1")
    }

    fn call(&self) -> Call {
        Call::new(self.scores.dim(0))
            .view(&self.scores)
            .stride(&self.scores, 0)
            .view(&self.positions)
            .view(&self.ids)
            .stride(&self.ids, 0)
            .dim(self.scores.dim(0))
            .dim(self.scores.dim(1))
            .dim(self.ids.dim(1))
            .dim(self.ratio as usize)
    }
}
