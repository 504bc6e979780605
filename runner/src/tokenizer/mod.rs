//! Tokenizers, built from a model file's metadata.
//!
//! Supported: SentencePiece-like vocabularies (`tokenizer.ggml.model = "llama"`: Gemma 3), byte-pair ones on plain
//! text (`"gemma4"`) and on bytes (`"gpt2"`, with the ways of DeepSeek's to cut text).
//!
//! ```no_run
//! use evergraph_runner::gguf::Gguf;
//! use evergraph_runner::tokenizer::{Encode, Tokenizer};
//!
//! let tokenizer = Tokenizer::from_gguf(&Gguf::open("model.gguf".as_ref())?)?;
//! let ids = tokenizer.encode("Hello", Encode::default())?;
//! assert_eq!(tokenizer.decode(&ids, false)?, "Hello");
//! # Ok::<(), evergraph_runner::Error>(())
//! ```

mod alphabet;
mod engine;
mod merge;
mod split;
mod stream;
mod texts;
mod vocab;

use std::sync::Arc;

pub use stream::TextStream;
pub use vocab::TokenKind;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use engine::{Engine, Rule};
use vocab::{Merges, Vocab};

/// How to read a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Encode {
    /// Add the begin and end tokens that the file asks for.
    pub add_special: bool,
    /// Read the texts of control tokens (`<start_of_turn>` …) as those tokens. Only for text that is
    /// trusted, such as the output of a chat template.
    pub parse_special: bool,
}

impl Default for Encode {
    fn default() -> Self {
        Self { add_special: true, parse_special: false }
    }
}

/// Text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Arc<Vocab>,
    engine: Engine,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    /// Whether tokens are bytes in a printable alphabet.
    bytes: bool,
    /// Tokens that end a generation, ascending.
    ends: Vec<u32>,
}

/// Texts that mean "end of generation" wherever they stand. llama.cpp turns such tokens into control tokens
/// whatever the file says (Gemma 3 has `</s>` as a normal one), so we do too.
const END_TEXTS: &[&str] = &[
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "</s>",
];

/// The key that says which kind of tokenizer a file has.
const MODEL: &str = "tokenizer.ggml.model";

/// What stands there in files that have none.
const NONE: [&str; 2] = ["no_vocab", "none"];

impl Tokenizer {
    /// Whether a file has a tokenizer at all. Some say that they have none.
    ///
    /// # Errors
    /// [`Error::Metadata`] if what is there is no text.
    pub fn is_in(file: &Gguf) -> Result<bool> {
        Ok(file.get_str(MODEL)?.is_some_and(|kind| !NONE.contains(&kind)))
    }

