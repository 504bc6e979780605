//! Random blocks of each type, as they are stored.
//!
//! All codes are random bits; what makes a block one of weights of a given deviation is its scale. A formula's deviation
//! is that of the values that uniform codes stand for. Where these are not centred (`Q4_0`'s -8 .. 7), scales have random
//! signs, so that weights are.

use half::{bf16, f16};

use super::random::{Random, unit};
use crate::gguf::QuantType;

/// Makes blocks of a type.
type Make = fn(&mut Random, &mut [u8], f32);

/// Whether there is a recipe.
pub(super) fn can_make(ty: QuantType) -> bool {
    recipe(ty).is_some()
}

/// Fills whole blocks of a type with weights of about this deviation.
pub(super) fn fill(ty: QuantType, random: &mut Random, bytes: &mut [u8], deviation: f32) {
    if let Some(make) = recipe(ty) {
        make(random, bytes, deviation);
    }
}

fn recipe(ty: QuantType) -> Option<Make> {
    Some(match ty {
        QuantType::F32 => |random, bytes, deviation| {
            floats::<4>(random, bytes, deviation, |x| x.to_le_bytes());
        },
        QuantType::F16 => |random, bytes, deviation| {
            floats::<2>(random, bytes, deviation, |x| f16::from_f32(x).to_le_bytes());
        },
        QuantType::BF16 => |random, bytes, deviation| {
            floats::<2>(random, bytes, deviation, |x| bf16::from_f32(x).to_le_bytes());
        },
        // Codes 0 .. 15 less 8.
        QuantType::Q4_0 => |random, bytes, deviation| scaled::<18>(random, bytes, deviation / 4.637, None),
        QuantType::Q4_1 => |random, bytes, deviation| scaled::<20>(random, bytes, deviation / 4.610, Some(-7.5)),
        QuantType::Q5_0 => |random, bytes, deviation| scaled::<22>(random, bytes, deviation / 9.247, None),
        QuantType::Q5_1 => |random, bytes, deviation| scaled::<24>(random, bytes, deviation / 9.233, Some(-15.5)),
        QuantType::Q8_0 => |random, bytes, deviation| scaled::<34>(random, bytes, deviation / 73.90, None),
        // The codebook's values: -127, -104, … 113.
        QuantType::IQ4_NL => |random, bytes, deviation| scaled::<18>(random, bytes, deviation / 69.30, None),
        QuantType::Q2_K => |random, bytes, deviation| blocks::<84>(random, bytes, q2_k, deviation),
        QuantType::Q3_K => |random, bytes, deviation| blocks::<110>(random, bytes, q3_k, deviation),
        QuantType::Q4_K => {
            |random, bytes, deviation| blocks::<144>(random, bytes, |r, b, d| q45_k(r, b, d / 4.610, 7.5), deviation)
        }
        QuantType::Q5_K => {
            |random, bytes, deviation| blocks::<176>(random, bytes, |r, b, d| q45_k(r, b, d / 9.233, 15.5), deviation)
        }
        QuantType::Q6_K => |random, bytes, deviation| blocks::<210>(random, bytes, q6_k, deviation),
        QuantType::IQ4_XS => |random, bytes, deviation| blocks::<136>(random, bytes, iq4_xs, deviation),
        QuantType::MXFP4 => mxfp4,
        _ => return None,
    })
}

/// Uniform floats.
fn floats<const N: usize>(random: &mut Random, bytes: &mut [u8], deviation: f32, store: impl Fn(f32) -> [u8; N]) {
    let most = deviation * 3f32.sqrt();
    let mut pairs = bytes.chunks_exact_mut(2 * N);
    for pair in &mut pairs {
        let bits = random.bits();
        let (first, second) = pair.split_at_mut(N);
        first.copy_from_slice(&store(unit(bits as u32) * most));
        second.copy_from_slice(&store(unit((bits >> 32) as u32) * most));
    }
    for value in pairs.into_remainder().chunks_exact_mut(N) {
        value.copy_from_slice(&store(unit(random.bits() as u32) * most));
    }
}

/// A scale around `scale`: three quarters to five quarters of it, so that blocks differ.
#[inline]
fn around(random: &mut Random, scale: f32) -> (f32, bool) {
    let bits = random.bits();
    (scale * (1.0 + 0.25 * unit(bits as u32)), bits >> 63 == 1)
}

