//! Matrix products of the host device: how they are cut into tasks.

use std::cell::RefCell;

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use super::integer::{Token, Way};
use super::quantize::GROUP;
use super::simd::Level;
use super::span::{Reader, Rows};
use super::{dot, gemm, integer, parallel};
use crate::quant::QuantType;
use crate::quant::codes::Format;

/// One weight matrix and the rows it is multiplied with.
struct Product<'a> {
    ty: QuantType,
    /// `[out][row_bytes]`.
    w: &'a [u8],
    row_bytes: usize,
    cols: usize,
    /// A row of `cols` per token.
    x: Activations<'a>,
    /// Where in `y` each token's result goes.
    places: Vec<(usize, usize)>,
}

/// Rows of floats, or of integers with two scales for each 32.
enum Activations<'a> {
    Floats(Vec<&'a [f32]>),
    Integers(Format, Vec<(&'a [i8], &'a [f32])>),
}

/// Activations in device memory.
enum Inputs {
    Floats(Rows<f32>),
    Integers(Format, Rows<i8>, Rows<f32>),
}

impl Inputs {
    /// Checks them for products with weights of type `ty`.
    fn read(
        ctx: &KernelContext<'_>,
        (x, strides): (DevicePtr, [usize; 2]),
        (scales, scales_strides): (Option<DevicePtr>, [usize; 2]),
        dims: [usize; 2],
        cols: usize,
        ty: QuantType,
    ) -> Result<Self, Fault> {
        let Some(scales) = scales else { return Ok(Self::Floats(Rows::read3(ctx, x, dims, cols, strides)?)) };
        let format = Format::of(ty).ok_or_else(|| ctx.fault(x, 0, false, "scales for weights without blocks"))?;
        let scales = Rows::read3(ctx, scales, dims, cols / GROUP * 2, scales_strides)?;
        Ok(Self::Integers(format, Rows::read3(ctx, x, dims, cols, strides)?, scales))
    }

    /// No rows yet.
    fn none<'a>(&self) -> Activations<'a> {
        match self {
            Self::Floats(_) => Activations::Floats(Vec::new()),
            Self::Integers(format, ..) => Activations::Integers(*format, Vec::new()),
        }
    }

    /// Appends row `(a, b)`.
    ///
    /// # Safety
    /// Nothing writes the row while the list is used.
    unsafe fn push(&self, a: usize, b: usize, to: &mut Activations<'_>) {
        match (self, to) {
            // SAFETY: the caller's.
            (Self::Floats(rows), Activations::Floats(list)) => list.push(unsafe { rows.row(a, b) }),
            (Self::Integers(_, rows, scales), Activations::Integers(_, list)) => {
                // SAFETY: the caller's.
                list.push(unsafe { (rows.row(a, b), scales.row(a, b)) });
            }
            // Lists are those of `none`.
            _ => {}
        }
    }
}

thread_local! {
    /// Buffers for packed activations, kept from launch to launch.
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// The same for integers.
    static PANELS: RefCell<integer::Panels> = RefCell::default();
    /// Buffers of a tile: decoded weights, accumulators.
    static TILE: RefCell<Tile> = RefCell::default();
}

#[derive(Default)]
struct Tile {
    floats: Vec<f32>,
    integers: integer::Buffers,
    acc: Vec<f32>,
}

/// `matmul`.
pub(super) fn matmul(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (w, ty, out, cols) = (a.ptr()?, a.ty()?, a.dim()?, a.dim()?);
    let (x, tokens, x_stride) = (a.ptr()?, a.dim()?, a.stride()?);
    let (y, y_stride) = (a.ptr()?, a.stride()?);
    let (scales, scales_stride) = (a.optional()?, a.stride()?);
    let row_bytes = row_bytes(ctx, ty, cols)?;
    let x = Inputs::read(ctx, (x, [x_stride, 0]), (scales, [scales_stride, 0]), [tokens, 1], cols, ty)?;
    let y = Rows::<f32>::write(ctx, y, tokens, out, y_stride)?;
    // SAFETY: stream order keeps writers of weights and inputs away; the op checked that the output is apart.
    let w = unsafe { ctx.slice::<u8>(w, out * row_bytes)? };
    let mut rows = x.none();
    // SAFETY: as above.
    (0..tokens).for_each(|t| unsafe { x.push(t, 0, &mut rows) });
    let places = (0..tokens).map(|t| (t, 0)).collect();
    run(&[Product { ty, w, row_bytes, cols, x: rows, places }], &y);
    Ok(())
}

