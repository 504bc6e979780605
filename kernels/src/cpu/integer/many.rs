//! Many tokens: tiles of weights are unpacked once and multiplied with all tokens. Lanes run over tokens, as in
//! [`gemm`](crate::cpu::gemm): an element is the sum of its groups in ascending order, whatever the other tokens are.

use super::Way;
use crate::cpu::aligned::Aligned;
use crate::cpu::gemm::{DEPTH, PANEL, TILE};
use crate::cpu::parallel;
use crate::cpu::span::Rows as Out;
use crate::quant::QuantType;
use crate::quant::codes::{self, Codes, Format, GROUP};

#[cfg(target_arch = "x86_64")]
use super::amx::{self, Tiles};

/// Rows that are multiplied at a time.
pub(super) const ROWS: usize = 4;

/// Activations in panels of [`PANEL`] tokens, made ready for weights of one format.
#[derive(Default)]
pub(in crate::cpu) struct Panels {
    cols: usize,
    /// Columns that share a scale in the weights: 16 or 32.
    group: usize,
    /// `[panel][col / 4][lane][col % 4]`.
    q: Aligned<i8>,
    /// `[panel][group][lane]`: scales.
    d: Aligned<f32>,
    /// `[panel][group][lane]`: sums of the codes times the format's zero, negated.
    offsets: Aligned<i32>,
    /// `[panel][group][lane]`: scales times the sums.
    sums: Aligned<f32>,
}

impl Panels {
    /// Columns that share a scale in the weights: 16 or 32.
    pub(in crate::cpu) fn group(&self) -> usize {
        self.group
    }

    /// Takes in rows of [`Quantize`](crate::ops::Quantize).
    pub(in crate::cpu) fn fill(&mut self, format: Format, x: &[(&[i8], &[f32])], cols: usize) {
        let group = if format.wide { 2 * GROUP } else { GROUP };
        let panels = x.len().div_ceil(PANEL);
        (self.cols, self.group) = (cols, group);
        let entries = panels * PANEL * (cols / group);
        self.q.resize(panels * PANEL * cols);
        self.d.resize(entries);
        self.offsets.resize(entries);
        self.sums.resize(entries);
        let zero = i32::from(format.zero);
        let entries = cols / group * PANEL;
        let (q_out, d_out) = (Out::over(&mut self.q, panels, cols * PANEL), Out::over(&mut self.d, panels, entries));
        let offsets = Out::over(&mut self.offsets, panels, entries);
        let sums = Out::over(&mut self.sums, panels, entries);
        parallel::each(panels, cols * PANEL / 4, |p| {
            let x = &x[p * PANEL..x.len().min((p + 1) * PANEL)];
            // SAFETY: each panel belongs to one task.
            let (panel, d_out) = unsafe { (q_out.row_mut(p, 0), d_out.row_mut(p, 0)) };
            // SAFETY: as above.
            let (offsets, sums) = unsafe { (offsets.row_mut(p, 0), sums.row_mut(p, 0)) };
            for lane in 0..PANEL {
                // Lanes without a token are computed and never read.
                let (q, scales) = x[lane.min(x.len() - 1)];
                for (k, four) in q.as_chunks::<4>().0.iter().enumerate() {
                    panel[(k * PANEL + lane) * 4..][..4].copy_from_slice(four);
                }
                for (g, q) in q.chunks_exact(group).enumerate() {
                    let d = scales[g * group / (2 * GROUP) * 2];
                    let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
                    d_out[g * PANEL + lane] = d;
                    offsets[g * PANEL + lane] = -zero * sum;
                    sums[g * PANEL + lane] = d * sum as f32;
                }
            }
        });
    }
}

/// Unpacked weights of a tile.
pub(in crate::cpu) struct Buffers {
    codes: Aligned<u8>,
    scales: Aligned<f32>,
    minima: Aligned<f32>,
    /// Sums of tiles, before they are scaled; groups whose sums are here at a time.
    #[cfg(target_arch = "x86_64")]
    sums: [Aligned<i32>; 2],
    #[cfg(target_arch = "x86_64")]
    pub(super) batch: usize,
}

