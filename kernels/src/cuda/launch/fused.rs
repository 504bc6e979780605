//! Sizes and arguments of the fused kernels: `flow.cuh` and the `fused_*.cu`.

use evergraph_pool::driver::{DeviceInfo, LaunchConfig};
use smallvec::smallvec;

use super::matvec::to_u32;
use super::product::of_fused_type;
use crate::ops::{Call, FusedDown, FusedNorm, FusedRouter, Launch, Launches, Op, Quantize, TensorView, glu_args};
use crate::quant::QuantType;

/// How a kernel's blocks take rows: warps of a block.
#[derive(Clone, Copy)]
struct Flow {
    warps: usize,
}

const NORM: Flow = Flow { warps: 16 };
const DOWN: Flow = Flow { warps: 8 };
const ROUTER: Flow = Flow { warps: 8 };

/// Rows that a warp has.
const ROWS: usize = 2;

/// Bytes of a unit of activations in shared memory.
const UNIT_BYTES: usize = 48;
/// Rows of a block of the product with floats.
const ROUTER_ROWS: usize = 4;

impl Flow {
    fn threads(self) -> u32 {
        to_u32(32 * self.warps)
    }

    /// Bytes of the steps that are on their way.
    fn rings(self, ty: QuantType) -> usize {
        let step = 1024 / ty.block_size() * ty.type_bytes();
        let stages = if step <= 640 { 3 } else { 2 };
        self.warps * stages * ROWS * ((step + 30) / 16 * 16)
    }

    /// Pairs of rows that a block takes at a time where `1 << log_parts` warps share them.
    fn pairs(self, log_parts: u32) -> usize {
        self.warps >> log_parts
    }

    /// How many groups of rows these weights are, if so many warps share rows that `wanted` blocks have some; and the logarithm
    /// of that number.
    fn groups<'a>(
        self,
        weights: impl Iterator<Item = &'a TensorView> + Clone,
        times: usize,
        wanted: usize,
    ) -> (usize, u32) {
        let Some(first) = weights.clone().next() else { return (0, 0) };
        let cols = first.cols();
        let out = |w: &TensorView| w.dim(w.rank() - 2);
        let groups = |log: u32| weights.clone().map(|w| out(w).div_ceil(ROWS * self.pairs(log))).sum::<usize>();
        let steps = cols.div_ceil(1024);
        let mut log = 0;
        while groups(log) * times < wanted && (2 << log) <= steps && log < 2 {
            log += 1;
        }
        (groups(log), log)
    }
}

/// Blocks for so many groups, all with the same number of turns or one less.
fn spread(groups: usize, resident: usize) -> usize {
    groups.div_ceil(groups.div_ceil(resident.max(1)).max(1)).max(1)
}

fn multiprocessors(device: &DeviceInfo) -> usize {
    device.multiprocessors.max(1) as usize
}

fn launch(kernel: &'static str, threads: u32, grid: [usize; 2], shared: usize, call: Call) -> Launches {
    let mut config = LaunchConfig::linear(to_u32(grid[0].max(1)), threads);
    config.grid[1] = to_u32(grid[1].max(1));
    config.shared_bytes = to_u32(shared);
    smallvec![Launch { kernel, config, args: call.args }]
}

