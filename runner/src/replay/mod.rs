//! Replays allocation traces on a pool: what it would hold, what it would ask of the driver, whether it would fit.
//!
//! Traces are streamed: memory is bounded by what is live at a time, whatever the length of the file. Input is never
//! trusted; each refusal names the line. Two formats are told apart by their first line.
//!
//! # Our own: one JSON object a line
//!
//! The first line is the header, every other line an event:
//!
//! ```text
//! {"trace":"evergraph","version":1,"name":"two buffers","limit_bytes":1048576}
//! {"do":"alloc","id":1,"bytes":4096,"for":"state"}
//! {"do":"alloc","id":2,"bytes":65536,"stream":1}
//! {"do":"free","id":2,"stream":1}
//! {"do":"end","events":4}
//! ```
//!
//! | event | members | what happens |
//! |---|---|---|
//! | header | `trace`, `version`; `name`, `limit_bytes`, `slab_bytes` | the limit holds unless another one is asked for; below 2 MiB of `slab_bytes` no slab is larger than a request needs |
//! | `alloc` | `id`, `bytes`; `for` (`scratch`, `state`, `weight`), `stream` (a number) | memory for a purpose, on a stream; scratch on stream 0 if nothing is said |
//! | `free` | `id`; `stream` | back to the pool, in order of the stream that it was allocated on, or of another one that used it last |
//! | `graph` | `graph`, `scratch` (list of sizes), `reads`, `writes` (lists of ids); `policy` (`track`, `share`, `pin`), `kernels` (how many at least), `stream` | says what work a graph is made of; runs nothing |
//! | `run` | `graph` | the work once, through the graph cache: warmed up, captured, replayed, repaired as need be |
//! | `drop` | `graph` | the graph goes |
//! | `wait` | `stream` | the host waits for a stream |
//! | `trim` | `bytes` | cached memory goes back until the pool holds no more than that |
//! | `step` | `name` | a mark: one round of the workload ends here |
//! | `end` | `events` | how many events there were, this one included; a trace with it can not be cut short unnoticed |
//!
//! Ids and graph names may be used again once what they named is gone. The `policy` is that of
//! [`ScratchPolicy`](evergraph_pool::ScratchPolicy).
//!
//! # RMM's log
//!
//! What RAPIDS' `logging_resource_adaptor` writes (`RMM_LOG_FILE`): a CSV file with the columns `Thread`, `Time`,
//! `Action`, `Pointer`, `Size` and `Stream`. Rows in which an allocation failed are counted and not replayed. A pointer
//! names an allocation until it is freed; streams are told apart by their text.

mod event;
mod json;
mod lines;
mod player;
mod report;
mod rmm;
mod settling;
mod shipped;

use std::io::BufRead;

use crate::device::Device;
use crate::error::Result;
use evergraph_pool::PoolMode;

pub use event::Format;
pub use report::{Graphs, Report};
pub use shipped::{SHIPPED, Shipped};

use event::Events;
use player::Player;

/// How many events are read before they are played: the clock runs for their playing only.
const BATCH: usize = 1024;

/// What is done when memory is short.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// What the pool does: just enough, from whoever it hurts least.
    #[default]
    Pool,
    /// What a widespread pool does: the first time that something must go back, all cached memory goes, and every captured
    /// graph is dropped. Modelled with our own pool of slabs that are no larger than the request.
    FlushAll,
}

impl Policy {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::FlushAll => "flush-all",
        }
    }
}

/// How a trace is replayed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// On which device.
    pub device: Device,
    /// With which pool.
    pub mode: PoolMode,
    /// Most bytes that the pool may hold; the trace's own limit if there is none.
    pub limit_bytes: Option<usize>,
    /// What is done when memory is short.
    pub policy: Policy,
}

impl Options {
    /// On a host device, with the trace's own limit.
    #[must_use]
    pub fn new(mode: PoolMode) -> Self {
        Self { device: Device::host(), mode, limit_bytes: None, policy: Policy::Pool }
    }

    /// On another device.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// With a limit, whatever the trace says.
    #[must_use]
    pub fn limit(mut self, bytes: Option<usize>) -> Self {
        self.limit_bytes = bytes;
        self
    }

    /// With another policy. `FlushAll` is a policy of slabs.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }
}

/// Replays a trace. Requests that find no memory are counted, and the trace goes on without them.
///
/// # Errors
/// [`Error::Trace`](crate::Error::Trace) for what is no trace, with the line; those of the device and the pool.
pub fn replay(trace: impl BufRead, options: &Options) -> Result<Report> {
    let mut events = Events::open(trace)?;
    let mut player = Player::new(options, events.header())?;
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        batch.clear();
        let filled = events.fill(&mut batch, BATCH);
        // What stands before a line that can not be read is played first: the first fault of a trace is the one reported.
        player.play(&batch)?;
        if !filled? {
            break;
        }
    }
    player.finish(events.summary())
}

#[cfg(test)]
mod tests;
