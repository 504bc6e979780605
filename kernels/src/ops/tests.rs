#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use evergraph_pool::driver::{DeviceOrdinal, DevicePtr};
use proptest::prelude::*;

use super::*;
use crate::quant::QuantType;

fn root(name: &str, at: u64) -> Arc<Root> {
    Root::new(name, DevicePtr(at), 1 << 20, DeviceOrdinal(0))
}

/// A contiguous tensor in a root of its own.
fn tensor(name: &str, ty: QuantType, shape: &[usize]) -> TensorView {
    let at = name.bytes().fold(1u64, |h, b| (h * 131 + u64::from(b)) % 1_000_003) << 24;
    TensorView::new(&root(name, at), ty, shape).unwrap()
}

fn f32s(name: &str, shape: &[usize]) -> TensorView {
    tensor(name, QuantType::F32, shape)
}

fn i32s(name: &str, shape: &[usize]) -> TensorView {
    tensor(name, QuantType::I32, shape)
}

#[test]
fn views_of_views_keep_the_root_and_know_their_bytes() {
    let r = root("kv", 0x1000);
    let kv = TensorView::new(&r, QuantType::F16, &[10, 2, 64]).unwrap();
    assert_eq!((kv.range(), kv.rows(), kv.cols(), kv.is_contiguous()), (0..2560, 20, 64, true));
    let v = kv.narrow(1, 1, 1).unwrap().narrow(0, 2, 3).unwrap();
    assert!(Arc::ptr_eq(v.root(), &r));
    assert_eq!((v.offset_bytes(), v.ptr(), v.is_contiguous()), (2 * 256 + 128, DevicePtr(0x1000 + 640), false));
    assert_eq!(v.range(), 640..640 + 2 * 256 + 128);
    let row = kv.index(4).unwrap();
    assert_eq!((row.shape(), row.offset_bytes()), (&[2usize, 64][..], 1024));
    let flat = kv.reshape(&[10, 128]).unwrap();
    assert!(flat.heads(2).unwrap().same_place(&kv));
    assert!(v.reshape(&[3 * 64]).is_err(), "not contiguous");
}

#[test]
fn quantised_views_are_cut_between_blocks() {
    let w = tensor("w", QuantType::Q4_K, &[8, 512]);
    assert_eq!(w.stride_bytes(0), 288);
    assert_eq!(w.narrow(0, 3, 2).unwrap().range(), 864..1440);
    assert_eq!(w.narrow(1, 256, 256).unwrap().offset_bytes(), 144);
    assert!(matches!(w.narrow(1, 128, 256), Err(KernelError::BlockSize { .. })));
    assert!(matches!(TensorView::new(w.root(), QuantType::Q8_0, &[4, 33]), Err(KernelError::BlockSize { .. })));
}

#[test]
fn views_that_can_not_be_are_typed_errors() {
    let r = root("r", 0x1000);
    let bad = |ty, offset, shape: &[usize]| {
        assert!(
            matches!(TensorView::at(&r, offset, ty, shape), Err(KernelError::View { .. })),
            "{shape:?} at {offset}"
        );
    };
    bad(QuantType::F32, 0, &[]);
    bad(QuantType::F32, 0, &[1, 1, 1, 1, 1]);
    bad(QuantType::F32, 0, &[3, 0]);
    bad(QuantType::F32, 0, &[usize::MAX]);
    bad(QuantType::F32, 0, &[1 << 30, 1 << 30, 1 << 30]);
    bad(QuantType::F32, 0, &[(1 << 18) + 1]);
    bad(QuantType::F32, 4, &[1 << 18]);
    bad(QuantType::F32, 2, &[4]);
    bad(QuantType::F32, usize::MAX - 3, &[4]);
    let high = Root::new("high", DevicePtr(u64::MAX - 100), 1 << 20, DeviceOrdinal(0));
    assert!(TensorView::new(&high, QuantType::I8, &[200]).is_err(), "address wraps");
    let v = TensorView::new(&r, QuantType::F32, &[4, 6]).unwrap();
    for (axis, start, len) in [(2, 0, 1), (0, 0, 0), (0, 4, 1), (0, 2, 3), (1, 1, usize::MAX)] {
        assert!(v.narrow(axis, start, len).is_err());
    }
    assert!(v.index(4).is_err() && v.heads(4).is_err() && v.heads(0).is_err() && v.reshape(&[5, 5]).is_err());
}

