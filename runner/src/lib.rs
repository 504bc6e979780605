//! Runs Gemma and DeepSeek models on the Evergraph pool and graph cache.
//!
//! GGUF in (memory-mapped, never trusted), text out. The step of a model is a list of ops with fixed
//! addresses; what changes from token to token lives in device memory, so that a decode step is the same
//! captured graph until the shape of the work changes.

pub mod bench;
pub mod chat;
pub mod cli;
pub mod demo;
pub mod device;
pub mod engine;
mod error;
pub mod gguf;
pub mod models;
pub mod placement;
pub mod replay;
pub mod sampling;
pub mod scenario;
pub mod stress;
pub mod synth;
pub mod tokenizer;

pub use error::{BadFile, BadTrace, Error, Result};
