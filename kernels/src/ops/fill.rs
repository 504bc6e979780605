//! One value everywhere.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// `x = value`, F32 or I32 (then `value` must be a whole number).
#[derive(Clone, Debug)]
pub struct Fill {
    /// Contiguous.
    pub x: TensorView,
    /// The value.
    pub value: f32,
}

impl Op for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn reads(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.x]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.ty("x", &self.x, &[QuantType::F32, QuantType::I32], "F32 or I32")?;
        check.contiguous("x", &self.x)?;
        if self.x.ty() == QuantType::I32 {
            let whole = self.value.fract() == 0.0 && self.value.abs() <= 16_777_216.0;
            check.parameter(whole, "value", self.value, "a whole number within 2^24 for I32")?;
        }
        Ok(())
    }

    fn call(&self) -> Call {
        // The bits to write, whichever type.
        let bits = match self.x.ty() {
            #[allow(clippy::cast_possible_truncation)]
            QuantType::I32 => self.value as i32,
            _ => self.value.to_bits() as i32,
        };
        Call::new(self.x.len().div_ceil(4096)).view(&self.x).dim(self.x.rows()).dim(self.x.cols()).int(bits)
    }
}
