//! The crate's one error type.

use std::fmt;
use std::path::PathBuf;

use crate::gguf::Check;

/// Result of the runner's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Separates what went wrong from what to try in an error's text.
const ADVICE: &str = "; try: ";

/// What went wrong: what was asked, what was found, and what to try.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, read, mapped or written.
    #[error("{what} {}: {source}; try: check the path and its permissions", path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Writing a result failed (a closed pipe is not reported this way).
    #[error("can not write the output: {0}; try: check the disk behind standard output")]
    Output(std::io::Error),
    /// A model file that can not be read.
    #[error("{0}")]
    BadFile(Box<BadFile>),
    /// Files that are no whole model together.
    #[error(
        "{}: expected {expected}, found {found}; try: put all parts of the model into one folder, under their own \
         names, and name the first",
        path.display()
    )]
    Split {
        /// The file where it showed.
        path: PathBuf,
        /// What should be there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// An allocation trace that can not be replayed.
    #[error("{0}")]
    Trace(Box<BadTrace>),
    /// A metadata key is missing or holds something else than the model needs.
    #[error("metadata key {key}: expected {expected}, found {found}; try: another file, or convert the model again")]
    Metadata {
        /// The key.
        key: String,
        /// What the model needs.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A tensor is missing or has another shape or type than the model needs.
    #[error("tensor {name}: expected {expected}, found {found}; try: another file, or convert the model again")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// What the model needs.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// Something that this version can not do.
    #[error("{what} is not supported: found {found}; try: {advice}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// The value found.
        found: String,
        /// What to use instead.
        advice: String,
    },
    /// Text could not be turned into tokens or back.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template could not be run.
    #[error("chat template: {0}; try: --chat-template gemma, or a plain prompt without --chat")]
    Template(String),
    /// A token id outside the vocabulary.
    #[error("token id {id}: the vocabulary has {vocabulary} tokens; try: ids below {vocabulary}")]
    TokenId {
        /// The id.
        id: i64,
        /// Number of tokens.
        vocabulary: usize,
    },
    /// More tokens than the context holds.
    #[error("{tokens} tokens were asked for, the context holds {context}; try: a larger -c, or a shorter text")]
    ContextFull {
        /// Tokens wanted.
        tokens: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// An argument or option with an impossible value.
    #[error("{name}: expected {expected}, found {found}; try: evergraph help")]
    Argument {
        /// The option.
        name: &'static str,
        /// What it takes.
        expected: String,
        /// What it got.
        found: String,
    },
    /// A device that is not there.
    #[error("device {asked}: {found}; try: {advice}")]
    NoDevice {
        /// What was asked for.
        asked: String,
        /// Why it can not be had.
        found: String,
        /// What to do.
        advice: String,
    },
    /// The memory pool: out of memory with its report, or a refused request.
    #[error("{source}{}", pool_advice(.source))]
    Pool {
        /// What the pool said.
        #[from]
        source: evergraph_pool::PoolError,
    },
    /// The graph cache.
    #[error("{source}")]
    Graph {
        /// What the cache said.
        source: evergraph_graphcache::CacheError,
    },
    /// An op that does not fit its tensors, or a kernel that could not be launched.
    #[error("{0}")]
    Kernel(#[from] evergraph_kernels::KernelError),
    /// A driver call failed.
    #[error("{0}")]
    Driver(#[from] evergraph_pool::driver::DriverError),
    /// Tests of a bench that failed; each was told when it did.
    #[error("{failed} of {tests} tests failed, as was said of each; try: what was advised there")]
    Tests {
        /// How many failed.
        failed: usize,
        /// How many there were.
        tests: usize,
    },
    /// The host found bad data in its share of a step.
    #[error("the host's share of a step: {fault}; try: the same with -ngl all, and report it if that works")]
    HostFault {
        /// What was found where.
        fault: String,
    },
    /// The host has not so much memory.
    #[error("the host has no {bytes} bytes for its share of the model; try: a smaller -c, -ub or -b")]
    HostMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A model that no placement makes small enough for the device.
    #[error(
        "no placement of the model fits: with as much of it on the host as can be the device still needs {needed_bytes} bytes, {free_bytes} are \
         free and {margin_bytes} of those are to stay so; try: a larger --mem-limit, a smaller -c, smaller -b and -ub, or a \
         smaller --fit-target"
    )]
    NoPlacement {
        /// What the smallest placement takes.
        needed_bytes: u64,
        /// What there is.
        free_bytes: u64,
        /// What is to be left.
        margin_bytes: u64,
    },
    /// A cache of experts that the device has no room for.
    #[error("a cache of experts of {bytes} bytes: {source}; try: a smaller --expert-cache")]
    ExpertCache {
        /// What it takes.
        bytes: usize,
        /// What the pool says.
        source: evergraph_pool::PoolError,
    },
    /// A check that did not hold.
    #[error("a check did not hold: {0}")]
    CheckFailed(String),
}

impl Error {
    /// The exit status that interface users rely on: 1 the work failed, 2 the words were off, 3 no such device.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Argument { .. } => 2,
            Self::NoDevice { .. } => 3,
            _ => 1,
        }
    }

    /// Whether memory was short.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Pool { source } | Self::Graph { source: evergraph_graphcache::CacheError::Pool(source) } => {
                source.is_out_of_memory()
            }
            Self::ExpertCache { source, .. } => source.is_out_of_memory(),
            Self::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// The text without its advice, and the advice.
    #[must_use]
    pub fn parts(&self) -> (String, Option<String>) {
        let text = self.to_string();
        match text.split_once(ADVICE) {
            Some((what, advice)) => (what.to_owned(), Some(advice.to_owned())),
            None => (text, None),
        }
    }

    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }

    pub(crate) fn metadata(key: impl Into<String>, expected: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::Metadata { key: key.into(), expected: expected.into(), found: found.to_string() }
    }

    pub(crate) fn tensor(name: impl Into<String>, expected: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::Tensor { name: name.into(), expected: expected.into(), found: found.to_string() }
    }

    pub(crate) fn argument(name: &'static str, expected: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::Argument { name, expected: expected.into(), found: found.to_string() }
    }
}

impl From<evergraph_graphcache::CacheError> for Error {
    fn from(source: evergraph_graphcache::CacheError) -> Self {
        match source {
            evergraph_graphcache::CacheError::Pool(source) => Self::Pool { source },
            evergraph_graphcache::CacheError::Driver(source) => Self::Driver(source),
            source => Self::Graph { source },
        }
    }
}

fn pool_advice(error: &evergraph_pool::PoolError) -> &'static str {
    if error.is_out_of_memory() { "; try: a larger --mem-limit, a smaller -c, or smaller -b and -ub" } else { "" }
}

/// Why a model file was refused, and where in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadFile {
    /// The rule that the file breaks.
    pub check: Check,
    /// Where reading had got to, bytes from the start of the file.
    pub at_bytes: u64,
    /// What was being read.
    pub what: String,
    /// What was found there.
    pub found: String,
}

impl fmt::Display for BadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { check, at_bytes, what, found } = self;
        write!(f, "{what} at byte {at_bytes}: expected {}, found {found}{ADVICE}{}", check.rule(), check.advice())
    }
}

/// Why an allocation trace was refused, and where in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadTrace {
    /// The line, from 1.
    pub line: u64,
    /// What had to stand there.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for BadTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, expected, found } = self;
        write!(
            f,
            "the trace's line {line}: expected {expected}, found {found}{ADVICE}record the trace again, or mend that line"
        )
    }
}
