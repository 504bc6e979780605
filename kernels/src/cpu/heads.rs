//! Heads made ready for attention.

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::KernelContext;

use super::norm::norm;
use super::parallel;
use super::rope::{frequencies, rotate_halves};
use super::rows::CacheRows;
use super::simd::Level;
use super::span::{Reader, Rows, load};

/// `attention_heads`.
pub(super) fn attention_heads(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (q, q_strides, q_norm) = (a.ptr()?, [a.stride()?, a.stride()?], a.ptr()?);
    let (k, k_strides, k_norm) = (a.optional()?, [a.stride()?, a.stride()?], a.optional()?);
    let (v, v_strides, positions) = (a.optional()?, [a.stride()?, a.stride()?], a.ptr()?);
    let (k_cache, k_rows) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (v_cache, v_rows) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (factors, ty, capacity) = (a.optional()?, a.ty()?, a.dim()?);
    let (ring, norm_values) = (a.dim()? == 1, a.dim()? == 1);
    let (tokens, heads, kv_heads) = (a.dim()?, a.dim()?, a.dim()?);
    let (d, dv, pairs) = (a.dim()?, a.dim()?, a.dim()?);
    let (eps, base, scale) = (a.float()?, a.float()?, a.float()?);

    let positions = load::<i32>(ctx, positions, tokens)?;
    let mut frequencies = frequencies(base, pairs, scale);
    if let Some(factors) = factors {
        frequencies.iter_mut().zip(load::<f32>(ctx, factors, pairs)?).for_each(|(f, factor)| *f /= factor);
    }
    let q = Rows::<f32>::write3(ctx, q, [tokens, heads], d, q_strides)?;
    let q_norm = load::<f32>(ctx, q_norm, d)?;
    let new = match (k, k_norm, v) {
        (Some(k), Some(k_norm), Some(v)) => {
            let cache =
                |at, strides, cols| CacheRows::new(ctx, at, ty, capacity, strides, [kv_heads, cols], &positions, ring);
            Some(New {
                k: Rows::read3(ctx, k, [tokens, kv_heads], d, k_strides)?,
                k_norm: load::<f32>(ctx, k_norm, d)?,
                v: Rows::read3(ctx, v, [tokens, kv_heads], dv, v_strides)?,
                k_cache: cache(k_cache, k_rows, d)?,
                v_cache: cache(v_cache, v_rows, dv)?,
            })
        }
        _ => None,
    };

    // All heads of a token turn alike.
    let mut turns = super::scratch(2 * tokens * pairs);
    let turns_of = Rows::over(&mut turns, tokens, 2 * pairs);
    parallel::each(tokens, 30 * pairs, |t| {
        // SAFETY: each row belongs to one task.
        let turns = unsafe { turns_of.row_mut(t, 0) }.as_chunks_mut::<2>().0;
        turns.iter_mut().zip(&frequencies).for_each(|(turn, f)| *turn = (positions[t] as f32 * f).sin_cos().into());
    });
    let level = Level::current();
    let all = heads + 2 * kv_heads;
    parallel::each(tokens * all, 4 * d.max(dv), |i| {
        let (t, head) = (i / all, i % all);
        // SAFETY: nobody writes them any more.
        let turns = unsafe { turns_of.row(t, 0) }.as_chunks::<2>().0;
        let mut row = super::scratch(if head < heads + kv_heads { d } else { dv });
        // SAFETY: each head of queries, and each place in a cache, belongs to one task (two tokens of a launch do not go to
        // the same row); the op checked that what is written is apart from what is read.
        unsafe {
            match (&new, head.checked_sub(heads)) {
                (_, None) => {
                    let q = q.row_mut(t, head);
                    norm(level, q, Some(&q_norm), eps, 1.0, &mut row);
                    rotate_halves(&mut row[..2 * pairs], turns);
                    q.copy_from_slice(&row);
                }
                (Some(new), Some(h)) if h < kv_heads => {
                    norm(level, new.k.row(t, h), Some(&new.k_norm), eps, 1.0, &mut row);
                    rotate_halves(&mut row[..2 * pairs], turns);
                    new.k_cache.write(level, t, h, &row);
                }
                (Some(new), Some(h)) => {
                    let h = h - kv_heads;
                    if norm_values {
                        norm(level, new.v.row(t, h), None, eps, 1.0, &mut row);
                        new.v_cache.write(level, t, h, &row);
                    } else {
                        new.v_cache.write(level, t, h, new.v.row(t, h));
                    }
                }
                (None, Some(_)) => {}
            }
        }
        super::give_back(row);
    });
    super::give_back(turns);
    Ok(())
}

/// Keys and values, and where they go.
struct New {
    k: Rows<f32>,
    k_norm: Vec<f32>,
    v: Rows<f32>,
    k_cache: CacheRows,
    v_cache: CacheRows,
}
