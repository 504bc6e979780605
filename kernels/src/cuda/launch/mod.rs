//! Which kernel, grid and block an op takes on a CUDA device.
//!
//! Only ops whose CUDA bodies come in variants (by weight type, by number of tokens) have a file here; the others
//! launch the kernel of their name with the grid of [`Op::call`](crate::ops::Op::call).

mod attention;
mod fused;
mod library;
mod matvec;
mod product;
#[cfg(test)]
mod tests;

pub(crate) use attention::{attention, attention_heads, attention_scores, attention_values};
pub(crate) use fused::{fused_down, fused_norm, fused_router};
pub(crate) use library::library_product;
pub(crate) use product::{expert_matmul, head_matmul, matmul, quantize};
