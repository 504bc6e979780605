//! Products with few tokens: each weight row is read once, block by block, and multiplied with every token's row.

use super::math::{LANES, accumulate, reduce};
use super::simd::per_level;
use crate::quant::{QuantType, decode_body};

/// Most tokens that this path takes.
pub(super) const MOST: usize = 7;

/// Elements decoded at a time: a multiple of every block size, small enough for registers and the first cache.
const CHUNK: usize = 256;

per_level! {
    /// `y[t][r] = w[r] . x[t]` for the rows in `w` and at most [`MOST`] tokens. `y` has a slice per token.
    pub(super) fn rows(ty: QuantType, w: &[u8], row_bytes: usize, x: &[&[f32]], y: &mut [&mut [f32]]) = rows_body
}

#[inline(always)]
fn rows_body<const L: u8>(ty: QuantType, w: &[u8], row_bytes: usize, x: &[&[f32]], y: &mut [&mut [f32]]) {
    if let ([x], [y]) = (x, &mut *y) {
        if L == 2 && crate::quant::dot_rows(ty, w, row_bytes, x, y) {
            return;
        }
        for (row, y) in w.chunks_exact(row_bytes).zip(y.iter_mut()) {
            let mut acc = [[0.0; LANES]; 1];
            row_body::<L, 1>(ty, row, &[*x], &mut acc);
            *y = reduce(&acc[0]);
        }
        return;
    }
    for (r, row) in w.chunks_exact(row_bytes).enumerate() {
        let mut acc = [[0.0; LANES]; MOST];
        row_body::<L, MOST>(ty, row, x, &mut acc);
        for (y, acc) in y.iter_mut().zip(&acc) {
            y[r] = reduce(acc);
        }
    }
}

#[inline(always)]
fn row_body<const L: u8, const N: usize>(ty: QuantType, row: &[u8], x: &[&[f32]], acc: &mut [[f32; LANES]; N]) {
    let mut buffer = [0.0f32; CHUNK];
    let chunk_bytes = CHUNK / ty.block_size() * ty.type_bytes();
    for (c, blocks) in row.chunks(chunk_bytes).enumerate() {
        let len = blocks.len() / ty.type_bytes() * ty.block_size();
        let values = &mut buffer[..len];
        decode_body::<L>(ty, blocks, values);
        for (x, acc) in x.iter().zip(acc.iter_mut()) {
            accumulate::<L>(values, &x[c * CHUNK..c * CHUNK + len], acc);
        }
    }
}
