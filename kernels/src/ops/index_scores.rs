//! How much compressed keys matter to a token.

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `scores[t, w] = scale * sum over h of weights[t, h] * max(q[t, h] . keys[w], 0)` for the entries that token `t` sees:
/// `w < (positions[t] + 1) / ratio`, rounded down. Scores of the others are not written.
///
/// Source: the lightning indexer of DeepSeek V3.2 and V4.
#[derive(Clone, Debug)]
pub struct IndexScores {
    /// `[T, H, d]` F32, `(H + 16) (d + 1)` at most 12288.
    pub q: TensorView,
    /// `[T, H]` F32.
    pub weights: TensorView,
    /// `[N, d]` F32, F16 or BF16.
    pub keys: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[T, N]` F32.
    pub scores: TensorView,
    /// Tokens of an entry.
    pub ratio: u32,
    /// Factor of the scores.
    pub scale: f32,
}

/// Entries that a block scores at a time.
const ENTRIES: usize = 16;

/// Floats of shared memory: a token's queries and some keys.
const MOST_FLOATS: usize = 12_288;

impl Op for IndexScores {
    fn name(&self) -> &'static str {
        "index_scores"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.q, &self.weights, &self.keys, &self.positions]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.scores]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.q, &mut self.weights, &mut self.keys, &mut self.positions]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("q", &self.q, &["T", "H", "d"])?;
        check.f32("q", &self.q)?;
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        let floats = (heads + ENTRIES).saturating_mul(d + 1);
        check.parameter(floats <= MOST_FLOATS, "(H + 16) (d + 1)", floats, "at most 12288")?;
        check.f32("weights", &self.weights)?;
        check.shape("weights", &self.weights, &[tokens, heads])?;
        check.ty("keys", &self.keys, CACHE_TYPES, "F32, F16 or BF16")?;
        check.shape("keys", &self.keys, &[self.keys.dim(0), d])?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        check.f32("scores", &self.scores)?;
        check.shape("scores", &self.scores, &[tokens, self.keys.dim(0)])?;
        let inputs = [("q", &self.q), ("weights", &self.weights), ("keys", &self.keys), ("positions", &self.positions)];
        check.apart("scores", &self.scores, &inputs)?;
        check.parameter(self.ratio > 0, "ratio", self.ratio, "at least 1")?;
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")
    }

    fn call(&self) -> Call {
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        // Blocks for all entries that there can be; those of entries that nobody sees end at once.
        let mut call = Call::new(self.keys.dim(0).div_ceil(ENTRIES).min(4096));
        call.config.grid[1] = u32::try_from(tokens).unwrap_or(u32::MAX).min(65535);
        call.shared_floats((heads + ENTRIES) * (d + 1))
            .view(&self.q)
            .stride(&self.q, 0)
            .stride(&self.q, 1)
            .view(&self.weights)
            .stride(&self.weights, 0)
            .view(&self.keys)
            .ty(&self.keys)
            .stride(&self.keys, 0)
            .view(&self.positions)
            .view(&self.scores)
            .stride(&self.scores, 0)
            .dim(tokens)
            .dim(heads)
            .dim(d)
            .dim(self.keys.dim(0))
            .dim(self.ratio as usize)
            .float(self.scale)
    }
}
