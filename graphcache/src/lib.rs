//! A bounded cache of captured graphs that launches a graph only under a lease which proves that every piece of memory it
//! depends on is still what it was, and repairs a graph that is not, at the lowest price.
//!
//! ```
//! use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Ran, Request};
//! use evergraph_pool::driver::{DynDriver, host::{HostConfig, HostDevice}};
//! use evergraph_pool::{Pool, PoolConfig, Purpose, ScratchPolicy, Stream, Use};
//!
//! let driver: DynDriver = HostDevice::new(HostConfig::default())?;
//! driver.bind()?;
//! let pool = Pool::new(driver.clone(), PoolConfig::vmm())?;
//! let stream = Stream::new(&driver)?;
//! let cache = GraphCache::new(CacheConfig::default());
//!
//! let input = pool.upload(&[1.0f32, 2.0], Purpose::State, &stream)?;
//! let output = pool.alloc_for::<f32>(2, Purpose::State, &stream)?;
//! let key = GraphKey::new("two copies");
//! let mut run = || {
//!     let request = Request::new(&key, &pool, &stream).policy(ScratchPolicy::Track);
//!     cache.run(&request, |scope| -> Result<(), CacheError> {
//!         scope.declare(&input, Use::Input)?;
//!         scope.declare(&output, Use::State)?;
//!         let temporary = scope.alloc::<f32>(2)?;
//!         scope.stream().copy(&input, &temporary)?;
//!         Ok(scope.stream().copy(&temporary, &output)?)
//!     })
//! };
//! let ran: Vec<Ran> = (0..4).map(|_| run().map(|o| o.ran)).collect::<Result<_, _>>()?;
//! assert_eq!(ran, [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed]);
//!
//! stream.upload(&[3.0, 4.0], &input)?;
//! assert_eq!(run()?.ran, Ran::Replayed);
//! assert_eq!(stream.download(&output)?, [3.0, 4.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it costs
//!
//! | what happened to the graph's memory | what a run does | price (300 nodes, NVIDIA H200) |
//! |---|---|---|
//! | nothing on any of its devices | lease, fence, one compare a device, launch | about 60 ns + the launch |
//! | something, but not to this graph's | one walk over its dependencies, launch | about 1 µs |
//! | its scratch lost its pages (vmm) | pages back under the same addresses | 73 µs for a chunk of 2 MiB |
//! | it moved, same work | capture, read back, exec-update | 290 + 129 + 76 µs |
//! | it moved, other work | capture, read back, instantiate | 290 + 129 + 562 µs |
//! | it can not be captured right now | the closure once, without a graph | 1.3 ms |
//!
//! The cheapest repair is chosen from a [table](CostTable) which measurements on the running device refine. A new capture needs
//! as much memory as the graph lost: where none is free it pays for the pages too. A steady replay makes the launch its only
//! driver call.
//!
//! # Reuse and capture
//!
//! A graph depends on what its closure [declares](Scope::declare), on what the capture window handed out, and on every pointer
//! that a walk over the captured nodes finds in known memory. It is keyed by what the caller says, the device, the
//! stream and the generation of the code; never by an address. Since a replay does not call the closure, the cache learns of a
//! buffer that was exchanged only from the key or from [`Request::bound`].
//!
mod cache;
mod capture;
mod config;
mod contents;
mod cost;
mod counters;
mod entry;
mod error;
mod graph;
mod key;
mod lru;
mod module;
mod near;
mod outcome;
mod reach;
mod repair;
mod request;
mod results;
mod scan;
mod scope;
mod seal;

pub use cache::{GraphCache, GraphInfo};
pub use config::CacheConfig;
pub use contents::{Contents, Word};
pub use cost::{CostTable, StepTimes};
pub use counters::Counters;
pub use error::CacheError;
pub use key::GraphKey;
pub use module::Module;
pub use outcome::{Cause, Outcome, Ran};
pub use request::Request;
pub use scope::{Keep, Scope};
pub use seal::CaptureModeGuard;
