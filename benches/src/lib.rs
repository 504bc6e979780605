//! What the benches share: a driver that does nothing, the churn, what is measured on a device, samples and tables.
//!
//! Numbers and how to get them again are in `RESULTS.md`.

pub mod churn;
pub mod device;
pub mod null;
pub mod samples;
