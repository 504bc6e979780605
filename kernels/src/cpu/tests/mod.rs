#![allow(clippy::unwrap_used)]

mod attention;
mod compressed;
mod elementwise;
mod experts;
mod heads;
pub(super) mod integer;
mod latent;
mod matmul;
mod rows;
mod sample;
mod streams;
mod unfused;

use std::sync::Arc;

use evergraph_pool::driver::host::{KernelContext, SpanCheck};
use evergraph_pool::driver::{DeviceOrdinal, DevicePtr, Fault, ParamLayout};

use super::simd::Level;
use super::{KERNELS, parallel};
use crate::ops::{Op, Root, TensorView};
use crate::quant::{QuantType, dequantize, quantize};

/// Device memory made of plain buffers; nothing outside them may be touched.
#[derive(Default)]
pub(super) struct Memory {
    /// Each with the bytes of it that are mapped.
    buffers: Vec<(Vec<u64>, usize)>,
}

impl SpanCheck for Memory {
    fn check(&self, op: &str, ptr: DevicePtr, bytes: usize, write: bool) -> Result<(), Fault> {
        let inside = |(buffer, mapped): &(Vec<u64>, usize)| {
            let start = buffer.as_ptr() as u64;
            let end = start + *mapped as u64;
            start <= ptr.0 && ptr.0 < end && bytes as u64 <= end - ptr.0
        };
        if self.buffers.iter().any(inside) {
            return Ok(());
        }
        Err(Fault { address: ptr, bytes, write, op: op.to_owned(), owner: "nobody".to_owned() })
    }
}

impl Memory {
    pub(super) fn root(&mut self, bytes: usize) -> Arc<Root> {
        let buffer = vec![0u64; bytes.div_ceil(8)];
        let ptr = DevicePtr(buffer.as_ptr() as u64);
        self.buffers.push((buffer, bytes.next_multiple_of(8)));
        Root::new(format!("buffer {}", self.buffers.len()), ptr, bytes, DeviceOrdinal(0))
    }

    pub(super) fn bytes(&mut self, ty: QuantType, shape: &[usize], bytes: &[u8]) -> TensorView {
        let root = self.root(bytes.len());
        let view = TensorView::new(&root, ty, shape).unwrap();
        assert_eq!(view.range(), 0..bytes.len());
        // SAFETY: the buffer is as long and lives in `self`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), root.ptr.0 as usize as *mut u8, bytes.len()) };
        view
    }

    pub(super) fn floats(&mut self, shape: &[usize], values: &[f32]) -> TensorView {
        self.weights(QuantType::F32, shape, values).0
    }

    pub(super) fn ints(&mut self, shape: &[usize], values: &[i32]) -> TensorView {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.bytes(QuantType::I32, shape, &bytes)
    }

    /// A quantised tensor and the exact values that it holds.
    pub(super) fn weights(&mut self, ty: QuantType, shape: &[usize], values: &[f32]) -> (TensorView, Vec<f32>) {
        let bytes = quantize(ty, values).unwrap_or_else(|_| random_blocks(ty, values));
        let mut exact = vec![0.0; values.len()];
        dequantize(ty, &bytes, &mut exact).unwrap();
        (self.bytes(ty, shape, &bytes), exact)
    }

    /// Space filled with a pattern that is no number.
    pub(super) fn output(&mut self, shape: &[usize]) -> TensorView {
        self.floats(shape, &vec![f32::NAN; shape.iter().product()])
    }

    /// A matrix inside a wider one, `gap` columns further on the right.
    pub(super) fn strided(&mut self, shape: &[usize], values: &[f32], gap: usize) -> TensorView {
        let cols = *shape.last().unwrap();
        let mut wide = Vec::new();
        for row in values.chunks(cols) {
            wide.extend_from_slice(row);
            wide.extend(std::iter::repeat_n(777.0, gap));
        }
        let mut wide_shape = shape.to_vec();
        *wide_shape.last_mut().unwrap() = cols + gap;
        self.floats(&wide_shape, &wide).narrow(shape.len() - 1, 0, cols).unwrap()
    }

    pub(super) fn run(&self, op: &dyn Op) -> Result<(), Fault> {
        op.check().unwrap();
        let kernel = KERNELS.iter().find(|k| k.name == op.name()).unwrap();
        let call = op.call();
        let layout = ParamLayout::c_layout(kernel.params);
        assert_eq!(layout.packed_bytes(), call.args.as_bytes().len(), "{} packs what its kernel takes", op.name());
        (kernel.body)(&KernelContext::new(kernel.name, call.config, &layout, call.args.as_bytes(), self))
    }
}

/// Blocks of a type without a quantiser: bits from the values, scales kept sane.
fn random_blocks(ty: QuantType, values: &[f32]) -> Vec<u8> {
    let mut state = values.iter().fold(7u64, |h, v| h.wrapping_mul(31).wrapping_add(u64::from(v.to_bits())));
    let blocks = values.len() / ty.block_size();
    let mut bytes: Vec<u8> = (0..blocks * ty.type_bytes()).map(|_| (next(&mut state) >> 24) as u8).collect();
    for block in bytes.chunks_mut(ty.type_bytes()) {
        // Halves at these places become 2^-8 or so.
        let at: &[usize] = match ty {
            QuantType::Q2_K => &[80, 82],
            QuantType::Q3_K => &[108],
            QuantType::Q5_K => &[0, 2],
            QuantType::Q8_K => {
                block[..4].copy_from_slice(&0.01f32.to_le_bytes());
                &[]
            }
            _ => &[0],
        };
        for &at in at {
            block[at + 1] = 0x1C | (block[at + 1] & 0x83);
        }
    }
    bytes
}

pub(super) fn read(view: &TensorView) -> Vec<f32> {
    rows_of(view).into_iter().flatten().collect()
}

pub(super) fn rows_of(view: &TensorView) -> Vec<Vec<f32>> {
    let (shape, strides) = (view.shape(), view.strides());
    let outer = shape[..shape.len() - 1].iter().product::<usize>();
    (0..outer)
        .map(|mut i| {
            let mut at = view.ptr().0 as usize;
            for axis in (0..shape.len() - 1).rev() {
                at += i % shape[axis] * strides[axis];
                i /= shape[axis];
            }
            // SAFETY: inside the view's root, a live buffer of the test's memory.
            unsafe { std::slice::from_raw_parts(at as *const f32, view.cols()) }.to_vec()
        })
        .collect()
}

pub(super) fn read_ints(view: &TensorView) -> Vec<i32> {
    read(view).into_iter().map(|v| v.to_bits() as i32).collect()
}

fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Numbers in -1 .. 1, always the same for a seed.
pub(super) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..20).for_each(|_| {
        next(&mut state);
    });
    (0..len).map(|_| (next(&mut state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

#[track_caller]
pub(super) fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(g) - w).abs();
        assert!(error <= tolerance * (1.0 + w.abs()), "element {i}: {g} for {w}");
    }
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs `f` on pools of 1, 2, 3 and 5 threads; all results must have the same bits.
#[track_caller]
pub(super) fn same_on_any_threads(f: impl Fn() -> Vec<f32>) {
    let on = |n| parallel::tests::on_threads(n, &f);
    let one = bits(&on(1));
    for n in [2, 3, 5] {
        assert_eq!(bits(&on(n)), one, "{n} threads");
    }
}

#[test]
fn levels_of_this_machine_are_in_order() {
    let levels = Level::available();
    assert_eq!(levels[0], Level::Plain);
    assert_eq!(*levels.last().unwrap(), Level::current());
}
