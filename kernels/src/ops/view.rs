//! Tensor views and their roots.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use evergraph_pool::driver::{DeviceOrdinal, DevicePtr};

use crate::KernelError;
use crate::quant::QuantType;

/// The allocation that a view, or a chain of views, stands on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Root {
    /// A name for people: the tensor in the file, the buffer in the step.
    pub name: String,
    /// First byte.
    pub ptr: DevicePtr,
    /// Length, bytes.
    pub bytes: usize,
    /// The device whose memory it is.
    pub device: DeviceOrdinal,
    /// The pool's allocation id as a number, so that an owner finds its slice again; 0 where there is none.
    pub allocation: u64,
    /// Of a weight that is split over devices, its rows in order, each part whole on its device; there is nothing at `ptr` then.
    pub shards: Vec<TensorView>,
}

impl Root {
    /// A root of `bytes` at `ptr`, without an allocation id.
    #[must_use]
    pub fn new(name: impl Into<String>, ptr: DevicePtr, bytes: usize, device: DeviceOrdinal) -> Arc<Self> {
        Self::with_allocation(name, ptr, bytes, device, 0)
    }

    /// A root of `bytes` at `ptr` that a pool knows as `allocation`.
    #[must_use]
    pub fn with_allocation(
        name: impl Into<String>,
        ptr: DevicePtr,
        bytes: usize,
        device: DeviceOrdinal,
        allocation: u64,
    ) -> Arc<Self> {
        Arc::new(Self { name: name.into(), ptr, bytes, device, allocation, shards: Vec::new() })
    }

    /// A weight of `bytes` whose rows are split over devices, and which ops of `device` read.
    #[must_use]
    pub fn split(name: impl Into<String>, bytes: usize, device: DeviceOrdinal, shards: Vec<TensorView>) -> Arc<Self> {
        Arc::new(Self { name: name.into(), ptr: DevicePtr::NULL, bytes, device, allocation: 0, shards })
    }

    /// Whether it is a weight that is split over devices.
    #[must_use]
    pub fn is_split(&self) -> bool {
        !self.shards.is_empty()
    }
}

/// Greatest number of dimensions.
pub const MAX_RANK: usize = 4;

/// A typed, strided window into a [`Root`]. Shapes are row-major: the last dimension is contiguous and
/// the one that quantised blocks run along. A view of a view keeps the root.
///
/// # Reuse and capture
/// A view holds an address and no ownership. The owner keeps the slice alive and declares
/// [`range`](Self::range) of it to the graph.
#[derive(Clone, PartialEq, Eq)]
pub struct TensorView {
    root: Arc<Root>,
    ty: QuantType,
    rank: usize,
    shape: [usize; MAX_RANK],
    /// Bytes from one index to the next; for the last dimension, bytes of a block.
    strides: [usize; MAX_RANK],
    offset_bytes: usize,
}

impl fmt::Debug for TensorView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}:{}{:?}", self.root.name, self.offset_bytes, self.ty, self.shape())?;
        if !self.is_contiguous() {
            write!(f, " strides {:?}", self.strides())?;
        }
        Ok(())
    }
}

impl TensorView {
    /// A contiguous tensor at the start of `root`.
    ///
    /// # Errors
    /// [`KernelError::View`] if the shape has no or too many dimensions, a zero, a number above 2^31, or
    /// does not fit; [`KernelError::BlockSize`] if rows are no whole number of blocks.
    pub fn new(root: &Arc<Root>, ty: QuantType, shape: &[usize]) -> Result<Self, KernelError> {
        Self::at(root, 0, ty, shape)
    }

