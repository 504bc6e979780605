//! Narration and checks of one scenario.

use std::fmt::Debug;

use evergraph_pool::{PoolConfig, PoolMode};
use serde::{Deserialize, Serialize};

use super::stage::{HOST_PAGE, PAGES};
use crate::device::Device;

/// One thing that had to hold.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Check {
    /// What was looked at.
    pub what: String,
    /// What it had to be.
    pub expected: String,
    /// What it was.
    pub found: String,
}

impl Check {
    /// Whether it held.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.expected == self.found
    }
}

/// How a scenario's body ends: any error ends the story, as a failed check.
pub(super) type Told = Result<(), Box<dyn std::error::Error>>;

/// Why a story can not be told on a device. A body ends with it instead of an error of its own.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Untold(pub(super) String);

/// A line of a told scenario.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Line {
    /// What happens.
    Said(String),
    /// What had to hold.
    Checked(Check),
}

/// A scenario while it is told.
#[derive(Debug)]
pub struct Story {
    mode: PoolMode,
    device: Device,
    /// Unit of mapping of the device, bytes.
    granule: usize,
    lines: Vec<Line>,
}

impl Story {
    pub(super) fn new(mode: PoolMode, device: Device, granule: usize) -> Self {
        Self { mode, device, granule, lines: Vec::new() }
    }

    /// Says what happens next.
    pub(super) fn say(&mut self, line: impl Into<String>) {
        self.lines.push(Line::Said(line.into()));
    }

    /// Checks that `found` is what was expected.
    pub(super) fn check<T: Debug + PartialEq>(&mut self, what: impl Into<String>, expected: T, found: T) {
        let (mut expected_text, mut found_text) = (brief(&expected), brief(&found));
        if (expected == found) != (expected_text == found_text) {
            // Long values that differ only where the text was cut, or values that are unlike but print alike.
            expected_text.push_str(" (as expected)");
            found_text.push_str(if expected == found { " (as expected)" } else { " (not as expected)" });
        }
        let check = Check { what: what.into(), expected: expected_text, found: found_text };
        self.lines.push(Line::Checked(check));
    }

    /// Checks that something holds.
    pub(super) fn holds(&mut self, what: impl Into<String>, found: bool) {
        self.check(what, true, found);
    }

    /// Checks that something failed, and that its text says what it should.
    pub(super) fn refused<T, E: std::fmt::Display>(&mut self, what: &str, says: &str, found: &Result<T, E>) {
        let found = match found {
            Ok(_) => "no error".to_owned(),
            Err(error) => {
                let text = error.to_string();
                if text.contains(says) { format!("an error with \"{says}\"") } else { text }
            }
        };
        self.check(what, Plain(format!("an error with \"{says}\"")), Plain(found));
    }

    /// The pool mode that it is told in.
    pub(super) fn mode(&self) -> PoolMode {
        self.mode
    }

    /// Whether pages and addresses can be told apart.
    pub(super) fn vmm(&self) -> bool {
        self.mode == PoolMode::Vmm
    }

    /// The device that it is told on.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether that is hardware, where nothing can be set but what the pool may take.
    pub(super) fn hardware(&self) -> bool {
        !self.device.is_host()
    }

    /// Ends a story that needs a device of its own making.
    pub(super) fn host_only(&self, why: &str) -> Result<(), Untold> {
        if self.hardware() { Err(Untold(why.to_owned())) } else { Ok(()) }
    }

    /// Bytes of a page: what a chunk and the smallest slab hold.
    pub(super) fn page(&self) -> usize {
        self.page_of(self.mode)
    }

    fn page_of(&self, mode: PoolMode) -> usize {
        // A slab is as large as we like, on any device.
        if mode == PoolMode::Vmm { self.granule } else { HOST_PAGE }
    }

    /// The pool that stories play with.
    pub(super) fn pages(&self) -> PoolConfig {
        self.pages_of(self.mode)
    }

    /// The same in a mode of choice.
    pub(super) fn pages_of(&self, mode: PoolMode) -> PoolConfig {
        let page = self.page_of(mode);
        let pool = PoolConfig::new(mode).chunk(page).smallest_slab(page);
        // A host device is that small by itself.
        if self.hardware() { pool.limit(PAGES * page) } else { pool }
    }

    pub(super) fn into_lines(self) -> Vec<Line> {
        self.lines
    }
}

/// Text that prints as it is.
#[derive(PartialEq)]
struct Plain(String);

impl Debug for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

fn brief(value: &impl Debug) -> String {
    const LONGEST: usize = 160;
    let mut text = format!("{value:?}");
    if let Some((cut, _)) = text.char_indices().nth(LONGEST) {
        text.truncate(cut);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests;
