//! The `tokenizers` crate, wrapped: the only file that knows it.
//!
//! The crate splits off special tokens and runs the stages; the merge rule is [`merge`](super::merge), plugged in
//! as a model, because the crate's own models can not express it exactly.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    SplitDelimiterBehavior, Token, TokenizerImpl,
};

use super::vocab::{Merges, TokenKind, Vocab};
use super::{alphabet, merge};
use crate::error::{Error, Result};

type Inner = TokenizerImpl<Merging, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Text to ids, once with control tokens read from the text and once without.
pub(super) struct Engine {
    with_control: Inner,
    plain: Inner,
}

impl Engine {
    /// For a vocabulary that merges by this rule; `unknown` stands for what has no token.
    pub(super) fn new(vocab: &Arc<Vocab>, unknown: Option<u32>, rule: &Rule) -> Result<Self> {
        let build = |kinds: &[TokenKind]| {
            let mut inner = Inner::new(Merging { vocab: vocab.clone(), unknown, rule: rule.clone() });
            if let Rule::Bytes { splits, .. } = rule {
                inner.with_pre_tokenizer(Some(cut(splits)?));
            }
            let added: Vec<AddedToken> = (0..vocab.len() as u32)
                .filter(|&id| kinds.contains(&vocab.kind(id)) && !vocab.text(id).is_empty())
                .map(|id| AddedToken::from(vocab.text(id), vocab.kind(id) != TokenKind::UserDefined).normalized(false))
                .collect();
            inner.add_tokens(added).map_err(failed)?;
            Ok::<_, Error>(inner)
        };
        Ok(Self {
            with_control: build(&[TokenKind::Unknown, TokenKind::Control, TokenKind::UserDefined])?,
            plain: build(&[TokenKind::UserDefined])?,
        })
    }

    /// The ids of a text, nothing added.
    pub(super) fn encode(&self, text: &str, control: bool) -> Result<Vec<u32>> {
        let inner = if control { &self.with_control } else { &self.plain };
        Ok(inner.encode_fast(text, false).map_err(failed)?.get_ids().to_vec())
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

/// Cuts text at these expressions, one after the other.
fn cut(expressions: &[&str]) -> Result<PreTokenizerWrapper> {
    let split = |expression: &&str| {
        let pattern = SplitPattern::Regex((*expression).to_owned());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map(PreTokenizerWrapper::Split).map_err(failed)
    };
    let splits = expressions.iter().map(split).collect::<Result<_>>()?;
    Ok(PreTokenizerWrapper::Sequence(Sequence::new(splits)))
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Tokenizer(error.to_string())
}

/// Which pairs merge, and when.
#[derive(Clone, Debug)]
pub(super) enum Rule {
    /// By the score of the token that they make. `prefix` puts a space before each piece of text.
    Scores {
        /// Whether.
        prefix: bool,
    },
    /// By their place in a list. Runs of newlines are apart from other text, and one that is a token is taken whole.
    List(Arc<Merges>),
    /// By their place in a list, of bytes in pieces that expressions cut.
    Bytes {
        /// The list.
        merges: Arc<Merges>,
        /// The expressions.
        splits: &'static [&'static str],
    },
}

/// A merge rule as a model of the crate.
struct Merging {
    vocab: Arc<Vocab>,
    unknown: Option<u32>,
    rule: Rule,
}

impl Merging {
    /// The ids of a text without special tokens and without spaces.
    fn ids(&self, text: &str, mut found: impl FnMut(u32)) {
        let (vocab, unknown) = (&self.vocab, self.unknown);
        let merges = match &self.rule {
            Rule::Scores { .. } => return merge::tokenize(vocab, unknown, text, merge::by_score(vocab), found),
            Rule::Bytes { merges, .. } => return merge::tokenize(vocab, unknown, text, merge::by_rank(merges), found),
            Rule::List(merges) => merges,
        };
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let newlines = first == '\n';
            let end = rest.find(|char| (char == '\n') != newlines).unwrap_or(rest.len());
            let (piece, after) = rest.split_at(end);
            rest = after;
            match vocab.id(piece).filter(|_| newlines) {
                Some(id) => found(id),
                None => merge::tokenize(vocab, unknown, piece, merge::by_rank(merges), &mut found),
            }
        }
    }
}

impl Model for Merging {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        let text = if let Rule::Bytes { .. } = self.rule {
            alphabet::written(sequence)
        } else {
            let mut text = String::with_capacity(sequence.len() + 3);
            if let Rule::Scores { prefix: true } = self.rule {
                text.push(merge::SPACE);
            }
            text.extend(sequence.chars().map(|char| if char == ' ' { merge::SPACE } else { char }));
            text
        };
        // The crate wants offsets into `sequence`; nobody here reads them, whole is always true.
        let whole = (0, sequence.len());
        let mut tokens = Vec::new();
        self.ids(&text, |id| tokens.push(Token::new(id, String::new(), whole)));
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.vocab.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        ((id as usize) < self.vocab.len()).then(|| self.vocab.text(id).to_owned())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        (0..self.vocab.len() as u32).map(|id| (self.vocab.text(id).to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocab.len()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a vocabulary read from a GGUF file is not saved".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        BpeTrainer::default().into()
    }
}
