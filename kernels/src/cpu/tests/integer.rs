use proptest::prelude::*;

use super::*;
use crate::cpu::gemm::{PANEL, TILE};
use crate::cpu::integer::{self, Panels, Token, Way};
use crate::cpu::quantize;
use crate::ops::{ExpertMatMul, MatMul, Quantize};
use crate::quant::codes::Format;

pub(in crate::cpu) const TYPES: &[QuantType] = &[
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
    QuantType::Q8_K,
    QuantType::IQ4_NL,
    QuantType::IQ4_XS,
    QuantType::MXFP4,
];

/// Blocks of any bits but for the scales, which are kept between 2^-10 and 2^-6, of either sign.
pub(in crate::cpu) fn raw(ty: QuantType, seed: u64, blocks: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes: Vec<u8> = (0..blocks * ty.type_bytes()).map(|_| (next(&mut state) >> 24) as u8).collect();
    for block in bytes.chunks_mut(ty.type_bytes()) {
        let halves: &[usize] = match ty {
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => &[0, 2],
            QuantType::Q2_K => &[80, 82],
            QuantType::Q3_K => &[108],
            QuantType::Q6_K => &[208],
            QuantType::MXFP4 | QuantType::Q8_K => &[],
            _ => &[0],
        };
        for &at in halves {
            block[at + 1] = 0x14 | (block[at + 1] & 0x8B);
        }
        match ty {
            QuantType::MXFP4 => block[0] = 118 + block[0] % 8,
            QuantType::Q8_K => block[..4].copy_from_slice(&0.01f32.to_le_bytes()),
            _ => {}
        }
    }
    bytes
}

struct Quantized {
    q: TensorView,
    scales: TensorView,
}

/// Runs the op on `[rows, cols]`.
fn quantized(memory: &mut Memory, x: &[f32], cols: usize) -> Quantized {
    let rows = x.len() / cols;
    let q = memory.bytes(QuantType::I8, &[rows, cols], &vec![99; rows * cols]);
    let scales = memory.output(&[rows, cols / 32, 2]);
    let op = Quantize { x: memory.floats(&[rows, cols], x), q: q.clone(), scales: scales.clone() };
    memory.run(&op).unwrap();
    Quantized { q, scales }
}

fn codes(view: &TensorView) -> Vec<i8> {
    // SAFETY: a contiguous tensor of the test's memory.
    unsafe { std::slice::from_raw_parts(view.ptr().0 as usize as *const i8, view.len()) }.to_vec()
}

impl Quantized {
    /// The numbers that codes and scales stand for.
    fn values(&self) -> Vec<f32> {
        let scales = read(&self.scales);
        codes(&self.q).iter().enumerate().map(|(i, &q)| f32::from(q) * scales[i / 32 * 2]).collect()
    }
}

fn reference(w: &[f32], x: &[f32], cols: usize) -> Vec<f64> {
    let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
    x.chunks(cols).flat_map(|x| w.chunks(cols).map(move |w| dot(w, x))).collect()
}

/// Mean square of the difference, by that of what is wanted.
fn nmse(got: &[f32], want: &[f64]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    square(&mut got.iter().zip(want).map(|(&g, &w)| f64::from(g) - w)) / square(&mut want.iter().copied())
}

#[test]
fn activations_are_rounded_to_the_nearest_code_of_their_32_ties_to_even() {
    let mut memory = Memory::default();
    let mut x = vec![0.0f32; 2 * 96];
    // d = 1, so that values are their own codes.
    x[..9].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4999, -3.5001]);
    // d = 0.25; the greatest is negative.
    x[32..37].copy_from_slice(&[-31.75, 31.75, 0.125, 0.375, -0.375]);
    // The second row has a group of its own scale, and one that is nothing but a subnormal.
    x[96] = 254.0;
    x[97] = 2.0;
    x[98] = -3.0;
    x[128] = 1e-45;
    let out = quantized(&mut memory, &x, 96);
    let q = codes(&out.q);
    assert_eq!(q[..10], [127, -127, 0, 2, 2, 0, -2, 3, -4, 0]);
    assert_eq!(q[32..38], [-127, 127, 0, 2, -2, 0]);
    assert_eq!(q[64..96], [0; 32]);
    assert_eq!(q[96..100], [127, 1, -2, 0], "2 / 2 and -3 / 2, which is a tie");
    assert!(q[128..].iter().all(|q| *q == 0), "{:?}", &q[128..]);
    let scales = [1.0, 1.0, 0.25, 0.0, 0.0, 0.0, 2.0, 252.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(read(&out.scales), scales, "of each group: scale, scale times sum");
}

