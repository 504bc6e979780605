//! `evergraph scenario`: tells the narrated cases and checks them.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use evergraph_pool::PoolMode;
use serde_json::{Value, json};

use super::device::choose;
use super::flags::PoolChoice;
use super::output::Output;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::scenario::{self, Report, Scenario, Telling};

/// How long a scenario in a process of its own may take.
const LONGEST_CHILD: Duration = Duration::from_secs(120);

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// `list`, `all`, or the name of a scenario
    #[arg(value_name = "NAME")]
    name: String,
    /// host, cuda or cuda:N; by default cuda if there is one, else host
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Number of devices (host: that many; cuda: virtual ones where there are fewer); a story that needs two has two anyway
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    devices: u32,
    /// Tell it with this pool only; by default with each that the scenario has something to tell about
    #[arg(long, value_enum)]
    pool: Option<PoolChoice>,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
    /// Tell it in this process although the device dies in it, and print what a parent reads
    #[arg(long, hide = true)]
    as_child: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    if flags.name == "list" {
        return list(out);
    }
    let all = flags.name == "all";
    let chosen: Vec<_> = scenario::list().filter(|s| all || s.name == flags.name).collect();
    if chosen.is_empty() {
        return Err(Error::argument("scenario", "list, all or a name from `evergraph scenario list`", &flags.name));
    }
    if let (false, [scenario], Some(asked)) = (all, chosen.as_slice(), flags.pool.map(mode))
        && !scenario.modes.contains(&asked)
    {
        let modes: Vec<String> = scenario.modes.iter().map(ToString::to_string).collect();
        return Err(Error::argument("--pool", format!("{}, which {} is about", modes.join(" or "), flags.name), asked));
    }
    let device = choose(flags.device.as_deref())?.with_devices(flags.devices);
    if flags.as_child {
        let telling = chosen.first().and_then(|s| Some(scenario::tell_on(s, flags.pool.map(mode)?, &device)));
        return out.document(&json!(telling));
    }
    out.line(format!("device: {device}\n"))?;
    let (mut told, mut failed, mut skipped) = (Vec::new(), Vec::new(), 0);
    for scenario in chosen {
        for mode in modes(scenario, flags.pool) {
            let apart = scenario.deadly && !device.is_host();
            let telling =
                if apart { in_a_child(scenario, mode, &device) } else { scenario::tell_on(scenario, mode, &device) };
            let report = Report::new(scenario, mode, &device, telling);
            out.line(format!("{report}\n"))?;
            if report.failed() {
                failed.push(format!("{} ({})", report.name, report.pool));
            }
            skipped += usize::from(report.skipped.is_some());
            told.push(report);
        }
    }
    out.document(&json!(told))?;
    out.line(format!("{} told, {skipped} skipped, {} failed", told.len() - skipped, failed.len()))?;
    if failed.is_empty() { Ok(()) } else { Err(Error::CheckFailed(failed.join(", "))) }
}

/// Tells a scenario in a process of its own, which its device takes along.
fn in_a_child(scenario: &Scenario, mode: PoolMode, device: &Device) -> Telling {
    tell_apart(scenario, mode, device).unwrap_or_else(|what| Telling::failure("its own process told it", &what))
}

fn tell_apart(scenario: &Scenario, mode: PoolMode, device: &Device) -> std::result::Result<Telling, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .args(["scenario", scenario.name, "--json", "--as-child"])
        .args(["--device", &device.words(), "--devices", &device.count().to_string(), "--pool", &mode.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("it did not start: {error}"))?;
    let since = Instant::now();
    // What it prints fits a pipe, so it is read at the end.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if since.elapsed() < LONGEST_CHILD => std::thread::sleep(Duration::from_millis(20)),
            ended => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(ended.map_or_else(|error| error.to_string(), |_| "it hung, and was ended".to_owned()));
            }
        }
    };
    let (mut text, mut talk) = (String::new(), String::new());
    let _ = child.stdout.take().map(|mut out| out.read_to_string(&mut text));
    let _ = child.stderr.take().map(|mut err| err.read_to_string(&mut talk));
    let telling = serde_json::from_str::<Value>(&text).and_then(serde_json::from_value::<Telling>);
    telling.map_err(|_| format!("it ended with {status} and said: {} {}", text.trim(), talk.trim()))
}

/// The pools to tell it with.
fn modes(scenario: &scenario::Scenario, asked: Option<PoolChoice>) -> Vec<PoolMode> {
    let told = |known: &PoolMode| asked.is_none_or(|asked| mode(asked) == *known);
    scenario.modes.iter().copied().filter(told).collect()
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
