//! Gated linear units.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// The function on the gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// `0.5 x (1 + tanh(0.7978845608 (x + 0.044715 x^3)))`, exact in `f32` (no table).
    GeluTanh,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// `out = act(gate) * up`. `out` may be `gate`.
#[derive(Clone, Debug)]
pub struct Glu {
    /// `[T, F]` or `[T, K, F]` F32.
    pub gate: TensorView,
    /// Shaped like `gate`, F32.
    pub up: TensorView,
    /// Shaped like `gate`, F32.
    pub out: TensorView,
    /// The function on the gate.
    pub activation: Activation,
    /// Before anything else the gate is cut at this from above and `up` on both sides.
    pub limit: Option<f32>,
}

impl Op for Glu {
    fn name(&self) -> &'static str {
        "glu"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.gate, &self.up]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        for (role, view) in [("gate", &self.gate), ("up", &self.up), ("out", &self.out)] {
            check.f32(role, view)?;
            if !(2..=3).contains(&view.rank()) {
                return Err(check.bad_shape(role, view, "[T, F] or [T, K, F]".to_owned()));
            }
            check.shape(role, view, self.gate.shape())?;
        }
        check.same_or_apart("out", &self.out, "gate", &self.gate)?;
        check.apart("out", &self.out, &[("up", &self.up)])?;
        check.parameter(self.limit.is_none_or(|l| l.is_finite() && l > 0.0), "limit", self.limit, "positive")
    }

    fn call(&self) -> Call {
        let inner = if self.gate.rank() == 3 { 1 } else { 3 };
        let slots = if self.gate.rank() == 3 { self.gate.dim(1) } else { 1 };
        Call::pieces(self.gate.rows(), self.gate.cols())
            .view(&self.gate)
            .stride(&self.gate, 0)
            .stride(&self.gate, inner)
            .view(&self.up)
            .stride(&self.up, 0)
            .stride(&self.up, inner)
            .view(&self.out)
            .stride(&self.out, 0)
            .stride(&self.out, inner)
            .dim(self.gate.dim(0))
            .dim(slots)
            .dim(self.gate.cols())
            .dim(match self.activation {
                Activation::GeluTanh => 0,
                Activation::Silu => 1,
            })
            .float(self.limit.unwrap_or(f32::INFINITY))
    }
}
