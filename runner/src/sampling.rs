//! How the next token is chosen. The choice itself runs on the device (`kernels`' `Sample`), so that a captured
//! step holds it; what is here are the parameters.

use evergraph_kernels::ops::SampleState;

use crate::error::{Error, Result};

/// Sampling parameters, with llama.cpp's defaults.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct Sampling {
    /// Temperature; 0 is greedy.
    pub temp: f32,
    /// Keep the K most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive logits of recent tokens, multiplies the negative ones; 1 does nothing.
    pub repeat_penalty: f32,
    /// How many recent tokens the penalty looks at; 0 none, -1 all that are kept.
    pub repeat_last_n: i32,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temp: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, repeat_penalty: 1.0, repeat_last_n: 64, seed: 0 }
    }
}

impl Sampling {
    /// The most likely token, always.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temp: 0.0, ..Self::default() }
    }

    /// Whether the parameters make sense.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the one that does not.
    pub fn check(&self) -> Result<()> {
        let within = |name, value: f32, least: f32, most: f32| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(Error::argument(name, format!("a number from {least} to {most}"), value))
            }
        };
        within("--temp", self.temp, 0.0, 100.0)?;
        within("--top-p", self.top_p, 0.0, 1.0)?;
        within("--min-p", self.min_p, 0.0, 1.0)?;
        within("--repeat-penalty", self.repeat_penalty, 0.01, 100.0)?;
        if self.repeat_last_n < -1 {
            return Err(Error::argument("--repeat-last-n", "-1 or more", self.repeat_last_n));
        }
        Ok(())
    }

    /// The state that the device starts from.
    #[must_use]
    pub fn state(&self) -> SampleState {
        let mut state = SampleState::greedy();
        state.seed = self.seed;
        state.temp = self.temp;
        state.top_k = i32::try_from(self.top_k).unwrap_or(i32::MAX);
        state.top_p = self.top_p;
        state.min_p = self.min_p;
        state.repeat_penalty = self.repeat_penalty;
        state.repeat_last_n = self.repeat_last_n;
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_named() {
        Sampling::default().check().expect("the defaults make sense");
        Sampling::greedy().check().expect("greedy makes sense");
        let bad = [
            ("--temp", Sampling { temp: -1.0, ..Sampling::default() }),
            ("--temp", Sampling { temp: f32::NAN, ..Sampling::default() }),
            ("--top-p", Sampling { top_p: 1.5, ..Sampling::default() }),
            ("--min-p", Sampling { min_p: -0.1, ..Sampling::default() }),
            ("--repeat-penalty", Sampling { repeat_penalty: 0.0, ..Sampling::default() }),
            ("--repeat-last-n", Sampling { repeat_last_n: -2, ..Sampling::default() }),
        ];
        for (flag, sampling) in bad {
            assert!(matches!(sampling.check(), Err(Error::Argument { name, .. }) if name == flag), "{flag}");
        }
    }
}
