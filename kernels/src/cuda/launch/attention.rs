//! Attention in one kernel, by heads or spread over keys; with its scores in memory: kernels for few queries, which spread over
//! keys and columns, and for many.

use evergraph_pool::driver::{DeviceInfo, LaunchConfig};
use smallvec::smallvec;

use super::matvec::to_u32;
use crate::ops::{
    Attention, AttentionHeads, AttentionScores, AttentionValues, Launch, Launches, Op, Quantize, Spread, TensorView,
};

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

/// Keys of a slice at least, where there are several; twice as many are still one.
const LEAST: usize = 64;

/// Most slices of a text.
const MOST_SLICES: usize = 256;

/// Bytes of shared memory that a block has without asking for more, but for what kernels of attention have besides.
const SHARED_BYTES: usize = 48 * 1024 - 512;

/// `attention`.
pub(crate) fn attention(op: &Attention, device: &DeviceInfo) -> Launches {
    if let Some(spread) = op.spread.as_ref().and_then(|spread| spread_keys(op, spread, device)) {
        return smallvec![spread];
    }
    let call = op.call();
    let mut launches: Launches = smallvec![Launch { kernel: op.name(), config: call.config, args: call.args }];
    if let Some(codes) = &op.codes {
        // The op checked that none of these has gaps.
        let (tokens, width) = (op.out.dim(0), op.out.dim(1) * op.out.dim(2));
        let rows = |view: &TensorView, shape: &[usize]| view.reshape(shape).ok();
        let x = rows(&op.out, &[tokens, width]);
        let q = rows(&codes.q, &[tokens, width]);
        let scales = rows(&codes.scales, &[tokens, width / Quantize::GROUP, 2]);
        if let (Some(x), Some(q), Some(scales)) = (x, q, scales) {
            launches.extend(Quantize { x, q, scales }.launches(device));
        }
    }
    launches
}

/// The kernel that spreads keys, where it takes these shapes.
fn spread_keys(op: &Attention, spread: &Spread, device: &DeviceInfo) -> Option<Launch> {
    let (tokens, heads, d) = (op.q.dim(0), op.q.dim(1), op.q.dim(2));
    let (capacity, kv_heads, dv) = (op.k.dim(0), op.k.dim(1), op.v.dim(2));
    let group = heads / kv_heads;
    let slots = Attention::counters(tokens, heads, kv_heads).filter(|&slots| slots <= spread.counters.dim(0))?;
    let wide = |view: &TensorView| {
        let strides = view.strides();
        [view.ptr().0 as usize, strides[0], strides[1]].iter().all(|bytes| bytes.is_multiple_of(16))
    };
    let views = [&op.q, &op.k, &op.v, &op.out];
    if !Attention::spreads(op.k.ty(), d, dv) || !views.into_iter().all(wide) || !spread.room.ptr().0.is_multiple_of(16)
    {
        return None;
    }
    let rows = Attention::rows(group);
    // As many slices as make a block or two for each multiprocessor, as there is room for, and as the longest text has.
    let blocks = device.multiprocessors.max(1) as usize * 16 / rows;
    let fits = spread.room.dim(0) / (slots * rows * (dv + 2));
    let most = capacity.div_ceil(LEAST).min(fits).min(MOST_SLICES);
    let slices = (blocks / slots).clamp(1, most.max(1));
    if fits == 0 {
        return None;
    }
    // Queries, scores of a tile; then parts of values, of the warps of a block and of slices.
    let queries = 2 * rows * d * 2;
    let parts = (8 / (dv / 64) - 1) * rows * dv * 4;
    let shared = (queries + rows * 160 * 4).max(parts).max(4096);
    if shared > SHARED_BYTES {
        return None;
    }
    let mut config = LaunchConfig::linear(to_u32(slices), 256);
    config.grid = [to_u32(slices), to_u32(tokens), to_u32(slots / tokens)];
    config.shared_bytes = to_u32(shared);
    let mut args = op.call().args;
    args.ptr(spread.room.ptr()).ptr(spread.counters.ptr());
    // Blocks that wait for others are fewer than half of the places that there are at least, so that the others find one.
    let helpers = if device.multiprocessors < 16 { 1 } else { (device.multiprocessors as usize / 2 - 1) / slots };
    args.u32(to_u32(slices)).u32(to_u32(LEAST)).u32(to_u32(helpers.max(1)));
    let kernel = if rows == 8 { "attention_split_8" } else { "attention_split_16" };
    Some(Launch { kernel, config, args })
}

/// `attention_heads`: a warp for each head where that has it in registers, else a block.
pub(crate) fn attention_heads(op: &AttentionHeads) -> Launches {
    let call = op.call();
    let mut launch = Launch { kernel: op.name(), config: call.config, args: call.args };
    let d = op.q.dim(2);
    let new = || op.new.iter();
    let kernel = match d {
        256 => "attention_heads_256",
        512 => "attention_heads_512",
        _ => op.name(),
    };
    let views = [&op.q].into_iter().chain(new().flat_map(|new| [&new.k, &new.v, &new.k_cache, &new.v_cache]));
    let norms = [&op.q_norm].into_iter().chain(new().map(|new| &new.k_norm));
    let aligned = |view: &TensorView| {
        let outer = &view.strides()[..view.rank() - 1];
        view.ptr().0.is_multiple_of(16) && outer.iter().all(|bytes| bytes.is_multiple_of(16))
    };
    if kernel != op.name() && op.dims == d && new().all(|new| new.v.dim(2) == d) && views.chain(norms).all(aligned) {
        launch.kernel = kernel;
        launch.config.block = [32, 1, 1];
        launch.config.shared_bytes = 0;
    }
    smallvec![launch]
}

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
