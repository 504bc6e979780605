//! Arguments and checked windows of device memory.

use evergraph_pool::driver::host::KernelContext;
use evergraph_pool::driver::{DevicePtr, Fault};

use crate::quant::QuantType;

/// Reads a kernel's arguments in the order of its parameters.
pub(super) struct Reader<'b, 'a> {
    ctx: &'b KernelContext<'a>,
    next: usize,
}

impl<'b, 'a> Reader<'b, 'a> {
    pub(super) fn new(ctx: &'b KernelContext<'a>) -> Self {
        Self { ctx, next: 0 }
    }

    fn index(&mut self) -> usize {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn ptr(&mut self) -> Result<DevicePtr, Fault> {
        let index = self.index();
        self.ctx.ptr(index)
    }

    /// A pointer that may be null.
    pub(super) fn optional(&mut self) -> Result<Option<DevicePtr>, Fault> {
        Ok(Some(self.ptr()?).filter(|&p| p != DevicePtr::NULL))
    }

    /// A dimension, count or flag.
    pub(super) fn dim(&mut self) -> Result<usize, Fault> {
        let index = self.index();
        Ok(self.ctx.arg::<u32>(index)? as usize)
    }

    /// A stride, bytes.
    pub(super) fn stride(&mut self) -> Result<usize, Fault> {
        let index = self.index();
        Ok(self.ctx.arg::<u64>(index)? as usize)
    }

    pub(super) fn float(&mut self) -> Result<f32, Fault> {
        let index = self.index();
        self.ctx.arg::<f32>(index)
    }

    pub(super) fn int(&mut self) -> Result<i32, Fault> {
        let index = self.index();
        self.ctx.arg::<i32>(index)
    }

    pub(super) fn ty(&mut self) -> Result<QuantType, Fault> {
        let id = self.dim()?;
        let ty = u32::try_from(id).ok().and_then(QuantType::from_id);
        ty.ok_or_else(|| self.ctx.fault(DevicePtr::NULL, 0, false, "argument is no element type"))
    }
}

/// A number that device memory may hold.
pub(super) trait Cell: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::Immutable + Send + Sync {}
impl Cell for f32 {}
impl Cell for i32 {}
impl Cell for u16 {}
impl Cell for u8 {}
impl Cell for i8 {}

/// Rows of `cols` numbers in one or two strided dimensions, checked as one span: mapped, accessible, aligned.
///
/// It hands out one row at a time, never a slice over the gaps between rows, which belong to other tensors.
#[derive(Clone, Copy)]
pub(super) struct Rows<T> {
    base: *mut T,
    dims: [usize; 2],
    cols: usize,
    strides: [usize; 2],
    writable: bool,
}

// SAFETY: a window into device memory, which any thread may touch; who may touch which row when is said where
// rows are handed out.
unsafe impl<T: Cell> Send for Rows<T> {}
// SAFETY: as above.
unsafe impl<T: Cell> Sync for Rows<T> {}

impl<T: Cell> Rows<T> {
    fn checked(
        ctx: &KernelContext<'_>,
        ptr: DevicePtr,
        dims: [usize; 2],
        cols: usize,
        strides: [usize; 2],
        writable: bool,
    ) -> Result<Self, Fault> {
        let far = |n: usize, stride: usize| n.saturating_sub(1).checked_mul(stride);
        let bytes = far(dims[0], strides[0])
            .and_then(|a| a.checked_add(far(dims[1], strides[1])?))
            .and_then(|a| a.checked_add(cols.checked_mul(size_of::<T>())?))
            .ok_or_else(|| ctx.fault(ptr, usize::MAX, writable, "size overflow"))?;
        let aligned = strides.iter().all(|s| s.is_multiple_of(size_of::<T>()));
        if !aligned {
            return Err(ctx.fault(ptr, bytes, writable, "misaligned stride"));
        }
        if dims.contains(&0) || cols == 0 {
            return Ok(Self { base: std::ptr::dangling_mut(), dims: [0, 0], cols: 0, strides, writable });
        }
        ctx.span::<T>(ptr, bytes.div_ceil(size_of::<T>()), writable)?;
        Ok(Self { base: ptr.0 as usize as *mut T, dims, cols, strides, writable })
    }

