//! What was in flight when a context died.
//!
//! A GPU reports a fault at some later call, without a name. So the last calls that queued work, and those after which
//! work was known to be complete, are kept in a ring: a few stores a call. Only when a context has died is the ring read,
//! and says who can have done it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::StreamHandle;

/// A decode step has some 300 kernels.
const SLOTS: usize = 512;
/// Names in a message.
const MOST_NAMES: usize = 6;
const KIND_SHIFT: u32 = 56;

/// What a slot is about. The numbers are the slots' own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(super) enum Note {
    /// A launch of a function.
    Kernel = 1,
    /// A launch of an exec.
    Graph,
    /// A copy to an address.
    Copy,
    /// A memset of an address.
    Set,
    /// A host function.
    Host,
    /// An event was recorded.
    Recorded,
    /// A stream waits for an event.
    Awaits,
    /// The host saw an event complete.
    EventDone,
    /// The host saw a stream complete.
    StreamDone,
    /// The host saw everything complete.
    AllDone,
    /// A stream records from here on: nothing of it runs.
    CaptureBegun,
    /// It records no more.
    CaptureEnded,
}

impl Note {
    const ALL: [Self; 12] = [
        Self::Kernel,
        Self::Graph,
        Self::Copy,
        Self::Set,
        Self::Host,
        Self::Recorded,
        Self::Awaits,
        Self::EventDone,
        Self::StreamDone,
        Self::AllDone,
        Self::CaptureBegun,
        Self::CaptureEnded,
    ];

    fn is_work(self) -> bool {
        self <= Self::Host
    }
}

/// A piece of work that may have been running.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Suspect {
    pub(super) note: Note,
    pub(super) value: u64,
    pub(super) stream: u64,
}

#[derive(Debug, Default)]
struct Slot {
    /// One more than the note's number; 0 while it is being written.
    number: AtomicU64,
    /// Kind and value.
    word: AtomicU64,
    stream: AtomicU64,
}

/// The ring.
#[derive(Debug)]
pub(super) struct Flight {
    next: AtomicU64,
    slots: Box<[Slot]>,
    /// `CUDA_LAUNCH_BLOCKING`: every launch is waited for, so that the call which reports a fault is the one that made it.
    pub(super) blocking: bool,
}

impl Default for Flight {
    fn default() -> Self {
        let blocking = std::env::var("CUDA_LAUNCH_BLOCKING").is_ok_and(|value| value == "1");
        Self { next: AtomicU64::new(0), slots: (0..SLOTS).map(|_| Slot::default()).collect(), blocking }
    }
}

impl Flight {
    /// Notes a call that was taken.
    #[inline]
    pub(super) fn note(&self, note: Note, value: u64, stream: StreamHandle) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = &self.slots[number as usize % SLOTS];
        slot.number.store(0, Ordering::Relaxed);
        let value = value & ((1 << KIND_SHIFT) - 1);
        slot.word.store((note as u64) << KIND_SHIFT | value, Ordering::Relaxed);
        slot.stream.store(stream.0, Ordering::Relaxed);
        slot.number.store(number + 1, Ordering::Release);
    }

    /// Everything that may still have been running, oldest first, and whether the ring was too short to know more.
    pub(super) fn suspects(&self) -> (Vec<Suspect>, bool) {
        let end = self.next.load(Ordering::Acquire);
        let start = end.saturating_sub(SLOTS as u64);
        let mut play = Play { complete: start == 0, ..Play::default() };
        for number in start..end {
            let slot = &self.slots[number as usize % SLOTS];
            if slot.number.load(Ordering::Acquire) != number + 1 {
                continue; // overwritten, or half written by another thread
            }
            let word = slot.word.load(Ordering::Relaxed);
            let Some(&note) = Note::ALL.get(((word >> KIND_SHIFT) as usize).wrapping_sub(1)) else { continue };
            let value = word & ((1 << KIND_SHIFT) - 1);
            play.step(number, note, value, slot.stream.load(Ordering::Relaxed));
        }
        (play.pending.into_values().collect(), !play.complete)
    }
}

/// The ring played back.
#[derive(Default)]
struct Play {
    /// Work that nobody saw complete, by number.
    pending: BTreeMap<u64, Suspect>,
    /// Where each event was recorded last: the stream and the number.
    recorded: BTreeMap<u64, (u64, u64)>,
    /// Streams that record, with the stream on which their capture began.
    capturing: BTreeMap<u64, u64>,
    /// Events recorded inside a capture, with that stream.
    captured: BTreeMap<u64, u64>,
    /// Whether what lies before the ring can not be running any more.
    complete: bool,
}

