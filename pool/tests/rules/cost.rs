//! What the warm path costs. The real numbers are in `benches/`; this keeps it from growing a driver call, an
//! event or a heap allocation unnoticed.

use std::time::Instant;

use crate::common::*;

#[test]
fn a_warm_pair_makes_no_driver_call() {
    both(|mode| {
        let rig = Rig::new(mode);
        for bytes in [512, 5000, MIB] {
            drop(rig.alloc(bytes));
            let calls = rig.faulty.count("any");
            let rounds = 200_000u32;
            let start = Instant::now();
            for _ in 0..rounds {
                drop(std::hint::black_box(rig.alloc(bytes)));
            }
            let pair = start.elapsed() / rounds;
            eprintln!("{bytes} bytes: {pair:?} for one alloc and drop");
            assert_eq!(rig.faulty.count("any"), calls);
        }
    });
}
