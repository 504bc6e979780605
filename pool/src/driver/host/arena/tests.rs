#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

const MEMORY: usize = 8 << 20;

proptest! {
    /// Whatever the order of takes and gives: no two live ranges overlap, and all given back is one piece again.
    #[test]
    fn live_ranges_never_overlap(steps in proptest::collection::vec((any::<bool>(), 1usize..200_000, any::<prop::sample::Index>()), 1..200)) {
        let mut arena = Arena::new(MEMORY).unwrap();
        let mut live: Vec<(u64, usize)> = Vec::new();
        for (take, bytes, which) in steps {
            if take || live.is_empty() {
                let bytes = Arena::rounded(bytes).unwrap();
                let Some(at) = arena.take(bytes) else { continue };
                prop_assert_eq!(at % UNIT_BYTES as u64, 0);
                for &(start, len) in &live {
                    prop_assert!(at + bytes as u64 <= start || start + len as u64 <= at);
                }
                live.push((at, bytes));
            } else {
                let (at, bytes) = live.swap_remove(which.index(live.len()));
                arena.give(at, bytes);
                prop_assert_eq!(arena.recent.last(), Some(&at));
            }
        }
        for (at, bytes) in live {
            arena.give(at, bytes);
        }
        prop_assert_eq!(arena.free.len(), 1);
        prop_assert_eq!(arena.take(2 * MEMORY), Some(arena.base));
    }
}

#[test]
fn sizes_that_wrap_are_refused() {
    assert_eq!(Arena::rounded(usize::MAX), None);
    assert_eq!(Arena::rounded(usize::MAX - 511), Some(usize::MAX - 511));
    assert!(Arena::new(usize::MAX / 2 + 1).is_none());
}
