//! Who may touch what, and whose it was.

use super::{Content, Grave, Space, Span};
use crate::driver::host::pages;
use crate::mutant;

impl Space {
    fn reaches(&self, device: u32, span: &Span) -> bool {
        match span.content {
            Content::Malloc { .. } if mutant::is("host.peers-open") => true,
            Content::Malloc { .. } => {
                span.device == device || self.devices[device as usize].peers >> span.device & 1 == 1
            }
            Content::Chunk { .. } => span.access >> device & 1 == 1 || mutant::is("host.access-open"),
            Content::Pinned | Content::Registered => true,
        }
    }

    /// Whether `device` may touch the range; else who owns it.
    pub(in super::super) fn check(&self, device: u32, ptr: u64, bytes: usize, write: bool) -> Result<(), String> {
        let Some(end) = ptr.checked_add(bytes as u64) else { return Err("the range wraps".to_owned()) };
        let mut at = ptr;
        let mut owner = None;
        while at < end {
            let Some((&start, span)) = self.spans.range(..=at).next_back() else {
                return Err(self.blame(device, at));
            };
            let span_end = start + span.bytes as u64;
            if span_end <= at
                || owner.is_some_and(|owner| owner != span.owner)
                || !self.reaches(device, span)
                || (write && span.content == Content::Registered && !mutant::is("host.registered-writable"))
            {
                return Err(self.blame(device, at));
            }
            owner = Some(span.owner);
            at = span_end;
        }
        Ok(())
    }

    /// The device whose memory is at an address, if any has it.
    pub(in super::super) fn home(&self, ptr: u64) -> Option<u32> {
        let (&start, span) = self.spans.range(..=ptr).next_back()?;
        let device_memory = matches!(span.content, Content::Malloc { .. } | Content::Chunk { .. });
        (device_memory && ptr < start + span.bytes as u64).then_some(span.device)
    }

    /// Why a range that is given as host memory can not be.
    pub(in super::super) fn check_host(&self, ptr: u64, bytes: usize) -> Result<(), String> {
        let end = ptr.saturating_add(bytes as u64);
        let last = self.spans.range(..end).next_back().filter(|(start, span)| **start + span.bytes as u64 > ptr);
        match last {
            Some((_, span)) if matches!(span.content, Content::Malloc { .. } | Content::Chunk { .. }) => {
                Err(format!("device memory used as host memory: {}", self.name(span)))
            }
            Some(_) => Ok(()),
            None => match self.grave(ptr) {
                Some(grave) if grave.what == "freed pinned memory" && !pages_live(grave) => {
                    Err(format!("{} of {} bytes", grave.what, grave.bytes))
                }
                _ => Ok(()),
            },
        }
    }

    fn name(&self, span: &Span) -> String {
        let what = match span.content {
            Content::Malloc { .. } => "malloc",
            Content::Chunk { .. } => "chunk",
            Content::Pinned => "pinned memory",
            Content::Registered => "registered memory",
        };
        format!("{what} of {} bytes of device {}", span.bytes, span.device)
    }

    fn grave(&self, at: u64) -> Option<&Grave> {
        self.graves.iter().rev().find(|grave| grave.start <= at && at < grave.start + grave.bytes as u64)
    }

    /// Who owns or last owned an address, in words.
    pub(in super::super) fn blame(&self, device: u32, at: u64) -> String {
        let before = self.spans.range(..=at).next_back();
        if let Some((&start, span)) = before.filter(|(start, span)| at < **start + span.bytes as u64) {
            let name = self.name(span);
            return if span.content == Content::Registered {
                format!("{name}, read-only")
            } else if self.reaches(device, span) {
                format!("{name} starts at {start:#x}: an access may not run into it from its neighbour")
            } else {
                format!("{name}, no access for device {device}")
            };
        }
        let past = before.map(|(&start, span)| (at - start - span.bytes as u64, span)).filter(|(by, _)| *by < 4096);
        let mut words = Vec::new();
        if let Some(grave) = self.grave(at) {
            words.push(format!("{} of {} bytes of device {}", grave.what, grave.bytes, grave.device));
        }
        if let Some((&start, &(len, owner))) = self.reservations.range(..=at).next_back()
            && at < start + len as u64
        {
            words.push(format!("reserved by device {owner}, not mapped"));
        }
        if let Some((by, span)) = past {
            words.push(format!("{by} bytes past the end of a {}", self.name(span)));
        }
        if words.is_empty() { "never allocated".to_owned() } else { words.join("; ") }
    }
}

/// Whether the system gave a freed pinned range to somebody else: a copy from there is that somebody's business.
fn pages_live(grave: &Grave) -> bool {
    !pages::reserve_probe(grave.start, grave.bytes)
}
