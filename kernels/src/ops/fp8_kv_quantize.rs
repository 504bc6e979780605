//! Keys rounded as an 8-bit cache would have them.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// Rounds the elements before the last `rotated` of each row through E4M3, in groups of 64 (the last one may be shorter);
/// the others stay as they are. `out` may be `x`.
///
/// A group's scale is `2^ceil(log2(max(greatest, 1e-4) / 448))`; values over the scale are cut at ±448 and rounded to
/// nearest, ties to even. NaN stays NaN and is no greatest value; the exponent of a scale is at most 127. Source: the
/// inference code of DeepSeek V4, which keeps such keys; neither llama.cpp nor transformers does.
#[derive(Clone, Debug)]
pub struct Fp8KvQuantize {
    /// `[T, d]` or `[T, H, d]` F32.
    pub x: TensorView,
    /// How many of the last elements are left alone, less than `d`.
    pub rotated: usize,
    /// Shaped like `x`, F32.
    pub out: TensorView,
}

impl Fp8KvQuantize {
    /// Elements that share a scale.
    pub const GROUP: usize = 64;
}

impl Op for Fp8KvQuantize {
    fn name(&self) -> &'static str {
        "fp8_kv_quantize"
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
        if !(2..=3).contains(&self.x.rank()) {
            return Err(check.bad_shape("x", &self.x, "[T, d] or [T, H, d]".to_owned()));
        }
        check.floats_to(&self.x, &self.out)?;
        check.parameter(self.rotated < self.x.cols(), "rotated", self.rotated, "less than the width of a row")
    }

    fn call(&self) -> Call {
        let (heads, inner) = if self.x.rank() == 3 { (self.x.dim(1), 1) } else { (1, 3) };
        // A warp a group; blocks have eight warps.
        let groups = self.x.cols().div_ceil(Self::GROUP);
        let warps = self.x.dim(0).saturating_mul(heads).saturating_mul(groups);
        Call::new(warps.div_ceil(8).min(1 << 20))
            .view(&self.x)
            .stride(&self.x, 0)
            .stride(&self.x, inner)
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, inner)
            .dim(self.x.dim(0))
            .dim(heads)
            .dim(self.x.cols())
            .dim(self.rotated)
    }
}
