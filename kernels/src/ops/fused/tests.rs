#![allow(clippy::unwrap_used)]

use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::driver::{DeviceOrdinal, DynDriver};

use super::*;
use crate::cases::{Bench, Tensors};
use crate::ops::{Activation, Add, Call, Codes, GroupRank, Launches, Normed, Part, Scoring};
use crate::{KernelError, Kernels};

const WIDTH: usize = 64;
const HIDDEN: usize = 32;
const EXPERTS: usize = 4;
const USED: usize = 2;

/// A device that fuses; the lists then run on the host device, part by part.
fn device() -> DeviceInfo {
    let mut info = DeviceInfo::new(DeviceOrdinal(0), "cuda", "for plans", 1 << 30, true);
    (info.multiprocessors, info.shared_bytes) = (132, 227 << 10);
    info
}

fn bench() -> Bench {
    let driver: DynDriver = HostDevice::new(HostConfig::default().memory(1 << 26)).unwrap();
    Bench::new(Kernels::load(driver).unwrap(), 0).unwrap()
}

/// The tensors of a small block of a model, a few of each kind.
struct Room {
    h: Vec<TensorView>,
    y: Vec<TensorView>,
    norms: Vec<TensorView>,
    floats: Vec<TensorView>,
    codes: Vec<Codes>,
    square: Vec<TensorView>,
    gate_up: Vec<TensorView>,
    hidden: Vec<TensorView>,
    hidden_codes: Vec<Codes>,
    down: TensorView,
    router: TensorView,
    logits: Vec<TensorView>,
    ids: Vec<TensorView>,
    weights: Vec<TensorView>,
    expert_gate_up: Vec<TensorView>,
    expert_hidden: Vec<TensorView>,
    expert_codes: Vec<Codes>,
    expert_down: TensorView,
    expert_y: TensorView,
    counter: TensorView,
}

