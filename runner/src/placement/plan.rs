//! What of a model stays on the host, if not all of it fits the device.
//!
//! Things are given up in llama.cpp's order: first a context that nobody asked for, then the experts of the first layers, as few
//! as will do, then whole layers. What a choice takes somebody else [says](super::rehearse); here it is only compared.

use super::{Home, Names, Placement, Rule};
use crate::error::{Error, Result};

/// What a margin is where none was asked for, and the most that it is of what is free.
const MARGIN_BYTES: u64 = 1 << 30;
const MARGIN_SHARE: u64 = 10;

/// A context that is shortened has a multiple of so many tokens.
const CONTEXT_STEP: usize = 256;

/// Memory to fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// What is free, bytes.
    pub free_bytes: u64,
    /// What of it is to stay so, bytes.
    pub margin_bytes: u64,
}

impl Room {
    /// That memory with a margin, or with the usual one: 1 GiB, but no more than a tenth of what is free.
    #[must_use]
    pub fn new(free_bytes: u64, margin_bytes: Option<u64>) -> Self {
        let usual = || MARGIN_BYTES.min(free_bytes / MARGIN_SHARE);
        Self { free_bytes, margin_bytes: margin_bytes.unwrap_or_else(usual) }
    }

    /// Whether so many bytes leave the margin alone.
    #[must_use]
    pub fn holds(&self, bytes: u64) -> bool {
        bytes.checked_add(self.margin_bytes).is_some_and(|bytes| bytes <= self.free_bytes)
    }
}

/// What there is to choose from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of the model.
    pub blocks: usize,
    /// The first block behind the last one that has experts; 0 where there are none.
    pub expert_blocks: usize,
    /// Whether blocks can stay on the host as a whole.
    pub whole_blocks: bool,
    /// The shortest context that will do, and the one wished for; none for a context that is not to be touched.
    pub context: Option<(usize, usize)>,
}

/// A choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Candidate {
    /// The context; none for what was wished for.
    pub context: Option<usize>,
    /// Experts of so many of the first layers stay on the host.
    pub experts_below: usize,
    /// So many of the last layers are on the device, the output being one; none for all.
    pub device_layers: Option<usize>,
}

impl Candidate {
    /// As a model is loaded by it.
    #[must_use]
    pub fn placement(&self) -> Placement {
        let experts = Rule { names: Names::ExpertsBelow(self.experts_below), home: Home::Host };
        let rules = if self.experts_below > 0 { vec![experts] } else { Vec::new() };
        Placement { device_layers: self.device_layers, rules, ..Placement::default() }
    }
}

/// What was chosen, and what it takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The choice.
    pub candidate: Candidate,
    /// What it takes of the device, bytes.
    pub needs_bytes: u64,
    /// What the next better one would take; none where there is no better one.
    pub better_bytes: Option<u64>,
}

/// Chooses as much for the device as there is room for. `needs` says what a choice takes there, bytes.
///
/// # Errors
/// [`Error::NoPlacement`] if even the last choice takes too much; those of `needs`.
pub fn choose(room: &Room, limits: &Limits, needs: &mut dyn FnMut(&Candidate) -> Result<u64>) -> Result<Chosen> {
    let mut base = Candidate::default();
    let whole = needs(&base)?;
    if room.holds(whole) {
        return Ok(Chosen { candidate: base, needs_bytes: whole, better_bytes: None });
    }
    let mut search = Search { room, needs };
    // What the best of the choices at hand takes, which is known to be too much.
    let mut best = whole;
    if let Some((least, wished)) = limits.context.filter(|(least, wished)| least < wished) {
        // Step 0 is the shortest, the last one that wished for.
        let steps = (wished - least).div_ceil(CONTEXT_STEP);
        let of = |step: usize| Candidate { context: Some(least + step * CONTEXT_STEP), ..base };
        match search.most(steps, best, of)? {
            Found::Some(chosen) => return Ok(chosen),
            Found::None(bytes) => (base, best) = (of(0), bytes),
        }
    }
    if limits.expert_blocks > 0 {
        // Step 0 has all of them on the host.
        let of = |step: usize| Candidate { experts_below: limits.expert_blocks - step, ..base };
        match search.most(limits.expert_blocks, best, of)? {
            Found::Some(chosen) => return Ok(chosen),
            Found::None(bytes) => (base, best) = (of(0), bytes),
        }
    }
    if limits.whole_blocks {
        let of = |step: usize| Candidate { device_layers: Some(step), ..base };
        match search.most(limits.blocks + 1, best, of)? {
            Found::Some(chosen) => return Ok(chosen),
            Found::None(bytes) => best = bytes,
        }
    }
    let Room { free_bytes, margin_bytes } = *room;
    Err(Error::NoPlacement { needed_bytes: best, free_bytes, margin_bytes })
}

/// What a search gave: a choice, or what the smallest one takes.
enum Found {
    Some(Chosen),
    None(u64),
}

struct Search<'a> {
    room: &'a Room,
    needs: &'a mut dyn FnMut(&Candidate) -> Result<u64>,
}

impl Search<'_> {
    /// The last step that fits, of which each takes more than the one before, or none. The step `end` does not fit, and takes
    /// `end_bytes`.
    fn most(&mut self, end: usize, end_bytes: u64, of: impl Fn(usize) -> Candidate) -> Result<Found> {
        let first = (self.needs)(&of(0))?;
        if !self.room.holds(first) {
            return Ok(Found::None(first));
        }
        let (mut good, mut good_bytes) = (0, first);
        let (mut bad, mut bad_bytes) = (end.max(1), end_bytes);
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            let bytes = (self.needs)(&of(middle))?;
            if self.room.holds(bytes) {
                (good, good_bytes) = (middle, bytes);
            } else {
                (bad, bad_bytes) = (middle, bytes);
            }
        }
        Ok(Found::Some(Chosen { candidate: of(good), needs_bytes: good_bytes, better_bytes: Some(bad_bytes) }))
    }
}

#[cfg(test)]
mod tests;
