//! Few tokens with AVX-512 VNNI: blocks become codes in registers and are multiplied there, 64 columns at a time, instead of
//! going through a buffer. Lane by lane this does what the plain loops do.

use std::arch::x86_64::*;

use super::blocks::*;
use super::few::{LANES, STEP, Token};
use crate::quant::QuantType;
use crate::quant::codes::{Codes, GROUP};

/// How far ahead of the products rows are asked for.
const AHEAD_BYTES: usize = 4 * 1024;

/// `y[t][r] = w[r] . x[t]` for the rows in `w`; false where there is no code for the type.
///
/// # Safety
/// The features of `run` are there.
pub(super) unsafe fn rows(ty: QuantType, w: &[u8], row_bytes: usize, x: &[Token], y: &mut [&mut [f32]]) -> bool {
    macro_rules! run {
        ($format:ty) => {{
            let (mut x, mut y) = (x, y);
            while !x.is_empty() {
                // SAFETY: by the caller.
                let done = unsafe {
                    match x.len() {
                        4.. => run::<$format, 4, 1>(w, row_bytes, x, y),
                        2.. => run::<$format, 2, 2>(w, row_bytes, x, y),
                        _ => run::<$format, 1, 4>(w, row_bytes, x, y),
                    }
                };
                (x, y) = (&x[done..], &mut y[done..]);
            }
        }};
    }
    match ty {
        QuantType::Q4_0 => run!(Q4_0),
        QuantType::Q4_1 => run!(Q4_1),
        QuantType::Q5_0 => run!(Q5_0),
        QuantType::Q5_1 => run!(Q5_1),
        QuantType::Q8_0 => run!(Q8_0),
        QuantType::IQ4_NL => run!(Iq4Nl),
        QuantType::MXFP4 => run!(Mxfp4),
        QuantType::Q2_K => run!(Q2K),
        QuantType::Q3_K => run!(Q3K),
        QuantType::Q4_K => run!(Q4K),
        QuantType::Q5_K => run!(Q5K),
        QuantType::Q6_K => run!(Q6K),
        QuantType::IQ4_XS => run!(Iq4Xs),
        _ => return false,
    }
    true
}

/// Unpacks whole blocks of each row as [`codes::unpack`](crate::quant::codes::unpack) does; false where there is no code for
/// the type, or blocks do not fill chunks.
///
/// # Safety
/// The features of `run` are there.
pub(super) unsafe fn unpack(
    ty: QuantType,
    w: &[u8],
    row_bytes: usize,
    from: usize,
    bytes: usize,
    to: &mut Codes<'_>,
) -> bool {
    macro_rules! unpack {
        ($format:ty) => {{
            // SAFETY: by the caller.
            unsafe { unpack_rows::<$format>(w, row_bytes, from, bytes, to) }
        }};
    }
    match ty {
        QuantType::Q4_0 => unpack!(Q4_0),
        QuantType::Q5_0 => unpack!(Q5_0),
        QuantType::Q8_0 => unpack!(Q8_0),
        QuantType::IQ4_NL => unpack!(Iq4Nl),
        QuantType::MXFP4 => unpack!(Mxfp4),
        QuantType::Q2_K => unpack!(Q2K),
        QuantType::Q3_K => unpack!(Q3K),
        QuantType::Q4_K => unpack!(Q4K),
        QuantType::Q5_K => unpack!(Q5K),
        QuantType::Q6_K => unpack!(Q6K),
        QuantType::IQ4_XS => unpack!(Iq4Xs),
        _ => false,
    }
}

/// # Safety
/// The features are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c")]
unsafe fn unpack_rows<B: Blocks>(w: &[u8], row_bytes: usize, from: usize, bytes: usize, to: &mut Codes<'_>) -> bool {
    let chunk_bytes = B::CHUNK / B::COLUMNS * B::BYTES;
    if !bytes.is_multiple_of(chunk_bytes) {
        return false;
    }
    let (chunks, entries) = (bytes / chunk_bytes, to.stride / GROUP);
    // Lengths that the loop below counts on.
    assert!(to.stride.is_multiple_of(GROUP) && chunks * B::CHUNK <= to.stride && from + bytes <= row_bytes);
    let rows = to.codes.chunks_exact_mut(to.stride).zip(to.scales.chunks_exact_mut(entries));
    let rows = rows.zip(to.minima.chunks_exact_mut(entries));
    for (row, ((codes, scales), minima)) in w.chunks_exact(row_bytes).zip(rows) {
        for c in 0..chunks {
            let b = row[from + c * chunk_bytes..].as_ptr();
            for line in (0..chunk_bytes).step_by(64) {
                // A prefetch touches nothing, at whatever address.
                _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(2048 + line).cast());
            }
            // SAFETY: a chunk is there, and room for what it gives.
            unsafe {
                let chunk = B::chunk(b);
                for p in 0..B::CHUNK / PART {
                    let at = c * B::CHUNK + p * PART;
                    _mm512_storeu_si512(codes.as_mut_ptr().add(at).cast(), chunk.codes[p]);
                    // One of each four lanes.
                    let four = _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, chunk.scales[p]));
                    _mm_storeu_ps(scales.as_mut_ptr().add(at / GROUP), four);
                }
                if B::MINIMA {
                    for h in 0..B::CHUNK / STEP {
                        let at = (c * B::CHUNK + h * STEP) / GROUP;
                        _mm256_storeu_ps(minima.as_mut_ptr().add(at), chunk.minima[h]);
                    }
                }
            }
        }
    }
    true
}

