//! How large a physical chunk is, by what it is for.

use crate::{PoolError, Purpose};

/// A line of the table of chunk sizes (vmm): what is missing in one piece, and for what, says how large the chunks are.
///
/// Measured on an H200 (driver 580, medians, microseconds a call):
///
/// | call | 2 MiB | 32 MiB | 256 MiB | 1 GiB |
/// |---|---|---|---|---|
/// | create | 14.5 | 14.3 | 32 | 50 |
/// | map | 1.1 | 1.3 | 1.6 | 2.7 |
/// | set access (a whole range) | 29 | 49 | 53 | 98 |
/// | unmap | 19 | 28 | 28 | 43 |
/// | release | 15 | 43 | 161 | 587 |
/// | **create, map, unmap, release: a MiB** | **24.8** | **2.7** | **0.87** | **0.67** |
///
/// So it is the calls that cost, not the bytes: 252 MiB are 126 chunks of 2 MiB and some 6 ms there and back, but 7 chunks
/// of 32 MiB and a rest of 14 small ones, 1.3 ms. From 32 to 256 MiB there is another factor of three to be had, from there
/// on hardly any.
///
/// What a large chunk costs is freedom: it goes back, or under another range, as a whole, so one small block in it keeps
/// all of it. Hence the table in [`USUAL`](Self::USUAL):
///
/// | for | missing at one place | chunk |
/// |---|---|---|
/// | scratch, state | 64 MiB or more | 32 MiB |
/// | weights (they come and go together) | 32 MiB or more | 32 MiB |
/// | weights | 256 MiB or more | 256 MiB |
/// | all else, and what is left over | | 2 MiB |
///
/// and a chunk is never more than a sixteenth of what the pool may have at all, so that a small card, or a small limit, has
/// small chunks. Nothing is rounded up: the rest of a request is in smaller chunks. Where the driver has no large chunk
/// left, smaller ones are tried before the pool says that it is short.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ChunkClass {
    /// For this purpose; `None`: for all.
    pub purpose: Option<Purpose>,
    /// Where at least so many bytes are missing in one piece.
    pub from_bytes: usize,
    /// Bytes of a chunk: a multiple of the pool's smallest chunk, no more than `from_bytes`.
    pub chunk_bytes: usize,
}

/// A chunk is at most this part of what the pool may have.
const LEAST_CHUNKS: u64 = 16;

impl ChunkClass {
    /// The table that a pool has unless it is told otherwise.
    pub const USUAL: [Self; 3] = [
        Self { purpose: None, from_bytes: 64 << 20, chunk_bytes: 32 << 20 },
        Self { purpose: Some(Purpose::Weight), from_bytes: 32 << 20, chunk_bytes: 32 << 20 },
        Self { purpose: Some(Purpose::Weight), from_bytes: 256 << 20, chunk_bytes: 256 << 20 },
    ];

    pub(crate) fn check(&self, smallest_bytes: usize) -> Result<(), PoolError> {
        if self.chunk_bytes == 0 || !self.chunk_bytes.is_multiple_of(smallest_bytes) || self.chunk_bytes > 1 << 46 {
            return Err(PoolError::Config("a class's chunk_bytes must be a multiple of the pool's smallest chunk"));
        }
        if self.from_bytes < self.chunk_bytes {
            return Err(PoolError::Config("a class's from_bytes must be at least its chunk_bytes"));
        }
        Ok(())
    }
}

/// Where a chunk is to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gap {
    pub(crate) purpose: Purpose,
    /// What was missing there in one piece at first.
    pub(crate) bytes: u64,
    /// What is missing still.
    pub(crate) left_bytes: u64,
}

/// Bytes of the next chunk: the largest of a class that the gap is in, that the rest of it has room for, and that is small
/// beside `room_bytes`, which is what the pool may have in all. Else `smallest_bytes`.
pub(crate) fn chunk_class(gap: Gap, room_bytes: u64, smallest_bytes: u64, classes: &[ChunkClass]) -> u64 {
    let share = if crate::mutant::is("bundles-on-small-cards") { u64::MAX } else { room_bytes / LEAST_CHUNKS };
    let fits = |class: &&ChunkClass| {
        class.purpose.is_none_or(|purpose| purpose == gap.purpose)
            && class.from_bytes as u64 <= gap.bytes
            && class.chunk_bytes as u64 <= gap.left_bytes.min(share)
    };
    let found = classes.iter().filter(fits).map(|class| class.chunk_bytes as u64).max();
    found.unwrap_or(smallest_bytes).max(smallest_bytes)
}

/// The chunks that fill a gap: sizes and how many of each, largest first.
pub(crate) fn chunks_of(
    purpose: Purpose,
    bytes: u64,
    room_bytes: u64,
    smallest_bytes: u64,
    classes: &[ChunkClass],
) -> impl Iterator<Item = (u64, u64)> {
    let mut left_bytes = bytes;
    std::iter::from_fn(move || {
        (left_bytes > 0).then(|| {
            let chunk = chunk_class(Gap { purpose, bytes, left_bytes }, room_bytes, smallest_bytes, classes).max(1);
            let count = (left_bytes / chunk).max(1);
            left_bytes = left_bytes.saturating_sub(count * chunk);
            (chunk, count)
        })
    })
}

#[cfg(test)]
mod tests;
