//! A GPU memory pool whose allocations carry generation tokens.

mod arena;
mod config;
mod copy;
#[allow(dead_code, reason = "the runtime is being built on it")]
mod core;
mod dependent;
pub mod driver;
mod element;
mod error;
mod event;
mod foreign;
pub mod handshake;
mod host_buffer;
pub mod mutant;
mod pointer_table;
mod pool;
mod report;
mod shared;
mod slice;
mod stale;
mod stats;
mod stream;
mod sync;
mod token;
mod window;

pub use arena::{Arena, ScratchPolicy};
pub use config::{PoolConfig, PoolMode, Purpose};
pub use dependent::{Dependency, Dependent, Hold, RetireReason, Retired, Use};
pub use driver::host_memory::HostMemory;
pub use element::Element;
pub use error::{OutOfMemory, PoolError};
pub use foreign::ForeignRange;
pub use host_buffer::{HostBuffer, RegisteredHost};
pub use pointer_table::{PointerTable, TableMember};
pub use pool::{Pool, RangeKind, Resolved};
pub use report::{Holder, MemoryReport};
pub use slice::{DeviceSlice, Tracked};
pub use stale::{Bad, BadReason, Stale};
pub use stats::{Counters, PoolStats, Stat};
pub use stream::Stream;
pub use token::{AllocationId, PoolId, Token};
pub use window::{HandedOut, Reback, Registration, Window};
