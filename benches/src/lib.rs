//! What the benches share: a driver that does nothing, and the churn.
//!
//! Numbers and how to get them again are in `RESULTS.md`.

pub mod churn;
pub mod null;
