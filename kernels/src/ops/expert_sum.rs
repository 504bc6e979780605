//! The weighted sum of the experts' outputs.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// `out[t] = residual[t] + sum over k of weights[t, k] * expert_scale[ids[t, k]] * y[t, k]`, summed in the order of k.
///
/// Id -1 says that there is no expert: the factor is one then, and so a weight of 0 leaves nothing, since the products write zeros.
/// Another id outside `0 .. E` is a fault.
#[derive(Clone, Debug)]
pub struct ExpertSum {
    /// `[T, K, D]` F32.
    pub y: TensorView,
    /// `[T, K]` F32, contiguous.
    pub weights: TensorView,
    /// A factor per expert `[E]` F32 with the ids `[T, K]` I32 (contiguous); none means ones.
    pub expert_scale: Option<(TensorView, TensorView)>,
    /// `[T, D]` F32, may be `out`; none means zeros.
    pub residual: Option<TensorView>,
    /// `[T, D]` F32.
    pub out: TensorView,
}

impl Op for ExpertSum {
    fn name(&self) -> &'static str {
        "expert_sum"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let mut list = vec![&self.y, &self.weights];
        if let Some((scale, ids)) = &self.expert_scale {
            list.extend([scale, ids]);
        }
        list.extend(&self.residual);
        list
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        let scale = self.expert_scale.iter_mut().flat_map(|(scale, ids)| [scale, ids]);
        [&mut self.y, &mut self.weights].into_iter().chain(scale).chain(&mut self.residual).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("y", &self.y, &["T", "K", "D"])?;
        check.f32("y", &self.y)?;
        let (tokens, used, width) = (self.y.dim(0), self.y.dim(1), self.y.dim(2));
        check.f32("weights", &self.weights)?;
        check.shape("weights", &self.weights, &[tokens, used])?;
        check.contiguous("weights", &self.weights)?;
        check.f32("out", &self.out)?;
        check.shape("out", &self.out, &[tokens, width])?;
        check.apart("out", &self.out, &[("y", &self.y), ("weights", &self.weights)])?;
        if let Some((scale, ids)) = &self.expert_scale {
            check.rank("expert scale", scale, &["E"])?;
            check.f32("expert scale", scale)?;
            check.i32("ids", ids)?;
            check.shape("ids", ids, &[tokens, used])?;
            check.contiguous("ids", ids)?;
            check.apart("out", &self.out, &[("expert scale", scale), ("ids", ids)])?;
        }
        if let Some(residual) = &self.residual {
            check.f32("residual", residual)?;
            check.shape("residual", residual, &[tokens, width])?;
            check.same_or_apart("out", &self.out, "residual", residual)?;
        }
        Ok(())
    }

    fn call(&self) -> Call {
        let (scale, ids) = self.expert_scale.as_ref().map_or((None, None), |(s, i)| (Some(s), Some(i)));
        Call::pieces(self.y.dim(0), self.y.dim(2))
            .view(&self.y)
            .stride(&self.y, 0)
            .stride(&self.y, 1)
            .view(&self.weights)
            .optional(scale)
            .optional(ids)
            .dim(scale.map_or(0, |s| s.dim(0)))
            .optional(self.residual.as_ref())
            .stride(self.residual.as_ref().unwrap_or(&self.out), 0)
            .view(&self.out)
            .stride(&self.out, 0)
            .dim(self.y.dim(0))
            .dim(self.y.dim(1))
            .dim(self.y.dim(2))
    }
}
