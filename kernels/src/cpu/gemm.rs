//! Products with many tokens: tiles of weights are dequantised once and multiplied with all tokens from registers.
//!
//! Vector lanes run over tokens, so weights keep the order they are stored in and only the activations are
//! transposed, once a launch. An output element is the sum over chunks of [`DEPTH`] columns, each summed in order:
//! it depends on its own row and column only, not on the other tokens nor on how the work was spread.

use super::simd::{fma, per_level};
use crate::quant::{QuantType, decode_body};

/// Tokens in a panel: lanes of a vector register at the widest.
pub(super) const PANEL: usize = 16;

/// Weight rows of a tile.
pub(super) const TILE: usize = 48;

/// Columns that are dequantised at a time: a multiple of every block size.
pub(super) const DEPTH: usize = 256;

/// Most tokens that are multiplied with one dequantised tile; bounds the accumulators of a thread.
pub(super) const TOKENS: usize = 512;

/// Transposes `PANEL` tokens (fewer at the end, the rest zero): `out[k][lane] = x[lane][k]`.
pub(super) fn pack(x: &[&[f32]], out: &mut [f32]) {
    for (k, lanes) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane = x.get(l).map_or(0.0, |row| row[k]);
        }
    }
}

per_level! {
    /// One tile: `acc[panel][r][lane] = sum over k of w[r][k] * x[panel][k][lane]`, for at most [`TILE`] rows.
    /// `x` is packed panel after panel, `cols * PANEL` numbers each; `decoded` has `TILE * DEPTH` numbers, `acc`
    /// `TILE * PANEL` a panel.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn tile(
        ty: QuantType,
        w: &[u8],
        row_bytes: usize,
        cols: usize,
        x: &[f32],
        decoded: &mut [f32],
        acc: &mut [f32],
    ) = tile_body
}

#[inline(always)]
fn tile_body<const FMA: bool>(
    ty: QuantType,
    w: &[u8],
    row_bytes: usize,
    cols: usize,
    x: &[f32],
    decoded: &mut [f32],
    acc: &mut [f32],
) {
    acc.fill(0.0);
    let rows = w.len() / row_bytes;
    for start in (0..cols).step_by(DEPTH) {
        let depth = DEPTH.min(cols - start);
        let first = start / ty.block_size() * ty.type_bytes();
        let bytes = depth / ty.block_size() * ty.type_bytes();
        for (row, out) in w.chunks_exact(row_bytes).zip(decoded.chunks_exact_mut(DEPTH)) {
            decode_body::<FMA>(ty, &row[first..first + bytes], &mut out[..depth]);
        }
        let panels = x.chunks_exact(cols * PANEL).zip(acc.chunks_exact_mut(TILE * PANEL));
        for (panel, acc) in panels {
            let panel = &panel[start * PANEL..(start + depth) * PANEL];
            let mut r = 0;
            while r < rows {
                let (w, acc) = (&decoded[r * DEPTH..], &mut acc[r * PANEL..]);
                r += match rows - r {
                    12.. => micro::<FMA, 12>(depth, w, panel, acc),
                    8.. => micro::<FMA, 8>(depth, w, panel, acc),
                    4.. => micro::<FMA, 4>(depth, w, panel, acc),
                    _ => micro::<FMA, 1>(depth, w, panel, acc),
                };
            }
        }
    }
}

/// `M` weight rows times one panel, in registers.
#[inline(always)]
fn micro<const FMA: bool, const M: usize>(depth: usize, w: &[f32], x: &[f32], acc: &mut [f32]) -> usize {
    let mut sums = [[0.0f32; PANEL]; M];
    let rows: [&[f32]; M] = std::array::from_fn(|m| &w[m * DEPTH..m * DEPTH + depth]);
    for (k, lanes) in x.as_chunks::<PANEL>().0.iter().enumerate().take(depth) {
        for m in 0..M {
            let weight = rows[m][k];
            for l in 0..PANEL {
                sums[m][l] = fma::<FMA>(weight, lanes[l], sums[m][l]);
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc.as_chunks_mut::<PANEL>().0) {
        for l in 0..PANEL {
            acc[l] += sums[l];
        }
    }
    M
}
