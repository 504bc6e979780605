#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evergraph_pool::driver::host::{HostConfig, HostMachine};
use evergraph_pool::driver::{DeviceOrdinal, DevicePtr, DynDriver};
use evergraph_pool::{Pool, PoolConfig, Stream};
use proptest::prelude::*;

use super::*;
use crate::ops::{Add, Attention, AttentionHeads, Copy, Fill, KvStore, MatMul, NewKeys, Scale};
use crate::quant::QuantType;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Memory that nobody touches: a plan is made of addresses.
fn root(name: &str, bytes: usize, device: u32) -> Arc<Root> {
    let place = NEXT.fetch_add(1, Ordering::Relaxed);
    Root::new(name, DevicePtr(place << 32), bytes, DeviceOrdinal(device))
}

fn floats(name: &str, shape: &[usize], device: u32) -> TensorView {
    TensorView::new(&root(name, shape.iter().product::<usize>() * 4, device), QuantType::F32, shape).unwrap()
}

fn numbers(name: &str, shape: &[usize], device: u32) -> TensorView {
    TensorView::new(&root(name, shape.iter().product::<usize>() * 4, device), QuantType::I32, shape).unwrap()
}

fn place(plan: &mut Plan, op: impl Op + 'static) -> Result<(), KernelError> {
    plan.place(op, &mut |name, bytes, device| Ok(root(&format!("{name} on {device}"), bytes, device.0)))
}

fn names(plan: &Plan) -> Vec<(&'static str, u32)> {
    let device = |index| plan.device(index).unwrap().0;
    plan.ops().iter().enumerate().map(|(index, op)| (op.name(), device(index))).collect()
}

/// Everything that step `step` comes after, through any number of others.
fn before(order: &[After], step: usize) -> Vec<bool> {
    let mut seen = vec![false; order.len()];
    let mut open = vec![step];
    while let Some(at) = open.pop() {
        for &earlier in &order[at] {
            if !std::mem::replace(&mut seen[earlier], true) {
                open.push(earlier);
            }
        }
    }
    seen
}

/// The bug that this is all about: a row write went where its rows were made, and wrote through a foreign pointer.
#[test]
fn a_row_write_runs_where_the_cache_is() {
    let cache = floats("cache", &[8, 16], 1);
    // A view of a view of a reshape.
    let view = cache.reshape(&[128]).unwrap().reshape(&[8, 1, 16]).unwrap().reshape(&[8, 16]).unwrap();
    let store =
        KvStore { src: floats("rows", &[2, 16], 0), cache: view, positions: numbers("at", &[2], 0), ring: false };
    let refused = Plan::new().push(store.clone()).unwrap_err();
    let words = refused.to_string();
    for word in ["kv_store", "device 1", "cache", "rows", "device 0", "copy it there first"] {
        assert!(words.contains(word), "{words}");
    }
    let mut plan = Plan::new();
    place(&mut plan, store).unwrap();
    assert_eq!(names(&plan), [("peer_copy", 1), ("peer_copy", 1), ("kv_store", 1)]);
    assert_eq!(plan.order()[2].as_slice(), [0, 1]);
}

/// The other half: what came of the row write was a view of some rows, and a later step read only those in order.
#[test]
fn the_whole_cache_is_what_comes_of_a_row_write() {
    let mut plan = Plan::new();
    let cache = floats("cache", &[8, 16], 0);
    let at = numbers("at", &[2], 0);
    // Rows 0 to 3 only are said to be written, and rows 4 to 7 only are read.
    let some = cache.narrow(0, 0, 4).unwrap();
    plan.push(KvStore { src: floats("rows", &[2, 16], 0), cache: some, positions: at, ring: false }).unwrap();
    let (others, columns) = (cache.narrow(0, 4, 4).unwrap(), cache.narrow(1, 3, 5).unwrap());
    plan.push(Copy { src: others, dst: floats("rows read", &[4, 16], 0) }).unwrap();
    plan.push(Copy { src: columns, dst: floats("columns read", &[8, 5], 0) }).unwrap();
    let order = plan.order();
    assert_eq!((order[1].as_slice(), order[2].as_slice()), ([0].as_slice(), [0].as_slice()));
    // A write that is no row write leaves other rows alone.
    let mut plan = Plan::new();
    plan.push(Fill { x: cache.narrow(0, 0, 4).unwrap(), value: 0.0 }).unwrap();
    plan.push(Copy { src: cache.narrow(0, 4, 4).unwrap(), dst: floats("rows read", &[4, 16], 0) }).unwrap();
    assert!(plan.order()[1].is_empty());
}

