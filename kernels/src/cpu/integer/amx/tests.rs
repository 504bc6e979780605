#![allow(clippy::unwrap_used)]

use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::cpu::gemm::TILE;
use crate::cpu::integer::{Buffers, Panels, Way, tile};
use crate::cpu::quantize;
use crate::cpu::tests::integer::{TYPES, all_bits, by, raw};
use crate::cpu::tests::{bits, random};
use crate::quant::QuantType;
use crate::quant::codes::Format;

/// Rows of codes with a scale for each 32, and another sum for each.
fn activations(seed: u64, tokens: usize, cols: usize) -> (Vec<i8>, Vec<f32>) {
    let x = random(seed, tokens * cols);
    let (mut q, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 16]);
    quantize::row(Level::Plain, &x, &mut q, &mut scales);
    (q, scales)
}

/// One tile of weight rows times all tokens: `[panel][row][lane]`, as bits, of the rows that are there.
fn product(way: Way, ty: QuantType, w: &[u8], cols: usize, panels: &Panels, tokens: usize, batch: usize) -> Vec<u32> {
    let (mut buffers, row_bytes) = (Buffers::default(), ty.row_bytes(cols).unwrap());
    buffers.batch = batch;
    let mut acc = vec![f32::NAN; tokens.div_ceil(PANEL) * TILE * PANEL];
    tile(way, (ty, Format::of(ty).unwrap()), w, row_bytes, panels, &mut buffers, &mut acc);
    let rows = w.len() / row_bytes * PANEL;
    acc.chunks(TILE * PANEL).flat_map(|acc| bits(&acc[..rows])).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Columns that fill no batch, rows that fill no tile, one panel left over: with any unit the same bits as without tiles.
    #[test]
    fn batches_rows_and_panels_of_any_number_give_the_bits_of_the_plain_way(
        ty in prop::sample::select(TYPES), rows in 1usize..=TILE, blocks in 1usize..12, tokens in 1usize..70,
        batch in 1usize..10, seed: u64,
    ) {
        let cols = if ty.block_size() == 32 { 32 * blocks } else { 256 * (blocks / 4 + 1) };
        let w = raw(ty, seed, rows * cols / ty.block_size());
        let (q, scales) = activations(seed ^ 1, tokens, cols);
        let x: Vec<(&[i8], &[f32])> = q.chunks(cols).zip(scales.chunks(cols / 16)).collect();
        let mut panels = Panels::default();
        panels.fill(Format::of(ty).unwrap(), &x, cols);
        let plain = product(Way::Plain, ty, &w, cols, &panels, tokens, BATCH);
        for unit in emulated::units() {
            let got = product(Way::Tiles(unit), ty, &w, cols, &panels, tokens, batch);
            prop_assert_eq!(got, plain.clone(), "{} {:?}", ty, unit);
            prop_assert!(!emulated::in_use(), "tiles are given back");
        }
    }
}

/// On a machine without tiles nothing else would notice a wrong instruction.
#[test]
#[cfg(target_os = "linux")]
fn instructions_of_tiles_are_tried_on_any_machine() {
    let units = emulated::units();
    assert_eq!(units, [Unit::Emulated, Unit::Hardware]);
    println!("tiles of the processor: {}", missing().map_or("used".to_owned(), |missing| missing.to_string()));
}

#[test]
fn few_columns_or_tokens_are_no_case_of_their_own() {
    for (group, from) in FROM {
        assert!(worth(from, group) && (from == 0 || !worth(from - 1, group)));
    }
    assert!(!worth(usize::MAX, 64), "no such group");
    for way in [Way::Plain, Way::Avx2, Way::Vnni] {
        assert_eq!(way.without_tiles(), way);
    }
    assert!(Way::for_tokens(1, 32) == Way::current().without_tiles() && Way::Tiles(Unit::Hardware) > Way::Vnni);
    assert_eq!(Way::for_tokens(512, 32), if worth(512, 32) { Way::current() } else { Way::current().without_tiles() });
}

