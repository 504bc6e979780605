//! The account that the demo gives as it goes.

use std::fmt::Write;
use std::time::Duration;

use evergraph_graphcache::{Cause as Why, Outcome, Ran};
use evergraph_pool::{Bad, BadReason};

use super::stage::name;
use super::witness::{Blow, Cause, Seen};
use crate::cli::format_size;
use crate::error::Result;

/// Repairs of one kind that are told in full; the table counts the rest.
const TOLD_IN_FULL: u32 = 6;

/// Takes a line.
type Tell<'a> = dyn FnMut(&str) -> Result<()> + 'a;

/// Where the account goes, line by line.
pub(super) struct Account<'a> {
    /// None: nobody listens.
    tell: Option<&'a mut Tell<'a>>,
    round: usize,
    told: [u32; 4],
    /// The last chunk of a prompt, named when it makes graphs stale.
    chunk: Option<(u64, usize)>,
}

impl std::fmt::Debug for Account<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Account").field("round", &self.round).finish_non_exhaustive()
    }
}

impl<'a> Account<'a> {
    pub(super) fn new(tell: &'a mut Tell<'a>) -> Self {
        Self { tell: Some(tell), round: 0, told: [0; 4], chunk: None }
    }

    /// One that says nothing.
    pub(super) fn silent() -> Self {
        Self { tell: None, round: 0, told: [0; 4], chunk: None }
    }

    fn line(&mut self, text: &str) -> Result<()> {
        match &mut self.tell {
            Some(tell) => tell(&format!("{:>4}  {text}", self.round)),
            None => Ok(()),
        }
    }

    pub(super) fn round(&mut self, round: usize) {
        self.round = round;
    }

    pub(super) fn model(&mut self, bytes: usize, limit: Option<usize>) -> Result<()> {
        let limit = limit.map_or("no limit".to_owned(), |limit| format!("a limit of {}", size(limit)));
        self.line(&format!("the weights take {}; the pool has {limit}", size(bytes)))
    }

    pub(super) fn arrives(
        &mut self,
        text: u64,
        prompt: usize,
        capacity: usize,
        cache_bytes: usize,
        prompt_bytes: usize,
    ) -> Result<()> {
        self.line(&format!(
            "text {text} arrives: {prompt} tokens of prompt; takes {} of cache for {capacity} tokens{}",
            size(cache_bytes),
            if prompt_bytes > 8 << 10 { format!(", and {} for its scores", size(prompt_bytes)) } else { String::new() },
        ))
    }

    pub(super) fn chunk(&mut self, text: u64, len: usize, done: bool) {
        self.chunk = (!done).then_some((text, len));
    }

    pub(super) fn grows(&mut self, text: u64, capacity: usize, other_kernels: bool) -> Result<()> {
        self.line(&format!(
            "text {text} outgrows its cache: moved to one of {capacity} tokens at another address{}",
            if other_kernels { "; too deep for fused attention from here on" } else { "" },
        ))
    }

    pub(super) fn leaves(&mut self, text: u64, tokens: usize) -> Result<()> {
        self.line(&format!("text {text} leaves with its {tokens} tokens; its memory is free, its graphs stay behind"))
    }

    /// What made graphs stale.
    pub(super) fn blows(&mut self, blows: Vec<Blow>, during: Option<u64>) -> Result<()> {
        for blow in blows.into_iter().filter(|blow| !blow.keys.is_empty()) {
            let what = match blow.cause {
                Cause::Unbacked => "memory is short: pages go where they are needed",
                Cause::Freed => "memory is short: slabs go back to the driver",
                Cause::Reissued => "memory changes hands",
            };
            let mut line = format!("{what} ({}", size(usize::try_from(blow.bytes).unwrap_or(usize::MAX)));
            if let Some(key) = during {
                let _ = write!(line, ", for {}", name(key));
            } else if let Some((text, len)) = self.chunk {
                let _ = write!(line, ", for the prompt of text {text} at token {len}");
            }
            let _ = write!(line, "); stale now: {}", list(&blow.keys));
            self.line(&line)?;
        }
        Ok(())
    }

    /// A step that was no plain replay.
    pub(super) fn step(&mut self, key: u64, outcome: &Outcome, seen: &Seen, took: Duration) -> Result<()> {
        let (slot, repair) = match outcome.ran {
            Ran::Remapped => (0, format!("remapped: {} put back at the same addresses", pages(seen.mapped))),
            Ran::Updated => (1, "updated: captured anew, its exec takes the new addresses".to_owned()),
            Ran::Recaptured => (2, "recaptured: other kernels or launch shapes, so a new exec".to_owned()),
            Ran::Eager => (3, "run eagerly, kernel by kernel, this once".to_owned()),
            _ => return Ok(()),
        };
        self.told[slot] += 1;
        if self.told[slot] > TOLD_IN_FULL {
            return Ok(());
        }
        let why = outcome.cause.as_ref().map_or(String::new(), why);
        self.line(&format!(
            "  {}: {why} -> {repair} ({} driver calls, {} µs)",
            name(key),
            seen.calls,
            took.as_micros()
        ))?;
        if self.told[slot] == TOLD_IN_FULL {
            self.line("  (more of this kind are only counted)")?;
        }
        Ok(())
    }
}

fn why(cause: &Why) -> String {
    let Why::Stale(stale) = cause else { return cause.to_string() };
    if stale.iter().all(|s| s.bad.is_empty()) {
        return "the pool took all its memory, and the graph with it".to_owned();
    }
    let bad: Vec<&Bad> = stale.iter().flat_map(|s| &s.bad).collect();
    let Some(first) = bad.first() else { return cause.to_string() };
    let token = first.dependency.token;
    let moved = match first.reason {
        BadReason::Unbacked => format!("backing {} is over", token.backing),
        BadReason::ContentLost => format!("content {} is over", token.content),
        _ => format!("address {} is over", token.address),
    };
    format!(
        "{} of its tokens {} bad ({:?} {}: {moved}, {})",
        bad.len(),
        if bad.len() == 1 { "is" } else { "are" },
        first.dependency.use_,
        token.allocation,
        first.reason
    )
}

fn pages(count: u64) -> String {
    if count == 1 { "1 page".to_owned() } else { format!("{count} pages") }
}

fn size(bytes: usize) -> String {
    format_size(bytes as u64)
}

/// A few names, then a number.
fn list(keys: &[u64]) -> String {
    let mut text = keys.iter().take(4).map(|&key| name(key)).collect::<Vec<_>>().join(", ");
    if keys.len() > 4 {
        let _ = write!(text, " and {} more", keys.len() - 4);
    }
    text
}