impl Room {
    fn new(t: &mut Tensors<'_>) -> Self {
        let weight = |t: &mut Tensors<'_>, shape: &[usize]| {
            let values = t.random(shape.iter().product());
            t.typed(QuantType::Q4_0, shape, &values).unwrap()
        };
        let two = |t: &mut Tensors<'_>, shape: &[usize]| (0..2).map(|_| t.noise(shape).unwrap()).collect::<Vec<_>>();
        let codes = |t: &mut Tensors<'_>, shape: &[usize]| {
            let scales = [&shape[..shape.len() - 1], &[shape[shape.len() - 1] / 32, 2]].concat();
            let code = |_| Codes {
                q: t.bytes(QuantType::I8, shape, &vec![3; shape.iter().product()]).unwrap(),
                scales: t.noise(&scales).unwrap(),
            };
            (0..2).map(code).collect::<Vec<_>>()
        };
        Self {
            h: two(t, &[1, WIDTH]),
            y: two(t, &[1, WIDTH]),
            norms: two(t, &[WIDTH]),
            floats: two(t, &[1, WIDTH]),
            codes: codes(t, &[1, WIDTH]),
            square: (0..2).map(|_| weight(t, &[WIDTH, WIDTH])).collect(),
            gate_up: (0..2).map(|_| weight(t, &[HIDDEN, WIDTH])).collect(),
            hidden: (0..3).map(|_| t.noise(&[1, HIDDEN]).unwrap()).collect(),
            hidden_codes: codes(t, &[1, HIDDEN]),
            down: weight(t, &[WIDTH, HIDDEN]),
            router: t.noise(&[EXPERTS, WIDTH]).unwrap(),
            logits: two(t, &[1, EXPERTS]),
            ids: (0..2).map(|_| t.ints(&[1, USED], &[1, 3]).unwrap()).collect(),
            weights: two(t, &[1, USED]),
            expert_gate_up: (0..2).map(|_| weight(t, &[EXPERTS, HIDDEN, WIDTH])).collect(),
            expert_hidden: (0..3).map(|_| t.noise(&[1, USED, HIDDEN]).unwrap()).collect(),
            expert_codes: codes(t, &[1, USED, HIDDEN]),
            expert_down: weight(t, &[EXPERTS, WIDTH, HIDDEN]),
            expert_y: t.noise(&[1, USED, WIDTH]).unwrap(),
            counter: t.ints(&[1], &[0]).unwrap(),
        }
    }

    fn residual_norm(&self, h: usize, y: usize, normed: Vec<Normed>) -> ResidualNorm {
        let parts = vec![Part { x: self.y[y].clone(), norm: None }];
        ResidualNorm { h: self.h[h].clone(), parts, weight: None, gain: 1.0, eps: 1e-6, normed }
    }

    fn coded(&self, weight: usize, codes: usize) -> Normed {
        let codes = Some(self.codes[codes].clone());
        Normed { weight: self.norms[weight].clone(), scale: 1.0, out: None, codes }
    }

    fn plain(&self, weight: usize, out: usize) -> Normed {
        let out = Some(self.floats[out].clone());
        Normed { weight: self.norms[weight].clone(), scale: 0.5, out, codes: None }
    }

    fn product(&self, w: &TensorView, codes: usize, y: &TensorView) -> MatMul {
        let Codes { q, scales } = self.codes[codes].clone();
        MatMul::quantized(w.clone(), q, scales, y.clone())
    }

    fn glu(&self, places: [usize; 2], codes: usize) -> Glu {
        let [gate, up] = places.map(|place| self.hidden[place].clone());
        let codes = Some(self.hidden_codes[codes].clone());
        Glu { gate, up, out: None, codes, activation: Activation::Silu, limit: None }
    }

    fn last(&self, codes: usize, y: usize) -> MatMul {
        let Codes { q, scales } = self.hidden_codes[codes].clone();
        MatMul::quantized(self.down.clone(), q, scales, self.y[y].clone())
    }

    fn choice(&self, logits: usize, chosen: usize) -> Router {
        let (ids, weights) = (self.ids[chosen].clone(), self.weights[chosen].clone());
        let (scoring, group_rank) = (Scoring::Softmax, GroupRank::default());
        let logits = self.logits[logits].clone();
        Router { logits, bias: None, ids, weights, scoring, groups: None, group_rank, norm: true, scale: 1.0 }
    }

    fn expert_product(&self, w: usize, codes: usize, chosen: usize, y: usize) -> ExpertMatMul {
        let Codes { q, scales } = self.codes[codes].clone();
        let (w, ids) = (self.expert_gate_up[w].clone(), self.ids[chosen].clone());
        ExpertMatMul::quantized(w, q, scales, ids, self.expert_hidden[y].clone())
    }

    fn expert_glu(&self, places: [usize; 2], codes: usize) -> Glu {
        let [gate, up] = places.map(|place| self.expert_hidden[place].clone());
        let codes = Some(self.expert_codes[codes].clone());
        Glu { gate, up, out: None, codes, activation: Activation::GeluTanh, limit: None }
    }

    fn expert_last(&self, codes: usize, chosen: usize) -> ExpertMatMul {
        let Codes { q, scales } = self.expert_codes[codes].clone();
        let (w, ids, y) = (self.expert_down.clone(), self.ids[chosen].clone(), self.expert_y.clone());
        ExpertMatMul::quantized(w, q, scales, ids, y)
    }

    fn sum(&self, chosen: usize, out: usize) -> ExpertSum {
        let (y, weights, out) = (self.expert_y.clone(), self.weights[chosen].clone(), self.y[out].clone());
        ExpertSum { y, weights, expert_scale: None, residual: None, out }
    }

    /// A feed-forward part with experts beside a dense one, as models append it.
    fn feed_forward(&self) -> Vec<Box<dyn Op>> {
        let normed = vec![self.coded(0, 0), self.plain(1, 0), self.coded(1, 1)];
        vec![
            Box::new(self.residual_norm(0, 0, normed)),
            Box::new(self.product(&self.gate_up[0], 0, &self.hidden[0])),
            Box::new(self.product(&self.gate_up[1], 0, &self.hidden[1])),
            Box::new(self.glu([0, 1], 0)),
            Box::new(self.last(0, 0)),
            Box::new(MatMul::new(self.router.clone(), self.floats[0].clone(), self.logits[0].clone())),
            Box::new(self.choice(0, 0)),
            Box::new(self.expert_product(0, 1, 0, 0)),
            Box::new(self.expert_product(1, 1, 0, 1)),
            Box::new(self.expert_glu([0, 1], 0)),
            Box::new(self.expert_last(0, 0)),
            Box::new(self.sum(0, 1)),
        ]
    }

    /// Any op, of any tensors that it fits.
    fn any(&self, next: &mut impl FnMut(usize) -> usize) -> Box<dyn Op> {
        match next(15) {
            0 | 1 => {
                let mut normed = vec![self.coded(next(2), next(2))];
                if next(2) == 0 {
                    normed.push(self.plain(next(2), next(2)));
                }
                Box::new(self.residual_norm(next(2), next(2), normed))
            }
            2 => {
                let norm = RmsNorm::new(
                    self.h[next(2)].clone(),
                    self.norms[next(2)].clone(),
                    self.floats[next(2)].clone(),
                    1e-6,
                );
                Box::new(RmsNorm { codes: Some(self.codes[next(2)].clone()), ..norm })
            }
            3 => Box::new(self.product(&self.square[next(2)], next(2), &self.y[next(2)])),
            4 | 5 => Box::new(self.product(&self.gate_up[next(2)], next(2), &self.hidden[next(3)])),
            6 => {
                let (x, y) = (self.floats[next(2)].clone(), self.logits[next(2)].clone());
                Box::new(MatMul::new(self.router.clone(), x, y))
            }
            7 => Box::new(self.glu([next(2), 2], next(2))),
            8 => Box::new(self.last(next(2), next(2))),
            9 => Box::new(self.choice(next(2), next(2))),
            10 => Box::new(self.expert_product(next(2), next(2), next(2), next(3))),
            11 => Box::new(self.expert_glu([next(2), 2], next(2))),
            12 => Box::new(self.expert_last(next(2), next(2))),
            13 => Box::new(self.sum(next(2), next(2))),
            _ => {
                let (a, b) = (self.h[next(2)].clone(), self.y[next(2)].clone());
                Box::new(Add { a, b, out: self.floats[next(2)].clone() })
            }
        }
    }
}