proptest! {
    #[test]
    fn overlap_is_that_of_the_bytes(
        rows in 1usize..5, cols in 1usize..12,
        a in (0usize..5, 1usize..5, 0usize..12, 1usize..12),
        b in (0usize..5, 1usize..5, 0usize..12, 1usize..12),
    ) {
        let base = TensorView::new(&root("m", 0x1000), QuantType::F32, &[rows, cols]).unwrap();
        let cut = |(r, n, c, m): (usize, usize, usize, usize)| base.narrow(0, r, n)?.narrow(1, c, m);
        let (Ok(va), Ok(vb)) = (cut(a), cut(b)) else { return Ok(()) };
        let meets = |s: usize, n: usize, t: usize, m: usize| s < t + m && t < s + n;
        let really = meets(a.0, a.1, b.0, b.1) && meets(a.2, a.3, b.2, b.3);
        prop_assert_eq!(va.overlaps(&vb), vb.overlaps(&va));
        prop_assert!(va.overlaps(&vb) || !really, "an overlap was missed");
        // Side by side in the same rows is no overlap: what merged gate and up need.
        if !meets(a.2, a.3, b.2, b.3) && va.shape()[0] > 1 && vb.shape()[0] > 1 {
            prop_assert!(!va.overlaps(&vb));
        }
    }
}

fn matmul() -> MatMul {
    MatMul::new(tensor("w", QuantType::Q8_0, &[10, 64]), f32s("x", &[3, 64]), f32s("y", &[3, 10]))
}

#[test]
fn wrong_shapes_types_layouts_and_overlaps_name_op_and_tensor() {
    matmul().check().unwrap();
    let shape = |op: MatMul, role: &str| match op.check() {
        Err(KernelError::Shape { op: "matmul", tensor, .. }) => assert!(tensor.starts_with(role), "{tensor}"),
        other => panic!("{other:?}"),
    };
    shape(MatMul { x: f32s("x", &[3, 32]), ..matmul() }, "x");
    shape(MatMul { x: f32s("x", &[3, 1, 64]), ..matmul() }, "x");
    shape(MatMul { y: f32s("y", &[3, 11]), ..matmul() }, "y");
    shape(MatMul { y: f32s("y", &[2, 10]), ..matmul() }, "y");
    let message = MatMul { y: f32s("logits", &[2, 10]), ..matmul() }.check().unwrap_err().to_string();
    assert_eq!(message, "matmul: y (logits) must be [3, 10], found [2, 10]");

    let ty = |op: MatMul| assert!(matches!(op.check(), Err(KernelError::Type { op: "matmul", .. })));
    ty(MatMul { x: tensor("x", QuantType::F16, &[3, 64]), ..matmul() });
    ty(MatMul { y: i32s("y", &[3, 10]), ..matmul() });
    ty(MatMul { w: tensor("w", QuantType::IQ1_S, &[10, 256]), x: f32s("x", &[3, 256]), ..matmul() });

    let w = tensor("w", QuantType::Q8_0, &[10, 128]).narrow(1, 0, 64).unwrap();
    assert!(matches!(MatMul { w, ..matmul() }.check(), Err(KernelError::Layout { .. })));

    let buffer = f32s("shared", &[3, 74]);
    let (x, y) = (buffer.narrow(1, 0, 64).unwrap(), buffer.narrow(1, 64, 10).unwrap());
    MatMul { x: x.clone(), y, ..matmul() }.check().unwrap();
    let y = buffer.narrow(1, 60, 10).unwrap();
    assert!(matches!(MatMul { x, y, ..matmul() }.check(), Err(KernelError::Overlap { op: "matmul", .. })));
}

