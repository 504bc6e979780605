//! Our own format, line by line.

use evergraph_pool::Purpose;
use serde::Deserialize;

use super::event::{Event, Format, Header, Scratch, Streams, Work, size};
use super::lines::bad;
use crate::error::Result;

/// The version that this program reads and writes.
pub(super) const VERSION: u32 = 1;
/// Most kernels of a graph.
const MOST_KERNELS: u32 = 65_536;

#[derive(Debug, Deserialize)]
struct First {
    trace: String,
    version: u32,
    #[serde(default)]
    name: String,
    limit_bytes: Option<u64>,
    slab_bytes: Option<u64>,
}

/// A line behind the header.
#[derive(Debug)]
pub(super) enum Line {
    Event(Event),
    End { events: u64 },
}

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
enum Raw {
    Alloc {
        id: u64,
        bytes: u64,
        #[serde(rename = "for", default)]
        purpose: For,
        #[serde(default)]
        stream: u64,
    },
    Free {
        id: u64,
        stream: Option<u64>,
    },
    Graph {
        graph: String,
        #[serde(default)]
        scratch: Vec<u64>,
        #[serde(default)]
        reads: Vec<u64>,
        #[serde(default)]
        writes: Vec<u64>,
        #[serde(default)]
        kernels: u32,
        #[serde(default)]
        policy: Keep,
        #[serde(default)]
        stream: u64,
    },
    Run {
        graph: String,
    },
    Drop {
        graph: String,
    },
    Wait {
        #[serde(default)]
        stream: u64,
    },
    Trim {
        bytes: u64,
    },
    Step {
        #[serde(default, rename = "name")]
        _name: String,
    },
    End {
        events: u64,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum For {
    #[default]
    Scratch,
    State,
    Weight,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Keep {
    #[default]
    Track,
    Share,
    Pin,
}

/// Reads the header.
pub(super) fn header(number: u64, line: &str) -> Result<Header> {
    let first: First = serde_json::from_str(line)
        .map_err(|error| bad(number, "a header such as {\"trace\":\"evergraph\",\"version\":1}", error.to_string()))?;
    if first.trace != "evergraph" || first.version != VERSION {
        let found = format!("trace {:?}, version {}", first.trace, first.version);
        return Err(bad(number, format!("trace \"evergraph\", version {VERSION}"), found));
    }
    let First { name, limit_bytes, slab_bytes, .. } = first;
    for bytes in [limit_bytes, slab_bytes].into_iter().flatten() {
        size(number, bytes)?;
    }
    Ok(Header { format: Format::Evergraph, name, limit_bytes, slab_bytes })
}

/// Reads an event.
pub(super) fn event(number: u64, line: &str, streams: &mut Streams) -> Result<Line> {
    let raw: Raw = serde_json::from_str(line).map_err(|error| bad(number, "an event", error.to_string()))?;
    let mut stream = |name: u64| streams.number(number, &name.to_string());
    Ok(Line::Event(match raw {
        Raw::Alloc { id, bytes, purpose, stream: on } => {
            let purpose = match purpose {
                For::Scratch => Purpose::Scratch,
                For::State => Purpose::State,
                For::Weight => Purpose::Weight,
            };
            Event::Alloc { id, bytes: size(number, bytes)?, purpose, stream: stream(on)? }
        }
        Raw::Free { id, stream: on } => Event::Free { id, bytes: None, stream: on.map(stream).transpose()? },
        Raw::Graph { graph, scratch, reads, writes, kernels, policy, stream: on } => {
            if kernels > MOST_KERNELS {
                return Err(bad(number, format!("at most {MOST_KERNELS} kernels"), kernels.to_string()));
            }
            for bytes in &scratch {
                size(number, *bytes)?;
            }
            if writes.is_empty() && scratch.iter().all(|bytes| *bytes < 4) {
                return Err(bad(number, "a graph with scratch of 4 bytes or more, or with writes", "neither"));
            }
            let policy = match policy {
                Keep::Track => Scratch::Track,
                Keep::Share => Scratch::Share,
                Keep::Pin => Scratch::Pin,
            };
            Event::Graph { graph, work: Work { stream: stream(on)?, policy, scratch, reads, writes, kernels } }
        }
        Raw::Run { graph } => Event::Run { graph },
        Raw::Drop { graph } => Event::Drop { graph },
        Raw::Wait { stream: on } => Event::Wait { stream: stream(on)? },
        Raw::Trim { bytes } => Event::Trim { bytes },
        Raw::Step { .. } => Event::Step,
        Raw::End { events } => return Ok(Line::End { events }),
    }))
}