impl Play {
    fn step(&mut self, number: u64, note: Note, value: u64, stream: u64) {
        match note {
            _ if note.is_work() => {
                if !self.capturing.contains_key(&stream) {
                    self.pending.insert(number, Suspect { note, value, stream });
                }
            }
            Note::Recorded => match self.capturing.get(&stream) {
                Some(&root) => {
                    self.captured.insert(value, root);
                }
                None => {
                    self.captured.remove(&value);
                    self.recorded.insert(value, (stream, number));
                }
            },
            Note::Awaits => {
                if let Some(&root) = self.captured.get(&value) {
                    self.capturing.insert(stream, root);
                }
            }
            Note::EventDone => {
                if let Some(&(stream, number)) = self.recorded.get(&value) {
                    self.pending.retain(|&n, suspect| suspect.stream != stream || n > number);
                }
            }
            Note::StreamDone => self.pending.retain(|_, suspect| suspect.stream != stream),
            Note::AllDone => {
                self.pending.clear();
                self.complete = true;
            }
            Note::CaptureBegun => {
                self.capturing.insert(stream, stream);
            }
            _ => {
                if self.capturing.remove(&stream).is_none() {
                    // It began before the ring does.
                    self.pending.retain(|_, suspect| suspect.stream != stream);
                }
                self.capturing.retain(|_, root| *root != stream);
                self.captured.retain(|_, root| *root != stream);
            }
        }
    }
}

/// The suspects in words; `name` says what one is called.
pub(super) fn in_words(suspects: &[Suspect], more: bool, name: impl Fn(&Suspect) -> String) -> String {
    let mut names: Vec<String> = Vec::new();
    for suspect in suspects {
        let name = name(suspect);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let streams = suspects.iter().map(|s| s.stream).collect::<BTreeSet<_>>().len();
    match names.len() {
        0 if more => "unknown: more was queued than is kept".to_owned(),
        0 => "unknown: nothing that was queued here was running".to_owned(),
        1 if !more => names.swap_remove(0),
        count => {
            let hidden = count.saturating_sub(MOST_NAMES);
            names.truncate(MOST_NAMES);
            let rest = match (hidden, more) {
                (0, false) => String::new(),
                (0, true) => ", or something before it".to_owned(),
                (hidden, _) => format!(", or one of {hidden} more"),
            };
            let streams = if streams > 1 { format!(" on {streams} streams") } else { String::new() };
            format!("one of: {}{rest}{streams} (CUDA_LAUNCH_BLOCKING=1 tells which)", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamHandle = StreamHandle(0xa0);
    const B: StreamHandle = StreamHandle(0xb0);

    fn values(flight: &Flight) -> Vec<u64> {
        flight.suspects().0.iter().map(|s| s.value).collect()
    }

    #[test]
    fn what_was_waited_for_is_no_suspect() {
        let flight = Flight::default();
        flight.note(Note::Kernel, 1, A);
        flight.note(Note::Kernel, 2, B);
        flight.note(Note::StreamDone, 0, A);
        flight.note(Note::Graph, 3, A);
        assert_eq!(values(&flight), [2, 3]);
        flight.note(Note::AllDone, 0, A);
        flight.note(Note::Set, 4, B);
        assert_eq!(values(&flight), [4]);
        assert!(!flight.suspects().1);
    }

    #[test]
    fn an_event_clears_what_was_queued_before_it() {
        let flight = Flight::default();
        flight.note(Note::Kernel, 1, A);
        flight.note(Note::Recorded, 9, A);
        flight.note(Note::Kernel, 2, A);
        flight.note(Note::Kernel, 3, B);
        flight.note(Note::EventDone, 9, A);
        assert_eq!(values(&flight), [2, 3]);
    }

    #[test]
    fn what_was_recorded_into_a_graph_did_not_run() {
        let flight = Flight::default();
        flight.note(Note::Kernel, 1, A);
        flight.note(Note::CaptureBegun, 0, A);
        flight.note(Note::Kernel, 2, A);
        flight.note(Note::Recorded, 9, A);
        flight.note(Note::Awaits, 9, B);
        flight.note(Note::Kernel, 3, B);
        flight.note(Note::CaptureEnded, 0, A);
        flight.note(Note::Graph, 4, A);
        flight.note(Note::Kernel, 5, B);
        assert_eq!(values(&flight), [1, 4, 5]);
    }

    #[test]
    fn a_full_ring_says_that_it_is_short() {
        let flight = Flight::default();
        (0..2 * SLOTS as u64).for_each(|i| flight.note(Note::Kernel, i, A));
        let (suspects, more) = flight.suspects();
        assert_eq!((suspects.len(), more), (SLOTS, true));
        flight.note(Note::StreamDone, 0, A);
        assert!(flight.suspects().0.is_empty());
    }

    #[test]
    fn suspects_are_named_once_and_few() {
        let kernel = |value| Suspect { note: Note::Kernel, value, stream: 1 };
        let name = |s: &Suspect| format!("k{}", s.value);
        assert_eq!(in_words(&[kernel(1), kernel(1)], false, name), "k1");
        let many: Vec<_> = (0..9).map(kernel).collect();
        let words = in_words(&many, false, name);
        assert!(words.contains("k0, k1") && words.contains("3 more") && !words.contains("k7"), "{words}");
        assert!(in_words(&[], false, name).starts_with("unknown"));
    }
}
