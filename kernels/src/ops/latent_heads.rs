//! Queries and latent rows made ready for attention over a compressed cache.

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Op, TensorView, Yarn};
use crate::KernelError;

/// Rotates the last part of each query head, and stores a row for all heads: `[norm(kv[..R]), rope(kv[R..])]`, at
/// `cache[positions[t]]`.
///
/// The same as [`RmsNorm`](super::RmsNorm), two [`Rope`](super::Rope) (interleaved pairs) and [`KvStore`](super::KvStore) in one
/// launch. A position outside the cache is a fault. Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434).
#[derive(Clone, Debug)]
pub struct LatentHeads {
    /// `[T, H, dr]` F32, dr even: what is rotated of the queries.
    pub q: TensorView,
    /// Shaped like `q`, F32: where it goes; may be `q`.
    pub out: TensorView,
    /// `[T, R + dr]` F32.
    pub kv: TensorView,
    /// `[R]` F32.
    pub norm: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[C, R + dr]` F32, F16 or BF16.
    pub cache: TensorView,
    /// Added to mean squares; more than 0.
    pub eps: f32,
    /// Frequency base (theta).
    pub base: f32,
    /// Factor of every angle.
    pub scale: f32,
    /// YaRN blending.
    pub yarn: Option<Yarn>,
    /// Factor of what is rotated.
    pub magnitude: f32,
}

/// Warps of a block.
const WARPS: usize = 4;

impl LatentHeads {
    /// Most elements that are rotated, or normed.
    pub const MOST: usize = 4096;
}

impl Op for LatentHeads {
    fn name(&self) -> &'static str {
        "latent_heads"
    }

    fn reads(&self) -> Vec<&TensorView> {
        // A row write leaves the rest of the cache as it was.
        vec![&self.q, &self.kv, &self.norm, &self.positions, &self.cache]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out, &self.cache]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.q, &mut self.kv, &mut self.norm, &mut self.positions]
    }

    fn writes_rows(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("q", &self.q, &["T", "H", "dr"])?;
        let (tokens, turned) = (self.q.dim(0), self.q.dim(2));
        for (role, view) in [("q", &self.q), ("out", &self.out), ("kv", &self.kv), ("norm", &self.norm)] {
            check.f32(role, view)?;
        }
        if !turned.is_multiple_of(2) || turned > Self::MOST {
            return Err(check.bad_shape("q", &self.q, "[T, H, even dr of at most 4096]".to_owned()));
        }
        check.shape("out", &self.out, self.q.shape())?;
        check.same_or_apart("out", &self.out, "q", &self.q)?;
        check.rank("norm", &self.norm, &["R"])?;
        let rank = self.norm.dim(0);
        check.shape("kv", &self.kv, &[tokens, rank + turned])?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        check.ty("cache", &self.cache, CACHE_TYPES, "F32, F16 or BF16")?;
        check.shape("cache", &self.cache, &[self.cache.dim(0), rank + turned])?;
        if tokens > self.cache.dim(0) {
            return Err(check.bad_shape("cache", &self.cache, format!("at least {tokens} rows")));
        }
        let inputs = [("kv", &self.kv), ("norm", &self.norm), ("positions", &self.positions)];
        check.apart("out", &self.out, &inputs)?;
        check.apart("cache", &self.cache, &inputs)?;
        check.apart("cache", &self.cache, &[("q", &self.q), ("out", &self.out)])?;
        check.parameter(self.eps.is_finite() && self.eps > 0.0, "eps", self.eps, "positive")?;
        check.parameter(self.base.is_finite() && self.base > 0.0, "base", self.base, "positive")?;
        check.parameter(self.scale.is_finite() && self.scale > 0.0, "scale", self.scale, "positive")?;
        check.parameter(self.magnitude.is_finite(), "magnitude", self.magnitude, "finite")?;
        self.yarn.map_or(Ok(()), |yarn| yarn.check(&check, self.base))
    }

    fn call(&self) -> Call {
        let (tokens, heads, turned) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        let yarn = self.yarn.unwrap_or(Yarn::NONE);
        // A warp for the norm of the row, and one for 32 pairs of each head and of the row; blocks take tokens in turns, since
        // what they know of the rotation serves all of them.
        let warps = 1 + (heads + 1).saturating_mul((turned / 2).div_ceil(32));
        let mut call = Call::new(warps.div_ceil(WARPS)).threads(32 * WARPS, 1);
        call.config.grid[1] = u32::try_from(tokens).unwrap_or(u32::MAX).clamp(1, 256);
        call.view(&self.q)
            .stride(&self.q, 0)
            .stride(&self.q, 1)
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .view(&self.kv)
            .stride(&self.kv, 0)
            .view(&self.norm)
            .view(&self.positions)
            .view(&self.cache)
            .stride(&self.cache, 0)
            .ty(&self.cache)
            .dim(self.cache.dim(0))
            .dim(tokens)
            .dim(heads)
            .dim(self.norm.dim(0))
            .dim(turned / 2)
            .float(self.eps)
            .float(self.base)
            .float(self.scale)
            .float(yarn.factor)
            .dim(yarn.original_context as usize)
            .float(yarn.beta_fast)
            .float(yarn.beta_slow)
            .float(self.magnitude)
    }
}
