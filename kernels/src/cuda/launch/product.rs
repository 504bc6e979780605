//! Products with weights: kernels for few tokens, one for each type, and for many.

use evergraph_pool::driver::{DeviceInfo, LaunchConfig};
use smallvec::smallvec;

use super::matvec::{MatVec, to_u32};
use crate::ops::{ExpertMatMul, HeadMatMul, Launch, Launches, MatMul, Op, Quantize, TensorView};
use crate::quant::QuantType;

/// Most tokens that the kernels for few take.
const FEW: usize = 8;

/// Rows and tokens of a tile, threads of its block: those of `tiles.cuh`.
const TILE: usize = 64;
const TILE_THREADS: u32 = 128;
/// Words of two buffers, for floats and for 8-bit integers.
const FLOAT_TILE_BYTES: u32 = 2 * 4 * (2 * 32) * 68;
const EIGHT_TILE_BYTES: u32 = 2 * 4 * (12 + 11) * 68;

/// The name of a type's kernel.
macro_rules! of_type {
    ($ty:expr, $prefix:literal) => {
        of_type!(
            $ty, $prefix, F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ4_NL IQ4_XS MXFP4 IQ2_XXS
            IQ2_XS IQ2_S IQ3_XXS IQ3_S
        )
    };
    ($ty:expr, $prefix:literal, $($name:ident)*) => {
        match $ty {
            $(QuantType::$name => concat!($prefix, stringify!($name)),)*
            // Ops refuse other weights.
            _ => concat!($prefix, "none"),
        }
    };
}

/// A kernel of this kind for this type of weights.
pub(super) fn of_fused_type(ty: QuantType, kind: &str) -> &'static str {
    match kind {
        "norm" => of_type!(ty, "fused_norm_", Q4_0 Q8_0 Q4_K Q5_K Q6_K),
        "router" => of_type!(ty, "fused_router_", Q4_0 Q8_0 Q4_K Q5_K Q6_K),
        _ => of_type!(ty, "fused_down_", Q4_0 Q8_0 Q4_K Q5_K Q6_K),
    }
}

/// `matmul`.
pub(crate) fn matmul(op: &MatMul, device: &DeviceInfo) -> Launches {
    let (ty, out, cols, tokens) = (op.w.ty(), op.w.dim(0), op.w.dim(1), op.x.dim(0));
    let eights = op.scales.is_some();
    let (kernel, config) = if tokens <= FEW {
        let (kernel, at_a_time) = match (eights, tokens) {
            (true, ..=1) => (of_type!(ty, "matvec_q8_t1_"), 1),
            (true, _) => (of_type!(ty, "matvec_q8_t8_"), 8),
            (false, ..=1) => (of_type!(ty, "matvec_f32_t1_"), 1),
            (false, _) => (of_type!(ty, "matvec_f32_t4_"), 4),
        };
        let kind = MatVec { ty, eights, tokens: at_a_time };
        (kernel, kind.config(out, cols, tokens.div_ceil(at_a_time), device.multiprocessors))
    } else if eights {
        ("matmul_tiled_q8", tiled(out, tokens.div_ceil(TILE), true))
    } else {
        ("matmul_tiled_f32", tiled(out, tokens.div_ceil(TILE), false))
    };
    smallvec![Launch { kernel, config, args: op.call().args }]
}

/// `expert_matmul`.
pub(crate) fn expert_matmul(op: &ExpertMatMul, device: &DeviceInfo) -> Launches {
    let (ty, experts, out, cols) = (op.w.ty(), op.w.dim(0), op.w.dim(1), op.w.dim(2));
    let all = experts.saturating_add(op.more.as_ref().map_or(0, |more| more.dim(0)));
    let (tokens, used) = (op.ids.dim(0), op.ids.dim(1));
    let eights = op.scales.is_some();
    let (kernel, config) = if tokens <= FEW {
        let kernel = if eights { of_type!(ty, "expert_matvec_q8_") } else { of_type!(ty, "expert_matvec_f32_") };
        let kind = MatVec { ty, eights, tokens: 1 };
        (kernel, kind.config(out, cols, tokens.saturating_mul(used), device.multiprocessors))
    } else if eights {
        ("expert_matmul_tiled_q8", tiled(out, all, true))
    } else {
        ("expert_matmul_tiled_f32", tiled(out, all, false))
    };
    smallvec![Launch { kernel, config, args: op.call().args }]
}

/// `head_matmul`: as products with experts, each head with its own.
pub(crate) fn head_matmul(op: &HeadMatMul, device: &DeviceInfo) -> Launches {
    let (ty, heads, out, cols) = (op.w.ty(), op.w.dim(0), op.w.dim(1), op.w.dim(2));
    let tokens = op.x.dim(0);
    let (kernel, config) = if tokens <= FEW {
        let kind = MatVec { ty, eights: false, tokens: 1 };
        let slots = tokens.saturating_mul(heads);
        (of_type!(ty, "expert_matvec_f32_"), kind.config(out, cols, slots, device.multiprocessors))
    } else {
        ("expert_matmul_tiled_f32", tiled(out, heads, false))
    };
    smallvec![Launch { kernel, config, args: op.call().args }]
}

/// `quantize`: a warp for each 32 columns.
pub(crate) fn quantize(op: &Quantize, device: &DeviceInfo) -> Launches {
    let groups = |x: &TensorView| x.rows().saturating_mul(x.cols() / Quantize::GROUP);
    let most = device.multiprocessors.max(1) as usize * 8;
    let blocks = groups(&op.x).div_ceil(8).clamp(1, most);
    smallvec![Launch { kernel: op.name(), config: LaunchConfig::linear(to_u32(blocks), 256), args: op.call().args }]
}

/// A block for each tile of rows, `times` times: tiles of tokens, or experts.
fn tiled(out: usize, times: usize, eights: bool) -> LaunchConfig {
    let mut config = LaunchConfig::linear(to_u32(out.div_ceil(TILE).max(1)), TILE_THREADS);
    config.grid[1] = to_u32(times.max(1));
    config.shared_bytes = if eights { EIGHT_TILE_BYTES } else { FLOAT_TILE_BYTES };
    config
}
