//! Rotary position embedding.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// Which elements are rotated together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeKind {
    /// `(x[i], x[i + n/2])`: Gemma.
    Neox,
    /// `(x[2i], x[2i + 1])`: DeepSeek.
    Interleaved,
}

/// Frequency blending of YaRN.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Yarn {
    /// Interpolation factor `s`, at least 1.
    pub factor: f32,
    /// Context length of the original training, tokens.
    pub original_context: u32,
    /// Rotations at the fast end of the ramp (32 in most files).
    pub beta_fast: f32,
    /// Rotations at the slow end of the ramp (1 in most files).
    pub beta_slow: f32,
}

impl Yarn {
    /// What an op that blends frequencies of this base asks of it.
    pub(super) fn check(&self, check: &Check, base: f32) -> Result<(), KernelError> {
        let Self { factor, original_context, beta_fast, beta_slow } = *self;
        check.parameter(factor.is_finite() && factor >= 1.0, "yarn.factor", factor, "at least 1")?;
        check.parameter(original_context > 0, "yarn.original_context", 0, "positive")?;
        let positive = |beta: f32| beta.is_finite() && beta > 0.0;
        check.parameter(positive(beta_fast) && positive(beta_slow), "yarn.beta", (beta_fast, beta_slow), "positive")?;
        check.parameter(base > 1.0, "base", base, "above 1 with YaRN")
    }

    /// Without any.
    pub(super) const NONE: Self = Self { factor: 1.0, original_context: 0, beta_fast: 32.0, beta_slow: 1.0 };
}

/// Rotates pairs of the last dimension by `position * base^(-2i/n) / factors[i] * scale`, angles in `f32`.
///
/// All of the last dimension (`n = d`) is rotated: for partial rotation give a narrowed view. `out` may be `x`.
/// Source: "RoFormer" (arXiv 2104.09864); blending: "YaRN" (arXiv 2309.00071).
#[derive(Clone, Debug)]
pub struct Rope {
    /// `[T, H, d]` F32, d even.
    pub x: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// Shaped like `x`, F32.
    pub out: TensorView,
    /// Pairing.
    pub kind: RopeKind,
    /// Frequency base (theta).
    pub base: f32,
    /// Factor of every angle: 1 / `rope.scaling.factor` for linear scaling, else 1.
    pub scale: f32,
    /// Frequency divisors `[d / 2]` F32; none means ones.
    pub factors: Option<TensorView>,
    /// YaRN blending; excludes `factors`.
    pub yarn: Option<Yarn>,
    /// Rotates back (by the negative angle).
    pub inverse: bool,
}

impl Rope {
    /// Half-split rotation in place.
    #[must_use]
    pub fn neox(x: TensorView, positions: TensorView, base: f32, scale: f32) -> Self {
        let out = x.clone();
        Self { x, positions, out, kind: RopeKind::Neox, base, scale, factors: None, yarn: None, inverse: false }
    }

    /// Interleaved rotation in place.
    #[must_use]
    pub fn interleaved(x: TensorView, positions: TensorView, base: f32) -> Self {
        Self { kind: RopeKind::Interleaved, ..Self::neox(x, positions, base, 1.0) }
    }
}

/// The launch and the first arguments of a kernel that turns heads.
pub(super) fn turning(x: &TensorView, out: &TensorView, positions: &TensorView) -> Call {
    // A single token's heads are spread over blocks, which then compute the same turns; with many tokens each
    // block computes them once for all heads.
    let mut call = Call::new(x.dim(0));
    call.config.grid[1] = match x.dim(0) {
        0..64 => u32::try_from(x.dim(1).div_ceil(4)).unwrap_or(u32::MAX).min(64),
        _ => 1,
    };
    call.view(x)
        .stride(x, 0)
        .stride(x, 1)
        .view(positions)
        .view(out)
        .stride(out, 0)
        .stride(out, 1)
        .dim(x.dim(0))
        .dim(x.dim(1))
        .dim(x.dim(2))
}

impl Op for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn reads(&self) -> Vec<&TensorView> {
        [Some(&self.x), Some(&self.positions), self.factors.as_ref()].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        [Some(&mut self.x), Some(&mut self.positions), self.factors.as_mut()].into_iter().flatten().collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.turned(&self.x, &self.out, &self.positions)?;
        if !self.x.cols().is_multiple_of(2) {
            return Err(check.bad_shape("x", &self.x, "[T, H, even d]".to_owned()));
        }
        if let Some(factors) = &self.factors {
            check.f32("factors", factors)?;
            check.shape("factors", factors, &[self.x.cols() / 2])?;
            check.apart("out", &self.out, &[("factors", factors)])?;
        }
        check.parameter(self.base.is_finite() && self.base > 0.0, "base", self.base, "positive")?;
        check.parameter(self.scale.is_finite() && self.scale > 0.0, "scale", self.scale, "positive")?;
        if let Some(yarn) = &self.yarn {
            check.parameter(self.factors.is_none(), "yarn", yarn, "absent where frequency factors are given")?;
            yarn.check(&check, self.base)?;
        }
        Ok(())
    }

    fn call(&self) -> Call {
        let yarn = self.yarn.unwrap_or(Yarn::NONE);
        turning(&self.x, &self.out, &self.positions)
            .dim(match self.kind {
                RopeKind::Neox => 0,
                RopeKind::Interleaved => 1,
            })
            .dim(usize::from(self.inverse))
            .float(self.base)
            .float(self.scale)
            .optional(self.factors.as_ref())
            .float(yarn.factor)
            .dim(yarn.original_context as usize)
            .float(yarn.beta_fast)
            .float(yarn.beta_slow)
    }
}
