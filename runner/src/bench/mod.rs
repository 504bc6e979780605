//! Speed of models, measured and told as llama-bench does, with what the pool and the graphs had to do beside it.
//!
//! A *row* is one test with all its parameters; [`Lists`] gives every combination. A test reads a prompt (`pp512`), takes
//! single tokens in (`tg128`), or both, behind a cache that holds `depth` tokens already. Tokens are random. A prompt's time
//! includes the choice of one token behind each batch; a single token's includes its choice, on the device, and its way back
//! to the host. The cache is filled once; after each repetition it is taken back to where it was.
//!
//! Before a test is timed it runs to warm up: its whole prompt and a few tokens, and again (three times at most, for about a
//! second) while there are steps that the graph cache has yet to capture.
//!
//! # Events and bytes
//! Give-backs, stale graphs and repairs are counted from the first allocation of a test to its last repetition: filling and
//! warm-up count, since that is where memory runs short first. So is the peak of the pool, which includes the model (but not on
//! the host device: there it is the mapped file).
//!
//! Achieved gigabytes a second are the bytes that the steps can not do without reading, by the time that they took. A step reads
//! each matrix once, however many tokens it has; of experts as many as its tokens can pick if each picks others; one row of the
//! embedding for each token; the output matrix where a token is chosen; and the keys and values that its tokens see, once. So for
//! single tokens it is (active weights + cache) × tokens a second.

mod describe;
mod limits;
mod measure;
mod parameters;
mod ranges;
mod samples;
mod table;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use describe::{Description, Machine};
pub use limits::shares;
pub use measure::{Events, Measured};
pub use parameters::{
    FlashAttn, Lists, ModelParameters, Placement, Row, SequenceParameters, SplitMode, TensorSplit, Test, kv_name,
    kv_parse,
};
pub use ranges::parse as parse_ranges;
pub use samples::{deviation, mean};
pub use table::{Format, Record, Setup, Table};

use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::models::{self, Decoder};
use crate::placement::Account;

/// What holds for all rows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// How many devices there are.
    pub devices: usize,
    /// Times that each test is timed.
    pub repetitions: u32,
    /// Whether a test runs once before it is timed.
    pub warm_up: bool,
    /// Rest before each test.
    pub delay: Duration,
    /// Seed of the random tokens.
    pub seed: u64,
    /// Whether model files are mapped; else they are read.
    pub mmap: bool,
    /// As in [`SessionConfig`](crate::engine::SessionConfig).
    pub stream_experts: Option<usize>,
    /// As in [`SessionConfig`](crate::engine::SessionConfig).
    pub device_experts: Option<usize>,
    /// As in [`SessionConfig`](crate::engine::SessionConfig).
    pub expert_cache: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 1,
            repetitions: 5,
            warm_up: true,
            delay: Duration::ZERO,
            seed: 1,
            mmap: true,
            stream_experts: None,
            device_experts: None,
            expert_cache: None,
        }
    }
}

/// What a test is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Stage {
    /// Its model is loaded.
    Load,
    /// The model and the first sequence on it are there: where what is.
    Placed(Account),
    /// The cache is filled up to the test's depth.
    Fill,
    /// It runs without being timed.
    WarmUp,
    /// It is timed; which time, from 1.
    Repetition(u32),
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Load => f.write_str("load"),
            Self::Placed(_) => f.write_str("placed"),
            Self::Fill => f.write_str("fill"),
            Self::WarmUp => f.write_str("warm up"),
            Self::Repetition(number) => write!(f, "run {number}"),
        }
    }
}

/// Who listens.
pub trait Listener {
    /// A test is at a stage.
    fn stage(&mut self, number: usize, row: &Row, stage: Stage);

    /// A test is done, one way or the other.
    ///
    /// # Errors
    /// Where it could not be written: the run ends.
    fn done(&mut self, row: &Row, model: &Description, result: &Result<Measured>) -> Result<()>;
}

