//! One typed description per op, tensor views and their roots, and the plan.
//!
//! Names in shapes: `T` tokens of the launch, `D` width, `H` heads, `d` head width, `E` experts, `K`
//! experts used, `V` vocabulary. Shapes are row-major (`[rows, cols]`); activations are `f32`, or 8-bit
//! integers with scales ([`Quantize`]) where a product says so.
//! Every op wants its last dimension contiguous; leading dimensions may be strided unless said otherwise.

mod check;
mod view;

mod advance;
mod argmax;
mod attention;
mod attention_heads;
mod attention_scores;
mod attention_values;
mod compress_keys;
mod compressed_attention;
mod copy;
mod elementwise;
mod expert_matmul;
mod expert_sum;
mod fill;
mod fp8_kv_quantize;
mod fused;
mod gather_experts;
mod get_rows;
mod glu;
mod hash_router;
mod hc_expand;
mod hc_split_sinkhorn;
mod hc_weighted_sum;
mod head_matmul;
mod host_turn;
mod index_scores;
mod index_top;
mod kv_store;
mod latent_heads;
mod matmul;
mod quantize;
mod residual_norm;
mod rms_norm;
mod rope;
mod rope_tail;
mod router;
mod sample;
mod share_experts;
mod soft_max;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt::Debug;

use evergraph_pool::driver::{Args, DeviceInfo, LaunchConfig, StreamHandle};
use smallvec::{SmallVec, smallvec};

pub use advance::Advance;
pub use argmax::ArgMax;
pub use attention::{Attention, Spread};
pub use attention_heads::{AttentionHeads, NewKeys};
pub use attention_scores::AttentionScores;
pub use attention_values::AttentionValues;
pub use compress_keys::CompressKeys;
pub use compressed_attention::{CompressedAttention, Entries};
pub use copy::Copy;
pub use elementwise::{Add, Mul, Scale, Softcap};
pub use expert_matmul::ExpertMatMul;
pub use expert_sum::ExpertSum;
pub use fill::Fill;
pub use fp8_kv_quantize::Fp8KvQuantize;
pub(crate) use fused::glu_args;
pub use fused::{FusedDown, FusedNorm, FusedRouter, fuse};
pub use gather_experts::GatherExperts;
pub use get_rows::GetRows;
pub use glu::{Activation, Glu};
pub use hash_router::HashRouter;
pub use hc_expand::HcExpand;
pub use hc_split_sinkhorn::{HcMix, HcSplitSinkhorn};
pub use hc_weighted_sum::HcWeightedSum;
pub use head_matmul::HeadMatMul;
pub use host_turn::{HostAsk, HostWait};
pub use index_scores::IndexScores;
pub use index_top::IndexTop;
pub use kv_store::KvStore;
pub use latent_heads::LatentHeads;
pub use matmul::MatMul;
pub use quantize::{Codes, Quantize};
pub use residual_norm::{Normed, Part, ResidualNorm};
pub use rms_norm::RmsNorm;
pub use rope::{Rope, RopeKind, Yarn};
pub use rope_tail::RopeTail;
pub use router::{GroupRank, Router, Scoring};
pub use sample::{Sample, SampleState};
pub use share_experts::{Chosen, ShareExperts};
pub use soft_max::SoftMax;
pub use view::{MAX_RANK, Root, TensorView};

pub use crate::plan::{Access, Plan};
use crate::{KernelError, Kernels};

/// A described piece of work.
pub trait Op: Any + Debug + Send + Sync {
    /// Its name, also that of its kernel.
    fn name(&self) -> &'static str;

    /// The views that it reads (those that it reads *and* writes are in both lists).
    fn reads(&self) -> Vec<&TensorView>;

    /// The views that it writes.
    fn writes(&self) -> Vec<&TensorView>;

    /// Views in which nothing of use is left, whether it writes them or, being made of several ops, does not.
    fn leftovers(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    /// The views that it reads and does not write, for a plan that brings them from another device. An op that does not say so
    /// reads nothing from elsewhere.
    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        Vec::new()
    }

    /// Whether it writes rows of a state that it also reads: what comes of it is the whole state.
    fn writes_rows(&self) -> bool {
        false
    }

    /// Whether it is the step between two devices: what it reads is on another one than what it writes.
    fn crosses(&self) -> bool {
        false
    }

    /// Whether it stands between all before it and all after it, whatever they read and write.
    fn is_barrier(&self) -> bool {
        self.writes().is_empty()
    }

    /// Whether shapes, types, layouts and scalars fit.
    ///
    /// # Errors
    /// A [`KernelError`] that names the op and the tensor.
    fn check(&self) -> Result<(), KernelError>;

    /// The launch: grid and packed arguments. Only meaningful for an op that passes [`check`](Self::check). An op that is no
    /// kernel has none, and an [`enqueue`](Self::enqueue) of its own.
    fn call(&self) -> Call {
        Call::none()
    }

    /// The kernels that do the work on a device, in order. On the host device always one, of the op's name; on others
    /// an op may choose among kernels by type and shape. Depends on shapes and capacities only, as the grids do.
    fn launches(&self, device: &DeviceInfo) -> Launches {
        let _ = device;
        single(self)
    }