/// `expert_matmul`, and `head_matmul`, which has no ids.
pub(super) fn expert_matmul(ctx: &KernelContext<'_>) -> Result<(), Fault> {
    let mut a = Reader::new(ctx);
    let (w, ty, experts, out, cols) = (a.ptr()?, a.ty()?, a.dim()?, a.dim()?, a.dim()?);
    let (ids, tokens, used) = (a.optional()?, a.dim()?, a.dim()?);
    let (x, x_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (y, y_strides) = (a.ptr()?, [a.stride()?, a.stride()?]);
    let (scales, scales_strides) = (a.optional()?, [a.stride()?, a.stride()?]);
    let (more, more_experts) = (a.optional()?, a.dim()?);
    let row_bytes = row_bytes(ctx, ty, cols)?;
    let ids = match ids {
        Some(ids) => super::span::load::<i32>(ctx, ids, tokens * used)?,
        // Slot k of a token takes expert k.
        None => (0..tokens * used).map(|slot| (slot % used) as i32).collect(),
    };
    let x = Inputs::read(ctx, (x, x_strides), (scales, scales_strides), [tokens, used], cols, ty)?;
    let y = Rows::<f32>::write3(ctx, y, [tokens, used], out, y_strides)?;
    let mut products: Vec<Product<'_>> = Vec::new();
    let all = experts + more_experts;
    let mut of_expert = vec![usize::MAX; all];
    for (slot, &id) in ids.iter().enumerate() {
        if id == -1 {
            // SAFETY: nobody else writes the row, as in `run_few`.
            unsafe { y.row_mut(slot / used, slot % used) }.fill(0.0);
            continue;
        }
        let expert = usize::try_from(id).ok().filter(|&e| e < all);
        let expert = expert.ok_or_else(|| ctx.fault(w, out * row_bytes, false, "expert id out of range"))?;
        if of_expert[expert] == usize::MAX {
            of_expert[expert] = products.len();
            let (first, number) = match more {
                Some(more) if expert >= experts => (more, expert - experts),
                _ => (w, expert),
            };
            let slab = first.checked_add(number * out * row_bytes).unwrap_or_default();
            // SAFETY: as in `matmul`. Only the slabs of chosen experts are touched.
            let w = unsafe { ctx.slice::<u8>(slab, out * row_bytes)? };
            products.push(Product { ty, w, row_bytes, cols, x: x.none(), places: Vec::new() });
        }
        let product = &mut products[of_expert[expert]];
        let place = (slot / used, slot % used);
        // SAFETY: as in `matmul`.
        unsafe { x.push(place.0, place.1, &mut product.x) };
        product.places.push(place);
    }
    run(&products, &y);
    Ok(())
}

fn row_bytes(ctx: &KernelContext<'_>, ty: QuantType, cols: usize) -> Result<usize, Fault> {
    ty.row_bytes(cols).map_err(|_| ctx.fault(Default::default(), 0, false, "columns do not fit the blocks"))
}

/// Weights that one task of the few-token path reads, about: of a large product more, since what is asked for ahead at the end of
/// one task is another thread's.
const TASK_BYTES: std::ops::RangeInclusive<usize> = 32 * 1024..=512 * 1024;

fn run(products: &[Product<'_>], y: &Rows<f32>) {
    let (few, many): (Vec<_>, Vec<_>) = products.iter().partition(|p| p.places.len() <= dot::MOST);
    run_few(&few, y);
    for product in many {
        match &product.x {
            Activations::Floats(x) => {
                for (x, places) in x.chunks(gemm::TOKENS).zip(product.places.chunks(gemm::TOKENS)) {
                    multiply_floats(product, x, places, y);
                }
            }
            Activations::Integers(format, x) => {
                for (x, places) in x.chunks(gemm::TOKENS).zip(product.places.chunks(gemm::TOKENS)) {
                    multiply_integers(product, *format, x, places, y);
                }
            }
        }
    }
}

/// Few tokens: every product's rows in one list of tasks, so that eight small experts keep all threads busy.
fn run_few(few: &[&Product<'_>], y: &Rows<f32>) {
    let (level, way) = (Level::current(), Way::current());
    let bytes: usize = few.iter().map(|p| p.w.len()).sum();
    let task_bytes = (bytes / (16 * parallel::threads())).clamp(*TASK_BYTES.start(), *TASK_BYTES.end());
    let mut tasks = Vec::new();
    for (i, product) in few.iter().enumerate() {
        let rows = product.w.len() / product.row_bytes;
        let step = (task_bytes / product.row_bytes).max(1);
        tasks.extend((0..rows).step_by(step).map(|start| (i, start, step.min(rows - start))));
    }
    let tokens = |product: &&Product<'_>| match &product.x {
        Activations::Floats(_) => Vec::new(),
        Activations::Integers(format, x) => x.iter().map(|(q, scales)| Token::new(*format, q, scales)).collect(),
    };
    let tokens: Vec<Vec<Token>> = few.iter().map(tokens).collect();
    parallel::each(tasks.len(), bytes / tasks.len().max(1), |task| {
        let (i, start, rows) = tasks[task];
        let product = few[i];
        let w = &product.w[start * product.row_bytes..(start + rows) * product.row_bytes];
        // SAFETY: each task writes its own rows of the outputs of its own tokens.
        let out = |&(a, b): &(usize, usize)| unsafe { y.part_mut(a, b, start, rows) };
        let mut out: Vec<&mut [f32]> = product.places.iter().map(out).collect();
        match &product.x {
            Activations::Floats(x) => dot::rows(level, product.ty, w, product.row_bytes, x, &mut out),
            Activations::Integers(format, _) => {
                integer::rows(way, (product.ty, *format), w, product.row_bytes, &tokens[i], &mut out);
            }
        }
    });
}

/// Many tokens: `x` packed once, then tile after tile of weight rows.
fn multiply_floats(product: &Product<'_>, x: &[&[f32]], places: &[(usize, usize)], y: &Rows<f32>) {
    let level = Level::current();
    let panel_len = product.cols * gemm::PANEL;
    let panels = x.len().div_ceil(gemm::PANEL);
    let mut packed = PACKED.take();
    packed.resize(panels * panel_len, 0.0);
    let address = Rows::over(&mut packed, panels, panel_len);
    let pack = |p: usize| {
        // SAFETY: each panel belongs to one task.
        let panel = unsafe { address.row_mut(p, 0) };
        gemm::pack(&x[p * gemm::PANEL..x.len().min((p + 1) * gemm::PANEL)], panel);
    };
    parallel::each(panels, panel_len, pack);
    tiles(product, places, y, |w, tile| {
        let Tile { floats, acc, .. } = tile;
        floats.resize(gemm::TILE * gemm::DEPTH, 0.0);
        gemm::tile(level, product.ty, w, product.row_bytes, product.cols, &packed, floats, acc);
    });
    PACKED.set(packed);
}

/// The same with integers.
fn multiply_integers(
    product: &Product<'_>,
    format: Format,
    x: &[(&[i8], &[f32])],
    places: &[(usize, usize)],
    y: &Rows<f32>,
) {
    let mut panels = PANELS.take();
    panels.fill(format, x, product.cols);
    let way = Way::for_tokens(x.len(), panels.group());
    tiles(product, places, y, |w, tile| {
        integer::tile(way, (product.ty, format), w, product.row_bytes, &panels, &mut tile.integers, &mut tile.acc);
    });
    PANELS.set(panels);
}

/// Calls `multiply` for each tile of weight rows, which leaves products in `acc`, and takes them to their places.
fn tiles(
    product: &Product<'_>,
    places: &[(usize, usize)],
    y: &Rows<f32>,
    multiply: impl Fn(&[u8], &mut Tile) + Send + Sync,
) {
    let rows = product.w.len() / product.row_bytes;
    let tiles = rows.div_ceil(gemm::TILE);
    let cost = gemm::TILE * product.cols * places.len() / 16;
    let level = Level::current();
    parallel::each(tiles, cost, |t| {
        let start = t * gemm::TILE;
        let count = gemm::TILE.min(rows - start);
        let w = &product.w[start * product.row_bytes..(start + count) * product.row_bytes];
        // The buffers are taken out, since a thread that waits may start another task meanwhile.
        let mut tile = TILE.take();
        tile.acc.resize(places.len().div_ceil(gemm::PANEL) * gemm::TILE * gemm::PANEL, 0.0);
        multiply(w, &mut tile);
        for (panel, places) in tile.acc.chunks_exact(gemm::TILE * gemm::PANEL).zip(places.chunks(gemm::PANEL)) {
            for first in (0..count).step_by(gemm::PANEL) {
                let rows = gemm::PANEL.min(count - first);
                let square = gemm::transpose(level, &panel[first * gemm::PANEL..]);
                for (&(a, b), column) in places.iter().zip(&square) {
                    // SAFETY: each task writes its own rows of the outputs.
                    unsafe { y.part_mut(a, b, start + first, rows) }.copy_from_slice(&column[..rows]);
                }
            }
        }
        TILE.set(tile);
    });
}
