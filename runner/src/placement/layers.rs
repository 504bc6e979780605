//! Which device each block is on, where there are several.

use super::Placement;

impl Placement {
    /// Where block `index` of `blocks` is among so many devices, by its place: blocks go as a whole, in order, each device as many as its
    /// [share](Self::shares). As in llama.cpp, the output matrix counts as one more block behind the last, and blocks that stay
    /// on the host do not count. Blocks that read the cache of another are on its device, and so is all between them.
    #[must_use]
    pub fn device(&self, index: usize, blocks: usize, devices: usize) -> usize {
        if devices < 2 {
            return 0;
        }
        let shared = self.follows.iter().map(|(_, source)| *source).min();
        let last = self.follows.iter().map(|(block, _)| *block).max();
        let index = match (shared, last) {
            // They go where the middle one of them would.
            (Some(first), Some(last)) if (first..=last).contains(&index) => usize::midpoint(first, last),
            _ => index,
        };
        let layers = self.device_layers.map_or(blocks + 1, |layers| layers.min(blocks + 1));
        let first = blocks + 1 - layers;
        let place = index.saturating_sub(first) as f64 / layers.max(1) as f64;
        let share = |device: usize| match self.shares.is_empty() {
            true => 1.0,
            false => self.shares.get(device).copied().unwrap_or(0.0).max(0.0),
        };
        let all: f64 = (0..devices).map(share).sum();
        // Shares that say nothing are equal ones.
        let share = |device: usize| if all > 0.0 { share(device) / all } else { 1.0 / devices as f64 };
        let mut end = 0.0;
        for device in 0..devices {
            end += share(device);
            if place < end {
                return device;
            }
        }
        // The sum may fall short of one by a little.
        (0..devices).rev().find(|device| share(*device) > 0.0).unwrap_or(0)
    }

    /// Whether the experts of block `index` stay on the host because its device keeps only those of later blocks.
    #[must_use]
    pub fn experts_stay(&self, index: usize, blocks: usize, devices: usize) -> bool {
        let device = self.device(index, blocks, devices);
        let Some(budget) = self.host_experts.get(device).copied().filter(|budget| *budget > 0) else { return false };
        let before = (0..index).filter(|other| self.device(*other, blocks, devices) == device).count();
        before < budget
    }
}

#[cfg(test)]
mod tests;