    /// A contiguous tensor `offset_bytes` into `root`.
    ///
    /// # Errors
    /// As [`TensorView::new`], and for an offset that breaks the type's alignment.
    pub fn at(root: &Arc<Root>, offset_bytes: usize, ty: QuantType, shape: &[usize]) -> Result<Self, KernelError> {
        let fail = |what: String| KernelError::View { root: root.name.clone(), what };
        let rank = shape.len();
        if rank == 0 || rank > MAX_RANK || shape.iter().any(|&n| n == 0 || n > i32::MAX as usize) {
            return Err(fail(format!("shape {shape:?}: 1 to {MAX_RANK} dimensions of 1 to 2^31 - 1 are possible")));
        }
        let mut view =
            Self { root: root.clone(), ty, rank, shape: [1; MAX_RANK], strides: [0; MAX_RANK], offset_bytes };
        view.shape[..rank].copy_from_slice(shape);
        view.strides[rank - 1] = ty.type_bytes();
        let mut bytes = ty.row_bytes(shape[rank - 1])?;
        for axis in (0..rank - 1).rev() {
            view.strides[axis] = bytes;
            bytes = bytes.checked_mul(shape[axis]).ok_or_else(|| fail(format!("shape {shape:?} overflows")))?;
        }
        let end = offset_bytes.checked_add(bytes).ok_or_else(|| fail("offset overflows".to_owned()))?;
        if end > root.bytes {
            return Err(fail(format!(
                "{ty} {shape:?} at byte {offset_bytes} ends at {end}, past the {} bytes there are",
                root.bytes
            )));
        }
        if root.ptr.checked_add(end).is_none() {
            return Err(fail("address overflows".to_owned()));
        }
        if !(root.ptr.0 as usize).wrapping_add(offset_bytes).is_multiple_of(ty.align_bytes()) {
            return Err(fail(format!("{ty} at byte {offset_bytes} is not aligned to {} bytes", ty.align_bytes())));
        }
        Ok(view)
    }

    /// The allocation underneath.
    #[must_use]
    pub fn root(&self) -> &Arc<Root> {
        &self.root
    }

    /// Element type.
    #[must_use]
    pub fn ty(&self) -> QuantType {
        self.ty
    }

    /// Elements along each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Bytes from one index to the next along each dimension; the last is the size of one block.
    #[must_use]
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Elements along `axis`; 1 past the last dimension.
    #[must_use]
    pub fn dim(&self, axis: usize) -> usize {
        self.shape().get(axis).copied().unwrap_or(1)
    }

    /// Bytes from one index of `axis` to the next; 0 past the last dimension.
    #[must_use]
    pub fn stride_bytes(&self, axis: usize) -> usize {
        self.strides().get(axis).copied().unwrap_or(0)
    }