fn names(ops: &[Box<dyn Op>]) -> Vec<&'static str> {
    ops.iter().map(|op| op.name()).collect()
}

/// Runs a list in fresh memory, fused or not. Gives the bytes of all tensors and which of them say nothing.
fn run(list: &dyn Fn(&Room) -> Vec<Box<dyn Op>>, fused: bool) -> (Vec<Vec<u8>>, Vec<TensorView>, Vec<&'static str>) {
    let bench = bench();
    let mut tensors = Tensors::new(&bench).unwrap();
    let room = Room::new(&mut tensors);
    let ops = list(&room);
    let ops = if fused { fuse(ops, &device(), &room.counter) } else { ops };
    for op in &ops {
        op.launch(bench.kernels(), bench.stream()).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    }
    // What a unit hands on lies where the gate was.
    let gates = ops.iter().filter_map(|op| cast::<FusedNorm>(op)?.glu.as_ref()?.out.clone());
    let left = ops.iter().flat_map(|op| op.leftovers()).cloned().chain(gates).collect();
    (tensors.contents().unwrap(), left, names(&ops))
}

/// Both ways leave the same bytes, but where nothing of use is left.
fn assert_same(list: &dyn Fn(&Room) -> Vec<Box<dyn Op>>, what: &str) -> usize {
    let ((plain, _, before), (fused, left, after)) = (run(list, false), run(list, true));
    let left: Vec<String> = left.iter().map(|view| view.root().name.clone()).collect();
    for (number, (plain, fused)) in plain.iter().zip(&fused).enumerate() {
        let name = format!("tensor {}", number + 1);
        assert!(left.contains(&name) || plain == fused, "{what}: {name} differs: {before:?} became {after:?}");
    }
    before.len() - after.len()
}

