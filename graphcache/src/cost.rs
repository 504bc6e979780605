//! What repairs cost: a table, refined by what is measured on the way.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use evergraph_pool::driver::DeviceInfo;
use evergraph_pool::{Pool, Purpose};

/// Prices of one device, in µs.
///
/// Prices by size of the graph are given at 100, 300 and 1000 nodes; the price of pages at 1, 8 and 64 ranges of one chunk
/// and at chunks of 2 and 32 MiB. In between they are interpolated, beyond they go on as straight lines.
///
/// `benches/device.sh --only repair` (on the host device: `device --backend host --only repair`) measures a table and prints
/// it as the constants of this file.
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
    /// Launching the graph, until the device is done.
    pub launch_us: [f32; 3],
    /// Putting pages back under 1, 8 and 64 ranges (rows), with chunks of 2 and 32 MiB (columns): one chunk a range, all its
    /// driver calls.
    pub remap_us: [[f32; 2]; 3],
    /// Whether prices are refined by what is measured on the way.
    pub refine: bool,
}

impl Default for CostTable {
    fn default() -> Self {
        Self::h200()
    }
}

impl CostTable {
    /// The table of a kind of device: [`host`](Self::host) for the host device, else [`h200`](Self::h200) until this device
    /// has been measured.
    #[must_use]
    pub fn of(device: &DeviceInfo) -> Self {
        if device.backend == "host" { Self::host() } else { Self::h200() }
    }

    /// An NVIDIA H200, driver 580.159 (CUDA 13.0), beside 16 cores of an Intel Xeon virtual machine: one run of the bench,
    /// medians of 21 a cell. `benches/RESULTS.md` has the table of another.
    #[must_use]
    pub fn h200() -> Self {
        Self {
            capture_us: [107.4, 290.5, 923.1],
            scan_us: [48.6, 129.0, 447.7],
            instantiate_us: [166.1, 562.3, 1984.4],
            update_us: [26.6, 76.4, 282.3],
            eager_us: [439.2, 1287.3, 4243.0],
            launch_us: [94.8, 264.3, 861.1],
            remap_us: [[73.0, 70.7], [357.8, 374.8], [2852.6, 3156.0]],
            refine: true,
        }
    }

    /// The host device: two cores of an Intel Xeon virtual machine with much else to do, medians of 21 a cell. The prices of
    /// pages are of a run at the highest priority: many ranges take longer than a busy machine leaves a thread alone.
    #[must_use]
    pub fn host() -> Self {
        Self {
            capture_us: [45.0, 76.3, 397.7],
            scan_us: [26.4, 62.3, 215.0],
            instantiate_us: [8.9, 29.4, 109.7],
            update_us: [13.1, 49.4, 215.3],
            eager_us: [46.5, 150.1, 594.0],
            launch_us: [20.6, 62.7, 310.3],
            remap_us: [[135.3, 97.7], [850.2, 796.9], [8575.6, 9888.4]],
            refine: true,
        }
    }

    /// With pages at this price, however many.
    #[must_use]
    pub fn flat_remap(mut self, us: f32) -> Self {
        self.remap_us = [[us; 2]; 3];
        self
    }

    fn nodes(&self, step: Step) -> &[f32; 3] {
        match step {
            Step::Capture => &self.capture_us,
            Step::Scan => &self.scan_us,
            Step::Instantiate => &self.instantiate_us,
            Step::Update => &self.update_us,
            Step::Eager => &self.eager_us,
            Step::Launch => &self.launch_us,
        }
    }

    fn remap(&self, pages: Pages) -> f32 {
        if pages.chunks == 0 {
            return 0.0;
        }
        let columns: [f32; 2] = std::array::from_fn(|column| {
            let points = self.remap_us.map(|row| row[column]);
            line(&RANGES, &points, pages.chunks as f32)
        });
        // Smaller chunks are no cheaper than the smallest that were measured: it is the calls that cost.
        let bytes = (pages.chunk_bytes as f32).max(CHUNK_BYTES[0]);
        line(&CHUNK_BYTES, &columns, bytes).max(0.0)
    }
}

const NODES: [f32; 3] = [100.0, 300.0, 1000.0];
const RANGES: [f32; 3] = [1.0, 8.0, 64.0];
const CHUNK_BYTES: [f32; 2] = [(2 << 20) as f32, (32 << 20) as f32];

/// What is priced by the number of nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Capture,
    Scan,
    Instantiate,
    Update,
    Eager,
    Launch,
}

const STEPS: usize = Step::Launch as usize + 1;
/// Where the remap's correction stands, after those of the steps.
const REMAP: usize = STEPS;

/// Pages that a remap must bring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Pages {
    pub(crate) chunks: usize,
    /// Bytes of one chunk, of the largest where they differ.
    pub(crate) chunk_bytes: usize,
}

impl Pages {
    /// With those under `bytes` of scratch that a pool took away.
    pub(crate) fn add(&mut self, pool: &Pool, bytes: usize) {
        if let Some((chunks, chunk_bytes)) = pool.chunks_for(Purpose::Scratch, bytes) {
            self.chunks += chunks;
            self.chunk_bytes = self.chunk_bytes.max(chunk_bytes);
        }
    }
}

/// The repairs that there are to choose from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Repair {
    /// Pages back under the same addresses.
    Remap,
    /// A new capture, into the old exec or a new one.
    Capture,
    /// The closure, this once.
    Eager,
}

/// What is known of a graph that went stale.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Case {
    pub(crate) nodes: usize,
    /// The pages that would repair it, if pages alone do.
    pub(crate) pages: Option<Pages>,
    /// Whether the pools have as much free memory at hand, so that a new capture needs none from the driver.
    pub(crate) at_hand: bool,
    /// Runs that it may be expected to live after a repair.
    pub(crate) life: f32,
    /// Whether it may be run eagerly once.
    pub(crate) may_wait: bool,
}