/// Attention of a layer on device 1 whose queries and keys were made on device 0: each comes over once.
#[test]
fn a_source_comes_over_once_for_all_who_read_it() {
    let mut plan = Plan::new();
    let (q, k) = (floats("q", &[2, 4, 8], 1), floats("k", &[2, 2, 8], 0));
    let at = numbers("at", &[2], 0);
    let (k_cache, v_cache) = (floats("keys", &[16, 2, 8], 1), floats("values", &[16, 2, 8], 1));
    let norm = floats("norm", &[8], 1);
    let new = NewKeys {
        k: k.clone(),
        k_norm: norm.clone(),
        v: k,
        norm_values: true,
        k_cache: k_cache.clone(),
        v_cache: v_cache.clone(),
        ring: false,
    };
    let heads = AttentionHeads {
        q: q.clone(),
        q_norm: norm,
        new: Some(new),
        positions: at.clone(),
        eps: 1e-6,
        dims: 8,
        base: 1e4,
        scale: 1.0,
        factors: None,
    };
    place(&mut plan, heads).unwrap();
    let out = floats("attention", &[2, 4, 8], 1);
    let attention = Attention {
        q,
        k: k_cache,
        v: v_cache,
        positions: at,
        out,
        scale: 1.0,
        window: None,
        softcap: None,
        sinks: None,
        ring: false,
        codes: None,
        spread: None,
    };
    place(&mut plan, attention).unwrap();
    // The positions and the keys, which are values too.
    let ran = [("peer_copy", 1), ("peer_copy", 1), ("attention_heads", 1), ("attention", 1)];
    assert_eq!(names(&plan), ran);
    assert!(plan.order()[3].contains(&2));
}

#[test]
fn a_source_that_was_written_since_comes_over_anew() {
    let mut plan = Plan::new();
    let x = floats("x", &[2, 16], 0);
    let (y, z) = (floats("y", &[2, 16], 1), floats("z", &[2, 16], 1));
    let read = |x: &TensorView, out: &TensorView| Scale { x: x.clone(), out: out.clone(), factor: 2.0 };
    place(&mut plan, read(&x, &y)).unwrap();
    place(&mut plan, read(&x, &z)).unwrap();
    plan.push(Fill { x: x.clone(), value: 1.0 }).unwrap();
    place(&mut plan, read(&x, &y)).unwrap();
    assert_eq!(
        names(&plan),
        [("peer_copy", 1), ("scale", 1), ("scale", 1), ("fill", 0), ("peer_copy", 1), ("scale", 1),]
    );
    // The old copy is read before the new bytes come, and those come after they are made.
    let order = plan.order();
    assert!(order[3].contains(&0) && order[4].contains(&3));
}

/// What one op made comes as a whole: rows of it that blocks read one after the other are there already.
#[test]
fn what_one_op_made_comes_over_as_a_whole() {
    let mut plan = Plan::new();
    let all = floats("all", &[1, 64], 0);
    plan.push(Fill { x: all.clone(), value: 1.0 }).unwrap();
    for part in 0..4 {
        let x = all.narrow(1, part * 16, 16).unwrap();
        place(&mut plan, Scale { x, out: floats("out", &[1, 16], 1), factor: 2.0 }).unwrap();
    }
    assert_eq!(names(&plan).iter().filter(|(name, _)| *name == "peer_copy").count(), 1);
}