#[test]
fn a_feed_forward_part_with_experts_is_three_launches() {
    let (_, _, names) = run(&Room::feed_forward, true);
    assert_eq!(names, ["fused_norm", "fused_router", "fused_down"]);
    assert_eq!(assert_same(&Room::feed_forward, "a block"), 9);
}

#[test]
fn on_a_host_device_and_with_several_tokens_ops_stay_as_they_are() {
    let bench = bench();
    let room = Room::new(&mut Tensors::new(&bench).unwrap());
    let same = fuse(room.feed_forward(), bench.kernels().device(), &room.counter);
    assert_eq!(names(&same), names(&room.feed_forward()));
    // Too little shared memory for the largest kernel: the others are still put together.
    let mut small = device();
    small.shared_bytes = 40 << 10;
    let some = fuse(room.feed_forward(), &small, &room.counter);
    assert!(!names(&some).contains(&"fused_norm") && names(&some).contains(&"fused_down"), "{:?}", names(&some));
}

/// The codes of a gated unit may not vanish while somebody else reads them, nor may a product overtake the norm of its input.
#[test]
fn what_others_read_is_written() {
    let read_again = |room: &Room| {
        let mut ops = room.feed_forward();
        ops.push(Box::new(room.last(0, 0)));
        ops
    };
    assert_same(&read_again, "codes read twice");
    let between = |room: &Room| {
        let mut ops = room.feed_forward();
        // The router reads what this writes.
        ops.insert(4, Box::new(Add { a: room.h[1].clone(), b: room.y[1].clone(), out: room.floats[0].clone() }));
        ops
    };
    assert_same(&between, "a new input for the router");
}

/// An op that says nothing of what it touches, as a question to the host.
#[derive(Debug)]
struct Fence;

impl Op for Fence {
    fn name(&self) -> &'static str {
        "fence"
    }

    fn reads(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    fn writes(&self) -> Vec<&TensorView> {
        Vec::new()
    }

    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn call(&self) -> Call {
        Call::none()
    }

    fn launches(&self, _: &DeviceInfo) -> Launches {
        Launches::new()
    }
}

#[test]
fn nothing_goes_past_a_question_to_the_host() {
    let list = |room: &Room| {
        let mut ops = room.feed_forward();
        ops.insert(1, Box::new(Fence));
        ops.insert(8, Box::new(Fence));
        ops
    };
    let (_, _, names) = run(&list, true);
    let fences: Vec<usize> = (0..names.len()).filter(|&at| names[at] == "fence").collect();
    assert_eq!(names[..fences[0]], ["residual_norm"]);
    assert!(names[fences[0]..fences[1]].iter().all(|name| !name.starts_with("expert")), "{names:?}");
    assert!(!names.contains(&"fused_norm") && !names.contains(&"fused_router"), "{names:?}");
    assert_same(&list, "fences");
}

#[test]
fn any_list_gives_the_same_in_few_launches_as_in_many() {
    let (mut fewer, mut lists) = (0, 0);
    for seed in 0..300u64 {
        let list = |room: &Room| {
            let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            let mut next = |below: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 33) as usize % below
            };
            // Whole blocks, with anything between their ops.
            let mut ops = if seed % 3 == 0 { Vec::new() } else { room.feed_forward() };
            for _ in 0..if ops.is_empty() { 24 } else { seed as usize % 7 } {
                let op = room.any(&mut next);
                let place = next(ops.len() + 1);
                if op.check().is_ok() {
                    ops.insert(place, op);
                }
            }
            ops
        };
        let saved = assert_same(&list, &format!("seed {seed}"));
        (fewer, lists) = (fewer + saved, lists + usize::from(saved > 0));
    }
    assert!(fewer > 1000 && lists > 200, "{fewer} launches saved in {lists} lists");
}
