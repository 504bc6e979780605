//! `evergraph bench`: speed, as llama-bench measures and tells it.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use super::device::choose;
use super::flags::{ActChoice, PoolChoice, Switch};
use super::output::{Output, progress, say};
use super::placement::{HostWorkChoice, StreamExperts};
use super::size::{format_size, parse_size};
use crate::bench::{
    self, Description, FlashAttn, Format, Listener, Lists, Machine, Measured, Record, Row, Settings, Setup, SplitMode,
    Stage, Table, TensorSplit,
};
use crate::chat::time;
use crate::device::Device;
use crate::engine::{KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig};
use crate::error::{Error, Result};
use crate::placement;

#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Flags {
    /// Model files (GGUF; of a split model, the first part)
    #[arg(short = 'm', long = "model", value_name = "FILE,…", required = true, value_parser = files)]
    models: Vec<Several<PathBuf>>,
    /// Read the files into memory instead of mapping them
    #[arg(long)]
    no_mmap: bool,
    /// Tests of prompts: tokens; 0 for none [default: 512]
    #[arg(short = 'p', long = "n-prompt", value_name = "N,…", value_parser = sizes)]
    prompts: Vec<Several<u32>>,
    /// Tests of generation: tokens; 0 for none [default: 128]
    #[arg(short = 'n', long = "n-gen", value_name = "N,…", value_parser = sizes)]
    generations: Vec<Several<u32>>,
    /// A test of a prompt of P tokens and G generated ones behind it (also -pg)
    #[arg(long = "pg", value_name = "P,G", value_parser = pair)]
    both: Vec<(u32, u32)>,
    /// Tokens in the cache before a test begins, which are not timed [default: 0]
    #[arg(short = 'd', long = "n-depth", value_name = "N,…", value_parser = sizes)]
    depths: Vec<Several<u32>>,
    /// Most tokens handed to the model at a time [default: 2048]
    #[arg(short = 'b', long = "batch-size", value_name = "N,…", value_parser = counts)]
    batches: Vec<Several<u32>>,
    /// Most tokens in one step (also -ub) [default: 512]
    #[arg(long = "ubatch-size", value_name = "N,…", value_parser = counts)]
    ubatches: Vec<Several<u32>>,
    /// Types of the key cache (also -ctk) [default: f16]
    #[arg(long = "cache-type-k", value_name = "TYPE,…", value_parser = cache_types)]
    types_k: Vec<Several<KvType>>,
    /// Types of the value cache (also -ctv) [default: f16]
    #[arg(long = "cache-type-v", value_name = "TYPE,…", value_parser = cache_types)]
    types_v: Vec<Several<KvType>>,
    /// Threads on the host [default: one a core]
    #[arg(short = 't', long = "threads", value_name = "N,…", value_parser = threads)]
    threads: Vec<Several<u32>>,
    /// Layers on the device; -1 is all, and so is any number that is large enough (also -ngl) [default: -1]
    #[arg(long = "n-gpu-layers", value_name = "N,…", allow_hyphen_values = true, value_parser = layers)]
    gpu_layers: Vec<Several<i64>>,
    /// Layers whose experts stay with the host (also -ncmoe) [default: 0]
    #[arg(long = "n-cpu-moe", value_name = "N,…", value_parser = sizes)]
    n_cpu_moe: Vec<Several<u32>>,
    /// Keep the experts of all layers with the host, as -ncmoe 999 does (also -cmoe)
    #[arg(long = "cpu-moe", conflicts_with = "n_cpu_moe")]
    cpu_moe: bool,
    /// Tensors by name: PATTERN=DEVICE;… (also -ot)
    #[arg(long = "override-tensor", value_name = "PATTERN=DEVICE,…", value_parser = overrides)]
    overrides: Vec<Several<String>>,
    /// Flash attention: on, off or auto (also -fa) [default: auto]
    #[arg(long = "flash-attn", value_name = "on|off|auto,…", allow_hyphen_values = true, value_parser = flash_attn)]
    flash_attn: Vec<Several<FlashAttn>>,
    /// How a model is split between devices: none, layer, row or tensor (also -sm) [default: layer]
    #[arg(long = "split-mode", value_name = "MODE,…", value_parser = split_modes)]
    split_modes: Vec<Several<SplitMode>>,
    /// The device that holds what is not split (also -mg) [default: 0]
    #[arg(long = "main-gpu", value_name = "N,…", value_parser = sizes)]
    main_gpus: Vec<Several<u32>>,
    /// Shares of the devices, such as 3/1 (also -ts) [default: 0]
    #[arg(long = "tensor-split", value_name = "A/B,…", value_parser = tensor_splits)]
    tensor_splits: Vec<Several<TensorSplit>>,
    /// Times that each test is timed
    #[arg(short = 'r', long = "repetitions", value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    repetitions: u32,
    /// Time each test from cold
    #[arg(long)]
    no_warmup: bool,
    /// Seconds of rest before each test
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    delay: u32,
    /// Priority of the process: only 0, as it is
    #[arg(long, value_name = "N", default_value_t = 0, allow_hyphen_values = true)]
    prio: i32,
    /// Format on standard output: csv, json, jsonl, md, sql or none
    #[arg(short = 'o', long = "output", value_name = "FORMAT", default_value = "md", value_parser = format)]
    output: Chosen,
    /// Format on standard error, the same rows (also -oe)
    #[arg(long = "output-err", value_name = "FORMAT", default_value = "none", value_parser = format)]
    output_err: Chosen,
    /// Tell what each test is at, also where standard error is no terminal
    #[arg(long)]
    progress: bool,
    /// host, cuda or cuda:N; by default cuda if there is one, else host (also -dev)
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Number of devices (host: that many; cuda: virtual ones where there are fewer)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    devices: u32,
    /// How the pool gets memory: by mapping pages, or in slabs
    #[arg(long, value_enum, default_value_t = PoolChoice::Vmm)]
    pool: PoolChoice,
    /// Most memory that the pool may take on the device, for example 7.8GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    mem_limit: Option<usize>,
    /// Whether steps are captured and replayed
    #[arg(long, value_enum, default_value_t = Switch::On)]
    graphs: Switch,
    /// Whether a CUDA device does ops of one token together, in few launches
    #[arg(long, value_enum, default_value_t = Switch::On)]
    fuse: Switch,
    /// How the host gets to know of its share inside a graph; by default as is best for the device
    #[arg(long, value_enum)]
    host_work: Option<HostWorkChoice>,
    /// Tokens in a step from which on experts of the host are copied to the device for it; by default as is best, if there is room
    #[arg(long, value_name = "N|off|auto", default_value = "auto")]
    stream_experts: StreamExperts,
    /// Of a single token's experts on the host, how many the device reads over the bus and does; by default as is best
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    device_experts: Option<u32>,
    /// Memory of the device for experts on the host that single tokens choose most often, such as 2GiB; none by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    expert_cache: Option<usize>,
    /// Activations in products with weights in blocks; weights of floats always take floats
    #[arg(long, value_enum, default_value_t = ActChoice::Q8)]
    act: ActChoice,
    /// Seed of the random tokens
    #[arg(short = 's', long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// The same as -o json
    #[arg(long, conflicts_with = "output")]
    pub(super) json: bool,
}

