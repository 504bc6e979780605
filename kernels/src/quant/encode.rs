//! Simple quantisers: scales from the extremes, codes by rounding to nearest. No search for better scales, so
//! not the quality of tools that search; for made-up weights and tests.

use super::QuantType;
use super::half::{f16_to_f32, f32_to_bf16, f32_to_f16};

/// Appends one block.
pub(super) fn block(ty: QuantType, x: &[f32], out: &mut Vec<u8>) -> bool {
    match ty {
        QuantType::F32 => out.extend_from_slice(&x[0].to_le_bytes()),
        QuantType::F16 => out.extend_from_slice(&f32_to_f16(x[0]).to_le_bytes()),
        QuantType::BF16 => out.extend_from_slice(&f32_to_bf16(x[0]).to_le_bytes()),
        QuantType::Q4_0 => {
            let d = half_scale(signed_extreme(x) / -8.0, out);
            let q = |v: f32| code(v / d + 8.0, 15.0);
            out.extend((0..16).map(|j| q(x[j]) | (q(x[j + 16]) << 4)));
        }
        QuantType::Q4_1 => {
            let (low, high) = extremes(x);
            let d = half_scale((high - low) / 15.0, out);
            let m = half_scale(low, out);
            let q = |v: f32| code((v - m) / d, 15.0);
            out.extend((0..16).map(|j| q(x[j]) | (q(x[j + 16]) << 4)));
        }
        QuantType::Q5_0 => {
            let d = half_scale(signed_extreme(x) / -16.0, out);
            five_bits(x, |v| code(v / d + 16.0, 31.0), out);
        }
        QuantType::Q5_1 => {
            let (low, high) = extremes(x);
            let d = half_scale((high - low) / 31.0, out);
            let m = half_scale(low, out);
            five_bits(x, |v| code((v - m) / d, 31.0), out);
        }
        QuantType::Q8_0 => {
            let d = half_scale(signed_extreme(x).abs() / 127.0, out);
            out.extend(x.iter().map(|&v| signed_code(v / d, 127.0) as u8));
        }
        QuantType::Q4_K => q4_k(x, out),
        QuantType::Q6_K => q6_k(x, out),
        QuantType::MXFP4 => mxfp4(x, out),
        _ => return false,
    }
    true
}

/// Rounds to a code of `0 ..= max`; 0 where a zero scale made it NaN.
fn code(value: f32, max: f32) -> u8 {
    value.round().clamp(0.0, max) as u8
}

/// Rounds to a code of `-max ..= max`.
fn signed_code(value: f32, max: f32) -> i8 {
    value.round().clamp(-max, max) as i8
}

/// Stores a half and returns what was stored.
fn half_scale(value: f32, out: &mut Vec<u8>) -> f32 {
    let bits = f32_to_f16(value.clamp(-65504.0, 65504.0));
    out.extend_from_slice(&bits.to_le_bytes());
    f16_to_f32(bits)
}

/// The element of the greatest magnitude, with its sign.
fn signed_extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best })
}

fn extremes(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)))
}

fn five_bits(x: &[f32], q: impl Fn(f32) -> u8, out: &mut Vec<u8>) {
    let codes: Vec<u8> = x.iter().map(|&v| q(v)).collect();
    let high = codes.iter().enumerate().fold(0u32, |bits, (j, &c)| bits | u32::from(c >> 4) << j);
    out.extend_from_slice(&high.to_le_bytes());
    out.extend((0..16).map(|j| (codes[j] & 15) | ((codes[j + 16] & 15) << 4)));
}

fn q4_k(x: &[f32], out: &mut Vec<u8>) {
    // Each group of 32: x = scale * q - minimum, minimum >= 0.
    let groups: Vec<(f32, f32)> = x
        .chunks_exact(32)
        .map(|group| {
            let (low, high) = extremes(group);
            let low = low.min(0.0);
            ((high.max(low) - low) / 15.0, -low)
        })
        .collect();
    let greatest = groups.iter().fold((0.0f32, 0.0f32), |m, g| (m.0.max(g.0), m.1.max(g.1)));
    let d = half_scale(greatest.0 / 63.0, out);
    let dmin = half_scale(greatest.1 / 63.0, out);
    let pairs: Vec<(u8, u8)> = groups.iter().map(|g| (code(g.0 / d, 63.0), code(g.1 / dmin, 63.0))).collect();
    let mut scales = [0u8; 12];
    for j in 0..4 {
        scales[j] = pairs[j].0 | ((pairs[j + 4].0 >> 4) << 6);
        scales[j + 4] = pairs[j].1 | ((pairs[j + 4].1 >> 4) << 6);
        scales[j + 8] = (pairs[j + 4].0 & 15) | ((pairs[j + 4].1 & 15) << 4);
    }
    out.extend_from_slice(&scales);
    let q = |group: usize, l: usize| {
        let (scale, minimum) = (d * f32::from(pairs[group].0), dmin * f32::from(pairs[group].1));
        code((x[32 * group + l] + minimum) / scale, 15.0)
    };
    for c in 0..4 {
        out.extend((0..32).map(|l| q(2 * c, l) | (q(2 * c + 1, l) << 4)));
    }
}

fn q6_k(x: &[f32], out: &mut Vec<u8>) {
    let groups: Vec<f32> = x.chunks_exact(16).map(|group| signed_extreme(group) / -32.0).collect();
    let d = f16_to_f32(f32_to_f16(signed_extreme(&groups) / -128.0));
    let scales: Vec<i8> = groups.iter().map(|&g| (g / d).round().clamp(-128.0, 127.0) as i8).collect();
    let q = |e: usize| code(x[e] / (d * f32::from(scales[e / 16])) + 32.0, 63.0);
    let (mut low, mut high) = (Vec::with_capacity(128), Vec::with_capacity(64));
    for n in 0..2 {
        let at = 128 * n;
        low.extend((0..64).map(|l| (q(at + l) & 15) | ((q(at + l + 64) & 15) << 4)));
        high.extend((0..32).map(|l| (0..4).fold(0, |bits, p| bits | (q(at + l + 32 * p) >> 4) << (2 * p))));
    }
    out.extend_from_slice(&low);
    out.extend_from_slice(&high);
    out.extend(scales.iter().map(|&s| s as u8));
    out.extend_from_slice(&f32_to_f16(d).to_le_bytes());
}

fn mxfp4(x: &[f32], out: &mut Vec<u8>) {
    let greatest = signed_extreme(x).abs();
    // The greatest code is 6 = 1.5 * 2^2.
    let exponent = if greatest > 0.0 { (greatest.log2().floor() as i32 - 2 + 127).clamp(0, 254) } else { 0 };
    let scale = (f64::from(exponent) - 127.0).exp2();
    out.push(exponent as u8);
    let nearest = |v: f32| {
        let v = f64::from(v) / scale;
        let distance = |c: usize| (f64::from(super::blocks::FP4_CODES[c]) - v).abs();
        (0..16usize).fold(0, |best, c| if distance(c) < distance(best) { c } else { best }) as u8
    };
    out.extend((0..16).map(|j| nearest(x[j]) | (nearest(x[j + 16]) << 4)));
}