#[test]
fn quantised_activations_want_scales_of_their_shape_and_weights_in_blocks() {
    let i8s = |name: &str, shape: &[usize]| tensor(name, QuantType::I8, shape);
    let w = || tensor("w", QuantType::Q8_0, &[10, 64]);
    let good = || MatMul::quantized(w(), i8s("q", &[3, 64]), f32s("scales", &[3, 2, 2]), f32s("y", &[3, 10]));
    good().check().unwrap();
    let bad = |op: &dyn Op, role: &str| {
        let error = op.check().unwrap_err();
        assert!(error.to_string().contains(role), "{error}");
    };
    bad(&MatMul { scales: None, ..good() }, "x (q) must be F32");
    bad(&MatMul { x: f32s("x", &[3, 64]), ..good() }, "x (x) must be I8");
    bad(&MatMul { w: f32s("w", &[10, 64]), ..good() }, "w (w) must be a type of blocks");
    bad(&MatMul { scales: Some(f32s("scales", &[3, 2])), ..good() }, "scales (scales)");
    bad(&MatMul { scales: Some(f32s("scales", &[2, 2, 2])), ..good() }, "scales (scales)");
    bad(&MatMul { scales: Some(i32s("scales", &[3, 2, 2])), ..good() }, "scales (scales) must be F32");
    let gaps = f32s("scales", &[3, 4, 4]).narrow(2, 0, 2).unwrap().narrow(1, 0, 2).unwrap();
    bad(&MatMul { scales: Some(gaps), ..good() }, "contiguous");
    let rows_apart = f32s("scales", &[3, 4, 2]).narrow(1, 0, 2).unwrap();
    MatMul { scales: Some(rows_apart), ..good() }.check().unwrap();
    let shared = f32s("shared", &[42]);
    let scales = shared.narrow(0, 20, 12).unwrap().reshape(&[3, 2, 2]).unwrap();
    let y = shared.narrow(0, 0, 30).unwrap().reshape(&[3, 10]).unwrap();
    assert!(matches!(MatMul { scales: Some(scales), y, ..good() }.check(), Err(KernelError::Overlap { .. })));

    let experts = |x: &[usize], scales: &[usize]| {
        let (w, ids) = (tensor("w", QuantType::Q4_0, &[4, 10, 64]), i32s("ids", &[3, 2]));
        ExpertMatMul::quantized(w, i8s("q", x), f32s("scales", scales), ids, f32s("y", &[3, 2, 10]))
    };
    experts(&[3, 64], &[3, 2, 2]).check().unwrap();
    experts(&[3, 2, 64], &[3, 2, 2, 2]).check().unwrap();
    bad(&experts(&[3, 2, 64], &[3, 2, 2]), "scales (scales)");
    bad(&experts(&[3, 64], &[3, 2, 2, 2]), "scales (scales)");
    bad(&ExpertMatMul { scales: None, ..experts(&[3, 64], &[3, 2, 2]) }, "x (q) must be F32");

    let quantize = |cols: usize, groups: usize| Quantize {
        x: f32s("x", &[3, cols]),
        q: i8s("q", &[3, cols]),
        scales: f32s("scales", &[3, groups, 2]),
    };
    quantize(64, 2).check().unwrap();
    bad(&quantize(48, 1), "multiple of 32");
    bad(&quantize(64, 1), "scales (scales)");
    bad(&Quantize { q: f32s("q", &[3, 64]), ..quantize(64, 2) }, "q (q) must be I8");
    bad(&Quantize { q: i8s("q", &[2, 64]), ..quantize(64, 2) }, "q (q)");
    let inside = TensorView::new(quantize(64, 2).x.root(), QuantType::I8, &[3, 64]).unwrap();
    assert!(matches!(Quantize { q: inside, ..quantize(64, 2) }.check(), Err(KernelError::Overlap { .. })));
    let names = |views: Vec<&TensorView>| views.iter().map(|view| view.root().name.clone()).collect::<Vec<_>>();
    assert_eq!(names(good().reads()), ["w", "q", "scales"]);
    assert_eq!(names(experts(&[3, 64], &[3, 2, 2]).reads()), ["w", "q", "scales", "ids"]);
    assert_eq!(names(quantize(64, 2).writes()), ["q", "scales"]);
}

