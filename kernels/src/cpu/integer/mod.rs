//! Products of blocks with quantised activations: codes are multiplied and summed as integers, exactly; the sums are
//! scaled and added as `f32`.
//!
//! All ways of computing give the same bits: integer sums do not depend on their order, and what is done in floats is
//! done in the same order everywhere, by multiplications and additions that each round. With few tokens that order is
//! 16 lanes of four columns each; with many it is one lane a token, groups ascending.

#[cfg(target_arch = "x86_64")]
mod blocks;
mod few;
#[cfg(target_arch = "x86_64")]
mod fused;
mod many;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use super::simd::Level;

pub(super) use few::{Token, rows};
pub(super) use many::{Buffers, Panels, tile};

/// How integers are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Way {
    /// One by one.
    Plain,
    /// In pairs, with AVX2.
    Avx2,
    /// In fours, with AVX-512 VNNI.
    Vnni,
}

impl Way {
    /// The ways of this machine, slowest first.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        [Self::Plain, Self::Avx2, Self::Vnni].into_iter().filter(|&way| way <= Self::current()).collect()
    }

    /// The best of this machine.
    pub(super) fn current() -> Self {
        static CURRENT: OnceLock<Way> = OnceLock::new();
        *CURRENT.get_or_init(|| match Level::current() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if is_x86_feature_detected!("avx512vnni") => Self::Vnni,
            Level::Avx512 | Level::Avx2 => Self::Avx2,
            Level::Plain => Self::Plain,
        })
    }

    /// The widest instruction set that this way takes for granted.
    fn level(self) -> Level {
        match self {
            Self::Plain => Level::Plain,
            Self::Avx2 => Level::Avx2,
            Self::Vnni => Level::Avx512,
        }
    }
}