    /// Builds the tokenizer that a file describes.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the description does not hold together, [`Error::Unsupported`] for kinds that
    /// are not there yet.
    pub fn from_gguf(file: &Gguf) -> Result<Self> {
        let kind = file.get_str(MODEL)?.ok_or_else(|| Error::metadata(MODEL, "a tokenizer", "no such key"))?;
        let flag = |name: &str, default: bool| {
            Ok::<_, Error>(file.get_bool(&format!("tokenizer.ggml.{name}"))?.unwrap_or(default))
        };
        let bytes = kind == "gpt2";
        let mut add_bos = flag("add_bos_token", !bytes)?;
        let rule = match kind {
            "llama" => Rule::Scores { prefix: flag("add_space_prefix", true)? },
            "gemma4" => {
                // The model does not work without, whatever the file says.
                add_bos = true;
                Rule::List(Arc::new(Merges::from_gguf(file)?))
            }
            "gpt2" => Rule::Bytes { splits: splits(file)?, merges: Arc::new(Merges::from_gguf(file)?) },
            none if NONE.contains(&none) => return Err(Error::metadata(MODEL, "a tokenizer", none)),
            other => {
                return Err(Error::Unsupported {
                    what: "this kind of tokenizer (tokenizer.ggml.model)",
                    found: other.to_owned(),
                    advice: "a model with a tokenizer of kind llama, gemma4 or gpt2, or --tokens with token ids"
                        .to_owned(),
                });
            }
        };
        let mut vocab = Vocab::from_gguf(file)?;
        let special = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let id = file.get_in(&key, 0..=vocab.len() as u64 - 1)?;
            Ok::<_, Error>(id.map(|id| id as u32))
        };
        let (bos, eos, unknown) = (special("bos")?, special("eos")?, special("unknown")?);
        let mut ends: Vec<u32> = [eos, special("eot")?, special("eom")?].into_iter().flatten().collect();
        // In Gemma 4's vocabulary `</s>` is text like any other.
        let texts = END_TEXTS.iter().filter(|text| kind != "gemma4" || **text != "</s>");
        for text in texts {
            if let Some(id) = vocab.id(text) {
                ends.push(id);
                vocab.set_kind(id, TokenKind::Control);
            }
        }
        ends.sort_unstable();
        ends.dedup();
        let vocab = Arc::new(vocab);
        Ok(Self {
            engine: Engine::new(&vocab, unknown, &rule)?,
            vocab,
            bos,
            eos,
            add_bos,
            add_eos: flag("add_eos_token", false)?,
            bytes,
            ends,
        })
    }

    /// Number of tokens.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocab.len()
    }

    /// The token that starts every text, where the file asks for one.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text.
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether a generation ends with this token.
    #[must_use]
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// The token's text as the vocabulary writes it (U+2581 for a space); empty past the end.
    #[must_use]
    pub fn token(&self, id: u32) -> &str {
        self.vocab.text(id)
    }

    /// The id of the token with this text.
    #[must_use]
    pub fn id(&self, text: &str) -> Option<u32> {
        self.vocab.id(text)
    }

    /// What kind of token an id is.
    #[must_use]
    pub fn kind(&self, id: u32) -> TokenKind {
        self.vocab.kind(id)
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text can not be tokenised.
    pub fn encode(&self, text: &str, how: Encode) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        if how.add_special && self.add_bos {
            ids.extend(self.bos);
        }
        if !text.is_empty() {
            ids.extend(self.engine.encode(text, how.parse_special)?);
        }
        if how.add_special && self.add_eos {
            ids.extend(self.eos);
        }
        Ok(ids)
    }

    /// The bytes that a token stands for. Control tokens stand for nothing unless `special` is set; one byte
    /// token is one byte, so the result need not be whole characters.
    ///
    /// # Errors
    /// [`Error::TokenId`] if there is no such token.
    pub fn piece(&self, id: u32, special: bool) -> Result<Vec<u8>> {
        if id as usize >= self.vocab.len() {
            return Err(Error::TokenId { id: id.into(), vocabulary: self.vocab.len() });
        }
        let text = self.vocab.text(id);
        Ok(match self.vocab.kind(id) {
            TokenKind::Control | TokenKind::Unknown if !special => Vec::new(),
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => text.as_bytes().to_vec(),
            TokenKind::Byte => match byte_of(text) {
                Some(byte) => vec![byte],
                None => text.as_bytes().to_vec(),
            },
            TokenKind::Normal | TokenKind::Unused if self.bytes => alphabet::read(text),
            TokenKind::Normal | TokenKind::Unused => text.replace(merge::SPACE, " ").into_bytes(),
        })
    }

    /// The text of ids. What is no UTF-8 comes out as U+FFFD.
    ///
    /// # Errors
    /// [`Error::TokenId`] if there is no such token.
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String> {
        let mut stream = TextStream::new();
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(&self.piece(id, special)?));
        }
        text.push_str(&stream.finish());
        Ok(text)
    }
}

/// How a byte-level vocabulary cuts text.
fn splits(file: &Gguf) -> Result<&'static [&'static str]> {
    let key = "tokenizer.ggml.pre";
    let name = file.get_str(key)?.unwrap_or("default");
    match split::RULES.iter().find(|(known, _)| *known == name) {
        Some((_, splits)) => Ok(splits),
        None => {
            let known: Vec<&str> = split::RULES.iter().map(|(known, _)| *known).collect();
            Err(Error::Unsupported {
                what: "this way to cut text before it is tokenised (tokenizer.ggml.pre)",
                found: name.to_owned(),
                advice: format!("a model with {}, or --tokens with token ids", known.join(", ")),
            })
        }
    }
}

/// The byte that `<0xXX>` names.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests;
