//! How a run ended.

use std::fmt;

use evergraph_pool::Stale;

/// What ran.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Ran {
    /// The closure, before the first capture.
    WarmUp,
    /// A graph just captured.
    Captured,
    /// A graph, good as it was.
    Replayed,
    /// A graph, after pages were put back under its addresses.
    Remapped,
    /// A graph, after a new capture went into its exec.
    Updated,
    /// A graph, captured and instantiated anew.
    Recaptured,
    /// The closure, instead of a graph.
    Eager,
}

impl Ran {
    /// Whether a graph was launched.
    #[must_use]
    pub fn is_graph(self) -> bool {
        !matches!(self, Self::WarmUp | Self::Eager)
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WarmUp => "warm-up",
            Self::Captured => "captured",
            Self::Replayed => "replayed",
            Self::Remapped => "remapped",
            Self::Updated => "updated",
            Self::Recaptured => "recaptured",
            Self::Eager => "eager",
        })
    }
}

/// How a run ended, and why it was no plain replay.
#[must_use]
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// What ran.
    pub ran: Ran,
    /// Why it was repaired or run eagerly. `None` for warm-ups, first captures and replays.
    pub cause: Option<Cause>,
}

impl Outcome {
    pub(crate) fn plain(ran: Ran) -> Self {
        Self { ran, cause: None }
    }
}

/// Why a graph was not simply launched.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// Memory that it depends on was retired: what each pool said.
    Stale(Vec<Stale>),
    /// It was captured with other allocations than the request names.
    Rebound,
    /// Somebody [invalidated](crate::GraphCache::invalidate) it.
    Invalidated,
    /// Memory was not ready inside the capture window, and could not be made ready.
    WindowMiss {
        /// What was asked for, bytes.
        requested_bytes: usize,
    },
    /// The warm-up had not loaded a function that the capture needed.
    NotLoaded {
        /// Which.
        name: String,
    },
    /// An illegal call broke the capture.
    CaptureLost,
    /// There was no memory for an exec.
    NoMemory,
    /// Predicted to be cheaper, as often as the graph goes stale.
    Cheaper,
    /// The pools were disturbed again and again while it was being repaired.
    Unsettled,
    /// A launch would have written over a result that somebody holds.
    OutputHeld,
    /// All other graphs are busy and the bounds leave no room.
    Full,
    /// The cache is set to use no graphs.
    GraphsOff,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale(stale) => {
                for (i, stale) in stale.iter().enumerate() {
                    write!(f, "{}{stale}", if i == 0 { "" } else { "; " })?;
                }
                Ok(())
            }
            Self::Rebound => f.write_str("the request names other allocations"),
            Self::Invalidated => f.write_str("it was invalidated"),
            Self::WindowMiss { requested_bytes } => {
                write!(f, "{requested_bytes} bytes were not ready inside the capture")
            }
            Self::NotLoaded { name } => write!(f, "{name} was not loaded before the capture"),
            Self::CaptureLost => f.write_str("an illegal call broke the capture"),
            Self::NoMemory => f.write_str("no memory for the instantiated graph"),
            Self::Cheaper => f.write_str("an eager run is cheaper, as often as it goes stale"),
            Self::Unsettled => f.write_str("it went stale again while it was being repaired"),
            Self::OutputHeld => f.write_str("somebody holds a result that it would write over"),
            Self::Full => f.write_str("the cache is full of busy graphs"),
            Self::GraphsOff => f.write_str("graphs are off"),
        }
    }
}