#[test]
fn codes_beside_a_result_want_their_shape_and_a_place_of_their_own() {
    let codes = |shape: &[usize], groups: usize| {
        let scales = [&shape[..shape.len() - 1], &[groups, 2]].concat();
        Some(Codes { q: tensor("q", QuantType::I8, shape), scales: f32s("scales", &scales) })
    };
    let (x, h, w) = (f32s("x", &[3, 64]), f32s("h", &[3, 64]), f32s("w", &[64]));
    let norm = |codes| RmsNorm { codes, ..RmsNorm::add_to(h.clone(), x.clone(), w.clone(), 1e-6) };
    let gate = |codes| Glu { codes, ..Glu::new(x.clone(), h.clone(), x.clone(), Activation::Silu) };
    norm(codes(&[3, 64], 2)).check().unwrap();
    RmsNorm { out: None, ..norm(codes(&[3, 64], 2)) }.check().unwrap();
    gate(codes(&[3, 64], 2)).check().unwrap();
    Glu { out: None, ..gate(codes(&[3, 64], 2)) }.check().unwrap();
    let names = |views: Vec<&TensorView>| views.iter().map(|view| view.root().name.clone()).collect::<Vec<_>>();
    assert_eq!(names(norm(codes(&[3, 64], 2)).writes()), ["h", "q", "scales"]);
    assert_eq!(names(Glu { out: None, ..gate(codes(&[3, 64], 2)) }.writes()), ["q", "scales"]);

    let bad = |op: &dyn Op, what: &str| {
        let error = op.check().unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    bad(&RmsNorm { out: None, ..norm(None) }, "out");
    bad(&Glu { out: None, ..gate(None) }, "out");
    bad(&norm(codes(&[3, 32], 1)), "q (q)");
    bad(&norm(codes(&[3, 64], 1)), "scales (scales)");
    bad(&gate(codes(&[3, 1, 64], 2)), "q (q)");
    let inside = |view: &TensorView| {
        let q = TensorView::new(view.root(), QuantType::I8, &[3, 64]).unwrap();
        codes(&[3, 64], 2).map(|codes| Codes { q, ..codes })
    };
    for view in [&x, &h, &w] {
        assert!(matches!(norm(inside(view)).check(), Err(KernelError::Overlap { .. })));
    }
    for view in [&x, &h] {
        assert!(matches!(Glu { out: None, ..gate(inside(view)) }.check(), Err(KernelError::Overlap { .. })));
    }
    let odd = |cols: usize| RmsNorm {
        codes: codes(&[3, cols], 1),
        ..RmsNorm::new(f32s("x", &[3, cols]), f32s("w", &[cols]), f32s("o", &[3, cols]), 1e-6)
    };
    bad(&odd(48), "multiple of 32");
}

#[test]
fn residual_norms_refuse_what_does_not_fit() {
    let x = |name: &str| f32s(name, &[2, 64]);
    let weight = || f32s("w", &[64]);
    let codes = || Codes { q: tensor("q", QuantType::I8, &[2, 64]), scales: f32s("scales", &[2, 2, 2]) };
    let normed = |out: &str| Normed { weight: weight(), scale: 1.0, out: Some(x(out)), codes: None };
    let good = || ResidualNorm {
        h: x("h"),
        parts: vec![Part { x: x("a"), norm: Some(f32s("an", &[64])) }, Part { x: x("b"), norm: None }],
        weight: Some(weight()),
        gain: 1.0,
        eps: 1e-6,
        normed: vec![Normed { out: None, codes: Some(codes()), ..normed("") }, normed("n")],
    };
    good().check().unwrap();
    ResidualNorm { normed: vec![], ..good() }.check().unwrap();
    ResidualNorm { weight: None, ..good() }.check().unwrap();
    let names = |views: Vec<&TensorView>| views.iter().map(|view| view.root().name.clone()).collect::<Vec<_>>();
    assert_eq!(names(good().writes()), ["h", "q", "scales", "n"]);
    assert_eq!(names(good().reads()), ["h", "a", "an", "b", "w", "w", "w"]);
    let bad = |op: ResidualNorm| assert!(op.check().is_err(), "{op:?}");
    bad(ResidualNorm { parts: vec![], ..good() });
    bad(ResidualNorm { parts: [good().parts, good().parts].concat(), ..good() });
    bad(ResidualNorm { parts: vec![Part { x: x("h"), norm: None }], ..good() });
    bad(ResidualNorm { parts: vec![Part { x: f32s("a", &[1, 64]), norm: None }], ..good() });
    bad(ResidualNorm { weight: Some(f32s("w", &[32])), ..good() });
    bad(ResidualNorm { gain: f32::NAN, ..good() });
    bad(ResidualNorm { eps: 0.0, ..good() });
    for wrong in [
        vec![normed("h")],
        vec![normed("a")],
        vec![normed("n"), normed("n")],
        vec![normed("n"), normed("m"), normed("o"), normed("p")],
        vec![Normed { out: None, ..normed("") }],
        vec![Normed { scale: f32::INFINITY, ..normed("n") }],
        vec![Normed { codes: Some(codes()), ..normed("n") }, Normed { codes: Some(codes()), ..normed("m") }],
        vec![Normed { weight: f32s("w", &[63]), ..normed("n") }],
    ] {
        bad(ResidualNorm { normed: wrong, ..good() });
    }
}

#[test]
fn products_of_heads_and_latent_rows_refuse_what_does_not_fit() {
    let product = || HeadMatMul { w: f32s("w", &[4, 6, 8]), x: f32s("x", &[2, 4, 8]), y: f32s("y", &[2, 4, 6]) };
    product().check().unwrap();
    let bad = |op: &dyn Op| assert!(op.check().is_err(), "{op:?}");
    bad(&HeadMatMul { w: f32s("w", &[3, 6, 8]), ..product() });
    bad(&HeadMatMul { w: f32s("w", &[4, 6, 16]).narrow(2, 0, 8).unwrap(), ..product() });
    bad(&HeadMatMul { x: f32s("x", &[2, 4, 6]), ..product() });
    bad(&HeadMatMul { x: i32s("x", &[2, 4, 8]), ..product() });
    bad(&HeadMatMul { y: f32s("x", &[2, 4, 6]), x: f32s("x", &[2, 4, 8]), ..product() });
    bad(&HeadMatMul { y: f32s("y", &[3, 4, 6]), ..product() });

    let good = || LatentHeads {
        q: f32s("q", &[2, 4, 6]),
        out: f32s("o", &[2, 4, 6]),
        kv: f32s("kv", &[2, 16]),
        norm: f32s("n", &[10]),
        positions: i32s("p", &[2]),
        cache: tensor("c", QuantType::F16, &[5, 16]),
        eps: 1e-6,
        base: 1e4,
        scale: 1.0,
        yarn: None,
        magnitude: 1.0,
    };
    good().check().unwrap();
    LatentHeads { out: good().q, ..good() }.check().unwrap();
    let names = |views: Vec<&TensorView>| views.iter().map(|view| view.root().name.clone()).collect::<Vec<_>>();
    assert_eq!(names(good().writes()), ["o", "c"]);
    assert!(names(good().reads()).contains(&"c".to_owned()), "the rest of the cache stays");
    bad(&LatentHeads { q: f32s("q", &[2, 4, 5]), ..good() });
    bad(&LatentHeads { norm: f32s("n", &[9]), ..good() });
    bad(&LatentHeads { cache: tensor("c", QuantType::F16, &[5, 15]), ..good() });
    bad(&LatentHeads { cache: tensor("c", QuantType::F16, &[1, 16]), ..good() });
    bad(&LatentHeads { cache: tensor("c", QuantType::Q8_0, &[5, 32]), ..good() });
    bad(&LatentHeads { out: f32s("kv", &[2, 4, 6]), ..good() });
    bad(&LatentHeads { positions: i32s("p", &[3]), ..good() });
    for value in [0.0, f32::NAN] {
        bad(&LatentHeads { eps: value, ..good() });
        bad(&LatentHeads { base: value, ..good() });
        bad(&LatentHeads { scale: value, ..good() });
    }
    bad(&LatentHeads { magnitude: f32::INFINITY, ..good() });
    let yarn = Yarn { factor: 0.5, original_context: 4096, beta_fast: 32.0, beta_slow: 1.0 };
    bad(&LatentHeads { yarn: Some(yarn), ..good() });
}

#[test]
fn scalars_out_of_range_are_typed_errors() {
    let bad = |op: &dyn Op| {
        let result = op.check();
        assert!(matches!(result, Err(KernelError::Parameter { .. })), "{op:?}: {result:?}");
    };
    let (x, w) = (f32s("x", &[2, 4]), f32s("w", &[4]));
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        bad(&RmsNorm::new(x.clone(), w.clone(), x.clone(), eps));
    }
    bad(&Softcap { x: x.clone(), out: x.clone(), cap: 0.0 });
    bad(&Scale { x: x.clone(), out: x.clone(), factor: f32::NAN });
    bad(&Fill { x: i32s("i", &[2]), value: 0.5 });
    let (heads, positions) = (f32s("h", &[2, 1, 4]), i32s("p", &[2]));
    bad(&Rope::neox(heads.clone(), positions.clone(), 0.0, 1.0));
    bad(&Rope::neox(heads.clone(), positions.clone(), 1e4, f32::INFINITY));
    let yarn = Yarn { factor: 0.5, original_context: 4096, beta_fast: 32.0, beta_slow: 1.0 };
    bad(&Rope { yarn: Some(yarn), ..Rope::neox(heads.clone(), positions.clone(), 1e4, 1.0) });
    bad(&Rope {
        yarn: Some(Yarn { original_context: 0, factor: 2.0, ..yarn }),
        ..Rope::neox(heads, positions, 1e4, 1.0)
    });
    let glu = |limit| Glu { limit, ..Glu::new(x.clone(), f32s("u", &[2, 4]), x.clone(), Activation::Silu) };
    bad(&glu(Some(0.0)));
    glu(Some(1.0)).check().unwrap();
}

