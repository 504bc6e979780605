//! What each kind of repair costs, by nodes, moved ranges and chunk size: real repairs through the cache, each forced by a
//! table that makes the others dear.

use std::fmt::Write;
use std::time::{Duration, Instant};

use evergraph_graphcache::{CacheConfig, CacheError, CostTable, GraphCache, GraphKey, Outcome, Ran, Request};
use evergraph_pool::{DeviceSlice, Pool, PoolConfig, Purpose, ScratchPolicy, Use};

use super::{Effort, Error, Report, Rig, Step};
use crate::samples::median;

/// The points of the cost table.
pub const NODES: [usize; 3] = [100, 300, 1000];
/// Likewise.
pub const RANGES: [usize; 3] = [1, 8, 64];
/// Likewise, MiB.
pub const CHUNKS_MIB: [usize; 2] = [2, 32];

/// What one cell took, µs: every sample.
#[derive(Clone, Debug, Default)]
struct Cell {
    give_back: Vec<f64>,
    remap: Vec<f64>,
    remap_alone: Vec<f64>,
    update: Vec<f64>,
    update_without: Vec<f64>,
    capture: Vec<f64>,
    scan: Vec<f64>,
    update_alone: Vec<f64>,
    recapture: Vec<f64>,
    instantiate: Vec<f64>,
    eager: Vec<f64>,
    launch: Vec<f64>,
}

/// A graph whose scratch is taken away.
struct Victim<'a> {
    rig: &'a Rig,
    pool: &'a Pool,
    cache: GraphCache,
    key: GraphKey,
    state: DeviceSlice<u32>,
    nodes: usize,
    ranges: usize,
    range_bytes: usize,
}

impl<'a> Victim<'a> {
    fn new(
        rig: &'a Rig,
        pool: &'a Pool,
        config: CacheConfig,
        nodes: usize,
        ranges: usize,
        range_bytes: usize,
    ) -> Result<Self, Error> {
        let state = pool.alloc_zeroed(1024, Purpose::State, &rig.stream)?;
        let cache = GraphCache::new(config);
        let victim = Self { rig, pool, cache, key: GraphKey::new("victim"), state, nodes, ranges, range_bytes };
        for _ in 0..4 {
            let _ = victim.run(256)?;
        }
        Ok(victim)
    }

    /// The work: kernels that go round the ranges.
    fn run(&self, threads: u32) -> Result<Outcome, CacheError> {
        let request = Request::new(&self.key, self.pool, &self.rig.stream).policy(ScratchPolicy::Track);
        self.cache.run::<CacheError>(&request, |scope| {
            scope.declare(&self.state, Use::State)?;
            scope.keep(self.rig.module().clone());
            let slices =
                (0..self.ranges).map(|_| scope.alloc::<u32>(self.range_bytes / 4)).collect::<Result<Vec<_>, _>>()?;
            (0..self.nodes).try_for_each(|node| {
                let dst = slices[node % self.ranges].ptr();
                let src = if node < self.ranges { self.state.ptr() } else { dst };
                self.rig.launch(Step { dst, src, words: 256, threads }, scope.stream())
            })
        })
    }

    /// Takes the scratch's pages; then, if asked to, as much memory is put elsewhere.
    fn take(&self, elsewhere: bool) -> Result<Duration, Error> {
        self.rig.settle()?;
        let start = Instant::now();
        self.pool.trim_to(0)?;
        let took = start.elapsed();
        if elsewhere {
            self.pool.reserve(self.ranges * self.range_bytes, Purpose::Scratch, &self.rig.stream)?;
        }
        Ok(took)
    }
}

/// Which repair a cache is made to choose.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Only {
    Remap,
    Capture,
    Eager,
}

