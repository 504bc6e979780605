//! Random numbers: fast, and the same everywhere.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    /// The numbers of one piece of one tensor.
    pub(super) fn of(seed: u64, tensor: u64, piece: u64) -> Self {
        // Each step mixes, so that pieces that are numbered alike do not resemble each other.
        let mut mixed = Self(seed);
        for part in [tensor, piece] {
            mixed = Self(mixed.bits() ^ part.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        }
        Self(mixed.bits())
    }

    #[inline]
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Fills with random bytes.
    #[inline]
    pub(super) fn fill(&mut self, bytes: &mut [u8]) {
        let mut pieces = bytes.chunks_exact_mut(8);
        for piece in &mut pieces {
            piece.copy_from_slice(&self.bits().to_le_bytes());
        }
        let rest = pieces.into_remainder();
        if !rest.is_empty() {
            let last = self.bits().to_le_bytes();
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }

    /// Uniform in `low .. high`.
    #[inline]
    pub(super) fn below(&mut self, low: u8, high: u8) -> u8 {
        low + (((self.bits() >> 56) * u64::from(high - low)) >> 8) as u8
    }
}

/// A number of `-1 .. 1` from 32 random bits.
#[inline]
pub(super) fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (2.0 / 16_777_216.0) - 1.0
}
