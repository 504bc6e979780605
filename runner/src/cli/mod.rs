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
mod size;

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
            Self::Demo(flags) => demo::run(&flags, &mut Output::of_a_verdict(flags.json)),
            Self::Run(flags) => run::run(&flags, &mut Output::new(flags.json)),
            Self::Logits(flags) => logits::run(&flags, &mut Output::new(flags.json)),
            Self::Perplexity(flags) => perplexity::run(&flags, &mut Output::new(flags.json)),
            Self::Bench(flags) => bench::run(&flags, &mut Output::new(false)),
            Self::Info(flags) => info::run(&flags, &mut Output::new(flags.json)),
            Self::Tokenize(flags) => tokenize::run(&flags, &mut Output::new(flags.json)),
            Self::Detokenize(flags) => detokenize::run(&flags, &mut Output::new(flags.json)),
            Self::Ops(flags) => ops::run(&flags, &mut Output::of_a_verdict(flags.json)),
            Self::Scenario(flags) => scenario::run(&flags, &mut Output::of_a_verdict(flags.json)),
            Self::Replay(flags) => replay::run(&flags, &mut Output::new(flags.json)),
            Self::Stress(flags) => stress::run(&flags, &mut Output::of_a_verdict(flags.json)),
            Self::Synth(flags) => synth::run(&flags, &mut Output::new(flags.json)),
            Self::Doctor(flags) => doctor::run(&flags, &mut Output::new(flags.json)),
        }
    }
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
    let matches = command.try_get_matches_from(normalise(args)).map_err(Failure::Words)?;
    let cli = Cli::from_arg_matches(&matches).map_err(Failure::Words)?;
    match cli.command.run() {
        Err(crate::Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(Failure::Work(error)),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