#[test]
fn attention_refuses_what_does_not_fit() {
    let good = || Attention {
        q: f32s("q", &[2, 4, 8]),
        k: f32s("k", &[16, 2, 8]),
        v: f32s("v", &[16, 2, 6]),
        positions: i32s("p", &[2]),
        out: f32s("o", &[2, 4, 6]),
        scale: 1.0,
        window: Some(15),
        softcap: None,
        sinks: None,
        ring: true,
        codes: None,
        spread: None,
    };
    good().check().unwrap();
    let bad = |op: Attention| assert!(op.check().is_err(), "{op:?}");
    bad(Attention { q: f32s("q", &[2, 3, 8]), out: f32s("o", &[2, 3, 6]), ..good() });
    bad(Attention { v: tensor("v", QuantType::F16, &[16, 2, 6]), ..good() });
    bad(Attention { v: f32s("v", &[15, 2, 6]), ..good() });
    bad(Attention { window: Some(16), ..good() });
    bad(Attention { window: Some(0), ring: false, ..good() });
    bad(Attention { window: None, ..good() });
    bad(Attention { softcap: Some(-1.0), ..good() });
    bad(Attention { positions: i32s("p", &[1]), ..good() });
    bad(Attention { sinks: Some(f32s("s", &[2])), ..good() });
    bad(Attention { out: good().q.narrow(2, 0, 6).unwrap(), ..good() });
    let spread = || Spread { room: f32s("room", &[64]), counters: i32s("count", &[8]) };
    let op = Attention { spread: Some(spread()), ..good() };
    op.check().unwrap();
    let names = |views: Vec<&TensorView>| views.iter().map(|view| view.root().name.clone()).collect::<Vec<_>>();
    assert_eq!(
        (names(op.writes()), names(op.leftovers())),
        (vec!["o".into(), "room".into(), "count".into()], vec!["room".into()])
    );
    bad(Attention { spread: Some(Spread { room: i32s("room", &[64]), ..spread() }), ..good() });
    bad(Attention { spread: Some(Spread { counters: f32s("count", &[8]), ..spread() }), ..good() });
    bad(Attention { spread: Some(Spread { counters: i32s("p", &[2]), ..spread() }), ..good() });
    bad(Attention {
        spread: Some(Spread { room: f32s("room", &[8, 8]).narrow(1, 0, 4).unwrap(), ..spread() }),
        ..good()
    });
    let codes = || Codes { q: tensor("codes", QuantType::I8, &[2, 4, 6]), scales: f32s("scales", &[2, 4, 1, 2]) };
    bad(Attention { codes: Some(codes()), ..good() });
    let wide = |out| Attention { v: f32s("v", &[16, 2, 32]), out, ..good() };
    let codes = Codes { q: tensor("codes", QuantType::I8, &[2, 4, 32]), ..codes() };
    Attention { codes: Some(codes.clone()), ..wide(f32s("o", &[2, 4, 32])) }.check().unwrap();
    bad(Attention { codes: Some(codes), ..wide(f32s("o", &[2, 4, 40]).narrow(2, 0, 32).unwrap()) });
    Attention { window: None, ring: false, ..good() }.check().unwrap();
}

