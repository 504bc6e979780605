//! The last third of attention without fusion: the weighted sum of the values.

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[t, h] = sum over c of p[t, h, c] * v[c, h / (H / Hkv)]`, summed in the order of c. Rows with a weight of 0 are
/// not read, so what lies beyond the filled part of the cache does not matter.
#[derive(Clone, Debug)]
pub struct AttentionValues {
    /// `[T, H, C]` F32.
    pub p: TensorView,
    /// `[C, Hkv, dv]` F32, F16 or BF16.
    pub v: TensorView,
    /// `[T, H, dv]` F32.
    pub out: TensorView,
}

impl Op for AttentionValues {
    fn name(&self) -> &'static str {
        "attention_values"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.p, &self.v]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
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
        check.apart("out", &self.out, &[("p", &self.p), ("v", &self.v)])
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
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, 1)
            .dim(self.p.dim(0))
            .dim(self.p.dim(1))
            .dim(self.v.dim(1))
            .dim(self.v.dim(2))
            .dim(self.p.dim(2))
    }
}
