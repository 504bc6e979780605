//! What a sequence takes to where memory is short: the same tokens, in less room.
//!
//! A step that finds no memory is tried again with less, from what costs least to what costs most: fewer queries' scores at a time
//! (nothing else changes), shorter steps (the weights are read more often), experts of the host done there instead of brought to the
//! device (the slowest), and at last steps that are hardly more than a token. What was taken to stays: memory that was short once
//! will be short again, and a step of another size is another graph.

/// Queries at a time, and tokens in a step, below which scores and scratch are not what memory is short for.
const FEWEST_QUERIES: usize = 32;
const FEWEST_TOKENS: usize = 32;

/// Tokens in a step below which bringing experts to the device is slower than to have the host do them.
const FEWEST_STREAMED: usize = 128;

/// How large the steps of a prompt are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepSize {
    asked: usize,
    /// Tokens in a step at most.
    pub(super) tokens: usize,
    /// Queries whose scores are written out at a time, where they are.
    pub(super) queries: usize,
}

/// What a step does without, from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Without {
    /// All scores at once.
    Scores,
    /// So many tokens.
    Tokens,
    /// Experts of the host on the device.
    Experts,
}

impl StepSize {
    /// As large as asked for.
    pub(super) fn new(tokens: usize) -> Self {
        Self { asked: tokens, tokens, queries: tokens }
    }

    /// Takes to less after there was no memory for a step of `count` tokens: one that wrote its scores out (`scored`), and to which
    /// experts of the host came (`streamed`). None where there is no less.
    pub(super) fn lessen(&mut self, count: usize, scored: bool, streamed: bool) -> Option<Without> {
        let queries = self.queries.min(count);
        if scored && queries > FEWEST_QUERIES {
            self.queries = (queries / 2).max(FEWEST_QUERIES);
            return Some(Without::Scores);
        }
        if streamed && count <= FEWEST_STREAMED {
            self.tokens = self.asked;
            return Some(Without::Experts);
        }
        let fewest = if streamed { FEWEST_STREAMED } else { FEWEST_TOKENS };
        (count > fewest).then(|| {
            self.tokens = (count / 2).max(fewest);
            Without::Tokens
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that a sequence of steps takes to, until there is no less.
    fn ladder(ubatch: usize, scored: bool, mut streamed: bool) -> Vec<(Without, usize, usize)> {
        let mut size = StepSize::new(ubatch);
        let mut taken = Vec::new();
        while let Some(without) = size.lessen(size.tokens, scored, streamed) {
            streamed &= without != Without::Experts;
            taken.push((without, size.tokens, size.queries));
            assert!(taken.len() < 64, "it ends: {taken:?}");
        }
        taken
    }

    #[test]
    fn what_costs_least_goes_first() {
        use Without::{Experts, Scores, Tokens};
        assert_eq!(
            ladder(512, true, true),
            [
                (Scores, 512, 256),
                (Scores, 512, 128),
                (Scores, 512, 64),
                (Scores, 512, 32),
                (Tokens, 256, 32),
                (Tokens, 128, 32),
                (Experts, 512, 32),
                (Tokens, 256, 32),
                (Tokens, 128, 32),
                (Tokens, 64, 32),
                (Tokens, 32, 32),
            ]
        );
        assert_eq!(ladder(100, false, true), [(Experts, 100, 100), (Tokens, 50, 100), (Tokens, 32, 100)]);
        assert_eq!(ladder(32, true, false), []);
        assert_eq!(ladder(1, false, false), []);
    }

    #[test]
    fn the_end_of_a_prompt_that_did_not_fit_makes_later_steps_no_longer() {
        let mut size = StepSize::new(512);
        assert_eq!(size.lessen(200, false, false), Some(Without::Tokens));
        assert_eq!(size.tokens, 100);
        assert_eq!(size.lessen(20, false, false), None);
        assert_eq!(size.tokens, 100);
    }
}
