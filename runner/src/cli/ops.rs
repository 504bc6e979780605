//! `evergraph ops`: every op on a device against the CPU body, case by case.

use comfy_table::{CellAlignment, Table, presets};
use evergraph_kernels::cases::{Bench, Case, Outcome, cases};
use evergraph_kernels::{KernelError, Kernels};
use evergraph_pool::driver::DynDriver;
use evergraph_pool::driver::host::{HostConfig, HostDevice};
use serde_json::{Value, json};

use super::device::choose;
use super::output::{Output, say};
use crate::error::{Error, Result};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// Only this op
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// The device under test; on the host device both sides run the same bodies, which shows the cases only
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Timed launches a case; 0 for none
    #[arg(long, value_name = "N", default_value_t = 11)]
    times: u16,
    /// Print every case, not only the worst of each op
    #[arg(long)]
    all: bool,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

/// One case and what came of it.
struct Row {
    case: Case,
    result: Result<Outcome, String>,
}

impl Row {
    fn passed(&self) -> bool {
        self.result.as_ref().is_ok_and(Outcome::passed)
    }

    /// The error in units of what is allowed; above 1 is a failure.
    fn share(&self) -> f64 {
        match &self.result {
            Ok(outcome) if outcome.error == 0.0 => 0.0,
            Ok(outcome) => outcome.error / outcome.tolerance,
            Err(_) => f64::INFINITY,
        }
    }
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let chosen: Vec<Case> = cases().into_iter().filter(|c| flags.op.as_deref().is_none_or(|op| c.op() == op)).collect();
    if chosen.is_empty() {
        let mut names: Vec<&str> = cases().iter().map(Case::op).collect();
        names.sort_unstable();
        names.dedup();
        return Err(Error::argument("--op", format!("one of {}", names.join(", ")), flags.op.as_deref().unwrap_or("")));
    }
    let device = choose(flags.device.as_deref())?;
    let host = || -> Result<DynDriver> { Ok(HostDevice::new(HostConfig::default())?) };
    let start = std::time::Instant::now();
    let kernels = Kernels::load(device.driver(HostConfig::default())?)?;
    say(format!(
        "device {device}; kernels loaded in {:.1} ms, {} sources compiled",
        start.elapsed().as_secs_f64() * 1e3,
        kernels.compiled()
    ));
    let under_test = Bench::new(kernels, flags.times.into())?;
    let reference = Bench::new(Kernels::load(host()?)?, 0)?;
    let rows = compare(chosen, &under_test, &reference);
    report(flags, &device.to_string(), &rows, out)
}

/// Runs the cases. A fault ends a device's context, so nothing can be run after one.
fn compare(chosen: Vec<Case>, under_test: &Bench, reference: &Bench) -> Vec<Row> {
    let mut lost: Option<String> = None;
    let one = |case: Case| {
        let result = match &lost {
            Some(by) => Err(format!("not run: the device was lost by {by}")),
            None => case.run(under_test, reference).map_err(|error: KernelError| error.to_string()),
        };
        if lost.is_none() && under_test.driver().fault().is_some() {
            lost = Some(format!("{case:?}"));
        }
        Row { case, result }
    };
    chosen.into_iter().map(one).collect()
}

fn report(flags: &Flags, device: &str, rows: &[Row], out: &mut Output) -> Result<()> {
    let failed: Vec<&Row> = rows.iter().filter(|row| !row.passed()).collect();
    let worst = rows.iter().max_by(|a, b| a.share().total_cmp(&b.share()));
    out.document(&json!({
        "device": device,
        "cases": rows.len(),
        "passed": rows.len() - failed.len(),
        "failed": failed.len(),
        "worst": worst.map(|row| json!({
            "op": row.case.op(),
            "case": row.case.name(),
            "error": row.result.as_ref().map_or(Value::Null, |outcome| json!(outcome.error)),
            "tolerance": row.result.as_ref().map_or(Value::Null, |outcome| json!(outcome.tolerance)),
        })),
        "rows": rows.iter().map(document).collect::<Vec<_>>(),
    }))?;
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["op", "cases", "worst case", "error", "allowed", "µs", "GB/s"]);
    for column in [1, 3, 4, 5, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for group in rows.chunk_by(|a, b| a.case.op() == b.case.op()) {
        let worst = group.iter().max_by(|a, b| a.share().total_cmp(&b.share()));
        let shown: Vec<&Row> = if flags.all { group.iter().collect() } else { worst.into_iter().collect() };
        for row in shown {
            let number = if flags.all { String::new() } else { group.len().to_string() };
            table.add_row(cells(row, number));
        }
    }
    out.line(table.to_string())?;
    for row in &failed {
        match &row.result {
            Ok(outcome) => {
                out.line(format!("FAILED {:?}: error {:.3e} at {}", row.case, outcome.error, outcome.place))?
            }
            Err(why) => out.line(format!("FAILED {:?}: {why}", row.case))?,
        }
    }
    out.line(format!(
        "{} cases on {device}: {} passed, {} failed",
        rows.len(),
        rows.len() - failed.len(),
        failed.len()
    ))?;
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::CheckFailed(format!("{} of {} cases on {device}", failed.len(), rows.len())))
    }
}

fn document(row: &Row) -> Value {
    let mut value = json!({ "op": row.case.op(), "case": row.case.name(), "passed": row.passed() });
    match &row.result {
        Ok(outcome) => {
            // JSON has no infinity: null stands for an error that is no number.
            value["error"] = json!(outcome.error);
            value["tolerance"] = json!(outcome.tolerance);
            value["micros"] = json!(outcome.micros);
            value["bytes"] = json!(outcome.bytes);
            value["place"] = json!(outcome.place);
        }
        Err(why) => value["failure"] = json!(why),
    }
    value
}

fn cells(row: &Row, number: String) -> Vec<String> {
    let mut cells = vec![row.case.op().to_owned(), number, row.case.name().to_owned()];
    match &row.result {
        Ok(outcome) if outcome.micros > 0.0 => cells.extend([
            format!("{:.2e}", outcome.error),
            format!("{:.0e}", outcome.tolerance),
            format!("{:.1}", outcome.micros),
            format!("{:.0}", outcome.bytes as f64 / outcome.micros * 1e-3),
        ]),
        Ok(outcome) => cells.extend([format!("{:.2e}", outcome.error), format!("{:.0e}", outcome.tolerance)]),
        Err(_) => cells.push("failed".to_owned()),
    }
    cells
}
