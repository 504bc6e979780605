//! Bodies for the host device.
//!
//! A body sees the whole grid of a launch, checks the spans that it will touch once, and spreads rows or tiles over
//! a pool of threads. Which thread does what never changes a result. Bodies are compiled for several instruction
//! sets ([`simd::Level`]); the widest of the machine is used.

#![allow(unsafe_code)]

mod aligned;
mod attention;
mod compressed;
mod dot;
mod elementwise;
mod fp8;
mod gemm;
mod heads;
mod hyper;
mod integer;
mod latent;
mod math;
mod moe;
mod norm;
mod parallel;
mod product;
mod quantize;
mod residual;
mod rope;
mod rows;
mod sample;
mod sets;
pub mod simd;
mod span;
#[cfg(test)]
mod tests;
mod turn;
mod unfused;

use std::cell::RefCell;

use evergraph_pool::driver::Fault;
use evergraph_pool::driver::host::{HostKernel, KernelContext};

pub(crate) use math::reduce;
pub use sets::{InstructionSets, VARIABLE};

use crate::KernelError;

/// A pointer parameter.
const P: (u32, u32) = (8, 8);
/// A stride in bytes.
const S: (u32, u32) = (8, 8);
/// A dimension, count, type or flag.
const D: (u32, u32) = (4, 4);
/// A float.
const F: (u32, u32) = (4, 4);

