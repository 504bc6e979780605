//! Which instruction sets are in use, and what keeps a wider one out of it.

use std::sync::OnceLock;

use super::integer::Way;
use super::simd::Level;

/// What may be used, narrowest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Limit {
    Plain,
    Avx2,
    Avx512,
    Vnni,
    Amx,
}

/// The variable that names the widest set to use; without it that is the widest of the machine.
pub const VARIABLE: &str = "EVERGRAPH_CPU";

const NAMES: [(&str, Limit); 5] = [
    ("plain", Limit::Plain),
    ("avx2", Limit::Avx2),
    ("avx512", Limit::Avx512),
    ("avx512_vnni", Limit::Vnni),
    ("amx_int8", Limit::Amx),
];

impl Limit {
    /// What [`VARIABLE`] says, read once. A name that is none limits nothing.
    pub(super) fn current() -> Self {
        static CURRENT: OnceLock<Limit> = OnceLock::new();
        *CURRENT.get_or_init(|| match asked().as_deref().map(Self::named) {
            Some(Err(complaint)) => {
                tracing::warn!("{complaint}");
                Self::Amx
            }
            Some(Ok(limit)) => limit,
            None => Self::Amx,
        })
    }

    fn named(name: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(known, _)| *known == name).map(|(_, limit)| *limit);
        found.ok_or_else(|| {
            let names = NAMES.map(|(name, _)| name).join(", ");
            format!("{VARIABLE} is {name:?}, which limits nothing; it may be one of {names}")
        })
    }

    /// The widest level that it allows.
    pub(super) fn level(self) -> Level {
        match self {
            Self::Plain => Level::Plain,
            Self::Avx2 => Level::Avx2,
            Self::Avx512 | Self::Vnni | Self::Amx => Level::Avx512,
        }
    }
}

fn asked() -> Option<String> {
    std::env::var_os(VARIABLE).map(|name| name.to_string_lossy().into_owned()).filter(|name| !name.is_empty())
}

/// The instruction sets in use.
///
/// ```
/// let sets = evergraph_kernels::cpu::InstructionSets::current();
/// assert!(["plain", "avx2", "avx512"].contains(&sets.floats));
/// assert_eq!(sets.integers_of_many == "amx_int8", sets.no_amx.is_none());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct InstructionSets {
    /// For floats: `plain`, `avx2` or `avx512`.
    pub floats: &'static str,
    /// For products of integers: `plain`, `avx2` or `avx512_vnni`.
    pub integers: &'static str,
    /// The same with many tokens: also `amx_int8`.
    pub integers_of_many: &'static str,
    /// Why tiles (AMX) are not used; none where they are.
    pub no_amx: Option<String>,
    /// What is wrong with [`VARIABLE`].
    pub complaint: Option<String>,
}

impl InstructionSets {
    /// Those of this process. The first call asks the system for tile registers, if there are any.
    #[must_use]
    pub fn current() -> Self {
        let name = |limit: Limit| NAMES.iter().find(|(_, known)| *known == limit).map_or("", |(name, _)| name);
        let floats = match Level::current() {
            Level::Plain => Limit::Plain,
            Level::Avx2 => Limit::Avx2,
            Level::Avx512 => Limit::Avx512,
        };
        let limit = |way: Way| match way {
            Way::Plain => Limit::Plain,
            Way::Avx2 => Limit::Avx2,
            Way::Vnni => Limit::Vnni,
            #[cfg(target_arch = "x86_64")]
            Way::Tiles(_) => Limit::Amx,
        };
        #[cfg(target_arch = "x86_64")]
        let no_amx = super::integer::no_amx().map(|missing| missing.to_string());
        #[cfg(not(target_arch = "x86_64"))]
        let no_amx = Some("only x86-64 has it".to_owned());
        Self {
            floats: name(floats),
            integers: name(limit(Way::current().without_tiles())),
            integers_of_many: name(limit(Way::current())),
            no_amx,
            complaint: asked().and_then(|name| Limit::named(&name).err()),
        }
    }
}

#[cfg(test)]
mod tests;
