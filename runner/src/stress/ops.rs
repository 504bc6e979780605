//! The alphabet of stress: every step is one [`Op`], decoded from bytes.
//!
//! A seeded generator and a fuzzer feed the same decoder: any bytes make a legal sequence, a prefix of bytes
//! makes a prefix of it, and small numbers mean small things, so that a fuzzer can shrink what it found.

/// One step. Numbers are reduced to what the world has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Drops what is in a slot and puts a new slice there.
    Alloc {
        /// Which slot.
        slot: u8,
        /// The size, in steps of a growing scale.
        size: u8,
        /// On which stream.
        stream: u8,
    },
    /// Drops the slice of a slot.
    Free {
        /// Which slot.
        slot: u8,
    },
    /// A kernel writes the whole slice.
    Fill {
        /// Which slot.
        slot: u8,
        /// On which stream.
        stream: u8,
        /// What.
        value: u8,
    },
    /// A kernel reads one slice and writes another, on any stream.
    Copy {
        /// Read.
        from: u8,
        /// Written.
        to: u8,
        /// On which stream.
        stream: u8,
    },
    /// Reads on another stream, tells the pool, and frees at once, with the work still queued.
    UseAndFree {
        /// Which slot.
        slot: u8,
        /// On which stream.
        stream: u8,
    },
    /// Reads a slice back and compares.
    Read {
        /// Which slot.
        slot: u8,
    },
    /// New input, then one run through the graph cache.
    Run {
        /// Which recipe.
        recipe: u8,
        /// The new input.
        value: u8,
        /// Whether to compare the output right away.
        compare: bool,
    },
    /// A recipe reads from another slot from now on.
    Rebind {
        /// Which recipe.
        recipe: u8,
        /// Which slot.
        slot: u8,
    },
    /// A run whose closure gives up with an error after some of its work.
    Cancel {
        /// Which recipe.
        recipe: u8,
        /// After how many parts.
        after: u8,
    },
    /// A run whose closure panics after some of its work.
    Panic {
        /// Which recipe.
        recipe: u8,
        /// After how many parts.
        after: u8,
    },
    /// Drops a recipe's graph.
    Evict {
        /// Which recipe.
        recipe: u8,
    },
    /// Asks for one large block and drops it, so that memory has to come from somewhere.
    Flush {
        /// How much of the device, in sixteenths.
        sixteenths: u8,
    },
    /// Gives free memory back.
    Trim {
        /// How much may stay, in sixteenths of the device.
        sixteenths: u8,
    },
    /// Moves the byte limit.
    Limit {
        /// How much of the device, in sixteenths; 0 takes the limit away.
        sixteenths: u8,
    },
    /// Makes a driver call fail.
    Fail {
        /// Which kind, by index.
        call: u8,
        /// Which of the next calls of that kind.
        nth: u8,
    },
    /// The next step runs on a thread of its own.
    Thread,
    /// Lets queued work run.
    Step {
        /// On which stream.
        stream: u8,
        /// How many pieces.
        pieces: u8,
    },
    /// Waits for a stream.
    Sync {
        /// Which.
        stream: u8,
    },
    /// Drops a stream and makes a new one in its place.
    Restream {
        /// Which.
        stream: u8,
    },
    /// Lets memory fall asleep.
    Sleep {
        /// For which purposes, by bits; none: all.
        purposes: u8,
        /// What becomes of the bytes.
        content: u8,
    },
    /// Wakes it.
    Wake {
        /// For which purposes, by bits; none: all.
        purposes: u8,
    },
    /// Nobody disturbs: every graph that is good must replay.
    Quiet,
}

/// Makes a step from the bytes that follow.
type Make = fn(&mut dyn FnMut() -> Option<u8>) -> Option<Op>;

/// How often each kind comes, of 256.
const WEIGHTS: &[(u8, Make)] = &[
    (31, |b| Some(Op::Alloc { slot: b()?, size: b()?, stream: b()? })),
    (18, |b| Some(Op::Free { slot: b()? })),
    (20, |b| Some(Op::Fill { slot: b()?, stream: b()?, value: b()? })),
    (16, |b| Some(Op::Copy { from: b()?, to: b()?, stream: b()? })),
    (8, |b| Some(Op::UseAndFree { slot: b()?, stream: b()? })),
    (16, |b| Some(Op::Read { slot: b()? })),
    (66, |b| b().and_then(|r| Some(Op::Run { recipe: r & 127, value: b()?, compare: r > 127 }))),
    (6, |b| Some(Op::Rebind { recipe: b()?, slot: b()? })),
    (5, |b| Some(Op::Cancel { recipe: b()?, after: b()? })),
    (4, |b| Some(Op::Panic { recipe: b()?, after: b()? })),
    (3, |b| Some(Op::Evict { recipe: b()? })),
    (7, |b| Some(Op::Flush { sixteenths: b()? })),
    (6, |b| Some(Op::Trim { sixteenths: b()? })),
    (5, |b| Some(Op::Limit { sixteenths: b()? })),
    (8, |b| Some(Op::Fail { call: b()?, nth: b()? })),
    (6, |_| Some(Op::Thread)),
    (13, |b| Some(Op::Step { stream: b()?, pieces: b()? })),
    (6, |b| Some(Op::Sync { stream: b()? })),
    (2, |b| Some(Op::Restream { stream: b()? })),
    (2, |b| Some(Op::Sleep { purposes: b()?, content: b()? })),
    (4, |b| Some(Op::Wake { purposes: b()? })),
    (4, |_| Some(Op::Quiet)),
];

impl Op {
    /// The next step from a source of bytes; `None` when it runs dry.
    pub fn decode(bytes: &mut impl Iterator<Item = u8>) -> Option<Self> {
        let mut point = bytes.next()?;
        let mut next = || bytes.next();
        for (weight, make) in WEIGHTS {
            match point.checked_sub(*weight) {
                Some(rest) => point = rest,
                None => return make(&mut next),
            }
        }
        // The weights add up to 256; a table that does not would land here.
        Some(Self::Quiet)
    }
}

/// Bytes from a seed (SplitMix64): the same on every machine.
#[derive(Clone, Debug)]
pub struct Seeded {
    state: u64,
    word: u64,
    left: u8,
}

impl Seeded {
    /// The bytes of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed, word: 0, left: 0 }
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Iterator for Seeded {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        if self.left == 0 {
            self.word = self.word();
            self.left = 8;
        }
        self.left -= 1;
        let byte = self.word as u8;
        self.word >>= 8;
        Some(byte)
    }
}

#[cfg(test)]
mod tests;
