//! A GPU memory pool whose allocations carry generation tokens.

#[allow(dead_code, reason = "the runtime is being built on it")]
mod core;
pub mod driver;
pub mod handshake;
pub mod mutant;
mod sync;
