//! A model at work: a device with its pool, kernels and graphs, and one sequence of tokens on it.

mod buffers;
mod config;
mod expert_cache;
mod host;
mod planned;
mod rehearsal;
mod residents;
mod runtime;
mod session;
mod shortage;
mod step;

pub use config::{KvType, SessionConfig};
pub(crate) use expert_cache::{CachedExperts, HostExperts};
pub use host::{Crossing, HostWork};
pub use planned::Plans;
pub use residents::ExpertTally;
pub use runtime::StepKey;
pub use runtime::{ActType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Unit};
pub use session::{Mark, Session};
pub use step::{Asked, Step};
pub(crate) use step::{tensor_bytes, view_of};