impl Default for Buffers {
    fn default() -> Self {
        Self {
            codes: Aligned::default(),
            scales: Aligned::default(),
            minima: Aligned::default(),
            #[cfg(target_arch = "x86_64")]
            sums: Default::default(),
            #[cfg(target_arch = "x86_64")]
            batch: amx::BATCH,
        }
    }
}

/// One tile: `acc[panel][r][lane] = w[r] . x[panel, lane]`, for at most [`TILE`] rows. `acc` has `TILE * PANEL` a panel.
pub(in crate::cpu) fn tile(
    way: Way,
    (ty, format): (QuantType, Format),
    w: &[u8],
    row_bytes: usize,
    x: &Panels,
    buffers: &mut Buffers,
    acc: &mut [f32],
) {
    acc.fill(0.0);
    let rows = w.len() / row_bytes;
    buffers.codes.resize(TILE * DEPTH);
    buffers.scales.resize(TILE * DEPTH / GROUP);
    buffers.minima.resize(TILE * DEPTH / GROUP);
    let (codes, scales, minima) = (&mut *buffers.codes, &mut *buffers.scales, &mut *buffers.minima);
    #[cfg(target_arch = "x86_64")]
    let mut tiles = match way {
        Way::Tiles(unit) => Some(Tiles::new(unit, x.group, buffers.batch, &mut buffers.sums)),
        _ => None,
    };
    let way = way.without_tiles();
    for start in (0..x.cols).step_by(DEPTH) {
        let depth = DEPTH.min(x.cols - start);
        let from = start / ty.block_size() * ty.type_bytes();
        let bytes = depth / ty.block_size() * ty.type_bytes();
        let mut to = Codes { stride: DEPTH, codes, scales, minima };
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the way is one of this machine.
        let done = way == Way::Vnni && unsafe { super::fused::unpack(ty, w, row_bytes, from, bytes, &mut to) };
        #[cfg(not(target_arch = "x86_64"))]
        let done = false;
        if !done {
            codes::unpack(way.level(), ty, w, row_bytes, from, bytes, &mut to);
        }
        let (first, groups) = (start / x.group * PANEL, depth / x.group * PANEL);
        let job = |p: usize| {
            let entries = p * (x.cols / x.group) * PANEL + first;
            Job {
                group: x.group,
                signed: format.zero == 128,
                minima: format.minima,
                q: &x.q[(p * x.cols + start) * PANEL..][..depth * PANEL],
                d: &x.d[entries..entries + groups],
                offsets: &x.offsets[entries..entries + groups],
                sums: &x.sums[entries..entries + groups],
            }
        };
        // Two panels at a time, which share the weights' codes.
        for (pair, acc) in acc.chunks_mut(2 * TILE * PANEL).enumerate() {
            let (acc, second) = acc.split_at_mut(TILE * PANEL);
            let jobs = (job(2 * pair), (!second.is_empty()).then(|| job(2 * pair + 1)));
            let weights = |r: usize, rows: usize| Rows {
                codes: &codes[r * DEPTH..(r + rows) * DEPTH],
                scales: &scales[r * DEPTH / GROUP..(r + rows) * DEPTH / GROUP],
                minima: &minima[r * DEPTH / GROUP..(r + rows) * DEPTH / GROUP],
            };
            #[cfg(target_arch = "x86_64")]
            if let Some(tiles) = &mut tiles {
                for r in (0..rows).step_by(amx::ROWS) {
                    let weights = weights(r, amx::ROWS);
                    let own = r * PANEL..(r + amx::ROWS) * PANEL;
                    match &jobs {
                        (first, None) => tiles.multiply(way.level(), [first], &weights, [&mut acc[own]]),
                        (first, Some(other)) => {
                            let acc = [&mut acc[own.clone()], &mut second[own]];
                            tiles.multiply(way.level(), [first, other], &weights, acc);
                        }
                    }
                }
                continue;
            }
            for r in (0..rows).step_by(ROWS) {
                let weights = weights(r, ROWS);
                let own = r * PANEL..(r + ROWS) * PANEL;
                match &jobs {
                    (first, None) => first.run(way, &weights, &mut acc[own]),
                    (first, Some(other)) => {
                        first.run_two(other, way, &weights, &mut acc[own.clone()], &mut second[own])
                    }
                }
            }
        }
    }
}