/// Blocks that begin with a half as scale; then, with `minimum` (in units of the scale), another half.
#[inline]
fn scaled<const BYTES: usize>(random: &mut Random, bytes: &mut [u8], scale: f32, minimum: Option<f32>) {
    for block in bytes.chunks_exact_mut(BYTES) {
        let (d, negative) = around(random, scale);
        let d = f16::from_f32(if negative && minimum.is_none() { -d } else { d });
        block[..2].copy_from_slice(&d.to_le_bytes());
        let codes = match minimum {
            Some(minimum) => {
                block[2..4].copy_from_slice(&f16::from_f32(d.to_f32() * minimum).to_le_bytes());
                &mut block[4..]
            }
            None => &mut block[2..],
        };
        random.fill(codes);
    }
}

/// Blocks with scales of their own for parts of them: random all over, then mended.
#[inline]
fn blocks<const BYTES: usize>(
    random: &mut Random,
    bytes: &mut [u8],
    mend: impl Fn(&mut Random, &mut [u8], f32),
    deviation: f32,
) {
    for block in bytes.chunks_exact_mut(BYTES) {
        random.fill(block);
        mend(random, block, deviation);
    }
}

fn put(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// 16 bytes of scale (low half) and minimum (high half); codes 0 .. 3.
fn q2_k(random: &mut Random, block: &mut [u8], deviation: f32) {
    for byte in &mut block[..16] {
        let scale = random.below(6, 15);
        *byte = scale | scale << 4;
    }
    // Scales 6 .. 14 are 10.3 in the mean square, codes 0 .. 3 are 1.118 around 1.5.
    let (d, _) = around(random, deviation / (10.33 * 1.118));
    put(block, 80, d);
    put(block, 82, 1.5 * d);
}

/// Random scales of 6 bits around 0; codes -4 .. 3.
fn q3_k(random: &mut Random, block: &mut [u8], deviation: f32) {
    let (d, _) = around(random, deviation / (18.48 * 2.345));
    put(block, 108, d);
}

/// Eight scales and minima of 6 bits in 12 bytes; `middle` is the middle of the codes.
fn q45_k(random: &mut Random, block: &mut [u8], deviation: f32, middle: f32) {
    let mut pairs = [(0u8, 0u8); 8];
    for pair in &mut pairs {
        let scale = random.below(20, 44);
        *pair = (scale, scale - 1 + random.below(0, 3));
    }
    for j in 0..4 {
        block[4 + j] = pairs[j].0 | (pairs[j + 4].0 >> 4) << 6;
        block[8 + j] = pairs[j].1 | (pairs[j + 4].1 >> 4) << 6;
        block[12 + j] = (pairs[j + 4].0 & 15) | (pairs[j + 4].1 & 15) << 4;
    }
    // Scales 20 .. 43 are 32.3 in the mean square.
    let (d, _) = around(random, deviation / 32.25);
    put(block, 0, d);
    put(block, 2, d * middle);
}

/// 16 signed scales; codes -32 .. 31.
fn q6_k(random: &mut Random, block: &mut [u8], deviation: f32) {
    let signs = random.bits();
    for (j, byte) in block[192..208].iter_mut().enumerate() {
        let scale = random.below(60, 127) as i8;
        *byte = if signs >> j & 1 == 1 { -scale } else { scale } as u8;
    }
    let (d, _) = around(random, deviation / (94.98 * 18.48));
    put(block, 208, d);
}

/// Random scales of 6 bits around 0; codes through a book.
fn iq4_xs(random: &mut Random, block: &mut [u8], deviation: f32) {
    let (d, _) = around(random, deviation / (18.48 * 69.30));
    put(block, 0, d);
}

/// Codes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; a power of two as scale: of the two next to the right one each as
/// often as makes the mean square right.
fn mxfp4(random: &mut Random, bytes: &mut [u8], deviation: f32) {
    let exact = (deviation / 2.926).log2();
    let lower = exact.floor();
    let upper = ((4f32.powf(exact - lower) - 1.0) / 3.0 * 65_536.0) as u64;
    let exponent = (127.0 + lower).clamp(1.0, 253.0) as u8;
    for block in bytes.chunks_exact_mut(17) {
        block[0] = exponent + u8::from(random.bits() & 0xFFFF < upper);
        random.fill(&mut block[1..]);
    }
}
