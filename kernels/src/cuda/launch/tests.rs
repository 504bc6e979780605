#![allow(clippy::unwrap_used)]

use super::matvec::MatVec;
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