#[test]
fn activations_that_are_no_numbers_show_in_the_scales() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [0, 7, 8, 31] {
            let mut memory = Memory::default();
            let mut x = vec![1.0; 64];
            x[place] = bad;
            let out = quantized(&mut memory, &x, 64);
            let scales = read(&out.scales);
            assert!(!scales[0].is_finite() && scales[2] == 1.0 / 127.0, "{bad} at {place}: {scales:?}");
            let (w, _) = memory.weights(QuantType::Q4_0, &[3, 64], &random(1, 3 * 64));
            let y = memory.output(&[1, 3]);
            memory.run(&MatMul::quantized(w, out.q, out.scales, y.clone())).unwrap();
            assert!(read(&y).iter().all(|y| !y.is_finite()), "{:?}", read(&y));
        }
    }
}

#[test]
fn every_level_quantises_to_the_same_bits() {
    let mut x = random(3, 4096);
    x.iter_mut().enumerate().for_each(|(i, x)| *x *= (i as f32 / 100.0).exp2() * 1e-8);
    let run = |level| {
        let (mut q, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 16]);
        quantize::row(level, &x, &mut q, &mut scales);
        (q, bits(&scales))
    };
    for level in Level::available() {
        assert_eq!(run(level), run(Level::Plain), "{level:?}");
    }
}

#[test]
fn every_type_and_shape_is_near_the_product_with_floats_and_at_that_of_the_codes() {
    for &ty in TYPES {
        let widths: &[usize] = if ty.block_size() == 32 { &[32, 96, 320, 640] } else { &[256, 768] };
        for &cols in widths {
            for (rows, tokens) in [(1, 1), (37, 1), (5, 2), (49, 7), (49, 8), (100, 17), (1, 40), (3, 33)] {
                let mut memory = Memory::default();
                let (w, exact) = memory.weights(ty, &[rows, cols], &random(rows as u64, rows * cols));
                // Not around 0, so that minima count.
                let x: Vec<f32> = random(2, tokens * cols).iter().map(|x| x + 0.3).collect();
                let input = quantized(&mut memory, &x, cols);
                let y = memory.output(&[tokens, rows]);
                memory.run(&MatMul::quantized(w, input.q.clone(), input.scales.clone(), y.clone())).unwrap();
                let want = reference(&exact, &x, cols);
                let error = nmse(&read(&y), &want);
                // A single result may be near 0 by chance.
                assert!(error <= 5e-4 || want.len() == 1, "{ty} [{rows}, {cols}], {tokens} tokens: {error:e}");
                let want = reference(&exact, &input.values(), cols);
                let size = exact.iter().fold(1.0f64, |m, v| m.max(f64::from(v.abs())));
                close(&read(&y), &want, 2e-6 * size * (cols as f64).sqrt());
            }
        }
    }
}

/// Products by one way, with few tokens and with many.
pub(in crate::cpu) fn by(
    way: Way,
    ty: QuantType,
    w: &[u8],
    cols: usize,
    x: &[(&[i8], &[f32])],
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let (format, row_bytes) = (Format::of(ty).unwrap(), ty.row_bytes(cols).unwrap());
    let rows = w.len() / row_bytes;
    let tokens: Vec<Token> = x.iter().map(|(q, scales)| Token::new(format, q, scales)).collect();
    let mut few = vec![vec![f32::NAN; rows]; x.len()];
    let mut out: Vec<&mut [f32]> = few.iter_mut().map(Vec::as_mut_slice).collect();
    integer::rows(way, (ty, format), w, row_bytes, &tokens, &mut out);
    let mut panels = Panels::default();
    panels.fill(format, x, cols);
    let mut many = vec![Vec::new(); x.len()];
    for w in w.chunks(TILE * row_bytes) {
        let mut acc = vec![f32::NAN; x.len().div_ceil(PANEL) * TILE * PANEL];
        integer::tile(way, (ty, format), w, row_bytes, &panels, &mut integer::Buffers::default(), &mut acc);
        for (t, many) in many.iter_mut().enumerate() {
            let at = |r: usize| acc[t / PANEL * TILE * PANEL + r * PANEL + t % PANEL];
            many.extend((0..w.len() / row_bytes).map(at));
        }
    }
    (few, many)
}

