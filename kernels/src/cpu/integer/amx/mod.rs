//! Many tokens with AMX: an instruction multiplies 16 weight rows with 16 tokens.
//!
//! A tile instruction takes 64 columns, but scales belong to 32 columns or 16, and the sums of each such group must leave
//! the tiles to be scaled, in the order of the plain loops. So one instruction does one group: rows of A are 32 (or 16)
//! codes, as they lie in the unpacked weights; B is a group of a panel, whose order (four columns of a token beside each
//! other, then the next token) is that of the tiles already; C starts as the panel's offsets, the same for all rows (a load
//! with stride 0), so that it ends as the exact sum that the plain loops scale. Then AVX-512 scales.
//!
//! # What it saves
//! By the rates of Sapphire Rapids, for 16 tokens, one row and 32 columns, in cycles of a core: VNNI multiplies for 4
//! (eight instructions, two a cycle) and scales for 2 (four instructions; 3 with minima), in the same two ports: 6 or 7.
//! A tile instruction takes 16 cycles for 16 rows whatever the columns, so 1, in a unit of its own; storing its sums takes
//! 1 of the store port, loads (sums, C, A, B) 1.5 of two ports; scaling stays at 2 (3). Between 2 (all of it overlaps)
//! and 4.5 (nothing does) instead of 6 to 7. With groups of 16 columns the products are half as much for VNNI and the same for
//! tiles: 4 to 5 against 2 to 4.5. Both take 16 tokens at a time, so that this holds for any number of them; what tiles
//! cost once (a configuration for 48 rows and all their columns, some hundred cycles) is lost in a single panel of 1000 columns.
//!
//! # What was measured
//! One core of a Sapphire Rapids server, whole products, tiles against VNNI by `tiles_against_vnni`, sums of 8 groups at a time
//! (of 1, 2, 4, 8 and 16 the best or as good):
//!
//! | tokens | Q4_0 | Q8_0 | Q4_K | Q6_K (groups of 16) |
//! |---|---|---|---|---|
//! | 9 | 1.13 | 1.20 | 1.10 | 0.90 |
//! | 16 | 1.32 | 1.21 | 1.11 | 0.89 |
//! | 32 | 0.87 | 1.04 | 0.89 | 0.61 |
//! | 64 | 0.91 | 1.15 | 1.12 | 0.63 |
//! | 512 | 2.35 | 1.40 | 1.22 | 0.62 |
//!
//! The machine was shared and VNNI's own figures differed by half from row to row. Groups of 16 do not pay: an instruction does half as much.

mod hardware;
mod permit;
mod scale;

#[cfg(test)]
pub(in crate::cpu) mod emulated;

use std::marker::PhantomData;

use super::many::{Job, Rows};
use crate::cpu::aligned::Aligned;
use crate::cpu::gemm::{DEPTH, PANEL};
use crate::cpu::simd::Level;

pub(in crate::cpu) use permit::missing;

/// Weight rows of a tile.
pub(super) const ROWS: usize = 16;

/// Numbers of a tile of sums.
const SUMS: usize = ROWS * PANEL;

/// Groups whose sums are in memory at a time: few enough to stay in the first cache twice over.
pub(super) const BATCH: usize = 8;

/// From how many tokens on tiles are used, for groups of 16 columns and of 32.
///
/// As measured, see above. `usize::MAX` takes them out.
const FROM: [(usize, usize); 2] = [(16, usize::MAX), (32, 9)];

/// Whether so many tokens are worth it.
pub(super) fn worth(tokens: usize, group: usize) -> bool {
    FROM.iter().any(|&(columns, from)| columns == group && tokens >= from)
}

/// Whose tiles.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::cpu) enum Unit {
    /// Those that [`emulated`] makes up.
    #[cfg(test)]
    Emulated,
    /// Those of the processor. Made only where none are [`missing`].
    Hardware,
}