#[test]
fn attention_heads_refuse_what_does_not_fit() {
    let new = || NewKeys {
        k: f32s("k", &[2, 2, 8]),
        k_norm: f32s("kn", &[8]),
        v: f32s("v", &[2, 2, 6]),
        norm_values: true,
        k_cache: f32s("kc", &[16, 2, 8]),
        v_cache: f32s("vc", &[16, 2, 6]),
        ring: false,
    };
    let good = || AttentionHeads {
        q: f32s("q", &[2, 4, 8]),
        q_norm: f32s("qn", &[8]),
        new: Some(new()),
        positions: i32s("p", &[2]),
        eps: 1e-6,
        dims: 6,
        base: 1e4,
        scale: 1.0,
        factors: Some(f32s("f", &[3])),
    };
    good().check().unwrap();
    AttentionHeads { new: None, dims: 0, factors: None, ..good() }.check().unwrap();
    let names = |views: Vec<&TensorView>| views.iter().map(|view| view.root().name.clone()).collect::<Vec<_>>();
    assert_eq!(names(good().writes()), ["q", "kc", "vc"]);
    assert_eq!(names(good().reads()), ["q", "qn", "p", "f", "k", "kn", "v", "kc", "vc"]);
    let bad = |op: AttentionHeads| assert!(op.check().is_err(), "{op:?}");
    bad(AttentionHeads { dims: 5, factors: None, ..good() });
    bad(AttentionHeads { dims: 10, factors: None, ..good() });
    bad(AttentionHeads { factors: Some(f32s("f", &[4])), ..good() });
    bad(AttentionHeads { q_norm: f32s("qn", &[7]), ..good() });
    bad(AttentionHeads { positions: i32s("p", &[3]), ..good() });
    bad(AttentionHeads { eps: 0.0, ..good() });
    bad(AttentionHeads { base: f32::NAN, ..good() });
    bad(AttentionHeads { q: f32s("q", &[2, 4, 5000]), q_norm: f32s("qn", &[5000]), new: None, ..good() });
    bad(AttentionHeads { q: i32s("q", &[2, 4, 8]), ..good() });
    let changed = |change: fn(&mut NewKeys)| {
        let mut new = new();
        change(&mut new);
        AttentionHeads { new: Some(new), ..good() }
    };
    changed(|new| (new.v, new.v_cache) = (new.k.clone(), f32s("vc", &[16, 2, 8]))).check().unwrap();
    bad(changed(|new| new.v_cache = tensor("vc", QuantType::F16, &[16, 2, 6])));
    bad(changed(|new| new.v_cache = f32s("vc", &[15, 2, 6])));
    bad(changed(|new| (new.k_cache, new.v_cache) = (f32s("kc", &[1, 2, 8]), f32s("vc", &[1, 2, 6]))));
    bad(changed(|new| new.k = f32s("q", &[2, 2, 8])));
    bad(changed(|new| (new.v, new.v_cache) = (new.k.clone(), new.k_cache.clone())));
    bad(changed(|new| new.k_norm = f32s("kn", &[6])));
    bad(changed(|new| new.v = f32s("v", &[2, 1, 6])));
}

