//! Queries and latent rows made ready for attention over a compressed cache.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::norm::norm;
use super::parallel;
use super::rope::{blend, frequencies, rotate_pairs};
use super::rows::CacheRows;
use super::simd::Level;
use super::span::{Reader, Rows, load};

/// `latent_heads`.
pub(super) fn latent_heads(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (q, q_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (out, out_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (kv, kv_stride, weight, positions) = (a.ptr()?, a.stride()?, a.ptr()?, a.ptr()?);
    let (cache, cache_stride, ty, capacity) = (a.ptr()?, a.stride()?, a.ty()?, a.dim()?);
    let (tokens, heads, rank, pairs) = (a.dim()?, a.dim()?, a.dim()?, a.dim()?);
    let (eps, base, scale) = (a.float()?, a.float()?, a.float()?);
    let (yarn_factor, original, beta_fast, beta_slow) = (a.float()?, a.dim()?, a.float()?, a.float()?);
    let magnitude = a.float()?;

    let mut frequencies = frequencies(base, pairs, scale);
    if original > 0 {
        blend(&mut frequencies, base, yarn_factor, original as f64, beta_fast, beta_slow);
    }
    let (turned, cols) = (2 * pairs, rank + 2 * pairs);
    let positions = load::<i32>(ctx, positions, tokens)?;
    let q = Rows::<f32>::read3(ctx, q, [tokens, heads], turned, q_strides)?;
    let out = Rows::<f32>::write3(ctx, out, [tokens, heads], turned, out_strides)?;
    let in_place = q.in_place(&out);
    let kv = Rows::<f32>::read(ctx, kv, tokens, cols, kv_stride)?;
    let weight = load::<f32>(ctx, weight, rank)?;
    let cache = CacheRows::new(ctx, cache, ty, capacity, [cache_stride, 0], [1, cols], &positions, false)?;
    let level = Level::current();
    parallel::each(tokens, heads * turned + 4 * cols + 30 * pairs, |t| {
        let position = positions[t] as f32;
        let turn = |f: &f32| {
            let (sin, cos) = (position * f).sin_cos();
            [sin * magnitude, cos * magnitude]
        };
        let turns: Vec<[f32; 2]> = frequencies.iter().map(turn).collect();
        for h in 0..heads {
            // SAFETY: each token's rows belong to one task. The input is read only where it is not the output, and then the op
            // checked that they are apart.
            let row = unsafe { out.row_mut(t, h) };
            if !in_place {
                // SAFETY: as above.
                row.copy_from_slice(unsafe { q.row(t, h) });
            }
            rotate_pairs(row, &turns);
        }
        let mut row = super::scratch(cols);
        // SAFETY: as above; two tokens of a launch do not go to the same row of the cache.
        unsafe {
            let from = kv.row(t, 0);
            norm(level, &from[..rank], Some(&weight), eps, 1.0, &mut row[..rank]);
            row[rank..].copy_from_slice(&from[rank..]);
            rotate_pairs(&mut row[rank..], &turns);
            cache.write(level, t, 0, &row);
        }
        super::give_back(row);
    });
    Ok(())
}
