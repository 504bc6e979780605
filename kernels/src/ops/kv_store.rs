//! Row writes into a cache.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// `cache[positions[t]] = src[t]`, converted to the cache's type; with `ring`, at `positions[t] mod C`.
///
/// The result is seen as the whole cache with this write as its dependency. A position outside the cache
/// (negative, or `>= C` without `ring`) is a fault. Two tokens of a launch must not go to the same row.
#[derive(Clone, Debug)]
pub struct KvStore {
    /// `[T, N]` or `[T, H, d]` F32.
    pub src: TensorView,
    /// `[C, N]` or `[C, H, d]`: F32, F16 or BF16; C is the capacity in tokens.
    pub cache: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// Whether rows wrap around (sliding window layers).
    pub ring: bool,
}

/// Types that a cache may have.
pub(super) const CACHE_TYPES: &[QuantType] = &[QuantType::F32, QuantType::F16, QuantType::BF16];

impl Op for KvStore {
    fn name(&self) -> &'static str {
        "kv_store"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.src, &self.positions, &self.cache]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.cache]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.src, &mut self.positions]
    }

    fn writes_rows(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        if !(2..=3).contains(&self.src.rank()) {
            return Err(check.bad_shape("src", &self.src, "[T, N] or [T, H, d]".to_owned()));
        }
        check.f32("src", &self.src)?;
        check.ty("cache", &self.cache, CACHE_TYPES, "F32, F16 or BF16")?;
        let mut shape = self.src.shape().to_vec();
        shape[0] = self.cache.dim(0);
        check.shape("cache", &self.cache, &shape)?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[self.src.dim(0)])?;
        if self.src.dim(0) > self.cache.dim(0) {
            return Err(check.bad_shape("cache", &self.cache, format!("at least {} rows", self.src.dim(0))));
        }
        check.apart("cache", &self.cache, &[("src", &self.src), ("positions", &self.positions)])
    }

    fn call(&self) -> Call {
        let heads = if self.src.rank() == 3 { self.src.dim(1) } else { 1 };
        // Two dimensions are one head of all columns.
        let inner = if self.src.rank() == 3 { 1 } else { 3 };
        Call::pieces(self.src.dim(0), heads.saturating_mul(self.src.cols()))
            .view(&self.src)
            .stride(&self.src, 0)
            .stride(&self.src, inner)
            .view(&self.positions)
            .view(&self.cache)
            .ty(&self.cache)
            .dim(self.cache.dim(0))
            .stride(&self.cache, 0)
            .stride(&self.cache, inner)
            .dim(self.src.dim(0))
            .dim(heads)
            .dim(self.src.cols())
            .dim(usize::from(self.ring))
    }
}