/// The tiles of this thread, configured for groups of one length until this is dropped.
pub(super) struct Tiles<'a> {
    unit: Unit,
    group: usize,
    batch: usize,
    /// Sums of two batches.
    sums: &'a mut [Aligned<i32>; 2],
    /// Tiles belong to a thread.
    _here: PhantomData<*const ()>,
}

/// A group's part of one panel, or of two.
struct Step<'a, const V: usize> {
    /// Rows of `DEPTH`.
    codes: &'a [u8],
    q: [&'a [i8]; V],
    offsets: [&'a [i32]; V],
    /// `[group][panel][row][lane]`.
    sums: &'a mut [i32],
    groups: usize,
}

impl<'a> Tiles<'a> {
    pub(super) fn new(unit: Unit, group: usize, batch: usize, sums: &'a mut [Aligned<i32>; 2]) -> Self {
        // What the configuration, and the loops below, count on.
        assert!((group == 16 || group == 32) && batch > 0);
        match unit {
            // SAFETY: there is hardware; the group was checked above.
            Unit::Hardware => unsafe { hardware::configure(group) },
            #[cfg(test)]
            Unit::Emulated => emulated::configure(&hardware::configuration(group)),
        }
        Self { unit, group, batch, sums, _here: PhantomData }
    }

    /// `acc[panel][r][lane] += w[r] . q[panel][lane]` for [`ROWS`] rows. Lengths are as `Job::check` checks them, and jobs
    /// alike.
    pub(super) fn multiply<const V: usize>(
        &mut self,
        level: Level,
        jobs: [&Job<'_>; V],
        w: &Rows<'_>,
        mut acc: [&mut [f32]; V],
    ) {
        let Some(first) = jobs.first() else { return };
        let (group, groups, batch) = (self.group, first.d.len() / PANEL, self.batch);
        assert!(group == first.group);
        self.sums.iter_mut().for_each(|sums| sums.resize(batch * V * SUMS));
        let starts = || (0..groups).step_by(batch);
        // The products of a batch are under way while the one before is scaled.
        for (b, start) in starts().map(Some).chain([None]).enumerate() {
            let [ahead, behind] = if b % 2 == 0 { [0, 1] } else { [1, 0] };
            if let Some(start) = start {
                let groups = batch.min(groups - start);
                let lanes = start * PANEL..(start + groups) * PANEL;
                let q = lanes.start * group..lanes.end * group;
                let sums = &mut self.sums[ahead][..groups * V * SUMS];
                let (q, offsets) = (jobs.map(|job| &job.q[q.clone()]), jobs.map(|job| &job.offsets[lanes.clone()]));
                products(self.unit, group, Step { codes: &w.codes[start * group..], q, offsets, sums, groups });
            }
            if let Some(start) = b.checked_sub(1).map(|b| b * batch) {
                let groups = start..groups.min(start + batch);
                scale::add(level, jobs, w, groups, &self.sums[behind], acc.each_mut().map(|acc| &mut **acc));
            }
        }
    }
}

/// The sums of some groups.
fn products<const V: usize>(unit: Unit, group: usize, step: Step<'_, V>) {
    let Step { codes, q, offsets, sums, groups } = step;
    // All that is touched, once for all.
    assert!(codes.len() >= (ROWS - 1) * DEPTH + groups * group && sums.len() >= groups * V * SUMS);
    assert!(q.iter().all(|q| q.len() >= groups * group * PANEL));
    assert!(offsets.iter().all(|offsets| offsets.len() >= groups * PANEL));
    let step = Step { codes, q, offsets, sums, groups };
    match unit {
        // SAFETY: there is hardware, configured for groups of this length; lengths were checked above.
        Unit::Hardware => unsafe { hardware::products(group, step) },
        #[cfg(test)]
        Unit::Emulated => emulated::products(group, step),
    }
}

impl Drop for Tiles<'_> {
    fn drop(&mut self) {
        match self.unit {
            // SAFETY: there is hardware.
            Unit::Hardware => unsafe { hardware::release() },
            #[cfg(test)]
            Unit::Emulated => emulated::release(),
        }
    }
}

#[cfg(test)]
mod tests;
