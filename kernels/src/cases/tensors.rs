//! Tensors with known contents on a device.

#![allow(unsafe_code)]

use evergraph_pool::driver::DevicePtr;

use super::Bench;
use crate::KernelError;
use crate::ops::{Codes, Quantize, Root, TensorView};
use crate::quant::{QuantType, quantize};

/// Bytes before and after every tensor that nobody may touch. As floats they are NaN.
pub(super) const MARGIN: usize = 256;
pub(super) const MARGIN_BYTE: u8 = 0xFF;

/// One allocation: margin, tensor, margin.
pub(super) struct Allocation {
    ptr: DevicePtr,
    pub(super) before: Vec<u8>,
    pub(super) after: Vec<u8>,
}

impl Allocation {
    /// Where a view into it starts, counted from the first byte; none if it is another's.
    pub(super) fn offset(&self, view: &TensorView) -> Option<usize> {
        let offset = view.ptr().0.checked_sub(self.ptr.0)? as usize;
        (offset < self.before.len()).then_some(offset)
    }
}

/// Makes the tensors of a case; the same calls make the same contents on any device. Freed on drop.
pub(crate) struct Tensors<'b> {
    bench: &'b Bench,
    pub(super) allocations: Vec<Allocation>,
    seed: u64,
}

impl<'b> Tensors<'b> {
    pub(crate) fn new(bench: &'b Bench) -> Result<Self, KernelError> {
        bench.driver().bind()?;
        Ok(Self { bench, allocations: Vec::new(), seed: 0 })
    }

    /// A tensor of these bytes.
    pub(crate) fn bytes(&mut self, ty: QuantType, shape: &[usize], bytes: &[u8]) -> Result<TensorView, KernelError> {
        let driver = self.bench.driver();
        let mut before = vec![MARGIN_BYTE; bytes.len() + 2 * MARGIN];
        before[MARGIN..MARGIN + bytes.len()].copy_from_slice(bytes);
        let ptr = driver.malloc(before.len())?;
        self.allocations.push(Allocation { ptr, before, after: Vec::new() });
        let before = &self.allocations[self.allocations.len() - 1].before;
        // SAFETY: the host buffer lives until the copy is done, which the wait sees to.
        unsafe { driver.memcpy_htod(ptr, before.as_ptr(), before.len(), self.bench.stream())? };
        driver.stream_synchronize(self.bench.stream())?;
        let name = format!("tensor {}", self.allocations.len());
        let start = DevicePtr(ptr.0.wrapping_add(MARGIN as u64));
        TensorView::new(&Root::new(name, start, bytes.len(), driver.info().ordinal), ty, shape)
    }

