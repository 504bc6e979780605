//! One key for many: the compressed cache of DeepSeek V4.

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Op, TensorView, Yarn};
use crate::KernelError;

/// Makes the compressed key of each window of `r` tokens that ends at one of the launch's tokens, and nothing else: where a
/// window ends is seen on the device.
///
/// Token `p` has values `v` and gates `g`, `c` of each, in row `p mod C` of a ring. Window `w` covers tokens
/// `w r .. w r + r - 1`; its entry is `sum over p of softmax over p of (g_p + ape[p mod r]) * v_p`, channel by channel. With
/// overlap `c` is `2 d` and `2 r` slots take part: the first half of the channels of the window before (of none for
/// `w = 0`) and the second half of this one's. The entry is normed (`weight`), the pairs of its last `dims` elements are
/// rotated as by [`RopeTail`](super::RopeTail) at position `w r`, and it goes to row `w` of the cache. A position outside of
/// the cache's windows is a fault.
#[derive(Clone, Debug)]
pub struct CompressKeys {
    /// `[C, 2 c]` F32: values, then gates. `C >= r + T - 1`, with overlap `2 r + T - 1`.
    pub rows: TensorView,
    /// `[r, c]` F32, F16 or BF16, contiguous.
    pub ape: TensorView,
    /// `[d]` F32.
    pub weight: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[N, d]` F32, F16 or BF16, `d` at most 4096.
    pub cache: TensorView,
    /// Whether a window's entry takes in the window before.
    pub overlap: bool,
    /// Added to mean squares; more than 0.
    pub eps: f32,
    /// How many of the last elements are rotated.
    pub dims: usize,
    /// Frequency base (theta).
    pub base: f32,
    /// YaRN blending.
    pub yarn: Option<Yarn>,
}

/// An entry lies in shared memory while it is normed and rotated.
const MOST_WIDTH: usize = 4096;

impl Op for CompressKeys {
    fn name(&self) -> &'static str {
        "compress_keys"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.rows, &self.ape, &self.weight, &self.positions, &self.cache]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.cache]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.rows, &mut self.ape, &mut self.weight, &mut self.positions]
    }

    fn writes_rows(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("cache", &self.cache, &["N", "d"])?;
        check.ty("cache", &self.cache, CACHE_TYPES, "F32, F16 or BF16")?;
        let d = self.cache.dim(1);
        check.parameter(d <= MOST_WIDTH, "width", d, "at most 4096")?;
        let channels = if self.overlap { 2 * d } else { d };
        check.rank("ape", &self.ape, &["r", "c"])?;
        check.ty("ape", &self.ape, CACHE_TYPES, "F32, F16 or BF16")?;
        check.contiguous("ape", &self.ape)?;
        let ratio = self.ape.dim(0);
        check.shape("ape", &self.ape, &[ratio, channels])?;
        check.rank("positions", &self.positions, &["T"])?;
        check.i32("positions", &self.positions)?;
        check.f32("rows", &self.rows)?;
        let needed = ratio * (1 + usize::from(self.overlap)) + self.positions.dim(0) - 1;
        if self.rows.rank() != 2 || self.rows.dim(1) != 2 * channels || self.rows.dim(0) < needed {
            return Err(check.bad_shape("rows", &self.rows, format!("[at least {needed}, {}]", 2 * channels)));
        }
        check.f32("weight", &self.weight)?;
        check.shape("weight", &self.weight, &[d])?;
        let inputs =
            [("rows", &self.rows), ("ape", &self.ape), ("weight", &self.weight), ("positions", &self.positions)];
        check.apart("cache", &self.cache, &inputs)?;
        let fits = self.dims > 0 && self.dims.is_multiple_of(2) && self.dims <= d;
        check.parameter(fits, "dims", self.dims, "even, from 2 to the width of a key")?;
        check.parameter(self.eps.is_finite() && self.eps > 0.0, "eps", self.eps, "positive")?;
        check.parameter(self.base.is_finite() && self.base > 0.0, "base", self.base, "positive")?;
        self.yarn.as_ref().map_or(Ok(()), |yarn| yarn.check(&check, self.base))
    }

    fn call(&self) -> Call {
        let yarn = self.yarn.unwrap_or(Yarn::NONE);
        let d = self.cache.dim(1);
        Call::new(self.positions.dim(0))
            .shared_floats(d)
            .view(&self.rows)
            .stride(&self.rows, 0)
            .dim(self.rows.dim(0))
            .view(&self.ape)
            .ty(&self.ape)
            .view(&self.weight)
            .view(&self.positions)
            .view(&self.cache)
            .ty(&self.cache)
            .dim(self.cache.dim(0))
            .stride(&self.cache, 0)
            .dim(self.positions.dim(0))
            .dim(d)
            .dim(self.ape.dim(0))
            .dim(usize::from(self.overlap))
            .float(self.eps)
            .dim(self.dims)
            .float(self.base)
            .float(yarn.factor)
            .dim(yarn.original_context as usize)
            .float(yarn.beta_fast)
            .float(yarn.beta_slow)
    }
}