/// `fused_norm`.
pub(crate) fn fused_norm(op: &FusedNorm, device: &DeviceInfo) -> Launches {
    let weights = op.products.iter().map(|product| &product.w);
    let ty = op.products[0].w.ty();
    let (groups, log_parts) = NORM.groups(weights, 1, multiprocessors(device));
    let router_rows = op.router.as_ref().map_or(0, |router| router.w.dim(0));
    let router_blocks = router_rows.div_ceil(ROUTER_ROWS);
    // All at once, with those of the router and the one that writes.
    let room = multiprocessors(device) * 2;
    let blocks = spread(groups, room.saturating_sub(router_blocks + 1).max(room / 2));
    let [which, router_which] = op.which();
    let mut call = op.call().dim(which).dim(log_parts as usize).dim(blocks);
    for index in 0..4 {
        let product = op.products.get(index);
        call = call.optional(product.map(|p| &p.w)).optional(product.map(|p| &p.y));
        call = call.dim(product.map_or(0, |p| p.w.dim(0)));
    }
    let router = op.router.as_ref();
    call =
        glu_args(call, op.glu.as_ref()).dim(router_which).optional(router.map(|r| &r.w)).optional(router.map(|r| &r.y));
    call = call.dim(router_rows).dim(router_blocks).view(&op.counter);
    let cols = op.norm.h.cols();
    let floats = 4 * cols;
    // Weights of norms, then rows on their way and codes, or rows and floats of the router.
    let shared = 4 * floats + (NORM.rings(ty) + cols / 32 * UNIT_BYTES).max((1 + ROUTER_ROWS) * floats);
    launch(of_fused_type(ty, "norm"), NORM.threads(), [blocks + router_blocks + 1, 1], shared, call)
}

/// `fused_router`.
pub(crate) fn fused_router(op: &FusedRouter, device: &DeviceInfo) -> Launches {
    let (ty, used) = (op.products[0].w.ty(), op.router.ids.dim(1));
    let weights = op.products.iter().map(|product| &product.w);
    let room = multiprocessors(device) * 4;
    let (groups, log_parts) = ROUTER.groups(weights, used, 2 * multiprocessors(device));
    let blocks = match &op.glu {
        Some(glu) => glu.gate.cols() / Quantize::GROUP,
        None => spread(groups * used, room).div_ceil(used),
    };
    let log_parts = if op.glu.is_some() { 0 } else { log_parts };
    let first = &op.products[0];
    let call = op.call().dim(first.w.dim(2)).dim(log_parts as usize).view(&first.x).optional(first.scales.as_ref());
    let codes = op.glu.as_ref().and_then(|glu| glu.codes.as_ref());
    let (q, scales) = (codes.map(|codes| &codes.q), codes.map(|codes| &codes.scales));
    let call = glu_args(call, op.glu.as_ref()).dim(op.glu.as_ref().map_or(0, |glu| glu.gate.cols()));
    let call = call.optional(q).optional_stride(q, 1).optional(scales).optional_stride(scales, 1);
    let shared = ROUTER.rings(ty) + first.w.dim(2) / 32 * UNIT_BYTES;
    launch(of_fused_type(ty, "router"), ROUTER.threads(), [blocks, used], shared, call)
}

/// `fused_down`.
pub(crate) fn fused_down(op: &FusedDown, device: &DeviceInfo) -> Launches {
    let Some(ty) = op.weights().next().map(TensorView::ty) else { return Launches::new() };
    let wanted = multiprocessors(device);
    let dense = op.dense.as_ref().map(|(_, product)| &product.w);
    let experts = op.experts.as_ref().map(|(product, _)| &product.w);
    let (dense_groups, dense_log) = DOWN.groups(dense.into_iter(), 1, wanted);
    let (groups, log) = DOWN.groups(experts.into_iter(), 1, wanted);
    let resident = wanted * 4;
    let blocks = |groups| if groups == 0 { 0 } else { spread(groups, resident) };
    let (dense_blocks, blocks) = (blocks(dense_groups), blocks(groups));
    let units = |w: Option<&TensorView>, slots: usize| w.map_or(0, |w| w.cols() / 32 * slots);
    let used = op.experts.as_ref().map_or(1, |(product, _)| product.ids.dim(1));
    let shared = DOWN.rings(ty) + units(dense, 1).max(units(experts, used)) * UNIT_BYTES;
    let call = op.args(dense_blocks, dense_log, log);
    launch(of_fused_type(ty, "down"), DOWN.threads(), [dense_blocks + blocks, 1], shared, call)
}