    /// Length of the last dimension.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape[self.rank - 1]
    }

    /// Product of all dimensions but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape[..self.rank - 1].iter().product()
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Never: views have at least one element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// First byte, counted from the root's.
    #[must_use]
    pub fn offset_bytes(&self) -> usize {
        self.offset_bytes
    }

    /// Address of the first element.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        // The constructors checked that the end of the view does not wrap.
        DevicePtr(self.root.ptr.0.wrapping_add(self.offset_bytes as u64))
    }

    /// From the first to the last byte, counted from the root's first (gaps between rows included).
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        let mut end = self.offset_bytes + self.cols() / self.ty.block_size() * self.ty.type_bytes();
        for axis in 0..self.rank - 1 {
            end += (self.shape[axis] - 1) * self.strides[axis];
        }
        self.offset_bytes..end
    }

    /// Whether elements follow each other without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut bytes = self.cols() / self.ty.block_size() * self.ty.type_bytes();
        for axis in (0..self.rank - 1).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != bytes {
                return false;
            }
            bytes *= self.shape[axis];
        }
        true
    }

    /// Whether both are the same elements in the same places.
    #[must_use]
    pub fn same_place(&self, other: &Self) -> bool {
        self.ptr() == other.ptr() && self.shape() == other.shape() && self.strides() == other.strides()
    }

    /// Whether the byte ranges of both touch, and no stride pattern keeps the two apart.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.range(), other.range());
        let (a0, b0) = (self.root.ptr.0 as u128, other.root.ptr.0 as u128);
        let disjoint = a0 + a.end as u128 <= b0 + b.start as u128 || b0 + b.end as u128 <= a0 + a.start as u128;
        if disjoint {
            return false;
        }
        // Column windows of one matrix (gate and up side by side): same row stride, columns apart.
        let (row_a, row_b) = (self.column_window(), other.column_window());
        if let (Some((stride_a, bytes_a)), Some((stride_b, bytes_b))) = (row_a, row_b)
            && stride_a == stride_b
            && bytes_a <= stride_a
            && bytes_b <= stride_b
        {
            let stride = stride_a as u128;
            let (start_a, start_b) = ((a0 + a.start as u128) % stride, (b0 + b.start as u128) % stride);
            let apart = |s: u128, n: usize, t: u128| (t + stride - s) % stride >= n as u128;
            return !(apart(start_a, bytes_a, start_b) && apart(start_b, bytes_b, start_a));
        }
        true
    }

    /// (row stride, bytes used of each row), where all leading dimensions fold into one row stride.
    fn column_window(&self) -> Option<(usize, usize)> {
        if self.rank < 2 {
            return None;
        }
        let mut bytes = self.cols() / self.ty.block_size() * self.ty.type_bytes();
        let mut axis = self.rank - 1;
        // Swallow dimensions that are contiguous inside a row.
        while axis > 0 && self.strides[axis - 1] == bytes {
            axis -= 1;
            bytes *= self.shape[axis];
        }
        if axis == 0 {
            return None;
        }
        let stride = self.strides[axis - 1];
        let mut span = stride * self.shape[axis - 1];
        for outer in (0..axis - 1).rev() {
            if self.strides[outer] != span {
                return None;
            }
            span *= self.shape[outer];
        }
        Some((stride, bytes))
    }

    /// Elements `start .. start + len` of `axis`.
    ///
    /// # Errors
    /// [`KernelError::View`] out of bounds; [`KernelError::BlockSize`] if a quantised row is cut inside a block.
    pub fn narrow(&self, axis: usize, start: usize, len: usize) -> Result<Self, KernelError> {
        let fits = axis < self.rank && len > 0 && start.checked_add(len).is_some_and(|end| end <= self.shape[axis]);
        if !fits {
            return Err(self.fail(format!("narrow({axis}, {start}, {len}) of {:?}", self.shape())));
        }
        let mut view = self.clone();
        view.shape[axis] = len;
        if axis == self.rank - 1 {
            for n in [start, len] {
                self.ty.row_bytes(n)?;
            }
            view.offset_bytes += start / self.ty.block_size() * self.ty.type_bytes();
        } else {
            view.offset_bytes += start * self.strides[axis];
        }
        Ok(view)
    }

    /// Index `index` of the first dimension, which goes away.
    ///
    /// # Errors
    /// [`KernelError::View`] out of bounds or for a view of one dimension.
    pub fn index(&self, index: usize) -> Result<Self, KernelError> {
        if self.rank < 2 || index >= self.shape[0] {
            return Err(self.fail(format!("index {index} of {:?}", self.shape())));
        }
        let mut view = self.clone();
        view.offset_bytes += index * self.strides[0];
        view.rank -= 1;
        for axis in 0..view.rank {
            view.shape[axis] = self.shape[axis + 1];
            view.strides[axis] = self.strides[axis + 1];
        }
        view.shape[view.rank] = 1;
        view.strides[view.rank] = 0;
        Ok(view)
    }

    /// The last dimension as `heads` dimensions of equal length: `[.., heads * d]` to `[.., heads, d]`.
    /// Strides of the others stay.
    ///
    /// # Errors
    /// [`KernelError::View`] if it does not divide or the rank is full.
    pub fn heads(&self, heads: usize) -> Result<Self, KernelError> {
        if heads == 0 || !self.cols().is_multiple_of(heads) || self.rank == MAX_RANK {
            return Err(self.fail(format!("{heads} heads of {:?}", self.shape())));
        }
        let mut view = self.clone();
        let d = self.cols() / heads;
        let bytes = self.ty.row_bytes(d)?;
        view.shape[self.rank - 1] = heads;
        view.strides[self.rank - 1] = bytes;
        view.shape[self.rank] = d;
        view.strides[self.rank] = self.ty.type_bytes();
        view.rank += 1;
        Ok(view)
    }

    /// The same elements in another shape; the view must be contiguous.
    ///
    /// # Errors
    /// [`KernelError::View`] if elements are not contiguous or their number differs.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self, KernelError> {
        let len = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if !self.is_contiguous() || len != Some(self.len()) {
            return Err(self.fail(format!("{self:?} reshaped to {shape:?}")));
        }
        Self::at(&self.root, self.offset_bytes, self.ty, shape)
    }

    /// The same elements in a copy of the root's bytes from `start_bytes` on, which is all of `root`.
    ///
    /// # Errors
    /// [`KernelError::View`] if they do not lie there, or would not be aligned.
    pub fn moved_to(&self, root: &Arc<Root>, start_bytes: usize) -> Result<Self, KernelError> {
        let range = self.range();
        let offset_bytes = range.start.checked_sub(start_bytes).filter(|_| range.end - start_bytes <= root.bytes);
        let Some(offset_bytes) = offset_bytes else {
            return Err(self.fail(format!("{self:?} in a copy of {} bytes from {start_bytes} on", root.bytes)));
        };
        let view = Self { root: Arc::clone(root), offset_bytes, ..self.clone() };
        if !view.ptr().0.is_multiple_of(view.ty.align_bytes() as u64) {
            return Err(self.fail(format!("{view:?} is not aligned to {} bytes", view.ty.align_bytes())));
        }
        Ok(view)
    }

    fn fail(&self, what: String) -> KernelError {
        KernelError::View { root: self.root.name.clone(), what }
    }
}
