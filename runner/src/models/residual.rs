//! The residual stream: what parts add to it, and the norms of it that come next.

use evergraph_kernels::ops::{Add, Copy, Normed, Part, ResidualNorm, RmsNorm, TensorView};

use super::input::Input;
use crate::engine::Step;
use crate::error::Result;

/// A norm of the residual stream, as the input of what reads it.
#[derive(Debug)]
pub(super) struct Wanted {
    /// `[D]`.
    weight: TensorView,
    scale: f32,
    input: Input,
}

impl Wanted {
    /// The norm with this weight and factor, to be written as `input`.
    pub(super) fn new(weight: &TensorView, scale: f32, input: Input) -> Self {
        Self { weight: weight.clone(), scale, input }
    }

    /// What it is written as.
    pub(super) fn input(&self) -> &Input {
        &self.input
    }

    /// Appends the norm of `h` (`[T, D]`) alone.
    pub(super) fn norm(&self, step: &mut Step<'_>, h: &TensorView, eps: f32) -> Result<()> {
        let norm = RmsNorm::new(h.clone(), self.weight.clone(), h.clone(), eps);
        self.input.norm(step, RmsNorm { scale: self.scale, ..norm })
    }

    fn normed(&self) -> Normed {
        let (weight, scale) = (self.weight.clone(), self.scale);
        Normed { weight, scale, out: self.input.out(), codes: self.input.codes().cloned() }
    }
}

/// Appends a sum onto the residual stream (without norms of its result) and what is wanted of it next, in as few kernels as
/// there is room for in one.
pub(super) fn add<'a>(
    step: &mut Step<'_>,
    sum: ResidualNorm,
    wanted: impl IntoIterator<Item = &'a Wanted>,
) -> Result<()> {
    let (h, eps) = (sum.h.clone(), sum.eps);
    let mut wanted = wanted.into_iter();
    let normed = wanted.by_ref().take(ResidualNorm::MOST_NORMED).map(Wanted::normed).collect();
    step.push(ResidualNorm { normed, ..sum })?;
    wanted.try_for_each(|wanted| wanted.norm(step, &h, eps))
}

/// Appends the sum of parts, into `y`, where the first one may be.
pub(super) fn fold(step: &mut Step<'_>, parts: &[Part], y: &TensorView, eps: f32) -> Result<()> {
    for (index, Part { x, norm }) in parts.iter().enumerate() {
        let (x, out) = (x.clone(), y.clone());
        match (norm.clone(), index) {
            (Some(norm), 0) => step.push(RmsNorm::new(x, norm, out, eps))?,
            (Some(norm), _) => step.push(RmsNorm::add_to(out, x, norm, eps))?,
            (None, 0) if x == out => {}
            (None, 0) => step.push(Copy { src: x, dst: out })?,
            (None, _) => step.push(Add { a: out.clone(), b: x, out })?,
        }
    }
    Ok(())
}
