//! Evergraph graphcache.

mod cache;
mod capture;
mod config;
mod cost;
mod counters;
mod entry;
mod error;
mod graph;
mod key;
mod lru;
mod module;
mod outcome;
mod repair;
mod request;
mod scan;
mod scope;
mod seal;

pub use cache::{GraphCache, GraphInfo};
pub use config::CacheConfig;
pub use cost::CostTable;
pub use counters::Counters;
pub use error::CacheError;
pub use key::GraphKey;
pub use module::Module;
pub use outcome::{Cause, Outcome, Ran};
pub use request::Request;
pub use scope::{Keep, Scope};
pub use seal::CaptureModeGuard;
