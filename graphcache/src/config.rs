//! How a cache is set up.

use evergraph_pool::driver::CaptureMode;

use crate::CostTable;

/// Settings of a cache. Start from [`CacheConfig::default`] and change what you need.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Whether graphs are used at all. Without, every run is the closure itself, with the same results.
    pub graphs: bool,
    /// Most graphs at a time.
    pub max_entries: usize,
    /// Most memory that graphs may keep to themselves, bytes: held blocks plus the execs' own.
    pub max_bytes: usize,
    /// Runs of the closure before its first capture, so that lazy set-up is behind it.
    pub warm_ups: u32,
    /// Whether a captured pointer into undeclared memory is an error. Otherwise that memory is pinned.
    pub strict: bool,
    /// Whose unsafe calls break a capture.
    pub mode: CaptureMode,
    /// More captures than this within [`storm_launches`](Self::storm_launches), and the graph's memory is pinned.
    pub storm_captures: u32,
    /// See [`storm_captures`](Self::storm_captures).
    pub storm_launches: u64,
    /// What an instantiated kernel node costs in device memory, bytes.
    pub node_bytes: usize,
    /// What things cost, until this device has been measured.
    pub costs: CostTable,
}

impl Default for CacheConfig {
    /// 128 graphs, 2 GiB, two warm-ups, pins instead of errors, thread-local captures.
    fn default() -> Self {
        Self {
            graphs: true,
            max_entries: 128,
            max_bytes: 2 << 30,
            warm_ups: 2,
            strict: false,
            mode: CaptureMode::ThreadLocal,
            storm_captures: 8,
            storm_launches: 64,
            node_bytes: 10 << 10,
            costs: CostTable::default(),
        }
    }
}

impl CacheConfig {
    /// Sets whether graphs are used.
    #[must_use]
    pub fn graphs(mut self, on: bool) -> Self {
        self.graphs = on;
        self
    }

    /// Sets the most graphs at a time (at least 1).
    #[must_use]
    pub fn max_entries(mut self, entries: usize) -> Self {
        self.max_entries = entries.max(1);
        self
    }

    /// Sets the most memory that graphs may keep, bytes.
    #[must_use]
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Sets the number of warm-ups.
    #[must_use]
    pub fn warm_ups(mut self, runs: u32) -> Self {
        self.warm_ups = runs;
        self
    }

    /// Sets strict mode.
    #[must_use]
    pub fn strict(mut self, on: bool) -> Self {
        self.strict = on;
        self
    }

    /// Sets the capture mode.
    #[must_use]
    pub fn mode(mut self, mode: CaptureMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets what things cost.
    #[must_use]
    pub fn costs(mut self, costs: CostTable) -> Self {
        self.costs = costs;
        self
    }
}
