//! The weights of hyper-connections.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// From the mixed vector of each token the weights by which its residual streams are read and written.
///
/// ```text
/// pre[j]       = sigmoid(m[j] * scale[0] + base[j]) + eps
/// post[j]      = 2 sigmoid(m[n + j] * scale[1] + base[n + j])
/// C[src][dst]  = m[2n + src n + dst] * scale[2] + base[2n + src n + dst]
/// C = softmax over dst + eps;  C /= sum over src + eps
/// iterations - 1 times:  C /= sum over dst + eps;  C /= sum over src + eps
/// ```
///
/// All in `f32`. Without a [mix](HcMix) only `pre` is made, as after the last block. Source: "mHC: Manifold-Constrained
/// Hyper-Connections" (arXiv 2512.24880), as DeepSeek V4 has it.
#[derive(Clone, Debug)]
pub struct HcSplitSinkhorn {
    /// `[T, (2 + n) n]` F32, or `[T, n]` without a mix.
    pub m: TensorView,
    /// `[3]` F32, or `[1]` without a mix.
    pub scale: TensorView,
    /// `[(2 + n) n]` F32, or `[n]` without a mix.
    pub base: TensorView,
    /// `[T, n]` F32, at most 32 streams.
    pub pre: TensorView,
    /// How a block's output and the streams make the next streams.
    pub mix: Option<HcMix>,
    /// Keeps sums from 0.
    pub eps: f32,
}

/// What writes the streams.
#[derive(Clone, Debug)]
pub struct HcMix {
    /// `[T, n]` F32: how much of the block's output goes to each stream.
    pub post: TensorView,
    /// `[T, n, n]` F32, contiguous: how much of each stream (second dimension) goes to each (third dimension).
    pub comb: TensorView,
    /// Rounds of scaling, at least 1.
    pub iterations: u32,
}

/// Most residual streams: a lane of a warp has a row.
const MOST_STREAMS: usize = 32;

impl Op for HcSplitSinkhorn {
    fn name(&self) -> &'static str {
        "hc_split_sinkhorn"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.m, &self.scale, &self.base]
    }

    fn writes(&self) -> Vec<&TensorView> {
        let mix = self.mix.iter().flat_map(|mix| [&mix.post, &mix.comb]);
        [&self.pre].into_iter().chain(mix).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.m, &mut self.scale, &mut self.base]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("pre", &self.pre, &["T", "n"])?;
        check.f32("pre", &self.pre)?;
        let (tokens, n) = (self.pre.dim(0), self.pre.dim(1));
        check.parameter(n <= MOST_STREAMS, "streams", n, "at most 32")?;
        let (width, scales) = if self.mix.is_some() { ((2 + n) * n, 3) } else { (n, 1) };
        for (role, view, shape) in
            [("m", &self.m, &[tokens, width][..]), ("scale", &self.scale, &[scales]), ("base", &self.base, &[width])]
        {
            check.f32(role, view)?;
            check.shape(role, view, shape)?;
            check.apart("pre", &self.pre, &[(role, view)])?;
        }
        if let Some(HcMix { post, comb, iterations }) = &self.mix {
            check.f32("post", post)?;
            check.shape("post", post, &[tokens, n])?;
            check.f32("comb", comb)?;
            check.shape("comb", comb, &[tokens, n, n])?;
            check.contiguous("comb", comb)?;
            check.parameter((1..=10_000).contains(iterations), "iterations", iterations, "from 1 to 10000")?;
            let inputs = [("m", &self.m), ("scale", &self.scale), ("base", &self.base), ("pre", &self.pre)];
            check.apart("post", post, &inputs)?;
            check.apart("comb", comb, &inputs)?;
            check.apart("comb", comb, &[("post", post)])?;
        }
        check.parameter(self.eps.is_finite() && self.eps >= 0.0, "eps", self.eps, "at least 0")
    }

    fn call(&self) -> Call {
        let (post, comb) = self.mix.as_ref().map(|mix| (&mix.post, &mix.comb)).unzip();
        // One warp a token; the matrix is in shared memory.
        Call::new(self.pre.dim(0))
            .threads(1, 1)
            .shared_floats(self.pre.dim(1) * self.pre.dim(1))
            .view(&self.m)
            .stride(&self.m, 0)
            .view(&self.scale)
            .view(&self.base)
            .view(&self.pre)
            .stride(&self.pre, 0)
            .optional(post)
            .optional_stride(post, 0)
            .optional(comb)
            .dim(self.pre.dim(0))
            .dim(self.pre.dim(1))
            .dim(self.mix.as_ref().map_or(0, |mix| mix.iterations as usize))
            .float(self.eps)
    }
}
