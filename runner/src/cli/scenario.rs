//! `evergraph scenario`: tells the narrated cases and checks them.

use evergraph_pool::PoolMode;
use serde_json::json;

use super::device::choose;
use super::flags::PoolChoice;
use super::output::Output;
use crate::error::{Error, Result};
use crate::scenario;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// `list`, `all`, or the name of a scenario
    #[arg(value_name = "NAME")]
    name: String,
    /// The device to play on; the stories are told on host devices of their own
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    device: String,
    /// Tell it with this pool only; by default with each that the scenario has something to tell about
    #[arg(long, value_enum)]
    pool: Option<PoolChoice>,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let device = choose(Some(&flags.device))?;
    if !device.is_host() {
        return Err(Error::NoDevice {
            asked: device.to_string(),
            found: "scenarios are told on the host device".to_owned(),
            advice: "--device host".to_owned(),
        });
    }
    if flags.name == "list" {
        return list(out);
    }
    let all = flags.name == "all";
    let chosen: Vec<_> = scenario::list().filter(|s| all || s.name == flags.name).collect();
    if chosen.is_empty() {
        return Err(Error::argument("scenario", "list, all or a name from `evergraph scenario list`", &flags.name));
    }
    let (mut told, mut failed) = (Vec::new(), Vec::new());
    for scenario in chosen {
        for mode in modes(scenario, flags.pool, all) {
            let Some(report) = scenario::tell(scenario.name, mode) else { continue };
            out.line(format!("{report}\n"))?;
            if !report.passed {
                failed.push(format!("{} ({})", report.name, report.pool));
            }
            told.push(report);
        }
    }
    out.document(&json!(told))?;
    out.line(format!("{} told, {} failed", told.len(), failed.len()))?;
    if failed.is_empty() { Ok(()) } else { Err(Error::CheckFailed(failed.join(", "))) }
}

/// The pools to tell it with. A name and a pool that were both asked for are told, whatever the scenario lists.
fn modes(scenario: &scenario::Scenario, asked: Option<PoolChoice>, all: bool) -> Vec<PoolMode> {
    match asked.map(mode) {
        None => scenario.modes.to_vec(),
        Some(mode) if !all || scenario.modes.contains(&mode) => vec![mode],
        Some(_) => Vec::new(),
    }
}

pub(super) fn mode(choice: PoolChoice) -> PoolMode {
    match choice {
        PoolChoice::Vmm => PoolMode::Vmm,
        PoolChoice::Slab => PoolMode::Slab,
    }
}

fn list(out: &mut Output) -> Result<()> {
    let names: Vec<_> = scenario::list()
        .map(|s| {
            let pools: Vec<String> = s.modes.iter().map(ToString::to_string).collect();
            json!({ "name": s.name, "about": s.about, "pools": pools })
        })
        .collect();
    out.document(&json!(names))?;
    for scenario in scenario::list() {
        let pools: Vec<String> = scenario.modes.iter().map(ToString::to_string).collect();
        out.line(format!("{:<42} {:<10} {}", scenario.name, pools.join(" "), scenario.about))?;
    }
    Ok(())
}