    /// Checks, then launches on `stream`; a capturing stream records it.
    ///
    /// # Errors
    /// Those of [`check`](Self::check) and the driver's.
    fn launch(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        self.check()?;
        self.enqueue(kernels, stream)
    }

    /// Launches an op that was checked.
    ///
    /// # Errors
    /// The driver's.
    fn enqueue(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        enqueue(self, kernels, stream)
    }
}

/// Launches an op's kernels.
fn enqueue(op: &(impl Op + ?Sized), kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
    for mut launch in op.launches(kernels.device()) {
        // Kernels of ops wait for the one before them by themselves (`evg_begin`), where the device can.
        launch.config.programmatic = overlaps(kernels.device());
        kernels.launch(launch.kernel, &launch.config, launch.args.as_bytes(), stream)?;
    }
    Ok(())
}

/// Whether a kernel may take its place before the one before it has ended.
fn overlaps(device: &DeviceInfo) -> bool {
    device.backend == "cuda" && device.compute_capability.0 >= 9
}

/// One kernel launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The launch shape.
    pub config: LaunchConfig,
    /// The arguments, in the order of the kernel's parameters.
    pub args: Args,
}

/// One launch of the kernel of the op's name; none for an op without.
fn single<O: Op + ?Sized>(op: &O) -> Launches {
    let call = op.call();
    if call.is_none() {
        return Launches::new();
    }
    smallvec![Launch { kernel: op.name(), config: call.config, args: call.args }]
}

/// The launches of an op, in order.
pub type Launches = SmallVec<[Launch; 2]>;

/// Grid and packed arguments of a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// The launch shape; it depends on shapes and capacities only.
    pub config: LaunchConfig,
    /// The arguments, in the order of the kernel's parameters.
    pub args: Args,
}

/// Columns that a block of an elementwise kernel takes at a time.
const PIECE: usize = 1024;

impl Call {
    /// A launch of `blocks` blocks.
    fn new(blocks: usize) -> Self {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).max(1);
        Self { config: LaunchConfig::linear(blocks, 256), args: Args::new() }
    }

    /// No launch at all, for ops that are not kernels.
    fn none() -> Self {
        let mut none = Self::new(1);
        none.config.grid = [0; 3];
        none
    }

    fn is_none(&self) -> bool {
        self.config.grid == [0; 3]
    }

    /// A launch of enough blocks for `rows` rows of `cols` elements, where a block takes [`PIECE`] of them at a time.
    fn pieces(rows: usize, cols: usize) -> Self {
        // More blocks than any device runs at once are no use: kernels take further pieces in turn.
        Self::new(rows.saturating_mul(cols.div_ceil(PIECE)).min(1 << 20))
    }

    /// Threads a block: whole warps, about one per `each` of `cols` elements, at most 1024.
    fn threads(mut self, cols: usize, each: usize) -> Self {
        let threads = cols.div_ceil(each).next_multiple_of(32).clamp(32, 1024);
        self.config.block = [u32::try_from(threads).unwrap_or(1024), 1, 1];
        self
    }

    /// Dynamic shared memory a block, in floats.
    fn shared_floats(mut self, floats: usize) -> Self {
        self.config.shared_bytes = u32::try_from(floats.saturating_mul(4)).unwrap_or(u32::MAX);
        self
    }

    pub(crate) fn view(mut self, view: &TensorView) -> Self {
        self.args.ptr(view.ptr());
        self
    }

    pub(crate) fn optional(mut self, view: Option<&TensorView>) -> Self {
        self.args.ptr(view.map_or(evergraph_pool::driver::DevicePtr::NULL, TensorView::ptr));
        self
    }

    /// A dimension or count. Views have no dimension above `i32::MAX`.
    pub(crate) fn dim(mut self, value: usize) -> Self {
        self.args.u32(u32::try_from(value).unwrap_or(u32::MAX));
        self
    }

    /// A stride of `view`, in elements (blocks for quantised types are handled by whole rows: bytes).
    pub(crate) fn stride(mut self, view: &TensorView, axis: usize) -> Self {
        self.args.u64(view.stride_bytes(axis) as u64);
        self
    }

    /// A stride of a view that may not be there: 0 then.
    pub(crate) fn optional_stride(mut self, view: Option<&TensorView>, axis: usize) -> Self {
        self.args.u64(view.map_or(0, |view| view.stride_bytes(axis) as u64));
        self
    }

    /// Codes that an op may write: places and strides, in one or two outer dimensions.
    fn codes(self, codes: Option<&Codes>) -> Self {
        let (q, scales) = codes.map(|codes| (&codes.q, &codes.scales)).unzip();
        // Two dimensions have no inner stride; the third last one of scales is one only where there are four.
        let inner = |view: Option<&TensorView>, rank| if view.is_some_and(|v| v.rank() > rank) { 1 } else { 4 };
        let (q_inner, scales_inner) = (inner(q, 2), inner(scales, 3));
        let call = self.optional(q).optional_stride(q, 0).optional_stride(q, q_inner);
        call.optional(scales).optional_stride(scales, 0).optional_stride(scales, scales_inner)
    }

    fn ty(mut self, view: &TensorView) -> Self {
        self.args.u32(view.ty().id());
        self
    }

    fn int(mut self, value: i32) -> Self {
        self.args.i32(value);
        self
    }

    pub(crate) fn float(mut self, value: f32) -> Self {
        self.args.f32(value);
        self
    }
}
