//! `evergraph replay`: an allocation trace on a pool.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use evergraph_pool::PoolMode;
use serde_json::{Value, json};

use super::device::choose;
use super::flags::PoolChoice;
use super::output::{Output, say};
use super::scenario::mode;
use super::size::{format_size, parse_size};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::replay::{Options, Policy, Report, replay};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// The trace: our JSONL or RMM's CSV log; `-` reads standard input
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// How the pool gets memory
    #[arg(long, value_enum, default_value_t = PoolChoice::Vmm)]
    pool: PoolChoice,
    /// Most memory that the pool may take; without it the trace's own limit, if it has one
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    mem_limit: Option<usize>,
    /// What is done when memory is short
    #[arg(long, value_enum, default_value_t = PolicyChoice::Pool)]
    policy: PolicyChoice,
    /// Replay with both pools and with `flush-all`, and print a table; the trace is a file then
    #[arg(long, conflicts_with_all = ["pool", "policy"])]
    beside: bool,
    /// host, cuda or cuda:N; by default cuda if there is one, else host
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

/// What is done when memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyChoice {
    /// What the pool does: just enough, from whoever it hurts least
    Pool,
    /// All cached memory goes, and every captured graph (with slabs)
    FlushAll,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let device = choose(flags.device.as_deref())?;
    say(format!("device: {device}"));
    if flags.beside {
        return beside(flags, &device, out);
    }
    let policy = match flags.policy {
        PolicyChoice::Pool => Policy::Pool,
        PolicyChoice::FlushAll => Policy::FlushAll,
    };
    let report = one(flags, &device, mode(flags.pool), policy)?;
    out.document(&document(&report))?;
    out.line(report.to_string())?;
    match report.ooms {
        0 => Ok(()),
        missed => Err(Error::CheckFailed(format!("the trace fits: {missed} of its requests found no memory"))),
    }
}

fn one(flags: &Flags, device: &Device, mode: PoolMode, policy: Policy) -> Result<Report> {
    let options = Options::new(mode).device(device.clone()).limit(flags.mem_limit).policy(policy);
    replay(BufReader::with_capacity(1 << 20, open(&flags.trace)?), &options)
}

fn open(path: &Path) -> Result<Box<dyn Read>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin()));
    }
    let file = File::open(path).map_err(Error::io("can not open", path))?;
    Ok(Box::new(file))
}

fn document(report: &Report) -> Value {
    let mut value = json!(report);
    value["fragmentation"] = json!(report.fragmentation());
    value
}

/// The same trace on both pools, and under the policy that this project exists to replace.
fn beside(flags: &Flags, device: &Device, out: &mut Output) -> Result<()> {
    let rivals = [(PoolMode::Vmm, Policy::Pool), (PoolMode::Slab, Policy::Pool), (PoolMode::Slab, Policy::FlushAll)];
    let reports = rivals.iter().map(|(mode, policy)| one(flags, device, *mode, *policy)).collect::<Result<Vec<_>>>()?;
    out.document(&json!({ "runs": reports.iter().map(document).collect::<Vec<_>>() }))?;
    out.line(format!("{}\n", reports.first().map_or("", |report| report.trace.as_str())))?;
    out.line(table(&reports).to_string())?;
    if reports.iter().any(|report| report.graphs.is_some()) {
        out.line("\nRows that begin with \"then\" count from the first step on in which every graph replayed.")?;
    }
    Ok(())
}

fn table(reports: &[Report]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    let names = reports.iter().map(|r| match r.policy {
        "flush-all" => "flush all, drop all".to_owned(),
        _ => r.pool.clone(),
    });
    table.set_header(std::iter::once(String::new()).chain(names));
    let mut row = |name: &str, of: &dyn Fn(&Report) -> String| {
        table.add_row(std::iter::once(name.to_owned()).chain(reports.iter().map(of)));
    };
    let size = |bytes| format_size(bytes);
    row("reserved at peak", &|r| size(r.reserved_peak_bytes));
    row("reserved / requested", &|r| format!("{:.4}", r.fragmentation()));
    row("requests without memory", &|r| r.ooms.to_string());
    row("returned to the driver", &|r| size(r.given_back_bytes));
    row("driver calls", &|r| r.driver_calls.values().sum::<u64>().to_string());
    row("seconds", &|r| format!("{:.4}", r.seconds));
    if reports.iter().any(|r| r.graphs.is_some()) {
        let graphs = |r: &Report| r.graphs.unwrap_or_default();
        row("graph replays", &|r| graphs(r).replays.to_string());
        row("then: returned to the driver", &|r| size(graphs(r).given_back_bytes_since));
        row("then: driver calls", &|r| graphs(r).driver_calls_since.to_string());
        row("then: graphs lost", &|r| graphs(r).lost_since.to_string());
        row("then: remaps", &|r| graphs(r).remaps.to_string());
        row("then: captures", &|r| graphs(r).captures_since.to_string());
        row("then: times unsteady", &|r| graphs(r).spells.to_string());
        row("then: ms until steady again, in all", &|r| format!("{:.3}", graphs(r).unsteady_ms));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
