//! What is measured on a device, CUDA's or the host's: the same code over the driver traits.
//!
//! | module | what |
//! |---|---|
//! | [`memory`] | pairs, churns, reuse across streams; `rivals/rivals.cpp` does the same work with other allocators |
//! | [`graphs`] | a launch through the cache beside a bare one, reading a graph back, loading the kernels |
//! | [`repair`] | every kind of repair at several sizes, and the cost table that comes of it |

pub mod graphs;
pub mod memory;
pub mod repair;
mod rig;

pub use rig::{Rig, Step};

use crate::samples::Row;

/// Anything that can go wrong while measuring.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Where rows go: to standard output at once, and into the table at the end.
#[derive(Debug, Default)]
pub struct Report {
    /// All rows so far.
    pub rows: Vec<Row>,
}

impl Report {
    /// Adds what was measured of this project.
    pub fn add(&mut self, bench: &str, case: &str, who: &str, unit: &str, samples: &[f64]) {
        let Some(row) = Row::of(bench, case, who, unit, samples) else { return };
        if let Ok(line) = serde_json::to_string(&row) {
            println!("{line}");
        }
        self.rows.push(row);
    }
}

/// How much is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// For numbers.
    Full,
    /// To see that it runs: a hundredth of the rounds, small sizes.
    Quick,
}

impl Effort {
    /// So many rounds, or a few.
    #[must_use]
    pub fn rounds(self, full: usize) -> usize {
        match self {
            Self::Full => full,
            Self::Quick => (full / 100).max(3),
        }
    }
}
