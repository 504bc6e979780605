//! `evergraph synth`: a model file of a real shape with random weights.

use std::path::PathBuf;

use serde_json::json;

use super::output::{Output, progress};
use super::size::format_size;
use crate::error::Result;
use crate::synth::{self, Options};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// The model: gemma3-270m, gemma4-26b-a4b, gemma4-31b, gemma4-e2b or deepseek-v4-flash
    #[arg(value_name = "ARCH")]
    model: String,
    /// The file to write
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: PathBuf,
    /// Type of the matrices
    #[arg(long, value_name = "TYPE", default_value = "Q4_0")]
    quant: String,
    /// Number of layers; all of the model's by default
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Seed of the weights
    #[arg(short = 's', long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Threads that make and write; by default one a core
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Option<u16>,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let quant = synth::quant(&flags.quant)?;
    let threads = flags.threads.map(usize::from);
    let options = Options { quant, layers: flags.layers, seed: flags.seed, threads, ..Options::new(&*flags.model) };
    let bar = progress(0, "writing");
    let made = synth::make(&flags.output, &options, &|done, total| {
        bar.set_length(total >> 20);
        bar.set_position(done >> 20);
    })?;
    bar.finish_and_clear();
    let mut document = json!(made);
    document["model"] = json!(flags.model);
    document["quant"] = json!(quant.name());
    document["seed"] = json!(flags.seed);
    document["path"] = json!(flags.output);
    out.document(&document)?;
    let speed = made.bytes as f64 / 1e9 / made.seconds.max(1e-9);
    out.line(format!(
        "{}: {} ({} bytes), {} tensors, {:.2} G weights in {} layers; {:.1} s, {speed:.2} GB/s",
        flags.output.display(),
        format_size(made.bytes),
        made.bytes,
        made.tensors,
        made.parameters as f64 / 1e9,
        made.layers,
        made.seconds,
    ))
}
