//! 16-bit floats, written without branches so that loops over them vectorise.

/// An IEEE half as `f32`, exactly.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let word = u32::from(bits) << 16;
    let sign = word & 0x8000_0000;
    let magnitude = word << 1;
    // Normal numbers (and infinities, NaNs): the exponent moved, then 2^-112 puts the bias right.
    let normal = f32::from_bits((magnitude >> 4).wrapping_add(0xE0 << 23)) * f32::from_bits(0x0780_0000);
    // Subnormal ones: the bits as a fraction on top of 0.5.
    let subnormal = f32::from_bits((magnitude >> 17) | (126 << 23)) - 0.5;
    let value = if magnitude < (1 << 27) { subnormal } else { normal };
    f32::from_bits(sign | value.to_bits())
}

/// The half nearest to an `f32`, ties to even; too great becomes infinity.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let doubled = bits << 1;
    // Scaling by 2^112 then 2^-110 rounds at the right place and sends overflow to infinity.
    let base = (f32::from_bits(bits & 0x7FFF_FFFF) * f32::from_bits(0x7780_0000)) * f32::from_bits(0x0880_0000);
    let bias = (doubled & 0xFF00_0000).max(0x7100_0000);
    let rounded = f32::from_bits((bias >> 1) + 0x0780_0000) + base;
    let rounded = rounded.to_bits();
    let nonsign = ((rounded >> 13) & 0x7C00).wrapping_add(rounded & 0x0FFF) as u16;
    sign | if doubled > 0xFF00_0000 { 0x7E00 } else { nonsign }
}

/// A bfloat16 as `f32`, exactly.
#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bfloat16 nearest to an `f32`, ties to even.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000;
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    (if nan { (bits >> 16) | 0x40 } else { rounded }) as u16
}
