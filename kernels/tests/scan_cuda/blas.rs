//! cuBLAS: what its kernels refer to, in both forms of parameters, and that a graph of its products replays.

use std::collections::BTreeMap;
use std::sync::Arc;

use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Ran, Request};
use evergraph_kernels::Kernels;
use evergraph_kernels::cuda::{Blas, BlasError, BlasType, Product};
use evergraph_kernels::ops::{MatMul, Op, Root, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::{CaptureMode, GraphHandle, Node, NodeArgs, NodeHandle};
use evergraph_pool::{DeviceSlice, Purpose, ScratchPolicy, Stream, Use};

use super::rig::{Rig, ids};
use super::{Story, Told};

pub(crate) const STORIES: &[Story] = &[
    ("products_refer_to_their_matrices", products_refer_to_their_matrices),
    ("products_of_half_precision", products_of_half_precision),
    ("a_product_is_right", a_product_is_right),
    ("a_large_dense_product_of_an_op_is_the_librarys", a_large_dense_product_of_an_op_is_the_librarys),
    ("a_graph_of_products_survives_a_flush", a_graph_of_products_survives_a_flush),
    ("a_forgotten_matrix_is_found", a_forgotten_matrix_is_found),
];

/// Rows, outputs, inputs: a decode step, a prompt, ragged ones, thin and deep ones.
const SHAPES: [[usize; 3]; 10] = [
    [1, 64, 64],
    [1, 2048, 640],
    [4, 640, 2048],
    [16, 256, 256],
    [33, 65, 127],
    [64, 4096, 1024],
    [128, 128, 16384],
    [512, 640, 2048],
    [1024, 1024, 1024],
    [2048, 4096, 4096],
];

fn blas(rig: &Rig) -> Result<Arc<Blas>, String> {
    match Blas::new(&rig.pool, &rig.stream) {
        Ok(blas) => {
            println!("cuBLAS {}", blas.version());
            Ok(blas)
        }
        Err(error @ BlasError::Missing { .. }) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

/// How many kernels were captured with parameters one by one, packed, or unreadable; and other nodes.
fn forms(rig: &Rig, graph: GraphHandle) -> String {
    let mut count: BTreeMap<&str, u32> = BTreeMap::new();
    for node in rig.driver.graph_nodes(graph).unwrap() {
        let form = match rig.driver.node(node).unwrap() {
            Node::Kernel { args: NodeArgs::Packed { layout: Some(_), .. }, .. } => "kernelParams",
            Node::Kernel { args: NodeArgs::Packed { layout: None, .. }, .. } => "extra",
            Node::Kernel { .. } => "unreadable",
            Node::Set { .. } => "memset",
            Node::Copy { .. } => "memcpy",
            _ => "other",
        };
        *count.entry(form).or_default() += 1;
    }
    count.iter().map(|(form, n)| format!("{n} x {form}")).collect::<Vec<_>>().join(", ")
}

fn bytes(rig: &Rig, bytes: usize) -> DeviceSlice<u8> {
    rig.pool.alloc_for::<u8>(bytes, Purpose::State, &rig.stream).unwrap()
}

/// Captures one product a shape; finds its matrices, and nothing but them and the workspace.
fn shapes(rig: &Rig, blas: &Blas, factors: BlasType, result: BlasType) {
    for [rows, outputs, inputs] in SHAPES {
        let w = bytes(rig, outputs * inputs * factors.bytes());
        let x = bytes(rig, rows * inputs * factors.bytes());
        let y = bytes(rig, rows * outputs * result.bytes());
        for slice in [&w, &x, &y] {
            rig.stream.fill(slice, 0).unwrap();
        }
        let product = Product { result, ..Product::dense(w.ptr(), x.ptr(), y.ptr(), [rows, outputs, inputs], factors) };
        // SAFETY: the matrices are as large as said.
        let run = || unsafe { blas.product(&product, &rig.stream).unwrap() };
        run();
        rig.stream.synchronize().unwrap();
        let graph = rig.capture(run);
        let contents = rig.read(graph);
        let found = rig.found(&contents);
        let workspace = found.contains(&blas.workspace().allocation());
        println!(
            "{factors:?} -> {result:?} {rows:>4} x {outputs:>4} x {inputs:>5}: {}{}",
            forms(rig, graph),
            if workspace { ", with workspace" } else { "" }
        );
        assert_eq!(contents.opaque, None);
        let mut expected = ids(&[&w, &x, &y]);
        assert!(expected.is_subset(&found), "not all of {expected:?} in {found:?}");
        expected.insert(blas.workspace().allocation());
        assert!(found.is_subset(&expected), "more than {expected:?}: {found:?}");
        rig.run(graph);
        rig.driver.graph_destroy(graph).unwrap();
    }
}

fn products_refer_to_their_matrices(rig: &Rig) -> Told {
    shapes(rig, &*blas(rig)?, BlasType::F32, BlasType::F32);
    Ok(())
}

fn products_of_half_precision(rig: &Rig) -> Told {
    let blas = blas(rig)?;
    shapes(rig, &blas, BlasType::Bf16, BlasType::Bf16);
    shapes(rig, &blas, BlasType::Bf16, BlasType::F32);
    shapes(rig, &blas, BlasType::F16, BlasType::F32);
    Ok(())
}

/// Against the sum in `f64`, with strides.
fn a_product_is_right(rig: &Rig) -> Told {
    let blas = blas(rig)?;
    let (rows, outputs, inputs) = (5, 7, 33);
    let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
    let (w_stride, x_stride, y_stride) = (inputs + 3, inputs + 1, outputs + 2);
    let w: Vec<f32> = (0..outputs * w_stride).map(value).collect();
    let x: Vec<f32> = (0..rows * x_stride).map(|i| value(i + 5)).collect();
    let upload = |data: &[f32]| rig.pool.upload(data, Purpose::State, &rig.stream).unwrap();
    let (wd, xd, yd) = (upload(&w), upload(&x), upload(&vec![9.0; rows * y_stride]));
    let product = Product {
        w_stride,
        x_stride,
        y_stride,
        ..Product::dense(wd.ptr(), xd.ptr(), yd.ptr(), [rows, outputs, inputs], BlasType::F32)
    };
    // SAFETY: the matrices are as large as said.
    unsafe { blas.product(&product, &rig.stream).unwrap() };
    let y = rig.stream.download(&yd).unwrap();
    for row in 0..rows {
        for out in 0..outputs {
            let exact: f64 =
                (0..inputs).map(|i| f64::from(x[row * x_stride + i]) * f64::from(w[out * w_stride + i])).sum();
            let found = f64::from(y[row * y_stride + out]);
            assert!((found - exact).abs() < 1e-5, "row {row}, output {out}: {found}, not {exact}");
        }
        assert_eq!(y[row * y_stride + outputs..(row + 1) * y_stride], [9.0; 2], "the gap is untouched");
    }
    let refused = Product { w_stride: inputs - 1, ..product };
    // SAFETY: refused before it is looked at.
    assert!(matches!(unsafe { blas.product(&refused, &rig.stream) }, Err(BlasError::Shape { .. })));
    Ok(())
}

/// An op over floats takes the library where that is at hand, on its stream, and agrees with the op's own kernels.
fn a_large_dense_product_of_an_op_is_the_librarys(rig: &Rig) -> Told {
    let blas = blas(rig)?;
    let (tokens, outputs, inputs) = (48, 520, 384);
    let value = |i: usize| ((i * 29 + 3) % 89) as f32 / 44.0 - 1.0;
    let upload = |n: usize, from: usize| {
        let data: Vec<f32> = (0..n).map(|i| value(i + from)).collect();
        rig.pool.upload(&data, Purpose::State, &rig.stream).unwrap()
    };
    let (w, x, y) = (upload(outputs * inputs, 0), upload(tokens * inputs, 7), upload(tokens * outputs, 1));
    let view = |slice: &DeviceSlice<f32>, shape: &[usize]| {
        let root = Root::new("matrix", slice.ptr(), slice.bytes(), rig.pool.device());
        TensorView::new(&root, QuantType::F32, shape).unwrap()
    };
    let op = MatMul::new(view(&w, &[outputs, inputs]), view(&x, &[tokens, inputs]), view(&y, &[tokens, outputs]));
    let kernels = Kernels::load(rig.driver.clone()).unwrap();
    let run = || {
        op.launch(&kernels, rig.stream.handle()).unwrap();
        rig.stream.download(&y).unwrap()
    };
    let own = run();
    kernels.use_blas(blas.clone());
    let library = run();
    for (own, library) in own.iter().zip(&library) {
        assert!((own - library).abs() < 1e-3, "{own} and {library}");
    }
    let captured = |stream: &Stream| {
        rig.driver.begin_capture(stream.handle(), CaptureMode::ThreadLocal).unwrap();
        op.launch(&kernels, stream.handle()).unwrap();
        let graph = rig.driver.end_capture(stream.handle()).unwrap();
        let nodes = rig.driver.graph_nodes(graph).unwrap();
        let theirs = kernels.functions().map(|(_, function)| function).collect::<Vec<_>>();
        let own = |node: &NodeHandle| matches!(rig.driver.node(*node).unwrap(), Node::Kernel { function, .. } if theirs.contains(&function));
        nodes.iter().any(own)
    };
    assert!(!captured(&rig.stream), "the library's kernels on the handle's stream");
    assert!(captured(&Stream::new(&rig.driver).unwrap()), "its own on another");
    Ok(())
}

/// Two products through scratch, whose pages go: the replay has the bits of the eager run.
fn a_graph_of_products_survives_a_flush(rig: &Rig) -> Told {
    let blas = blas(rig)?;
    let (rows, width) = (64, 1024);
    let value = |i: usize| ((i * 31 + 7) % 97) as f32 / 48.0 - 1.0;
    let upload = |n: usize, from: usize| {
        let data: Vec<f32> = (0..n).map(|i| value(i + from)).collect();
        rig.pool.upload(&data, Purpose::State, &rig.stream).unwrap()
    };
    let (w1, w2, x, y) =
        (upload(width * width, 0), upload(width * width, 9), upload(rows * width, 5), upload(rows * width, 1));
    let (cache, key) = (GraphCache::new(CacheConfig::default()), GraphKey::new("two products"));
    let run = || {
        let request = Request::new(&key, &rig.pool, &rig.stream).policy(ScratchPolicy::Track);
        let outcome = cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.keep(blas.clone());
            scope.declare(blas.workspace(), Use::Scratch)?;
            for input in [&w1, &w2, &x] {
                scope.declare(input, Use::Input)?;
            }
            scope.declare(&y, Use::State)?;
            let middle = scope.alloc::<f32>(rows * width)?;
            let big = scope.alloc::<f32>(4 << 20)?;
            rig.driver.memset_d8(big.ptr(), 0, 64, rig.stream.handle())?;
            for (w, from, to) in [(&w1, &x, &middle), (&w2, &middle, &y)] {
                let product = Product::dense(w.ptr(), from.ptr(), to.ptr(), [rows, width, width], BlasType::F32);
                // SAFETY: the matrices are as large as said.
                unsafe { blas.product(&product, scope.stream()) }.unwrap();
            }
            Ok(())
        });
        (outcome.unwrap().ran, rig.stream.download(&y).unwrap())
    };
    let eager = run();
    assert_eq!(eager.0, Ran::WarmUp);
    for expected in [Ran::WarmUp, Ran::Captured, Ran::Replayed] {
        let (ran, y) = run();
        assert_eq!((ran, y == eager.1), (expected, true));
    }
    let back = rig.pool.trim_to(0).unwrap();
    let (ran, bits) = run();
    println!("{} KiB went back; {ran}; {:?}", back >> 10, cache.info(&Request::new(&key, &rig.pool, &rig.stream)));
    assert!(matches!(ran, Ran::Remapped | Ran::Updated | Ran::Recaptured), "{ran}");
    assert!(bits == eager.1);
    assert_eq!(run().0, Ran::Replayed);
    Ok(())
}

/// A matrix that nobody declared is an error where the cache is strict, and pinned where it is not.
fn a_forgotten_matrix_is_found(rig: &Rig) -> Told {
    let blas = blas(rig)?;
    let (w, x, y) = (bytes(rig, 64 * 64 * 4), bytes(rig, 64 * 64 * 4), bytes(rig, 64 * 64 * 4));
    let product = Product::dense(w.ptr(), x.ptr(), y.ptr(), [64, 64, 64], BlasType::F32);
    for strict in [true, false] {
        let cache = GraphCache::new(CacheConfig::default().strict(strict));
        let key = GraphKey::new("one product");
        let run = || {
            cache.run(&Request::new(&key, &rig.pool, &rig.stream), |scope| -> Result<(), CacheError> {
                scope.keep(blas.clone());
                scope.declare(blas.workspace(), Use::Scratch)?;
                scope.declare(&x, Use::Input)?;
                scope.declare(&y, Use::State)?;
                // SAFETY: the matrices are as large as said.
                unsafe { blas.product(&product, scope.stream()) }.unwrap();
                Ok(())
            })
        };
        let _ = (run().unwrap(), run().unwrap());
        match run() {
            Err(CacheError::Undeclared { base, .. }) if strict => assert_eq!(base, w.ptr()),
            Ok(outcome) if !strict => {
                assert_eq!(outcome.ran, Ran::Captured);
                assert!(cache.counters().undeclared >= 1);
            }
            other => panic!("strict {strict}: {other:?}"),
        }
    }
    Ok(())
}
