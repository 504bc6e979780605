//! `evergraph tokenize`: text to ids.

use serde_json::{Value, json};

use super::flags::ModelFlags;
use super::output::Output;
use crate::error::Result;
use crate::tokenizer::{Encode, Tokenizer};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// The text
    #[arg(short = 'p', long = "prompt", value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// Leave out the token that starts a text
    #[arg(long)]
    no_bos: bool,
    /// Read the texts of control tokens as those tokens
    #[arg(long)]
    special: bool,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let tokenizer = Tokenizer::from_gguf(&flags.model.open()?)?;
    let how = Encode { add_special: !flags.no_bos, parse_special: flags.special };
    let ids = tokenizer.encode(&flags.prompt, how)?;
    let pieces = ids.iter().map(|&id| piece(&tokenizer, id)).collect::<Result<Vec<_>>>()?;
    out.document(&json!({ "tokens": ids, "pieces": pieces }))?;
    for (id, piece) in ids.iter().zip(&pieces) {
        out.line(format!("{id:>7}  {piece}"))?;
    }
    Ok(())
}

/// The piece of text that a token stands for; where that is no UTF-8, its bytes.
pub(super) fn piece(tokenizer: &Tokenizer, id: u32) -> Result<Value> {
    Ok(match String::from_utf8(tokenizer.piece(id, true)?) {
        Ok(text) => json!(text),
        Err(error) => json!(error.as_bytes()),
    })
}
