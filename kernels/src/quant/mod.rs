//! GGUF block formats.
//!
//! Sizes and names for every type that files may hold, `f32` values for those with code.

mod types;

pub use types::QuantType;

use crate::KernelError;

/// Turns whole blocks into `f32`; `out` has as many elements as `bytes` holds.
///
/// # Errors
/// [`KernelError::UnsupportedType`], [`KernelError::BlockSize`].
pub fn dequantize(ty: QuantType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let _ = (ty, bytes, out);
    Err(KernelError::UnsupportedType(ty))
}

/// Turns `f32` into blocks by rounding to nearest, without a search for better scales.
///
/// # Errors
/// [`KernelError::UnsupportedType`], [`KernelError::BlockSize`].
pub fn quantize(ty: QuantType, values: &[f32]) -> Result<Vec<u8>, KernelError> {
    let _ = values;
    Err(KernelError::UnsupportedType(ty))
}
