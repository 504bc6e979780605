//! Products with many tokens: tiles of weights are dequantised once and multiplied with all tokens from registers.
//!
//! Vector lanes run over tokens, so weights keep the order they are stored in and only the activations are
//! transposed, once a launch. An output element is the sum over chunks of [`DEPTH`] columns, each summed in order:
//! it depends on its own row and column only, not on the other tokens nor on how the work was spread.

use super::simd::per_level;
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
    /// The first [`PANEL`] rows of [`PANEL`] numbers, as columns.
    pub(super) fn transpose(rows: &[f32]) -> [[f32; PANEL]; PANEL] = transpose_body
}

#[inline(always)]
fn transpose_body<const L: u8>(rows: &[f32]) -> [[f32; PANEL]; PANEL] {
    let rows = &rows[..PANEL * PANEL];
    let mut columns = [[0.0; PANEL]; PANEL];
    #[cfg(target_arch = "x86_64")]
    if L == 2 {
        // SAFETY: level 2 runs only where AVX-512 was found; as many numbers are there.
        unsafe { x86::transpose(rows, &mut columns) };
        return columns;
    }
    for (r, row) in rows.as_chunks::<PANEL>().0.iter().enumerate() {
        for (column, &value) in columns.iter_mut().zip(row) {
            column[r] = value;
        }
    }
    columns
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
fn tile_body<const L: u8>(
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
            decode_body::<L>(ty, &row[first..first + bytes], &mut out[..depth]);
        }
        let pair_len = 2 * cols * PANEL;
        for (panels, acc) in x.chunks(pair_len).zip(acc.chunks_mut(2 * TILE * PANEL)) {
            let mut r = 0;
            while r < rows {
                let (w, acc) = (&decoded[r * DEPTH..], &mut acc[r * PANEL..]);
                let job = Job { depth, w, x: &panels[start * PANEL..], panel_len: cols * PANEL, acc };
                r += match (rows - r, panels.len() == pair_len) {
                    (12.., true) => job.run::<L, 12, 2>(),
                    (4.., true) => job.run::<L, 4, 2>(),
                    (_, true) => job.run::<L, 1, 2>(),
                    (12.., false) => job.run::<L, 12, 1>(),
                    (4.., false) => job.run::<L, 4, 1>(),
                    (_, false) => job.run::<L, 1, 1>(),
                };
            }
        }
    }
}

/// Some weight rows times one panel or two.
struct Job<'a> {
    depth: usize,
    /// Rows of `DEPTH`.
    w: &'a [f32],
    /// From the first column of the chunk on; the second panel is `panel_len` further.
    x: &'a [f32],
    panel_len: usize,
    /// Rows of `PANEL`; the second panel's are `TILE * PANEL` further.
    acc: &'a mut [f32],
}

impl Job<'_> {
    /// `M` rows, `V` panels; returns `M`.
    #[inline(always)]
    fn run<const L: u8, const M: usize, const V: usize>(self) -> usize {
        // The last element that is touched of each, once for all.
        assert!(self.depth <= DEPTH && self.w.len() >= (M - 1) * DEPTH + self.depth);
        assert!(self.x.len() >= (V - 1) * self.panel_len + self.depth * PANEL);
        assert!(self.acc.len() >= (V - 1) * TILE * PANEL + M * PANEL);
        #[cfg(target_arch = "x86_64")]
        if L == 2 {
            // SAFETY: level 2 runs only where AVX-512 was found; lengths were checked above.
            unsafe { x86::avx512::<M, V>(self.depth, self.w, self.x, self.panel_len, self.acc) };
            return M;
        } else if L == 1 {
            for v in 0..V {
                let (x, acc) = (&self.x[v * self.panel_len..], &mut self.acc[v * TILE * PANEL..]);
                for m in (0..M).step_by(4) {
                    let (w, acc) = (&self.w[m * DEPTH..], &mut acc[m * PANEL..]);
                    // SAFETY: level 1 runs only where AVX2 and FMA were found; lengths were checked above.
                    unsafe {
                        if M >= 4 {
                            x86::avx2::<4>(self.depth, w, x, acc)
                        } else {
                            x86::avx2::<1>(self.depth, w, x, acc)
                        }
                    }
                }
            }
            return M;
        }
        for v in 0..V {
            let (x, acc) = (&self.x[v * self.panel_len..], &mut self.acc[v * TILE * PANEL..]);
            for m in 0..M {
                plain(&self.w[m * DEPTH..m * DEPTH + self.depth], x, &mut acc[m * PANEL..(m + 1) * PANEL]);
            }
        }
        M
    }
}

/// One weight row times one panel.
#[inline(always)]
fn plain(w: &[f32], x: &[f32], acc: &mut [f32]) {
    let mut sums = [0.0f32; PANEL];
    for (w, lanes) in w.iter().zip(x.as_chunks::<PANEL>().0) {
        for l in 0..PANEL {
            sums[l] += w * lanes[l];
        }
    }
    acc.iter_mut().zip(sums).for_each(|(acc, sum)| *acc += sum);
}

