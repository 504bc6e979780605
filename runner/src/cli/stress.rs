//! `evergraph stress`: random steps against a plain model.

use std::time::Duration;

use serde_json::json;

use super::device::choose;
use super::flags::{PoolChoice, Switch};
use super::output::{Output, say};
use super::scenario::mode;
use crate::error::{Error, Result};
use crate::stress::{self, Options};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// Steps in all; without it 20000, or as many as fit into --seconds
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Workers; with one, everything follows from the seed
    #[arg(long, short = 't', value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Whether driver calls are made to fail
    #[arg(long, value_enum, default_value_t = Switch::On)]
    faults: Switch,
    /// Stop after this many seconds
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// The seed of the steps
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// host, cuda or cuda:N; by default cuda if there is one, else host
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// How the pool gets memory
    #[arg(long, value_enum, default_value_t = PoolChoice::Vmm)]
    pool: PoolChoice,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let device = choose(flags.device.as_deref())?;
    let unless_timed = if flags.seconds.is_some() { u64::MAX } else { 20_000 };
    say(format!("device: {device}"));
    let options = Options::new(mode(flags.pool))
        .device(device)
        .steps(flags.steps.unwrap_or(unless_timed))
        .threads(flags.threads.into())
        .faults(flags.faults == Switch::On)
        .longest(flags.seconds.map(Duration::from_secs))
        .seed(flags.seed);
    let report = stress::run(&options).map_err(|e| Error::CheckFailed(format!("the world was not set up: {e}")))?;
    out.document(&json!(report))?;
    out.line(report.to_string())?;
    if report.passed() {
        return Ok(());
    }
    let what = match (&report.first_divergence, report.missing.is_empty()) {
        (Some(first), _) => first.what.clone(),
        (None, false) => format!("never happened: {}", report.missing.join(", ")),
        (None, true) => "see the report".to_owned(),
    };
    Err(Error::CheckFailed(what))
}
