//! Matrix product with the chosen experts' weights.

use evergraph_pool::driver::DeviceInfo;

use super::check::Check;
use super::{Call, Launches, Op, TensorView};
use crate::KernelError;

/// `y[t, k] = W[ids[t, k]] x[t]`, or `… x[t, k]` where each slot has its own input (the down projection).
///
/// Merged gate and up weights are one such product with `out = 2 F`; narrow `y` for the two halves.
/// Only chosen experts' weights are touched. Id -1 says that there is no expert: zeros are written. Another id outside `0 .. E`, or
/// `0 .. E + S` where there are [`more`](Self::more), is a fault. Activations are floats, or quantised as
/// in [`MatMul`](super::MatMul).
#[derive(Clone, Debug)]
pub struct ExpertMatMul {
    /// `[E, out, in]`, any supported type; without gaps.
    pub w: TensorView,
    /// `[T, in]` or `[T, K, in]`, F32, or I8 with `scales`.
    pub x: TensorView,
    /// `[T, in / 32, 2]` or `[T, K, in / 32, 2]` F32, those of [`Quantize`](super::Quantize); none for an `x` of floats.
    pub scales: Option<TensorView>,
    /// `[T, K]` I32, contiguous, in device memory.
    pub ids: TensorView,
    /// `[T, K, out]` F32.
    pub y: TensorView,
    /// `[S, out, in]`, of the type of `w` and as it without gaps: experts `E .. E + S`, which are elsewhere.
    pub more: Option<TensorView>,
}

impl ExpertMatMul {
    /// The products with activations of floats.
    #[must_use]
    pub fn new(w: TensorView, x: TensorView, ids: TensorView, y: TensorView) -> Self {
        Self { w, x, scales: None, ids, y, more: None }
    }

    /// The products with quantised activations.
    #[must_use]
    pub fn quantized(w: TensorView, q: TensorView, scales: TensorView, ids: TensorView, y: TensorView) -> Self {
        Self { w, x: q, scales: Some(scales), ids, y, more: None }
    }
}

impl Op for ExpertMatMul {
    fn name(&self) -> &'static str {
        "expert_matmul"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let list = [Some(&self.w), Some(&self.x), self.scales.as_ref(), Some(&self.ids), self.more.as_ref()];
        list.into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.y]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        let list =
            [Some(&mut self.w), Some(&mut self.x), self.scales.as_mut(), Some(&mut self.ids), self.more.as_mut()];
        list.into_iter().flatten().collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("w", &self.w, &["E", "out", "in"])?;
        check.weight("w", &self.w)?;
        check.contiguous("w", &self.w)?;
        check.rank("ids", &self.ids, &["T", "K"])?;
        check.i32("ids", &self.ids)?;
        check.contiguous("ids", &self.ids)?;
        let (tokens, used) = (self.ids.dim(0), self.ids.dim(1));
        let (cols, groups) = (self.w.dim(2), self.w.dim(2) / 32);
        check.activations(&self.w, &self.x, self.scales.as_ref())?;
        let per_slot = self.x.rank() == 3;
        let shape: &[usize] = if per_slot { &[tokens, used, cols] } else { &[tokens, cols] };
        check.shape("x", &self.x, shape)?;
        check.f32("y", &self.y)?;
        check.shape("y", &self.y, &[tokens, used, self.w.dim(1)])?;
        if let Some(scales) = &self.scales {
            let shape: &[usize] = if per_slot { &[tokens, used, groups, 2] } else { &[tokens, groups, 2] };
            check.shape("scales", scales, shape)?;
            check.apart("y", &self.y, &[("scales", scales)])?;
        }
        if let Some(more) = &self.more {
            check.rank("more", more, &["S", "out", "in"])?;
            check.shape("more", more, &[more.dim(0), self.w.dim(1), cols])?;
            check.same_type("more", more, &self.w, "the type of w")?;
            check.contiguous("more", more)?;
            check.apart("y", &self.y, &[("more", more)])?;
        }
        check.apart("y", &self.y, &[("w", &self.w), ("x", &self.x), ("ids", &self.ids)])
    }

    fn call(&self) -> Call {
        let slots = self.ids.dim(0).saturating_mul(self.ids.dim(1));
        let call = Call::new(slots.saturating_mul(self.w.dim(1).div_ceil(64)))
            .view(&self.w)
            .ty(&self.w)
            .dim(self.w.dim(0))
            .dim(self.w.dim(1))
            .dim(self.w.dim(2))
            .view(&self.ids)
            .dim(self.ids.dim(0))
            .dim(self.ids.dim(1))
            .view(&self.x)
            .stride(&self.x, 0);
        // A shared input has stride 0 from slot to slot.
        let slot = if self.x.rank() == 3 { 1 } else { super::MAX_RANK };
        call.stride(&self.x, slot)
            .view(&self.y)
            .stride(&self.y, 0)
            .stride(&self.y, 1)
            .optional(self.scales.as_ref())
            .optional_stride(self.scales.as_ref(), 0)
            .optional_stride(self.scales.as_ref(), slot)
            .optional(self.more.as_ref())
            .dim(self.more.as_ref().map_or(0, |more| more.dim(0)))
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::expert_matmul(self, device) } else { super::single(self) }
    }
}
