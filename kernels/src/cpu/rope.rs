//! Rotary position embedding.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::parallel;
use super::span::{Reader, Rows, load};

/// `rope`.
pub(super) fn rope(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let positions = a.ptr()?;
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, cols) = (a.dim()?, a.dim()?, a.dim()?);
    let (interleaved, inverse) = (a.dim()? == 1, a.dim()? == 1);
    let (base, scale, factors) = (a.float()?, a.float()?, a.optional()?);
    let (yarn_factor, original, beta_fast, beta_slow) = (a.float()?, a.dim()?, a.float()?, a.float()?);
    let positions = load::<i32>(ctx, positions, tokens)?;
    let pairs = cols / 2;
    let mut frequencies = frequencies(base, pairs, scale);
    if let Some(factors) = factors {
        for (f, factor) in frequencies.iter_mut().zip(load::<f32>(ctx, factors, pairs)?) {
            *f /= factor;
        }
    }
    if original > 0 {
        blend(&mut frequencies, base, yarn_factor, original as f64, beta_fast, beta_slow);
    }
    let x = Rows::<f32>::read3(ctx, x, [tokens, heads], cols, x_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], cols, out_strides)?;
    let in_place = x.in_place(&out);
    parallel::each(tokens, cols * heads + pairs * 30, |t| {
        let turns = turns(positions[t], &frequencies, inverse);
        for h in 0..heads {
            // SAFETY: each token's rows belong to one task. The input is read only where it is not the output, and
            // then the op checked that they are apart.
            let row = unsafe { out.row_mut(t, h) };
            if !in_place {
                // SAFETY: as above.
                row.copy_from_slice(unsafe { x.row(t, h) });
            }
            if interleaved {
                rotate_pairs(row, &turns);
            } else {
                rotate_halves(row, &turns);
            }
        }
    });
    Ok(())
}

/// Rotates each pair of neighbours, by sine and cosine.
pub(super) fn rotate_pairs(row: &mut [f32], turns: &[[f32; 2]]) {
    for (pair, &[sin, cos]) in row.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
        *pair = [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos];
    }
}

/// Rotates each element of the first half with its like in the second, by sine and cosine.
pub(super) fn rotate_halves(row: &mut [f32], turns: &[[f32; 2]]) {
    let (low, high) = row.split_at_mut(row.len() / 2);
    for ((a, b), &[sin, cos]) in low.iter_mut().zip(high).zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

/// `scale * base^(-2i/n)`, rounded once.
pub(super) fn frequencies(base: f32, pairs: usize, scale: f32) -> Vec<f32> {
    let base = f64::from(base);
    (0..pairs).map(|i| (base.powf(-(i as f64) / pairs as f64) * f64::from(scale)) as f32).collect()
}

/// YaRN: slow frequencies are interpolated, fast ones stay, a linear ramp between.
pub(super) fn blend(frequencies: &mut [f32], base: f32, factor: f32, original: f64, beta_fast: f32, beta_slow: f32) {
    let n = 2.0 * frequencies.len() as f64;
    let dim = |rotations: f32| {
        n * (original / (2.0 * std::f64::consts::PI * f64::from(rotations))).ln() / (2.0 * f64::from(base).ln())
    };
    let low = dim(beta_fast).floor().max(0.0);
    let high = dim(beta_slow).ceil().min(n - 1.0);
    for (i, f) in frequencies.iter_mut().enumerate() {
        let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let value = f64::from(*f);
        *f = (value * (1.0 - ramp) + value / f64::from(factor) * ramp) as f32;
    }
}

/// `rope_tail`.
pub(super) fn rope_tail(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (x, x_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let positions = a.ptr()?;
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (tokens, heads, cols, dims) = (a.dim()?, a.dim()?, a.dim()?, a.dim()?);
    let inverse = a.dim()? == 1;
    let frequencies = tail_frequencies(&mut a, dims)?;
    let positions = load::<i32>(ctx, positions, tokens)?;
    let x = Rows::<f32>::read3(ctx, x, [tokens, heads], cols, x_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], cols, out_strides)?;
    let in_place = x.in_place(&out);
    parallel::each(tokens, cols * heads + dims * 15, |t| {
        let turns = turns(positions[t], &frequencies, inverse);
        for h in 0..heads {
            // SAFETY: as in `rope`.
            let row = unsafe { out.row_mut(t, h) };
            if !in_place {
                // SAFETY: as in `rope`.
                row.copy_from_slice(unsafe { x.row(t, h) });
            }
            rotate_pairs(&mut row[cols - dims..], &turns);
        }
    });
    Ok(())
}

/// The frequencies that base and blending, the next arguments, give.
pub(super) fn tail_frequencies(a: &mut Reader<'_, '_>, dims: usize) -> Result<Vec<f32>, Fault> {
    let base = a.float()?;
    let (factor, original, beta_fast, beta_slow) = (a.float()?, a.dim()?, a.float()?, a.float()?);
    let mut frequencies = frequencies(base, dims / 2, 1.0);
    if original > 0 {
        blend(&mut frequencies, base, factor, original as f64, beta_fast, beta_slow);
    }
    Ok(frequencies)
}

/// Sine and cosine of each pair at a position.
pub(super) fn turns(position: i32, frequencies: &[f32], inverse: bool) -> Vec<[f32; 2]> {
    let turn = |f: &f32| {
        let (sin, cos) = (position as f32 * f).sin_cos();
        [if inverse { -sin } else { sin }, cos]
    };
    frequencies.iter().map(turn).collect()
}
