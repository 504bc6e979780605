//! Spreading work over threads, without an influence on results.

use rayon::prelude::*;

/// Below this many elementary steps (about 1 ns each) waking other threads costs more than it saves.
const WORTH_WAKING: usize = 32 * 1024;

/// Calls `f(0) .. f(n - 1)`, each of about `cost` elementary steps, in any order and on any thread.
pub(super) fn each(n: usize, cost: usize, f: impl Fn(usize) + Send + Sync) {
    let total = n.saturating_mul(cost);
    if n < 2 || total < WORTH_WAKING || rayon::current_num_threads() < 2 {
        (0..n).for_each(f);
    } else {
        let least = (WORTH_WAKING / 4 / cost.max(1)).max(1);
        (0..n).into_par_iter().with_min_len(least).for_each(f);
    }
}
