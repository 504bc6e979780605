//! A device that runs work only when somebody waits for it, and then the worst order that is allowed.

use std::sync::{Arc, Mutex};

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Condvar, Mutex as Blocking};

/// A piece of queued work.
#[derive(Clone, Copy, Debug)]
enum Work {
    /// A graph's run: needs the block mapped and still holding the graph's bytes.
    Run { block: usize, tag: u32 },
    /// An owner's first write.
    Write { block: usize, tag: u32 },
    /// Waits for another stream (`cuStreamWaitEvent`).
    After { stream: usize, number: u64 },
}

#[derive(Debug, Default)]
struct Queue {
    work: Vec<(u64, Work)>,
    done: usize,
    capturing: bool,
}

#[derive(Clone, Copy, Debug)]
struct Page {
    mapped: bool,
    tag: u32,
}

/// Streams and memory. Its inside is no part of the memory model (a driver orders its own calls), so it sits
/// in a plain mutex which loom does not see and which gives no happens-before to anybody. `turn` makes every call a point
/// where threads may switch.
#[derive(Debug)]
pub(crate) struct Device {
    inner: Mutex<Inner>,
    turn: AtomicU64,
    gate: Option<(Blocking<bool>, Condvar)>,
}

#[derive(Debug)]
struct Inner {
    queues: Vec<Queue>,
    pages: Vec<Page>,
}

impl Device {
    /// `tags[i]` is what block `i` holds.
    pub(crate) fn new(streams: usize, tags: &[u32]) -> Arc<Self> {
        Self::build(streams, tags, None)
    }

    /// As [`new`](Self::new), but nothing completes before [`open`](Self::open), and a second launch
    /// blocks in the driver until then (a full queue).
    pub(crate) fn gated(streams: usize, tags: &[u32]) -> Arc<Self> {
        Self::build(streams, tags, Some((Blocking::new(false), Condvar::new())))
    }

    fn build(streams: usize, tags: &[u32], gate: Option<(Blocking<bool>, Condvar)>) -> Arc<Self> {
        let queues = (0..streams).map(|_| Queue::default()).collect();
        let pages = tags.iter().map(|&tag| Page { mapped: true, tag }).collect();
        Arc::new(Self { inner: Mutex::new(Inner { queues, pages }), turn: AtomicU64::new(0), gate })
    }

    fn call<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        self.turn.fetch_add(1, Ordering::Relaxed);
        f(&mut self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    pub(crate) fn open(&self) {
        if let Some((open, changed)) = &self.gate {
            *open.lock().unwrap() = true;
            changed.notify_all();
        }
    }

    fn pass_gate(&self) {
        if let Some((open, changed)) = &self.gate {
            let mut open = open.lock().unwrap();
            while !*open {
                open = changed.wait(open).unwrap();
            }
        }
    }

    /// Launches run `number` of a graph that lives on one stream.
    pub(crate) fn launch(&self, stream: usize, number: u64, block: usize, tag: u32) {
        if self.call(|d| !d.queues[stream].work.is_empty()) {
            self.pass_gate();
        }
        self.call(|d| d.push(stream, number, Work::Run { block, tag }));
    }

    /// As [`launch`](Self::launch); the stream numbers it.
    pub(crate) fn launch_numbered(&self, stream: usize, block: usize, tag: u32) -> u64 {
        self.call(|d| {
            let number = d.next(stream);
            d.push(stream, number, Work::Run { block, tag });
            number
        })
    }

    /// Queues an owner's first write behind `after`.
    pub(crate) fn write_after(&self, stream: usize, block: usize, tag: u32, after: &[(usize, u64)]) -> u64 {
        self.call(|d| {
            for &(other, number) in after {
                let own = d.next(stream);
                d.push(stream, own, Work::After { stream: other, number });
            }
            let number = d.next(stream);
            d.push(stream, number, Work::Write { block, tag });
            number
        })
    }

    /// An event behind everything queued on `stream`. A capturing stream must not be asked.
    pub(crate) fn record(&self, stream: usize) -> u64 {
        self.call(|d| {
            assert!(!d.queues[stream].capturing, "event recorded on a capturing stream");
            d.queues[stream].work.last().map_or(0, |&(number, _)| number)
        })
    }

    pub(crate) fn begin_capture(&self, stream: usize) {
        self.call(|d| d.queues[stream].capturing = true);
    }

    pub(crate) fn end_capture(&self, stream: usize) {
        self.call(|d| d.queues[stream].capturing = false);
    }

    /// Waits on the host: runs the stream up to `number`, and only what that needs.
    pub(crate) fn wait(&self, stream: usize, number: u64) {
        if number != 0 {
            self.pass_gate();
            self.call(|d| d.run_to(stream, number));
        }
    }

    pub(crate) fn unmap(&self, block: usize) {
        self.call(|d| d.pages[block].mapped = false);
    }

    /// Runs everything, last stream first: new owners before the graphs whose memory they got, unless they
    /// were ordered behind them.
    pub(crate) fn drain(&self) {
        self.open();
        self.call(|d| {
            for stream in (0..d.queues.len()).rev() {
                d.run_to(stream, u64::MAX);
            }
        });
    }
}

impl Inner {
    fn next(&self, stream: usize) -> u64 {
        self.queues[stream].work.last().map_or(1, |&(number, _)| number + 1)
    }

    fn push(&mut self, stream: usize, number: u64, work: Work) {
        self.queues[stream].work.push((number, work));
    }

    fn run_to(&mut self, stream: usize, number: u64) {
        while let Some(&(at, work)) = self.queues[stream].work.get(self.queues[stream].done) {
            if at > number {
                break;
            }
            self.queues[stream].done += 1;
            match work {
                Work::Run { block, tag } => {
                    assert!(self.pages[block].mapped, "illegal address: a graph ran on block {block}, unmapped");
                    assert_eq!(
                        self.pages[block].tag, tag,
                        "a graph ran on block {block} after it went to another owner"
                    );
                }
                Work::Write { block, tag } => {
                    assert!(self.pages[block].mapped, "illegal address: a write to block {block}, unmapped");
                    self.pages[block].tag = tag;
                }
                Work::After { stream, number } => self.run_to(stream, number),
            }
        }
    }
}
