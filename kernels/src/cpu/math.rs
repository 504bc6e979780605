//! Exponentials and sums in a form that vectorises.

use super::simd::fma;

/// `exp(x)` to about 1.5 ulp: reduction by powers of two and a polynomial of degree 6 (Cephes). Below -87.3 it is 0
/// (no subnormal results), above 88.7 infinity; NaN stays NaN.
#[inline(always)]
pub(super) fn exp<const L: u8>(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.5, 88.8);
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
    const ROUND: f32 = 12_582_912.0;
    let rounded = fma::<L>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma::<L>(n, -LN2_LOW, fma::<L>(n, -LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4;
    p = fma::<L>(p, r, 1.398_2e-3);
    p = fma::<L>(p, r, 8.333_452e-3);
    p = fma::<L>(p, r, 4.166_579_6e-2);
    p = fma::<L>(p, r, 1.666_666_5e-1);
    p = fma::<L>(p, r, 0.5);
    let value = fma::<L>(r * r, p, r) + 1.0;
    // 2^n in two halves, so that n = 128 and n = -127 do not leave the range. The number stands in the low bits of what was
    // rounded; NaN gives some number, and is put right below.
    let number = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = number >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    let value = value * power(half) * power(number.wrapping_sub(half));
    let value = if x < -87.3 { 0.0 } else { value };
    let value = if x > 88.722_84 { f32::INFINITY } else { value };
    if x.is_nan() { x } else { value }
}

/// Lanes that sums are kept in.
pub(super) const LANES: usize = 64;

/// `acc[i mod LANES] += a[i] * b[i]`, in the order of i.
#[inline(always)]
pub(super) fn accumulate<const L: u8>(a: &[f32], b: &[f32], acc: &mut [f32; LANES]) {
    let (a_whole, a_rest) = a.as_chunks::<LANES>();
    let (b_whole, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_whole.iter().zip(b_whole) {
        for l in 0..LANES {
            acc[l] = fma::<L>(a[l], b[l], acc[l]);
        }
    }
    for ((acc, &a), &b) in acc.iter_mut().zip(a_rest).zip(b_rest) {
        *acc = fma::<L>(a, b, *acc);
    }
}

/// The sum of all lanes, pairwise in a fixed order.
#[inline(always)]
pub(crate) fn reduce(acc: &[f32; LANES]) -> f32 {
    let mut acc = *acc;
    let mut n = LANES / 2;
    while n > 0 {
        for l in 0..n {
            acc[l] += acc[l + n];
        }
        n /= 2;
    }
    acc[0]
}

/// `a . b` in a fixed order.
#[inline(always)]
pub(super) fn dot<const L: u8>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    accumulate::<L>(a, b, &mut acc);
    reduce(&acc)
}

/// The sum of all elements, in a fixed order.
#[inline(always)]
pub(super) fn sum(x: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for l in 0..LANES {
            acc[l] += x[l];
        }
    }
    acc.iter_mut().zip(rest).for_each(|(acc, x)| *acc += x);
    reduce(&acc)
}

/// The greatest element; minus infinity if there is none. NaN counts as less than everything.
#[inline(always)]
pub(super) fn greatest(x: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for l in 0..LANES {
            acc[l] = if x[l] > acc[l] { x[l] } else { acc[l] };
        }
    }
    acc.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}
