//! Ops of one token that a CUDA device does in one launch.
//!
//! At one token a launch costs more than most ops do, so a step is made of few: a norm with the products that read it, a choice of
//! experts with their first products, gated units with the products that read them. [`fuse`] finds such groups in a list of ops; whoever
//! makes the list needs not know. A fused op is its parts: they say what it reads and writes, they check it, and on the host
//! device, where a launch costs nothing, they are what runs.
//!
//! An op may be moved to another of its group only past ops that it has nothing to do with: neither writes what the other
//! reads or writes. What goes from part to part inside a group (codes of a gated unit) is written nowhere, and therefore must
//! not be read by anybody else.

mod down;
mod norm;
mod router;
#[cfg(test)]
mod tests;

use std::any::Any;

use evergraph_pool::driver::DeviceInfo;

pub use down::FusedDown;
pub use norm::FusedNorm;
pub use router::FusedRouter;

use super::{
    Activation, Call, ExpertMatMul, ExpertSum, Glu, MatMul, Op, Quantize, ResidualNorm, RmsNorm, Router, TensorView,
};
use crate::quant::QuantType;

/// How far behind the first op of a group its others are looked for.
const SIGHT: usize = 16;

/// The types of weights that fused kernels read. `FOR_FUSED_TYPES` of `flow.cuh` has the same.
const TYPES: [QuantType; 5] = [QuantType::Q4_0, QuantType::Q8_0, QuantType::Q4_K, QuantType::Q5_K, QuantType::Q6_K];

/// Puts ops into groups, for a device that has kernels for them; the others stay as they are, all in an order that gives the
/// same results. `counter` is one I32, zero, that all of the stream may use in turn.
#[must_use]
pub fn fuse(ops: Vec<Box<dyn Op>>, device: &DeviceInfo, counter: &TensorView) -> Vec<Box<dyn Op>> {
    if device.backend != "cuda" {
        return ops;
    }
    let mut list: Vec<Option<Box<dyn Op>>> = ops.into_iter().map(Some).collect();
    for start in 0..list.len() {
        norm::find(&mut list, start, device, counter);
        router::find(&mut list, start, device);
        down::find(&mut list, start, device);
    }
    let mut list: Vec<_> = list.into_iter().flatten().collect();
    down::join(&mut list, device);
    list
}

/// An op of this type.
#[allow(clippy::borrowed_box, reason = "what lists hold")]
fn cast<T: Op>(op: &Box<dyn Op>) -> Option<&T> {
    let any: &dyn Any = &**op;
    any.downcast_ref()
}

/// The ops behind `start` that are still there, with their places, as far as groups are looked for.
fn behind(list: &[Option<Box<dyn Op>>], start: usize) -> impl Iterator<Item = (usize, &Box<dyn Op>)> {
    let rest = list.iter().enumerate().skip(start + 1);
    rest.filter_map(|(place, op)| Some((place, op.as_ref()?))).take(SIGHT)
}

/// Whether two ops may change places.
fn commute(a: &dyn Op, b: &dyn Op) -> bool {
    if a.is_barrier() || b.is_barrier() {
        return false;
    }
    let touches = |views: &[&TensorView], others: &[&TensorView]| {
        views.iter().any(|view| others.iter().any(|other| view.overlaps(other)))
    };
    let (a_reads, a_writes, b_reads, b_writes) = (a.reads(), a.writes(), b.reads(), b.writes());
    !touches(&a_writes, &b_reads) && !touches(&a_writes, &b_writes) && !touches(&a_reads, &b_writes)
}

/// Whether the op at `place` may come right behind that at `start`: past all that is between them but `taken`.
fn may_come(list: &[Option<Box<dyn Op>>], start: usize, place: usize, taken: &[usize]) -> bool {
    let Some(op) = &list[place] else { return false };
    (start + 1..place)
        .filter(|between| !taken.contains(between))
        .all(|between| list[between].as_ref().is_none_or(|between| commute(&**op, &**between)))
}

/// Whether the op at `start` may come right before that at `place`.
fn may_wait(list: &[Option<Box<dyn Op>>], start: usize, place: usize) -> bool {
    let Some(op) = &list[start] else { return false };
    (start + 1..place).all(|between| list[between].as_ref().is_none_or(|between| commute(&**op, &**between)))
}

/// Whether nobody behind `place` reads of `view` what is there now: it is written anew before.
fn is_dead(list: &[Option<Box<dyn Op>>], place: usize, view: &TensorView) -> bool {
    let mut written: Vec<TensorView> = Vec::new();
    let covers = |by: &TensorView, what: &TensorView| {
        let (own, other) = (by.range(), what.range());
        by.root() == what.root() && by.is_contiguous() && own.start <= other.start && other.end <= own.end
    };
    for op in list.iter().skip(place + 1).flatten() {
        let anew = |read: &TensorView| written.iter().any(|written| covers(written, read));
        if op.reads().into_iter().any(|read| read.overlaps(view) && !anew(read)) {
            return false;
        }
        for to in op.writes().into_iter().filter(|to| to.overlaps(view)) {
            if covers(to, view) {
                return true;
            }
            written.push(to.clone());
        }
    }
    true
}

/// The number by which kernels know a function on a gate.
fn activation(of: Activation) -> usize {
    match of {
        Activation::GeluTanh => 0,
        Activation::Silu => 1,
    }
}

/// The number and the limit of a gated unit for a kernel that may do without (`NO_GLU` in `gated.cuh`).
pub(crate) fn glu_args(call: Call, glu: Option<&Glu>) -> Call {
    let limit = glu.and_then(|glu| glu.limit).unwrap_or(f32::INFINITY);
    call.dim(glu.map_or(u32::MAX as usize, |glu| activation(glu.activation))).float(limit)
}

/// Whether fused kernels read weights of this type.
fn has_kernels(w: &TensorView) -> bool {
    TYPES.contains(&w.ty())
}

/// Whether the device can do a group, and has the shared memory that the kernel takes, beside a little of its own.
fn is_able(group: &dyn Op, device: &DeviceInfo) -> bool {
    let own = 2048;
    group.check().is_ok()
        && group.launches(device).iter().all(|launch| launch.config.shared_bytes + own <= device.shared_bytes)
}

/// Whether 16-byte accesses may be used for a row: no gaps, at a multiple of 16.
fn is_plain(view: &TensorView) -> bool {
    view.is_contiguous() && view.ptr().0.is_multiple_of(16)
}

/// Whether no op writes what one before it reads or writes: then all may run at once, but for what goes from one to the next.
#[allow(clippy::borrowed_box, reason = "what lists hold")]
fn are_apart(ops: &[Box<dyn Op>]) -> bool {
    ops.iter().enumerate().all(|(index, op)| {
        let writes = op.writes();
        let free = |views: Vec<&TensorView>| !views.iter().any(|view| writes.iter().any(|w| w.overlaps(view)));
        ops[..index].iter().all(|before| free(before.reads()) && free(before.writes()))
    })
}

/// The views of several ops, each once.
fn all<'a>(lists: impl IntoIterator<Item = Vec<&'a TensorView>>) -> Vec<&'a TensorView> {
    let mut views: Vec<&TensorView> = Vec::new();
    for view in lists.into_iter().flatten() {
        if !views.contains(&view) {
            views.push(view);
        }
    }
    views
}
