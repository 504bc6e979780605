//! Sums of groups become floats: what the plain loop does with them, element by element in the same order.

// Counted loops over register arrays, which unroll wholly.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::{ROWS, SUMS};
use crate::cpu::gemm::{DEPTH, PANEL};
use crate::cpu::integer::many::{Job, Rows};
use crate::cpu::simd::Level;
use crate::quant::codes::GROUP;

/// Rows at a time, of which all sums are in registers.
const AT_ONCE: usize = 8;

/// `acc[panel][r][lane] += scales * sums + minima` for some groups; `sums` is `[group][panel][row][lane]`, from the first
/// of them on.
pub(super) fn add<const V: usize>(
    level: Level,
    jobs: [&Job<'_>; V],
    w: &Rows<'_>,
    groups: Range<usize>,
    sums: &[i32],
    acc: [&mut [f32]; V],
) {
    // All that is touched, once for all.
    assert!(sums.len() >= groups.len() * V * SUMS && acc.iter().all(|acc| acc.len() >= SUMS));
    let (lanes, group) = (groups.end * PANEL, jobs.first().map_or(GROUP, |job| job.group));
    assert!(jobs.iter().all(|job| job.d.len() >= lanes && job.sums.len() >= lanes && job.group == group));
    assert!(groups.end * group <= DEPTH && w.scales.len() >= ROWS * DEPTH / GROUP);
    assert!(w.minima.len() >= ROWS * DEPTH / GROUP);
    let minima = jobs.iter().any(|job| job.minima);
    match (level, minima) {
        // SAFETY: the level is one of this machine; lengths were checked above.
        (Level::Avx512, true) => unsafe { add_avx512::<V, true>(jobs, w, groups, sums, acc) },
        // SAFETY: as above.
        (Level::Avx512, false) => unsafe { add_avx512::<V, false>(jobs, w, groups, sums, acc) },
        _ => add_plain(jobs, w, groups, sums, acc),
    }
}

fn add_plain<const V: usize>(
    jobs: [&Job<'_>; V],
    w: &Rows<'_>,
    groups: Range<usize>,
    sums: &[i32],
    acc: [&mut [f32]; V],
) {
    for (v, (job, acc)) in jobs.into_iter().zip(acc).enumerate() {
        for (r, acc) in acc.as_chunks_mut::<PANEL>().0.iter_mut().take(ROWS).enumerate() {
            for (i, g) in groups.clone().enumerate() {
                let entry = r * (DEPTH / GROUP) + g * job.group / GROUP;
                let sums = &sums[(i * V + v) * SUMS + r * PANEL..][..PANEL];
                for (lane, &sum) in sums.iter().enumerate() {
                    let at = g * PANEL + lane;
                    acc[lane] += w.scales[entry] * job.d[at] * sum as f32;
                    if job.minima {
                        acc[lane] += w.minima[entry] * job.sums[at];
                    }
                }
            }
        }
    }
}

/// # Safety
/// Lengths as `add` checks them.
#[target_feature(enable = "avx512f")]
unsafe fn add_avx512<const V: usize, const MINIMA: bool>(
    jobs: [&Job<'_>; V],
    w: &Rows<'_>,
    groups: Range<usize>,
    sums: &[i32],
    acc: [&mut [f32]; V],
) {
    let acc = acc.map(<[f32]>::as_mut_ptr);
    let group = jobs.first().map_or(GROUP, |job| job.group);
    // SAFETY: groups, rows and panels are whole in all lists.
    unsafe {
        for first in (0..ROWS).step_by(AT_ONCE) {
            let mut totals = [[_mm512_setzero_ps(); V]; AT_ONCE];
            for r in 0..AT_ONCE {
                for v in 0..V {
                    totals[r][v] = _mm512_loadu_ps(acc[v].add((first + r) * PANEL));
                }
            }
            for (i, g) in groups.clone().enumerate() {
                let d = jobs.map(|job| _mm512_loadu_ps(job.d.as_ptr().add(g * PANEL)));
                let of_x = jobs.map(|job| _mm512_loadu_ps(job.sums.as_ptr().add(g * PANEL)));
                for r in 0..AT_ONCE {
                    let entry = (first + r) * (DEPTH / GROUP) + g * group / GROUP;
                    let scale = _mm512_set1_ps(*w.scales.as_ptr().add(entry));
                    for v in 0..V {
                        let at = (i * V + v) * SUMS + (first + r) * PANEL;
                        let products = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.as_ptr().add(at).cast()));
                        let scaled = _mm512_mul_ps(_mm512_mul_ps(scale, d[v]), products);
                        totals[r][v] = _mm512_add_ps(totals[r][v], scaled);
                        if MINIMA {
                            let minimum = _mm512_set1_ps(*w.minima.as_ptr().add(entry));
                            totals[r][v] = _mm512_add_ps(totals[r][v], _mm512_mul_ps(minimum, of_x[v]));
                        }
                    }
                }
            }
            for r in 0..AT_ONCE {
                for v in 0..V {
                    _mm512_storeu_ps(acc[v].add((first + r) * PANEL), totals[r][v]);
                }
            }
        }
    }
}
