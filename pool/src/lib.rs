//! A GPU memory pool whose allocations carry generation tokens.
//!
//! In the vmm mode physical memory comes in chunks of 2 MiB, and in larger ones where much is missing at one place: see
//! [`ChunkClass`] for the table and what it costs.

mod alloc;
mod arena;
mod bundles;
mod capture;
mod capture_thread;
mod chunk_class;
mod config;
mod copy;
#[cfg_attr(not(test), allow(dead_code, reason = "tested on its own; the runtime uses most of it"))]
mod core;
mod dependent;
pub mod driver;
mod element;
mod error;
mod event;
mod foreign;
mod give_back;
mod grant;
mod growing;
mod growth;
pub mod handshake;
mod host_buffer;
mod inspect;
mod kept;
mod lock;
pub mod mutant;
mod outputs;
mod outside;
mod pointer_table;
mod pool;
mod reback;
mod register;
mod report;
mod retire;
mod shared;
mod sleep;
mod slice;
mod staging;
mod stale;
mod state;
mod stats;
mod stitch;
mod stream;
mod sync;
mod token;
mod victims;
mod wake;
mod window;

pub use arena::{Arena, ScratchPolicy};
pub use chunk_class::ChunkClass;
pub use config::{PoolConfig, PoolMode, Purpose};
pub use copy::Elements;
pub use dependent::{Dependency, Dependent, Hold, RetireReason, Retired, Use};
pub use driver::host_memory::HostMemory;
pub use element::Element;
pub use error::{OutOfMemory, PoolError};
pub use foreign::ForeignRange;
pub use growing::{Extent, GrowableSlice, Touch};
pub use host_buffer::{HostBuffer, HostWords, RegisteredHost};
pub use outputs::{ArenaGraph, Output};
pub use pointer_table::{PointerTable, TableMember};
pub use pool::{Pool, RangeKind, Resolved};
pub use report::{Holder, MemoryReport};
pub use shared::Awake;
pub use sleep::Content;
pub use slice::{DeviceSlice, Tracked};
pub use staging::Staging;
pub use stale::{Bad, BadReason, Stale};
pub use stats::{Counters, PoolStats, Stat};
pub use stream::Stream;
pub use token::{AllocationId, PoolId, Token};
pub use window::{HandedOut, Reback, Registration, Window};