#[test]
fn what_can_not_be_done_on_a_device_is_refused() {
    let mut plan = Plan::new();
    // Of the host, nothing comes by itself.
    let host = floats("on the host", &[1, 16], HOST.0);
    let error = place(&mut plan, Scale { x: host, out: floats("out", &[1, 16], 1), factor: 1.0 }).unwrap_err();
    assert!(error.to_string().contains("on the host"), "{error}");
    // An op that writes on two devices runs on neither.
    let x = floats("x", &[1, 32], 0);
    let (q, scales) =
        (TensorView::new(&root("codes", 32, 0), QuantType::I8, &[1, 32]).unwrap(), floats("scales", &[1, 1, 2], 1));
    let error = place(&mut plan, crate::ops::Quantize { x, q, scales }).unwrap_err();
    let words = error.to_string();
    assert!(words.contains("quantize") && words.contains("scales") && words.contains("device 1"), "{words}");
    assert!(plan.ops().is_empty());
    // A copy between devices is no way around: it names both.
    let (here, there) = (floats("here", &[4], 0), floats("there", &[4], 1));
    assert!(plan.push(PeerCopy { src: here.clone(), dst: floats("also here", &[4], 0) }).is_err());
    assert!(plan.push(PeerCopy { src: there, dst: here }).is_ok());
}

#[test]
fn a_split_weight_is_read_by_nobody_as_a_whole() {
    let shards = vec![floats("upper rows", &[2, 16], 0), floats("lower rows", &[2, 16], 1)];
    let root = Root::split("weight", 256, DeviceOrdinal(0), shards);
    let w = TensorView::new(&root, QuantType::F32, &[4, 16]).unwrap();
    let product = MatMul::new(w, floats("x", &[1, 16], 0), floats("y", &[1, 4], 0));
    let words = Plan::new().push(product).unwrap_err().to_string();
    assert!(words.contains("weight") && words.contains("matmul") && words.contains("split"), "{words}");
}

/// One table says it, and the five ops of DeepSeek V4 stand in it, that once were refused and slid to the processor.
#[test]
fn the_table_of_ops_for_split_weights() {
    for op in ["rope_tail", "hc_split_sinkhorn", "hc_weighted_sum", "hc_expand", "fp8_kv_quantize"] {
        assert!(SPLIT_OPS.iter().any(|known| known.op == op && known.split == Split::Whole), "{op}");
    }
    for op in ["matmul", "expert_matmul", "head_matmul"] {
        assert!(accepts_split(op), "{op}");
    }
    for (index, known) in SPLIT_OPS.iter().enumerate() {
        assert!(SPLIT_OPS[..index].iter().all(|other| other.op != known.op), "{} twice", known.op);
        assert!(crate::cpu::KERNELS.iter().any(|kernel| kernel.name == known.op), "{} is no op", known.op);
    }
    assert!(!accepts_split("attention"));
}

#[test]
fn a_plan_is_printed() {
    let mut plan = Plan::new();
    let x = floats("the \"x\"", &[2, 16], 0);
    plan.push(Fill { x: x.clone(), value: 1.0 }).unwrap();
    place(&mut plan, Scale { x: x.narrow(0, 1, 1).unwrap(), out: floats("y", &[1, 16], 1), factor: 2.0 }).unwrap();
    let steps = plan.steps();
    assert_eq!(steps.len(), 3);
    assert!(steps[1].crosses && !steps[2].crosses);
    assert_eq!((&steps[2].reads[0].offset_bytes, steps[2].reads[0].bytes), (&64, 64));
    let text = text(&steps);
    assert_eq!(text.lines().count(), 3);
    assert!(text.contains("peer_copy from device 0") && text.contains("after [1]"), "{text}");
    let dot = dot(&steps);
    assert!(dot.starts_with("digraph") && dot.contains("s1 -> s2;") && dot.contains("the \\\"x\\\""), "{dot}");
    assert_eq!(dot.matches("subgraph").count(), 2);
}

