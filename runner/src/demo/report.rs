//! What the demo found, for people and as JSON.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use evergraph_pool::PoolMode;
use serde::Serialize;

use super::stage::{Played, Setting};
use super::witness::{Cause, Way};
use crate::cli::format_size;

/// Graphs repaired, by kind, as the driver's log shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Repairs {
    /// Pages were put back under the same addresses.
    pub remap: u64,
    /// A new capture went into the same exec.
    pub update: u64,
    /// A new capture became a new exec.
    pub recapture: u64,
    /// The work ran kernel by kernel once.
    pub eager: u64,
}

/// Steps whose graph nobody had disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Steady {
    /// Steps whose graph was good when they were asked for, and that were meant for the same memory as before.
    pub undisturbed: u64,
    /// Of those, the ones whose launch was the only driver call.
    pub replayed: u64,
    /// The share, percent.
    pub percent: f64,
}

/// Both sides of the books: what the driver's log shows, and what pool and cache counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Counted {
    /// Driver calls that gave memory back (`unmap`, `free`).
    pub log_returned_calls: u64,
    /// Bytes that they gave back.
    pub log_returned_bytes: u64,
    /// Of these calls, those below a live captured graph.
    pub log_returned_under_graphs: u64,
    /// Graphs gone stale because pages under them were unmapped.
    pub log_stale_unbacked: u64,
    /// Graphs gone stale because slabs under them were freed.
    pub log_stale_freed: u64,
    /// Graphs gone stale because memory under them went to another owner.
    pub log_stale_reissued: u64,
    /// Steps whose graph was stale when they were asked for.
    pub log_met_stale: u64,
    /// Launches of graphs.
    pub log_launches: u64,
    /// First captures.
    pub captures: u64,
    /// Runs before a first capture.
    pub warm_ups: u64,
    /// Runs of the give-back function.
    pub pool_give_backs: u64,
    /// Bytes that it gave back.
    pub pool_given_back_bytes: u64,
    /// Blocks with dependents that went to another owner.
    pub pool_reissues: u64,
    /// Blocks with dependents that lost their pages.
    pub pool_unbacked: u64,
    /// Graphs evicted for their memory.
    pub pool_evictions: u64,
    /// Times that the pool told a graph that it is stale.
    pub pool_stale: u64,
    /// Graphs evicted for the bounds of the cache.
    pub cache_evictions: u64,
    /// Captures that met a request for memory that was not ready.
    pub cache_window_misses: u64,
    /// Most memory held from the driver, bytes.
    pub reserved_peak_bytes: u64,
    /// Most memory in live slices, bytes.
    pub allocated_peak_bytes: u64,
}

/// Something that must hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// What.
    pub what: String,
    /// Whether it does.
    pub passed: bool,
    /// What was found.
    pub found: String,
}

/// What the demo found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// `host` or `cuda`.
    pub device: &'static str,
    /// `vmm` or `slab`.
    pub pool: String,
    /// The limit in force, bytes.
    pub limit_bytes: Option<usize>,
    /// Whether steps were captured.
    pub graphs: bool,
    /// The seed.
    pub seed: u64,
    /// Whether the run without limit and graphs sampled the same tokens.
    pub tokens_equal: bool,
    /// Times that memory went back to the driver.
    pub give_backs: u64,
    /// Times that a good graph went stale.
    pub stale: u64,
    /// Times that memory which a graph had been captured with went to another owner, by the log.
    pub reissues: u64,
    /// How stale graphs were repaired.
    pub repairs: Repairs,
    /// Launches of graphs that were good as they were.
    pub replays: u64,
    /// Launches of graphs that were stale at that moment.
    pub bad_launches: u64,
    /// Undisturbed steps.
    pub steady: Steady,
    /// Both sides of the books.
    pub counted: Counted,
    /// Decoded tokens (prompts not counted).
    pub decoded: u64,
    /// Seconds under the limit, with the log on.
    pub seconds: f64,
    /// Seconds without limit and graphs.
    pub reference_seconds: f64,
    /// The tokens of each text.
    pub tokens: Vec<Vec<i32>>,
    /// What must hold.
    pub checks: Vec<Check>,
}

/// Steady decoding replays at least this share of undisturbed steps, percent.
const STEADY_PERCENT: f64 = 99.0;

impl Report {
    pub(super) fn new(setting: &Setting, played: &Played, reference: &Played) -> Self {
        let (seen, pool, cache) = (&played.findings, &played.pool, &played.cache);
        let stale = |cause| seen.stale.get(&cause).copied().unwrap_or(0);
        let repairs = Repairs {
            remap: seen.way(Way::Remapped),
            update: seen.way(Way::Updated),
            recapture: seen.way(Way::Recaptured),
            eager: seen.way(Way::Eager),
        };
        let percent = match seen.undisturbed {
            0 => 0.0,
            n => seen.undisturbed_replays as f64 * 100.0 / n as f64,
        };
        let mut report = Self {
            device: setting.backend,
            pool: setting.mode.to_string(),
            limit_bytes: setting.limit_bytes,
            graphs: setting.graphs,
            seed: setting.seed,
            tokens_equal: played.tokens == reference.tokens,
            give_backs: pool.give_backs,
            stale: seen.stale_total(),
            reissues: seen.reissues,
            repairs,
            replays: seen.way(Way::Replayed),
            bad_launches: seen.bad_launches,
            steady: Steady { undisturbed: seen.undisturbed, replayed: seen.undisturbed_replays, percent },
            counted: Counted {
                log_returned_calls: seen.returned_calls,
                log_returned_bytes: seen.returned_bytes,
                log_returned_under_graphs: seen.returned_under_graphs,
                log_stale_unbacked: stale(Cause::Unbacked),
                log_stale_freed: stale(Cause::Freed),
                log_stale_reissued: stale(Cause::Reissued),
                log_met_stale: seen.met_stale,
                log_launches: seen.launches,
                captures: seen.way(Way::Captured),
                warm_ups: seen.way(Way::WarmUp),
                pool_give_backs: pool.give_backs,
                pool_given_back_bytes: pool.given_back_bytes,
                pool_reissues: pool.reissues,
                pool_unbacked: pool.unbacked,
                pool_evictions: pool.evictions,
                pool_stale: pool.stale,
                cache_evictions: cache.evictions,
                cache_window_misses: cache.window_misses,
                reserved_peak_bytes: played.stats.reserved_bytes.peak,
                allocated_peak_bytes: played.stats.allocated_bytes.peak,
            },
            decoded: played.steps,
            seconds: played.seconds,
            reference_seconds: reference.seconds,
            tokens: played.tokens.clone(),
            checks: Vec::new(),
        };
        report.check(setting, played);
        report
    }