// Counted loops over register arrays, which unroll wholly.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::needless_range_loop)]
mod x86 {
    use std::arch::x86_64::*;

    use super::{DEPTH, PANEL, TILE};

    /// Rows to columns.
    ///
    /// # Safety
    /// `rows` has `PANEL * PANEL` numbers.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose(rows: &[f32], columns: &mut [[f32; PANEL]; PANEL]) {
        let mut from = [_mm512_setzero_ps(); PANEL];
        for r in 0..PANEL {
            // SAFETY: by the length above.
            from[r] = unsafe { _mm512_loadu_ps(rows.as_ptr().add(r * PANEL)) };
        }
        // Within quarters: 4x4 blocks of rows 4 i .. 4 i + 3.
        let mut to = from;
        for i in (0..PANEL).step_by(4) {
            let (a, b) = (_mm512_unpacklo_ps(from[i], from[i + 1]), _mm512_unpackhi_ps(from[i], from[i + 1]));
            let (c, d) = (_mm512_unpacklo_ps(from[i + 2], from[i + 3]), _mm512_unpackhi_ps(from[i + 2], from[i + 3]));
            to[i] = _mm512_shuffle_ps::<0x44>(a, c);
            to[i + 1] = _mm512_shuffle_ps::<0xEE>(a, c);
            to[i + 2] = _mm512_shuffle_ps::<0x44>(b, d);
            to[i + 3] = _mm512_shuffle_ps::<0xEE>(b, d);
        }
        // Now quarter q of register 4 i + m has column 4 q + m, rows 4 i and on.
        for m in 0..4 {
            let (a, b) = (to[m], to[4 + m]);
            let (c, d) = (to[8 + m], to[12 + m]);
            let (ab, cd) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0x44>(c, d));
            let (ab_high, cd_high) = (_mm512_shuffle_f32x4::<0xEE>(a, b), _mm512_shuffle_f32x4::<0xEE>(c, d));
            let list = [
                _mm512_shuffle_f32x4::<0x88>(ab, cd),
                _mm512_shuffle_f32x4::<0xDD>(ab, cd),
                _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high),
                _mm512_shuffle_f32x4::<0xDD>(ab_high, cd_high),
            ];
            for (q, column) in list.into_iter().enumerate() {
                // SAFETY: a column has as many numbers.
                unsafe { _mm512_storeu_ps(columns[4 * q + m].as_mut_ptr(), column) };
            }
        }
    }

    /// `M` weight rows times `V` panels, sums in registers (`M * V + V + 1` of 32).
    ///
    /// # Safety
    /// `w` has `M` rows of `DEPTH` (the last at least `depth` long), `x` `depth * PANEL` at each panel, `acc` `M * PANEL`
    /// at each panel.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<const M: usize, const V: usize>(
        depth: usize,
        w: &[f32],
        x: &[f32],
        panel_len: usize,
        acc: &mut [f32],
    ) {
        let (w, x, acc) = (w.as_ptr(), x.as_ptr(), acc.as_mut_ptr());
        let mut sums = [[_mm512_setzero_ps(); V]; M];
        for k in 0..depth {
            let mut lanes = [_mm512_setzero_ps(); V];
            for v in 0..V {
                // SAFETY: by the lengths above.
                lanes[v] = unsafe { _mm512_loadu_ps(x.add(v * panel_len + k * PANEL)) };
            }
            for m in 0..M {
                // SAFETY: by the lengths above.
                let weight = unsafe { _mm512_set1_ps(*w.add(m * DEPTH + k)) };
                for v in 0..V {
                    sums[m][v] = _mm512_fmadd_ps(weight, lanes[v], sums[m][v]);
                }
            }
        }
        for m in 0..M {
            for v in 0..V {
                // SAFETY: by the lengths above.
                unsafe {
                    let at = acc.add(v * TILE * PANEL + m * PANEL);
                    _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sums[m][v]));
                }
            }
        }
    }

    /// `M` weight rows times one panel, sums in registers (`2 M + 3` of 16).
    ///
    /// # Safety
    /// As for `avx512`.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<const M: usize>(depth: usize, w: &[f32], x: &[f32], acc: &mut [f32]) {
        let (w, x, acc) = (w.as_ptr(), x.as_ptr(), acc.as_mut_ptr());
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        for k in 0..depth {
            // SAFETY: by the lengths above.
            let lanes = unsafe { [_mm256_loadu_ps(x.add(k * PANEL)), _mm256_loadu_ps(x.add(k * PANEL + 8))] };
            for m in 0..M {
                // SAFETY: by the lengths above.
                let weight = unsafe { _mm256_broadcast_ss(&*w.add(m * DEPTH + k)) };
                for v in 0..2 {
                    sums[m][v] = _mm256_fmadd_ps(weight, lanes[v], sums[m][v]);
                }
            }
        }
        for m in 0..M {
            for v in 0..2 {
                // SAFETY: by the lengths above.
                unsafe {
                    let at = acc.add(m * PANEL + 8 * v);
                    _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), sums[m][v]));
                }
            }
        }
    }
}
