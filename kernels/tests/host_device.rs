//! Ops through the driver of the host device: loading, launching, capturing, faulting.
#![allow(clippy::unwrap_used, unsafe_code)]

use evergraph_kernels::ops::{Advance, Attention, GetRows, KvStore, MatMul, Op, Plan, RmsNorm, Root, Rope, TensorView};
use evergraph_kernels::quant::{QuantType, quantize};
use evergraph_kernels::{KernelError, Kernels};
use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::driver::{CaptureMode, DeviceOrdinal, DriverErrorKind, DynDriver, StreamHandle};

struct Device {
    driver: DynDriver,
    kernels: Kernels,
    stream: StreamHandle,
}

impl Device {
    fn new() -> Self {
        let driver: DynDriver = HostDevice::new(HostConfig::default().memory(256 << 20)).unwrap();
        let kernels = Kernels::load(driver.clone()).unwrap();
        driver.bind().unwrap();
        let stream = driver.stream_create(0).unwrap();
        Self { driver, kernels, stream }
    }

    fn tensor(&self, name: &str, ty: QuantType, shape: &[usize], bytes: &[u8]) -> TensorView {
        let ptr = self.driver.malloc(bytes.len()).unwrap();
        // SAFETY: the host buffer lives until the copy is done, which the wait sees to.
        unsafe { self.driver.memcpy_htod(ptr, bytes.as_ptr(), bytes.len(), self.stream).unwrap() };
        self.driver.stream_synchronize(self.stream).unwrap();
        TensorView::new(&Root::new(name, ptr, bytes.len(), DeviceOrdinal(0)), ty, shape).unwrap()
    }

    fn floats(&self, name: &str, shape: &[usize], f: impl Fn(usize) -> f32) -> TensorView {
        let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(|i| f(i).to_ne_bytes()).collect();
        self.tensor(name, QuantType::F32, shape, &bytes)
    }

    fn read(&self, view: &TensorView) -> Result<Vec<u32>, evergraph_pool::driver::DriverError> {
        let mut bytes = vec![0u8; view.range().len()];
        // SAFETY: the buffer lives until the copy is done, which the wait sees to.
        unsafe { self.driver.memcpy_dtoh(bytes.as_mut_ptr(), view.ptr(), bytes.len(), self.stream)? };
        self.driver.stream_synchronize(self.stream)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect())
    }
}

/// One layer of a decoder with all that changes from token to token in device memory.
struct Step {
    plan: Plan,
    logits: TensorView,
    ids: TensorView,
}

fn wave(i: usize) -> f32 {
    ((i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) % 101) as f32 / 50.0 - 1.0
}

fn step(d: &Device) -> Step {
    let (vocabulary, width, heads, context) = (64, 64, 2, 40);
    let matrix = |name: &str, rows: usize| {
        let values: Vec<f32> = (0..rows * width).map(|i| wave(i * name.len() + i / 7 + rows) * 0.2).collect();
        d.tensor(name, QuantType::Q8_0, &[rows, width], &quantize(QuantType::Q8_0, &values).unwrap())
    };
    let int = |name: &str| d.tensor(name, QuantType::I32, &[1], &3i32.to_ne_bytes());
    let (ids, positions) = (int("token"), int("position"));
    let embedding = matrix("embedding", vocabulary);
    let norm = d.floats("norm", &[width], |_| 1.0);
    let row = |name: &str| d.floats(name, &[1, width], |_| f32::NAN);
    let (h, x, a) = (row("h"), row("x"), row("a"));
    let qkv = d.floats("qkv", &[1, 3 * width], |_| f32::NAN);
    let cache = |name: &str| d.floats(name, &[context, heads, width / heads], |_| 0.0);
    let (k, v) = (cache("k cache"), cache("v cache"));
    let part = |i: usize| qkv.narrow(1, i * width, width).unwrap().heads(heads).unwrap();
    let logits = d.floats("logits", &[1, vocabulary], |_| f32::NAN);
    let mut plan = Plan::new();
    plan.push(GetRows { table: embedding, ids: ids.clone(), out: h.clone(), scale: 8.0 }).unwrap();
    plan.push(RmsNorm::new(h.clone(), norm.clone(), x.clone(), 1e-6)).unwrap();
    plan.push(MatMul::new(matrix("qkv weight", 3 * width), x, qkv.clone())).unwrap();
    for (i, cache) in [(1, &k), (2, &v)] {
        if i == 1 {
            plan.push(Rope::neox(part(0), positions.clone(), 1e4, 1.0)).unwrap();
            plan.push(Rope::neox(part(1), positions.clone(), 1e4, 1.0)).unwrap();
        }
        plan.push(KvStore { src: part(i), cache: cache.clone(), positions: positions.clone(), ring: false }).unwrap();
    }
    plan.push(Attention {
        q: part(0),
        k,
        v,
        positions: positions.clone(),
        out: a.heads(heads).unwrap(),
        scale: 0.2,
        window: None,
        softcap: None,
        sinks: None,
        ring: false,
        codes: None,
        spread: None,
    })
    .unwrap();
    plan.push(RmsNorm::add_to(h.clone(), a, norm, 1e-6)).unwrap();
    plan.push(MatMul::new(matrix("the head", vocabulary), h, logits.clone())).unwrap();
    plan.push(evergraph_kernels::ops::ArgMax { x: logits.clone(), out: ids.clone() }).unwrap();
    plan.push(Advance { positions, by: 1 }).unwrap();
    Step { plan, logits, ids }
}