    /// Checks that do not hold.
    pub fn failed(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| !check.passed)
    }

    fn must(&mut self, what: impl Into<String>, passed: bool, found: impl ToString) {
        self.checks.push(Check { what: what.into(), passed, found: found.to_string() });
    }

    fn check(&mut self, setting: &Setting, played: &Played) {
        let tokens: usize = self.tokens.iter().map(Vec::len).sum();
        let equal = self.tokens_equal && tokens > 0;
        self.must("the tokens are those of a run without limit and without graphs", equal, format!("{tokens} tokens"));
        let left = &played.left;
        let leaks = left.mallocs + left.chunks + left.mappings + left.reservations + left.graphs + left.execs;
        let objects = left.streams + left.events + left.modules + left.host;
        self.must("nothing is left on the card afterwards", leaks + objects == 0, leaks + objects);
        if !setting.graphs {
            return;
        }
        let first_bad = played.findings.first_bad.clone().unwrap_or_else(|| "none".to_owned());
        self.must("no graph was launched while it was stale", self.bad_launches == 0, first_bad);
        self.must("memory was given back", self.give_backs > 0, self.give_backs);
        let counted = self.counted;
        self.must(
            "the driver's log shows memory going back below captured graphs",
            counted.log_returned_under_graphs > 0,
            counted.log_returned_under_graphs,
        );
        self.must("graphs went stale", self.stale > 0, self.stale);
        self.must("stale graphs were asked for again", counted.log_met_stale > 0, counted.log_met_stale);
        self.must("memory of graphs was reissued", self.reissues > 0, self.reissues);
        let Repairs { remap, update, recapture, eager } = self.repairs;
        if setting.mode == PoolMode::Vmm {
            self.must("a graph was repaired by remapping", remap > 0, remap);
        }
        self.must("a graph was repaired by updating its exec", update > 0, update);
        self.must("a graph was repaired by capturing it anew", recapture > 0, recapture);
        self.must("a graph was replaced by one eager run", eager > 0, eager);
        self.must(
            format!("undisturbed steps are one launch and no other driver call ({STEADY_PERCENT} % at least)"),
            self.steady.percent >= STEADY_PERCENT,
            format!("{:.2} %", self.steady.percent),
        );
        let cache = played.cache;
        let ours = (remap, update, recapture, eager, self.replays);
        let theirs = (cache.remaps, cache.updates, cache.recaptures, cache.eager, cache.replays);
        self.must("the cache's own counters say the same as the log", ours == theirs, format!("{ours:?}, {theirs:?}"));
    }

    /// The closing table.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(NOTHING);
        let counted = &self.counted;
        let size = |bytes: u64| format_size(bytes);
        let repairs = self.repairs;
        let mut row = |what: &str, n: String, note: String| {
            table.add_row([what.to_owned(), n, note]);
        };
        row("tokens decoded", self.decoded.to_string(), format!("{} texts, {:.2} s", self.tokens.len(), self.seconds));
        let peak =
            format!("peak {} held, {} live", size(counted.reserved_peak_bytes), size(counted.allocated_peak_bytes));
        row("memory limit", self.limit_bytes.map_or("none".to_owned(), |b| size(b as u64)), peak);
        row(
            "give-backs",
            self.give_backs.to_string(),
            format!(
                "{} in {} driver calls, {} of them below captured graphs",
                size(counted.log_returned_bytes),
                counted.log_returned_calls,
                counted.log_returned_under_graphs
            ),
        );
        row(
            "graphs gone stale",
            self.stale.to_string(),
            format!(
                "{} lost pages, {} lost slabs, {} lost memory to others",
                counted.log_stale_unbacked, counted.log_stale_freed, counted.log_stale_reissued
            ),
        );
        row("repaired by remap", repairs.remap.to_string(), "pages back at the same addresses".to_owned());
        row("repaired by update", repairs.update.to_string(), "captured anew into the same exec".to_owned());
        row("repaired by recapture", repairs.recapture.to_string(), "captured anew, new exec".to_owned());
        row("run eagerly once", repairs.eager.to_string(), "kernel by kernel".to_owned());
        row("captures", counted.captures.to_string(), format!("after {} warm-ups", counted.warm_ups));
        row(
            "replays",
            self.replays.to_string(),
            format!(
                "{} of {} undisturbed steps were one driver call: {:.2} %",
                self.steady.replayed, self.steady.undisturbed, self.steady.percent
            ),
        );
        row("launches of stale graphs", self.bad_launches.to_string(), "by the driver's own log".to_owned());
        let same = if self.tokens_equal { "equal" } else { "DIFFERENT" };
        row("tokens", same.to_owned(), "against no limit, graphs off".to_owned());
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.trim_fmt()
    }
}