const AFTER: &str = "Flags with lists take several values, with commas or by being given again; all combinations are measured. Ranges of \
numbers are first-last, first-last+step or first-last*factor.

A test is timed after it ran to warm up. Columns are llama-bench's; after them come: give-backs of the pool, steps \
that found their graph stale, how those were repaired (remaps, updates, recaptures, eager runs), the peak of the pool, and \
achieved GB/s: the bytes of weights and cache that the steps can not do without reading, each matrix once a step and of experts \
only those that can have been picked, by the time. Events count from the first allocation of a test, filling and warm-up included. \
A test that fails, say for want of memory, is a row with an error; the others go on, and the exit status is 1.";

/// What one giving of a flag gives: clap takes a bare vector for one value each.
#[derive(Clone, Debug)]
struct Several<T>(Vec<T>);

/// A format, or none.
#[derive(Clone, Copy, Debug)]
struct Chosen(Option<Format>);

/// Reads values between commas.
fn list<T>(text: &str, value: impl Fn(&str) -> Result<T, String>) -> Result<Several<T>, String> {
    text.split(',').map(|part| value(part.trim())).collect::<Result<_, _>>().map(Several)
}

fn files(text: &str) -> Result<Several<PathBuf>, String> {
    // A name may hold a comma.
    if std::path::Path::new(text).exists() {
        return Ok(Several(vec![text.into()]));
    }
    list(text, |part| if part.is_empty() { Err("an empty name".to_owned()) } else { Ok(PathBuf::from(part)) })
}

