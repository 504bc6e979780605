use super::*;

const MIB: u64 = 1 << 20;
const BASE: u64 = 2 * MIB;
const CARD: u64 = 140 << 30;

/// Chunk sizes and how many of each, in MiB.
fn usual(purpose: Purpose, mib: u64) -> Vec<(u64, u64)> {
    chunks_of(purpose, mib * MIB, CARD, BASE, &ChunkClass::USUAL).map(|(bytes, times)| (bytes / MIB, times)).collect()
}

#[test]
fn a_large_request_is_a_few_chunks_and_nothing_is_rounded_up() {
    assert_eq!(usual(Purpose::Scratch, 252), [(32, 7), (2, 14)]);
    assert_eq!(usual(Purpose::State, 252), usual(Purpose::Scratch, 252));
    assert_eq!(usual(Purpose::Weight, 700), [(256, 2), (32, 5), (2, 14)]);
    for purpose in Purpose::ALL {
        for mib in [2, 8, 30, 62, 64, 66, 252, 256, 1024] {
            let sum: u64 = usual(purpose, mib).iter().map(|(mib, times)| mib * times).sum();
            assert_eq!(sum, mib, "{purpose:?} {mib}");
        }
    }
}

#[test]
fn what_is_small_stays_in_small_chunks() {
    assert_eq!(usual(Purpose::Scratch, 62), [(2, 31)], "a small block would keep too much");
    assert_eq!(usual(Purpose::Scratch, 64), [(32, 2)]);
    assert_eq!(usual(Purpose::Weight, 30), [(2, 15)]);
    assert_eq!(usual(Purpose::Weight, 34), [(32, 1), (2, 1)]);
    assert_eq!(usual(Purpose::Weight, 256), [(256, 1)]);
    assert_eq!(usual(Purpose::Scratch, 256), [(32, 8)], "256 MiB at a time is for weights");
}

#[test]
fn a_small_card_has_small_chunks() {
    let largest = |room: u64| {
        let sizes = chunks_of(Purpose::Weight, 256 * MIB, room, BASE, &ChunkClass::USUAL);
        sizes.map(|(bytes, _)| bytes / MIB).max()
    };
    let rooms = [4 << 30, (4 << 30) - 1, 512 * MIB, 511 * MIB, 0];
    assert_eq!(rooms.map(largest), [256, 32, 32, 2, 2].map(Some));
}

#[test]
fn classes_without_an_order_and_odd_numbers() {
    let classes = [
        ChunkClass { purpose: None, from_bytes: 96, chunk_bytes: 48 },
        ChunkClass { purpose: None, from_bytes: 24, chunk_bytes: 12 },
    ];
    let sizes = |bytes| chunks_of(Purpose::State, bytes, u64::MAX, 6, &classes).collect::<Vec<_>>();
    assert_eq!(sizes(120), [(48, 2), (12, 2)]);
    assert_eq!(sizes(31), [(12, 2), (6, 1), (6, 1)], "the last one is not full");
    assert_eq!(sizes(18), [(6, 3)]);
    assert!(sizes(0).is_empty());
    assert_eq!(sizes(u64::MAX).iter().map(|(size, _)| *size).collect::<Vec<_>>(), [48, 12, 6]);
    assert_eq!(chunks_of(Purpose::State, u64::MAX, u64::MAX, 6, &[]).count(), 2);
}

#[test]
fn a_class_that_makes_no_sense_is_refused() {
    let class = |from_bytes, chunk_bytes| ChunkClass { purpose: None, from_bytes, chunk_bytes }.check(64);
    assert!(class(128, 128).is_ok());
    for (from, chunk) in [(128, 0), (128, 96), (100, 128), (usize::MAX, usize::MAX & !63)] {
        assert!(class(from, chunk).is_err(), "{from} {chunk}");
    }
}
