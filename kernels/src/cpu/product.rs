//! Matrix products of the host device: how they are cut into tasks.

use std::borrow::Cow;
use std::cell::RefCell;

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};
use rayon::prelude::*;

use super::quantize::GROUP;
use super::simd::Level;
use super::span::{Reader, Rows};
use super::{dot, gemm, parallel};
use crate::quant::QuantType;

/// One weight matrix and the rows it is multiplied with.
struct Product<'a> {
    ty: QuantType,
    /// `[out][row_bytes]`.
    w: &'a [u8],
    row_bytes: usize,
    cols: usize,
    /// A row of `cols` per token.
    x: Vec<Cow<'a, [f32]>>,
    /// Where in `y` each token's result goes.
    places: Vec<(usize, usize)>,
}

/// Activations of floats, or integers with their scales.
enum Inputs {
    Floats(Rows<f32>),
    Integers(Rows<i8>, Rows<f32>),
}

impl Inputs {
    fn read(
        ctx: &KernelContext<'_>,
        x: DevicePtr,
        scales: Option<DevicePtr>,
        dims: [usize; 2],
        cols: usize,
        strides: [usize; 2],
        scales_strides: [usize; 2],
    ) -> Result<Self, Fault> {
        let Some(scales) = scales else { return Ok(Self::Floats(Rows::read3(ctx, x, dims, cols, strides)?)) };
        let scales = Rows::read3(ctx, scales, dims, cols / GROUP * 2, scales_strides)?;
        Ok(Self::Integers(Rows::read3(ctx, x, dims, cols, strides)?, scales))
    }

    /// Row `(a, b)` as floats.
    ///
    /// # Safety
    /// Nothing writes the row while the slice is used.
    unsafe fn row<'r>(&self, a: usize, b: usize) -> Cow<'r, [f32]> {
        match self {
            // SAFETY: the caller's.
            Self::Floats(rows) => Cow::Borrowed(unsafe { rows.row(a, b) }),
            Self::Integers(codes, scales) => {
                // SAFETY: the caller's.
                let (codes, scales) = unsafe { (codes.row(a, b), scales.row(a, b)) };
                let groups = codes.chunks(GROUP).zip(scales.chunks(2));
                groups.flat_map(|(codes, scale)| codes.iter().map(|&code| f32::from(code) * scale[0])).collect()
            }
        }
    }
}