fn config(rig: &Rig, only: Only) -> CacheConfig {
    const DEAR: f32 = 1e9;
    let mut costs = CostTable::of(rig.driver.info());
    costs.refine = false;
    costs.eager_us = [DEAR; 3];
    costs = costs.flat_remap(if only == Only::Remap { 0.0 } else { DEAR });
    // Sixty-four ranges of 32 MiB are more than a graph may keep by default.
    let mut config = CacheConfig::default().costs(costs).graphs(only != Only::Eager).max_bytes(usize::MAX);
    config.storm_captures = u32::MAX;
    config
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn expect(outcome: &Outcome, wanted: Ran) -> Result<(), Error> {
    match outcome {
        Outcome { ran, .. } if *ran == wanted => Ok(()),
        Outcome { ran, cause: Some(cause), .. } => Err(format!("{ran} where {wanted} was wanted: {cause}").into()),
        Outcome { ran, .. } => Err(format!("{ran} where {wanted} was wanted").into()),
    }
}

fn timed(victim: &Victim<'_>, threads: u32, wanted: Ran) -> Result<f64, Error> {
    let start = Instant::now();
    let ran = victim.run(threads)?;
    let took = us(start.elapsed());
    expect(&ran, wanted)?;
    Ok(took)
}

/// Until the device is done.
fn timed_to_the_end(victim: &Victim<'_>, wanted: Ran) -> Result<f64, Error> {
    victim.rig.settle()?;
    let start = Instant::now();
    let ran = victim.run(256)?;
    victim.rig.settle()?;
    expect(&ran, wanted)?;
    Ok(us(start.elapsed()))
}

fn cell(rig: &Rig, rounds: usize, nodes: usize, ranges: usize, chunk_bytes: usize) -> Result<Cell, Error> {
    let mut cell = Cell::default();
    let pool = Pool::new(rig.driver.clone(), PoolConfig::vmm().chunk(chunk_bytes))?;
    let victim = |only: Only| Victim::new(rig, &pool, config(rig, only), nodes, ranges, chunk_bytes);

    let graph = victim(Only::Remap)?;
    for _ in 0..rounds {
        cell.give_back.push(us(graph.take(false)?));
        cell.remap.push(timed(&graph, 256, Ran::Remapped)?);
        cell.remap_alone.extend(graph.cache.step_times().remap.map(us));
    }
    for _ in 0..rounds {
        cell.launch.push(timed_to_the_end(&graph, Ran::Replayed)?);
    }
    drop(graph);

    let graph = victim(Only::Capture)?;
    for _ in 0..rounds {
        graph.take(true)?;
        cell.update.push(timed(&graph, 256, Ran::Updated)?);
        let times = graph.cache.step_times();
        cell.capture.extend(times.capture.map(us));
        cell.scan.extend(times.scan.map(us));
        cell.update_alone.extend(times.update.map(us));
    }
    for round in 0..rounds {
        graph.take(true)?;
        // Another launch shape each time: nothing proves an update.
        let threads = if round % 2 == 0 { 128 } else { 256 };
        cell.recapture.push(timed(&graph, threads, Ran::Recaptured)?);
        cell.instantiate.extend(graph.cache.step_times().instantiate.map(us));
    }
    // A capture of memory that is not there. The cache does not choose that by itself where pages repair, so it is made to
    // by an invalidation.
    for _ in 0..rounds {
        graph.take(false)?;
        graph.cache.invalidate(&graph.key);
        let start = Instant::now();
        // Many misses end in an eager run, which brings the memory; the next run captures.
        while !graph.run(256)?.ran.is_graph() {}
        cell.update_without.push(us(start.elapsed()));
    }
    drop(graph);

    let graph = victim(Only::Eager)?;
    for _ in 0..rounds {
        cell.eager.push(timed_to_the_end(&graph, Ran::Eager)?);
    }
    Ok(cell)
}

/// The table, and the constants for `graphcache/src/cost.rs`.
///
/// # Errors
/// Those of the cache, the pool and the driver; a repair that ended otherwise than it was made to.
pub fn measure(rig: &Rig, effort: Effort, report: &mut Report) -> Result<(), Error> {
    let rounds = effort.rounds(21);
    let mut cells = Vec::new();
    for nodes in NODES {
        for ranges in RANGES {
            for mib in CHUNKS_MIB {
                if effort == Effort::Quick && (nodes > 100 || ranges > 8 || mib > 2) {
                    continue;
                }
                let case = format!("{nodes} nodes, {ranges} x {mib} MiB");
                let cell = cell(rig, rounds, nodes, ranges, mib << 20).map_err(|e| format!("{case}: {e}"))?;
                for (bench, samples) in named(&cell) {
                    report.add(bench, &case, "evergraph", "us", samples);
                }
                cells.push(((nodes, ranges, mib), cell));
            }
        }
    }
    println!("\n{}", table(&cells, rounds));
    if effort == Effort::Full {
        println!("{}", constants(&cells));
    }
    Ok(())
}

fn named(cell: &Cell) -> [(&'static str, &[f64]); 5] {
    [
        ("repair by remap", &cell.remap),
        ("repair by update", &cell.update),
        ("repair by update, memory first", &cell.update_without),
        ("repair by recapture", &cell.recapture),
        ("eager run + sync", &cell.eager),
    ]
}

type At = (usize, usize, usize);

fn table(cells: &[(At, Cell)], rounds: usize) -> String {
    let mut out = format!(
        "Repairs, µs, medians of {rounds}. A repair is the whole run of the cache up to and with its launch; *alone*: that step by\n\
         itself. *memory first*: nothing is free, so the capture must get it from the driver.\n\n\
         | nodes | ranges | chunk, MiB | give back | remap | alone | update | capture alone | scan alone | exec-update alone | \
         update, memory first | recapture | instantiate alone | eager + sync | launch + sync |\n{}|\n",
        "|---".repeat(15)
    );
    for ((nodes, ranges, mib), cell) in cells {
        let _ = write!(out, "| {nodes} | {ranges} | {mib} ");
        for samples in [
            &cell.give_back,
            &cell.remap,
            &cell.remap_alone,
            &cell.update,
            &cell.capture,
            &cell.scan,
            &cell.update_alone,
            &cell.update_without,
            &cell.recapture,
            &cell.instantiate,
            &cell.eager,
            &cell.launch,
        ] {
            let _ = write!(out, "| {:.1} ", median(samples));
        }
        out.push_str("|\n");
    }
    out
}

/// Prices by nodes are medians over all ranges and chunks; prices of pages over all nodes.
fn constants(cells: &[(At, Cell)]) -> String {
    let all = |of: &dyn Fn(&At) -> bool, value: fn(&Cell) -> &[f64]| -> f64 {
        median(&cells.iter().filter(|(at, _)| of(at)).flat_map(|(_, cell)| value(cell)).copied().collect::<Vec<_>>())
    };
    let by_nodes = |value: fn(&Cell) -> &[f64]| NODES.map(|nodes| all(&|at| at.0 == nodes, value));
    let by_pages =
        RANGES.map(|ranges| CHUNKS_MIB.map(|mib| all(&|at| (at.1, at.2) == (ranges, mib), |cell| &cell.remap_alone)));
    let mut out = String::from("            // graphcache/src/cost.rs\n");
    let list = |values: &[f64]| values.iter().map(|v| format!("{v:.1}")).collect::<Vec<_>>().join(", ");
    for (name, values) in [
        ("capture_us", by_nodes(|c| &c.capture)),
        ("scan_us", by_nodes(|c| &c.scan)),
        ("instantiate_us", by_nodes(|c| &c.instantiate)),
        ("update_us", by_nodes(|c| &c.update_alone)),
        ("eager_us", by_nodes(|c| &c.eager)),
        ("launch_us", by_nodes(|c| &c.launch)),
    ] {
        let _ = writeln!(out, "            {name}: [{}],", list(&values));
    }
    let rows = by_pages.map(|row| format!("[{}]", list(&row))).join(", ");
    let _ = writeln!(out, "            remap_us: [{rows}],");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prices by nodes come from all cells of so many nodes, prices of pages from all cells of such ranges and chunks.
    #[test]
    fn constants_are_medians_over_the_cells_that_they_speak_for() {
        let mut cells = Vec::new();
        for nodes in NODES {
            for ranges in RANGES {
                for mib in CHUNKS_MIB {
                    let cell = Cell {
                        capture: vec![nodes as f64],
                        remap_alone: vec![(ranges * mib) as f64, (ranges * mib) as f64],
                        ..Cell::default()
                    };
                    cells.push(((nodes, ranges, mib), cell));
                }
            }
        }
        let text = constants(&cells);
        assert!(text.contains("capture_us: [100.0, 300.0, 1000.0],"), "{text}");
        assert!(text.contains("remap_us: [[2.0, 32.0], [16.0, 256.0], [128.0, 2048.0]],"), "{text}");
        assert_eq!(table(&cells, 21).lines().filter(|line| line.starts_with("| 1000 ")).count(), 6);
    }
}
