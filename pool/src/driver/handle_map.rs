//! Maps from handles.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from handles or addresses, which come from the driver and not from an adversary: a multiplication hashes them.
pub type HandleMap<K, V> = HashMap<K, V, BuildHasherDefault<HandleHasher>>;

/// Hashes one word.
#[derive(Clone, Copy, Debug, Default)]
pub struct HandleHasher(u64);

impl Hasher for HandleHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.chunks(8).for_each(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        });
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        // Handles are addresses: their low bits are alike, so the well mixed high half goes to the low bits too.
        let mixed = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
