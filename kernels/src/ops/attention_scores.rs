//! The first third of attention without fusion: scores, written out.

use evergraph_pool::driver::DeviceInfo;

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Launches, Op, TensorView};
use crate::KernelError;

/// `scores[t, h, c] = scale * q[t, h] k[c, h / (H / Hkv)]` for every row the query may see, `-inf` for the others.
///
/// Query `t` at position `p = positions[t]` sees the rows of the positions `max(0, p - window + 1) ..= p`; others are not
/// read. Followed by [`SoftMax`](super::SoftMax) and [`AttentionValues`](super::AttentionValues) this is
/// [`Attention`](super::Attention) with its scores in memory: scratch that grows with tokens × heads × capacity. A view of
/// the first rows of a cache is a cache of that capacity. A position outside the cache is a fault.
#[derive(Clone, Debug)]
pub struct AttentionScores {
    /// `[T, H, d]` F32.
    pub q: TensorView,
    /// `[C, Hkv, d]` F32, F16 or BF16.
    pub k: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[T, H, C]` F32.
    pub scores: TensorView,
    /// Factor of the scores.
    pub scale: f32,
    /// Sliding window in tokens, the query's own included; none means all before.
    pub window: Option<u32>,
    /// `c * tanh(score / c)` on scaled scores.
    pub softcap: Option<f32>,
    /// Whether position `p` is in row `p mod C`; then `C >= window + T - 1`.
    pub ring: bool,
}

impl Op for AttentionScores {
    fn name(&self) -> &'static str {
        "attention_scores"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.q, &self.k, &self.positions]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.scores]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.q, &mut self.k, &mut self.positions]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("q", &self.q, &["T", "H", "d"])?;
        check.f32("q", &self.q)?;
        check.rank("k", &self.k, &["C", "Hkv", "d"])?;
        check.ty("k", &self.k, CACHE_TYPES, "F32, F16 or BF16")?;
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        check.shape("k", &self.k, &[self.k.dim(0), self.k.dim(1), d])?;
        if !heads.is_multiple_of(self.k.dim(1)) {
            return Err(check.bad_shape("q", &self.q, format!("[T, a multiple of {} heads, d]", self.k.dim(1))));
        }
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        check.f32("scores", &self.scores)?;
        check.shape("scores", &self.scores, &[tokens, heads, self.k.dim(0)])?;
        check.apart("scores", &self.scores, &[("q", &self.q), ("k", &self.k), ("positions", &self.positions)])?;
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")?;
        check.parameter(self.window != Some(0), "window", self.window, "at least 1")?;
        check.parameter(self.softcap.is_none_or(|c| c.is_finite() && c > 0.0), "softcap", self.softcap, "positive")?;
        check.ring("k", &self.k, self.ring, self.window, tokens)
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::attention_scores(self) } else { super::single(self) }
    }

    fn call(&self) -> Call {
        Call::new(self.q.dim(0).saturating_mul(self.q.dim(1)))
            .view(&self.q)
            .stride(&self.q, 0)
            .stride(&self.q, 1)
            .view(&self.k)
            .stride(&self.k, 0)
            .stride(&self.k, 1)
            .ty(&self.k)
            .view(&self.positions)
            .view(&self.scores)
            .stride(&self.scores, 0)
            .stride(&self.scores, 1)
            .dim(self.q.dim(0))
            .dim(self.q.dim(1))
            .dim(self.k.dim(1))
            .dim(self.q.dim(2))
            .dim(self.k.dim(0))
            .dim(self.window.unwrap_or(0) as usize)
            .dim(usize::from(self.ring))
            .float(self.scale)
            .float(self.softcap.unwrap_or(0.0))
    }
}
