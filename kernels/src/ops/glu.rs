//! Gated linear units.

use super::check::Check;
use super::{Call, Codes, Op, TensorView};
use crate::KernelError;

/// The function on the gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// `0.5 x (1 + tanh(0.7978845608 (x + 0.044715 x^3)))`, exact in `f32` (no table).
    GeluTanh,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// `out = act(gate) * up`. `out` may be `gate`. The result goes to `out`, as codes to `codes`, or both.
#[derive(Clone, Debug)]
pub struct Glu {
    /// `[T, F]` or `[T, K, F]` F32.
    pub gate: TensorView,
    /// Shaped like `gate`, F32.
    pub up: TensorView,
    /// Shaped like `gate`, F32.
    pub out: Option<TensorView>,
    /// Shaped like `gate`.
    pub codes: Option<Codes>,
    /// The function on the gate.
    pub activation: Activation,
    /// Before anything else the gate is cut at this from above and `up` on both sides.
    pub limit: Option<f32>,
}

impl Glu {
    /// `out = act(gate) * up`, without a limit.
    #[must_use]
    pub fn new(gate: TensorView, up: TensorView, out: TensorView, activation: Activation) -> Self {
        Self { gate, up, out: Some(out), codes: None, activation, limit: None }
    }
}

impl Op for Glu {
    fn name(&self) -> &'static str {
        "glu"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.gate, &self.up]
    }

    fn writes(&self) -> Vec<&TensorView> {
        let codes = self.codes.iter().flat_map(|codes| [&codes.q, &codes.scales]);
        self.out.iter().chain(codes).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.gate, &mut self.up]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        for (role, view) in [("gate", &self.gate), ("up", &self.up)] {
            check.f32(role, view)?;
            if !(2..=3).contains(&view.rank()) {
                return Err(check.bad_shape(role, view, "[T, F] or [T, K, F]".to_owned()));
            }
            check.shape(role, view, self.gate.shape())?;
        }
        let inputs = [("gate", &self.gate), ("up", &self.up)];
        check.results(&self.gate, self.out.as_ref(), self.codes.as_ref(), &inputs)?;
        if let Some(out) = &self.out {
            check.same_or_apart("out", out, "gate", &self.gate)?;
            check.apart("out", out, &[("up", &self.up)])?;
        }
        check.parameter(self.limit.is_none_or(|l| l.is_finite() && l > 0.0), "limit", self.limit, "positive")
    }

    fn call(&self) -> Call {
        let out = self.out.as_ref();
        let inner = if self.gate.rank() == 3 { 1 } else { 3 };
        let slots = if self.gate.rank() == 3 { self.gate.dim(1) } else { 1 };
        Call::pieces(self.gate.rows(), self.gate.cols())
            .view(&self.gate)
            .stride(&self.gate, 0)
            .stride(&self.gate, inner)
            .view(&self.up)
            .stride(&self.up, 0)
            .stride(&self.up, inner)
            .optional(out)
            .optional_stride(out, 0)
            .optional_stride(out, inner)
            .dim(self.gate.dim(0))
            .dim(slots)
            .dim(self.gate.cols())
            .dim(match self.activation {
                Activation::GeluTanh => 0,
                Activation::Silu => 1,
            })
            .float(self.limit.unwrap_or(f32::INFINITY))
            .codes(self.codes.as_ref())
    }
}
