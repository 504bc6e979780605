//! Rows of a table by number.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// `out[t] = scale * table[ids[t]]`: the embedding lookup, straight from quantised rows.
///
/// An id outside `0 .. V` is a fault on the device.
#[derive(Clone, Debug)]
pub struct GetRows {
    /// `[V, D]`, any supported type, or I32 with an I32 `out` (then `scale` must be 1).
    pub table: TensorView,
    /// `[T]` I32, contiguous, in device memory.
    pub ids: TensorView,
    /// `[T, D]` F32.
    pub out: TensorView,
    /// Factor of every element.
    pub scale: f32,
}

impl Op for GetRows {
    fn name(&self) -> &'static str {
        "get_rows"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.table, &self.ids]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.out]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.table, &mut self.ids]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("table", &self.table, &["V", "D"])?;
        check.rank("ids", &self.ids, &["T"])?;
        check.i32("ids", &self.ids)?;
        check.shape("out", &self.out, &[self.ids.dim(0), self.table.dim(1)])?;
        if self.table.ty() == QuantType::I32 {
            check.i32("out", &self.out)?;
            check.parameter(self.scale == 1.0, "scale", self.scale, "1 for integers")?;
        } else {
            check.weight("table", &self.table)?;
            check.f32("out", &self.out)?;
        }
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")?;
        check.apart("out", &self.out, &[("table", &self.table), ("ids", &self.ids)])
    }

    fn call(&self) -> Call {
        Call::new(self.ids.dim(0))
            .view(&self.table)
            .ty(&self.table)
            .dim(self.table.dim(0))
            .dim(self.table.dim(1))
            .stride(&self.table, 0)
            .view(&self.ids)
            .view(&self.out)
            .dim(self.ids.dim(0))
            .stride(&self.out, 0)
            .float(self.scale)
    }
}
