//! What ops ask of their views.

use super::{Codes, Quantize, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// The checks of one op.
pub(super) struct Check(pub(super) &'static str);

impl Check {
    fn label(role: &str, view: &TensorView) -> String {
        format!("{role} ({})", view.root().name)
    }

    /// `view` has exactly this shape.
    pub(super) fn shape(&self, role: &str, view: &TensorView, shape: &[usize]) -> Result<(), KernelError> {
        if view.shape() == shape { Ok(()) } else { Err(self.bad_shape(role, view, format!("{shape:?}"))) }
    }

    /// `view` has this many dimensions.
    pub(super) fn rank(&self, role: &str, view: &TensorView, names: &[&str]) -> Result<(), KernelError> {
        if view.rank() == names.len() {
            Ok(())
        } else {
            Err(self.bad_shape(role, view, format!("[{}]", names.join(", "))))
        }
    }

    pub(super) fn bad_shape(&self, role: &str, view: &TensorView, expected: String) -> KernelError {
        KernelError::Shape { op: self.0, tensor: Self::label(role, view), expected, found: view.shape().to_vec() }
    }

    /// `view` has one of these types.
    pub(super) fn ty(
        &self,
        role: &str,
        view: &TensorView,
        types: &[QuantType],
        expected: &'static str,
    ) -> Result<(), KernelError> {
        if types.contains(&view.ty()) { Ok(()) } else { Err(self.bad_type(role, view, expected)) }
    }

    fn bad_type(&self, role: &str, view: &TensorView, expected: &'static str) -> KernelError {
        KernelError::Type { op: self.0, tensor: Self::label(role, view), expected, found: view.ty() }
    }

    pub(super) fn f32(&self, role: &str, view: &TensorView) -> Result<(), KernelError> {
        self.ty(role, view, &[QuantType::F32], "F32")
    }

    pub(super) fn i32(&self, role: &str, view: &TensorView) -> Result<(), KernelError> {
        self.ty(role, view, &[QuantType::I32], "I32")
    }

    /// `view` can be turned into `f32`.
    pub(super) fn weight(&self, role: &str, view: &TensorView) -> Result<(), KernelError> {
        if view.ty().supported() { Ok(()) } else { Err(self.bad_type(role, view, "a supported float or block type")) }
    }

    /// `view` is of the type of `of`.
    pub(super) fn same_type(
        &self,
        role: &str,
        view: &TensorView,
        of: &TensorView,
        expected: &'static str,
    ) -> Result<(), KernelError> {
        if view.ty() == of.ty() { Ok(()) } else { Err(self.bad_type(role, view, expected)) }
    }

    /// `x` are floats, or 8-bit integers with scales for a weight in blocks. Shapes are the op's business.
    pub(super) fn activations(
        &self,
        w: &TensorView,
        x: &TensorView,
        scales: Option<&TensorView>,
    ) -> Result<(), KernelError> {
        let Some(scales) = scales else { return self.f32("x", x) };
        self.ty("x", x, &[QuantType::I8], "I8, as there are scales")?;
        self.f32("scales", scales)?;
        if w.ty().block_size() == 1 {
            return Err(self.bad_type("w", w, "a type of blocks, as activations are quantised"));
        }
        self.scale_rows("scales", scales)
    }

    /// The last two dimensions of `view`, `[in / 32, 2]`, have no gaps.
    pub(super) fn scale_rows(&self, role: &str, view: &TensorView) -> Result<(), KernelError> {
        let axis = view.rank().saturating_sub(2);
        if view.dim(axis) == 1 || view.stride_bytes(axis) == view.cols() * view.ty().type_bytes() {
            Ok(())
        } else {
            Err(self.layout(role, view, "the scales of a row must be contiguous"))
        }
    }

    /// `q` and `scales` are room for the codes of something shaped like `x`.
    pub(super) fn codes(
        &self,
        role: &str,
        x: &TensorView,
        q: &TensorView,
        scales: &TensorView,
    ) -> Result<(), KernelError> {
        if !x.cols().is_multiple_of(Quantize::GROUP) {
            return Err(self.bad_shape(role, x, "[.., in] with in a multiple of 32".to_owned()));
        }
        self.ty("q", q, &[QuantType::I8], "I8")?;
        self.shape("q", q, x.shape())?;
        self.f32("scales", scales)?;
        self.shape("scales", scales, &[&x.shape()[..x.rank() - 1], &[x.cols() / Quantize::GROUP, 2]].concat())?;
        self.scale_rows("scales", scales)?;
        self.apart("q", q, &[("scales", scales)])
    }

    /// The results of an op, shaped like `x`: floats, codes or both, apart from each other. Codes share no byte with
    /// the inputs; what the floats may share is the op's business.
    pub(super) fn results(
        &self,
        x: &TensorView,
        out: Option<&TensorView>,
        codes: Option<&Codes>,
        inputs: &[(&str, &TensorView)],
    ) -> Result<(), KernelError> {
        if let Some(out) = out {
            self.f32("out", out)?;
            self.shape("out", out, x.shape())?;
        }
        let Some(Codes { q, scales }) = codes else {
            return self.parameter(out.is_some(), "out", "none", "there where no codes are");
        };
        self.codes("codes", x, q, scales)?;
        for (role, written) in [("q", q), ("scales", scales)] {
            self.apart(role, written, inputs)?;
            if let Some(out) = out {
                self.apart(role, written, &[("out", out)])?;
            }
        }
        Ok(())
    }

    /// `view` has no gaps.
    pub(super) fn contiguous(&self, role: &str, view: &TensorView) -> Result<(), KernelError> {
        if view.is_contiguous() { Ok(()) } else { Err(self.layout(role, view, "must be contiguous")) }
    }

    pub(super) fn layout(&self, role: &str, view: &TensorView, what: &'static str) -> KernelError {
        KernelError::Layout { op: self.0, tensor: Self::label(role, view), what }
    }

    /// `written` shares no byte with the others.
    pub(super) fn apart(
        &self,
        role: &str,
        written: &TensorView,
        others: &[(&str, &TensorView)],
    ) -> Result<(), KernelError> {
        for (other_role, other) in others {
            if written.overlaps(other) {
                return Err(KernelError::Overlap {
                    op: self.0,
                    written: Self::label(role, written),
                    other: Self::label(other_role, other),
                });
            }
        }
        Ok(())
    }

    /// `written` is exactly `other`, or shares no byte with it.
    pub(super) fn same_or_apart(
        &self,
        role: &str,
        written: &TensorView,
        other_role: &str,
        other: &TensorView,
    ) -> Result<(), KernelError> {
        if written.same_place(other) { Ok(()) } else { self.apart(role, written, &[(other_role, other)]) }
    }

    /// `x` and `out` are floats of one shape, and one place or apart.
    pub(super) fn floats_to(&self, x: &TensorView, out: &TensorView) -> Result<(), KernelError> {
        self.f32("x", x)?;
        self.f32("out", out)?;
        self.shape("out", out, x.shape())?;
        self.same_or_apart("out", out, "x", x)
    }

    /// As [`floats_to`](Self::floats_to) for `[T, H, d]`, with a position for each token.
    pub(super) fn turned(&self, x: &TensorView, out: &TensorView, positions: &TensorView) -> Result<(), KernelError> {
        self.rank("x", x, &["T", "H", "d"])?;
        self.floats_to(x, out)?;
        self.i32("positions", positions)?;
        self.shape("positions", positions, &[x.dim(0)])?;
        self.apart("out", out, &[("positions", positions)])
    }

    /// `logits`, `[T, E]`, and the choice that is made of them: `ids` and `weights`, `[T, used]`, apart from each other and from
    /// the inputs.
    pub(super) fn choice(
        &self,
        logits: &TensorView,
        [ids, weights]: [&TensorView; 2],
        used: usize,
        inputs: &[(&str, &TensorView)],
    ) -> Result<(), KernelError> {
        self.rank("logits", logits, &["T", "E"])?;
        self.f32("logits", logits)?;
        let shape = [logits.dim(0), used];
        self.i32("ids", ids)?;
        self.f32("weights", weights)?;
        for (role, written) in [("ids", ids), ("weights", weights)] {
            self.shape(role, written, &shape)?;
            self.contiguous(role, written)?;
            self.apart(role, written, &[("logits", logits)])?;
            self.apart(role, written, inputs)?;
        }
        self.apart("ids", ids, &[("weights", weights)])
    }

    /// A cache that is a ring keeps all that `tokens` queries see.
    pub(super) fn ring(
        &self,
        role: &str,
        cache: &TensorView,
        ring: bool,
        window: Option<u32>,
        tokens: usize,
    ) -> Result<(), KernelError> {
        if !ring {
            return Ok(());
        }
        let Some(window) = window else {
            return self.parameter(false, "window", window, "given for a ring");
        };
        let needed = (window as usize).saturating_add(tokens - 1);
        if cache.dim(0) >= needed {
            return Ok(());
        }
        Err(self.bad_shape(role, cache, format!("at least {needed} rows (window + T - 1)")))
    }

    /// A scalar condition.
    pub(super) fn parameter(
        &self,
        ok: bool,
        name: &'static str,
        value: impl std::fmt::Debug,
        expected: &'static str,
    ) -> Result<(), KernelError> {
        if ok {
            Ok(())
        } else {
            Err(KernelError::Parameter { op: self.0, name, value: format!("{value:?}"), expected })
        }
    }
}
