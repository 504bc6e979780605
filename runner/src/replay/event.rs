//! Events of a trace, whatever its format.

use std::collections::HashMap;
use std::io::BufRead;

use evergraph_pool::Purpose;

use super::json;
use super::lines::{Lines, bad};
use super::rmm::{self, Columns};
use crate::error::Result;

/// More than any device's address space, bytes: such a size is a broken number.
pub(super) const MOST_BYTES: u64 = 1 << 47;
/// Most streams that a trace may use.
const MOST_STREAMS: usize = 256;

/// The format of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Our own: one JSON object a line.
    Evergraph,
    /// The log of RAPIDS' memory manager.
    Rmm,
}

impl Format {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Evergraph => "evergraph",
            Self::Rmm => "rmm",
        }
    }
}

/// What the first line says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) format: Format,
    pub(super) name: String,
    pub(super) limit_bytes: Option<u64>,
    pub(super) slab_bytes: Option<u64>,
}

/// What happens to a graph's scratch between its runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Scratch {
    #[default]
    Track,
    Share,
    Pin,
}

/// The work that a graph is made of.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Work {
    pub(super) stream: u32,
    pub(super) policy: Scratch,
    pub(super) scratch: Vec<u64>,
    pub(super) reads: Vec<u64>,
    pub(super) writes: Vec<u64>,
    /// Kernels that it has at least.
    pub(super) kernels: u32,
}

/// One event. Streams are numbered in the order in which they come up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Event {
    Alloc {
        id: u64,
        bytes: u64,
        purpose: Purpose,
        stream: u32,
    },
    /// `bytes`: what the trace says that was allocated; checked where it says so.
    Free {
        id: u64,
        bytes: Option<u64>,
        stream: Option<u32>,
    },
    Graph {
        graph: String,
        work: Work,
    },
    Run {
        graph: String,
    },
    Drop {
        graph: String,
    },
    Wait {
        stream: u32,
    },
    Trim {
        bytes: u64,
    },
    Step,
}

/// What is known of a trace once it is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Summary {
    /// Allocations that had failed when the trace was recorded.
    pub(super) recorded_failures: u64,
}

/// Reads a trace event by event.
#[derive(Debug)]
pub(super) struct Events<R> {
    lines: Lines<R>,
    header: Header,
    /// Where RMM's columns are.
    columns: Columns,
    streams: Streams,
    events: u64,
    recorded_failures: u64,
    /// The line of the `end` event.
    ended: Option<u64>,
}

/// Streams by the trace's own names for them.
#[derive(Debug, Default)]
pub(super) struct Streams(HashMap<String, u32>);

impl Streams {
    /// The number of a stream; a new one for a new name.
    pub(super) fn number(&mut self, line: u64, name: &str) -> Result<u32> {
        if let Some(number) = self.0.get(name) {
            return Ok(*number);
        }
        if self.0.len() == MOST_STREAMS {
            return Err(bad(line, format!("at most {MOST_STREAMS} streams"), format!("another one, {name}")));
        }
        let number = self.0.len() as u32;
        self.0.insert(name.to_owned(), number);
        Ok(number)
    }
}

impl<R: BufRead> Events<R> {
    /// Reads the first line, which says what the trace is.
    pub(super) fn open(from: R) -> Result<Self> {
        let mut lines = Lines::new(from);
        let Some((number, line)) = lines.next()? else {
            return Err(bad(1, "a trace", "an empty file"));
        };
        let (header, columns) = if line.starts_with('{') {
            (json::header(number, line)?, Columns::default())
        } else {
            let header =
                Header { format: Format::Rmm, name: "RMM log".to_owned(), limit_bytes: None, slab_bytes: None };
            (header, rmm::columns(number, line)?)
        };
        let streams = Streams::default();
        Ok(Self { lines, header, columns, streams, events: 0, recorded_failures: 0, ended: None })
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    pub(super) fn summary(&self) -> Summary {
        Summary { recorded_failures: self.recorded_failures }
    }

    /// Adds up to `most` events with the numbers of their lines; whether there may be more. On an error those before it
    /// were added.
    pub(super) fn fill(&mut self, batch: &mut Vec<(u64, Event)>, most: usize) -> Result<bool> {
        while batch.len() < most {
            let Some((number, line)) = self.lines.next()? else {
                return self.at_the_end().map(|()| false);
            };
            if self.ended.is_some() {
                return Err(bad(number, "nothing after the end event", line));
            }
            self.events += 1;
            match self.header.format {
                Format::Evergraph => match json::event(number, line, &mut self.streams)? {
                    json::Line::Event(event) => batch.push((number, event)),
                    json::Line::End { events } if events == self.events => self.ended = Some(number),
                    json::Line::End { events } => {
                        let found = format!("an end event that counts {events}");
                        return Err(bad(number, format!("{} events", self.events), found));
                    }
                },
                Format::Rmm => match rmm::event(number, line, &self.columns, &mut self.streams)? {
                    Some(event) => batch.push((number, event)),
                    None => self.recorded_failures += 1,
                },
            }
        }
        Ok(true)
    }

    fn at_the_end(&self) -> Result<()> {
        if self.header.format == Format::Evergraph && self.ended.is_none() {
            return Err(bad(self.lines.number(), "an end event (the trace was cut short?)", "the end of the file"));
        }
        Ok(())
    }
}

/// A size that some device could have.
pub(super) fn size(line: u64, bytes: u64) -> Result<u64> {
    if bytes <= MOST_BYTES {
        return Ok(bytes);
    }
    Err(bad(line, format!("a size of at most {MOST_BYTES} bytes"), bytes.to_string()))
}
