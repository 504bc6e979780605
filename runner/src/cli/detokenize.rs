//! `evergraph detokenize`: ids to text.

use serde_json::json;

use super::flags::{ModelFlags, TokenList};
use super::output::Output;
use super::tokenize::piece;
use crate::error::Result;
use crate::tokenizer::Tokenizer;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// The ids, separated by commas
    #[arg(long, value_name = "1,2,3", allow_hyphen_values = true)]
    tokens: TokenList,
    /// Write control tokens too
    #[arg(long)]
    special: bool,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    let tokenizer = Tokenizer::from_gguf(&flags.model.open()?)?;
    let ids = flags.tokens.check(tokenizer.vocabulary())?;
    let text = tokenizer.decode(&ids, flags.special)?;
    let pieces = ids.iter().map(|&id| piece(&tokenizer, id)).collect::<Result<Vec<_>>>()?;
    out.document(&json!({ "tokens": ids, "pieces": pieces, "text": text }))?;
    out.line(text)
}
