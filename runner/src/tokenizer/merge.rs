//! Merging of characters to tokens: the adjacent pair with the highest score first, the leftmost among equals, until
//! there is none that merges.
//!
//! In SentencePiece-like vocabularies (`tokenizer.ggml.model = "llama"`) a pair has the score of the token that it makes.
//! The merge lists of byte-pair encoding can not say this exactly: there each *pair* has a rank of its own, so that two
//! ways to the same token, or two tokens of one score, are tried in list order instead of from the left. With such a
//! list (`"gemma4"`), a pair scores the higher the sooner it stands in the list.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::vocab::{Merges, Vocab};

/// What SentencePiece writes for a space.
pub(super) const SPACE: char = '\u{2581}';

/// A run of text that is one token or waits to become part of one.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// Zero once it was merged into its left neighbour.
    bytes: usize,
    previous: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// Two neighbours whose concatenation is a token.
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    /// Length of both when the candidate was found: if it has changed, the candidate is out of date.
    bytes: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// The score of a pair, given as one text and the length of its first half, under the rule of vocabularies with scores.
pub(super) fn by_score(vocab: &Vocab) -> impl FnMut(&str, usize) -> Option<f32> {
    |both, _| Some(vocab.score(vocab.id(both)?))
}

/// The same under the rule of vocabularies with a merge list.
pub(super) fn by_rank(merges: &Merges) -> impl FnMut(&str, usize) -> Option<f32> {
    let mut merge = String::new();
    move |both, half| {
        merge.clear();
        merge.extend([&both[..half], " ", &both[half..]]);
        // There are at most 2^24 merges, so that a float holds each rank exactly.
        merges.rank(&merge).map(|rank| -(rank as f32))
    }
}

/// Tokenises text that holds no special tokens. `score` tells which pairs merge, `found` gets each id. What makes no
/// token becomes byte tokens.
pub(super) fn tokenize(
    vocab: &Vocab,
    unknown: Option<u32>,
    text: &str,
    mut score: impl FnMut(&str, usize) -> Option<f32>,
    mut found: impl FnMut(u32),
) {
    let mut symbols = Vec::with_capacity(text.len());
    for (start, char) in text.char_indices() {
        let index = symbols.len();
        let previous = if index == 0 { NONE } else { index - 1 };
        symbols.push(Symbol { start, bytes: char.len_utf8(), previous, next: index + 1 });
    }
    if let Some(last) = symbols.last_mut() {
        last.next = NONE;
    }

    let mut candidate = |symbols: &[Symbol], left: usize, right: usize| {
        let (a, b) = (symbols.get(left)?, symbols.get(right)?);
        let bytes = a.bytes + b.bytes;
        let score = score(&text[a.start..a.start + bytes], a.bytes)?;
        Some(Candidate { score, left, right, bytes })
    };
    let mut heap: BinaryHeap<Candidate> =
        (1..symbols.len()).filter_map(|right| candidate(&symbols, right - 1, right)).collect();

    while let Some(best) = heap.pop() {
        let (left, right) = (symbols[best.left], symbols[best.right]);
        if left.bytes == 0 || right.bytes == 0 || left.bytes + right.bytes != best.bytes {
            continue;
        }
        symbols[best.left].bytes = best.bytes;
        symbols[best.left].next = right.next;
        symbols[best.right].bytes = 0;
        if right.next != NONE {
            symbols[right.next].previous = best.left;
        }
        if left.previous != NONE {
            heap.extend(candidate(&symbols, left.previous, best.left));
        }
        if right.next != NONE {
            heap.extend(candidate(&symbols, best.left, right.next));
        }
    }

    for symbol in symbols.iter().filter(|symbol| symbol.bytes > 0) {
        let piece = &text[symbol.start..symbol.start + symbol.bytes];
        match vocab.id(piece) {
            Some(id) => found(id),
            None => piece.bytes().filter_map(|byte| vocab.byte_id(byte).or(unknown)).for_each(&mut found),
        }
    }
}
