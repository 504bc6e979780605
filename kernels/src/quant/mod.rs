//! GGUF block formats.
//!
//! Sizes and names for every type that files may hold, `f32` values for those with code. Values are exact: the
//! same bits as ggml's C code gives.

pub(crate) mod blocks;
pub(crate) mod codes;
mod encode;
mod grids;
pub(crate) mod half;
pub(crate) mod kquants;
#[cfg(test)]
mod tests;
mod types;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use types::QuantType;

use crate::KernelError;
use crate::cpu::simd::{Level, per_level};

/// Turns whole blocks into `f32`; `out` has as many elements as `bytes` holds.
///
/// # Errors
/// [`KernelError::UnsupportedType`], [`KernelError::BlockSize`].
pub fn dequantize(ty: QuantType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    if !ty.supported() {
        return Err(KernelError::UnsupportedType(ty));
    }
    if bytes.len() != ty.row_bytes(out.len())? {
        return Err(ty.block_error("bytes", bytes.len()));
    }
    decode(Level::current(), ty, bytes, out);
    Ok(())
}

/// Turns `f32` into blocks by rounding to nearest, without a search for better scales. For F32, F16, BF16, Q4_0,
/// Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K and MXFP4.
///
/// # Errors
/// [`KernelError::UnsupportedType`], [`KernelError::BlockSize`].
pub fn quantize(ty: QuantType, values: &[f32]) -> Result<Vec<u8>, KernelError> {
    let mut out = Vec::with_capacity(ty.row_bytes(values.len())?);
    for block in values.chunks_exact(ty.block_size()) {
        if !encode::block(ty, block, &mut out) {
            return Err(KernelError::UnsupportedType(ty));
        }
    }
    Ok(out)
}

per_level! {
    /// Turns whole blocks of a supported type into `f32`; stops at the shorter of both.
    pub(crate) fn decode(ty: QuantType, bytes: &[u8], out: &mut [f32]) = decode_body
}

#[inline(always)]
pub(crate) fn decode_body<const L: u8>(ty: QuantType, bytes: &[u8], out: &mut [f32]) {
    #[inline(always)]
    fn each<const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn(&[u8; B], &mut [f32; N])) {
        for (b, o) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
            f(b, o);
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    if L == 2 {
        // SAFETY: level 2 runs only where AVX-512 was found.
        unsafe { x86::decode(ty, bytes, out) };
        return;
    }
    match ty {
        QuantType::F32 => each(bytes, out, blocks::f32),
        QuantType::F16 => each(bytes, out, blocks::f16),
        QuantType::BF16 => each(bytes, out, blocks::bf16),
        QuantType::Q4_0 => each(bytes, out, blocks::q4_0),
        QuantType::Q4_1 => each(bytes, out, blocks::q4_1),
        QuantType::Q5_0 => each(bytes, out, blocks::q5_0),
        QuantType::Q5_1 => each(bytes, out, blocks::q5_1),
        QuantType::Q8_0 => each(bytes, out, blocks::q8_0),
        QuantType::Q2_K => each(bytes, out, kquants::q2_k),
        QuantType::Q3_K => each(bytes, out, kquants::q3_k),
        QuantType::Q4_K => each(bytes, out, kquants::q4_k),
        QuantType::Q5_K => each(bytes, out, kquants::q5_k),
        QuantType::Q6_K => each(bytes, out, kquants::q6_k),
        QuantType::Q8_K => each(bytes, out, kquants::q8_k),
        QuantType::IQ4_NL => each(bytes, out, blocks::iq4_nl),
        QuantType::IQ4_XS => each(bytes, out, kquants::iq4_xs),
        QuantType::MXFP4 => each(bytes, out, blocks::mxfp4),
        QuantType::IQ2_XXS => each(bytes, out, grids::values(grids::iq2_xxs::<L>)),
        QuantType::IQ2_XS => each(bytes, out, grids::values(grids::iq2_xs::<L>)),
        QuantType::IQ2_S => each(bytes, out, grids::values(grids::iq2_s::<L>)),
        QuantType::IQ3_XXS => each(bytes, out, grids::values(grids::iq3_xxs::<L>)),
        QuantType::IQ3_S => each(bytes, out, grids::values(grids::iq3_s::<L>)),
        // Ops refuse the rest when they check their weights.
        _ => {}
    }
}

/// `y[r] = w[r] . x` straight from the blocks. The caller runs at the widest level, where there is code for it; false
/// where there is none.
#[inline(always)]
pub(crate) fn dot_rows(ty: QuantType, w: &[u8], row_bytes: usize, x: &[f32], y: &mut [f32]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: level 2 runs only where AVX-512 was found.
        #[allow(unsafe_code)]
        unsafe {
            x86::dot_rows(ty, w, row_bytes, x, y);
        }
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (ty, w, row_bytes, x, y);
        false
    }
}
