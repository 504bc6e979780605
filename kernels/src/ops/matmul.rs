//! Matrix product with a weight.

use evergraph_pool::driver::{DeviceInfo, StreamHandle};

use super::check::Check;
use super::{Call, Launches, Op, TensorView};
use crate::quant::QuantType;
use crate::{KernelError, Kernels};

/// `y[t] = W x[t]`.
///
/// With float activations, products and sums are `f32` on exactly dequantised weights. With those of
/// [`Quantize`](super::Quantize) (`scales` given), the codes of each 32 columns are multiplied and summed as integers,
/// exactly, and only these sums are scaled and added as `f32`. That is for weights in blocks; floats take floats.
///
/// Each element of `y` is summed in an order that depends on the columns and on whether the launch has
/// few tokens or many, never on the number of threads.
#[derive(Clone, Debug)]
pub struct MatMul {
    /// `[out, in]`, any supported type; rows without gaps.
    pub w: TensorView,
    /// `[T, in]`, F32, or I8 with `scales`.
    pub x: TensorView,
    /// `[T, in / 32, 2]` F32, those of [`Quantize`](super::Quantize); none for an `x` of floats.
    pub scales: Option<TensorView>,
    /// `[T, out]` F32.
    pub y: TensorView,
}

impl MatMul {
    /// The product with activations of floats.
    #[must_use]
    pub fn new(w: TensorView, x: TensorView, y: TensorView) -> Self {
        Self { w, x, scales: None, y }
    }

    /// The product with quantised activations.
    #[must_use]
    pub fn quantized(w: TensorView, q: TensorView, scales: TensorView, y: TensorView) -> Self {
        Self { w, x: q, scales: Some(scales), y }
    }
}

impl MatMul {
    /// Whether the vendor's library does it in a fraction of the time: floats by floats, with much to multiply.
    fn is_large_and_dense(&self) -> bool {
        const TOKENS: usize = 16;
        const WEIGHTS: usize = 1 << 16;
        self.w.ty() == QuantType::F32 && self.x.dim(0) >= TOKENS && self.w.len() >= WEIGHTS
    }
}

impl Op for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn reads(&self) -> Vec<&TensorView> {
        [Some(&self.w), Some(&self.x), self.scales.as_ref()].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.y]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        [Some(&mut self.w), Some(&mut self.x), self.scales.as_mut()].into_iter().flatten().collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("w", &self.w, &["out", "in"])?;
        check.weight("w", &self.w)?;
        check.contiguous("w", &self.w)?;
        check.rank("x", &self.x, &["T", "in"])?;
        check.activations(&self.w, &self.x, self.scales.as_ref())?;
        check.f32("y", &self.y)?;
        check.shape("x", &self.x, &[self.x.dim(0), self.w.dim(1)])?;
        check.shape("y", &self.y, &[self.x.dim(0), self.w.dim(0)])?;
        if let Some(scales) = &self.scales {
            check.shape("scales", scales, &[self.x.dim(0), self.w.dim(1) / 32, 2])?;
            check.apart("y", &self.y, &[("scales", scales)])?;
        }
        check.apart("y", &self.y, &[("w", &self.w), ("x", &self.x)])
    }

    fn call(&self) -> Call {
        Call::new(self.w.dim(0).div_ceil(64))
            .view(&self.w)
            .ty(&self.w)
            .dim(self.w.dim(0))
            .dim(self.w.dim(1))
            .view(&self.x)
            .dim(self.x.dim(0))
            .stride(&self.x, 0)
            .view(&self.y)
            .stride(&self.y, 0)
            .optional(self.scales.as_ref())
            .optional_stride(self.scales.as_ref(), 0)
    }

    fn enqueue(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        match kernels.blas().filter(|blas| blas.stream().handle() == stream && self.is_large_and_dense()) {
            Some(blas) => crate::cuda::launch::library_product(self, blas),
            None => super::enqueue(self, kernels, stream),
        }
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::matmul(self, device) } else { super::single(self) }
    }
}
