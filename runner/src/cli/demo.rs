//! `evergraph demo`: stale graphs and their repair, told as it happens.

use super::device::choose;
use super::flags::{DeviceFlags, PoolChoice, Switch};
use super::output::Output;
use crate::demo::{self, Settings};
use crate::error::{Error, Result};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    device: DeviceFlags,
    /// What weights and prompts are made from
    #[arg(short = 's', long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    if flags.device.devices != 1 {
        return Err(Error::argument("--devices", "1 (the story is told on one device)", flags.device.devices));
    }
    let device = choose(flags.device.device.as_deref())?;
    if let Some(threads) = flags.device.threads {
        evergraph_kernels::threads(threads as usize)?;
    }
    let settings = Settings {
        pool: match flags.device.pool {
            PoolChoice::Vmm => evergraph_pool::PoolMode::Vmm,
            PoolChoice::Slab => evergraph_pool::PoolMode::Slab,
        },
        limit_bytes: flags.device.mem_limit,
        graphs: flags.device.graphs == Switch::On,
        seed: flags.seed,
    };
    out.line(format!(
        "device {device}, {} pool, graphs {}, seed {}: a mixture of experts decodes on a card that is too small\n",
        settings.pool,
        if settings.graphs { "on" } else { "off" },
        settings.seed
    ))?;
    let scale = demo::scale(&device, settings.pool)?;
    if scale > 1 {
        out.line(format!(
            "its pages are {scale} times those that the story was written for, so every buffer has {} times its size \
             behind it, and the limit is as much larger\n",
            scale - 1
        ))?;
    }
    out.line("round")?;
    let report = demo::run_on(&device, &settings, &mut |line| out.line(line))?;
    out.line(format!("\n{}", report.table()))?;
    out.document(&serde_json::to_value(&report).map_err(|e| Error::Output(e.into()))?)?;
    let failed: Vec<String> = report.failed().map(|check| format!("{} (found: {})", check.what, check.found)).collect();
    if failed.is_empty() { Ok(()) } else { Err(Error::CheckFailed(failed.join("; "))) }
}