/// A chunk of a panel.
pub(super) struct Job<'a> {
    pub(super) group: usize,
    /// Whether codes fill all of a byte: signed integers, 128 greater.
    pub(super) signed: bool,
    pub(super) minima: bool,
    pub(super) q: &'a [i8],
    pub(super) d: &'a [f32],
    pub(super) offsets: &'a [i32],
    pub(super) sums: &'a [f32],
}

/// [`ROWS`] unpacked rows, [`DEPTH`] apart. Rows that are not there are computed and never read.
pub(super) struct Rows<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) minima: &'a [f32],
}

impl Job<'_> {
    /// Lengths that the loops below, and those with intrinsics, count on.
    fn check(&self, w: &Rows<'_>, acc: &[f32]) {
        let entries = self.q.len() / self.group;
        assert!(self.q.len() <= DEPTH * PANEL && self.q.len().is_multiple_of(self.group * PANEL));
        assert!(self.d.len() == entries && self.offsets.len() == entries && self.sums.len() == entries);
        assert!(w.codes.len() == ROWS * DEPTH && w.scales.len() == ROWS * DEPTH / GROUP);
        assert!(w.minima.len() == ROWS * DEPTH / GROUP && acc.len() == ROWS * PANEL);
    }

    /// `acc[r][lane] += w[r] . q[lane]`.
    fn run(&self, way: Way, w: &Rows<'_>, acc: &mut [f32]) {
        self.check(w, acc);
        #[cfg(target_arch = "x86_64")]
        match way {
            // SAFETY: the way is one of this machine; lengths were checked above.
            Way::Vnni => return unsafe { super::x86::many_vnni([self], w, [acc]) },
            // SAFETY: as above.
            Way::Avx2 => return unsafe { super::x86::many_avx2(self, w, acc) },
            // Tiles are taken out above.
            Way::Plain | Way::Tiles(_) => {}
        }
        let _ = way;
        for (r, acc) in acc.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            self.plain(w, r, acc);
        }
    }

    /// The same for two panels of one chunk.
    fn run_two(&self, other: &Self, way: Way, w: &Rows<'_>, acc: &mut [f32], other_acc: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if way == Way::Vnni {
            self.check(w, acc);
            other.check(w, other_acc);
            assert!(self.group == other.group && self.minima == other.minima && self.d.len() == other.d.len());
            // SAFETY: the way is one of this machine; lengths were checked above.
            return unsafe { super::x86::many_vnni([self, other], w, [acc, other_acc]) };
        }
        self.run(way, w, acc);
        other.run(way, w, other_acc);
    }

    fn plain(&self, w: &Rows<'_>, r: usize, acc: &mut [f32; PANEL]) {
        for (g, q) in self.q.chunks_exact(self.group * PANEL).enumerate() {
            let entry = r * (DEPTH / GROUP) + g * self.group / GROUP;
            let codes = &w.codes[r * DEPTH + g * self.group..][..self.group];
            let mut products = [0i32; PANEL];
            for (codes, q) in codes.as_chunks::<4>().0.iter().zip(q.as_chunks::<{ 4 * PANEL }>().0) {
                for (product, q) in products.iter_mut().zip(q.as_chunks::<4>().0) {
                    *product += codes.iter().zip(q).map(|(&code, &q)| i32::from(code) * i32::from(q)).sum::<i32>();
                }
            }
            for (lane, product) in products.into_iter().enumerate() {
                let at = g * PANEL + lane;
                acc[lane] += w.scales[entry] * self.d[at] * (product + self.offsets[at]) as f32;
                if self.minima {
                    acc[lane] += w.minima[entry] * self.sums[at];
                }
            }
        }
    }
}
