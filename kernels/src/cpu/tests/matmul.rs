use proptest::prelude::*;

use super::*;
use crate::cpu::{dot, gemm};
use crate::ops::{ExpertMatMul, MatMul, Quantize};

const TYPES: &[QuantType] = &[
    QuantType::F32,
    QuantType::F16,
    QuantType::BF16,
    QuantType::Q4_0,
    QuantType::Q4_1,
    QuantType::Q5_0,
    QuantType::Q5_1,
    QuantType::Q8_0,
    QuantType::Q2_K,
    QuantType::Q3_K,
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
    QuantType::IQ4_NL,
    QuantType::IQ4_XS,
    QuantType::MXFP4,
];

fn reference(w: &[f32], x: &[f32], cols: usize) -> Vec<f64> {
    x.chunks(cols)
        .flat_map(|x| {
            w.chunks(cols).map(move |w| w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>())
        })
        .collect()
}

#[test]
fn every_type_and_number_of_tokens_agrees_with_the_plain_product() {
    for &ty in TYPES {
        let widths: &[usize] = match ty.block_size() {
            1 => &[1, 37, 300],
            32 => &[32, 320],
            _ => &[256, 768],
        };
        for &cols in widths {
            for (rows, tokens) in [(1, 1), (5, 2), (49, 7), (49, 8), (100, 17), (3, 40)] {
                let mut memory = Memory::default();
                let (w, exact) = memory.weights(ty, &[rows, cols], &random(1, rows * cols));
                let x = random(2, tokens * cols);
                let (x_view, y) = (memory.floats(&[tokens, cols], &x), memory.output(&[tokens, rows]));
                memory.run(&MatMul::new(w, x_view, y.clone())).unwrap();
                let scale = exact.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let want = reference(&exact, &x, cols);
                let tolerance = 1e-6 * f64::from(scale.max(1.0)) * (cols as f64).sqrt();
                close(&read(&y), &want, tolerance.max(1e-6));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_shape_agrees_with_the_plain_product(
        ty in prop::sample::select(TYPES), rows in 1usize..120, blocks in 1usize..5, odd in 1usize..700,
        tokens in 1usize..70, gap in 0usize..3,
    ) {
        let cols = match ty.block_size() {
            1 => odd,
            32 => 32 * blocks * 3,
            _ => 256 * blocks,
        };
        let mut memory = Memory::default();
        let (w, exact) = memory.weights(ty, &[rows, cols], &random(odd as u64, rows * cols));
        let x = random(2, tokens * cols);
        let (x_view, y) = (memory.strided(&[tokens, cols], &x, gap), memory.output(&[tokens, rows]));
        memory.run(&MatMul::new(w, x_view, y.clone())).unwrap();
        let scale = exact.iter().fold(1.0f64, |m, v| m.max(f64::from(v.abs())));
        close(&read(&y), &reference(&exact, &x, cols), 1e-6 * scale * (cols as f64).sqrt());
    }
}

#[test]
fn views_with_gaps_leave_the_gaps_alone() {
    for tokens in [3, 20] {
        let mut memory = Memory::default();
        let (rows, cols) = (50, 64);
        let (w, exact) = memory.weights(QuantType::Q8_0, &[rows, cols], &random(3, rows * cols));
        let x = random(4, tokens * cols);
        let x_view = memory.strided(&[tokens, cols], &x, 5);
        let wide = memory.output(&[tokens, 2 * rows + 3]);
        let (y, rest) = (wide.narrow(1, rows, rows).unwrap(), wide.narrow(1, 0, rows).unwrap());
        memory.run(&MatMul::new(w, x_view, y.clone())).unwrap();
        close(&read(&y), &reference(&exact, &x, cols), 1e-5);
        assert!(read(&rest).iter().all(|v| v.is_nan()), "columns of others were written");
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut memory = Memory::default();
    let (rows, cols) = (1000, 512);
    let (w, _) = memory.weights(QuantType::Q4_K, &[rows, cols], &random(5, rows * cols));
    for tokens in [1, 3, 600] {
        let (x, y) = (memory.floats(&[tokens, cols], &random(6, tokens * cols)), memory.output(&[tokens, rows]));
        let op = MatMul::new(w.clone(), x, y.clone());
        same_on_any_threads(|| {
            memory.run(&op).unwrap();
            read(&y)
        });
    }
}

#[test]
fn a_token_does_not_notice_the_others_of_its_batch() {
    let (rows, cols) = (70, 640);
    let mut memory = Memory::default();
    let (w, _) = memory.weights(QuantType::Q5_0, &[rows, cols], &random(7, rows * cols));
    let x = random(8, 33 * cols);
    let mut run = |range: std::ops::Range<usize>| {
        let values = &x[range.start * cols..range.end * cols];
        let (x, y) = (memory.floats(&[range.len(), cols], values), memory.output(&[range.len(), rows]));
        memory.run(&MatMul::new(w.clone(), x, y.clone())).unwrap();
        rows_of(&y)
    };
    let all = run(0..33);
    assert_eq!(run(5..25)[3], all[8], "many tokens: the same bits");
    assert_eq!(run(8..9)[0], run(4..11)[4], "few tokens: the same bits");
    for (few, many) in run(8..9)[0].iter().zip(&all[8]) {
        assert!((few - many).abs() <= 1e-5 * (1.0 + many.abs()), "{few} and {many}");
    }
}

#[test]
fn every_level_gives_nearly_the_same() {
    let (rows, cols, tokens) = (48, 512, 16);
    let x = random(9, tokens * cols);
    for &ty in TYPES {
        let mut memory = Memory::default();
        let (w, exact) = memory.weights(ty, &[rows, cols], &random(10, rows * cols));
        let row_bytes = ty.row_bytes(cols).unwrap();
        // SAFETY: the tensor's bytes, live in `memory`.
        let bytes = unsafe { std::slice::from_raw_parts(w.ptr().0 as usize as *const u8, rows * row_bytes) };
        let want = reference(&exact, &x, cols);
        let scale = exact.iter().fold(1.0f64, |m, v| m.max(f64::from(v.abs())));
        let inputs: Vec<&[f32]> = x.chunks(cols).collect();
        let mut packed = vec![0.0; cols * gemm::PANEL];
        gemm::pack(&inputs, &mut packed);
        for level in Level::available() {
            let mut few = vec![0.0; rows];
            dot::rows(level, ty, bytes, row_bytes, &inputs[..1], &mut [&mut few]);
            close(&few, &want[..rows], 3e-5 * scale);
            let (mut decoded, mut acc) = (vec![0.0; gemm::TILE * gemm::DEPTH], vec![0.0; gemm::TILE * gemm::PANEL]);
            gemm::tile(level, ty, bytes, row_bytes, cols, &packed, &mut decoded, &mut acc);
            let many: Vec<f32> = (0..tokens)
                .flat_map(|t| (0..rows).map(move |r| (t, r)))
                .map(|(t, r)| acc[r * gemm::PANEL + t])
                .collect();
            close(&many, &want, 3e-5 * scale);
        }
    }
}

#[test]
fn a_weight_that_is_not_there_is_a_fault() {
    let mut memory = Memory::default();
    let root = Root::new("lost", DevicePtr(0x10_0000), 1 << 20, DeviceOrdinal(0));
    let w = TensorView::new(&root, QuantType::Q8_0, &[10, 64]).unwrap();
    for tokens in [1, 9] {
        let (x, y) = (memory.floats(&[tokens, 64], &random(1, tokens * 64)), memory.output(&[tokens, 10]));
        let fault = memory.run(&MatMul::new(w.clone(), x, y)).unwrap_err();
        assert_eq!((fault.address, fault.bytes, fault.write), (DevicePtr(0x10_0000), 680, false));
        assert_eq!(fault.op, "matmul");
    }
}

#[test]
fn experts_are_the_products_that_the_ids_name() {
    for (tokens, used) in [(1, 2), (5, 3), (40, 2)] {
        for shared_input in [true, false] {
            let (experts, rows, cols) = (4, 20, 64);
            let mut memory = Memory::default();
            let (w, exact) =
                memory.weights(QuantType::Q5_1, &[experts, rows, cols], &random(11, experts * rows * cols));
            let ids: Vec<i32> = (0..tokens * used).map(|i| ((i * 7 + i / used) % experts) as i32).collect();
            let per_token = if shared_input { 1 } else { used };
            let x = random(12, tokens * per_token * cols);
            let shape: &[usize] = if shared_input { &[tokens, cols] } else { &[tokens, used, cols] };
            let (x_view, y) = (memory.floats(shape, &x), memory.output(&[tokens, used, rows]));
            let ids_view = memory.ints(&[tokens, used], &ids);
            memory.run(&ExpertMatMul::new(w, x_view, ids_view, y.clone())).unwrap();
            let mut want = Vec::new();
            for (slot, &id) in ids.iter().enumerate() {
                let row = if shared_input { slot / used } else { slot };
                let slab = &exact[id as usize * rows * cols..][..rows * cols];
                want.extend(reference(slab, &x[row * cols..][..cols], cols));
            }
            close(&read(&y), &want, 1e-5);
        }
    }
}

#[test]
fn an_expert_that_does_not_exist_is_a_fault() {
    // -1 stands for none.
    for id in [-2, 4, i32::MIN, i32::MAX] {
        let mut memory = Memory::default();
        let (w, _) = memory.weights(QuantType::Q8_0, &[4, 8, 32], &random(13, 4 * 8 * 32));
        let (x, ids) = (memory.floats(&[1, 32], &random(14, 32)), memory.ints(&[1, 2], &[0, id]));
        let y = memory.output(&[1, 2, 8]);
        let fault = memory.run(&ExpertMatMul::new(w, x, ids, y)).unwrap_err();
        assert!(fault.owner.contains("expert id"), "{fault}");
    }
}

/// Not a test: prints speeds of one thread, by the time it was on a core (other load does not count).
/// `cargo test --release -p evergraph-kernels speed -- --ignored --nocapture`
#[test]
#[ignore = "prints speeds"]
fn speed() {
    let on_core = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap() * 1e-9
    };
    let best = |f: &dyn Fn()| {
        (0..5)
            .map(|_| {
                let start = on_core();
                f();
                // The kernel counts at switches and ticks.
                std::thread::yield_now();
                on_core() - start
            })
            .fold(f64::INFINITY, f64::min)
    };
    parallel::tests::on_threads(1, || {
        for &ty in TYPES {
            let (rows, cols) = (16384, 1024);
            let mut memory = Memory::default();
            let values = random(1, rows * cols);
            let (w, _) = memory.weights(ty, &[rows, cols], &values);
            let bytes = w.range().len() as f64;
            let (x, y) = (memory.floats(&[1, cols], &random(2, cols)), memory.output(&[1, rows]));
            let op = MatMul::new(w.clone(), x, y);
            let seconds = best(&|| memory.run(&op).unwrap());
            print!("{ty:8} 1 token {:6.2} GB/s", bytes / seconds / 1e9);
            // SAFETY: the tensor's bytes, live in `memory`.
            let raw = unsafe { std::slice::from_raw_parts(w.ptr().0 as usize as *const u8, w.range().len()) };
            let (row_bytes, x) = (ty.row_bytes(cols).unwrap(), random(2, cols));
            for level in Level::available() {
                let mut y = vec![0.0; rows];
                let y = std::cell::RefCell::new(&mut y);
                let seconds =
                    best(&|| dot::rows(level, ty, raw, row_bytes, &[&x], &mut [y.borrow_mut().as_mut_slice()]));
                print!("  {level:?} {:5.2}", bytes / seconds / 1e9);
            }
            let all = w.clone();
            let w = w.narrow(0, 0, 2048).unwrap();
            for tokens in [4, 8, 32, 512] {
                let x = memory.floats(&[tokens, cols], &random(2, tokens * cols));
                let op = MatMul::new(w.clone(), x, memory.output(&[tokens, 2048]));
                let seconds = best(&|| memory.run(&op).unwrap());
                print!("  {tokens} tokens {:6.1} GFLOP/s", 2.0 * (tokens * 2048 * cols) as f64 / seconds / 1e9);
            }
            println!();
            if ty.block_size() == 1 {
                continue;
            }
            print!("{:8} integers", "");
            for (tokens, rows) in [(1, rows), (4, 2048), (8, 2048), (32, 2048), (512, 2048)] {
                let x = memory.floats(&[tokens, cols], &random(2, tokens * cols));
                let q = memory.bytes(QuantType::I8, &[tokens, cols], &vec![0; tokens * cols]);
                let scales = memory.output(&[tokens, cols / 32, 2]);
                let quantize = Quantize { x, q: q.clone(), scales: scales.clone() };
                let y = memory.output(&[tokens, rows]);
                let op = MatMul::quantized(all.narrow(0, 0, rows).unwrap(), q, scales, y);
                let seconds = best(&|| {
                    memory.run(&quantize).unwrap();
                    memory.run(&op).unwrap();
                });
                let gb = bytes * rows as f64 / 16384.0 / seconds / 1e9;
                print!(
                    "  {tokens} tokens {gb:6.2} GB/s, {:6.1} GFLOP/s",
                    2.0 * (tokens * rows * cols) as f64 / seconds / 1e9
                );
            }
            println!();
        }
    });
}
