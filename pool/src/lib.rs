//! A GPU memory pool whose allocations carry generation tokens.

pub mod driver;
pub mod handshake;
pub mod mutant;
mod sync;
