//! The last third of attention without fusion: the weighted sum of the values.

use evergraph_pool::driver::DeviceInfo;

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Launches, Op, TensorView};
use crate::KernelError;

/// `out[t, h] = sum over c of p[t, h, c] * v[c, h / (H / Hkv)]`, over the rows that query `t` sees. Its weights of others do
/// not matter, nor does what lies in rows that it does not see. A position outside the cache is a fault.
///
/// What a query sees is as for [`AttentionScores`](super::AttentionScores).
#[derive(Clone, Debug)]
pub struct AttentionValues {
    /// `[T, H, C]` F32.
    pub p: TensorView,
    /// `[C, Hkv, dv]` F32, F16 or BF16.
    pub v: TensorView,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// `[T, H, dv]` F32.
    pub out: TensorView,
    /// Sliding window in tokens, the query's own included; none means all before.
    pub window: Option<u32>,
    /// Whether position `p` is in row `p mod C`; then `C >= window + T - 1`.
    pub ring: bool,
}

impl Op for AttentionValues {
    fn name(&self) -> &'static str {
        "attention_values"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.p, &self.v, &self.positions]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.p, &mut self.v, &mut self.positions]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("p", &self.p, &["T", "H", "C"])?;
        check.f32("p", &self.p)?;
        check.rank("v", &self.v, &["C", "Hkv", "dv"])?;
        check.ty("v", &self.v, CACHE_TYPES, "F32, F16 or BF16")?;
        let (tokens, heads, capacity) = (self.p.dim(0), self.p.dim(1), self.p.dim(2));
        check.shape("v", &self.v, &[capacity, self.v.dim(1), self.v.dim(2)])?;
        if !heads.is_multiple_of(self.v.dim(1)) {
            return Err(check.bad_shape("p", &self.p, format!("[T, a multiple of {} heads, C]", self.v.dim(1))));
        }
        check.f32("out", &self.out)?;
        check.shape("out", &self.out, &[tokens, heads, self.v.dim(2)])?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        check.apart("out", &self.out, &[("p", &self.p), ("v", &self.v), ("positions", &self.positions)])?;
        check.parameter(self.window != Some(0), "window", self.window, "at least 1")?;
        check.ring("v", &self.v, self.ring, self.window, tokens)
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::attention_values(self) } else { super::single(self) }
    }

    fn call(&self) -> Call {
        Call::new(self.p.dim(0).saturating_mul(self.p.dim(1)))
            .view(&self.p)
            .stride(&self.p, 0)
            .stride(&self.p, 1)
            .view(&self.v)
            .stride(&self.v, 0)
            .stride(&self.v, 1)
            .ty(&self.v)
            .view(&self.positions)
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .dim(self.p.dim(0))
            .dim(self.p.dim(1))
            .dim(self.v.dim(1))
            .dim(self.v.dim(2))
            .dim(self.p.dim(2))
            .dim(self.window.unwrap_or(0) as usize)
            .dim(usize::from(self.ring))
    }
}