pub(in crate::cpu) fn all_bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| bits(row)).collect()
}

#[track_caller]
pub(in crate::cpu) fn every_way_agrees(ty: QuantType, w: &[u8], cols: usize, x: &[(&[i8], &[f32])]) {
    let plain = by(Way::Plain, ty, w, cols, x);
    for way in Way::available() {
        let (few, many) = by(way, ty, w, cols, x);
        assert_eq!(all_bits(&few), all_bits(&plain.0), "{ty} {way:?}, few tokens");
        assert_eq!(all_bits(&many), all_bits(&plain.1), "{ty} {way:?}, many tokens");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_way_gives_the_same_bits(
        ty in prop::sample::select(TYPES), rows in 1usize..60, blocks in 1usize..5, tokens in 1usize..20, seed: u64,
    ) {
        let cols = ty.block_size() * blocks;
        let w = raw(ty, seed, rows * blocks);
        let x = random(seed ^ 1, tokens * cols);
        let (mut q, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 16]);
        quantize::row(Level::Plain, &x, &mut q, &mut scales);
        let x: Vec<(&[i8], &[f32])> = q.chunks(cols).zip(scales.chunks(cols / 16)).collect();
        every_way_agrees(ty, &w, cols, &x);
    }
}

#[test]
fn the_greatest_codes_and_activations_do_not_overflow() {
    let cols = 256;
    for &ty in TYPES {
        for (fill, sign) in [(0xFF, 127), (0x00, 127), (0x80, -127), (0x7F, -127), (0x88, 127), (0x0F, 127)] {
            let mut w = vec![fill; 2 * ty.row_bytes(cols).unwrap()];
            let scales = raw(ty, 5, 2 * cols / ty.block_size());
            for (w, scales) in w.chunks_mut(ty.type_bytes()).zip(scales.chunks(ty.type_bytes())) {
                // Scales as before, all else filled.
                let kept = match ty {
                    QuantType::Q2_K => 80..84,
                    QuantType::Q3_K => 108..110,
                    QuantType::Q6_K => 208..210,
                    QuantType::MXFP4 => 0..1,
                    QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K | QuantType::Q8_K => 0..4,
                    _ => 0..2,
                };
                w[kept.clone()].copy_from_slice(&scales[kept]);
            }
            let (q, d) = (vec![sign; 9 * cols], vec![0.5; 9 * cols / 16]);
            let x: Vec<(&[i8], &[f32])> = q.chunks(cols).zip(d.chunks(cols / 16)).collect();
            every_way_agrees(ty, &w, cols, &x);
            let mut exact = vec![0.0; 2 * cols];
            dequantize(ty, &w, &mut exact).unwrap();
            let want = reference(&exact, &vec![0.5 * f32::from(sign); cols], cols);
            let (few, many) = by(Way::current(), ty, &w, cols, &x);
            let size = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
            close(&few[0], &want, 1e-5 * size);
            close(&many[8], &want, 1e-5 * size);
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_nor_on_other_tokens() {
    let mut memory = Memory::default();
    let (rows, cols) = (1000, 512);
    let (w, _) = memory.weights(QuantType::Q4_K, &[rows, cols], &random(5, rows * cols));
    let x = random(6, 600 * cols);
    let all = quantized(&mut memory, &x, cols);
    let mut run = |first: usize, tokens: usize| {
        let (q, scales) = (all.q.narrow(0, first, tokens).unwrap(), all.scales.narrow(0, first, tokens).unwrap());
        let y = memory.output(&[tokens, rows]);
        let op = MatMul::quantized(w.clone(), q, scales, y.clone());
        same_on_any_threads(|| {
            memory.run(&op).unwrap();
            read(&y)
        });
        rows_of(&y)
    };
    let many = run(0, 600);
    assert_eq!(run(530, 20)[3], many[533]);
    assert_eq!(run(8, 1)[0], run(4, 7)[4]);
}

#[test]
fn strided_activations_are_read_where_they_are() {
    for tokens in [3, 20] {
        let mut memory = Memory::default();
        let (rows, cols) = (50, 64);
        let (w, exact) = memory.weights(QuantType::Q5_1, &[rows, cols], &random(3, rows * cols));
        let x = random(4, tokens * 2 * cols);
        // Two inputs side by side; codes and scales of the second are used, and made from strided floats.
        let wide = memory.floats(&[tokens, 2 * cols], &x);
        let q = memory.bytes(QuantType::I8, &[tokens, 2 * cols], &vec![77; tokens * 2 * cols]);
        let scales = memory.output(&[tokens, 2 * cols / 32, 2]);
        let second = |view: &TensorView, by: usize| view.narrow(1, by, by).unwrap();
        let (q2, scales2) = (second(&q, cols), second(&scales, cols / 32));
        memory.run(&Quantize { x: second(&wide, cols), q: q2.clone(), scales: scales2.clone() }).unwrap();
        assert!(codes(&q).chunks(2 * cols).all(|row| row[..cols].iter().all(|&q| q == 77)), "others' codes");
        assert!(
            read(&scales).chunks(cols / 8).all(|row| row[..cols / 16].iter().all(|d| d.is_nan())),
            "others' scales"
        );
        let y = memory.output(&[tokens, rows]);
        memory.run(&MatMul::quantized(w, q2, scales2, y.clone())).unwrap();
        let x: Vec<f32> = x.chunks(2 * cols).flat_map(|row| row[cols..].to_vec()).collect();
        assert!(nmse(&read(&y), &reference(&exact, &x, cols)) < 5e-4);
    }
}

#[test]
fn experts_take_quantised_activations_shared_or_their_own() {
    for &ty in &[QuantType::Q8_0, QuantType::MXFP4, QuantType::Q2_K] {
        for (tokens, used) in [(1, 2), (5, 3), (40, 2)] {
            for shared_input in [true, false] {
                let (experts, rows, cols) = (4, 21, 256);
                let mut memory = Memory::default();
                let (w, exact) = memory.weights(ty, &[experts, rows, cols], &random(11, experts * rows * cols));
                let ids: Vec<i32> = (0..tokens * used).map(|i| ((i * 7 + i / used) % experts) as i32).collect();
                let per_token = if shared_input { 1 } else { used };
                let x = random(12, tokens * per_token * cols);
                let mut input = quantized(&mut memory, &x, cols);
                if !shared_input {
                    input.q = input.q.reshape(&[tokens, used, cols]).unwrap();
                    input.scales = input.scales.reshape(&[tokens, used, cols / 32, 2]).unwrap();
                }
                let (ids_view, y) = (memory.ints(&[tokens, used], &ids), memory.output(&[tokens, used, rows]));
                memory.run(&ExpertMatMul::quantized(w, input.q, input.scales, ids_view, y.clone())).unwrap();
                let mut want = Vec::new();
                for (slot, &id) in ids.iter().enumerate() {
                    let row = if shared_input { slot / used } else { slot };
                    let slab = &exact[id as usize * rows * cols..][..rows * cols];
                    want.extend(reference(slab, &x[row * cols..][..cols], cols));
                }
                let error = nmse(&read(&y), &want);
                assert!(error <= 5e-4, "{ty}, {tokens} tokens, {used} experts, shared {shared_input}: {error:e}");
            }
        }
    }
}

#[test]
fn scales_that_are_not_there_are_a_fault() {
    for tokens in [1, 9] {
        let mut memory = Memory::default();
        let (w, _) = memory.weights(QuantType::Q8_0, &[10, 64], &random(1, 640));
        let input = quantized(&mut memory, &random(1, tokens * 64), 64);
        let root = Root::new("lost", DevicePtr(0x10_0000), 1 << 20, DeviceOrdinal(0));
        let scales = TensorView::new(&root, QuantType::F32, &[tokens, 2, 2]).unwrap();
        let y = memory.output(&[tokens, 10]);
        let fault = memory.run(&MatMul::quantized(w, input.q, scales, y)).unwrap_err();
        assert_eq!((fault.address, fault.bytes, fault.write), (DevicePtr(0x10_0000), tokens * 16, false));
    }
}
