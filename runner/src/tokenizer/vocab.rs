//! The vocabulary: token texts, their scores and kinds, and the list of merges.

use super::texts::Texts;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};

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

/// Token texts by id, ids by text, with scores and kinds.
#[derive(Debug)]
pub(super) struct Vocab {
    texts: Texts,
    scores: Vec<f32>,
    kinds: Vec<TokenKind>,
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
        let texts =
            Texts::new(file, &tokens).ok_or_else(|| Error::metadata(key, "at most 2^24 tokens in 4 GiB", count))?;
        let byte_ids = (0..=255u8).map(|byte| texts.find(&format!("<0x{byte:02X}>"))).collect();
        Ok(Self { texts, scores: scores(file, count)?, kinds: kinds(file, count)?, byte_ids })
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// The id of a text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.texts.find(text)
    }

    /// The text of an id; empty past the end.
    pub(super) fn text(&self, id: u32) -> &str {
        self.texts.text(id)
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
}

/// The merge list of a byte-pair vocabulary: pairs of texts, the first to be merged first.
#[derive(Debug)]
pub(super) struct Merges(Texts);

impl Merges {
    pub(super) fn from_gguf(file: &Gguf) -> Result<Self> {
        let key = "tokenizer.ggml.merges";
        let expected = "the list of merges, two texts with a space between them each";
        let Some(list) = file.get_strings(key)? else { return Err(Error::metadata(key, expected, "no such key")) };
        // A text may begin with a space, so the one between is looked for after that.
        let whole = |merge: &str| merge.bytes().skip(1).any(|byte| byte == b' ');
        if let Some((_, bad)) = list.spans().find(|(_, merge)| !whole(merge)) {
            return Err(Error::metadata(key, expected, format!("{bad:?}")));
        }
        Texts::new(file, &list)
            .map(Self)
            .ok_or_else(|| Error::metadata(key, "at most 2^24 merges in 4 GiB", list.len()))
    }

    /// The rank of a merge, written with a space between its parts: the lower, the sooner.
    pub(super) fn rank(&self, merge: &str) -> Option<u32> {
        self.0.find(merge)
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
