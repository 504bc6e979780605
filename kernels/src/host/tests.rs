#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use evergraph_pool::driver::{DeviceOrdinal, DevicePtr};

use super::*;
use crate::ops::{Add, ExpertMatMul, Root, Scale};

fn floats(block: &HostBlock, name: &str, shape: &[usize], values: &[f32]) -> TensorView {
    let view = tensor(block, name, QuantType::F32, shape).unwrap();
    for (i, value) in values.iter().enumerate() {
        // SAFETY: inside the block, which nobody else uses here.
        unsafe { (view.ptr().0 as usize as *mut f32).add(i).write(*value) };
    }
    view
}

fn values(view: &TensorView) -> Vec<f32> {
    // SAFETY: as above.
    (0..view.len()).map(|i| unsafe { *(view.ptr().0 as usize as *const f32).add(i) }).collect()
}

#[test]
fn a_part_does_its_ops_in_order_as_often_as_one_likes() {
    let blocks = [HostBlock::new(64).unwrap(), HostBlock::new(64).unwrap()];
    let (a, b) = (floats(&blocks[0], "a", &[1, 3], &[1.0, 2.0, 3.0]), floats(&blocks[1], "b", &[1, 3], &[0.5; 3]));
    let mut plan = Plan::new();
    plan.push(Add { a: b.clone(), b: a.clone(), out: b.clone() }).unwrap();
    plan.push(Add { a: a.clone(), b: b.clone(), out: a.clone() }).unwrap();
    let part = HostPart::new(&plan, blocks.map(|block| Arc::new(block) as Keep).into()).unwrap();
    part.run().unwrap();
    assert_eq!((values(&a), values(&b)), (vec![2.5, 4.5, 6.5], vec![1.5, 2.5, 3.5]));
    part.run().unwrap();
    assert_eq!((values(&a), values(&b)), (vec![6.5, 11.5, 16.5], vec![4.0, 7.0, 10.0]));
}

#[test]
fn memory_of_a_device_is_refused_before_anything_runs() {
    let block = HostBlock::new(64).unwrap();
    let here = tensor(&block, "here", QuantType::F32, &[1, 4]).unwrap();
    let other = HostBlock::new(64).unwrap();
    let there = Root::new("there", other.ptr(), 64, DeviceOrdinal(0));
    let there = TensorView::new(&there, QuantType::F32, &[1, 4]).unwrap();
    let mut plan = Plan::new();
    let mixed = plan.push(Add { a: here.clone(), b: there.clone(), out: here });
    assert!(matches!(mixed, Err(KernelError::Placement { .. })), "{mixed:?}");
    plan.push(Scale { x: there.clone(), out: there, factor: 1.0 }).unwrap();
    let part = HostPart::new(&plan, Vec::new());
    assert!(matches!(part, Err(KernelError::Placement { op: "scale", device: HOST, .. })), "{part:?}");
}

#[test]
fn an_expert_that_is_not_there_is_a_fault_and_no_crash() {
    let blocks = [(); 4].map(|()| HostBlock::new(4096).unwrap());
    let w = floats(&blocks[0], "w", &[4, 1, 32], &[1.0; 128]);
    let x = floats(&blocks[1], "x", &[1, 32], &[2.0; 32]);
    let ids = tensor(&blocks[2], "ids", QuantType::I32, &[1, 1]).unwrap();
    let y = floats(&blocks[3], "y", &[1, 1, 1], &[-1.0]);
    let mut plan = Plan::new();
    plan.push(ExpertMatMul::new(w, x, ids.clone(), y.clone())).unwrap();
    let part = HostPart::new(&plan, Vec::new()).unwrap();
    let set = |id: i32| {
        // SAFETY: inside the block, which nobody else uses here.
        unsafe { (ids.ptr().0 as usize as *mut i32).write(id) }
    };
    for bad in [4, -2, i32::MAX] {
        set(bad);
        let fault = part.run().unwrap_err();
        assert!(fault.owner.contains("expert id out of range"), "{fault:?}");
        assert_eq!(values(&y), [-1.0]);
    }
    set(3);
    part.run().unwrap();
    assert_eq!(values(&y), [64.0]);
    // No expert, and none is missed.
    set(-1);
    part.run().unwrap();
    assert_eq!(values(&y), [0.0]);
}

#[test]
fn a_span_that_no_tensor_has_is_a_fault() {
    let spans = Spans([(1000, 1100, false), (1100, 1200, true)].into_iter().collect());
    let check = |at: u64, bytes, write| spans.check("op", DevicePtr(at), bytes, write).is_ok();
    assert!(check(1000, 100, false) && check(1150, 50, true) && check(1100, 100, false));
    assert!(
        !check(1000, 100, true) && !check(999, 2, false) && !check(1150, 51, true) && !check(u64::MAX - 1, 8, false)
    );
}

#[test]
fn what_can_not_be_had_is_none() {
    assert!(HostBlock::new(usize::MAX).is_none());
    let block = HostBlock::new(100).unwrap();
    assert!(block.root("past the end", 64, 64).is_none() && block.root("wraps", usize::MAX, 2).is_none());
    assert!(block.ptr().0.is_multiple_of(64));
}
