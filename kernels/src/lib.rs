//! Ops over quantised tensors, and the CPU bodies that run them.
//!
//! An op is a plain struct of [`TensorView`](ops::TensorView)s and scalars. It checks itself, says what
//! it reads and writes, and launches one kernel through the driver with packed arguments, so that a
//! capture records it like any kernel:
//!
//! ```no_run
//! use evergraph_kernels::ops::{Add, Op, TensorView};
//! # fn f(kernels: &evergraph_kernels::Kernels, h: TensorView, x: TensorView,
//! #      stream: evergraph_pool::driver::StreamHandle) -> Result<(), evergraph_kernels::KernelError> {
//! Add { a: h.clone(), b: x, out: h }.launch(kernels, stream)?;
//! # Ok(()) }
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`ops`] | one typed description per op, views and their roots |
//! | [`plan`] | the steps of a list of ops over devices: what runs where and after what, what is copied |
//! | [`quant`] | GGUF block formats: sizes, dequantisation, simple quantisers |
//! | [`cpu`] | the bodies for the host device |
//! | [`cuda`] | the kernels for CUDA devices: sources, compiler, disk cache |
//! | [`cases`] | what every op is tried with, on any device, against the bodies of the host device |
//! | [`host`] | ops that the host does beside a device |
//! | [`lane`] | a stream beside that of a step, for copies |
//! | [`probe`] | tiny kernels that show which bytes a graph touches |
//!
//! # Cost model
//! One launch per op. What changes from token to token (token id, position, sampling state) is read from
//! device memory, and grids depend on capacities only: a decode step is the same graph for each token.
//! A matrix product with few tokens reads each weight block once and is bound by memory; one with many
//! dequantises tiles and is bound by arithmetic. With activations from [`ops::Quantize`] the codes of weights in blocks are
//! multiplied as integers, which is less work. The result of one output element does not depend on the
//! number of threads, nor, with integers, on the instruction set.

pub mod cases;
pub mod cpu;
pub mod cuda;
#[cfg(any(test, feature = "emulation"))]
pub mod emulation;
mod error;
pub mod host;
pub mod lane;
mod module;
pub mod ops;
pub mod plan;
pub mod probe;
pub mod quant;

pub use cpu::{limit_threads, threads};
pub use error::KernelError;
pub use module::Kernels;