type Body = fn(&KernelContext<'_>) -> Result<(), Fault>;

const fn kernel(name: &'static str, params: &'static [(u32, u32)], body: Body) -> HostKernel {
    HostKernel { name, params, hidden_attribute: 0, body }
}

/// The module that [`Kernels::load`](crate::Kernels::load) loads on the host device. Parameters are in the order in
/// which the ops pack them.
pub(crate) static KERNELS: &[HostKernel] = &[
    kernel("add", &[P, S, P, S, P, S, D, D], elementwise::add),
    kernel("advance", &[P, D, D], sample::advance),
    kernel("argmax", &[P, S, P, D, D], sample::argmax),
    kernel(
        "attention",
        &[P, S, S, P, S, S, P, S, S, D, P, P, P, S, S, D, D, D, D, D, D, D, D, F, F, P, S, S, P, S, S],
        attention::attention,
    ),
    kernel(
        "attention_heads",
        &[P, S, S, P, P, S, S, P, P, S, S, P, P, S, S, P, S, S, P, D, D, D, D, D, D, D, D, D, D, F, F, F],
        heads::attention_heads,
    ),
    kernel("attention_scores", &[P, S, S, P, S, S, D, P, P, S, S, D, D, D, D, D, D, D, F, F], unfused::scores),
    kernel("attention_values", &[P, S, S, P, S, S, D, P, P, S, S, D, D, D, D, D, D, D], unfused::values),
    kernel(
        "compress_keys",
        &[P, S, D, P, D, P, P, P, D, D, S, D, D, D, D, F, D, F, F, D, F, F],
        compressed::compress_keys,
    ),
    kernel(
        "compressed_attention",
        &[P, S, S, P, D, D, S, P, D, S, P, D, S, P, P, P, S, S, D, D, D, D, D, D, D, F],
        compressed::attention,
    ),
    kernel("copy", &[P, D, S, S, P, D, S, S, D, D, D], rows::copy),
    kernel("expert_matmul", &[P, D, D, D, D, P, D, D, P, S, S, P, S, S, P, S, S, P, D], product::expert_matmul),
    kernel("expert_sum", &[P, S, S, P, P, P, D, P, S, P, S, D, D, D], moe::expert_sum),
    kernel("fill", &[P, D, D, D], rows::fill),
    kernel("fp8_kv_quantize", &[P, S, S, P, S, S, D, D, D, D], fp8::kv_quantize),
    kernel("gather_experts", &[P, D, S, P, D, P], moe::gather_experts),
    kernel("get_rows", &[P, D, D, D, S, P, P, D, S, F], rows::get_rows),
    kernel("glu", &[P, S, S, P, S, S, P, S, S, D, D, D, D, F, P, S, S, P, S, S], elementwise::glu),
    kernel("hash_router", &[P, S, P, D, P, P, P, D, D, D, D, D, F], moe::hash_router),
    kernel("hc_expand", &[P, S, P, S, S, P, S, P, P, S, S, D, D, D], hyper::expand),
    kernel("hc_split_sinkhorn", &[P, S, P, P, P, S, P, S, P, D, D, D, F], hyper::split_sinkhorn),
    kernel("hc_weighted_sum", &[P, S, S, P, S, P, S, D, D, D], hyper::weighted_sum),
    kernel("head_matmul", &[P, D, D, D, D, P, D, D, P, S, S, P, S, S, P, S, S, P, D], product::expert_matmul),
    kernel("host_ask", &[P, P], turn::ask),
    kernel("host_wait", &[P, P], turn::wait),
    kernel("index_scores", &[P, S, S, P, S, P, D, S, P, P, S, D, D, D, D, D, F], compressed::index_scores),
    kernel("index_top", &[P, S, P, P, S, D, D, D, D], compressed::index_top),
    kernel("kv_store", &[P, S, S, P, P, D, D, S, S, D, D, D, D], rows::kv_store),
    kernel(
        "latent_heads",
        &[P, S, S, P, S, S, P, S, P, P, P, S, D, D, D, D, D, D, F, F, F, F, D, F, F, F],
        latent::latent_heads,
    ),
    kernel("matmul", &[P, D, D, D, P, D, S, P, S, P, S], product::matmul),
    kernel("mul", &[P, S, P, S, P, S, D, D], elementwise::mul),
    kernel("quantize", &[P, S, P, S, P, S, D, D], quantize::quantize),
    kernel(
        "residual_norm",
        &[
            D, D, F, F, P, S, P, P, S, P, P, S, P, P, P, S, P, S, S, P, S, S, P, P, S, P, S, S, P, S, S, P, P, S, P, S,
            S, P, S, S, F, F, F,
        ],
        residual::residual_norm,
    ),
    kernel("rms_norm", &[P, P, P, P, D, D, D, S, S, S, S, S, S, F, F, F, P, S, S, P, S, S], norm::rms_norm),
    kernel("rope", &[P, S, S, P, P, S, S, D, D, D, D, D, F, F, P, F, D, F, F], rope::rope),
    kernel("rope_tail", &[P, S, S, P, P, S, S, D, D, D, D, D, F, F, D, F, F], rope::rope_tail),
    kernel("router", &[P, S, P, P, P, D, D, D, D, D, D, D, D, F], moe::router),
    kernel("sample", &[P, D, P, P, D, P], sample::sample),
    kernel("scale", &[P, S, P, S, D, D, F], elementwise::scale),
    kernel("share_experts", &[P, P, D, P, P, D, D, P, P, P, P, D, P, P], moe::share_experts),
    kernel("soft_max", &[P, S, S, P, S, S, D, D, D], unfused::soft_max),
    kernel("softcap", &[P, S, P, S, D, D, F], elementwise::softcap),
];

/// Sets the number of threads that a kernel works with, the one that runs it included; 0 means one per core. Returns the number in use. Once per
/// process: later calls with the same number are fine.
///
/// # Errors
/// [`KernelError::Threads`] if the pool already runs with another number.
pub fn threads(n: usize) -> Result<usize, KernelError> {
    let running = parallel::start(n);
    if n == 0 || running == n {
        return Ok(running);
    }
    Err(KernelError::Threads(format!("{n} threads asked for, {running} are running")))
}

/// Lets `n` of the threads work from here on, at least one; the others rest. Returns how many work. Results are the same with
/// any number.
///
/// # Errors
/// [`KernelError::Threads`] if `n` is more than [`threads`] set.
pub fn limit_threads(n: usize) -> Result<usize, KernelError> {
    let running = parallel::start(0);
    if n > running {
        return Err(KernelError::Threads(format!("{n} threads asked for, {running} are running")));
    }
    Ok(parallel::limit(n))
}

thread_local! {
    static SCRATCH: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A zeroed buffer of this thread; [`give_back`] keeps it for the next use.
fn scratch(len: usize) -> Vec<f32> {
    let mut buffer = SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default();
    buffer.clear();
    buffer.resize(len, 0.0);
    buffer
}

/// Keeps a buffer, unless it is large.
fn give_back(buffer: Vec<f32>) {
    const KEEP: usize = 256 * 1024;
    if buffer.capacity() <= KEEP {
        SCRATCH.with_borrow_mut(|kept| {
            if kept.len() < 8 {
                kept.push(buffer);
            }
        });
    }
}
