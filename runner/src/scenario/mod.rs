//! Narrated cases: each a short deterministic story on a host device, with checks.
//!
//! A scenario builds a small device (its streams stepped, its calls logged), plays one fault that graph caches
//! and allocators have had, and checks what must hold instead. The names of those that replay a public report
//! begin with the project and the number of the report.
//!
//! ```
//! use evergraph_pool::PoolMode;
//! let told = evergraph_runner::scenario::tell("aba", PoolMode::Slab).ok_or("no such scenario")?;
//! assert!(told.passed, "{told}");
//! # Ok::<(), &str>(())
//! ```

mod cache;
mod capture;
mod devices;
mod giveback;
mod identity;
mod memory;
mod record;
mod scratch;
mod stage;
mod story;
mod streams;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use evergraph_pool::PoolMode;
use serde::Serialize;

use story::Told;
pub use story::{Check, Line, Story};

/// A scenario, by name.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it tells, in one line.
    pub about: &'static str,
    /// The pool modes that it has something to tell about.
    pub modes: &'static [PoolMode],
    body: fn(&mut Story) -> Told,
}

impl fmt::Debug for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scenario").field("name", &self.name).field("modes", &self.modes).finish_non_exhaustive()
    }
}

const BOTH: &[PoolMode] = &[PoolMode::Vmm, PoolMode::Slab];
const VMM: &[PoolMode] = &[PoolMode::Vmm];

const fn both(name: &'static str, about: &'static str, body: fn(&mut Story) -> Told) -> Scenario {
    Scenario { name, about, modes: BOTH, body }
}

const fn vmm(name: &'static str, about: &'static str, body: fn(&mut Story) -> Told) -> Scenario {
    Scenario { name, about, modes: VMM, body }
}

/// Every scenario, in the order in which `all` tells them.
pub fn list() -> impl Iterator<Item = &'static Scenario> {
    [
        giveback::SCENARIOS,
        identity::SCENARIOS,
        scratch::SCENARIOS,
        record::SCENARIOS,
        capture::SCENARIOS,
        cache::SCENARIOS,
        streams::SCENARIOS,
        memory::SCENARIOS,
        devices::SCENARIOS,
    ]
    .into_iter()
    .flatten()
}

/// A scenario that was told.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Which.
    pub name: &'static str,
    /// On which device.
    pub device: &'static str,
    /// With which pool.
    pub pool: String,
    /// Whether every check held.
    pub passed: bool,
    /// What was checked.
    pub checks: Vec<Check>,
    /// Narration and checks, in order.
    #[serde(skip)]
    pub lines: Vec<Line>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({}, {})", self.name, self.device, self.pool)?;
        for line in &self.lines {
            match line {
                Line::Said(text) => writeln!(f, "  {text}")?,
                Line::Checked(check) if check.passed() => writeln!(f, "    ok    {}: {}", check.what, check.found)?,
                Line::Checked(check) => {
                    writeln!(f, "    FAIL  {}: expected {}, found {}", check.what, check.expected, check.found)?;
                }
            }
        }
        write!(f, "  {}", if self.passed { "passed" } else { "FAILED" })
    }
}

/// Tells one scenario in a mode, whether it lists that mode or not; `None` if there is none of that name. An
/// error or a panic in its body is a failed check.
#[must_use]
pub fn tell(name: &str, mode: PoolMode) -> Option<Report> {
    let scenario = list().find(|s| s.name == name)?;
    let mut story = Story::new(mode);
    let ended = catch_unwind(AssertUnwindSafe(|| (scenario.body)(&mut story)));
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => story.check("the story was told to its end", "yes".to_owned(), error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            story.check("nothing panicked", "nothing".to_owned(), text.unwrap_or_else(|| "a panic".to_owned()));
        }
    }
    let lines = story.into_lines();
    let checks: Vec<Check> = lines
        .iter()
        .filter_map(|line| match line {
            Line::Checked(check) => Some(check.clone()),
            Line::Said(_) => None,
        })
        .collect();
    let passed = !checks.is_empty() && checks.iter().all(Check::passed);
    Some(Report { name: scenario.name, device: "host", pool: mode.to_string(), passed, checks, lines })
}
