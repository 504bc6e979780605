//! Attention over a window of keys and compressed ones before it.

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// Attention of all heads over one set of keys that are values too: the last `window` tokens, and compressed entries.
///
/// Query `t` at position `p` sees the tokens `max(0, p - window + 1) ..= p`, each in row `position mod C` of `keys`, and
/// the [entries](Entries) `w < (p + 1) / ratio`: all, or those that a list names. `out = sum of softmax(scale * q . key) * key`,
/// with a sink per head that takes part in the denominator only. Softmax and sums in `f32`.
#[derive(Clone, Debug)]
pub struct CompressedAttention {
    /// `[T, H, d]` F32, `d` at most 1024.
    pub q: TensorView,
    /// `[C, d]` F32, F16 or BF16; `C >= window + T - 1`, or more than any position.
    pub keys: TensorView,
    /// Compressed entries, if the layer has such.
    pub entries: Option<Entries>,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[H]` F32.
    pub sinks: Option<TensorView>,
    /// `[T, H, d]` F32.
    pub out: TensorView,
    /// Factor of the scores.
    pub scale: f32,
    /// Sliding window in tokens, the query's own included.
    pub window: u32,
    /// Whether tokens may lie beyond row `C`: rows are used again.
    pub ring: bool,
}

/// Compressed entries of a cache.
#[derive(Clone, Debug)]
pub struct Entries {
    /// `[N, d]`, the type of the keys.
    pub cache: TensorView,
    /// Tokens of an entry.
    pub ratio: u32,
    /// `[T, K]` I32: the numbers of those that count, in the first `min(K, those that are seen)` places; none: all do. A
    /// number that is not seen is a fault.
    pub chosen: Option<TensorView>,
}

/// A thread keeps four sums of each head.
const MOST_WIDTH: usize = 1024;

impl Op for CompressedAttention {
    fn name(&self) -> &'static str {
        "compressed_attention"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let mut list = vec![&self.q, &self.keys, &self.positions];
        list.extend(&self.sinks);
        if let Some(entries) = &self.entries {
            list.push(&entries.cache);
            list.extend(&entries.chosen);
        }
        list
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        let entries = self.entries.iter_mut();
        let entries =
            entries.flat_map(|entries| [Some(&mut entries.cache), entries.chosen.as_mut()].into_iter().flatten());
        let list = [&mut self.q, &mut self.keys, &mut self.positions];
        list.into_iter().chain(&mut self.sinks).chain(entries).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("q", &self.q, &["T", "H", "d"])?;
        check.f32("q", &self.q)?;
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        check.parameter(d <= MOST_WIDTH, "width", d, "at most 1024")?;
        check.ty("keys", &self.keys, CACHE_TYPES, "F32, F16 or BF16")?;
        check.shape("keys", &self.keys, &[self.keys.dim(0), d])?;
        check.f32("out", &self.out)?;
        check.shape("out", &self.out, &[tokens, heads, d])?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        check.apart("out", &self.out, &[("q", &self.q), ("keys", &self.keys), ("positions", &self.positions)])?;
        if let Some(sinks) = &self.sinks {
            check.f32("sinks", sinks)?;
            check.shape("sinks", sinks, &[heads])?;
            check.apart("out", &self.out, &[("sinks", sinks)])?;
        }
        if let Some(Entries { cache, ratio, chosen }) = &self.entries {
            check.ty("entries", cache, &[self.keys.ty()], "the type of the keys")?;
            check.shape("entries", cache, &[cache.dim(0), d])?;
            check.parameter(*ratio > 0, "ratio", ratio, "at least 1")?;
            check.apart("out", &self.out, &[("entries", cache)])?;
            if let Some(chosen) = chosen {
                check.i32("chosen", chosen)?;
                check.shape("chosen", chosen, &[tokens, chosen.dim(1)])?;
                check.apart("out", &self.out, &[("chosen", chosen)])?;
            }
        }
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")?;
        check.parameter(self.window > 0, "window", self.window, "at least 1")?;
        check.ring("keys", &self.keys, self.ring, Some(self.window), tokens)
    }

    fn call(&self) -> Call {
        let (cache, chosen) = match &self.entries {
            Some(entries) => (Some(&entries.cache), entries.chosen.as_ref()),
            None => (None, None),
        };
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        // Heads share what they read of a key; a single token's are spread over more blocks.
        let rows = if tokens < 16 { 2 } else { 8 };
        let mut call = Call::new(tokens);
        call.config.grid[1] = u32::try_from(heads.div_ceil(rows)).unwrap_or(u32::MAX).min(65535);
        call.shared_floats(rows * d)
            .view(&self.q)
            .stride(&self.q, 0)
            .stride(&self.q, 1)
            .view(&self.keys)
            .ty(&self.keys)
            .dim(self.keys.dim(0))
            .stride(&self.keys, 0)
            .optional(cache)
            .dim(cache.map_or(0, |cache| cache.dim(0)))
            .optional_stride(cache, 0)
            .optional(chosen)
            .dim(chosen.map_or(0, |chosen| chosen.dim(1)))
            .optional_stride(chosen, 0)
            .view(&self.positions)
            .optional(self.sinks.as_ref())
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .dim(tokens)
            .dim(heads)
            .dim(d)
            .dim(self.window as usize)
            .dim(self.entries.as_ref().map_or(1, |entries| entries.ratio as usize))
            .dim(usize::from(self.ring))
            .dim(rows)
            .float(self.scale)
    }
}
