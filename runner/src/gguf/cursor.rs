//! Reading forward through bytes that nobody vouches for.

use super::types::{Check, ValueType};
use crate::error::{BadFile, Error, Result};

/// Longest string taken, bytes.
pub(super) const STRING_CAP_BYTES: u64 = 1 << 27;
/// Most array elements taken.
pub(super) const ARRAY_CAP: u64 = 1 << 27;

/// A position in a file.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    pub(super) fn bad(&self, check: Check, what: impl Into<String>, found: impl Into<String>) -> Error {
        bad(check, self.at as u64, what, found)
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8]> {
        if count > self.left() {
            return Err(self.bad(Check::Truncated, what, format!("{} of {count} bytes", self.left())));
        }
        // `count` is at most the length of a slice, so it fits a usize and the sum can not wrap.
        let end = self.at + count as usize;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things of which each takes at least `least_bytes` more bytes.
    pub(super) fn count(&mut self, what: &str, least_bytes: u64, cap: u64) -> Result<u64> {
        let start = self.at as u64;
        let count = self.u64(what)?;
        let fits = self.left() / least_bytes.max(1);
        if count > cap.min(fits) {
            let found = format!("{count}, with {} bytes left and a cap of {cap}", self.left());
            return Err(bad(Check::Count, start, what, found));
        }
        Ok(count)
    }

    /// A length-prefixed string.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str> {
        let bytes = self.count(what, 1, STRING_CAP_BYTES)?;
        let start = self.at as u64;
        let text = self.take(bytes, what)?;
        std::str::from_utf8(text)
            .map_err(|error| bad(Check::Utf8, start, what, format!("{error} in {} bytes", text.len())))
    }

    /// Moves past `count` values of a type, checking them.
    pub(super) fn skip(&mut self, ty: ValueType, count: u64, what: &str) -> Result<()> {
        match ty {
            ValueType::String => {
                for _ in 0..count {
                    self.string(what)?;
                }
            }
            ValueType::Bool => {
                let start = self.at as u64;
                let bytes = self.take(count, what)?;
                if let Some(index) = bytes.iter().position(|&byte| byte > 1) {
                    return Err(bad(Check::Bool, start + index as u64, what, bytes[index].to_string()));
                }
            }
            _ => {
                // `count` is at most ARRAY_CAP, so the product can not overflow.
                self.take(count * ty.least_bytes(), what)?;
            }
        }
        Ok(())
    }
}

pub(super) fn bad(check: Check, at_bytes: u64, what: impl Into<String>, found: impl Into<String>) -> Error {
    Error::BadFile(Box::new(BadFile { check, at_bytes, what: what.into(), found: found.into() }))
}
