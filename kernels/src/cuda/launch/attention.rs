//! Attention with its scores in memory: kernels for few queries, which spread over keys and columns, and for many.

use evergraph_pool::driver::LaunchConfig;
use smallvec::smallvec;

use super::matvec::to_u32;
use crate::ops::{AttentionScores, AttentionValues, Launch, Launches, Op, TensorView};

/// Most queries of a key head that the kernels for few take: those of a token or two.
const FEW: usize = 16;

/// Queries of a block of those, its threads; keys of a block of scores, columns of a block of values.
const ROWS: usize = 8;
const THREADS: u32 = 256;
const KEYS: usize = 128;
const COLUMNS: usize = 16;

/// Sides of a tile of the kernels for many, and threads of its block.
const TILE: usize = 64;
const TILE_THREADS: u32 = 128;

/// `attention_scores`. All depends on shapes and capacities, nothing on how long a text is.
pub(crate) fn attention_scores(op: &AttentionScores) -> Launches {
    let across = op.k.dim(0);
    let (kernel, config) = match queries(&op.q, &op.k) {
        few @ ..=FEW => ("attention_scores", grid(across.div_ceil(KEYS), few.div_ceil(ROWS), &op.k, THREADS)),
        many => ("attention_scores_tiled", grid(across.div_ceil(TILE), many.div_ceil(TILE), &op.k, TILE_THREADS)),
    };
    smallvec![Launch { kernel, config, args: op.call().args }]
}

/// `attention_values`.
pub(crate) fn attention_values(op: &AttentionValues) -> Launches {
    let across = op.v.dim(2);
    let (kernel, config) = match queries(&op.p, &op.v) {
        few @ ..=FEW => ("attention_values", grid(across.div_ceil(COLUMNS), few.div_ceil(ROWS), &op.v, THREADS)),
        many => ("attention_values_tiled", grid(across.div_ceil(TILE), many.div_ceil(TILE), &op.v, TILE_THREADS)),
    };
    smallvec![Launch { kernel, config, args: op.call().args }]
}

/// Queries that share a key head, `[T, H, ..]` over `[C, Hkv, ..]`.
fn queries(rows: &TensorView, cache: &TensorView) -> usize {
    rows.dim(0).saturating_mul(rows.dim(1) / cache.dim(1))
}

/// Blocks across keys or columns, over queries, and over key heads; kernels take what is left over in turns.
fn grid(across: usize, queries: usize, cache: &TensorView, threads: u32) -> LaunchConfig {
    let mut config = LaunchConfig::linear(to_u32(across.max(1)), threads);
    config.grid[1] = to_u32(queries.clamp(1, 65535));
    config.grid[2] = to_u32(cache.dim(1).clamp(1, 65535));
    config
}
