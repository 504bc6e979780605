//! Errors of ops and of the kernel module.

use evergraph_pool::driver::{DeviceOrdinal, DriverError};

use crate::quant::QuantType;

/// What can go wrong before a kernel runs. Bad *contents* of device memory (an index out of range, an
/// address that is not mapped) come later, as the device's sticky fault.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A tensor has the wrong shape.
    #[error("{op}: {tensor} must be {expected}, found {found:?}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The tensor's role in the op and the name of its root.
        tensor: String,
        /// What was wanted.
        expected: String,
        /// What was given.
        found: Vec<usize>,
    },
    /// A tensor has the wrong element type.
    #[error("{op}: {tensor} must be {expected}, found {found}")]
    Type {
        /// The op.
        op: &'static str,
        /// The tensor's role in the op and the name of its root.
        tensor: String,
        /// What was wanted.
        expected: &'static str,
        /// What was given.
        found: QuantType,
    },
    /// A tensor's strides or alignment do not suit the op.
    #[error("{op}: {tensor}: {what}")]
    Layout {
        /// The op.
        op: &'static str,
        /// The tensor's role in the op and the name of its root.
        tensor: String,
        /// What is off.
        what: &'static str,
    },
    /// Two tensors share bytes where the op can not have it.
    #[error("{op}: {written} is written and overlaps {other}")]
    Overlap {
        /// The op.
        op: &'static str,
        /// The tensor that is written.
        written: String,
        /// The one that it overlaps.
        other: String,
    },
    /// A scalar is out of range.
    #[error("{op}: {name} is {value}, must be {expected}")]
    Parameter {
        /// The op.
        op: &'static str,
        /// The scalar.
        name: &'static str,
        /// Its value.
        value: String,
        /// What was wanted.
        expected: &'static str,
    },
    /// A view that can not be made.
    #[error("view of {root}: {what}")]
    View {
        /// Name of the root allocation.
        root: String,
        /// What is off.
        what: String,
    },
    /// An op would touch memory of a device other than the one that it writes to.
    #[error("{op} writes on device {device}{writes}, but {tensor} lives on device {found}; copy it there first")]
    Placement {
        /// The op.
        op: &'static str,
        /// The device of the buffer that the op writes.
        device: DeviceOrdinal,
        /// What it writes there, in brackets, or nothing.
        writes: String,
        /// The tensor that is elsewhere, with its root.
        tensor: String,
        /// Where it is.
        found: DeviceOrdinal,
    },
    /// An op would read a weight that is split over devices as if it were in one place.
    #[error("{op} reads {tensor}, which is split over devices; ops that take such weights: {accepted}")]
    SplitWeight {
        /// The op.
        op: &'static str,
        /// The tensor, with its root.
        tensor: String,
        /// The ops that do, by name.
        accepted: String,
    },
    /// A type that is known by name but has no code here.
    #[error("type {0} is not supported")]
    UnsupportedType(QuantType),
    /// A row or buffer whose length does not fit its type's blocks.
    #[error("{what}: {found} does not fit {ty} (blocks of {block_size} elements, {type_bytes} bytes)")]
    BlockSize {
        /// Which length.
        what: &'static str,
        /// Its value.
        found: usize,
        /// The type.
        ty: QuantType,
        /// Elements a block.
        block_size: usize,
        /// Bytes a block.
        type_bytes: usize,
    },
    /// The thread pool is already running with another size.
    #[error("thread pool: {0}")]
    Threads(String),
    /// The loaded module has no such kernel.
    #[error("the kernel module has no function {0}")]
    MissingKernel(&'static str),
    /// cuBLAS refused a product.
    #[error("{0}")]
    Product(String),
    /// The kernels could not be compiled.
    #[error(transparent)]
    Compiler(#[from] crate::cuda::NvrtcError),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
