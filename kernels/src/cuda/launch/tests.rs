#![allow(clippy::unwrap_used)]

use evergraph_pool::driver::{DeviceInfo, DeviceOrdinal, DevicePtr};

use super::matvec::MatVec;
use crate::ops::{Attention, Codes, Launches, Op, Root, Spread, TensorView};
use crate::quant::QuantType;

#[test]
fn every_kernel_for_few_tokens_fits_every_device() {
    for &ty in QuantType::ALL.iter().filter(|ty| ty.supported()) {
        for (eights, tokens) in [(false, 1), (false, 4), (true, 1), (true, 8)] {
            for cols in [256, 2048, 2816, 8192, 1 << 20] {
                let config = MatVec { ty, eights, tokens }.config(100_000, cols, 1, 132);
                assert!(config.shared_bytes <= 47 * 1024, "{ty} {tokens}: {} bytes", config.shared_bytes);
                assert!(config.grid[0] >= 1 && config.grid[0] <= 132 * 4);
            }
        }
    }
}

#[test]
fn small_products_spread_over_the_device_and_large_ones_take_turns_evenly() {
    let kind = MatVec { ty: QuantType::Q4_0, eights: true, tokens: 1 };
    // 16 rows a block where a row is one step: 2048 rows are 128 blocks.
    assert_eq!(kind.config(2048, 1024, 1, 132).grid, [128, 1, 1]);
    // Two warps share the rows of two steps.
    assert_eq!(kind.config(2048, 2048, 1, 132).grid, [256, 1, 1]);
    // 16384 groups on 528 blocks would be 32 turns, the last one for a few: 512 blocks take 32 each.
    assert_eq!(kind.config(262_144, 2816, 1, 132).grid, [512, 1, 1]);
    // Slots of experts share the device.
    assert_eq!(kind.config(4096, 1024, 8, 132).grid, [64, 8, 1]);
}

/// Attention of some tokens over a cache of 16384 rows, on a device of 132 multiprocessors.
fn attention([tokens, heads, kv_heads, d, dv]: [usize; 5], ty: QuantType, codes: bool) -> Launches {
    let mut at = 0;
    let mut tensor = |ty: QuantType, shape: &[usize]| {
        at += 1 << 32;
        TensorView::new(&Root::new("x", DevicePtr(at), 1 << 32, DeviceOrdinal(0)), ty, shape).unwrap()
    };
    let (room, counters) = (Attention::room(tokens, heads, kv_heads, dv), Attention::counters(tokens, heads, kv_heads));
    let op = Attention {
        q: tensor(QuantType::F32, &[tokens, heads, d]),
        k: tensor(ty, &[16384, kv_heads, d]),
        v: tensor(ty, &[16384, kv_heads, dv]),
        positions: tensor(QuantType::I32, &[tokens]),
        out: tensor(QuantType::F32, &[tokens, heads, dv]),
        scale: 1.0,
        window: None,
        softcap: None,
        sinks: None,
        ring: false,
        codes: codes.then(|| Codes {
            q: tensor(QuantType::I8, &[tokens, heads, dv]),
            scales: tensor(QuantType::F32, &[tokens, heads, dv / 32, 2]),
        }),
        spread: room.zip(counters).map(|(room, counters)| Spread {
            room: tensor(QuantType::F32, &[room]),
            counters: tensor(QuantType::I32, &[counters]),
        }),
    };
    op.check().unwrap();
    let mut device = DeviceInfo::new(DeviceOrdinal(0), "cuda", "test", 1 << 40, true);
    (device.multiprocessors, device.compute_capability) = (132, (9, 0));
    op.launches(&device)
}

#[test]
fn keys_of_few_tokens_are_spread_over_all_of_a_device() {
    let f16 = QuantType::F16;
    for (shape, kernel, grid) in [
        // Compressed keys of 16 heads; two global key heads; eight local ones; 128 heads; some tokens.
        ([1, 16, 1, 576, 512], "attention_split_16", [132, 1, 1]),
        ([1, 16, 2, 512, 512], "attention_split_8", [132, 1, 2]),
        ([1, 16, 8, 256, 256], "attention_split_8", [33, 1, 8]),
        ([1, 128, 1, 576, 512], "attention_split_16", [16, 1, 8]),
        ([8, 16, 1, 576, 512], "attention_split_16", [16, 8, 1]),
        ([8, 256, 32, 128, 128], "attention_split_8", [1, 8, 32]),
    ] {
        let launches = attention(shape, f16, true);
        let [launch] = &launches[..] else { panic!("{shape:?}: {launches:?}") };
        assert_eq!((launch.kernel, launch.config.grid), (kernel, grid), "{shape:?}");
        assert!(launch.config.shared_bytes <= 48 * 1024 - 512, "{shape:?}: {}", launch.config.shared_bytes);
    }
    for (shape, ty) in [
        ([9, 16, 1, 576, 512], f16),
        ([1, 16, 1, 576, 512], QuantType::F32),
        ([1, 16, 1, 576, 512], QuantType::BF16),
        ([1, 16, 1, 608, 512], f16),
        ([1, 16, 1, 72, 64], f16),
        ([1, 16, 1, 64, 96], f16),
    ] {
        let kernels = |codes| attention(shape, ty, codes).iter().map(|launch| launch.kernel).collect::<Vec<_>>();
        assert_eq!((kernels(true), kernels(false)), (vec!["attention", "quantize"], vec!["attention"]), "{shape:?}");
    }
}
