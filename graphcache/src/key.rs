//! What a graph is found by.

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};

use evergraph_pool::driver::DeviceOrdinal;
use smallvec::SmallVec;

use crate::Request;

/// The caller's part of a graph's key: everything that shapes the work, and nothing that is an address.
///
/// Two keys are equal only if everything that was put in is equal; a hash is never taken for identity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GraphKey {
    hash: u64,
    bytes: SmallVec<[u8; 32]>,
}

impl GraphKey {
    /// A key of anything hashable: a name, a shape, a tuple of both. Make it once and keep it.
    #[must_use]
    pub fn new(key: impl Hash) -> Self {
        let mut recorder = Recorder(SmallVec::new());
        key.hash(&mut recorder);
        let mut mixer = Mixer::default();
        mixer.write(&recorder.0);
        Self { hash: mixer.finish(), bytes: recorder.0 }
    }
}

impl GraphKey {
    #[inline]
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}

/// The texts in it as they are, other bytes as numbers: for messages.
impl fmt::Display for GraphKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |byte: &u8| (b' '..=b'~').contains(byte);
        let alike = |a: &u8, b: &u8| text(a) == text(b);
        let pieces = self.bytes.chunk_by(alike).map(|piece| match std::str::from_utf8(piece) {
            Ok(words) if text(&piece[0]) => words.to_owned(),
            // What ends a text, and what pads a number.
            _ => piece.iter().filter(|&&byte| byte != 0 && byte != 0xff).map(|byte| format!("{byte:02x}")).collect(),
        });
        f.write_str(pieces.filter(|piece| !piece.is_empty()).collect::<Vec<_>>().join(" ").as_str())
    }
}

/// Keeps what a key feeds to its hasher, instead of hashing it.
struct Recorder(SmallVec<[u8; 32]>);

impl Hasher for Recorder {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
    fn finish(&self) -> u64 {
        0
    }
}

/// The whole key: the caller's, the device, the stream that the graph is bound to, the generation of the code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FullKey {
    pub(crate) key: GraphKey,
    pub(crate) device: DeviceOrdinal,
    pub(crate) stream: u64,
    pub(crate) modules: u64,
}

impl FullKey {
    /// Whether it is a request's key: compared without making one.
    #[inline]
    pub(crate) fn is_of(&self, request: &Request<'_>) -> bool {
        self.stream == request.stream.id()
            && self.modules == request.modules
            && self.key == *request.key
            && self.device == request.stream.device()
    }
}

impl Hash for FullKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.key.hash);
        state.write_u64(self.stream);
        state.write_u64(self.modules << 8 | u64::from(self.device.0));
    }
}

/// A quick hasher for keys that are hashed already. Keys come from the program, not from an adversary.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word) ^ (chunk.len() as u64) << 56);
        }
    }
    #[inline]
    fn write_u64(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 29;
    }
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

impl BuildHasher for Mixer {
    type Hasher = Self;
    fn build_hasher(&self) -> Self {
        *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_equal_only_if_everything_in_them_is() {
        assert_eq!(GraphKey::new(("decode", 4)), GraphKey::new(("decode", 4)));
        assert_ne!(GraphKey::new(("decode", 4)), GraphKey::new(("decode", 5)));
        assert_ne!(GraphKey::new(("ab", "c")), GraphKey::new(("a", "bc")));
        assert_ne!(GraphKey::new(vec![1u8, 2]), GraphKey::new((1u8, 2u8)));
    }

    #[test]
    fn streams_and_code_generations_have_their_own_graphs() {
        let full = |stream, modules| FullKey { key: GraphKey::new(1u8), device: DeviceOrdinal(0), stream, modules };
        assert_ne!(full(1, 0), full(2, 0));
        assert_ne!(full(1, 0), full(1, 1));
    }
}
