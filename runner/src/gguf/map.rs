//! The one file of the runner that maps files.

#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use evergraph_pool::HostMemory;
use memmap2::{Mmap, MmapOptions};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{Error, Result};

/// The bytes of a model: a mapped file, or memory.
///
/// A mapped file must not shrink while it is in use: touching what is no longer there ends the process
/// with SIGBUS, which no program can turn into an error. Where that can happen (a file that others
/// rewrite in place, some network file systems), use [`Bytes::read`].
pub struct Bytes(Kind);

enum Kind {
    Mapped(Mmap),
    Memory { lines: Vec<Line>, bytes: usize },
}

/// Keeps copies aligned like a mapped file would be, for every tensor alignment in use.
#[derive(Clone, Copy, IntoBytes, FromBytes, Immutable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Bytes {
    /// Maps a whole file, read-only. No byte is read before it is used.
    ///
    /// # Errors
    /// [`Error::Io`] if the file can not be opened or mapped.
    pub fn map(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("can not open", path))?;
        let metadata = file.metadata().map_err(Error::io("can not read", path))?;
        if !metadata.is_file() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::Io { what: "can not map", path: path.to_owned(), source });
        }
        if metadata.len() == 0 {
            return Ok(Self::copy_of(&[])); // an empty range can not be mapped
        }
        // SAFETY: the mapping is private and read-only and lives as long as `Mmap`; the bytes are only ever
        // read as plain bytes and checked before use. Another process that changes the file can change
        // what we read, not make it invalid for `u8`; one that truncates it ends us with SIGBUS, which is
        // documented on the type.
        let map = unsafe { MmapOptions::new().map(&file) }.map_err(Error::io("can not map", path))?;
        Ok(Self(Kind::Mapped(map)))
    }

    /// Reads a whole file into memory.
    ///
    /// # Errors
    /// [`Error::Io`] if the file can not be opened or read.
    pub fn read(path: &Path) -> Result<Self> {
        // A device or a pipe might never end.
        if !std::fs::metadata(path).map_err(Error::io("can not read", path))?.is_file() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::Io { what: "can not read", path: path.to_owned(), source });
        }
        let bytes = std::fs::read(path).map_err(Error::io("can not read", path))?;
        Ok(Self::copy_of(&bytes))
    }

    /// Takes a copy of bytes in memory, aligned to 64 bytes.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut lines = vec![Line([0; 64]); bytes.len().div_ceil(64)];
        lines.as_mut_slice().as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        Self(Kind::Memory { lines, bytes: bytes.len() })
    }

    /// Whether the bytes are a mapped file.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Kind::Mapped(_))
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        match &self.0 {
            Kind::Mapped(map) => map,
            Kind::Memory { lines, bytes } => &lines.as_slice().as_bytes()[..*bytes],
        }
    }
}

// SAFETY: a mapping and a vector that is never touched again keep their address and length; the mapping is
// private and read-only, and what other processes may do to the file is documented on the type.
unsafe impl HostMemory for Bytes {
    fn bytes(&self) -> &[u8] {
        self.as_ref()
    }
}

/// A part of the bytes of a model.
#[derive(Debug)]
pub struct BytesRange {
    bytes: Arc<Bytes>,
    range: Range<usize>,
}

impl BytesRange {
    /// None where the range is not in the bytes.
    #[must_use]
    pub fn new(bytes: &Arc<Bytes>, range: Range<usize>) -> Option<Self> {
        bytes.as_ref().as_ref().get(range.clone())?;
        Some(Self { bytes: Arc::clone(bytes), range })
    }
}

// SAFETY: as for the whole, which the value owns a share of; the range was checked and does not change.
unsafe impl HostMemory for BytesRange {
    fn bytes(&self) -> &[u8] {
        self.bytes.as_ref().as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bytes").field("bytes", &self.as_ref().len()).field("mapped", &self.is_mapped()).finish()
    }
}