/// Work on another device that nobody reads: it is done when the stream is on which the plan begins and ends.
#[test]
fn a_plan_ends_where_it_begins() {
    // Streams run only as far as somebody waits for.
    let machine = HostMachine::new(2, HostConfig::default().stepped(true)).unwrap();
    let drivers: Vec<DynDriver> = machine.into_iter().map(|device| device as DynDriver).collect();
    let kernels: Vec<Kernels> = drivers.iter().map(|driver| Kernels::load(Arc::clone(driver)).unwrap()).collect();
    let events: Vec<Events> = drivers.iter().map(|driver| Events::new(driver).unwrap()).collect();
    let pool = |driver: &DynDriver| Pool::new(Arc::clone(driver), PoolConfig::vmm()).unwrap();
    let pools: Vec<Pool> = drivers.iter().map(pool).collect();
    let streams: Vec<Stream> = drivers.iter().map(|driver| Stream::new(driver).unwrap()).collect();
    let slices: Vec<_> =
        pools.iter().zip(&streams).map(|(pool, stream)| pool.alloc::<f32>(16, stream).unwrap()).collect();
    let view = |n: usize| {
        let root = Root::new("x", slices[n].ptr(), 64, pools[n].device());
        TensorView::new(&root, QuantType::F32, &[1, 16]).unwrap()
    };
    let lane = |n: usize| {
        let (device, stream) = (pools[n].device(), streams[n].handle());
        DeviceLane { device, kernels: &kernels[n], stream, events: &events[n] }
    };
    let lanes = [lane(0), lane(1)];
    let mut plan = Plan::new();
    plan.push(Fill { x: view(0), value: 3.0 }).unwrap();
    plan.push(Fill { x: view(1), value: 5.0 }).unwrap();
    assert!(plan.order().iter().all(|after| after.is_empty()));
    plan.launch_over(&lanes, false).unwrap();
    streams[0].synchronize().unwrap();
    // A stream of its own, so that reading runs nothing of the plan.
    let reader = Stream::new(&drivers[1]).unwrap();
    assert_eq!(reader.download(&slices[1]).unwrap(), [5.0; 16]);
    // A device without a lane is no device to run on.
    let third = root("far away", 64, 2);
    plan.push(Fill { x: TensorView::new(&third, QuantType::F32, &[1, 16]).unwrap(), value: 1.0 }).unwrap();
    assert!(matches!(plan.launch_over(&lanes, false), Err(KernelError::Placement { .. })));
}

/// A step of a random list: kind, destination, two sources, and how views of them are cut.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    kind: u8,
    to: usize,
    from: [usize; 2],
    cut: [u8; 3],
}

fn drawn() -> impl Strategy<Value = Drawn> {
    (0u8..6, 0usize..8, [0usize..8, 0usize..8], [0u8..6, 0u8..6, 0u8..6]).prop_map(|(kind, to, from, cut)| Drawn {
        kind,
        to,
        from,
        cut,
    })
}

/// A `[4, 16]` tensor or a part of it that is shaped `[2, 16]`, through some chain of views.
fn cut(whole: &TensorView, how: u8) -> TensorView {
    let half = |first| whole.narrow(0, first, 2).unwrap();
    match how {
        0 => half(0),
        1 => half(2),
        2 => half(1),
        3 => whole.reshape(&[64]).unwrap().narrow(0, 16, 32).unwrap().reshape(&[2, 16]).unwrap(),
        4 => whole.reshape(&[2, 32]).unwrap().narrow(1, 0, 16).unwrap(),
        _ => whole.reshape(&[2, 32]).unwrap().narrow(1, 16, 16).unwrap(),
    }
}

/// Elements of a view, as (root, index).
fn elements(view: &TensorView) -> Vec<(u64, usize)> {
    let base = view.root().ptr.0;
    let shape = [view.dim(0), if view.rank() > 1 { view.dim(1) } else { 1 }];
    let strides = [view.stride_bytes(0), if view.rank() > 1 { view.stride_bytes(1) } else { 0 }];
    let at = |row: usize, col: usize| (view.offset_bytes() + row * strides[0] + col * strides[1]) / 4;
    (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |col| (base, at(row, col)))).collect()
}

/// Which op made each element: the meaning of a list of ops without arithmetic.
#[derive(Default)]
struct Memory(HashMap<(u64, usize), usize>);

impl Memory {
    fn read(&self, view: &TensorView) -> Vec<usize> {
        let elements = match view.ty() {
            // Bytes of a copy.
            QuantType::I8 => (0..view.len() / 4).map(|n| (view.root().ptr.0, view.offset_bytes() / 4 + n)).collect(),
            _ => elements(view),
        };
        elements.iter().map(|at| self.0.get(at).copied().unwrap_or(at.0 as usize)).collect()
    }

    fn copy(&mut self, copy: &PeerCopy) {
        let values = self.read(&copy.src);
        for (n, value) in values.into_iter().enumerate() {
            self.0.insert((copy.dst.root().ptr.0, copy.dst.offset_bytes() / 4 + n), value);
        }
    }

