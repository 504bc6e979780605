//! Elementwise ops on rows.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

fn binary_check(check: &Check, a: &TensorView, b: &TensorView, out: &TensorView) -> Result<(), KernelError> {
    check.rank("a", a, &["T", "D"])?;
    for (role, view) in [("a", a), ("b", b), ("out", out)] {
        check.f32(role, view)?;
    }
    if b.rank() == 1 {
        check.shape("b", b, &[a.dim(1)])?;
    } else {
        check.shape("b", b, a.shape())?;
    }
    check.shape("out", out, a.shape())?;
    check.same_or_apart("out", out, "a", a)?;
    check.apart("out", out, &[("b", b)])
}

fn binary_call(a: &TensorView, b: &TensorView, out: &TensorView) -> Call {
    // A row for all tokens has stride 0.
    let b_axis = if b.rank() == 1 { 3 } else { 0 };
    Call::pieces(a.dim(0), a.dim(1))
        .view(a)
        .stride(a, 0)
        .view(b)
        .stride(b, b_axis)
        .view(out)
        .stride(out, 0)
        .dim(a.dim(0))
        .dim(a.dim(1))
}

fn unary_check(check: &Check, x: &TensorView, out: &TensorView) -> Result<(), KernelError> {
    check.rank("x", x, &["T", "D"])?;
    check.floats_to(x, out)
}

fn unary_call(x: &TensorView, out: &TensorView, value: f32) -> Call {
    Call::pieces(x.dim(0), x.dim(1))
        .view(x)
        .stride(x, 0)
        .view(out)
        .stride(out, 0)
        .dim(x.dim(0))
        .dim(x.dim(1))
        .float(value)
}

macro_rules! binary {
    ($(#[$doc:meta])* $name:ident, $kernel:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name {
            /// `[T, D]` F32.
            pub a: TensorView,
            /// `[T, D]` F32, or `[D]` for the same row with every token.
            pub b: TensorView,
            /// `[T, D]` F32; may be `a`, not `b`.
            pub out: TensorView,
        }

        impl Op for $name {
            fn name(&self) -> &'static str {
                $kernel
            }

            fn reads(&self) -> Vec<&TensorView> {
                vec![&self.a, &self.b]
            }

            fn writes(&self) -> Vec<&TensorView> {
                vec![&self.out]
            }

            fn sources_mut(&mut self) -> Vec<&mut TensorView> {
                vec![&mut self.a, &mut self.b]
            }

            fn check(&self) -> Result<(), KernelError> {
                binary_check(&Check($kernel), &self.a, &self.b, &self.out)
            }

            fn call(&self) -> Call {
                binary_call(&self.a, &self.b, &self.out)
            }
        }
    };
}

binary!(
    /// `out = a + b`.
    Add, "add"
);
binary!(
    /// `out = a * b`.
    Mul, "mul"
);

/// `out = factor * x`. `out` may be `x`.
#[derive(Clone, Debug)]
pub struct Scale {
    /// `[T, D]` F32.
    pub x: TensorView,
    /// `[T, D]` F32.
    pub out: TensorView,
    /// The factor.
    pub factor: f32,
}

impl Op for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.x]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.x]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        unary_check(&check, &self.x, &self.out)?;
        check.parameter(self.factor.is_finite(), "factor", self.factor, "finite")
    }

    fn call(&self) -> Call {
        unary_call(&self.x, &self.out, self.factor)
    }
}

/// `out = cap * tanh(x / cap)`. `out` may be `x`.
#[derive(Clone, Debug)]
pub struct Softcap {
    /// `[T, D]` F32.
    pub x: TensorView,
    /// `[T, D]` F32.
    pub out: TensorView,
    /// The cap, positive.
    pub cap: f32,
}

impl Op for Softcap {
    fn name(&self) -> &'static str {
        "softcap"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.x]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.x]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        unary_check(&check, &self.x, &self.out)?;
        check.parameter(self.cap.is_finite() && self.cap > 0.0, "cap", self.cap, "positive")
    }

    fn call(&self) -> Call {
        unary_call(&self.x, &self.out, self.cap)
    }
}
