//! Few tokens: some weight rows are unpacked at a time, into the first cache, and multiplied with every token.

use std::cell::RefCell;

use super::Way;
use crate::cpu::quantize;
use crate::quant::QuantType;
use crate::quant::codes::{self, Codes, Format, GROUP};

/// Columns that are multiplied at a time; rows are filled up with zeros to a multiple of it.
pub(super) const STEP: usize = 128;

/// Codes that are unpacked at a time, about: a part of the first cache.
const BATCH: usize = 8 * 1024;

/// Lanes that sums are kept in: 16 of four columns.
pub(super) const LANES: usize = 16;

/// A token's activations, made ready for weights of one format.
pub(in crate::cpu) struct Token {
    /// Filled up with zeros to a multiple of [`STEP`].
    pub(super) q: Vec<i8>,
    /// For each four columns, their sum times the format's zero, negated.
    pub(super) offsets: Vec<i32>,
    /// For each [`GROUP`], its scale.
    pub(super) d: Vec<f32>,
    /// The same for each four columns.
    pub(super) spread: Vec<f32>,
    /// For each [`GROUP`], its scale times the sum of its codes.
    pub(super) sums: Vec<f32>,
}

impl Token {
    /// From a row of [`Quantize`](crate::ops::Quantize).
    pub(in crate::cpu) fn new(format: Format, q: &[i8], scales: &[f32]) -> Self {
        let cols = q.len().next_multiple_of(STEP);
        let mut token = Self { q: Vec::with_capacity(cols), offsets: vec![], d: vec![], spread: vec![], sums: vec![] };
        token.q.extend_from_slice(q);
        token.q.resize(cols, 0);
        let zero = i32::from(format.zero);
        let sum = |q: &[i8]| q.iter().map(|&q| i32::from(q)).sum::<i32>();
        token.offsets.extend(token.q.as_chunks::<4>().0.iter().map(|q| -zero * sum(q)));
        let groups = q.chunks_exact(GROUP).zip(scales.as_chunks::<2>().0.iter().flat_map(|[d, _]| [*d; 2]));
        for (q, d) in groups {
            token.d.push(d);
            token.sums.push(d * sum(q) as f32);
        }
        token.d.resize(cols / GROUP, 0.0);
        token.sums.resize(cols / GROUP, 0.0);
        token.spread.extend(token.d.iter().flat_map(|&d| [d; GROUP / 4]));
        token
    }
}

const _: () = assert!(quantize::GROUP == 2 * GROUP);

#[derive(Default)]
struct Buffers {
    codes: Vec<u8>,
    scales: Vec<f32>,
    minima: Vec<f32>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// `y[t][r] = w[r] . x[t]` for the rows in `w`. `y` has a slice per token.
pub(in crate::cpu) fn rows(
    way: Way,
    (ty, format): (QuantType, Format),
    w: &[u8],
    row_bytes: usize,
    x: &[Token],
    y: &mut [&mut [f32]],
) {
    let way = way.without_tiles();
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the way is one of this machine.
    if way == Way::Vnni && unsafe { super::fused::rows(ty, w, row_bytes, x, y) } {
        return;
    }
    let cols = row_bytes / ty.type_bytes() * ty.block_size();
    let stride = cols.next_multiple_of(STEP);
    let batch = (BATCH / stride).max(1);
    // Taken out, since a thread that waits may start another task meanwhile.
    let mut buffers = BUFFERS.take();
    buffers.codes.resize(batch * stride, 0);
    // What fills rows up must count for nothing.
    buffers.scales.clear();
    buffers.scales.resize(batch * stride / GROUP, 0.0);
    buffers.minima.clear();
    buffers.minima.resize(batch * stride / GROUP, 0.0);
    let Buffers { codes, scales, minima } = &mut buffers;
    for (b, w) in w.chunks(batch * row_bytes).enumerate() {
        let count = w.len() / row_bytes;
        let mut to = Codes { stride, codes, scales, minima };
        codes::unpack(way.level(), ty, w, row_bytes, 0, row_bytes, &mut to);
        let weights = Weights {
            codes: &codes[..count * stride],
            scales: &scales[..count * stride / GROUP],
            minima: format.minima.then_some(&minima[..count * stride / GROUP]),
            signed: format.zero == 128,
        };
        for (x, y) in x.iter().zip(y.iter_mut()) {
            weights.times(way, x, &mut y[b * batch..b * batch + count]);
        }
    }
    BUFFERS.set(buffers);
}

/// Unpacked rows.
pub(super) struct Weights<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) minima: Option<&'a [f32]>,
    /// Whether codes fill all of a byte: signed integers, 128 greater.
    pub(super) signed: bool,
}

impl Weights<'_> {
    /// `y[r] = w[r] . x`.
    fn times(&self, way: Way, x: &Token, y: &mut [f32]) {
        let (stride, entries) = (x.q.len(), x.q.len() / GROUP);
        // Lengths that the loops below, and those with intrinsics, count on.
        assert!(stride.is_multiple_of(STEP) && self.codes.len() == y.len() * stride);
        assert!(self.scales.len() == y.len() * entries && self.minima.is_none_or(|m| m.len() == y.len() * entries));
        assert!(x.offsets.len() == stride / 4 && x.d.len() == entries && x.sums.len() == entries);
        #[cfg(target_arch = "x86_64")]
        match way {
            // SAFETY: the way is one of this machine; lengths were checked above.
            Way::Vnni => return unsafe { super::x86::few_vnni(self, x, y) },
            // SAFETY: as above.
            Way::Avx2 => return unsafe { super::x86::few_avx2(self, x, y) },
            // Tiles are taken out above.
            Way::Plain | Way::Tiles(_) => {}
        }
        let _ = way;
        for (r, y) in y.iter_mut().enumerate() {
            let (codes, scales) = (&self.codes[r * stride..], &self.scales[r * entries..]);
            let minima = self.minima.map_or(&[][..], |minima| &minima[r * entries..(r + 1) * entries]);
            *y = plain(codes, scales, minima, x);
        }
    }
}

fn plain(codes: &[u8], scales: &[f32], minima: &[f32], x: &Token) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let fours = codes.as_chunks::<4>().0.iter().zip(x.q.as_chunks::<4>().0).zip(&x.offsets);
    for (i, ((codes, q), offset)) in fours.enumerate() {
        let product: i32 = codes.iter().zip(q).map(|(&code, &q)| i32::from(code) * i32::from(q)).sum();
        lanes[i % LANES] += scales[i / 4] * x.d[i / 4] * (product + offset) as f32;
    }
    let mut low = [0.0f32; 8];
    for (i, (minimum, sum)) in minima.iter().zip(&x.sums).enumerate() {
        low[i % 8] += minimum * sum;
    }
    reduce(&lanes, &low)
}

/// The sum of all lanes, in a fixed order.
#[inline(always)]
pub(super) fn reduce(lanes: &[f32; LANES], low: &[f32; 8]) -> f32 {
    let mut lanes = *lanes;
    for (l, low) in low.iter().enumerate() {
        lanes[l] += lanes[l + 8] + low;
    }
    for n in [4, 2, 1] {
        for l in 0..n {
            lanes[l] += lanes[l + n];
        }
    }
    lanes[0]
}
