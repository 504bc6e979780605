//! Large dense products, which the vendor's library does better.

#![allow(unsafe_code)]

use crate::KernelError;
use crate::cuda::{Blas, BlasType, Product};
use crate::ops::MatMul;

/// Queues a product of `f32` matrices on the handle's stream.
///
/// # Errors
/// [`KernelError::Product`] with what the library says.
pub(crate) fn library_product(op: &MatMul, blas: &Blas) -> Result<(), KernelError> {
    const BYTES: usize = size_of::<f32>();
    let shape = [op.x.dim(0), op.w.dim(0), op.w.dim(1)];
    let product = Product {
        w_stride: op.w.stride_bytes(0) / BYTES,
        x_stride: op.x.stride_bytes(0) / BYTES,
        y_stride: op.y.stride_bytes(0) / BYTES,
        ..Product::dense(op.w.ptr(), op.x.ptr(), op.y.ptr(), shape, BlasType::F32)
    };
    // SAFETY: the op checked types, shapes and that the result is apart from both factors; its views lie inside their
    // roots. Whether a root is still live is what tokens and leases are for.
    let queued = unsafe { blas.product(&product, blas.stream()) };
    queued.map_err(|error| KernelError::Product(error.to_string()))
}
