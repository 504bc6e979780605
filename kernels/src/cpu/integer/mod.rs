//! Products of blocks with quantised activations: codes are multiplied and summed as integers, exactly; the sums are
//! scaled and added as `f32`.
//!
//! All ways of computing give the same bits: integer sums do not depend on their order, and what is done in floats is
//! done in the same order everywhere, by multiplications and additions that each round. With few tokens that order is
//! 16 lanes of four columns each; with many it is one lane a token, groups ascending.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod blocks;
mod few;
#[cfg(target_arch = "x86_64")]
mod fused;
mod many;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use super::sets::Limit;
use super::simd::Level;

#[cfg(target_arch = "x86_64")]
pub(super) use amx::missing as no_amx;
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
    /// The same with few tokens; with many, 16 rows by 16 tokens, with AMX.
    #[cfg(target_arch = "x86_64")]
    Tiles(amx::Unit),
}

impl Way {
    /// The ways of this machine, and those that can be emulated; slowest first.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        let most = Self::current().without_tiles();
        let ways = [Self::Plain, Self::Avx2, Self::Vnni].into_iter().filter(|&way| way <= most);
        #[cfg(target_arch = "x86_64")]
        let ways = ways.chain(amx::emulated::units().into_iter().map(Self::Tiles));
        ways.collect()
    }

    /// The best of this machine.
    pub(super) fn current() -> Self {
        static CURRENT: OnceLock<Way> = OnceLock::new();
        *CURRENT.get_or_init(|| match Self::best_without_tiles() {
            #[cfg(target_arch = "x86_64")]
            Self::Vnni if amx::missing().is_none() => Self::Tiles(amx::Unit::Hardware),
            way => way,
        })
    }

    fn best_without_tiles() -> Self {
        match Level::current() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if is_x86_feature_detected!("avx512vnni") && Limit::current() >= Limit::Vnni => Self::Vnni,
            Level::Avx512 | Level::Avx2 => Self::Avx2,
            Level::Plain => Self::Plain,
        }
    }

    /// For products with so many tokens, of weights with a scale for each `group` columns.
    pub(super) fn for_tokens(tokens: usize, group: usize) -> Self {
        match Self::current() {
            #[cfg(target_arch = "x86_64")]
            way @ Self::Tiles(_) if !amx::worth(tokens, group) => way.without_tiles(),
            way => way,
        }
    }

    /// This one, or what is best where there are no tiles.
    pub(super) fn without_tiles(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles(_) => Self::best_without_tiles(),
            way => way,
        }
    }

    /// The widest instruction set that this way takes for granted.
    fn level(self) -> Level {
        match self.without_tiles() {
            Self::Plain => Level::Plain,
            Self::Avx2 => Level::Avx2,
            _ => Level::Avx512,
        }
    }
}
