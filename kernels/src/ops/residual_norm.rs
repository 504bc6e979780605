//! A sum onto the residual stream, and norms of what comes of it.

use super::check::Check;
use super::{Call, Codes, Op, TensorView};
use crate::KernelError;

/// `h = gain * (h + norm(y) * weight)`, with `y` the sum of one or two parts, or `gain * (h + y)`; and then norms of `h`.
///
/// [`RmsNorm`](super::RmsNorm) for each norm and [`Add`](super::Add) in one launch; on the host device to the same bits.
#[derive(Clone, Debug)]
pub struct ResidualNorm {
    /// `[T, D]` F32.
    pub h: TensorView,
    /// One or two, whose sum is `y`.
    pub parts: Vec<Part>,
    /// `[D]` F32, of the norm of `y`; none: `y` is added as it is.
    pub weight: Option<TensorView>,
    /// Factor of `h`.
    pub gain: f32,
    /// Added to mean squares; more than 0.
    pub eps: f32,
    /// Norms of the new `h`, at most [`MOST_NORMED`](Self::MOST_NORMED).
    pub normed: Vec<Normed>,
}

/// Something that is added.
#[derive(Clone, Debug)]
pub struct Part {
    /// `[T, D]` F32.
    pub x: TensorView,
    /// `[D]` F32: the norm of `x` is what is added; none: `x` as it is.
    pub norm: Option<TensorView>,
}

/// `scale * x / sqrt(mean(x^2) + eps) * weight`, as floats, codes or both.
#[derive(Clone, Debug)]
pub struct Normed {
    /// `[D]` F32.
    pub weight: TensorView,
    /// Factor, 1 for the plain norm.
    pub scale: f32,
    /// `[T, D]` F32.
    pub out: Option<TensorView>,
    /// Of `[T, D]`.
    pub codes: Option<Codes>,
}

impl Normed {
    fn writes(&self) -> impl Iterator<Item = &TensorView> {
        self.out.iter().chain(self.codes.iter().flat_map(|codes| [&codes.q, &codes.scales]))
    }
}

impl ResidualNorm {
    /// Most norms of the result.
    pub const MOST_NORMED: usize = 3;

    /// What is read and never written.
    fn inputs(&self) -> Vec<(&'static str, &TensorView)> {
        let parts = self.parts.iter();
        let parts = parts.flat_map(|part| [Some(("x", &part.x)), part.norm.as_ref().map(|norm| ("norm", norm))]);
        let weights = self.normed.iter().map(|normed| ("weight", &normed.weight));
        parts.flatten().chain(self.weight.iter().map(|weight| ("weight", weight))).chain(weights).collect()
    }
}

impl Op for ResidualNorm {
    fn name(&self) -> &'static str {
        "residual_norm"
    }

    fn reads(&self) -> Vec<&TensorView> {
        [&self.h].into_iter().chain(self.inputs().into_iter().map(|(_, view)| view)).collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        [&self.h].into_iter().chain(self.normed.iter().flat_map(Normed::writes)).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        let parts = self.parts.iter_mut();
        let parts = parts.flat_map(|part| [Some(&mut part.x), part.norm.as_mut()].into_iter().flatten());
        parts.chain(&mut self.weight).chain(self.normed.iter_mut().map(|normed| &mut normed.weight)).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("h", &self.h, &["T", "D"])?;
        check.f32("h", &self.h)?;
        let width = self.h.cols();
        check.parameter((1..=2).contains(&self.parts.len()), "parts", self.parts.len(), "one or two")?;
        check.parameter(self.normed.len() <= Self::MOST_NORMED, "normed", self.normed.len(), "at most three")?;
        for (role, view) in self.inputs() {
            check.f32(role, view)?;
            if role == "x" {
                check.shape(role, view, self.h.shape())?;
            } else {
                check.shape(role, view, &[width])?;
            }
        }
        check.apart("h", &self.h, &self.inputs())?;
        let mut taken = self.inputs();
        taken.push(("h", &self.h));
        for normed in &self.normed {
            check.results(&self.h, normed.out.as_ref(), normed.codes.as_ref(), &taken)?;
            if let Some(out) = &normed.out {
                check.apart("out", out, &taken)?;
            }
            taken.extend(normed.writes().map(|view| ("another result", view)));
            check.parameter(normed.scale.is_finite(), "scale", normed.scale, "finite")?;
        }
        check.parameter(self.eps.is_finite() && self.eps > 0.0, "eps", self.eps, "positive")?;
        check.parameter(self.gain.is_finite(), "gain", self.gain, "finite")
    }

    fn call(&self) -> Call {
        let (tokens, width) = (self.h.dim(0), self.h.cols());
        let mut call = Call::new(tokens).threads(width, 4).dim(tokens).dim(width).float(self.eps).float(self.gain);
        for index in 0..2 {
            let part = self.parts.get(index);
            let x = part.map(|part| &part.x);
            call = call.optional(x).optional_stride(x, 0).optional(part.and_then(|part| part.norm.as_ref()));
        }
        call = call.view(&self.h).stride(&self.h, 0).optional(self.weight.as_ref());
        for index in 0..Self::MOST_NORMED {
            let normed = self.normed.get(index);
            let out = normed.and_then(|normed| normed.out.as_ref());
            call = call.optional(normed.map(|normed| &normed.weight)).optional(out).optional_stride(out, 0);
            call = call.codes(normed.and_then(|normed| normed.codes.as_ref()));
        }
        for index in 0..Self::MOST_NORMED {
            call = call.float(self.normed.get(index).map_or(1.0, |normed| normed.scale));
        }
        call
    }
}