thread_local! {
    /// Buffers for packed activations, kept from launch to launch.
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Buffers of a tile: decoded weights, accumulators.
    static TILE: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// `matmul`.
pub(super) fn matmul(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (w, ty, out, cols) = (a.ptr()?, a.ty()?, a.dim()?, a.dim()?);
    let (x, tokens, x_stride) = (a.ptr()?, a.dim()?, a.stride()?);
    let (y, y_stride) = (a.ptr()?, a.stride()?);
    let (scales, scales_stride) = (a.optional()?, a.stride()?);
    let row_bytes = row_bytes(ctx, ty, cols)?;
    let x = Inputs::read(ctx, x, scales, [tokens, 1], cols, [x_stride, 0], [scales_stride, 0])?;
    let y = Rows::<f32>::write(ctx, y, tokens, out, y_stride)?;
    // SAFETY: stream order keeps writers of weights and inputs away; the op checked that the output is apart.
    let (w, x) = unsafe { (ctx.slice::<u8>(w, out * row_bytes)?, (0..tokens).map(|t| x.row(t, 0)).collect()) };
    let places = (0..tokens).map(|t| (t, 0)).collect();
    run(&[Product { ty, w, row_bytes, cols, x, places }], &y);
    Ok(())
}

/// `expert_matmul`.
pub(super) fn expert_matmul(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (w, ty, experts, out, cols) = (a.ptr()?, a.ty()?, a.dim()?, a.dim()?, a.dim()?);
    let (ids, tokens, used) = (a.ptr()?, a.dim()?, a.dim()?);
    let (x, x_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (y, y_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (scales, scales_strides) = (a.optional()?, [a.stride()?, a.stride()?]);
    let row_bytes = row_bytes(ctx, ty, cols)?;
    let ids = super::span::load::<i32>(ctx, ids, tokens * used)?;
    let x = Inputs::read(ctx, x, scales, [tokens, used], cols, x_strides, scales_strides)?;
    let y = Rows::<f32>::write3(ctx, y, [tokens, used], out, y_strides)?;
    let mut products: Vec<Product<'_>> = Vec::new();
    let mut of_expert = vec![usize::MAX; experts];
    for (slot, &id) in ids.iter().enumerate() {
        let expert = usize::try_from(id).ok().filter(|&e| e < experts);
        let expert = expert.ok_or_else(|| ctx.fault(w, out * row_bytes, false, "expert id out of range"))?;
        if of_expert[expert] == usize::MAX {
            of_expert[expert] = products.len();
            let slab = w.checked_add(expert * out * row_bytes).unwrap_or_default();
            // SAFETY: as in `matmul`. Only the slabs of chosen experts are touched.
            let w = unsafe { ctx.slice::<u8>(slab, out * row_bytes)? };
            products.push(Product { ty, w, row_bytes, cols, x: Vec::new(), places: Vec::new() });
        }
        let product = &mut products[of_expert[expert]];
        let place = (slot / used, slot % used);
        // SAFETY: as in `matmul`.
        product.x.push(unsafe { x.row(place.0, place.1) });
        product.places.push(place);
    }
    run(&products, &y);
    Ok(())
}

fn row_bytes(ctx: &KernelContext<'_>, ty: QuantType, cols: usize) -> Result<usize, Fault> {
    ty.row_bytes(cols).map_err(|_| ctx.fault(Default::default(), 0, false, "columns do not fit the blocks"))
}

/// Weights that one task of the few-token path reads, about.
const TASK_BYTES: usize = 32 * 1024;

fn run(products: &[Product<'_>], y: &Rows<f32>) {
    let level = Level::current();
    let (few, many): (Vec<_>, Vec<_>) = products.iter().partition(|p| p.x.len() <= dot::MOST);
    // Few tokens: every product's rows in one list of tasks, so that eight small experts keep all threads busy.
    let mut tasks = Vec::new();
    for (i, product) in few.iter().enumerate() {
        let rows = product.w.len() / product.row_bytes;
        let step = (TASK_BYTES / product.row_bytes).max(1);
        tasks.extend((0..rows).step_by(step).map(|start| (i, start, step.min(rows - start))));
    }
    let bytes: usize = few.iter().map(|p| p.w.len()).sum();
    parallel::each(tasks.len(), bytes / tasks.len().max(1), |task| {
        let (i, start, rows) = tasks[task];
        let product = few[i];
        let w = &product.w[start * product.row_bytes..(start + rows) * product.row_bytes];
        // SAFETY: each task writes its own rows of the outputs of its own tokens.
        let out = |&(a, b): &(usize, usize)| unsafe { y.part_mut(a, b, start, rows) };
        let mut out: Vec<&mut [f32]> = product.places.iter().map(out).collect();
        let x: Vec<&[f32]> = product.x.iter().map(AsRef::as_ref).collect();
        dot::rows(level, product.ty, w, product.row_bytes, &x, &mut out);
    });
    for product in many {
        let x: Vec<&[f32]> = product.x.iter().map(AsRef::as_ref).collect();
        for (x, places) in x.chunks(gemm::TOKENS).zip(product.places.chunks(gemm::TOKENS)) {
            multiply(level, product, x, places, y);
        }
    }
}

/// Many tokens: `x` packed once, then tile after tile of weight rows.
fn multiply(level: Level, product: &Product<'_>, x: &[&[f32]], places: &[(usize, usize)], y: &Rows<f32>) {
    let panel_len = product.cols * gemm::PANEL;
    let panels = x.len().div_ceil(gemm::PANEL);
    let mut packed = PACKED.take();
    packed.resize(panels * panel_len, 0.0);
    packed.par_chunks_mut(panel_len).zip(x.par_chunks(gemm::PANEL)).for_each(|(out, x)| gemm::pack(x, out));
    let rows = product.w.len() / product.row_bytes;
    let tiles = rows.div_ceil(gemm::TILE);
    let cost = gemm::TILE * product.cols * x.len() / 16;
    parallel::each(tiles, cost, |t| {
        let start = t * gemm::TILE;
        let count = gemm::TILE.min(rows - start);
        let w = &product.w[start * product.row_bytes..(start + count) * product.row_bytes];
        // The buffers are taken out, since a thread that waits may start another task meanwhile.
        let (mut decoded, mut acc) = TILE.take();
        decoded.resize(gemm::TILE * gemm::DEPTH, 0.0);
        acc.resize(panels * gemm::TILE * gemm::PANEL, 0.0);
        gemm::tile(level, product.ty, w, product.row_bytes, product.cols, &packed, &mut decoded, &mut acc);
        for (t, &(a, b)) in places.iter().enumerate() {
            let panel = &acc[t / gemm::PANEL * gemm::TILE * gemm::PANEL..];
            // SAFETY: each task writes its own rows of the outputs.
            let out = unsafe { y.part_mut(a, b, start, count) };
            for (r, out) in out.iter_mut().enumerate() {
                *out = panel[r * gemm::PANEL + t % gemm::PANEL];
            }
        }
        TILE.set((decoded, acc));
    });
    PACKED.set(packed);
}
