//! Measures on a device, and puts the rows of several programs into one table. `benches/device.sh` runs it beside the rivals.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use evergraph_benches::device::{Effort, Error, Report, Rig, graphs, memory, repair};
use evergraph_benches::samples;
use evergraph_pool::driver::DynDriver;
use evergraph_pool::driver::cuda::{self, CudaDevice};
use evergraph_pool::driver::host::{HostConfig, HostDevice};

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Backend {
    Cuda,
    Host,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Pairs, churns, reuse across streams.
    Memory,
    /// A launch through the cache beside a bare one.
    Launch,
    /// Reading a graph back.
    Scan,
    /// Loading the kernels.
    Load,
    /// The cost table.
    Repair,
}

/// Measures on a device. Rows are lines of JSON on standard output; a table ends it.
#[derive(Parser, Debug)]
struct Words {
    /// On which kind of device.
    #[arg(long, default_value = "cuda")]
    backend: Backend,
    /// Its number.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Only these parts.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// A hundredth of the rounds and small sizes: to see that it runs.
    #[arg(long)]
    quick: bool,
    /// No measuring: read these files of JSON lines and print one table.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    table: Vec<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Words::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("device: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &Words) -> Result<ExitCode, Error> {
    if !words.table.is_empty() {
        let mut rows = Vec::new();
        for file in &words.table {
            let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
            rows.extend(samples::read(&text));
        }
        print!("{}", samples::table(&rows));
        return Ok(ExitCode::SUCCESS);
    }
    let driver: DynDriver = match words.backend {
        Backend::Host => HostDevice::new(HostConfig::default())?,
        Backend::Cuda if cuda::device_count() == 0 => {
            println!("skipped: no device");
            return Ok(ExitCode::SUCCESS);
        }
        Backend::Cuda => CudaDevice::open(words.device)?,
    };
    println!("device: {:?}", driver.info());
    let rig = Rig::new(driver)?;
    let effort = if words.quick { Effort::Quick } else { Effort::Full };
    let mut report = Report::default();
    let mut failed = false;
    for part in Part::value_variants() {
        if !words.only.is_empty() && !words.only.contains(part) {
            continue;
        }
        let report = &mut report;
        let done = match part {
            Part::Memory => memory::measure(&rig, effort, report),
            Part::Launch => graphs::launches(&rig, effort, report),
            Part::Scan => graphs::scan(&rig, effort, report),
            Part::Load => graphs::load(&rig, effort, report),
            Part::Repair => repair::measure(&rig, effort, report),
        };
        // One part that fails takes none of the others with it: machine time is dear.
        if let Err(error) = done {
            eprintln!("{part:?}: {error}");
            failed = true;
        }
    }
    print!("\n{}", samples::table(&report.rows));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
