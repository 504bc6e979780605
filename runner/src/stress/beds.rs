//! What sleeps, by the model's account.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use evergraph_pool::{Pool, Purpose};
use parking_lot::Mutex;

/// What sleeps, by the model's account. Purposes are numbered as in [`Purpose::ALL`].
#[derive(Debug, Default)]
pub(super) struct Beds {
    /// Taken for a sleep or a wake: nobody wakes what another one is just noting down.
    pub(super) turn: Mutex<()>,
    asleep: [AtomicBool; 3],
    /// How often the bytes of a purpose were dropped.
    dropped: [AtomicU64; 3],
}

impl Beds {
    pub(super) fn any_asleep(&self) -> bool {
        self.asleep.iter().any(|asleep| asleep.load(Ordering::SeqCst))
    }

    pub(super) fn dropped(&self) -> [u64; 3] {
        [0, 1, 2].map(|purpose: usize| self.dropped[purpose].load(Ordering::SeqCst))
    }

    /// Notes what is asleep now, after a call that may have let it fall asleep with its bytes dropped.
    pub(super) fn note(&self, pool: &Pool, dropping: bool) {
        for (index, purpose) in Purpose::ALL.into_iter().enumerate() {
            let now = pool.is_asleep(purpose);
            let before = self.asleep[index].swap(now, Ordering::SeqCst);
            if now && !before && dropping {
                self.dropped[index].fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

/// The purposes of a number's lower bits.
pub(super) fn purposes(bits: u8) -> Vec<Purpose> {
    let chosen = |(index, purpose): (usize, Purpose)| (bits >> index & 1 == 1).then_some(purpose);
    Purpose::ALL.into_iter().enumerate().filter_map(chosen).collect()
}
