//! What can go wrong.

use evergraph_pool::driver::{DeviceOrdinal, DevicePtr, DriverError};
use evergraph_pool::{AllocationId, PoolError, PoolId, Stale};

/// Errors of the cache. The stream and the pools stay usable after each of them.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The pool said no.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The capture recorded nothing: the work went to another stream or another device.
    #[error(
        "the capture on device {device} recorded nothing; queue the work on the scope's stream, whose device that is"
    )]
    EmptyGraph {
        /// The device that was captured.
        device: DeviceOrdinal,
    },
    /// A stream-ordered allocation or free was captured. Such graphs own memory that nobody can track.
    #[error("the capture contains a memory allocation node; take memory from the scope instead")]
    AllocationNode,
    /// Strict mode: a captured pointer leads to memory that was not declared.
    #[error(
        "{node} refers to {address} in memory that was not declared ({owner}, {bytes} bytes at {base}); declare it \
         in the scope"
    )]
    Undeclared {
        /// Which node, for people.
        node: String,
        /// The pointer.
        address: DevicePtr,
        /// Where the memory starts.
        base: DevicePtr,
        /// How long it is, bytes.
        bytes: usize,
        /// Whose it is.
        owner: String,
    },
    /// A captured copy from or to host memory that nothing keeps alive.
    #[error("{node} refers to host memory at {address} that nothing keeps; use a host buffer, or keep its owner")]
    UnownedHost {
        /// Which node, for people.
        node: String,
        /// The address.
        address: DevicePtr,
    },
    /// A token of a pool that the request does not name.
    #[error("the memory belongs to {found}, which the request does not name; add that pool to it")]
    UnknownPool {
        /// Whose it is.
        found: PoolId,
    },
    /// Input, state or weights lost their bytes. No repair brings them back: fill them again, then
    /// [`invalidate`](crate::GraphCache::invalidate) the graph.
    #[error("the graph reads bytes that were lost ({0}); fill them again and invalidate the graph")]
    ContentLost(Stale),
    /// A run that reaches further into a growable slice than the slice has grown. Nothing was queued.
    #[error(
        "the run touches {touched_bytes} bytes of allocation {allocation}, which has grown to {there_bytes}; grow it first"
    )]
    NotGrown {
        /// Which slice.
        allocation: AllocationId,
        /// How far the run reaches, bytes.
        touched_bytes: usize,
        /// How far the slice has grown, bytes.
        there_bytes: usize,
    },
    /// A result was asked of a request whose policy is no arena.
    #[error("results that share memory live in an arena; give the request the policy `Shared`")]
    NoArena,
    /// Scratch was asked for on a device that the request does not say that its work goes to.
    #[error("the request has no device {lane} beside its own; name it with `beside`")]
    NoLane {
        /// The number that was asked for.
        lane: usize,
    },
    /// There is no such result, or it is not of that type.
    #[error("the last run of the graph has no result {index} of that type")]
    NoOutput {
        /// Its number.
        index: usize,
    },
    /// A run inside the capture of another graph.
    #[error("a cached graph can not run inside the capture of another one")]
    Nested,
    /// The closure ran its own graph.
    #[error("the closure of a graph ran the same graph")]
    Reentrant,
    /// Code that was not loaded before the capture. The next warm-up or eager run loads it.
    #[error("{name} is not loaded, and inside a capture it must not be; the warm-up took another branch")]
    NotLoaded {
        /// The function or module.
        name: String,
    },
}
