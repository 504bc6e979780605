//! Lines of a file that nobody vouches for.

use std::io::{BufRead, Read};

use crate::error::{BadTrace, Error, Result};

/// Longest line, bytes. Ours have under a hundred.
const LONGEST: usize = 64 << 10;

/// Reads line by line into one buffer of bounded size.
#[derive(Debug)]
pub(super) struct Lines<R> {
    from: R,
    buffer: Vec<u8>,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from, buffer: Vec::new(), number: 0 }
    }

    /// The next line that is not blank, with its number from 1; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &str)>> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let read = (&mut self.from).take(LONGEST as u64 + 1).read_until(b'\n', &mut self.buffer);
            if read.map_err(Error::io("can not read the trace", "(input)"))? == 0 {
                return Ok(None);
            }
            if self.buffer.len() > LONGEST {
                return Err(bad(self.number, "a line of at most 64 KiB", "a longer one"));
            }
            if self.number == 1 && self.buffer.starts_with(b"\xEF\xBB\xBF") {
                self.buffer.drain(..3);
            }
            if !self.buffer.trim_ascii().is_empty() {
                break;
            }
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(line) => Ok(Some((self.number, line.trim()))),
            Err(error) => {
                Err(bad(self.number, "UTF-8 text", format!("other bytes at column {}", error.valid_up_to() + 1)))
            }
        }
    }

    /// Number of the line that was read last.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

/// The error of a line.
pub(super) fn bad(line: u64, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Trace(Box::new(BadTrace { line, expected: expected.into(), found: cut(found.into()) }))
}

/// What was found, short enough for a message.
fn cut(mut text: String) -> String {
    const LONGEST_QUOTE: usize = 120;
    if let Some((at, _)) = text.char_indices().nth(LONGEST_QUOTE) {
        text.truncate(at);
        text.push('…');
    }
    text
}
