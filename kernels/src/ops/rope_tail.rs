//! Rotary position embedding of the last elements of a head.

use super::check::Check;
use super::rope::turning;
use super::{Call, Op, TensorView, Yarn};
use crate::KernelError;

/// Rotates pairs `(x[2i], x[2i + 1])` of the last `dims` elements of each head by `position * base^(-2i/dims)`, blended by
/// YaRN where it is given; angles in `f32`. The elements before them stay as they are. `out` may be `x`.
///
/// Source: DeepSeek V4's attention, whose keys are values too and carry their rotation in the last elements; `inverse` takes
/// it out of what attention made of them.
#[derive(Clone, Debug)]
pub struct RopeTail {
    /// `[T, H, d]` F32.
    pub x: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// Shaped like `x`, F32.
    pub out: TensorView,
    /// How many of the last elements are rotated: even, at most `d`.
    pub dims: usize,
    /// Frequency base (theta).
    pub base: f32,
    /// YaRN blending.
    pub yarn: Option<Yarn>,
    /// Rotates back (by the negative angle).
    pub inverse: bool,
}

impl RopeTail {
    /// Rotation in place, without blending.
    #[must_use]
    pub fn new(x: TensorView, positions: TensorView, dims: usize, base: f32) -> Self {
        let out = x.clone();
        Self { x, positions, out, dims, base, yarn: None, inverse: false }
    }
}

impl Op for RopeTail {
    fn name(&self) -> &'static str {
        "rope_tail"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.x, &self.positions]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.x, &mut self.positions]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.turned(&self.x, &self.out, &self.positions)?;
        let fits = self.dims > 0 && self.dims.is_multiple_of(2) && self.dims <= self.x.cols();
        check.parameter(fits, "dims", self.dims, "even, from 2 to the width of a head")?;
        check.parameter(self.base.is_finite() && self.base > 0.0, "base", self.base, "positive")?;
        self.yarn.as_ref().map_or(Ok(()), |yarn| yarn.check(&check, self.base))
    }

    fn call(&self) -> Call {
        let yarn = self.yarn.unwrap_or(Yarn::NONE);
        turning(&self.x, &self.out, &self.positions)
            .dim(self.dims)
            .dim(usize::from(self.inverse))
            .float(self.base)
            .float(yarn.factor)
            .dim(yarn.original_context as usize)
            .float(yarn.beta_fast)
            .float(yarn.beta_slow)
    }
}
