//! Root mean square norm.

use super::check::Check;
use super::{Call, Codes, Op, TensorView};
use crate::KernelError;

/// `out = gain * (residual + scale * x / sqrt(mean(x^2) + eps) * weight)` over the last dimension.
///
/// With three dimensions the norm is per head. `out` may be `x` or `residual`. The result goes to `out`, as codes to
/// `codes`, or both.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// `[T, D]` or `[T, H, d]` F32.
    pub x: TensorView,
    /// `[D]` or `[d]` F32; none means ones.
    pub weight: Option<TensorView>,
    /// Shaped like `x`, F32; none means zeros.
    pub residual: Option<TensorView>,
    /// Shaped like `x`, F32.
    pub out: Option<TensorView>,
    /// Shaped like `x`.
    pub codes: Option<Codes>,
    /// Added to the mean square; more than 0.
    pub eps: f32,
    /// Factor of the normed value, 1 for the plain norm.
    pub scale: f32,
    /// Factor of everything, 1 for the plain norm.
    pub gain: f32,
}

impl RmsNorm {
    /// The plain norm: no residual, factors 1.
    #[must_use]
    pub fn new(x: TensorView, weight: TensorView, out: TensorView, eps: f32) -> Self {
        let (weight, out) = (Some(weight), Some(out));
        Self { x, weight, residual: None, out, codes: None, eps, scale: 1.0, gain: 1.0 }
    }

    /// `h += norm(x) * weight`.
    #[must_use]
    pub fn add_to(h: TensorView, x: TensorView, weight: TensorView, eps: f32) -> Self {
        Self { residual: Some(h.clone()), ..Self::new(x, weight, h, eps) }
    }
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn reads(&self) -> Vec<&TensorView> {
        [Some(&self.x), self.weight.as_ref(), self.residual.as_ref()].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        let codes = self.codes.iter().flat_map(|codes| [&codes.q, &codes.scales]);
        self.out.iter().chain(codes).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        [Some(&mut self.x), self.weight.as_mut(), self.residual.as_mut()].into_iter().flatten().collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.f32("x", &self.x)?;
        if !(2..=3).contains(&self.x.rank()) {
            return Err(check.bad_shape("x", &self.x, "[T, D] or [T, H, d]".to_owned()));
        }
        if let Some(weight) = &self.weight {
            check.f32("weight", weight)?;
            check.shape("weight", weight, &[self.x.cols()])?;
        }
        if let Some(residual) = &self.residual {
            check.f32("residual", residual)?;
            check.shape("residual", residual, self.x.shape())?;
        }
        let inputs = [("x", Some(&self.x)), ("weight", self.weight.as_ref()), ("residual", self.residual.as_ref())];
        let inputs: Vec<_> = inputs.into_iter().filter_map(|(role, view)| Some((role, view?))).collect();
        check.results(&self.x, self.out.as_ref(), self.codes.as_ref(), &inputs)?;
        if let Some(out) = &self.out {
            for &(role, view) in &inputs {
                match role {
                    "weight" => check.apart("out", out, &[(role, view)])?,
                    _ => check.same_or_apart("out", out, role, view)?,
                }
            }
        }
        check.parameter(self.eps.is_finite() && self.eps > 0.0, "eps", self.eps, "positive")?;
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")?;
        check.parameter(self.gain.is_finite(), "gain", self.gain, "finite")
    }

    fn call(&self) -> Call {
        let heads = if self.x.rank() == 3 { self.x.dim(1) } else { 1 };
        let head = |call: Call, view: &TensorView| {
            let call = call.stride(view, 0);
            if view.rank() == 3 { call.stride(view, 1) } else { call.stride(view, 2) }
        };
        let residual = self.residual.as_ref();
        let call = Call::new(self.x.rows())
            .threads(self.x.cols(), 4)
            .view(&self.x)
            .optional(self.weight.as_ref())
            .optional(residual)
            .optional(self.out.as_ref())
            .dim(self.x.dim(0))
            .dim(heads)
            .dim(self.x.cols());
        let views = [Some(&self.x), residual, self.out.as_ref()];
        let call = views.into_iter().fold(call, |call, view| head(call, view.unwrap_or(&self.x)));
        call.float(self.eps).float(self.scale).float(self.gain).codes(self.codes.as_ref())
    }
}