    /// `[rows, cols]` for reading.
    pub(super) fn read(
        ctx: &KernelContext<'_>,
        ptr: DevicePtr,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Result<Self, Fault> {
        Self::checked(ctx, ptr, [rows, 1], cols, [stride, 0], false)
    }

    /// `[rows, cols]` for writing and reading.
    pub(super) fn write(
        ctx: &KernelContext<'_>,
        ptr: DevicePtr,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Result<Self, Fault> {
        Self::checked(ctx, ptr, [rows, 1], cols, [stride, 0], true)
    }

    /// `[a, b, cols]` for reading.
    pub(super) fn read3(
        ctx: &KernelContext<'_>,
        ptr: DevicePtr,
        dims: [usize; 2],
        cols: usize,
        strides: [usize; 2],
    ) -> Result<Self, Fault> {
        Self::checked(ctx, ptr, dims, cols, strides, false)
    }

    /// `[a, b, cols]` for writing and reading.
    pub(super) fn write3(
        ctx: &KernelContext<'_>,
        ptr: DevicePtr,
        dims: [usize; 2],
        cols: usize,
        strides: [usize; 2],
    ) -> Result<Self, Fault> {
        Self::checked(ctx, ptr, dims, cols, strides, true)
    }

    /// `[rows, cols]` over a buffer of the body itself.
    pub(super) fn over(buffer: &mut [T], rows: usize, cols: usize) -> Self {
        assert!(rows.checked_mul(cols).is_some_and(|n| n <= buffer.len()), "rows outside the buffer");
        Self { base: buffer.as_mut_ptr(), dims: [rows, 1], cols, strides: [cols * size_of::<T>(), 0], writable: true }
    }

    fn start(&self, a: usize, b: usize) -> *mut T {
        assert!(a < self.dims[0] && b < self.dims[1], "row outside the checked window");
        self.base.wrapping_byte_add(a * self.strides[0] + b * self.strides[1])
    }

    /// Row `(a, b)`.
    ///
    /// # Safety
    /// Nothing writes the row while the slice is used.
    pub(super) unsafe fn row<'r>(&self, a: usize, b: usize) -> &'r [T] {
        let start = self.start(a, b);
        // SAFETY: inside the span that was checked when the window was made; the caller vouches for the absence of
        // writers. The memory outlives the launch.
        unsafe { std::slice::from_raw_parts(start, self.cols) }
    }

    /// Row `(a, b)`, for writing.
    ///
    /// # Safety
    /// Nothing else touches the row while the slice is used.
    pub(super) unsafe fn row_mut<'r>(&self, a: usize, b: usize) -> &'r mut [T] {
        assert!(self.writable, "window opened for reading");
        let start = self.start(a, b);
        // SAFETY: inside the span that was checked for writing; the caller vouches for exclusivity.
        unsafe { std::slice::from_raw_parts_mut(start, self.cols) }
    }

    /// Elements `start .. start + len` of row `(a, b)`, for writing.
    ///
    /// # Safety
    /// Nothing else touches them while the slice is used.
    pub(super) unsafe fn part_mut<'r>(&self, a: usize, b: usize, start: usize, len: usize) -> &'r mut [T] {
        assert!(self.writable && start <= self.cols && len <= self.cols - start, "part outside the checked window");
        let first = self.start(a, b).wrapping_add(start);
        // SAFETY: inside the span that was checked for writing; the caller vouches for exclusivity.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }

    /// Whether both windows start at the same address: an op in place (ops check that the rest agrees).
    pub(super) fn in_place(&self, other: &Self) -> bool {
        self.base == other.base
    }
}

/// A few numbers in device memory, copied out at once.
pub(super) fn load<T: Cell + Copy>(ctx: &KernelContext<'_>, ptr: DevicePtr, len: usize) -> Result<Vec<T>, Fault> {
    // SAFETY: stream order keeps writers away while the kernel runs; the slice does not leave this function.
    Ok(unsafe { ctx.slice::<T>(ptr, len)? }.to_vec())
}