#[test]
fn routers_refuse_groups_and_counts_that_do_not_divide() {
    let router = |experts: usize, used: usize, groups| Router {
        logits: f32s("l", &[2, experts]),
        bias: None,
        ids: i32s("i", &[2, used]),
        weights: f32s("w", &[2, used]),
        scoring: Scoring::Softmax,
        groups,
        group_rank: GroupRank::default(),
        norm: true,
        scale: 1.0,
    };
    for (experts, used, groups) in [(8, 8, None), (8, 4, Some((4, 2))), (8, 2, Some((1, 1)))] {
        router(experts, used, groups).check().unwrap();
    }
    for (experts, used, groups) in [
        (8, 9, None),
        (8, 5, Some((4, 2))),
        (8, 1, Some((3, 1))),
        (8, 1, Some((0, 0))),
        (8, 1, Some((4, 5))),
        (8, 1, Some((8, 2))),
    ] {
        assert!(router(experts, used, groups).check().is_err(), "{experts} {used} {groups:?}");
    }
}

#[test]
fn a_plan_names_what_a_graph_depends_on() {
    let (table, ids, h) = (tensor("embedding", QuantType::Q8_0, &[50, 32]), i32s("ids", &[2]), f32s("h", &[2, 32]));
    let (cache, positions) = (f32s("cache", &[16, 32]), i32s("positions", &[2]));
    let mut plan = Plan::new();
    plan.push(GetRows { table, ids, out: h.clone(), scale: 1.0 }).unwrap();
    plan.push(Scale { x: h.clone(), out: h.clone(), factor: 2.0 }).unwrap();
    let store = KvStore { src: h.clone(), cache: cache.clone(), positions: positions.clone(), ring: false };
    plan.push(store).unwrap();
    plan.push(Advance { positions, by: 1 }).unwrap();
    let seen: Vec<_> = plan.accesses().into_iter().map(|a| (a.root.name.clone(), a.range, a.reads, a.writes)).collect();
    let expected = [
        ("embedding", 0..50 * 34, true, false),
        ("ids", 0..8, true, false),
        // Written before it is read: scratch, not an input.
        ("h", 0..256, false, true),
        ("positions", 0..8, true, true),
        // A row write leaves the rest of the state as it was.
        ("cache", 0..2048, true, true),
    ];
    assert_eq!(seen, expected.map(|(n, r, a, b)| (n.to_owned(), r, a, b)));
    assert!(matches!(plan.push(MatMul { y: f32s("y", &[1, 1]), ..matmul() }), Err(KernelError::Shape { .. })));
    assert_eq!(plan.ops().len(), 4);
}

#[test]
fn an_op_over_two_devices_is_refused_with_names_and_devices() {
    let far = Root::new("blk.3.attn_q.weight", DevicePtr(1 << 40), 1 << 20, DeviceOrdinal(1));
    let w = TensorView::new(&far, QuantType::Q8_0, &[10, 64]).unwrap();
    let error = Plan::new().push(MatMul { w, ..matmul() }).unwrap_err();
    let KernelError::Placement { op: "matmul", device: DeviceOrdinal(0), found: DeviceOrdinal(1), tensor, .. } = &error
    else {
        panic!("{error:?}");
    };
    assert!(tensor.contains("blk.3.attn_q.weight"), "{tensor}");
    assert!(error.to_string().contains("copy it there first"));
}