/// The first `T` tokens; returns `T`. Goes through `S` parts of the rows side by side: one core has more reads under way in several
/// streams than in one (a loop that only reads, with the same prefetches, got 14.8 GB/s in one stream and 17.3 in four on one core of a Xeon).
///
/// # Safety
/// The features are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c")]
#[allow(clippy::needless_range_loop, reason = "rows are counted on both sides")]
unsafe fn run<B: Blocks, const T: usize, const S: usize>(
    w: &[u8],
    row_bytes: usize,
    x: &[Token],
    y: &mut [&mut [f32]],
) -> usize {
    let chunk_bytes = B::CHUNK / B::COLUMNS * B::BYTES;
    let (chunks, rest) = (row_bytes / chunk_bytes, row_bytes % chunk_bytes);
    let cols = (chunks * B::CHUNK + rest / B::BYTES * B::COLUMNS).next_multiple_of(STEP);
    assert!(row_bytes.is_multiple_of(B::BYTES) && x.len() >= T && y.len() >= T);
    let count = w.len() / row_bytes;
    for (x, y) in x.iter().zip(y.iter()).take(T) {
        // Lengths that `dots` counts on.
        assert!(x.q.len() == cols && x.offsets.len() == cols / 4 && x.spread.len() == cols / 4);
        assert!(x.sums.len() == cols / 16 && y.len() == count);
    }
    let row = |r: usize| &w[r * row_bytes..(r + 1) * row_bytes];
    let part = count / S;
    for r in 0..part {
        // SAFETY: the lengths were checked.
        let sums = unsafe { dots::<B, T, S>(std::array::from_fn(|s| row(s * part + r)), x) };
        for (s, sums) in sums.iter().enumerate() {
            y.iter_mut().zip(sums).for_each(|(y, sum)| y[s * part + r] = *sum);
        }
    }
    for r in S * part..count {
        // SAFETY: the lengths were checked.
        let [sums] = unsafe { dots::<B, T, 1>([row(r)], x) };
        y.iter_mut().zip(sums).for_each(|(y, sum)| y[r] = sum);
    }
    T
}

/// Products of rows of one length with the first `T` tokens.
///
/// # Safety
/// The features are there, and the tokens are as long as the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c")]
#[inline]
unsafe fn dots<B: Blocks, const T: usize, const S: usize>(rows: [&[u8]; S], x: &[Token]) -> [[f32; T]; S] {
    let blocks = B::CHUNK / B::COLUMNS;
    let (row_bytes, chunk_bytes) = (rows[0].len(), blocks * B::BYTES);
    let (chunks, rest) = (row_bytes / chunk_bytes, row_bytes % chunk_bytes);
    let mut sums = [[_mm512_setzero_ps(); T]; S];
    let mut low = [[_mm256_setzero_ps(); T]; S];
    let mut multiply = |s: usize, b: *const u8, c: usize| {
        for line in (0..chunk_bytes).step_by(64) {
            // A prefetch touches nothing, at whatever address.
            _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(AHEAD_BYTES + line).cast());
        }
        // SAFETY: the caller of this closure has a chunk there. Parts are whole in all lists of a token.
        unsafe {
            let chunk = B::chunk(b);
            for p in 0..B::CHUNK / PART {
                let at = c * (B::CHUNK / PART) + p;
                for t in 0..T {
                    let q = _mm512_loadu_si512(x[t].q.as_ptr().add(at * PART).cast());
                    let offsets = _mm512_loadu_si512(x[t].offsets.as_ptr().add(at * LANES).cast());
                    let d = _mm512_loadu_ps(x[t].spread.as_ptr().add(at * LANES));
                    let products = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(offsets, chunk.codes[p], q));
                    let scaled = _mm512_mul_ps(_mm512_mul_ps(chunk.scales[p], d), products);
                    sums[s][t] = _mm512_add_ps(sums[s][t], scaled);
                }
            }
            if B::MINIMA {
                for h in 0..B::CHUNK / STEP {
                    let at = c * (B::CHUNK / STEP) + h;
                    for t in 0..T {
                        let of_x = _mm256_loadu_ps(x[t].sums.as_ptr().add(8 * at));
                        low[s][t] = _mm256_add_ps(low[s][t], _mm256_mul_ps(chunk.minima[h], of_x));
                    }
                }
            }
        }
    };
    for c in 0..chunks {
        for (s, row) in rows.iter().enumerate() {
            multiply(s, row[c * chunk_bytes..].as_ptr(), c);
        }
    }
    if rest > 0 {
        for (s, row) in rows.iter().enumerate() {
            // Scales of zero for what is not there. No chunk of several blocks is longer.
            let mut last = [0u8; 4 * 34];
            last[..rest].copy_from_slice(&row[row_bytes - rest..]);
            multiply(s, last.as_ptr(), chunks);
        }
    }
    std::array::from_fn(|s| std::array::from_fn(|t| reduce(sums[s][t], low[s][t])))
}

/// The sum of all lanes, in the order of the plain loops.
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
#[inline]
fn reduce(lanes: __m512, low: __m256) -> f32 {
    let (first, second) = (_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
    let eight = _mm256_add_ps(first, _mm256_add_ps(second, low));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
