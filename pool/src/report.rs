//! What the pool looks like, for people.

use std::fmt;

use crate::driver::DeviceOrdinal;
use crate::{PoolId, PoolMode};

/// The state of a pool at one moment. Bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Which pool.
    pub pool: PoolId,
    /// Its mode.
    pub mode: PoolMode,
    /// Its device.
    pub device: DeviceOrdinal,
    /// The byte limit, if there is one.
    pub limit_bytes: Option<usize>,
    /// Held from the driver.
    pub reserved_bytes: usize,
    /// In live slices, rounded.
    pub allocated_bytes: usize,
    /// In live slices, as asked for.
    pub requested_bytes: usize,
    /// Free, with memory behind.
    pub free_bytes: usize,
    /// The largest free block.
    pub largest_free_bytes: usize,
    /// Could be given back at once: whole free chunks or slabs that no graph depends on.
    pub cached_bytes: usize,
    /// Held by graphs (and arenas), not by live slices.
    pub held_by_graphs_bytes: usize,
    /// The biggest holders, biggest first.
    pub holders: Vec<Holder>,
    /// Every segment as a strip of characters: `#` live, `g` held by graphs, `.` free, blank: no memory.
    pub strips: Vec<String>,
    /// What to try.
    pub advice: Vec<&'static str>,
}

/// Who holds memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// How much, bytes.
    pub bytes: usize,
    /// Who.
    pub who: String,
}

pub(crate) struct Bytes(pub(crate) usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", units[unit]) }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on device {} ({} mode", self.pool, self.device, self.mode)?;
        match self.limit_bytes {
            Some(limit) => writeln!(f, ", limit {})", Bytes(limit))?,
            None => writeln!(f, ", no limit)")?,
        }
        writeln!(
            f,
            "  reserved {}, live {} (asked for {}), held by graphs {}, free {} (largest {}, could go back {})",
            Bytes(self.reserved_bytes),
            Bytes(self.allocated_bytes),
            Bytes(self.requested_bytes),
            Bytes(self.held_by_graphs_bytes),
            Bytes(self.free_bytes),
            Bytes(self.largest_free_bytes),
            Bytes(self.cached_bytes),
        )?;
        for holder in &self.holders {
            writeln!(f, "  {:>10}  {}", Bytes(holder.bytes).to_string(), holder.who)?;
        }
        for strip in &self.strips {
            writeln!(f, "  {strip}")?;
        }
        for advice in &self.advice {
            writeln!(f, "  try: {advice}")?;
        }
        Ok(())
    }
}
