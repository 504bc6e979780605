//! Attention over a cache.

use evergraph_pool::driver::DeviceInfo;

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Codes, Launches, Op, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// `out = softmax(scale * q k^T, causal) v` with grouped heads; softmax and sums in `f32`.
///
/// Query `t` at position `p = positions[t]` sees the cache rows `max(0, p - window + 1) ..= p`, which must have been
/// stored before (its own among them). Head `h` uses key head `h / (H / Hkv)`. Work depends on the positions,
/// the grid on shapes only. A position outside the cache is a fault.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `[T, H, d]` F32.
    pub q: TensorView,
    /// `[C, Hkv, d]` F32, F16 or BF16.
    pub k: TensorView,
    /// `[C, Hkv, dv]`, the type of `k`.
    pub v: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[T, H, dv]` F32.
    pub out: TensorView,
    /// Factor of the scores.
    pub scale: f32,
    /// Sliding window in tokens, the query's own included; none means all before.
    pub window: Option<u32>,
    /// `c * tanh(score / c)` on scaled scores.
    pub softcap: Option<f32>,
    /// One more score per head `[H]` F32 that takes part in the denominator only.
    pub sinks: Option<TensorView>,
    /// Whether position `p` is in row `p mod C`; then `C >= window + T - 1`.
    pub ring: bool,
    /// The result as 8-bit integers too, which then has no gaps, as they.
    pub codes: Option<Codes>,
    /// Room to spread the keys of few tokens over a device. Without it, and for shapes that are not spread, blocks go by heads
    /// only.
    pub spread: Option<Spread>,
}

/// Where a device puts together what its blocks make of a slice of the keys each.
#[derive(Clone, Debug)]
pub struct Spread {
    /// `[n]` F32, contiguous; what is in it before and after is nobody's business. The more there is, up to
    /// [`Attention::room`], the more slices.
    pub room: TensorView,
    /// `[n]` I32 zeros, contiguous; zeros again afterwards. As many as [`Attention::counters`].
    pub counters: TensorView,
}

impl Attention {
    /// Most tokens whose keys are spread.
    pub const FEW: usize = 8;

    /// Most blocks that the keys of a launch are spread over.
    const BLOCKS: usize = 264;

    /// Floats that [`Spread`] is to have at most for so many tokens and heads over key heads, with values of width `dv`; none
    /// where keys are not spread.
    #[must_use]
    pub fn room(tokens: usize, heads: usize, kv_heads: usize, dv: usize) -> Option<usize> {
        let slots = Self::counters(tokens, heads, kv_heads)?;
        // Each block leaves the values of its rows, their greatest scores and their sums.
        let rows = Self::rows(heads / kv_heads);
        Some(slots.max(Self::BLOCKS * 8 / rows).saturating_mul(rows).saturating_mul(dv.saturating_add(2)))
    }

    /// Counters that [`Spread`] is to have; none where keys are not spread.
    #[must_use]
    pub fn counters(tokens: usize, heads: usize, kv_heads: usize) -> Option<usize> {
        let group = heads.checked_div(kv_heads).filter(|_| (1..=Self::FEW).contains(&tokens))?;
        Some(tokens * kv_heads * group.div_ceil(Self::rows(group)))
    }

    /// Whether the keys of few tokens can be spread for caches of this type and for heads of these widths.
    #[must_use]
    pub fn spreads(ty: QuantType, d: usize, dv: usize) -> bool {
        ty == QuantType::F16 && d.is_multiple_of(32) && (32..=576).contains(&d) && [64, 128, 256, 512].contains(&dv)
    }

    /// Heads of a key head that a block takes at most.
    pub(crate) fn rows(group: usize) -> usize {
        if group <= 8 { 8 } else { 16 }
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let mut list = vec![&self.q, &self.k, &self.v, &self.positions];
        list.extend(&self.sinks);
        list.extend(self.spread.iter().map(|spread| &spread.counters));
        list
    }

    fn writes(&self) -> Vec<&TensorView> {
        let codes = self.codes.iter().flat_map(|codes| [&codes.q, &codes.scales]);
        let spread = self.spread.iter().flat_map(|spread| [&spread.room, &spread.counters]);
        [&self.out].into_iter().chain(codes).chain(spread).collect()
    }

    fn leftovers(&self) -> Vec<&TensorView> {
        self.spread.iter().map(|spread| &spread.room).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        let list = [&mut self.q, &mut self.k, &mut self.v, &mut self.positions];
        list.into_iter().chain(&mut self.sinks).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("q", &self.q, &["T", "H", "d"])?;
        check.f32("q", &self.q)?;
        check.rank("k", &self.k, &["C", "Hkv", "d"])?;
        check.rank("v", &self.v, &["C", "Hkv", "dv"])?;
        check.ty("k", &self.k, CACHE_TYPES, "F32, F16 or BF16")?;
        check.ty("v", &self.v, &[self.k.ty()], "the type of k")?;
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        check.shape("k", &self.k, &[self.k.dim(0), self.k.dim(1), d])?;
        check.shape("v", &self.v, &[self.k.dim(0), self.k.dim(1), self.v.dim(2)])?;
        if !heads.is_multiple_of(self.k.dim(1)) {
            return Err(check.bad_shape("q", &self.q, format!("[T, a multiple of {} heads, d]", self.k.dim(1))));
        }
        check.f32("out", &self.out)?;
        check.shape("out", &self.out, &[tokens, heads, self.v.dim(2)])?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        if let Some(sinks) = &self.sinks {
            check.f32("sinks", sinks)?;
            check.shape("sinks", sinks, &[heads])?;
            check.apart("out", &self.out, &[("sinks", sinks)])?;
        }
        let inputs = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("positions", &self.positions)];
        check.apart("out", &self.out, &inputs)?;
        let inputs: Vec<_> = inputs.into_iter().chain(self.sinks.iter().map(|sinks| ("sinks", sinks))).collect();
        check.results(&self.out, Some(&self.out), self.codes.as_ref(), &inputs)?;
        if let Some(Codes { q, scales }) = &self.codes {
            for (role, view) in [("out", &self.out), ("codes", q), ("scales", scales)] {
                check.contiguous(role, view)?;
            }
        }
        if let Some(Spread { room, counters }) = &self.spread {
            check.rank("room", room, &["n"])?;
            check.f32("room", room)?;
            check.contiguous("room", room)?;
            check.rank("counters", counters, &["n"])?;
            check.i32("counters", counters)?;
            check.contiguous("counters", counters)?;
            check.apart("room", room, &[("counters", counters)])?;
            let codes = self.codes.iter().flat_map(|codes| [("codes", &codes.q), ("scales", &codes.scales)]);
            let others: Vec<_> = inputs.into_iter().chain([("out", &self.out)]).chain(codes).collect();
            check.apart("room", room, &others)?;
            check.apart("counters", counters, &others)?;
        }
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")?;
        check.parameter(self.window != Some(0), "window", self.window, "at least 1")?;
        check.parameter(self.softcap.is_none_or(|c| c.is_finite() && c > 0.0), "softcap", self.softcap, "positive")?;
        check.ring("k", &self.k, self.ring, self.window, tokens)
    }

    fn call(&self) -> Call {
        // A block takes up to eight rows (heads of a group, of as many tokens) of one key head; four of a single token, since
        // there are fewer blocks then than places for them.
        let most_rows: usize = if self.q.dim(0) == 1 { 4 } else { 8 };
        let (tokens, kv_heads) = (self.q.dim(0), self.k.dim(1));
        let group = self.q.dim(1) / kv_heads;
        let parts = group.div_ceil(most_rows);
        let tokens_of_block = most_rows / group.div_ceil(parts);
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).min(65535);
        let mut call = Call::new(tokens.div_ceil(tokens_of_block));
        call.config.grid[1..].copy_from_slice(&[narrow(kv_heads), narrow(parts)]);
        call.view(&self.q)
            .stride(&self.q, 0)
            .stride(&self.q, 1)
            .view(&self.k)
            .stride(&self.k, 0)
            .stride(&self.k, 1)
            .view(&self.v)
            .stride(&self.v, 0)
            .stride(&self.v, 1)
            .ty(&self.k)
            .view(&self.positions)
            .optional(self.sinks.as_ref())
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .dim(self.q.dim(0))
            .dim(self.q.dim(1))
            .dim(self.k.dim(1))
            .dim(self.q.dim(2))
            .dim(self.v.dim(2))
            .dim(self.k.dim(0))
            .dim(self.window.unwrap_or(0) as usize)
            .dim(usize::from(self.ring))
            .float(self.scale)
            .float(self.softcap.unwrap_or(0.0))
            .codes(self.codes.as_ref())
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::attention(self, device) } else { super::single(self) }
    }
}
