//! What repairs cost: a table, refined by what is measured on the way.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Prices of one device, in µs. The default is what an NVIDIA H200 showed (driver 580, CUDA 13).
///
/// Prices per graph are given at 100, 300 and 1000 nodes and interpolated.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CostTable {
    /// Capturing the closure.
    pub capture_us: [f32; 3],
    /// Reading every node back.
    pub scan_us: [f32; 3],
    /// Instantiating.
    pub instantiate_us: [f32; 3],
    /// Putting new arguments into an exec.
    pub update_us: [f32; 3],
    /// Running the closure without a graph, until the device is done.
    pub eager_us: [f32; 3],
    /// Creating, mapping and opening one chunk of 2 MiB.
    pub chunk_us: f32,
    /// Launching a graph.
    pub launch_us: f32,
    /// Whether prices are refined by what is measured on the way.
    pub refine: bool,
}

impl Default for CostTable {
    fn default() -> Self {
        Self {
            capture_us: [60.0, 184.0, 1138.0],
            scan_us: [117.0, 576.0, 1215.0],
            instantiate_us: [127.0, 416.0, 1645.0],
            update_us: [3.5, 12.0, 54.0],
            eager_us: [412.0, 1294.0, 4080.0],
            chunk_us: 14.5 + 1.1 + 29.0,
            launch_us: 1.8,
            refine: true,
        }
    }
}

const NODES: [f32; 3] = [100.0, 300.0, 1000.0];
const CHUNK_BYTES: usize = 2 << 20;

/// What was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Capture,
    Scan,
    Instantiate,
    Update,
    Eager,
    Remap,
}

/// A table with a correction for each price: the running ratio of measured to predicted.
#[derive(Debug)]
pub(crate) struct Costs {
    table: CostTable,
    /// f32 bits, by step.
    ratios: [AtomicU32; 6],
}

impl Costs {
    pub(crate) fn new(table: CostTable) -> Self {
        Self { table, ratios: std::array::from_fn(|_| AtomicU32::new(1f32.to_bits())) }
    }

    fn listed(&self, step: Step, size: usize) -> f32 {
        let points = match step {
            Step::Capture => &self.table.capture_us,
            Step::Scan => &self.table.scan_us,
            Step::Instantiate => &self.table.instantiate_us,
            Step::Update => &self.table.update_us,
            Step::Eager => &self.table.eager_us,
            Step::Remap => return self.table.chunk_us * size.div_ceil(CHUNK_BYTES).max(1) as f32,
        };
        interpolate(points, size as f32)
    }

    fn ratio(&self, step: Step) -> f32 {
        f32::from_bits(self.ratios[step as usize].load(Ordering::Relaxed))
    }

    /// Predicted price, µs. `size` is in nodes; for a remap, in bytes.
    pub(crate) fn predict(&self, step: Step, size: usize) -> f32 {
        self.listed(step, size) * self.ratio(step)
    }

    /// Refines the price by one measurement.
    pub(crate) fn measured(&self, step: Step, size: usize, took: Duration) {
        if !self.table.refine {
            return;
        }
        let listed = self.listed(step, size).max(0.1);
        // One odd measurement (a page fault, a descheduled thread) must not turn the table over.
        let sample = (took.as_secs_f32() * 1e6 / listed).clamp(0.01, 100.0);
        let old = self.ratio(step);
        let new = if old == 1.0 { sample } else { old + 0.2 * (sample - old) };
        // A lost race loses one sample.
        self.ratios[step as usize].store(new.to_bits(), Ordering::Relaxed);
    }

    /// Whether the price is still the table's word for some other device.
    pub(crate) fn is_hearsay(&self, step: Step) -> bool {
        self.table.refine && self.ratio(step) == 1.0
    }

    /// Capturing anew into the old exec, if that is possible.
    pub(crate) fn update_us(&self, nodes: usize) -> f32 {
        self.predict(Step::Capture, nodes) + self.predict(Step::Scan, nodes) + self.predict(Step::Update, nodes)
    }

    /// Capturing anew into a new exec.
    pub(crate) fn recapture_us(&self, nodes: usize) -> f32 {
        self.predict(Step::Capture, nodes) + self.predict(Step::Scan, nodes) + self.predict(Step::Instantiate, nodes)
    }

    pub(crate) fn launch_us(&self) -> f32 {
        self.table.launch_us
    }
}

fn interpolate(points: &[f32; 3], nodes: f32) -> f32 {
    if nodes <= NODES[0] {
        return points[0] * (nodes / NODES[0]).max(0.01);
    }
    let i = if nodes <= NODES[1] { 0 } else { 1 };
    let slope = (points[i + 1] - points[i]) / (NODES[i + 1] - NODES[i]);
    points[i] + slope * (nodes - NODES[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_met_at_its_points_and_between_them() {
        let costs = Costs::new(CostTable::default());
        for (nodes, us) in [(100, 127.0), (300, 416.0), (1000, 1645.0), (200, 271.5)] {
            assert!((costs.predict(Step::Instantiate, nodes) - us).abs() < 0.01, "{nodes}");
        }
        assert!(costs.predict(Step::Capture, 2000) > 1138.0);
        assert!(costs.predict(Step::Capture, 0) > 0.0);
        assert!((costs.predict(Step::Remap, 5 << 20) - 3.0 * 44.6).abs() < 0.01);
    }

    #[test]
    fn measurements_refine_the_table() {
        let costs = Costs::new(CostTable::default());
        costs.measured(Step::Eager, 100, Duration::from_micros(824));
        assert!((costs.predict(Step::Eager, 300) - 2588.0).abs() < 1.0);
        costs.measured(Step::Eager, 100, Duration::from_secs(3600));
        assert!(costs.predict(Step::Eager, 100) < 412.0 * 23.0, "one absurd sample has bounded weight");
    }

    #[test]
    fn few_chunks_are_put_back_rather_than_captured_anew() {
        let costs = Costs::new(CostTable::default());
        assert!(costs.predict(Step::Remap, 2 << 20) < costs.update_us(300));
        assert!(costs.predict(Step::Remap, 252 << 20) > costs.recapture_us(300));
    }
}