#[test]
fn a_captured_step_gives_the_bits_of_the_eager_one_token_after_token() {
    let d = Device::new();
    let eager = step(&d);
    let wanted: Vec<_> = (0..20)
        .map(|_| {
            eager.plan.launch(&d.kernels, d.stream).unwrap();
            (d.read(&eager.ids).unwrap(), d.read(&eager.logits).unwrap())
        })
        .collect();
    assert!(wanted.windows(2).any(|w| w[0].0 != w[1].0), "tokens change, or replaying would prove little");

    let captured = step(&d);
    d.driver.begin_capture(d.stream, CaptureMode::ThreadLocal).unwrap();
    captured.plan.launch(&d.kernels, d.stream).unwrap();
    let graph = d.driver.end_capture(d.stream).unwrap();
    assert_eq!(d.driver.graph_nodes(graph).unwrap().len(), captured.plan.ops().len());
    let exec = d.driver.instantiate(graph).unwrap();
    for (i, wanted) in wanted.iter().enumerate() {
        d.driver.launch(exec, d.stream).unwrap();
        assert_eq!((d.read(&captured.ids).unwrap(), d.read(&captured.logits).unwrap()), *wanted, "token {i}");
    }
}

#[test]
fn freed_weights_are_a_fault_that_names_the_op() {
    let d = Device::new();
    let w = d.tensor("w", QuantType::Q8_0, &[4, 32], &[0; 4 * 34]);
    let (x, y) = (d.floats("x", &[1, 32], wave), d.floats("y", &[1, 4], wave));
    let op = MatMul::new(w.clone(), x, y.clone());
    op.launch(&d.kernels, d.stream).unwrap();
    d.read(&y).unwrap();
    d.driver.free(w.ptr()).unwrap();
    let launched = op.launch(&d.kernels, d.stream);
    let error = launched.err().map_or_else(
        || d.read(&y).unwrap_err(),
        |e| match e {
            KernelError::Driver(e) => e,
            e => panic!("{e}"),
        },
    );
    let DriverErrorKind::Fault(fault) = error.kind else { panic!("{error}") };
    assert_eq!((fault.op.as_str(), fault.address, fault.write), ("matmul", w.ptr(), false));
    assert!(matches!(op.launch(&d.kernels, d.stream), Err(KernelError::Driver(_))), "the fault is sticky");
}

#[test]
fn an_op_that_does_not_fit_makes_no_driver_call() {
    let d = Device::new();
    let (x, y) = (d.floats("x", &[1, 32], wave), d.floats("y", &[1, 5], wave));
    let w = d.tensor("w", QuantType::Q8_0, &[4, 32], &[0; 4 * 34]);
    assert!(matches!(MatMul::new(w, x, y).launch(&d.kernels, d.stream), Err(KernelError::Shape { .. })));
    assert_eq!(d.driver.fault(), None);
}

#[test]
fn every_kernel_loads_and_unloads() {
    let driver: DynDriver = HostDevice::new(HostConfig::default()).unwrap();
    let kernels = Kernels::load(driver.clone()).unwrap();
    let module = kernels.modules()[0];
    drop(kernels);
    driver.bind().unwrap();
    assert!(driver.module_unload(module).is_err(), "it was unloaded on drop");
    let again = Kernels::load(driver).unwrap();
    assert!(format!("{again:?}").contains("functions"));
}

#[test]
fn threads_are_set_once() {
    let n = evergraph_kernels::threads(0).unwrap();
    assert_eq!(evergraph_kernels::threads(n).unwrap(), n);
    assert!(matches!(evergraph_kernels::threads(n + 1), Err(KernelError::Threads(_))));
}