    /// An F32 tensor of these values.
    pub(crate) fn floats(&mut self, shape: &[usize], values: &[f32]) -> Result<TensorView, KernelError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.bytes(QuantType::F32, shape, &bytes)
    }

    /// An I32 tensor of these values.
    pub(crate) fn ints(&mut self, shape: &[usize], values: &[i32]) -> Result<TensorView, KernelError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.bytes(QuantType::I32, shape, &bytes)
    }

    /// A tensor of any type that has a quantiser.
    pub(crate) fn typed(&mut self, ty: QuantType, shape: &[usize], values: &[f32]) -> Result<TensorView, KernelError> {
        self.bytes(ty, shape, &quantize(ty, values)?)
    }

    /// Numbers in -1 .. 1, other ones at each call.
    pub(crate) fn random(&mut self, len: usize) -> Vec<f32> {
        self.seed += 1;
        let mut state = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..20).for_each(|_| {
            next();
        });
        (0..len).map(|_| next()).collect()
    }

    /// An F32 tensor of numbers in -1 .. 1.
    pub(crate) fn noise(&mut self, shape: &[usize]) -> Result<TensorView, KernelError> {
        let values = self.random(shape.iter().product());
        self.floats(shape, &values)
    }

    /// An F32 tensor inside one whose rows are `gap` columns longer, from column `start` on. The rest is NaN.
    pub(crate) fn strided(
        &mut self,
        shape: &[usize],
        values: &[f32],
        start: usize,
        gap: usize,
    ) -> Result<TensorView, KernelError> {
        let last = shape.len().saturating_sub(1);
        let cols = shape.get(last).copied().unwrap_or(1);
        let mut wide = vec![f32::NAN; values.len() / cols.max(1) * (cols + gap)];
        for (to, from) in wide.chunks_exact_mut(cols + gap).zip(values.chunks_exact(cols.max(1))) {
            to[start..start + cols].copy_from_slice(from);
        }
        let mut wide_shape = shape.to_vec();
        wide_shape[last] = cols + gap;
        self.floats(&wide_shape, &wide)?.narrow(last, start, cols)
    }

    /// Noise as [`strided`](Self::strided).
    pub(crate) fn strided_noise(
        &mut self,
        shape: &[usize],
        start: usize,
        gap: usize,
    ) -> Result<TensorView, KernelError> {
        let values = self.random(shape.iter().product());
        self.strided(shape, &values, start, gap)
    }

    /// An F32 tensor without numbers, to be written.
    pub(crate) fn output(&mut self, shape: &[usize]) -> Result<TensorView, KernelError> {
        self.floats(shape, &vec![f32::NAN; shape.iter().product()])
    }

    /// As [`output`](Self::output), with gaps.
    pub(crate) fn strided_output(
        &mut self,
        shape: &[usize],
        start: usize,
        gap: usize,
    ) -> Result<TensorView, KernelError> {
        self.strided(shape, &vec![f32::NAN; shape.iter().product()], start, gap)
    }

    /// Codes for something of this shape, to be written, with gaps between rows; codes start `start` bytes into theirs.
    pub(crate) fn codes(&mut self, shape: &[usize], start: usize) -> Result<Codes, KernelError> {
        let last = shape.len() - 1;
        let (cols, groups) = (shape[last], shape[last] / Quantize::GROUP);
        let (mut wide, mut wide_scales) = (shape.to_vec(), shape.to_vec());
        wide[last] = cols + 4;
        wide_scales[last] = groups + 1;
        wide_scales.push(2);
        let q = self.bytes(QuantType::I8, &wide, &vec![0x55; wide.iter().product()])?.narrow(last, start, cols)?;
        let scales = self.output(&wide_scales)?.narrow(last, 1, groups)?;
        Ok(Codes { q, scales })
    }

    /// Codes without gaps.
    pub(crate) fn whole_codes(&mut self, shape: &[usize]) -> Result<Codes, KernelError> {
        let last = shape.len() - 1;
        let groups = shape[last] / Quantize::GROUP;
        let q = self.bytes(QuantType::I8, shape, &vec![0x55; shape.iter().product()])?;
        Ok(Codes { q, scales: self.output(&[&shape[..last], &[groups, 2]].concat())? })
    }

    /// The bytes of all tensors as they are now.
    #[cfg(test)]
    pub(crate) fn contents(&mut self) -> Result<Vec<Vec<u8>>, KernelError> {
        self.fetch()?;
        Ok(self.allocations.iter().map(|allocation| allocation.after.clone()).collect())
    }

    /// Copies all contents back from the device.
    pub(super) fn fetch(&mut self) -> Result<(), KernelError> {
        let (driver, stream) = (self.bench.driver(), self.bench.stream());
        for allocation in &mut self.allocations {
            allocation.after = vec![0; allocation.before.len()];
            let to = &mut allocation.after;
            // SAFETY: the buffer lives until the copy is done, which the wait sees to.
            unsafe { driver.memcpy_dtoh(to.as_mut_ptr(), allocation.ptr, to.len(), stream)? };
            driver.stream_synchronize(stream)?;
        }
        Ok(())
    }
}

impl Drop for Tensors<'_> {
    fn drop(&mut self) {
        let driver = self.bench.driver();
        if driver.bind().is_ok() {
            // What a device that died still holds goes with it.
            let _ = driver.stream_synchronize(self.bench.stream());
            self.allocations.iter().for_each(|a| drop(driver.free(a.ptr)));
        }
    }
}