fn numbers(text: &str, least: i64, most: i64) -> Result<Vec<i64>, String> {
    let values = bench::parse_ranges(text)?;
    match values.iter().find(|value| !(least..=most).contains(*value)) {
        Some(value) => Err(format!("{value} is not in {least} to {most}")),
        None => Ok(values),
    }
}

fn small(text: &str, least: i64, most: i32) -> Result<Several<u32>, String> {
    // All fit, by the bounds.
    numbers(text, least, most.into()).map(|values| Several(values.into_iter().map(|value| value as u32).collect()))
}

fn sizes(text: &str) -> Result<Several<u32>, String> {
    small(text, 0, 1 << 30)
}

fn counts(text: &str) -> Result<Several<u32>, String> {
    small(text, 1, 1 << 20)
}

fn threads(text: &str) -> Result<Several<u32>, String> {
    small(text, 1, 4096)
}

fn layers(text: &str) -> Result<Several<i64>, String> {
    numbers(text, -1, i32::MAX.into()).map(Several)
}

fn pair(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| numbers(text, 0, 1 << 30).ok().filter(|values| values.len() == 1)?.first().copied();
    let both = text.split_once(',').and_then(|(p, g)| Some((number(p)? as u32, number(g)? as u32)));
    both.ok_or_else(|| format!("`{text}` is no pair of numbers; write 512,128"))
}

fn cache_types(text: &str) -> Result<Several<KvType>, String> {
    list(text, bench::kv_parse)
}

fn flash_attn(text: &str) -> Result<Several<FlashAttn>, String> {
    list(text, FlashAttn::parse)
}

fn split_modes(text: &str) -> Result<Several<SplitMode>, String> {
    list(text, SplitMode::parse)
}

fn tensor_splits(text: &str) -> Result<Several<TensorSplit>, String> {
    list(text, TensorSplit::parse)
}

fn overrides(text: &str) -> Result<Several<String>, String> {
    list(text, |part| {
        let fine = part
            .split(';')
            .all(|rule| rule.split_once('=').is_some_and(|(left, right)| !left.is_empty() && !right.is_empty()));
        if part.is_empty() || fine { Ok(part.to_owned()) } else { Err(format!("`{part}` is not PATTERN=DEVICE;…")) }
    })
}

fn format(text: &str) -> Result<Chosen, String> {
    Format::parse(text).map(Chosen)
}

impl Flags {
    fn lists(&self) -> Lists {
        fn given<T: Clone>(flag: &[Several<T>], usual: Vec<T>) -> Vec<T> {
            if flag.is_empty() { usual } else { flag.iter().flat_map(|several| several.0.clone()).collect() }
        }
        let usual = Lists::default();
        Lists {
            models: given(&self.models, usual.models),
            gpu_layers: given(&self.gpu_layers, usual.gpu_layers),
            cpu_moe: if self.cpu_moe { vec![999] } else { given(&self.n_cpu_moe, usual.cpu_moe) },
            split_modes: given(&self.split_modes, usual.split_modes),
            main_gpus: given(&self.main_gpus, usual.main_gpus),
            tensor_splits: given(&self.tensor_splits, usual.tensor_splits),
            overrides: given(&self.overrides, usual.overrides),
            batches: given(&self.batches, usual.batches),
            ubatches: given(&self.ubatches, usual.ubatches),
            types_k: given(&self.types_k, usual.types_k),
            types_v: given(&self.types_v, usual.types_v),
            flash_attn: given(&self.flash_attn, usual.flash_attn),
            threads: given(&self.threads, usual.threads),
            depths: given(&self.depths, usual.depths),
            prompts: given(&self.prompts, usual.prompts),
            generations: given(&self.generations, usual.generations),
            both: self.both.clone(),
        }
    }

    fn settings(&self) -> Settings {
        Settings {
            devices: self.devices as usize,
            repetitions: self.repetitions,
            warm_up: !self.no_warmup,
            delay: Duration::from_secs(self.delay.into()),
            seed: self.seed,
            mmap: !self.no_mmap,
            stream_experts: self.stream_experts.tokens(),
            device_experts: self.device_experts.map(|count| count as usize),
            expert_cache: self.expert_cache,
        }
    }

