//! Which experts a [cache](super::expert_cache) keeps: those that are chosen most often, and no change without a clear gain.

/// What is kept of each block, by how often its experts were chosen.
#[derive(Debug)]
pub(super) struct Residents {
    blocks: Vec<Kept>,
    /// Bytes of copies that one change may take.
    most_bytes: usize,
    changes: u32,
    tally: ExpertTally,
}

/// Experts of one block.
#[derive(Debug)]
struct Kept {
    /// The expert in each slot.
    experts: Vec<usize>,
    /// The counts that were read last, of every expert.
    counts: Vec<i32>,
    expert_bytes: usize,
}

/// How often experts were chosen, and how often they were there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ExpertTally {
    /// Experts that tokens chose, one at a time.
    pub chosen: u64,
    /// Of those, experts that the cache had.
    pub hits: u64,
    /// Experts that took the place of others.
    pub came: u64,
}

impl ExpertTally {
    /// Without what was there before.
    pub(crate) fn since(self, before: Self) -> Self {
        let (chosen, hits) = (self.chosen.saturating_sub(before.chosen), self.hits.saturating_sub(before.hits));
        Self { chosen, hits, came: self.came.saturating_sub(before.came) }
    }
}

/// An expert that takes another's slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Swap {
    pub(super) block: usize,
    pub(super) slot: usize,
    pub(super) expert: usize,
}

/// Counts are halved every so many changes, so that old ones fade: too often, and chance looks like use.
const HALVED_EVERY: u32 = 4;

/// Whether one count is above another for more than chance: by over three standard deviations of their difference.
fn is_clear(more: i32, less: i32) -> bool {
    let (more, less) = (i64::from(more), i64::from(less));
    more > less && (more - less).saturating_mul(more - less) > 9 * (more + less)
}

impl Residents {
    /// The first experts of each block, given as (slots, experts, bytes of an expert); slots are at most as many as experts.
    pub(super) fn new(blocks: impl IntoIterator<Item = (usize, usize, usize)>, most_bytes: usize) -> Self {
        let kept = |(slots, experts, expert_bytes): (usize, usize, usize)| Kept {
            experts: (0..slots.min(experts)).collect(),
            counts: vec![0; experts],
            expert_bytes,
        };
        Self { blocks: blocks.into_iter().map(kept).collect(), most_bytes, changes: 0, tally: ExpertTally::default() }
    }

    /// Of every expert, block after block, the slot that it is in, or -1.
    pub(super) fn table(&self) -> Vec<i32> {
        let mut table = Vec::new();
        for block in &self.blocks {
            let start = table.len();
            table.resize(start + block.counts.len(), -1);
            for (slot, expert) in block.experts.iter().enumerate() {
                if let Some(place) = table.get_mut(start + expert) {
                    *place = i32::try_from(slot).unwrap_or(-1);
                }
            }
        }
        table
    }

    /// The expert of every slot, block after block.
    pub(super) fn experts(&self) -> Vec<i32> {
        let experts = self.blocks.iter().flat_map(|block| &block.experts);
        experts.map(|&expert| i32::try_from(expert).unwrap_or(-1)).collect()
    }

    /// Takes the counts of every expert, block after block, into the tally.
    pub(super) fn note(&mut self, counts: &[i32]) -> ExpertTally {
        let mut rest = counts;
        for block in &mut self.blocks {
            let (ours, others) = rest.split_at_checked(block.counts.len()).unwrap_or((rest, &[]));
            rest = others;
            for (expert, (count, last)) in ours.iter().zip(&mut block.counts).enumerate() {
                let new = u64::try_from(count.wrapping_sub(*last)).unwrap_or(0);
                *last = *count;
                self.tally.chosen += new;
                self.tally.hits += if block.experts.contains(&expert) { new } else { 0 };
            }
        }
        self.tally
    }

    /// From the counts of every expert, block after block: who comes in whose place, the greatest gains first, as far as bytes
    /// go; and the counts to go on with, if these are to be others.
    pub(super) fn change(&mut self, counts: &[i32]) -> (Vec<Swap>, Option<Vec<i32>>) {
        self.note(counts);
        let mut gains = Vec::new();
        for (number, block) in self.blocks.iter().enumerate() {
            let count = |expert: usize| block.counts.get(expert).copied().unwrap_or(0);
            let mut there: Vec<(i32, usize)> =
                block.experts.iter().enumerate().map(|(slot, &expert)| (count(expert), slot)).collect();
            let mut others: Vec<(i32, usize)> = (0..block.counts.len())
                .filter(|expert| !block.experts.contains(expert))
                .map(|expert| (count(expert), expert))
                .collect();
            // Least used first; most used first, of equal ones the first.
            there.sort_unstable();
            others.sort_unstable_by_key(|&(count, expert)| (std::cmp::Reverse(count), expert));
            let pairs = others.into_iter().zip(there).take_while(|((more, _), (less, _))| is_clear(*more, *less));
            gains.extend(
                pairs.map(|((more, expert), (less, slot))| (more - less, Swap { block: number, slot, expert })),
            );
        }
        gains.sort_by_key(|&(gain, swap)| (std::cmp::Reverse(gain), swap.block, swap.expert));
        let (mut swaps, mut bytes) = (Vec::new(), 0usize);
        for (_, swap) in gains {
            let Some(block) = self.blocks.get_mut(swap.block) else { continue };
            bytes = bytes.saturating_add(block.expert_bytes);
            // A single one may be larger than that.
            if bytes > self.most_bytes && !swaps.is_empty() {
                break;
            }
            if let Some(place) = block.experts.get_mut(swap.slot) {
                *place = swap.expert;
                swaps.push(swap);
            }
        }
        self.tally.came += swaps.len() as u64;
        self.changes = self.changes.wrapping_add(1);
        let halved = self.changes.is_multiple_of(HALVED_EVERY).then(|| self.halve());
        (swaps, halved)
    }

    fn halve(&mut self) -> Vec<i32> {
        let counts = self.blocks.iter_mut().flat_map(|block| &mut block.counts);
        counts
            .map(|count| {
                *count /= 2;
                *count
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
