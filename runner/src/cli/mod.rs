//! The command line: results on standard output, talk on standard error.
//!
//! Exit status: 0 fine; 1 the work failed or a check did not hold; 2 the words were off; 3 the asked-for
//! device is not there.

mod argv;
mod device;
mod fit;
mod flags;
mod output;
mod placement;
mod plan;
mod size;
mod split;

mod bench;
mod demo;
mod detokenize;
mod doctor;
mod info;
mod logits;
mod ops;
mod perplexity;
mod replay;
mod run;
mod scenario;
mod stress;
mod synth;
mod tokenize;

use std::ffi::OsString;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub use argv::normalise;
pub use size::{format_size, parse_size};

use crate::error::Result;
use output::Output;

/// Runs Gemma and DeepSeek models on a GPU memory pool with generation tokens and a graph cache that can
/// not replay a stale graph.
#[derive(Debug, Parser)]
#[command(name = "evergraph", version, max_term_width = 110, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// One variant a command: its flags and, in [`Command::run`], its function.
#[derive(Debug, Subcommand)]
enum Command {
    /// Show what happens to captured graphs when memory is short, and how they are repaired
    Demo(demo::Flags),
    /// Generate text
    Run(run::Flags),
    /// Compute the logits of given tokens
    Logits(logits::Flags),
    /// Measure how well a model predicts a text
    Perplexity(perplexity::Flags),
    /// Measure the speed of models, as llama-bench does
    Bench(Box<bench::Flags>),
    /// Show the metadata and tensors of a model file
    Info(info::Flags),
    /// Turn text into token ids
    Tokenize(tokenize::Flags),
    /// Turn token ids into text
    Detokenize(detokenize::Flags),
    /// Compare every op on a device with its CPU body
    Ops(ops::Flags),
    /// Tell the narrated cases of stale graphs and lost memory, with checks
    Scenario(scenario::Flags),
    /// Replay an allocation trace: what a pool would hold, and whether it would fit
    Replay(replay::Flags),
    /// Random steps against a plain model of what must be true
    Stress(stress::Flags),
    /// Write a model file of a real shape with random weights
    Synth(synth::Flags),
    /// Show devices, drivers, memory, and what is missing
    Doctor(doctor::Flags),
}

impl Command {
    fn run(self) -> Result<()> {
        match self {
            Self::Demo(flags) => told(Output::of_a_verdict(flags.json), |out| demo::run(&flags, out)),
            Self::Run(flags) => told(Output::new(flags.json), |out| run::run(&flags, out)),
            Self::Logits(flags) => told(Output::new(flags.json), |out| logits::run(&flags, out)),
            Self::Perplexity(flags) => told(Output::new(flags.json), |out| perplexity::run(&flags, out)),
            Self::Bench(flags) => told(Output::of_rows(flags.json), |out| bench::run(&flags, out)),
            Self::Info(flags) => told(Output::new(flags.json), |out| info::run(&flags, out)),
            Self::Tokenize(flags) => told(Output::new(flags.json), |out| tokenize::run(&flags, out)),
            Self::Detokenize(flags) => told(Output::new(flags.json), |out| detokenize::run(&flags, out)),
            Self::Ops(flags) => told(Output::of_a_verdict(flags.json), |out| ops::run(&flags, out)),
            Self::Scenario(flags) => told(Output::of_a_verdict(flags.json), |out| scenario::run(&flags, out)),
            Self::Replay(flags) => told(Output::of_a_verdict(flags.json), |out| replay::run(&flags, out)),
            Self::Stress(flags) => told(Output::of_a_verdict(flags.json), |out| stress::run(&flags, out)),
            Self::Synth(flags) => told(Output::new(flags.json), |out| synth::run(&flags, out)),
            Self::Doctor(flags) => told(Output::new(flags.json), |out| doctor::run(&flags, out)),
        }
    }
}

/// Does a command's work; a failure is a part of the output.
fn told(mut out: Output, work: impl FnOnce(&mut Output) -> Result<()>) -> Result<()> {
    work(&mut out).inspect_err(|error| out.failure(error))
}

/// How a run of the command line ended, where it did not simply work.
#[derive(Debug)]
pub enum Failure {
    /// The words were off, or help was asked for: the text is for people, the status as clap says.
    Words(clap::Error),
    /// The work failed.
    Work(crate::Error),
}

/// Runs one command line, the program's name first.
///
/// # Errors
/// What the words or the work did not allow; a reader that closed the pipe is no error.
pub fn run(args: impl IntoIterator<Item = OsString>) -> std::result::Result<(), Failure> {
    let command = argv::as_llama_reads(Cli::command());
    let args = normalise(args);
    let json = argv::asks_for_json(&args);
    let parsed = command.try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = parsed.map_err(|error| {
        if json && error.use_stderr() {
            let text = error.to_string();
            let what = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
            // Nobody reading is fine.
            let _ = Output::new(true).document(&output::failure(what, Some("evergraph help"), 2));
        }
        Failure::Words(error)
    })?;
    match cli.command.run() {
        Err(crate::Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(Failure::Work(error)),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
