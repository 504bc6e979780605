//! What is said about ops and copies before they are issued: `EVERGRAPH_DEBUG`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::{DeviceOrdinal, DevicePtr, DynDriver, WatchedCopies};

/// Where lines go.
pub type Say = Arc<dyn Fn(&str) + Send + Sync>;

/// What is wanted. In words: `ops`, `copies`, or both with a comma between.
///
/// Who wants any of it runs without graphs: what a graph does is not said again when it is replayed, and an error in it is
/// nobody's in particular.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Debugging {
    /// Each op is said before it is queued: its name and device, and of each tensor name, type, shape, root, device and
    /// address.
    pub ops: bool,
    /// Each copy is said before it is queued, waited for, and the device is asked for older errors before it: see
    /// [`WatchedCopies`].
    pub copies: bool,
}

/// Words that ask for nothing that there is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` can not be debugged; {VARIABLE} takes {WORDS}", VARIABLE = Debugging::VARIABLE, WORDS = Debugging::WORDS)]
pub struct NoSuchDebugging(pub String);

impl Debugging {
    /// The environment variable that [`asked`](Self::asked) reads.
    pub const VARIABLE: &'static str = "EVERGRAPH_DEBUG";
    /// What it takes, in words.
    pub const WORDS: &'static str = "ops, copies, or ops,copies";

    /// What the environment asks for; nothing where the variable is not set or empty.
    ///
    /// # Errors
    /// `NoSuchDebugging`.
    pub fn asked() -> Result<Self, NoSuchDebugging> {
        match std::env::var_os(Self::VARIABLE) {
            None => Ok(Self::default()),
            Some(words) => words.to_string_lossy().parse(),
        }
    }

    /// `driver`, with its copies watched if that is wanted.
    #[must_use]
    pub fn watch(self, driver: DynDriver, say: &Say) -> DynDriver {
        if self.copies { WatchedCopies::new(driver, Arc::clone(say)) } else { driver }
    }

    /// Whether anything is wanted.
    #[must_use]
    pub fn any(self) -> bool {
        self.ops || self.copies
    }
}

impl FromStr for Debugging {
    type Err = NoSuchDebugging;

    fn from_str(words: &str) -> Result<Self, NoSuchDebugging> {
        let mut wanted = Self::default();
        if words.trim().is_empty() {
            return Ok(wanted);
        }
        for word in words.split(',') {
            match word.trim() {
                "ops" => wanted.ops = true,
                "copies" => wanted.copies = true,
                other => return Err(NoSuchDebugging(other.to_owned())),
            }
        }
        Ok(wanted)
    }
}

impl fmt::Display for Debugging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.ops, self.copies) {
            (true, true) => "ops,copies",
            (true, false) => "ops",
            (false, true) => "copies",
            (false, false) => "",
        })
    }
}

/// Whether anybody wants names: unless somebody does, none are kept.
static NAMING: AtomicBool = AtomicBool::new(false);
static NAMES: RwLock<BTreeMap<u64, Name>> = RwLock::new(BTreeMap::new());

struct Name {
    bytes: usize,
    device: DeviceOrdinal,
    name: String,
}

/// From here on names of ranges are kept, in this process.
pub(super) fn keep_names() {
    NAMING.store(true, Ordering::Relaxed);
}

/// Says what is at a range, for those who talk about copies. Nothing is kept where nobody does. A later name for the same
/// bytes takes the place of an earlier one.
#[inline]
pub fn name_range(ptr: DevicePtr, bytes: usize, device: DeviceOrdinal, name: &str) {
    if NAMING.load(Ordering::Relaxed) {
        keep(ptr, bytes, device, name);
    }
}

#[cold]
fn keep(ptr: DevicePtr, bytes: usize, device: DeviceOrdinal, name: &str) {
    let mut names = NAMES.write();
    let end = ptr.0.saturating_add(bytes as u64);
    let before = names.range(..ptr.0).next_back().filter(|(start, known)| **start + known.bytes as u64 > ptr.0);
    let mut gone: Vec<u64> = before.map(|(&start, _)| start).into_iter().collect();
    gone.extend(names.range(ptr.0..end).map(|(&start, _)| start));
    for start in gone {
        names.remove(&start);
    }
    names.insert(ptr.0, Name { bytes, device, name: name.to_owned() });
}

/// The device and the name of what is at an address, with the bytes before it.
#[must_use]
pub fn name_at(ptr: DevicePtr) -> Option<(DeviceOrdinal, String)> {
    let names = NAMES.read();
    let (&start, known) = names.range(..=ptr.0).next_back()?;
    let offset = ptr.0 - start;
    (offset < known.bytes as u64).then(|| {
        let name = if offset == 0 { known.name.clone() } else { format!("{}+{offset}", known.name) };
        (known.device, name)
    })
}

/// Lines for the person who watches: on standard error. Nobody listening is fine.
#[must_use]
pub fn to_stderr() -> Say {
    Arc::new(|line| {
        use std::io::Write;
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    })
}
