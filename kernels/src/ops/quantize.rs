//! Activations as 8-bit integers.

use evergraph_pool::driver::DeviceInfo;

use super::check::Check;
use super::{Call, Launches, Op, TensorView};
use crate::KernelError;

/// Activations as 8-bit integers with a scale for each 32 columns.
///
/// Of 32 values `x`: `d = max |x| / 127`, `q = round(x / d)` (to nearest, ties to even; all 0 where `d` is 0), and
/// `scales = (d, d * sum(q))`. Products with weights in blocks then take `q` and `scales`, several of them the same
/// ones. Values that are not finite give results that are not finite, never a fault.
#[derive(Clone, Debug)]
pub struct Quantize {
    /// `[T, in]` F32; `in` a multiple of 32.
    pub x: TensorView,
    /// `[T, in]` I8.
    pub q: TensorView,
    /// `[T, in / 32, 2]` F32; rows may be strided, a row has no gaps.
    pub scales: TensorView,
}

/// What [`Quantize`] makes of a result, written by the op that makes the result: the same codes and scales.
#[derive(Clone, Debug)]
pub struct Codes {
    /// Shaped like the result, whose last dimension is a multiple of 32; I8.
    pub q: TensorView,
    /// `[.., in / 32, 2]` F32; rows may be strided, a row has no gaps.
    pub scales: TensorView,
}

impl Quantize {
    /// Columns that share a scale.
    pub const GROUP: usize = 32;
}

impl Op for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.x]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.q, &self.scales]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.x]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("x", &self.x, &["T", "in"])?;
        check.f32("x", &self.x)?;
        check.codes("x", &self.x, &self.q, &self.scales)?;
        check.apart("q", &self.q, &[("x", &self.x)])?;
        check.apart("scales", &self.scales, &[("x", &self.x)])
    }

    fn call(&self) -> Call {
        Call::new(self.x.rows())
            .view(&self.x)
            .stride(&self.x, 0)
            .view(&self.q)
            .stride(&self.q, 0)
            .view(&self.scales)
            .stride(&self.scales, 0)
            .dim(self.x.dim(0))
            .dim(self.x.dim(1))
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::quantize(self, device) } else { super::single(self) }
    }
}