/// The models of rows, looked at before anything is measured: one at least is there, and the engine can do what the rows ask
/// for on so many devices. Rows of others will fail.
///
/// # Errors
/// That of the first file, if none can be read; [`Error::Argument`] for what the engine can not do.
pub fn check(rows: &[Row], devices: usize) -> Result<Vec<(PathBuf, Description)>> {
    let mut models: Vec<(PathBuf, Result<Description>)> = Vec::new();
    for row in rows {
        let file = &row.model.file;
        if !models.iter().any(|(known, _)| known == file) {
            models.push((file.clone(), Description::open(file)));
        }
        row.check(devices)?;
    }
    if models.iter().all(|(_, model)| model.is_err()) {
        models.truncate(1);
        return models.into_iter().map(|(file, model)| Ok((file, model?))).collect();
    }
    Ok(models.into_iter().map(|(file, model)| (file, model.unwrap_or_else(|_| Description::unknown()))).collect())
}

/// A model on a device.
struct Loaded {
    parameters: ModelParameters,
    model: Arc<Decoder>,
    runtime: Arc<Runtime>,
    /// Whether somebody was told where what is.
    told: bool,
}

impl Loaded {
    fn new(parameters: &ModelParameters, mmap: bool, open: &dyn Fn() -> Result<Arc<Runtime>>) -> Result<Self> {
        let file = Arc::new(if mmap { Gguf::open(&parameters.file)? } else { Gguf::read(&parameters.file)? });
        let runtime = open()?;
        let model = Arc::new(models::load_placed(file, &runtime, &parameters.placement.placed_on(&runtime)?)?);
        Ok(Self { parameters: parameters.clone(), model, runtime, told: false })
    }

    /// As it was before a test, so that the next one finds the same: no graphs, and no memory but the model's.
    fn clean(&self) {
        self.runtime.cache().clear();
        // A device that died will tell the next test.
        self.runtime.units().iter().for_each(|unit| drop(unit.pool().trim_to(0)));
    }
}

/// Measures row by row. A row that fails is told as such, and the next is tried; a row whose model is the last one's
/// takes it as it is.
///
/// # Errors
/// Those of [`check`] and of the listener, at once; [`Error::Tests`] at the end if rows failed.
pub fn run(
    rows: &[Row],
    settings: &Settings,
    open: &dyn Fn() -> Result<Arc<Runtime>>,
    listener: &mut dyn Listener,
) -> Result<()> {
    let models = check(rows, settings.devices)?;
    // Threads are started once; a test that asks for more than run, since somebody else started them, is refused.
    let threads = rows.iter().map(|row| row.sequence.threads).max().unwrap_or(0);
    let _ = evergraph_kernels::threads(threads as usize);
    let mut loaded: Option<Loaded> = None;
    let mut failed = 0;
    for (index, row) in rows.iter().enumerate() {
        let Some((_, description)) = models.iter().find(|(file, _)| *file == row.model.file) else { continue };
        if loaded.as_ref().is_some_and(|loaded| loaded.parameters != row.model) {
            loaded = None; // before the next one needs the memory
        }
        let mut stage = |stage| listener.stage(index + 1, row, stage);
        let result = test(&mut loaded, row, settings, open, &mut stage);
        failed += usize::from(result.is_err());
        listener.done(row, description, &result)?;
        if let Some(loaded) = &loaded {
            loaded.clean();
        }
    }
    if failed > 0 { Err(Error::Tests { failed, tests: rows.len() }) } else { Ok(()) }
}

fn test(
    loaded: &mut Option<Loaded>,
    row: &Row,
    settings: &Settings,
    open: &dyn Fn() -> Result<Arc<Runtime>>,
    stage: &mut dyn FnMut(Stage),
) -> Result<Measured> {
    let loaded = match loaded {
        Some(loaded) => loaded,
        None => {
            stage(Stage::Load);
            loaded.insert(Loaded::new(&row.model, settings.mmap, open)?)
        }
    };
    std::thread::sleep(settings.delay);
    let told = std::mem::replace(&mut loaded.told, true);
    let mut stage = |at| match at {
        Stage::Placed(_) if told => {}
        at => stage(at),
    };
    measure::measure(&loaded.runtime, &loaded.model, row, settings, &mut stage)
}

#[cfg(test)]
mod tests;