    fn write(&mut self, view: &TensorView, by: usize) {
        for (n, at) in elements(view).into_iter().enumerate() {
            self.0.insert(at, by * 1000 + n);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Random lists of ops on views of tensors on one to four devices: every access is local or a copy, whatever touches the same
    /// bytes is in order, and each op reads what it would have read where all is in one memory.
    #[test]
    fn plans_mean_what_their_ops_mean(devices in 1u32..5, list in prop::collection::vec(drawn(), 1..24)) {
        let tensors: Vec<TensorView> =
            (0..8).map(|n| floats(&format!("t{n}"), &[4, 16], n % devices)).collect();
        let positions = numbers("positions", &[2], 0);
        let mut plan = Plan::new();
        let mut plain = Memory::default();
        let (mut want, mut made) = (Vec::new(), Vec::new());
        for (number, step) in list.iter().enumerate() {
            let to = &tensors[step.to];
            let out = cut(to, step.cut[0]);
            let [a, b] = [0, 1].map(|n| cut(&tensors[step.from[n]], step.cut[n + 1]));
            let (reads, written) = match step.kind {
                0 => (vec![a.clone(), b.clone()], out.clone()),
                1 | 2 => (vec![a.clone()], out.clone()),
                3 => (vec![], out.clone()),
                _ => (vec![a.clone()], to.clone()),
            };
            let fits = match step.kind {
                0 => place(&mut plan, Add { a, b, out }),
                1 => place(&mut plan, Scale { x: a, out, factor: 1.0 }),
                2 => place(&mut plan, Copy { src: a, dst: out }),
                3 => place(&mut plan, Fill { x: out, value: 0.0 }),
                _ => place(&mut plan, KvStore { src: a, cache: to.clone(), positions: positions.clone(), ring: false }),
            };
            // Views that overlap are the ops' own business.
            if fits.is_err() {
                continue;
            }
            want.push(reads.iter().map(|view| plain.read(view)).collect::<Vec<_>>());
            made.push(number + 1);
            plain.write(&written, number + 1);
        }
        // The same by the plan, with memory of each device apart.
        let mut memory = Memory::default();
        let order = plan.order();
        let mut want = want.into_iter();
        let mut made = made.into_iter();
        for (index, op) in plan.ops().iter().enumerate() {
            let home = plan.device(index).unwrap();
            prop_assert!(op.writes().iter().all(|view| view.root().device == home));
            if op.crosses() {
                let (src, dst) = (op.reads()[0].clone(), op.writes()[0].clone());
                prop_assert!(src.root().device != home);
                memory.copy(&PeerCopy { src, dst });
                continue;
            }
            prop_assert!(op.reads().iter().all(|view| view.root().device == home));
            let rows = op.writes_rows();
            let inputs = op.reads().into_iter().filter(|view| view.ty() == QuantType::F32);
            let inputs = inputs.filter(|view| !rows || !op.writes().contains(view));
            let got: Vec<Vec<usize>> = inputs.map(|view| memory.read(view)).collect();
            prop_assert_eq!(Some(got), want.next());
            memory.write(op.writes()[0], made.next().unwrap_or_default());
        }
        prop_assert!(want.next().is_none());
        // Whatever touches the same bytes, one of them writing, is in order.
        for later in 0..plan.ops().len() {
            let seen = before(&order, later);
            for (earlier, seen) in seen.iter().enumerate().take(later) {
                prop_assert!(*seen || !clash(&*plan.ops()[earlier], &*plan.ops()[later]), "{} then {}", earlier, later);
            }
        }
    }
}

fn clash(a: &dyn Op, b: &dyn Op) -> bool {
    let touch = |x: &TensorView, y: &TensorView| {
        let (one, other) = (x.range(), y.range());
        x.root() == y.root() && one.start < other.end && other.start < one.end
    };
    let any = |xs: Vec<&TensorView>, ys: Vec<&TensorView>| xs.iter().any(|x| ys.iter().any(|y| touch(x, y)));
    any(a.writes(), b.reads()) || any(a.writes(), b.writes()) || any(a.reads(), b.writes())
}