    fn setup(&self, device: &Device) -> Setup {
        Setup {
            machine: Machine::with(device),
            pool: self.pool_mode().to_string(),
            mem_limit_bytes: self.mem_limit.map(|bytes| bytes as u64),
            graphs: self.graphs == Switch::On,
            act: self.act.name(),
            seed: self.seed,
            mmap: !self.no_mmap,
        }
    }

    fn pool_mode(&self) -> PoolMode {
        match self.pool {
            PoolChoice::Vmm => PoolMode::Vmm,
            PoolChoice::Slab => PoolMode::Slab,
        }
    }

    fn open(&self, device: &Device) -> Result<Arc<Runtime>> {
        let mut pool = PoolConfig::new(self.pool_mode());
        pool.limit_bytes = self.mem_limit;
        let graphs = self.graphs == Switch::On;
        let host_work = self.host_work.map(Into::into);
        let (act, fuse) = (self.act.into(), self.fuse == Switch::On);
        let config = RuntimeConfig { pool, graphs, act, fuse, host_work, ..RuntimeConfig::default() };
        Runtime::on(device, config).map(Arc::new)
    }
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    if flags.prio != 0 {
        return Err(Error::argument("--prio", "0 (the priority stays as it is; nice changes it)", flags.prio));
    }
    let lists = flags.lists();
    let rows = lists.rows()?;
    bench::check(&rows, flags.devices as usize)?;
    let device = choose(flags.device.as_deref())?.with_devices(flags.devices);
    let setup = flags.setup(&device);
    let limit = setup.mem_limit_bytes.map_or_else(String::new, |bytes| format!(", limit {}", format_size(bytes)));
    let graphs = if setup.graphs { "on" } else { "off" };
    say(format!("device: {device}; pool: {}{limit}; graphs: {graphs}; activations: {}", setup.pool, setup.act));
    let table = |format| Table::new(format, setup.clone(), &lists);
    let format = if flags.json { Some(Format::Json) } else { flags.output.0 };
    let total = rows.len();
    let mut teller = Teller {
        out,
        table: format.map(table),
        beside: flags.output_err.0.map(table),
        bar: progress(total as u64, "bench"),
        aloud: flags.progress,
        total,
    };
    teller.write(|table| table.header())?;
    let result = bench::run(&rows, &flags.settings(), &|| flags.open(&device), &mut teller);
    teller.bar.finish_and_clear();
    if matches!(result, Ok(()) | Err(Error::Tests { .. })) {
        teller.write(|table| table.footer())?;
    }
    result
}

/// Writes each row once it is there, and says what is going on.
struct Teller<'a> {
    out: &'a mut Output,
    table: Option<Table>,
    beside: Option<Table>,
    bar: indicatif::ProgressBar,
    aloud: bool,
    total: usize,
}

impl Teller<'_> {
    fn write(&mut self, piece: impl Fn(&mut Table) -> String) -> Result<()> {
        let Self { out, table, beside, bar, .. } = self;
        bar.suspend(|| {
            if let Some(table) = beside {
                // Nobody listening is fine.
                let _ = std::io::stderr().lock().write_all(piece(table).as_bytes());
            }
            match table {
                Some(table) => out.text(piece(table)),
                None => Ok(()),
            }
        })
    }
}

impl Listener for Teller<'_> {
    fn stage(&mut self, number: usize, row: &Row, stage: Stage) {
        if let Stage::Placed(account) = stage {
            if self.aloud || std::io::stderr().is_terminal() {
                self.bar.suspend(|| say(placement::table(&account)));
            }
            return;
        }
        self.bar.set_position(number as u64 - 1);
        self.bar.set_message(format!("{}: {stage}", row.test));
        if self.aloud {
            self.bar.suspend(|| say(format!("test {number} of {}: {}: {stage}", self.total, row.test)));
        }
    }

    fn done(&mut self, row: &Row, model: &Description, result: &Result<Measured>) -> Result<()> {
        if let Err(error) = result {
            let (what, advice) = error.parts();
            let advice = advice.map_or_else(String::new, |advice| format!("\n  try: {advice}"));
            self.bar.suspend(|| say(format!("{} failed: {what}{advice}", row.test)));
        }
        let time = time::strftime("%FT%TZ", time::now());
        self.write(|table| table.row(&Record { row, model, time: &time, result }))
    }
}
