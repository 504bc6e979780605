//! Switches that take one safety rule out at a time, in test builds only.
//!
//! A test that guards a rule must fail when the rule is gone. With the `mutants` feature the environment
//! variable `EVERGRAPH_MUTANT` names the rule to drop for the life of the process; without the feature
//! [`is`] is the constant `false` and the branches vanish. The table of rule, mutant and test lives in the
//! `mutants` integration tests, which run every row in a child process without rebuilding.

/// Whether the named mutant is switched on in this process.
#[cfg(feature = "mutants")]
#[must_use]
pub fn is(name: &str) -> bool {
    static ACTIVE: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    ACTIVE.get_or_init(|| std::env::var("EVERGRAPH_MUTANT").ok()).as_deref() == Some(name)
}

/// Whether the named mutant is switched on in this process.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
#[must_use]
pub const fn is(_name: &str) -> bool {
    false
}