/// Real tiles, on all threads at once, so that the system has to keep them over switches.
#[test]
fn tiles_of_the_processor_give_the_same_bits_on_many_threads() {
    if let Some(missing) = missing() {
        eprintln!("skipped: no tiles here: {missing}");
        return;
    }
    let (rows, cols, tokens) = (TILE + 5, 768, 37);
    let work = |seed: u64| {
        for &ty in TYPES {
            let w = raw(ty, seed, rows * cols / ty.block_size());
            let (q, scales) = activations(seed, tokens, cols);
            let x: Vec<(&[i8], &[f32])> = q.chunks(cols).zip(scales.chunks(cols / 16)).collect();
            let [plain, tiles] = [Way::Plain, Way::Tiles(Unit::Hardware)].map(|way| by(way, ty, &w, cols, &x).1);
            assert_eq!(all_bits(&tiles), all_bits(&plain), "{ty}");
            assert!(!in_use(), "tiles are given back");
        }
    };
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from).min(32);
    std::thread::scope(|scope| (0..threads as u64).for_each(|t| drop(scope.spawn(move || work(t)))));
}

/// Whether this thread's tiles must be kept over a switch (XINUSE, bit 18).
fn in_use() -> bool {
    #[target_feature(enable = "xsave")]
    fn xinuse() -> u64 {
        // SAFETY: processors with tiles have register 1.
        unsafe { std::arch::x86_64::_xgetbv(1) }
    }
    // SAFETY: processors with tiles have XSAVE.
    unsafe { xinuse() & 1 << 18 != 0 }
}

/// Not a test: prints speeds of one thread, with and without tiles, which decide [`FROM`] and [`BATCH`].
/// `cargo test --release -p evergraph-kernels --lib tiles_against_vnni -- --ignored --nocapture`
#[test]
#[ignore = "prints speeds"]
fn tiles_against_vnni() {
    let missing = missing();
    let (rows, cols) = (20 * TILE, 2048);
    let batches = [1, 2, 4, 8, 16];
    println!("10^9 multiplications and additions a second, one thread, {rows} rows, {cols} columns; best of 7");
    if let Some(missing) = missing {
        println!("no tiles here: {missing}");
    }
    for ty in [QuantType::Q4_0, QuantType::Q8_0, QuantType::Q4_K, QuantType::Q6_K] {
        let (format, row_bytes) = (Format::of(ty).unwrap(), ty.row_bytes(cols).unwrap());
        let w = raw(ty, 1, rows * cols / ty.block_size());
        for tokens in [9, 16, 32, 64, 512] {
            let (q, scales) = activations(2, tokens, cols);
            let x: Vec<(&[i8], &[f32])> = q.chunks(cols).zip(scales.chunks(cols / 16)).collect();
            let mut panels = Panels::default();
            panels.fill(format, &x, cols);
            let mut acc = vec![0.0; tokens.div_ceil(PANEL) * TILE * PANEL];
            let mut speed = |way: Way, batch: usize| {
                let mut buffers = Buffers::default();
                buffers.batch = batch;
                let mut once = || {
                    let start = Instant::now();
                    for w in w.chunks(TILE * row_bytes) {
                        tile(way, (ty, format), w, row_bytes, &panels, &mut buffers, &mut acc);
                    }
                    start.elapsed().as_secs_f64()
                };
                let best = (0..7).map(|_| once()).fold(f64::INFINITY, f64::min);
                (2.0 * (rows * cols * tokens) as f64 / best / 1e9, bits(&acc))
            };
            let (vnni, want) = speed(Way::current().without_tiles(), BATCH);
            print!("{ty:5} {tokens:3} tokens: {:?} {vnni:7.1}", Way::current().without_tiles());
            if missing.is_none() {
                print!("  tiles");
                for batch in batches {
                    let (tiles, got) = speed(Way::Tiles(Unit::Hardware), batch);
                    assert!(got == want, "other bits");
                    print!("  {tiles:7.1} ({batch} groups, {:.2} x)", tiles / vnni);
                }
            }
            println!();
        }
    }
}
