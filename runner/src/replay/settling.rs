//! How long graphs take to be steady again after memory was short.

use std::time::{Duration, Instant};

/// Watches the runs of graphs. A step is *steady* if every run in it was a plain replay and nothing went back to the
/// driver; a *spell* of trouble lasts from the beginning of the first event that was not, to the end of the last one before the
/// next steady step. What comes before the first steady step is the start-up and not counted.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// A steady step was seen.
    pub(super) started: bool,
    /// Anything in this step was not steady.
    troubled: bool,
    /// Any graph ran in this step.
    ran: bool,
    spell: Option<(Instant, Instant)>,
    pub(super) spells: u64,
    pub(super) unsteady: Duration,
}

impl Settling {
    /// An event that gave memory back or was no plain replay.
    pub(super) fn trouble(&mut self, since: Instant) {
        self.troubled = true;
        if self.started {
            let now = Instant::now();
            self.spell = Some((self.spell.map_or(since, |(first, _)| first), now));
        }
    }

    /// A graph ran.
    pub(super) fn run(&mut self) {
        self.ran = true;
    }

    /// A step ends; whether it was the first steady one.
    pub(super) fn step(&mut self) -> bool {
        let steady = self.ran && !self.troubled;
        (self.ran, self.troubled) = (false, false);
        if steady {
            self.close();
        }
        let first = steady && !self.started;
        self.started |= steady;
        first
    }

    /// The trace ends.
    pub(super) fn close(&mut self) {
        if let Some((first, last)) = self.spell.take() {
            self.spells += 1;
            self.unsteady += last - first;
        }
    }
}
