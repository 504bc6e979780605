//! The vocabulary: token texts in the mapped file, an index over them, scores and kinds.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gguf::{Bytes, Gguf, Value};

/// What a token is for (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TokenKind {
    /// Text.
    Normal,
    /// Stands for what has no token.
    Unknown,
    /// Steers the model; never part of plain text.
    Control,
    /// Always split off whole, also in plain text.
    UserDefined,
    /// Not in use.
    Unused,
    /// One byte, `<0xXX>`.
    Byte,
}

/// Token texts by id, ids by text.
///
/// The texts stay in the file's bytes; what is kept in memory is 4 bytes a token for its place, 4 to 8 for
/// the index, 4 for the score and 1 for the kind. (A quarter million tokens as `String`s, in two maps, would
/// be more than everything else that loading takes.)
pub(super) struct Vocab {
    file: Arc<Bytes>,
    /// Where the array of tokens starts in the file.
    base: usize,
    /// Where each text starts after that; its length stands in the eight bytes before.
    starts: Vec<u32>,
    /// Open addressing, id + 1 in each slot, a power of two of them.
    slots: Vec<u32>,
    hasher: RandomState,
    scores: Vec<f32>,
    kinds: Vec<TokenKind>,
    longest_bytes: usize,
    /// The ids of `<0x00>` … `<0xFF>`.
    byte_ids: Vec<Option<u32>>,
}

impl Vocab {
    pub(super) fn from_gguf(file: &Gguf) -> Result<Self> {
        let key = "tokenizer.ggml.tokens";
        let tokens = file
            .get_strings(key)?
            .filter(|tokens| !tokens.is_empty())
            .ok_or_else(|| Error::metadata(key, "the list of tokens", "nothing"))?;
        let count = tokens.len();
        if count > (1 << 24) || tokens.bytes().len() > u32::MAX as usize {
            return Err(Error::metadata(key, "at most 2^24 tokens in 4 GiB", count));
        }
        let all: &[u8] = (**file.bytes()).as_ref();
        // Both slices come from the same file, so the difference is the array's place in it.
        let base = (tokens.bytes().as_ptr() as usize).wrapping_sub(all.as_ptr() as usize);
        let starts: Vec<u32> = tokens.spans().map(|(at, _)| at as u32).collect();
        let longest_bytes = tokens.spans().map(|(_, text)| text.len()).max().unwrap_or(0);

        let mut vocab = Self {
            file: file.bytes().clone(),
            base,
            starts,
            slots: vec![0; (count * 2).next_power_of_two()],
            hasher: RandomState::new(),
            scores: scores(file, count)?,
            kinds: kinds(file, count)?,
            longest_bytes,
            byte_ids: Vec::new(),
        };
        for id in 0..count as u32 {
            let slot = vocab.slot(vocab.text(id));
            if vocab.slots[slot] == 0 {
                vocab.slots[slot] = id + 1; // of equal texts the first counts
            }
        }
        vocab.byte_ids = (0..=255u8).map(|byte| vocab.id(&format!("<0x{byte:02X}>"))).collect();
        Ok(vocab)
    }

    /// The slot that holds a text, or the empty one where it would go.
    fn slot(&self, text: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(text) as usize & mask;
        // At most half of the slots are taken, so an empty one comes.
        while self.slots[slot] != 0 && self.text(self.slots[slot] - 1) != text {
            slot = (slot + 1) & mask;
        }
        slot
    }

    pub(super) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The id of a text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        if text.len() > self.longest_bytes {
            return None;
        }
        self.slots[self.slot(text)].checked_sub(1)
    }

    /// The text of an id; empty past the end.
    pub(super) fn text(&self, id: u32) -> &str {
        let bytes: &[u8] = (*self.file).as_ref();
        let text = self.starts.get(id as usize).and_then(|&start| {
            let start = self.base + start as usize;
            let length = u64::from_le_bytes(bytes.get(start - 8..)?.first_chunk().copied()?);
            std::str::from_utf8(bytes.get(start..start + length as usize)?).ok()
        });
        text.unwrap_or_default()
    }

    pub(super) fn score(&self, id: u32) -> f32 {
        self.scores.get(id as usize).copied().unwrap_or(0.0)
    }

    pub(super) fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    pub(super) fn set_kind(&mut self, id: u32, kind: TokenKind) {
        if let Some(slot) = self.kinds.get_mut(id as usize) {
            *slot = kind;
        }
    }

    pub(super) fn byte_id(&self, byte: u8) -> Option<u32> {
        self.byte_ids.get(usize::from(byte)).copied().flatten()
    }

    pub(super) fn longest_bytes(&self) -> usize {
        self.longest_bytes
    }
}

impl std::fmt::Debug for Vocab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocab").field("tokens", &self.len()).finish_non_exhaustive()
    }
}

fn scores(file: &Gguf, count: usize) -> Result<Vec<f32>> {
    let key = "tokenizer.ggml.scores";
    let Some(array) = file.get_array(key)? else { return Ok(Vec::new()) };
    let scores: Vec<f32> = array.iter().filter_map(Value::as_f32).collect();
    if scores.len() != count {
        return Err(Error::metadata(key, format!("{count} finite floats, one a token"), scores.len()));
    }
    Ok(scores)
}

fn kinds(file: &Gguf, count: usize) -> Result<Vec<TokenKind>> {
    let key = "tokenizer.ggml.token_type";
    let Some(array) = file.get_array(key)? else { return Ok(vec![TokenKind::Normal; count]) };
    let kinds: Vec<TokenKind> = array
        .iter()
        .filter_map(|value| {
            Some(match value.as_i64()? {
                1 => TokenKind::Normal,
                2 => TokenKind::Unknown,
                3 => TokenKind::Control,
                4 => TokenKind::UserDefined,
                0 | 5 => TokenKind::Unused,
                6 => TokenKind::Byte,
                _ => return None,
            })
        })
        .collect();
    if kinds.len() != count {
        return Err(Error::metadata(key, format!("{count} types from 0 to 6, one a token"), kinds.len()));
    }
    Ok(kinds)
}
