//! A model at work: a device with its pool, kernels and graphs, and one sequence of tokens on it.

mod runtime;
mod session;
mod step;

pub use runtime::StepKey;
pub use runtime::{ActType, PoolConfig, PoolMode, Runtime, RuntimeConfig};
pub use session::{KvType, Mark, Session, SessionConfig};
pub use step::Step;
pub(crate) use step::{tensor_bytes, view_of};
