//! Narrated cases: each a short deterministic story on a device, with checks.
//!
//! A scenario takes a small device (its calls logged, the streams of a host device stepped), plays one fault that graph
//! caches and allocators have had, and checks what must hold instead. The names of those that replay a public report
//! begin with the project and the number of the report. A few need a device of their own making, or two of them: where
//! there is none they are skipped, with the reason.
//!
//! ```
//! use evergraph_pool::PoolMode;
//! let told = evergraph_runner::scenario::tell("aba", PoolMode::Slab).ok_or("no such scenario")?;
//! assert!(told.passed, "{told}");
//! # Ok::<(), &str>(())
//! ```

mod cache;
mod capture;
mod deadly;
mod devices;
mod flush;
mod giveback;
mod identity;
mod memory;
mod pages;
mod record;
mod scratch;
mod sleep;
mod stage;
mod story;
mod streams;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use evergraph_pool::PoolMode;
use evergraph_pool::driver::DriverResult;
use serde::{Deserialize, Serialize};

use crate::device::Device;
use stage::HOST_PAGE;
pub use story::{Check, Line, Story};
use story::{Told, Untold};

/// A scenario, by name.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it tells, in one line.
    pub about: &'static str,
    /// The pool modes that it has something to tell about.
    pub modes: &'static [PoolMode],
    /// Whether its device dies in it, on purpose. On hardware it wants a process of its own.
    pub deadly: bool,
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
    Scenario { name, about, modes: BOTH, deadly: false, body }
}

const fn vmm(name: &'static str, about: &'static str, body: fn(&mut Story) -> Told) -> Scenario {
    Scenario { name, about, modes: VMM, deadly: false, body }
}

/// Every scenario, in the order in which `all` tells them.
pub fn list() -> impl Iterator<Item = &'static Scenario> {
    [
        giveback::SCENARIOS,
        flush::SCENARIOS,
        identity::SCENARIOS,
        scratch::SCENARIOS,
        record::SCENARIOS,
        capture::SCENARIOS,
        cache::SCENARIOS,
        streams::SCENARIOS,
        memory::SCENARIOS,
        pages::SCENARIOS,
        sleep::SCENARIOS,
        devices::SCENARIOS,
        deadly::SCENARIOS,
    ]
    .into_iter()
    .flatten()
}

/// A scenario that was told.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Which.
    pub name: &'static str,
    /// On which device: `host` or `cuda`.
    pub device: &'static str,
    /// With which pool.
    pub pool: String,
    /// Whether it was told and every check held.
    pub passed: bool,
    /// Why it was not told, if it was not. Neither passed nor failed, then.
    pub skipped: Option<String>,
    /// What was checked.
    pub checks: Vec<Check>,
    /// Narration and checks, in order.
    #[serde(skip)]
    pub lines: Vec<Line>,
}

/// What comes of telling: lines, or the reason why there are none.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Telling {
    /// Narration and checks, in order.
    pub lines: Vec<Line>,
    /// Why it was not told.
    pub skipped: Option<String>,
}

impl Telling {
    /// That of a story which could not even be begun.
    #[must_use]
    pub fn failure(what: &str, found: &str) -> Self {
        let check = Check { what: what.to_owned(), expected: "yes".to_owned(), found: found.to_owned() };
        Self { lines: vec![Line::Checked(check)], skipped: None }
    }
}

impl Report {
    /// The report of a telling, which may have happened in another process.
    #[must_use]
    pub fn new(scenario: &Scenario, mode: PoolMode, device: &Device, telling: Telling) -> Self {
        let Telling { lines, skipped } = telling;
        let checks: Vec<Check> = lines
            .iter()
            .filter_map(|line| match line {
                Line::Checked(check) => Some(check.clone()),
                Line::Said(_) => None,
            })
            .collect();
        let passed = skipped.is_none() && !checks.is_empty() && checks.iter().all(Check::passed);
        let (name, device, pool) = (scenario.name, device.backend(), mode.to_string());
        Self { name, device, pool, passed, skipped, checks, lines }
    }

    /// Whether it was told and a check did not hold.
    #[must_use]
    pub fn failed(&self) -> bool {
        !self.passed && self.skipped.is_none()
    }
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
        match &self.skipped {
            Some(why) => write!(f, "  skipped: {why}"),
            None => write!(f, "  {}", if self.passed { "passed" } else { "FAILED" }),
        }
    }
}

/// Tells one scenario in a mode on a host device, whether it lists that mode or not; `None` if there is none of that
/// name. An error or a panic in its body is a failed check.
#[must_use]
pub fn tell(name: &str, mode: PoolMode) -> Option<Report> {
    let scenario = list().find(|s| s.name == name)?;
    let device = Device::host();
    Some(Report::new(scenario, mode, &device, tell_on(scenario, mode, &device)))
}

/// Tells one scenario in a mode on a device.
#[must_use]
pub fn tell_on(scenario: &Scenario, mode: PoolMode, device: &Device) -> Telling {
    let granule: DriverResult<usize> = device.page_bytes(HOST_PAGE);
    let mut story = Story::new(mode, device.clone(), *granule.as_ref().unwrap_or(&HOST_PAGE));
    if let Err(error) = granule {
        story.check("the device answers", "yes".to_owned(), error.to_string());
        return Telling { lines: story.into_lines(), skipped: None };
    }
    let ended = catch_unwind(AssertUnwindSafe(|| (scenario.body)(&mut story)));
    let mut skipped = None;
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => match error.downcast::<Untold>() {
            Ok(untold) => skipped = Some(untold.0),
            Err(error) => story.check("the story was told to its end", "yes".to_owned(), error.to_string()),
        },
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            story.check("nothing panicked", "nothing".to_owned(), text.unwrap_or_else(|| "a panic".to_owned()));
        }
    }
    Telling { lines: story.into_lines(), skipped }
}
