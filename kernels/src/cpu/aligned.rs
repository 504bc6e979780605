//! Buffers that begin with a cache line, so that no vector of 64 bytes in them lies in two.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Numbers, aligned to 64 bytes.
pub(super) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    of: PhantomData<T>,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl<T> Default for Aligned<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), len: 0, of: PhantomData }
    }
}

impl<T: FromBytes + IntoBytes + Immutable> Aligned<T> {
    /// Makes it so long. New numbers are 0, or what was there when it was longer.
    pub(super) fn resize(&mut self, len: usize) {
        let lines = len.saturating_mul(size_of::<T>()).div_ceil(64);
        if lines > self.lines.len() {
            self.lines.resize(lines, Line::new_zeroed());
        }
        self.len = len;
    }
}

impl<T: FromBytes + IntoBytes + Immutable> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // Lines are aligned, and there are enough.
        <[T]>::ref_from_prefix_with_elems(self.lines.as_bytes(), self.len).map_or(&[], |(numbers, _)| numbers)
    }
}

impl<T: FromBytes + IntoBytes + Immutable> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        <[T]>::mut_from_prefix_with_elems(self.lines.as_mut_bytes(), self.len).map_or(&mut [], |(numbers, _)| numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_with_a_line_and_keep_what_was_in_them() {
        let mut buffer = Aligned::<i32>::default();
        assert!(buffer.is_empty());
        for len in [1, 17, 1000] {
            buffer.resize(len);
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % 64), (len, 0));
            buffer[len - 1] = 7;
        }
        buffer.resize(1);
        buffer.resize(1000);
        assert_eq!((buffer[0], buffer[1], buffer[999]), (7, 0, 7));
    }
}