/// What each step took when it was last done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct StepTimes {
    /// Capturing the closure.
    pub capture: Option<Duration>,
    /// Reading every node back, and comparing with what was declared.
    pub scan: Option<Duration>,
    /// Instantiating.
    pub instantiate: Option<Duration>,
    /// Putting new arguments into an exec.
    pub update: Option<Duration>,
    /// Putting pages back.
    pub remap: Option<Duration>,
}

/// A table with a correction for each price: the running ratio of measured to predicted.
#[derive(Debug)]
pub(crate) struct Costs {
    table: CostTable,
    /// f32 bits, by step, the remap last.
    ratios: [AtomicU32; STEPS + 1],
    /// ns, likewise; 0: never.
    last: [AtomicU64; STEPS + 1],
}

impl Costs {
    pub(crate) fn new(table: CostTable) -> Self {
        Self {
            table,
            ratios: std::array::from_fn(|_| AtomicU32::new(1f32.to_bits())),
            last: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    fn ratio(&self, index: usize) -> f32 {
        f32::from_bits(self.ratios[index].load(Ordering::Relaxed))
    }

    /// Predicted price of a step, µs.
    pub(crate) fn predict(&self, step: Step, nodes: usize) -> f32 {
        by_nodes(self.table.nodes(step), nodes) * self.ratio(step as usize)
    }

    /// Predicted price of pages, µs.
    pub(crate) fn remap_us(&self, pages: Pages) -> f32 {
        self.table.remap(pages) * self.ratio(REMAP)
    }

    /// Refines the price of a step by one measurement.
    pub(crate) fn measured(&self, step: Step, nodes: usize, took: Duration) {
        self.refine(step as usize, by_nodes(self.table.nodes(step), nodes), took);
    }

    /// Refines the price of pages by one measurement.
    pub(crate) fn remapped(&self, pages: Pages, took: Duration) {
        self.refine(REMAP, self.table.remap(pages), took);
    }

    fn refine(&self, index: usize, listed: f32, took: Duration) {
        self.last[index].store(took.as_nanos() as u64, Ordering::Relaxed);
        if !self.table.refine {
            return;
        }
        // One odd measurement (a page fault, a descheduled thread) must not turn the table over.
        let sample = (took.as_secs_f32() * 1e6 / listed.max(0.1)).clamp(0.01, 100.0);
        let old = self.ratio(index);
        let new = if old == 1.0 { sample } else { old + 0.2 * (sample - old) };
        // A lost race loses one sample.
        self.ratios[index].store(new.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn times(&self) -> StepTimes {
        let last = |index: usize| match self.last[index].load(Ordering::Relaxed) {
            0 => None,
            ns => Some(Duration::from_nanos(ns)),
        };
        StepTimes {
            capture: last(Step::Capture as usize),
            scan: last(Step::Scan as usize),
            instantiate: last(Step::Instantiate as usize),
            update: last(Step::Update as usize),
            remap: last(REMAP),
        }
    }

    /// Capturing anew into the old exec, if that is possible.
    pub(crate) fn update_us(&self, nodes: usize) -> f32 {
        self.predict(Step::Capture, nodes) + self.predict(Step::Scan, nodes) + self.predict(Step::Update, nodes)
    }

    /// Capturing anew into a new exec.
    pub(crate) fn recapture_us(&self, nodes: usize) -> f32 {
        self.predict(Step::Capture, nodes) + self.predict(Step::Scan, nodes) + self.predict(Step::Instantiate, nodes)
    }

    /// The repair with the lowest predicted price.
    ///
    /// A new capture of memory that is not at hand costs the pages too, and the capture that finds out. Between equals pages
    /// win: they need no run of the caller's closure.
    pub(crate) fn cheapest(&self, case: &Case) -> Repair {
        let pages_us = case.pages.map_or(0.0, |pages| self.remap_us(pages));
        let growth_us = if case.at_hand { 0.0 } else { pages_us };
        // The same closure mostly has the same shape: then its exec can be updated.
        let mut capture_us = self.update_us(case.nodes) + growth_us;
        if !case.at_hand {
            capture_us += self.predict(Step::Capture, case.nodes);
        }
        // A price that was never paid here is paid once, to know it.
        let hearsay = self.table.refine && self.ratio(REMAP) == 1.0;
        let (repair, repair_us) = match case.pages {
            Some(_) if pages_us <= capture_us || hearsay => (Repair::Remap, pages_us),
            _ => (Repair::Capture, capture_us),
        };
        let eager_us = self.predict(Step::Eager, case.nodes) + growth_us;
        let repaired_us = repair_us / case.life.max(1.0) + self.predict(Step::Launch, case.nodes);
        if case.may_wait && eager_us < repaired_us { Repair::Eager } else { repair }
    }
}

fn by_nodes(points: &[f32; 3], nodes: usize) -> f32 {
    let nodes = nodes as f32;
    // Below the first point in proportion: a graph of nothing costs next to nothing.
    if nodes <= NODES[0] { points[0] * (nodes / NODES[0]).max(0.01) } else { line(&NODES, points, nodes) }
}

/// A line through the points, straight on beyond both ends.
fn line<const N: usize>(places: &[f32; N], points: &[f32; N], at: f32) -> f32 {
    let i = (1..N - 1).find(|&i| at < places[i]).unwrap_or(N - 1) - 1;
    points[i] + (points[i + 1] - points[i]) / (places[i + 1] - places[i]) * (at - places[i])
}

#[cfg(test)]
mod tests;
