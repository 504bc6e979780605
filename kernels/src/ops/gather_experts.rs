//! Copies of the chosen experts' weights.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[k] = W[ids[k]]`, as they are: brings experts from memory that is slow to read, such as the host's, to where their
/// products read them several times.
///
/// Only chosen experts are touched. For id -1 nothing is read or written; another id outside `0 .. E` is a fault.
#[derive(Clone, Debug)]
pub struct GatherExperts {
    /// `[E, out, in]`, any type; without gaps.
    pub w: TensorView,
    /// `[K]` I32, contiguous.
    pub ids: TensorView,
    /// `[K, out, in]`, of the type of `w`; without gaps.
    pub out: TensorView,
}

/// Blocks for each expert: enough loads in flight for a bus with a long way, and whole numbers of them for any device.
const BLOCKS: usize = 64;

impl Op for GatherExperts {
    fn name(&self) -> &'static str {
        "gather_experts"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.w, &self.ids]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.w, &mut self.ids]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("w", &self.w, &["E", "out", "in"])?;
        check.contiguous("w", &self.w)?;
        check.rank("ids", &self.ids, &["K"])?;
        check.i32("ids", &self.ids)?;
        check.contiguous("ids", &self.ids)?;
        check.shape("out", &self.out, &[self.ids.dim(0), self.w.dim(1), self.w.dim(2)])?;
        check.same_type("out", &self.out, &self.w, "the type of w")?;
        check.contiguous("out", &self.out)?;
        check.apart("out", &self.out, &[("w", &self.w), ("ids", &self.ids)])
    }

    fn call(&self) -> Call {
        let mut call = Call::new(BLOCKS);
        call.config.grid[1] = u32::try_from(self.ids.dim(0)).unwrap_or(u32::MAX).min(65535);
        call.view(&self.w).dim(self.w.dim(0)).stride(&self.w, 0).view(&self.ids).dim(self.ids.dim(0)).view(&self.out)
    }
}
