//! What came of a replay.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::cli::format_size;

/// What came of a replay. Bytes unless the name says otherwise.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The trace's name for itself.
    pub trace: String,
    /// Its format: `evergraph` or `rmm`.
    pub format: &'static str,
    /// The device: `host` or `cuda`.
    pub device: &'static str,
    /// The pool's mode.
    pub pool: String,
    /// What was done when memory was short.
    pub policy: &'static str,
    /// The most that the pool could hold, if there was a limit.
    pub limit_bytes: Option<usize>,
    /// Events played.
    pub events: u64,
    /// Allocations among them.
    pub allocs: u64,
    /// Frees among them.
    pub frees: u64,
    /// Steps that the trace marks.
    pub steps: u64,
    /// The most that the pool held from the driver.
    pub reserved_peak_bytes: u64,
    /// The most that was allocated at a time, rounded as the pool does.
    pub allocated_peak_bytes: u64,
    /// The most that was allocated at a time, as asked for.
    pub requested_peak_bytes: u64,
    /// The largest request.
    pub largest_bytes: u64,
    /// Driver calls by kind.
    pub driver_calls: BTreeMap<&'static str, u64>,
    /// Time that the events took, reading them excluded.
    pub seconds: f64,
    /// Whether any request found no memory.
    pub oom: bool,
    /// How many did not. The trace went on without them.
    pub ooms: u64,
    /// The first of them.
    pub first_oom: Option<Miss>,
    /// How often memory went back to the driver.
    pub give_backs: u64,
    /// How much.
    pub given_back_bytes: u64,
    /// How often everything was flushed, by the policy of that name.
    pub flushes: u64,
    /// Allocations that the trace never freed.
    pub leaked_allocations: u64,
    /// Their bytes.
    pub leaked_bytes: u64,
    /// Allocations that had failed when the trace was recorded.
    pub recorded_failures: u64,
    /// What became of the trace's graphs, if it has any.
    pub graphs: Option<Graphs>,
}

/// A request that found no memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Miss {
    /// Its line in the trace.
    pub line: u64,
    /// How much it was.
    pub bytes: u64,
}

/// What became of graphs. What ends in `_since` counts from the first step on in which every graph replayed.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Graphs {
    /// Runs that the trace asks for.
    pub runs: u64,
    /// Runs that were left out, because there was no memory for what they read or write.
    pub skipped: u64,
    /// First captures, and first captures after a graph was lost.
    pub captures: u64,
    /// Plain replays.
    pub replays: u64,
    /// Replays after pages were put back.
    pub remaps: u64,
    /// Captures into the old executable graph.
    pub updates: u64,
    /// Captures into a new one.
    pub recaptures: u64,
    /// Runs without a graph, warm-ups not counted.
    pub eager: u64,
    /// Runs that found their graph stale.
    pub stale: u64,
    /// Graphs that were dropped for their memory.
    pub lost: u64,
    /// Whether there was a step in which every graph replayed.
    pub was_steady: bool,
    /// How often that ended.
    pub spells: u64,
    /// How long it took, in all, until every graph replayed again, ms.
    pub unsteady_ms: f64,
    /// Bytes that went back to the driver.
    pub given_back_bytes_since: u64,
    /// Driver calls of every kind.
    pub driver_calls_since: u64,
    /// Graphs that were dropped for their memory.
    pub lost_since: u64,
    /// Captures of every kind.
    pub captures_since: u64,
}

impl Report {
    /// Reserved over requested, at their peaks. 1 is perfect; 0 if nothing was requested.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.requested_peak_bytes == 0 {
            return 0.0;
        }
        self.reserved_peak_bytes as f64 / self.requested_peak_bytes as f64
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.limit_bytes.map_or_else(String::new, |bytes| format!(", limit {}", format_size(bytes as u64)));
        writeln!(f, "{} ({}), pool {}{limit}", self.trace, self.format, self.pool)?;
        writeln!(
            f,
            "events                {:>12}  {} allocations, {} frees, {} steps",
            self.events, self.allocs, self.frees, self.steps
        )?;
        let size = |bytes| format_size(bytes);
        writeln!(
            f,
            "reserved at peak      {:>12}  {:.4} times what was requested",
            size(self.reserved_peak_bytes),
            self.fragmentation()
        )?;
        writeln!(f, "allocated at peak     {:>12}", size(self.allocated_peak_bytes))?;
        writeln!(
            f,
            "requested at peak     {:>12}  the largest {}",
            size(self.requested_peak_bytes),
            size(self.largest_bytes)
        )?;
        let calls: u64 = self.driver_calls.values().sum();
        let kinds: Vec<String> = self.driver_calls.iter().map(|(name, n)| format!("{name} {n}")).collect();
        writeln!(f, "driver calls          {calls:>12}  {}", kinds.join(", "))?;
        writeln!(f, "give-backs            {:>12}  {}", self.give_backs, size(self.given_back_bytes))?;
        if let Some(graphs) = &self.graphs {
            writeln!(
                f,
                "graph runs            {:>12}  {} replays, {} remaps, {} updates, {} recaptures, {} eager; {} captures, {} lost",
                graphs.runs,
                graphs.replays,
                graphs.remaps,
                graphs.updates,
                graphs.recaptures,
                graphs.eager,
                graphs.captures,
                graphs.lost
            )?;
        }
        if self.recorded_failures > 0 {
            writeln!(f, "failed when recorded  {:>12}", self.recorded_failures)?;
        }
        if self.leaked_allocations > 0 {
            writeln!(f, "never freed           {:>12}  {}", self.leaked_allocations, size(self.leaked_bytes))?;
        }
        match &self.first_oom {
            Some(miss) => writeln!(
                f,
                "out of memory         {:>12}  first {} on line {}",
                self.ooms,
                size(miss.bytes),
                miss.line
            )?,
            None => writeln!(f, "out of memory         {:>12}", "never")?,
        }
        write!(f, "seconds               {:>12.6}", self.seconds)
    }
}
