//! The demo: what happens to captured graphs when a pool gives memory back, and how they are repaired.
//!
//! It re-tells a real failure in miniature. A runner kept the scratch of captured CUDA graphs in a pool; when memory ran
//! short the pool gave cached buffers back to the driver, and the next replay wrote through dead addresses. Here a small
//! mixture of experts decodes several texts under a byte limit. Prompts arrive between decode steps and need much
//! scratch, because attention writes its scores out; caches are outgrown and move; texts leave and others get
//! their memory. Every step goes through the graph cache, and a witness reads the driver's call log to tell what
//! really happened.
//!
//! ```no_run
//! use evergraph_runner::demo::{self, Settings};
//! let report = demo::run(&Settings::default(), &mut |line| { println!("{line}"); Ok(()) })?;
//! assert!(report.tokens_equal && report.bad_launches == 0);
//! # Ok::<(), evergraph_runner::Error>(())
//! ```

mod account;
mod model;
mod report;
mod sequence;
mod stage;
mod step;
mod witness;

use evergraph_pool::PoolMode;

use self::account::Account;
use self::stage::{Setting, play};
use crate::device::Device;
use crate::error::Result;

pub use report::{Check, Counted, Repairs, Report, Steady};

/// The limit that makes memory short at the right moments, bytes.
const LIMIT_BYTES: usize = 6336 << 10;

/// How the demo is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// How the pool gets memory.
    pub pool: PoolMode,
    /// Most bytes that the pool may hold; none means what makes memory short at the right moments.
    pub limit_bytes: Option<usize>,
    /// Whether steps are captured and replayed. Without, only the tokens are compared.
    pub graphs: bool,
    /// What the weights and prompts are made from.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { pool: PoolMode::Vmm, limit_bytes: None, graphs: true, seed: 1 }
    }
}

impl Settings {
    /// The limit in force on the host's card, bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes.unwrap_or(LIMIT_BYTES)
    }
}

/// How many times its size each buffer takes on a device, so that the story, written for pages of 32 KiB, is the same
/// with its pages.
///
/// # Errors
/// Those of the driver.
pub fn scale(device: &Device, pool: PoolMode) -> Result<usize> {
    stage::scale(device, pool)
}

/// Plays the story on a host device under the limit, once more without limit and without graphs, and compares.
///
/// # Errors
/// Those of the pool (a limit that the story does not fit in), the graph cache and the driver, and of `tell`. Checks
/// that do not hold are no error here: see [`Report::failed`].
pub fn run(settings: &Settings, tell: &mut dyn FnMut(&str) -> Result<()>) -> Result<Report> {
    run_on(&Device::host(), settings, tell)
}

/// As [`run`], on a device of choice. Where its pages are larger than those of the host's card every buffer is padded by
/// as much, and so is the limit: see [`scale`].
///
/// # Errors
/// As [`run`].
pub fn run_on(device: &Device, settings: &Settings, tell: &mut dyn FnMut(&str) -> Result<()>) -> Result<Report> {
    let scale = scale(device, settings.pool)?;
    let setting = Setting {
        mode: settings.pool,
        limit_bytes: Some(settings.limit_bytes.unwrap_or(LIMIT_BYTES * scale)),
        graphs: settings.graphs,
        seed: settings.seed,
        backend: device.backend(),
        scale,
    };
    let played = play(device, &setting, &mut Account::new(tell))?;
    let plain = Setting { limit_bytes: None, graphs: false, ..setting };
    let reference = play(device, &plain, &mut Account::silent())?;
    Ok(Report::new(&setting, &played, &reference))
}
